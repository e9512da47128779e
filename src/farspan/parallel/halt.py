"""Ranks that stop together within a step: behind the same cell, which they agree on.

A rank may not leave a step alone: the others would wait for it in a collective. But all of them
pass the same places in the same order, and what was begun before a place has been begun by all. So
they number the places, and stop at the same one:

    rank 0   ..7..8..9..|10          9 was the last it passed when it heard of it, and says so
    rank 1   ..7..8........9..|10    8; no rank passes its next place before all have said theirs
    stop at 10, the first that no rank can have passed

Nobody can wait for another in vain. What a rank says, its thread says, which waits for nothing; so
all have said theirs within three pulses, wherever their main threads are. Then a rank that held
still goes on to the place or stops there, and one that waits in a collective waits for a rank that
is not yet there.
"""

import threading

from farspan.parallel.faults import RankFailed, Store

_WANTED = "halt"


class Halt:
    """One rank's side of it. `pass_place` is of its main thread, `look` of the one with a pulse,
    `ask` of a signal's handler too."""

    def __init__(self, rank: int, ranks: int, patience: float) -> None:
        """`patience` are seconds that a rank holds still for an answer of the others."""
        self._rank, self._ranks, self._patience = rank, ranks, patience
        self._changed = threading.Condition()
        self._asked = 0
        self._passed = 0
        self._said: int | None = None  # what was passed when this rank heard of it
        self._place: tuple[int, int] | None = None  # where all stop, and the number to stop with
        self._alone = False
        self._missing = "all ranks"

    def ask(self, number: int) -> None:
        """All ranks are to stop, with a number above 0: of several the largest. Without a lock: a
        handler interrupts the thread that may have it."""
        self._asked = max(number, self._asked)

    @property
    def is_asked(self) -> bool:
        """Whether this rank knows that somebody has asked."""
        return bool(self._asked) or self._said is not None

    def pass_place(self) -> int:
        """The number where all ranks stop here, 0 where they go on. All call it at the same places,
        between which they have begun the same collectives. It waits when somebody has asked, and
        never otherwise. Raises RankFailed where another does not answer."""
        with self._changed:
            self._passed += 1
            if self._said is None or self._alone:
                return 0
            known = self._changed.wait_for(lambda: self._place or self._alone, self._patience)
            if not known:
                raise RankFailed(f"{self._missing}: silent for {self._patience:g} s")
            place, number = self._place or (0, 0)
            return number if place == self._passed else 0

    def look(self, store: Store) -> None:
        """Tells and hears, at every pulse. Raises RuntimeError where the store is gone."""
        if self._place is not None:
            return
        if self._said is None:
            if not self._asked and not store.check([_WANTED]):
                return
            with self._changed:
                self._said = self._passed
            store.set(_key(self._rank), f"{self._said} {self._asked}")
            store.set(_WANTED, "")
        keys = {rank: _key(rank) for rank in range(self._ranks)}
        silent = [rank for rank, key in keys.items() if not store.check([key])]
        if silent:
            self._missing = f"rank {silent[0]}"
            return
        said = [tuple(map(int, store.get(key).decode().split())) for key in keys.values()]
        with self._changed:
            self._place = max(passed for passed, _ in said) + 1, max(asked for _, asked in said)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody looks any more: a rank is gone, or the store. Collectives will tell."""
        with self._changed:
            self._alone = True
            self._changed.notify_all()


def _key(rank: int) -> str:
    return f"{_WANTED}/{rank}"
