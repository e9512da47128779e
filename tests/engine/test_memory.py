"""What a step takes is what was said it would take."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from farspan.engine.loss import make_inputs
from farspan.engine.memory import LiveStorage, PeakMemory, estimate_memory, refuse_too_large
from farspan.engine.step import Step
from farspan.planner.states import INPUT_BYTES
from farspan.program.program import made_bytes
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from tests.grids import crossed, part_of
from tests.sparse.test_index import random_index
from tests.zoo import RECURRENT, make_model

BASE = Schedule(chunk=64, kv_block=64)
SCHEDULES = {
    "g = 1": BASE,
    "g = 2": replace(BASE, groups=2),
    "g = L": replace(BASE, groups=4),
    "unequal": replace(BASE, groups=(3, 1)),
    "phi": replace(BASE, groups=2, attention_save_fraction=0.5),
    "phi on device": replace(BASE, attention_save_fraction=1.0, attention=Tier.DEVICE),
    "open": replace(BASE, groups=2, attention_open=True),
    "alpha": replace(BASE, groups=2, activation_save_fraction=0.5),
    "alpha on device": replace(BASE, activation_save_fraction=0.5, activations=Tier.DEVICE),
    "kv kept": replace(BASE, groups=2, kv_kept=True),
    "kv kept on device": replace(BASE, groups=2, kv_kept=True, kv_home=Tier.DEVICE),
    "streamed": replace(BASE, groups=4, kv=Tier.HOST, layer_checkpoint=True),
    "weights": replace(BASE, groups=1, weights=Tier.HOST),
}


def measure(
    step: Step, batch: int, tokens: int, steps: int = 1, documents: Tensor | None = None
) -> int:
    """Peak bytes of new tensors in steps that add to the same gradients, both tiers."""
    ids = torch.arange(tokens).repeat(batch, 1) % step.model_spec.vocab
    step.boundary.model.zero_grad(set_to_none=True)
    step.release()
    with PeakMemory(torch.device("cpu")) as meter:
        for _ in range(steps):
            step(ids, ids, documents)
    return meter.peak


@pytest.mark.parametrize("kv", Tier)
def test_sparse_steps_take_no_more_than_predicted(kv: Tier) -> None:
    """How many pages are gathered is only known when they are chosen: at most so much less."""
    model = make_model("qwen2", torch.float32, max_position_embeddings=4096)
    sparse = Sparse(page=16, budget=256, recent=64, sinks=16)
    schedule = Schedule(chunk=128, kv_block=128, groups=2, kv=kv, sparse=sparse)
    for tokens in (600, 1200):
        predicted = estimate_memory(Step(model, schedule), 1, tokens)
        found = measure(Step(model, schedule), 1, tokens)
        assert found <= predicted.new_device + predicted.host_arena <= 1.3 * found


def test_maps_of_an_index_are_there_once_and_counted() -> None:
    """Where cells compute: the first step brings them there, and none after it."""
    model = make_model("qwen2", torch.bfloat16, max_position_embeddings=4096)
    sparse = Sparse(page=16, budget=64, recent=64, sinks=16, selector="index", index_dim=4)
    schedule = Schedule(chunk=128, kv_block=128, groups=2, sparse=sparse)
    index = random_index(Step(model, Schedule()).model_spec.layers, 4)
    step = Step(model, schedule, selector=index)
    first, second = (measure(step, 1, 600) for _ in range(2))
    expected = estimate_memory(step, 1, 600)
    assert first - second == expected.index == index.nbytes(torch.bfloat16)
    fresh = Step(model, schedule, selector=replace(index, placed={}))
    assert expected == estimate_memory(fresh, 1, 600)
    assert second <= expected.new_device + expected.host_arena <= 1.3 * second
    for parameter in index.parameters():
        parameter.add_(1)  # as an optimizer does
    assert measure(step, 1, 600) > second


@pytest.mark.parametrize("page", part_of([1, 2, 4], 4))
def test_many_small_pages_take_no_more_than_predicted(page: int) -> None:
    """Votes are most of what a step holds, in the last chunk before superpages are ranked."""
    model = make_model("qwen2", torch.float32, max_position_embeddings=4096)
    sparse = Sparse(page=page, budget=16 * page, recent=16, sinks=page)
    schedule = Schedule(chunk=128, kv_block=128, groups=1, kv=Tier.HOST, sparse=sparse)
    predicted = estimate_memory(Step(model, schedule), 1, 4096)
    assert measure(Step(model, schedule), 1, 4096) <= predicted.new_device + predicted.host_arena


@pytest.mark.parametrize(
    ("name", "dtype"),
    part_of(
        [(name, torch.float32) for name in SCHEDULES]
        # Gradients narrower than their sums: the accumulators of the open group count as well.
        + [(name, torch.bfloat16) for name in ("g = 2", "alpha", "weights")],
        *[(name, torch.float32) for name in list(SCHEDULES)[::2]],
        *[(name, torch.bfloat16) for name in ("alpha", "weights")],
    ),
)
def test_predicted_is_measured(name: str, dtype: torch.dtype) -> None:
    """To 2%, whatever the length; and what no program sizes does not grow with the length."""
    model = make_model("qwen2", dtype, max_position_embeddings=4096)
    step = Step(model, SCHEDULES[name])
    rest = set()
    for tokens in (192, 408):
        expected = estimate_memory(step, 1, tokens)
        planned = expected.new_device + expected.new_host
        assert measure(step, 1, tokens) == pytest.approx(planned, rel=0.02)
        rest.add(expected.transient)
    assert max(rest) == min(rest)


@pytest.mark.parametrize(
    ("name", "family"),
    part_of(
        product(SCHEDULES, ["lfm2", "qwen3_5_text"]),
        *[("phi", "lfm2"), ("alpha", "lfm2"), ("kv kept", "qwen3_5_text")],
        ("streamed", "qwen3_5_text"),
    ),
)
def test_steps_of_recurrent_layers_are_predicted(name: str, family: str) -> None:
    """To 2%; a longer step leaves more states, whose rows are their chunks'."""
    if family not in RECURRENT:
        pytest.skip(f"this transformers has no {family}")
    step = Step(make_model(family, torch.float32, max_position_embeddings=4096), SCHEDULES[name])
    for tokens in (192, 408):
        expected = estimate_memory(step, 2, tokens)
        planned = expected.new_device + expected.host_arena
        assert measure(step, 2, tokens) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("name", part_of(["deepseek_v3", "vaultgemma"], "deepseek_v3"))
