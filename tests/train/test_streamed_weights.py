"""Runs whose weights, gradients and states live in main memory: the bits of those that have them on
the device."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from farspan.distributed.run_context import DistributedContext
from farspan.durable import WriteFailed
from farspan.engine.memory import _static
from farspan.engine.step import Step
from farspan.engine.streamed_weights import StreamedWeights, _StreamedUnit
from farspan.hf.load import add_adapters, load_model
from farspan.hf.stages import CausalLMStages
from farspan.planner.evaluate import evaluate
from farspan.planner.plans import best_plan
from farspan.program.layout import Parallel
from farspan.spec import Schedule, Tier, UnsupportedError
from farspan.train.config import (
    CheckpointConfig,
    DType,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StatesPlace,
)
from farspan.train.context import Components, RunContext
from farspan.train.observer import Interrupt, Observer
from farspan.train.optimizer import TrainingOptimizer
from farspan.train.setup import make_context, resolve
from farspan.train.staged_states import HostStates
from farspan.train.trainer import train
from tests.engine.checks import draw
from tests.grids import part_of
from tests.numerics import assert_exact
from tests.ranks import run_ranks
from tests.train.planner import planned_components
from tests.train.test_ranks import interrupted
from tests.train.tiny import MODEL, Quiet, Stopped, Stopping, load_tiny, replaced, tiny_run
from tests.zoo import make_model

pytestmark = pytest.mark.slow

RESIDENT = ScheduleConfig(strategy="grouped", chunk=24)
STREAMED = replace(RESIDENT, weights=Tier.HOST)
BF16 = ModelConfig(config=MODEL, dtype=DType.BFLOAT16)


def run_of(root: Path, schedule: ScheduleConfig = STREAMED, **changes: Any) -> RunConfig:
    """In a folder of its own, by whether its weights are streamed."""
    name = "streamed" if schedule.weights else "resident"
    changes |= {"evaluation": EvaluationConfig(every=2, sequences=1)}
    return tiny_run(root, folder=str(root / name), schedule=schedule, **changes)


def outcome(folder: Path, last: int = 1) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What a run wrote of its steps, and every tensor of its last checkpoints and its model."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "heldout_loss")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    folders = *sorted((folder / "checkpoints").iterdir())[-last:], folder / "model"
    files = [file for of in folders for file in of.glob("*.safetensors")]
    # Which rank writes what several have depends on the order of states.
    kinds = {file: file.name if file.name[:5] != "rank-" else "ranks" for file in files}
    names = {file: f"{file.parent.name if last > 1 else ''}/{kinds[file]}" for file in files}
    tensors = {f"{names[f]}/{k}": t for f in files for k, t in load_file(f).items()}
    return [{key: line.get(key) for key in keys} for line in lines], tensors


def assert_same(ours: tuple[Any, Mapping[str, Tensor]], theirs: Any) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, tensor in ours[1].items():
        assert torch.equal(tensor, theirs[1][name]), name


CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"model": BF16},
    "float32": {"batch": 2, "accumulate": 1},
    "lora": {"model": replace(BF16, lora=LoraConfig(rank=2))},
}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Updates of a thread begin when somebody waits for them: so far the next step has come. Who
    did, by name."""
    waited: list[str] = []
    asked, update = threading.Event(), HostStates.update

    def waits(of: type, busy: str) -> None:
        settle = of.settle  # type: ignore[attr-defined]

        def heard(self: Any) -> None:
            if getattr(self, busy) is not None:
                waited.append(of.__name__)
                asked.set()
            settle(self)

        monkeypatch.setattr(of, "settle", heard)

    def late_update(self: HostStates, lr: float, begins: Any = None, ends: Any = None) -> None:
        assert begins is None or asked.wait(60.0)
        update(self, lr, begins, ends)
        asked.clear()

    waits(_StreamedUnit, "updated")
    waits(TrainingOptimizer, "_updating")
    monkeypatch.setattr(HostStates, "update", late_update)
    return waited


