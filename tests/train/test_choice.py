"""What is given up after a shortage, and what is never asked for."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farspan.distributed.run_context import DistributedContext
from farspan.hf.describe import describe
from farspan.hf.load import add_adapters
from farspan.hf.stages import CausalLMStages
from farspan.planner.machines import machine
from farspan.planner.request import Budget, Plan, Question, Remedy
from farspan.program.layout import ALONE, Layout, refuse_together
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Kernels, MachineSpec, RunSpec, Schedule, Tier, UnsupportedError
from farspan.train.config import ScheduleConfig, StatesPlace
from farspan.train.context import InspectedModel, inspect_model
from farspan.train.memory import Placed
from farspan.train.oom import (
    RETRY_SHARE,
    USUAL,
    Shortage,
    advice,
    explain_none_fits,
    lighter_schedule,
    needed,
)
from farspan.train.planning import (
    OWN,
    Choice,
    FreeMemory,
    SchedulePolicy,
    choice_json,
    free_now,
    question_of,
)
from farspan.train.run_folder import RunState
from farspan.train.staged_states import StateBytes
from farspan.train.step_runner import shortage_json
from tests.grids import crossed
from tests.train.planner import one_memory, plan_for
from tests.train.tiny import replaced, tiny_run
from tests.zoo import LAYERS, make_model

CPU = torch.device("cpu")
GIB = 2**30
TOKENS = 200
SHORT = {tier: Shortage(tier, "no memory") for tier in Tier}


def spec() -> Any:
    return describe(CausalLMStages(make_model("llama")))


Chooser = Callable[[MachineSpec], SchedulePolicy]
NOTHING = StateBytes(0, 0, 0)
SMALLEST = ScheduleConfig(
    None, chunk=1, groups=1, kv=Tier.HOST, kv_block=1, loss_chunk_size=1, layer_checkpoint=True
)
SMALL = Schedule(chunk=50)
PLENTY = FreeMemory(2**60, 2**60)


def a_policy(
    root: Path,
    schedule: ScheduleConfig,
    best: Schedule = SMALL,
    layout: Layout = ALONE,
    device: torch.device = CPU,
) -> SchedulePolicy:
    """Of a run that gives a schedule, or whose planner always finds the one that is the best."""
    run = tiny_run(root, schedule=schedule, context=TOKENS)
    ctx: Any = SimpleNamespace(
        run=run,
        model=make_model("llama"),
        device=device,
        world=DistributedContext(device, layout=layout),
        placed=Placed(StatesPlace.DEVICE, ""),
        inspected=None,
        describe=spec,
        touched_bytes=lambda: NOTHING,
        components=replaced(best_plan=lambda question: plan_for(question, "grouped", best)),
    )
    folder: Any = SimpleNamespace(path=root, shortage=root / "shortage.json")
    return SchedulePolicy(ctx, folder, RunState(), print)


@pytest.fixture
def chooser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chooser:
    def made(spec_: MachineSpec) -> SchedulePolicy:
        question = Question(spec(), RunSpec(1, TOKENS), spec_, dtype="float64")
        monkeypatch.setattr("farspan.train.planning.ask", lambda *_: question)
        monkeypatch.setattr("farspan.train.planning.free_now", lambda *_: PLENTY)
        return a_policy(tmp_path, ScheduleConfig("auto"))

    return made


@pytest.mark.parametrize("tier", list(Tier))
def test_the_tier_that_ran_out_shrinks_and_the_other_stays(chooser: Chooser, tier: Tier) -> None:
    gpu = machine("h200")
    made = chooser(gpu)
    first = made.first()
    assert first.plan is not None
    with pytest.raises(
        UnsupportedError,
        match=r"schedule: none fits .* on the device and .* on the host: grouped comes",
    ):
        made.again(first, SHORT[tier])
    assert made._question is not None
    after, budget = made._question.machine, {"device": first.plan.device, "host": first.plan.host}
    sizes = {Tier.DEVICE: after.device_bytes, Tier.HOST: after.host_bytes}
    before = {Tier.DEVICE: gpu.device_bytes, Tier.HOST: gpu.host_bytes}
    other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
    assert sizes[other] == before[other]
    own = budget[tier]
    fixed = own.parts.get("weights", 0) + own.parts.get("reserve", 0)
    assert sizes[tier] == fixed + int(RETRY_SHARE * own.parts["arena"])


MIB = 2**20


def a_miss(layout: Layout, devices: int, unified: bool, remedy: str) -> Plan:
    """Of 10 MiB a rank where 4 are there, in one memory or on a device."""
    size = 4 * MIB * min(devices, layout.devices())
    machine_ = replace(
        one_memory(size), devices=devices, unified=unified, device_bytes=size, reserve=0
    )
    question = Question(spec(), RunSpec(1, TOKENS), machine_, layout, dtype="float64")
    plan = plan_for(question, "fpdt", SMALL)
    parts = {"weights": 6 * MIB, "optimizer": 2 * MIB}
    remedies = (Remedy(remedy, same=True),) if remedy else ()
    # The device tier of one memory has what the host tier leaves of it, here less than nothing.
    device = Budget(parts, -MIB if unified else 4 * MIB)
    return replace(plan, device=device, host=Budget({"kv": 2 * MIB}, 4 * MIB), remedies=remedies)


@pytest.mark.parametrize(
    ("layout", "devices", "unified", "words"),
    [
        (
            Layout(),
            1,
            True,
            "none fits 4.0 MiB of main memory: fpdt comes closest: it needs ",
        ),
        (Layout(ulysses=2), 2, True, "none fits 8.0 MiB of main memory for the 2 ranks of a "),
        (Layout(), 1, False, "none fits 4.0 MiB on the device and 4.0 MiB on the host: fpdt"),
        (Layout(data=2), 2, False, "on each device and 8.0 MiB on the host for the 2 ranks"),
    ],
)
def test_what_misses_is_said_of_one_rank(
    layout: Layout, devices: int, unified: bool, words: str
) -> None:
    said = explain_none_fits(a_miss(layout, devices, unified, ""))
    assert words in said
    assert not re.search(r"-\d|--", said), "no negative amount, no flag of another command"
    who = "it" if layout == Layout() else "a rank"
    needs = "10.0 MiB of main memory" if unified else "8.0 MiB of device memory"
    assert f"{who} needs {needs}, but has 4.0 MiB; the largest parts are 6.0 MiB of weights" in said


@pytest.mark.parametrize(
    ("remedy", "devices", "unified", "words"),
    [
        ("--optimizer host", 1, False, "set optimizer.states: host"),
        ("--optimizer host", 1, True, USUAL),
        (
            "--optimizer host --weights host",
            1,
            False,
            "set optimizer.states: host and set schedule.weights: host",
        ),
        (
            "--optimizer adamw8bit",
            1,
            True,
            f"set optimizer.states: 8bit, which is not AdamW, or {USUAL}",
        ),
        ("--host-memory 16GiB", 1, True, "use a machine with 16GiB of main memory"),
        ("--batch 2", 1, True, "set batch: 2, and raise accumulate by the same factor"),
        ("--gpus 4", 8, False, "start 4 ranks, with parallel: auto: torchrun --nproc-per-node 4 "),
        ("--gpus 4", 2, True, "start 4 ranks, with parallel: auto: on 2 machines"),
        ("--context 512", 1, True, "set context: 512"),
        ("without --sparse", 1, True, "set sparse: null"),
        ("", 1, True, "shorten the context"),
        ("--lora 16", 1, False, "set model.lora.rank: 16, which trains adapters, or shorten"),
        ("--machine h100", 1, False, "use another card, such as h100"),
        (
            "--optimizer host --gpus 2",
            8,
            False,
            "set optimizer.states: host and start 2 ranks, with parallel: auto: torchrun",
        ),
    ],
)
def test_remedies_are_of_a_run_file(remedy: str, devices: int, unified: bool, words: str) -> None:
    assert advice(a_miss(Layout(), devices, unified, remedy)).startswith(words)


def test_one_memory_shrinks_by_what_both_tiers_took(
    chooser: Chooser,
) -> None:
    made = chooser(one_memory(GIB))
    first = made.first()
    assert first.plan is not None
    with pytest.raises(UnsupportedError, match=r"none fits \d.* of main memory: grouped comes"):
        made.again(first, SHORT[Tier.HOST])
    assert made._question is not None
    arenas = first.plan.device.parts["arena"], first.plan.host.parts["arena"]
    fixed = first.plan.device.total - arenas[0]
    expected = fixed + sum(int(RETRY_SHARE * arena) for arena in arenas)
    assert made._question.machine.host_bytes == expected


def test_no_more_is_asked_for_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.train.planning.available_host_bytes", lambda: 7 * GIB)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert free_now(cpu, used=GIB).limit(one_memory(100 * GIB)).host_bytes == 8 * GIB
    assert free_now(cpu, used=GIB).limit(one_memory(3 * GIB)).host_bytes == 3 * GIB
    gpu = replace(machine("h200"), device_bytes=140 * GIB, reserve=2 * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (100 * GIB, 140 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 20 * GIB)
    found = free_now(cuda, used=GIB).limit(gpu)
    # What torch has taken already is the run's own; others have 140 - 100 - 20 - 2.
    assert (found.device_bytes, found.host_bytes) == (122 * GIB, 7 * GIB)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 39 * GIB)
    assert free_now(cuda, used=GIB).limit(gpu).device_bytes == 140 * GIB


def test_gradients_of_earlier_batches_are_the_planners_to_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another process has part of the device: 60 GiB are free, and a GiB is this one's own
    context. No more is set aside."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (60 * GIB, 140 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 0)
    monkeypatch.setattr("farspan.train.planning.available_host_bytes", lambda: GIB)
    device = replace(one_memory(GIB), unified=False, device_bytes=140 * GIB, reserve=GIB)
    world, looked = DistributedContext(torch.device("cuda")), InspectedModel(spec())
    for accumulate, graphs in ((1, False), (2, False), (1, True)):
        run = tiny_run(tmp_path, accumulate=accumulate, kernels=Kernels(graphs=graphs))
        question = question_of(run, looked, device, StatesPlace.DEVICE, world)
        assert question.accumulates == (accumulate > 1 or graphs)
        policy = a_policy(tmp_path, ScheduleConfig("auto"), device=world.device)
        found = policy._limit(question).machine
        assert (found.device_bytes, found.reserve) == (61 * GIB, GIB)


def test_a_run_on_a_gpu_is_planned_with_copies_beside_the_computation(tmp_path: Path) -> None:
    """As `farspan plan` does: the engine runs them so, and the fastest schedule is another."""
    run, world, looked = tiny_run(tmp_path), DistributedContext(CPU), InspectedModel(spec())
    for machine_ in (machine("h200"), one_memory()):
        question = question_of(run, looked, machine_, StatesPlace.DEVICE, world)
        assert question.overlap is not machine_.unified


def a_question(tokens: int = TOKENS, layout: Layout = ALONE) -> Question:
    return Question(spec(), RunSpec(1, tokens), one_memory(), layout, dtype="float64")


@pytest.mark.parametrize(
    ("name", "tiers"), crossed(STRATEGIES, [(Tier.DEVICE,), (Tier.HOST,), tuple(Tier)])
)
def test_a_lighter_schedule_needs_less_where_it_is_short(
    name: str, tiers: tuple[Tier, ...]
) -> None:
    question, schedule = a_question(), strategy(name, LAYERS, TOKENS)
    before = needed(question, schedule, tiers)
    found = lighter_schedule(question, schedule, tiers)
    if found is None:  # nothing on that tier is the schedule's to give up
        assert tiers == (Tier.HOST,)
        assert name in ("plain", "recompute", "offload", "fpdt", "oomb", "memo", "grouped")
    else:
        assert needed(question, found, tiers) < before
        assert found.group_sizes(LAYERS)


@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2), Layout(ring=2), Layout(tensor=2), Layout(shards=2, data=2)]
)
def test_a_lighter_schedule_is_one_that_the_ranks_can_run(layout: Layout) -> None:
    """Down to the last: stages keep their layers, a ring its keys on the device."""
    question = a_question(layout=layout)
    schedule: Schedule | None = Schedule(
        chunk=100, groups=(1, LAYERS - 1), attention_save_fraction=1.0
    )
    sizes = []
    while schedule is not None:
        sizes.append(needed(question, schedule, tuple(Tier)))
        refuse_together(schedule, layout)
        if layout.pipeline > 1:
            assert schedule.groups == (1, LAYERS - 1)
        schedule = lighter_schedule(question, schedule, tuple(Tier))
    assert len(sizes) > 3
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_shortage_on_the_device_ends_with_the_smallest_pieces() -> None:
    """Again and again, until there is nothing left to give."""
    question = a_question(64)
    schedule: Schedule | None = strategy("plain", LAYERS, 64)
    sizes = []
    while schedule is not None:
        last = schedule
        sizes.append(needed(question, schedule, (Tier.DEVICE,)))
        schedule = lighter_schedule(question, schedule, (Tier.DEVICE,))
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] < sizes[0] / 4
    assert last.kv is Tier.HOST
    assert (last.boundary_inputs, last.activations, last.chunk) == (Tier.HOST, Tier.HOST, 1)


def test_a_chunk_is_cut_before_anything_else_while_it_stays_efficient() -> None:
    question = a_question(2**14)
    chunks = []
    schedule: Schedule | None = strategy("recompute", LAYERS, 2**14)
    while schedule is not None and schedule.boundary_inputs is Tier.DEVICE:
        chunks.append(schedule.chunk)
        schedule = lighter_schedule(question, schedule, (Tier.DEVICE,))
    assert chunks == [16384, 8192, 4096, 2048]
    assert schedule is not None
    assert (schedule.chunk, schedule.boundary_inputs) == (1024, Tier.HOST)


def test_what_takes_next_to_nothing_away_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter chunks cost time: here one of half the tokens would need 1% less."""

    def few(_: Question, schedule: Schedule, __: object) -> int:
        return 1000 - 10 * (schedule.chunk < 4096) - 300 * schedule.layer_checkpoint

    monkeypatch.setattr("farspan.train.oom.needed", few)
    schedule = Schedule(chunk=4096, groups=2)
    found = lighter_schedule(a_question(2**14), schedule, (Tier.DEVICE,))
    assert found == replace(schedule, layer_checkpoint=True)


