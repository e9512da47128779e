"""How the cells of a chunk attend: which keys they see, on which rank, by which kernel."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from farspan.attention.chunk import AttentionCall
from farspan.engine.batch import Batch
from farspan.engine.exchange import ALONE, Exchange
from farspan.engine.kernels import AttentionKernels
from farspan.engine.prefix import streamed_spans
from farspan.parallel.ranks import Ranks
from farspan.parallel.ring import Ring
from farspan.parallel.shards import Shards
from farspan.parallel.ulysses import Ulysses
from farspan.plan.blocks import Block, Run, cut_wide, document_runs, most_of, near_blocks
from farspan.plan.exchange_pieces import Piece, pieces_of
from farspan.plan.held_blocks import Held, plan_held_blocks
from farspan.plan.layout import Range, Rank
from farspan.plan.program import Program
from farspan.plan.share import Share, among_heads, share_of
from farspan.plan.traffic import parts_of

QUERIES = ("tensor", "ulysses", "shards")  # ranks that bring queries to the keys of one


@dataclass(slots=True)
class Attending:
    """The attention of one program on one batch. Blocks of one chunk are remembered."""

    program: Program
    batch: Batch
    kernels: AttentionKernels
    ranks: Ranks | None
    chunk: int = -1
    blocks: dict[tuple[int | None, int, int], tuple[Block, ...]] = field(default_factory=dict)

    @property
    def rank(self) -> Rank:
        return self.program.share.rank

    def call(self, layer: int, chunk: int, scale: float) -> AttentionCall:
        """Attention of this rank's queries against the keys that it holds itself."""
        spec = self.program.model.layers[layer]
        blocks = self.blocks_of(layer, chunk, self.rank.along["ring"])
        kernel, first = self.kernels.of(spec, self.program), self._own_row(chunk)
        start, fused = self.queries(chunk)[0], self.kernels.fused
        return AttentionCall(scale, spec.softcap, blocks, start, kernel, first, fused)

    def streamed(self, layer: int, chunk: int) -> list[Range]:
        """Ranges of earlier keys in the order in which they will be asked for."""
        own = self.rank.along["ring"]
        return streamed_spans(self.blocks_of(layer, chunk, own), self._own_row(chunk))

    def queries(self, chunk: int) -> Range:
        """Positions of the queries that meet this rank's keys."""
        return self.rank.tokens(self.program.chunks[chunk], *QUERIES)

    def exchange(self, chunk: int) -> Exchange:
        """What turns the chunk's tokens into this rank's heads."""
        if self.ranks is None or self.rank.layout.sequence() == 1:
            return ALONE
        ulysses = None
        if self.rank.layout.ulysses > 1:
            parts = among_heads(self.rank, self.program.chunks[chunk])
            ulysses = Ulysses(self.ranks.among("ulysses"), parts)
        return Exchange(ulysses, self.rank.layout.tensor * self.is_filler(chunk))

    def pieces(self, layer: int) -> tuple[Piece, ...]:
        """In which a layer's heads are exchanged."""
        program = self.program
        return pieces_of(program.schedule, self.rank.layout, program.model.layers[layer])

    def spread(self, layer: int, chunk: int) -> Shards | Ring | None:
        """What attends where keys are spread over ranks; None: this rank has all of its heads'."""
        if self.ranks is None:
            return None
        layout, ring = self.rank.layout, None
        if layout.ring > 1:
            peers = [self._share(index).keys.rows[chunk] for index in range(layout.ring)]
            rows = [(start, stop - start) for start, stop in peers]
            ring = Ring(self.ranks.among("ring"), rows, partial(self.blocks_of, layer, chunk))
        if layout.shards == 1:
            return ring
        counts = parts_of(self.rank, self.program.chunks[chunk])
        return Shards(self.ranks.among("shards"), counts, ring)

    def is_filler(self, chunk: int) -> bool:
        """Has it, with its tensor peers, no token of the chunk? Modules cannot run on none, so it
        runs one of no effect: attention and buffers leave it out, and its gradient is zero."""
        start, stop = self.rank.tokens(self.program.chunks[chunk], "tensor")
        return start == stop

    def blocks_of(self, layer: int, chunk: int, ring: int) -> tuple[Block, ...]:
        """Blocks of the queries against the keys of the rank at this place of the ring."""
        program = self.program
        spec, sparse = program.model.layers[layer], program.schedule.sparse
        if chunk != self.chunk:
            self.chunk, self.blocks = chunk, {}
        most = most_of(spec, program.run)
        key = spec.window, most, ring
        if key not in self.blocks:
            start, stop = self.queries(chunk)
            block, held = program.schedule.kv_block, self._held(ring)
            runs = self.runs(chunk)
            blocks = plan_held_blocks(start, stop, block, spec.window, runs, held)
            if sparse is not None and spec.window is None:
                blocks = near_blocks(blocks, sparse, start)
            self.blocks[key] = tuple(piece for block in blocks for piece in cut_wide(block, most))
        return self.blocks[key]

    def runs(self, chunk: int) -> Sequence[tuple[Run, ...]] | None:
        """The documents of the queries' rows; None: each row is one."""
        rows, (start, stop) = self.batch.documents, self.queries(chunk)
        if rows is None or start == stop:
            return None
        return [document_runs(row, start, stop) for row in rows]

    def documents(self, chunk: int) -> Tensor | None:
        """The first token of each query's document [B, C], int64, on the batch's device; None: each
        row is one."""
        start, stop = self.queries(chunk)
        if self.batch.documents is None or start == stop:
            return None
        # From what is on the device: copying it there would have the CPU wait in every cell.
        positions = self.batch.position_ids[:, start:stop]
        return torch.arange(start, stop, device=positions.device) - positions

    def _own_row(self, chunk: int) -> int:
        return self.program.share.keys.rows[chunk][0]

    def _held(self, ring: int) -> Held | None:
        layout = self.rank.layout
        if layout.ring * layout.shards == 1:
            return None
        return Held(self._share(ring).keys.ranges)

    def _share(self, ring: int) -> Share:
        """Of the rank at this place of the ring."""
        number = self.rank.peers("ring")[ring]
        return share_of(self.program.chunks, Rank(self.rank.layout, number))
