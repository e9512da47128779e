"""The ranks along an axis of a layout, and what they send each other.

Rows lie along dimension 0, of any further shape and dtype, contiguous; how many rows each peer has
may differ and may be none. `scatter_sum` adds parts in the order of ranks, so that sums are the
same bits every time and on every number of nodes; `sum` leaves the order to the backend. `sent`
counts the bytes that this rank gives to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Since torch 2.13 under another name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Counts = Sequence[int]  # rows of each peer


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows on their way."""

    rows: Tensor
    work: dist.Work | None  # None: nobody else was to send any
    sent: Tensor  # must live until they are there

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.rows


@dataclass(slots=True)
class Peers:
    """This rank among its peers along one axis; None: it has none, and sends nothing."""

    group: dist.ProcessGroup | None
    sent: int = 0  # bytes, since the start

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        return 0 if self.group is None else self.group.rank()

    def number(self, index: int) -> int:
        """Of a peer, among all ranks."""
        assert self.group is not None
        return dist.get_global_rank(self.group, index)

    def exchange(self, rows: Tensor, out: Counts, back: Counts) -> Tensor:
        """All-to-all: `out[i]` rows, one peer after the other, go to peer i; `back[i]` rows come
        from it and stand in the order of peers."""
        return self.begin_exchange(rows, out, back).wait()

    def begin_exchange(self, rows: Tensor, out: Counts, back: Counts) -> "Arrival":
        """The same, under way when this returns."""
        if self.size == 1:
            return Arrival(rows, None, rows)
        received = rows.new_empty(sum(back), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, list(back), list(out), group=self.group, async_op=True
        )
        self._count(rows, sum(out) - out[self.index])
        return Arrival(received, work, rows)

    def gather(self, rows: Tensor, counts: Counts) -> Tensor:
        """All-gather: the rows of all peers in their order, `counts[i]` of peer i."""
        assert rows.shape[0] == counts[self.index], (rows.shape, counts)
        if self.size == 1:
            return rows
        most = max(counts)
        # Backends gather equal parts only; shares of a chunk differ by a row at most.
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        whole = rows.new_empty(self.size * most, *rows.shape[1:])
        all_gather(whole, padded, group=self.group)
        self._count(rows, most * (self.size - 1))
        if min(counts) == most:
            return whole
        return torch.cat([whole[i * most : i * most + n] for i, n in enumerate(counts)])

    def scatter_sum(self, rows: Tensor, counts: Counts) -> Tensor:
        """Reduce-scatter: of the rows of all peers' tensors, summed, the `counts[i]` that follow
        those of peers before i go to peer i. In the dtype of `rows`."""
        own = counts[self.index]
        parts = self.exchange(rows, counts, [own] * self.size).unflatten(0, (self.size, own))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce, in place."""
        if self.size == 1:
            return tensor
        dist.all_reduce(tensor, group=self.group)
        self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return tensor

    def _count(self, like: Tensor, rows: int) -> None:
        self.sent += rows * like.shape[1:].numel() * like.element_size()
