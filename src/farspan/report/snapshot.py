"""A planned step as a PyTorch memory snapshot, for pytorch.org/memory_viz and similar viewers.

A planned step has two devices: 0 is the device, 1 is main memory. On each

    arena   |kv.0      |x.0  | free     |   buffers at their planned addresses; the arena is there
            |kv.0      |act.0       |   |   all step long, so its unused parts are drawn too
    rest    |weights|optimizer|temporaries| states and transients of cells, at made-up addresses:
                                            a run gets this memory from PyTorch

The memory drawn at each moment is the planned one, so its maximum is the plan's peak.

Moments are instructions. If there are more than `MOST_MOMENTS`, neighbours are merged into one
moment, which shows their maximum and the memory that is left after the last.

The format is that of `torch.cuda.memory._snapshot()`: dicts, lists, texts and numbers, pickled by a
protocol that the viewer's own reader knows (2 to 4). That reader changes the entries that it reads,
so no entry may be in the snapshot twice.
"""

import pickle
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farspan.durable import write_output
from farspan.planner import evaluate
from farspan.planner.remedies import part_words
from farspan.planner.request import Plan
from farspan.planner.timeline import Span
from farspan.program.placement import PlacementRequest, place
from farspan.program.program import Allocate, Free, Instruction, Program
from farspan.report.plan import ROWS, program_spans, span_words
from farspan.spec import Tier

MOST_MOMENTS = 5000  # the viewer draws 15,000 tensors, and a moment brings one to three
ARENA, REST = 2**40, 2**44  # addresses, further apart than any main memory is large
PROTOCOL = 4
NEVER = 2**62  # a moment after all others
# Causes in addition to the parts of a budget.
UNUSED, KERNELS, SUMS = "arena, free", "workspaces of kernels", "gradients and their sums"
CELL, GRAPH, REGISTER = "transients of a cell", "graphs of cells", "hidden states and gradients"
# The viewer's reader fails if entries have categories and none has this one.
UNKNOWN = "unknown"

Frames = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A range of memory in use from one moment (`_StepMoments`) of a step to another."""

    size: int  # bytes
    born: int  # moments; alive in [born, dies)
    dies: int
    cause: str
    frames: Frames
    address: int = -1  # -1: not placed yet


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot as a pickle. Raises UnsupportedError if the file cannot be written."""
    write_output(path, pickle.dumps(snapshot, protocol=PROTOCOL), "snapshot")


def frame(where: str, line: int, what: str) -> dict[str, Any]:
    """Return a stack frame, which viewers show as `where:line:what`."""
    return {"filename": where, "line": line, "name": what}


# -- a planned step -------------------------------------------------------------------------------


def plan_snapshot(plan: Plan) -> tuple[dict[str, Any], str]:
    """Return a snapshot of the planned step, for the rank with the fullest device; and a note for
    the user that each point in time stands for several instructions, or "" if it does not."""
    question = plan.question
    walked = max(
        evaluate.size(question, plan.schedule).walked,
        key=lambda one: sum(evaluate.rank_parts(question, one)[0].values()),
    )
    program, parts = walked.program, evaluate.rank_parts(question, walked)
    moments = _StepMoments(program)
    cells = _CellMemory(plan, walked, moments)
    transients = list(cells.blocks())
    devices = []
    for tier, of_tier in zip((Tier.DEVICE, Tier.HOST), parts, strict=True):
        buffers = _arena(program, tier, moments)
        states = list(_lasting_blocks(program, tier, of_tier, cells.most))
        rest = states + (transients if tier is Tier.DEVICE else [])
        if buffers or rest:
            devices.append(_SnapshotDevice(buffers, rest, program.arena_bytes[tier]))
    about = {
        "about": "planned by farspan plan, not measured",
        "model": question.model.name,
        "tokens": question.run.tokens,
        "strategy": plan.strategy,
        "devices": ["the device", "main memory"],
        "instructions_a_moment": moments.each,
    }
    note = ""
    if moments.each > 1:
        note = (
            f"the snapshot shows {moments.count:,} moments of {len(program.instructions):,} "
            f"instructions: each moment shows the maximum of {moments.each} instructions"
        )
    return _snapshot(devices, moments.times(plan), about), note


