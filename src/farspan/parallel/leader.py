"""What rank 0 does, or has, for all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.parallel.meetings import busy, meet
from farspan.spec import Refused

T = TypeVar("T")


def by_first(
    work: Callable[[], T],
    raised: tuple[type[Exception], ...] = (Refused,),
    what: str = "what it does for all",
) -> T:
    """What `work` returns on rank 0, everywhere; the others wait for it. What it raises of these
    kinds is raised everywhere too. `what` it is is said where it takes rank 0 too long."""
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            with busy(what):
                said = [work(), None]
        except raised as error:
            said = [None, error]
    meet()
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    return said[0]


def broadcast(tensor: Tensor) -> None:
    """Rank 0's bits, in everybody's tensor."""
    # As bytes: every backend knows them, whatever the dtype.
    there = tensor.detach()
    flat = there.contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(flat, src=0)
    if flat.data_ptr() != there.data_ptr():
        there.copy_(flat.view(there.dtype).view(there.shape))
