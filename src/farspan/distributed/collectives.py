"""Collectives among the ranks along an axis of a layout, and sends between pipeline stages.

Rows lie along dimension 0, of any further shape and dtype, contiguous; peers may have different
numbers of rows, or none. `scatter_sum` adds parts in the order of ranks, so that sums are the same
bits every time and on any number of nodes; `sum` leaves the order to the backend. `sent` counts the
bytes that this rank sends to others.

Pipeline stages are groups of layers: chunks go up, their gradients down. A stage waits for a send
only once `CHUNKS_UNDER_WAY` later ones have been posted, so the memory that pending sends hold does
not grow with the sequence. It receives in the order in which its neighbour sends: inputs in the
order of chunks, gradients in the reverse one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.program.layout import CHUNKS_UNDER_WAY

# torch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Counts = Sequence[int]  # rows of each peer


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """Rows that an asynchronous all-to-all is receiving."""

    rows: Tensor
    work: dist.Work | None  # None: this rank is alone
    sent: Tensor  # must live until the rows arrive

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.rows


@dataclass(slots=True)
class Communicator:
    """This rank and its peers along an axis of the layout; no peers without a process group."""

    group: dist.ProcessGroup | None
    sent: int = 0  # bytes, since the start

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def index(self) -> int:
        """The index of this rank among its peers."""
        return 0 if self.group is None else self.group.rank()

    def number(self, index: int) -> int:
        """Return the global rank of the peer with this index."""
        assert self.group is not None
        return dist.get_global_rank(self.group, index)

    def exchange(self, rows: Tensor, out: Counts, back: Counts) -> Tensor:
        """All-to-all: send the next `out[i]` rows to each peer i in turn, and return the rows that
        peers sent to this rank, `back[i]` from peer i, in the order of peers."""
        return self.begin_exchange(rows, out, back).wait()

    def begin_exchange(self, rows: Tensor, out: Counts, back: Counts) -> "PendingExchange":
        """Start an all-to-all like `exchange`, without waiting for its rows."""
        if self.size == 1:
            return PendingExchange(rows, None, rows)
        received = rows.new_empty(sum(back), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows, list(back), list(out), group=self.group, async_op=True
        )
        self._count(rows, sum(out) - out[self.index])
        return PendingExchange(received, work, rows)

    def gather(self, rows: Tensor, counts: Counts) -> Tensor:
        """All-gather: return the rows of all peers, in their order, `counts[i]` from peer i."""
        assert rows.shape[0] == counts[self.index], (rows.shape, counts)
        if self.size == 1:
            return rows
        most = max(counts)
        # Backends gather equal parts only; shares of a chunk differ by a row at most.
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        whole = rows.new_empty(self.size * most, *rows.shape[1:])
        self.gather_into(whole, padded)
        if min(counts) == most:
            return whole
        return torch.cat([whole[i * most : i * most + n] for i, n in enumerate(counts)])

    def gather_into(self, whole: Tensor, rows: Tensor) -> None:
        """All-gather into an existing tensor. Every peer has the same number of rows."""
        all_gather(whole, rows, group=self.group)
        self._count(rows, rows.shape[0] * (self.size - 1))

    def send(self, tensor: Tensor, number: int) -> dist.Work | None:
        """Start to send a tensor to the peer with this global rank. Return the work to wait for;
        until then the tensor must stay alive. None if it is already sent."""
        self.sent += tensor.nbytes
        return dist.isend(tensor, number, group=self.group)

    def receive(self, place: Tensor, number: int) -> None:
        """Wait for a tensor from the peer with this global rank, and write it into `place`."""
        dist.recv(place, number, group=self.group)

    def pass_round(self, sent: Sequence[Tensor], places: Sequence[Tensor]) -> list[dist.Work]:
        """Start to send tensors to the next peer, and to receive tensors from the previous peer
        into `places`. Tensors without rows are not sent: both peers know each other's counts."""
        ahead = self.number((self.index + 1) % self.size)
        behind = self.number((self.index - 1) % self.size)
        gone = [dist.P2POp(dist.isend, x, ahead, self.group) for x in sent if x.numel()]
        come = [dist.P2POp(dist.irecv, x, behind, self.group) for x in places if x.numel()]
        self.sent += sum(x.nbytes for x in sent)
        works: list[dist.Work] = dist.batch_isend_irecv([*gone, *come]) if gone or come else []
        return works

    def scatter_sum(self, rows: Tensor, counts: Counts) -> Tensor:
        """Reduce-scatter: add up the `rows` of all peers, in their dtype, and return this rank's
        part of the sum. In `rows`, the next `counts[i]` rows belong to each peer i in turn."""
        own = counts[self.index]
        parts = self.exchange(rows, counts, [own] * self.size).unflatten(0, (self.size, own))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce: replace a tensor by its sum over peers, and return it."""
        if self.size == 1:
            return tensor
        dist.all_reduce(tensor, group=self.group)
        self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return tensor

    def _count(self, like: Tensor, rows: int) -> None:
        self.sent += rows * like.shape[1:].numel() * like.element_size()


@dataclass(slots=True)
class Pipeline:
    """The sends and receives of one pipeline stage during a step."""

    peers: Communicator
    sending: deque[tuple[dist.Work | None, Tensor]] = field(default_factory=deque)  # pending sends

    def send(self, tensor: Tensor, *, up: bool) -> None:
        """Start to send a tensor to the next stage if `up`, else to the previous one."""
        tensor = tensor.contiguous()
        self.sending.append((self.peers.send(tensor, self._other(up)), tensor))
        while len(self.sending) > CHUNKS_UNDER_WAY:
            self._wait()

    def receive(self, place: Tensor, *, up: bool) -> Tensor:
        """Receive a tensor from the previous stage if `up`, else from the next one."""
        self.peers.receive(place, self._other(not up))
        return place

    def finish(self) -> None:
        """Wait until all sends are complete."""
        while self.sending:
            self._wait()

    def _wait(self) -> None:
        work, _ = self.sending.popleft()
        if work is not None:
            work.wait()

    def _other(self, after: bool) -> int:
        return self.peers.number(self.peers.index + (1 if after else -1))
