"""Memory that CUDA kernels take and give back within themselves: no tensor ever shows it.

From torch 2.11 to 2.13 and its FlashAttention 2; each can be switched off by its name. Left out,
because it depends on the data or on the version of a library: partial sums of the embedding's
backward, scratch space of cub, and kernels that find another algorithm for other sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

MIB = 2**20
CUBLAS_WORKSPACE = 32 * MIB  # on Hopper and newer; 8.1 MiB before. One a thread and stream
ROWS = 128  # FlashAttention rounds lengths to these
HEAD_DIM = 32  # and head sizes up to these


class Temporary(StrEnum):
    """A kind of memory that kernels take."""

    CUBLAS = "cublas"  # a workspace at the first product of each thread, kept for good
    FLASH = "flash"  # the backward: fp32 dQ, row sums, dK and dV of every query head
    EMBEDDING = "embedding"  # the backward: indices, sorted, and where they were


PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))
FLASH_BACKWARD = frozenset(
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._flash_attention_backward.default,
    )
)
EMBEDDING_BACKWARD = aten.embedding_dense_backward.default
SORTED = 3072  # so many tokens or fewer are added one by one, without sorting


@dataclass(frozen=True, slots=True)
class Temporaries:
    """The kinds that are recorded."""

    kinds: frozenset[Temporary]

    def workspace(self, func: Any) -> int:
        """Bytes that the first such operation of a thread takes for good."""
        return CUBLAS_WORKSPACE if Temporary.CUBLAS in self.kinds and func in PRODUCTS else 0

    def within(self, func: Any, args: Sequence[Any]) -> tuple[int, ...]:
        """Bytes of each block that the operation takes and gives back, all alive together."""
        if func in FLASH_BACKWARD and Temporary.FLASH in self.kinds:
            return tuple(_flash_backward(func, args))
        if func is EMBEDDING_BACKWARD and Temporary.EMBEDDING in self.kinds:
            indices = args[1]
            return (indices.nbytes,) * 2 if indices.numel() > SORTED else ()
        return ()


NONE, ALL = Temporaries(frozenset()), Temporaries(frozenset(Temporary))


def _flash_backward(func: Any, args: Sequence[Any]) -> Iterator[int]:
    """Both operations have dout, q, k first; the one of SDPA has heads before tokens."""
    q: Tensor = args[1]
    k: Tensor = args[2]
    heads_first = func is not aten._flash_attention_backward.default
    batch, head_dim = q.shape[0], q.shape[3]
    heads, tokens = (q.shape[1], q.shape[2]) if heads_first else (q.shape[2], q.shape[1])
    kv_heads, keys = (k.shape[1], k.shape[2]) if heads_first else (k.shape[2], k.shape[1])
    rows = -(-tokens // ROWS) * ROWS
    yield batch * heads * rows * 4  # rowsum(dO * O)
    yield batch * rows * heads * (-(-head_dim // HEAD_DIM) * HEAD_DIM) * 4  # dQ
    if kv_heads != heads:
        yield batch * keys * heads * head_dim * q.element_size()  # dK
        yield batch * keys * heads * head_dim * q.element_size()  # dV
