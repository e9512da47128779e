"""States in a file on a drive: the same bits, bounded main memory, and refusals before a step."""

import errno
import mmap
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.distributed.run_context import DistributedContext
from farspan.durable import WriteFailed
from farspan.engine.memory import PeakMemory
from farspan.engine.streamed_weights import StreamedWeights
from farspan.hf.stages import CausalLMStages
from farspan.planner.states import drive_bytes, states
from farspan.spec import Tier, UnsupportedError
from farspan.train.config import DType, ModelConfig, OptimizerConfig, StatesPlace
from farspan.train.context import inspect_model
from farspan.train.optimizer import TrainingOptimizer, decays
from farspan.train.planning import question_of
from farspan.train.staged_states import DiskStates, Rule, ScratchFile, settle
from tests.grids import crossed
from tests.train.late import LateCopies
from tests.train.planner import one_memory
from tests.train.test_optimizer import set_gradients
from tests.train.test_optimizer_host import LRS, same, update
from tests.train.tiny import MODEL, load_tiny, tiny_run

DISK, HOST, DEVICE = StatesPlace.DISK, StatesPlace.HOST, StatesPlace.DEVICE
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
PIECE = 1024  # elements: whole sectors; the embedding is five pieces, more than there are slots
CPU = torch.device("cpu")


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.planner.states.STAGED", PIECE)


def tiny(dtype: torch.dtype) -> nn.Module:
    return load_tiny(config=MODEL, dtype=dtype, seed=1)


def on_disk(folder: Path, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(states=DISK, disk=str(folder), **changes)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(
    ("dtype", "clip", "skip"), crossed(DTYPES, [None, 0.5], ["none", "layers.1.mlp"])
)
def test_the_bits_are_those_of_states_on_the_device(
    tmp_path: Path, dtype: torch.dtype, clip: float | None, skip: str
) -> None:
    models = [tiny(dtype) for _ in range(2)]
    config = on_disk(tmp_path, clip=clip, weight_decay=0.3)
    device = update(models[0], replace(config, states=DEVICE), skip)
    disk = update(models[1], config, skip)
    assert same(*models)
    assert not same(models[0], tiny(dtype))
    same_states(disk.tensors(), device.tensors())


def same_states(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_may_be_as_late_as_events_allow(tmp_path: Path, dtype: torch.dtype) -> None:
    models = [tiny(dtype) for _ in range(2)]
    update(models[0], OptimizerConfig(states=DEVICE, clip=None))
    config = on_disk(tmp_path, clip=None)
    optimizer = TrainingOptimizer(models[1], config)
    rule = Rule(config, decays(models[1]))
    optimizer._states = DiskStates(optimizer.parameters, rule, LateCopies())
    for step, lr in enumerate(LRS):
        set_gradients(models[1], step)
        optimizer.step(lr, optimizer.gradient_norm())
    assert same(*models)


@pytest.mark.usefixtures("in_pieces")
def test_requests_may_be_slow_and_end_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when nobody waits for them, it shows."""
    import random
    import time

    whole = ScratchFile._move

    def slowly(self: ScratchFile, *given: Any) -> None:
        time.sleep(random.random() / 200)
        whole(self, *given)

    monkeypatch.setattr(ScratchFile, "_move", slowly)
    models = [tiny(torch.bfloat16) for _ in range(3)]
    update(models[0], OptimizerConfig(states=DEVICE))
    update(models[1], on_disk(tmp_path))
    assert same(*models[:2])
    monkeypatch.setattr("farspan.train.staged_states._DiskSlot.wait", lambda _: None)
    update(models[2], on_disk(tmp_path))
    assert not same(models[0], models[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_checkpoint_copies_in_is_what_updates_read(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Through the mapping, behind what direct writes left there, and back."""
    model, other = tiny(dtype), tiny(dtype)
    disk, device = update(model, on_disk(tmp_path)), update(other, OptimizerConfig(states=DEVICE))
    for optimizer in (disk, device):
        for name, tensor in optimizer.tensors().items():
            if not name.startswith("step/"):
                tensor.mul_(0.5)
    for optimizer, own in ((disk, model), (device, other)):
        set_gradients(own, 7)
        optimizer.step(0.1, optimizer.gradient_norm())
    assert same(model, other)
    same_states(disk.tensors(), device.tensors())


@pytest.mark.parametrize("refusing", [False, True])
def test_without_direct_io_it_goes_by_the_page_cache_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: bool
) -> None:
    if refusing:
        monkeypatch.setattr(ScratchFile, "_go_direct", lambda _: False)
    models = [tiny(torch.bfloat16) for _ in range(2)]
    update(models[0], OptimizerConfig(states=DEVICE))
    optimizer = update(models[1], on_disk(tmp_path))
    assert same(*models)
    assert ("no direct I/O there" in optimizer.drive()) is refusing


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    optimizer = update(tiny(torch.bfloat16), on_disk(folder))
    assert optimizer.drive()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("dtype", "weights"), crossed(DType, Tier))
