"""A plan is a value: typed instructions over named buffers, in the order they run.

Registers. `hidden[l]` is the input of layer l for the chunk at hand and `gradient[l]` its
gradient; `hidden[L]` is what the head reads. Registers are transient tensors of one chunk and
hold no memory that grows with the sequence; everything that does is a `Buffer`.

Boundaries. Boundary b is the input of group b, and boundary G (after the last group) the input of
the head. In the backward the gradient of boundary b takes the place of `x.b`, chunk by chunk, so
boundary gradients need no memory of their own.

Sizes. A buffer holds one or more tensors, each of a shape a token and a precision (`regions`).
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from farspan.program.layout import ALIGNMENT, Range, Share, own_groups, streams
from farspan.program.residency import RESIDENCY, CutInto, Kind, RowTensor
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Sparse, Tier, value


def rows_of(share: Share, kind: Kind) -> tuple[Range, ...]:
    """The rows of every chunk in buffers of this kind."""
    match RESIDENCY[kind].rows:
        case CutInto.CELLS | CutInto.GROUPS:
            return share.cells
        case CutInto.TOKENS:
            return share.tokens.rows
        case CutInto.KEYS:
            return share.keys.rows


class AttentionMode(StrEnum):
    """The forward modes: nothing quadratic happens in any but COMPUTE."""

    COMPUTE = "compute"  # full attention over the prefix
    NONE = "none"  # project and write K, V, then stop: the cell has no output
    GIVEN = "given"  # O and LSE come from the kept buffer
    HELD = "held"  # O and LSE come from the register an earlier pass over this chunk left


MODE_COMPUTE, MODE_NONE, MODE_GIVEN, MODE_HELD = AttentionMode  # for loops, as spec.HOST


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor of a buffer: a row a token, rows contiguous."""

    name: str
    offset: int  # bytes from the buffer's address
    shape: tuple[int, ...]  # of one token, batch first
    element_bytes: int
    accumulate: bool  # fp32 (fp64 in a float64 model) whatever the model's dtype is

    def row_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@value
class Buffer:
    """A named range of one arena that lives for a range of instructions."""

    name: str
    kind: Kind
    layer: int  # the layer, or the boundary of `x`; -1 for slots, which serve any
    tier: Tier
    start: int  # first row held (program.layout), or first token of the chunks of cells
    stop: int  # one past the last
    cell_bytes: int  # of cells: bytes of the first, the longest; else 0
    bytes: int
    born: int  # index of the instruction that allocates it
    dies: int  # index of the instruction that frees it; alive in [born, dies)
    address: int  # in its tier's arena
    cell_row: int = 0  # by which a cell is smaller a token that its chunk is shorter


@value
class Allocate:
    """The buffer's memory is its own from here; its content is undefined."""

    buffer: str


@value
class Free:
    buffer: str


@value
class Clear:
    """Fill with zeros: an accumulator must not start from what memory held before."""

    buffer: str


@value
class Fetch:
    """Copy one chunk host to device."""

    source: str
    target: str
    chunk: int


@value
class Evict:
    """Copy one chunk device to host."""

    source: str
    target: str
    chunk: int


@value
class Embed:
    """hidden[0] = embedding of the chunk."""

    chunk: int


@value
class Load:
    """hidden[layer] = the chunk of x in `buffer`."""

    layer: int
    chunk: int
    buffer: str


@value
class Store:
    """The chunk of x in `buffer` = hidden[layer]."""

    layer: int
    chunk: int
    buffer: str


@value
class LoadGradient:
    """gradient[layer] = the chunk of x's gradient in `buffer`."""

    layer: int
    chunk: int
    buffer: str


@value
class StoreGradient:
    """The chunk of x's gradient in `buffer` = gradient[layer]."""

    layer: int
    chunk: int
    buffer: str


@value
class Forward:
    """The forward cell F(layer, chunk): hidden[layer] to hidden[layer + 1]."""

    layer: int
    chunk: int
    mode: AttentionMode
    prefix: str  # buffer that K, V of the earlier chunks are read from
    write_kv: str | None = None  # buffer that takes the chunk's K, V
    attention: str | None = None  # buffer that takes O, LSE (COMPUTE) or holds them (GIVEN)
    graph: bool = False  # keep the autograd graph for this cell's Backward
    activations: str | None = None  # buffer that takes what a kept graph saves
    kept: bool = False  # the graph outlives the chunk: its K, V (and kept O, LSE) stay in buffers
    hold: bool = False  # leave hidden[layer] and O, LSE in registers for a HELD pass
    means: str | None = None  # buffer of page means: written with K, V, read by what chooses
    choice: str | None = None  # buffer that takes the chosen pages, or holds them
    chooses: bool = False  # COMPUTE of sparse attention: the pages are chosen here


