"""Lanes against a dumb checker: what touches one place never meets in time."""

from dataclasses import fields, replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.ask import Request
from farspan.planner.evaluate import evaluate, outlined, size, surely_sized
from farspan.planner.feasibility import composed
from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.planner.states import update_seconds
from farspan.planner.timeline import AHEAD, fold, run_time, spans
from farspan.program.builder import build_program
from farspan.program.dependencies import Lane, waits
from farspan.program.layout import Layout
from farspan.program.program import (
    Allocate,
    AttentionMode,
    Backward,
    Clear,
    Close,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Instruction,
    Load,
    LoadGradient,
    Program,
)
from farspan.program.strategies import strategy
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier
from tests.grids import crossed, examples
from tests.planner.machines import slow_machine
from tests.planner.test_bound import anywhere, with_work
from tests.program.cases import steps

Place = tuple[str, int]
CLOSE = 1e-9
ANYWHERE = st.builds(anywhere, steps(), st.booleans())  # weights are on the device or on host


def prices_of(
    model: ModelSpec, run: RunSpec, schedule: Schedule, layout: Layout | None = None
) -> Prices:
    question = Question(
        with_work(model),
        run,
        slow_machine(),
        layout=layout or Layout(),
        optimizer=Optimizer.NONE,
        dtype="float32",
        overlap=True,
    )
    return Prices(question, build_program(question.model, run, schedule))


def touched(program: Program, i: Instruction) -> tuple[set[Place], set[Place]]:
    """Places an instruction reads and writes, from its fields alone. A cell's own places count as
    both; so do whole prefixes that it reads."""
    if isinstance(i, Allocate | Free | Clear | Close):
        return set(), set()
    names = [v for f in fields(i) if isinstance(v := getattr(i, f.name), str)]
    names = [name for name in names if name in program.buffers]
    chunk = getattr(i, "chunk", -1)
    places = {(n, -1 if program.buffers[n].layer < 0 else chunk) for n in names}
    if isinstance(i, Fetch | Evict):
        source, target = ((n, -1 if program.buffers[n].layer < 0 else chunk) for n in names)
        return {source}, {target}
    if isinstance(i, Load | LoadGradient):
        return places, set()
    if isinstance(i, Forward | Backward):
        attends = isinstance(i, Backward) or i.mode is AttentionMode.COMPUTE
        prefix = {(i.prefix, c) for c in range(i.chunk * attends)}
        own = {p for p in places if p[0] not in (i.prefix, getattr(i, "accumulator", ""))}
        return prefix | own, own if isinstance(i, Forward) else set()
    return set(), places


def check(prices: Prices) -> None:
    """Every pair on one place, one of which writes, is in the program's order and apart."""
    program = prices.program
    found = spans(prices)
    for lane in ("fetch", "evict", "compute", "collective"):
        own = [span for span in found if span.lane == lane]
        for before, after in pairwise(own):
            assert after.start >= before.end - CLOSE, (lane, before, after)
    written: dict[Place, float] = {}
    read: dict[Place, float] = {}
    main = {}
    for span in found:
        streamed = isinstance(program.instructions[span.index], Forward | Backward)
        if not streamed or span.lane == "compute":
            main[span.index] = span
    for index in sorted(main):
        span = main[index]
        reads, writes = touched(program, program.instructions[index])
        for place in reads:
            assert span.start >= written.get(place, 0.0) - CLOSE, (place, span)
        for place in writes:
            assert span.start >= read.get(place, 0.0) - CLOSE, (place, span)
        for place in reads:
            read[place] = max(span.end, read.get(place, 0.0))
        for place in writes:
            written[place] = max(span.end, written.get(place, 0.0))


def check_addresses(prices: Prices) -> None:
    """Nobody touches a buffer while an earlier owner of its addresses is in use."""
    program = prices.program
    used: dict[str, tuple[float, float]] = {}
    for span in spans(prices):
        i = program.instructions[span.index]
        reads, writes = touched(program, i)
        names = {name for name, _ in reads | writes}
        names |= {i.prefix} if isinstance(i, Forward | Backward) and i.chunk else set()
        for name in names:
            first, last = used.get(name, (span.start, span.end))
            used[name] = min(first, span.start), max(last, span.end)
    for before, after in permutations(used, 2):
        old, new = program.buffers[before], program.buffers[after]
        meet = old.address < new.address + new.bytes and new.address < old.address + old.bytes
        if old.tier is new.tier and meet and old.dies <= new.born:
            assert used[before][1] <= used[after][0] + CLOSE, (before, after)


