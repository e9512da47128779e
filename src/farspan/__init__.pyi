from farspan import losses as losses
from farspan.ask import plan
from farspan.distributed.context import ParallelContext
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.posttrain.trainer import LongContext, Trainer
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import VERSION as __version__
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from farspan.train.loggers import Callback
from farspan.train.trainer import train

Refused = UnsupportedError

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
