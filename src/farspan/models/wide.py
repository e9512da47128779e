"""A float64 model whose own code computes nothing in float32: ground to compare on.

Many families round to float32 on the way. Gradients of Gemma's norm weights are then sums over
tokens in float32, DeepSeek's router is a matrix product in float32, and where a sequence is cut
decides how a recurrence rounds, by 1e-4 in gradients of decays. No cut is to blame for it: the
uncut sequence is as far from what float64 gives.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InFloat64(TorchDispatchMode):
    """Inside it whoever asks for float32 gets float64, also in a backward, which modes of the
    level above do not see. For models without a float32 parameter, whose gradient would be of
    another dtype."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func.overloadpacket in PRODUCTS:
            first, second, *rest = args
            # A table that was float32 to begin with, such as frequencies, was asked for nothing.
            if first.dtype is not second.dtype:
                args = first.double(), second.double(), *rest
        return func(*args, **kwargs)


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm)
