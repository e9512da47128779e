"""A sequence of attention whose keys are spread over ranks, in one process: what each rank holds,
and what its part of the keys gives to all queries."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.attention.backends import (
    BlockKernel,
    accumulate_dtype,
)
from farspan.attention.chunk import AttentionCall
from farspan.engine.kernels import select_kernel
from farspan.program.attention_blocks import Block, Held, document_runs, plan_held_blocks
from farspan.program.layout import Range, part
from tests.attention.cases import Case, Inputs

Deal = Callable[[Range, int, int], Range]  # the part of a chunk that one of so many ranks has


def lopsided(chunk: Range, index: int, count: int) -> Range:
    """Parts of very different sizes, of which many are empty."""
    start, stop = chunk
    size = stop - start
    borders = [0, *sorted((start * 7 + i * i * 5) % (size + 1) for i in range(1, count)), size]
    return start + borders[index], start + borders[index + 1]


def positions(ranges: tuple[Range, ...]) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@dataclass
class Rows:
    """Keys, values and gradient sums of one rank, in rows [T, B, Hk, D]. What `keys` returned is
    poisoned at its next call, as a streaming slot is; rows from `limit` on are not to be asked
    for, nor ranges that cross the grid."""

    k: Tensor
    v: Tensor
    kv_block: int
    limit: int = 0
    asked: list[Range] = field(default_factory=list)
    added: list[Range] = field(default_factory=list)
    slot: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        dtype = accumulate_dtype(self.k.dtype)
        self.dk, self.dv = (torch.zeros_like(x, dtype=dtype) for x in (self.k, self.v))

    def begin(self, limit: int) -> None:
        self.limit, self.asked, self.added = limit, [], []

    def own(self, count: int) -> tuple[Tensor, Tensor]:
        """k and v [B, Hk, t, D] of the next rows."""
        k, v = (x[self.limit : self.limit + count].permute(1, 2, 0, 3) for x in (self.k, self.v))
        return k.contiguous(), v.contiguous()

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert 0 <= start < stop <= self.limit
        assert start // self.kv_block == (stop - 1) // self.kv_block
        assert not self.asked or self.asked[-1][1] <= start
        for old in self.slot:
            old.fill_(torch.nan)
        self.asked.append((start, stop))
        self.slot = k, v = self.k[start:stop].clone(), self.v[start:stop].clone()
        return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self.added.append((start, stop))
        self.dk[start:stop, rows] += dk.permute(2, 0, 1, 3)
        self.dv[start:stop, rows] += dv.permute(2, 0, 1, 3)

    def prefix_rows(self) -> tuple[Tensor, Tensor]:
        return self.k[: self.limit], self.v[: self.limit]

    def add_rows(self, dk: Tensor, dv: Tensor) -> None:
        assert self.added == self.asked
        self.dk[: self.limit] += dk
        self.dv[: self.limit] += dv

    def add_own(self, dk: Tensor, dv: Tensor) -> None:
        stop = self.limit + dk.shape[2]
        self.dk[self.limit : stop] += dk.permute(2, 0, 1, 3)
        self.dv[self.limit : stop] += dv.permute(2, 0, 1, 3)


@dataclass(frozen=True)
class Spread:
    """How a case's tokens are dealt to ranks."""

    case: Case
    ranks: int
    deal: Deal = part

    @property
    def chunks(self) -> list[Range]:
        tokens, chunk = self.case.tokens, self.case.chunk
        return [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]

    def held(self, rank: int) -> tuple[Range, ...]:
        return tuple(self.deal(chunk, rank, self.ranks) for chunk in self.chunks)

    def rows(self, inputs: Inputs, rank: int) -> Rows:
        where = positions(self.held(rank))
        k, v = (x[:, :, where].permute(2, 0, 1, 3).contiguous() for x in (inputs.k, inputs.v))
        return Rows(k, v, self.case.kv_block)

    def blocks(self, queries: Range, chunk: int, rank: int) -> tuple[Block, ...]:
        """Of queries of a chunk against what a rank holds up to it."""
        documents = self.case.documents
        runs = None if documents is None else [document_runs(row, *queries) for row in documents]
        held = Held(self.held(rank)[: chunk + 1])
        return plan_held_blocks(*queries, self.case.kv_block, self.case.window, runs, held)

    def call(self, queries: Range, chunk: int, rank: int, kernel: BlockKernel) -> AttentionCall:
        first = Held(self.held(rank)).row(self.chunks[chunk][0])
        return AttentionCall(
            self.case.scale,
            self.case.softcap,
            self.blocks(queries, chunk, rank),
            queries[0],
            kernel,
            first,
        )


def fastest(case: Case) -> BlockKernel:
    return select_kernel("cpu", case.dtype, case.head_dim, case.value_dim, case.softcap)
