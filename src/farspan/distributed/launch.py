"""The environment that a launcher such as torchrun gave this process, and the process group."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from farspan.distributed.failure import (
    SILENCE,
    CooperativeStop,
    FailureDetector,
    RankFailed,
    exit_process,
)

# Set by torchrun, and by any launcher that uses `env://`.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # small talk goes through main memory


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """One of `ranks` processes; `local` is its index on its machine, and so that of its GPU, and
    `near` is the number of processes there (torchrun's LOCAL_WORLD_SIZE)."""

    rank: int
    ranks: int
    local: int
    near: int


def launch_env() -> LaunchEnv | None:
    """The place of this process; None if no launcher started it and no process group exists."""
    if dist.is_initialized():
        rank = dist.get_rank()
        return _placed(rank, dist.get_world_size())
    if not all(name in os.environ for name in _VARIABLES):
        return None
    return _placed(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _placed(rank: int, ranks: int) -> LaunchEnv:
    """All ranks are on one machine unless the launcher says otherwise."""
    local, near = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return LaunchEnv(rank, ranks, int(local), int(near))


@contextmanager
def process_group(
    place: LaunchEnv, device: torch.device, seconds: float
) -> Iterator[CooperativeStop]:
    """Create the process group, and destroy it at the end, unless it exists already; run its
    FailureDetector, and yield the CooperativeStop of its ranks.

    A collective fails after `seconds`. An error inside the block names the first rank that failed.
    Raises RankFailed where the ranks do not come together; where the store is silent meanwhile, the
    process ends, unless the group was there.
    """
    was_there = dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=seconds)
    if not was_there:
        with _joining(place, seconds):
            own = _store(place, timeout)
        with _joining(place, seconds):
            dist.init_process_group(
                BACKENDS[device.type],
                store=own,
                rank=place.rank,
                world_size=place.ranks,
                timeout=timeout,
            )
    store = dist.distributed_c10d._get_default_store()
    failures = PrefixStore(f"failures/{_number()}", store)
    halt = CooperativeStop(place.rank, place.ranks, seconds)
    leave, store_of = (
        (None, "the store of the process group") if was_there else (exit_process, _launcher())
    )
    with nullcontext() if was_there else _joining(place, seconds):
        detector = FailureDetector(
            failures,
            place.rank,
            place.ranks,
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
def _joining(place: LaunchEnv, seconds: float) -> Iterator[None]:
    """Calls the store before a FailureDetector watches. One that answers does so within `seconds`;
    of one that does not, the calls neither return nor raise, and the process ends. Raises
    RankFailed for what they raise."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    host = _launcher() or f"rank 0, which has the store of all ranks at {where},"
    silent = RankFailed(
        f"rank {place.rank}: {host} has not answered for {seconds + SILENCE:g} s while the ranks "
        "were joining: its process is frozen, or its node or the link to it is down"
    )
    watchdog = threading.Timer(seconds + SILENCE, exit_process, [silent])
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    except RankFailed:
        raise
    except RuntimeError as error:  # of torch.distributed
        words = str(error).strip().split("\n", 1)[0]
        why = f"{words}; {host} or another rank has not started, has ended or is frozen"
        if isinstance(error, dist.DistNetworkError):
            why = f"{host} has not started, has ended or is frozen: {words}"
        raise RankFailed(f"rank {place.rank}: {why}; see the logs of all ranks") from error
    finally:
        watchdog.cancel()


def _store(place: LaunchEnv, timeout: timedelta) -> PrefixStore:
    """The key-value store of all ranks. torchrun's agent keeps one store through all attempts, with
    the addresses of dead ranks, so each attempt has a prefix of its own."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.ranks,
        is_master=place.rank == 0 and _launcher() is None,
        timeout=timeout,
        multi_tenant=True,
    )
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _launcher() -> str | None:
    """The launcher's store, in words; None where rank 0 has the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return f"the launcher's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


_boards = 0


def _number() -> int:
    """Every FailureDetector of a group has keys of its own: ranks open them in the same order."""
    global _boards
    _boards += 1
    return _boards
