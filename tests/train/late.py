"""Copies that happen as late as events allow: on a CPU, what a GPU's streams may do at worst."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farspan.engine.tiers import CopyEngine
from farspan.program.dependencies import Lane

Work = Callable[[], object]


class Event:
    """All that was issued on a lane until now."""

    def __init__(self, copies: "LateCopies", lane: Lane) -> None:
        self.copies, self.lane, self.place = copies, lane, copies.issued[lane]

    def synchronize(self) -> None:
        self.copies.catch_up(self.lane, self.place)


class LateCopies(CopyEngine):
    """Queues of copies, worked off no further than somebody waits for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queues: dict[Lane, list[Work]] = {Lane.FETCH: [], Lane.EVICT: []}
        self.issued = dict.fromkeys(self.queues, 0)
        self.late = 0  # copies that happened only when they were waited for

    def fetch(self, target: Tensor, source: Tensor) -> None:
        self._issue(Lane.FETCH, lambda: target.copy_(source))

    def evict(self, target: Tensor, source: Tensor) -> None:
        self._issue(Lane.EVICT, lambda: target.copy_(source))

    def _issue(self, lane: Lane, work: Work) -> None:
        self.queues[lane].append(work)
        self.issued[lane] += 1

    def catch_up(self, lane: Lane, place: int) -> None:
        queue = self.queues[lane]
        while self.issued[lane] - len(queue) < place:
            queue.pop(0)()
            self.late += 1

    def begin(self) -> None:
        assert not any(self.queues.values())

    def end(self) -> None:
        for lane, count in self.issued.items():
            self.catch_up(lane, count)

    def record(self, lane: Lane) -> Any:
        return Event(self, lane)

    def wait(self, lane: Lane, event: Any, _: Any = None) -> None:
        if event is not None:
            self._issue(lane, event.synchronize)
