"""Puts the stand-in's operators in place, in a process that `python -m tests.standin` started."""

import ctypes
import os
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.attention import vendor

_library = torch.library.Library("aten", "IMPL")
_held = vendor.cuda_ops_on_cpu()  # for as long as the process lives


def install() -> None:
    """Attention first: what the CPU can compute is what operators.cpp hands to it."""
    _held.__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each operator has a kernel for CUDA already
        ctypes.CDLL(os.environ["STANDIN_OPERATORS"]).standin_install()
        _library.impl("addmm.dtype_out", _add_product, "CUDA")
    with suppress(ImportError):
        _interpret_bfloat16()
        _interpret_numbers()
        _launch_unseen()


def _add_product(
    total: Tensor,
    first: Tensor,
    second: Tensor,
    _: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """A product of narrow matrices that is added in fp32, which no CPU has."""
    product = alpha * (first.float() @ second.float())
    return out.copy_(product if beta == 0 else product + beta * total)


def _interpret_bfloat16() -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers."""
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != language.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _interpret_numbers() -> None:
    """Before Triton 3.7 a number is an array of one element, which NumPy 2.4 makes no integer."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _launch_unseen() -> None:
    """A launch copies all tensors to the CPU and back, which a GPU's does not."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def unseen(self: GridExecutor, *given: Any, **named: Any) -> None:
        told = torch.cuda.get_sync_debug_mode()
        if told:
            torch._C._cuda_set_sync_debug_mode(0)
        try:
            launch(self, *given, **named)
        finally:
            if told:
                torch._C._cuda_set_sync_debug_mode(told)

    GridExecutor.__call__ = unseen