def test_attention_that_takes_the_most_is_predicted_beside_gradients(name: str) -> None:
    """The last chunk of a step has no gradients beside it yet, and the first no earlier keys."""
    step = Step(make_model(name, torch.bfloat16, max_position_embeddings=4096), BASE)
    for tokens in (128, 192, 408):
        expected = estimate_memory(step, 1, tokens)
        assert measure(step, 1, tokens) == expected.new_device + expected.host_arena


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("several", [False, True])
def test_what_is_made_of_a_batch_is_known(batch: int, several: bool) -> None:
    ids = torch.arange(50).repeat(batch, 1)
    documents = ids // 20 if several else None
    with LiveStorage() as meter:
        made = make_inputs(ids, ids, documents, vocab=50)
        assert meter.live == made_bytes(batch, 50, documents=several)
    assert made.input_ids is ids
    if batch == 1 or several:  # what is planned for a batch, whose labels are its ids
        assert ids.nbytes + made_bytes(batch, 50, documents=several) == INPUT_BYTES * batch * 50


@pytest.mark.parametrize(
    ("name", "batch"), crossed(["g = 1", "g = 2", "g = L", "phi on device"], [1, 2])
)
def test_what_a_longer_step_takes_is_predicted_to_the_byte(name: str, batch: int) -> None:
    """With documents, as a run has them. What no program sizes is the same at every length."""
    model = make_model("qwen2", torch.float32, max_position_embeddings=4096)
    step = Step(model, SCHEDULES[name])
    grown = []
    for tokens in (192, 320):
        expected = estimate_memory(step, batch, tokens)
        found = measure(step, batch, tokens, documents=torch.zeros(batch, tokens).long())
        grown.append((expected.new_device + expected.host_arena, found))
    (few, before), (many, after) = grown
    assert many - few == after - before


