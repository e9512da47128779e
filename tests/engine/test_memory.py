"""What a step takes is what was said it would take."""

from dataclasses import replace

import pytest
import torch

from farspan.distributed.context import ParallelContext
from farspan.engine.loss import make_inputs
from farspan.engine.memory import (
    LiveStorage,
    PeakMemory,
    estimate_memory,
    least_transient,
    refuse_too_large,
)
from farspan.engine.parallelize import parallelize, sharded_parameters
from farspan.engine.step import Step
from farspan.engine.tiers import refuse_beyond_together
from farspan.host import GIB, TooLarge
from farspan.planner.states import INPUT_BYTES
from farspan.program.layout import Layout
from farspan.program.program import made_bytes
from farspan.spec import Schedule, Sparse, UnsupportedError
from farspan.train.config import OptimizerConfig, StatesPlace
from farspan.train.optimizer import TrainingOptimizer
from tests.ranks import run_ranks
from tests.sparse.test_index import random_index
from tests.zoo import make_model

BASE = Schedule(chunk=64, kv_block=64)


def measure(step: Step, batch: int, tokens: int) -> int:
    """Peak bytes of new tensors in a step, both tiers."""
    ids = torch.arange(tokens).repeat(batch, 1) % step.model_spec.vocab
    step.stages.model.zero_grad(set_to_none=True)
    step.release()
    with PeakMemory(torch.device("cpu")) as meter:
        step(ids, ids)
    return meter.peak


@pytest.mark.slow
def test_maps_of_an_index_are_there_once_and_counted() -> None:
    """Where cells compute: the first step brings them there, and none after it."""
    model = make_model("qwen2", torch.bfloat16, max_position_embeddings=4096)
    sparse = Sparse(page=16, budget=64, recent=64, sinks=16, selector="index", index_dim=4)
    schedule = Schedule(chunk=128, kv_block=128, groups=2, sparse=sparse)
    index = random_index(Step(model, Schedule()).model_spec.layers, 4)
    step = Step(model, schedule, selector=index)
    first, second = (measure(step, 1, 600) for _ in range(2))
    expected = estimate_memory(step, 1, 600, cells=least_transient)
    assert first - second == expected.index == index.nbytes(torch.bfloat16)
    fresh = Step(model, schedule, selector=replace(index, placed={}))
    assert expected == estimate_memory(fresh, 1, 600, cells=least_transient)
    for parameter in index.parameters():
        parameter.add_(1)  # as an optimizer does
    assert measure(step, 1, 600) > second


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("several", [False, True])
def test_what_is_made_of_a_batch_is_known(batch: int, several: bool) -> None:
    ids = torch.arange(50).repeat(batch, 1)
    documents = ids // 20 if several else None
    with LiveStorage() as meter:
        made = make_inputs(ids, ids, documents, vocab=50)
        assert meter.live == made_bytes(batch, 50, documents=several)
    assert made.input_ids is ids
    if batch == 1 or several:  # what is planned for a batch, whose labels are its ids
        assert ids.nbytes + made_bytes(batch, 50, documents=several) == INPUT_BYTES * batch * 50


def test_what_the_host_cannot_hold_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(make_model("qwen2"), BASE)
    expected = estimate_memory(step, 1, 100, cells=least_transient)
    needed = expected.new_device + expected.host_arena + 1000
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: needed)
    refuse_too_large(step, expected, optimizer=1000)
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: needed - 1)
    with pytest.raises(
        UnsupportedError, match=r"host memory: a step .* needs .* available .*shorten"
    ):
        refuse_too_large(step, expected, optimizer=1000)


def test_a_step_that_cannot_be_held_is_refused_and_leaves_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("qwen2")
    step = Step(model, BASE)
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: 1000)
    ids = torch.zeros(1, 100, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="a step of 100 tokens needs"):
        step(ids, ids)
    assert all(p.grad is None for p in model.parameters())


def test_live_storage_counts_what_is_alive_once() -> None:
    with LiveStorage() as meter:
        one = torch.zeros(1000, dtype=torch.float32)
        views = [one[10:], one.view(10, 100)]
        assert meter.live == 4000
        two = one + 1
        assert meter.live == 8000
        del one, views
        assert meter.live == 4000
        del two
    assert meter.live == 0
    assert meter.peak == 8000


# -- ranks of one machine --------------------------------------------------------------------------

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
