"""farspan trains Hugging Face language models on sequences far longer than memory, exactly."""

import logging

from farspan import train
from farspan.lazy import attributes, give
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import VERSION as __version__
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError

# Any import of bitsandbytes on a CPU with AVX512 warns of an inference kernel that farspan does not
# use.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

give("far attention", "farspan.sparse")  # to `farspan.engine.far`

Refused = UnsupportedError  # former name, for code that catches it

# Names that need torch are imported when first read; `__init__.pyi` has their types.
__getattr__, __dir__ = attributes(
    __name__,
    {
        "Callback": "farspan.train.loggers",
        "LongContext": "farspan.posttrain.trainer",
        "ParallelContext": "farspan.distributed.context",
        "Progress": "farspan.engine.runner",
        "ShardedModel": "farspan.engine.parallelize",
        "Step": "farspan.engine.step",
        "Trainer": "farspan.posttrain.trainer",
        "Verification": "farspan.engine.verify",
        "VerificationRun": "farspan.engine.verify",
        "losses": "farspan.losses",
        "parallelize": "farspan.engine.parallelize",
        "plan": "farspan.ask",
        "verify": "farspan.engine.verify",
    },
)

__all__ = [
    "Callback",
    "Layout",
    "LongContext",
    "ParallelContext",
    "Progress",
    "Refused",
    "Schedule",
    "ShardedModel",
    "Sparse",
    "Step",
    "Tier",
    "Trainer",
    "UnsupportedError",
    "Verification",
    "VerificationRun",
    "__version__",
    "losses",
    "parallelize",
    "plan",
    "strategy",
    "train",
    "verify",
]
