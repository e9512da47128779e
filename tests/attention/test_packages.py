"""FlashAttention-3 behind the aten names, and FlashAttention-4: stand-ins as their packages are."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.library import Library
from torch.nn import attention

from farspan.attention.backends import CudaFlash, Directed
from farspan.engine.kernels import (
    NAME,
    PACKAGES,
    AttentionKernels,
    Flash4,
    flash_4_fault,
    flash_attention_3,
    refuse_missing,
)
from farspan.spec import AttentionKernel, UnsupportedError
from tests.attention import vendor
from tests.attention.cases import Case
from tests.attention.test_cell import compare

REGISTRY = sys.modules["torch.nn.attention._registry"]
FA3, FA4 = AttentionKernel.FA3, AttentionKernel.FA4
PACKAGE, PACKAGE_4 = (PACKAGES[kernel][0] for kernel in (FA3, FA4))
CPU = torch.device("cpu")
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
    with AttentionKernels(CPU, torch.float64, FA3).ready():
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
    with pytest.raises(
        UnsupportedError, match=f"attention: fa3 needs the package {PACKAGE}.*choose auto"
    ):
        refuse_missing(FA3)
    loaded = pytest.raises(
        UnsupportedError, match=r"attention: fa3 cannot be loaded: .*choose auto"
    )
    with loaded, flash_attention_3():
        raise AssertionError


def test_a_package_of_that_name_without_its_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, ModuleType(PACKAGE))
    refused = pytest.raises(UnsupportedError, match=r"fa3 cannot be loaded: .*does not expose FA3")
    with refused, flash_attention_3():
        raise AssertionError


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "list_flash_attention_impls")
    with pytest.raises(UnsupportedError, match=r"fa3 needs PyTorch 2\.11"):
        refuse_missing(FA3)


# -- FlashAttention-4 --------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> vendor.FlashAttention4:
    """The package, dense and on a CPU."""
    made, module = vendor.FlashAttention4(), ModuleType(PACKAGE_4)
    module.__spec__ = ModuleSpec(PACKAGE_4, None)
    vars(module).update(_flash_attn_fwd=made.forward, _flash_attn_bwd=made.backward)
    monkeypatch.setitem(sys.modules, PACKAGE_4, module)
    flash_4_fault.cache_clear()
    return made


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, window=None, softcap=3.0, sinks=True), replace(CASE, softcap=2.0)]
)
def test_flash_attention_4_equals_dense_attention(case: Case, four: vendor.FlashAttention4) -> None:
    """Windows, soft caps, and sinks, which are a correction of its LSE."""
    compare(case, Flash4(case.softcap))
    assert {name for name, _ in four.calls} == {"forward", "backward"}
    assert not any(deterministic for _, deterministic in four.calls)


@pytest.mark.parametrize("turned", [False, True])
def test_flash_attention_4_may_be_one_direction(turned: bool, four: vendor.FlashAttention4) -> None:
    ways = (CudaFlash(), Flash4()) if turned else (Flash4(), CudaFlash())
    with vendor.cuda_ops_on_cpu() as calls:
        compare(CASE, Directed(*ways))
    own = "backward" if turned else "forward"
    other = vendor.FORWARD_FLASH if turned else vendor.BACKWARD_FLASH
    assert {name for name, _ in four.calls} == {own}
    assert set(calls) == {other}


def test_flash_attention_4_is_deterministic_where_torch_is(four: vendor.FlashAttention4) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compare(CASE, Flash4())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(deterministic for name, deterministic in four.calls if name == "backward")


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_it_is_tried_before_it_is_used(
    softcap: float | None, four: vendor.FlashAttention4, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that is off, and a function that takes other arguments."""
    refuse_missing(FA4)
    assert flash_4_fault(softcap, 64, CPU) is None
    flash_4_fault.cache_clear()
    four.off = 0.05
    assert "relative error of a call is 0.05" in str(flash_4_fault(softcap, 64, CPU))
    flash_4_fault.cache_clear()
    monkeypatch.setattr(sys.modules[PACKAGE_4], "_flash_attn_bwd", lambda q: q)
    four.off = 0.0
    assert "TypeError" in str(flash_4_fault(softcap, 64, CPU))
    flash_4_fault.cache_clear()


def test_without_its_package_flash_attention_4_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"fa4 needs the package flash_attn\.cute.*flash-attn-4"
    ):
        refuse_missing(FA4)
