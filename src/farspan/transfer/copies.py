"""The one owner of copies between the tiers.

Copies run in program order on the stream that computes, so a slot is free for reuse as soon as
the instruction that read it was issued.

Note: [The CPU runs ahead of the copies]. On CUDA a copy is issued and happens later, while what the
CPU does to host memory happens now. Bytes of a host buffer that the CPU is about to write may still
have to be read, or be about to be written, by copies that were issued for their earlier owner. So
`clear` is the only way for the CPU to write an arena, and it waits for what was issued.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class CopyEngine:
    """Moves tensors between device and host, and counts the bytes of each direction."""

    device: torch.device
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

    def clear(self, target: Tensor) -> None:
        """Fill with zeros. See Note: [The CPU runs ahead of the copies]."""
        if target.device.type == "cpu":
            self.wait()
        target.zero_()

    def wait(self) -> None:
        """Until every copy that was issued has happened."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
