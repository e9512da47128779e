"""The CPU issues a step on a GPU and waits for nothing meanwhile, but where it is said; where main
memory cannot be locked it waits for copies, and not one bit is different."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.engine import tiers as arena_module
from farspan.engine.runner import Runner
from farspan.engine.step import Step
from farspan.program.program import Forward
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Schedule, Sparse, Tier
from tests.engine.checks import draw
from tests.grids import part_of
from tests.numerics import relative_error
from tests.unread import Unread
from tests.zoo import LAYERS, make_model, shared_model

TOKENS = 101
BASE = Schedule(chunk=16, groups=2, kv_block=20)
DENSE = {
    **{name: replace(strategy(name, LAYERS, TOKENS), kv_block=20) for name in STRATEGIES},
    "streamed, kept": replace(BASE, kv=Tier.HOST, kv_kept=True, attention_save_fraction=0.5),
    "tiles": replace(BASE, mlp_chunk_size=8, activation_save_fraction=0.6),
}
FAMILIES = ["gemma2", "olmo3", "gpt2", "lfm2"]
SPARSE = Sparse(page=4, budget=8, recent=6, sinks=4)


class Waits:
    """Of the CPU, for events: those that PyTorch does not tell of."""

    count = 0


@pytest.mark.parametrize("family", part_of(FAMILIES, *list(FAMILIES)[::4]))
def test_nothing_computed_is_read_in_a_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(shared_model(family), replace(BASE, kv=Tier.HOST, activation_save_fraction=0.6))
    run = Runner.run

    def watched(*everything: Any) -> Tensor:
        with Unread():
            return run(*everything)

    monkeypatch.setattr(Runner, "run", watched)
    assert torch.isfinite(step(*draw(TOKENS, batch=2, documents=3)))


@contextmanager
def nothing_waited_for() -> Iterator[Waits]:
    """PyTorch raises wherever the CPU would wait for what is on the GPU."""
    waits, wait = Waits(), torch.cuda.Event.synchronize

    def counted(event: Any) -> None:
        waits.count += 1
        wait(event)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait is told of
        patch.setattr(torch.cuda.Event, "synchronize", counted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waits_of(step: Step, tokens: int = TOKENS) -> int:
    """For events, of a second step, from its first instruction to its last: what was given to it
    is read before, and its loss after."""
    given = [x.cuda() for x in draw(tokens, batch=2, documents=3) if x is not None]
    step(*given)
    run, found = Runner.run, Waits()

    def watched(*everything: Any) -> Tensor:
        with nothing_waited_for() as waits:
            loss = run(*everything)
        found.count = waits.count
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", watched)
        loss = step(*given)
    assert torch.isfinite(loss)
    return found.count


def on_gpu(family: str, **changes: Any) -> nn.Module:
    model: nn.Module = make_model(family, torch.bfloat16, **changes)
    return model.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_step(name: str, overlap: bool) -> None:
    model = on_gpu("qwen2")
    assert waits_of(Step(model, DENSE[name], overlap=overlap)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_special_about_a_family(family: str) -> None:
    model = on_gpu(family)
    assert waits_of(Step(model, replace(BASE, kv=Tier.HOST))) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kv", Tier)
def test_a_sparse_step(kv: Tier, overlap: bool) -> None:
    """With K, V on host the CPU is told once a cell how many pages were chosen."""
    model, tokens = on_gpu("qwen2", num_hidden_layers=2), 41
    step = Step(model, replace(BASE, kv=kv, sparse=SPARSE), overlap=overlap)
    waits = waits_of(step, tokens)
    cells = [
        i for i in step.program(2, tokens).instructions if isinstance(i, Forward) and i.chooses
    ]
    assert cells
    assert waits == (len(cells) if kv is Tier.HOST else 0)
    assert step.seen is not None


# -- where main memory cannot be locked ------------------------------------------------------------

ON_HOST = [name for name in DENSE if name not in ("plain", "recompute")]


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
    locked, expected = results(DENSE[name])
    assert not locked.arenas[Tier.HOST].is_pageable
    pageable, found = without_locks(monkeypatch, DENSE[name])
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
