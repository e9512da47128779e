"""One rank over NCCL on a GPU runs what several run over gloo."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.distributed.context import (
    ParallelContext,
    broadcast_bits,
    broadcast_from_rank0,
    run_on_rank0,
)
from farspan.distributed.fsdp import ShardedParameters, Stage, local
from farspan.distributed.run_context import LaunchEnv, process_group
from farspan.engine.tiers import refuse_beyond_together
from farspan.program.layout import Auto, Layout
from farspan.train.trainer import train
from tests.distributed.cut import Model
from tests.train.test_ranks import a_run, same_run
from tests.train.tiny import Quiet

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
Place = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def launcher() -> Place:
    """What torchrun says to the one process that it starts."""

    @contextmanager
    def place() -> Iterator[None]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        said: dict[str, Any] = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        said |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in said.items():
                patch.setenv(name, str(value))
            yield

    return place


@pytest.fixture
def ranks(launcher: Place) -> Iterator[ParallelContext]:
    with launcher(), process_group(LaunchEnv(0, 1, 0, 1), DEVICE, 60.0):
        yield ParallelContext(Layout(), DEVICE, timedelta(seconds=60))


def test_a_launched_run_is_the_run_of_one_process(tmp_path: Path, launcher: Place) -> None:
    run = a_run(tmp_path, "launched", parallel=Auto.AUTO, device=DEVICE.type)
    with launcher():
        assert train(run, reporter=Quiet()).step == run.steps
    alone = a_run(tmp_path, "alone", device=DEVICE.type)
    assert train(alone, reporter=Quiet()).step == run.steps
    same_run(run, alone)


def test_shards_are_gathered_and_reduced(ranks: ParallelContext) -> None:
    model = Model().to(ranks.device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    peers = ranks.among("data", alone=False)
    sharded = ShardedParameters(model, list(model.layers), peers, ranks.device, stage=Stage.ZERO_3)
    for unit in range(sharded.outer + 1):
        sharded.gather(unit)
        wholes = sharded.whole(unit)
        totals: dict[nn.Parameter, Tensor] = {
            p: 2 * p.detach() for p in wholes.values() if p.requires_grad
        }
        assert all(torch.equal(p, before[name]) for name, p in wholes.items())
        sharded.reduce(unit, totals)
        sharded.release(unit)
    for name, p in sharded.parameters().items():
        if p.requires_grad:
            assert p.grad is not None
            assert torch.equal(local(p.grad), 2 * before[name]), name


def test_small_talk(ranks: ParallelContext) -> None:
    tensor = torch.arange(3, dtype=torch.bfloat16, device=ranks.device)
    broadcast_bits(tensor)
    assert run_on_rank0(lambda: tensor.tolist()) == [0, 1, 2]
    ranks.refuse_unlike("tensor", tensor)
    refuse_beyond_together(ranks, 1, "a byte", "take none")
    broadcast_from_rank0(ranks, Model().to(ranks.device))
    assert ranks.among("data", alone=False).sum(tensor).tolist() == [0, 1, 2]
