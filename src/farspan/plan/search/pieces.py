"""Sizes of pieces that the search leaves as they are: `head_tokens` and `kv_block`.

Each would double the space. Both are nearly apart from the rest of a schedule: a larger piece of
the head reads and writes the gradient of its weights less often and holds more logits for a moment,
larger blocks of keys are merged less often. So they are chosen for the schedule that was found: by
their prices, and kept if the whole program with them fits and is faster by a share worth having.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from farspan.plan.price.evaluate import evaluate
from farspan.plan.question import Plan
from farspan.plan.search.best_first import gap
from farspan.plan.search.ruler import Ruler
from farspan.spec import Schedule, Tier

HEADS = (2048, 4096, 8192)  # tokens, after the default
BLOCKS = (2**15, 2**16)  # keys, after the default
# Of a step, what the next size has to save: a fifth of what the search gives for main memory.
WORTH = 0.001
MOST_ELEMENTS = 2**31 - 1  # of the K of a call with all heads, which kernels count in 32 bits


def with_pieces(plans: Sequence[Plan], seconds: float) -> list[Plan]:
    """The plans with the sizes of pieces that are best for the first; one that they do not fit is
    left as it is. After `seconds` of this process no other program is looked at.

    Their gaps count on what was saved being saved by any schedule."""
    deadline = time.process_time() + seconds
    first = _improved(plans[0], "head_tokens", HEADS, deadline)
    first = _improved(first, "kv_block", tuple(_blocks(first)), deadline)
    head = first.schedule.head_tokens
    if head == plans[0].schedule.head_tokens:
        return [first, *plans[1:]]
    others = (_resized(plan, replace(plan.schedule, head_tokens=head)) for plan in plans[1:])
    return [first, *others]


def _improved(plan: Plan, field: str, sizes: Sequence[int], deadline: float) -> Plan:
    """The plan with the largest of the sizes that pays by its price, fits and saves."""
    for size in reversed(_worth_having(plan, field, sizes)):
        if time.process_time() > deadline:
            break
        found = _resized(plan, _with(plan.schedule, field, size))
        if found.seconds.total <= plan.seconds.total * (1 - WORTH):
            return found
    return plan


def _worth_having(plan: Plan, field: str, sizes: Sequence[int]) -> list[int]:
    """Sizes that by their prices save enough over the one before; dear ones are passed over."""
    found, known = list[int](), _work(plan, plan.schedule)
    for size in sizes:
        work = _work(plan, _with(plan.schedule, field, size))
        if known - work >= WORTH * plan.seconds.total:
            found.append(size)
            known = work
    return found


def _work(plan: Plan, schedule: Schedule) -> float:
    """Seconds that the head computes, and once forward and backward every cell, which are as many
    for any size; where attention is sparse the head alone, whose size is then the only choice."""
    ruler = Ruler(plan.question, schedule)
    seconds = float(ruler.lanes.head.sum())
    if schedule.sparse is not None:
        return seconds
    for layer in ruler.model.layers:
        for lane in (ruler.lanes.forward[layer], ruler.lanes.backward[layer]):
            seconds += lane.seconds(overlap=plan.question.overlap)
    return seconds


def _resized(plan: Plan, schedule: Schedule) -> Plan:
    """The plan of a schedule that differs in its pieces; the plan where that fits less well, or
    takes still more where the plan is tight."""
    found = evaluate(plan.question, plan.strategy, schedule)
    takes_more = found.device.total > plan.device.total
    if found.fit < plan.fit or (plan.tight and takes_more):
        return plan
    lowest = plan.seconds.total / (1 + plan.gap) - (plan.seconds.total - found.seconds.total)
    return replace(found, gap=gap(found, lowest))


def _with(schedule: Schedule, field: str, size: int) -> Schedule:
    changed: dict[str, Any] = {field: size}
    return replace(schedule, **changed)


def _blocks(plan: Plan) -> Iterator[int]:
    """Those that may be looked at: where K, V lie on the device, and calls on earlier keys exist
    that could see more."""
    question, schedule = plan.question, plan.schedule
    batch, tokens = question.run.batch, question.run.tokens
    if schedule.kv is Tier.HOST or schedule.sparse is not None or question.layout.ring > 1:
        return
    widest = max(layer.query_heads * layer.head_dim for layer in question.model.layers)
    for size in BLOCKS:
        is_seen = schedule.kv_block < size < 2 * (tokens - schedule.chunk)
        if is_seen and batch * size * widest <= MOST_ELEMENTS:
            yield size
