"""The seam with Hugging Face mixtures of experts."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from farspan.models.configs import config_field


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Compute experts one by one inside the block. The default, torch's grouped product, has no
    float64 and rounds otherwise, so it is no ground to compare gradients on."""
    with config_field(model, "_experts_implementation_internal", "eager"):
        yield
