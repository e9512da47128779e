"""When ranks would be done if each had a processor of its own: their events beside each other.

Who meets waits for the last to come; who receives waits until it was sent. Bytes take the processor
seconds that they took here, and no others: there is no network in it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.ranks.clock import BEGIN, END, MEET, SEND, Event

Ranks = Sequence[tuple[Sequence[Event], float]]  # events of each, and seconds after the last
Meeting = tuple[tuple[int, ...], int]  # its ranks, and which of theirs it is


def replay(ranks: Ranks) -> float:
    """Seconds until the last rank is done. Raises ValueError where they wait for each other."""
    replayed = _Replay(ranks)
    moved = True
    while moved:
        moved = any(replayed.go_on(rank) for rank in range(len(ranks)))
    left = [len(events) - at for (events, _), at in zip(ranks, replayed.at, strict=True)]
    if any(left):
        raise ValueError(f"ranks wait for each other, with {left} events left")
    return max(now + tail for now, (_, tail) in zip(replayed.now, ranks, strict=True))


@dataclass(slots=True)
class _Replay:
    ranks: Ranks
    now: list[float] = field(init=False)
    at: list[int] = field(init=False)  # events that are over
    came: dict[Meeting, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    sent: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    heard: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.now, self.at = [0.0] * len(self.ranks), [0] * len(self.ranks)

    def go_on(self, rank: int) -> bool:
        """As far as the rank needs nobody else; whether it got anywhere."""
        events, first = self.ranks[rank][0], self.at[rank]
        for event in events[first:]:
            begins = self._begins(rank, event)
            if begins is None:
                break
            self.now[rank] = begins + event.inside
            if event.kind == SEND:
                self.sent[rank, event.ranks[0]].append(self.now[rank])
            self.at[rank] += 1
        return self.at[rank] > first

    def _begins(self, rank: int, event: Event) -> float | None:
        """When the event does; None: not before another rank goes on."""
        arrived = self.now[rank] + event.before
        if event.kind == SEND:
            return arrived
        if event.kind in (MEET, BEGIN, END):
            meeting = self.came[event.ranks, event.number]
            meeting.setdefault(rank, arrived)
            if event.kind == BEGIN:
                return arrived
            if len(meeting) < len(event.ranks):
                return None
            return max(arrived, *meeting.values())
        way = event.ranks[0], rank
        if self.heard[way] == len(self.sent[way]):
            return None
        self.heard[way] += 1
        return max(arrived, self.sent[way][self.heard[way] - 1])
