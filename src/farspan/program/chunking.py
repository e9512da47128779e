"""Chunks of a pipeline: ranges of the sequence that keep a stage busy about equally long.

A stage waits until the first chunk has come through those before it, and the slowest chunk sets the
pace of all: passes over chunks that cost t take sum(t) + (stages - 1) max(t). Of equal chunks the
last costs a causal layer many times what the first does, so later chunks are shorter here.

    equal       |--------|--------|--------|--------|
    balanced    |--------|------|-----|----|----|---|

Every rank of a pipeline must cut alike, whatever its machine: all arithmetic is of whole numbers,
from the model's own sizes."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from farspan.program.attention_blocks import seen_pairs
from farspan.program.layout import Layout, Range, chunk_ranges
from farspan.program.work import linear_products
from farspan.spec import ModelSpec, Schedule

# Costs are evened out until the last chunk is a quarter of the longest, or a long sequence would be
# cut into thousands: Qwen2.5-7B at 4M tokens in chunks of 16K into 13,423 in place of 547, for a
# stage of four to wait 0.6% of a pass less.
SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Costs:
    """Multiplications of the first tokens of a sequence in all layers, one forward, batch 1."""

    linear: int  # of a token
    widths: tuple[tuple[int | None, int], ...]  # window: of a query and key

    def before(self, token: int) -> int:
        """Of the tokens [0, token)."""
        attention = sum(width * seen_pairs(token, window) for window, width in self.widths)
        return self.linear * token + attention


def costs_of(model: ModelSpec) -> Costs:
    """What the layers cost. The head, which one stage has alone, is not among them."""
    widths: dict[int | None, int] = {}
    for layer in model.layers:
        width = layer.query_heads * (layer.head_dim + layer.value_dim)
        widths[layer.window] = widths.get(layer.window, 0) + width
    return Costs(sum(linear_products(model, layer) for layer in model.layers), (*widths.items(),))


def is_balanced(schedule: Schedule, layout: Layout) -> bool:
    """Are the chunks cut unequally? Not where attention is sparse: which keys a query sees depends
    on where its chunk begins, and how many does not grow with the sequence."""
    return layout.pipeline > 1 and schedule.sparse is None


def chunks_of(
    model: ModelSpec, tokens: int, schedule: Schedule, layout: Layout
) -> tuple[Range, ...]:
    """The chunks of a sequence, for all ranks of a layout. `model` is the whole model."""
    if is_balanced(schedule, layout):
        return balanced_ranges(costs_of(model), tokens, schedule.chunk)
    return chunk_ranges(tokens, schedule.chunk)


def balanced_ranges(costs: Costs, tokens: int, chunk: int) -> tuple[Range, ...]:
    """Ranges of at most `chunk` tokens, none longer than the one before. To a token's rounding they
    cost the same, but for the first ones where `chunk` tokens do not cost as much.

    As few as have none that costs more than the first `chunk` tokens, or than the last
    `chunk / SHORTEST` where that is more.
    """
    whole, short = costs.before(tokens), -(-chunk // SHORTEST)
    most = max(
        costs.before(min(chunk, tokens)),
        whole - costs.before(max(0, tokens - short)),
    )
    ranges, start = [], 0
    for left in range(_count(costs, tokens, chunk, most), 0, -1):
        # Rounded up every time, so that what is left for each of the others never grows.
        done = costs.before(start)
        wanted = done - (done - whole) // left
        longest = min(tokens, start + chunk)
        among = range(start + 1, longest)
        stop = start + 1 + bisect_left(among, wanted, key=costs.before)
        ranges.append((start, stop))
        start = stop
        if start == tokens:
            break
    return tuple(ranges)


def _count(costs: Costs, tokens: int, chunk: int, most: int) -> int:
    """How many ranges it takes when none may be longer than `chunk` or cost more than `most`."""
    count = start = 0
    while start < tokens:
        among = range(start + 1, min(tokens, start + chunk) + 1)
        start += max(1, bisect_right(among, costs.before(start) + most, key=costs.before))
        count += 1
    return count
