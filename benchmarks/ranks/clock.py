"""Where a rank's processor seconds go in a step, and when it meets others.

The library is not changed: methods are wrapped for the length of a block. Seconds outside
collectives are the main thread's; those inside them are the process's, whose other threads carry
the bytes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from farspan.attention import chunk as cell
from farspan.distributed import collectives as peers
from farspan.distributed import kv_sharding
from farspan.distributed.collectives import Communicator, Pipeline

ATTENTION, REST, COLLECTIVES = "attention", "rest", "collectives"
MEET, BEGIN, END, SEND, RECEIVE = "meet", "begin", "end", "send", "receive"

# Of attention.chunk: kernels, and what is added and merged of their results.
KERNELS = "_forward", "merge_", "_gradients", "_earlier_gradients"
# Of Communicator; FSDP gathers by the third.
MEETINGS = "exchange", "gather", "gather_into", "scatter_sum", "sum"


@dataclass(frozen=True, slots=True)
class Event:
    """A rank met others: all of `ranks`, at once (MEET) or from a BEGIN to its END, or the one in
    `ranks` that it sends to or hears."""

    kind: str
    ranks: tuple[int, ...]
    before: float  # processor seconds since the event before it
    inside: float  # processor seconds that it took, waiting left out
    number: int = 0  # how often these ranks had met before


@dataclass(slots=True)
class Clock:
    """One step of one rank."""

    parts: dict[str, float] = field(default_factory=lambda: {ATTENTION: 0.0, REST: 0.0})
    events: list[Event] = field(default_factory=list)
    total: float = 0.0
    tail: float = 0.0  # after the last event
    _part: str = REST
    _mark: float = 0.0
    _since: float = 0.0
    _from: dict[int, int] = field(default_factory=dict)
    _met: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _begun: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A step, once."""
        began = time.process_time()
        self._mark = time.thread_time()
        with self._wrapped():
            yield
        self._charge()
        self.total = time.process_time() - began
        self.tail = self._since

    def seconds(self) -> dict[str, float]:
        """By part; they add up to what the process took."""
        return {**self.parts, COLLECTIVES: self.total - sum(self.parts.values())}

    def _charge(self) -> None:
        now = time.thread_time()
        if self._part != COLLECTIVES:
            self.parts[self._part] += now - self._mark
            self._since += now - self._mark
        self._mark = now

    @contextmanager
    def _in(self, part: str) -> Iterator[None]:
        self._charge()
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._charge()
            self._part = before

    def _meeting(
        self, kind: str, ranks: Callable[["Call"], tuple[int, ...]]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Wraps what is a collective of `ranks(the call)`, or a message to one or from one; where
        they are none, it is nothing. One within another is a part of it."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def met(*given: Any, **named: Any) -> Any:
                if self._part == COLLECTIVES:
                    return function(*given, **named)
                with self._in(COLLECTIVES):
                    began = time.process_time()
                    out = function(*given, **named)
                    inside = time.process_time() - began
                call = Call(given, named, out)
                found = ranks(call)
                if found:
                    number = self._number(kind, found, call)
                    self.events.append(Event(kind, found, self._since, inside, number))
                    self._since = 0.0
                return out

            return met

        return wrap

    def _number(self, kind: str, ranks: tuple[int, ...], call: "Call") -> int:
        if kind == END:
            return self._begun.pop(id(call.given[0]))[1]
        if kind not in (MEET, BEGIN):
            return 0
        self._met[ranks] += 1
        if kind == BEGIN:
            self._begun[id(call.out)] = ranks, self._met[ranks]
        return self._met[ranks]

    def _ended(self, call: "Call") -> tuple[int, ...]:
        return self._begun[id(call.given[0])][0]

    def _attending(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def attend(*given: Any, **named: Any) -> Any:
            with self._in(ATTENTION):
                return function(*given, **named)

        return attend

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        of_peers = self._meeting(MEET, of_peers_of)
        places: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
            *((Communicator, name, of_peers) for name in MEETINGS),
            (Communicator, "begin_exchange", self._meeting(BEGIN, of_peers_of)),
            (peers.PendingExchange, "wait", self._meeting(END, self._ended)),
            (Pipeline, "send", self._meeting(SEND, next_stage)),
            (Pipeline, "receive", self._meeting(RECEIVE, stage_before)),
            (kv_sharding, "_pass_on", self._meeting(SEND, self._passed)),
            (kv_sharding._Pass, "wait", self._meeting(RECEIVE, self._heard)),
            *((cell, name, self._attending) for name in KERNELS),
        ]
        with ExitStack() as stack:
            for owner, name, wrap in places:
                stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
            yield

    def _passed(self, call: "Call") -> tuple[int, ...]:
        peers, sent = call.given[:2]
        around = members(peers.group)
        self._from[id(call.out)] = around[(peers.index - 1) % peers.size]
        ahead = around[(peers.index + 1) % peers.size]
        return (ahead,) if any(x.numel() for x in sent) else ()

    def _heard(self, call: "Call") -> tuple[int, ...]:
        (passing,) = call.given
        return (self._from[id(passing)],) if any(x.numel() for x in call.out) else ()


@dataclass(frozen=True, slots=True)
class Call:
    """What a function was given, and gave."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    out: Any


def members(group: Any) -> tuple[int, ...]:
    """Numbers of a group's ranks."""
    return tuple(dist.get_process_group_ranks(group))


def of_peers_of(call: Call) -> tuple[int, ...]:
    return members(call.given[0].group)


def next_stage(call: Call) -> tuple[int, ...]:
    return (call.given[0]._other(call.named["up"]),)


def stage_before(call: Call) -> tuple[int, ...]:
    return (call.given[0]._other(not call.named["up"]),)
