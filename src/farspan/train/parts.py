"""What training is made of besides the data: passed in, so that each can be another one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from farspan.spec import Schedule


class CellsDone(Protocol):
    """How far a step has come. `work` is proportional to expected time."""

    @property
    def cells_done(self) -> int: ...
    @property
    def cells(self) -> int: ...
    @property
    def work_done(self) -> float: ...
    @property
    def work(self) -> float: ...


class StepLike(Protocol):
    """Forward and backward over a batch; gradients are added to `.grad`."""

    progress: Callable[[Any], None] | None

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor: ...

    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The model's loader, the engine and the strategies."""

    load_model: Callable[..., Any]  # path, config, dtype, overrides, seed, device -> a model
    make_step: Callable[[nn.Module, Schedule], StepLike]
    strategy: Callable[[str, int, int], Schedule]  # name, layers, tokens
    count_trained: Callable[[Tensor, Tensor | None], int]  # labels, document_ids
