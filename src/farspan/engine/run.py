"""The interpreter of a program: one match over its instructions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from farspan.attention.cell import AttentionCall
from farspan.attention.sparse.select import Selector
from farspan.engine.attending import Attending
from farspan.engine.batch import IGNORED, Batch
from farspan.engine.cell import Cell, CellDone, Entry, Rows
from farspan.engine.deal import Dealt
from farspan.engine.gradients import Gradients
from farspan.engine.head import Head as HeadStage
from farspan.engine.kernels import AttentionKernels
from farspan.engine.layers import Layers
from farspan.engine.prefix import Prefix, Slots
from farspan.engine.sparse import SparseRun
from farspan.engine.storage import Storage
from farspan.models.boundary import Boundary, LayerCall
from farspan.models.route import answering
from farspan.parallel.pipeline import Pipeline
from farspan.plan import names
from farspan.plan.program import (
    Allocate,
    AttentionMode,
    Backward,
    Clear,
    Close,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Receive,
    Release,
    Send,
    Store,
    StoreGradient,
)
from farspan.plan.sizes import cell_place
from farspan.plan.waits import Order
from farspan.spec import Tier
from farspan.transfer.copies import Followed
from farspan.transfer.saved import SavedCell


@dataclass(frozen=True, slots=True)
class _Graph:
    """A cell's autograd graph, waiting for its backward."""

    out: GradientEdge
    anchor: Tensor
    sink: list[Tensor]  # takes the gradient of the layer's input
    cell: Cell
    saved: SavedCell | None  # of a kept graph


