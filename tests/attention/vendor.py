"""The CUDA attention ops as their contracts say, dense and on a CPU.

Registered under the ops' own names, so that the real dispatcher checks schemas and the kernels that
call them are tested in float64 on a machine without a GPU. They refuse what the real ops get wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library

from farspan.attention.backends import accumulate_dtype

FORWARD_FLASH, BACKWARD_FLASH = "_flash_attention_forward", "_flash_attention_backward"
FORWARD_CUDNN = "_scaled_dot_product_cudnn_attention"
BACKWARD_CUDNN = "_scaled_dot_product_cudnn_attention_backward"

Layout = tuple[int, ...]  # strides of the dimensions that have more than one place
Plans = dict[tuple[Any, ...], tuple[Layout, Layout]]  # what cuDNN keeps: of O and dO, by its key


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """In float64, whatever the dtype; lse is in the one that the ops give it in. A softcap of 0 is
    none."""
    dtype, wide = q.dtype, accumulate_dtype(q.dtype)
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).to(dtype), scores.logsumexp(-1).to(wide)


def dense_backward(
    tensors: tuple[Tensor, ...], hidden: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """From the out and lse that are given, as all flash attention does."""
    dtype = tensors[1].dtype
    dout, q, k, v, out, lse = (x.double() for x in tensors)
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores, slope = q @ wide_k.mT * scale, torch.ones((), dtype=torch.float64)
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1 - bounded.square()
    weights = (scores.masked_fill(hidden, -torch.inf) - lse.unsqueeze(-1)).exp()
    dscores = weights * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True)) * slope * scale
    dk, dv = dscores.mT @ q, weights.mT @ dout
    dk, dv = (x.unflatten(1, (k.shape[1], groups)).sum(2) for x in (dk, dv))
    return (dscores @ wide_k).to(dtype), dk.to(dtype), dv.to(dtype)


def need_dense_rows(*tensors: Tensor) -> None:
    assert all(x.stride(-1) == 1 for x in tensors)


def in_layout_of(q: Tensor, out: Tensor) -> Tensor:
    """The ops make O as torch.empty_like(q): its dimensions lie in memory as those of q do."""
    return torch.empty_like(q).copy_(out)


def layout_of(x: Tensor) -> Layout:
    return tuple(s for s, extent in zip(x.stride(), x.shape, strict=True) if extent > 1)


def flash_hidden(queries: int, keys: int, causal: bool, options: dict[str, Any]) -> Tensor:
    """Bottom right aligned; one side of -1 beside a window on the other becomes `keys`."""
    left, right = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    right = 0 if causal else right
    left = -1 if left >= keys else left
    if left < 0 and right < 0:
        return torch.zeros(queries, keys, dtype=torch.bool)
    left, right = keys if left < 0 else left, keys if right < 0 else right
    diagonal = torch.arange(queries)[:, None] + keys - queries
    column = torch.arange(keys)
    return (column < diagonal - left) | (column > diagonal + right)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    _, _, queries, keys, dropout, causal, _ = rest
    need_dense_rows(q, k, v)
    assert (q.shape[1], k.shape[1], dropout) == (queries, keys, 0.0)
    hidden = flash_hidden(queries, keys, causal, options)
    of_heads = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = dense_forward(of_heads[0], of_heads[1], of_heads[2], hidden, options["scale"])
    none = torch.empty(0)
    return in_layout_of(q, out.transpose(1, 2)), lse, none, none, none


def flash_backward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
    dout, q, k, v, out, lse = given[:6]
    _, _, queries, keys, dropout, causal, _, _ = given[6:]
    need_dense_rows(dout, q, k, v, out)
    assert lse.is_contiguous()
    assert (q.shape[1], k.shape[1], dropout) == (queries, keys, 0.0)
    hidden = flash_hidden(queries, keys, causal, options)
    heads = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = dense_backward((*heads, lse), hidden, options["scale"])
    return tuple(x.transpose(1, 2).contiguous() for x in gradients)


@dataclass
class FlashAttention4:
    """The two private functions of the package, as they are since 2026-06-24: tensors are
    [B, S, H, D], None is all keys of a side, softcap 0 is none."""

    calls: list[tuple[str, bool]] = field(default_factory=list)  # and were they deterministic
    off: float = 0.0  # by which results are wrong

    def forward(self, *tensors: Tensor, return_lse: bool, **options: Any) -> tuple[Any, ...]:
        self.calls.append(("forward", False))
        assert return_lse
        q, k, v = (x.transpose(1, 2) for x in tensors)
        out, lse = dense_forward(q, k, v, *self._options(q, k, options))
        return out.transpose(1, 2).contiguous() * (1 + self.off), lse, None, None

    def backward(self, *tensors: Tensor, deterministic: bool, **options: Any) -> tuple[Any, ...]:
        self.calls.append(("backward", deterministic))
        q, k, v, out, dout = (x.transpose(1, 2) for x in tensors[:5])
        given = (dout, q, k, v, out, tensors[5])
        return tuple(
            x.transpose(1, 2).contiguous()
            for x in dense_backward(given, *self._options(q, k, options))
        )

    def _options(
        self, q: Tensor, k: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, float, float]:
        left = options["window_size_left"]
        sides = {"window_size_left": -1 if left is None else left, "window_size_right": -1}
        hidden = flash_hidden(q.shape[2], k.shape[2], options["causal"], sides)
        return hidden.to(q.device), options["softmax_scale"], options["softcap"]


def cudnn_hidden(queries: int, keys: int, causal: bool) -> Tensor:
    """Top left aligned."""
    assert queries % 128 == 0
    assert keys % 128 == 0
    everything = torch.ones(queries, keys, dtype=torch.bool)
    return everything.triu(1) if causal else ~everything


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, *rest: Any, **options: Any
) -> tuple[Any, ...]:
    dropout, causal = rest[:2] if rest else (0.0, False)
    need_dense_rows(q, k, v)
    assert (bias, with_lse, dropout) == (None, True, 0.0)
    hidden = cudnn_hidden(q.shape[2], k.shape[2], causal)
    out, lse = dense_forward(q, k, v, hidden, options["scale"])
    none = torch.empty(0)
    sizes = q.shape[2], k.shape[2]
    return in_layout_of(q, out), lse.unsqueeze(-1), none, none, *sizes, none, none, none


def cudnn_backward(plans: Plans, *given: Any, **options: Any) -> tuple[Tensor, ...]:
    """A plan is kept under q, k, v and flags alone, and has the strides of O and dO of its first
    call in it: it would read those of a later call in another layout as what they are not."""
    dout, q, k, v, out, lse, _, _, bias, _, _, queries, keys, dropout, causal = given
    key = (*((x.shape, layout_of(x)) for x in (q, k, v)), causal)
    layouts = layout_of(out), layout_of(dout)
    assert plans.setdefault(key, layouts) == layouts, "a second layout of O, dO for one plan"
    need_dense_rows(dout, q, k, v, out)
    assert lse.is_contiguous()
    assert lse.ndim == 4
    assert (bias, queries, keys, dropout) == (None, q.shape[2], k.shape[2], 0.0)
    hidden = cudnn_hidden(queries, keys, causal)
    return dense_backward((dout, q, k, v, out, lse.squeeze(-1)), hidden, options["scale"])


@contextmanager
def cuda_ops_on_cpu(shapes: set[tuple[Any, ...]] | None = None) -> Iterator[dict[str, int]]:
    """Within it the CUDA ops answer for CPU tensors; the value counts the calls of each. `shapes`
    takes what each call is distinguished by: the op, and shapes and strides of its tensors."""
    calls: dict[str, int] = {}

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            if shapes is not None:
                tensors = (x for x in given if isinstance(x, Tensor))
                shapes.add((name, *((x.shape, x.stride()) for x in tensors)))
            return op(*given, **options)

        return call

    ops: dict[str, Callable[..., Any]] = {
        FORWARD_FLASH: flash_forward,
        BACKWARD_FLASH: flash_backward,
        FORWARD_CUDNN: cudnn_forward,
        BACKWARD_CUDNN: partial(cudnn_backward, {}),
    }
    with _scoped_library("aten", "IMPL") as library:
        for name, op in ops.items():
            library.impl(name, counted(name, op), "CPU")
        yield calls
