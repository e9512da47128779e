"""What a graph saved goes into bytes and comes back the same, bit by bit and stride by stride."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farspan.activations import SavedActivations

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, 2).clone(memory_format=torch.preserve_format),
    "permuted": lambda x: x.permute(1, 2, 0),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "strided": lambda x: x[:, ::2],
    "narrow": lambda x: x[1:, :, 1:],
    "scalar": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}
NOTHING = torch.empty(0, dtype=torch.uint8)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def store_for(cell: SavedActivations, extra: int = 0) -> Tensor:
    return torch.full((cell.size() + extra,), 0xAB, dtype=torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(layout: str, dtype: torch.dtype) -> None:
    source = LAYOUTS[layout]((10 * torch.randn(3, 4, 6)).to(dtype))
    expected = source.clone()
    cell = SavedActivations([], {})
    handle = cell.pack(source)
    assert not isinstance(handle, Tensor)
    store = store_for(cell)
    cell.seal(store)
    moved = store.clone()
    store.zero_()
    source.zero_() if layout != "expanded" else None
    cell.restore(moved, {})
    found = cell.unpack(handle)
    assert torch.equal(found, expected)
    assert found.dtype is dtype
    assert found.stride() == source.stride()
    assert found.untyped_storage().data_ptr() == moved.data_ptr() or found.numel() == 0


def test_named_tensors_become_references() -> None:
    """A view of the layer's input is stored nowhere: it is taken from where the input then is."""
    base = torch.randn(2, 6, 4)
    views = [base, base.transpose(1, 2), base[1, 2:], base.view(12, 4)]
    expected = [view.clone() for view in views]
    cell = SavedActivations([], {"x": base, "out": torch.randn(3)})
    handles = [cell.pack(view) for view in views]
    assert cell.size() == 0
    assert cell.references == {"x"}
    cell.seal(NOTHING)
    slab = torch.full((10 + base.numel(),), torch.nan)
    elsewhere = slab[10:].view(2, 6, 4)
    elsewhere.copy_(base)
    base.fill_(torch.nan)
    cell.restore(NOTHING, {"x": elsewhere})
    for handle, view, same in zip(handles, views, expected, strict=True):
        found = cell.unpack(handle)
        assert torch.equal(found, same)
        assert found.stride() == view.stride()


def test_a_cast_of_a_named_tensor_is_no_reference() -> None:
    base = torch.randn(6)
    cell = SavedActivations([], {"x": base})
    cell.pack(base.double())
    cell.pack(base.view(torch.int32))
    assert cell.references == set()
    assert cell.count() == 2


@pytest.mark.parametrize("room", [0, 64, 128])
def test_more_than_planned_stays_on_the_device(room: int) -> None:
    """Beside the plan, and copied: the memory it lay in is written over."""
    sources = [torch.randn(16), torch.randn(40)[24:], torch.randn(4, 4).T]
    expected = [source.clone() for source in sources]
    cell = SavedActivations([], {})
    views = [cell.pack(source) for source in sources]
    store = torch.full((room,), 0xAB, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="more than planned.*activation_save_fraction: 0"):
        cell.seal(store)
    for source in sources:
        source.zero_()
    cell.restore(store.clone(), {})
    for view, tensor in zip(views, expected, strict=True):
        found = cell.unpack(view)
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()


def test_a_sealed_cell_holds_no_tensor() -> None:
    """Otherwise keeping it would keep what was evicted."""
    source = torch.randn(1000)
    alive = weakref.ref(source)
    cell = SavedActivations([], {"x": source[:10]})
    packed = cell.pack(source)
    cell.seal(store_for(cell))
    del source
    assert alive() is None
    assert not isinstance(packed, Tensor)
