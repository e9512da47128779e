"""What training is made of besides the data: passed in, so that each can be another one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from farspan.engine.calibrate import calibrate, here
from farspan.engine.loss import trained_token_count
from farspan.engine.step import Step
from farspan.hf.load import load_model
from farspan.plan.price.evaluate import evaluate
from farspan.plan.price.machines import user_file
from farspan.plan.question import Plan, Question
from farspan.plan.search.plans import best_plan
from farspan.plan.strategies import AUTO, strategy
from farspan.sparse.engine import Seen
from farspan.spec import MachineSpec, Schedule
from farspan.train.allocator import DeviceMemory, choose_allocator
from farspan.train.config import DeviceAllocator, RunConfig
from farspan.train.memory import Expected, expect_memory, rehearse_apart
from farspan.train.optimizer_parts import Held


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
    host_room: int | None  # bytes of main memory that it may take; None: as many as there are

    @property
    def seen(self) -> Seen | None: ...  # by the latest step's watched cell; None: all is dense

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

    def release(self) -> None:
        """Gives back the memory that is kept between steps."""


def machine_of(
    device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
) -> MachineSpec:
    """The machine at hand with this device: as its file has it, else measured now, quickly, in the
    one dtype that is asked for."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if device.type == usual and user_file().is_file():
        return here(progress)
    return calibrate(device, [dtype], progress, quick=True).spec


def remembered(
    machine: Callable[[torch.device, torch.dtype, Callable[[str], None]], MachineSpec],
) -> Callable[[torch.device, torch.dtype, Callable[[str], None]], MachineSpec]:
    """`machine`, measured once for a device and a dtype, by whoever asks first."""
    known: dict[tuple[torch.device, torch.dtype], MachineSpec] = {}

    def ask(
        device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
    ) -> MachineSpec:
        if (device, dtype) not in known:
            known[device, dtype] = machine(device, dtype, progress)
        return known[device, dtype]

    return ask


@dataclass(frozen=True, slots=True)
class Parts:
    """The model's loader, the engine, the strategies and the planner; by default farspan's own."""

    # path, config, dtype, overrides, seed, device, trust_remote_code -> a model
    load_model: Callable[..., Any] = load_model
    make_step: Callable[..., StepLike] = (
        Step  # model, schedule, kernels and selector where any is named
    )
    strategy: Callable[[str, int, int], Schedule] = strategy  # name, layers, tokens
    count_trained: Callable[[Tensor, Tensor | None], int] = trained_token_count
    # step, batch, tokens, the optimizer's bytes, called after each cell, whether gradients are
    # there before -> bytes, or Refused
    expect_memory: Callable[[Any, int, int, Held, Callable[[Any], None], bool], Expected] = (
        expect_memory
    )
    # step, batch, tokens, called after each cell, whether gradients are there before; of several
    # ranks, before they expect memory together
    rehearse_apart: Callable[[Any, int, int, Callable[[Any], None], bool], None] = rehearse_apart
    choose_allocator: Callable[[DeviceAllocator, torch.device], DeviceMemory] = choose_allocator
    # For strategy auto.
    machine: Callable[[torch.device, torch.dtype, Callable[[str], None]], MachineSpec] = machine_of
    best_plan: Callable[[Question], Plan] = best_plan
    evaluate: Callable[[Question, str, Schedule], Plan] = evaluate

    def schedule_of(self, run: RunConfig, model: Any) -> Schedule:
        """The schedule of a strategy by name, or of fields alone, as the run wants it; the
        default where the planner chooses."""
        return self.schedule_for(run, model.config.get_text_config().num_hidden_layers)

    def schedule_for(self, run: RunConfig, layers: int) -> Schedule:
        """The same of a model that has so many layers."""
        base, named = Schedule(), run.schedule.strategy
        if named is not None and named != AUTO:
            base = self.strategy(named, layers, run.context)
        return run.schedule.apply(base).with_sparse(run.pages())
