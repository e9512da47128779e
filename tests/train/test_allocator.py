"""A run's device allocator: installed once before CUDA starts, told of steps, refused on a CPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import farspan_memory
from farspan.spec import UnsupportedError
from farspan.train.config import DeviceAllocator
from farspan.train.memory import DeviceMemory, choose_allocator
from farspan.train.trainer import train
from farspan_memory.allocator import Installed
from farspan_memory.native import AllocatorOptions
from tests.train.tiny import STEPS, Quiet, TinyStep, replaced, tiny_components, tiny_run

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
STITCH, REPLAY = DeviceAllocator.STITCH, DeviceAllocator.REPLAY


class Native:
    """The functions of farspan_memory, and what they were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.now: Installed | None = None
        monkeypatch.setattr(farspan_memory, "install", self.install)
        monkeypatch.setattr(farspan_memory, "installed", lambda: self.now)
        for name in ("begin_iteration", "forget"):
            call = lambda device, name=name: self.calls.append((name, device))  # noqa: E731
            monkeypatch.setattr(farspan_memory, name, call)

    def install(self, mode: str) -> None:
        self.calls.append(("install", mode))
        self.now = Installed(mode, AllocatorOptions(), Path(), "")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    return Native(monkeypatch)


def test_by_default_pytorch_keeps_its_own(native: Native) -> None:
    assert choose_allocator(DeviceAllocator.DEFAULT, GPU) == DeviceMemory()
    assert native.calls == []


def test_on_a_gpu_it_is_installed_and_told_of_its_steps(native: Native) -> None:
    chosen = choose_allocator(REPLAY, GPU)
    assert chosen.begin_step is not None
    assert chosen.forget is not None
    chosen.begin_step()
    chosen.forget()
    assert native.calls == [("install", "replay"), ("begin_iteration", 1), ("forget", 1)]


def test_a_second_run_of_a_process_finds_it_there(native: Native) -> None:
    choose_allocator(STITCH, GPU)
    choose_allocator(STITCH, GPU)
    assert native.calls == [("install", "stitch")]
    with pytest.raises(
        UnsupportedError, match=r"this process already uses stitch, .* in a new process"
    ):
        choose_allocator(REPLAY, GPU)


def test_where_it_is_not_installed_a_run_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "farspan_memory", None)
    with pytest.raises(UnsupportedError) as refused:
        choose_allocator(REPLAY, GPU)
    assert str(refused.value) == (
        "allocator: replay: farspan-memory is not installed; pip install 'farspan[allocator]'"
    )


@pytest.mark.usefixtures("native")
def test_what_the_package_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is installed, and whatever it is told of later."""

    def refuse(_: object) -> None:
        raise farspan_memory.UnsupportedError("allocator: no driver")

    for name in ("begin_iteration", "forget"):
        monkeypatch.setattr(farspan_memory, name, refuse)
    chosen = choose_allocator(REPLAY, GPU)
    monkeypatch.setattr(farspan_memory, "install", refuse)
    monkeypatch.setattr(farspan_memory, "installed", lambda: None)
    for call in (chosen.begin_step, chosen.forget, lambda: choose_allocator(REPLAY, GPU)):
        assert call is not None
        with pytest.raises(UnsupportedError, match="allocator: no driver"):
            call()


def test_a_cpu_is_refused_before_anything_is_loaded(native: Native, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, device="cpu", allocator=STITCH)
    parts = replaced(tiny_components(), load_model=lambda **_: pytest.fail("loaded"))
    with pytest.raises(UnsupportedError, match="allocator: stitch is for the memory of a GPU"):
        train(run, components=parts, reporter=Quiet())
    assert native.calls == []


def test_each_step_begins_and_a_new_schedule_forgets(tmp_path: Path) -> None:
    """Once more than there are steps: the third runs out of memory, and is taken again."""
    calls: list[str] = []

    def fail_once(_: TinyStep, calls_made: int) -> None:
        if calls_made == 5 and "forget" not in calls:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    told = DeviceMemory(lambda: calls.append("begin"), lambda: calls.append("forget"))
    parts = replaced(tiny_components(fail_once), choose_allocator=lambda *_: told)
    train(tiny_run(tmp_path), components=parts, reporter=Quiet())
    assert calls == ["begin"] * 3 + ["forget"] + ["begin"] * (STEPS - 3)
