"""Run a program's instructions on a model and a batch.

`Interpreter.run` runs a step. `Layers` gives the module that runs each cell: the model's layer or a
shallow copy of that layer. Layers call `farspan.engine.attention_op` for attention.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from farspan.activations import SavedActivations
from farspan.attention.backends import BlockKernel
from farspan.distributed.collectives import Pipeline
from farspan.distributed.tensor import TensorParallel
from farspan.engine.attention_op import AttentionContext, ChunkAttention, KVWritten
from farspan.engine.buffers import ProgramBuffers, StagingBuffers
from farspan.engine.far import FarStep
from farspan.engine.gradients import (
    AccumulatingLinears,
    GradientAccumulator,
    Graph,
    build_graph,
    differentiate,
    enter,
)
from farspan.engine.heads import ValueHead
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import IGNORED, LossHead, StepInputs
from farspan.engine.parallelize import ShardedModel
from farspan.engine.recurrent import Recurrent, RecurrentCell
from farspan.engine.streamed_weights import StreamedWeights
from farspan.engine.tiers import StreamOrder
from farspan.hf.attention_interface import answering
from farspan.hf.dropout import Draws, TokenRange
from farspan.hf.stages import CausalLMStages, LayerCall
from farspan.hf.tiled_mlp import Add, Tokenwise, tiled
from farspan.program import buffer_names as names
from farspan.program.dependencies import Cell, Order
from farspan.program.layout import SEQUENCE, Rank
from farspan.program.program import (
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
    Reduce,
    Release,
    Send,
    Store,
    StoreGradient,
    cell_place,
)
from farspan.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Layers:
    """Decoder layers of a model; each cell runs the model's own layer."""

    stages: CausalLMStages

    def of(self, i: Forward) -> nn.Module:
        """Return the module that runs a cell: the model's layer, or a copy with its weights."""
        return self.stages.running[i.layer]


@dataclass(frozen=True, slots=True)
class SparingLayers(Layers):
    """Layers that skip their last matrix product in cells whose output no instruction reads."""

    adding: AccumulatingLinears
    unread: frozenset[Cell]  # cells whose output only autograd needs
    spared: frozenset[int]  # layers that can skip it

    def of(self, i: Forward) -> nn.Module:
        self.adding.unread = i.layer in self.spared and (i.layer, i.chunk) in self.unread
        return self.stages.running[i.layer]


@dataclass(frozen=True, slots=True)
class CutLayers(Layers):
    """Layers with weights sliced by tensor parallelism; they know how many tokens each rank has."""

    tensor: TensorParallel
    program: Program

    def of(self, i: Forward) -> nn.Module:
        rank, chunk = self.program.share.rank, self.program.chunks[i.chunk]
        peers = [Rank(rank.layout, number) for number in rank.peers("tensor")]
        counts = [stop - start for start, stop in (peer.tokens(chunk) for peer in peers)]
        if not any(counts):  # all run padding tokens (is_padding)
            counts = [1] * len(counts)
        return self.tensor.shell(i.layer, self.stages.layers[i.layer], counts)


@dataclass(frozen=True, slots=True)
class TiledLayers(Layers):
    """Layers whose token-wise modules run on tiles of tokens, in shallow copies made for one step.
    Cells with saved graphs run without tiles: their graphs save all activations anyway."""

    children: Sequence[Sequence[Tokenwise]]  # of each layer
    tokens: int
    unread: frozenset[Cell]  # cells whose output only autograd needs
    add: Add
    draws: Draws | None = None
    shells: dict[tuple[int, bool], nn.Module] = field(default_factory=dict)

    def of(self, i: Forward) -> nn.Module:
        layer = self.stages.running[i.layer]
        if i.kept:
            return layer
        key = i.layer, not (i.graph and (i.layer, i.chunk) in self.unread)
        if key not in self.shells:
            children = self.children[i.layer]
            self.shells[key] = tiled(
                layer, children, self.tokens, self.add, value=key[1], draws=self.draws
            )
        return self.shells[key]


# A cell with its graph, if built; else the backward builds the graph from the cell's input.
Waiting = tuple[ChunkAttention | RecurrentCell, Graph | None]


