"""A planned step as a trace of events, which Perfetto (ui.perfetto.dev) and chrome://tracing draw.

One row a lane: what computes, fetches, evicts and talks to other devices when. The format is that
of Chrome's trace events, and of torch.profiler's `export_chrome_trace`: a measured step and the
planned one can be looked at side by side.

The device's own program is drawn and, after it, the update. Where copies are in line a lane is idle
while another works. What pipeline stages wait for each other is in no row.
"""

from collections.abc import Iterator
from typing import Any

from farspan.planner.evaluate import size, slowest
from farspan.planner.prices import Prices
from farspan.planner.request import Plan
from farspan.planner.states import update_overlaps
from farspan.planner.timeline import Span, spans
from farspan.program.program import (
    AttentionMode,
    Backward,
    Close,
    Evict,
    Fetch,
    Forward,
    Instruction,
    Program,
)

UPDATE = -1  # the index of the optimizer's update, which is no instruction
LANES = {
    "compute": "compute",
    "fetch": "fetch, host to device",
    "evict": "evict, device to host",
    "collective": "collective, between devices",
    "update": "update of the step before, in main memory",
}
NANOSECOND = 1e-3  # of the microseconds that the format counts in: finer is left out
MODES = {
    AttentionMode.NONE: " K, V only",
    AttentionMode.GIVEN: " O kept",
    AttentionMode.HELD: " O held",
    AttentionMode.COMPUTE: "",
}


def timeline_json(plan: Plan) -> dict[str, Any]:
    """The trace of a plan, ready to be written as JSON. Times are microseconds."""
    program, found = step_spans(plan)
    events = [_event(program, span) for span in found]
    rows = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": words}}
        for row, words in enumerate(LANES.values())
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.question.model.name,
            "tokens": plan.question.run.tokens,
            "machine": plan.question.machine.name,
            "strategy": plan.strategy,
            "overlap": plan.question.overlap,
            "predicted_seconds": plan.seconds.total,
            "about": "simulated by farspan plan, not measured",
        },
        "traceEvents": rows + events,
    }


def step_spans(plan: Plan) -> tuple[Program, tuple[Span, ...]]:
    """The slowest rank's program and when each of its instructions keeps which lane busy, the
    update last, where it is not beside the next step; seconds from the step's begin."""
    question = plan.question
    program, _ = slowest(question, size(question, plan.schedule))
    prices = Prices(question, program, together=question.overlap)
    beside = update_overlaps(question)
    found = spans(prices, beside=beside) if question.overlap else tuple(_in_line(prices))
    end = max((span.end for span in found), default=0.0)
    update = plan.seconds.optimizer + plan.seconds.beside
    if update:
        when = Span("update", 0.0, update, UPDATE) if beside else None
        found += (when or Span("compute", end, end + update, UPDATE),)
    return program, found


def _in_line(prices: Prices) -> Iterator[Span]:
    """One instruction after the other, and each lane of one after the other."""
    now = 0.0
    for index, instruction in enumerate(prices.program.instructions):
        cost = prices.of(instruction)
        parts = (
            ("fetch", cost.fetch),
            ("compute", cost.compute + cost.host),
            ("collective", cost.collective + _closing(prices, instruction)),
            ("evict", cost.evict),
        )
        for lane, seconds in parts:
            if seconds > 0:
                yield Span(lane, now, now + seconds, index)
                now += seconds


def _closing(prices: Prices, instruction: Instruction) -> float:
    """Seconds of the gathers of a group's weights and of the reduction of their gradients: they are
    drawn where the group closes."""
    if not isinstance(instruction, Close):
        return 0.0
    program = prices.program
    layers = range(*program.groups[instruction.group])
    gathers = sum(prices.gather(layer) for layer in layers)
    passes = 1 if instruction.group == program.own_groups()[-1] else 2
    return passes * gathers + prices.reduce(instruction.group)


def _event(program: Program, span: Span) -> dict[str, Any]:
    """A complete event. Both ends are whole nanoseconds, so that neighbours meet and do not
    overlap."""
    start, end = (round(time * 1e9) for time in (span.start, span.end))
    return {
        "name": span_words(program, span),
        "cat": span.lane,
        "ph": "X",
        "pid": 1,
        "tid": tuple(LANES).index(span.lane),
        "ts": round(start * NANOSECOND, 3),
        "dur": round((end - start) * NANOSECOND, 3),
        "args": {"instruction": span.index},
    }


def span_words(program: Program, span: Span) -> str:
    """What happens there: F 3.5 is the forward of layer 3, chunk 5."""
    if span.index == UPDATE:
        return "optimizer's update"
    instruction = program.instructions[span.index]
    match instruction:
        case Forward(layer, chunk, mode):
            words = f"F {layer}.{chunk}{MODES[mode]}"
        case Backward(layer, chunk):
            words = f"B {layer}.{chunk}"
        case Fetch(source, _, chunk):
            return f"{source} {chunk}"
        case Evict(_, target, chunk):
            return f"{target} {chunk}"
        case Close(group):
            return f"close group {group}"
        case _:
            where = getattr(instruction, "chunk", None)
            return type(instruction).__name__ + ("" if where is None else f" {where}")
    return words if span.lane == "compute" else f"{span.lane} of {words}"
