"""Triton's compiler without a GPU: launches are made as on one, and compiled instead of run."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from farspan.lazy import load


class Compiler:
    """Stands where Triton asks the driver which GPU there is."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = 10 * capability[0] + capability[1]

    def get_current_target(self) -> Any:
        return load("triton.backends.compiler", "GPUTarget")("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A number for each capability: Triton keeps what it compiled by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0 * device


@contextmanager
def compiling(kernel: Any, cache: Path) -> Iterator[Any]:
    """Triton's driver, to be set; nothing is taken from or left in the user's cache. `kernel` is
    any that has been imported: a test of it is skipped where Triton interprets."""
    if not hasattr(kernel, "warmup") or not hasattr(kernel, "device_caches"):
        pytest.skip("Triton interprets in this process")
    driver = load("triton.runtime.driver", "driver")
    before = driver._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        yield driver
    driver.set_active(before)


def assembled(kernel: Any, capability: tuple[int, int], folder: Path) -> str:
    """What ptxas says of a compiled kernel."""
    return _assembled(kernel.asm["ptx"], capability, folder)


@cache
def _assembled(ptx: str, capability: tuple[int, int], folder: Path) -> str:
    source = folder / "kernel.ptx"
    source.write_text(ptx, "utf-8")
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    tool = load("triton.backends.nvidia.compiler", "get_ptxas")
    arch = 10 * capability[0] + capability[1]
    command = [tool(arch).path, "-v", f"--gpu-name={target[1]}", "-o", folder / "kernel", source]
    return run(command, check=True, capture_output=True, text=True, timeout=1200).stderr


def spilled(kernel: Any, capability: tuple[int, int], folder: Path) -> int:
    """Bytes of registers that a thread of a compiled kernel stores in memory, as ptxas says."""
    said = assembled(kernel, capability, folder)
    spills = re.search(r"(\d+) bytes spill stores", said)
    assert spills is not None, said
    return int(spills[1])


def waits(kernel: Any) -> list[int]:
    """Of each wait for asynchronous copies, how many copies may still be under way behind it."""
    return [int(number) for number in re.findall(r"async_wait.*num = (\d+)", kernel.asm["ttgir"])]


def products(kernel: Any) -> int:
    """Multiplications in instructions of matrix products, each counted once."""
    sizes = re.findall(r"\bw?g?mma\.\S*\bm(\d+)n(\d+)k(\d+)", kernel.asm["ptx"])
    return sum(int(rows) * int(columns) * int(depth) for rows, columns, depth in sizes)
