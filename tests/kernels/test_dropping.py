"""A kernel drops what PyTorch's operators drop, and rounds as they do."""

import pytest
import torch

from farspan.hf.dropout import Numbers, dropped
from tests.kernels.cases import INTERPRETED, Run, dropped_by_kernel, place_of


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 96), (1, 3, 5000), (3, 2, 2, 7)], ids=str)
def test_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype, interpreted: Run) -> None:
    x = torch.randn(shape).to(dtype)
    for p in (0.1, 0.5, 0.97):
        plain = dropped(x.to(place_of(interpreted)), p, Numbers((2**63 + 11, 77), 3, 40)).cpu()
        assert plain.count_nonzero() < x.numel()
        assert torch.equal(interpreted(dropped_by_kernel, x, p, 3, 40), plain)
    across = x.transpose(0, 1).contiguous().transpose(0, 1)
    expected = dropped(x.to(place_of(interpreted)), 0.5, Numbers((2**63 + 11, 77), 0, 0)).cpu()
    assert torch.equal(interpreted(dropped_by_kernel, across, 0.5, 0, 0), expected)
