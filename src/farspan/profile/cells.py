"""Bytes of cells and stages of a program, from a profile and what their attention holds."""

from dataclasses import dataclass, field

from farspan.profile.attention import Call, attention_bytes, chunk_call, sparse_call
from farspan.profile.model import CellLines, KindProfile, ModelProfile, at, form, highest
from farspan.program.program import AttentionMode
from farspan.spec import LayerSpec, Sparse


@dataclass(frozen=True, slots=True)
class CellKind:
    """What decides the memory of a cell."""

    block: int  # the number of a kind of layer
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


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of a stage outside the layers."""

    rise: int
    out: int  # the register it leaves
    tables: int
    new: frozenset[str]  # parameters whose sums it begins


@dataclass(slots=True)
class ProfiledCells:
    """Cells of one model, each kind found once."""

    profile: ModelProfile
    batch: int
    kv_block: int
    sparse: Sparse | None = None
    in_slots: bool = False  # chosen pages are gathered to slots of the program
    tile: int = 0  # tokens, of cells that run on tiles
    found: dict[CellKind, CellBytes] = field(default_factory=dict)

    def get(self, kind: CellKind) -> CellBytes:
        if kind not in self.found:
            self.found[kind] = self._bytes(kind)
        return self.found[kind]

    def _bytes(self, kind: CellKind) -> CellBytes:
        layer = self.profile.kind_of.index(kind.block)
        spec, made = self.profile.spec.layers[layer], self.profile.kinds[kind.block]
        lines = _lines_of(made, kind)
        chunk = self.batch * kind.tokens
        tokens = (chunk, self.batch * self.tile)[: len(lines.at) - 1]
        out = chunk * self.profile.spec.hidden * self.profile.spec.element_bytes
        if kind.mode is AttentionMode.NONE:
            return CellBytes(highest(lines.asked, *tokens), 0, 0, 0, False, 0, 0, 0)
        computes = kind.mode is AttentionMode.COMPUTE
        attended = self._attended(spec, chunk)
        forward, backward = 0, 0
        if spec.attends() and (computes or kind.graph):
            forward, backward = self._attention(spec, kind, made.heads_first)
        stays = attended if computes and not kind.buffered else 0
        moments = [highest(lines.before, *tokens), highest(lines.after, *tokens) + stays]
        if computes:
            moments.append(at(lines.at, *tokens) + forward)
        rise = max(moments)
        if not kind.graph:
            return CellBytes(rise, out, stays if kind.hold else 0, 0, False, 0, 0, 0)
        graph = 0 if kind.kept else at(lines.graph, *tokens) + stays
        waits = 0 if kind.kept else stays
        return CellBytes(
            rise,
            out,
            0,
            graph,
            lines.saves_input and not kind.kept,
            self._backward(lines, tokens, waits, backward) - graph,
            lines.weight_gradients,
            out,
            lines.sums,
        )

    def _backward(
        self, lines: CellLines, tokens: tuple[int, ...], waits: int, attention: int
    ) -> int:
        """Bytes at the fullest moment, what the graph holds included."""
        return max(
            highest(lines.backward_before, *tokens) + waits,
            at(lines.backward_at, *tokens) + waits + attention,
            highest(lines.backward_after, *tokens),
        )

    def _attended(self, spec: LayerSpec, tokens: int) -> int:
        """O and LSE."""
        model = self.profile.spec
        out = spec.output_elements() * model.element_bytes
        return tokens * (out + spec.query_heads * model.accumulate_bytes())

    def _attention(self, spec: LayerSpec, kind: CellKind, heads_first: bool) -> tuple[int, int]:
        run = self.batch, self.profile.spec.element_bytes
        call: Call = chunk_call(
            spec, self.batch, kind.q_start, kind.q_start + kind.tokens, self.kv_block
        )
        if self.sparse is not None and spec.window is None:
            call = sparse_call(call, spec, self.sparse, run, kind.tokens, self.in_slots)
        return attention_bytes(spec, call, run, kind.tokens, heads_first, kind.chooses)


def _lines_of(made: KindProfile, kind: CellKind) -> CellLines:
    """Those of its way to run, or of the nearest that the layer has: without a product that nobody
    reads, and where tiles were not looked at, as a whole."""
    named = form(
        graph=kind.graph,
        kept=kind.kept,
        fresh=kind.fresh,
        unread=kind.graph and not kind.value,
        tiled=kind.tiled,
    )
    whole = named.removesuffix(" tiled")
    near = named, named.replace(" unread", ""), whole, whole.replace(" unread", "")
    return next(made.cells[name] for name in (*near, named.split()[0]) if name in made.cells)


@dataclass(slots=True)
class ProfiledStages:
    """Stages outside the layers."""

    profile: ModelProfile
    batch: int
    loss_chunk_size: int

    def get(self, what: str, tokens: int, known: frozenset[str]) -> StageBytes:
        outer, rows = self.profile.outer, self.batch * tokens
        hidden = rows * self.profile.spec.hidden * self.profile.spec.element_bytes
        tables = at(outer.tables, tokens)
        match what:
            case "tables":
                return StageBytes(highest(outer.tables_peak, tokens), 0, tables, frozenset())
            case "embed":
                return StageBytes(highest(outer.embed, rows), hidden, tables, frozenset())
            case "embed backward":
                new = self._begun(by_head=False) - known
                peak = outer.embed_backward_fresh if new else outer.embed_backward
                return StageBytes(highest(peak, rows), 0, 0, new)
        pieces = rows, self.batch * min(self.loss_chunk_size, tokens)
        if what == "evaluation":
            return StageBytes(highest(outer.evaluation, *pieces), 0, 0, frozenset())
        new = self._begun(by_head=True) - known
        if tokens <= self.loss_chunk_size:
            once = outer.head_once_fresh if new else outer.head_once
            return StageBytes(highest(once, rows), hidden, 0, new)
        peak = outer.head_fresh if new else outer.head
        return StageBytes(highest(peak, *pieces), hidden, 0, new)

    def _begun(self, *, by_head: bool) -> frozenset[str]:
        """Tensors whose sums the head begins, or the embedding's backward."""
        of = zip(outer_names(self.profile), self.profile.outer.by_head, strict=True)
        return frozenset(name for name, found in of if found is by_head)


def outer_names(profile: ModelProfile) -> tuple[str, ...]:
    """A name of each trained tensor outside the layers."""
    return tuple(map(str, range(len(profile.outer.weights))))
