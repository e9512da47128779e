"""Profile of a model: bytes of its cells and of its modules outside the layers, read without torch.

`farspan.engine.profile` measures it once, by running the engine's own cells on the meta device.
Each quantity is a line (linear function) in the tokens of a cell, or the maximum of several lines.
The memory of attention depends on the blocks of keys that a chunk sees. Lines leave it out, and
`ProfiledCells` adds it: a cell has `at` before attention begins; later lines leave out O and LSE.
"""

from dataclasses import dataclass, field, replace
from math import ceil

from farspan.profile.attention import Call, attention_bytes, choice_bytes, chunk_call, sparse_call
from farspan.program.program import AttentionMode, row_bytes
from farspan.program.residency import Kind
from farspan.spec import LayerSpec, ModelSpec, Sparse

Line = tuple[float, ...]  # bytes: a constant, then a slope for each count of tokens
Peak = tuple[Line, ...]  # lines of moments, each possibly the peak


def at(line: Line, *tokens: int) -> int:
    """Return the bytes that a linear function (`line`) gives for token counts of all sequences."""
    constant, *slopes = line
    return ceil(constant + sum(a * b for a, b in zip(slopes, tokens, strict=True)) - 1e-6)


def highest(peak: Peak, *tokens: int) -> int:
    """Return the most bytes that any of these linear functions gives; 0 if there are none."""
    return max((at(line, *tokens) for line in peak), default=0)


@dataclass(frozen=True, slots=True)
class Variant:
    """Training options that change the memory of cells: precision, adapters, kernels."""

    dtype: str = "bfloat16"  # torch's name
    # Rank of LoRA on every linear module of the layers; 0: full training; None: other adapters.
    rank: int | None = 0
    fused: bool = False  # farspan's kernels for norms, gates, rotations and the loss
    adds: bool = False  # products add weight gradients to their sums
    tiled: bool = False  # token-wise modules may also run on tiles
    nf4: bool = False  # frozen weights of linear modules have four bits
    remakes: bool = True  # kept cells compute norms' outputs and act(gate) * up again

    def key(self) -> str:
        words = [self.dtype, *[f"lora{self.rank}"] * bool(self.rank)]
        words += [name for name in ("fused", "adds", "tiled", "nf4") if getattr(self, name)]
        words += [] if self.remakes else ["whole"]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class CellLines:
    """Memory of a layer's cell when run in one way (see `form`). Bytes are linear functions (lines)
    of the cell's tokens and, if modules run on tiles, of a tile's tokens. A backward's lines
    include the graph."""

    asked: Peak  # until the cell calls attention, where a pass for K, V stops
    before: Peak  # until attention kernels run
    at: Line  # while attention kernels run
    after: Peak  # after attention, without O and LSE
    graph: Line  # the graph, without O, LSE and the layer's input
    saves_input: bool  # whether the graph has that input
    backward_before: Peak
    backward_at: Line
    backward_after: Peak
    weight_gradients: int = 0  # bytes of weight gradients when autograd returns
    sums: int = 0  # bytes of sums of weight gradients made during autograd


@dataclass(frozen=True, slots=True)
class KindProfile:
    """Memory of all layers that are built and called alike."""

    weights: tuple[int, ...]  # elements of each trained tensor
    heads_first: bool  # memory layout of queries, which O has too
    cells: dict[str, CellLines]  # by name from `form`


def form(
    *,
    graph: bool,
    kept: bool = False,
    fresh: bool = False,
    unread: bool = False,
    tiled: bool = False,
) -> str:
    """Return the name of a way to run a cell.

    It may build a graph, keep the graph after its chunk, begin sums of weight gradients in its
    backward (`fresh`), skip a product that nothing reads (`unread`), and run token-wise modules on
    tiles.
    """
    if not graph:
        return "plain tiled" if tiled else "plain"
    words = ["kept" if kept else "graph", *["fresh"] * fresh, *["unread"] * (unread and not kept)]
    return " ".join([*words, *["tiled"] * tiled])


@dataclass(frozen=True, slots=True)
class OuterProfile:
    """Memory outside the layers; the head's is linear in tokens of a chunk and of a loss piece."""

    weights: tuple[int, ...]  # elements of each trained tensor
    by_head: tuple[bool, ...]  # whether the head begins their sums, not the embedding's backward
    embed: Peak
    tables: Line  # inputs of layers besides hidden states
    tables_peak: Peak
    head: Peak  # if the sums exist
    head_fresh: Peak
    head_once: Peak  # for a chunk that is one piece, in its tokens
    head_once_fresh: Peak
    evaluation: Peak
    embed_backward: Peak
    embed_backward_fresh: Peak


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """Memory profile of a model in one variant. Profiles are equal only if they are one object."""

    spec: ModelSpec
    kinds: tuple[KindProfile, ...]
    kind_of: tuple[int, ...]  # layer to its kind
    outer: OuterProfile
    variant: Variant
    longest: int | None = None  # most positions, if they are bounded
    learned_positions: bool = False  # positions are embedded, so they cannot be extended


# -- bytes of the cells and stages of a program ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellKind:
    """Properties that determine the memory of a cell."""

    block: int  # index of the kind of layer
    tokens: int
    q_start: int  # reduced to the starts that differ in blocks of keys
    mode: AttentionMode
    buffered: bool
    graph: bool
    kept: bool
    hold: bool
    tiled: bool = False  # token-wise modules run on tiles
    value: bool = True  # with tiles: its output is read
    fresh: bool = False  # its backward makes sums of weight gradients during autograd
    chooses: bool = False  # it chooses pages


