"""The stages of a pipeline, each a group of layers: chunks stream up, their gradients down.

A stage waits for a send only when it is `AHEAD` chunks further, so that what it holds of what it
sent does not grow with the sequence. It receives in the order in which its neighbour sends: inputs
in the order of chunks, gradients in the reverse one.
"""

from collections import deque
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from farspan.parallel.peers import Peers

AHEAD = 2  # chunks on their way


@dataclass(slots=True)
class Pipeline:
    """This stage among the others, for one step."""

    peers: Peers
    sending: deque[tuple[dist.Work | None, Tensor]] = field(default_factory=deque)  # until it left

    def send(self, tensor: Tensor, *, up: bool) -> None:
        """To the stage after this one, or before it."""
        tensor = tensor.contiguous()
        self.sending.append((self.peers.send(tensor, self._other(up)), tensor))
        while len(self.sending) > AHEAD:
            self._wait()

    def receive(self, place: Tensor, *, up: bool) -> Tensor:
        """What the stage before this one sent up, or the one after it sent down."""
        self.peers.receive(place, self._other(not up))
        return place

    def finish(self) -> None:
        """All that was sent has left."""
        while self.sending:
            self._wait()

    def _wait(self) -> None:
        work, _ = self.sending.popleft()
        if work is not None:
            work.wait()

    def _other(self, after: bool) -> int:
        return self.peers.number(self.peers.index + (1 if after else -1))
