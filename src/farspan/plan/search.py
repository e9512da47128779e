"""What to run: the best plan of all strategies, and the longest context of each."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from farspan.plan.alpha import with_alpha
from farspan.plan.best_first import search, something_fits
from farspan.plan.evaluate import evaluate, memory
from farspan.plan.local import refuse_layout
from farspan.plan.question import Plan, Question
from farspan.plan.reason import breaks_first, reason_of, remedy_of
from farspan.plan.space import MOST_CELLS, thriftiest, whole_space
from farspan.plan.strategies import STRATEGIES, strategy
from farspan.spec import Refused, RunSpec, Schedule

GROUPED = "grouped"
FINEST = 64  # the longest context is found to within 1 / FINEST of itself
LEAST = 1024  # tokens


def best_plan(
    question: Question, strategies: Sequence[str] | None = None, seconds: float = 8.0
) -> Plan:
    """The fastest plan that fits, the others as its alternatives.

    `strategies` are the names to choose from, None for all; `grouped` stands for the whole space
    of schedules, searched for at most about `seconds`. If nothing fits, the plan that misses by
    the least, with what breaks first and a change that would help. Raises Refused.
    """
    refuse_layout(question)
    plans = list(_plans(question, strategies or list(STRATEGIES), seconds))
    plans.sort(key=_order)
    best, others = plans[0], tuple(plans[1:])
    if not best.fits:
        return replace(
            best, reason=breaks_first(best), remedy=remedy_of(best, fits), alternatives=others
        )
    return replace(best, reason=reason_of(best, others), alternatives=others)


def longest_contexts(
    question: Question, strategies: Sequence[str] | None = None, seconds: float = 4.0
) -> dict[str, Plan]:
    """By strategy, the plan at the longest context that fits; a strategy that fits none is left
    out. Contexts are found to within 1 / 64 of themselves."""
    refuse_layout(question)
    found = {}
    for name in strategies or STRATEGIES:
        plan = _grouped(question, seconds) if name == GROUPED else _named(question, name)
        if plan is not None:
            found[name] = plan
    return found


def fits(question: Question) -> bool:
    """Does any schedule fit?"""
    return something_fits(question, thriftiest(question))


def named_schedule(question: Question, name: str) -> Schedule:
    """A strategy's schedule for this question: memo's alpha solved, and chunks that are too many
    to plan made wider."""
    tokens, layers = question.run.tokens, len(question.model.layers)
    schedule = strategy(name, layers, tokens)
    least = -(-tokens * layers // MOST_CELLS)
    if schedule.chunk < least:
        schedule = replace(schedule, chunk=least)
    return with_alpha(question, schedule) if name == "memo" else schedule


def _plans(question: Question, names: Sequence[str], seconds: float) -> Iterator[Plan]:
    for name in names:
        if name not in STRATEGIES:
            raise Refused(
                f"strategy: {name!r} is not known; expected one of {', '.join(STRATEGIES)}"
            )
        own = named_schedule(question, name)
        if name == GROUPED:
            outcome = search(question, whole_space(question), seconds)
            if outcome.best is not None:
                yield replace(outcome.best, gap=outcome.gap)
                continue
        yield evaluate(question, name, own)


def _order(plan: Plan) -> tuple[bool, float]:
    over = -min(0, plan.device.left) - min(0, plan.host.left)
    return not plan.fits, plan.seconds.total if plan.fits else over


def _at(question: Question, tokens: int) -> Question:
    return replace(question, run=RunSpec(question.run.batch, tokens))


def _named(question: Question, name: str) -> Plan | None:
    """The longest context of one strategy. What its tiers have left falls almost in a line with
    the tokens, so the next guess is where the line through the last two meets zero."""

    def left(tokens: int) -> float:
        asked = _at(question, tokens)
        device, host = memory(asked, named_schedule(asked, name))
        return min(device.left / max(1, device.limit), host.left / max(1, host.limit))

    low, high = LEAST, 0
    spare = left(low)
    if spare < 0:
        return None
    tokens, over = 64 * LEAST, 0.0
    while not high or high - low > max(LEAST, low // FINEST):
        found = left(tokens)
        if found >= 0:
            slope = (spare - found) / (tokens - low)
            low, spare = tokens, found
        else:
            high, over = tokens, found
            slope = (spare - over) / (high - low)
        guess = low + round(spare / max(slope, 1e-30))
        most = high - LEAST if high else 16 * low
        # A little short of where the line says: a guess that fits closes in from below.
        tokens = min(max(low + LEAST, guess - guess // (2 * FINEST)), most)
        tokens = max(low + 1, tokens // LEAST * LEAST)
    asked = _at(question, low)
    return evaluate(asked, name, named_schedule(asked, name))


def _grouped(question: Question, seconds: float) -> Plan | None:
    """The longest context of the whole space: the longest that bounds allow, and then as much less
    as it takes for a program to fit."""
    tokens = _longest(question)
    while tokens >= LEAST:
        asked = _at(question, tokens)
        outcome = search(asked, whole_space(asked), seconds)
        if outcome.best is not None:
            return replace(outcome.best, gap=outcome.gap)
        tokens -= max(LEAST, tokens // FINEST)
    return None


def _longest(question: Question) -> int:
    """The longest context that bounds do not rule out."""

    def may_fit(tokens: int) -> bool:
        return fits(_at(question, tokens))

    if not may_fit(LEAST):
        return 0
    low, high = LEAST, 2 * LEAST
    while may_fit(high):
        low, high = high, 2 * high
    while high - low > max(LEAST, low // FINEST):
        middle = (low + high) // 2
        low, high = (middle, high) if may_fit(middle) else (low, middle)
    return low