@settings(max_examples=examples(80))
@given(ANYWHERE)
def test_no_race(step: tuple[ModelSpec, RunSpec, Schedule]) -> None:
    prices = prices_of(*step)
    check(prices)
    check_addresses(prices)


def ends_by_waits(prices: Prices) -> dict[tuple[str, int], float]:
    """When each lane has done its part of each instruction, by the waits of the engine."""
    program = prices.program
    free, ends = dict.fromkeys(Lane, 0.0), dict[tuple[str, int], float]()
    orders, issued, cells = waits(program), 0.0, list[float]()
    for index, (i, order) in enumerate(zip(program.instructions, orders, strict=True)):
        cost, is_cell = prices.of(i), isinstance(i, Forward | Backward)
        is_copied = isinstance(i, Gather | Close)  # weights: what computes only issues it
        if is_cell and len(cells) >= AHEAD:
            issued = max(issued, cells[-AHEAD])
        for lane, after in order.items():
            earlier = (ends[other.name.lower(), awaited] for other, awaited in after)
            begin = max([free[lane], issued, *earlier])
            busy = 0.0 if is_copied and lane is Lane.COMPUTE else cost.in_line() - cost.host
            free[lane] = max(begin + busy, issued + cost.host)
            ends[lane.name.lower(), index] = free[lane]
        issued += cost.host
        if is_cell:
            cells.append(free[Lane.COMPUTE])
    return ends


@pytest.mark.parametrize("overhead", [0.0, 1e-4, 1e-2, 10.0])
@pytest.mark.parametrize("tier", Tier)
@given(step=ANYWHERE)
@settings(max_examples=examples(20))
def test_times_are_those_of_the_engines_waits(
    tier: Tier, overhead: float, step: tuple[ModelSpec, RunSpec, Schedule]
) -> None:
    """Of programs whose cells stream nothing: those use two lanes at a time."""
    model, run, schedule = step
    prices = prices_of(
        model, run, replace(schedule, kv=Tier.DEVICE, boundary_inputs=tier, attention=tier)
    )
    prices.question = replace(prices.question, machine=slow_machine(overhead=overhead))
    expected = ends_by_waits(prices)
    for span in spans(prices):
        assert span.end == pytest.approx(expected[span.lane, span.index], rel=CLOSE)


@pytest.mark.parametrize("name", ["grouped", "oomb", "fpdt"])
@pytest.mark.parametrize("tokens", [2**16, 2**18])
def test_copies_hide_on_a_gpu(name: str, tokens: int) -> None:
    """Under 4% of a step waits for them, Qwen2.5-7B on the H200 of the presets. Issuing hides."""
    question = Request("Qwen2.5-7B", tokens, "h200").question()
    schedule = strategy(name, len(question.model.layers), tokens)
    program = build_program(question.model, question.run, schedule)
    line = run_time(Prices(question, program, together=True), overlap=True)
    assert line.fetch + line.evict > 0.03 * line.total  # there is something to hide
    assert line.total - line.compute < 0.04 * line.total


def of_groups(tokens: str, *, gpus: int = 1) -> Question:
    return Request("Qwen2.5-7B", tokens, "h200", gpus=gpus).question()


FOLDED = (
    Schedule(2**13, 1, Tier.HOST, attention_save_fraction=0.5, attention=Tier.HOST),
    Schedule(2**13, 1, kv=Tier.HOST),
    Schedule(2**13, 2, kv=Tier.HOST, kv_kept=True, attention_save_fraction=1.0),
    Schedule(2**13, (4,) * 7, attention_open=True, layer_checkpoint=True),
    Schedule(2**14, (2,) * 5 + (3,) * 6, kv=Tier.HOST, activation_save_fraction=0.5),
    Schedule(2**13, (28,), attention_save_fraction=0.25),
    Schedule(2**13, (2,) * 14, kv_kept=True, weights=Tier.HOST),
)
EVENLY = Schedule(2**13, 1, activation_save_fraction=1.0, activation_save_layers=0.25, kv_kept=True)


# Of weights in main memory also whole ones on several devices.
CASES = [(of, *to) for of in FOLDED for to in ((1, 1), (4, 1), (4, 50))][: 3 * 6 + 2]
CASES.append((FOLDED[-1], -4, 1))
CASES.append((EVENLY, 1, 1))
CASES.append((replace(EVENLY, activation_save_layers=0.5), 4, 50))


