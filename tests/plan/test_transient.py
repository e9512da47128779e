"""What a step is said to hold for a moment, without torch, is what it is measured to hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from farspan.engine.meter import PeakMeter
from farspan.engine.step import Step
from farspan.plan.build import build_evaluation, build_program
from farspan.plan.describe import model_spec
from farspan.plan.families import architecture_from
from farspan.plan.program import Program
from farspan.plan.strategies import STRATEGIES, strategy
from farspan.plan.transient import Walk, assumed, transient_bytes
from farspan.spec import RunSpec, Schedule, Tier

INDEX = 8  # bytes of a token's target or position
# Of the Llama family every byte is accounted for, numbers of a single element included but for
# some tens of bytes; elsewhere tiny vectors beside the tensors are not.
EXACT, CLOSE = 1e-4, 2e-3

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 1024,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 1024}
DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 90},
    "gpt2": {**GPT2, **DROPOUT},
    "gemma2": {"sliding_window": 90},
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 90},
}


def make(name: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def measured(step: Step, batch: int, tokens: int) -> int:
    """Peak bytes of new tensors in one step, both tiers."""
    ids = torch.arange(tokens).repeat(batch, 1) % step.model_spec.vocab
    step.boundary.model.zero_grad(set_to_none=True)
    step.release()
    with PeakMeter(torch.device("cpu")) as meter:
        step(ids, ids)
    step.release()
    return meter.peak


def predicted(step: Step, batch: int, tokens: int) -> int:
    program = step.program(batch, tokens)
    found = Walk(program, architecture_from(step.boundary.model.config)).run()
    inputs = INDEX * (batch * tokens + tokens)  # what the step itself makes of them
    return sum(program.arena_bytes.values()) + inputs + found.bytes


def agree(step: Step, batch: int, tokens: int, limit: float) -> None:
    assert predicted(step, batch, tokens) == pytest.approx(measured(step, batch, tokens), rel=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_predicted(name: str, dtype: torch.dtype) -> None:
    """At two lengths, one of them ragged, and two batches."""
    model = make("llama", dtype)
    for batch, tokens in ((1, 256), (2, 150)):
        agree(Step(model, strategy(name, 3, tokens)), batch, tokens, EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", OTHERS)
def test_every_family_is_predicted(family: str, dtype: torch.dtype) -> None:
    model = make(family, dtype, **OTHERS[family])
    for name in ("oomb", "grouped"):
        agree(Step(model, strategy(name, 3, 230)), 1, 230, CLOSE)


BASE = Schedule(chunk=64, kv_block=48, head_tokens=40)
SCHEDULES = {
    "kept on the device": replace(BASE, attention_kept=1.0, attention=Tier.DEVICE),
    "open": replace(BASE, groups=2, attention_open=True, layer_checkpoint=True),
    "kept graphs": replace(BASE, groups=(2, 1), activations_kept=0.5, activations=Tier.DEVICE),
    "kept graphs and attention": replace(
        BASE, groups=3, activations_kept=0.6, attention_kept=0.3, kv_kept=True
    ),
    "streamed": replace(BASE, groups=3, kv=Tier.HOST, kv_block=100),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_way_to_run_a_cell_is_predicted(name: str) -> None:
    agree(Step(make("llama", torch.bfloat16), SCHEDULES[name]), 2, 250, EXACT)


def test_a_frozen_model_has_no_weight_gradients() -> None:
    model = make("llama", torch.float32)
    program = Step(model, BASE).program(1, 200)
    architecture = architecture_from(model.config)
    full = Walk(program, architecture).run()
    adapted = Walk(program, replace(architecture, adapter_rank=2)).run()
    assert 0 < adapted.gradients < full.gradients / 5
    assert adapted.bytes < full.bytes


def test_evaluation_has_no_gradients() -> None:
    model = make("llama", torch.float32)
    architecture = architecture_from(model.config)
    program = build_evaluation(model_spec(architecture, "float32"), RunSpec(1, 200), BASE)
    step = build_program(program.model, program.run, BASE)
    assert Walk(program, architecture).run().bytes < Walk(step, architecture).run().bytes / 2


def test_it_does_not_grow_with_the_sequence() -> None:
    """Beyond one full block of earlier keys; and many chunks are walked with few cells."""
    architecture = architecture_from(make("llama", torch.bfloat16).config)
    model = model_spec(architecture)
    schedule = replace(BASE, kv_block=128, groups=2)
    walks = [Walk(_program(model, tokens, schedule), architecture) for tokens in (1024, 64 * 200)]
    short, long = (walk.run() for walk in walks)
    assert short == long
    assert len(walks[1].cells.found) < 40


def _program(model: Any, tokens: int, schedule: Schedule) -> Program:
    return build_program(model, RunSpec(1, tokens), schedule)


def test_wide_gradients_need_no_accumulators() -> None:
    """And shared ones are smaller."""
    architecture = architecture_from(make("llama", torch.bfloat16).config)
    program = _program(model_spec(architecture), 200, BASE)
    narrow, wide = Walk(program, architecture), Walk(program, architecture, gradient_bytes=4)
    shared = Walk(program, architecture, ranks=4).run()
    assert wide.run().accumulators == 0
    assert wide.run().gradients == 2 * narrow.run().gradients
    assert shared.gradients < narrow.run().gradients / 3
    assert shared.bytes < narrow.run().bytes


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_without_an_architecture_one_is_assumed_that_saves_as_much(element_bytes: int) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    model = make("qwen2", dtype)
    program = Step(model, BASE).program(1, 200)
    found = transient_bytes(program, architecture_from(model.config))
    made = assumed(program.model)
    assert made.blocks[0].feed_forward.width == pytest.approx(SIZES["intermediate_size"], rel=0.05)
    assert transient_bytes(program, None) == pytest.approx(found, rel=0.05)
