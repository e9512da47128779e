"""act(gate) * up against the formula."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from farspan.kernels.operations import (
    GATE_BLOCK,
    Act,
    gate_launch,
    swiglu,
    swiglu_again,
    swiglu_backward,
)
from farspan.kernels.reference import gated
from tests.grids import crossed
from tests.kernels.cases import (
    BRAIN,
    HALF,
    INTERPRETED,
    Run,
    assert_no_less_accurate,
    gradients,
    on_gpu,
    place_of,
    spread,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

# Of one block, of several with a ragged last, and of rows that are no multiple of anything.
SHAPES = [(1,), (2, 3, 64), (3, 701), (2, GATE_BLOCK + 5)]


def check(run: Run, gate: Tensor, up: Tensor, act: Act) -> None:
    dout = torch.randn(gate.shape).to(gate.dtype)
    formula = partial(gated, act=act)
    exact, of_exact = gradients(formula, dout.double(), gate.double(), up.double())
    plain, of_plain = gradients(formula, dout, gate, up, place=place_of(run))
    out = run(swiglu, gate, up, act)
    assert out.is_contiguous()
    assert_no_less_accurate(out, exact, plain)
    for found, right, usual in zip(
        run(swiglu_backward, dout, gate, up, act), of_exact, of_plain, strict=True
    ):
        assert_no_less_accurate(found, right, usual)
    apart = out, *run(swiglu_backward, dout, gate, up, act)
    assert all(map(torch.equal, run(swiglu_again, dout, gate, up, act), apart))


def drawn(shape: tuple[int, ...], dtype: torch.dtype, fused: bool) -> tuple[Tensor, Tensor]:
    """gate and up, which are halves of one product where `fused`."""
    if fused:
        both = torch.randn(*shape[:-1], 2 * shape[-1]).mul(2).to(dtype)
        return both[..., : shape[-1]], both[..., shape[-1] :]
    return torch.randn(shape).mul(2).to(dtype), torch.randn(shape).mul(2).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "act", "fused"),
    crossed(SHAPES, INTERPRETED, Act, [False, True]),
    ids=str,
)
def test_gate(
    shape: tuple[int, ...], dtype: torch.dtype, act: Act, fused: bool, interpreted: Run
) -> None:
    check(interpreted, *drawn(shape, dtype, fused), act)


@pytest.mark.parametrize("act", Act)
def test_great_numbers(act: Act, interpreted: Run) -> None:
    gate = torch.tensor([-1e4, -80.0, -5.0, -0.0, 0.0, 5.0, 80.0, 1e4])
    check(interpreted, gate, torch.randn(8), act)


def test_gradients_of_any_layout(interpreted: Run) -> None:
    gate, up = drawn((6, 40), HALF, fused=False)
    dout = torch.randn(40, 6).to(HALF).T
    found = interpreted(swiglu_backward, dout, gate, up, Act.SILU)
    wanted = interpreted(swiglu_backward, dout.contiguous(), gate, up, Act.SILU)
    assert all(map(torch.equal, found, wanted))


def far_apart(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Dense, and from rows to rows that are spread."""
    tensors = {"gate": gate, "up": up, "out": torch.zeros_like(gate)}
    far = {name: spread(x) for name, x in tensors.items()}
    gate_launch("gate_kernel", far, Act.SILU).run(gate)
    return swiglu(gate, up, Act.SILU), far["out"].clone()


def test_more_elements_than_an_int32_counts(interpreted: Run) -> None:
    near, far = interpreted(far_apart, *drawn((4, 40), HALF, fused=False))
    assert torch.equal(near, far)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 18944)], ids=str)
def test_gate_on_a_gpu(shape: tuple[int, ...], act: Act, fused: bool) -> None:
    check(on_gpu, *drawn(shape, BRAIN, fused), act)
