"""Installing: what PyTorch is told, what it lacks and gets, and every refusal before that.

A PyTorch without CUDA has none of the names, so they are put there: what they are called with and
what they return is what torch.cuda.memory of 2.13 does with them.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import farspan_memory as memory
from farspan_memory import allocator
from farspan_memory.errors import UnsupportedError
from farspan_memory.native import AllocatorOptions, Backend
from farspan_memory.pytorch import Raiser

MIB = 2**20


@dataclass
class FakeAllocator:
    """torch._C._cuda_CUDAAllocator with the setters of a pluggable one."""

    functions: tuple[int, int] = (0, 0)
    hooks: dict[str, int] = field(default_factory=dict)

    def set_record_stream_fn(self, address: int) -> None:
        self.hooks["record_stream"] = address

    def set_reset_fn(self, address: int) -> None:
        self.hooks["reset"] = address

    def set_memory_fraction_fn(self, address: int) -> None:
        self.hooks["memory_fraction"] = address

    def set_begin_allocate_to_pool(self, address: int) -> None:
        self.hooks["begin_pool"] = address

    def set_end_allocate_to_pool_fn(self, address: int) -> None:
        self.hooks["end_pool"] = address

    def set_release_pool(self, address: int) -> None:
        self.hooks["release_pool"] = address


class FakeCuda:
    """The part of PyTorch with CUDA that an allocator meets."""

    def __init__(self) -> None:
        self.own = FakeAllocator()
        self.current = self.own
        self.started = False

    def names(self) -> dict[str, Any]:
        return {
            "_cuda_customAllocator": lambda alloc, free: FakeAllocator((alloc, free)),
            "_cuda_getAllocator": lambda: self.current,
            "_cuda_changeCurrentAllocator": self.change,
            "_cuda_memoryStats": self.unsupported,
            "_cuda_resetPeakMemoryStats": self.unsupported,
            "_cuda_resetAccumulatedMemoryStats": self.unsupported,
        }

    def change(self, other: FakeAllocator) -> None:
        if self.started:
            raise RuntimeError("Can't swap an already initialized allocator")
        self.current = other

    def unsupported(self, device: int) -> Any:
        raise RuntimeError(f"device {device}: getDeviceStats is not yet supported")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A PyTorch with CUDA and one device that maps virtual memory."""
    fake = FakeCuda()
    for name, function in fake.names().items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.started)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for owner in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(owner, "mem_get_info", lambda _=None: (900 * MIB, 1000 * MIB))
    monkeypatch.setattr(allocator, "refuse_without_virtual_memory", lambda _: None)
    monkeypatch.setattr(allocator, "out_of_memory_raiser", lambda: Raiser(None, "not compiled"))
    yield fake
    fake.started = False
    if allocator.installed() is not None:
        allocator.uninstall()


def test_pytorch_gets_the_functions_of_the_library(cuda: FakeCuda) -> None:
    made = memory.install("stitch", chunk=32 * MIB, capacity=512 * MIB)
    assert made == memory.installed()
    assert made.options.backend is Backend.CUDA
    assert (made.options.chunk, made.options.capacity) == (32 * MIB, 512 * MIB)
    assert made.out_of_memory == "RuntimeError (not compiled)"
    assert all(cuda.current.functions)
    counted = {"record_stream", "reset", "memory_fraction"}
    assert set(cuda.current.hooks) == counted | {"begin_pool", "end_pool", "release_pool"}
    assert all(cuda.current.hooks.values())


def test_an_older_pytorch_without_a_hook_does_without(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeAllocator, "set_memory_fraction_fn")
    memory.install("stitch")
    assert "memory_fraction" not in cuda.current.hooks
    assert {"record_stream", "reset"} <= set(cuda.current.hooks)


def test_uninstalled_pytorch_is_as_it_was(cuda: FakeCuda) -> None:
    shared = "_accelerator_getDeviceStats"  # of torch.accelerator.memory_stats
    names = {name: getattr(torch._C, name) for name in (*cuda.names(), shared)}
    ask = torch.cuda.mem_get_info
    memory.install("record")
    assert torch._C._cuda_memoryStats is not names["_cuda_memoryStats"]
    assert getattr(torch._C, shared) is not names[shared]
    assert torch.cuda.mem_get_info is not ask
    memory.uninstall()
    assert {name: getattr(torch._C, name) for name in names} == names
    assert torch.cuda.mem_get_info is ask
    assert cuda.current is cuda.own
    assert memory.installed() is None
    memory.install("stitch")


