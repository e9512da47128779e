"""How much work a rank is given: counted, so that neighbours on the machine cannot change it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# These give a tensor its place and touch nothing in it.
PLACING = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "set_",
    "resize_",
)
CALLS, TOUCHED, PRODUCTS, ATTENDED = "calls", "touched", "products", "attended"


class Counted(TorchDispatchMode):
    """Counts, of all operations in the block but views and collectives: calls, also of those that
    place a tensor; bytes of the tensors that are read and written; multiplications in products and
    in attention, whose causal calls count half and whose backward is 2.5 forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.found = dict.fromkeys((CALLS, TOUCHED, PRODUCTS, ATTENDED), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace != "aten":
            return out
        self.found[CALLS] += 1
        if func.overloadpacket.__name__ in PLACING:
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        self.found[TOUCHED] += sum({id(x): x.nbytes for x in tensors}.values())
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            inner = args[-2]
            self.found[PRODUCTS] += out.numel() * inner.shape[-1]
        elif func is FORWARD:
            causal = args[4] if len(args) > 4 else (kwargs or {}).get("is_causal", False)
            self.found[ATTENDED] += 2 * pairs(args[0], args[1], causal)
        elif func is BACKWARD:
            self.found[ATTENDED] += 5 * pairs(args[1], args[2], args[7])
        return out


def pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """Multiplications of one product of queries and keys."""
    every = q.numel() * k.shape[2]
    return every // 2 if causal else every
