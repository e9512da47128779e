"""Plans for several devices are schedules that their ranks run."""

from dataclasses import replace

import pytest

from farspan.plan.build import build_program
from farspan.plan.cell.describe import model_spec
from farspan.plan.layout import Layout, Rank, refuse_together
from farspan.plan.model.catalog import find_architecture
from farspan.plan.price.evaluate import arena_parts, evaluate, walk
from farspan.plan.price.machines import machine
from farspan.plan.question import Plan, Question
from farspan.plan.search.plans import best_plan, named_schedule
from farspan.spec import Refused, RunSpec, Schedule, Tier
from tests.grids import part_of

TOKENS = 64 * 1024
LAYOUTS = [
    Layout(pipeline=3),
    Layout(pipeline=4, fsdp=False),
    Layout(ring=2),
    Layout(tensor=2),
    Layout(ulysses=2, data=2),
    Layout(ulysses=2, shards=2, pipeline=2),
]


def question(layout: Layout) -> Question:
    whole = find_architecture("Qwen2.5-0.5B")
    architecture = replace(whole, blocks=whole.blocks[:7])
    return Question(
        model_spec(architecture),
        RunSpec(1, TOKENS),
        replace(machine("rtx4090"), devices=layout.devices()),
        layout,
        architecture=architecture,
    )


def of_stages(layout: Layout) -> tuple[int, ...]:
    return {2: (3, 4), 3: (2, 2, 3), 4: (1, 2, 2, 2)}[layout.pipeline]


@pytest.mark.parametrize("layout", part_of(LAYOUTS, LAYOUTS[0], LAYOUTS[2], LAYOUTS[5]), ids=str)
def test_plans_run_on_their_layouts(layout: Layout) -> None:
    """Every alternative is a program for every rank; a pipeline's has a group for each stage."""
    asked = question(layout)
    best = best_plan(asked, seconds=1.0)
    assert best.fits
    for plan in (best, *best.alternatives):
        refuse_together(plan.schedule, layout)
        if layout.pipeline > 1:
            assert plan.schedule.groups == of_stages(layout), plan.strategy
        if plan.fits:
            for number in range(layout.devices()):
                build_program(asked.model, asked.run, plan.schedule, Rank(layout, number))
    again = evaluate(asked, best.strategy, best.schedule)
    assert (again.device, again.host) == (best.device, best.host)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=3),
        Layout(pipeline=2),
        Layout(ulysses=2),
        Layout(shards=2),
        Layout(ulysses=2, shards=2, data=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["grouped", "fpdt", "memo", "swap"])
def test_a_plan_takes_what_the_fullest_rank_takes(layout: Layout, name: str) -> None:
    """Of every kind of buffer to the byte, but for slots and what the addresses leave unused."""
    asked = question(layout)
    schedule = replace(named_schedule(asked, name), activations_kept=0.5)
    plan = evaluate(asked, name, schedule)
    assert layout.pipeline == 1 or len(walk(asked, plan.schedule).program.groups) == 1
    last = layout.devices() - 1
    program = build_program(asked.model, asked.run, plan.schedule, Rank(layout, last))
    for tier, budget in ((Tier.DEVICE, plan.device), (Tier.HOST, plan.host)):
        for part, size in arena_parts(program, tier).items():
            if part not in ("placement", "slots"):
                assert budget.parts.get(part, 0) == size, (tier, part)


def test_what_a_layout_cannot_run_is_refused_by_name() -> None:
    assert kinds(best_plan(question(Layout(ring=2)), seconds=1.0), "kv") == {Tier.DEVICE}
    with pytest.raises(Refused, match="kv: a ring sends K, V from the device"):
        best_plan(question(Layout(ring=2)), ["fpdt"])
    assert kinds(best_plan(question(Layout(tensor=2)), seconds=1.0), "activations_kept") == {0.0}
    with pytest.raises(Refused, match="activations_kept: with tensor"):
        best_plan(question(Layout(tensor=2)), ["swap"])


def kinds(plan: Plan, name: str) -> set[object]:
    return {getattr(p.schedule, name) for p in (plan, *plan.alternatives)}


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(Refused, match="8 stages for 7 layers"):
        best_plan(question(Layout(pipeline=8)))
    with pytest.raises(Refused, match="one group each"):
        build_program(
            question(Layout()).model, RunSpec(1, 9), Schedule(groups=(3, 4)), Rank(LAYOUTS[0])
        )
