"""Views of an arena: where they are, what they share and what they do not."""

import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.engine import buffers as buffers_module
from farspan.engine import tiers as arena_module
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.tiers import Arena, CopyEngine
from farspan.program.builder import build_program
from farspan.program.strategies import strategy
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Tier

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


NAME = "attention.0"  # a buffer with O of all chunks


def buffers(slabs: dict[Tier, Arena]) -> ProgramBuffers:
    """Those of a small program, in slabs that are large enough."""
    model = ModelSpec("m", 8, 16, (LayerSpec(2, 2, 4, 4),) * 2, 8)
    schedule = replace(strategy("grouped", 2, 16), chunk=4, groups=2)
    program = build_program(model, RunSpec(1, 16), schedule)
    for tier, slab in slabs.items():
        slab.reserve(program.arena_bytes[tier])
    return ProgramBuffers(program, slabs, torch.float64, CopyEngine(CPU))


@pytest.fixture
def slabs() -> dict[Tier, Arena]:
    return {tier: Arena(tier, CPU) for tier in Tier}


def test_a_view_that_is_asked_for_again_has_its_own_version(slabs: dict[Tier, Arena]) -> None:
    """A slot is filled anew while a graph still names what it saved there."""
    made = buffers(slabs)
    first, second = (made.chunk(NAME, 0, 0)["out"] for _ in range(2))
    first.fill_(1)
    version = first._version
    second.fill_(2)
    assert first._version == version
    assert torch.equal(first, second)


@pytest.mark.parametrize("grows", [True, False])
def test_a_view_is_of_the_present_block(grows: bool, slabs: dict[Tier, Arena]) -> None:
    made = buffers(slabs)
    old = made.chunk(NAME, 0, 0)["out"].fill_(1)
    for slab in slabs.values():
        size = slab.nbytes
        if not grows:
            slab.release()
        slab.reserve(size + grows)
        slab.poison()
    assert bool(made.chunk(NAME, 0, 0)["out"].isnan().all())
    assert torch.equal(old, torch.ones_like(old))


def test_a_view_first_asked_for_in_inference_mode_can_be_saved_for_a_backward(
    slabs: dict[Tier, Arena],
) -> None:
    made = buffers(slabs)
    with torch.inference_mode():
        made.chunk(NAME, 0, 0)["out"].fill_(3)
    view = made.chunk(NAME, 0, 0)["out"]
    weight = torch.ones_like(view, requires_grad=True)
    (weight * view).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(view, 3.0))


def test_views_beyond_those_kept_are_as_right(
    slabs: dict[Tier, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers_module, "VIEWS_KEPT", 2)
    made = buffers(slabs)
    chunks = range(len(made.program.chunks))
    assert len(chunks) > 2
    for chunk in chunks:
        made.chunk(NAME, chunk, 0)["out"].fill_(chunk)
    assert [int(made.chunk(NAME, chunk, 0)["out"].unique()) for chunk in chunks] == list(chunks)
    assert len(made._views) <= 2


def test_views_go_with_what_keeps_them(slabs: dict[Tier, Arena]) -> None:
    made = buffers(slabs)
    made.chunk(NAME, 0, 0)
    del made
    assert not any(slab.kept for slab in slabs.values())


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
    with pytest.raises(
        MemoryError, match=r"refused 1,152,921,504,606,846,976 bytes of .*: Cannot allo"
    ):
        made.reserve(2**60)
    assert made.nbytes == 0


class Refusal:
    """A system that locks no pages in place, and what torch's own allocator then does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, own: bool) -> None:
        self.own = own  # does it lock what it allocates itself?
        self.asked: list[int] = []
        self.given_back = 0
        Locks(monkeypatch)
        monkeypatch.setattr(arena_module, "_pin", self.refuse)
        monkeypatch.setattr(arena_module, "allocate_pinned", self.allocate)
        monkeypatch.setattr(arena_module, "_give_back_pinned", self.give_back)
        monkeypatch.setattr(arena_module, "available_host_bytes", lambda: free)

    def refuse(self, *_: object) -> None:
        raise RuntimeError("operation not supported\nwhere it was asked")

    def allocate(self, size: int) -> torch.Tensor:
        self.asked.append(size)
        if not self.own:
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self) -> None:
        self.given_back += 1


SIZE = 5 * mmap.PAGESIZE  # 8 pages as torch would lock it
PAGEABLE = r"cannot be locked for copies \(cudaHostRegister: operation not supported\): the"


def test_what_cannot_be_locked_in_place_is_locked_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal(monkeypatch, free=3 * mmap.PAGESIZE, own=True)  # and the 5 given back
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    made.reserve(SIZE)
    assert (refusal.asked, made.nbytes, made.is_pageable) == ([SIZE], SIZE, False)
    made.reserve(SIZE - 1)
    made.release()
    made.release()
    assert (len(refusal.asked), refusal.given_back, made.nbytes) == (1, 1, 0)
    made.reserve(SIZE)
    del made
    assert refusal.given_back == 2


@pytest.mark.parametrize(("free", "asked"), [(2**40, 1), (3 * mmap.PAGESIZE - 1, 0)])
def test_what_cannot_be_locked_at_all_is_pageable(
    monkeypatch: pytest.MonkeyPatch, free: int, asked: int
) -> None:
    """Torch is asked where it would have room for a power of two."""
    refusal = Refusal(monkeypatch, free, own=False)
    made = Arena(Tier.HOST, torch.device("cuda:1"))
    with pytest.warns(UserWarning, match=PAGEABLE):
        made.reserve(SIZE - 7)
    assert len(refusal.asked) == asked
    assert (made.nbytes, made.is_pageable) == (SIZE - 7, True)
    view = made.view(64, (8,), torch.float32, mapped=True)
    view.fill_(3)
    assert view.device.type == "cpu"
    assert bool((made.view(64, (8,), torch.float32) == 3).all())
    made.release()
    assert (made.nbytes, made.is_pageable, refusal.given_back) == (0, False, 0)


@pytest.mark.gpu
def test_the_host_arena_is_pinned() -> None:
    made = Arena(Tier.HOST, torch.device("cuda"))
    made.reserve(256)
    assert made.view(0, (64,), torch.float32).is_pinned()
    assert made.view(0, (64,), torch.float32).device.type == "cpu"


IS_STAND_IN = torch.cuda.is_available() and "stand-in" in torch.cuda.get_device_name()


@pytest.mark.gpu
@pytest.mark.skipif(not IS_STAND_IN, reason="asks the stand-in to refuse")
@pytest.mark.parametrize("locks", ["own", "none"])
def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch, locks: str) -> None:
    """And nothing of it is left to be reported by who asks CUDA next."""
    monkeypatch.setenv("STANDIN_LOCKS", locks)
    torch._C._host_emptyCache()  # what was locked before would be handed out again
    made = Arena(Tier.HOST, torch.device("cuda"))
    if locks == "own":
        made.reserve(5000)
    else:
        with pytest.warns(UserWarning, match="cannot be locked"):
            made.reserve(5000)
    assert made.is_pageable is (locks == "none")
    assert made.view(0, (64,), torch.float32).is_pinned() is (locks == "own")
    torch.cuda.synchronize()
    made.release()
