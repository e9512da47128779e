"""The processes that share one run: what they agree on, and when they stop."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.distributed.context import ParallelContext, broadcast_bits, run_on_rank0
from farspan.distributed.failure import CooperativeStop, record_sync
from farspan.distributed.launch import LaunchEnv, process_group
from farspan.durable import WriteFailed
from farspan.plan.layout import ALONE, AXES, Layout, Rank
from farspan.spec import Refused
from farspan.train.config import Parallel, RunConfig
from farspan.train.run_folder import Finding
from farspan.train.yaml_config import flatten, to_mapping
from farspan.version import VERSION

T = TypeVar("T")

OWN = ("data.cache",)  # keys that may differ from rank to rank


class StopPoint(Enum):
    """Where all ranks may leave what they are at."""

    BATCH = auto()  # before each batch of a step or an evaluation
    CELL = auto()  # behind a cell of a step
    HELD_OUT_CELL = auto()  # of an evaluation


@dataclass(slots=True)
class DistributedContext:
    """This process among those of its run. All of them make the same calls in the same order."""

    device: torch.device
    place: LaunchEnv | None = None  # None: alone
    timeout: float = Parallel().timeout  # seconds that ranks wait for each other
    ranks: ParallelContext | None = None  # once the layout is known
    layout: Layout = field(default=ALONE)
    halt: CooperativeStop | None = None  # None: alone

    @property
    def leads(self) -> bool:
        """Whether it writes the folder and speaks."""
        return self.place is None or self.place.rank == 0

    @property
    def count(self) -> int:
        return 1 if self.place is None else self.place.ranks

    @property
    def near(self) -> int:
        """How many are on this machine."""
        return 1 if self.place is None else self.place.near

    @property
    def replica(self) -> int:
        """Which of the `replicas` along `data` it belongs to."""
        return 0 if self.ranks is None else self.ranks.rank.along["data"]

    @property
    def replicas(self) -> int:
        return self.layout.data

    def lay_out(self, layout: Layout) -> None:
        """From now on ranks have their places in a layout."""
        if self.place is not None:
            timeout = timedelta(seconds=self.timeout)
            self.ranks, self.layout = ParallelContext(layout, self.device, timeout), layout

    def agree(self, value: int) -> int:
        """The largest of what all ranks give, at least 0."""
        return max(self.everyone(value))

    def least(self, value: int) -> int:
        """The smallest of what all ranks give."""
        return min(self.everyone(value))

    def ask_to_halt(self, number: int) -> None:
        """All ranks are to leave the step, with a signal's number. A handler may call it."""
        if self.halt is not None:
            self.halt.ask(number)

    def halts(self, place: StopPoint) -> int:
        """The number of a signal for which all ranks leave here what they are at; 0 where they go
        on. They number only places that all of them pass."""
        # Stages of a pipeline have cells of their own, and the last held-out sequence, which one of
        # the replicas has, may be shorter than the others.
        if place is not StopPoint.BATCH and self.layout.pipeline > 1:
            return 0
        if place is StopPoint.HELD_OUT_CELL and self.replicas > 1:
            return 0
        return 0 if self.halt is None else self.halt.pass_place()

    def is_asked_to_halt(self) -> bool:
        """Whether all will halt behind a cell: this rank has heard of it, others may not yet."""
        return self.halt is not None and self.layout.pipeline == 1 and self.halt.is_asked

    def agree_on(self, finding: Finding) -> Finding:
        """The first rank's that found a bad weight, or a bad gradient, or else rank 0's."""
        found = self.everyone(finding)
        return max(found, key=lambda f: (f.weight is not None, f.gradient is not None))

    def first_of(self, found: T | None) -> tuple[int, T] | None:
        """What the first rank has that has something, and its number."""
        everyone = enumerate(self.everyone(found))
        return next(((number, one) for number, one in everyone if one is not None), None)

    def of_replicas(self, items: list[T]) -> list[T]:
        """What all replicas have, one after the other."""
        if self.ranks is None:
            return items
        found = self.everyone(items)
        firsts = Rank(self.layout, 0).peers("data")
        return [item for rank in firsts for item in found[rank]]

    def everyone(self, value: T) -> list[T]:
        """What each rank gives."""
        return [value] if self.place is None else _everyone(value)

    def total(self, count: int) -> int:
        """The sum over replicas."""
        if self.ranks is None or self.replicas == 1:
            return count
        return int(self.ranks.among("data").sum(torch.tensor([count], device=self.ranks.device)))

    def by_first(self, work: Callable[[], T], what: str = "what it does for all") -> T:
        """What `work` returns on rank 0, everywhere; the others wait for it. Refused and
        WriteFailed are raised everywhere too; `what` it is is said where it takes too long."""
        return work() if self.place is None else run_on_rank0(work, (Refused, WriteFailed), what)

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's tensors, copied into everybody's."""
        if self.place is None:
            return
        for tensor in tensors:
            broadcast_bits(tensor)

    def refuse_unlike(self, what: str, value: str) -> None:
        """Raises Refused, on all ranks, where they do not have the same."""
        if self.ranks is not None:
            self.ranks.refuse_unlike(what, value, *AXES)


@contextmanager
def join_run(
    run: RunConfig, place: LaunchEnv | None, device: torch.device
) -> Iterator[DistributedContext]:
    """This process and the others that were started with it, which have been found to want the
    same. `device` is what the run names. Raises Refused where they do not, and RankFailed where
    another rank failed."""
    if place is None:
        yield DistributedContext(device)
        return
    device = _own_device(run, device, place)
    seconds = run.parallel.timeout if isinstance(run.parallel, Parallel) else Parallel().timeout
    with process_group(place, device, seconds) as halt:
        _refuse_unlike(run)
        yield DistributedContext(device, place, seconds, halt=halt)


def _own_device(run: RunConfig, device: torch.device, place: LaunchEnv) -> torch.device:
    """The device of this process. Raises Refused where it is another one's too."""
    if device.type != "cuda" or (device.index is not None and place.ranks == 1):
        return device
    if device.index is not None:
        raise Refused(
            f"device: {run.device} is one GPU, and {place.ranks} ranks were started; give cuda or "
            "auto, and each rank takes its own"
        )
    if place.local >= torch.cuda.device_count():
        raise Refused(
            f"device: rank {place.rank} is number {place.local} of its machine, which has "
            f"{torch.cuda.device_count()} GPUs; start as many ranks there"
        )
    return torch.device("cuda", place.local)


