"""Plans with page-sparse attention: the dense search's schedules, priced as what they become.

Sparse attention takes a little more memory than dense and less time, so that what fits dense nearly
always fits sparse, and in nearly the same order. No bound is derived for it, so none is claimed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from farspan.plan.price.evaluate import evaluate
from farspan.plan.question import Plan, Question
from farspan.plan.reason import breaks_first, reason_of
from farspan.plan.search.thrift import chosen
from farspan.spec import Refused, RunSpec, Schedule, Sparse

WITHOUT = "without --sparse"


def best_sparse(question: Question, search: Callable[[Question], Plan]) -> Plan:
    """The best with `question.sparse` of the schedules that `search` finds for dense attention.

    Raises Refused, also for several devices.
    """
    sparse = _sparse_of(question)
    dense = search(replace(question, sparse=None))
    plans = [_best_form(question, plan, sparse) for plan in (dense, *dense.alternatives)]
    best, others = chosen(plans)
    if best.fits:
        return replace(best, reason=reason_of(best, others), alternatives=others)
    remedy = WITHOUT if dense.fits else dense.remedy
    return replace(best, reason=breaks_first(best), remedy=remedy, alternatives=others)


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
                found[name] = best
                break
            tokens -= max(least, tokens // finest)
    return found


def _best_form(question: Question, plan: Plan, sparse: Sparse) -> Plan:
    forms = _forms(plan.schedule, sparse)
    return min((evaluate(question, plan.strategy, form) for form in forms), key=Plan.rank)


def _sparse_of(question: Question) -> Sparse:
    assert question.sparse is not None
    if question.layout.devices() > 1:
        raise Refused("sparse: planned for one device so far; give --gpus 1, or leave --sparse out")
    return question.sparse


def _forms(schedule: Schedule, sparse: Sparse) -> Iterator[Schedule]:
    """A dense schedule with sparse attention: as it is, its chunk rounded up to pages, and with
    attention computed again, which costs less than it did."""
    form = schedule.with_sparse(sparse)
    yield form
    if schedule.attention_kept and not schedule.activations_kept:
        yield replace(form, attention_kept=0.0)
