"""The processes that share one run: their launch by torchrun or another launcher, their process
group, their agreement on settings, and their common stops."""

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from farspan.distributed import messages
from farspan.distributed.context import ParallelContext, broadcast_bits, run_on_rank0
from farspan.distributed.failure import (
    SILENCE,
    CooperativeStop,
    FailureDetector,
    RankFailed,
    exit_process,
)
from farspan.durable import WriteFailed
from farspan.program.layout import ALONE, Layout, Rank
from farspan.spec import VERSION, UnsupportedError

_BACKLOG = 1024  # pending connections: one or two of each rank at the start
# Set by torchrun, and by any launcher that uses `env://`.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # short messages go through main memory


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """This process among all: its `rank` of `ranks` and, on its machine, its index `local` (also of
    its GPU) among the `near` processes (torchrun's LOCAL_WORLD_SIZE)."""

    rank: int
    ranks: int
    local: int
    near: int


def launch_env() -> LaunchEnv | None:
    """Return this process's rank, from its launcher or process group; None if it has neither."""
    if dist.is_initialized():
        rank = dist.get_rank()
        return _placed(rank, dist.get_world_size())
    if not all(name in os.environ for name in _VARIABLES):
        return None
    return _placed(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _placed(rank: int, ranks: int) -> LaunchEnv:
    """Return a rank's LaunchEnv; without the launcher's variables, as if on one machine."""
    local, near = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return LaunchEnv(rank, ranks, int(local), int(near))


@contextmanager
def process_group(
    launch: LaunchEnv, device: torch.device, seconds: float
) -> Iterator[CooperativeStop]:
    """Provide a process group with a FailureDetector inside the block, and yield its
    CooperativeStop. A group that already exists is used, and kept at the end.

    A collective fails after `seconds`. An error that leaves the block names the first rank that
    failed. Raises RankFailed if the ranks do not come together; if the store is silent meanwhile,
    the process ends, unless the group existed before.
    """
    was_there = dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=seconds)
    if not was_there:
        with _joining(launch, seconds):
            own = _store(launch, timeout)
        with _joining(launch, seconds):
            dist.init_process_group(
                BACKENDS[device.type],
                store=own,
                rank=launch.rank,
                world_size=launch.ranks,
                timeout=timeout,
            )
    store = dist.distributed_c10d._get_default_store()
    failures = PrefixStore(f"failures/{_number()}", store)
    halt = CooperativeStop(launch.rank, launch.ranks, seconds)
    leave, store_of = (
        (None, "the store of the process group") if was_there else (exit_process, _launcher())
    )
    with nullcontext() if was_there else _joining(launch, seconds):
        detector = FailureDetector(
            failures,
            launch.rank,
            launch.ranks,
            leave,
            halt,
            patience=max(seconds, SILENCE),
            store_of=store_of,
        )
    with detector:
        yield halt
    # Not after a failure: ending the group would wait for ranks that are gone.
    if not was_there:
        dist.destroy_process_group()


