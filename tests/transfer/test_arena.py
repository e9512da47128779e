"""Views of an arena: where they are, what they share and what they do not."""

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.spec import Tier
from farspan.transfer import arena as arena_module
from farspan.transfer.arena import Arena

CPU = torch.device("cpu")
STATM = Path("/proc/self/statm")
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


class Locks:
    """What is locked, in place of a driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, int] = {}  # address to bytes
        monkeypatch.setattr(arena_module, "_pin", self.pin)
        monkeypatch.setattr(arena_module, "_unpin", self.unpin)

    def pin(self, slab: torch.Tensor, device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        self.held[slab.data_ptr()] = slab.numel()

    def unpin(self, slab: torch.Tensor, device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        del self.held[slab.data_ptr()]


def test_what_is_locked_is_unlocked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it grows, is released, or is dropped without either."""
    locks = Locks(monkeypatch)
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    made.reserve(100)
    made.reserve(5000)
    assert list(locks.held.values()) == [2 * mmap.PAGESIZE]
    made.release()
    made.release()
    assert not locks.held
    made.reserve(300)
    view = made.view(0, (300,), torch.uint8).fill_(7)
    del made
    assert not locks.held
    assert bool((view == 7).all())


@pytest.mark.skipif(not STATM.exists(), reason="asks Linux what is resident")
def test_pages_are_there_before_they_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking would take them one by one, on one thread."""
    resident: list[int] = []
    size = 2**26

    def pin(*_: object) -> None:
        resident.append(int(STATM.read_text().split()[1]) * mmap.PAGESIZE)

    monkeypatch.setattr(arena_module, "_pin", pin)
    monkeypatch.setattr(arena_module, "_unpin", lambda *_: None)
    pin()
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    made.reserve(size)
    assert resident[1] - resident[0] > 0.9 * size


def test_locked_slabs_share_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks(monkeypatch)
    made = [Arena(Tier.HOST, torch.device("cuda:1")) for _ in range(8)]
    for number, each in enumerate(made):
        each.reserve(256)
        each.view(0, (64,), torch.float32).fill_(number)
    pages = [
        page for at, size in locks.held.items() for page in range(at, at + size, mmap.PAGESIZE)
    ]
    assert len(set(pages)) == len(made)
    assert all(page % mmap.PAGESIZE == 0 for page in pages)
    assert [each.nbytes for each in made] == [256] * len(made)
    for number, each in enumerate(made):
        assert bool((each.view(0, (64,), torch.float32) == number).all())


def test_storages_begin_where_pages_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Tensor.is_pinned` asks for the first byte of the storage."""
    locks = Locks(monkeypatch)
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    made.reserve(300)
    assert made.view(64, (8,), torch.float32).untyped_storage().data_ptr() in locks.held


def test_what_the_system_does_not_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Locks(monkeypatch)
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    with pytest.raises(MemoryError, match="gave no 1,152,921,504,606,846,976 bytes: Cannot allo"):
        made.reserve(2**60)
    assert made.nbytes == 0


def test_a_slab_that_cannot_be_locked_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    Locks(monkeypatch)
    monkeypatch.setattr(arena_module, "_pin", refuse)
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="out of memory"):
        made.reserve(256)
    assert made.nbytes == 0
    made.release()


@pytest.mark.gpu
def test_the_host_arena_is_pinned() -> None:
    made = Arena(Tier.HOST, torch.device("cuda"))
    made.reserve(256)
    assert made.view(0, (64,), torch.float32).is_pinned()
    assert made.view(0, (64,), torch.float32).device.type == "cpu"
