"""Plans for several devices are schedules that their ranks run."""

from dataclasses import replace

import pytest

from farspan.planner import feasibility as quick
from farspan.planner.bounds import rank_grids, tiers_of
from farspan.planner.evaluate import PAGE, evaluate, size
from farspan.planner.feasibility import slowest, taken
from farspan.planner.machines import machine
from farspan.planner.plans import best_plan
from farspan.planner.request import Plan, Question
from farspan.planner.search import TransientCache
from farspan.program.builder import build_program
from farspan.program.layout import Layout, Rank, refuse_together
from farspan.spec import RunSpec, Tier, UnsupportedError
from tests.grids import part_of
from tests.planner.test_bound import CLOSE
from tests.planner.test_ranks import LAYOUTS as PRICED
from tests.planner.test_ranks import SCHEDULES, runs
from tests.planner.test_ranks import asked as odd_question
from tests.profiles import profile_of

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
    profile = profile_of("Qwen2.5-0.5B", 7, fused=True, adds=True)
    return Question(
        profile.spec,
        RunSpec(1, TOKENS),
        replace(machine("rtx4090"), devices=layout.devices()),
        layout,
        profile=profile,
    )


def of_stages(layout: Layout) -> tuple[int, ...]:
    return {2: (3, 4), 3: (2, 2, 3), 4: (1, 2, 2, 2)}[layout.pipeline]


@pytest.mark.parametrize("layout", part_of(LAYOUTS, LAYOUTS[5]), ids=str)
def test_plans_run_on_their_layouts(layout: Layout) -> None:
    """Every alternative is a program for every rank; a pipeline's has a group for each stage."""
    asked = question(layout)
    best = best_plan(asked, seconds=0.3)
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", part_of(PRICED, *PRICED[::2]), ids=str)
def test_bounds_of_several_ranks_hold(layout: Layout) -> None:
    """Of time, of device memory with what cells hold at least, and of a machine's main memory,
    which falls short of it by padding alone."""
    asked = odd_question(layout, devices=2)
    for schedule in (s for s in SCHEDULES if s.sparse is None and runs(asked, s)):
        sized, grids = size(asked, schedule), rank_grids(asked, schedule)
        (found, devices), tiers, cells = taken(grids), tiers_of(schedule), TransientCache()
        held = [
            max(cells.beyond(grid, 0, int(grid.saves.alike[0])), cells.least(grid)[0, 0])
            for grid in grids
        ]
        each = [found[0, 0, tiers] + beyond for found, beyond in zip(devices, held, strict=True)]
        assert max(each) <= sized.device.total, schedule
        assert sized.host.total * 0.9 - PAGE <= found.host[0, 0, tiers] <= sized.host.total
        total = evaluate(asked, "grouped", schedule, sized).seconds.total
        assert slowest(grids)[0, 0, tiers] <= total * (1 + CLOSE), schedule
        device, host = quick.left(asked, schedule)
        assert device >= sized.device.left, schedule
        assert host >= sized.host.left, schedule


def test_what_a_layout_cannot_run_is_refused_by_name() -> None:
    assert kinds(best_plan(question(Layout(ring=2)), seconds=1.0), "kv") == {Tier.DEVICE}
    with pytest.raises(UnsupportedError, match="kv: a ring sends K, V from the device"):
        best_plan(question(Layout(ring=2)), ["fpdt"])
    assert kinds(
        best_plan(question(Layout(tensor=2)), seconds=1.0), "activation_save_fraction"
    ) == {0.0}
    with pytest.raises(UnsupportedError, match="activation_save_fraction: saved activations"):
        best_plan(question(Layout(tensor=2)), ["swap"])


def kinds(plan: Plan, name: str) -> set[object]:
    return {getattr(p.schedule, name) for p in (plan, *plan.alternatives)}
