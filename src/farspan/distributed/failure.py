"""Failures and stops of ranks, exchanged through the store of their process group.

A rank that raises writes its cause into the store before it leaves. The collectives of the others
then fail or time out; they read the store and raise an error that names the rank and its cause. A
killed rank writes nothing: ranks on its machine see that its process is gone, all others that its
heartbeat stops. A rank that lives but is late has a heartbeat too, which carries the number of
synchronisations it has reached and its activity. All ranks synchronise in the same order outside of
steps, so the others wait for the rank with the fewest.

Note: [The store]. The store is a server in rank 0's process, or in torchrun's; while that is
frozen, or the link to it is down, calls of the store neither return nor raise. Only the heartbeat
thread and a thread for the end of a run call it, and a further thread measures the time since the
last heartbeat that succeeded. After the collectives' timeout, or after `SILENCE` once one of them
has failed, the process ends without the store; it then reports faults of other ranks that it has
read before.

Note: [The thread]. A rank that waits in a collective reads nothing. A thread of each rank sends its
heartbeat, and ends the process when a fault is known and the collective still waits: a collective
of NCCL does, until its timeout.

Note: [Stopping together]. A rank may not leave a step alone: the others would wait for it in a
collective. But all ranks pass the same places (calls of `pass_place`) in the same order, and have
all begun every collective before a place. So they count the places and stop at the same one:

    rank 0   ..7..8..9..|10          9 was its last when it read the request, which it writes down
    rank 1   ..7..8........9..|10    8; no rank passes its next before all have written theirs
    stop at 10, the first that no rank can have passed

No rank can wait for another forever. The thread writes for its rank and waits for nothing, so all
have written within three heartbeats, wherever their main threads are. Then a rank that held still
goes on to the common place or stops there, and a rank that waits in a collective waits for one
that has yet to arrive.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import psutil
import torch.distributed as dist

UNNAMED = "its own work"


def machine_name() -> str:
    """Return an identifier that two ranks share exactly if they see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


@dataclass(slots=True)
class SyncRecord:
    """Number of synchronisations that this process has reached, and what it does at present."""

    syncs: int = 0  # synchronisations reached
    activity: str = UNNAMED


sync_record = SyncRecord()


def record_sync() -> None:
    """Count a synchronisation outside steps, before it begins: a late rank has a lower count."""
    sync_record.syncs += 1


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Name what the block does, for the error that other ranks raise if it takes too long."""
    before, sync_record.activity = sync_record.activity, what
    try:
        yield
    finally:
        sync_record.activity = before


Store = Any  # torch.distributed's; its stubs lack some methods

HEARTBEAT = 0.5  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 4.0  # seconds without a heartbeat after which a rank counts as silent
SILENCE = 3.0  # seconds without an answer of the store, after a collective has failed
GRACE = 10.0  # seconds a process may still wait after a fault; torchrun kills after 30
FAILED = 1
GONE, SILENT = "gone", "does not answer"
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

# Parts of the bare RuntimeErrors that torch raises when a peer is gone or too late.
_SIGNS = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "NCCL")
_TOO_LONG = "longer than the timeout of the ranks; raise parallel.timeout in the run file"
_SHARED = "all ranks raised the same error; rank 0 reports it"


class RankFailed(RuntimeError):
    """Error about another rank's failure, whose message names that rank and the cause."""


_FOREIGN = "the store of all ranks holds a value not from farspan (another program uses its port)"


_MALFORMED = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
)  # raised by reading them


@dataclass(frozen=True, slots=True)
class Fault:
    """The first rank that failed, and the cause of its failure."""

    rank: int
    cause: str

    def error(self) -> RankFailed:
        return RankFailed(f"rank {self.rank}: {self.cause}")


class _Home(NamedTuple):
    """The machine and the process of a rank."""

    machine: str  # see `machine_name`
    process: int
    node: str  # the machine's name for people


