"""Plans leave room on a device and in main memory where any can, and say so where none does."""

from dataclasses import replace

import pytest

from farspan.planner.evaluate import evaluate
from farspan.planner.machines import with_main_memory
from farspan.planner.plans import best_plan, fits, longest_contexts, named_schedule, plan_as_written
from farspan.planner.request import SHARE, Fit, Margin, Plan, Question, margin_of, with_room
from farspan.spec import UnsupportedError
from tests.planner.machines import slow_machine
from tests.planner.test_plans import question

GIB = 2**30
SECONDS = 0.5


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("3GiB", 3 * GIB),
        (2 * GIB, 2 * GIB),
        ("0", 0),
        (0, 0),
        ("5%", int(0.05 * 100 * GIB) - GIB),
        ("0.5 %", 0),
        (None, int(SHARE * 100 * GIB) - GIB),
    ],
)
def test_a_share_counts_what_the_reserve_takes_and_bytes_do_not(
    given: str | int | None, size: int
) -> None:
    made = slow_machine(device_bytes=100 * GIB, reserve=GIB)
    assert margin_of(given, made).device == size


@pytest.mark.parametrize(
    ("given", "size"),
    [("3GiB", 3 * GIB), ("25%", 15 * GIB), ("5%", 0), ("0", 0), (None, 0)],
)
def test_of_main_memory_it_is_beside_the_reserve(given: str | None, size: int) -> None:
    """Which is enough where nothing is asked for."""
    made = with_main_memory(slow_machine(), 100 * GIB)
    assert (made.host_bytes, made.host_reserve) == (90 * GIB, 10 * GIB)
    assert margin_of(given, made).host == size


@pytest.mark.parametrize("given", ["much", "100%", "-5%", "24", -1, "5 % of it"])
def test_what_is_no_size_is_refused(given: str | int) -> None:
    with pytest.raises(UnsupportedError, match=r"^margin: expected bytes such as 3GiB"):
        margin_of(given, slow_machine())


def test_of_one_memory_it_is_taken_once() -> None:
    made = slow_machine(unified=True)
    assert margin_of(None, made) == Margin()
    assert margin_of("5%", made) == Margin(0, int(0.05 * made.host_bytes))


def of_bytes(plan: Plan, more: int, margin: int, asked: Question) -> Question:
    """The question on a device with so much more than a plan takes."""
    here = replace(asked.machine, device_bytes=plan.device.total + more)
    return replace(asked, machine=here, margin=Margin(margin))


@pytest.fixture(scope="module")
def thrifty() -> Plan:
    """What takes the least of the device."""
    asked = question(32 * 1024)
    return best_plan(
        replace(asked, machine=replace(asked.machine, device_bytes=GIB)), None, SECONDS
    )


@pytest.fixture(scope="module")
def oomb() -> Plan:
    asked = question(32 * 1024)
    return evaluate(asked, "oomb", named_schedule(asked, "oomb"))


@pytest.mark.parametrize(("more", "fit"), [(GIB, Fit.ROOMY), (GIB - 1, Fit.TIGHT), (-1, Fit.NOT)])
def test_a_named_schedule_may_use_the_margin_to_the_byte(oomb: Plan, more: int, fit: Fit) -> None:
    asked = of_bytes(oomb, more, GIB, question(32 * 1024))
    plan = best_plan(asked, ["oomb"], SECONDS)
    assert (plan.fit, plan.fits, plan.tight) == (fit, fit is not Fit.NOT, fit is Fit.TIGHT)
    assert plan.device.limit == oomb.device.total + more
    written = plan_as_written(asked, "oomb", oomb.schedule, SECONDS)
    assert written.fit is fit
    data = plan.to_json()
    assert (data["fits"], data["tight"], data["margin"]) == (
        plan.fits,
        plan.tight,
        {"device": GIB, "host": 0},
    )
    assert ("fits, tightly: " in str(plan)) is plan.tight
    assert ("tight: 1.0 GiB of a device should stay free" in str(plan)) is plan.tight


def test_the_planner_leaves_it_where_it_can() -> None:
    """And plans as on a device that is smaller by it."""
    asked = question(32 * 1024)
    free = best_plan(asked, None, SECONDS)
    tight = replace(asked, margin=Margin(free.device.left + GIB))
    plan = best_plan(tight, None, SECONDS)
    assert plan.fit is Fit.ROOMY
    assert plan.device.left >= tight.margin.device
    assert plan.device.limit == asked.machine.device_bytes
    assert plan.question == tight
    assert with_room(tight).machine.device_bytes == asked.machine.device_bytes - tight.margin.device
    order = [other.fit for other in plan.alternatives]
    assert order == sorted(order, reverse=True)
    assert all(other.device.limit == plan.device.limit for other in plan.alternatives)


def test_where_none_leaves_it_the_best_is_tight(thrifty: Plan) -> None:
    plan = best_plan(of_bytes(thrifty, GIB // 64, GIB, question(32 * 1024)), None, SECONDS)
    assert plan.fit is Fit.TIGHT
    assert "no plan leaves the margin free" in plan.reason
    assert not plan.remedy


@pytest.mark.parametrize(("more", "helps"), [(3 * GIB, True), (GIB // 2, False)])
def test_what_helps_leaves_it(thrifty: Plan, more: int, helps: bool) -> None:
    """A change with which a plan would be tight is not said to help."""
    asked = of_bytes(thrifty, more, GIB, question(32 * 1024))
    assert fits(asked) is helps
    assert fits(replace(asked, margin=Margin()))


def test_main_memory_is_left_too() -> None:
    """By the plan, by the longest context, and by what is said to help."""
    asked = question(1024)
    free = longest_contexts(asked, ["offload"], SECONDS)["offload"]
    size = free.host.total + GIB
    here = replace(asked, machine=replace(asked.machine, host_bytes=size))
    less = longest_contexts(replace(here, margin=Margin(host=size // 2)), ["offload"], SECONDS)
    plan = less["offload"]
    assert plan.fit is Fit.ROOMY
    assert plan.host.limit == size
    assert plan.question.run.tokens < free.question.run.tokens
    tight = replace(here, run=free.question.run, margin=Margin(host=GIB + 1))
    found = best_plan(tight, ["offload"], SECONDS)
    assert (found.fit, found.host.left) == (Fit.TIGHT, GIB)
    assert "fits, tightly: " in str(found)
    assert "tight: 1.0 GiB of main memory should stay free" in str(found)
    assert not fits(tight, ["offload"])
