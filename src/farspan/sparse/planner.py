"""Plans with page-sparse attention: the dense search's schedules, priced as what they become.

Sparse attention takes a little more memory than dense and less time, so that what fits dense nearly
always fits sparse. The order of their times is another where chunks differ: queries see all of
their own, so that dense attention gains by a wide chunk and sparse attention loses. Where the whole
space is asked for, all schedules are therefore priced with narrower chunks as well. No bound is
derived for any of it, so none is claimed."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from farspan.planner.evaluate import evaluate, size
from farspan.planner.explain import breaks_first, reason_of
from farspan.planner.request import Plan, Question, Remedy
from farspan.planner.search import SearchEffort, chosen, with_pieces
from farspan.planner.space import chunk_sizes
from farspan.program.strategies import GROUPED
from farspan.spec import RunSpec, Schedule, Sparse, UnsupportedError

WITHOUT = Remedy("without --sparse", same=False, means="exact attention")
NARROWING = 4.0  # seconds of `SearchEffort` that narrower chunks are looked for


def best_sparse(
    question: Question,
    search: Callable[[Question], Sequence[Plan]],
    remedies_for: Callable[[Plan], tuple[Remedy, ...]],
) -> Plan:
    """The best with `question.sparse` of the schedules that `search` finds for dense attention;
    where none fits, with what would help: dense attention where that fits, or `remedies_for` it.

    Raises UnsupportedError, also for several devices.
    """
    sparse = _sparse_of(question)
    dense = search(replace(question, sparse=None))
    plans = [_best_form(question, plan, sparse) for plan in dense]
    # Where nothing fits, narrower chunks do not either: the dense search went through them.
    if any(plan.strategy == GROUPED for plan in dense) and any(plan.fits for plan in plans):
        plans = [p for p in plans if p.strategy != GROUPED] + _grouped(question, plans)
    best, others = chosen(plans)
    if best.fits:
        return replace(best, reason=reason_of(best, others), alternatives=others)
    remedies = (WITHOUT,) if any(plan.fits for plan in dense) else remedies_for(best)
    return replace(best, reason=breaks_first(best), remedies=remedies, alternatives=others)


def longest_sparse(
    question: Question, search: Callable[[Question], dict[str, Plan]], least: int, finest: int
) -> dict[str, Plan]:
    """By strategy, the plan at the longest context that fits, looked for from what fits with dense
    attention downwards in steps of 1 / `finest` of it."""
    sparse, found = _sparse_of(question), {}
    for name, plan in search(replace(question, sparse=None)).items():
        tokens = plan.question.run.tokens
        while tokens >= least:
            asked = replace(question, run=RunSpec(question.run.batch, tokens))
            best = _best_form(asked, plan, sparse)
            if best.fits:
                found[name] = _grouped(asked, [best])[-1] if name == GROUPED else best
                break
            tokens -= max(least, tokens // finest)
    return found


def _best_form(question: Question, plan: Plan, sparse: Sparse) -> Plan:
    forms = _forms(plan.schedule, sparse)
    return min((evaluate(question, plan.strategy, form) for form in forms), key=Plan.rank)


def _grouped(question: Question, plans: Sequence[Plan]) -> list[Plan]:
    """Of these plans, and of them with narrower chunks, the one to choose, and last the fastest
    where that is another: every strategy is a point of the space."""
    known = [*plans, *_narrower(question, plans)]
    best, fastest = chosen(known)[0], min(known, key=Plan.rank)
    found = [best] if best is fastest else [best, fastest]
    found = [replace(plan, strategy=GROUPED) for plan in found]
    return with_pieces(found, NARROWING / 4) if best.fits else found


def _narrower(question: Question, plans: Sequence[Plan]) -> list[Plan]:
    """The plans with their chunks halved for as long as that is better, down to the finest chunk
    that is searched; the best first, since a long sequence leaves no time for all."""
    sparse, found = _sparse_of(question), list[Plan]()
    finest = max(sparse.page, min(chunk_sizes(question)))
    heap = [(plan.rank(), place, plan) for place, plan in enumerate(plans)]
    heapq.heapify(heap)
    effort = SearchEffort(NARROWING)
    while heap and not effort.is_spent:
        rank, place, plan = heapq.heappop(heap)
        half = plan.schedule.chunk // 2
        if half < finest:
            continue
        schedule = replace(plan.schedule, chunk=sparse.whole_pages(half))
        sized = size(question, schedule)
        effort.build(sized.programs)
        effort.time(sized.programs)
        narrow = evaluate(question, GROUPED, schedule, sized)
        if narrow.rank() < rank:
            found.append(narrow)
            heapq.heappush(heap, (narrow.rank(), place, narrow))
    return found


def _sparse_of(question: Question) -> Sparse:
    assert question.sparse is not None
    if question.layout.devices() > 1:
        raise UnsupportedError(
            "sparse: planned for one device so far; give --gpus 1, or leave --sparse out"
        )
    return question.sparse


def _forms(schedule: Schedule, sparse: Sparse) -> Iterator[Schedule]:
    """A dense schedule with sparse attention: as it is, its chunk rounded up to pages, and with
    attention computed again, which costs less than it did."""
    form = schedule.with_sparse(sparse)
    yield form
    if schedule.attention_save_fraction and not schedule.activation_save_fraction:
        yield replace(form, attention_save_fraction=0.0)
