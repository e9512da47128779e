"""Every supported family gives the gradients of plain full-sequence autograd."""

import gc
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch

from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.spec import Schedule, Tier
from tests.engine.checks import Data, Outcome, assert_close, draw, run_oracle, run_step
from tests.grids import part_of
from tests.numerics import EXACT, relative_error
from tests.zoo import FAMILIES, FURTHER, make_model, shared_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64_throughout")]

# The chunk is no multiple of the window, nor of the block of keys; lengths are no multiple of it.
PLAIN = Schedule(chunk=16, groups=1)
KEPT = Schedule(
    chunk=13, groups=(1, 3), attention_save_fraction=0.4, activation_save_fraction=0.5, kv_block=16
)
STREAMED = Schedule(chunk=10, groups=4, kv=Tier.HOST, kv_block=12, layer_checkpoint=True)
SCHEDULES = {"plain": PLAIN, "kept": KEPT, "streamed": STREAMED}


@cache
def drawn(name: str, tokens: int, seed: int) -> tuple[Data, Outcome]:
    """A batch, and what plain autograd gives."""
    data = draw(tokens, batch=2, documents=3 * seed, seed=seed)
    return data, run_oracle(shared_model(name), data)


# Every other family by default, the schedules by turns: attention of each kind is among them.
TURNS = list(zip(list(FAMILIES)[::2], cycle(SCHEDULES), strict=False))
TIES = [(name, tied) for name in FAMILIES for tied in (True, False)]


@pytest.mark.parametrize(("name", "kind"), part_of(product(FAMILIES, SCHEDULES), *TURNS))
def test_a_family(name: str, kind: str) -> None:
    """The probe sees its attention, and two steps are exact: the second, shorter one finds the
    first one's memory, poisoned, and clears nothing."""
    family, model = FAMILIES[name], shared_model(name)
    step = Step(model, SCHEDULES[kind], poison=True)
    layers = step.model_spec.layers
    assert tuple(layer.window for layer in layers) == family.windows
    assert {layer.softcap for layer in layers} == {family.softcap}
    assert {layer.sinks for layer in layers} == {family.sinks}
    assert {layer.kv_heads for layer in layers} == {family.kv_heads}
    data, expected = drawn(name, 37, 0)
    takes_part(name, expected)
    is_the_family_s_own_loss(model, data)
    for own, found in ((data, expected), drawn(name, 19, 1)):
        assert all(bool(g.isfinite().all()) for g in found.gradients.values())
        assert_close(run_step(model, step, own), found)


def takes_part(name: str, expected: Outcome) -> None:
    """Every parameter: no gradient is zero, except where mathematics makes it so."""
    found = expected.gradients
    whole = sum(float(g.norm()) ** 2 for g in found.values()) ** 0.5
    zero = {key for key, g in found.items() if not float(g.norm()) > 1e-6 * whole}
    assert zero <= {key for key in found if "k_proj.bias" in key and name == "opt"}


@torch.no_grad()
def is_the_family_s_own_loss(model: Any, data: Data) -> None:
    """The oracle's, by Hugging Face's eager attention: no window, cap, sink or scale is
    forgotten."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    own = model(input_ids=data.input_ids, labels=data.labels).loss
    model.set_attn_implementation(before)
    assert relative_error(reference_loss(model, *data), own) <= EXACT


@pytest.mark.parametrize(("name", "tied"), part_of(TIES, *TIES[1::14]))
def test_tied_and_untied_embeddings(name: str, tied: bool) -> None:
    model = make_model(name, tie_word_embeddings=tied)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.weight is head.weight) is tied
    data = draw(29, seed=2)
    assert_close(run_step(model, KEPT, data), run_oracle(model, data))


ROPES = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("name", part_of(ROPES, "yarn"))
def test_scaled_rope_is_exact(name: str) -> None:
    """Beyond the original length, where the scaling is felt."""
    changes: dict[str, Any] = {
        "rope_parameters": {"rope_theta": 1e4, **ROPES[name]},
        "max_position_embeddings": 64,
    }
    model, data = make_model("llama", **changes), draw(61, seed=3)
    expected = run_oracle(model, data)
    assert_close(run_step(model, KEPT, data), expected)
    unscaled = reference_loss(shared_model("llama"), *data).detach()
    assert relative_error(unscaled, expected.loss) > 1e-4


def test_layers_that_one_setting_tells_apart() -> None:
    """A layer that does not rotate saves less than the next, whose room is its own."""
    model = make_model("smollm3", no_rope_layers=[0, 1, 1, 0])
    layers = describe(CausalLMStages(model)).layers
    saved = [layer.activation_bytes + layer.activation_constant for layer in layers]
    assert saved[1] == saved[2] > saved[0] == saved[3]
    step = Step(model, Schedule(chunk=16, activation_save_fraction=1.0), poison=True)
    data = draw(40, batch=2)
    assert_close(run_step(model, step, data), run_oracle(model, data))


def test_longer_windows_than_a_kernel_s_tile() -> None:
    """Windows of 70 tokens in chunks of 90: tiles of queries inside a block of keys."""
    model, data = make_model("mistral", sliding_window=70), draw(203, seed=4)
    schedule = Schedule(chunk=90, groups=2, kv_block=64)
    expected = run_oracle(model, data)
    assert_close(run_step(model, schedule, data), expected)
    assert_close(run_step(model, replace(schedule, chunk=203), data), expected)


@pytest.mark.parametrize("name", part_of(FURTHER, *list(FURTHER)[::24]))
def test_a_family_that_nothing_knows_is_exact(name: str) -> None:
    """Windows, scales and caps come by the attention interface: nothing else is in the masks."""
    model = make_model(name)
    step = Step(model, KEPT, poison=True)
    is_the_family_s_own_loss(model, draw(53, batch=2))
    for tokens, seed in ((37, 0), (19, 1)):
        data = draw(tokens, batch=2, documents=3 * seed, seed=seed)
        assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "llama"])  # its layers return tuples; tensors
def test_a_first_step_leaves_the_collector_no_tensors(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Runs collect garbage rarely, so a cycle would hold tensors that no plan counts."""
    step = Step(make_model(name), PLAIN)
    gc.collect()
    request.addfinalizer(lambda: gc.set_debug(0))
    gc.set_debug(gc.DEBUG_SAVEALL)
    step(*draw(19))
    gc.collect()
    left = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    gc.garbage.clear()
    assert not left