def test_once_cuda_has_started_it_stays(cuda: FakeCuda) -> None:
    memory.install("stitch")
    cuda.started = True
    with pytest.raises(UnsupportedError, match=r"cannot change its allocator.*start a new process"):
        memory.uninstall()
    assert memory.installed() is not None


def test_cuda_that_has_started_is_refused(cuda: FakeCuda) -> None:
    cuda.started = True
    with pytest.raises(UnsupportedError, match=r"already started.*install first"):
        memory.install("stitch")


@pytest.mark.usefixtures("cuda")
def test_a_pytorch_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(_: FakeAllocator) -> None:
        raise RuntimeError("Can't swap an already initialized allocator")

    monkeypatch.setattr(torch._C, "_cuda_changeCurrentAllocator", change)
    with pytest.raises(UnsupportedError, match="PyTorch refused it: Can't swap"):
        memory.install("stitch")
    assert memory.installed() is None


@pytest.mark.skipif(hasattr(torch._C, "_cuda_customAllocator"), reason="this torch has CUDA")
def test_a_pytorch_without_cuda_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"built without CUDA.*install a CUDA build"):
        memory.install("stitch")


def test_a_missing_library_says_how_to_build_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(allocator, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(UnsupportedError, match=r"none.so is missing; install g\+\+"):
        memory.install("stitch")
    assert cuda.current is cuda.own


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="mode: expected record, stitch, replay, got 'magic'"
    ):
        memory.install("magic")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("given", [{"plan": "plan.json"}, {"trace": "trace"}])
def test_a_plan_file_comes_with_its_trace(given: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedError, match="trace: a plan file needs the trace that it was made from"
    ):
        memory.install("replay", **given)


@pytest.mark.parametrize(
    "call", [memory.uninstall, memory.statistics, memory.recorded, memory.begin_iteration]
)
def test_what_needs_an_allocator_says_so(call: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"none is installed; call farspan_memory\.install"):
        call()


@pytest.mark.usefixtures("cuda")
def test_options_keep_what_is_given() -> None:
    made = memory.install(
        "stitch", options=AllocatorOptions(Backend.NULL, fragment_limit=7, peers=2)
    )
    assert made.options.backend is Backend.CUDA
    assert (made.options.fragment_limit, made.options.peers) == (7, 2)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "given", [{"chunk": 4 * MIB}, {"chunk": 32 * MIB}, {"capacity": 1}, {"capacity": 0}]
)
def test_what_both_say_is_refused(given: dict[str, Any]) -> None:
    """Also what is equal: which one counts would be a guess when one of them changes."""
    ((name, value),) = given.items()
    with pytest.raises(UnsupportedError, match=f"{name}: {value} is given, but options has [0-9]+"):
        memory.install(
            "stitch", **given, options=AllocatorOptions(chunk=32 * MIB, capacity=512 * MIB)
        )
    assert memory.installed() is None


SCRIPT = """
import sys
from pathlib import Path
from farspan_sibling import WORD
sys.path.append("left behind")
Path(sys.argv[1]).write_text(f"{WORD} {sys.path[0]}")
"""


@pytest.mark.usefixtures("cuda")
def test_a_recorded_program_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python train.py` does; a link to it is followed. Afterwards the path is as it was."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "farspan_sibling.py").write_text("WORD = 'found'")
    (home / "train.py").write_text(SCRIPT)
    (elsewhere / "link.py").symlink_to(home / "train.py")
    monkeypatch.chdir(elsewhere)
    monkeypatch.delitem(sys.modules, "farspan_sibling", raising=False)
    path, arguments = sys.path[:], sys.argv
    with pytest.raises(UnsupportedError, match="did not use the GPU"):
        allocator.record_script(Path("link.py"), ["witness"])
    assert (elsewhere / "witness").read_text() == f"found {home.resolve()}"
    assert (sys.path, sys.argv) == (path, arguments)
