"""What is computed is not read: on a GPU the CPU would wait for it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
READ = {_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal, _ATEN._unique2}


class Unread(TorchDispatchMode):
    """Inside it numbers, truths and sizes of what is computed are not asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func.overloadpacket not in READ, func
        if func.overloadpacket in (_ATEN.index, _ATEN.index_put_):
            masks = (x for x in args[1] if isinstance(x, Tensor) and x.dtype is torch.bool)
            assert not any(True for _ in masks), func
        return func(*args, **(kwargs or {}))
