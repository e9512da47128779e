"""Sizes of what a buffer holds: which tensors, of which shape a token, in which precision. And of
what a step reads."""

from farspan.plan.layout import Range
from farspan.plan.program import Buffer, Program, Region
from farspan.plan.residency import RESIDENCY, Kind
from farspan.spec import LayerSpec, ModelSpec, Sparse

# Regions start on cache-line boundaries: vendor kernels want at least 16 bytes, and a packed
# tensor of any dtype must be viewable at its offset.
ALIGNMENT = 64


INDEX_BYTES = 8  # int64: of a token's number, of its target, of its position


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
        width = model.accumulate_bytes() if one.wide else model.element_bytes
        region = Region(one.name, offset, one.shape, width, one.wide)
        found.append(region)
        offset += aligned(region.row_bytes() * tokens)
    return tuple(found)


def regions_bytes(found: tuple[Region, ...], tokens: int) -> int:
    """Bytes of a buffer with these regions."""
    return sum(aligned(region.row_bytes() * tokens) for region in found)


def row_bytes(kind: Kind, model: ModelSpec, layer: LayerSpec, batch: int) -> int:
    """Bytes a token of a buffer, padding left out."""
    return sum(region.row_bytes() for region in regions(kind, model, layer, batch, 1))


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
    row = layer.activation_bytes
    if with_attention:
        row += sharers * layer.output_elements() * model.element_bytes
        row += sharers * layer.query_heads * model.accumulate_bytes()
    return row


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
    """Bytes of the mean keys [n, B, Hk, D] of a chunk's pages, in the accumulate dtype."""
    row = batch * layer.kv_heads * layer.head_dim * model.accumulate_bytes()
    return tokens // sparse.page * row


def choice_cell_bytes(layer: LayerSpec, batch: int, tokens: int, pages: int, page: int) -> int:
    """Bytes of a choice [B, Hk, M, k] of a chunk of `tokens`, of k = `pages` pages."""
    return batch * layer.kv_heads * -(-tokens // page) * pages * CHOICE_BYTES
