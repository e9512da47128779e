"""farspan trains Hugging Face language models on sequences far longer than memory, exactly."""

from farspan.engine.step import Progress, Step
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.plan.strategies import strategy
from farspan.spec import Refused, Schedule, Tier

__version__ = "0.1.0"

__all__ = [
    "Progress",
    "Refused",
    "Schedule",
    "Step",
    "Tier",
    "Verification",
    "VerificationRun",
    "strategy",
    "verify",
]
