"""MEMO's alpha against trying every number of chunks."""

from dataclasses import replace

import pytest

from farspan.planner.evaluate import evaluate
from farspan.planner.request import Optimizer, Plan, Question
from farspan.planner.space import Alpha, solve_alpha, with_alpha
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import RunSpec, Schedule
from tests.planner.machines import slow_machine
from tests.planner.test_bound import with_work
from tests.program.cases import model_of

TOKENS, LAYERS = 1024, 8


def question(overlap: bool = True, **machine: object) -> Question:
    fields: dict[str, object] = {"device_bytes": 2**40, "host_bytes": 2**40, "reserve": 0}
    return Question(
        with_work(model_of(LAYERS)),
        RunSpec(1, TOKENS),
        slow_machine(**fields | machine),
        optimizer=Optimizer.NONE,
        dtype="float32",
        overlap=overlap,
    )


def memo() -> Schedule:
    return strategy("memo", LAYERS, TOKENS)


def tried(asked: Question) -> list[Plan]:
    """Every alpha on the grid of chunks."""
    chunks = -(-TOKENS // memo().chunk)
    schedules = [replace(memo(), activation_save_fraction=k / chunks) for k in range(chunks + 1)]
    return [evaluate(asked, "memo", schedule) for schedule in schedules]


@pytest.mark.parametrize("rate", [1e5, 3e5, 1e6, 3e6, 1e7])
def test_alpha_is_nearly_as_fast_as_the_best(rate: float) -> None:
    asked = question(fetch_together=rate, evict_together=rate, host_memory=1e12)
    best = min(plan.seconds.total for plan in tried(asked))
    found = evaluate(asked, "memo", with_alpha(asked, memo()))
    # A layer's swap may also hide behind the layers after it, which the program does not count on;
    # and the last layer needs none.
    assert found.seconds.total <= best * 1.05


@pytest.mark.parametrize("rate", [1e4, 1e7])
def test_in_line_alpha_is_all_or_nothing(rate: float) -> None:
    asked = question(overlap=False, fetch=rate, evict=rate, host_memory=1e12)
    found = evaluate(asked, "memo", with_alpha(asked, memo()))
    best = min(plan.seconds.total for plan in tried(asked))
    # Which chunks' K, V projections fall away differs by a chunk: less than 1e-3 of a step.
    assert found.seconds.total <= best * 1.001


def binding_of(alpha: Alpha) -> str:
    """The constraint that holds alpha down; empty when nothing does."""
    name = min(alpha.limits, key=lambda key: alpha.limits[key])
    return name if alpha.limits[name] < 1.0 else ""


def test_host_memory_is_shared_by_the_ranks_of_a_node() -> None:
    sizes = [plan.host.total for plan in tried(question())]
    middle = (min(sizes) + max(sizes)) // 2
    one = question(host_bytes=middle, fetch_together=1e9, evict_together=1e9)
    alpha = solve_alpha(one, memo())
    assert binding_of(alpha) == "host memory"
    chunks = -(-TOKENS // memo().chunk)
    fitting = [k / chunks for k, plan in enumerate(tried(one)) if plan.host.left >= 0]
    assert max(fitting) <= alpha.value + 1 / chunks
    assert evaluate(one, "memo", with_alpha(one, memo())).host.left >= 0
    node = replace(one.machine, devices=4)
    shared = replace(one, machine=node, layout=Layout(shards=4))
    # Four ranks hold a quarter of the tokens each, and have a quarter of the memory. (Ranks that
    # exchange heads keep attention's output by tokens, too.)
    assert solve_alpha(shared, memo()).limits["host memory"] == pytest.approx(
        alpha.limits["host memory"], abs=1 / chunks
    )


@pytest.mark.parametrize(
    ("slow", "fast", "binding"),
    [
        ("fetch_together", "evict_together", "backward"),
        ("evict_together", "fetch_together", "forward"),
    ],
)
def test_either_direction_of_the_link_may_bind(slow: str, fast: str, binding: str) -> None:
    # Somewhere between a link that carries nothing in time and one that carries all.
    rates = [10.0 ** (power / 2) for power in range(2, 14)]
    machines = [{slow: rate, fast: 1e12, "host_memory": 1e15} for rate in rates]
    found = [solve_alpha(question(**machine), memo()) for machine in machines]
    values = [alpha.value for alpha in found]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.0, 1.0)
    assert {binding_of(alpha) for alpha in found} == {binding, ""}


def test_no_device_memory_for_the_rounding_buffers_is_no_alpha() -> None:
    asked = question(device_bytes=10_000)
    assert solve_alpha(asked, memo()).value == 0.0
    assert binding_of(solve_alpha(asked, memo())) == "rounding buffers"
