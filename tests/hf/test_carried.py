"""Layers that share K, V or have inputs of their own (Gemma 3n, Gemma 4 E2B): exact, predicted."""

from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from farspan.engine.profile import measure
from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.describe import describe_config
from farspan.hf.load import add_adapters, load_model
from farspan.hf.probe import Float64Mode
from farspan.planner.walk import Walk
from farspan.profile.model import Variant
from farspan.program.layout import Layout, local_heads
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from tests.engine import test_dropout, test_ranks
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.engine.test_ranks import Case, outcomes_of
from tests.grids import exhaustive, part_of
from tests.hf.test_families import KEPT, PLAIN, STREAMED
from tests.hf.test_fused import by_formulas  # noqa: F401 - a fixture
from tests.hf.test_text import KINDS
from tests.numerics import EXACT, relative_error
from tests.planner.test_walk import (
    CLOSE,
    INDEX,
    SIZES,
    agree,
    in_chunks,
    make,
    measured,
    profile_of,
)
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
IN_TURNS = list(zip(cycle(FAMILIES), SCHEDULES, strict=False))
LAYOUTS = {
    "ring": Layout(ring=2),
    "shards": Layout(shards=2),
    "ulysses": Layout(ulysses=2),
    "pipeline": Layout(pipeline=2),
}


@pytest.mark.slow
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("family", "name"), part_of(product(FAMILIES, SCHEDULES), *IN_TURNS, ("gemma3n_text", "kept"))
)
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


@pytest.mark.slow
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("family", "name"),
    part_of(product(FAMILIES, SCHEDULES), *IN_TURNS[:3]),
)
def test_adapters_are_exact(family: str, name: str) -> None:
    """All else is frozen, so nothing comes to the per-layer inputs."""
    model = make_model(family)
    add_adapters(model, rank=2, alpha=4)
    step = Step(model, SCHEDULES[name], poison=True)
    for tokens, documents in ((38, 0), (19, 3)):
        data = draw(tokens, batch=2, documents=documents, seed=documents)
        assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.usefixtures("float64_throughout")
def test_frozen_layers_pass_gradients_of_inputs() -> None:
    """The second embedding and its projection are trained, and nothing else."""
    model, data = make_model("gemma4_e2b"), draw(38, batch=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("per_layer" in name and "layers." not in name)
    assert_close(run_step(model, KEPT, data), run_oracle(model, data))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("trains", [exhaustive(False), True])
def test_noise_reaches_inputs_of_layers(*, trains: bool) -> None:
    """NEFTune's, of the embeddings that a projection makes them of, whenever they are made."""
    model, data = test_dropout.adapted("gemma4_e2b"), draw(45, batch=2)
    model.get_input_embeddings().weight.requires_grad_(trains)
    with Float64Mode():
        step = Step(model, Schedule(chunk=16, groups=2), seed=test_dropout.SEED, neftune_alpha=40.0)
        assert bool(step.model_spec.embeds) is not trains
        test_dropout.assert_exact(model, step, data, alpha=40.0)


def adapted(name: str, **fields: Any) -> PreTrainedModel:
    model = make_model(name, **fields)
    add_adapters(model, rank=2, alpha=4)
    return model


INPUTS = draw(37, batch=2, seed=0), draw(41, batch=2, documents=3, seed=1)


def over_two(name: str, family: str) -> list[str]:
    # A ring has no K, V on the host.
    schedule = replace(KEPT, groups=2) if name in ("ring", "pipeline") else STREAMED
    with Float64Mode():
        return outcomes_of(LAYOUTS[name], [Case(name, schedule, INPUTS, family)])


def over_two_of_adapters(name: str) -> list[str]:
    """Ranks hold shards of the weights, gathered group by group, or stages of the layers."""
    case = Case(f"adapters, {name}", replace(STREAMED, groups=1), INPUTS, "gemma4_e2b")
    sharded: dict[str, Any] | None = None if name == "pipeline" else {}
    with Float64Mode(), patch.object(test_ranks, "make_model", adapted):
        return outcomes_of(LAYOUTS[name], [case], sharded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    part_of(
        zip(LAYOUTS, cycle(("gemma4_e2b", "gemma3n_text")), strict=False),
        ("pipeline", "gemma3n_text"),
    ),
)
def test_two_ranks_give_what_one_does(name: str, family: str) -> None:
    assert run_ranks(2, over_two, name, family) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(["ulysses", "pipeline"], "ulysses"))
def test_two_ranks_train_adapters(name: str) -> None:
    assert run_ranks(2, over_two_of_adapters, name) == [[], []]


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


def test_inputs_are_made_again_if_nothing_is_trained_for_them() -> None:
    model = make_model("gemma4_e2b")
    add_adapters(model, rank=2, alpha=4)
    spec = Step(model, PLAIN).model_spec
    assert spec.embeds == 4 * 6
    assert spec.carried == 2 * 2 * (8 + 16)


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


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), part_of(GRID, GRID[2]))
def test_memory_is_predicted(family: str, name: str) -> None:
    model = make(family, torch.float32, num_hidden_layers=4, **FIELDS[family])
    schedule = replace(in_chunks(name, 230), groups=2)
    agree(Step(model, schedule), 1, 230, CLOSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", part_of(FIELDS, "gemma4_text"))
def test_memory_of_adapters_is_predicted(family: str) -> None:
    """A chunk's inputs of all layers are there while any layer of it runs."""
    model = make(family, torch.float32, num_hidden_layers=4, **FIELDS[family])
    add_adapters(model, rank=8, alpha=8)
    step = Step(model, replace(in_chunks("grouped", 230), groups=2))
    program, profile = step.program(1, 230), profile_of(model, rank=8)
    found = Walk(program, profile, gradient_bytes=4).run()
    expected = sum(program.arena_bytes.values()) + INDEX * 2 * 230 + found.bytes
    assert expected == pytest.approx(measured(step, 1, 230), rel=CLOSE)


def test_a_configuration_is_described_as_its_model() -> None:
    """Layers of each kind come before the last, whose number what is passed on depends on."""
    types = ["sliding_attention", "full_attention"] * 4
    fields = {**SIZES, **GEMMA4_E2B, "num_hidden_layers": 8, "layer_types": types}
    config = {**fields, "model_type": "gemma4_text", "num_kv_shared_layers": 4}
    found = measure(config, Variant("float32")).spec
    assert found.carried == describe_config(config, "float32").carried == 8 * 6 + 4 * (12 + 16)


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


@pytest.mark.slow
@pytest.mark.usefixtures("by_formulas", "float64_throughout")
@pytest.mark.parametrize("family", part_of(FAMILIES, "gemma4_e2b"))
def test_a_step_in_shells_is_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where norms, gates and rotations run on own kernels."""
    monkeypatch.setattr("farspan.engine.preparation.adds_products", lambda *_: True)
    model, data = make_model(family), draw(45, batch=2, documents=3)
    step, expected = Step(model, KEPT, poison=True), run_oracle(model, data)
    for _ in range(2):
        assert_close(run_step(model, step, data), expected)
