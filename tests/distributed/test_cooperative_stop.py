"""Ranks stop behind the same cell, whichever of them is asked and whoever waits for whom."""

import random
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from farspan.distributed.failure import CooperativeStop, RankFailed

PLACES = 60
TERM = 15


class Crew:
    """Ranks as threads that meet every few places, and their pulses."""

    def __init__(self, ranks: int, seed: int, meet: int) -> None:
        self.store = HashStore()
        self.halts = [CooperativeStop(rank, ranks, 30.0) for rank in range(ranks)]
        self.draws = [random.Random(seed * 100 + rank) for rank in range(ranks)]
        self.meeting, self.meet = threading.Barrier(ranks, timeout=300.0), meet
        self.stopped: dict[int, tuple[int, int]] = {}
        self.over = threading.Event()

    def run(self, asks: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Where each rank stopped and with which number; `asks` says behind which place a rank asks
        for which."""
        ranks = range(len(self.halts))
        workers = [threading.Thread(target=self._work, args=(r, asks.get(r))) for r in ranks]
        pulses = [threading.Thread(target=self._pulse, args=(rank,)) for rank in ranks]
        for thread in (*pulses, *workers):
            thread.start()
        for thread in workers:
            thread.join(30.0)
            assert not thread.is_alive(), "a rank waits in vain"
        self.over.set()
        for thread in pulses:
            thread.join()
        return self.stopped

    def _work(self, rank: int, ask: tuple[int, int] | None) -> None:
        halt, draw = self.halts[rank], self.draws[rank]
        for place in range(1, PLACES + 1):
            if place % self.meet == 0:
                self.meeting.wait()  # a collective between two places
            time.sleep(0.002 * draw.random())
            if ask is not None and ask[0] == place:
                halt.ask(ask[1])
            if number := halt.pass_place():
                self.stopped[rank] = place, number
                return

    def _pulse(self, rank: int) -> None:
        while not self.over.wait(0.004 * self.draws[rank].random()):
            self.halts[rank].look(self.store)


@pytest.mark.parametrize("meet", [1, 7, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_all_stop_at_one_place(seed: int, meet: int) -> None:
    """Ranks that meet at every place, seldom or never; one of four asks."""
    stopped = Crew(4, seed, meet).run({seed % 4: (5, TERM)})
    assert len(stopped) == 4
    ((place, number),) = set(stopped.values())
    assert place >= 5
    assert number == TERM


def test_nobody_stops_or_waits_unasked() -> None:
    assert Crew(3, 0, 5).run({}) == {}


def test_all_go_on_where_no_place_is_left() -> None:
    """Asked behind the last place: they meet after it."""
    assert Crew(2, 1, 1).run({0: (PLACES, TERM), 1: (PLACES, TERM)}) in (
        {},
        {0: (PLACES, TERM), 1: (PLACES, TERM)},
    )


def test_a_rank_that_does_not_answer_is_named() -> None:
    store, halt = HashStore(), CooperativeStop(0, 2, 0.1)
    halt.ask(TERM)
    halt.look(store)
    halt.look(store)
    with pytest.raises(
        RankFailed, match=r"^rank 1 did not answer a request to stop for 0\.1 s; see its log$"
    ):
        halt.pass_place()


def test_without_a_pulse_nobody_waits() -> None:
    """Collectives tell what became of the others."""
    store, halt = HashStore(), CooperativeStop(0, 2, 60.0)
    halt.ask(TERM)
    halt.look(store)
    threading.Timer(0.05, halt.give_up).start()
    began = time.monotonic()
    assert halt.pass_place() == 0
    assert time.monotonic() - began < 30.0
