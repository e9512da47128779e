"""Draw dropout and noise of a step from random numbers that depend only on their place.

A cell that runs again must draw the same numbers, and so must another chunk size, schedule or
layout. So no generator advances: a number follows from its seed, step, module, row, position in the
row and feature alone. In arithmetic of 32 bits, modulo 2**32:

    t, u    the halves of splitmix64 of (row, position), which begins at the hash of (seed, step,
            module); f the lower half of that of the feature, which begins at another hash
    number  x = t + f;  x ^= x >> 16;  x *= A;  x ^= x >> 15;  x ^= u;  x *= B;  x ^= x >> 16;
            x *= C

A number below p * 2**32, in the order of signed ones, drops its element. A mask is never kept: the
backward makes it again. The model is not changed: modules have another forward while a step runs,
as their attention has another implementation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.hf.swap import forwards, put_in
from farspan.hf.unsupported import drawing_dropouts
from farspan.kernels.launch import TILE, Launch, padded, warps_of
from farspan.spec import UnsupportedError

A, B, C = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32
PIECE = 1 << 18  # numbers made at one time: 1 MiB, and as much scratch memory
NOISE = "input embeddings"  # module name of the noise
_ROWS = 40  # bits of a position, below the row


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _words(counters: Tensor, key: int) -> Tensor:
    """Return two random int32 words [..., 2] for each int64 counter [...], by splitmix64."""
    z = counters.mul_(_GOLDEN).add_(_signed(key))
    for shift, factor in (30, _FIRST), (27, _SECOND):
        z ^= (z >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        z *= factor
    z ^= (z >> 31).bitwise_and_(2**33 - 1)
    return z.view(torch.int32).view(*z.shape, 2)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Random numbers for one module's input, [batch, tokens, ...], by position in the sequence."""

    keys: tuple[int, int]  # of tokens and of features, 64 bits each
    row: int  # of the tensor's first sequence
    first: int  # position of its first token
    fused: bool = False  # a kernel draws them

    def words(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return random int32 words, from which each element's number is mixed: two per token,
        [batch, tokens, 2], and one per feature, [features]."""
        batch, tokens, features = x.shape
        rows = torch.arange(self.row, self.row + batch, device=x.device)[:, None]
        places = torch.arange(self.first, self.first + tokens, device=x.device)
        of_tokens = _words((rows << _ROWS) + places, self.keys[0])
        return of_tokens, _words(torch.arange(features, device=x.device), self.keys[1])[:, 0]

    def fill(self, x: Tensor) -> Iterator[tuple[tuple[Any, ...], Tensor, Tensor]]:
        """Cut x [batch, tokens, features] into pieces, each some tokens of one sequence. Yield, for
        each, (index, numbers, scratch): its index in x, its random numbers (int32), and scratch
        memory of the same size; the next piece overwrites both. On the meta device yield nothing,
        but allocate memory."""
        batch, tokens, features = x.shape
        memory = torch.empty(2, max(PIECE, features), dtype=torch.int32, device=x.device)
        of_tokens, f = self.words(x)
        t, u = of_tokens.unbind(-1)
        step = max(1, PIECE // max(1, features))
        for row in range(0 if x.is_meta else batch):
            for start in range(0, tokens, step):
                place = row, slice(start, min(start + step, tokens))
                size = t[place].numel() * features
                numbers, beside = (m[:size].view(-1, features) for m in memory)
                _mix(t[place][:, None], u[place][:, None], f, numbers, beside)
                yield place, numbers, beside


def _mix(t: Tensor, u: Tensor, f: Tensor, x: Tensor, beside: Tensor) -> None:
    torch.add(t, f, out=x)
    _fold(x, 16, beside)
    x *= A
    _fold(x, 15, beside)
    x ^= u
    x *= B
    _fold(x, 16, beside)
    x *= C


def _fold(x: Tensor, shift: int, beside: Tensor) -> None:
    """Compute x ^= x >> shift in place, with x as unsigned numbers."""
    torch.bitwise_right_shift(x, shift, out=beside)
    beside &= 2 ** (32 - shift) - 1
    x ^= beside


def dropped(x: Tensor, p: float, numbers: Numbers) -> Tensor:
    """Apply dropout to x [batch, tokens, ...]: zero elements with probability p (to 2**-32), and
    divide the others by 1 - p. The function is linear in x, and its own gradient."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if p >= 1:
        return out.zero_()
    below = min(round(p * 2**32), 2**32 - 1) - 2**31
    given, found = x.flatten(2), out.flatten(2)
    if numbers.fused:
        drop_launch(given.contiguous(), found, below, 1 / (1 - p), numbers).run(x)
        return out
    for place, number, beside in numbers.fill(given):
        part = torch.mul(given[place], 1 / (1 - p), out=found[place])
        drops = beside.view(torch.bool)[:, : number.shape[1]]
        part.masked_fill_(torch.lt(number, below, out=drops), 0)
    return out


def drop_launch(x: Tensor, out: Tensor, below: int, scale: float, numbers: Numbers) -> Launch:
    """Return the launch of the dropout kernel for contiguous x, [batch, tokens, features]."""
    words, features = numbers.words(x)
    width = x.shape[2]
    block = min(padded(width), TILE)
    given = {"x": x, "out": out, "words": words, "features": features.contiguous()}
    sizes = {"width": width, "block": block, "num_warps": warps_of(block, 32)}
    programs = x.shape[0] * x.shape[1], -(-width // block)
    return Launch("drop_kernel", programs, given | {"below": below, "scale": scale} | sizes)


def noisy(x: Tensor, most: float, numbers: Numbers) -> Tensor:
    """Add noise, uniform from -most to most with 24 random bits, to x [batch, tokens, hidden]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for place, number, beside in numbers.fill(x):
        torch.bitwise_right_shift(number, 8, out=number)
        noise = torch.mul(number, most / 2**23, out=beside.view(torch.float32))
        torch.add(x[place], noise, out=out[place])
    return out


Change = Callable[[Tensor], Tensor]


class Adjoint(torch.autograd.Function):
    """Autograd function `ahead`, linear up to a constant. `back` makes the gradient of its input
    from that of its output, so autograd saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Change, back: Change) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dout), None, None


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Range of tokens on which a module is called: a chunk of some batch rows, or part of one."""

    first: int  # position of the first token in the sequence
    tokens: int
    row: int = 0  # of the batch, the first
    extra: int = 0  # of the tokens, the last ones that are not in the sequence

    def part(self, start: int, stop: int) -> "TokenRange":
        """Return the range of tokens [start, stop) within this one."""
        stop = min(stop, self.tokens)
        extra = max(0, stop - max(start, self.tokens - self.extra))
        return TokenRange(self.first + start, stop - start, self.row, extra)


@dataclass(slots=True)
class Draws:
    """Random draws of one call of a step, which recomputed cells repeat. Invariant: `place` is the
    range of tokens on which modules are being called."""

    seed: int
    step: int  # number of the call
    row: int  # of the first sequence among those of all replicas
    tokens: int  # of a whole sequence
    fused: bool = False  # dropouts run on the device's own kernel
    alpha: float | None = None  # of the noise on embeddings; None: no noise
    place: TokenRange = TokenRange(0, 0)
    asked: set[str] = field(default_factory=set)  # modules already called with these tokens

    def at(self, place: TokenRange) -> None:
        """Set the range of tokens on which modules are called next."""
        self.place, self.asked = place, set()

    def numbers(self, name: str, x: Tensor) -> Numbers:
        """Return the random numbers of a module for its input x. Raises UnsupportedError if x does
        not have the shape [batch, tokens, ...] of the current range of tokens."""
        if x.ndim < 3 or x.shape[1] != self.place.tokens:
            raise _given_other(name, x)
        if name in self.asked:
            raise UnsupportedError(
                f"model: {name} is called twice with the same tokens, and would drop the same "
                "elements both times; set its probability to 0"
            )
        self.asked.add(name)
        digest = blake2b(f"{self.seed} {self.step} {name}".encode(), digest_size=16).digest()
        keys = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        return Numbers(keys, self.row + self.place.row, self.place.first, self.fused)

    def forward(self, name: str, module: nn.Dropout, x: Tensor) -> Tensor:
        drop = partial(dropped, p=module.p, numbers=self.numbers(name, x))
        return Adjoint.apply(x, drop, drop)

    def embed(self, table: nn.Module, forward: Callable[..., Tensor], *ids: Any) -> Tensor:
        """Run the embedding, and in training add NEFTune's noise to its output."""
        out = forward(*ids)
        if self.alpha is None or not table.training:
            return out
        most = self.alpha / (self.tokens * out.shape[2]) ** 0.5
        noise = partial(noisy, most=most, numbers=self.numbers(NOISE, out))
        return Adjoint.apply(out, noise, _same)


