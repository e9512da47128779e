"""Where a rank's part of a tensor lies in the whole, as boxes of rows, columns and so on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, contiguous in every dimension, here and in the whole."""

    here: tuple[int, ...]  # where it starts in the rank's tensor
    there: tuple[int, ...]  # where it starts in the whole
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """A view of it in the rank's tensor."""
        for dim, (start, size) in enumerate(zip(self.here, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of a tensor of `shape`; without boxes it has none of it."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def rows(self, start: int, stop: int) -> "Place":
        """The place of rows [start, stop) of the rank's tensor, which is cut once more."""
        kept = []
        for box in self.boxes:
            first, last = max(box.here[0], start), min(box.here[0] + box.sizes[0], stop)
            if first < last:
                there = box.there[0] + first - box.here[0]
                kept.append(
                    Box(
                        (first - start, *box.here[1:]),
                        (there, *box.there[1:]),
                        (last - first, *box.sizes[1:]),
                    )
                )
        return Place(self.shape, tuple(kept))


def everything(shape: Sequence[int]) -> Place:
    """Of a tensor that the rank holds whole."""
    zeros = (0,) * len(shape)
    boxes = (Box(zeros, zeros, tuple(shape)),) if 0 not in shape else ()
    return Place(tuple(shape), boxes)


def along(shape: Sequence[int], dim: int, ranges: Sequence[Range]) -> Place:
    """Of these ranges of dimension `dim` of a whole of `shape`, one behind the other."""
    starts = accumulate((stop - start for start, stop in ranges), initial=0)
    boxes = []
    for here, (start, stop) in zip(starts, ranges, strict=False):
        if start < stop:
            before, after = (0,) * dim, (0,) * (len(shape) - dim - 1)
            sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
            boxes.append(Box((*before, here, *after), (*before, start, *after), sizes))
    return Place(tuple(shape), tuple(boxes))