def test_planned_bytes_are_those_taken(tmp_path: Path, dtype: DType, weights: Tier) -> None:
    """Main memory to the byte, counters of four bytes a parameter aside; of the file sectors."""
    model = load_tiny(config=MODEL, dtype=getattr(torch, dtype.value), seed=1)
    run = tiny_run(tmp_path, model=ModelConfig(config=MODEL, dtype=dtype))
    found, world = inspect_model(model, dtype.value, CPU), DistributedContext(CPU)
    question = question_of(run, found, one_memory(), DISK, world)
    question = replace(question, weights=weights)
    apart = replace(run, optimizer=replace(run.optimizer, overlap=False))
    beside = (question_of(of, found, one_memory(), DISK, world) for of in (run, apart))
    assert [of.update_beside for of in beside] == [True, False]
    planned = states(question, ((0, 1), (1, 2)))
    streamed = StreamedWeights(CausalLMStages(model)) if weights is Tier.HOST else None
    with PeakMemory(CPU) as meter:
        optimizer = TrainingOptimizer(model, on_disk(tmp_path), streamed=streamed)
    held, counters = optimizer.held(), 4 * len(optimizer.parameters)
    assert held.device == planned.optimizer == 0
    assert held.host == planned.optimizer_on_host + counters
    assert meter.peak <= held.host + 2**16
    kept = sum(t.nbytes for n, t in optimizer.tensors().items() if not n.startswith("step/"))
    assert drive_bytes(question) == kept


def test_main_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """16 MiB of states by way of slots of 768 KiB: what is not the file's own pages stays."""

    def anonymous() -> int:
        text = Path("/proc/self/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+) kB", text)[0]) * 1024

    model = nn.Linear(1024, 2048, bias=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.planner.states.STAGED", 2**15)
        optimizer = TrainingOptimizer(model, on_disk(tmp_path))
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(0.1, torch.ones(()))
        before = anonymous()
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step(0.1, torch.ones(()))
            assert sum(float(t.sum()) for t in optimizer.tensors().values()) > 0
        assert anonymous() - before < 12 * 2**20  # the gradient has 8
        assert optimizer.held().host < 2 * 2**20


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "not" / "there", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            UnsupportedError, match=rf"optimizer\.disk: .*{folder}.* name a writable folder"
        ):
            TrainingOptimizer(tiny(torch.float32), on_disk(folder))


def test_a_full_drive_is_refused_with_what_is_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UnsupportedError, match=r"need [\d,]+ bytes, but .* has [\d,]+ free \(No sp"
    ):
        TrainingOptimizer(tiny(torch.float32), on_disk(tmp_path))


def test_a_slow_drive_is_refused_with_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScratchFile, "rates", lambda *_: (1e4, 1e4))
    model, config = tiny(torch.bfloat16), on_disk(tmp_path)
    with pytest.raises(UnsupportedError, match=r"takes [\d,]+\.\d s .*disk_seconds \(30\)"):
        TrainingOptimizer(model, replace(config, disk_seconds=30.0))
    assert "s of an update" in TrainingOptimizer(model, config).drive()


@pytest.mark.usefixtures("in_pieces")
def test_a_drive_that_fails_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(torch.bfloat16)
    optimizer = TrainingOptimizer(model, on_disk(tmp_path))

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", broken)
    set_gradients(model, 0)
    with pytest.raises(WriteFailed, match=f"cannot write {tmp_path}: Input/output error"):
        optimizer.step(0.1, optimizer.gradient_norm())
    monkeypatch.setattr(os, "preadv", broken)
    set_gradients(model, 0)
    with pytest.raises(WriteFailed, match=r"cannot read states on disk .* another folder"):
        optimizer.step(0.1, optimizer.gradient_norm())


def test_a_drive_that_fails_when_it_is_tried_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(number: int, *given: Any) -> Any:
        if number == -1:  # memory alone
            return anonymous(number, *given)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model, anonymous = tiny(torch.bfloat16), mmap.mmap
    for module, name in ((os, "pwritev"), (mmap, "mmap")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(UnsupportedError, match=r"^optimizer\.disk: .*Input/output error"):
                TrainingOptimizer(model, on_disk(tmp_path))


def test_all_requests_have_ended_when_one_has_failed() -> None:
    begun, ended = threading.Event(), []

    def late() -> None:
        begun.wait()
        ended.append("late")

    def fails() -> None:
        begun.set()
        raise WriteFailed("broken")

    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(late), pool.submit(fails)]
        with pytest.raises(WriteFailed, match="broken"):
            settle([requests[1], requests[0]])
        assert ended == ["late"]
