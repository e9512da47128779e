"""Steps where main memory cannot be locked: slower, and not one bit different."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.engine import tiers as arena_module
from farspan.engine.step import Step
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Schedule, Sparse, Tier
from tests.engine.checks import draw
from tests.numerics import relative_error
from tests.zoo import LAYERS, make_model

TOKENS = 101
BASE = Schedule(chunk=16, groups=2, kv_block=20)
SPARSE = Sparse(page=4, budget=8, recent=6, sinks=4)
SCHEDULES = {
    **{name: replace(strategy(name, LAYERS, TOKENS), kv_block=20) for name in STRATEGIES},
    "streamed, kept": replace(BASE, kv=Tier.HOST, kv_kept=True, attention_save_fraction=0.5),
    "cells": replace(BASE, activation_save_fraction=0.6),
}
ON_HOST = [name for name in SCHEDULES if name not in ("plain", "recompute")]


def refuse(*_: object) -> Any:
    raise RuntimeError("not supported")


def results(schedule: Schedule) -> tuple[Step, list[Tensor]]:
    """The losses of two steps and the gradients of both; arenas hold NaN before each."""
    model: Any = make_model("qwen2", torch.float32)
    model.cuda()
    step = Step(model, schedule, poison=True)
    batch = [t.cuda() for t in draw(TOKENS, batch=2, documents=3)]
    losses = [step(*batch).detach() for _ in range(2)]
    return step, [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_HOST)
def test_results_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, expected = results(SCHEDULES[name])
    assert not locked.arenas[Tier.HOST].is_pageable
    pageable, found = without_locks(monkeypatch, SCHEDULES[name])
    assert all(map(torch.equal, found, expected))
    for way in ("fetched", "evicted"):
        assert getattr(pageable.copies, way) == getattr(locked.copies, way) > 0


@pytest.mark.gpu
def test_chosen_pages_are_moved_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a step whose keys never leave the device."""
    sparse = replace(BASE, sparse=SPARSE)
    _, expected = results(sparse)
    _, found = without_locks(monkeypatch, replace(sparse, kv=Tier.HOST))
    # Of float32, added up on the GPU in any order.
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def without_locks(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> tuple[Step, list[Tensor]]:
    """The results where nothing can be locked, which is said once."""
    monkeypatch.setattr(arena_module, "_pin", refuse)
    monkeypatch.setattr(arena_module, "allocate_pinned", refuse)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        step, found = results(schedule)
    assert step.arenas[Tier.HOST].is_pageable
    assert sum("cannot be locked" in str(w.message) for w in said) == 1
    return step, found
