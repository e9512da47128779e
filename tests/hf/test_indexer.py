"""Layers whose queries attend to the tokens that an indexer chooses: exact, and predicted."""

from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import farspan.spec
from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.indexer import IndexerCall, indexed_parameters
from farspan.planner.prices import Prices
from farspan.planner.request import Question
from farspan.program.layout import Layout, refuse_shared_states
from farspan.program.program import AttentionMode, Forward
from farspan.spec import AttentionKernel, Indexer, Kernels, Schedule, Sparse, Tier, UnsupportedError
from tests.engine.checks import (
    Data,
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    gradients,
    run_oracle,
    run_step,
)
from tests.engine.test_ranks import Case, outcomes_of
from tests.grids import exhaustive, part_of
from tests.hf.test_every_architecture import small_model
from tests.hf.test_families import KEPT, SCHEDULES, STREAMED
from tests.numerics import relative_error
from tests.planner.machines import slow_machine
from tests.planner.test_walk import CLOSE, agree, in_chunks, make
from tests.ranks import run_ranks
from tests.zoo import INDEXED, make_model

exactly = pytest.mark.usefixtures("float64_throughout")

FAMILY = "deepseek_v32"
SHARED = "glm_moe_dsa_shared", "hy_v4"  # some layers attend to what an earlier one chose
FAMILIES = (FAMILY, "glm_moe_dsa", "axk2", "dots3_note_text", *SHARED)
LAYOUTS = {"ulysses": Layout(ulysses=2), "pipeline": Layout(pipeline=2), "data": Layout(data=2)}
REFUSED = Layout(shards=2), Layout(ring=2), Layout(tensor=2)
CHOOSING = FAMILY, "dots3_note_text", *SHARED
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 17, [0] * 5 + [1] * 32])


def by_transformers(model: PreTrainedModel, data: Data) -> Outcome:
    """Loss and gradients of the model's own forward with eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    positions = torch.arange(data.input_ids.shape[1]).expand(data.input_ids.shape)
    labels = data.labels.clone()
    if data.document_ids is not None:
        begins = data.document_ids.diff(dim=1, prepend=data.document_ids[:, :1] - 1) != 0
        positions = positions - (positions * begins).cummax(1).values
        labels[begins] = -100
    model.zero_grad(set_to_none=True)
    out = model(data.input_ids, position_ids=positions, labels=labels, use_cache=False)
    out.loss.backward()
    model.set_attn_implementation(before)
    return Outcome(out.loss.detach(), gradients(model))


@pytest.mark.slow
@exactly
@pytest.mark.parametrize("family", part_of(FAMILIES, *FAMILIES[::2]))
def test_a_step_gives_transformers_own_gradients(family: str) -> None:
    """Its packed documents too, whose ties at 0 are broken by the place in the whole row."""
    model, step = make_model(family), None
    for documents in (None, DOCUMENTS):
        ids, labels, _ = draw(37, batch=2)
        data = Data(ids, labels, documents)
        step = step or Step(model, KEPT, poison=True)
        found, expected = run_step(model, step, data), by_transformers(model, data)
        assert_close(found, expected)


@exactly
def test_transformers_gives_an_indexer_no_gradient() -> None:
    model, data = make_model(FAMILY), draw(37)
    inside = indexed_parameters(model)
    by_transformers(model, data)
    without = {id(p) for p in model.parameters() if p.grad is None}
    assert without == inside
    for weights in (Tier.DEVICE, Tier.HOST):
        run_step(model, replace(KEPT, weights=weights), data)
        assert {id(p) for p in model.parameters() if p.grad is None} == inside


@exactly
def test_the_choice_counts() -> None:
    data = draw(37)
    loss = [reference_loss(make_model(FAMILY, index_topk=n), *data).detach() for n in (8, 64)]
    assert relative_error(loss[0], loss[1]) > 1e-3


@pytest.mark.slow
@exactly
@pytest.mark.parametrize(
    ("name", "family"),
    part_of(product(SCHEDULES, CHOOSING), *zip(cycle(SCHEDULES), CHOOSING, strict=False)),
)
def test_a_step_is_exact(name: str, family: str) -> None:
    model = make_model(family)
    step = Step(model, SCHEDULES[name], poison=True)
    for tokens, documents in ((37, 0), (53, 3)):
        data = draw(tokens, batch=2, documents=documents, seed=documents)
        assert_close(run_step(model, step, data), run_oracle(model, data))


@exactly
def test_later_layers_are_given_a_choice_whose_own_attention_is_known() -> None:
    model, data = make_model(SHARED[0]), draw(37, batch=2)
    schedule = Schedule(chunk=9, groups=(3, 1), layer_checkpoint=True, attention_save_fraction=1.0)
    assert_close(run_step(model, schedule, data), run_oracle(model, data))


@exactly
def test_scores_that_are_all_equal() -> None:
    """Such as those of an indexer that has learned nothing: torch.topk breaks all ties."""
    model, data = make_model(FAMILY), draw(53, batch=2)
    for name, parameter in model.named_parameters():
        if "weights_proj" in name:
            parameter.data.zero_()
    for schedule in (KEPT, STREAMED):
        assert_close(run_step(model, schedule, data), by_transformers(model, data))


@exactly
def test_queries_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = make_model(FAMILY), draw(53, batch=2, documents=2)
    whole = run_step(model, KEPT, data)
    monkeypatch.setattr(farspan.spec, "SCORES", 4 * 4 * 53 * 3)
    assert Indexer(4, 16, 8).piece(53) == 3
    assert_close(run_step(model, KEPT, data), whole)


@exactly
def test_keys_on_the_host_give_the_same_bits() -> None:
    model, data = make_model(FAMILY), draw(53, batch=2, documents=2)
    schedule = Schedule(chunk=16, groups=2, kv_block=16)
    found = run_step(model, schedule, data)
    assert_same_bits(run_step(model, replace(schedule, kv=Tier.HOST), data), found)


def test_layers_say_what_they_choose_by() -> None:
    step = Step(make_model("dots3_note_text", torch.bfloat16), KEPT)
    indexers = [layer.indexer for layer in step.model_spec.layers]
    # Its rotary embedding is float32, and so are its index keys.
    assert indexers == [Indexer(4, 16, 8, 8, wide=True)] * 2 + [None] * 2


@pytest.mark.slow
def test_cells_choose_only_what_is_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or passed to later layers: where K, V alone are needed, nothing reads a choice."""
    chosen, choose = [0], IndexerCall.choose

    def counted(call: IndexerCall, keys: Tensor, *rest: Any) -> Tensor:
        chosen[0] += call.hidden.shape[1] * keys.shape[1]
        return choose(call, keys, *rest)

    monkeypatch.setattr(IndexerCall, "choose", counted)
    checkpointed = Schedule(
        chunk=16, groups=(3, 1), layer_checkpoint=True, attention_save_fraction=1.0
    )
    for family, schedule in product((FAMILY, *SHARED), (Schedule(16, groups=1), checkpointed)):
        step, ids = Step(make_model(family), schedule), draw(64).input_ids
        chosen[0] = 0
        step(ids, ids)
        program, spec = step.program(1, 64), step.model_spec
        prices = Prices(Question(spec, program.run, slow_machine(), dtype="float64"), program)
        cells = [i for i in program.instructions if isinstance(i, Forward)]
        priced = sum(
            16 * program.chunks[i.chunk][1]
            for i in cells
            if i.mode is not AttentionMode.NONE and prices._choice(i)
        )
        assert chosen[0] == priced > 0, (family, schedule)


