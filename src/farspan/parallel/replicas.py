"""Whole weights on every rank: each has the gradient of its tokens, and all need the sum."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farspan.attention.merge import accumulate_dtype
from farspan.parallel.peers import Peers


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that have the same weights and different tokens."""

    peers: Peers

    def reduce(
        self, parameters: Sequence[nn.Parameter], totals: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Sums over all ranks in the accumulate dtype, by one all-reduce for each dtype. A
        parameter that no rank has a gradient of keeps none."""
        found: list[Tensor | None] = [None] * len(totals)
        # Dtypes of parameters, not of totals: all ranks make the same calls.
        for dtype in dict.fromkeys(accumulate_dtype(p.dtype) for p in parameters):
            places = [i for i, p in enumerate(parameters) if accumulate_dtype(p.dtype) == dtype]
            for place, total in zip(
                places, self._sums(dtype, places, parameters, totals), strict=True
            ):
                found[place] = total
        return found

    def _sums(
        self,
        dtype: torch.dtype,
        places: list[int],
        parameters: Sequence[nn.Parameter],
        totals: Sequence[Tensor | None],
    ) -> Iterator[Tensor | None]:
        sizes = [parameters[place].numel() for place in places]
        device = parameters[places[0]].device
        # One more element a parameter: how many ranks have a gradient of it.
        flat = torch.zeros(sum(sizes) + len(places), dtype=dtype, device=device)
        pieces = flat[len(places) :].split(sizes)
        for index, (place, piece) in enumerate(zip(places, pieces, strict=True)):
            total = totals[place]
            if total is not None:
                flat[index] = 1
                piece.copy_(total.flatten())
        self.peers.sum(flat)
        for place, piece, count in zip(places, pieces, flat[: len(places)].tolist(), strict=True):
            yield piece.view(parameters[place].shape) if count else None
