"""Chunked attention equals dense attention: forward, every gradient, every shape of visibility."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.attention.backends import BlockKernel, CpuFlash, Tiled, merge_
from farspan.attention.chunk import AttentionCall, attend, attend_backward, attend_blocks
from tests.attention.cases import (
    Case,
    Inputs,
    Memory,
    cases,
    chunk_call,
    expected,
    limits,
    long_cases,
    make_inputs,
    run_chunked,
)
from tests.attention.held import Spread
from tests.grids import crossed, examples
from tests.numerics import assert_exact, relative_error

# Sums over 90 blocks, which must not be taken in 16 bits.
MANY_BLOCKS = Case(tokens=1500, chunk=600, kv_block=16, heads=2, kv_heads=1)


def compare(case: Case, kernel: BlockKernel | None = None) -> None:
    inputs = make_inputs(case)
    found, wanted = run_chunked(case, inputs, kernel), expected(case, inputs)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Where every query sees only itself, or one key, dq and dk are 0 but for rounding.
        noise = tensor.numel() ** 0.5 * 1e-3
        error = relative_error(found[name], tensor, least=noise)
        assert error <= 1e-12, f"{name}: relative L2 error {error:.3g}"


@pytest.mark.parametrize("case", [*cases(), *long_cases()], ids=str)
def test_equals_dense_attention_in_float64(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_tiles_equal_dense_attention_in_float64(case: Case) -> None:
    compare(case, Tiled(case.softcap, tile=7))


@pytest.mark.parametrize(
    ("case", "dtype"),
    crossed(
        [*long_cases()[:4], MANY_BLOCKS, cases()[0]], [torch.float32, torch.bfloat16, torch.float16]
    ),
    ids=str,
)
def test_no_less_accurate_than_dense_attention(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case)
    exact, most = expected(case, inputs.to(torch.float64)), limits(case, inputs)
    found = run_chunked(case, inputs)
    for name, tensor in exact.items():
        error = relative_error(found[name], tensor)
        assert error <= most[name], f"{name}: {error:.3g} > {most[name]:.3g}"


@given(data=st.data())
@settings(max_examples=examples(60))
def test_equals_dense_attention_for_any_geometry(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 40))
    batch = data.draw(st.integers(1, 2))
    starts = st.sets(st.integers(0, tokens - 1)).map(lambda s: tuple(sorted(s | {0})))
    rows = st.tuples(*[starts] * batch)
    case = Case(
        tokens=tokens,
        batch=batch,
        chunk=data.draw(st.integers(1, tokens + 2)),
        kv_block=data.draw(st.integers(1, tokens + 2)),
        window=data.draw(st.none() | st.integers(1, tokens + 2)),
        sinks=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([None, 2.0])),
        documents=data.draw(st.none() | rows),
        head_dim=4,
        value_dim=4,
    )
    compare(case)


def test_parts_that_kernels_join_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By formulas in place of kernels: of an even and an odd number of parts none is lost."""

    def call_of(*arguments: Any) -> tuple[AttentionCall, slice]:
        call, span = chunk_call(*arguments)
        return replace(call, fused=True), span

    def merged(
        out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> Tensor:
        for one in parts:
            merge_(out, lse, *one)
        return out.to(dtype)

    def added(total: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        most.append(len(parts))
        return sum(parts, total).to(dtype)

    most: list[int] = []
    monkeypatch.setattr("tests.attention.cases.chunk_call", call_of)
    monkeypatch.setattr("farspan.attention.chunk.fused_for", lambda *_: True)
    monkeypatch.setattr("farspan.attention.chunk.merged", merged)
    monkeypatch.setattr("farspan.attention.chunk.added", added)
    for kv_block in (7, 16, 24):
        compare(Case(tokens=61, chunk=16, kv_block=kv_block))
    assert set(most) == {1, 2}


@pytest.mark.parametrize("documents", [None, ((0, 3, 33), (0, 40))])
def test_is_deterministic_and_leaves_inputs_alone(
    documents: tuple[tuple[int, ...], ...] | None,
) -> None:
    case = Case(tokens=50, chunk=16, kv_block=8, batch=2, documents=documents, sinks=True)
    inputs = make_inputs(case)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    first, second = run_chunked(case, inputs), run_chunked(case, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    after = (inputs.q, inputs.k, inputs.v, inputs.dout)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_key_block_is_asked_for_once() -> None:
    """Tiles of windows and documents of several rows share it."""
    case = replace(long_cases()[4], kv_block=4096, chunk=750)
    inputs = make_inputs(case)
    memory = Memory(inputs.k, inputs.v)
    call, span = chunk_call(case, CpuFlash(), 750)
    memory.begin(750)
    q, k, v, dout = (x[:, :, span] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    attended = attend(call, q, k, v, memory)
    assert memory.asked == [(101, 750)]
    attend_backward(call, dout, q, k, v, attended, memory)
    assert memory.asked == memory.asked[:1] * 2
    assert memory.added == memory.asked[:1]


def test_expanded_gradients_and_transposed_heads_are_accepted() -> None:
    """Autograd hands over stride 0 for `out.sum()`; a model may hand over any strides."""
    case = Case(tokens=40, chunk=16, kv_block=8, head_dim=6, value_dim=6)
    inputs = make_inputs(case)
    ones = torch.ones((), dtype=case.dtype).expand_as(inputs.dout)
    q, k, v = (x.mT.contiguous().mT for x in (inputs.q, inputs.k, inputs.v))
    strange = Inputs(q, k, v, ones)
    found, wanted = run_chunked(case, strange), expected(case, strange)
    for name in wanted:
        assert_exact(found[name], wanted[name])


def test_queries_that_see_no_held_key_are_of_no_weight() -> None:
    case = Case(tokens=16, chunk=16, kv_block=8, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    spread = Spread(case, 2)
    rows = spread.rows(inputs, 1)
    call = spread.call((0, 16), 0, 1, CpuFlash())
    out, lse = attend_blocks(call, inputs.q, *rows.own(8), rows)
    assert lse.dtype == torch.float32
    assert (lse[:, :, :8] == -torch.inf).all()
    assert (out[:, :, :8] == 0).all()
    assert lse[:, :, 8:].isfinite().all()
    dout, k, v = inputs.dout, *rows.own(8)
    dq, *_ = attend_backward(call, dout, inputs.q, k, v, (inputs.dout, lse + 9), rows)
    assert (dq[:, :, :8] == 0).all()