PLAIN = Schedule(chunk=9, groups=2)

# -- ranks ----------------------------------------------------------------------------------------


def over_two(name: str) -> list[str]:
    inputs = draw(37, batch=2, seed=0), draw(41, batch=2, documents=3, seed=1)
    # The last chunk of the first has one token, so one rank of Ulysses has none.
    family = {"pipeline": SHARED[0]}.get(name, FAMILY)
    cases = [Case(name, PLAIN, inputs, family)]
    if name == "ulysses":
        host = replace(STREAMED, chunk=9)
        cases = [Case(name, KEPT, inputs, SHARED[0]), Case(name, host, inputs, FAMILY)]
    return outcomes_of(LAYOUTS[name], cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(LAYOUTS, "ulysses"))
def test_two_ranks_give_what_one_does(name: str) -> None:
    assert run_ranks(2, over_two, name) == [[], []]


# -- what cannot be exact -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", REFUSED, ids=str)
def test_ranks_that_spread_index_keys_are_refused(layout: Layout) -> None:
    model = Step(make_model(FAMILY), KEPT).model_spec
    with pytest.raises(UnsupportedError, match="among the tokens of the whole prefix"):
        refuse_shared_states(model, layout)


@exactly
def test_keys_of_several_tokens_are_refused() -> None:
    """DeepSeek-V4's, which transformers trains with gradients for what makes them."""
    model = small_model("deepseek_v4")
    with pytest.raises(UnsupportedError, match="makes of several tokens each, and hides them"):
        Step(model, PLAIN)
    by_transformers(model, draw(37))
    grads = {n: p.grad for n, p in model.named_parameters() if "3.self_attn.compressor" in n}
    assert all((grad is None) == ("indexer" in name) for name, grad in grads.items())


def test_another_choice_is_refused() -> None:
    pages = Sparse(page=8, budget=16, recent=8, sinks=8)
    step = Step(make_model(FAMILY), Schedule(chunk=16, sparse=pages))
    with pytest.raises(UnsupportedError, match="sparse: the model's own indexers"):
        step(*draw(37))
    with pytest.raises(UnsupportedError, match="attention: flash needs"):
        Step(make_model(FAMILY), KEPT, kernels=Kernels(attention=AttentionKernel.FLASH))


# -- memory ---------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    **INDEXED,
    **{"index_topk": 60, "intermediate_size": 112, "mlp_layer_types": ["dense"] * 2},
}


@pytest.mark.parametrize(
    ("name", "dtype"), [exhaustive("grouped", torch.float32), ("plain", torch.bfloat16)], ids=str
)
def test_memory_is_predicted(name: str, dtype: torch.dtype) -> None:
    model = make(FAMILY, dtype, **SIZES)
    for batch in (1, 2):
        agree(Step(model, in_chunks(name, 230)), batch, 230, CLOSE)


def test_memory_of_choices_that_layers_pass_on_is_predicted() -> None:
    """In bfloat16 two elements of a hidden state hold the number of a token."""
    model = make("glm_moe_dsa", torch.bfloat16, **SIZES, indexer_types=["full", "shared"])
    step = Step(model, in_chunks("grouped", 230))
    assert step.model_spec.carried == 2 * SIZES["index_topk"]
    agree(step, 1, 230, CLOSE)


def test_memory_is_predicted_with_keys_on_the_host() -> None:
    model = make(FAMILY, torch.bfloat16, **{**SIZES, "index_n_heads": 16})
    schedule = Schedule(chunk=64, groups=2, kv=Tier.HOST, kv_block=48)
    agree(Step(model, schedule), 1, 230, CLOSE)
