"""Views of an arena: where they are, what they share and what they do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.spec import Tier
from farspan.transfer.arena import Arena

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def arena(size: int, tier: Tier = Tier.DEVICE) -> Arena:
    made = Arena(tier, CPU)
    made.reserve(size)
    return made


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(0, 20),
    st.sampled_from([*DTYPES, torch.uint8]),
)
def test_a_view_is_the_bytes_at_its_address(
    shape: list[int], place: int, dtype: torch.dtype
) -> None:
    slab = arena(8192)
    address = 64 * place
    view = slab.view(address, tuple(shape), dtype)
    assert view.shape == tuple(shape)
    assert view.is_contiguous()
    assert view.dtype is dtype
    view.copy_(torch.arange(view.numel()).reshape(shape))
    raw = slab.view(address, (view.nbytes,), torch.uint8)
    assert raw.data_ptr() == view.data_ptr()
    assert torch.equal(raw.view(dtype).reshape(shape), view)
    whole = slab.view(0, (8192,), torch.uint8)
    assert view.data_ptr() - whole.data_ptr() == address


def test_writing_one_view_leaves_the_others_unmodified_to_autograd() -> None:
    """Autograd checks version counters of what it saved; buffers share a slab, not a counter."""
    slab = arena(256)
    saved, other = (slab.view(at, (4,), torch.float64) for at in (0, 128))
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    saved.fill_(3)
    product = (weight * saved).sum()
    other.fill_(7)
    slab.view(128, (4,), torch.float64).add_(1)
    (gradient,) = torch.autograd.grad(product, [weight])
    assert torch.equal(gradient, torch.full((4,), 3.0, dtype=torch.float64))


def test_writing_a_saved_view_itself_is_noticed() -> None:
    slab = arena(256)
    saved = slab.view(0, (4,), torch.float64).fill_(3)
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    product = (weight * saved).sum()
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(product, [weight])


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan(dtype: torch.dtype) -> None:
    slab = arena(512)
    view = slab.view(64, (7, 3), dtype).fill_(1)
    slab.poison()
    assert bool(view.isnan().all())


def test_a_view_must_be_aligned_and_inside() -> None:
    slab = arena(64)
    slab.view(0, (8,), torch.float64)
    slab.view(64, (0, 3), torch.float64)
    for address, count in ((4, 1), (0, 9), (64, 1), (-8, 1)):
        with pytest.raises(AssertionError):
            slab.view(address, (count,), torch.float64)


def test_reserve_keeps_a_slab_that_is_large_enough() -> None:
    slab = arena(128)
    assert slab.nbytes == 128
    before = slab.view(0, (128,), torch.uint8).data_ptr()
    slab.reserve(128)
    assert slab.view(0, (128,), torch.uint8).data_ptr() == before
    slab.reserve(32)
    assert slab.view(0, (128,), torch.uint8).data_ptr() == before
    slab.reserve(256)
    assert slab.nbytes == 256
    slab.release()
    assert slab.nbytes == 0


def test_tiers_are_separate_memory() -> None:
    one, other = arena(64, Tier.DEVICE), arena(64, Tier.HOST)
    one.view(0, (8,), torch.float64).fill_(1)
    other.view(0, (8,), torch.float64).fill_(2)
    assert torch.equal(one.view(0, (8,), torch.float64), torch.ones(8, dtype=torch.float64))


@pytest.mark.gpu
def test_the_host_arena_is_pinned() -> None:
    made = Arena(Tier.HOST, torch.device("cuda"))
    made.reserve(256)
    assert made.view(0, (64,), torch.float32).is_pinned()
    assert made.view(0, (64,), torch.float32).device.type == "cpu"