@dataclass(slots=True)
class Registers:
    """Tensors and counters that change while a program runs."""

    hidden: dict[int, Tensor] = field(default_factory=dict)  # inputs by layer, [B, C, hidden]
    gradient: dict[int, Tensor] = field(default_factory=dict)  # gradients of those inputs, by layer
    trained: dict[int, list[nn.Parameter]] = field(default_factory=dict)  # by layer
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # O and LSE by layer
    graphs: dict[tuple[int, int], Waiting] = field(default_factory=dict)  # by layer and chunk
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)  # by chunk and layer
    loss: Tensor | None = None
    values: Tensor | None = None  # output of a value head, [B, T, k]
    given: Tensor | None = None  # gradient of the loss by `values`, [B, T, k]
    # Sums of a custom head, which are not reduced here: its caller adds them over ranks.
    own: GradientAccumulator = field(default_factory=lambda: GradientAccumulator(lambda *_: None))
    place: int = 0  # index of the next instruction
    order: StreamOrder | None = None  # the waits between lanes, if copies overlap


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """Interpreter of one program on one batch; all state that changes is in `registers`."""

    stages: CausalLMStages
    program: Program
    storage: ProgramBuffers
    inputs: StepInputs
    head: LossHead | ValueHead
    gradients: GradientAccumulator
    after: Callable[[Instruction], None]  # called after each issued instruction
    layers: Layers
    kernels: AttentionKernels
    kernel_of: dict[LayerSpec, BlockKernel] = field(default_factory=dict)  # kernels selected so far
    far: FarStep | None = None  # None: queries see every key
    watches: bool = False  # measure the coverage of a cell of `far`
    sharded_model: ShardedModel | None = None  # None: a single process
    weights: StreamedWeights | None = None  # None: weights stay on the device
    registers: Registers = field(default_factory=Registers)
    make_attention: Callable[..., AttentionContext] = AttentionContext

    @cached_property
    def attention(self) -> AttentionContext:
        """Context that all attention calls of the program share, made on first use."""
        slots = StagingBuffers(self.storage.copies)
        ranks = None if self.sharded_model is None else self.sharded_model.ranks
        made = self.make_attention(
            self.program, self.inputs, self.kernels, ranks, self.storage, slots, self.kernel_of
        )
        if self.far is not None:
            made.far = self.far.run(made, watches=self.watches)
        return made

    @cached_property
    def recurrent(self) -> Recurrent:
        slots = self.attention.slots
        return Recurrent(self.stages, self.program, self.storage, slots, self.attention)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """Communication with neighbouring pipeline stages, or None without a pipeline."""
        ranks = None if self.sharded_model is None else self.sharded_model.ranks
        if ranks is None or ranks.layout.pipeline == 1:
            return None
        return Pipeline(ranks.among("pipeline"))

    def run(self, orders: tuple[Order, ...] | None = None, until: int | None = None) -> Tensor:
        """Run the instructions from the next one to the last, or up to index `until`. Return the
        mean loss, float64. `orders` has the earlier instructions that each instruction waits
        for."""
        now = self.registers
        if orders is not None and now.order is None:
            now.order = StreamOrder(self.storage.copies, orders)
        order, instructions = now.order, self.program.instructions
        for index in range(now.place, len(instructions) if until is None else until):
            if index == self.program.cut > 0:
                self.complete_routers()
            instruction, now.place = instructions[index], index + 1
            if order is not None:
                order.before(index)
            match instruction:
                case Forward():
                    self._forward(instruction)
                case Backward():
                    self._backward(instruction)
                case Fetch(source, target, chunk) | Evict(source, target, chunk):
                    self.storage.copy_chunk(source, target, chunk)
                case Allocate() | Free():
                    pass  # addresses are planned: nothing to do at run time
                case Clear(buffer):
                    self.storage.clear(buffer)
                case Embed(chunk):
                    now.hidden[0] = self._embed(chunk)
                case Load(layer, chunk, buffer):
                    now.hidden[layer] = self._load(buffer, chunk)
                case Store(layer, chunk, buffer):
                    self._store(buffer, chunk, now.hidden.pop(layer))
                case LoadGradient(layer, chunk, buffer):
                    now.gradient[layer] = self._load(buffer, chunk)
                case StoreGradient(layer, chunk, buffer):
                    self._store(buffer, chunk, now.gradient.pop(layer))
                case Head(chunk, gradient):
                    self._head(chunk, gradient)
                case EmbedBackward(chunk):
                    self._embed_backward(chunk)
                case Close(group):
                    self._close(group)
                case Gather() | Reduce() if self.weights is not None:
                    self._stream_weights(instruction, self.weights)
                case Gather() | Release() | Reduce() | Receive() | Send():
                    self._among_ranks(instruction)
            if order is not None:
                order.after(index)
            self.after(instruction)
        if self.pipeline is not None:
            self.pipeline.finish()
        if now.place == len(instructions):
            self.complete_routers()
        if now.loss is None:  # another pipeline stage has the head
            return torch.zeros((), dtype=torch.float64, device=self.stages.device)
        return now.loss

    def complete_routers(self) -> None:
        """Sum over the ranks of a sequence what its routers have counted in the forward."""
        routers, sharded = self.inputs.routers, self.sharded_model
        if routers is not None:
            peers = None if sharded is None else sharded.ranks.among(*SEQUENCE, "pipeline")
            routers.complete(None if peers is None else peers.sum)

    def _stream_weights(self, i: Gather | Reduce, weights: StreamedWeights) -> None:
        sharded = None if self.sharded_model is None else self.sharded_model.sharded
        if isinstance(i, Reduce):
            assert sharded is not None, "this process is alone"
            weights.reduce(self.program, i.group, self.gradients, sharded)
        elif i.gradients:
            weights.open(self.program, i, self.storage.copies, self.gradients)
        else:
            weights.fetch(self.program, i, self.storage.copies)

    def _among_ranks(self, instruction: Instruction) -> None:
        """Run an instruction that exchanges weights or hidden states with other ranks."""
        now = self.registers
        match instruction:
            case Gather(group, outer) if self.sharded_model is not None:
                self.sharded_model.gather(self.program, group, outer=outer)
            case Release(group, outer) if self.sharded_model is not None:
                self.sharded_model.release(self.program, group, outer=outer)
            case Receive(layer, chunk, gradient) if self.pipeline is not None:
                span, run = self._span(chunk), self.program.run
                shape = run.batch, span.stop - span.start, self.program.model.passed()
                rows = torch.empty(shape, dtype=self.storage.dtype, device=self.stages.device)
                rows = self.pipeline.receive(rows, up=not gradient)
                (now.gradient if gradient else now.hidden)[layer] = rows
            case Send(layer, _, gradient) if self.pipeline is not None:
                rows = (now.gradient if gradient else now.hidden).pop(layer)
                self.pipeline.send(rows, up=not gradient)
            case _:
                raise AssertionError(f"{instruction}: this process is alone")

    # -- stages outside the layers -------------------------------------------------------------

    def _span(self, chunk: int) -> slice:
        """Return this rank's range of a chunk's tokens; if it has none, a padding token."""
        start, stop = self.program.share.tokens.ranges[chunk]
        if not self.attention.is_padding(chunk):
            return slice(start, stop)
        start = min(start, self.program.run.tokens - 1)
        return slice(start, start + 1)

    def _stand_at(self, chunk: int) -> slice:
        """Return this rank's range of a chunk's tokens, and let dropout draw for these tokens."""
        span, inputs = self._span(chunk), self.inputs
        if inputs.place is not None:
            inputs.place.at(TokenRange(span.start, span.stop - span.start))
        if inputs.routers is not None:
            inputs.routers.is_padding = self.attention.is_padding(chunk)
        return span

    def _embed(self, chunk: int) -> Tensor:
        span, inputs = self._stand_at(chunk), self.inputs
        tokens = inputs.input_ids[:, span], inputs.position_ids[:, span]
        with torch.no_grad():
            if chunk in self.registers.calls:
                return self.stages.embedded(*tokens)
            hidden, calls = self.stages.embed(*tokens)
        if self.program.share.rank.layout.tensor == 1:
            self._keep_calls(chunk, calls)
        return hidden

    def _embed_backward(self, chunk: int) -> None:
        gradient = self.registers.gradient.pop(0)
        parameters = self.head.parameters
        if not parameters:
            return
        span, inputs = self._stand_at(chunk), self.inputs
        with torch.enable_grad():
            hidden = self.stages.embedded(inputs.input_ids[:, span], inputs.position_ids[:, span])
        if hidden.requires_grad:  # PEFT may require it for no parameter
            found = torch.autograd.grad(hidden, parameters, gradient, allow_unused=True)
            self.gradients.add(parameters, found)

    def _head(self, chunk: int, gradient: bool) -> None:
        now = self.registers
        layer, span, inputs = len(self.stages.layers), self._span(chunk), self.inputs
        hidden, targets = now.hidden.pop(layer), inputs.targets[:, span]
        is_padding = self.attention.is_padding(chunk)
        if isinstance(self.head, ValueHead):
            self._value_head(self.head, span, hidden, gradient=gradient, is_padding=is_padding)
            return
        if is_padding:
            targets = torch.full_like(targets, IGNORED)
        weights = None if inputs.weights is None else inputs.weights[:, span]
        if gradient:
            loss, now.gradient[layer] = self.head.loss_and_gradient(
                hidden, targets, weights, self.gradients
            )
        else:
            loss = self.head.loss(hidden, targets, weights)
        now.loss = loss if now.loss is None else now.loss + loss

    def _value_head(
        self, head: ValueHead, span: slice, hidden: Tensor, *, gradient: bool, is_padding: bool
    ) -> None:
        now = self.registers
        targets, layer = self.inputs.targets[:, span], len(self.stages.layers)
        if hidden.shape[1] == 0:  # another rank has all tokens of the chunk
            if gradient:
                now.gradient[layer] = hidden
            return
        if gradient:
            assert now.given is not None
            given = now.given[:, span]
            now.gradient[layer] = head.gradient(
                hidden, targets, given * 0 if is_padding else given, self.gradients, now.own
            )
            return
        if now.given is not None:  # a repeated forward: the values are known
            return
        values = head.values(hidden, targets)
        if now.values is None:
            now.values = values.new_zeros(*self.inputs.input_ids.shape, values.shape[2])
        if not is_padding:
            now.values[:, span] = values

    def _close(self, group: int) -> None:
        if self.weights is not None:
            self.weights.close(self.program, group, self.storage.copies, self.gradients)
            return
        layers = range(*self.program.groups[group])
        # Ranks of a pipeline close the parameters outside the layers together.
        outer = group == 0 or self.pipeline is not None
        if self.sharded_model is not None:
            for unit in [*layers, *[self.sharded_model.sharded.outer] * outer]:
                self.gradients.reduce(unit)
            return
        for layer in layers:
            self.gradients.close(self.stages.layers[layer].parameters())
        if outer:
            self.gradients.close(self.head.parameters)

    def _x(self, buffer: str, chunk: int) -> Tensor:
        """Return the hidden states of a chunk in a buffer or slot, [B, C, hidden]."""
        return self.storage.chunk(buffer, chunk, 0)["x"]

    def _load(self, buffer: str, chunk: int) -> Tensor:
        rows = self._x(buffer, chunk)
        if self.attention.is_padding(chunk):
            return rows.new_zeros(len(rows), 1, rows.shape[2])
        return rows

    def _store(self, buffer: str, chunk: int, rows: Tensor) -> None:
        place = self._x(buffer, chunk)
        place.copy_(rows[:, : place.shape[1]])

    # -- cells -----------------------------------------------------------------------------------

    def _forward(self, i: Forward) -> None:
        now = self.registers
        hidden = now.hidden[i.layer] if i.hold else now.hidden.pop(i.layer)
        spec = self.program.model.layers[i.layer]
        if spec.state or not spec.attends():
            self._forward_recurrent(i, hidden)
            return
        self._stand_at(i.chunk)
        held = now.held.pop(i.layer) if i.mode is AttentionMode.HELD else None
        cell = self.attention.begin(i, held)
        layer, call = self.layers.of(i), self._call(i.layer, i.chunk)
        saved = self._saved(i, hidden, cell) if i.kept else None
        try:
            with torch.set_grad_enabled(i.graph), answering(cell, cell.choose):
                entered, graph_input = enter(hidden) if i.graph else (hidden, None)
                with nullcontext() if saved is None else saved.hooks(), self.stages.computing():
                    if call.carry is None:  # in line: each call has one frame less
                        out = layer(entered, *call.arguments, **call.keywords)
                    else:
                        out = call.carry.run(layer, entered, call.keywords)
        except KVWritten:
            return
        if i.drops:
            return
        out = out[0] if isinstance(out, tuple) else out
        now.hidden[i.layer + 1] = out.detach() if i.graph else out
        if graph_input is not None:
            if saved is not None:
                saved.seal(self._planned_cell(i))
            now.graphs[i.layer, i.chunk] = cell, Graph(get_gradient_edge(out), graph_input, saved)
            cell.write_kv = cell.held = None
        elif i.hold:
            assert cell.held is not None
            now.held[i.layer] = cell.held

    def _forward_recurrent(self, i: Forward, hidden: Tensor) -> None:
        now = self.registers
        held = now.held.pop(i.layer, None) if i.mode is AttentionMode.HELD else None
        cell = self.recurrent.cell(i, held)
        again = i.kept and cell.is_cut()
        if i.graph and not again:
            self._build_recurrent(i, cell, hidden)
        else:
            with torch.no_grad():
                now.hidden[i.layer + 1] = cell.run(hidden)
        if again:
            self._keep_input(i, cell, hidden)
        self.recurrent.leave(i, cell)
        if i.hold and cell.attention is not None:
            assert cell.attention.held is not None
            now.held[i.layer] = cell.attention.held
        cell.seal()
        if i.kept and now.graphs[i.layer, i.chunk][1] is None:
            cell.forget()
        if i.drops or i.mode is AttentionMode.NONE:
            del now.hidden[i.layer + 1]

    def _saved(
        self, i: Forward, hidden: Tensor, cell: ChunkAttention | RecurrentCell
    ) -> SavedActivations:
        """Return a new store for tensors saved by autograd in a graph that outlives its chunk."""
        layer = self.stages.layers[i.layer]
        tensors = *layer.parameters(), *layer.buffers()
        return SavedActivations(tensors, self._named(i.layer, hidden, cell))

    def _build_recurrent(self, i: Forward, cell: RecurrentCell, hidden: Tensor) -> None:
        saved = self._saved(i, hidden, cell) if i.kept else None
        graph, self.registers.hidden[i.layer + 1] = build_graph(cell.run, hidden, saved)
        if saved is not None:
            store = self._planned_cell(i)
            # Scans save a little more than in proportion to their tokens.
            if saved.size() > len(store):
                self._keep_input(i, cell, hidden)
                return
            saved.seal(store)
        self.registers.graphs[i.layer, i.chunk] = cell, graph

    def _keep_input(self, i: Forward, cell: RecurrentCell, hidden: Tensor) -> None:
        """Save a recurrent cell's input, from which its backward builds the graph."""
        self._as_input(self._planned_cell(i), i.chunk).copy_(hidden)
        self.registers.graphs[i.layer, i.chunk] = cell, None

    def _planned_cell(self, i: Forward) -> Tensor:
        """View the bytes planned for a cell's saved tensors; its slot may be larger than these."""
        assert i.activations is not None
        start, stop = cell_place(
            self.program, self.program.buffers[names.activations(i.layer)], i.chunk
        )
        return self.storage.cell(i.activations, i.chunk)[: stop - start]

    def _backward(self, i: Backward) -> None:
        now = self.registers
        cell, graph = now.graphs.pop((i.layer, i.chunk))
        now.hidden.pop(i.layer + 1, None)
        if isinstance(cell, RecurrentCell):
            self._backward_recurrent(i, cell, graph)
            return
        assert graph is not None
        self.attention.begin_backward(i, cell)
        self._restore(i, cell, graph)
        parameters = self._trained(i.layer)
        found, now.gradient[i.layer] = differentiate(
            graph, parameters, [now.gradient.pop(i.layer + 1)]
        )
        self.gradients.add(parameters, found)

    def _backward_recurrent(self, i: Backward, cell: RecurrentCell, graph: Graph | None) -> None:
        now = self.registers
        attention = cell.attention
        coming = None if attention else self.recurrent.begin_backward(i)
        if graph is None:
            assert i.activations is not None
            now.hidden.pop(i.layer, None)
            hidden = self._as_input(self.storage.cell(i.activations, i.chunk), i.chunk)
            graph, _ = build_graph(self.recurrent.again(i, cell), hidden)
            cell.seal()
        if attention is not None:
            self.attention.begin_backward(i, attention)
        self._restore(i, cell, graph)
        left, gradients = self.recurrent.given(i, cell)
        parameters = self._trained(i.layer)
        found, now.gradient[i.layer] = differentiate(
            graph,
            parameters,
            [now.gradient.pop(i.layer + 1), *gradients],
            left=left,
            graph_inputs=cell.graph_inputs,
        )
        self.gradients.add(parameters, found)
        # Blocks of keys come one after another: those of the state after those of attention.
        self.recurrent.add(coming or self.recurrent.begin_backward(i), i, cell)

    def _trained(self, layer: int) -> list[nn.Parameter]:
        known = self.registers.trained
        if layer not in known:
            parameters = self.stages.layers[layer].parameters()
            known[layer] = [p for p in parameters if p.requires_grad]
        return known[layer]

    def _restore(self, i: Backward, cell: ChunkAttention | RecurrentCell, graph: Graph) -> None:
        if graph.saved is not None:
            assert i.activations is not None
            hidden = self.registers.hidden.pop(i.layer, None)
            store = self.storage.cell(i.activations, i.chunk)
            graph.saved.restore(store, self._named(i.layer, hidden, cell))

    def _as_input(self, store: Tensor, chunk: int) -> Tensor:
        """View a cell's saved bytes as a layer's input, [B, C, hidden]."""
        span, width = self._span(chunk), self.program.model.passed()
        shape = self.program.run.batch, span.stop - span.start, width
        size = prod(shape) * self.storage.dtype.itemsize
        return store[:size].view(self.storage.dtype).view(shape)

    def _named(
        self, layer: int, hidden: Tensor | None, cell: ChunkAttention | RecurrentCell
    ) -> dict[str, Tensor]:
        """Return tensors of a saved graph that stay in their buffers, by the name under which its
        backward finds them: the layer's input and the attention's output."""
        named = {}
        if hidden is not None and layer in {first for first, _ in self.program.groups}:
            named["x"] = hidden
        attention = cell.attention if isinstance(cell, RecurrentCell) else cell
        if attention is not None and attention.attention is not None:
            named["out"] = attention.attention["out"]
        return named

    def _call(self, layer: int, chunk: int) -> LayerCall:
        known = self.registers.calls
        if chunk not in known:
            with torch.no_grad():
                ids, positions = self.inputs.input_ids, self._positions(chunk)
                self._keep_calls(chunk, self.stages.calls_for(ids[:, self._span(chunk)], positions))
        return known[chunk][layer]

    def _keep_calls(self, chunk: int, calls: list[LayerCall]) -> None:
        known = self.registers.calls
        if not self.program.run.keeps_calls():
            known.clear()
        known[chunk] = calls

    def _positions(self, chunk: int) -> Tensor:
        """Return position ids for a layer's call: those of this tensor-parallel group's tokens."""
        positions, rank = self.inputs.position_ids, self.program.share.rank
        if not self.attention.shares:
            return positions[:, self._span(chunk)]
        if self.attention.is_padding(chunk):
            return positions[:, self._span(chunk)].expand(-1, rank.layout.tensor)
        return positions[:, slice(*rank.tokens(self.program.chunks[chunk], "tensor"))]
