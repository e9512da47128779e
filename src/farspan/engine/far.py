"""Functions by which the engine gets sparse attention. The package farspan.sparse provides them: it
imports the engine, not the reverse, and implements `farspan.attention.far`."""

from typing import Any, Protocol

import torch

from farspan.attention.far import FarRun, GivenSelector
from farspan.engine.attention_op import AttentionContext
from farspan.engine.buffers import KVPrefix
from farspan.engine.reference import Function
from farspan.lazy import given
from farspan.spec import Curve, Schedule

PART = "far attention"  # of the package


class FarStep(Protocol):
    """Sparse attention of a step object, made from its schedule."""

    @property
    def select(self) -> object:
        """The function that chooses pages, equal on all ranks."""

    def run(self, context: AttentionContext, *, watches: bool) -> FarRun[KVPrefix]:
        """Return the sparse attention for one run of a program. With `watches`, it measures the
        share of attention weight that falls on the chosen pages, in one cell."""

    def held_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Allocate the device memory that sparse attention keeps between runs; return its bytes."""


def far_step(schedule: Schedule, selector: GivenSelector | None) -> FarStep | None:
    """Return the schedule's sparse attention, or None if dense. Raises UnsupportedError."""
    if schedule.sparse is None:
        return None
    found: FarStep = given(PART, "SparseStep").of(schedule, selector)
    return found


def function_of(schedule: Schedule, selector: GivenSelector | None, dtype: torch.dtype) -> Function:
    """Return a step's attention, dense or sparse, as plain autograd in `dtype` can run it."""
    if schedule.sparse is None:
        return Function(schedule, dtype)
    found: Function = given(PART, "SparseFunction")(schedule, dtype, selector)
    return found


def far_curves(bench: Any, path: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Return measured rates of sparse attention by size (`farspan.sparse.measure`)."""
    found: dict[str, Curve] = given(PART, "page_curves")(bench, path, dtype)
    return found