@dataclass(frozen=True, slots=True)
class CellBytes:
    """Bytes of one cell. A rise is the peak minus the memory at the start of the instruction."""

    forward_rise: int
    out: int
    held: int  # O and LSE that stay in registers
    graph: int  # the graph, without the layer's input
    saves_input: bool
    backward_rise: int
    weight_gradients: int  # present when autograd returns
    gradient: int  # gradient of the layer's input
    sums: int = 0  # sums of weight gradients made during autograd


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of running a module outside the layers on a chunk."""

    rise: int
    out: int  # its output register
    tables: int
    new: frozenset[str]  # parameters whose sums the stage begins


@dataclass(slots=True)
class ProfiledCells:
    """Bytes of a model's cells, computed once for each kind of cell."""

    profile: ModelProfile
    batch: int
    kv_block: int
    sparse: Sparse | None = None
    in_slots: bool = False  # gather chosen pages to slots of the program
    tile: int = 0  # tokens of a tile
    sequence: int = 0  # tokens of a sequence, if layers choose among these by an indexer
    known: dict[CellKind, CellBytes] = field(default_factory=dict)

    def get(self, kind: CellKind) -> CellBytes:
        if kind not in self.known:
            self.known[kind] = self._bytes(kind)
        return self.known[kind]

    def _bytes(self, kind: CellKind) -> CellBytes:
        layer = self.profile.kind_of.index(kind.block)
        spec, made = self.profile.spec.layers[layer], self.profile.kinds[kind.block]
        lines = _lines_of(made, kind)
        chunk = self.batch * kind.tokens
        tokens = (chunk, self.batch * self.tile)[: len(lines.at) - 1]
        out = chunk * self.profile.spec.passed() * self.profile.spec.element_bytes
        if kind.mode is AttentionMode.NONE:
            return CellBytes(highest(lines.asked, *tokens), 0, 0, 0, False, 0, 0, 0)
        computes = kind.mode is AttentionMode.COMPUTE
        attended = row_bytes(Kind.ATTENTION, self.profile.spec, spec, chunk)
        forward, backward = 0, 0
        if spec.attends() and (computes or kind.graph):
            forward, backward = self._attention(spec, kind, made.heads_first)
        stays = attended if computes and not kind.buffered else 0
        moments = [highest(lines.before, *tokens), highest(lines.after, *tokens) + stays]
        if spec.indexer is not None and (kind.graph or spec.indexer.passed):
            # A backward, or later layers, attend to the chosen tokens.
            moments.append(at(lines.at, *tokens) + self._choice(spec, kind))
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
        """Return the peak bytes of a cell's backward, including its graph."""
        return max(
            highest(lines.backward_before, *tokens) + waits,
            at(lines.backward_at, *tokens) + waits + attention,
            highest(lines.backward_after, *tokens),
        )

    def _attention(self, spec: LayerSpec, kind: CellKind, heads_first: bool) -> tuple[int, int]:
        run = self.batch, self.profile.spec.element_bytes
        call = self._call(spec, kind)
        if self.sparse is not None and spec.window is None:
            call = sparse_call(call, spec, self.sparse, run, kind.tokens, self.in_slots)
        return attention_bytes(spec, call, run, kind.tokens, heads_first, kind.chooses)

    def _call(self, spec: LayerSpec, kind: CellKind) -> Call:
        stop = kind.q_start + kind.tokens
        call = chunk_call(spec, self.batch, kind.q_start, stop, self.kv_block)
        if spec.indexer is None:
            return call
        return replace(call, sequence=self.sequence, in_slots=self.in_slots)

    def _choice(self, spec: LayerSpec, kind: CellKind) -> int:
        run = self.batch, self.profile.spec.element_bytes
        return choice_bytes(spec, self._call(spec, kind), run, kind.tokens)


def _lines_of(profile: KindProfile, kind: CellKind) -> CellLines:
    """Return the memory of a cell, run as `kind` says or, if that way was not measured, in the
    nearest way: some layers cannot run on tiles, or have no product to skip as unread."""
    named = form(
        graph=kind.graph,
        kept=kind.kept,
        fresh=kind.fresh,
        unread=kind.graph and not kind.value,
        tiled=kind.tiled,
    )
    whole = named.removesuffix(" tiled")
    near = named, named.replace(" unread", ""), whole, whole.replace(" unread", "")
    return next(profile.cells[name] for name in (*near, named.split()[0]) if name in profile.cells)


@dataclass(slots=True)
class ProfiledStages:
    """Bytes of running the modules outside the layers, such as the embedding and the head."""

    profile: ModelProfile
    batch: int
    loss_chunk_size: int

    def get(self, what: str, tokens: int, known: frozenset[str]) -> StageBytes:
        outer, rows = self.profile.outer, self.batch * tokens
        hidden = rows * self.profile.spec.passed() * self.profile.spec.element_bytes
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
        """Return which gradient sums begin in the head or, if not `by_head`, in the embedding."""
        pairs = zip(outer_names(self.profile), self.profile.outer.by_head, strict=True)
        return frozenset(name for name, is_head in pairs if is_head is by_head)


def outer_names(profile: ModelProfile) -> tuple[str, ...]:
    """Return a made-up name for each trained tensor outside the layers, to track its gradient."""
    return tuple(map(str, range(len(profile.outer.weights))))
