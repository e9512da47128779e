"""The one owner of copies between the tiers.

Copies run in program order on the stream that computes, so a slot is free for reuse as soon as
the instruction that read it was issued.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class CopyEngine:
    """Moves tensors between device and host, and counts the bytes of each direction."""

    fetched: int = 0  # bytes host to device
    evicted: int = 0  # bytes device to host

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Host to device."""
        target.copy_(source, non_blocking=True)
        self.fetched += source.nbytes

    def evict(self, target: Tensor, source: Tensor) -> None:
        """Device to host. On CUDA the copy is asynchronous to the CPU but ordered with every
        later fetch of the same bytes, because both run on one stream."""
        target.copy_(source, non_blocking=True)
        self.evicted += source.nbytes
