"""The environment that a launcher such as torchrun gave this process, and the process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from farspan.distributed.failure import (
    SILENCE,
    CooperativeStop,
    FailureDetector,
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
    """
    was_there = dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not was_there:
        dist.init_process_group(
            BACKENDS[device.type],
            store=_store(place, timedelta(seconds=seconds)),
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=seconds),
        )
    store = dist.distributed_c10d._get_default_store()
    failures = PrefixStore(f"failures/{_number()}", store)
    halt = CooperativeStop(place.rank, place.ranks, seconds)
    leave, store_of = (
        (None, "the store of the process group") if was_there else (exit_process, _launcher())
    )
    with FailureDetector(
        failures,
        place.rank,
        place.ranks,
        leave,
        halt,
        patience=max(seconds, SILENCE),
        store_of=store_of,
    ):
        yield halt
    # Not after a failure: ending the group would wait for ranks that are gone.
    if not was_there:
        dist.destroy_process_group()


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
