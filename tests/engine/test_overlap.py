"""Copies beside the computation: the same bits, whatever happens when, and each hazard is real."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from farspan.engine.step import Step
from farspan.plan.check_order import check_order
from farspan.plan.contents import ProgramError
from farspan.plan.strategies import STRATEGIES, strategy
from farspan.plan.waits import EVERY, Hazard, waits
from farspan.spec import Schedule, Tier
from tests.engine.checks import Data, Outcome, assert_same_bits, draw, gradients
from tests.transfer.lanes import Manner, Recorder, Replay
from tests.zoo import LAYERS, shared_model

DATA = draw(53, batch=2, documents=4)
BASE = Schedule(chunk=11, groups=2, kv_block=7)
SCHEDULES = {
    **{name: replace(strategy(name, LAYERS, 53), kv_block=7) for name in STRATEGIES},
    "unequal": replace(BASE, groups=(1, 2, 1), attention_kept=1.0),
    "streamed": replace(BASE, kv=Tier.HOST),
    "streamed, kept": replace(BASE, kv=Tier.HOST, kv_kept=True, groups=1),
    "streamed, alpha": replace(BASE, kv=Tier.HOST, activations_kept=0.6, attention_kept=0.3),
    "kv home": replace(BASE, kv_kept=True),
    "open": replace(BASE, attention_open=True, groups=(3, 1)),
    "alpha": replace(BASE, activations_kept=1.0, attention_kept=0.5, groups=1),
    "layer by layer": replace(BASE, layer_checkpoint=True, attention_kept=1.0, groups=4),
}
MANNERS = [(manner, 0) for manner in Manner] + [(Manner.RANDOM, seed) for seed in (1, 2)]


def two_steps(model: PreTrainedModel, step: Step, data: Data) -> Outcome:
    """Losses and summed gradients of two steps on the same data."""
    model.zero_grad(set_to_none=True)
    losses = torch.stack([step(*data), step(*data)])
    return Outcome(losses, gradients(model))


def recorded(step: Step, data: Data, dropped: Hazard | None = None) -> Recorder:
    """What the lanes are told in a step without the waits of one hazard."""
    step.copies = recorder = Recorder(dropped)
    if dropped is not None:
        program = step.program(*data.input_ids.shape)
        step._orders = [(program, waits(program, EVERY - {dropped}))]
    step(*data)
    return recorder


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_bits_in_any_order(name: str) -> None:
    model = shared_model("qwen2", torch.float32)
    expected = two_steps(model, Step(model, SCHEDULES[name], poison=True), DATA)
    step = Step(model, SCHEDULES[name], poison=True)
    told = recorded(step, DATA).told
    for manner, seed in MANNERS:
        step.copies = Replay(told, manner, seed)
        assert_same_bits(two_steps(model, step, DATA), expected)


def test_windows_and_sinks() -> None:
    """Cells whose window ends before their chunk begins ask for no block."""
    model, data = shared_model("gpt_oss", torch.float32), draw(53, batch=2)
    expected = two_steps(model, Step(model, SCHEDULES["streamed"], poison=True), data)
    step = Step(model, SCHEDULES["streamed"], poison=True)
    told = recorded(step, data).told
    for manner, seed in MANNERS:
        step.copies = Replay(told, manner, seed)
        assert_same_bits(two_steps(model, step, data), expected)


def test_a_single_chunk_on_host() -> None:
    model, data = shared_model("qwen2", torch.float32), draw(9)
    schedule = replace(BASE, kv=Tier.HOST, attention_kept=1.0, activations_kept=1.0)
    expected = two_steps(model, Step(model, schedule, poison=True), data)
    step = Step(model, schedule, poison=True)
    told = recorded(step, data).told
    for manner, seed in MANNERS:
        step.copies = Replay(told, manner, seed)
        assert_same_bits(two_steps(model, step, data), expected)


def survives(name: str, hazard: Hazard) -> list[str]:
    """Manners in which a step gives the right bits without the waits of a hazard."""
    model = shared_model("qwen2", torch.float32)
    expected = two_steps(model, Step(model, SCHEDULES[name], poison=True), DATA)
    step = Step(model, SCHEDULES[name], poison=True)
    told = recorded(step, DATA, hazard).told
    right = []
    for manner, seed in MANNERS:
        step.copies = Replay(told, manner, seed, hazard)
        try:
            assert_same_bits(two_steps(model, step, DATA), expected)
        except AssertionError:
            continue
        right.append(f"{manner} {seed}")
    return right


if __name__ == "__main__":
    for hazard in Hazard:
        for name in SCHEDULES:
            model = shared_model("qwen2", torch.float32)
            program = Step(model, SCHEDULES[name]).program(2, 53)
            try:
                check_order(program, waits(program, EVERY - {hazard}))
                found = "in order"
            except ProgramError:
                found = "race"
            right = survives(name, hazard)
            print(hazard, name, found, len(right), "of", len(MANNERS), "right", flush=True)
