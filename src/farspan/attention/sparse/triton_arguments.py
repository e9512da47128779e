"""What the kernels are given: named tuples, which Triton takes apart into single arguments.

Letters: B batch rows, H query heads, Hk heads of keys and values, C tokens of the chunk, D head
size, M query pages, k chosen pages. Strides and offsets are in elements.
"""

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A tensor of vectors with inner stride 1: its address and its strides, in elements."""

    base: Any
    batch: int
    head: int
    token: int


class Pages(NamedTuple):
    """What each query page reads (`PageTable`), and the first key each query sees, or None."""

    choice: Any  # [B, Hk, M, k]
    slots: Any  # [B, Hk, M, k]
    first_key: Any  # [B, C] int32, or None


class Visits(NamedTuple):
    """Who reads each page (`Inverse`), and the first key each query sees, or None."""

    query_pages: Any
    pages: Any
    starts: Any
    rows: Any
    first_key: Any


class Softmax(NamedTuple):
    """Of the whole softmax, per query: [B, H, C] fp32, contiguous."""

    lse: Any
    delta: Any  # rowsum(dO * O)


class Totals(NamedTuple):
    """Sums of the gradients of keys and values, fp32."""

    dk: Rows
    dv: Rows


class Sizes(NamedTuple):
    """What changes from chunk to chunk, made by `veiled`; heads and scale, which do not, as they
    are."""

    queries: int  # tokens of the chunk
    tokens: int  # tokens of the sequence so far; no key beyond
    query_pages: int  # M
    chosen: int  # k
    slots: int  # pages that the buffer of keys and values holds
    kv_heads: int
    scale: float


LARGEST = 2**27 - 1  # of what `veiled` takes: what it gives is an int32


def veiled(size: int) -> int:
    """16 size + 2, for the kernels to shift back.

    Triton compiles a kernel anew for integers that are 1 and for multiples of 16, in tuples even
    where `do_not_specialize` is asked for. This is never either, so that one kernel serves all
    chunks of all sequences.
    """
    assert 0 <= size <= LARGEST, size
    return 16 * size + 2


class Shape(NamedTuple):
    """What the code is compiled for."""

    page: int
    group: int  # query heads of a head of keys and values
    head_dim: int
    padded_dim: int
    tile_queries: int
    tile_keys: int
    stages: int
