"""Parts that join a softmax, and parts that are added, against PyTorch's operators."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from farspan.attention.backends import merge_ as reference
from farspan.kernels.operations import add_, merge_
from tests.grids import crossed
from tests.kernels.cases import (
    BRAIN,
    HALF,
    INTERPRETED,
    Run,
    added,
    assert_no_less_accurate,
    merged,
    on_gpu,
    place_of,
    spread,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

# B, H, S, Dv; in the last a program has no whole number of rows.
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 24), (1, 4, 9, 128), (2, 3, 37, 64)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, token_first: bool) -> tuple[Tensor, ...]:
    """out, lse, part_out and part_lse; rows that one has not seen, or the other, or neither."""
    batch, heads, tokens, width = shape
    out, part = (torch.randn(batch, tokens, heads, width).transpose(1, 2) for _ in range(2))
    lse, part_lse = (20 * torch.randn(shape[:3]) for _ in range(2))
    if min(shape) > 1:
        lse[0, 0, 0], part_lse[0, 0, 1] = -torch.inf, -torch.inf
        lse[0, 1, 0], part_lse[0, 1, 0] = -torch.inf, -torch.inf
    out = out if token_first else out.contiguous()
    return out, lse, part.to(dtype), part_lse


def check_merge(run: Run, given: tuple[Tensor, ...]) -> None:
    out, lse, part, part_lse = given
    exact, exact_lse = out.double(), lse.double()
    reference(exact, exact_lse, part.double(), part_lse.double())
    place = place_of(run)
    plain, plain_lse = out.to(place, copy=True), lse.to(place, copy=True)
    reference(plain, plain_lse, part.to(place), part_lse.to(place))
    kept, taken = part_lse == -torch.inf, (lse == -torch.inf) & (part_lse != -torch.inf)
    before = out[kept].clone(), lse[kept].clone()
    found, found_lse = run(merged, *given)
    assert torch.equal(found[kept], before[0])
    assert torch.equal(found_lse[kept], before[1])
    assert torch.equal(found[taken], part[taken].float())
    assert torch.equal(found_lse[taken], part_lse[taken])
    assert_no_less_accurate(found, exact, plain.cpu())
    unseen = found_lse == -torch.inf
    exact_lse, plain_lse = (x.cpu().masked_fill(unseen, 0.0) for x in (exact_lse, plain_lse))
    assert_no_less_accurate(found_lse.masked_fill(unseen, 0.0), exact_lse, plain_lse)


@pytest.mark.parametrize(
    ("shape", "dtype", "token_first"), crossed(SHAPES, INTERPRETED, [True, False]), ids=str
)
def test_merge(
    shape: tuple[int, ...], dtype: torch.dtype, token_first: bool, interpreted: Run
) -> None:
    check_merge(interpreted, drawn(shape, dtype, token_first))


def sums(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Totals and parts in the same order, in two orders, and parts of wider tensors."""
    batch, heads, tokens, width = shape
    part = torch.randn(shape).to(dtype)
    token_first = torch.randn(tokens, batch, heads, width)
    wider = torch.randn(batch, tokens, 3 * heads, width).to(dtype)[:, :, heads : 2 * heads]
    return [
        (torch.randn(shape), part),
        (token_first, part.permute(2, 0, 1, 3)),
        (token_first.permute(1, 2, 0, 3), part),
        (torch.randn(shape), wider.transpose(1, 2)),
        (torch.randn(shape).flatten(0, 2), part.flatten(0, 2)),
    ]


@pytest.mark.parametrize(("shape", "dtype"), crossed(SHAPES, INTERPRETED), ids=str)
def test_add(shape: tuple[int, ...], dtype: torch.dtype, interpreted: Run) -> None:
    for total, part in sums(shape, dtype):
        wanted = total + part
        assert torch.equal(interpreted(added, total, part), wanted)


def joined_into(*given: Tensor) -> tuple[Tensor, ...]:
    """Merged and added in place, and from the same narrow tensors into wide and narrow ones."""
    out, lse, part, part_lse = given
    found = []
    for dtype in (torch.float32, part.dtype):
        narrow, own_lse, into = out.to(part.dtype), lse.clone(), out.to(dtype, copy=True).zero_()
        kept = narrow.clone()
        merge_(narrow, own_lse, (part, part_lse), into=into)
        total = torch.zeros_like(into)
        add_(narrow, part, into=total)
        assert torch.equal(narrow, kept)
        found += [into, own_lse, total]
    wide, total = (out.to(part.dtype).float().clone() for _ in range(2))
    merge_(wide, lse, (part, part_lse))
    add_(total, part)
    return *found, wide, lse, total


def two_at_once(*given: Tensor) -> tuple[Tensor, ...]:
    """Merged and added one after the other, and together."""
    out, lse, part, part_lse = given
    parts = (part, part_lse), (part.neg(), part_lse + 0.7)
    ones, one_lse, total = out.clone(), lse.clone(), out.clone()
    for other, other_lse in parts:
        merge_(ones, one_lse, (other, other_lse))
        add_(total, other, into=total)
    both, both_lse, total_both = out.clone(), lse.clone(), out.clone()
    merge_(both, both_lse, *parts)
    add_(total_both, *(other for other, _ in parts))
    return ones, one_lse, total, both, both_lse, total_both


@pytest.mark.parametrize(("shape", "dtype"), crossed(SHAPES, INTERPRETED), ids=str)
def test_two_parts_at_once(shape: tuple[int, ...], dtype: torch.dtype, interpreted: Run) -> None:
    found = interpreted(two_at_once, *drawn(shape, dtype, token_first=True))
    assert all(map(torch.equal, found[:3], found[3:]))


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
def test_what_is_joined_may_go_elsewhere(dtype: torch.dtype, interpreted: Run) -> None:
    """The first of several parts is given narrow, the last is rounded: the same numbers."""
    found = interpreted(joined_into, *drawn(SHAPES[3], dtype, token_first=True))
    wide, rounded, (out, lse, total) = found[:3], found[3:6], found[6:]
    assert all(map(torch.equal, wide, (out, lse, total)))
    assert all(map(torch.equal, rounded, (out.to(dtype), lse, total.to(dtype))))


def far_apart(*given: Tensor) -> tuple[Tensor, ...]:
    """Merged and added in place, dense and spread."""
    out, lse, part, part_lse = given
    far = spread(out)
    merge_(far, spread(lse), (spread(part), spread(part_lse)))
    added_far = spread(out)
    add_(added_far, spread(part))
    total = out.clone()
    add_(total, part)
    merge_(out, lse, (part, part_lse))
    return out, total, far.clone(), added_far.clone()


def test_more_elements_than_an_int32_counts(interpreted: Run) -> None:
    results = interpreted(far_apart, *drawn((4, 2, 3, 8), HALF, token_first=True))
    assert all(map(torch.equal, results[:2], results[2:]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1, 28, 700, 128)], ids=str)
def test_joining_on_a_gpu(shape: tuple[int, ...]) -> None:
    check_merge(on_gpu, drawn(shape, BRAIN, token_first=True))
    for total, part in sums(shape, BRAIN):
        assert torch.equal(on_gpu(added, total, part), total + part)