@dataclass(slots=True)
class Interpreter:
    """Runs one program on one batch."""

    boundary: Boundary
    program: Program
    storage: Storage
    batch: Batch
    head: HeadStage
    gradients: Gradients
    after: Callable[[Instruction], None]  # called when an instruction was issued
    layers: Layers
    kernels: AttentionKernels
    select: Selector | None = None  # of pages, where attention is sparse
    watched: tuple[int, int] | None = None  # the sparse cell whose seen mass is measured
    dealt: Dealt | None = None  # None: this process is alone
    slots: Slots = field(init=False)
    attending: Attending = field(init=False)
    sparse: SparseRun | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    gradient: dict[int, Tensor] = field(default_factory=dict)
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    calls: tuple[int, list[LayerCall]] = (-1, [])  # of the chunk at hand
    loss: Tensor | None = None
    pipeline: Pipeline | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.slots = Slots(self.storage.copies)
        ranks = None if self.dealt is None else self.dealt.ranks
        self.attending = Attending(self.program, self.batch, self.kernels, ranks)
        if ranks is not None and ranks.layout.pipeline > 1:
            self.pipeline = Pipeline(ranks.among("pipeline"))
        sparse = self.program.schedule.sparse
        if sparse is not None and self.select is not None:
            self.sparse = SparseRun(
                *(self.storage, self.slots, sparse, self.select, self.kernels),
                *(self.attending.documents, self.watched),
            )

    def run(self, orders: tuple[Order, ...] | None = None) -> Tensor:
        """The mean loss, a float64 scalar. `orders` are the waits when copies run beside the
        computation."""
        followed = None if orders is None else Followed(self.storage.copies, orders)
        for index, instruction in enumerate(self.program.instructions):
            if followed is not None:
                followed.before(index)
            self._issue(instruction)
            if followed is not None:
                followed.after(index)
            self.after(instruction)
        if self.pipeline is not None:
            self.pipeline.finish()
        if self.loss is None:  # another stage has the head
            return torch.zeros((), dtype=torch.float64, device=self.boundary.device)
        return self.loss

    def _issue(self, instruction: Instruction) -> None:
        match instruction:
            case Allocate() | Free():
                pass  # addresses are planned: nothing happens at run time
            case Clear(buffer):
                self.storage.clear(buffer)
            case Fetch(source, target, chunk) | Evict(source, target, chunk):
                self.storage.copy_chunk(source, target, chunk)
            case Embed(chunk):
                self.hidden[0] = self._embed(chunk)
            case Load(layer, chunk, buffer):
                self.hidden[layer] = self._load(buffer, chunk)
            case Store(layer, chunk, buffer):
                self._store(buffer, chunk, self.hidden.pop(layer))
            case LoadGradient(layer, chunk, buffer):
                self.gradient[layer] = self._load(buffer, chunk)
            case StoreGradient(layer, chunk, buffer):
                self._store(buffer, chunk, self.gradient.pop(layer))
            case Forward():
                self._forward(instruction)
            case Head(chunk, gradient):
                self._head(chunk, gradient)
            case Backward():
                self._backward(instruction)
            case EmbedBackward(chunk):
                self._embed_backward(chunk)
            case Close(group):
                self._close(group)
            case Gather() | Release():
                self._weights(instruction)
            case Receive(layer, chunk, gradient):
                bank = self.gradient if gradient else self.hidden
                bank[layer] = self._pipeline().receive(self._passing(chunk), up=not gradient)
            case Send(layer, chunk, gradient):
                tensor = (self.gradient if gradient else self.hidden).pop(layer)
                self._pipeline().send(tensor, up=not gradient)

    # -- stages outside the layers -------------------------------------------------------------

    def _span(self, chunk: int) -> slice:
        """The tokens of a chunk that this rank runs: its own, or a filler."""
        start, stop = self.program.share.tokens.ranges[chunk]
        if not self.attending.is_filler(chunk):
            return slice(start, stop)
        start = min(start, self.program.run.tokens - 1)
        return slice(start, start + 1)

    def _embed(self, chunk: int) -> Tensor:
        span = self._span(chunk)
        with torch.no_grad():
            hidden, calls = self.boundary.embed(
                self.batch.input_ids[:, span], self.batch.position_ids[:, span]
            )
        if self.program.share.rank.layout.tensor == 1:
            self.calls = chunk, calls
        return hidden

    def _embed_backward(self, chunk: int) -> None:
        gradient = self.gradient.pop(0)
        parameters = self.head.parameters
        span = self._span(chunk)
        with torch.enable_grad():
            hidden, _ = self.boundary.embed(
                self.batch.input_ids[:, span], self.batch.position_ids[:, span]
            )
        if hidden.requires_grad:
            found = torch.autograd.grad(hidden, parameters, gradient, allow_unused=True)
            self.gradients.add(parameters, found)

    def _head(self, chunk: int, gradient: bool) -> None:
        layer = len(self.boundary.layers)
        hidden, targets = self.hidden.pop(layer), self.batch.targets[:, self._span(chunk)]
        if self.attending.is_filler(chunk):
            targets = torch.full_like(targets, IGNORED)
        if gradient:
            loss, self.gradient[layer] = self.head.loss_and_gradient(
                hidden, targets, self.gradients
            )
        else:
            loss = self.head.loss(hidden, targets)
        self.loss = loss if self.loss is None else self.loss + loss

    def _close(self, group: int) -> None:
        layers = range(*self.program.groups[group])
        # Ranks of a pipeline close what is outside the layers together.
        outer = group == 0 or self.pipeline is not None
        if self.dealt is not None:
            for unit in [*layers, *[self.dealt.sharded.outer] * outer]:
                self.gradients.reduce(unit)
            return
        for layer in layers:
            self.gradients.close(self.boundary.layers[layer].parameters())
        if outer:
            self.gradients.close(self.head.parameters)

    def _weights(self, i: Gather | Release) -> None:
        assert self.dealt is not None
        move = self.dealt.gather if isinstance(i, Gather) else self.dealt.release
        move(self.program, i.group, outer=i.outer)

    def _pipeline(self) -> Pipeline:
        assert self.pipeline is not None
        return self.pipeline

    def _passing(self, chunk: int) -> Tensor:
        """Memory for the rank's tokens of a chunk between layers, [B, C, hidden]."""
        span, run = self._span(chunk), self.program.run
        shape = run.batch, span.stop - span.start, self.program.model.hidden
        return torch.empty(shape, dtype=self.storage.dtype, device=self.boundary.device)

    def _x(self, buffer: str, chunk: int) -> Tensor:
        """[B, C, hidden] of a chunk in a buffer or slot of x."""
        return self.storage.chunk(buffer, chunk, 0)["x"]

    def _load(self, buffer: str, chunk: int) -> Tensor:
        rows = self._x(buffer, chunk)
        if self.attending.is_filler(chunk):
            return rows.new_zeros(len(rows), 1, rows.shape[2])
        return rows

    def _store(self, buffer: str, chunk: int, rows: Tensor) -> None:
        place = self._x(buffer, chunk)
        place.copy_(rows[:, : place.shape[1]])

    # -- cells -----------------------------------------------------------------------------------

    def _forward(self, i: Forward) -> None:
        hidden = self.hidden[i.layer] if i.hold else self.hidden.pop(i.layer)
        cell = Cell(
            i.mode,
            partial(self._attention_call, i.layer, i.chunk),
            self._prefix(i.layer, i.chunk, i.prefix),
            write_kv=self._rows(i.write_kv, i.chunk, i.layer),
            attention=self._rows(i.attention, i.chunk, i.layer),
            held=self.held.pop(i.layer) if i.mode is AttentionMode.HELD else None,
            kept=i.kept,
            sparse=None if self.sparse is None else self.sparse.cell(i),
            exchange=self.attending.exchange(i.chunk),
            spread=self.attending.spread(i.layer, i.chunk),
            graph=i.graph,
            at_hand=self._at_hand(i),
            pieces=self.attending.pieces(i.layer),
        )
        if i.mode is AttentionMode.COMPUTE:
            self._begin(cell, i.layer, i.chunk)
        if i.graph:
            self.hidden[i.layer + 1] = self._forward_with_graph(i, cell, hidden)
            return
        try:
            with torch.no_grad(), answering(cell):
                out = self.layers.run(i, hidden, self._call(i.layer, i.chunk))
        except CellDone:
            return
        self.hidden[i.layer + 1] = out
        if i.hold:
            assert cell.held is not None
            self.held[i.layer] = cell.held

    def _forward_with_graph(self, i: Forward, cell: Cell, hidden: Tensor) -> Tensor:
        anchor = torch.zeros(0, dtype=hidden.dtype, device=hidden.device, requires_grad=True)
        sink: list[Tensor] = []
        call = self._call(i.layer, i.chunk)
        with torch.enable_grad(), answering(cell):
            if not i.kept:
                out = self.layers.run(i, Entry.apply(anchor, hidden, sink), call)
                saved = None
            else:
                layer = self.boundary.layers[i.layer]
                saved = SavedCell(
                    (*layer.parameters(), *layer.buffers()), self._named(i.layer, hidden, cell)
                )
                with saved.hooks():
                    out = self.layers.run(i, Entry.apply(anchor, hidden, sink), call)
                saved.seal(self._planned_cell(i))
        cell.write_kv = cell.held = None
        self.graphs[i.layer, i.chunk] = _Graph(get_gradient_edge(out), anchor, sink, cell, saved)
        return out.detach()

    def _at_hand(self, i: Forward) -> Rows | None:
        """The chunk's own K, V, where an earlier pass left them on the device."""
        there = i.write_kv is None and self.program.buffers[i.prefix].tier is Tier.DEVICE
        return self._rows(i.prefix, i.chunk, i.layer) if there else None

    def _planned_cell(self, i: Forward) -> Tensor:
        """The bytes planned for this layer's cell: a slot may be wider than its home."""
        assert i.activations is not None
        start, stop = cell_place(
            self.program, self.program.buffers[names.activations(i.layer)], i.chunk
        )
        return self.storage.cell(i.activations, i.chunk)[: stop - start]

    def _backward(self, i: Backward) -> None:
        graph = self.graphs.pop((i.layer, i.chunk))
        self.hidden.pop(i.layer + 1, None)
        cell = graph.cell
        cell.key_values = self._prefix(i.layer, i.chunk, i.prefix, i.accumulator)
        if cell.sparse is not None and self.sparse is not None:
            cell.sparse.choice = self.sparse.choice(i)
        self._begin(cell, i.layer, i.chunk)
        cell.own_dkv = self._rows(i.own_dkv, i.chunk, i.layer)
        if graph.saved is not None:
            cell.own_kv = self._rows(i.own_kv, i.chunk, i.layer)
            cell.attention = self._rows(i.attention, i.chunk, i.layer)
            assert i.activations is not None
            store = self.storage.cell(i.activations, i.chunk)
            hidden = self.hidden.pop(i.layer, None)
            graph.saved.restore(store, self._named(i.layer, hidden, cell))
        parameters = [p for p in self.boundary.layers[i.layer].parameters() if p.requires_grad]
        *found, _ = torch.autograd.grad(
            [graph.out],
            [*parameters, graph.anchor],
            [self.gradient.pop(i.layer + 1)],
            allow_unused=True,
        )
        self.gradients.add(parameters, found)
        (self.gradient[i.layer],) = graph.sink

    def _named(self, layer: int, hidden: Tensor | None, cell: Cell) -> dict[str, Tensor]:
        """Tensors that will be at hand again when a kept graph runs backward."""
        named = {}
        if hidden is not None and layer in {first for first, _ in self.program.groups}:
            named["x"] = hidden
        if cell.attention is not None:
            named["out"] = cell.attention["out"]
        return named

    def _call(self, layer: int, chunk: int) -> LayerCall:
        if self.calls[0] != chunk:
            with torch.no_grad():
                batch, positions = self.program.run.batch, self._positions(chunk)
                self.calls = chunk, self.boundary.calls(batch, positions)
        return self.calls[1][layer]

    def _positions(self, chunk: int) -> Tensor:
        """Of the tokens that a layer's attention is called with: those of all tensor peers."""
        positions, rank = self.batch.position_ids, self.program.share.rank
        if self.attending.is_filler(chunk):
            return positions[:, self._span(chunk)].expand(-1, rank.layout.tensor)
        return positions[:, slice(*rank.tokens(self.program.chunks[chunk], "tensor"))]

    def _rows(self, name: str | None, chunk: int, layer: int) -> Rows | None:
        return None if name is None else self.storage.chunk(name, chunk, layer)

    def _begin(self, cell: Cell, layer: int, chunk: int) -> None:
        """Keys of earlier chunks may be on their way before the cell asks for them."""
        cell.key_values.begin(self.attending.streamed(layer, chunk))
        if cell.sparse is not None:
            cell.sparse.begin(cell.key_values)

    def _attention_call(self, layer: int, chunk: int, scale: float) -> AttentionCall:
        return self.attending.call(layer, chunk, scale)

    def _prefix(self, layer: int, chunk: int, name: str, gradients: str | None = None) -> Prefix:
        before = self.program.share.keys.rows[chunk][0]
        return Prefix(self.storage, self.slots, layer, name, gradients, before)
