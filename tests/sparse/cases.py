"""A whole sequence of sparse attention, chunk by chunk, as the engine does it, and what it must
equal."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from farspan.attention.backends import accumulate_dtype
from farspan.attention.chunk import AttentionCall
from farspan.engine.kernels import select_kernel
from farspan.profile.far_sizes import MOST_UNITS
from farspan.program.attention_blocks import Run, document_runs, plan_blocks
from farspan.sparse.attend import (
    FarKernel,
    SparseCall,
    attend_sparse,
    attend_sparse_backward,
    choose,
    seen_mask,
    sparse_call,
    sparse_reference,
)
from farspan.sparse.gathered import select_far
from farspan.sparse.pages import Selector, TopK
from farspan.spec import Sparse
from tests.attention.cases import Case, Inputs, Results
from tests.sparse.memory_pages import MemoryPages

SPARSE = Sparse(page=4, budget=12, recent=6, sinks=4)


@dataclass(frozen=True)
class SparseCase:
    dense: Case
    sparse: Sparse = SPARSE
    select: Selector | None = None
    kernel: FarKernel | None = None
    most_units: int = MOST_UNITS

    @property
    def starts(self) -> range:
        return range(0, self.dense.tokens, self.dense.chunk)

    @property
    def pages(self) -> int:
        return -(-self.dense.tokens // self.sparse.page)

    def runs(self, start: int, stop: int) -> list[tuple[Run, ...]] | None:
        rows = self.dense.documents
        return None if rows is None else [document_runs(row, start, stop) for row in rows]

    def call(self, start: int) -> tuple[SparseCall, slice]:
        case = self.dense
        stop = min(start + case.chunk, case.tokens)
        runs = self.runs(start, stop)
        blocks = plan_blocks(start, stop, case.kv_block, None, runs)
        sizes = case.head_dim, case.value_dim, case.softcap
        dense = AttentionCall(
            case.scale, case.softcap, blocks, start, select_kernel("cpu", case.dtype, *sizes)
        )
        select = self.select or TopK(self.sparse.budget // self.sparse.page)
        kernel = self.kernel or select_far("cpu", *sizes)
        call = sparse_call(self.sparse, dense, select, kernel, first_tokens(runs))
        return call, slice(start, stop)


def first_tokens(runs: list[tuple[Run, ...]] | None) -> Tensor | None:
    """Of the document of each of a chunk's tokens [B, C]."""
    if runs is None:
        return None
    rows = [[run.document_start for run in row for _ in range(run.start, run.stop)] for row in runs]
    return torch.tensor(rows)


