"""The numbers of dropouts and noise of a whole sequence at once, in NumPy's arithmetic without
signs; and modules that apply them."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

np.seterr(over="ignore")
U32, U64 = np.uint32, np.uint64


def splitmix(counters: Any, key: int) -> Any:
    z = counters.astype(U64) * U64(0x9E3779B97F4A7C15) + U64(key)
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def numbers(name: str, seed: int, step: int, shape: Sequence[int], row: int = 0) -> Any:
    """As integers from -2**31 on, of rows from `row` on, [batch, tokens, features]."""
    batch, tokens, features = shape
    digest = blake2b(f"{seed} {step} {name}".encode(), digest_size=16).digest()
    rows = np.arange(row, row + batch, dtype=U64)[:, None] << U64(40)
    of_tokens = splitmix(rows + np.arange(tokens, dtype=U64), int.from_bytes(digest[:8], "little"))
    of_features = splitmix(np.arange(features), int.from_bytes(digest[8:], "little"))
    t, u = of_tokens.astype(U32)[..., None], (of_tokens >> U64(32)).astype(U32)[..., None]
    x = t + of_features.astype(U32)
    x = (x ^ (x >> U32(16))) * U32(0x7FEB352D)
    x = ((x ^ (x >> U32(15))) ^ u) * U32(0x846CA68B)
    x = (x ^ (x >> U32(16))) * U32(0x9E3779B1)
    return x.view(np.int32).astype(np.int64)


class Masked(nn.Module):
    """A dropout of whole sequences; or of `pieces` of a row, (row, first position, tokens) in the
    order of calls, which are told by their tokens."""

    pieces: Sequence[tuple[int, int, int]] = ()
    calls = 0

    def __init__(self, name: str, p: float, seed: int, step: int, row: int) -> None:
        super().__init__()
        self.name, self.p, self.given, self.row = name, p, (seed, step), row

    def forward(self, x: Tensor) -> Tensor:
        wide, row, first = x.flatten(2), self.row, 0
        if self.pieces and len(x) == 1:
            row, first, tokens = self.pieces[self.calls]
            self.calls, row = self.calls + 1, row + self.row
            assert tokens == x.shape[1]
        shape = len(wide), first + wide.shape[1], wide.shape[2]
        found = numbers(self.name, *self.given, shape, row)[:, first:]
        if self.p == 1:
            return 0 * x
        keeps = torch.from_numpy(found >= self.p * 2**32 - 2**31).view(x.shape)
        return x * keeps.to(x.dtype) / (1 - self.p)


def pieces_of(document_ids: Tensor) -> list[tuple[int, int, int]]:
    """Documents of rows, as recurrent layers are run on them."""
    found = []
    for number, row in enumerate(document_ids):
        counts = row.unique_consecutive(return_counts=True)[1].tolist()
        found += [(number, sum(counts[:i]), count) for i, count in enumerate(counts)]
    return found


def replace_dropouts(model: nn.Module, seed: int, step: int, row: int = 0) -> nn.Module:
    """The model, in place, whose dropouts drop what those of a step with these numbers do."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout | Masked):
            parent, _, last = name.rpartition(".")
            masked = Masked(name, module.p, seed, step, row)
            model.get_submodule(parent)._modules[last] = masked
    return model


def add_noise(model: Any, alpha: float, seed: int, step: int, row: int = 0) -> Any:
    """A handle of the hook that makes its embeddings noisy."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        found = numbers("input embeddings", seed, step, out.shape, row) >> 8
        most = np.float32(alpha / (out.shape[1] * out.shape[2]) ** 0.5 / 2**23)
        return out + torch.from_numpy(found.astype(np.float32) * most)

    return model.get_input_embeddings().register_forward_hook(hook)
