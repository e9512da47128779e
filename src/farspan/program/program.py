"""A program is a value: typed instructions over named buffers, in the order they run.

Registers. `hidden[l]` is the input of layer l for the current chunk and `gradient[l]` its gradient;
the head reads `hidden[L]`. Registers are transient tensors of one chunk and hold no memory that
grows with the sequence; everything that does is a `Buffer`.

Boundaries. Boundary b is the input of group b, and boundary G (after the last group) the input of
the head. In the backward the gradient of boundary b replaces `x.b`, chunk by chunk, so boundary
gradients need no memory of their own.

Sizes. A buffer holds one or more tensors, each with a shape per token and a precision (`regions`).
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from farspan.program.layout import ALIGNMENT, Range, Share, own_groups, streams
from farspan.program.residency import RESIDENCY, CutInto, Kind, RowTensor
from farspan.spec import Cut, LayerSpec, ModelSpec, RunSpec, Schedule, Sparse, Tier, value


def rows_of(share: Share, kind: Kind) -> tuple[Range, ...]:
    """Return the range of rows that each chunk takes in a rank's buffers of this tensor kind."""
    match RESIDENCY[kind].rows:
        case CutInto.CELLS | CutInto.GROUPS:
            return share.cells
        case CutInto.TOKENS:
            return share.tokens.rows
        case CutInto.KEYS:
            return share.keys.rows


class AttentionMode(StrEnum):
    """Source of attention's output in a forward cell. Only COMPUTE is quadratic in the sequence."""

    COMPUTE = "compute"  # full attention over the prefix
    NONE = "none"  # project and write K, V, then stop: the cell has no output
    GIVEN = "given"  # O and LSE come from the kept buffer
    HELD = "held"  # O and LSE come from the register that an earlier pass over this chunk left


MODE_COMPUTE, MODE_NONE, MODE_GIVEN, MODE_HELD = AttentionMode  # fast in loops, as spec.HOST


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor in a buffer, with one row per token; rows are contiguous."""

    name: str
    offset: int  # bytes from the buffer's address
    shape: tuple[int, ...]  # of one token, batch first
    element_bytes: int
    accumulate: bool  # fp32 (fp64 in a float64 model) for any dtype of the model

    def row_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@value
class Buffer:
    """A named range of bytes in an arena, with its lifetime in instructions."""

    name: str
    kind: Kind
    layer: int  # the layer, for x the group that reads it; -1 for slots, which any layer uses
    tier: Tier
    start: int  # first row held (program.layout), or first token of the chunks of cells
    stop: int  # one past the last
    cell_bytes: int  # of raw cells: bytes of the first cell, the longest; else 0
    bytes: int
    born: int  # index of the instruction that allocates it
    dies: int  # index of the instruction that frees it; alive in [born, dies)
    address: int  # in its tier's arena
    cell_row: int = 0  # bytes by which a cell shrinks for each token that its chunk is shorter


@value
class Allocate:
    """Start the lifetime of a buffer; its content is undefined."""

    buffer: str


@value
class Free:
    buffer: str


@value
class Clear:
    """Fill a buffer with zeros, since sums must not start from old content."""

    buffer: str


@value
class Fetch:
    """Copy one chunk of a tensor from host to device."""

    source: str
    target: str
    chunk: int


@value
class Evict:
    """Copy one chunk of a buffer from device to host."""

    source: str
    target: str
    chunk: int


@value
class Embed:
    """Set hidden[0] to the embeddings of the chunk's tokens."""

    chunk: int


@value
class Load:
    """Set hidden[layer], a layer's input, to the chunk's hidden states saved in `buffer`."""

    layer: int
    chunk: int
    buffer: str


@value
class Store:
    """Write hidden[layer], a layer's input, to the chunk's rows in `buffer`."""

    layer: int
    chunk: int
    buffer: str


@value
class LoadGradient:
    """Set gradient[layer], the gradient of a layer's input, to the chunk's rows in `buffer`."""

    layer: int
    chunk: int
    buffer: str


@value
class StoreGradient:
    """Write gradient[layer] to the chunk's rows in `buffer`."""

    layer: int
    chunk: int
    buffer: str


