"""Rotary position embedding against the formula, and its transpose against autograd."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from farspan.kernels.operations import rotate, rotate_launch
from farspan.kernels.reference import rotated
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

# Query heads, heads of keys, head size, of which are rotated.
SIZES = [(1, 1, 2, 2), (3, 1, 64, 64), (4, 2, 20, 12), (7, 2, 80, 32)]
BATCH, TOKENS = 2, 5


def drawn(
    size: tuple[int, ...], dtype: torch.dtype, token_first: bool, tables: int
) -> tuple[Tensor, ...]:
    """q, k, cos and sin; halves of the tables differ, as no model's do."""
    heads, kv_heads, width, turned = size
    q, k = (torch.randn(BATCH, TOKENS, h, width).to(dtype) for h in (heads, kv_heads))
    q, k = (x.transpose(1, 2) if token_first else x.transpose(1, 2).contiguous() for x in (q, k))
    return q, k, *(torch.randn(tables, TOKENS, turned).to(dtype) for _ in range(2))


def check(run: Run, *given: Tensor) -> None:
    q, k, cos, sin = given

    def formula(x: Tensor) -> Tensor:
        return rotated(x, cos.to(x), sin.to(x))

    results = run(rotate, q, k, cos, sin)
    for x, found, back in zip((q, k), results, run(rotate, q, k, cos, sin, True), strict=True):
        # x stands for the gradient of the result, too.
        exact, (right,) = gradients(formula, x.double(), x.double())
        plain, (usual,) = gradients(formula, x, x, place=place_of(run))
        assert_no_less_accurate(found, exact, plain)
        assert_no_less_accurate(back, right, usual)
        for result in (found, back):
            assert result.stride() == x.stride()
            assert torch.equal(result[..., cos.shape[-1] :], x[..., cos.shape[-1] :])


@pytest.mark.parametrize(
    ("size", "dtype", "token_first", "tables"),
    crossed(SIZES, INTERPRETED, [True, False], [1, BATCH]),
    ids=str,
)
def test_rotary(
    size: tuple[int, ...], dtype: torch.dtype, token_first: bool, tables: int, interpreted: Run
) -> None:
    check(interpreted, *drawn(size, dtype, token_first, tables))


def test_tables_of_another_dtype(interpreted: Run) -> None:
    q, k, cos, sin = drawn(SIZES[1], HALF, True, 1)
    check(interpreted, q, k, cos.float(), sin.float())


def test_parts_of_one_product(interpreted: Run) -> None:
    """q and k as views of what a fused projection gives: results are dense."""
    of_both = torch.randn(BATCH, TOKENS, 6, 16).transpose(1, 2)
    q, k = of_both[:, :4], of_both[:, 4:]
    _, _, cos, sin = drawn((4, 2, 16, 16), SINGLE, True, 1)
    found = interpreted(rotate, q, k, cos, sin)
    dense = interpreted(rotate, *(x.clone() for x in (q, k)), cos, sin)
    assert all(map(torch.equal, found, dense))


def far_apart(*given: Tensor) -> tuple[Tensor, ...]:
    """Dense, and from tokens to tokens that are spread, with tables that are spread."""
    q, k, cos, sin = given

    def tokens_apart(x: Tensor, token: int) -> Tensor:
        return spread(x.movedim(token, 0).contiguous()).movedim(0, token)

    far = tuple(tokens_apart(x, 2) for x in (q, k))
    far_cos, far_sin = tokens_apart(cos, 1), tokens_apart(sin, 1)
    results = tuple(tokens_apart(torch.zeros_like(x), 2) for x in (q, k))
    rotate_launch(far[0], far[1], results[0], results[1], far_cos, far_sin, False).run(q)
    return *rotate(q, k, cos, sin), *(x.clone() for x in results)


def test_more_elements_than_an_int32_counts(interpreted: Run) -> None:
    results = interpreted(far_apart, *drawn((2, 1, 16, 16), HALF, True, 1))
    assert all(map(torch.equal, results[:2], results[2:]))


@pytest.mark.gpu
@pytest.mark.parametrize("token_first", [True, False])
@pytest.mark.parametrize("size", [*SIZES, (28, 4, 128, 128), (32, 8, 128, 64)], ids=str)
def test_rotary_on_a_gpu(size: tuple[int, ...], token_first: bool) -> None:
    check(on_gpu, *drawn(size, BRAIN, token_first, 1))