@value
class Head:
    """Final norm, logits and loss from hidden[L]; gives gradient[L] and adds to dW, unless the
    program only evaluates."""

    chunk: int
    gradient: bool = True


@value
class Backward:
    """The backward cell B(layer, chunk): gradient[layer + 1] to gradient[layer]; adds to dW and to
    dK, dV of the whole prefix, and takes the chunk's own complete dK, dV."""

    layer: int
    chunk: int
    prefix: str  # buffer that K, V of the earlier chunks are read from
    accumulator: str  # buffer of dK, dV of the earlier chunks
    own_dkv: str  # buffer that holds the chunk's own dK, dV
    own_kv: str | None = None  # buffer that holds the chunk's own K, V of a kept graph
    attention: str | None = None  # buffer that holds O, LSE of a kept graph
    activations: str | None = None  # buffer that holds what a kept graph saved
    choice: str | None = None  # buffer that holds the pages that the forward's queries chose


@value
class EmbedBackward:
    """gradient[0] into the embedding's dW."""

    chunk: int


@value
class Close:
    """The group's dW is complete: fp32 accumulators go into `.grad` once."""

    group: int


@value
class Gather:
    """The weights of a group's layers are whole from here on, and those outside the layers if
    `outer`: from the other ranks, or from main memory. With `gradients` what their gradients are
    added to is there."""

    group: int
    outer: bool
    gradients: bool = False


@value
class Release:
    """They are cut over the ranks again."""

    group: int
    outer: bool


@value
class Reduce:
    """The group's dW of all ranks are added up, where weights live in main memory: their gradients
    leave as sums."""

    group: int


@value
class Receive:
    """hidden[layer], or its gradient, comes from the pipeline stage before, or after."""

    layer: int
    chunk: int
    gradient: bool = False


@value
class Send:
    """hidden[layer], or its gradient, goes to the pipeline stage after, or before."""

    layer: int
    chunk: int
    gradient: bool = False


Instruction = (
    Allocate
    | Free
    | Clear
    | Fetch
    | Evict
    | Embed
    | Load
    | Store
    | LoadGradient
    | StoreGradient
    | Forward
    | Head
    | Backward
    | EmbedBackward
    | Close
    | Gather
    | Release
    | Reduce
    | Receive
    | Send
)


@dataclass(frozen=True, slots=True)
class Program:
    """What one step does, and where every tensor that grows with the sequence lives."""

    model: ModelSpec
    run: RunSpec
    schedule: Schedule
    chunks: tuple[tuple[int, int], ...]  # token range of each chunk, all ranks together
    groups: tuple[tuple[int, int], ...]  # layer range of each group
    instructions: tuple[Instruction, ...]
    buffers: dict[str, Buffer]
    arena_bytes: dict[Tier, int]
    share: Share  # what of each chunk the rank has whose program this is
    # Of a step whose backward comes later: the instructions before it are its forward. Else 0.
    cut: int = 0

    def rows(self, kind: Kind, chunk: int) -> Range:
        """Where in buffers of this kind a chunk's rows are."""
        return rows_of(self.share, kind)[chunk]

    def own_groups(self) -> range:
        """The groups that the rank runs: all, or its pipeline stage's one."""
        return own_groups(self.share.rank, len(self.groups))

    def streams(self) -> bool:
        """Do whole weights come through its slots, and their gradients leave there?"""
        return streams(self.schedule, self.share.rank.layout)

    def closes_outer(self, group: int) -> bool:
        """Whether what lies outside the layers is closed with the group: with the first, and with
        every stage of a pipeline, which all have it."""
        return group == 0 or self.share.rank.layout.pipeline > 1

    def trains(self) -> bool:
        """Does it compute gradients, and not only the loss?"""
        return any(isinstance(i, Close) for i in reversed(self.instructions))


INDEX_BYTES = 8  # int64: of a token's number, of its target, of its position


