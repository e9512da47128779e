"""The search against trying everything."""

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.planner.bounds import TIERS
from farspan.planner.evaluate import evaluate
from farspan.planner.feasibility import latest_fraction
from farspan.planner.request import Optimizer, Plan, Question
from farspan.planner.search import TOLERANCE, search
from farspan.planner.space import Space, even, leanest, tapered, whole_space
from farspan.program.layout import chunk_ranges
from farspan.spec import ModelSpec, RunSpec, Schedule
from tests.grids import part_of
from tests.planner.machines import slow_machine
from tests.planner.test_bound import with_work
from tests.program.cases import model_of, models

TOKENS = 96
TRIED = 40  # schedules of a space, where there are too many to try all
SPACE = Space(
    chunks=(32,),
    splits=((1, 1, 1), (1, 2)),
    attention=(0.0, 0.3, 1.0),
    activations=(0.0, 1.0),
    shares=(1 / 3, 1.0),
)


def question(device: int, host: int, **fields: object) -> Question:
    machine = slow_machine(device_bytes=device, host_bytes=host, reserve=0)
    asked = Question(
        with_work(model_of(3)),
        RunSpec(1, TOKENS),
        machine,
        optimizer=Optimizer.NONE,
        dtype="float32",
    )
    return replace(asked, **fields)  # type: ignore[arg-type]


def schedules(asked: Question, space: Space) -> list[Schedule]:
    """Every schedule of the space, fractions and tiers as well."""
    found = []
    for base in space.schedules():
        own = chunk_ranges(asked.run.tokens, base.chunk)
        count = len(own)
        for kept, graphs, tiers in product(space.attention, space.activations, TIERS):
            x, attention, activations = tiers
            schedule = replace(
                base,
                boundary_inputs=x,
                attention=attention,
                activations=activations,
                attention_save_fraction=latest_fraction(own, round(kept * count)),
                activation_save_fraction=latest_fraction(own, round(graphs * count)),
            )
            found.append(schedule)
    return found


@cache
def all_plans(overlap: bool) -> tuple[Plan, ...]:
    """Every schedule of SPACE on a machine where all fit."""
    asked = question(2**40, 2**40, overlap=overlap)
    return tuple(evaluate(asked, "grouped", schedule) for schedule in schedules(asked, SPACE))


@pytest.fixture(scope="module")
def amounts() -> list[tuple[int, int]]:
    """Device and host bytes of the schedules, at several places of their range."""
    plans = all_plans(True)
    device = sorted(plan.device.total for plan in plans)
    host = sorted(plan.host.total for plan in plans)
    places = (0.02, 0.4, 0.9)
    return [
        (device[int(d * (len(device) - 1))], host[int(h * (len(host) - 1))])
        for d, h in product(places, places)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tolerance", "overlap", "unified"),
    part_of(
        product([TOLERANCE, 0.3], [False, True], [False, True]),
        *((TOLERANCE, True, False), (0.3, True, False), (0.3, True, True)),
    ),
)
def test_nothing_as_fast_takes_less(
    amounts: list[tuple[int, int]], tolerance: float, overlap: bool, unified: bool
) -> None:
    preferred = 0
    for device, host in amounts[::2]:
        asked = question(device, device + host if unified else host, overlap=overlap)
        asked = replace(asked, machine=replace(asked.machine, unified=unified))
        fitting = [
            plan
            for plan in all_plans(overlap)
            if (
                plan.device.total + plan.host.total <= device + host
                if unified
                else plan.device.total <= device and plan.host.total <= host
            )
        ]
        if not fitting:
            continue
        least = min(plan.seconds.total for plan in fitting)
        near = [plan for plan in fitting if plan.seconds.total <= least * (1 + tolerance)]
        bytes_ = min(footprint(plan) for plan in near)
        outcome = search(asked, SPACE, 60.0, tolerance=tolerance)
        assert outcome.best is not None
        assert outcome.fastest is not None
        assert outcome.fastest.seconds.total == pytest.approx(least, rel=1e-9)
        assert outcome.lowest == pytest.approx(least, rel=1e-9)
        assert footprint(outcome.best) == bytes_
        assert outcome.best.seconds.total <= least * (1 + tolerance) * (1 + 1e-9)
        assert outcome.best.seconds.total <= outcome.lowest * (1 + outcome.gap) * (1 + 1e-9)
        assert outcome.gap <= tolerance * (1 + 1e-6)
        assert outcome.simulated < len(all_plans(overlap)) / 2
        preferred += outcome.best is not outcome.fastest
    assert preferred or tolerance == TOLERANCE


