"""Out of memory: seen from an exception, and what is left of it cleared away."""

import gc
from dataclasses import dataclass

import torch

from farspan.engine.tiers import DeviceTooSmall
from farspan.memory.host import TooLarge
from farspan.spec import Refused, Tier

# How torch's allocator of main memory says that it got none.
NO_MAIN_MEMORY = ("DefaultCPUAllocator", "not enough memory", "an't allocate memory")
# CUDA libraries that take device memory for themselves, and an allocator that was installed where
# no compiler could make torch's own exception.
NO_DEVICE_MEMORY = ("CUDA error: out of memory", "ALLOC_FAILED", "CUDA out of memory")


class OutOfMemory(Refused):
    """No schedule that was tried fits; the message says which were."""


class OneRankShort(OutOfMemory):
    """One of several ranks ran out while the others went on: they wait for it within the step."""


# What ranks look at together before they take any: all of them are refused, or none.
_TOGETHER = (TooLarge, DeviceTooSmall)


class Heard(Refused):
    """A rank ran out apart from the others, and has told them."""

    def __init__(self, shortage: "Shortage") -> None:
        super().__init__(shortage.message)
        self.shortage = shortage


@dataclass(frozen=True, slots=True)
class Shortage:
    """A tier that ran out. On a CPU both are main memory: it is then the host."""

    tier: Tier
    message: str  # one line
    of_all: bool = True  # the ranks of this run: all of them know, and have left the same work


def find_shortage(error: BaseException) -> Shortage | None:
    """What ran out, if that is why `error`, or what it was raised from, was raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Heard):
            return cause.shortage
        tier = _tier(cause)
        if tier is not None:
            text = str(cause).strip().splitlines()[0] if str(cause) else "no memory"
            return Shortage(tier, text, isinstance(cause, _TOGETHER))
        cause = cause.__cause__
    return None


def _tier(error: BaseException) -> Tier | None:
    if isinstance(error, TooLarge | MemoryError):
        return Tier.HOST
    if isinstance(error, torch.OutOfMemoryError | DeviceTooSmall):
        return Tier.DEVICE
    if isinstance(error, torch.cuda.CudaError):
        return Tier.HOST if "out of memory" in str(error) else None  # pages that are to be locked
    if not isinstance(error, RuntimeError):
        return None
    if any(sign in str(error) for sign in NO_MAIN_MEMORY):
        return Tier.HOST
    return Tier.DEVICE if any(sign in str(error) for sign in NO_DEVICE_MEMORY) else None


def clear_up(device: torch.device) -> None:
    """Gives back what a failed step has left. Call it outside the handler of its exception, which
    holds the step's frames and they its tensors."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        # A call of CUDA's that failed, such as locking pages, leaves its error code behind, and
        # the next kernel would report it as its own.
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        pass
    torch.cuda.empty_cache()
