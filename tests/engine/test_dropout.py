"""Dropout and noise that a cell draws again: the gradients of plain autograd with the same masks,
by any schedule, in any layout."""

import copy
from dataclasses import replace
from functools import cache, partial, partialmethod
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from farspan.distributed.context import ParallelContext
from farspan.engine.profile import profiles_of_model
from farspan.engine.reference import gradients_of, reference_loss
from farspan.engine.step import Step
from farspan.hf import dropout
from farspan.hf.dropout import Draws, Numbers, TokenRange, dropped
from farspan.hf.probe import Float64Mode
from farspan.planner.walk import Walk
from farspan.profile.model import Variant
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import Kernels, Schedule, Tier, UnsupportedError
from tests.engine.checks import Data, Outcome, assert_close, draw, errors, gradients
from tests.engine.test_exact import schedules, shapes
from tests.engine.test_values import expected, loss_of
from tests.grids import examples, exhaustive, part_of
from tests.numerics import EXACT, relative_error
from tests.oracles.masks import Masked, add_noise, numbers, pieces_of, replace_dropouts
from tests.planner.test_walk import CLOSE, INDEX, SCHEDULES, measured
from tests.ranks import run_ranks
from tests.zoo import make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.is_gradient_checkpointing:FutureWarning",
        "ignore:fan_in_fan_out:UserWarning",
        "ignore:.torch.jit.script_method:DeprecationWarning",
    ),
]
CPU = torch.device("cpu")
LAYERS, TOKENS, SEED, P = 4, 45, 7, 0.3
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]  # of each kind of input one
MODULE = "model.layers.0.self_attn.q_proj.lora_dropout.default"


def adapted(family: str = "qwen2", p: float = P, targets: Any = TARGETS, **fields: Any) -> Any:
    """A causal LM with adapters that are not zero and drop, without its PeftModel."""
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=p, task_type="CAUSAL_LM")
    generator = torch.Generator().manual_seed(5)
    found: Any = get_peft_model(make_model(family, **fields), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(0.1 * noise)
    return found.get_base_model().train()


def oracle(model: nn.Module, data: Data, number: int = 0, alpha: float = 0.0) -> Outcome:
    """By plain autograd with the masks of the call of this number."""
    plain = replace_dropouts(copy.deepcopy(model), SEED, number)
    add_noise(plain, alpha, SEED, number)
    loss = reference_loss(plain, *data)
    return Outcome(loss.detach(), gradients_of(plain, loss))


def assert_exact(
    model: nn.Module, step: Step, data: Data, calls: int = 2, alpha: float = 0.0
) -> None:
    """Call after call, each with other masks."""
    losses = set()
    for _ in range(calls):
        wanted = oracle(model, data, step.drawn, alpha)
        model.zero_grad(set_to_none=True)
        assert_close(Outcome(step(*data), gradients(model)), wanted)
        losses.add(float(wanted.loss))
    assert len(losses) == calls
    model.zero_grad(set_to_none=True)


shared = cache(adapted)


@settings(max_examples=examples(25))
@given(schedules, shapes)
def test_any_schedule_is_exact(schedule: Schedule, data: Data) -> None:
    assert_exact(shared(), Step(shared(), schedule, poison=True, seed=SEED), data, calls=1)


@pytest.mark.parametrize(
    ("fraction", "tile"), part_of(product([0.0, 0.5], [1, 5, 16]), (0.0, 5), (0.5, 16))
)
def test_tiles_drop_what_chunks_do(tile: int, fraction: float) -> None:
    model, data = adapted(), draw(TOKENS, batch=2, documents=3)
    schedule = Schedule(
        chunk=16, groups=2, mlp_chunk_size=tile, activation_save_fraction=fraction, kv=Tier.HOST
    )
    assert_exact(model, Step(model, schedule, poison=True, seed=SEED), data)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        exhaustive("gemma3_text", TARGETS),
        ("qwen3_next", ["q_proj", "in_proj_qkvz", "out_proj", "in_proj_ba"]),
        exhaustive("falcon_h1", ["q_proj", "in_proj", "down_proj"]),
    ],
)
def test_every_kind_of_layer(family: str, targets: list[str]) -> None:
    """Windows, and recurrent layers, which run document by document."""
    model = adapted(family, targets=targets)
    schedule = Schedule(chunk=16, groups=(1, len(model.model.layers) - 1), kv=Tier.HOST)
    with Float64Mode():
        for documents in (0, 3):
            data = draw(TOKENS, batch=2, documents=documents)
            step = Step(model, schedule, poison=True, seed=SEED)
            if data.document_ids is not None and family != "gemma3_text":
                with patch.object(Masked, "pieces", pieces_of(data.document_ids)):
                    assert_exact(model, step, data, calls=1)
            else:
                assert_exact(model, step, data, calls=1)


