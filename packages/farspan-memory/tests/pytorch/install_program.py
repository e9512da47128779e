"""farspan_memory.install from beginning to end: a driver that is a fake over real memory, and a
PyTorch whose "CUDA" allocator is that of its CPU tensors.

    python install_program.py SETTINGS.json

Trains as allocator_program does, with what torch.cuda.memory says at the end.
"""

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import farspan_memory as memory
from farspan_memory.native import AllocatorOptions
from tests.pytorch.allocator_program import SCENARIOS, train

GIB = 2**30
SMALL = 64 << 10  # larger requests get chunks of their own, of the driver's 2 MiB
NAMES = ("memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats")


def unsupported(device: int) -> None:
    """As a pluggable allocator answers."""
    raise RuntimeError(f"device {device}: not yet supported")


def pretend_cuda(shim: ctypes.CDLL) -> None:
    """The names of torch._C that a CUDA build has; its allocator is that of the CPU."""

    def change(chosen: Any) -> None:
        shim.farspan_cpu_install(*(ctypes.c_void_p(address) for address in chosen.functions))

    core: Any = torch._C
    core._cuda_customAllocator = lambda *functions: SimpleNamespace(functions=functions)
    core._cuda_getAllocator = lambda: None
    core._cuda_changeCurrentAllocator = change
    for name in NAMES:
        setattr(core, f"_cuda_{name}", unsupported)
    cuda, utils = torch.cuda, torch._utils
    for owner in (cuda, cuda.memory):
        vars(owner)["mem_get_info"] = lambda _=None: (500 * GIB, 500 * GIB)
    vars(cuda)["current_device"] = vars(utils)["_get_current_device_index"] = lambda: 0


def counted() -> dict[str, int]:
    """What a program reads."""
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "free": torch.cuda.mem_get_info()[0],
        "ooms": torch.cuda.memory_stats()["num_ooms"],
        "summary": len(torch.cuda.memory_summary()),
    }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    shim = ctypes.CDLL(settings["shim"])
    expected = list(train(SCENARIOS["fixed"], lambda: None))
    pretend_cuda(shim)
    options = AllocatorOptions(library=settings["driver"], small=SMALL)
    made = memory.install(settings["mode"], capacity=GIB, options=options)
    vars(torch.cuda.memory)["is_initialized"] = lambda: True
    found = list(train(SCENARIOS["fixed"], memory.begin_iteration))
    result: dict[str, Any] = {"expected": expected, "found": found, "error": made.out_of_memory}
    held = torch.ones(GIB // 16)  # 256 MiB
    result["holding"] = counted()
    del held
    torch.cuda.reset_peak_memory_stats()
    result["after"] = counted()
    try:
        torch.ones(GIB)
    except torch.OutOfMemoryError as error:
        result["caught"] = str(error)
    result["end"] = counted()
    followed = memory.followed()
    result["planned"] = followed.planned if followed else None
    result["hits"] = memory.statistics().replay_hits
    shim.farspan_cpu_uninstall()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
