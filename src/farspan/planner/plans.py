"""Choose the best plan of all strategies, and find the longest context of each."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from farspan.formatting import MOST_TOKENS
from farspan.planner import feasibility as quick
from farspan.planner.bounds import RankGrids, rank_grids, tiers_of
from farspan.planner.cell_prices import CellPrices
from farspan.planner.evaluate import (
    DENSE,
    evaluate,
    most_layers,
    outlined,
    refuse_layout,
    surely_sized,
    useful_flop,
    whole_schedule,
)
from farspan.planner.feasibility import plan_of, roomiest, states_do_not_fit
from farspan.planner.prices import rates_of
from farspan.planner.remedies import breaks_first, reason_of, remedies_of
from farspan.planner.request import (
    PINNED,
    Fit,
    Optimizer,
    Plan,
    Question,
    Remedy,
    of_whole,
    with_room,
)
from farspan.planner.search import (
    TOLERANCE,
    SearchEffort,
    chosen,
    gap,
    lightest,
    search,
    with_pieces,
)
from farspan.planner.space import MOST_CELLS, chunk_sizes, leanest, whole_space, with_alpha
from farspan.planner.states import update_seconds
from farspan.program.layout import group_ranges, refuse_together
from farspan.program.program import Program
from farspan.program.strategies import AUTO, GROUPED, STRATEGIES, strategy
from farspan.spec import RunSpec, Schedule, Sparse, Tier, UnsupportedError

FINEST = 64  # relative precision of the longest context is 1 / FINEST
LEAST = 1024  # tokens
NEAR = 0.003  # fraction of a step's time that is not worth further search
PIECES = 16  # searching the sizes of pieces takes 1 / PIECES of the seconds of the search
# With a limit on a step's time, contexts are tried until a step takes CLOSE to 1 of the limit.
CLOSE, AIM = 0.95, 0.985
TRIES = 4  # plans per schedule with a limit on time
SEARCHES = 3  # searches for a faster schedule with a limit on time
CANDIDATES = 6  # schedules examined closely for the least memory
ANY_STRATEGY = Remedy(f"--strategy {AUTO}", same=True)
MOST_NAMED = 4 * MOST_CELLS  # cells of a strategy that defines its own chunk
REMEDY_SECONDS = 1.0  # of search for the step of a remedy
CHALLENGE = 1.5  # of search for a faster placement, before it is planned
WAITS = 0.01  # of a step: with more waiting, a program of fewer layers is not exact enough


def best_plan(
    question: Question, strategies: Sequence[str] | None = None, seconds: float = 2.5
) -> Plan:
    """Return the fastest plan that fits, with the other plans as its alternatives.

    A plan slower by at most a fraction `search.TOLERANCE` is preferred if it takes less main
    memory, or as much and less of the device. If `question.open` lets the planner place states and
    weights, they are placed for the fastest training steps, updates included (`Plan.question`).

    Args:
        question: What to plan; with `question.sparse` see `best_sparse`.
        strategies: Names to choose from, None for all; `grouped` is the whole space of schedules.
        seconds: `search.SearchEffort` of searching that space, in seconds.

    Returns:
        The plan, which leaves the question's margin if any plan can. If nothing fits, the plan that
        misses by the least, with the tier that is too small and changes that would help.

    Raises:
        UnsupportedError: The layout, a strategy or the length cannot be planned.
    """
    refuse_layout(question)
    if question.run.tokens > MOST_TOKENS:
        raise UnsupportedError(
            f"context: {question.run.tokens:,} tokens are more than farspan plans; use at most "
            f"{MOST_TOKENS:,}"
        )
    found = best_placed(
        question,
        lambda placed: _best_there(placed, strategies, seconds),
        partial(_may_be_faster, names=strategies),
    )
    if found.fits or found.remedies:
        return found
    return replace(found, remedies=_remedies(question, strategies))


def _best_there(question: Question, strategies: Sequence[str] | None, seconds: float) -> Plan:
    """Return a question's best plan with fixed placement; if none fits, no remedies are tried."""
    names = strategies or list(STRATEGIES)
    if question.sparse is not None:
        return best_sparse(question, partial(_plans, names=names, seconds=seconds))
    best, others = _confirmed(question, _plans(question, names, seconds))
    if not best.fits:
        return replace(best, reason=breaks_first(best), alternatives=others)
    # The lower bound of the whole space holds for any plan.
    lowest = min(p.seconds.total / (1 + p.gap) for p in (best, *others) if p.fit is best.fit)
    off = gap(best, lowest)
    return replace(best, gap=off, reason=reason_of(best, others), alternatives=others)


