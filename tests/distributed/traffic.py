"""The bytes that collectives of fsdp and tensor parallelism are expected to send."""

from collections.abc import Iterable, Sequence
from math import prod

from farspan.distributed.fsdp import shard_bytes
from farspan.distributed.tensor_plan import LayerPlan


def gather_bytes(shapes: Iterable[tuple[Sequence[int], int]], ranks: int) -> int:
    """That a rank gives to others when a unit of these shapes and item sizes is gathered: (P - 1)/P
    of its weights where P divides all rows."""
    return (ranks - 1) * sum(shard_bytes(shape, size, ranks) for shape, size in shapes)


def reduce_bytes(shapes: Sequence[Sequence[int]], itemsize: int, ranks: int) -> int:
    """That a rank gives to others when the gradients of a unit's trainable parameters are reduced,
    `itemsize` bytes an element: (P - 1)/P of them, and 4 bytes a parameter that say whether there
    is one, there and back. Where they are replicated, twice the gradients."""
    said = 2 * 4 * len(shapes) * (ranks - 1) // ranks
    return said + (ranks - 1) * sum(shard_bytes(shape, itemsize, ranks) for shape in shapes)


def layer_sent(
    layer: LayerPlan, counts: Sequence[int], index: int, *, batch: int, width: int, itemsize: int
) -> int:
    """Bytes that rank `index` gives to its peers in a layer's forward, and again in its backward.

    `counts[i]` are the tokens of rank i, `width` the elements of a hidden state. Each block gathers
    the tokens, for which shares are padded to the largest, and scatters the sums.
    """
    ranks, tokens = len(counts), sum(counts)
    gathered = max(counts) * (ranks - 1)
    scattered = tokens - counts[index]
    features = sum(prod(wide.shape) for block in layer.blocks for wide in block.wide)
    elements = len(layer.blocks) * (gathered + scattered) * width
    return batch * itemsize * (elements + tokens * features * (ranks - 1) // ranks)