@value
class Forward:
    """Cell F(layer, chunk): run a layer forward, from hidden[layer] to hidden[layer + 1]."""

    layer: int
    chunk: int
    mode: AttentionMode
    prefix: str  # buffer that K, V of the earlier chunks are read from
    write_kv: str | None = None  # buffer that takes the chunk's K, V
    attention: str | None = None  # buffer that takes O, LSE (COMPUTE) or holds them (GIVEN)
    graph: bool = False  # keep the autograd graph for this cell's Backward
    activations: str | None = None  # buffer for the tensors that a kept graph saves
    kept: bool = False  # the graph outlives the chunk: its K, V (and kept O, LSE) stay in buffers
    hold: bool = False  # leave hidden[layer] and O, LSE in registers for a HELD pass
    means: str | None = None  # buffer of page means: written with K, V, read by a cell that chooses
    choice: str | None = None  # buffer for the chosen pages, or with them
    chooses: bool = False  # COMPUTE with sparse attention: this cell chooses the pages
    drops: bool = False  # the output is not needed: the layer runs for its router's choices alone


@value
class Head:
    """Run norm, logits and loss on hidden[L]; with `gradient`, set gradient[L] and add to dW."""

    chunk: int
    gradient: bool = True


@value
class Backward:
    """Cell B(layer, chunk): run a layer backward, from gradient[layer + 1] to gradient[layer]. It
    adds to dW and to dK, dV of earlier chunks, and reads the chunk's own, complete dK, dV."""

    layer: int
    chunk: int
    prefix: str  # buffer that K, V of the earlier chunks are read from
    accumulator: str  # buffer of dK, dV of the earlier chunks
    own_dkv: str  # buffer that holds the chunk's own dK, dV
    own_kv: str | None = None  # buffer that holds the chunk's own K, V of a kept graph
    attention: str | None = None  # buffer that holds O, LSE of a kept graph
    activations: str | None = None  # buffer with the tensors that a kept graph saved
    choice: str | None = None  # buffer with the pages that the forward's queries chose


@value
class EmbedBackward:
    """Add gradient[0] to the embedding's weight gradient."""

    chunk: int


@value
class Close:
    """Finish the group's weight gradients: round their fp32 sums once, into `.grad`."""

    group: int


@value
class Gather:
    """Bring the weights of a group's layers to the device, from other ranks or main memory. `outer`
    adds the modules outside the layers; `gradients` brings sums of gradients instead of weights."""

    group: int
    outer: bool
    gradients: bool = False


@value
class Release:
    """Free the gathered weights of a group; ranks keep their shards."""

    group: int
    outer: bool


@value
class Reduce:
    """Sum the group's weight gradients over ranks, in programs with weights in main memory."""

    group: int


@value
class Receive:
    """Receive hidden[layer] from the previous pipeline stage, or gradient[layer] from the next."""

    layer: int
    chunk: int
    gradient: bool = False


@value
class Send:
    """Send hidden[layer] to the next pipeline stage, or gradient[layer] to the previous one."""

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
    """Instructions of one step on one rank, and all buffers with their addresses in the arenas."""

    model: ModelSpec
    run: RunSpec
    schedule: Schedule
    chunks: tuple[tuple[int, int], ...]  # token range of each chunk, all ranks together
    groups: tuple[tuple[int, int], ...]  # layer range of each group
    instructions: tuple[Instruction, ...]
    buffers: dict[str, Buffer]
    arena_bytes: dict[Tier, int]
    share: Share  # the part of each chunk that the program's rank has
    # Number of instructions of the forward if the backward is separate, else 0.
    cut: int = 0
    cut_after: Cut = Cut.NONE  # what the forward then has complete

    def rows(self, kind: Kind, chunk: int) -> Range:
        return rows_of(self.share, kind)[chunk]

    def own_groups(self) -> range:
        """Return the indices of the groups that the rank runs: all, or its pipeline stage's."""
        return own_groups(self.share.rank, len(self.groups))

    def streams(self) -> bool:
        """Return whether whole weights come from main memory, and whole gradients go there."""
        return streams(self.schedule, self.share.rank.layout)

    def closes_outer(self, group: int) -> bool:
        """Return whether closing the group also closes the modules outside the layers. The first
        group does, and every stage of a pipeline, since each stage has a shard of these modules."""
        return group == 0 or self.share.rank.layout.pipeline > 1

    def trains(self) -> bool:
        """Return whether the program computes gradients, not only the loss."""
        return any(isinstance(i, Close) for i in reversed(self.instructions))


INDEX_BYTES = 8  # int64: of a token's id, its target or its position