@pytest.mark.parametrize(
    ("name", "states"),
    part_of(
        product(CASES, [StatesPlace.HOST, StatesPlace.DISK]),
        *(("bfloat16", StatesPlace.HOST), ("lora", StatesPlace.DISK)),
    ),
)
def test_an_update_beside_the_next_step_changes_nothing(
    tmp_path: Path, late: list[str], states: StatesPlace, name: str
) -> None:
    """Not what is trained, nor what evaluations and checkpoints between steps see: all is as with
    resident weights. Batches add up, and gradients are clipped."""
    optimizer = OptimizerConfig(lr=1e-2, warmup=2, clip=0.05, states=states)
    found = []
    for schedule, overlap in ((RESIDENT, None), (STREAMED, False), (STREAMED, True)):
        config = replace(optimizer, overlap=overlap)
        run = run_of(tmp_path / str(overlap), schedule, optimizer=config, **CASES[name])
        checkpoints = CheckpointConfig(every=1, keep=3)  # some with no evaluation before
        train(replace(run, checkpoints=checkpoints), reporter=(quiet := Quiet()))
        found.append(outcome(Path(run.folder), last=3))
    for streamed in found[1:]:
        assert_same(streamed, found[0])
    assert max(line["grad_norm"] or 0 for line in found[0][0]) > 0.05
    assert "weights and their gradients on host" in "\n".join(quiet.notes)
    assert late.count("_StreamedUnit") > len(late) / 2


KINDS = {
    **{"gemma3_text": torch.float32, "qwen3_moe": torch.bfloat16},
    **{"lfm2": torch.bfloat16, "adapted": torch.float32},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    part_of(KINDS.items(), ("lfm2", torch.bfloat16)),
)
def test_models_of_all_kinds_are_updated_in_every_place(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Tied embeddings, experts, recurrent states, frozen parts: batches that add up, gradients that
    are clipped, three updates, each read by the next step."""
    data, schedule = draw(42, batch=2, documents=4), Schedule(chunk=11, groups=(1, 3), kv_block=7)

    def trained(states: StatesPlace, weights: Tier) -> dict[str, Tensor]:
        model: Any = make_model("qwen2" if name == "adapted" else name, dtype, num_hidden_layers=4)
        if name == "adapted":
            add_adapters(model, rank=2, alpha=4)
        host = StreamedWeights(CausalLMStages(model)) if weights is Tier.HOST else None
        config = OptimizerConfig(clip=0.05, states=states, disk=str(tmp_path), overlap=True)
        optimizer = TrainingOptimizer(model, config, streamed=host)
        step = Step(model, replace(schedule, weights=weights), weights=host)
        for number in range(3):
            for _ in range(2):
                step(*data)
            norm = optimizer.gradient_norm()
            assert norm > 0.05
            optimizer.step(1e-2 / (number + 1), norm)
        optimizer.settle()
        return optimizer.tensors() | dict(model.named_parameters())

    expected = trained(StatesPlace.DEVICE, Tier.DEVICE)
    for states in StatesPlace.HOST, StatesPlace.DISK:
        found = trained(states, Tier.HOST)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (states, key)


def test_a_run_that_is_left_waits_for_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for the whole update, whose thread ends before the process does."""
    model: Any = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=0)
    streamed = StreamedWeights(CausalLMStages(model))
    config = OptimizerConfig(states=StatesPlace.HOST, overlap=True)
    optimizer = TrainingOptimizer(model, config, streamed=streamed)
    update, updated = HostStates._update, list[str]()

    def leaving(self: HostStates, piece: Any, *given: Any) -> None:
        updated.append(piece.name)
        optimizer.abandon()
        update(self, piece, *given)

    monkeypatch.setattr(HostStates, "_update", leaving)
    streamed.reserve_sums()
    for p in streamed._all():
        if p.home is not None:
            p.own.grad, p.norm = p.home.zero_(), None
    optimizer.step(1e-2, optimizer.gradient_norm())
    with pytest.raises(RuntimeError, match="the run ended"):
        optimizer.settle()
    assert len(updated) == 1


