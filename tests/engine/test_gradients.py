"""Weight gradients are summed over chunks in fp32, whatever the parameters are in."""

import pytest
import torch
from torch import Tensor, nn

from farspan.engine.gradients import GradientAccumulator
from tests.numerics import relative_error

CHUNKS = 1024
# One rounding to bf16 changes a number by at most 2**-9 of it, and so a vector in its L2 norm.
ONE_ROUNDING = 2**-9


def chunk_gradients(dtype: torch.dtype) -> list[Tensor]:
    """They share a direction, as gradients do."""
    common = torch.randn(64)
    return [(common + 3 * torch.randn(64)).to(dtype) for _ in range(CHUNKS)]


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).double().sum(0)


def accumulate(parameter: nn.Parameter, parts: list[Tensor]) -> Tensor:
    gradients = GradientAccumulator()
    for part in parts:
        gradients.add([parameter], [part])
    gradients.close([parameter])
    assert parameter.grad is not None
    return parameter.grad


def test_bf16_is_rounded_once() -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    parts = chunk_gradients(torch.bfloat16)
    found = accumulate(parameter, parts)
    assert found.dtype is torch.bfloat16
    assert relative_error(found, total(parts)) <= ONE_ROUNDING
    naive = torch.zeros_like(found)
    for part in parts:
        naive += part
    assert relative_error(naive, total(parts)) > 10 * ONE_ROUNDING


def test_what_was_there_is_added_before_rounding() -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    parts = chunk_gradients(torch.bfloat16)
    accumulate(parameter, parts[:500])
    assert parameter.grad is not None
    left = parameter.grad.clone()
    found = accumulate(parameter, parts[500:])
    assert relative_error(found, total([left, *parts[500:]])) <= ONE_ROUNDING


@pytest.mark.parametrize(
    ("own", "wide"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wide_gradients_add_in_place(own: torch.dtype, wide: torch.dtype) -> None:
    """fp32 sums of 1,024 numbers: 1,023 roundings of 2**-24 at most."""
    parameter = nn.Parameter(torch.zeros(64, dtype=own))
    parameter.grad_dtype = wide
    parts = chunk_gradients(own)
    grad = accumulate(parameter, parts)
    assert grad.dtype is wide
    assert relative_error(grad, total(parts)) <= CHUNKS * torch.finfo(wide).eps / 2
    assert accumulate(parameter, parts) is grad
    assert relative_error(grad, 2 * total(parts)) <= CHUNKS * torch.finfo(wide).eps


def test_a_gradient_is_nobody_s_else() -> None:
    """Autograd may hand out one tensor twice, or an expanded one."""
    one, other = (nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
    shared = torch.ones(1, 1).expand(4, 3)
    gradients = GradientAccumulator()
    gradients.add([one, other], [shared, shared])
    gradients.add([one], [shared])
    gradients.close([one, other])
    assert one.grad is not None
    assert other.grad is not None
    assert torch.equal(one.grad, torch.full((4, 3), 2.0))
    assert torch.equal(other.grad, torch.ones(4, 3))
    assert one.grad.is_contiguous()


def test_no_gradient_stays_none() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    gradients = GradientAccumulator()
    gradients.add([parameter], [None])
    gradients.close([parameter])
    assert parameter.grad is None