# -- where optimizer states, weights and gradients live --------------------------------------------
#
# All placements that keep the results are tried, and the fastest that fits is taken. Its time
# includes the update, which gets slower when states move, while the freed device memory makes the
# rest of a step faster. A drive wears, so it is used only if nothing else fits. LoRA and rounding
# to eight or four bits are never chosen: they change the results (`remedies`).


def placements(question: Question) -> tuple[tuple[Question, ...], ...]:
    """Return a question for each open placement (tiers of states and weights), in sets. A later set
    is tried only if no plan of the earlier sets fits. Placements that move fewer bytes come
    first."""
    free, machine, layout = question.open, question.machine, question.layout
    here = replace(question, open=PINNED)
    if machine.unified:  # both tiers are one memory
        return ((here,),)
    is_open = free.weights and question.weights is Tier.DEVICE and not question.model.shares
    is_whole = layout.tensor == 1 or layout.cuts_weights()  # `refuse_together`
    may_leave = is_open and is_whole and not question.nf4

    def with_states(optimizer: Optimizer) -> tuple[Question, ...]:
        found = replace(here, optimizer=optimizer)
        moves = may_leave and optimizer in (Optimizer.HOST, Optimizer.DISK, Optimizer.NONE)
        return (found, replace(found, weights=Tier.HOST))[: 1 + moves]

    if free.apart:
        there = replace(here, optimizer=Optimizer.HOST, weights=Tier.HOST)
        return ((here,), (there,))[: 1 + may_leave]
    if not free.states or question.optimizer not in (Optimizer.ADAMW, Optimizer.HOST):
        return (with_states(question.optimizer),)
    places = [Optimizer.ADAMW, Optimizer.HOST]
    if question.weights is Tier.HOST:
        places.remove(Optimizer.ADAMW)
    near = tuple(placed for place in places for placed in with_states(place))
    can_drive = free.drive and layout.devices() == 1
    return (near, with_states(Optimizer.DISK))[: 1 + can_drive]


def best_placed(
    question: Question,
    plan_at: Callable[[Question], Plan],
    may_be_faster: Callable[[Question, Plan], bool] = lambda _, best: not best.fits,
) -> Plan:
    """Return the best plan over all placements that the question leaves open; `plan_at` plans one.
    A placement that moves more bytes wins only if it is faster by more than `search.TOLERANCE`. If
    no plan fits, the one that misses by the least wins. Once a plan fits with its margin,
    `may_be_faster` says whether another placement is worth planning."""
    best: Plan | None = None
    for group in placements(question):
        for placed in group:
            if best is not None and best.fit is Fit.ROOMY and not may_be_faster(placed, best):
                continue
            plan = plan_at(placed)
            if best is None or _is_better(plan, best):
                best = replace(plan, unmoved=best)
        if best is not None and best.fits:
            break
    assert best is not None, "a question has a placement"
    return best


def _is_better(plan: Plan, best: Plan) -> bool:
    if plan.fit is not best.fit:
        return plan.fit > best.fit
    if not plan.fits:
        return plan.rank() < best.rank()
    return plan.update_seconds() < best.update_seconds() * (1 - TOLERANCE)


