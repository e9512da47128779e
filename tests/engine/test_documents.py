"""Packed documents give what each gives alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farspan.engine.loss import trained_token_count
from farspan.engine.reference import gradients_of, reference_loss
from farspan.engine.step import Step
from farspan.spec import Schedule, Tier
from tests.engine.checks import (
    Data,
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    run_step,
)
from tests.grids import crossed, examples
from tests.numerics import EXACT, relative_error
from tests.zoo import shared_model

# Spanning three chunks of 16, one token, several in a chunk, one that ends with the chunk.
LENGTHS = (37, 1, 2, 3, 21)
OTHERS = (1, 1, 30, 16, 16)
SCHEDULES = {
    "device": Schedule(
        chunk=16, groups=2, attention_save_fraction=0.5, activation_save_fraction=0.3
    ),
    "host": Schedule(chunk=16, groups=(1, 3), kv=Tier.HOST, kv_block=12, layer_checkpoint=True),
    "whole": Schedule(chunk=64, groups=1, kv_block=10),
}


def pack(*rows: tuple[int, ...], seed: int = 0) -> Data:
    """Rows of documents of these lengths; the rows must be equally long."""
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    plain = draw(len(ids[0]), batch=len(rows), seed=seed)
    return Data(plain.input_ids, plain.labels, torch.stack(ids))


def alone(data: Data) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of every document, each [1, length]."""
    assert data.document_ids is not None
    found = []
    for row, marks in enumerate(data.document_ids):
        for mark in marks.unique().tolist():
            chosen = marks == mark
            found.append((data.input_ids[row, chosen][None], data.labels[row, chosen][None]))
    return found


def sum_of_documents(model: nn.Module, data: Data) -> Outcome:
    """Plain autograd of every document on its own, weighted by its trained tokens."""
    pieces = alone(data)
    counts = [trained_token_count(labels) for _, labels in pieces]
    loss = torch.zeros((), dtype=torch.float64)
    total: dict[str, Tensor] = {}
    for (ids, labels), count in zip(pieces, counts, strict=True):
        share = reference_loss(model, ids, labels) * (count / max(sum(counts), 1))
        loss += share.detach()
        for name, gradient in gradients_of(model, share).items():
            total[name] = total.get(name, 0) + gradient
    return Outcome(loss, total)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(["gemma3_text", "gpt_oss", "gpt2"], SCHEDULES),
)
@pytest.mark.usefixtures("float64_throughout")
def test_documents_give_what_they_give_alone(name: str, kind: str) -> None:
    """Rotary and learned positions, full and sliding attention, sinks; rows cut differently."""
    model, schedule = shared_model(name), SCHEDULES[kind]
    data = pack(LENGTHS, OTHERS)
    expected = sum_of_documents(model, data)
    assert_close(run_step(model, schedule, data), expected)
    found = Step(model, schedule, poison=True).evaluate(*data)
    assert relative_error(found, expected.loss) <= EXACT


@settings(max_examples=examples(16))
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.sampled_from([3, 8, 16, 300]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 40),
)
def test_any_packing(lengths: list[int], chunk: int, groups: int, kv_block: int) -> None:
    model = shared_model("mistral")
    data = pack(tuple(lengths), tuple(reversed(lengths)))
    schedule = Schedule(chunk=chunk, groups=groups, kv_block=kv_block, attention_save_fraction=0.5)
    assert_close(run_step(model, schedule, data), sum_of_documents(model, data))


def test_one_document_is_no_document() -> None:
    model, data = shared_model("qwen2"), draw(53, batch=2)
    marked = Data(data.input_ids, data.labels, torch.full_like(data.input_ids, 7))
    schedule = SCHEDULES["device"]
    assert_same_bits(run_step(model, schedule, marked), run_step(model, schedule, data))


def test_documents_of_one_token_train_nothing() -> None:
    model = shared_model("qwen2")
    found = run_step(model, SCHEDULES["device"], pack((1,) * 20))
    assert found.loss == 0
    assert not any(bool(g.any()) for g in found.gradients.values())


def test_a_document_does_not_see_another() -> None:
    """Other tokens in the first document leave the second one's share of the loss alone."""
    model, step = shared_model("qwen2"), Step(shared_model("qwen2"), SCHEDULES["device"])
    assert model is step.stages.model
    data = pack((20, 33))
    labels = data.labels.clone()
    labels[:, :20] = -100
    other = data.input_ids.clone()
    other[:, :20] = other[:, :20].flip(1)
    assert data.document_ids is not None
    losses = [step.evaluate(ids, labels, data.document_ids) for ids in (data.input_ids, other)]
    assert torch.equal(*losses)
    without = [step.evaluate(ids, labels) for ids in (data.input_ids, other)]
    assert not torch.equal(*without)
