"""Cells run on phantoms, each kind once."""

from dataclasses import dataclass, field, replace

from farspan.plan.cell.attending import Attending, Call, CellDone, chunk_call
from farspan.plan.cell.layer import given_tables, given_weights, run_layer
from farspan.plan.cell.phantom import Memory, Phantom, differentiate
from farspan.plan.cell.sparse import far_of, most_units_of
from farspan.plan.cell.tiles import Tiles, whole
from farspan.plan.model.architecture import Architecture, ArchitectureBlock
from farspan.program.attention_blocks import near_blocks
from farspan.program.program import AttentionMode
from farspan.spec import Sparse


@dataclass(frozen=True, slots=True)
class CellKind:
    """What decides the memory of a cell."""

    block: ArchitectureBlock | int  # or the number of a kind of a profile
    tokens: int
    q_start: int  # as far as it decides which blocks of keys there are
    mode: AttentionMode
    buffered: bool
    graph: bool
    kept: bool
    hold: bool
    tiled: bool = False  # its token-wise modules run on tiles
    value: bool = True  # then: its output is read
    fresh: bool = False  # its backward makes sums of weight gradients while autograd runs
    chooses: bool = False  # pages are chosen in it


@dataclass(frozen=True, slots=True)
class CellBytes:
    """Bytes of a cell; rises are above what is alive when the instruction begins."""

    forward_rise: int
    out: int
    held: int  # O, LSE that stay in registers
    graph: int  # what the graph holds, the layer's input aside
    saves_input: bool
    backward_rise: int
    weight_gradients: int  # alive together when autograd returns
    gradient: int  # of the layer's input
    sums: int = 0  # of weight gradients, made while autograd runs


@dataclass(slots=True)
class PhantomCells:
    """Cells run on phantoms, each kind once."""

    architecture: Architecture
    batch: int
    width: int  # bytes of an element
    kv_block: int
    in_place: bool
    tile: int = 0  # tokens, of cells that run on tiles
    wide: int = 4  # bytes of an element of a sum of weight gradients
    sparse: Sparse | None = None
    in_slots: bool = False  # chosen pages are gathered to slots of the program
    found: dict[CellKind, CellBytes] = field(default_factory=dict)

    def get(self, kind: CellKind) -> CellBytes:
        if kind not in self.found:
            self.found[kind] = self._run(kind)
        return self.found[kind]

    def _run(self, kind: CellKind) -> CellBytes:
        how = self.architecture
        sums = self.wide if how.adds and kind.fresh else 0
        memory = Memory(in_place=self.in_place, fused=how.fused, adds=how.adds, sums=sums)
        assert isinstance(kind.block, ArchitectureBlock)
        attention = kind.block.attention
        weights = given_weights(memory, self.architecture, kind.block, self.width)
        tables = given_tables(memory, self.architecture, attention, kind.tokens, self.width)
        shape = (self.batch, kind.tokens, self.architecture.hidden)
        x = memory.given(shape, self.width, trained=kind.graph)
        stop = kind.q_start + kind.tokens
        call = chunk_call(attention, self.batch, kind.q_start, stop, self.kv_block)
        if self.sparse is not None and attention.window is None:
            call = self._sparse(call, self.sparse, kind)
        cell = Attending(kind.mode, call, kind.chooses, kind.buffered, None, kind.kept)
        if kind.mode is AttentionMode.HELD:
            cell.held = self._held(memory, kind)
        memory.grad = kind.graph
        tiles = None
        if kind.tiled:
            tiles = Tiles(memory, weights, self.tile, kind.value, self.wide, kind.fresh)
        try:
            out = run_layer(self.architecture, kind.block, weights, x, tables, cell, tiles or whole)
        except CellDone:
            return CellBytes(memory.peak, 0, 0, 0, False, 0, 0, 0)
        memory.grad = False
        rise = memory.peak
        if not kind.graph:
            out_bytes = out.storage.disown()
            held = cell.held if kind.hold else None
            del cell
            return CellBytes(rise, out_bytes, memory.live if held else 0, 0, False, 0, 0, 0)
        cell.held = None
        made = self._backward(kind, memory, rise, x, out)
        begun = [*memory.sums.values(), *(tiles.sums.values() if tiles is not None else ())]
        size = sum(total.storage.size for total in begun)
        return replace(made, sums=size, weight_gradients=made.weight_gradients - size)

    def _sparse(self, call: Call, sparse: Sparse, kind: CellKind) -> Call:
        """The sparse form of a dense call."""
        assert isinstance(kind.block, ArchitectureBlock)
        start, run = kind.q_start, (self.batch, self.width)
        far = far_of(kind.block.attention, sparse, run, start, kind.tokens)
        units = 0 if far is None else most_units_of(far)
        blocks = near_blocks(call.blocks, sparse, start)
        return replace(call, blocks=blocks, far=far, most_units=units, in_slots=self.in_slots)

    def _held(self, memory: Memory, kind: CellKind) -> tuple[Phantom, Phantom]:
        assert isinstance(kind.block, ArchitectureBlock)
        attention = kind.block.attention
        rows = (self.batch, kind.tokens, attention.query_heads)
        out = memory.given((*rows, attention.value_dim), self.width)
        strides = (out.strides[0], out.strides[2], out.strides[1], 1)
        shape = (rows[0], rows[2], rows[1], attention.value_dim)
        lse = memory.given((rows[0], rows[2], rows[1]), max(4, self.width))
        return Phantom(out.storage, shape, strides, 0, self.width), lse

    def _backward(
        self, kind: CellKind, memory: Memory, rise: int, x: Phantom, out: Phantom
    ) -> CellBytes:
        node = out.node
        assert node is not None
        assert x.node is not None
        shape, out_bytes = out.shape, out.storage.disown()
        holds = node.holds()
        saves_input = id(x.storage) in holds and not kind.kept
        if kind.kept:
            for views in holds.values():
                views[0].storage.disown()
        del out, holds
        graph = memory.live
        memory.peak = graph
        found = differentiate(node, memory.given(shape, self.width))
        gradient = found.pop(x.node)
        own = gradient.storage.size
        return CellBytes(
            rise, out_bytes, 0, graph, saves_input, memory.peak - graph, memory.live - own, own
        )
