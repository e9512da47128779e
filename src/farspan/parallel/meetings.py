"""How far this process is among the ranks, and what it is at: what the others blame it for.

All ranks meet outside of steps in the same order, so who waits in vain can tell whom for: a rank
that has been at fewer meetings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

UNNAMED = "what it does alone"


@dataclass(slots=True)
class Whereabouts:
    """Of this process, which is in one process group."""

    met: int = 0  # meetings that it has come to
    at: str = UNNAMED


here = Whereabouts()


def meet() -> None:
    """Called before what all ranks do together, outside of steps."""
    here.met += 1


@contextmanager
def busy(what: str) -> Iterator[None]:
    """What this rank is at, if the others wait for it meanwhile."""
    before, here.at = here.at, what
    try:
        yield
    finally:
        here.at = before
