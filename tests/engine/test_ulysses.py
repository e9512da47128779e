"""An exchange in pieces: the same results, and one piece travels while another is attended to."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from farspan.attention.backends import CpuFlash
from farspan.distributed.collectives import Communicator, PendingExchange
from farspan.distributed.context import ParallelContext
from farspan.engine.step import Step
from farspan.program.layout import Layout
from farspan.program.work import Piece, cut_heads
from farspan.spec import LayerSpec, Schedule, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.grids import part_of
from tests.ranks import run_ranks
from tests.zoo import make_model

CPU = torch.device("cpu")
SCHEDULE = Schedule(chunk=16, groups=2)


def every_number_of_pieces(kv_heads: int) -> None:
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    model = make_model("gpt_oss", num_key_value_heads=kv_heads, num_attention_heads=8)
    data = draw(37, batch=2, documents=3)
    expected = run_oracle(model, data)
    for count in (1, 2, 3):
        schedule = replace(SCHEDULE, alltoall_splits=count)
        step = Step(model, schedule, ranks=ranks, poison=True)
        assert_close(run_step(model, step, data), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", part_of([8, 2], 2))
def test_any_number_of_pieces_is_exact(kv_heads: int) -> None:
    """Of whole K, V heads, some more than others, and of query heads of one."""
    run_ranks(2, every_number_of_pieces, kv_heads)


class Watched(Communicator):
    """Notes when rows leave and when somebody waits for them."""

    log: list[str]

    def begin_exchange(self, *arguments: Any) -> Any:
        number = sum(line.startswith("begin") for line in self.log)
        self.log.append(f"begin {number}")
        coming = super().begin_exchange(*arguments)
        log = self.log

        class Waited(PendingExchange):
            def wait(self) -> torch.Tensor:
                log.append(f"wait {number}")
                return coming.wait()

        return Waited(coming.rows, coming.work, coming.sent)


def attended(log: list[str]) -> None:
    """Note every call of a kernel, in this process."""
    kind = CpuFlash

    def noting(name: str) -> None:
        call = getattr(kind, name)

        def noted(*arguments: Any) -> Any:
            log.append("attend")
            return call(*arguments)

        setattr(kind, name, noted)

    noting("forward")
    noting("backward")


def order_of_a_cell() -> list[str]:
    """What a forward cell with a graph, and its backward, do in which order."""
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    watched = Watched(ranks.among("ulysses").group)
    watched.log = []
    ranks.groups["ulysses",] = watched
    model = make_model("llama", num_hidden_layers=1, num_key_value_heads=4)
    step = Step(model, Schedule(chunk=64, alltoall_splits=2), ranks=ranks)
    attended(watched.log)
    step(*draw(8))
    return watched.log


def test_a_piece_travels_while_another_is_attended_to() -> None:
    forward = ["begin 0", "begin 1", "wait 0", "attend", "begin 2", "wait 1", "attend", "begin 3"]
    leave = ["wait 2", "wait 3"]
    backward = ["begin 4", "begin 5", "wait 4", "attend", "begin 6", "wait 5", "attend", "begin 7"]
    expected = [*forward, *leave, *backward, "wait 6", "wait 7"]
    assert run_ranks(2, order_of_a_cell) == [expected, expected]


def test_pieces_share_heads_out() -> None:
    def heads(query: int, kv: int) -> LayerSpec:
        return LayerSpec(query, kv, 8, 8)

    assert cut_heads(heads(8, 4), 1) == (Piece((0, 8), (0, 4)),)
    assert cut_heads(heads(8, 4), 2) == (Piece((0, 4), (0, 2)), Piece((4, 8), (2, 4)))
    assert cut_heads(heads(6, 3), 2) == (Piece((0, 2), (0, 1)), Piece((2, 6), (1, 3)))
    assert cut_heads(heads(7, 1), 2) == (
        Piece((0, 3), (0, 1), True, False),
        Piece((3, 7), (0, 1), False, True),
    )
    assert cut_heads(heads(1, 1), 2) == (Piece((0, 1), (0, 1)),)
    with pytest.raises(
        UnsupportedError, match="alltoall_splits: expected a whole number >= 1, got 0"
    ):
        Schedule(alltoall_splits=0)
