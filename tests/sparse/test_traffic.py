"""Bytes that sparse attention moves between the memories: each chosen page once a cell and pass,
and never more than the plan counts."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from farspan.engine.step import Step
from farspan.engine.tiers import StreamOrder
from farspan.program.program import AttentionMode, Backward, Forward, Instruction, Program
from farspan.program.work import streamed_bytes
from farspan.spec import HOST, LayerSpec, Schedule, Sparse
from tests.engine.checks import assert_close, assert_same_bits, draw, run_step
from tests.engine.lanes import Recorder
from tests.sparse.test_engine import run_sparse_oracle
from tests.zoo import shared_model

TOKENS = 53  # in chunks of 12: the last is not full
FAR = Sparse(page=4, budget=8, recent=6, sinks=4, query_page=2)
SCHEDULES = {
    "all that is earlier": Schedule(
        chunk=12, groups=2, kv=HOST, kv_block=7, sparse=replace(FAR, recent=0, sinks=0)
    ),
    "beside near keys": Schedule(
        chunk=12, groups=2, kv=HOST, kv_block=7, attention_save_fraction=0.5, sparse=FAR
    ),
    "kept": Schedule(chunk=12, groups=1, kv=HOST, kv_kept=True, kv_block=7, sparse=FAR),
}


class Moved:
    """Bytes to and from the device of each instruction of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
        self.of: list[tuple[int, int]] = []
        after, before = StreamOrder.after, StreamOrder.before
        copies, since = step.copies, (0, 0)

        def begin(order: StreamOrder, index: int) -> None:
            nonlocal since
            since = copies.fetched, copies.evicted
            before(order, index)

        def end(order: StreamOrder, index: int) -> None:
            assert index == len(self.of)
            self.of.append((copies.fetched - since[0], copies.evicted - since[1]))
            after(order, index)

        monkeypatch.setattr(StreamOrder, "before", begin)
        monkeypatch.setattr(StreamOrder, "after", end)


def attending(program: Program) -> Iterator[tuple[int, Forward | Backward]]:
    for index, i in enumerate(program.instructions):
        if isinstance(i, Backward) or (isinstance(i, Forward) and i.mode is AttentionMode.COMPUTE):
            yield index, i


def planned(program: Program, i: Instruction) -> tuple[int, int]:
    """Bytes to and from the device of a cell's attention, at most."""
    assert isinstance(i, Forward | Backward)
    kv = streamed_bytes(program, i.layer, i.chunk, i.prefix)
    if isinstance(i, Forward):
        return kv, 0
    dkv = streamed_bytes(program, i.layer, i.chunk, i.accumulator)
    return kv + dkv, dkv


def heads_of(model: nn.Module, schedule: Schedule) -> LayerSpec:
    return Step(model, schedule).program(2, TOKENS).model.layers[0]


def unit_bytes(model: nn.Module, schedule: Schedule) -> int:
    """Of K, V of one page and head, in float64."""
    spec = heads_of(model, schedule)
    return FAR.page * (spec.head_dim + spec.value_dim) * 8


@pytest.mark.parametrize(
    ("name", "most_units", "documents"),
    [
        ("all that is earlier", 3, 3),
        ("beside near keys", 10_000, 0),
        ("kept", 3, 0),
    ],
)
def test_each_page_travels_once_a_cell_and_pass(
    name: str, most_units: int, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, schedule = shared_model("qwen2"), SCHEDULES[name]
    sparse, counts = schedule.sparse, list[int]()
    assert sparse is not None
    spec, unit = heads_of(model, schedule), unit_bytes(model, schedule)
    monkeypatch.setattr("farspan.program.far_sizes.SLAB_BYTES", most_units * unit)

    def select(votes: Tensor, pages: range) -> Tensor:
        """Neighbours differ, so that most pages are wanted by several slabs of queries."""
        order = votes.argsort(3, descending=True)[..., :2] + pages.start
        places = torch.cartesian_prod(*(torch.arange(size) for size in order.shape[:2])).tolist()
        counts.append(sum(len(order[b, h].unique()) for b, h in places))
        return order

    step = Step(model, schedule, selector=select, poison=True)
    step.watches, step.copies = False, Recorder()
    moved = Moved(monkeypatch, step)
    data = draw(TOKENS, batch=2, documents=documents)
    step(*data)
    program = step.program(2, TOKENS)
    cells = dict[tuple[int, int], int]()
    in_slabs = 0
    for index, i in attending(program):
        start, stop = program.chunks[i.chunk]
        width = sparse.width(start)
        if isinstance(i, Forward) and i.chooses:
            cells[i.layer, i.chunk] = counts.pop(0)
        units = cells.get((i.layer, i.chunk), 0)
        near = 2 * sparse.near(start) * spec.kv_heads * unit // sparse.page
        ways = (near + units * unit) * (1 + isinstance(i, Backward))
        fetched, evicted = moved.of[index]
        assert fetched == ways
        assert evicted == (ways // 2 if isinstance(i, Backward) else 0)
        most = planned(program, i)
        assert fetched <= most[0]
        assert evicted <= most[1]
        # The plan's most: of every page of queries others, while there are any.
        candidates = len(sparse.candidates(start))
        others = min(candidates, -(-(stop - start) // sparse.query_tokens) * width)
        assert most[0] == (near + 2 * spec.kv_heads * others * unit) * (1 + isinstance(i, Backward))
        in_slabs += units > most_units
    assert not counts
    assert (in_slabs > 0) == (most_units < 10_000)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pages_in_several_slabs_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second step has the same bits."""
    model, schedule, data = (
        shared_model("qwen2"),
        SCHEDULES[name],
        draw(TOKENS, batch=2, documents=3),
    )
    monkeypatch.setattr("farspan.program.far_sizes.SLAB_BYTES", 3 * unit_bytes(model, schedule))
    step = Step(model, schedule, poison=True)
    step.watches = False
    found = run_step(model, step, data)
    assert_close(found, run_sparse_oracle(model, schedule, data))
    assert_same_bits(run_step(model, step, data), found)
