"""farspan's engine with something that happens at a chosen moment of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.train.context import Components
from tests.train.tiny import replaced


@dataclass(frozen=True)
class Moment:
    """A cell of a step, behind which something may happen."""

    rank: int
    step: int  # from 1
    cell: int  # from 1, in the step
    cells: int  # of a batch
    batches: int  # of the step

    @property
    def last(self) -> bool:
        """Whether it is the last of its step."""
        return self.cell == self.batches * self.cells


def components_with(
    accumulate: int,
    happen: Callable[[Moment], None] = lambda _: None,
    spoil: Callable[[Tensor, int], Tensor] = lambda loss, _: loss,
) -> Components:
    """`happen` is called behind every cell, and `spoil` has the loss of every batch and the number
    of its step. Steps are counted from where this process begins."""

    class Fused(Step):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            rank = dist.get_rank() if dist.is_initialized() else 0
            step = -(-self.calls // accumulate)
            told = self.progress
            batch = (self.calls - 1) % accumulate

            def progress(done: Progress) -> None:
                cell = batch * done.cells + done.cells_done
                happen(Moment(rank, step, cell, done.cells, accumulate))
                if told is not None:
                    told(done)

            self.progress = progress
            try:
                return spoil(super().__call__(*args, **kwargs), step)
            finally:
                self.progress = told

    return replaced(make_step=Fused)