class BackgroundTask(Protocol):
    """Work that the heartbeat thread of a FailureDetector does at each heartbeat."""

    def look(self, store: Store) -> None:
        """Do a part of the work, at one heartbeat; not called once a fault is known. May raise the
        store's RuntimeError, and ValueError for entries that farspan did not write."""

    def give_up(self) -> None:
        """End the work, since heartbeats have ended or a rank has failed. May be called again."""


class FailureDetector:
    """Tells every rank which rank failed first. As a context, it publishes an exception that leaves
    its block to the other ranks, or raises RankFailed if another rank failed before.

    `leave` ends this process when it waits for a rank that failed, or when the store has not
    answered for `patience` seconds; with None the process waits until its collective fails. `task`
    runs at every heartbeat. `store_of` names the owner of the store, if that is not rank 0.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        leave: Callable[[RankFailed], None] | None = None,
        task: BackgroundTask | None = None,
        patience: float = float("inf"),
        store_of: str | None = None,
    ) -> None:
        self._task = task
        self._patience, self._store_of = patience, store_of
        self.rank, self.ranks = rank, ranks
        self._store = store.clone()  # a client of its own: calls of the group's client wait
        self._heartbeat_store = store.clone()
        self._leave = leave
        self._known: Fault | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._beats: int | None = 0  # successful heartbeats; None: no more follow
        self._silence = 0.0  # seconds since the last one
        sync_record.syncs = 0  # the ranks of this group count together
        self._home = _Home(machine_name(), os.getpid(), platform.node())
        self._where = self._meet()

    def _meet(self) -> list[_Home]:
        """Return the machine and process of each rank, once all ranks have written theirs into the
        store. All ranks call this. Raises RankFailed if a rank does not call it in time."""
        keys = [f"where/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], json.dumps(self._home))
        try:
            homes = self._store.multi_get(keys)
        except dist.DistStoreError as error:  # raised when the wait for a rank times out
            why = "has not joined the others in time: it has ended, or is frozen; see its log"
            for absent in (rank for rank, key in enumerate(keys) if not self._store.check([key])):
                raise Fault(absent, why).error() from error
            raise
        try:
            said = [json.loads(home) for home in homes]
            return [_Home(str(machine), int(process), str(node)) for machine, process, node in said]
        except _MALFORMED as error:
            raise Fault(self.rank, f"{_FOREIGN}: {error}").error() from error

    def __enter__(self) -> "FailureDetector":
        self._thread.start()
        threading.Thread(target=self._listen, name="ranks' store", daemon=True).start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raised = self._end(error)
        self._stop.set()
        if self._silence < SILENCE:
            self._thread.join(SILENCE)
        elif isinstance(raised, RankFailed) and self._leave is not None:
            # NCCL's own threads call the store as well, and a process waits for them at its end.
            self._leave(raised)
        if raised is not None and raised is not error:
            raise raised from error

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Tell the other ranks that this rank has left the `with` body. Return the exception to
        raise for the body's `error`, or None if there was no error. See Note: [The store]."""
        verdict: list[BaseException] = []

        def part() -> None:
            if error is not None:
                verdict.append(self._verdict(error))
            with suppress(RuntimeError):  # the owner of the store may have left first
                self._store.set(f"left/{self.rank}", "")
                if error is not None and self.rank == 0:
                    self._stay()

        work = threading.Thread(target=part, name="ranks' end", daemon=True)
        work.start()
        while work.is_alive() and self._silence < SILENCE:
            work.join(HEARTBEAT / 10)
        if verdict or error is None:
            return verdict[0] if verdict else None
        silent = self._silence >= SILENCE and _of_a_collective(error)
        return self._no_answer() if silent else error

    def _verdict(self, error: BaseException) -> BaseException:
        """Return this rank's `error`, or RankFailed if another rank failed before this one."""
        words = _words(error)
        try:
            waited = _of_a_collective(error)
            fault = self._wait_for_cause() if waited else None
            self._store.set(f"word/{self.rank}", words)
            # A timeout is no fault of this rank's: it blames another one.
            is_late = isinstance(error, RuntimeError) and "Timed out" in str(error)
            cause = f"waited for another rank {_TOO_LONG}" if is_late else words
            fault = fault or self._claim(self._store, Fault(self.rank, cause))
            # If another rank's error says that this one came too late, the others know better why.
            if fault.cause != words and (fault.rank != self.rank or waited):
                return fault.error()
            if self.rank and self._is_said(words):
                error.add_note(_SHARED)
        except RuntimeError as lost:  # raised by the store
            if self._known is not None:
                return error if self._known.cause == words else self._known.error()
            if self._is_host_gone():
                return _exited(0).error()
            return RankFailed(
                f"rank {self.rank}: {words}; the store of the process group ended with its rank or "
                f"launcher ({_words(lost)}): see the log of rank 0"
            )
        return error

    def _is_host_gone(self) -> bool:
        """Return whether the store has ended with rank 0's process, which owned it."""
        if self._store_of is not None or self.rank == 0:
            return False
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT / 2  # it closes its files first
        while self._lives(0) and time.monotonic() < deadline:
            time.sleep(HEARTBEAT / 10)
        return not self._lives(0)

    def _no_answer(self) -> RankFailed:
        """Return the error for a store that does not answer, with the state of its owner."""
        if self._known is not None:
            return self._known.error()
        if self._store_of is None and self.rank:
            return self._silent(0).error()
        store, node = self._store_of or "the store of the process group", self._where[0].node
        return RankFailed(
            f"rank {self.rank}: {store} has not answered for {self._silence:.0f} s ({node} has "
            "rank 0): its process is frozen, or its node or the link to it is down"
        )

    def _silent(self, rank: int) -> Fault:
        """Return the fault of a rank that sends no heartbeats, with its process's state."""
        if not self._lives(rank):
            return _exited(rank)
        home = self._where[rank]
        if home.machine != self._home.machine:
            why = f"its process is frozen, or {home.node} or the link to it is down"
        else:
            why = f"its process {home.process} exists, but {_status(home.process)}"
        return Fault(rank, f"{SILENT}: {why}")

    def _wait_for_cause(self) -> Fault | None:
        """Return the cause of a failed collective: the fault of a rank that failed or was late.
        None if all other ranks live, report nothing and have synchronised as often as this one."""
        late = self._behind()
        before = {rank: self._store.add(f"heartbeat/{rank}", 0) for rank in self._others()}
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        while time.monotonic() < deadline:
            fault = self._fault(self._store) or self._missed(self._store)
            stopped = [rank for rank in self._others() if self._is_stopped(rank)]
            if fault is None and stopped:
                fault = self._claim(self._store, self._silent(stopped[0]))
            if fault is not None:
                return fault
            still = self._behind()  # the last of several late ranks
            late = {rank: what for rank, what in late.items() if rank in still} or late
            time.sleep(HEARTBEAT / 10)
        for rank, count in before.items():
            if self._store.add(f"heartbeat/{rank}", 0) == count:
                return self._claim(self._store, self._silent(rank))
        for rank, what in late.items():
            return self._claim(self._store, Fault(rank, f"{what} takes {_TOO_LONG}"))
        return None

    def _behind(self) -> dict[int, str]:
        """Return activities of ranks with fewer synchronisations than this one, slowest first."""
        met: dict[int, int] = {}
        at: dict[int, str] = {}
        for rank in self._others():
            if self._store.check([f"at/{rank}"]):
                with suppress(*_MALFORMED):  # used in messages only
                    count, what = json.loads(self._store.get(f"at/{rank}"))
                    met[rank], at[rank] = int(count), str(what)
        return {r: at[r] for r in sorted(met, key=met.__getitem__) if met[r] < sync_record.syncs}

    def _is_said(self, words: str) -> bool:
        """Wait up to two heartbeats; return whether rank 0 has reported the error text `words`."""
        deadline = time.monotonic() + 2 * HEARTBEAT
        while not self._store.check(["word/0"]) and time.monotonic() < deadline:
            time.sleep(HEARTBEAT / 10)
        return self._store.check(["word/0"]) and self._store.get("word/0") == words.encode()

    def _stay(self) -> None:
        """Wait until the other ranks have left, since the store may end with this process."""
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        fault = self._fault(self._store)
        hangs = None  # a rank that does not leave
        if fault is not None and fault.cause.startswith(SILENT):
            hangs = fault.rank
        waiting = [rank for rank in self._others() if rank != hangs]
        while waiting and time.monotonic() < deadline:
            alive = [rank for rank in waiting if self._lives(rank)]
            waiting = [rank for rank in alive if not self._has_left(rank, self._store)]
            time.sleep(HEARTBEAT / 10)

    def _watch(self) -> None:
        """Send heartbeats until the block ends; see Note: [The thread]."""
        try:
            self._send_heartbeats()
        finally:
            self._beats = None
            if self._task is not None:
                self._task.give_up()

    def _listen(self) -> None:
        """Measure how long the store has not answered; end the process if too long, see Note: [The
        store]. Counts rounds of this loop: time in which the process is frozen does not count."""
        before = self._beats
        while not self._stop.wait(HEARTBEAT / 2) and self._beats is not None:
            self._silence = self._silence + HEARTBEAT / 2 if self._beats == before else 0.0
            before = self._beats
            if self._silence >= self._patience and self._leave is not None:
                self._leave(self._no_answer())

    def _send_heartbeats(self) -> None:
        store, known_for = self._heartbeat_store, 0.0
        while not self._stop.is_set():
            try:
                store.add(f"heartbeat/{self.rank}", 1)
                store.set(f"at/{self.rank}", json.dumps([sync_record.syncs, sync_record.activity]))
                self._known = self._known or self._fault(store) or self._missed(store)
                if self._task is not None and self._known is None:
                    self._task.look(store)
                elif self._task is not None:
                    self._task.give_up()
                assert self._beats is not None
                self._beats += 1
            except RuntimeError:
                if self._known is None:
                    return  # the store is gone: the collectives will fail
            except _MALFORMED as error:  # raised for entries that the task read
                self._known = Fault(self.rank, f"{_FOREIGN}: {error}")
            known_for += HEARTBEAT if self._known else 0.0
            if self._known is not None and self._leave is not None and known_for >= GRACE:
                self._leave(self._known.error())
            self._stop.wait(HEARTBEAT)

    def _missed(self, store: Store) -> Fault | None:
        """Return the fault of a rank whose process ended without reporting an error; else None."""
        for rank in self._others():
            # The order matters: a rank reports that it leaves before its process ends.
            if not self._lives(rank) and not self._has_left(rank, store):
                return self._claim(store, _exited(rank))
        return None

    def _lives(self, rank: int) -> bool:
        """Return whether a rank's process still exists; True if it is on another machine."""
        home = self._where[rank]
        return home.machine != self._home.machine or _status(home.process) != GONE

    def _is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped a rank's process; False on another machine."""
        home = self._where[rank]
        return home.machine == self._home.machine and _status(home.process) in STOPPED

    def _claim(self, store: Store, fault: Fault) -> Fault:
        """Publish `fault` unless another fault is already published; return the published one."""
        if store.add("faults", 1) == 1:
            store.set("fault", json.dumps([fault.rank, fault.cause]))
        return self._read_fault(store)

    def _fault(self, store: Store) -> Fault | None:
        return self._read_fault(store) if store.check(["fault"]) else None

    def _read_fault(self, store: Store) -> Fault:
        """Return the published fault once it is there; if malformed, a fault that says so."""
        text = store.get("fault").decode(errors="replace")
        try:
            rank, cause = json.loads(text)
            return Fault(int(rank), str(cause))
        except _MALFORMED:
            return Fault(self.rank, f"{_FOREIGN}: fault is {text[:40]!r}")

    def _has_left(self, rank: int, store: Store) -> bool:
        return bool(store.check([f"left/{rank}"]))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]


