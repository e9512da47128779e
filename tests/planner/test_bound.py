"""The bounds of the search against programs built and walked."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from farspan.ask import Request
from farspan.planner.bounds import ScheduleGrid, fixed, grid_of, least, peaks, seconds, tiers_of
from farspan.planner.evaluate import Sized, evaluate, size
from farspan.planner.feasibility import latest_fraction
from farspan.planner.pass_counts import SaveCounts
from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.planner.search import TransientCache
from farspan.planner.timeline import run_time
from farspan.program.builder import build_evaluation, build_program
from farspan.program.layout import Layout
from farspan.spec import (
    LayerWork,
    LossKind,
    ModelSpec,
    Objective,
    Reference,
    RunSpec,
    Schedule,
    Tier,
)
from tests.grids import examples
from tests.planner.machines import slow_machine
from tests.program.cases import dense, model_of, steps

CLOSE = 1e-9  # sums of the same numbers in another order

Step = tuple[ModelSpec, RunSpec, Schedule]


def with_work(model: ModelSpec) -> ModelSpec:
    """Every layer with products and traffic, so that every cell costs something of its own."""
    layers = tuple(
        replace(
            layer,
            work=LayerWork(
                parameters=100 + index,
                trainable=100 + index,
                products=((8, 5 + layer.kv_heads), (7, 9), (3, 11)),
                projections=1,
                forward_traffic=40 + layer.query_heads,
                backward_traffic=90,
            ),
        )
        for index, layer in enumerate(model.layers)
    )
    total = sum(layer.work.parameters for layer in layers) + 900
    return replace(model, layers=layers, parameters=total, trainable=total)


def make_grid(step: Step, **fields: object) -> tuple[Question, Schedule, ScheduleGrid]:
    """A question, its schedule with fractions in whole chunks, and its grid."""
    model, run, schedule = step
    asked = Question(
        with_work(model), run, slow_machine(), optimizer=Optimizer.NONE, dtype="float32"
    )
    asked = replace(asked, weights=schedule.weights, **fields)  # type: ignore[arg-type]
    kept, chunks = grid_of(asked, schedule).saves, grid_of(asked, schedule).cell_prices.chunks
    schedule = replace(
        schedule,
        attention_save_fraction=latest_fraction(chunks, int(kept.attention[0])),
        activation_save_fraction=latest_fraction(chunks, int(kept.graphs[0])),
    )
    return asked, schedule, grid_of(asked, schedule)


def anywhere(step: Step, on_host: bool) -> Step:
    """The step, its weights in main memory."""
    weights = Tier.HOST if on_host else Tier.DEVICE
    return step[0], step[1], replace(step[2], weights=weights)


STEPS = st.builds(anywhere, steps().map(dense), st.booleans())
# Few steps drawn have weights in main memory and several groups, whose last two stay.
STREAMED = (
    model_of(4),
    RunSpec(batch=1, tokens=64),
    Schedule(chunk=16, groups=1, weights=Tier.HOST),
)


@settings(max_examples=examples(150))
@given(STEPS, st.booleans())
@example(STREAMED, False)
def test_bounds_hold(step: Step, overlap: bool) -> None:
    question, schedule, grid = make_grid(step, overlap=overlap)
    found, tiers = peaks(grid), tiers_of(schedule)
    program = build_program(question.model, question.run, schedule)
    line = run_time(Prices(question, program, together=overlap), overlap=overlap)
    bound = seconds(grid)[0, 0, tiers]
    if overlap:
        assert bound <= line.total * (1 + CLOSE)
    else:
        assert abs(bound - line.total) <= CLOSE * line.total
    states = grid.splits.split_states[0].on_host
    assert found.host[0, 0, tiers] - states <= program.arena_bytes[Tier.HOST]
    arena = found.device[0, 0, tiers] - fixed(grid)[0, 0, 0]
    assert arena <= program.arena_bytes[Tier.DEVICE]
    floor = least(grid)
    assert (floor.device <= found.device).all()
    assert (floor.host <= found.host).all()


@settings(max_examples=examples(150))
@given(STEPS, st.sampled_from([2.0, 0.5, 0.05]), st.sampled_from([(1, 2), (2, 1), (1, 4)]))
def test_bounds_hold_where_weights_are_gathered(
    step: Step, pace: float, ranks: tuple[int, int]
) -> None:
    """Over a fast network and one that takes most of the step."""
    assume(not any(layer.kv_heads % ranks[0] for layer in step[0].layers))
    layout = Layout(ulysses=ranks[0], shards=ranks[1], fsdp=True)
    layout = Layout(data=2, fsdp=True) if step[0].is_recurrent() else layout
    question, schedule, grid = make_grid(step, overlap=True, layout=layout)
    machine = question.machine
    machine = replace(machine, peer=machine.peer * pace, network=machine.network * pace)
    question = replace(question, machine=machine)
    grid = grid_of(question, schedule)
    bound = float(seconds(grid)[0, 0, tiers_of(schedule)])
    whole = evaluate(question, "grouped", schedule, roomy(size(question, schedule)))
    assert bound <= whole.seconds.total * (1 + CLOSE)


def roomy(sized: Sized) -> Sized:
    """The programs where they fit, so that their time is simulated."""
    device, host = (replace(budget, limit=2**60) for budget in (sized.device, sized.host))
    return replace(sized, device=device, host=host)


@pytest.mark.parametrize("slower", [1, 10])
@pytest.mark.parametrize("kv_kept", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_bounds_know_the_network(kept: float, kv_kept: bool, slower: int) -> None:
    """Within 1.5% of a step whose weights, 32 layers in groups of eight, are gathered by 16 cards
    of two nodes, with a tenth of the network too. Seconds of each queue alone miss 6 to 18%."""
    asked = Request("Llama-3.1-8B", "64K", "h200", gpus=16, optimizer="none").question()
    network = asked.machine.network / slower
    machine = replace(asked.machine, device_bytes=2**45, host_bytes=2**45, network=network)
    asked = replace(asked, machine=machine)
    schedule = Schedule(
        2**15, (8,) * 4, Tier.DEVICE, kv_kept=kv_kept, kv_home=Tier.DEVICE, attention=Tier.DEVICE
    )
    kept_on_device = {"activation_save_fraction": kept, "activations": Tier.DEVICE}
    schedule = replace(schedule, **kept_on_device)  # type: ignore[arg-type]
    whole = evaluate(asked, "grouped", schedule).seconds.total
    bound = float(seconds(grid_of(asked, schedule))[0, 0, tiers_of(schedule)])
    assert 0.985 * whole <= bound <= whole * (1 + CLOSE)


LOSSES = st.just(Objective()) | st.builds(
    Objective, st.sampled_from([LossKind.DPO, LossKind.ORPO]), st.sampled_from(Reference)
)


@settings(max_examples=examples(150))
@given(STEPS, st.booleans(), LOSSES)
def test_bounds_hold_of_steps_that_are_cut(step: Step, overlap: bool, loss: Objective) -> None:
    """Of a step cut behind the head or behind its routers, and of the forward of its reference."""
    step = replace(step[0], routers=True), *step[1:]
    question, schedule, grid = make_grid(step, overlap=overlap, loss=loss)
    found, tiers = peaks(grid), tiers_of(schedule)
    what = question.model, question.run, schedule
    program = build_program(*what, cut=question.model.cut(loss))
    total = run_time(Prices(question, program, together=overlap), overlap=overlap).total
    if loss.evaluates:
        forward = Prices(question, build_evaluation(*what), together=overlap)
        total += run_time(forward, overlap=overlap).total
    bound = seconds(grid)[0, 0, tiers]
    assert bound <= total * (1 + CLOSE)
    assert overlap or bound == pytest.approx(total, rel=CLOSE)
    states = grid.splits.split_states[0].on_host
    assert found.host[0, 0, tiers] - states <= program.arena_bytes[Tier.HOST]
    arena = found.device[0, 0, tiers] - fixed(grid)[0, 0, 0]
    assert arena <= program.arena_bytes[Tier.DEVICE]
    sized = size(question, schedule)
    assert found.device[0, 0, tiers] <= sized.device.total
    assert found.host[0, 0, tiers] <= sized.host.total


@settings(max_examples=examples(60))
@given(STEPS, st.sampled_from(Optimizer), st.booleans())
def test_memory_is_never_overestimated(step: Step, optimizer: Optimizer, accumulates: bool) -> None:
    """The whole of it: gradients and the graphs of a chunk need not be there together, unless an
    earlier batch left some."""
    question, schedule, grid = make_grid(step, optimizer=optimizer, accumulates=accumulates)
    bounds, tiers = peaks(grid), tiers_of(schedule)
    sized = size(question, schedule)
    assert bounds.device[0, 0, tiers] <= sized.device.total
    assert bounds.host[0, 0, tiers] <= sized.host.total


@settings(max_examples=examples(60))
@given(
    STEPS,
    st.sampled_from(Optimizer),
    st.sampled_from([Layout(), Layout(shards=2)]),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_cells_of_a_kind_are_never_overestimated(
    step: Step, optimizer: Optimizer, layout: Layout, attention: int, graphs: int
) -> None:
    """A few chunks tell what cells hold at least, in every choice that is kept alike."""
    layout = Layout() if step[0].is_recurrent() else layout
    question, schedule, grid = make_grid(step, optimizer=optimizer, layout=layout)
    chunks, own = grid.saves.chunks, grid.saves
    pairs = np.array([[own.attention[0], own.graphs[0]], [attention, graphs]])
    counts = np.minimum(pairs, chunks)
    kept = SaveCounts(counts[:, 0], counts[:, 1], chunks)
    if kept.alike[0] != kept.alike[1]:
        kept = SaveCounts(counts[[0, 0], 0], counts[[0, 0], 1], chunks)
    both = replace(grid, saves=kept)
    device = peaks(both).device[0, 0, tiers_of(schedule)]
    beyond = TransientCache().beyond(both, 0, int(both.saves.alike[0]))
    least = TransientCache().least(both)[0, 0]
    assert device + max(beyond, least) <= size(question, schedule).device.total


@settings(max_examples=examples(30))
@given(STEPS, st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=2))
def test_choices_and_cuts_do_not_disturb_each_other(
    step: Step, pairs: list[tuple[int, int]]
) -> None:
    """Many at once have the bounds that each has alone."""
    _, _, grid = make_grid(step)
    chunks, layers = grid.saves.chunks, len(grid.cell_prices.model.layers)
    counts = np.minimum(np.array(pairs, dtype=np.int64), chunks)
    sizes = dict.fromkeys([grid.splits.sizes[0], (layers,), (1,) * layers])
    (share,) = grid.splits.shares
    splits = replace(grid.splits, sizes=tuple(sizes), shares=(share,) * len(sizes))
    together = replace(grid, splits=splits, saves=SaveCounts(counts[:, 0], counts[:, 1], chunks))
    each = seconds(together), peaks(together)
    for k, cut in enumerate(splits.sizes):
        for f in range(len(counts)):
            alone = replace(
                grid,
                cell_prices=grid_of(grid.cell_prices.question, grid.schedule).cell_prices,
                splits=replace(splits, sizes=(cut,), shares=(share,)),
                saves=SaveCounts(counts[f : f + 1, 0], counts[f : f + 1, 1], chunks),
            )
            assert np.allclose(each[0][k, f], seconds(alone)[0, 0], CLOSE, 0.0)
            assert (each[1].device[k, f] == peaks(alone).device[0, 0]).all()
            assert (each[1].host[k, f] == peaks(alone).host[0, 0]).all()