@pytest.mark.gpu
def test_an_update_beside_the_next_step_of_a_gpu_changes_nothing(tmp_path: Path) -> None:
    """Where it is the default."""
    optimizer, found = OptimizerConfig(lr=1e-2, clip=0.05, states=StatesPlace.HOST), []
    for overlap in (False, None):
        config = replace(optimizer, overlap=overlap)
        run = run_of(tmp_path / str(overlap), optimizer=config, model=BF16, device="cuda")
        train(run, reporter=Quiet())
        found.append(outcome(Path(run.folder)))
    assert_same(*found)


def test_an_update_that_fails_is_heard_of_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the step that has begun, or by the checkpoint; a second try has the same bits."""
    optimizer = OptimizerConfig(states=StatesPlace.HOST, overlap=True)
    whole = run_of(tmp_path / "whole", optimizer=optimizer, model=BF16)
    train(whole, reporter=Quiet())
    run = replace(whole, folder=str(tmp_path / "failed"))
    update, failed = HostStates._update, list[Any]()

    def failing(self: HostStates, piece: Any, *given: Any) -> None:
        assert not failed
        if self._updates[piece.name] == 3 and "layers.1" in piece.name:
            failed.append(piece)
            raise WriteFailed("the drive is full")
        update(self, piece, *given)

    with monkeypatch.context() as patched:
        patched.setattr(HostStates, "_update", failing)
        with pytest.raises(WriteFailed, match="drive is full"):
            train(run, reporter=Quiet())
    saved = [path.name for path in (Path(run.folder) / "checkpoints").iterdir()]
    assert saved == ["step-00000002"]
    train(run, reporter=Quiet())
    assert_same(outcome(Path(run.folder)), outcome(Path(whole.folder)))


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Behind checkpoints of steps 2 and 4, whatever place its weights had before."""
    run = run_of(tmp_path, model=BF16)
    train(run, reporter=Quiet())
    stopped = replace(run, folder=str(tmp_path / "stopped"))
    for step, schedule in ((3, RESIDENT), (5, STREAMED)):
        with pytest.raises(Stopped):
            train(replace(stopped, schedule=schedule), reporter=Stopping(step))
    train(replace(stopped, schedule=RESIDENT), reporter=Quiet())
    assert_same(outcome(Path(stopped.folder)), outcome(Path(run.folder)))


def test_auto_plans_within_it_and_takes_what_it_said(tmp_path: Path) -> None:
    """Planned, forecast and measured."""
    run = run_of(tmp_path, ScheduleConfig(strategy="auto", weights=Tier.HOST), model=BF16)
    parts = replaced(
        planned_components(()), best_plan=partial(best_plan, seconds=0.1), evaluate=evaluate
    )
    found = train(run, components=parts, reporter=Quiet()).comparison
    assert found is not None
    assert abs(found.predicted_bytes / found.measured_bytes - 1) < 0.02
    plan = json.loads((Path(run.folder) / "plan.json").read_text())
    assert plan["fields"]["weights"] == "host"


def test_a_planned_run_keeps_its_plan_where_its_weights_move(tmp_path: Path) -> None:
    """Resumed with another place for them: the rest of the plan, so the same bits."""
    resident = run_of(tmp_path, ScheduleConfig(strategy="auto"), model=BF16)
    parts = replaced(
        planned_components(()), best_plan=partial(best_plan, seconds=0.1), evaluate=evaluate
    )
    train(resident, components=parts, reporter=Quiet())
    stopped = replace(resident, folder=str(tmp_path / "stopped"))
    with pytest.raises(Stopped):
        train(stopped, components=parts, reporter=Stopping(4))
    moved = ScheduleConfig(strategy="auto", weights=Tier.HOST)
    quiet = Quiet()
    train(replace(stopped, schedule=moved), components=parts, reporter=quiet)
    assert any("weights and their gradients on host" in note for note in quiet.notes)
    assert_same(outcome(Path(stopped.folder)), outcome(Path(resident.folder)))