def test_a_named_strategy_says_when_it_has_nothing_left(tmp_path: Path) -> None:
    made = a_policy(tmp_path, SMALLEST, device=torch.device("meta"))
    with pytest.raises(
        UnsupportedError,
        match=r"schedule: the run's own: chunk 1; .* cannot be made smaller; shorten",
    ):
        made.again(made.first(), SHORT[Tier.DEVICE])


def test_frozen_weights_are_not_planned_as_trained() -> None:
    model = make_model("llama", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    looked = inspect_model(model, "float32", CPU)
    assert looked.profile is not None
    assert looked.profile.variant.rank is None
    for layer, kind in zip(looked.model.layers, looked.profile.kind_of, strict=True):
        assert sum(looked.profile.kinds[kind].weights) == layer.work.trainable
        assert layer.work.trainable == 3 * 32 * 48
        assert layer.work.parameters > layer.work.trainable


@pytest.mark.parametrize(("rank", "known"), [(4, True), (0, False)])
def test_adapters_everywhere_are_planned_as_the_family_has_them(rank: int, known: bool) -> None:
    """`rank` is what the planner is told: 0 where the adapters are on some modules only."""
    model = make_model("llama", torch.float32)
    add_adapters(model, rank=4, alpha=8.0)
    looked = inspect_model(model, "float32", CPU, rank)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert looked.profile is not None
    assert (looked.profile.variant.rank == rank) is known
    assert looked.model.trainable == sum(layer.work.trainable for layer in looked.model.layers)
    assert looked.model.trainable == trained
    assert looked.model.outer_trainable() == 0


def test_a_named_schedule_that_ran_out_is_found_again(tmp_path: Path) -> None:
    """What it had become by then is what is made lighter, for the same schedule and layout."""
    asked, now = Schedule(chunk=64), Schedule(chunk=32)
    layout, both = Layout(ulysses=2), tuple(Tier)

    def first(layout: Layout = layout, chunk: int = 64) -> Choice:
        return a_policy(tmp_path, ScheduleConfig(None, chunk=chunk), layout=layout).first()

    assert first() == Choice(OWN, asked)
    known = choice_json(Choice(OWN, now), asked, layout)
    of_what = shortage_json(SHORT[Tier.DEVICE], Choice(OWN, now))
    path = tmp_path / "shortage.json"
    path.write_text(json.dumps(known | of_what))
    less, before = (needed(a_question(layout=layout), s, both) for s in (first().schedule, now))
    assert less < before < needed(a_question(layout=layout), asked, both)
    assert first().reason == "memory ran out before: no memory; less on the device than before"
    assert first(ALONE).schedule == asked
    assert first(chunk=16).schedule == replace(asked, chunk=16)
    for torn in (known, known | of_what | {"fields": []}, known | of_what | {"fields": None}):
        path.write_text(json.dumps(torn))
        assert first().schedule == asked


def test_a_named_schedule_that_cannot_be_made_lighter_says_how_to_take_it_again(
    tmp_path: Path,
) -> None:
    """What ran out may have been another program's doing, and the file would refuse for ever."""
    policy = a_policy(tmp_path, SMALLEST)
    first = policy.first()
    known = choice_json(first, first.schedule, ALONE) | shortage_json(SHORT[Tier.DEVICE], first)
    (tmp_path / "shortage.json").write_text(json.dumps(known))
    words = "the run's own: .*; memory ran out before: no memory; .*, delete shortage.json"
    with pytest.raises(UnsupportedError, match=words):
        policy.first()
