"""Steps as CUDA graphs, on the stand-in for these: the same bits as without them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.engine import graphs, preparation
from farspan.engine.memory import PeakMemory
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.hf.load import add_adapters
from farspan.spec import Kernels, Schedule, Sparse, Tier, UnsupportedError
from tests.engine.checks import Data, draw
from tests.planner.test_walk import EXACT, make, predicted
from tests.standin.graphs import Graph, on_cpu
from tests.zoo import make_model

TOKENS = 24
NEAR: dict[str, Any] = dict.fromkeys(
    ("boundary_inputs", "kv_home", "attention", "activations"), Tier.DEVICE
)
BASE = Schedule(chunk=TOKENS, **NEAR)
CHUNKS = Schedule(chunk=9, groups=2, kv_block=5, **NEAR)
GRAPHS = Kernels(graphs=True)


@pytest.fixture(autouse=True)
def made() -> Iterator[list[Graph]]:
    with on_cpu() as graphs:
        yield graphs


def batch(seed: int, tokens: int = TOKENS, **how: Any) -> Data:
    """With the same number of trained tokens each."""
    ids, *_ = draw(tokens, seed=seed, **how)
    return Data(ids, ids)


Work = Callable[[Any, Step, int], None]


def trained(
    kernels: Kernels,
    schedule: Schedule = BASE,
    work: Work | None = None,
    *,
    steps: int = 5,
    parts: int = 1,
    clear: bool = True,
    family: str = "qwen2",
    dtype: torch.dtype = torch.float64,
    poison: bool = True,
) -> list[Tensor]:
    """Losses, gradients and weights of some updates."""
    model: Any = make_model(family)
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = Step(model, schedule, kernels=kernels, poison=poison)
    found: list[Tensor] = []
    for number in range(steps):
        model.zero_grad(set_to_none=clear)
        if work is not None:
            work(model, step, number)
        found += [step(*batch(number * parts + part)) for part in range(parts)]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found + [p.detach() for p in model.parameters()]


def bits(x: Tensor) -> Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(whole[x.itemsize])


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    pairs = enumerate(zip(found, wanted, strict=True))
    wrong = [n for n, (a, b) in pairs if not torch.equal(bits(a), bits(b))]
    assert not wrong, wrong


def replays(made: list[Graph]) -> list[int]:
    return [graph.replays for graph in made]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("schedule", [BASE, CHUNKS])
def test_a_step_is_replayed_to_the_same_bits(
    schedule: Schedule, dtype: torch.dtype, made: list[Graph]
) -> None:
    wanted = trained(Kernels(), schedule, dtype=dtype)
    assert not made
    assert_equal(trained(GRAPHS, schedule, dtype=dtype), wanted)
    assert replays(made) == [4]


def test_products_add_to_sums_in_a_graph(
    made: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "adds_products", lambda *_: True)
    assert_equal(trained(GRAPHS, CHUNKS), trained(Kernels(), CHUNKS))
    assert replays(made) == [4]


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_other_families_run_as_graphs(family: str, made: list[Graph]) -> None:
    found = trained(GRAPHS, CHUNKS, family=family, steps=4)
    assert_equal(found, trained(Kernels(), CHUNKS, family=family, steps=4))
    assert replays(made) == [3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_micro_batches_add_up(dtype: torch.dtype, made: list[Graph]) -> None:
    """The first of an update begins without gradients, the others add to the first one's."""
    found = trained(GRAPHS, parts=3, steps=3, dtype=dtype)
    assert_equal(found, trained(Kernels(), parts=3, steps=3, dtype=dtype))
    assert replays(made) == [8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_may_stay_and_be_cleared(dtype: torch.dtype, made: list[Graph]) -> None:
    found = trained(GRAPHS, clear=False, steps=6, dtype=dtype)
    assert_equal(found, trained(Kernels(), clear=False, steps=6, dtype=dtype))
    assert sum(replays(made)) >= 3


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_chunk_size": 4},
        {"activation_save_fraction": 0.5, "attention_save_fraction": 1.0},
        {"attention_open": True, "kv_kept": True},
        {"layer_checkpoint": True, "loss_chunk_size": 5},
    ],
    ids=str,
)
def test_other_schedules_run_as_graphs(change: dict[str, Any], made: list[Graph]) -> None:
    schedule = replace(CHUNKS, **change)
    found = trained(GRAPHS, schedule, parts=2, steps=3)
    assert_equal(found, trained(Kernels(), schedule, parts=2, steps=3))
    assert replays(made) == [5]


