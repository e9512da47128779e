"""Build the program of one step from a model, a run and a schedule."""

from collections.abc import Sequence
from dataclasses import replace

from farspan.program import buffer_names as names
from farspan.program.attention_blocks import refuse_wide_calls
from farspan.program.chunking import chunks_of
from farspan.program.layout import (
    ONLY,
    Range,
    Rank,
    group_ranges,
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
from farspan.sparse.sizes import far_of, slot_bytes
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier


def build_program(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    rank: Rank = ONLY,
    chunks: tuple[Range, ...] | None = None,
    walked: Sequence[int] | None = None,
    *,
    is_cut: bool = False,
) -> Program:
    """The program of one training step; `chunks` where they are cut as somebody else says. One that
    `is_cut` runs the head on every chunk before its backward, which is from `Program.cut` on.
    With `walked`, chunks in order, passes skip the others: an outline, which has every buffer at
    its size and in its order and cannot be run.

    Every linear extension of the grid's order gives the same gradients; this one walks group by
    group, forward and then back. Raises UnsupportedError when the schedule's groups do not fit the
    model, and where a batch is too wide for attention's kernels.
    """
    ledger = _ledger(model, run, schedule, rank, chunks, walked)
    ledger.is_cut = is_cut
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
    """The program that computes the loss and no gradients: one pass of every group, K, V of the
    open group only."""
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


def _ledger(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    rank: Rank,
    chunks: tuple[Range, ...] | None = None,
    walked: Sequence[int] | None = None,
) -> Ledger:
    refuse_wide_calls(model, run)
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
    """Slots for everything that crosses the link: on the device, for the whole program."""
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
        largest = max(group.cell_bytes(layer) for group in passes for layer in group.layers)
        ledger.allocate_cell_slots(Kind.ACTIVATIONS, largest)


def _open_page_slots(ledger: Ledger, *, backward: bool) -> None:
    """Slots for chosen pages, of any chunk and any layer that chooses."""
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
