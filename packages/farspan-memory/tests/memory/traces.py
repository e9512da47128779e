"""Random traces that an allocator can serve."""

from hypothesis import strategies as st

from farspan_memory.trace import Event, FreeEvent, Malloc, Mark, Trace

SIZES = st.integers(0, 64) | st.integers(0, 2**40)
# What stands in a line of its own: no line breaks, and not blank at its ends.
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)


@st.composite
def traces(draw: st.DrawFn, streams: int = 3, most: int = 40, marks: bool = True) -> Trace:
    """Each step asks for a tensor, frees one that is alive, or sets a mark."""
    events: list[Event] = []
    alive: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        kind = draw(st.sampled_from(["malloc", "malloc", "free"] + ["mark"] * marks))
        if kind == "malloc":
            free = [n for n in range(most) if n not in alive]
            tensor = draw(st.sampled_from(free))
            alive.append(tensor)
            events.append(Malloc(tensor, draw(SIZES), draw(st.integers(0, streams - 1))))
        elif kind == "mark":
            events.append(Mark(draw(NAMES)))
        elif alive:
            events.append(FreeEvent(alive.pop(draw(st.integers(0, len(alive) - 1)))))
    return Trace(tuple(events))
