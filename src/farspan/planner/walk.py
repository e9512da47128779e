"""Device memory that a step allocates outside the program's buffers.

A cell's memory depends on its layer, its tokens, the keys before it and its mode. A walk goes
through the program and takes the bytes of each cell from the model's profile.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, lcm
from typing import Any

from farspan.planner.request import Question
from farspan.planner.states import ALONE, Sharing
from farspan.profile.model import (
    CellBytes,
    CellKind,
    ModelProfile,
    ProfiledCells,
    ProfiledStages,
    StageBytes,
    outer_names,
)
from farspan.program.attention_blocks import most_tokens
from farspan.program.dependencies import unread_outputs
from farspan.program.program import (
    MODE_COMPUTE,
    MODE_HELD,
    MODE_NONE,
    Backward,
    Close,
    Embed,
    EmbedBackward,
    Forward,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Store,
    StoreGradient,
)
from farspan.spec import HOST, AttentionKernel, LayerSpec, Schedule, Sparse

# Up to this many chunks, prefixes are exact to the token; beyond, they are rounded up to 1 / STARTS
# of a block of keys.
EXACT_CHUNKS, STARTS = 64, 32
LOSS = 8  # bytes of the step's accumulated loss


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak bytes of a simulated step (a walk), without arenas, inputs and weights."""

    bytes: int
    gradients: int  # of all weights, at the end of a step
    accumulators: int  # of the modules outside the layers and of the widest group

    @property
    def transient(self) -> int:
        return self.bytes - self.gradients - self.accumulators


# Programs of one model share most of their cells; a search walks hundreds of programs.
@lru_cache(maxsize=8)
def _cells(
    profile: ModelProfile,
    batch: int,
    kv_block: int,
    sparse: Sparse | None,
    on_host: bool,
    tile: int,
    sequence: int,
) -> ProfiledCells:
    return ProfiledCells(profile, batch, kv_block, sparse, on_host, tile, sequence)


@dataclass(slots=True)
class _Graph:
    bytes: int
    kept: bool
    cell: CellBytes
    forward: Forward