@dataclass
class Sequence:
    """A storage that outlives a step, and the choices of its chunks."""

    case: SparseCase
    pages: MemoryPages = field(init=False)
    choices: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case.dense
        shape = case.tokens, case.batch, case.kv_heads
        k = torch.full((*shape, case.head_dim), torch.nan, dtype=case.dtype)
        v = torch.full((*shape, case.value_dim), torch.nan, dtype=case.dtype)
        sparse, most = self.case.sparse, self.case.most_units
        self.pages = MemoryPages(k, v, sparse.page, most, sparse.mean_tokens)
        self.pages.means.fill_(torch.nan)

    def step(self, inputs: Inputs, given: Tensor | None = None) -> Results:
        """Forward over the chunks, then backward from the last chunk to the first; with the choice
        `given` [B, Hk, M, k] of the whole sequence or one that is made."""
        out, attended = self.forward(inputs, given)
        return {"out": out} | self.backward(inputs, attended)

    def forward(
        self, inputs: Inputs, given: Tensor | None = None
    ) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        page, attended = self.case.sparse.query_tokens, {}
        out = torch.full_like(inputs.dout, torch.nan)
        self.choices = {}
        for start in self.case.starts:
            call, span = self.case.call(start)
            q, k, v = (x[:, :, span] for x in (inputs.q, inputs.k, inputs.v))
            if given is None:
                self.choices[start] = choose(call, q, self.pages)
            else:
                self.choices[start] = given[:, :, start // page : -(-span.stop // page)]
            choice = self.choices[start]
            attended[start] = attend_sparse(call, q, k, v, choice, self.pages, inputs.sinks)
            out[:, :, span] = attended[start][0]
            self.pages.write(start, k, v)
        return out, attended

    def backward(self, inputs: Inputs, attended: dict[int, tuple[Tensor, Tensor]]) -> Results:
        self.pages.clear()
        dtype = accumulate_dtype(inputs.q.dtype)
        dq, sinks = torch.full_like(inputs.q, torch.nan, dtype=dtype), inputs.sinks
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
        for start in reversed(self.case.starts):
            call, span = self.case.call(start)
            dout, q, k, v = (x[:, :, span] for x in (inputs.dout, inputs.q, inputs.k, inputs.v))
            given = *attended[start], self.choices[start]
            parts = attend_sparse_backward(call, dout, q, k, v, given, self.pages, sinks)
            assert all(part.dtype == dtype for part in parts[:3])
            dq[:, :, span] = parts[0]
            self.pages.add_gradient(span.start, span.stop, slice(None), parts[1], parts[2])
            if dsinks is not None and parts[3] is not None:
                dsinks += parts[3]
        dk, dv = (x.permute(1, 2, 0, 3).clone() for x in (self.pages.dk, self.pages.dv))
        results = {"q": dq, "k": dk, "v": dv}
        return results if dsinks is None else results | {"sinks": dsinks}

    def choice(self) -> Tensor:
        """Of the whole sequence [B, Hk, M, k]."""
        most = max(choice.shape[3] for choice in self.choices.values())
        parts = [pad(c, (0, most - c.shape[3]), value=-1) for c in self.choices.values()]
        return torch.cat(parts, 2)


def document_ids(case: Case) -> Tensor:
    ids = case.document_ids
    return torch.zeros(case.batch, case.tokens, dtype=torch.long) if ids is None else ids


def expected(case: SparseCase, inputs: Inputs, choice: Tensor) -> Results:
    """The reference and autograd in the dtype of the inputs."""
    dense = case.dense
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in named.items() if x is not None}
    q, k, v = (leaves[name] for name in "qkv")
    mask = seen_mask(choice, case.sparse, dense.chunk, document_ids(dense))
    cap = math.inf if dense.softcap is None else dense.softcap
    out = sparse_reference(q, k, v, mask, dense.scale, cap, leaves.get("sinks"))
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


MIXED = ((0, 5, 6, 7, 40), (0, 16, 33))


def cases() -> list[SparseCase]:
    """What a model or a batch can ask of sparse attention, one thing at a time and together."""
    plain = Case(tokens=93, chunk=16, kv_block=24)
    two = replace(plain, batch=2)
    denses = [
        plain,
        two,
        replace(plain, tokens=96),
        replace(plain, tokens=1),
        replace(plain, tokens=81),
        replace(plain, chunk=4, kv_block=7),
        replace(plain, chunk=100),
        replace(plain, kv_heads=4),
        replace(plain, kv_heads=1, heads=6, batch=3),
        replace(plain, head_dim=5, value_dim=5),
        replace(plain, value_dim=12),
        replace(plain, softcap=1.5),
        replace(plain, sinks=True),
        replace(two, softcap=1.5, sinks=True, value_dim=4, documents=MIXED),
        replace(two, documents=((0, 20), (0, 20))),
        replace(two, documents=MIXED),
        replace(two, documents=MIXED, sinks=True, chunk=8, kv_block=5),
        replace(two, documents=((0,), (0, 90))),
        replace(two, documents=(tuple(range(93)), tuple(range(0, 93, 2)))),
    ]
    sparses = [
        Sparse(page=4, budget=0, recent=6, sinks=4),
        Sparse(page=4, budget=4, recent=0, sinks=0),
        Sparse(page=1, budget=5, recent=3, sinks=2),
        Sparse(page=16, budget=16, recent=1, sinks=0),
        Sparse(page=8, budget=16, recent=1, sinks=3, query_page=2, selector="mean"),
        Sparse(page=8, budget=16, recent=40, sinks=24),
    ]
    return [
        *(SparseCase(dense) for dense in denses),
        *(SparseCase(dense, sparse) for sparse in sparses for dense in (plain, denses[16 - 1])),
    ]
