"""Layers that attend twice, to half of their value heads each (DiffLlama): exact, in one call."""

import pytest
import torch

from farspan.engine.step import Step
from farspan.hf.attention_interface import attends_twice
from farspan.hf.probe import Float64Mode
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.engine.test_ranks import Case, outcomes_of
from tests.grids import part_of
from tests.hf.test_carried import INPUTS, LAYOUTS, SCHEDULES
from tests.hf.test_families import PLAIN, STREAMED
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.zoo import make_model


@pytest.mark.slow
@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", part_of(SCHEDULES, "plain", "weights", "kv kept", "sparse"))
def test_two_steps_are_exact(name: str) -> None:
    model = make_model("diffllama")
    step = Step(model, SCHEDULES[name], poison=True)
    for tokens, documents in ((37, 0), (19, 3)):
        data = draw(tokens, batch=2, documents=documents, seed=documents)
        assert_close(run_step(model, step, data), run_oracle(model, data))


def test_both_calls_are_one() -> None:
    """With values of twice the width, so that keys are read once; other layers are left alone."""
    (spec, *_) = Step(make_model("diffllama"), PLAIN).model_spec.layers
    assert (spec.kv_heads, spec.head_dim, spec.value_dim) == (2, 8, 16)
    assert not any(attends_twice(layer) for layer in make_model("llama").model.layers)


@pytest.mark.usefixtures("float64_throughout")
def test_the_model_is_that_of_transformers() -> None:
    model, data = make_model("diffllama"), draw(23, batch=2)
    found = Step(model, PLAIN).evaluate(data.input_ids, data.labels)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(input_ids=data.input_ids, labels=data.labels).loss
    assert relative_error(found, wanted) <= EXACT


def over_two(name: str) -> list[str]:
    schedule = PLAIN if name in ("ring", "pipeline") else STREAMED
    with Float64Mode():
        return outcomes_of(LAYOUTS[name], [Case(name, schedule, INPUTS, "diffllama")])


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(LAYOUTS, "shards"))
def test_two_ranks_give_what_one_does(name: str) -> None:
    assert run_ranks(2, over_two, name) == [[], []]
