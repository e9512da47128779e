"""A trace: what a program asked of its allocator, in order (MEMO 4.3.2).

    event   0         1         2         3         4
            malloc a  mark m    malloc b  free a    malloc a
    a       |-----------------------------|         |-------> never freed: to the end
    b                           |------------------------->

Time counts events. A tensor's number may be given again once it was freed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farspan.memory.place import Request, live_peak
from farspan.spec import Refused

LARGEST = 2**50  # bytes of one request; more is a broken trace: no machine has a pebibyte
LAST_STREAM = 2**64 - 1  # a stream is an address to CUDA


@dataclass(frozen=True, slots=True)
class Malloc:
    """Memory wanted, before any rounding."""

    tensor: int
    size: int  # bytes
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """The tensor's memory given back."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A border between events: "layer 3 forward", "step 2". What follows, up to the next mark,
    is its segment; bi-level plans place one segment at a time (MEMO 4.2)."""

    name: str


Event = Malloc | Free | Mark


@dataclass(frozen=True, slots=True)
class Trace:
    """Events that an allocator can serve.

    Invariant: a tensor is freed only while it is alive, and asked for only while it is not; each
    size is in [0, LARGEST], each stream in [0, LAST_STREAM]. Raises Refused with the number of the
    first event that breaks it.
    """

    events: tuple[Event, ...]
    name: str = ""

    def __post_init__(self) -> None:
        for index, words in faults(self.events):
            raise Refused(f"trace {self.name or 'without a name'}: event {index}: {words}")

    def requests(self) -> tuple[Request, ...]:
        """One for each malloc, in order; what is never freed dies at the end."""
        end = len(self.events)
        deaths: dict[int, int] = {}  # index of a malloc to that of its free
        alive: dict[int, int] = {}  # tensor to index of its malloc
        for index, event in enumerate(self.events):
            if isinstance(event, Malloc):
                alive[event.tensor] = index
            elif isinstance(event, Free):
                deaths[alive.pop(event.tensor)] = index
        return tuple(
            Request(event.size, index, deaths.get(index, end))
            for index, event in enumerate(self.events)
            if isinstance(event, Malloc)
        )

    def live_peak(self) -> int:
        """The most bytes alive at one time: no allocator needs less."""
        return live_peak(self.requests())


def faults(events: Iterable[Event]) -> Iterator[tuple[int, str]]:
    """What no allocator can serve: the number of the event, counted from 0, and why."""
    alive: set[int] = set()
    freed: set[int] = set()
    for index, event in enumerate(events):
        if isinstance(event, Malloc):
            if event.tensor in alive:
                yield index, f"malloc of tensor {event.tensor}, which was not freed"
            if not 0 <= event.size <= LARGEST:
                yield index, f"size {event.size}, expected 0 to {LARGEST} bytes"
            if not 0 <= event.stream <= LAST_STREAM:
                yield index, f"stream {event.stream}, expected 0 to {LAST_STREAM}"
            alive.add(event.tensor)
        elif isinstance(event, Free):
            if event.tensor not in alive:
                why = "a second time" if event.tensor in freed else "without a malloc"
                yield index, f"free of tensor {event.tensor} {why}"
            alive.discard(event.tensor)
            freed.add(event.tensor)