def _refuse_unlike(run: RunConfig) -> None:
    """The run and the versions of all ranks are those of the first."""
    given = {k: v for k, v in flatten(to_mapping(run)).items() if k not in OWN}
    mine = {**given, "farspan": VERSION, "torch": torch.__version__}
    all_of = _everyone(mine)
    for key in sorted({key for one in all_of for key in one}):
        values = [one.get(key) for one in all_of]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise Refused(
                f"{key}: {values[0]!r} on rank 0, but {values[others[0]]!r} on "
                f"{_listed(others)}; every rank must be given the same"
            )


def _everyone(value: T) -> list[T]:
    """What each rank of the process group gives, in their order."""
    record_sync()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Interrupted(Exception):
    """The user or the system asked the run to end; raised only between two cells."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupt:
    """Between `__enter__` and `__exit__` the first signal is kept for `check`; a second one does
    at once what it did before. Processes that share a run cannot leave one by one: all leave where
    they `meet` between two steps, or within a step where all have `passed`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._crew: DistributedContext | None = None  # of several processes
        self._signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        # Python lets only its main thread set handlers; elsewhere the caller's own stay.
        if threading.current_thread() is threading.main_thread():
            for signum in self.SIGNALS:
                self._before[signum] = signal.signal(signum, self._remember) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def share(self, crew: DistributedContext) -> None:
        """From now on with these others."""
        if crew.count > 1:
            self._crew = crew
            crew.ask_to_halt(self._signum or 0)

    def check(self) -> None:
        """Raises Interrupted when a signal has come and nobody waits for this process."""
        if self._signum is not None and self._crew is None:
            raise Interrupted(self._signum)

    def passed(self, place: StopPoint) -> None:
        """Raises Interrupted when a signal has come; where several processes share the run, in all
        of them at the same place."""
        if self._crew is None:
            self.check()
        elif number := self._crew.halts(place):
            # None leaves before all are here: with rank 0 the store may go in which they agree.
            raise Interrupted(self._crew.agree(number))

    def meet(self) -> None:
        """Raises Interrupted in all processes when a signal has come to one. All of them call it
        between the same two steps."""
        if self._crew is not None:
            self._signum = self._crew.agree(self._signum or 0) or None
        if self._signum is not None:
            raise Interrupted(self._signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signum = signum
        if self._crew is not None:
            self._crew.ask_to_halt(signum)
        # A launcher repeats SIGTERM while its processes leave their step.
        if self._crew is None or signum != signal.SIGTERM:
            self._give_back()

    def _give_back(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()
