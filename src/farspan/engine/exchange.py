"""Tokens for heads: what a cell's attention does with its ranks before and after it attends."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from farspan.parallel.ulysses import Ulysses


@dataclass(frozen=True, slots=True)
class Exchange:
    """Turns a cell's tensors [B, H, tokens, D] into the heads of this rank and back. Without
    Ulysses they are that already."""

    ulysses: Ulysses | None = None
    fillers: int = 0  # tokens that the cell runs though they are none of the chunk's

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        if self.fillers:
            tensors = tuple(x[:, :, :0] for x in tensors)
        return tensors if self.ulysses is None else self.ulysses.to_heads(tensors)

    def to_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        own = tensors if self.ulysses is None else self.ulysses.to_tokens(tensors)
        return [_zeros(x, self.fillers) for x in own] if self.fillers else own

    def heads_of(self, values: Tensor) -> Tensor:
        """This rank's of [H]."""
        return values if self.ulysses is None else self.ulysses.heads_of(values)

    def of_all_heads(self, values: Tensor, like: Tensor) -> Tensor:
        """[H] with this rank's values in their places, and zeros."""
        if self.ulysses is None:
            return values
        whole = like.new_zeros(like.shape)
        self.ulysses.heads_of(whole).copy_(values)
        return whole


def _zeros(like: Tensor, tokens: int) -> Tensor:
    batch, heads, _, width = like.shape
    return like.new_zeros(batch, heads, tokens, width)


ALONE = Exchange()