def _may_be_faster(question: Question, best: Plan, names: Sequence[str] | None) -> bool:
    """Return whether a short search finds that the question's placement may beat the best plan of
    another placement. True for named strategies, which are planned quickly."""
    if names is not None and GROUPED not in names:
        return True
    roomy, update = with_room(replace(question, sparse=None)), update_seconds(question)
    least = (best.update_seconds() * (1 - TOLERANCE) - update) / question.batches + update
    known = replace(best, seconds=replace(best.seconds, total=least))
    found = search(roomy, whole_space(roomy), CHALLENGE, known, near=TOLERANCE)
    return found.best is not known


def _confirmed(question: Question, plans: Sequence[Plan]) -> tuple[Plan, tuple[Plan, ...]]:
    """Return the best plan and all others. The best is computed again, from its program of all
    chunks and layers unless a smaller one is exact enough. If it then fits less well, or is slower
    than another plan, another is chosen."""
    best, others = chosen(plans)
    if not best.fits:
        return best, others
    waits = best.seconds.exposed(overlap=question.overlap)
    if question.weights is Tier.HOST or waits > WAITS * best.seconds.total:
        whole = evaluate(question, best.strategy, best.schedule)
        whole = replace(whole, gap=gap(whole, best.seconds.total / (1 + best.gap)))
    else:
        sized = surely_sized(question, best.schedule)
        whole = replace(best, device=sized.device, host=sized.host)
    if whole.fit < best.fit and others:  # a few bytes between buffers are missing
        return _confirmed(question, [whole, *others])
    alike = min((p.seconds.total for p in others if p.fit >= whole.fit), default=math.inf)
    if whole.seconds.total > max(best.seconds.total, (1 + TOLERANCE) * alike):
        return _confirmed(question, [whole, *others])
    return whole, others


def plan_as_written(
    question: Question, name: str, schedule: Schedule, seconds: float = 6.0
) -> Plan:
    """Return the plan of a schedule that the user wrote, whether or not a better one exists. Its
    alternative is the best plan of all, called `auto`, unless both schedules are equal. If the
    written schedule does not fit, the plan names the tier that is too small and changes that would
    help. Raises UnsupportedError for a schedule that cannot run."""
    refuse_layout(question)
    refuse_together(schedule, question.layout)
    plan = best_placed(
        question,
        lambda placed: evaluate(placed, name, replace(schedule, weights=placed.weights)),
    )
    question = plan.question
    best = best_plan(question, None, seconds)
    layers, stages = len(question.model.layers), question.layout.pipeline
    ranges = [group_ranges(one, layers, stages) for one in (best.schedule, schedule)]
    # One size for all groups may be written as one number.
    is_other = ranges[0] != ranges[1] or replace(best.schedule, groups=schedule.groups) != schedule
    others = (replace(best, strategy=AUTO, alternatives=()),) if is_other else ()
    if plan.fits:
        return replace(plan, reason=_compared(plan, best), alternatives=others)
    # The remedies were tried with any strategy.
    any_too = (replace(r, options=f"{r.options} {ANY_STRATEGY.options}") for r in best.remedies)
    remedies = (ANY_STRATEGY,) if best.fits else tuple(any_too)
    return replace(plan, reason=breaks_first(plan), remedies=remedies, alternatives=others)


def _compared(plan: Plan, best: Plan) -> str:
    share = best.seconds.total / plan.seconds.total
    if not best.fits or share > 1 - TOLERANCE:
        return f"as written; {AUTO} finds nothing faster"
    return f"as written; {AUTO} takes {share:.2f} times as long"