@contextmanager
def _joining(launch: LaunchEnv, seconds: float) -> Iterator[None]:
    """Guard calls of the store until a FailureDetector runs. End the process if the store does not
    answer within `seconds`, since calls then neither return nor raise. Raises RankFailed if a call
    raises."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    host = _launcher() or f"rank 0, which has the store of all ranks at {where},"
    silent = RankFailed(
        f"rank {launch.rank}: {host} has not answered for {seconds + SILENCE:g} s while the ranks "
        "were joining: its process is frozen, or its node or the link to it is down"
    )
    watchdog = threading.Timer(seconds + SILENCE, exit_process, [silent])
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    except RankFailed:
        raise
    # torch.distributed's errors; gloo reserves as many bytes as a foreign address announces.
    except (RuntimeError, ValueError, MemoryError) as error:
        words = str(error).strip().split("\n", 1)[0]
        why = f"{words}; {host} or another rank has not started, has ended or is frozen"
        if isinstance(error, dist.DistNetworkError):
            why = f"{host} has not started, has ended or is frozen: {words}"
        raise RankFailed(f"rank {launch.rank}: {why}; see the logs of all ranks") from error
    finally:
        watchdog.cancel()


def _store(launch: LaunchEnv, timeout: timedelta) -> PrefixStore:
    """Connect to the key-value store of all ranks. torchrun keeps one store through all attempts,
    with the addresses of dead ranks, so keys have a prefix per attempt."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = launch.rank == 0 and _launcher() is None
    store = TCPStore(
        host,
        port,
        launch.ranks,
        is_master=is_master,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=_listen(host, port, launch.near < launch.ranks) if is_master else None,
    )
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _listen(host: str, port: int, is_far: bool) -> int | None:
    """Return a socket that listens on MASTER_ADDR alone; TCPStore would listen on every interface.
    None if the address is not this machine's (but a service's, say), if it is local although some
    ranks are on other machines, or if this process already uses the port."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # TCPStore names the unknown host
        return None
    loopback = all(str(place[4][0]).startswith(("127.", "::1")) for place in places)
    if loopback and is_far and host not in ("localhost", "127.0.0.1", "::1"):
        return None  # a host's own name, which Debian's /etc/hosts maps to 127.0.1.1
    for family, kind, protocol, _, address in places:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            return listener.detach()
        except OSError:
            listener.close()
    return None


def _launcher() -> str | None:
    """Return text that names the launcher's store, for errors; None if rank 0 holds the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return f"the launcher's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


_boards = 0


def _number() -> int:
    """Return a new number, which keeps the next FailureDetector's keys apart from earlier ones. All
    ranks get the same, since they open detectors in the same order."""
    global _boards
    _boards += 1
    return _boards


# -- agreement of the processes ------------------------------------------------------------------


T = TypeVar("T")

OWN = ("data.cache",)  # keys that may differ from rank to rank


class StopPoint(Enum):
    """Point in the work at which all ranks may stop."""

    BATCH = auto()  # before each batch of a step or an evaluation
    CELL = auto()  # after a cell of a step
    HELD_OUT_CELL = auto()  # after a cell of an evaluation


@dataclass(slots=True)
class DistributedContext:
    """The processes of a run, seen by one process. All make the same calls in the same order."""

    device: torch.device
    launch: LaunchEnv | None = None  # None: alone
    timeout: float = 0.0  # seconds that ranks wait for each other
    ranks: ParallelContext | None = None  # once the layout is known
    layout: Layout = field(default=ALONE)
    halt: CooperativeStop | None = None  # None: alone

    @property
    def is_rank0(self) -> bool:
        """True on rank 0, the process that writes the run folder and prints."""
        return self.launch is None or self.launch.rank == 0

    @property
    def number(self) -> int:
        return 0 if self.launch is None else self.launch.rank

    @property
    def size(self) -> int:
        return 1 if self.launch is None else self.launch.ranks

    @property
    def local_size(self) -> int:
        return 1 if self.launch is None else self.launch.near

    @property
    def replica(self) -> int:
        """Index of this rank's replica along the axis `data`."""
        return 0 if self.ranks is None else self.ranks.rank.along["data"]

    @property
    def replicas(self) -> int:
        return self.layout.data

    def set_layout(self, layout: Layout) -> None:
        """Set the layout, along whose axes the ranks are arranged from now on."""
        if self.launch is not None:
            timeout = timedelta(seconds=self.timeout)
            self.ranks, self.layout = ParallelContext(layout, self.device, timeout), layout

    def maximum(self, value: int) -> int:
        """Return the largest value that any rank passes."""
        return max(self.all_gather(value))

    def minimum(self, value: int) -> int:
        """Return the smallest value that any rank passes."""
        return min(self.all_gather(value))

    def request_stop(self, number: int) -> None:
        """Ask all ranks to stop for a signal with this number. A signal handler may call this."""
        if self.halt is not None:
            self.halt.ask(number)

    def must_stop(self, point: StopPoint) -> int:
        """Return the signal's number if all ranks stop at this point, 0 if they go on. Always 0 at
        a point that only some ranks pass: they would wait for the others in vain."""
        # Each pipeline stage has cells of its own, and the last held-out sequence, of one replica
        # only, may be shorter than the others.
        if point is not StopPoint.BATCH and self.layout.pipeline > 1:
            return 0
        if point is StopPoint.HELD_OUT_CELL and self.replicas > 1:
            return 0
        return 0 if self.halt is None else self.halt.pass_place()

    def first_given(self, value: T | None) -> tuple[int, T] | None:
        """Return the first rank whose value is not None, with this value; None if all are None."""
        everyone = enumerate(self.all_gather(value))
        return next(((number, one) for number, one in everyone if one is not None), None)

    def gather_replicas(self, items: list[T]) -> list[T]:
        """Return the items of all replicas in one list, in the order of replicas."""
        if self.ranks is None:
            return items
        by_rank = self.all_gather(items)
        firsts = Rank(self.layout, 0).peers("data")
        return [item for rank in firsts for item in by_rank[rank]]

    def all_gather(self, value: T) -> list[T]:
        """Return the value of each rank, in the order of ranks."""
        return [value] if self.launch is None else messages.gather(value)

    def sum_over_replicas(self, count: int) -> int:
        """Return the sum of `count` over replicas."""
        if self.ranks is None:
            return count
        return int(self.ranks.among("data").sum(torch.tensor([count], device=self.ranks.device)))

    def run_on_rank0(self, work: Callable[[], T], what: str = "its work for all ranks") -> T:
        """Run `work` on rank 0 alone and return its result on every rank; the other ranks wait.
        UnsupportedError and WriteFailed are raised on all. `what` names the work in timeouts."""
        return (
            work()
            if self.launch is None
            else run_on_rank0(work, (UnsupportedError, WriteFailed), what)
        )

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors on every rank with rank 0's values, bit for bit."""
        if self.launch is None:
            return
        for tensor in tensors:
            broadcast_bits(tensor)

    def refuse_unlike(self, what: str, value: str) -> None:
        """Raise UnsupportedError on all ranks if `value`, named `what`, differs between them."""
        if self.ranks is not None:
            self.ranks.refuse_unlike(what, value)