# An estimate is a dry run of the step, which knows of no strategy; their parts are in SCHEDULES.
# What plans say of every strategy is measured in planner/test_walk.py.
@pytest.mark.parametrize("name", part_of(STRATEGIES, "recompute", "memo", "oomb"))
def test_strategies_are_predicted(name: str) -> None:
    model = make_model("qwen2", max_position_embeddings=4096)
    step = Step(model, strategy(name, 4, 300))
    expected = estimate_memory(step, 2, 300)
    planned = expected.new_device + expected.host_arena
    assert measure(step, 2, 300) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("name", ["g = 1", "g = L"])
def test_gradients_that_were_there_before_are_counted(name: str) -> None:
    model = make_model("qwen2", torch.float32, max_position_embeddings=4096)
    step = Step(model, SCHEDULES[name])
    one, more = (estimate_memory(step, 1, 300, accumulate=several) for several in (False, True))
    # With one group all gradients are there at the peak in any case.
    assert (more.new_device > one.new_device) is (name == "g = 1")
    for expected, steps in ((one, 1), (more, 2)):
        planned = expected.new_device + expected.host_arena
        assert measure(step, 1, 300, steps) == pytest.approx(planned, rel=0.02)


def test_a_forecast_leaves_the_model_alone() -> None:
    model = make_model("qwen2")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls: list[object] = []
    step = Step(model, BASE, progress=calls.append)
    estimate_memory(step, 1, 100)
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert step.progress == calls.append
    assert not calls


def test_what_the_host_cannot_hold_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(make_model("qwen2"), BASE)
    expected = estimate_memory(step, 1, 100)
    needed = expected.new_device + expected.host_arena + 1000
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: needed)
    refuse_too_large(step, expected, optimizer=1000)
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: needed - 1)
    with pytest.raises(
        UnsupportedError, match=r"host memory: a step .* needs .* available .*shorten"
    ):
        refuse_too_large(step, expected, optimizer=1000)


def test_a_step_that_cannot_be_held_is_refused_and_leaves_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("qwen2")
    step = Step(model, BASE)
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: 1000)
    ids = torch.zeros(1, 100, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="a step of 100 tokens needs"):
        step(ids, ids)
    assert all(p.grad is None for p in model.parameters())


def test_live_storage_counts_what_is_alive_once() -> None:
    with LiveStorage() as meter:
        one = torch.zeros(1000, dtype=torch.float32)
        views = [one[10:], one.view(10, 100)]
        assert meter.live == 4000
        two = one + 1
        assert meter.live == 8000
        del one, views
        assert meter.live == 4000
        del two
    assert meter.live == 0
    assert meter.peak == 8000


def test_live_storage_leaves_out_what_was_born_before() -> None:
    weight, x = torch.ones(50, 100), torch.ones(7, 100)
    with LiveStorage() as meter:
        y = x @ weight.t()
        assert meter.live == y.nbytes
        grown = torch.add(x, 1, out=torch.empty(7, 100))
        assert meter.live == y.nbytes + grown.nbytes


def test_a_rehearsal_that_would_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of the whole sequence is rehearsed whole: its graphs alone may be too much."""
    model = make_model("qwen2", max_position_embeddings=4096)
    step = Step(model, strategy("recompute", 4, 2000))
    arenas = sum(step.program(1, 2000).arena_bytes.values())
    room = arenas + sum(p.nbytes for p in model.parameters()) + 2000 * 100
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: room)
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("the rehearsal began"))
    with pytest.raises(UnsupportedError, match="host memory: a step"):
        estimate_memory(step, 1, 2000)
