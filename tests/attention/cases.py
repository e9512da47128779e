"""A whole sequence of attention, chunk by chunk, as the engine does it, and what it must equal."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from farspan.attention.backends import BlockKernel, accumulate_dtype, reference
from farspan.attention.chunk import AttentionCall, attend, attend_backward
from farspan.engine.kernels import select_kernel
from farspan.program.attention_blocks import document_runs, plan_blocks
from tests.numerics import relative_error


@dataclass(frozen=True)
class Case:
    tokens: int
    chunk: int
    kv_block: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None  # first tokens, a tuple for each row
    dtype: torch.dtype = torch.float64

    @property
    def scale(self) -> float:
        return 0.7 * self.head_dim**-0.5

    @property
    def document_ids(self) -> Tensor | None:
        if self.documents is None:
            return None
        ids = torch.zeros(self.batch, self.tokens, dtype=torch.long)
        for row, starts in enumerate(self.documents):
            ids[row, list(starts)] = 1
        return ids.cumsum(1)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None

    def to(self, place: torch.dtype | str) -> "Inputs":
        """The same inputs in another dtype or on another device."""
        sinks = None if self.sinks is None else self.sinks.to(place)
        q, k, v, dout = (x.to(place) for x in (self.q, self.k, self.v, self.dout))
        return Inputs(q, k, v, dout, sinks)


Results = dict[str, Tensor]


def make_inputs(case: Case) -> Inputs:
    """Random tensors in the memory layout models use: [B, S, H, D] seen as [B, H, S, D]."""

    def random(heads: int, size: int) -> Tensor:
        shape = case.batch, case.tokens, heads, size
        return torch.randn(shape, dtype=torch.float64).to(case.dtype).transpose(1, 2)

    sinks = torch.randn(case.heads, dtype=torch.float64).to(case.dtype) if case.sinks else None
    return Inputs(
        2 * random(case.heads, case.head_dim),
        2 * random(case.kv_heads, case.head_dim),
        random(case.kv_heads, case.value_dim),
        random(case.heads, case.value_dim),
        sinks,
    )


def expected(case: Case, inputs: Inputs) -> Results:
    """Dense attention and autograd in the dtype of the inputs."""
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in named.items() if x is not None}
    q, k, v = (leaves[name] for name in "qkv")
    out = reference(
        *(q, k, v),
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=leaves.get("sinks"),
        document_ids=case.document_ids,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def limits(case: Case, inputs: Inputs) -> dict[str, float]:
    """Relative errors that results may have: twice those of dense attention in the same dtype, and
    what exp(score - lse) loses when both are rounded to the accumulate dtype, which a dense
    softmax, normalised after exp(score - max), does not."""
    exact, plain = expected(case, inputs.to(torch.float64)), expected(case, inputs)
    keys = inputs.k.repeat_interleave(case.heads // case.kv_heads, 1)
    largest = float((inputs.q.double() @ keys.double().mT).abs().max()) * case.scale
    floor = torch.finfo(torch.float32).eps / 2 * min(largest, case.softcap or largest)
    return {name: 2 * relative_error(plain[name], x) + floor for name, x in exact.items()}


@dataclass
class Memory:
    """Keys, values and gradient sums of a sequence, laid out as a buffer is: [S, B, Hk, D] seen as
    [B, Hk, S, D]. What `keys` returned is poisoned at its next call, as a streaming slot is; keys
    from `limit` on must not be asked for."""

    k: Tensor
    v: Tensor
    limit: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    added: list[tuple[int, int]] = field(default_factory=list)
    slot: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        # Fresh: `contiguous` keeps another stride of a batch of one, as any stride of one place.
        self.k, self.v = (
            x.new_empty([x.shape[i] for i in (2, 0, 1, 3)]).permute(1, 2, 0, 3).copy_(x)
            for x in (self.k, self.v)
        )
        dtype = accumulate_dtype(self.k.dtype)
        self.dk, self.dv = (torch.zeros_like(x, dtype=dtype) for x in (self.k, self.v))

    def begin(self, limit: int) -> None:
        self.limit, self.asked, self.added = limit, [], []

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert 0 <= start < stop <= self.limit
        for old in self.slot:
            old.fill_(torch.nan)
        self.asked.append((start, stop))
        self.slot = k, v = self.k[:, :, start:stop].clone(), self.v[:, :, start:stop].clone()
        return k, v

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self.added.append((start, stop))
        self.dk[rows, :, start:stop] += dk
        self.dv[rows, :, start:stop] += dv

    def check(self, kv_block: int) -> None:
        """Each range once, ascending, within the grid, and its gradient in the same order."""
        assert all(stop <= after for (_, stop), (after, _) in pairwise(self.asked))
        assert all(start // kv_block == (stop - 1) // kv_block for start, stop in self.asked)
        assert self.added in ([], self.asked)


def run_chunked(case: Case, inputs: Inputs, kernel: BlockKernel | None = None) -> Results:
    """Forward over the chunks, then backward from the last chunk to the first."""
    kernel = kernel or select_kernel("cpu", case.dtype, case.head_dim, case.value_dim, case.softcap)
    memory = Memory(inputs.k, inputs.v)
    out = torch.full_like(inputs.dout, torch.nan)
    dq = torch.full_like(inputs.q, torch.nan)
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks).double()
    attended = {}
    starts = range(0, case.tokens, case.chunk)
    for start in starts:
        call, span = chunk_call(case, kernel, start)
        memory.begin(start)
        q, k, v = (x[:, :, span] for x in (inputs.q, inputs.k, inputs.v))
        attended[start] = attend(call, q, k, v, memory, inputs.sinks)
        out[:, :, span] = attended[start][0]
        memory.check(case.kv_block)
    for start in reversed(starts):
        call, span = chunk_call(case, kernel, start)
        memory.begin(start)
        dout, q, k, v = (x[:, :, span] for x in (inputs.dout, inputs.q, inputs.k, inputs.v))
        parts = attend_backward(call, dout, q, k, v, attended[start], memory, inputs.sinks)
        assert all(part.dtype == accumulate_dtype(case.dtype) for part in parts[:3])
        dq[:, :, span] = parts[0]
        memory.dk[:, :, span] += parts[1]
        memory.dv[:, :, span] += parts[2]
        if dsinks is not None and parts[3] is not None:
            dsinks += parts[3]
        memory.check(case.kv_block)
        assert memory.added == memory.asked
    results = {"out": out, "q": dq, "k": memory.dk, "v": memory.dv}
    return results if dsinks is None else results | {"sinks": dsinks}


def chunk_call(case: Case, kernel: BlockKernel, start: int) -> tuple[AttentionCall, slice]:
    stop = min(start + case.chunk, case.tokens)
    rows = case.documents
    runs = None if rows is None else [document_runs(row, start, stop) for row in rows]
    blocks = plan_blocks(start, stop, case.kv_block, case.window, runs)
    return AttentionCall(case.scale, case.softcap, blocks, start, kernel), slice(start, stop)


def every_token(tokens: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """Documents of one token each."""
    return (tuple(range(tokens)),) * rows


def cases() -> Sequence[Case]:
    """What a model or a batch can ask of attention, one thing at a time and together."""
    plain = Case(tokens=61, chunk=16, kv_block=24)
    two = replace(plain, batch=2)
    mixed = ((0, 5, 6, 7, 40), (0, 16, 33))
    return [
        plain,
        replace(plain, tokens=1),
        replace(plain, tokens=64, kv_block=64),
        replace(plain, tokens=5, chunk=1, kv_block=1),
        replace(plain, kv_block=5),
        replace(plain, chunk=100),
        replace(plain, kv_heads=4),
        replace(plain, kv_heads=1, heads=6, batch=3),
        replace(plain, head_dim=5, value_dim=5),
        replace(plain, value_dim=12),
        replace(plain, head_dim=12, value_dim=4, window=9, sinks=True),
        replace(plain, softcap=1.5),
        replace(two, softcap=1.5, window=20, documents=mixed),
        replace(plain, sinks=True),
        replace(plain, sinks=True, chunk=61),
        *(replace(plain, window=w) for w in (1, 7, 16, 17, 60, 200)),
        replace(plain, window=7, sinks=True, chunk=7, kv_block=7),
        replace(two, window=40, kv_block=7),
        replace(two, documents=((0, 20), (0, 20))),
        replace(two, documents=mixed),
        replace(two, documents=mixed, window=9, sinks=True),
        replace(two, documents=mixed, window=20, kv_block=5),
        replace(two, documents=every_token(61, 2)),
        replace(two, batch=3, documents=((0,), (0, 60), (0, 30, 31)), kv_block=8),
    ]


def long_cases() -> Sequence[Case]:
    """Beyond the tile of windows (64 and more) and the key split of the CPU kernel (512)."""
    wide = Case(tokens=1500, chunk=600, kv_block=512, heads=2, kv_heads=1)
    return [
        wide,
        replace(wide, window=100),
        replace(wide, window=700, sinks=True),
        replace(wide, window=300, softcap=2.0),
        replace(wide, batch=2, window=650, documents=((0, 3, 700), (0, 800, 1100))),
    ]