@contextmanager
def join_run(
    launch: LaunchEnv | None, device: torch.device, values: Mapping[str, Any], timeout: float
) -> Iterator[DistributedContext]:
    """Join the processes of a run for the duration of the block, and check that they have the same
    settings. `device` is the run file's device, `values` are its settings by dotted key. Raises
    UnsupportedError if settings differ between ranks, and RankFailed if another rank failed."""
    if launch is None:
        yield DistributedContext(device)
        return
    device = _own_device(str(values["device"]), device, launch)
    with process_group(launch, device, timeout) as halt:
        _refuse_unlike(values)
        yield DistributedContext(device, launch, timeout, halt=halt)


def _own_device(name: str, device: torch.device, launch: LaunchEnv) -> torch.device:
    """Return this process's device. Raises UnsupportedError if other ranks would use it too."""
    if device.type != "cuda" or (device.index is not None and launch.ranks == 1):
        return device
    if device.index is not None:
        raise UnsupportedError(
            f"device: {name} is one GPU, but {launch.ranks} ranks were started; give cuda or auto, "
            "and each rank takes its own"
        )
    if launch.local >= torch.cuda.device_count():
        raise UnsupportedError(
            f"device: rank {launch.rank} has no GPU of its own: its local rank is {launch.local}, "
            f"but its machine has {torch.cuda.device_count()} GPU(s); start one rank per GPU"
        )
    return torch.device("cuda", launch.local)


def _refuse_unlike(values: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if this rank's settings or versions differ from rank 0's."""
    settings = {key: value for key, value in values.items() if key not in OWN}
    mine = {**settings, "farspan": VERSION, "torch": torch.__version__}
    all_of = messages.gather(mine)
    for key in sorted({key for facts in all_of for key in facts}):
        by_rank = [facts.get(key) for facts in all_of]
        others = [rank for rank, value in enumerate(by_rank) if value != by_rank[0]]
        if others:
            raise UnsupportedError(
                f"{key}: {by_rank[0]!r} on rank 0, but {by_rank[others[0]]!r} on "
                f"{_listed(others)}; give every rank the same"
            )


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
