"""Build the program of one step from a model, a run and a schedule, and cut its chunks."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from farspan.program import buffer_names as names
from farspan.program.attention_blocks import refuse_wide_calls, seen_pairs
from farspan.program.far_sizes import far_of, slot_bytes
from farspan.program.layout import (
    ONLY,
    Layout,
    Range,
    Rank,
    chunk_ranges,
    group_ranges,
    keeping_groups,
    local_heads,
    own_groups,
    share_of,
    streams,
    with_states,
)
from farspan.program.ledger import Ledger
from farspan.program.passes import GroupPasses
from farspan.program.program import Close, Program, Reduce
from farspan.program.residency import RESIDENCY, Kind
from farspan.program.work import linear_products
from farspan.spec import Cut, ModelSpec, RunSpec, Schedule, Tier, UnsupportedError


def build_program(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    rank: Rank = ONLY,
    chunks: tuple[Range, ...] | None = None,
    walked: Sequence[int] | None = None,
    *,
    cut: Cut = Cut.NONE,
    keeping: frozenset[int] | None = None,
) -> Program:
    """Return the program of one training step on one rank.

    `chunks` replaces the token ranges of `chunks_of`. The backward begins when all up to `cut` is
    complete, at instruction `Program.cut`. With `walked`, some chunks in order, the result is an
    outline that cannot be run: it has all buffers, but only these chunks. `keeping` replaces the
    groups of layers that keep activations by `activation_save_layers`.

    Any order of cells that keeps their dependencies gives the same gradients; this one runs group
    by group, forward and then back. Raises UnsupportedError when the groups do not fit the model,
    or a batch is too wide for attention's kernels.
    """
    ledger = _ledger(model, run, schedule, rank, chunks, walked)
    ledger.cut_after = cut
    if keeping is None:
        share = 1.0 if rank.layout.pipeline > 1 else schedule.activation_save_layers
        keeping = keeping_groups(share, len(ledger.groups))
    ledger.keeping = keeping
    passes = [GroupPasses(ledger, index) for index in own_groups(rank, len(ledger.groups))]
    _open_slots(ledger, passes)
    for group in passes:
        group.first()
    for group in reversed(passes):
        group.rebuild()
        group.backward()
        if streams(schedule, rank.layout) and rank.layout.devices() > 1:
            ledger.emit(Reduce(group.index))
        ledger.emit(Close(group.index))
    return ledger.finish()


def build_evaluation(
    model: ModelSpec, run: RunSpec, schedule: Schedule, rank: Rank = ONLY
) -> Program:
    """Return the program that computes only a loss: one forward pass of every group."""
    plain = replace(
        schedule,
        kv_kept=False,
        attention_save_fraction=0.0,
        attention_open=False,
        activation_save_fraction=0.0,
    )
    ledger = _ledger(model, run, plain, rank)
    passes = [GroupPasses(ledger, index) for index in own_groups(rank, len(ledger.groups))]
    _open_slots(ledger, passes, backward=False)
    for group in passes:
        group.evaluate()
    return ledger.finish()


def _refuse_sparse(model: ModelSpec, schedule: Schedule) -> None:
    """Raise UnsupportedError if sparse attention is set and layers choose tokens by an indexer, or
    attend to all tokens and pass on a state."""
    if schedule.sparse is None:
        return
    if any(layer.indexer for layer in model.layers):
        raise UnsupportedError(
            "sparse: the model's own indexers choose the tokens that its queries attend to; leave "
            "sparse out"
        )
    if any(layer.state and layer.attends() and layer.window is None for layer in model.layers):
        raise UnsupportedError(
            f"sparse: layers of {model.name} attend and pass on a state, which is exact only with "
            "dense attention; leave sparse out"
        )


def _ledger(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    rank: Rank,
    chunks: tuple[Range, ...] | None = None,
    walked: Sequence[int] | None = None,
) -> Ledger:
    refuse_wide_calls(model, run)
    _refuse_sparse(model, schedule)
    if chunks is None:
        chunks = chunks_of(model, run.tokens, schedule, rank.layout)
    return Ledger(
        with_states(local_heads(model, rank.layout), chunks),
        run,
        schedule,
        chunks,
        group_ranges(schedule, len(model.layers), rank.layout.pipeline),
        share_of(chunks, rank),
        range(len(chunks)) if walked is None else walked,
    )


def _open_slots(ledger: Ledger, passes: list[GroupPasses], *, backward: bool = True) -> None:
    """Allocate device buffers, shared by all layers, for tensors copied to or from the host."""
    schedule = ledger.schedule
    share = ledger.share
    own, keys = share.tokens.most, share.keys.most
    slot = ledger.allocate_slot
    kept = any(group.graphs for group in passes)
    if streams(schedule, ledger.share.rank.layout):
        ledger.allocate_group_slots(Kind.WEIGHTS)
    if schedule.boundary_inputs is Tier.HOST and (len(ledger.groups) > 1 or kept):
        for name in (*ledger.few(names.X_IN), *ledger.few(names.X_OUT)):
            slot(name, Kind.X, own)
    if schedule.kv is Tier.HOST:
        block = min(schedule.kv_block, share.keys.total)
        for tokens, place in ((keys, 0), (block, 1)):
            for kind in (Kind.KV, Kind.DKV):
                for name in RESIDENCY[kind].slots[place]:
                    slot(name, kind, tokens)
        _open_page_slots(ledger, backward=backward)
    if schedule.attention is Tier.HOST and (
        schedule.attention_save_fraction or schedule.attention_open
    ):
        for name in ledger.attention_slots:
            slot(name, Kind.ATTENTION, keys)
    if kept and schedule.activations is Tier.HOST:
        groups = filter(GroupPasses.keeps, passes)
        largest = max(group.cell_bytes(layer) for group in groups for layer in group.layers)
        ledger.allocate_cell_slots(Kind.ACTIVATIONS, largest)


def _open_page_slots(ledger: Ledger, *, backward: bool) -> None:
    """Allocate device buffers, shared by all layers, for chosen pages gathered from the host."""
    sparse, run = ledger.schedule.sparse, (ledger.run.batch, ledger.model.element_bytes)
    if sparse is None:
        return
    fars = (
        far_of(layer, sparse, run, start, stop - start)
        for layer in set(ledger.model.layers)
        for start, stop in ledger.chunks
    )
    largest = max((slot_bytes(far, backward=backward) for far in fars if far), default=0)
    if largest:
        ledger.allocate_cell_slots(Kind.SLABS, largest)


# -- chunks of a pipeline ------------------------------------------------------------------------
#
# Ranges of the sequence that keep a stage busy about equally long.
#
# A stage waits until the first chunk has come through the stages before it, and the slowest chunk
# sets the pace: passes over chunks that cost t take sum(t) + (stages - 1) max(t). Of equal chunks
# the last costs a causal layer many times as much as the first, so later chunks are shorter here.
#
#     equal       |--------|--------|--------|--------|
#     balanced    |--------|------|-----|----|----|---|
#
# Every rank of a pipeline must cut alike, on any machine: all arithmetic is in whole numbers, from
# the model's own sizes.

# Costs are equal until the last chunk is a quarter of the longest. Otherwise a long sequence would
# have thousands of chunks: Qwen2.5-7B at 4M tokens in chunks of 16K 13,423 instead of 547, for a
# stage of four to wait 0.6% of a pass less.
SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Costs:
    """Multiplications that tokens cost in one forward of all decoder layers, with batch 1."""

    linear: int  # per token
    widths: tuple[tuple[int | None, int], ...]  # window: multiplications per query and key

    def before(self, token: int) -> int:
        """Return the number of multiplications for the tokens [0, token) of a sequence."""
        attention = sum(width * seen_pairs(token, window) for window, width in self.widths)
        return self.linear * token + attention


def costs_of(model: ModelSpec) -> Costs:
    """Return the multiplications of all decoder layers, without the head, which only one pipeline
    stage has."""
    widths: dict[int | None, int] = {}
    for layer in model.layers:  # chunked attention costs at most what its window would
        width = layer.query_heads * (layer.head_dim + layer.value_dim)
        widths[layer.window] = widths.get(layer.window, 0) + width
    return Costs(sum(linear_products(model, layer) for layer in model.layers), (*widths.items(),))


def chunks_of(
    model: ModelSpec, tokens: int, schedule: Schedule, layout: Layout
) -> tuple[Range, ...]:
    """Return the token range of each chunk, the same on all ranks. `model` is the whole model."""
    # Stages of a pipeline want chunks that cost the same, so later ones are shorter. With sparse
    # attention all are as long: a query's keys depend on where its chunk begins, and their number
    # does not grow with the sequence.
    if layout.pipeline > 1 and schedule.sparse is None:
        return balanced_ranges(costs_of(model), tokens, schedule.chunk)
    return chunk_ranges(tokens, schedule.chunk)


def balanced_ranges(costs: Costs, tokens: int, chunk: int) -> tuple[Range, ...]:
    """Cut a sequence into chunks of equal cost and at most `chunk` tokens, each no longer than the
    one before. The first chunks may cost less, since `chunk` bounds their length.

    The number of chunks is the least for which none costs more than the first `chunk` tokens, or
    than the last `chunk / SHORTEST` tokens if those cost more.
    """
    whole, short = costs.before(tokens), -(-chunk // SHORTEST)
    most = max(
        costs.before(min(chunk, tokens)),
        whole - costs.before(max(0, tokens - short)),
    )
    ranges, start = [], 0
    for left in range(_count(costs, tokens, chunk, most), 0, -1):
        # Rounded up every time, so the remaining cost per range never grows.
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
    """Return how many chunks of at most `chunk` tokens and `most` multiplications are needed."""
    count = start = 0
    while start < tokens:
        among = range(start + 1, min(tokens, start + chunk) + 1)
        start += max(1, bisect_right(among, costs.before(start) + most, key=costs.before))
        count += 1
    return count