def group_bytes(model: ModelSpec, layers: Range | None, gradients: bool) -> int:
    """Bytes of the weights of these layers, None being what is outside them, or of the sums of
    their gradients."""
    works = [] if layers is None else [layer.work for layer in model.layers[slice(*layers)]]
    if gradients:
        trained = sum(work.trainable for work in works)
        return (model.outer_trainable() if layers is None else trained) * model.accumulate_bytes()
    elements = model.outer() if layers is None else sum(work.parameters for work in works)
    return elements * model.element_bytes - sum(work.packed for work in works)


def made_bytes(batch: int, tokens: int, *, documents: bool) -> int:
    """What a step makes of a batch: targets, and positions, which are one row for all sequences
    where no documents are told apart. Ids, labels and documents are the caller's."""
    return INDEX_BYTES * tokens * (batch + (batch if documents else 1))


def aligned(size: int) -> int:
    """The next multiple of the alignment, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def regions(
    kind: Kind, model: ModelSpec, layer: LayerSpec, batch: int, tokens: int
) -> tuple[Region, ...]:
    """The tensors of a buffer of `tokens` tokens, one after the other."""
    found, offset = [], 0
    for one in RESIDENCY[kind].tensors(model, layer, batch):
        region = Region(one.name, offset, one.shape, _width(model, one), one.wide)
        found.append(region)
        offset += aligned(region.row_bytes() * tokens)
    return tuple(found)


def regions_bytes(found: tuple[Region, ...], tokens: int) -> int:
    """Bytes of a buffer with these regions."""
    return sum(aligned(region.row_bytes() * tokens) for region in found)


def row_bytes(kind: Kind, model: ModelSpec, layer: LayerSpec, batch: int) -> int:
    """Bytes a token of a buffer, padding left out."""
    found = RESIDENCY[kind].tensors(model, layer, batch)
    return sum(prod(one.shape) * _width(model, one) for one in found)


def _width(model: ModelSpec, tensor: RowTensor) -> int:
    return model.accumulate_bytes() if tensor.wide else model.element_bytes


def activation_cell_bytes(
    model: ModelSpec,
    layer: LayerSpec,
    batch: int,
    tokens: int,
    with_attention: bool,
    sharers: int = 1,
) -> int:
    """Bytes that one cell's saved tensors take, K and V excluded; O and LSE on request, of which
    the layer has the heads of one of so many ranks."""
    row = activation_row_bytes(model, layer, with_attention, sharers)
    # Of a recurrent layer it is what a scan rounds up to and the states, of each sequence.
    constant = layer.activation_constant * (batch if layer.state else 1)
    return aligned(row * batch * tokens + constant)


def activation_row_bytes(
    model: ModelSpec, layer: LayerSpec, with_attention: bool, sharers: int = 1
) -> int:
    """The part of them that grows, a token that the rank has outside attention."""
    attention = sharers * row_bytes(Kind.ATTENTION, model, layer, 1) if with_attention else 0
    return layer.activation_bytes + attention


def cell_sizes(rows: tuple[Range, ...], cell_bytes: int, cell_row: int) -> list[int]:
    """Bytes of the cells of these rows, the first of which are the most; see Buffer."""
    lengths = [stop - start for start, stop in rows]
    return [cell_bytes - cell_row * (lengths[0] - length) for length in lengths]


def cell_place(program: Program, buffer: Buffer, chunk: int) -> Range:
    """Where in a buffer of raw cells a chunk's is, in bytes; in a slot at its start."""
    if buffer.layer < 0:
        return 0, buffer.cell_bytes
    rows = program.share.cells
    first = [start for start, _ in rows].index(buffer.start)
    *before, size = cell_sizes(rows[first : chunk + 1], buffer.cell_bytes, buffer.cell_row)
    offset = sum(map(aligned, before))
    return offset, offset + size


CHOICE_BYTES = 4  # of the number of a page


def means_cell_bytes(
    model: ModelSpec, layer: LayerSpec, batch: int, tokens: int, sparse: Sparse
) -> int:
    """Bytes of the R keys that stand for each of a chunk's n pages, [n * R, B, Hk, D], in the dtype
    of keys."""
    row = batch * layer.kv_heads * sparse.key_dim(layer) * model.element_bytes
    return tokens // sparse.mean_tokens * row


def choice_cell_bytes(layer: LayerSpec, batch: int, tokens: int, pages: int, page: int) -> int:
    """Bytes of a choice [B, Hk, M, k] of a chunk of `tokens`, of k = `pages` pages."""
    return batch * layer.kv_heads * -(-tokens // page) * pages * CHOICE_BYTES
