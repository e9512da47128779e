"""Plans of losses that are computed from log-probabilities: what the engine takes and does."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan import losses
from farspan.ask import Request
from farspan.data.config import LossConfig
from farspan.engine.memory import PeakMemory
from farspan.engine.step import Step
from farspan.planner import search as best_first
from farspan.planner.evaluate import evaluate, programs, size
from farspan.planner.feasibility import loss_seconds, plan_of
from farspan.planner.plans import best_plan
from farspan.planner.remedies import remedies_of
from farspan.planner.request import DISTILLED, Optimizer, Plan, Question, loss_of
from farspan.planner.search import TOLERANCE, search
from farspan.program.builder import build_evaluation
from farspan.program.work import work_of
from farspan.report.plan import loss_json, loss_words, plan_text
from farspan.spec import (
    LossKind,
    LossRow,
    Objective,
    Reference,
    RunSpec,
    Schedule,
    Sparse,
    Tier,
    UnsupportedError,
)
from farspan.train.yaml_config import describe_type
from tests.grids import part_of
from tests.made_up import add_member
from tests.planner.machines import slow_machine
from tests.planner.test_best_first import SPACE, question, schedules
from tests.planner.test_walk import BASE, SCHEDULES, make, profile_for

TOKENS = 500
MODEL = {"tie_word_embeddings": True}
DPO_STORED = Objective(LossKind.DPO, Reference.STORED)
DPO_FROZEN = Objective(LossKind.DPO, Reference.FROZEN)
KTO_FROZEN = Objective(LossKind.KTO, Reference.FROZEN)
LOSSES = [
    Objective(LossKind.ORPO),
    DPO_STORED,
    DPO_FROZEN,
    Objective(LossKind.DISTILL, Reference.STORED, ids=8),
]


def asked_of(step: Step, loss: Objective) -> Question:
    """Gradients alone, in float32, on a machine where both tiers are apart."""
    profile = profile_for(step)
    return Question(
        profile.spec,
        RunSpec(1, TOKENS),
        slow_machine(),
        optimizer=Optimizer.NONE,
        dtype=profile.variant.dtype,
        profile=profile,
        loss=loss,
        weights=step.schedule.weights,
    )


def planned(question: Question, schedule: Schedule) -> int:
    """Bytes of both tiers that a first step makes."""
    sized = size(question, schedule)
    there = {"weights", "reference", "reserve", "pages"}
    parts = (*sized.device.parts.items(), *sized.host.parts.items())
    return sum(size for name, size in parts if name not in there)


def loss_of_pair(loss: Objective, logprobs: Tensor, reference: Tensor | None) -> Tensor:
    if loss.kind is LossKind.DISTILL:
        assert reference is not None
        return losses.distillation(logprobs, reference).mean()
    answers = [of.split(TOKENS // 2, 1) for of in (logprobs, reference) if of is not None]
    summed = [tuple(part.sum(1) for part in of) for of in answers]
    if reference is None:
        chosen, rejected = summed[0]
        return losses.orpo((chosen / TOKENS, rejected / TOKENS)).mean()
    return losses.dpo(*summed).mean()


def train(step: Step, loss: Objective, reference: Step | None = None) -> None:
    """A pair of answers in one sequence."""
    ids = torch.arange(TOKENS)[None] % 300
    answers = (torch.arange(TOKENS)[None] >= TOKENS // 2).long()
    known, labels = None, None
    if reference is not None:
        with torch.no_grad():
            known = reference.logprobs(ids, document_ids=answers)
    elif loss.reference is Reference.STORED:
        known = torch.full((1, TOKENS, loss.ids), -3.0)
        known = known[..., 0] if loss.ids == 1 else known
    if loss.ids > 1:
        labels = torch.zeros(1, TOKENS, loss.ids, dtype=torch.long)
    logprobs = step.logprobs(ids, labels, answers)
    loss_of_pair(loss, logprobs, known).backward()


CUT = {name: of for name, of in SCHEDULES.items() if name != "tiles of one token"}
WEIGHTS = replace(BASE, groups=1, weights=Tier.HOST)


TURNS = zip(LOSSES, list(CUT)[::2], [torch.float32, torch.bfloat16] * 2, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "name", "dtype"),
    part_of(product(LOSSES, CUT, [torch.float32, torch.bfloat16]), *TURNS),
    ids=str,
)
def test_the_engine_takes_what_is_planned(loss: Objective, name: str, dtype: torch.dtype) -> None:
    """With the values and all that the loss is computed from, which a tenth of a percent tells."""
    agrees(loss, CUT[name], dtype)


def test_the_engine_takes_what_is_planned_of_weights_in_main_memory() -> None:
    agrees(DPO_FROZEN, WEIGHTS, torch.float32)


def agrees(loss: Objective, schedule: Schedule, dtype: torch.dtype) -> None:
    step = Step(make("qwen2", dtype, **MODEL), schedule)
    reference = None
    if loss.evaluates:
        reference = Step(make("qwen2", dtype, **MODEL), schedule, memory=step.memory)
    with PeakMemory(torch.device("cpu")) as meter:
        train(step, loss, reference)
    found = planned(asked_of(step, loss), schedule)
    # Of several ids, what a piece of the head gathers of each is not planned: 16 bytes.
    beside = 16 * schedule.loss_chunk_size * loss.ids * (loss.ids > 1)
    assert abs(found - meter.peak) <= 0.001 * meter.peak + beside


@pytest.mark.parametrize("groups", [1, 2])
def test_the_engine_does_the_work_that_is_planned(groups: int) -> None:
    """Cell by cell: its program is the planned one, of the model as the step describes it."""
    done = []
    step = Step(
        make("qwen2", torch.float32, **MODEL),
        replace(BASE, groups=groups),
        progress=lambda progress: done.append(progress.work_done),
    )
    train(step, DPO_STORED)
    asked = replace(asked_of(step, DPO_STORED), model=step.model_spec)
    ((_, program),) = programs(asked, step.schedule)
    assert program.instructions == step.prepared(1, TOKENS, is_cut=True).program.instructions
    assert done[-1] == pytest.approx(sum(work_of(program, i) for i in program.instructions))
    one_pass = step.program(1, TOKENS)
    assert done[-1] > sum(work_of(one_pass, i) for i in one_pass.instructions)


def test_a_frozen_reference_lies_where_the_weights_do() -> None:
    for place in Tier:
        asked = Request(
            "Qwen2.5-0.5B",
            "64K",
            "h100",
            optimizer="host",
            weights=place,
            loss="dpo",
            reference="frozen",
        ).question()
        sized, bare = (
            size(of, Schedule(chunk=8192, groups=4, weights=place))
            for of in (asked, replace(asked, loss=DPO_STORED))
        )
        of, other = (
            (sized.device, sized.host) if place is Tier.DEVICE else (sized.host, sized.device)
        )
        assert of.parts["reference"] == of.parts["weights"] > 0
        assert "reference" not in other.parts
        more = sized.device.total + sized.host.total - bare.device.total - bare.host.total
        assert more == pytest.approx(of.parts["weights"], abs=4096)  # by whole pages


def test_a_step_takes_the_forward_of_its_reference_longer() -> None:
    schedule = Schedule(chunk=32, groups=(1, 2))
    for overlap in (False, True):
        asked = question(2**40, 2**40, overlap=overlap, loss=DPO_STORED)
        alone = evaluate(asked, "grouped", schedule).seconds
        both = evaluate(replace(asked, loss=DPO_FROZEN), "grouped", schedule).seconds
        what = asked.model, asked.run, schedule
        forward = build_evaluation(*what)
        one_pass = evaluate(replace(asked, loss=Objective()), "grouped", schedule).seconds
        assert both.total > alone.total > one_pass.total
        cells = sum(type(i).__name__ == "Forward" for i in forward.instructions)
        issued = cells * asked.machine.overhead
        assert both.host - alone.host == pytest.approx(issued)


def test_kto_takes_the_forwards_of_mismatched_answers_longer() -> None:
    """The policy's and, unless they are stored, those of the reference."""
    schedule = Schedule(chunk=32, groups=(1, 2))

    def seconds(*loss: Any) -> float:
        asked = question(2**40, 2**40, loss=Objective(*loss))
        return evaluate(asked, "grouped", schedule).seconds.total

    stored = seconds(LossKind.DPO, Reference.STORED)
    forward = seconds(LossKind.DPO, Reference.FROZEN) - stored
    assert seconds(LossKind.KTO, Reference.STORED) == pytest.approx(stored + forward)
    assert seconds(LossKind.KTO, Reference.FROZEN) == pytest.approx(stored + 3 * forward)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loss", "overlap"),
    part_of(product([DPO_STORED, DPO_FROZEN, KTO_FROZEN], [False, True]), (DPO_FROZEN, True)),
)
def test_nothing_that_the_search_looked_at_is_better(
    loss: Objective, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own pricing, and of what it did not look at nothing is: all were tried."""
    seen: list[Plan] = []
    real = best_first.simulated

    def simulated(*of: Any) -> Plan | None:
        plan = real(*of)
        seen.extend([plan] if plan is not None else [])
        return plan

    monkeypatch.setattr(best_first, "simulated", simulated)
    roomy = question(2**40, 2**40, overlap=overlap, loss=loss)
    every = [evaluate(roomy, "grouped", schedule) for schedule in schedules(roomy, SPACE)]
    device, host = (sorted(of)[len(of) // 3] for of in zip(*map(taken, every), strict=True))
    asked = question(device, host, overlap=overlap, loss=loss)
    outcome = search(asked, SPACE, 60.0, tolerance=TOLERANCE)
    fitting = [plan for plan in every if plan.device.total <= device and plan.host.total <= host]
    assert outcome.best is not None
    assert outcome.fastest is not None
    assert 0 < len(seen) < len(every) / 2
    least = min(plan.seconds.total for plan in fitting)
    assert min(plan.seconds.total for plan in seen) == pytest.approx(least, rel=1e-9)
    assert outcome.fastest.seconds.total == pytest.approx(least, rel=1e-9)
    assert outcome.best.seconds.total <= least * (1 + TOLERANCE) * (1 + 1e-9)


def taken(plan: Plan) -> tuple[int, int]:
    return plan.device.total, plan.host.total


def test_the_schedule_is_one_for_the_loss() -> None:
    """One chunk of one group would run its last chunk, which is all, forward twice."""
    asked = Request("Qwen2.5-0.5B", "16K", "h100", loss="orpo").question()
    one, cut, whole = loss_seconds(best_plan(asked, ["grouped"], 0.3))
    assert cut == whole
    worst = plan_of(asked, "grouped", Schedule(chunk=16384, groups=24))
    assert worst.seconds.total / plan_of(
        replace(asked, loss=Objective()), "grouped", worst.schedule
    ).seconds.total == pytest.approx(1.31, abs=0.06)
    assert cut / one < 1.1


def test_the_other_losses_leave_the_default_alone() -> None:
    given: dict[str, Any] = {"config": "Qwen2.5-0.5B", "context": "64K", "machine": "h100"}
    asked = Request(**given, loss="sft").question()
    assert asked == Request(**given).question()
    plan = plan_of(asked, "grouped", Schedule(chunk=16384, groups=24))
    assert not list(loss_words(plan))
    assert loss_json(plan) == {}


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({}, Objective()),
        ({"loss": "dpo", "lora": 8}, DPO_STORED),
        ({"loss": "dpo", "reference": "frozen"}, DPO_FROZEN),
        (
            {"loss": "kto", "reference": "adapters-off", "lora": 8},
            Objective(LossKind.KTO, Reference.ADAPTERS_OFF),
        ),
        ({"loss": "orpo", "lora": 8}, Objective(LossKind.ORPO)),
        ({"loss": "grpo"}, Objective(LossKind.GRPO)),
        ({"loss": "grpo", "reference": "frozen"}, Objective(LossKind.GRPO, Reference.FROZEN)),
        ({"loss": "distill"}, Objective(LossKind.DISTILL, Reference.STORED, DISTILLED)),
    ],
)
def test_losses_by_name(options: dict[str, Any], loss: Objective) -> None:
    assert Request("Qwen2.5-0.5B", "64K", "h100", **options).question().loss == loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ppo"}, "loss: expected one of sft, dpo, ipo, orpo, kto, grpo, distill, got "),
        (
            {"reference": "frozen"},
            "reference: loss sft expects none, got 'frozen'; leave it out",
        ),
        (
            {"loss": "orpo", "sparse": Sparse()},
            "sparse: not supported with loss orpo; leave one out",
        ),
        (
            {"loss": "dpo", "reference": "adapters-off"},
            "reference: loss dpo expects stored or frozen, got 'adapters-off'; adapters-off "
            "needs adapters: give lora, their rank, such as 16",
        ),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        Request("Qwen2.5-0.5B", "64K", "h100", **options).question()
    assert str(refused.value).startswith(message)


def test_a_reference_that_is_stored_is_offered_where_a_copy_does_not_fit() -> None:
    asked = Request("Qwen2.5-0.5B", "4K", "h100", loss="dpo", reference="frozen").question()
    offered = [remedy.options for remedy in remedies_of(asked, lambda of: not of.loss.evaluates)]
    assert "--reference stored" in offered
    teaches = replace(asked, loss=Objective(LossKind.DISTILL, Reference.FROZEN, 8))
    assert not remedies_of(teaches, lambda of: not of.loss.evaluates, tries=20)


def test_ids_are_of_distillation() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^ids: expected a whole number above 0, only with loss"
    ):
        loss_of("dpo", None, adapters=False, ids=3)
    assert loss_of("distill", None, adapters=False, ids=5).ids == 5


def test_a_new_kind_of_loss_is_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reference, unless its row has one; and it takes the keys of its row."""
    plain = add_member(monkeypatch, LossKind, "plain", LossRow())
    paired = add_member(
        monkeypatch, LossKind, "both", LossRow((Reference.FROZEN,), ("beta", "reference"), "both")
    )
    asked = Request("Qwen2.5-0.5B", "64K", "h100", loss="plain")
    assert asked.question().loss == Objective(plain)
    text = plan_text(best_plan(asked.question(), ["memo"]))
    assert "loss plain: a step takes" in text
    assert "before the backward, no reference" in text
    with pytest.raises(UnsupportedError, match="loss plain expects none, got 'stored'; leave it"):
        Request("Qwen2.5-0.5B", "64K", "h100", loss="plain", reference="stored").question()
    with pytest.raises(UnsupportedError, match="beta: kind plain does not use it"):
        LossConfig(plain, beta=0.2)
    assert LossConfig(plain).planned() == Objective(plain)
    assert LossConfig(paired, beta=0.2).planned() == Objective(paired, Reference.FROZEN)
    assert "plain" in describe_type(LossKind)


PLACES: list[tuple[dict[str, Any], str]] = [
    (
        {"lora": 8, "reference": "adapters-off"},
        "the forward of its reference, the same weights with adapters off",
    ),
    (
        {"optimizer": "host", "weights": "host", "reference": "frozen"},
        "the forward of its reference, a frozen copy of the weights in main memory",
    ),
    ({}, "its reference is stored with the data"),
]


@pytest.mark.parametrize(("options", "words"), PLACES)
def test_a_plan_says_what_its_loss_costs_and_where_the_reference_is(
    options: dict[str, Any], words: str
) -> None:
    asked = Request("Qwen2.5-0.5B", "64K", "h100", loss="dpo", **options).question()
    plan = best_plan(asked, ["memo"])
    one, cut, whole = loss_seconds(plan)
    text = " ".join(plan_text(plan).split())
    assert f"loss dpo: a step takes {whole / one - 1:.1%} longer than one pass" in text
    assert words in text
    assert (whole > cut) is asked.loss.evaluates
    assert plan.to_json()["loss"] == "dpo"
    assert plan.to_json()["reference"] == asked.loss.reference
    assert loss_json(plan)["seconds_of_loss"]["with_reference"] == whole
