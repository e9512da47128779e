"""Ranks of one machine take its main memory together, or none of them does."""

import pytest
import torch

from farspan.distributed.context import ParallelContext
from farspan.engine.parallelize import parallelize, sharded_parameters
from farspan.engine.step import Step
from farspan.engine.tiers import refuse_beyond_together
from farspan.host import GIB, TooLarge
from farspan.program.layout import Layout
from farspan.spec import Schedule
from farspan.train.config import OptimizerConfig, StatesPlace
from farspan.train.optimizer import TrainingOptimizer
from tests.ranks import run_ranks
from tests.zoo import make_model

CPU = torch.device("cpu")
SCHEDULE = Schedule(chunk=8, groups=2)


def room(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr("farspan.engine.tiers.available_host_bytes", lambda: size)


def asked(needs: list[int], machines: list[str]) -> str:
    """What a rank is told where it needs so much, on a machine of 4 GiB."""
    ranks = ParallelContext(Layout(ulysses=len(needs)), CPU)
    number = ranks.rank.number
    with pytest.MonkeyPatch.context() as patch:
        room(patch, 4 * GIB)
        patch.setattr("farspan.engine.tiers.machine_name", lambda: machines[number])
        try:
            refuse_beyond_together(ranks, needs[number] * GIB, "a step", "shorten it")
        except TooLarge as error:
            return str(error)
    return ""


def test_ranks_of_one_machine_share_what_it_has() -> None:
    assert run_ranks(2, asked, [2, 2], ["one", "one"]) == ["", ""]
    words = "a step, on 2 ranks of a machine, needs 5.00 GiB, but only 4.00 GiB are available"
    for said in run_ranks(2, asked, [1, 4], ["one", "one"]):
        assert words in said
    assert run_ranks(2, asked, [3, 4], ["one", "other"]) == ["", ""]


def test_all_ranks_hear_of_a_machine_that_is_too_small() -> None:
    for said in run_ranks(2, asked, [1, 5], ["one", "other"]):
        assert "host memory: a step needs 5.00 GiB" in said


def refusals() -> list[str]:
    """Of an optimizer and of a step on a machine that could hold one rank's need, not two."""
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    model = make_model("llama")
    sharded_model = parallelize(model, SCHEDULE, ranks)
    step = Step(model, SCHEDULE, ranks=sharded_model)
    ids = torch.zeros(1, 40, dtype=torch.long)
    states = OptimizerConfig(states=StatesPlace.HOST)
    pieces = sharded_parameters(sharded_model)
    found = []
    arenas = sum(step.program(1, 40).arena_bytes.values())
    lasting = 2 * sum(p.nbytes for p in pieces.trained.values())
    for size, work in (
        (2 * arenas - 1, lambda: step(ids, ids)),
        (2 * lasting, lambda: TrainingOptimizer(model, states, pieces, ranks)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            room(patch, size)
            with pytest.raises(TooLarge, match="on 2 ranks of a machine") as error:
                work()
            found.append(str(error.value).partition(",")[0])
        work()
    return found


def test_what_ranks_take_is_looked_at_together() -> None:
    ours, theirs = run_ranks(2, refusals)
    assert (
        ours
        == theirs
        == [
            "host memory: a step of 40 tokens",
            "host memory: keeping the optimizer's states in main memory",
        ]
    )