class Short(Step):
    """Runs out of memory in its second update, at the first schedule."""

    calls = 0

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        loss = super().__call__(*args, **named)
        self.calls += self.progress is not None
        if self.calls == 3 and self.schedule.chunk == 24:
            raise MemoryError
        return loss


def test_a_step_whose_memory_ran_out_is_taken_again(tmp_path: Path) -> None:
    """By a schedule that needs less, of the same weights where they lie."""
    run, quiet = run_of(tmp_path), Quiet()
    assert train(run, components=replaced(make_step=Short), reporter=quiet).step == run.steps
    (retry,) = (note for note in quiet.notes if "retry 1 of" in note)
    assert "weights and their gradients on host" in retry
    whole = replace(run, folder=str(tmp_path / "whole"))
    train(whole, reporter=Quiet())
    lines = [outcome(Path(r.folder))[0] for r in (run, whole)]
    losses = [torch.tensor([x["loss"] for x in found if x["loss"]]) for found in lines]
    assert_exact(losses[0].double(), losses[1].double(), limit=1e-5)


# -- several ranks ------------------------------------------------------------------------------

WIDE = MODEL | {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
CLIPPED = OptimizerConfig(lr=1e-2, warmup=2, clip=0.05)
PARALLEL = {
    "stages": Parallel(pipeline=2, fsdp=False),
    "heads": Parallel(ulysses=2, fsdp=False),
    "replicas": Parallel(data=2, fsdp=False),
    "shards": Parallel(ulysses=2),
    "shards of replicas": Parallel(data=2),
    "shards of stages": Parallel(pipeline=2),
}


def of_ranks(root: Path, parallel: Parallel, schedule: ScheduleConfig) -> RunConfig:
    model = ModelConfig(config=WIDE, dtype=DType.BFLOAT16)
    options = {"optimizer": CLIPPED, "parallel": parallel}
    return run_of(root, replace(schedule, groups=1), model=model, steps=4, **options)


def trained(run: RunConfig) -> list[str]:
    """What is noted of it."""
    quiet = Quiet()
    assert train(run, reporter=quiet).step == run.steps
    return quiet.notes


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", part_of(PARALLEL, "shards"))
def test_a_run_of_ranks_is_the_resident_one(tmp_path: Path, name: str) -> None:
    """With batches that add up, clipping, evaluations, checkpoints and what it exports. Stopped
    twice, it goes on with resident weights and with streamed ones."""
    resident, run = (of_ranks(tmp_path, PARALLEL[name], s) for s in (RESIDENT, STREAMED))
    run_ranks(2, trained, resident)
    assert run_ranks(2, interrupted, run, 2, 1) == [2, 2]
    assert run_ranks(2, interrupted, replace(run, schedule=resident.schedule), 1, 0) == [3, 3]
    notes, _ = run_ranks(2, trained, run)
    assert_same(*(outcome(Path(one.folder)) for one in (run, resident)))
    text = "\n".join(notes)
    assert "weights and their gradients on host" in text
    assert "optimizer states: in main memory, updated there" in text
    memory = json.loads((Path(run.folder) / "about.json").read_text())["memory"]
    assert memory["weights"] == memory["gradients"] == memory["optimizer"] == 0
    assert min(memory["host_weights"], memory["host_gradients"]) > 0
    assert (memory["accumulators"] > 0) == name.startswith("shards")


# -- where everything lives ---------------------------------------------------------------------


ONE = DistributedContext(torch.device("cpu"))


def context(run: RunConfig, world: DistributedContext | None = None) -> RunContext:
    with Interrupt() as interrupt:
        observer = Observer(Quiet(), interrupt)
        ranks = None if world is None else world.size
        return make_context(resolve(run, ranks), Components(), world or ONE, observer, {})


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_everything_refers_to_the_weights_where_they_lie(tmp_path: Path) -> None:
    """In one slab, before the optimizer and the checkpoints look at them, and whatever steps are
    made: one whose memory ran out, and the next."""
    ctx = context(run_of(tmp_path))
    assert ctx.weights is not None
    (slab,) = storages(ctx.model.parameters())
    steps = [ctx.make_step(STREAMED.apply(ctx.components.strategy("grouped", 2, 48))) for _ in "12"]
    assert all(step.weights is ctx.weights for step in steps)
    assert storages(ctx.model.parameters()) == {slab}
    entries = ctx.saver()._entries.items()
    assert storages(t for name, (t, _) in entries if name.startswith("model/")) == {slab}


def test_a_device_apart_is_given_nothing_but_steps(tmp_path: Path) -> None:
    """Of a run on another device, here one without memory: weights, states and what checkpoints
    are made of stay in main memory, and steps compute there."""
    meta = torch.device("meta")
    ctx = context(run_of(tmp_path, model=BF16), DistributedContext(meta))
    step: Any = ctx.make_step(STREAMED.apply(ctx.components.strategy("grouped", 2, 48)))
    assert ctx.weights is not None
    assert step.weights is ctx.weights
    assert step.stages.device == step.copies.device == ctx.weights.device == meta
    described, known = ctx.describe(), step.model_spec  # with which a lighter schedule is sought
    assert [x.work.parameters for x in described.layers] == [
        x.work.parameters for x in known.layers
    ]
    saved = (tensor for tensor, _ in ctx.saver()._entries.values())
    kept = (*ctx.model.parameters(), *ctx.model.buffers(), *saved)
    assert {t.device.type for t in kept} == {"cpu"}
    held, weights = ctx.optimizer.held(), ctx.weights.nbytes
    assert ctx.held_bytes() == ctx.touched_bytes().device == held.device == 0
    assert ctx.touched_bytes().host == held.host + sum(p.nbytes for p in ctx.model.parameters())
    assert 12 * 8976 <= held.host < 12 * 8976 + 4 * 30
    found = _static(step, step.program(1, 48))
    assert (found.weights, found.gradients, found.host_weights) == (0, 0, weights)
    assert found.host == found.host_arena + weights + found.host_gradients


def mapped_from(path: Path) -> Callable[[int], bool]:
    """Whether an address is one at which the kernel shows the file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    ranges = [range(int(first, 16), int(last, 16)) for first, last in found]
    return lambda address: any(address in r for r in ranges)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux for what is mapped")
def test_a_folders_weights_are_mapped_until_they_are_in_the_slab(tmp_path: Path) -> None:
    """So that main memory holds them once: pages of a file are no memory of the process."""
    saved = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=0)
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    model = load_model(path=str(tmp_path), dtype=torch.bfloat16)
    assert all(map(mapped_from(tmp_path / "model.safetensors"), storages(model.parameters())))
    StreamedWeights(CausalLMStages(model))
    assert len(storages(model.parameters())) == 1
    assert not any(map(mapped_from(tmp_path / "model.safetensors"), storages(model.parameters())))


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [StatesPlace.DEVICE, StatesPlace.EIGHT_BIT])
def test_states_on_the_device_are_refused(tmp_path: Path, states: StatesPlace) -> None:
    wanted = (
        r"^optimizer\.states: expected auto, host or disk with schedule\.weights: host, "
        rf"got {states}: .*; set optimizer\.states to auto, host or disk, "
        r"or schedule\.weights to device$"
    )
    with pytest.raises(UnsupportedError, match=wanted):
        run_of(tmp_path, optimizer=OptimizerConfig(states=states))


def test_whole_weights_that_tensor_cuts_are_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    class Two(DistributedContext):
        """The first of two."""

        size = 2

        def run_on_rank0(self, function: Any, *_: Any) -> Any:
            return function()

    run = run_of(tmp_path, parallel=Parallel(tensor=2, fsdp=False))
    with pytest.raises(UnsupportedError, match=r"^schedule\.weights: host without fsdp needs"):
        context(run, Two(torch.device("cpu")))