def refuse_noise(alpha: float | None) -> float | None:
    """Check and return NEFTune's alpha. Raises UnsupportedError if it is below 0 or infinite."""
    if alpha is not None and not 0 <= alpha < float("inf"):
        raise UnsupportedError(f"neftune_alpha: expected a number of at least 0, got {alpha}")
    return alpha


def _given_other(name: str, x: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"model: {name} gets {list(x.shape)}, not a chunk's tokens in order, [batch, tokens, ...], "
        "so its dropout cannot be repeated; set its probability to 0"
    )


@contextmanager
def drawing(model: PreTrainedModel, draws: Draws | None) -> Iterator[None]:
    """Inside the context, draw dropouts and embedding noise from `draws`; None turns both off."""
    found: dict[nn.Module, Callable[..., Tensor]] = {}
    for name, module in drawing_dropouts(model):
        found[module] = _same if draws is None else partial(draws.forward, name, module)
    if draws is not None and draws.alpha is not None:
        table = model.get_input_embeddings()
        found[table] = partial(draws.embed, table, table.forward)
    with put_in(forwards(found)):
        yield


@contextmanager
def still(model: PreTrainedModel) -> Iterator[None]:
    """Inside the context, have dropouts return copies of their inputs. Cells can then be examined,
    and autograd saves the same tensors as in training."""

    def forward(name: str, x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise _given_other(name, x)
        return x.clone()

    found = {module: partial(forward, name) for name, module in drawing_dropouts(model)}
    with put_in(forwards(found)):
        yield


def _same(x: Tensor) -> Tensor:
    return x
