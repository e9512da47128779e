"""What a step must take at least, from the ceilings, and the gap to what it took, line by line.

Floor: the products and the attention of one forward and one backward, nothing computed twice, at
the rates that the same calls reach alone. Everything else (norms, loss, copies, the update, the
host) has no floor but zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farspan.planner.request import Question
from farspan.program.attention_blocks import seen_pairs
from farspan.spec import BACKWARD_PRODUCTS, Schedule
from tests.oracles.formulas import attention_passes, linear_passes

Row = Mapping[str, Any]
LINEAR, FORWARD, BACKWARD = "linear", "attention forward", "attention backward"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """FLOP a second."""

    linear: float
    forward: float  # attention; pairs that are masked are no work
    backward: float


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one step: what is needed, and what the schedule computes again."""

    needed: dict[str, float]
    again: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.needed.values())


def floor(question: Question, ceilings: Ceilings, schedule: Schedule | None = None) -> Floor:
    """Of a step by this schedule; without one nothing is computed again."""
    model, run = question.model, question.run
    tokens = run.batch * run.tokens
    layers = sum(i * o for layer in model.layers for i, o in layer.work.products)
    linear = 2.0 * tokens * (layers + model.hidden * model.vocab)
    attention = sum(
        2.0
        * run.batch
        * seen_pairs(run.tokens, layer.window)
        * layer.query_heads
        * (layer.head_dim + layer.value_dim)
        for layer in model.layers
    )
    passes = (1.0, 1.0)
    if schedule is not None:
        found = (f(model, run, schedule) for f in (linear_passes, attention_passes))
        passes = float(next(found)), float(next(found))
    again = 2.0 * tokens * layers * (passes[0] - 1.0)
    return Floor(
        needed={
            LINEAR: 3.0 * linear / ceilings.linear,
            FORWARD: attention / ceilings.forward,
            BACKWARD: BACKWARD_PRODUCTS * attention / ceilings.backward,
        },
        again={
            LINEAR: again / ceilings.linear,
            FORWARD: attention * (passes[1] - 1.0) / ceilings.forward,
        },
    )


def ceilings_of(rows: Iterable[Row], schedule: Schedule, tokens: int) -> Ceilings | None:
    """The best that was measured for the calls of this schedule; None where something is missing.

    Attention on a sequence is squares of a chunk on the diagonal, rectangles of a chunk by a block
    of keys elsewhere; each is as fast as its own row, or the row nearest in pairs.
    """
    rows = list(rows)
    chunk = min(schedule.chunk, tokens)
    linear = linear_rate([row["product"] for row in rows if "product" in row], chunk)
    calls = [row["attention"] for row in rows if "attention" in row]
    squares = -(-tokens // chunk) * chunk * (chunk + 1) / 2
    rectangles = tokens * (tokens + 1) / 2 - squares
    block = min(schedule.kv_block, tokens)
    shapes = ((squares, chunk * chunk, True), (rectangles, chunk * block, False))
    rates = []
    for way in ("forward", "backward"):
        seconds = 0.0
        for pairs, size, causal in shapes:
            rate = attention_rate(calls, size, causal, way)
            if pairs > 0 and rate is None:
                return None
            seconds += pairs / rate if pairs > 0 and rate else 0.0
        rates.append((squares + max(0.0, rectangles)) / seconds)
    return None if linear is None else Ceilings(linear, *rates)


def linear_rate(products: Sequence[Row], chunk: int) -> float | None:
    """FLOP a second of a layer's products forward and backward, on the chunks nearest in tokens."""
    layers = [row for row in products if not row["head"]]
    if not layers:
        return None
    near = min({row["tokens"] for row in layers}, key=lambda tokens: abs(tokens - chunk))
    chosen = [row for row in layers if row["tokens"] == near]
    flop = sum(3 * row["flop"] * row["a_layer"] for row in chosen)
    return flop / sum(row["a_layer"] * sum(row["seconds"].values()) for row in chosen)


def attention_rate(calls: Sequence[Row], size: int, causal: bool, way: str) -> float | None:
    """FLOP a second of the fastest backend at the shape nearest to so many queries times keys."""
    fit = [row for row in calls if row["causal"] == causal and way in row]
    if not fit:
        return None
    near = min({row["queries"] * row["keys"] for row in fit}, key=lambda pairs: abs(pairs - size))
    same = (row for row in fit if row["queries"] * row["keys"] == near)
    return float(max(row[way]["flop_a_second"] for row in same))


def gap(measured: Mapping[str, float], found: Floor) -> list[dict[str, Any]]:
    """A line for each part of a measured step: its floor, what is computed again at the ceilings'
    rates, and what is slower than that. Lines add up to what was measured."""
    lines = []
    for name, seconds in measured.items():
        needed, again = found.needed.get(name, 0.0), found.again.get(name, 0.0)
        lines.append(
            {
                "part": name,
                "measured": seconds,
                "floor": needed,
                "again": again,
                "slower": seconds - needed - again,
            }
        )
    return lines
