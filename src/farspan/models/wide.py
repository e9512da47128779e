"""A float64 model whose own code computes nothing in float32: ground to compare on.

Many families round to float32 on the way, in norms, routers and recurrences. Where a sequence is
cut then decides how a recurrence rounds, by 1e-4 in gradients of decays, which no cut is to blame
for: the uncut one is as far from what float64 gives.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class InFloat64(TorchFunctionMode):
    """Inside it whoever asks for float32 gets float64. For models without a float32 parameter,
    whose gradient would be of another dtype."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {}))


def _widened(leaf: Any) -> Any:
    return torch.float64 if leaf is torch.float32 else leaf