@pytest.mark.parametrize("keeps", [True, False])
def test_logprobs_and_a_backward_that_comes_later(*, keeps: bool) -> None:
    model, data = adapted(), draw(TOKENS, batch=2, documents=3)
    step = Step(model, strategy("grouped", LAYERS, TOKENS), poison=True, seed=SEED)
    plain = replace_dropouts(copy.deepcopy(model), SEED, 0)
    wanted, _ = expected(plain, data)
    wanted_gradients = gradients_of(plain, loss_of(wanted))
    found = step.logprobs(*data)
    assert relative_error(found, wanted) < EXACT
    if not keeps:  # another call takes its memory, and the forward runs again
        with torch.no_grad():
            quiet = step.logprobs(*data)
        assert relative_error(quiet, expected(copy.deepcopy(model).eval(), data)[0]) < EXACT
    assert step.drawn == 1
    loss_of(found).backward()
    assert max(errors(gradients(model), wanted_gradients).values()) < EXACT


def test_noise_and_dropout_together() -> None:
    model, data = adapted("gemma3_text"), draw(TOKENS, batch=2)
    model.get_input_embeddings().weight.requires_grad_(True)
    step = Step(model, Schedule(chunk=16, groups=2), seed=SEED, neftune_alpha=40.0)
    with Float64Mode():
        quiet = oracle(model, data)
        assert_exact(model, step, data, alpha=40.0)
        noisy_one = oracle(model, data, alpha=40.0)
    assert relative_error(noisy_one.loss, quiet.loss) > 1e-3


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_evaluation_and_a_model_that_evaluates_drop_nothing(family: str) -> None:
    model, data = adapted(family, targets=None), draw(TOKENS, batch=2)
    step = Step(model, Schedule(chunk=16), seed=SEED, neftune_alpha=5.0)
    plain = copy.deepcopy(model).eval()
    wanted = reference_loss(plain, *data)
    assert relative_error(step.evaluate(*data), wanted) < EXACT
    assert step.drawn == 0
    model.eval()
    found = Outcome(step(*data), gradients(model))
    assert_close(found, Outcome(wanted.detach(), gradients_of(plain, wanted)))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_dropouts_of_the_model_itself() -> None:
    model = make_model("gpt2", resid_pdrop=0.2).train()
    data = draw(TOKENS, batch=2, documents=2)
    for schedule in (Schedule(chunk=16), Schedule(chunk=16, mlp_chunk_size=5, groups=2)):
        assert_exact(model, Step(model, schedule, poison=True, seed=SEED), data)


def test_a_probability_that_is_set_between_calls() -> None:
    model, data = adapted(p=P), draw(TOKENS)
    schedule = Schedule(chunk=16, activations=Tier.DEVICE, activation_save_fraction=1.0)
    step = Step(model, schedule, poison=True, seed=SEED)
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for p in (0.0, 0.5, 1.0, 0.1):
        for module in dropouts:
            module.p = p
        wanted = oracle(model, data, step.drawn)
        model.zero_grad(set_to_none=True)
        assert_close(Outcome(step(*data), gradients(model)), wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", part_of(["kept graphs and attention", "tiles", "streamed"], "tiles")
)
def test_memory_is_predicted(name: str) -> None:
    model = adapted("llama", targets=EVERYWHERE).to(torch.float32)
    step, tokens = Step(model, SCHEDULES[name]), 250
    profile = profiles_of_model(model, "llama").of(
        Variant("float32", None, tiled=step.schedule.mlp_chunk_size is not None)
    )
    program = step.program(1, tokens)
    walked = Walk(program, profile, gradient_bytes=4, accumulates=False).run()
    expected = sum(program.arena_bytes.values()) + INDEX * 2 * tokens + walked.bytes
    assert measured(step, 1, tokens) == pytest.approx(expected, rel=CLOSE)


def test_a_plan_for_a_gpu_knows_the_kernel() -> None:
    model = adapted("llama").to(torch.bfloat16)
    with patch.object(dropout, "drop_launch", wraps=dropout.drop_launch) as launched:
        profiles_of_model(model, "llama").of(Variant("bfloat16", None, fused=True, adds=True))
    assert launched.called


def test_a_probability_that_is_set_before_the_backward() -> None:
    model, data = adapted(), draw(TOKENS)
    found = Step(model, Schedule(chunk=16)).logprobs(*data)
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).p = 0.5
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        found.sum().backward()


# -- ranks ---------------------------------------------------------------------------------------