def with_adapters(model: Any) -> None:
    model.double()
    add_adapters(model, rank=2, alpha=4.0, zero=False)


def with_wide_gradients(model: Any) -> None:
    model.to(torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32


@pytest.mark.parametrize(
    ("prepare", "how"),
    [
        (with_adapters, {}),
        (with_wide_gradients, {}),
        (nn.Module.float, {"autocast": torch.bfloat16}),
    ],
)
def test_other_models_run_as_graphs(
    prepare: Callable[[Any], Any], how: dict[str, Any], made: list[Graph]
) -> None:
    """With labels that are ignored in other places, and values in between."""

    def run(kernels: Kernels) -> list[Tensor]:
        model: Any = make_model("qwen2")
        prepare(model)
        step = Step(model, CHUNKS, kernels=kernels, poison=True, **how)
        found = []
        for number in range(6):
            if number % 2 == 0:
                model.zero_grad()
            ids, _, _ = batch(number, batch=2)
            labels = ids.clone()
            labels[:, number : number + 4] = -100
            found.append(step(ids, labels, trained_tokens=40))
            if number == 3:
                found.append(step.logprobs(ids, ids))
                (-found[-1].mean()).backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [x.detach() for x in found]

    assert_equal(run(GRAPHS), run(Kernels()))
    assert sum(replays(made)) == 5


def moved(model: Any, _: Step, number: int) -> None:
    """A weight is at another address, and has another value."""
    if number == 3:
        weight = next(model.parameters())
        weight.data = weight.data * 1.5


def trained_no_more(model: Any, _: Step, number: int) -> None:
    if number == 3:
        next(model.model.layers[1].parameters()).requires_grad_(False)


def replaced(model: Any, _: Step, number: int) -> None:
    """A module is another one, whose weights the optimizer does not know."""
    if number == 3:
        model.model.layers[1].mlp = deepcopy(model.model.layers[2].mlp)


def set_otherwise(model: Any, _: Step, number: int) -> None:
    if number == 3:
        model.model.norm.variance_epsilon = 0.1


def evaluated(model: Any, step: Step, number: int) -> None:
    """A call without gradients, and another shape, which needs a larger arena."""
    if number == 3:
        step.evaluate(*batch(9))
        step(*batch(5, TOKENS + 9))
        model.zero_grad()


def released(_: Any, step: Step, number: int) -> None:
    if number == 3:
        step.release()


def turned(model: Any, _: Step, number: int) -> None:
    """A square weight is read by columns, at the same address."""
    if number == 3:
        weight = model.model.layers[0].self_attn.o_proj.weight
        assert weight.shape[0] == weight.shape[1]
        weight.data = weight.data.t()


def smoothed(_: Any, step: Step, number: int) -> None:
    if number == 3:
        step.runner.smoothing = 0.2


def put_in_by_the_user(model: Any, _: Step, number: int) -> None:
    """A gradient is the user's own tensor."""
    if number == 3:
        weight = next(model.parameters())
        weight.grad = torch.full_like(weight, 0.5)


def rounded_otherwise(_: Any, __: Step, number: int) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if number >= 3 else "none"


def in_another_mode(model: Any, _: Step, number: int) -> None:
    model.train(number < 3)


EDITS = [
    *(moved, trained_no_more, replaced, set_otherwise, evaluated, released, turned, smoothed),
    *(put_in_by_the_user, rounded_otherwise, in_another_mode),
]


@pytest.mark.parametrize("edit", EDITS)
def test_what_happens_between_steps_is_taken_up(edit: Work, made: list[Graph]) -> None:
    assert_equal(trained(GRAPHS, work=edit, steps=6), trained(Kernels(), work=edit, steps=6))
    assert replays(made) == [2, 2]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_may_be_smoothed_and_gradients_clipped(smoothing: float, made: list[Graph]) -> None:
    def run(kernels: Kernels) -> list[Tensor]:
        model = make_model("qwen2").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = Step(model, CHUNKS, kernels=kernels, poison=True, label_smoothing=smoothing)
        found: list[Tensor] = []
        for number in range(5):
            optimizer.zero_grad()
            found += [step(*batch(2 * number)), step(*batch(2 * number + 1))]
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
        return found + [p.detach() for p in model.parameters()]

    assert_equal(run(GRAPHS), run(Kernels()))
    assert replays(made) == [9]


def test_a_step_that_was_abandoned_is_followed_by_others(made: list[Graph]) -> None:
    def run(kernels: Kernels) -> list[Tensor]:
        model = make_model("qwen2").double()
        step = Step(model, CHUNKS, kernels=kernels)
        found = []
        for number in range(6):
            model.zero_grad()
            step.progress = stop if number in (0, 3) else None
            with pytest.raises(KeyboardInterrupt) if step.progress else nullcontext():
                found.append(step(*batch(number)))
            if step.progress is None:
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    def stop(now: Progress) -> None:
        if now.cells_done == 2:
            raise KeyboardInterrupt

    assert_equal(run(GRAPHS), run(Kernels()))
    assert sum(replays(made)) >= 4


def test_a_gradient_dtype_may_change(made: list[Graph]) -> None:
    def run(kernels: Kernels) -> list[Tensor]:
        model: Any = make_model("qwen2")
        model = model.to(torch.bfloat16)
        step = Step(model, BASE, kernels=kernels)
        found = []
        for number in range(6):
            model.zero_grad()
            if number == 3:
                for p in model.parameters():
                    p.grad_dtype = torch.float32
            step(*batch(number))
            found += [p.grad.double() for p in model.parameters() if p.grad is not None]
        return found

    assert_equal(run(GRAPHS), run(Kernels()))
    assert replays(made) == [2, 2]


def test_a_step_may_share_its_memory(made: list[Graph]) -> None:
    """With one that needs more of it, between its own calls."""

    def run(kernels: Kernels) -> list[Tensor]:
        model = make_model("qwen2").double()
        step = Step(model, CHUNKS, kernels=kernels, poison=True)
        other = Step(make_model("gemma2").double(), CHUNKS, memory=step.memory, poison=True)
        found = []
        for number in range(6):
            model.zero_grad()
            found += [step(*batch(number)), other.evaluate(*batch(number, 2 * TOKENS))]
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    assert_equal(run(GRAPHS), run(Kernels()))
    assert sum(replays(made)) >= 3


@pytest.mark.parametrize("kernels", [Kernels(), GRAPHS])
def test_only_graphs_keep_narrow_gradients_in_place(kernels: Kernels) -> None:
    model: Any = make_model("qwen2")
    model = model.to(torch.bfloat16)
    step = Step(model, BASE, kernels=kernels)
    for number in range(3):
        step(*batch(number))
    before = [p.grad for p in model.parameters()]
    step(*batch(3))
    same = [p.grad is old for p, old in zip(model.parameters(), before, strict=True)]
    assert same == [kernels.graphs] * len(before)


def test_a_capture_takes_the_memory_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides copies of the inputs. Gradients are there from the beginning."""
    tokens = 192
    step = Step(make("llama", torch.float32), Schedule(chunk=48, **NEAR), kernels=GRAPHS)
    ids = torch.arange(tokens)[None] % step.model_spec.vocab
    step(ids, ids)
    step.stages.model.zero_grad()
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(Graph, "replay", lambda _: None)
    with PeakMemory(torch.device("cpu")) as meter:
        step(ids, ids)
    copies = 3 * tokens * ids.itemsize
    expected = predicted(step, 1, tokens, accumulates=True)
    assert meter.peak - copies == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("tokens", [None, TOKENS, TOKENS + 9])
def test_calls_without_graphs_have_their_memory(tokens: int | None, made: list[Graph]) -> None:
    """`tokens`: of an evaluation (None), or of a step of this or another shape."""
    model = make_model("qwen2").double()
    step = Step(model, BASE, kernels=GRAPHS)
    for number in range(4):
        step(*batch(number))
    made.clear()
    gc.collect()
    assert Graph.alive
    step.evaluate(*batch(4)) if tokens is None else step(*batch(4, tokens))
    gc.collect()
    assert bool(Graph.alive) is (tokens == TOKENS)


def test_gradients_that_are_held_stay(made: list[Graph]) -> None:
    model = make_model("qwen2").double()
    step = Step(model, BASE, kernels=GRAPHS)
    held: list[Tensor] = []
    copies: list[Tensor] = []
    for number in range(6):
        model.zero_grad()
        step(*batch(number))
        last = next(reversed(list(model.parameters())))
        assert last.grad is not None
        held, copies = [*held, last.grad[:1]], [*copies, last.grad[:1].clone()]
    assert_equal(held, copies)
    assert made


def test_a_loss_stays_and_its_weights_and_divisors_count(made: list[Graph]) -> None:
    def losses(kernels: Kernels) -> list[Tensor]:
        step = Step(make_model("qwen2").double(), BASE, kernels=kernels)
        found = []
        for number, count in enumerate((50, 50, 50, 60, 60, 60)):
            weights = torch.rand(1, TOKENS, generator=torch.Generator().manual_seed(number))
            found.append(step(*batch(number), trained_tokens=count, weights=weights))
        return found

    assert_equal(losses(GRAPHS), losses(Kernels()))
    assert sum(replays(made)) > 0


def test_documents_that_differ_run_without(made: list[Graph]) -> None:
    def losses(kernels: Kernels) -> list[Tensor]:
        step = Step(make_model("qwen2").double(), BASE, kernels=kernels)
        found, (ids, *_) = [], batch(0)
        for cut in (5, 9, 9, 9, 5):
            step.stages.model.zero_grad()
            documents = (torch.arange(TOKENS) >= cut).long()[None]
            found.append(step(ids, ids, documents, trained_tokens=TOKENS))
        return found

    assert_equal(losses(GRAPHS), losses(Kernels()))
    assert replays(made) == [2]


def test_progress_is_told_of_every_cell(made: list[Graph]) -> None:
    told: list[int] = []
    step = Step(make_model("qwen2").double(), CHUNKS, kernels=GRAPHS)
    for number in range(4):
        step.progress = lambda now: told.append(now.cells_done)
        step.stages.model.zero_grad()
        step(*batch(number))
    assert made
    assert told == told[: len(told) // 4] * 4


def test_parameters_hear_of_their_gradients(made: list[Graph]) -> None:
    model, heard = make_model("qwen2").double(), []
    weight = next(model.parameters())
    weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))
    step = Step(model, BASE, kernels=GRAPHS)
    for number in range(4):
        model.zero_grad()
        step(*batch(number))
        assert weight.grad is not None
        assert len(heard) == number + 1
        assert torch.equal(heard[-1], weight.grad)
    assert made


def refused(words: str, family: str = "qwen2", schedule: Schedule = BASE, **how: Any) -> None:
    step = Step(make_model(family).double(), schedule, kernels=GRAPHS, **how)
    with pytest.raises(UnsupportedError, match=f"graphs: .*{words}.*set kernels.graphs to false"):
        step(*batch(0))


def test_what_a_graph_would_not_repeat_is_refused() -> None:
    refused("main memory", schedule=replace(CHUNKS, kv=Tier.HOST))
    refused("weights come from", schedule=replace(BASE, weights=Tier.HOST))
    refused("pages", schedule=replace(BASE, sparse=Sparse(page=4, budget=8)))
    refused("recurrent", "lfm2")
    refused("experts", "mixtral")
    refused("dropout", neftune_alpha=5.0)
    for module in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        model = make_model("qwen2").double()
        module(model.model.layers[0].mlp, lambda *_: None)
        with pytest.raises(UnsupportedError, match="graphs: hooks"):
            Step(model, BASE, kernels=GRAPHS)(*batch(0))
    with pytest.raises(UnsupportedError, match=r"graphs: .*compile"):
        Kernels(graphs=True, compile=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        refused("hooks")
    finally:
        handle.remove()


def test_what_is_switched_on_later_is_refused_before_the_step() -> None:
    model: Any = make_model("gpt2").double()
    step = Step(model, BASE, kernels=GRAPHS)
    for number in range(3):
        model.zero_grad()
        step(*batch(number))
    before = [p.grad.clone() for p in model.parameters()]
    model.transformer.h[0].mlp.dropout.p = 0.5
    with pytest.raises(UnsupportedError, match="graphs: dropout"):
        step(*batch(3))
    assert_equal([p.grad for p in model.parameters()], before)


def test_a_cpu_has_none() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "DEVICE", "cuda")
        refused("a step on cpu has no CUDA graph")


def test_what_cannot_be_captured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2").double()
    norm = type(model.model.norm)
    forward = norm.forward

    def reads(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x * torch.tensor(1.0, dtype=x.dtype))

    monkeypatch.setattr(norm, "forward", reads)
    step = Step(model, BASE, kernels=GRAPHS)
    step(*batch(0))
    model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"PyTorch cannot capture .* set kernels"):
        step(*batch(1))
