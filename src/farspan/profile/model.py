"""What a model costs, as a value: measured once by the engine's own cells on the meta device
(`farspan.engine.profile`), read by planning, which has no torch.

A quantity is a line in the tokens of a cell, or several of which the highest counts. What attention
itself holds depends on the blocks of keys that a chunk sees, so lines leave it out and it is added
where these are known (`ProfiledCells`): before it begins a cell holds `at`, and what follows is
counted without O and LSE.
"""

from dataclasses import dataclass, field
from math import ceil

from farspan.profile.attention import Call, attention_bytes, chunk_call, sparse_call
from farspan.program.program import AttentionMode, row_bytes
from farspan.program.residency import Kind
from farspan.spec import LayerSpec, ModelSpec, Sparse

Line = tuple[float, ...]  # bytes: constant, then for a token of every length that it depends on
Peak = tuple[Line, ...]  # moments of which any may be the fullest


def at(line: Line, *tokens: int) -> int:
    """Bytes for so many tokens of each length; those of a chunk are of all its sequences."""
    constant, *slopes = line
    return ceil(constant + sum(a * b for a, b in zip(slopes, tokens, strict=True)) - 1e-6)


def highest(peak: Peak, *tokens: int) -> int:
    """Bytes at the fullest of these moments, 0 of none."""
    return max((at(line, *tokens) for line in peak), default=0)


@dataclass(frozen=True, slots=True)
class Variant:
    """In what way a model is trained, as far as its cells know it."""

    dtype: str = "bfloat16"  # as torch names it
    # Of LoRA on every linear module of the layers; 0: all is trained; None: the model has others.
    rank: int | None = 0
    fused: bool = False  # norms, gates, rotations and the loss by farspan's own kernels
    adds: bool = False  # products add weight gradients to their sums
    tiled: bool = False  # token-wise modules may run on tiles, too
    nf4: bool = False  # frozen weights of linear modules have four bits

    def key(self) -> str:
        """A name for it."""
        words = [self.dtype, *[f"lora{self.rank}"] * bool(self.rank)]
        words += [name for name in ("fused", "adds", "tiled", "nf4") if getattr(self, name)]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class CellLines:
    """One way in which a layer's cell runs. Lines are in tokens, and where its token-wise modules
    run on tiles in those of a tile, too; a backward's count what the graph holds."""

    asked: Peak  # until attention is asked for, at which a pass for K, V stops
    before: Peak  # until kernels attend
    at: Line  # when they do
    after: Peak  # from then on, O and LSE left out
    graph: Line  # what the graph holds, O, LSE and the layer's input left out
    saves_input: bool  # does it hold that input?
    backward_before: Peak
    backward_at: Line
    backward_after: Peak
    weight_gradients: int = 0  # alive together when autograd returns
    sums: int = 0  # of weight gradients, made while autograd runs


@dataclass(frozen=True, slots=True)
class KindProfile:
    """Layers that are made and called alike."""

    weights: tuple[int, ...]  # elements of each trained tensor
    heads_first: bool  # how queries lie in memory: kernels lay out O as they
    cells: dict[str, CellLines]  # by `form`


def form(
    *,
    graph: bool,
    kept: bool = False,
    fresh: bool = False,
    unread: bool = False,
    tiled: bool = False,
) -> str:
    """The name of a way to run a cell: with a graph, one that outlives its chunk, with sums of
    weight gradients that begin in its backward, without the product that nobody reads, and with
    token-wise modules on tiles."""
    if not graph:
        return "plain tiled" if tiled else "plain"
    words = ["kept" if kept else "graph", *["fresh"] * fresh, *["unread"] * (unread and not kept)]
    return " ".join([*words, *["tiled"] * tiled])


@dataclass(frozen=True, slots=True)
class OuterProfile:
    """What lies outside the layers. The head's lines are in tokens of a chunk and of a piece."""

    weights: tuple[int, ...]  # elements of each trained tensor
    by_head: tuple[bool, ...]  # does the head begin their sums, or the embedding's backward?
    embed: Peak
    tables: Line  # what layers are handed beside their input
    tables_peak: Peak
    head: Peak  # where the sums exist
    head_fresh: Peak
    head_once: Peak  # of a chunk that is one piece, in its tokens
    head_once_fresh: Peak
    evaluation: Peak
    embed_backward: Peak
    embed_backward_fresh: Peak


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """A model in one dtype, trained in one way, on one choice of kernels. There is one of each, and
    it is told from others as an object."""

    spec: ModelSpec
    kinds: tuple[KindProfile, ...]
    kind_of: tuple[int, ...]  # of every layer
    outer: OuterProfile
    variant: Variant
    longest: int | None = None  # tokens the positions reach, where they are bounded
    learned_positions: bool = False  # they are embedded: there are no more


# -- bytes of the cells and stages of a program ----------------------------------------------------


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
        attended = row_bytes(Kind.ATTENTION, self.profile.spec, spec, chunk)
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
