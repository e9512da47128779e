"""Build the program of one step from a model, a run and a schedule."""

from dataclasses import replace

from farspan.plan import names
from farspan.plan.grid import chunk_ranges, group_ranges
from farspan.plan.ledger import Ledger
from farspan.plan.passes import GroupPasses
from farspan.plan.program import Close, Kind, Program
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier


def build_program(model: ModelSpec, run: RunSpec, schedule: Schedule) -> Program:
    """The program of one training step.

    Every linear extension of the grid's order gives the same gradients; this one walks group by
    group, forward and then back (DESIGN section 1). Raises Refused when the schedule's groups do
    not fit the model.
    """
    ledger = _ledger(model, run, schedule)
    passes = [GroupPasses(ledger, index) for index in range(len(ledger.groups))]
    _open_slots(ledger, passes)
    for group in passes:
        group.first()
    for group in reversed(passes):
        group.rebuild()
        group.backward()
        ledger.emit(Close(group.index))
    return ledger.finish()


def build_evaluation(model: ModelSpec, run: RunSpec, schedule: Schedule) -> Program:
    """The program that computes the loss and no gradients: one pass of every group, K, V of the
    open group only."""
    plain = replace(
        schedule,
        kv_kept=False,
        attention_kept=0.0,
        attention_open=False,
        activations_kept=0.0,
    )
    ledger = _ledger(model, run, plain)
    passes = [GroupPasses(ledger, index) for index in range(len(ledger.groups))]
    _open_slots(ledger, passes)
    for group in passes:
        group.evaluate()
    return ledger.finish()


def _ledger(model: ModelSpec, run: RunSpec, schedule: Schedule) -> Ledger:
    return Ledger(
        model,
        run,
        schedule,
        chunk_ranges(run.tokens, schedule.chunk),
        group_ranges(schedule, len(model.layers)),
    )


def _open_slots(ledger: Ledger, passes: list[GroupPasses]) -> None:
    """Slots for everything that crosses the link: on the device, for the whole program."""
    schedule = ledger.schedule
    chunk = ledger.chunks[0][1]
    slot = ledger.allocate_slot
    kept = any(group.graphs for group in passes)
    if schedule.x is Tier.HOST and (len(passes) > 1 or kept):
        for name in (*ledger.few(names.X_IN), *ledger.few(names.X_OUT)):
            slot(name, Kind.X, chunk)
    if schedule.kv is Tier.HOST:
        block = min(schedule.kv_block, ledger.run.tokens)
        for ring, kind, tokens in (
            (names.KV_OWN, Kind.KV, chunk),
            (names.DKV_OWN, Kind.DKV, chunk),
            (names.KV_BLOCKS, Kind.KV, block),
            (names.DKV_BLOCKS, Kind.DKV, block),
        ):
            for name in ring:
                slot(name, kind, tokens)
    if schedule.attention is Tier.HOST and (schedule.attention_kept or schedule.attention_open):
        for name in ledger.attention_slots():
            slot(name, Kind.ATTENTION, chunk)
    if kept and schedule.activations is Tier.HOST:
        largest = max(group.cell_bytes(layer) for group in passes for layer in group.layers)
        for name in names.ACTIVATIONS:
            ledger.allocate_cells(name, Tier.DEVICE, -1, range(1), largest)