def footprint(plan: Plan) -> tuple[int, int]:
    """What of schedules that are equally fast is preferred where it is less."""
    return plan.host.total, plan.device.total


@pytest.mark.slow
@settings(max_examples=12)
@given(
    models(),
    st.integers(20, 200),
    st.randoms(use_true_random=False),
    st.sampled_from(Optimizer),
    st.booleans(),
    st.booleans(),
)
def test_no_optimum_is_lost(
    model: ModelSpec,
    tokens: int,
    random: Random,
    optimizer: Optimizer,
    overlap: bool,
    unified: bool,
) -> None:
    """Of any model, with ragged chunks: no schedule of the space that fits is faster than what is
    found. Memory is between what the smallest and the largest of those tried take."""
    layers = len(model.layers)
    cuts = tuple(dict.fromkeys([even(layers, 1), even(layers, max(1, layers - 1))]))
    space = Space((tokens // 3 + 1, tokens), cuts, (0.0, 0.7, 1.0), (0.0, 0.4, 1.0))
    asked = question(2**40, 2**40, model=with_work(model), optimizer=optimizer, overlap=overlap)
    # An update on the host costs other seconds where host and device are one memory.
    machine = replace(asked.machine, unified=unified)
    asked = replace(asked, run=RunSpec(1, tokens), machine=machine)
    tried = random.sample(schedules(asked, space), TRIED)
    plans = [evaluate(asked, "grouped", schedule) for schedule in tried]

    def between(amounts: list[int]) -> int:
        return random.randint(min(amounts), max(amounts))

    device = between([plan.device.total for plan in plans])
    host = between([plan.host.total for plan in plans])
    both = between([plan.device.total + plan.host.total for plan in plans])
    limited = replace(machine, device_bytes=device, host_bytes=both if unified else host)
    asked = replace(asked, machine=limited)
    fitting = [
        plan.seconds.total
        for plan in plans
        if (
            plan.device.total + plan.host.total <= both
            if unified
            else plan.device.total <= device and plan.host.total <= host
        )
    ]
    outcome = search(asked, space, seconds=60.0)
    if fitting:
        assert outcome.best is not None
        assert outcome.gap == 0.0
        assert outcome.best.seconds.total <= min(fitting) * (1 + 1e-9)
    if outcome.best is not None:
        assert evaluate(asked, "grouped", outcome.best.schedule).fits


def test_a_search_cut_short_says_how_far_it_may_be_off() -> None:
    asked = question(2**40, 2**40, overlap=True)
    plans = sorted(all_plans(True), key=lambda plan: plan.seconds.total)
    slow = replace(plans[len(plans) // 2], question=asked)
    outcome = search(asked, SPACE, seconds=0.0, best=slow)
    assert outcome.best is slow
    assert outcome.gap > 0.0
    assert slow.seconds.total * (1 - outcome.gap) <= plans[0].seconds.total * (1 + 1e-9)


@pytest.mark.parametrize("layers", [5, 7])
def test_tapered_cuts_have_the_lowest_level(layers: int) -> None:
    model = model_of(layers)

    def level(cut: tuple[int, ...]) -> int:
        own = model.layers[0].kv_elements() * (model.element_bytes + model.accumulate_bytes())
        boundary = model.hidden * model.element_bytes
        # Its input and the boundaries below; its output's gradient, unless the head just made it.
        last = len(cut) - 1
        return max((i + (i != last)) * boundary + size * own for i, size in enumerate(cut))

    for groups in range(1, layers + 1):
        found = tapered(model, groups)
        assert len(found) == groups
        assert sum(found) == layers
        best = min(level(cut) for cut in compositions(layers, groups))
        assert level(found) == best


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write `total` as a sum of `parts` positive numbers, in order."""
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(1, total - parts + 2)
        for rest in compositions(total - first, parts - 1)
    ]


def test_the_space_is_not_empty_for_odd_questions() -> None:
    for tokens in (1, 5, 1025):
        asked = question(2**40, 2**40, run=RunSpec(1, tokens))
        assert whole_space(asked).chunks[-1] == tokens
        assert leanest(asked).attention == (0.0,)
        assert search(asked, whole_space(asked), 20.0).best is not None