@dataclass(slots=True)
class _StepMoments:
    """Moments of a snapshot: points in time, each of one or more instructions. Their numbers are
    even; a cell's temporary memory is freed at the odd number after the cell's moment."""

    program: Program
    places: list[int] = field(default_factory=list)  # instruction to the number of its moment
    each: int = 1
    count: int = 0

    def __post_init__(self) -> None:
        is_work = [not isinstance(i, Allocate | Free) for i in self.program.instructions]
        self.each = max(1, -(-sum(is_work) // MOST_MOMENTS))
        done = 0
        for works in is_work:
            self.places.append(2 * (done // self.each))
            done += works
        self.count = -(-done // self.each)

    def number_of(self, index: int) -> int:
        """Return the snapshot moment of instruction `index`; NEVER if the program is shorter."""
        return self.places[index] if index < len(self.places) else NEVER

    def groups(self) -> Iterator[tuple[int, list[tuple[int, Instruction]]]]:
        """Yield each moment's number, with its instructions and their indices in the program."""
        group: list[tuple[int, Instruction]] = []
        for index, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, Allocate | Free):
                continue
            group.append((index, instruction))
            if len(group) == self.each:
                yield self.places[group[0][0]], group
                group = []
        if group:
            yield self.places[group[0][0]], group

    def times(self, plan: Plan) -> list[int]:
        """Return when each moment begins in the plan, in microseconds from the step's start; the
        list's index is the moment's number."""
        first: dict[int, float] = {}
        for span in program_spans(plan, self.program):
            first[span.index] = min(span.start, first.get(span.index, span.start))
        micros = [0] * (2 * self.count + 1)
        now = 0.0
        for index, number in enumerate(self.places):
            now = max(now, first.get(index, now))
            micros[min(number + 1, 2 * self.count)] = round(now * 1e6)
        for number in range(1, len(micros)):  # a moment begins where the one before ends
            micros[number] = max(micros[number], micros[number - 1])
        return micros


@dataclass(slots=True)
class _CellMemory:
    """Planned device memory of cells outside the arena of buffers, instruction by instruction."""

    plan: Plan
    walked: evaluate.Walked
    moments: _StepMoments
    most: int = 0  # bytes, complete after `blocks`

    def blocks(self) -> Iterator[MemoryBlock]:
        walk = evaluate.RankWalk(self.plan.question, self.walked.program)
        standing: dict[Hashable, tuple[int, int, str, Frames]] = {}  # size, born, cause, frames
        for key, (size, cause) in _live(walk).items():
            standing[key] = size, 0, cause, [frame(cause, 0, "from earlier batches")]
        self.most = walk.live
        for number, group in self.moments.groups():
            before = walk.live
            fullest, where = before, group[0][0]
            for index, instruction in group:
                walk.peak = walk.live
                walk.issue(instruction)
                if walk.peak > fullest:
                    fullest, where = walk.peak, index
            self.most = max(self.most, fullest)
            frames = _instruction_frames(self.walked.program, where)
            if fullest > before:
                stack = [frame(CELL, *_layer_of(self.walked.program, where)), *frames]
                yield MemoryBlock(fullest - before, number, number + 1, CELL, stack)
            yield from self._changed(walk, standing, number + 1, group[-1][0])
        for size, born, cause, frames in standing.values():
            yield MemoryBlock(size, born, NEVER, cause, frames)

    def _changed(
        self,
        walk: evaluate.RankWalk,
        standing: dict[Hashable, tuple[int, int, str, Frames]],
        number: int,
        index: int,
    ) -> Iterator[MemoryBlock]:
        """Yield the blocks that end in moment `number`. In `standing` (blocks in use, by key)
        replace them by those that begin."""
        now = _live(walk)
        gone = [key for key, (size, *_) in standing.items() if now.get(key, (0, ""))[0] != size]
        for key in gone:
            size, born, cause, frames = standing.pop(key)
            yield MemoryBlock(size, born, number, cause, frames)
        frames = _instruction_frames(self.walked.program, index)
        for key, (size, cause) in now.items():
            if key not in standing:
                what = frame(cause, *_key_words(key))
                standing[key] = size, number, cause, [what, *frames]


def _live(walk: evaluate.RankWalk) -> dict[Hashable, tuple[int, str]]:
    """Return the bytes and cause of each live tensor outside buffers, by key."""
    live: dict[Hashable, tuple[int, str]] = {}
    for layer, size in walk.hidden.items():
        live["hidden state before layer", layer] = size, REGISTER
    for layer, size in walk.gradient.items():
        live["gradient before layer", layer] = size, REGISTER
    for layer, size in walk.held.items():
        live["O and LSE in registers of layer", layer] = size, REGISTER
    for cell, graph in walk.graphs.items():
        live["graph of cell", *cell] = graph.bytes, GRAPH
    live["positions and masks of chunks", 0] = sum(walk.tables.values()), REGISTER
    live[SUMS, 0] = walk.live - sum(size for size, _ in live.values()), SUMS
    return {key: (size, cause) for key, (size, cause) in live.items() if size}


def _key_words(key: Hashable) -> tuple[int, str]:
    """Return the layer and the label of a tensor, from its key in the result of `_live`."""
    assert isinstance(key, tuple)
    words, layer, *chunk = key
    if words == SUMS or words.startswith("positions"):
        return 0, words
    return layer, f"{words} {layer}" + "".join(f", chunk {number}" for number in chunk)


def _layer_of(program: Program, index: int) -> tuple[int, str]:
    instruction = program.instructions[index]
    layer, chunk = (getattr(instruction, name, None) for name in ("layer", "chunk"))
    words = [f"layer {layer}"] * (layer is not None) + [f"chunk {chunk}"] * (chunk is not None)
    return layer or 0, ", ".join(words) or "all"


def _instruction_frames(program: Program, index: int) -> Frames:
    """Return a stack frame that names an instruction, as in `farspan plan --timeline`."""
    words = span_words(program, Span(next(iter(ROWS)), 0.0, 0.0, index))
    return [frame("instruction", index, words)]


def _arena(program: Program, tier: Tier, moments: _StepMoments) -> list[MemoryBlock]:
    """Return the buffers of one memory at their addresses, and the unused ranges between."""
    blocks = []
    for buffer in program.buffers.values():
        born, dies = moments.number_of(buffer.born), moments.number_of(buffer.dies)
        if buffer.tier is not tier or not buffer.bytes or born >= dies:
            continue
        cause = part_words(str(buffer.kind))
        rows = f"{buffer.name}, rows {buffer.start} to {buffer.stop}"
        frames = [
            frame(cause, max(0, buffer.layer), rows),
            frame("instruction", buffer.born, "Allocate"),
        ]
        blocks.append(MemoryBlock(buffer.bytes, born, dies, cause, frames, ARENA + buffer.address))
    return [*blocks, *_unused(blocks, program.arena_bytes[tier])]


def _unused(blocks: Sequence[MemoryBlock], height: int) -> Iterator[MemoryBlock]:
    """Yield the ranges of an arena that no buffer uses, with the moments of begin and end."""
    frames = [frame(UNUSED, 0, "no buffer has these addresses now")]
    standing: dict[tuple[int, int], int] = {}  # range to when it became free
    for moment in sorted({0, *(b.born for b in blocks), *(b.dies for b in blocks)} - {NEVER}):
        taken = sorted((b.address, b.size) for b in blocks if b.born <= moment < b.dies)
        free, at = set(), ARENA
        for address, held in [*taken, (ARENA + height, 0)]:
            if address > at:
                free.add((at, address))
            at = address + held
        for gone in standing.keys() - free:
            born = standing.pop(gone)
            yield MemoryBlock(gone[1] - gone[0], born, moment, UNUSED, frames, gone[0])
        for new in free - standing.keys():
            standing[new] = moment
    for (start, stop), born in standing.items():
        yield MemoryBlock(stop - start, born, NEVER, UNUSED, frames, start)


def _lasting_blocks(
    program: Program, tier: Tier, parts: Mapping[str, int], walked: int
) -> Iterator[MemoryBlock]:
    """Yield the blocks outside the arena that last all step, such as weights, and one for kernels'
    extra memory: the plan's bytes for cells less `walked`, the bytes that the walk counts."""
    sizes = {
        name: count
        for name, count in parts.items()
        if name not in evaluate.arena_parts(program, tier)
    }
    if tier is Tier.DEVICE:
        cells = sum(sizes.pop(name, 0) for name in ("gradients", "accumulators", "cells"))
        # The walk rounds each weight's slice up; the plan rounds their sum.
        sizes[KERNELS] = max(0, cells - walked)
    for name, count in sizes.items():
        if count:
            words = part_words(name)
            yield MemoryBlock(count, 0, NEVER, words, [frame(words, 0, "all step long")])


# -- PyTorch's dicts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SnapshotDevice:
    """Memory blocks of a device: in an arena of `height` bytes, and others without addresses."""

    placed: list[MemoryBlock]
    rest: list[MemoryBlock]
    height: int


def _snapshot(
    devices: Sequence[_SnapshotDevice], times: Sequence[int], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a snapshot in PyTorch's format, given the microseconds of each moment. Each device has
    one segment for its arena and one for the other blocks."""
    segments, traces = [], []
    for number, device in enumerate(devices):
        placement = place([PlacementRequest(b.size, b.born, b.dies) for b in device.rest])
        blocks = zip(device.rest, placement.addresses, strict=True)
        rest = [replace(block, address=REST + address) for block, address in blocks]
        ranges = [(ARENA, device.height, device.placed), (REST, placement.height, rest)]
        ranges = [one for one in ranges if one[1]]
        segments += [_segment(number, *one) for one in ranges]
        opened = [_entry("segment_alloc", address, size, [], 0) for address, size, _ in ranges]
        traces.append([*opened, *_entries([b for *_, of in ranges for b in of], times)])
    return {"segments": segments, "device_traces": traces, "farspan": dict(about)}


def _entry(action: str, address: int, size: int, frames: Frames, time: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "frames": frames,
        "time_us": time,
    }


def _entries(blocks: Sequence[MemoryBlock], times: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield entries of allocations and frees by time; at one time, frees come first."""
    events = [(b.born, True, index) for index, b in enumerate(blocks)]
    events += [(b.dies, False, index) for index, b in enumerate(blocks) if b.dies < NEVER]
    causes = False
    for moment, is_birth, index in sorted(events):
        block = blocks[index]
        shared = block.address, block.size, block.frames, times[min(moment, len(times) - 1)]
        if not is_birth:
            yield _entry("free_requested", *shared)
            yield _entry("free_completed", *shared)
            continue
        made = _entry("alloc", *shared)
        if block.cause:
            causes, made["category"] = True, block.cause
        yield made
    if causes:
        yield _entry("snapshot", 0, 0, [], times[-1]) | {"category": UNKNOWN}


def _segment(device: int, address: int, size: int, blocks: Iterable[MemoryBlock]) -> dict[str, Any]:
    """Return a segment of the snapshot; its blocks are those that are never freed."""
    pieces, at = list[dict[str, Any]](), address
    for block in sorted((b for b in blocks if b.dies == NEVER), key=lambda b: b.address):
        if block.address > at:
            pieces.append(_piece(at, block.address - at, []))
        pieces.append(_piece(block.address, block.size, block.frames, used=True))
        at = block.address + block.size
    if address + size > at:
        pieces.append(_piece(at, address + size - at, []))
    used = sum(piece["size"] for piece in pieces if piece["requested_size"])
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": pieces,
    }


def _piece(address: int, size: int, frames: Frames, *, used: bool = False) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size if used else 0,
        "state": "active_allocated" if used else "inactive",
        "frames": frames,
    }