class Walk:
    """Simulation of the memory that one program's cells allocate, instruction by instruction. Its
    fields hold bytes where the interpreter (`engine.interpreter`) has tensors of the same names."""

    def __init__(
        self,
        program: Program,
        profile: ModelProfile,
        *,
        gradient_bytes: int | None = None,
        sharing: Sharing = ALONE,
        accumulates: bool = False,
    ) -> None:
        """Prepare the simulation. `gradient_bytes` is the size of an element of `.grad`, by default
        that of a weight. With `accumulates`, gradients of earlier batches exist from the start."""
        model, schedule = program.model, program.schedule
        self.program, self.profile = program, profile
        self.wide = model.accumulate_bytes()
        self.final = gradient_bytes or model.element_bytes
        self.sharing = sharing
        # All sums of weights in main memory lie in the program's buffers from the beginning.
        self.streams = program.streams()
        # No gradient of shards in main memory stays on the device.
        self.leaves = schedule.weights is HOST and not self.streams
        self.sums_apart = (self.final != self.wide or sharing.apart) and not self.streams
        self.tile = schedule.mlp_chunk_size
        self.unread: frozenset[tuple[int, int]] = frozenset()
        if self.tile is not None or profile.variant.fused:
            self.unread = unread_outputs(program)
        self.classes = profile.kind_of
        self.adds = profile.variant.adds
        batch, sparse = program.run.batch, (schedule.sparse, schedule.kv is HOST)
        sequence = program.run.tokens if any(layer.indexer for layer in model.layers) else 0
        self.cells = _cells(profile, batch, schedule.kv_block, *sparse, self.tile or 0, sequence)
        most = most_tokens(batch * model.vocab)  # of a piece, as in engine.loss
        piece = min(schedule.loss_chunk_size, max(1, most))
        self.stage = cache(ProfiledStages(profile, batch, piece).get)
        self.weights = [
            [sharing.slice(size) for size in profile.kinds[kind].weights]
            for kind in profile.kind_of
        ]
        names = outer_names(profile)
        self.outer_weights = dict(zip(names, profile.outer.weights, strict=True))
        self.live = self.peak = self.loss = 0
        self.hidden: dict[int, int] = {}
        self.gradient: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.tables: dict[int, int] = {}  # bytes by chunk
        self.begun: set[int] = set()  # layers that have weight gradients
        self.outer: frozenset[str] = frozenset()
        self.kinds: dict[tuple[object, ...], CellBytes] = {}
        self.steps = self._steps()
        self.replaces = accumulates and self.sums_apart  # `.grad` of earlier batches, when closed
        if accumulates or self.streams:
            self._begin_with_gradients()

    def _begin_with_gradients(self) -> None:
        """Allocate all weights' gradients, which are also the sums over chunks if wide enough."""
        if not self.streams:
            outer = sum(self.outer_weights.values())
            self._take(self._final_bytes(sum(map(sum, self.weights)), outer))
        if not self.sums_apart:
            self.begun.update(range(len(self.classes)))
            self.outer = frozenset(self.outer_weights)

    def _steps(self) -> dict[type[Instruction], Callable[[Any], None]]:
        return {
            Embed: self._embed,
            Load: self._load,
            Store: self._store,
            LoadGradient: self._load_gradient,
            StoreGradient: self._store_gradient,
            Forward: self._forward,
            Head: self._head,
            Backward: self._backward,
            EmbedBackward: self._embed_backward,
            Close: self._close,
        }

    def run(self) -> Peak:
        for instruction in self.program.instructions:
            step = self.steps.get(type(instruction))
            if step is not None:
                step(instruction)
        if self.streams:
            return Peak(self.peak, 0, 0)
        layers = [sum(map(sum, self.weights[slice(*group)])) for group in self.program.groups]
        outer = sum(self.outer_weights.values())
        gradients = self._final_bytes(sum(layers), outer)
        sums = self.wide * (outer + max(layers)) if self.sums_apart else 0
        return Peak(self.peak, gradients, sums)

    def _final_bytes(self, layers: int, outer: int = 0) -> int:
        """Return the bytes of `.grad` of `layers` elements in the layers and `outer` outside."""
        return 0 if self.leaves else self.sharing.own(self.final * layers, self.final * outer)

    def _settle(self, layers: int, outer: int = 0) -> None:
        """Free the fp32 sums of gradients and allocate `.grad`, for `layers` weight elements in the
        layers and `outer` outside."""
        size, final = self.wide * (layers + outer), self._final_bytes(layers, outer)
        if self.leaves:
            self._rise(self.sharing.own(self.wide * layers, self.wide * outer))
        self._take(final)
        self.live -= size + final * self.replaces

    def _rise(self, size: int) -> None:
        if self.live + size > self.peak:
            self.peak = self.live + size

    def _take(self, size: int) -> int:
        self.live += size
        self.peak = max(self.peak, self.live)
        return size

    def issue(self, instruction: Instruction) -> None:
        """Count the allocations of one instruction; buffers and copies allocate nothing."""
        step = self.steps.get(type(instruction))
        if step is not None:
            step(instruction)

    def _load(self, i: Load) -> None:
        self.live -= self.hidden.get(i.layer, 0)
        self.hidden[i.layer] = 0

    def _store(self, i: Store) -> None:
        self.live -= self.hidden.pop(i.layer)

    def _load_gradient(self, i: LoadGradient) -> None:
        self.live -= self.gradient.get(i.layer, 0)
        self.gradient[i.layer] = 0

    def _store_gradient(self, i: StoreGradient) -> None:
        self.live -= self.gradient.pop(i.layer)

    def _tokens(self, chunk: int) -> int:
        start, stop = self.program.chunks[chunk]
        return stop - start

    def _embed(self, i: Embed) -> None:
        stage = self.stage("embed", self._tokens(i.chunk), frozenset())
        self._keep_tables(i.chunk, stage)
        self.live += stage.out - self.hidden.get(0, 0)
        self.hidden[0] = stage.out

    def _call(self, chunk: int) -> None:
        if chunk not in self.tables:
            self._keep_tables(chunk, self.stage("tables", self._tokens(chunk), frozenset()))

    def _keep_tables(self, chunk: int, stage: StageBytes) -> None:
        self._rise(stage.rise)
        if not self.program.run.keeps_calls():
            self.live -= sum(self.tables.values())
            self.tables.clear()
        self.live += stage.tables - self.tables.get(chunk, 0)
        self.tables[chunk] = stage.tables

    def _head(self, i: Head) -> None:
        what = "head" if i.gradient else "evaluation"
        stage = self.stage(what, self._tokens(i.chunk), self.outer)
        top = len(self.classes)
        self._rise(stage.rise)
        self.live += LOSS - self.loss - self.hidden.pop(top)
        self.loss = LOSS
        if i.gradient:
            self.gradient[top] = stage.out
            self.live += stage.out
            self._begin_outer(stage.new)

    def _embed_backward(self, i: EmbedBackward) -> None:
        stage = self.stage("embed backward", self._tokens(i.chunk), self.outer)
        self._rise(stage.rise)
        self.live -= self.gradient.pop(0)
        self._begin_outer(stage.new)

    def _begin_outer(self, names: frozenset[str]) -> None:
        self.live += self.wide * sum(self.outer_weights[name] for name in names)
        self.outer |= names

    def _close(self, i: Close) -> None:
        if not self.sums_apart:
            return
        layers = range(*self.program.groups[i.group])
        for size in (s for layer in layers if layer in self.begun for s in self.weights[layer]):
            self._settle(size)
        for size in self.outer_weights.values() if i.group == 0 else ():
            self._settle(0, size)

    # -- cells ---

    def _forward(self, i: Forward) -> None:
        self._call(i.chunk)
        cell = self._cell(i)
        self._rise(cell.forward_rise)
        entered = self.hidden[i.layer] if i.hold else self.hidden.pop(i.layer)
        held = self.held.pop(i.layer, 0) if i.mode is MODE_HELD else 0
        if not i.hold and not (i.graph and cell.saves_input):
            self.live -= entered
            entered = 0
        if i.mode is MODE_NONE:
            return
        if i.graph:
            graph = cell.graph + self.sharing.gathered(cell.out)
            size = graph + held + (0 if i.hold else entered)
            self.live += graph
            self.graphs[i.layer, i.chunk] = _Graph(size, i.kept, cell, i)
        else:
            self.live -= held
        if i.drops:
            return
        self.live += cell.out + cell.held - self.hidden.get(i.layer + 1, 0)
        self.hidden[i.layer + 1] = cell.out
        if i.hold:
            self.held[i.layer] = cell.held

    def _backward(self, i: Backward) -> None:
        graph = self.graphs.pop((i.layer, i.chunk))
        cell = graph.cell
        if cell.sums and i.layer in self.begun:  # since the backward of a later chunk, also kept
            cell = self._cell(graph.forward)
        self.live -= self.hidden.pop(i.layer + 1, 0)
        self._rise(cell.backward_rise)
        weight_gradients = self.sharing.slice(cell.weight_gradients)
        self.live += cell.gradient + weight_gradients + cell.sums - graph.bytes
        self.live -= self.gradient.pop(i.layer + 1)
        if i.layer not in self.begun:
            self.begun.add(i.layer)
            self._take(self.wide * sum(self.weights[i.layer]) - cell.sums)
        self.live -= weight_gradients
        if graph.kept:
            self.live -= self.hidden.pop(i.layer, 0)
        self.gradient[i.layer] = cell.gradient

    def _cell(self, i: Forward) -> CellBytes:
        buffered = i.attention is not None
        tiled = self._tiled(i)
        run = i.mode, buffered, i.graph, i.kept, i.hold, *tiled, i.chooses
        key = self.classes[i.layer], i.chunk, *run
        if key not in self.kinds:
            start, stop = self.program.chunks[i.chunk]
            reads = i.mode is MODE_COMPUTE or i.graph
            kind = CellKind(
                self.classes[i.layer],
                stop - start,
                self._alike_start(start, self.program.model.layers[i.layer]) if reads else 0,
                *run,
            )
            self.kinds[key] = self.cells.get(kind)
        return self.kinds[key]

    def _tiled(self, i: Forward) -> tuple[bool, bool, bool]:
        """Return whether the cell runs on tiles, whether its output is read, and whether it
        allocates the sums of weight gradients."""
        fresh = i.graph and i.layer not in self.begun
        if self.tile is None or i.kept or self._tokens(i.chunk) <= self.tile:
            value = not i.graph or self.tile is not None or (i.layer, i.chunk) not in self.unread
            return False, value, fresh and self.adds
        value = not i.graph or (i.layer, i.chunk) not in self.unread
        return True, value, fresh

    def _alike_start(self, start: int, layer: LayerSpec) -> int:
        """Return an earlier start of a chunk that sees equal blocks, so that both share a result.
        The earlier chunk sees fewer full blocks, which run in turn, so its peak is the same."""
        schedule = self.program.schedule
        size, chunks, window = schedule.kv_block, len(self.program.chunks), layer.window
        step = 1 if chunks <= EXACT_CHUNKS else max(1, size // STARTS)
        start = -(-start // step) * step
        if schedule.sparse is not None and window is None:
            return start  # the number of pages to choose from depends on it
        if layer.indexer is not None:
            return start  # and here that of tokens
        if layer.chunked and window is not None:
            alike = lcm(size, window)
            return start - max(0, start // alike - 1) * alike
        first = 0 if window is None else start - min(start, window + size)
        return start - max(0, first // size if window is not None else start // size - 2) * size


# -- kernels' workspaces ------------------------------------------------------------------------

MOST_PROCESSORS = 192  # of a device whose machine file does not say; more than any has
ROWS, COLUMNS = 128, 32  # flash attention rounds queries and heads up to multiples
HALF = ("bfloat16", "float16")


def workspace_bytes(question: Question, schedule: Schedule) -> int:
    """Workspace bytes of the largest attention call, or of casts for FP8 products if these take
    more; `schedule` is in the device's own tokens (`own_schedule`). If unmeasured, only the sums of
    dQ of deterministic kernels count."""
    attention = max(_bytes(question, schedule, spec) for spec in question.model.layers)
    if question.kernels.products is None:
        return attention
    widths = {pair for spec in question.model.layers for pair in spec.work.products}
    queries, _ = _rows(question, schedule)
    return max(attention, cast_bytes(widths, question.run.batch * queries))


def cast_bytes(widths: Iterable[tuple[int, int]], rows: int) -> int:
    """Return the bytes that casts of the largest operand of FP8 products take, for products of
    these (inner, outer) widths: two float32 copies of it. On a CPU 7.4 bytes an element were
    measured with torchao 0.18."""
    largest = (max(rows * max(pair), pair[0] * pair[1]) for pair in widths)
    return 8 * max(largest, default=0)


def _bytes(question: Question, schedule: Schedule, spec: LayerSpec) -> int:
    rates, batch = question.machine.rates.get(question.dtype), question.run.batch
    queries, keys = _rows(question, schedule)
    width = max(spec.head_dim, spec.value_dim)
    measured = 0.0 if rates is None else rates.attention_workspace
    found = ceil(measured * batch * (queries + keys) * spec.query_heads * width)
    if not spec.attends() or not _sums_apart(question):
        return found
    processors = question.machine.processors or MOST_PROCESSORS
    layout = question.layout
    heads = batch * ceil(spec.query_heads / (layout.ulysses * layout.tensor))  # of this device
    sums = ceil(processors / heads) - (measured > 0)  # one sum is in the measurement
    of_one = _round_up(queries, ROWS) * batch * spec.query_heads * _round_up(width, COLUMNS) * 4
    return found + sums * of_one


def _sums_apart(question: Question) -> bool:
    """Return whether deterministic flash attention 2 runs, which keeps several sums of dQ."""
    kernels = question.kernels
    flash = kernels.attention in (AttentionKernel.AUTO, AttentionKernel.FLASH)
    on_gpu = not question.machine.on_cpu and question.dtype in HALF
    return kernels.deterministic and flash and on_gpu


def _rows(question: Question, schedule: Schedule) -> tuple[int, int]:
    layout = question.layout
    # Heads shared among ranks count as this rank's tokens; shards see the queries of all.
    own = -(-question.run.tokens // layout.sequence())
    return min(own, schedule.chunk) * layout.shards, min(own, schedule.kv_block)


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
