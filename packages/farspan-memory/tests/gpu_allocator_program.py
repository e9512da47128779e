"""The replay's child as on a GPU: a driver that is a fake, found as libcuda.so.1, and a PyTorch
that is told to have CUDA. Its requests go to the allocator that is installed.

    python -m tests.gpu_allocator_program SETTINGS...

A fork for each of the settings, since an allocator is installed once in a process.
"""

import os
import sys
from typing import Any

import torch

from benchmarks.gpu_allocator import replayed
from benchmarks.gpu_allocator.served import torch_allocator

GIB = 2**30


def pretend() -> None:
    """The names that a CUDA build has, as far as served.OfBoth meets them."""
    core: Any = torch._C
    core._cuda_customAllocator = lambda *functions: functions
    core._cuda_getAllocator = lambda: None
    core._cuda_changeCurrentAllocator = lambda _: None
    core._cuda_cudaCachingAllocator_raw_alloc = lambda size, stream: torch_allocator(0).malloc(
        size, stream
    )
    core._cuda_cudaCachingAllocator_raw_delete = lambda pointer: torch_allocator(0).free(pointer)
    for owner in (torch.cuda, torch.cuda.memory):
        vars(owner)["mem_get_info"] = lambda _=None: (3 * GIB, 4 * GIB)
    for name in ("init", "set_device", "synchronize"):
        vars(torch.cuda)[name] = lambda *_: None


if __name__ == "__main__":
    for path in sys.argv[1:]:
        child = os.fork()
        if not child:
            sys.argv[1:] = [path]
            pretend()
            replayed.main()
            break
        assert os.waitpid(child, 0)[1] == 0, path
