"""Layers that share K, V or have inputs of their own (Gemma 3n, Gemma 4 E2B): exact, predicted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.load import add_adapters, load_model
from farspan.hf.probe import Float64Mode
from farspan.program.layout import Layout, local_heads
from farspan.spec import Sparse, Tier, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.engine.test_ranks import Case, outcomes_of
from tests.grids import part_of
from tests.hf.test_families import KEPT, PLAIN, STREAMED
from tests.hf.test_text import KINDS
from tests.numerics import EXACT, relative_error
from tests.planner.test_walk import CLOSE, agree, in_chunks, make
from tests.ranks import run_ranks
from tests.zoo import GEMMA4_E2B, SHARED_KV, make_model, scatter_weights

FAMILIES = ("gemma4_e2b", "gemma4_shared", "gemma3n_text")
SCHEDULES = {
    "plain": PLAIN,
    "kept": KEPT,
    "streamed": STREAMED,
    "weights": replace(KEPT, weights=Tier.HOST, kv=Tier.HOST),
    "kv kept": replace(KEPT, kv_kept=True, attention_open=True),
    "tiles": replace(PLAIN, mlp_chunk_size=5),
    "sparse": replace(PLAIN, sparse=Sparse(page=4, budget=64, recent=0, sinks=0)),
}
LAYOUTS = {
    "ring": Layout(ring=2),
    "shards": Layout(shards=2),
    "ulysses": Layout(ulysses=2),
    "pipeline": Layout(pipeline=2),
}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_are_exact(family: str, name: str) -> None:
    """Gradients of shared K, V come from layers of other groups, and from later chunks."""
    model = make_model(family)
    step = Step(model, SCHEDULES[name], poison=True)
    for tokens, documents in ((37, 0), (19, 3)):
        data = draw(tokens, batch=2, documents=documents, seed=documents)
        assert_close(run_step(model, step, data), run_oracle(model, data))
        assert relative_error(step.evaluate(*data), reference_loss(model, *data)) <= EXACT


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_model_of_transformers(family: str) -> None:
    model, data = make_model(family), draw(53, batch=2)
    ours = reference_loss(model, data.input_ids, data.labels)
    model.set_attn_implementation("eager")
    theirs = model(input_ids=data.input_ids, labels=data.labels).loss
    assert relative_error(ours, theirs) <= EXACT


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_exact(family: str) -> None:
    """All else is frozen, so nothing comes to the per-layer inputs."""
    model = make_model(family)
    add_adapters(model, rank=2, alpha=4)
    data = draw(38, batch=2)
    assert_close(run_step(model, KEPT, data), run_oracle(model, data))


@pytest.mark.usefixtures("float64_throughout")
def test_frozen_layers_pass_gradients_of_inputs() -> None:
    """The second embedding and its projection are trained, and nothing else."""
    model, data = make_model("gemma4_e2b"), draw(38, batch=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("per_layer" in name and "layers." not in name)
    assert_close(run_step(model, KEPT, data), run_oracle(model, data))


def over_two(cases: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for layout, family in cases:
        inputs = draw(37, batch=2, seed=0), draw(41, batch=2, documents=3, seed=1)
        # A ring has no K, V on the host.
        schedule = replace(KEPT, groups=2) if layout in ("ring", "pipeline") else STREAMED
        case = Case(f"{layout} {family}", schedule, inputs, family)
        with Float64Mode():
            wrong += outcomes_of(LAYOUTS[layout], [case])
    return wrong


CASES = [(layout, family) for layout in LAYOUTS for family in ("gemma4_e2b", "gemma3n_text")]


@pytest.mark.slow
def test_two_ranks_give_what_one_does() -> None:
    assert run_ranks(2, over_two, CASES) == [[], []]


def test_tensor_parallelism_is_refused() -> None:
    model = Step(make_model("gemma4_e2b"), PLAIN).model_spec
    with pytest.raises(UnsupportedError, match=r"tensor: layers of .* pass on keys and values"):
        local_heads(model, Layout(tensor=2))


def test_what_layers_pass_on_is_counted() -> None:
    """Inputs of four layers, and K, V with two heads of 8 and of 16 elements."""
    model = Step(make_model("gemma4_e2b"), PLAIN).model_spec
    assert (model.hidden, model.carried) == (32, 4 * 6 + 2 * 2 * (8 + 16))
    model = Step(make_model("gemma3n_text"), PLAIN).model_spec
    assert (model.hidden, model.carried) == (32, 2 * 32 + 4 * 6 + 2 * 2 * (8 + 8))
    assert Step(make_model("gemma4_text"), PLAIN).model_spec.carried == 0


FIELDS: dict[str, dict[str, Any]] = {
    "gemma4_text": {**GEMMA4_E2B, "sliding_window": 90, "vocab_size_per_layer_input": 300},
    "gemma3n_text": {
        **SHARED_KV,
        "sliding_window": 90,
        "intermediate_size": [112] * 4,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 300,
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.6, 0.0] * 2,
    },
}


GRID = [(family, name) for family in FIELDS for name in ("grouped", "memo")]


@pytest.mark.parametrize(("family", "name"), part_of(GRID, GRID[1], GRID[2]))
def test_memory_is_predicted(family: str, name: str) -> None:
    model = make(family, torch.float32, num_hidden_layers=4, **FIELDS[family])
    schedule = in_chunks(name, 230)
    agree(Step(model, replace(schedule, groups=2)), 1, 230, CLOSE)


@pytest.mark.usefixtures("float64_throughout")
def test_text_of_a_model_that_reads_images_is_exact() -> None:
    """Tokens that stand for an image are padding to the second embedding, too."""
    kind = KINDS["gemma4"]
    text_config = {**kind["text_config"], **GEMMA4_E2B, "attention_k_eq_v": False}
    config = {"model_type": "gemma4", **kind, "text_config": text_config}
    model = load_model(config=config, dtype=torch.float64)
    scatter_weights(model)
    assert Step(model, PLAIN).model_spec.carried
    data = draw(37, batch=2)
    assert_close(run_step(model, KEPT, data), run_oracle(model, data))
