"""Tokens for heads: what a cell's attention does with its ranks before and after it attends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.parallel.ulysses import Coming, Ulysses
from farspan.plan.layout import Range


@dataclass(frozen=True, slots=True)
class Exchange:
    """Turns a cell's tensors [B, H, tokens, D] into the heads of this rank and back. Without
    Ulysses they are that already."""

    ulysses: Ulysses | None = None
    fillers: int = 0  # tokens that the cell runs though they are none of the chunk's

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.begin_heads([(x, None) for x in tensors])()

    def to_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.begin_tokens(*tensors)()

    def begin_heads(self, parts: Sequence[tuple[Tensor, Range | None]]) -> Coming:
        """Tensors on their way to heads, of each the heads of a range among every rank's, or
        all."""
        tensors = [self._some(x, heads) for x, heads in parts]
        if self.fillers:
            tensors = [x[:, :, :0] for x in tensors]
        return (lambda: tensors) if self.ulysses is None else self.ulysses.to_heads(tensors)

    def begin_tokens(self, *tensors: Tensor) -> Coming:
        """Tensors on their way back to tokens: of every rank the heads that these are of."""
        if self.ulysses is None:
            return lambda: [self._filled(x) for x in tensors]
        coming = self.ulysses.to_tokens(tensors)
        return lambda: [self._filled(x) for x in coming()]

    def of_all_ranks(self, pieces: Sequence[Tensor]) -> Tensor:
        """Tensors of pieces of every rank's heads, in order, as one of all heads."""
        ranks = 1 if self.ulysses is None else self.ulysses.peers.size
        apart = [x.unflatten(1, (ranks, x.shape[1] // ranks)) for x in pieces]
        return torch.cat(apart, 2).flatten(1, 2)

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

    def _some(self, x: Tensor, heads: Range | None) -> Tensor:
        if heads is None or self.ulysses is None:
            return x
        ranks = self.ulysses.peers.size
        return x.unflatten(1, (ranks, x.shape[1] // ranks))[:, :, slice(*heads)].flatten(1, 2)

    def _filled(self, x: Tensor) -> Tensor:
        batch, heads, _, width = x.shape
        return x.new_zeros(batch, heads, self.fillers, width) if self.fillers else x


ALONE = Exchange()
