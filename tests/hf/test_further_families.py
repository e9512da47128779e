"""Families that nothing here knows by name: what their own code does is held exact all the same."""

import pytest

from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.grids import part_of
from tests.hf.test_families import KEPT
from tests.numerics import EXACT, relative_error
from tests.zoo import FURTHER, make_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64_throughout")]


SOME = list(FURTHER)[::7]


@pytest.mark.parametrize("name", part_of(FURTHER, *SOME))
def test_two_steps_are_exact(name: str) -> None:
    model = make_model(name)
    step = Step(model, KEPT, poison=True)
    for tokens, seed in ((37, 0), (19, 1)):
        data = draw(tokens, batch=2, documents=3 * seed, seed=seed)
        assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.parametrize("name", part_of(FURTHER, *SOME))
def test_what_is_exact_is_the_model_of_hugging_face(name: str) -> None:
    """Windows, scales and caps come by the attention interface: nothing else is in the masks."""
    model = make_model(name)
    data = draw(53, batch=2, seed=0)
    ours = reference_loss(model, data.input_ids, data.labels)
    model.set_attn_implementation("eager")
    theirs = model(input_ids=data.input_ids, labels=data.labels).loss
    assert relative_error(ours, theirs) <= EXACT
