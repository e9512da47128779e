"""HTML page of a plan and its alternatives: a step's memory, and how it visits layers and chunks.

A step is drawn in frames, each of an equal number of neighbouring cells. A frame shows the memory
of the fullest moment in it, so that no peak is lost. At most `ROWS_SHOWN` layers and
`COLUMNS_SHOWN` chunks of the grid are shown, including both ends; each is drawn as itself, not as
an average. Memory outside the program's buffers (weights, gradients, transients of a cell) is drawn
at its planned maximum throughout."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from farspan.formatting import write_most, write_tokens
from farspan.planner.evaluate import most_layers, stage_schedule
from farspan.planner.remedies import part_words
from farspan.planner.request import Budget, Plan
from farspan.program.builder import chunks_of
from farspan.program.program import (
    Allocate,
    AttentionMode,
    Backward,
    Buffer,
    Evict,
    Fetch,
    Forward,
    Free,
    Head,
    Instruction,
    Program,
    Store,
    StoreGradient,
)
from farspan.program.residency import RESIDENCY, CutInto, Kind
from farspan.report.page import html_page
from farspan.report.plan import (
    BOUND,
    LANES,
    MFU_CONVENTION,
    NOTHING_HELPS,
    change_words,
    devices_words,
    notes,
    short_words,
    step_spans,
    subject,
    verdict_lines,
)
from farspan.report.tables import memory_text, schedule_words
from farspan.spec import VERSION, Tier, UnsupportedError

FRAMES, ROWS_SHOWN, COLUMNS_SHOWN = 600, 48, 64  # most frames, layers, chunks drawn
PHASES = 60  # rows of the walk's table
LEVELS = 2**14  # resolution of memory charts: bytes are rounded to peak / LEVELS
# Kinds of tensors that a cell leaves behind, in the order of their bits in its state.
LEFT = (Kind.KV, Kind.DKV, Kind.ATTENTION, Kind.ACTIVATIONS)
PLACE = {Tier.HOST: 1, Tier.DEVICE: 2}
COMPUTED, AGAIN, DONE = (phase << 2 * len(LEFT) for phase in (1, 2, 3))
OPERATIONS = {
    AttentionMode.COMPUTE: "forward",
    AttentionMode.NONE: "K, V of the forward",
    AttentionMode.GIVEN: "forward, attention outputs given",
    AttentionMode.HELD: "forward, attention outputs held",
}
BACKWARD, LOSS = "backward", "loss and its gradient"
NAMES = (*OPERATIONS.values(), BACKWARD, LOSS)
Cells = Forward | Backward | Head


@dataclass(frozen=True, slots=True)
class StepFrames:
    """Division of a step into frames, the pictures of the page's animation. Frame i ends before
    instruction `ends[i]`, and has instruction `shown[i]` as its label."""

    ends: tuple[int, ...]
    shown: tuple[int, ...]
    cells: int  # number of cells in the whole step

    def of(self, index: int) -> int:
        """Return the number of the frame to which the instruction at `index` belongs."""
        return min(bisect_left(self.ends, index + 1), len(self.ends) - 1)


def frames_of(program: Program, most: int, layers: set[int], chunks: set[int]) -> StepFrames:
    """Divide a program into at most `most` frames with equally many cells. A frame's label is its
    last cell that the page shows (one of `layers` and `chunks`), or else its last cell."""
    instructions = program.instructions
    cells = [index for index, i in enumerate(instructions) if isinstance(i, Cells)]
    count = min(most, len(cells))
    ends, shown = [], []
    for frame in range(count):
        members = cells[frame * len(cells) // count : (frame + 1) * len(cells) // count]
        seen = [i for i in members if _is_shown(instructions[i], layers, chunks)]
        shown.append((seen or members)[-1])
        ends.append(members[-1] + 1)
    ends[-1] = len(instructions)
    return StepFrames(tuple(ends), tuple(shown), len(cells))


def _is_shown(i: Instruction, layers: set[int], chunks: set[int]) -> bool:
    return isinstance(i, Forward | Backward) and i.layer in layers and i.chunk in chunks


def thinned(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers of a sequence, with the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    last = len(numbers) - 1
    return [numbers[round(place * last / (most - 1))] for place in range(most)]


def step_json(
    plan: Plan, frames: int = FRAMES, rows: int = ROWS_SHOWN, columns: int = COLUMNS_SHOWN
) -> dict[str, Any]:
    """Return a plan's step as data for `farspan.step` of the page: the `time` of each frame
    (seconds from the step's start), memory by tier and cause, and the order of layers and cells."""
    program, spans = step_spans(plan)
    begins = {span.index: span.start for span in spans if span.lane == "compute"}
    end = max((span.end for span in spans), default=0.0)
    at, drawn = drawn_walk(program, begins, end, frames, rows, columns)
    return drawn | {
        "device": _memory(plan.device, program, Tier.DEVICE, at),
        "host": _memory(plan.host, program, Tier.HOST, at),
    }


def drawn_walk(
    program: Program,
    begins: Mapping[int, float],
    end: float,
    frames: int = FRAMES,
    rows: int = ROWS_SHOWN,
    columns: int = COLUMNS_SHOWN,
) -> tuple[StepFrames, dict[str, Any]]:
    """Return a step's frames, and the data from which the page draws its cells. `begins[i]` is when
    instruction i begins, and `end` when the step ends, in seconds from the step's start."""
    groups = [program.groups[group] for group in program.own_groups()]
    layers = thinned(range(groups[0][0], groups[-1][1]), rows)
    chunks = thinned(range(len(program.chunks)), columns)
    at = frames_of(program, frames, set(layers), set(chunks))
    return at, {
        "seconds": end,
        "time": [_rounded(when, end) for when in _times(at, begins)],
        "walk": walk_json(program, at, layers, chunks),
        "phases": list(_phases(program, begins, end)),
        "thinned": _omitted_words(program, at, len(layers), len(chunks)),
    }


def _times(at: StepFrames, begins: Mapping[int, float]) -> list[float]:
    """Return the start time of each frame in seconds, never before the previous frame's."""
    starts, now = [], 0.0
    for index in at.shown:
        now = max(now, begins.get(index, now))
        starts.append(now)
    return starts


def _rounded(when: float, end: float) -> float:
    return float(f"{when:.6g}") if when < end else end


# -- a plan ----------------------------------------------------------------------------------------

ALTERNATIVE = {"frames": 240, "rows": 24, "columns": 24}  # for all plans but the first
MOST_PLANS = 12  # plans whose steps are drawn
DRAWN = (
    "Planned, not measured. Transients of a cell, weights and gradients are drawn at "
    "their maximum throughout; the optimizer's update follows the step or overlaps the next."
)


@dataclass(frozen=True, slots=True)
class PageOf:
    """Content of a page: `plans`, the best plan for a context and its alternatives, and `longest`,
    the plans with the longest contexts, by strategy."""

    plans: Sequence[Plan]
    longest: Mapping[str, Plan] = field(default_factory=dict)
    strategies: Sequence[str] = ()  # all that were tried for the longest contexts
    max_step: float = math.inf  # seconds a step of the longest contexts
    words: Sequence[str] = ()  # description of the planned run
    command: str = ""


def plan_page(page: PageOf) -> str:
    """Return a page about plans as HTML. Raises UnsupportedError if there is no plan to show."""
    longest = sorted(
        page.longest.values(), key=lambda plan: (-plan.question.run.tokens, plan.seconds.total)
    )
    plans = [*page.plans, *longest]
    if not plans:
        raise UnsupportedError("html: no strategy fits at any context, so there is nothing to show")
    first = plans[0]
    data = {
        "about": f"Planned for {first.question.machine.name}; no step was run.",
        "command": page.command,
        "machine": _machine(first),
        "words": list(page.words),
        "plans": [plan_json(plan, place) for place, plan in enumerate(plans)],
        "longest": len(page.plans),
        "max_step": page.max_step,
        "without": [name for name in page.strategies if name not in page.longest],
        "drawn": DRAWN,
        "mfu": MFU_CONVENTION,
    }
    tokens = write_tokens(first.question.run.tokens)
    return html_page(f"{first.question.model.name}, {tokens} tokens", data, "plan.js")


def _machine(plan: Plan) -> dict[str, str]:
    question = plan.question
    return {
        "machine": devices_words(question),
        "memory": memory_text(question.machine)
        .plain.strip()
        .removeprefix(f"{question.machine.name}: "),
        "farspan": VERSION,
    }


def plan_json(plan: Plan, index: int) -> dict[str, Any]:
    """Return a plan as data for the page: `Plan.to_json`, and more if it is the `first` plan."""
    question = plan.question
    schedule, layers = stage_schedule(question, plan.schedule), most_layers(question)
    chunks = chunks_of(question.model, question.run.tokens, plan.schedule, question.layout)
    seconds = plan.seconds
    busy = {LANES[name]: getattr(seconds, name) for name in LANES}
    busy["waiting, nothing is computed"] = seconds.exposed(overlap=question.overlap)
    drawn = None
    if plan.fits and index < MOST_PLANS:
        drawn = step_json(plan) if index == 0 else step_json(plan, **ALTERNATIVE)
    return {
        "strategy": plan.strategy,
        "subject": subject(plan),
        "tokens": question.run.tokens,
        "fits": plan.fits,
        "tight": plan.tight,
        "verdict": verdict_lines(plan) if plan.fits else [short_words(plan)],
        "changes": [*change_words(plan)] or [NOTHING_HELPS] * (not plan.fits and index == 0),
        "notes": list(notes(plan)),
        "device": _budget(plan.device),
        "host": _budget(plan.host),
        "unified": question.machine.unified,
        "seconds": seconds.total,
        "bound": BOUND[seconds.bound],
        "busy": [[name, time] for name, time in busy.items() if time > 0],
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "schedule": schedule_words(schedule, layers, len(chunks)) if plan.fits else [],
        "why": plan.reason if plan.fits else "",
        "gap": write_most(plan.gap) if plan.gap > 0 else "",
        "chunk": min(schedule.chunk, question.run.tokens),
        "groups": len(schedule.group_sizes(layers)),
        "attention": schedule.attention_save_fraction,
        "activations": schedule.activation_save_fraction * schedule.activation_save_layers,
        "step": drawn,
    }


def _budget(budget: Budget) -> dict[str, Any]:
    """Return one memory's bytes by cause as data for the page, the largest first."""
    parts = sorted(budget.parts.items(), key=lambda part: -part[1])
    return {
        "total": budget.total,
        "limit": budget.limit,
        "parts": [[name, part_words(name), size] for name, size in parts],
    }


# -- memory ----------------------------------------------------------------------------------------


def _memory(budget: Budget, program: Program, tier: Tier, at: StepFrames) -> dict[str, Any]:
    """Return one memory's bytes by cause for the page's chart, the lowest in the chart first. A
    constant cause has its bytes. A varying one has a value per frame, in units of `unit` bytes, at
    the moment of the frame at which the memory is fullest."""
    varying = _buffer_bytes(program, tier, at)
    unit = max(1, budget.total // LEVELS)
    causes = []
    for name, size in budget.parts.items():
        values = varying.get(name, [size])
        flat = len(set(values)) == 1
        shown = values[0] if flat else [round(value / unit) for value in values]
        causes.append({"key": name, "name": part_words(name), "values": shown})
    causes.sort(key=lambda cause: isinstance(cause["values"], list))
    return {"limit": budget.limit, "total": budget.total, "unit": unit, "causes": causes}


def _buffer_bytes(program: Program, tier: Tier, at: StepFrames) -> dict[str, list[int]]:
    """Return, by cause, the bytes of live buffers at the fullest instruction of each frame."""
    live: dict[str, int] = defaultdict(int)
    fullest_by_part: dict[str, list[int]] = defaultdict(list)
    start = 0
    for end in at.ends:
        total = most = sum(live.values())
        fullest = dict(live)
        for i in program.instructions[start:end]:
            if not isinstance(i, Allocate | Free):
                continue
            buffer = program.buffers[i.buffer]
            if buffer.tier is not tier:
                continue
            size = buffer.bytes if isinstance(i, Allocate) else -buffer.bytes
            live[_budget_part(buffer)] += size
            total += size
            if total > most:
                most, fullest = total, dict(live)
        for name in live:
            missing = [0] * (len(fullest_by_part["frames"]) - len(fullest_by_part[name]))
            fullest_by_part[name] += [*missing, fullest.get(name, 0)]
        fullest_by_part["frames"].append(0)
        start = end
    del fullest_by_part["frames"]
    return dict(fullest_by_part)


def _budget_part(buffer: Buffer) -> str:
    """Return the cause under which a buffer's bytes count, as in `evaluate.arena_parts`."""
    is_slot = buffer.layer < 0 and RESIDENCY[buffer.kind].rows is not CutInto.GROUPS
    return "slots" if is_slot else str(buffer.kind)


# -- the walk --------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """Key of a tensor in `_Grid`, which cell (layer, chunk) leaves in memory. For kind X: the
    chunk's hidden states that enter a group of layers; `layer` is then the group's number."""

    kind: Kind
    layer: int
    chunk: int


@dataclass(slots=True)
class _Grid:
    """State of the page's grid of cells while a program's instructions are followed one by one:
    which buffers hold each cell's tensors, and whether its forward or backward has run."""

    program: Program
    layers: dict[int, int]  # layer to its row on the page
    chunks: dict[int, int]  # chunk to its column on the page
    holders: dict[_Tensor, set[str]] = field(default_factory=lambda: defaultdict(set))
    held: dict[str, set[_Tensor]] = field(default_factory=lambda: defaultdict(set))
    phases: dict[tuple[int, int], int] = field(default_factory=dict)
    changed: set[_Tensor] = field(default_factory=set)

    def follow(self, i: Instruction) -> None:
        match i:
            case Forward():
                self._forward(i)
            case Backward(layer, chunk):
                self._phase(layer, chunk, DONE)
                self._drop(f"graph of {layer}, {chunk}")
            case Store(_, chunk, buffer) | StoreGradient(_, chunk, buffer):
                self._put(buffer, chunk)
            case Fetch(_, target, chunk) | Evict(_, target, chunk):
                self._put(target, chunk)
            case Free(buffer):
                self._drop(buffer)
            case Allocate(buffer) if self.program.buffers[buffer].kind is Kind.DKV:
                for chunk in self.chunks:  # the buffer has the sums of all chunks from here on
                    self._put(buffer, chunk)

    def _forward(self, i: Forward) -> None:
        again = (i.layer, i.chunk) in self.phases
        self._phase(i.layer, i.chunk, AGAIN if again else COMPUTED)
        for buffer in (i.write_kv, i.attention, i.activations):
            if buffer is not None:
                self._put(buffer, i.chunk, i.layer)
        if i.graph:
            self._hold(
                f"graph of {i.layer}, {i.chunk}", _Tensor(Kind.ACTIVATIONS, i.layer, i.chunk)
            )

    def _phase(self, layer: int, chunk: int, phase: int) -> None:
        if layer in self.layers and chunk in self.chunks:
            self.phases[layer, chunk] = phase
            self.changed.add(_Tensor(Kind.KV, layer, chunk))

    def _put(self, name: str, chunk: int, layer: int | None = None) -> None:
        """Record that a buffer holds a chunk's tensors. Does nothing for a slot, whose layer is -1
        because it holds any layer's tensors in turn."""
        buffer = self.program.buffers[name]
        if buffer.layer >= 0:
            self._hold(name, _Tensor(buffer.kind, buffer.layer if layer is None else layer, chunk))

    def _hold(self, name: str, cell: _Tensor) -> None:
        if cell.chunk not in self.chunks:
            return
        self.holders[cell].add(name)
        self.held[name].add(cell)
        self.changed.add(cell)

    def _drop(self, name: str) -> None:
        for cell in self.held.pop(name, ()):
            self.holders[cell].discard(name)
            self.changed.add(cell)

    def place(self, kind: Kind, layer: int, chunk: int) -> int:
        """Return the fastest memory that holds a tensor: 2 the device, 1 the host, 0 none."""
        buffers = self.program.buffers
        tiers = (
            buffers[name].tier if name in buffers else Tier.DEVICE
            for name in self.holders[_Tensor(kind, layer, chunk)]
        )
        return max((PLACE[tier] for tier in tiers), default=0)

    def state(self, layer: int, chunk: int) -> int:
        """Return a cell's state as bits: two for each tensor's memory, and above them the phase."""
        bits = (self.place(kind, layer, chunk) << 2 * n for n, kind in enumerate(LEFT))
        return sum(bits) + self.phases.get((layer, chunk), 0)


def walk_json(
    program: Program, at: StepFrames, layers: Sequence[int], chunks: Sequence[int]
) -> dict[str, Any]:
    """Return the data of the page's grid of cells (`farspan.walk`): each frame's operation, and a
    list for each cell and for each group's input. A list [frame, state, frame, state, ...] has the
    frames in which the state changes, each with the new state."""
    rows = {layer: row for row, layer in enumerate(layers)}
    columns = {chunk: column for column, chunk in enumerate(chunks)}
    first = [program.groups[group][0] for group in program.own_groups()]
    groups = [(group, layer) for group, layer in enumerate(first) if layer in rows]
    cells: list[list[int]] = [[] for _ in range(len(rows) * len(columns))]
    inputs: list[list[int]] = [[] for _ in range(len(groups) * len(columns))]
    of_group = {group: row for row, (group, _) in enumerate(groups)}
    walked, start = _Grid(program, rows, columns), 0
    for frame, end in enumerate(at.ends):
        for i in program.instructions[start:end]:
            walked.follow(i)
        for kind, layer, chunk in walked.changed:
            if kind is Kind.X:
                row, states, value = of_group.get(layer), inputs, walked.place(kind, layer, chunk)
            else:
                row, states, value = rows.get(layer), cells, walked.state(layer, chunk)
            if row is not None:
                _add_state(states[row * len(columns) + columns[chunk]], frame, value)
        walked.changed.clear()
        start = end
    shown = [program.instructions[index] for index in at.shown]
    return {
        "ops": list(NAMES),
        "op": [NAMES.index(_operation(i)) for i in shown],
        "layer": [getattr(i, "layer", -1) for i in shown],
        "chunk": [getattr(i, "chunk", -1) for i in shown],
        "kinds": [part_words(kind) for kind in LEFT],
        "layers": list(layers),
        "chunks": list(chunks),
        "groups": [layer for _, layer in groups],
        "cells": cells,
        "inputs": inputs,
    }


def _add_state(states: list[int], frame: int, state: int) -> None:
    """Append a state that begins in this frame, if it differs from the previous state."""
    if states[1::2][-1:] == [state]:
        return
    if states[-2:-1] == [frame]:
        states[-1] = state
    else:
        states += [frame, state]


def _operation(i: Instruction) -> str:
    match i:
        case Forward():
            return OPERATIONS[i.mode]
        case Backward():
            return BACKWARD
        case _:
            return LOSS


# -- the walk in words -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Phase:
    """Consecutive cells of a group of layers that run in one direction."""

    group: int
    forward: bool  # all cells run forward for the first time
    begin: float
    kinds: dict[str, None] = field(default_factory=dict)  # operations, in order
    layers: set[int] = field(default_factory=set)
    chunks: list[int] = field(default_factory=list)

    def row(self, end: float) -> list[Any]:
        layers, chunks = sorted(self.layers), self.chunks
        return [
            " and ".join(self.kinds),
            _span(layers[0], layers[-1]),
            _chunk_order(chunks),
            _rounded(self.begin, end),
            _rounded(end - self.begin, end),
        ]


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _chunk_order(chunks: list[int]) -> str:
    if chunks[0] == chunks[-1]:
        turn = max(chunks, key=lambda chunk: abs(chunk - chunks[0]))
        return _span(chunks[0], turn) + (" and back" if turn != chunks[0] else "")
    return _span(chunks[0], chunks[-1])


def _phases(program: Program, begins: Mapping[int, float], end: float) -> Iterator[list[Any]]:
    """Yield a row for each pass over a group: operation, layers, chunks, start and duration in
    seconds. If there are more than `PHASES` rows, one row sums up those in the middle."""
    passes = list(_passes(program, begins))
    ends = [*(phase.begin for phase in passes[1:]), end]
    rows = [phase.row(when) for phase, when in zip(passes, ends, strict=True)]
    if len(rows) > PHASES:
        left = len(rows) - PHASES
        between = rows[PHASES // 2 : -(PHASES // 2)]
        took = _rounded(sum(row[-1] for row in between), end)
        rows[PHASES // 2 : -(PHASES // 2)] = [
            [f"{left} more of the same", "", "", between[0][-2], took]
        ]
    yield from rows


def _passes(program: Program, begins: Mapping[int, float]) -> Iterator[_Phase]:
    group_of = {layer: group for group, ends in enumerate(program.groups) for layer in range(*ends)}
    seen: set[tuple[int, int]] = set()
    phase: _Phase | None = None
    now = 0.0
    for index, i in enumerate(program.instructions):
        if not isinstance(i, Forward | Backward):
            continue
        now = max(now, begins.get(index, now))
        forward = isinstance(i, Forward)
        first = forward and (i.layer, i.chunk) not in seen
        seen.add((i.layer, i.chunk))
        kind = "backward" if not forward else "forward" if first else "forward again"
        group = group_of[i.layer]
        if phase is None or (phase.group, phase.forward) != (group, first):
            if phase is not None:
                yield phase
            phase = _Phase(group, first, now)
        phase.kinds[kind] = None
        phase.layers.add(i.layer)
        phase.chunks.append(i.chunk)
    if phase is not None:
        yield phase


def _omitted_words(program: Program, at: StepFrames, rows: int, columns: int) -> str:
    """Describe which layers, chunks and cells a page leaves out; empty if it shows all."""
    layers = sum(stop - first for first, stop in (program.groups[g] for g in program.own_groups()))
    chunks, parts = len(program.chunks), list[str]()
    if at.cells > len(at.ends):
        parts.append(f"positions: {len(at.ends)} of {at.cells:,} cells, all peaks of memory")
    if layers > rows:
        parts.append(f"{rows} of {layers} layers")
    if chunks > columns:
        parts.append(f"{columns} of {chunks:,} chunks")
    return f"Reduced to fit on a page: {', '.join(parts)}." if parts else ""
