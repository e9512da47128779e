"""Attention of a step that does not see every key (`farspan.attention.far`), by the package that
implements it: what the engine asks of `farspan.sparse`, which stands above it."""

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
    """Sparse attention of a step, whose programs run one after another."""

    @property
    def select(self) -> object:
        """The selector of pages, equal on all ranks."""

    def run(self, context: AttentionContext, *, watches: bool) -> FarRun[KVPrefix]:
        """Return the sparse attention for one run of a program. With `watches` it measures the
        attention mass that one cell's queries see."""

    def held_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return the device bytes that stay allocated between runs, and allocate them now."""


def far_step(schedule: Schedule, selector: GivenSelector | None) -> FarStep | None:
    """Return the schedule's sparse attention, or None if it is dense. Raises UnsupportedError."""
    if schedule.sparse is None:
        return None
    found: FarStep = given(PART, "SparseStep").of(schedule, selector)
    return found


def function_of(schedule: Schedule, selector: GivenSelector | None, dtype: torch.dtype) -> Function:
    """Return the function that a step in `dtype` computes, for a comparison with plain autograd."""
    if schedule.sparse is None:
        return Function(schedule, dtype)
    found: Function = given(PART, "SparseFunction")(schedule, dtype, selector)
    return found


def far_curves(bench: Any, path: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Return measured rates of sparse attention (`farspan.sparse.measure`)."""
    found: dict[str, Curve] = given(PART, "page_curves")(bench, path, dtype)
    return found
