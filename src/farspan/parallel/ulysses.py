"""Ulysses inside a cell (FPDT 4.1): tokens of all heads become heads of all tokens, and back.

    tokens of rank 0 | tokens of rank 1          heads of rank 0, all tokens
    all heads        | all heads          <->    heads of rank 1, all tokens

One all-to-all carries q, k and v together. What a rank sends does not depend on the prefix: of
every token of its own, all heads but its own. It may go in pieces of heads
(plan/exchange_pieces.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.parallel.peers import Counts, Peers

Coming = Callable[[], list[Tensor]]  # waits for tensors that are on their way


@dataclass(frozen=True, slots=True)
class Ulysses:
    """The exchange for one chunk, of which peer i has `parts[i]` tokens."""

    peers: Peers
    parts: Counts

    def to_heads(self, tensors: Sequence[Tensor]) -> Coming:
        """Each [B, H, own tokens, D] to [B, H / P, all tokens, D]; all of one dtype."""
        own, ranks = self.parts[self.peers.index], self.peers.size
        rows = [
            x.unflatten(1, (ranks, x.shape[1] // ranks))
            .permute(1, 3, 0, 2, 4)
            .reshape(ranks * own, x.shape[0] * x.shape[1] // ranks * x.shape[3])
            for x in tensors
        ]
        coming = self.peers.begin_exchange(torch.cat(rows, 1), [own] * ranks, self.parts)
        shapes = [(x.shape[0], x.shape[1] // ranks, x.shape[3]) for x in tensors]

        def arrived() -> list[Tensor]:
            pieces = coming.wait().split([part.shape[1] for part in rows], 1)
            return [
                piece.reshape(len(piece), *shape).permute(1, 2, 0, 3)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]

        return arrived

    def to_tokens(self, tensors: Sequence[Tensor]) -> Coming:
        """Each [B, H / P, all tokens, D] to [B, H, own tokens, D]; all of one dtype."""
        own, ranks = self.parts[self.peers.index], self.peers.size
        rows = [
            x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0] * x.shape[1] * x.shape[3])
            for x in tensors
        ]
        coming = self.peers.begin_exchange(torch.cat(rows, 1), self.parts, [own] * ranks)
        shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in tensors]

        def arrived() -> list[Tensor]:
            pieces = coming.wait().split([part.shape[1] for part in rows], 1)
            return [
                piece.reshape(ranks, own, *shape).permute(2, 0, 3, 1, 4).flatten(1, 2)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]

        return arrived

    def heads_of(self, values: Tensor) -> Tensor:
        """This rank's part of something that each head has one of, [H]."""
        return values.chunk(self.peers.size)[self.peers.index]
