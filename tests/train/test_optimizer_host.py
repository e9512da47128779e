"""States in main memory: the same tensors, the same bits, whatever the copies do in between."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from farspan.distributed.run_context import DistributedContext
from farspan.engine.memory import PeakMemory
from farspan.host import TooLarge
from farspan.planner.states import SLOTS, states
from farspan.spec import UnsupportedError
from farspan.train.config import DType, ModelConfig, OptimizerConfig, StatesPlace
from farspan.train.context import inspect_model
from farspan.train.optimizer import TrainingOptimizer, decays
from farspan.train.planning import question_of
from farspan.train.staged_states import HostStates, Rule
from tests.grids import crossed, exhaustive
from tests.train.late import LateCopies
from tests.train.planner import one_memory
from tests.train.test_interrupt import same_weights
from tests.train.test_optimizer import set_gradients
from tests.train.tiny import MODEL, Quiet, fit, load_tiny, signalled, tiny_run

HOST, DEVICE = StatesPlace.HOST, StatesPlace.DEVICE
LRS = [0.1, 0.05, 0.2]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
PIECE = 128  # elements: a matrix of the tiny model is two to 33 pieces, some of them ragged


CPU = torch.device("cpu")


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.planner.states.STAGED", PIECE)


def update(model: nn.Module, config: OptimizerConfig, skip: str = "none") -> TrainingOptimizer:
    optimizer = TrainingOptimizer(model, config)
    for step, lr in enumerate(LRS):
        set_gradients(model, step)
        for name, parameter in model.named_parameters():
            if skip in name and step == 1:
                parameter.grad = None
        optimizer.step(lr, optimizer.gradient_norm())
    return optimizer


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(
    ("dtype", "clip", "skip"), crossed(DTYPES, [None, 0.5], ["none", "layers.1.mlp"])
)
def test_the_bits_are_those_of_states_on_the_device(
    dtype: torch.dtype, clip: float | None, skip: str
) -> None:
    config = OptimizerConfig(clip=clip, weight_decay=0.3)
    models = [load_tiny(config=MODEL, dtype=dtype, seed=1) for _ in range(2)]
    begun = copy.deepcopy(models[0])
    device = update(models[0], replace(config, states=DEVICE), skip)
    host = update(models[1], replace(config, states=HOST), skip)
    assert same(*models)
    assert not same(models[0], begun)
    ours, theirs = host.tensors(), device.tensors()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def run_late(dtype: torch.dtype) -> tuple[nn.Module, LateCopies]:
    """Two steps whose copies happen as late as they may."""
    model = load_tiny(config=MODEL, dtype=dtype, seed=1)
    config, copies = OptimizerConfig(clip=None), LateCopies()
    optimizer = TrainingOptimizer(model, config)
    optimizer._states = HostStates(optimizer.parameters, Rule(config, decays(model)), copies)
    for step, lr in enumerate(LRS):
        set_gradients(model, step)
        optimizer.step(lr, optimizer.gradient_norm())
    return model, copies


def expected_late(dtype: torch.dtype) -> nn.Module:
    model = load_tiny(config=MODEL, dtype=dtype, seed=1)
    update(model, OptimizerConfig(clip=None, states=DEVICE))
    return model


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_may_be_as_late_as_events_allow(dtype: torch.dtype) -> None:
    model, copies = run_late(dtype)
    assert same(model, expected_late(dtype))
    pieces = sum(-(-p.numel() // PIECE) for p in model.parameters())
    assert copies.late >= 2 * len(LRS) * pieces


@pytest.mark.parametrize(
    ("place", "dtype", "staged"),
    crossed([DEVICE, HOST], [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64], [PIECE, 2**24]),
)
def test_planned_bytes_are_those_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: StatesPlace, dtype: DType, staged: int
) -> None:
    """To the byte: planned, held, and allocated, counters of four bytes a parameter aside."""
    monkeypatch.setattr("farspan.planner.states.STAGED", staged)
    model = load_tiny(config=MODEL, dtype=getattr(torch, dtype.value), seed=1)
    run = tiny_run(tmp_path, model=ModelConfig(config=MODEL, dtype=dtype))
    found, world = inspect_model(model, dtype.value, CPU), DistributedContext(CPU)
    planned = states(question_of(run, found, one_memory(), place, world), ((0, 1), (1, 2)))
    with PeakMemory(torch.device("cpu")) as meter:
        optimizer = TrainingOptimizer(model, OptimizerConfig(states=place))
    counters = 4 * len(optimizer.parameters)
    held = optimizer.held()
    on_device, on_host = (counters, 0) if place is DEVICE else (0, counters)
    assert held.device == planned.optimizer + on_device
    assert held.host == planned.optimizer_on_host + on_host
    assert meter.peak == held.device + held.host
    gradients = sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in model.parameters())
    assert planned.gradients == gradients
    assert planned.accumulators == 0
    width = next(model.parameters()).itemsize
    slots = SLOTS * min(staged, 8976) * (max(4, width) + width)
    assert held.untouched == (slots if place is HOST else held.device - masters(optimizer))


def masters(optimizer: TrainingOptimizer) -> int:
    return sum(t.nbytes for name, t in optimizer.tensors().items() if name.startswith("master/"))


def test_nothing_is_untouched_after_an_update() -> None:
    for place in (DEVICE, HOST):
        model = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=1)
        assert update(model, OptimizerConfig(states=place)).held().untouched == 0


def test_too_little_main_memory_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: 100_000)
    model = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=1)
    with pytest.raises(TooLarge, match=r"states in main memory needs .* set optimizer\.states to"):
        TrainingOptimizer(model, OptimizerConfig(states=HOST))


def test_strided_parameters_are_refused_by_name() -> None:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.zeros(3, 4).t())
    with pytest.raises(
        UnsupportedError, match=r"optimizer\.states: host needs contig.* weight has strides"
    ):
        TrainingOptimizer(model, OptimizerConfig(states=HOST))


@pytest.mark.usefixtures("in_pieces")
def test_strided_gradients_are_taken_in_the_order_of_the_parameter() -> None:
    models = [load_tiny(config=MODEL, dtype=torch.float32, seed=1) for _ in range(2)]
    for model, place in zip(models, (DEVICE, HOST), strict=True):
        optimizer = TrainingOptimizer(model, OptimizerConfig(states=place))
        set_gradients(model, 0)
        for parameter in model.parameters():
            assert parameter.grad is not None
            if place is HOST and parameter.ndim == 2:
                parameter.grad = parameter.grad.t().contiguous().t()
        optimizer.step(0.1, optimizer.gradient_norm())
    assert same(*models)


@pytest.mark.slow
@pytest.mark.parametrize("there", [exhaustive(HOST), StatesPlace.DISK])
def test_a_run_goes_on_to_the_same_bits_and_may_change_the_place(
    tmp_path: Path, there: StatesPlace
) -> None:
    """Interrupted in its fourth step, and gone on with from there, the device and there."""
    start = tiny_run(tmp_path)
    optimizer = replace(start.optimizer, states=DEVICE)
    model = ModelConfig(config=MODEL, dtype=DType.BFLOAT16)
    reference = replace(start, optimizer=optimizer, model=model, folder=str(tmp_path / "reference"))
    fit(reference)
    told: list[str] = []
    for place, calls in ((there, 3), (DEVICE, 2), (there, 5), (there, 99)):
        run = replace(start, model=model, optimizer=replace(optimizer, states=place))
        quiet = Quiet()
        fit(run, signalled(calls), quiet)
        told += quiet.notes
    same_weights(tmp_path / "reference", tmp_path / "run")
    assert [note for note in told if "optimizer states: moved" in note] == [
        f"optimizer states: moved from the {before}; their values are unchanged"
        for before in (there, "device")
    ]
    assert ("states on disk: 0.00 GiB in " in "\n".join(told)) is (there is not HOST)
