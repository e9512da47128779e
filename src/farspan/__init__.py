"""farspan trains Hugging Face language models on sequences far longer than memory, exactly."""

from farspan import memory, plan
from farspan.lazy import attributes
from farspan.plan.layout import Layout
from farspan.plan.strategies import strategy
from farspan.spec import Refused, Schedule, Sparse, Tier
from farspan.version import VERSION as __version__

# What needs torch is imported when it is first read; `__init__.pyi` tells type checkers its types.
__getattr__, __dir__ = attributes(
    __name__,
    {
        "Dealt": "farspan.engine.parallelize",
        "LongContext": "farspan.train.hugging_face",
        "Progress": "farspan.engine.step",
        "Ranks": "farspan.distributed.context",
        "Step": "farspan.engine.step",
        "Trainer": "farspan.train.hugging_face",
        "Verification": "farspan.engine.verify",
        "VerificationRun": "farspan.engine.verify",
        "deal": "farspan.engine.parallelize",
        "verify": "farspan.engine.verify",
    },
)

__all__ = [
    "Dealt",
    "Layout",
    "LongContext",
    "Progress",
    "Ranks",
    "Refused",
    "Schedule",
    "Sparse",
    "Step",
    "Tier",
    "Trainer",
    "Verification",
    "VerificationRun",
    "__version__",
    "deal",
    "memory",
    "plan",
    "strategy",
    "verify",
]