def longest_contexts(
    question: Question,
    strategies: Sequence[str] | None = None,
    seconds: float = 4.0,
    max_step: float = math.inf,
) -> dict[str, Plan]:
    """Return, by strategy, the plan with the longest context that fits, leaves the question's
    margin and takes at most `max_step` seconds per step. Strategies without such a plan are left
    out. Contexts are found to within 1 / 64. With `max_step` they come from a few searches of
    `seconds` each; more seconds may find longer ones, by up to a fifth in tests. Plans are the
    fastest of their context, even if a slower one takes less memory."""
    refuse_layout(question)
    found: dict[str, Plan] = {}
    for placed in (one for group in placements(question) for one in group):
        plans = _longest_plans(with_room(placed), strategies, seconds, max_step)
        for name, plan in plans.items():
            tokens = plan.question.run.tokens
            if name not in found or tokens > found[name].question.run.tokens:
                found[name] = of_whole(_at(placed, tokens), plan)
    return found


def _longest_plans(
    question: Question, strategies: Sequence[str] | None, seconds: float, max_step: float
) -> dict[str, Plan]:
    found: dict[str, Plan] = {}
    if question.sparse is not None:
        dense = partial(longest_contexts, strategies=strategies, seconds=seconds)
        for name, plan in longest_sparse(question, dense, LEAST, FINEST).items():
            at = partial(_best_at, question, name, seconds / SEARCHES)
            if short := _in_time(plan, max_step, at, TRIES):
                found[name] = short
        return found
    for name in strategies or STRATEGIES:
        tokens = _longest(question, name)
        if tokens and max_step < math.inf:
            # No step is faster than its work at the datasheet's rate.
            asked = _at(question, tokens)
            peak = rates_of(question).peak * question.layout.devices()
            tokens = _tokens_in(asked, max_step * peak / useful_flop(asked), tokens)
        slow = [plan for plan in found.values() if plan.seconds.total >= CLOSE * max_step]
        if name == GROUPED and slow:  # its schedules are of this space
            known = max(slow, key=lambda plan: plan.question.run.tokens)
            found[name] = _faster(known, tokens, seconds, max_step)
            continue
        while tokens >= LEAST:
            asked = _at(question, tokens)
            schedule = _leanest_of(asked, name)
            # Of `grouped` it may be another strategy's, whose program was built already.
            same = (p for p in found.values() if (p.question, p.schedule) == (asked, schedule))
            plan = next(same, None) or evaluate(asked, name, schedule)
            if plan.fits:
                if short := _longest_in_time(plan, name, seconds, max_step):
                    found[name] = short
                break
            # Padding, which the quick look leaves out.
            tokens -= max(LEAST, tokens // (4 * FINEST))
    return found


def _longest_in_time(plan: Plan, name: str, seconds: float, most: float) -> Plan | None:
    """Return a strategy's plan for the longest context, up to that of `plan`, that takes at most
    `most` seconds per step; None if there is none."""
    question = plan.question
    if name != GROUPED:
        return _in_time(plan, most, lambda tokens: _named_at(question, name, tokens), TRIES)
    if plan.seconds.total <= most:
        return _searched(question, [plan], seconds, 0.0)[0]
    known = _in_time(plan, most, lambda tokens: _like(plan, tokens), TRIES)
    return None if known is None else _faster(known, question.run.tokens, seconds, most)


def _faster(known: Plan, longest: int, seconds: float, most: float) -> Plan:
    """Return a plan with a longer context than `known`, up to `longest`, if a search finds one of
    at most `most` seconds per step; else the fastest plan at the known context."""

    def searched(plan: Plan, part: int) -> Plan:
        return _searched(plan.question, [plan], seconds / part, 0.0)[0]

    first = searched(known, 2)

    def again(tokens: int) -> Plan:
        like = _like(first, tokens)
        if not like.fits:
            asked = like.question
            like = evaluate(asked, GROUPED, _leanest_of(asked, GROUPED))
        return searched(like, 4)

    return _in_time(first, most, again, SEARCHES, longest) or known


def _like(plan: Plan, tokens: int) -> Plan:
    return evaluate(_at(plan.question, tokens), GROUPED, plan.schedule)


def _named_at(question: Question, name: str, tokens: int) -> Plan:
    asked = _at(question, tokens)
    return evaluate(asked, name, named_schedule(asked, name, MOST_NAMED))


def _best_at(question: Question, name: str, seconds: float, tokens: int) -> Plan:
    return best_plan(_at(question, tokens), [name], seconds)


def _in_time(
    plan: Plan, most: float, at: Callable[[int], Plan], tries: int, longest: int | None = None
) -> Plan | None:
    """Return the plan with the longest context that fits and takes at most `most` seconds, or None.
    `at` plans a context of up to `longest` tokens (by default the context of `plan`)."""
    longest = longest or plan.question.run.tokens
    best: Plan | None = None
    low = 0
    for _ in range(tries):
        tokens, took = plan.question.run.tokens, plan.seconds.total
        if plan.fits and took <= most:
            low, best = tokens, plan
        else:
            longest = tokens - LEAST
        guess = _tokens_in(plan.question, AIM * most / took, longest, plan.schedule)
        guess = guess if guess > low else (low + longest) // 2 // LEAST * LEAST
        if guess <= low or CLOSE * most <= took <= most:
            break
        plan = at(guess)
    return best


def _tokens_in(question: Question, share: float, most: int, schedule: Schedule = DENSE) -> int:
    """Return the longest context, a multiple of `LEAST` up to `most`, whose step needs at most
    `share` of the question's FLOP. A step's time is nearly proportional to its FLOP."""
    work = share * useful_flop(question, schedule)
    low, high = 0, most // LEAST + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits_in = useful_flop(_at(question, middle * LEAST), schedule) <= work
        low, high = (middle, high) if fits_in else (low, middle)
    return low * LEAST


def _remedies(question: Question, strategies: Sequence[str] | None) -> tuple[Remedy, ...]:
    """Return changes with which some plan fits; only `ANY_STRATEGY` if another strategy fits."""
    if strategies is not None and fits(question):
        return (ANY_STRATEGY,)

    def seconds(changed: Question) -> float:
        names = strategies or [GROUPED]
        best = best_placed(changed, lambda there: chosen(_plans(there, names, REMEDY_SECONDS))[0])
        return best.seconds.total if best.fits else 0.0

    return remedies_of(question, partial(fits, strategies=strategies), seconds=seconds)


def fits(question: Question, strategies: Sequence[str] | None = None) -> bool:
    """Return whether any strategy, with its schedules of the least memory, fits and leaves the
    question's margin in any placement that the question leaves open."""
    if not _runs(refuse_layout, question):
        return False
    names = [GROUPED] if strategies is None else strategies
    placed = (with_room(one) for group in placements(question) for one in group)
    return any(_fitting(one, name) is not None for one in placed for name in names)


def named_schedule(question: Question, name: str, most: int = MOST_CELLS) -> Schedule:
    """Return the schedule of a named strategy for this question. `memo` saves the activations of as
    many tokens as `solve_alpha` allows. Chunks are lengthened if there are over `most` cells."""
    tokens, layers = question.run.tokens, most_layers(question)
    schedule = replace(strategy(name, layers, tokens), weights=question.weights)
    if question.layout.pipeline > 1:  # the stages are the groups
        schedule = whole_schedule(question, replace(schedule, groups=1))
    least = -(-tokens * layers // most)
    if schedule.chunk < least:
        schedule = replace(schedule, chunk=least)
    return with_alpha(question, schedule) if name == "memo" else schedule


def _plans(question: Question, names: Sequence[str], seconds: float) -> list[Plan]:
    """Return the plans of the named strategies. `grouped` is searched last, since it has to beat
    the other plans; if no schedule does, its plan is the fastest of theirs."""
    for name in names:
        if name not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise UnsupportedError(f"strategy: {name!r} is not known; expected one of {known}")
    schedules = {name: named_schedule(question, name) for name in names if name != GROUPED}
    runs = {name: s for name, s in schedules.items() if _runs(refuse_together, s, question.layout)}
    if not runs and GROUPED not in names:
        refuse_together(next(iter(schedules.values())), question.layout)
    plans = [plan_of(question, name, schedule) for name, schedule in runs.items()]
    if GROUPED in names:
        plans += _searched(question, plans, seconds)
    return plans


def _runs(refuse: Callable[..., None], *given: object) -> bool:
    try:
        refuse(*given)
    except UnsupportedError:
        return False
    return True


def _searched(
    question: Question, others: Sequence[Plan], seconds: float, tolerance: float = TOLERANCE
) -> list[Plan]:
    """Search the whole space for plans faster than `others` that leave the margin; if there are
    none, for plans that only fit. Return the best and, if another is faster but takes more bytes,
    that too. If none is found, return the schedule of the least memory, which fits if any does."""
    roomy = with_room(question)
    found = _seek(roomy, [p for p in others if p.fit is Fit.ROOMY], seconds, tolerance)
    if roomy is not question and not any(plan.fits for plan in found):
        found = _seek(question, [p for p in others if p.fits], seconds, tolerance)
    return [of_whole(question, plan) for plan in found]


def _seek(question: Question, fitting: list[Plan], seconds: float, tolerance: float) -> list[Plan]:
    """Search the whole space, starting with the fastest of the plans that fit; return the best."""
    others = tuple(fitting)
    known = min(fitting, key=Plan.rank, default=None)
    outcome = search(question, whole_space(question), seconds, known, tolerance, NEAR)
    if outcome.best is None or outcome.fastest is None:
        found = [plan_of(question, GROUPED, _leanest_of(question, GROUPED))]
    else:
        found = [lightest([outcome.best, outcome.fastest, *fitting], tolerance)]
        if not any(plan is outcome.fastest for plan in (*found, *others)):
            found.append(outcome.fastest)
    gaps = [gap(plan, outcome.lowest) if plan.fits else 0.0 for plan in found]
    found = [replace(p, strategy=GROUPED, gap=off) for p, off in zip(found, gaps, strict=True)]
    return with_pieces(found, seconds / PIECES) if found[0].fits else found


def _at(question: Question, tokens: int) -> Question:
    return replace(question, run=RunSpec(question.run.batch, tokens))


def _longest(question: Question, name: str) -> int:
    """Return the longest context of one strategy that fits, or 0. The context doubles until it does
    not fit, then is bisected; with sparse attention it shrinks from the longest dense context."""
    if question.sparse is not None:
        tokens = _longest(replace(question, sparse=None), name)
        while tokens >= LEAST and _fitting(_at(question, tokens), name) is None:
            tokens -= max(LEAST, tokens // FINEST)
        return tokens if tokens >= LEAST else 0
    known: Schedule | None = None

    def fits_at(tokens: int) -> bool:
        nonlocal known
        if tokens > MOST_TOKENS:
            return False
        asked = _at(question, tokens)
        # A schedule that fits at another length often fits here: then no other is needed.
        is_free = name == GROUPED and known is not None and known.chunk <= tokens
        if is_free and known is not None and quick.fits(asked, known):
            return True
        found = _fitting(asked, name)
        known = found or known
        return found is not None

    if not fits_at(LEAST):
        return 0
    low, high = LEAST, 2 * LEAST
    while fits_at(high):
        low, high = high, 2 * high
    while high - low > max(LEAST, low // FINEST):
        middle = (low + high) // 2
        low, high = (middle, high) if fits_at(middle) else (low, middle)
    return low


def _fitting(question: Question, name: str) -> Schedule | None:
    """Return one of the strategy's schedules of least memory that fits, or None. With sparse
    attention, it fits with dense attention and, by a program of a few chunks, with sparse."""
    if states_do_not_fit(question):
        return None
    dense = replace(question, sparse=None)
    found = (s for s in _candidates(dense, name) if quick.fits(dense, s))
    if question.sparse is not None:
        forms = (schedule.with_sparse(question.sparse) for schedule in found)
        found = (form for form in forms if outlined(question, form).fits)
    return next(found, None)


def _leanest_of(question: Question, name: str) -> Schedule:
    """Return the schedule of a strategy that takes the least memory."""
    candidates = _candidates(question, name)
    if len(candidates) == 1:
        return candidates[0]
    return max(candidates, key=lambda schedule: min(quick.left(question, schedule)))


def _candidates(question: Question, name: str) -> list[Schedule]:
    if name != GROUPED:
        return [named_schedule(question, name, MOST_NAMED)]
    candidates = roomiest(question, leanest(question), CANDIDATES)
    # Every strategy is a point of the space; some have finer chunks than the search.
    others = [other for other in STRATEGIES if other != GROUPED]
    named = [named_schedule(question, other, MOST_NAMED) for other in others]
    return candidates + [s for s in named if _runs(refuse_together, s, question.layout)]


# -- with page-sparse attention --------------------------------------------------------------------
#
# The dense search's schedules, priced with sparse attention. Sparse attention takes a little more
# memory than dense and less time, so a schedule that fits dense nearly always fits sparse. Their
# order by time differs where chunks differ: queries see all keys of their own chunk, so dense
# attention gains by a wide chunk and sparse attention loses. A search of the whole space therefore
# also prices narrower chunks that may win by a lower bound of their time. No bound is derived for
# the space of sparse plans, so none is claimed.

WITHOUT = Remedy("without --sparse", same=False, means="exact attention")
Priced = dict[tuple[int, int, int], CellPrices]  # by chunk, kv_block and loss_chunk_size
NARROWING = 4.0  # seconds of `SearchEffort` for narrower chunks


def best_sparse(
    question: Question,
    search: Callable[[Question], Sequence[Plan]],
) -> Plan:
    """Return the best plan with the sparse attention of `question.sparse`, for the schedules that
    `search` finds with dense attention. If no sparse plan fits, the returned plan says so; if a
    dense plan would fit, the remedy is dense attention.

    Raises UnsupportedError if the layout has several devices.
    """
    sparse = _sparse_of(question)
    dense = search(replace(question, sparse=None))
    priced: Priced = {}
    plans = [_best_form(question, plan, sparse, priced) for plan in dense]
    # If nothing fits, narrower chunks do not either: the dense search tried them.
    if any(plan.strategy == GROUPED for plan in dense) and any(plan.fits for plan in plans):
        plans = [p for p in plans if p.strategy != GROUPED] + _grouped(question, plans, priced)
    best, others = _confirmed(question, plans)
    if best.fits:
        return replace(best, reason=reason_of(best, others), alternatives=others)
    remedies = (WITHOUT,) * any(plan.fits for plan in dense)
    return replace(best, reason=breaks_first(best), remedies=remedies, alternatives=others)


def longest_sparse(
    question: Question, search: Callable[[Question], dict[str, Plan]], least: int, finest: int
) -> dict[str, Plan]:
    """Return, for each strategy, the plan with sparse attention at the longest context that fits.
    The first try is the longest dense context; each later one is shorter by 1 / `finest`."""
    sparse, found = _sparse_of(question), {}
    for name, plan in search(replace(question, sparse=None)).items():
        tokens = plan.question.run.tokens
        while tokens >= least:
            asked = replace(question, run=RunSpec(question.run.batch, tokens))
            priced: Priced = {}
            best = _best_form(asked, plan, sparse, priced)
            if best.fits:
                found[name] = _grouped(asked, [best], priced)[-1] if name == GROUPED else best
                break
            tokens -= max(least, tokens // finest)
    return found


def _best_form(question: Question, plan: Plan, sparse: Sparse, priced: Priced) -> Plan:
    forms = _sparse_forms(plan.schedule, sparse)
    plans = (_composed(question, plan.strategy, form, priced)[0] for form in forms)
    return min(plans, key=Plan.rank)


def _composed(
    question: Question, strategy: str, schedule: Schedule, priced: Priced
) -> tuple[Plan, tuple[Program, ...]]:
    """Return the schedule's plan, and all programs built for it."""
    sized, like = outlined(question, schedule), _grids(question, schedule, priced)[-1].cell_prices
    plan, timed = quick.composed(question, strategy, schedule, sized, like)
    return plan, (*sized.programs, *timed)


def _grids(question: Question, schedule: Schedule, priced: Priced) -> RankGrids:
    """Return the schedule's bounds, with the seconds of cells that were priced before."""
    key = schedule.chunk, schedule.kv_block, schedule.loss_chunk_size
    grids = rank_grids(question, schedule, priced.get(key))
    priced[key] = grids[-1].cell_prices
    return grids


def _grouped(question: Question, plans: Sequence[Plan], priced: Priced) -> list[Plan]:
    """Return the best of these plans and of their copies with shorter chunks, then the fastest if
    it is another plan. All are named `grouped`, whose space contains every strategy."""
    known = [*plans, *_narrower(question, plans, priced)]
    best, fastest = chosen(known)[0], min(known, key=Plan.rank)
    found = [best] if best is fastest else [best, fastest]
    found = [replace(plan, strategy=GROUPED) for plan in found]
    return with_pieces(found, NARROWING / 4) if best.fits else found


def _narrower(question: Question, plans: Sequence[Plan], priced: Priced) -> list[Plan]:
    """Return copies of the plans with chunks halved for as long as the plan gets better, down to
    the search's shortest chunk. The best plans come first, since time may not suffice for all."""
    found, effort = list[Plan](), SearchEffort(NARROWING)
    heap = [(plan.rank(), place, plan) for place, plan in enumerate(plans)]
    heapq.heapify(heap)
    roomy = (plan.seconds.total for plan in plans if plan.fit is Fit.ROOMY)
    fastest = min(roomy, default=math.inf)
    while heap and not effort.is_spent:
        rank, place, plan = heapq.heappop(heap)
        schedule = _half(plan, fastest * (1 + TOLERANCE), priced)
        if schedule is None:
            continue
        narrow, built = _composed(question, GROUPED, schedule, priced)
        effort.build(built)
        effort.time(built)
        if narrow.rank() < rank:
            found.append(narrow)
            heapq.heappush(heap, (narrow.rank(), place, narrow))
            if narrow.fit is Fit.ROOMY:
                fastest = min(fastest, narrow.seconds.total)
    return found


def _half(plan: Plan, most: float, priced: Priced) -> Schedule | None:
    """Return the plan's schedule with its chunk halved, once or until a lower bound of its seconds
    is at most `most`. None if no chunk reaches that, or if the bound shows no better plan."""
    question, schedule = plan.question, plan.schedule
    sparse, half = _sparse_of(question), schedule.chunk // 2
    while half >= max(sparse.page, min(chunk_sizes(question))):
        narrow = replace(schedule, chunk=sparse.whole_pages(half))
        bound = quick.slowest(_grids(question, narrow, priced))[..., tiers_of(narrow)].min()
        if bound <= most:
            return narrow
        if plan.fit is Fit.ROOMY and bound >= plan.seconds.total:
            break
        half //= 2
    return None


def _sparse_of(question: Question) -> Sparse:
    assert question.sparse is not None
    if question.layout.devices() > 1:
        raise UnsupportedError(
            "sparse: planned for one device so far; give --gpus 1, or leave --sparse out"
        )
    return question.sparse


def _sparse_forms(schedule: Schedule, sparse: Sparse) -> Iterator[Schedule]:
    """Yield a dense schedule's sparse forms: one with the chunk rounded up to whole pages; and one
    that also recomputes attention, which costs less than for dense attention."""
    form = schedule.with_sparse(sparse)
    yield form
    if schedule.attention_save_fraction and not schedule.activation_save_fraction:
        yield replace(form, attention_save_fraction=0.0)