def is_shared(error: BaseException) -> bool:
    """Return whether every rank raised the same error, so that rank 0 may report it for all."""
    return _SHARED in getattr(error, "__notes__", ())


def exit_process(error: RankFailed) -> None:
    """Print the error and end the process at once, even while a collective waits."""
    print(f"farspan: {error}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def _exited(rank: int) -> Fault:
    return Fault(rank, "exited without reporting an error (killed?)")


def _words(error: BaseException) -> str:
    text = str(error).strip()
    if type(error).__module__.startswith("farspan."):  # its own errors need no type's name
        return text
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}".rstrip(": ")


def _of_a_collective(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _SIGNS):
            return True
        cause = cause.__cause__
    return False


def _status(process: int) -> str:
    """Return the state of a process on this machine, as psutil names it; `GONE` if it has ended."""
    try:
        state = str(psutil.Process(process).status())
    except psutil.NoSuchProcess:
        return GONE
    return GONE if state == psutil.STATUS_ZOMBIE else state


_WANTED = "halt"


class CooperativeStop:
    """Stops all ranks at the same call of `pass_place`, see Note: [Stopping together]. Main threads
    call `pass_place`, heartbeat threads `look`, and signal handlers may call `ask`."""

    def __init__(self, rank: int, ranks: int, patience: float) -> None:
        """Join as this rank; other ranks' answers are waited for up to `patience` seconds."""
        self._rank, self._ranks, self._patience = rank, ranks, patience
        self._changed = threading.Condition()
        self._asked = 0
        self._passed = 0
        self._said: int | None = None  # places passed when this rank read the request
        self._place: tuple[int, int] | None = None  # common place, number to stop with
        self._alone = False
        self._missing = "all ranks"

    def ask(self, number: int) -> None:
        """Request that all ranks stop. `number`, above 0, is the reason; among several requests the
        largest counts. Takes no lock: a signal handler may interrupt the lock's holder."""
        self._asked = max(number, self._asked)

    def pass_place(self) -> int:
        """Return the reason to stop if all ranks stop at this call, 0 if they go on. All ranks make
        these calls in the same order, and begin the same collectives between two calls. Waits only
        after a request. Raises RankFailed if another rank does not answer."""
        with self._changed:
            self._passed += 1
            if self._said is None or self._alone:
                return 0
            answered = self._changed.wait_for(lambda: self._place or self._alone, self._patience)
            if not answered:
                raise RankFailed(
                    f"{self._missing} did not answer a request to stop for {self._patience:g} s; "
                    "see its log"
                )
            place, number = self._place or (0, 0)
            return number if place == self._passed else 0

    def look(self, store: Store) -> None:
        """Exchange requests to stop with the other ranks, at each heartbeat. Raises RuntimeError if
        the store is gone, and ValueError for entries that no rank wrote."""
        if self._place is not None:
            return
        if self._said is None:
            if not self._asked and not store.check([_WANTED]):
                return
            with self._changed:
                self._said = self._passed
            store.set(_stop_key(self._rank), f"{self._said} {self._asked}")
            store.set(_WANTED, "")
        keys = {rank: _stop_key(rank) for rank in range(self._ranks)}
        silent = [rank for rank, key in keys.items() if not store.check([key])]
        if silent:
            self._missing = f"rank {silent[0]}"
            return
        said = [tuple(map(int, store.get(key).decode().split())) for key in keys.values()]
        with self._changed:
            self._place = max(passed for passed, _ in said) + 1, max(asked for _, asked in said)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Stop waiting for other ranks: a rank or the store is gone, so collectives will fail."""
        with self._changed:
            self._alone = True
            self._changed.notify_all()


def _stop_key(rank: int) -> str:
    return f"{_WANTED}/{rank}"