def wrong_on_ranks(layout: Layout, schedule: Schedule) -> list[str]:
    """On a rank, in two calls: what is not plain autograd's."""
    ranks, wrong = ParallelContext(layout, CPU), []
    model = adapted(targets=["q_proj", "down_proj"], num_key_value_heads=4)
    data = draw(29, batch=2 * layout.data, documents=3)
    mine = ranks.rank.along["data"]
    rows = slice(2 * mine, 2 * mine + 2)
    assert data.document_ids is not None
    own = Data(data.input_ids[rows], data.labels[rows], data.document_ids[rows])
    step = Step(model, schedule, ranks=ranks, poison=True, seed=SEED, neftune_alpha=9.0)
    for number in range(2):
        wanted = oracle(model, data, number, alpha=9.0)
        model.zero_grad(set_to_none=True)
        found = Outcome(step(*own), gradients(model))
        if layout.pipeline > 1:  # the other stage has the rest
            names = {n for n, p in model.named_parameters() if p.grad is not None}
            found, wanted = (
                replace(x, gradients={n: x.gradients[n] for n in names}) for x in (found, wanted)
            )
            assert names
        try:
            assert_close(found, wanted)
        except AssertionError as error:
            wrong.append(f"call {number}: {error}"[:400])
    return wrong


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(ulysses=2), Schedule(chunk=16, groups=2, mlp_chunk_size=3)),
        exhaustive(Layout(ring=2), Schedule(chunk=16, groups=2)),
        (Layout(pipeline=2), Schedule(chunk=16, groups=2)),
        exhaustive(Layout(data=2), Schedule(chunk=16)),
    ],
    ids=str,
)
def test_any_layout_is_exact(layout: Layout, schedule: Schedule) -> None:
    for wrong in run_ranks(2, wrong_on_ranks, layout, schedule):
        assert not wrong


# -- the numbers ---------------------------------------------------------------------------------


def of(name: str = MODULE, *, step: int = 0, row: int = 0, first: int = 0) -> Numbers:
    draws = Draws(SEED, step, row, 0)
    draws.at(TokenRange(first, 1))
    return draws.numbers(name, torch.empty(1, 1, 1))


def test_a_mask_does_not_know_where_it_is_cut() -> None:
    whole = dropped(torch.ones(3, 700, 1000), P, of())
    for cuts in ((0, 1, 3, 700), (0, 128, 500, 699, 700)):
        parts = [dropped(whole.new_ones(3, b - a, 1000), P, of(first=a)) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(dropped(torch.ones(2, 700, 1000), P, of(row=1)), whole[1:])
    expected = torch.from_numpy(numbers(MODULE, SEED, 0, (3, 700, 1000)) >= P * 2**32 - 2**31)
    assert torch.equal(whole != 0, expected)
    far = of(first=10**9, row=10**5)
    assert not torch.equal(dropped(whole, P, far), dropped(whole, P, of(first=10**9)))


# -- faults, and what is refused -----------------------------------------------------------------


def test_what_cannot_be_drawn_again_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"dropout 0.3 at lm_head.lora_dropout.default"):
        Step(adapted(targets=["q_proj", "lm_head"]), Schedule(chunk=16))
    with pytest.raises(UnsupportedError, match=r"dropout 0.1 at .*attn_dropout"):
        Step(make_model("gpt2", attn_pdrop=0.1).train(), Schedule(chunk=16))
    with pytest.raises(UnsupportedError, match="neftune_alpha: expected a number of at least 0"):
        Step(adapted(), Schedule(chunk=16), neftune_alpha=-1.0)
    model = adapted()
    model.model.layers[1].self_attn.compile()
    with pytest.raises(UnsupportedError, match=r"cannot be repeated under torch.compile"):
        Step(model, Schedule(chunk=16))
    twice = adapted(targets=["q_proj", "v_proj"])
    attention = twice.model.layers[0].self_attn
    attention.v_proj.lora_dropout = attention.q_proj.lora_dropout
    with pytest.raises(UnsupportedError, match="is called twice with the same tokens"):
        Step(twice, Schedule(chunk=16))(*draw(TOKENS))


def test_modules_that_would_be_compiled_and_drop_are_left_as_they_are() -> None:
    model = adapted(targets=["down_proj"], num_hidden_layers=1)
    compiles = partialmethod(nn.Module.compile, backend="eager")
    with patch.object(nn.Module, "compile", compiles), torch.compiler.set_stance("force_eager"):
        Step(model, Schedule(chunk=16), kernels=Kernels(compile=True))
    assert model.model.layers[0].mlp._compiled_call_impl is None
    assert model.model.layers[0].input_layernorm._compiled_call_impl is not None


def test_experts_that_drop_are_refused() -> None:
    model = make_model("mixtral").train()
    layer: Any = model.model.layers[0].mlp

    class Dropping(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.dropout = inner, nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.dropout(self.inner(x).flatten(0, 1))
            return found.view(x.shape)

    model.model.layers[0].mlp = Dropping(layer)
    with pytest.raises(UnsupportedError, match="not a chunk's tokens in order"):
        Step(model, Schedule(chunk=16))


def test_ranks_with_other_seeds_are_refused() -> None:
    said = run_ranks(2, partial(_said_of_seeds, Layout(ulysses=2)))
    assert all("seed: 0 on rank 0, 1 on rank 1" in text for text in said)


def _said_of_seeds(layout: Layout) -> str:
    ranks = ParallelContext(layout, CPU)
    step = Step(adapted(), Schedule(chunk=16), ranks=ranks, seed=ranks.rank.number)
    with pytest.raises(UnsupportedError) as told:
        step(*draw(TOKENS))
    return str(told.value)
