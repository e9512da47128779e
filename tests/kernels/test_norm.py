"""RMS norm: against the formula, for hidden states and for heads, in all layouts."""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from farspan.kernels.operations import Norm, norm_launch, rms_norm, rms_norm_backward
from farspan.kernels.reference import rms_norm as reference
from farspan.spec import UnsupportedError
from tests.grids import crossed
from tests.kernels.cases import (
    BRAIN,
    HALF,
    INTERPRETED,
    SINGLE,
    Run,
    assert_no_less_accurate,
    gradients,
    on_gpu,
    place_of,
    spread,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

LLAMA, GEMMA = Norm(1e-6), Norm(1e-5, offset=1.0, cast=False)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    norm: Norm = LLAMA
    layout: str = "dense"  # or "heads first", or "part" of wider vectors
    dtype: torch.dtype = SINGLE
    weights: torch.dtype | None = None  # None: as `dtype`


def laid_out(case: Case) -> Tensor:
    if case.layout == "part":
        return torch.randn(*case.shape[:-1], 3 * case.shape[-1]).to(case.dtype).chunk(3, -1)[1]
    if case.layout == "heads first":
        batch, tokens, heads, width = case.shape
        return torch.randn(batch, tokens, heads, width).to(case.dtype).transpose(1, 2)
    return torch.randn(case.shape).to(case.dtype)


def check(run: Run, case: Case) -> None:
    x, dout = laid_out(case), laid_out(replace(case, layout="dense"))
    dout = dout.reshape(x.shape)
    x.select(-2, 0).zero_()  # a row without any length
    weight = torch.randn(x.shape[-1]).to(case.weights or case.dtype)
    norm = case.norm
    formula = partial(reference, **norm._asdict())
    exact, (dx_exact, dw_exact) = gradients(formula, dout.double(), x.double(), weight.double())
    plain, (dx_plain, dw_plain) = gradients(formula, dout, x, weight, place=place_of(run))
    out, rstd = run(rms_norm, x, weight, norm)
    assert_no_less_accurate(out, exact, plain)
    wide = x.double().pow(2).mean(-1) + norm.eps
    usual = x.to(place_of(run)).float().pow(2).mean(-1).add(norm.eps).rsqrt()
    assert_no_less_accurate(rstd, wide.rsqrt(), usual.cpu())
    dx, dweight = run(rms_norm_backward, dout, x, weight, rstd, norm)
    assert_no_less_accurate(dx, dx_exact, dx_plain)
    assert dweight.dtype == SINGLE
    assert_no_less_accurate(dweight.to(dw_plain.dtype), dw_exact, dw_plain)
    for result in (out, dx):
        assert result.stride() == torch.empty_like(x).stride()
    again = run(rms_norm_backward, dout, x, weight, rstd, norm)
    assert torch.equal(again[0], dx)
    assert torch.equal(again[1], dweight)


CASES = [
    Case((1, 1, 1)),
    Case((5, 5000)),  # a row a program, several rows each
    Case((2, 70, 40)),  # many rows a program, the last fewer
    Case((2, 3, 3, 64), layout="heads first"),
    Case((2, 3, 5, 96), layout="part"),
    Case((2, 2, 3, 2, 24)),
]


@pytest.mark.parametrize(
    ("case", "dtype", "norm"), crossed(CASES, INTERPRETED, [LLAMA, GEMMA]), ids=str
)
def test_norm(case: Case, dtype: torch.dtype, norm: Norm, interpreted: Run) -> None:
    check(interpreted, replace(case, dtype=dtype, norm=norm))


def test_weights_of_another_dtype(interpreted: Run) -> None:
    check(interpreted, Case((7, 48), dtype=HALF, weights=SINGLE))
    check(interpreted, Case((7, 48), dtype=HALF, weights=SINGLE, norm=GEMMA))


def test_no_rows(interpreted: Run) -> None:
    x, weight = torch.randn(0, 48), torch.randn(48)
    out, rstd = interpreted(rms_norm, x, weight, LLAMA)
    assert out.shape == x.shape
    dx, dweight = interpreted(rms_norm_backward, x, x, weight, rstd, LLAMA)
    assert dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros(48))


def far_apart(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """out, dx and dweight, dense and from tensors that are spread; out is written far apart."""
    out, rstd = rms_norm(x, weight, LLAMA)
    far, far_out = spread(x), spread(torch.zeros_like(x))
    norm_launch(far, weight, far_out, rstd.clone().zero_(), LLAMA).run(x)
    near = rms_norm_backward(x, x, weight, rstd, LLAMA)
    return out, *near, far_out.clone(), *rms_norm_backward(far, far, weight, rstd, LLAMA)


def test_more_elements_than_an_int32_counts(interpreted: Run) -> None:
    results = interpreted(far_apart, torch.randn(4, 2, 16).to(HALF), torch.randn(16).to(HALF))
    for near, far in zip(results[:3], results[3:], strict=True):
        assert torch.equal(near, far)


def test_without_an_interpreter_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device: expected CUDA"):
        rms_norm(torch.randn(3, 16), torch.randn(16), LLAMA)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [LLAMA, GEMMA], ids=["Llama", "Gemma"])
@pytest.mark.parametrize("case", [*CASES, Case((1000, 3584)), Case((2, 700, 28, 128))], ids=str)
def test_norm_on_a_gpu(case: Case, norm: Norm) -> None:
    check(on_gpu, replace(case, dtype=BRAIN, norm=norm))