def group_bytes(model: ModelSpec, layers: Range | None, gradients: bool) -> int:
    """Return the bytes of these layers' weights, or of the sums of their gradients. `layers` None
    means the modules outside the layers."""
    works = [] if layers is None else [layer.work for layer in model.layers[slice(*layers)]]
    if gradients:
        trained = sum(work.trainable for work in works)
        return (model.outer_trainable() if layers is None else trained) * model.accumulate_bytes()
    elements = model.outer() if layers is None else sum(work.parameters for work in works)
    return elements * model.element_bytes - sum(work.packed for work in works)


def made_bytes(batch: int, tokens: int, *, documents: bool) -> int:
    """Return the bytes that a step makes from a batch: targets, and positions, which all sequences
    share unless documents are separate. The caller's ids, labels and documents do not count."""
    return INDEX_BYTES * tokens * (batch + (batch if documents else 1))


def aligned(size: int) -> int:
    """Return the size rounded up to a multiple of `ALIGNMENT` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def regions(
    kind: Kind, model: ModelSpec, layer: LayerSpec, batch: int, tokens: int
) -> tuple[Region, ...]:
    """Return the tensors that lie one after the other in a buffer of `tokens` rows."""
    found, offset = [], 0
    for one in RESIDENCY[kind].tensors(model, layer, batch):
        region = Region(one.name, offset, one.shape, _width(model, one), one.wide)
        found.append(region)
        offset += aligned(region.row_bytes() * tokens)
    return tuple(found)


def regions_bytes(tensors: tuple[Region, ...], tokens: int) -> int:
    """Return the bytes of a buffer of `tokens` rows with these tensors."""
    return sum(aligned(region.row_bytes() * tokens) for region in tensors)


def row_bytes(kind: Kind, model: ModelSpec, layer: LayerSpec, batch: int) -> int:
    """Return the bytes per token of buffers of this kind, without padding."""
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
    """Return the bytes of activations that one cell saves, without K and V. `layer` has the heads
    of one rank; O and LSE, if included, have those of all `sharers` ranks."""
    row = activation_row_bytes(model, layer, with_attention, sharers)
    # A recurrent layer's constant is the rounding of its scan and its states, per sequence.
    constant = layer.activation_constant * (batch if layer.state else 1)
    return aligned(row * batch * tokens + constant)


def activation_row_bytes(
    model: ModelSpec, layer: LayerSpec, with_attention: bool, sharers: int = 1
) -> int:
    """Return the bytes per token of the activations that a cell saves."""
    attention = sharers * row_bytes(Kind.ATTENTION, model, layer, 1) if with_attention else 0
    return layer.activation_bytes + attention


def cell_sizes(rows: tuple[Range, ...], cell_bytes: int, cell_row: int) -> list[int]:
    """Return the bytes of each cell's saved tensors in a buffer, by chunk. The first takes
    `cell_bytes`; a chunk that is shorter by n tokens takes n * `cell_row` bytes fewer."""
    lengths = [stop - start for start, stop in rows]
    return [cell_bytes - cell_row * (lengths[0] - length) for length in lengths]


def cell_place(program: Program, buffer: Buffer, chunk: int) -> Range:
    """Return the byte range of a cell's saved tensors in a buffer; a slot holds one cell's only."""
    if buffer.layer < 0:
        return 0, buffer.cell_bytes
    rows = program.share.cells
    first = [start for start, _ in rows].index(buffer.start)
    *before, size = cell_sizes(rows[first : chunk + 1], buffer.cell_bytes, buffer.cell_row)
    offset = sum(map(aligned, before))
    return offset, offset + size


CHOICE_BYTES = 4  # of a page's number


def means_cell_bytes(
    model: ModelSpec, layer: LayerSpec, batch: int, tokens: int, sparse: Sparse
) -> int:
    """Return the bytes of a chunk's mean keys [means, batch, KV heads, dim], in the keys' dtype."""
    row = batch * layer.kv_heads * sparse.key_dim(layer) * model.element_bytes
    return tokens // sparse.mean_tokens * row


def choice_cell_bytes(layer: LayerSpec, batch: int, tokens: int, pages: int, page: int) -> int:
    """Return the bytes of a chunk's chosen pages, [batch, KV heads, query pages, `pages`]."""
    return batch * layer.kv_heads * -(-tokens // page) * pages * CHOICE_BYTES
