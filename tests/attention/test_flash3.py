"""FlashAttention-3 behind the aten names: stood in for, as its package would register it."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.library import Library
from torch.nn import attention

from farspan.attention.backends import CudaFlash
from farspan.attention.flash3 import NAME, PACKAGE, flash_attention_3, refuse_missing
from farspan.spec import Refused
from tests.attention import vendor
from tests.attention.cases import Case
from tests.attention.test_cell import compare

REGISTRY = sys.modules["torch.nn.attention._registry"]
CASE = Case(tokens=50, chunk=20, kv_block=16, window=30)


class Handle:
    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        assert self.library is not None
        self.library._destroy()
        self.library = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The stand-in is what FA3 registers; its calls."""
    found: list[str] = []

    def noted(name: str, op: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            found.append(name)
            return op(*given, **options)

        return call

    def register() -> Handle:
        library = Library("aten", "IMPL")
        for name, op in (
            (vendor.FORWARD_FLASH, vendor.flash_forward),
            (vendor.BACKWARD_FLASH, vendor.flash_backward),
        ):
            library.impl(name, noted(name, op), "CPU")
        return Handle(library)

    monkeypatch.setitem(REGISTRY._FLASH_ATTENTION_IMPLS, NAME, register)
    yield found
    assert attention.current_flash_attention_impl() is None


def test_a_step_runs_on_it_and_leaves_nothing(calls: list[str]) -> None:
    with flash_attention_3():
        assert attention.current_flash_attention_impl() == NAME
        compare(CASE, CudaFlash())
        with flash_attention_3():
            compare(CASE, CudaFlash())
        assert attention.current_flash_attention_impl() == NAME
    assert set(calls) == {vendor.FORWARD_FLASH, vendor.BACKWARD_FLASH}
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 4, 4, 0.0, True, False)


def test_it_is_left_when_a_step_fails(calls: list[str]) -> None:
    with pytest.raises(KeyError), flash_attention_3():
        raise KeyError
    assert attention.current_flash_attention_impl() is None
    assert not calls


def test_without_its_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(Refused, match=f"attention: fa3 needs the package {PACKAGE}.*choose auto"):
        refuse_missing()
    loaded = pytest.raises(Refused, match=r"attention: fa3 cannot be loaded: .*choose auto")
    with loaded, flash_attention_3():
        raise AssertionError


def test_a_package_of_that_name_without_its_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, ModuleType(PACKAGE))
    refused = pytest.raises(Refused, match=r"fa3 cannot be loaded: .*does not expose FA3")
    with refused, flash_attention_3():
        raise AssertionError


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "list_flash_attention_impls")
    with pytest.raises(Refused, match=r"fa3 needs PyTorch 2\.11"):
        refuse_missing()
