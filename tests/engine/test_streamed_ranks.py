"""Weights and gradients in main memory on several ranks: the bits of ranks that have them on their
devices, and autograd's gradients to 1e-12."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from farspan.distributed.context import ParallelContext
from farspan.engine.parallelize import parallelize, sharded_parameters
from farspan.engine.step import Step
from farspan.engine.streamed_weights import StreamedWeights
from farspan.hf.stages import CausalLMStages
from farspan.host import TooLarge
from farspan.program.builder import build_evaluation, build_program
from farspan.program.dependencies import waits
from farspan.program.layout import Layout, Rank
from farspan.spec import RunSpec, Schedule, Tier, UnsupportedError
from tests.engine.checks import Data, draw
from tests.engine.test_ranks import SCHEDULES, rows_of, words
from tests.engine.test_streamed_weights import counted
from tests.grids import crossed, exhaustive
from tests.oracles.check import check_program
from tests.oracles.check_order import check_order
from tests.ranks import run_ranks
from tests.zoo import make_model

CPU = torch.device("cpu")
UPDATES, BATCHES, CLIP, LR = 2, 2, 0.5, 0.5
HEADS = {"num_key_value_heads": 4}


@dataclass(frozen=True)
class Case:
    """A model by a schedule; `dealt`: parallelize is called first, as a run does."""

    schedule: Schedule
    dtype: torch.dtype = torch.float32
    family: str = "qwen2"
    dealt: bool = False
    frozen: bool = False
    wide: bool = False  # gradients are


def streamed(schedule: Schedule) -> Schedule:
    return replace(schedule, weights=Tier.HOST)


def batches(update: int) -> list[Data]:
    """Of lengths that differ, so that arenas grow and chunks are ragged."""
    drawn = enumerate((17, 25, 9)[update : update + BATCHES])
    return [draw(n, batch=4, documents=3, seed=10 * update + place) for place, n in drawn]


def trained(case: Case, ranks: ParallelContext, schedule: Schedule) -> list[tuple[str, Any]]:
    """Losses, gradients and weights of some updates, each of several batches, clipped."""
    model: Any = make_model(case.family, case.dtype, **HEADS)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(not case.frozen or number % 3 != 0)
        if case.wide:
            parameter.grad_dtype = torch.float32
    team: Any = parallelize(model, schedule, ranks) if case.dealt else ranks
    step = Step(model, schedule, ranks=team, poison=True)
    pieces = sharded_parameters(team) if case.dealt else None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    parameters = trained if pieces is None else pieces.trained
    for parameter in parameters.values() if case.wide else ():
        parameter.grad_dtype = torch.float32
    found: list[tuple[str, Any]] = []
    for update in range(UPDATES):
        for place, data in enumerate(batches(update)):
            own = rows_of(ranks, data)
            found.append((f"loss {update}.{place}", step(*own)))
        if pieces is not None:
            pieces.take()
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        norm = nn.utils.get_total_norm(gradients.values()) if pieces is None else pieces.norm()
        found += [("norm", norm), *((f"{n}.grad", g.clone()) for n, g in gradients.items())]
        nn.utils.clip_grads_with_norm_(parameters.values(), CLIP, norm)
        for name, gradient in gradients.items():
            parameters[name].data.sub_(gradient, alpha=LR)
            parameters[name].grad = None
        if pieces is not None:
            pieces.clear()
        found.append((f"evaluation {update}", step.evaluate(*own)))
    return found + [(n, p.detach().clone()) for n, p in parameters.items()]


def unlike(layout: Layout, cases: list[Case]) -> list[str]:
    """On each rank: what differs."""
    ranks, wrong = ParallelContext(layout, CPU), []
    for case in cases:
        expected = trained(case, ranks, case.schedule)
        found = trained(case, ranks, streamed(case.schedule))
        assert [name for name, _ in found] == [name for name, _ in expected]
        wrong += [
            f"{case}: {name}"
            for (name, ours), (_, theirs) in zip(found, expected, strict=True)
            if not torch.equal(ours, theirs)
        ]
    return wrong


FEW = [Case(SCHEDULES["groups"]), Case(SCHEDULES["kept"], torch.bfloat16, wide=True)]
MORE = [
    *FEW,
    Case(SCHEDULES["host"], torch.bfloat16, frozen=True),
    Case(SCHEDULES["layers"], family="gemma3_text"),  # tied embeddings
]
DEALT, MORE_DEALT = ([replace(case, dealt=True) for case in cases] for cases in (FEW, MORE))
WHOLE: dict[str, Any] = {"fsdp": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (Layout(pipeline=2, **WHOLE), [FEW[0], DEALT[1]]),
        exhaustive(Layout(pipeline=2, **WHOLE), [*MORE, *MORE_DEALT]),
        (Layout(ulysses=2), [FEW[1], DEALT[0]]),  # the latter of shards
        exhaustive(Layout(ulysses=2), MORE),
        exhaustive(Layout(ulysses=2, shards=2), FEW),
        exhaustive(Layout(data=2), [MORE[2]]),
        exhaustive(Layout(data=2), MORE),
        exhaustive(Layout(pipeline=2, ulysses=2, **WHOLE), [*FEW, *DEALT]),
        exhaustive(Layout(data=2), MORE_DEALT),
        exhaustive(Layout(pipeline=2, data=2), MORE_DEALT),
        exhaustive(Layout(tensor=2), MORE_DEALT[2:3]),
    ],
    ids=words,
)
def test_ranks_train_to_the_bits_of_resident_weights(layout: Layout, cases: list[Case]) -> None:
    wrong = run_ranks(layout.devices(), unlike, layout, cases)
    assert not any(wrong), "\n".join(line for rank in wrong for line in rank)


def refused_elsewhere() -> list[str]:
    said, ranks, here = [], ParallelContext(Layout(), CPU), SCHEDULES["layers"]
    for dealt, wanted in ((here, streamed(here)), (streamed(here), here)):
        model = make_model("qwen2")
        sharded_model = parallelize(model, dealt, ranks)
        with pytest.raises(UnsupportedError) as refused:
            Step(model, wanted, ranks=sharded_model)
        said.append(str(refused.value))
    return said


def test_weights_are_where_the_model_was_sharded() -> None:
    (said,) = run_ranks(1, refused_elsewhere)
    for text, (there, wanted) in zip(said, (("device", "host"), ("host", "device")), strict=True):
        wanted = f"sharded with them on the {there}, not on the {wanted}; call parallelize"
        assert text.startswith("weights: the model was ")
        assert wanted in text


# -- programs -----------------------------------------------------------------------------------

LAYOUTS = [Layout(ulysses=2, **WHOLE), Layout(pipeline=3, **WHOLE), Layout(data=2, **WHOLE)]


@pytest.mark.parametrize(("name", "layout"), crossed(SCHEDULES, LAYOUTS), ids=str)
def test_programs_are_whole_and_nothing_races(layout: Layout, name: str) -> None:
    schedule = streamed(replace(SCHEDULES[name], groups=1))
    for number in range(layout.devices()):
        for build in (build_program, build_evaluation):
            program = build(counted(4), RunSpec(1, 29), schedule, Rank(layout, number))
            check_program(program)
            check_order(program, waits(program))


def too_large(layout: Layout) -> str:
    """What a rank says that has memory for its own weights and half of another's."""
    model: Any = make_model("qwen2", torch.float32)
    size = sum(p.nbytes for p in model.parameters())
    ranks = ParallelContext(layout, CPU)
    has = patch("farspan.engine.tiers.available_host_bytes", lambda: size + size // 2)
    with has, pytest.raises(TooLarge) as told:  # weights are counted where they leave a device
        StreamedWeights(CausalLMStages(model, torch.device("meta")), ranks)
    return str(told.value)


def test_ranks_of_a_machine_add_up_their_weights() -> None:
    for said in run_ranks(2, too_large, Layout(data=2, fsdp=False)):
        assert "moving the model's weights to main memory, on 2 ranks of a machine, needs" in said