@pytest.mark.parametrize(("schedule", "gpus", "slower"), CASES, ids=range(23))
def test_few_layers_take_the_time_of_all(schedule: Schedule, gpus: int, slower: int) -> None:
    """Where devices wait for each other, too; and outlines of programs take the bytes of the whole
    ones."""
    asked = replace(of_groups("96K", gpus=abs(gpus)), weights=schedule.weights)
    asked = replace(asked, layout=replace(asked.layout, fsdp=gpus > 0), accumulates=gpus < 0)
    peer = asked.machine.peer / slower
    roomy = replace(asked.machine, device_bytes=2**45, host_bytes=2**45, peer=peer)
    asked = replace(asked, machine=roomy)
    sized, outline = size(asked, schedule), outlined(asked, schedule)
    assert (outline.device, outline.host) == (sized.device, sized.host)
    assert surely_sized(asked, schedule).device == sized.device
    whole = evaluate(asked, "grouped", schedule, sized)
    few, (program,) = composed(asked, "grouped", schedule, outline)
    assert len(program.instructions) < 0.8 * len(sized.programs[0].instructions)
    assert few.seconds.total == pytest.approx(whole.seconds.total, rel=0.01)
    lanes = {field.name for field in fields(whole.seconds)} - {"total", "bound"}
    for lane in lanes:
        assert getattr(few.seconds, lane) == pytest.approx(getattr(whole.seconds, lane))


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("chunk", [2**14, 2**15])
def test_copies_of_every_nth_layer_hide(chunk: int, share: float) -> None:
    """Qwen2.5-7B at 32K on an H100: no step is longer for them. In one chunk tokens are all kept or
    none, and all make it wait for half a second."""
    asked = Request("Qwen2.5-7B", "32K", "h100", optimizer="none").question()
    home = replace(EVENLY, chunk=chunk, kv_home=Tier.DEVICE, boundary_inputs=Tier.DEVICE)

    def waits(schedule: Schedule) -> float:
        here, away = (
            evaluate(asked, "grouped", replace(schedule, activations=tier)).seconds for tier in Tier
        )
        assert away.evict > 0.4
        return away.total - here.total

    assert waits(replace(home, activation_save_layers=share)) == pytest.approx(0.0, abs=1e-3)
    assert waits(replace(home, activation_save_layers=1.0)) > 0.3


@pytest.mark.parametrize(
    ("groups", "slower"), crossed([(1,) * 28, (14, 14), (28,), (3,) * 9 + (1,)], [1, 20])
)
def test_an_update_beside_the_next_step_is_waited_for(groups: tuple[int, ...], slower: int) -> None:
    """By each group's first pass, with main memory as it is and so slow that nothing hides it."""
    asked = Request("Qwen2.5-7B", "32K", "h200", optimizer="host", weights="host").question()
    memory = asked.machine.host_memory / slower
    roomy = replace(asked.machine, device_bytes=2**45, host_bytes=2**45, host_memory=memory)
    asked = replace(asked, machine=roomy)
    schedule = Schedule(2**13, groups, kv_kept=True, weights=Tier.HOST)
    plan, update = evaluate(asked, "grouped", schedule), update_seconds(asked)
    prices = Prices(asked, build_program(asked.model, asked.run, schedule))
    alone, took = run_time(prices, overlap=True).total, plan.seconds
    assert took.optimizer + took.beside == pytest.approx(update)
    assert took.total == pytest.approx(alone + took.optimizer)
    assert max(alone, update) <= took.total <= (alone + update) * (1 + CLOSE)
    few, _ = composed(asked, "grouped", schedule, outlined(asked, schedule))
    assert few.seconds.total == pytest.approx(took.total, rel=0.01)
    updated, first = prices.updated(), dict[int, float]()
    assert updated[-1] == pytest.approx(update)
    for span in spans(prices, beside=True):
        i = prices.program.instructions[span.index]
        if isinstance(i, Forward):
            first.setdefault(i.layer, span.start)
    begins = [first[sum(groups[:group])] for group in range(len(groups))]
    assert all(begin >= new for begin, new in zip(begins, updated, strict=True))
    if slower > 1:  # a group that comes early waits for the next one's update, too
        assert begins[-1] == pytest.approx(update, rel=0.15)
    in_line = evaluate(replace(asked, overlap=False), "grouped", schedule).seconds
    assert in_line.beside == 0.0
    assert in_line.optimizer == pytest.approx(update)


def test_a_fold_stands_for_every_layer() -> None:
    kinds, row = "abcbcbcbcbcbcd", [(at, at + 1) for at in range(14)]
    layers, counts, sizes = fold(kinds, row)
    assert "".join(kinds[layer] for layer in layers) == "abcbcbcd"
    assert counts == (1, 1, 1, 4, 4, 1, 1, 1)
    assert sizes == (1,) * 8
    assert fold("x" * 12, [(0, 10), (10, 12)])[1:] == ((1, 1, 6, 1, 1, 1, 1), (5, 2))
    assert fold("abc", [(0, 3)])[1] == (1, 1, 1)
