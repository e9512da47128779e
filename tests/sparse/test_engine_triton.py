"""Sparse steps on the Triton kernels, in Triton's interpreter: pages in place and through slots."""

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.engine.step import Step
from farspan.sparse.kernel_calls import TritonFar
from farspan.spec import Schedule, Sparse, Tier
from tests.engine.checks import Outcome, draw, run_step
from tests.grids import part_of
from tests.numerics import relative_error
from tests.sparse.triton_cases import SMALL, interpreter
from tests.zoo import make_model

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

SCHEDULE = Schedule(
    chunk=12, groups=1, kv_block=20, sparse=Sparse(page=4, budget=8, recent=6, sinks=4)
)
DATA = draw(36)


def model_of(weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    model = make_model("qwen2", torch.float32, num_hidden_layers=1)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def by_triton(weights: dict[str, Tensor], schedule: Schedule) -> tuple[Outcome, int]:
    """A step, and how often the kernels were asked for."""
    asked = 0

    def far(*_: object) -> TritonFar:
        nonlocal asked
        asked += 1
        return TritonFar(SMALL)

    with (
        patch("farspan.sparse.engine.far_kernel", far),
        # Slabs of three units, or one page of queries: a cell takes several.
        patch("farspan.program.far_sizes.SLAB_BYTES", 3 * 4 * 2 * 8 * 4),
    ):
        model = model_of(weights)
        return run_step(model, Step(model, schedule, poison=True), DATA), asked


@pytest.mark.parametrize("kv", part_of(Tier, Tier.HOST))
def test_steps_are_those_of_gathered_pages(kv: Tier) -> None:
    """Within twice what rounding costs there."""
    model, schedule = model_of(), replace(SCHEDULE, kv=kv)
    with interpreter() as pool:
        found, asked = pool.submit(by_triton, model.state_dict(), schedule).result()
    assert asked
    plain, exact = (run_step(one, schedule, DATA) for one in (model, deepcopy(model).double()))
    assert relative_error(found.loss, exact.loss) <= 2 * torch.finfo(torch.float32).eps
    for name, gradient in exact.gradients.items():
        limit = 2 * relative_error(plain.gradients[name], gradient)
        assert relative_error(found.gradients[name], gradient) <= limit, name
