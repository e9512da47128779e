"""Ranks that differ, and models that are edited once ranks share them: named before the step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import Stage
from farspan.engine.parallelize import parallelize
from farspan.engine.step import Step
from farspan.program.layout import Layout
from farspan.spec import Kernels, Schedule, UnsupportedError
from tests.engine.checks import Outcome, assert_close, draw, run_oracle
from tests.grids import exhaustive
from tests.ranks import run_ranks
from tests.zoo import make_model

CPU = torch.device("cpu")
SCHEDULE = Schedule(chunk=8, groups=2)
DATA = draw(21, documents=3)
AT_MOST = 1.0  # second, until every rank has raised

Undo = Callable[[], object]


class Shared:
    """A model that two ranks share, the same by itself, and what steps of both gave."""

    def __init__(self, layout: Layout, stage: Stage | None, adapted: bool = False) -> None:
        self.ranks = ParallelContext(layout, CPU)
        self.whole = made(adapted)
        self.model = made(adapted)
        team: Any = self.ranks
        if stage is not None:
            team = parallelize(self.model, SCHEDULE, self.ranks, stage=stage)
        self.head = head()
        self.step = Step(self.model, SCHEDULE, ranks=team, head=self.head, seed=3)
        self.sharded = self.step.sharded_model
        self.expected = None if adapted else run_oracle(self.whole, DATA)  # dropouts draw anew

    @property
    def second(self) -> bool:
        """Whether this is the rank that differs."""
        return self.ranks.rank.number == 1

    def check(self) -> None:
        """A step of what stands now has the loss and the gradients of plain autograd."""
        assert self.sharded is not None
        if self.expected is None:
            self.step(*DATA)
            return
        self.model.zero_grad(set_to_none=True)
        loss, expected = self.step(*DATA), self.expected
        found = {}
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                tensor = self.sharded.tensor
                found[name] = grad if tensor is None else tensor.whole(name, grad)
        assert found or self.ranks.layout.pipeline > 1
        wanted = {name: g for name, g in expected.gradients.items() if name in found}
        assert len(wanted) == len(expected.gradients) or self.ranks.layout.pipeline > 1
        assert_close(Outcome(loss, found), replace(expected, gradients=wanted))


def made(adapted: bool) -> Any:
    model: Any = make_model("qwen2")
    if adapted:
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
        model = get_peft_model(model, config).double().train()
    return model


def head() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(32, 1).double()


class Value(nn.Module):
    """A head that values tokens."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden)
        return found


# -- what one rank alone has otherwise ---------------------------------------------------------


def attribute(module: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], Undo]:
    def edit(shared: Any) -> Undo:
        of = module(shared)
        before = getattr(of, name)
        setattr(of, name, value)
        return partial(setattr, of, name, before)

    return edit


def numbers(tensor: Callable[[Any], Tensor], *, by_data: bool = False) -> Callable[[Any], Undo]:
    def edit(shared: Any) -> Undo:
        of = tensor(shared)
        before = of.detach().clone()
        with torch.no_grad():
            (of.data if by_data else of).mul_(1.5)

        def undo() -> None:
            with torch.no_grad():
                of.copy_(before)

        return undo

    return edit


def nothing(_: Any) -> Undo:
    return lambda: None


def hooked(shared: Any) -> Undo:
    def looks(*_: object) -> None: ...

    return inner(shared).layers[1].mlp.register_forward_hook(looks).remove


def in_eval_mode(shared: Any) -> Undo:
    shared.model.eval()
    return shared.model.train


def frozen(shared: Any) -> Undo:
    weight = inner(shared).norm.weight
    weight.requires_grad_(False)
    return partial(weight.requires_grad_, True)


def inner(shared: Any) -> Any:
    return shared.model.model


def layer(shared: Any) -> Any:
    return inner(shared).layers[1]


def of_rank(first: Any, second: Any) -> Callable[[Any], Any]:
    return lambda shared: second if shared.second else first


Call = Callable[[Any], object]


def steps(shared: Any) -> Tensor:
    found: Tensor = shared.step(*DATA)
    return found


def evaluates(shared: Any) -> object:
    return shared.step.evaluate(*DATA)


def asks(name: str, **given: Callable[[Any], Any]) -> Call:
    """A call of the step by which ranks differ."""

    def call(shared: Any) -> object:
        keywords = {key: value(shared) for key, value in given.items()}
        return getattr(shared.step, name)(DATA.input_ids, **keywords)

    return call


def either(first: Call, second: Call) -> Call:
    return lambda shared: (second if shared.second else first)(shared)


def autocast(shared: Any) -> object:
    with torch.autocast("cpu", torch.bfloat16) if shared.second else nullcontext():
        return steps(shared)


def with_other(name: str, value: Any) -> Call:
    def call(shared: Any) -> object:
        return shared.step(**{**vars(DATA), name: value} if shared.second else vars(DATA))

    return call


def without_gradients(shared: Any) -> object:
    with torch.set_grad_enabled(not shared.second):
        return shared.step.logprobs(DATA.input_ids)


def late_backward(shared: Any) -> object:
    values = shared.step.logprobs(DATA.input_ids)
    undo = numbers(lambda _: inner(shared).norm.weight)(shared) if shared.second else None
    try:
        return values.sum().backward()
    finally:
        if undo is not None:
            undo()


def another_step(**given: Callable[[Any], Any]) -> Call:
    def call(shared: Any) -> object:
        keywords = {key: value(shared) for key, value in given.items()}
        schedule = keywords.pop("schedule", SCHEDULE)
        return Step(shared.model, schedule, ranks=shared.sharded, **keywords)(*DATA)

    return call


# What is named; what the second rank edits; what both ranks then call.
Case = tuple[str, Callable[[Any], Undo], Call]
DIFFERENCES: list[Case] = [
    ("variance_epsilon", attribute(lambda s: inner(s).norm, "variance_epsilon", 0.1), steps),
    ("hidden_act of config", attribute(lambda s: s.model.config, "hidden_act", "relu"), steps),
    ("inv_freq", numbers(lambda s: inner(s).rotary_emb.inv_freq), steps),
    ("inv_freq", numbers(lambda s: inner(s).rotary_emb.inv_freq, by_data=True), steps),
    ("hooks of model.layers.1.mlp", hooked, steps),
    ("training: True on rank 0, False on rank 1", in_eval_mode, steps),
    ("model.norm.weight: changed its dtype, shape or requires_grad", frozen, steps),
    ("input_ids", nothing, with_other("input_ids", draw(21, seed=1).input_ids)),
    ("labels", nothing, with_other("labels", DATA.labels.roll(1))),
    ("input_ids", nothing, with_other("input_ids", [1, 2, 3])),
    ("document_ids", nothing, with_other("document_ids", None)),
    ("weights", nothing, with_other("weights", torch.ones(1, 21))),
    ("trained_tokens", nothing, with_other("trained_tokens", 5)),
    ("autocast", nothing, autocast),
    ("temperature", nothing, asks("logprobs", temperature=of_rank(1.0, 0.7))),
    ("logprobs.statistics", nothing, asks("logprobs", entropy=of_rank(False, True))),
    ("top_logprobs.k: 2 on rank 0, 3 on rank 1", nothing, asks("top_logprobs", k=of_rank(2, 3))),
    ("vocab", nothing, asks("top_logprobs", k=of_rank(2, 2), vocab=of_rank(None, 9))),
    ("gradients", nothing, without_gradients),
    ("head", numbers(lambda s: s.head.inner.weight, by_data=True), asks("values")),
    ("targets", nothing, asks("values", targets=of_rank(DATA.input_ids, DATA.labels))),
    ("call: step on rank 0, evaluate on rank 1", nothing, either(steps, evaluates)),
    ("call: step on rank 0, logprobs on rank 1", nothing, either(steps, asks("logprobs"))),
    ("neftune_alpha", attribute(lambda s: s.step, "neftune_alpha", 5.0), steps),
    ("the model has changed", nothing, late_backward),
    ("schedule", nothing, another_step(schedule=of_rank(SCHEDULE, Schedule(chunk=4, groups=2)))),
    ("kernels", nothing, another_step(kernels=of_rank(Kernels(), Kernels(fused=False)))),
]  # fmt: skip
WHOLE: list[Case] = [
    ("norm.weight", numbers(lambda s: inner(s).norm.weight), steps),
    ("layers.1.mlp.up_proj.weight", numbers(lambda s: layer(s).mlp.up_proj.weight), steps),
    ("embed_tokens.weight", numbers(lambda s: inner(s).embed_tokens.weight, by_data=True), steps),
]
ADAPTED: list[Case] = [
    (
        "p of model.layers.2.self_attn.q_proj.lora_dropout.default",
        attribute(lambda s: lora(s).lora_dropout["default"], "p", 0.2),
        steps,
    ),
    ("seed: 3 on rank 0, 4 on rank 1", attribute(lambda s: s.step, "seed", 4), steps),
    ("drawn", attribute(lambda s: s.step, "drawn", 9), steps),
    ("scaling", attribute(lambda s: lora(s), "scaling", {"default": 9.0}), steps),
]


def lora(shared: Any) -> Any:
    return shared.model.base_model.model.model.layers[2].self_attn.q_proj


@contextmanager
def edited(edit: Callable[[Any], Undo], shared: Shared, here: bool) -> Iterator[None]:
    undo = edit(shared) if here else None
    try:
        yield
    finally:
        if undo is not None:
            undo()


CHECKED = 12  # a step of what stands takes five times as long as a refusal


def wrong_cases(shared: Shared, cases: list[Case], *, everywhere: bool = False) -> list[str]:
    """The cases that are not refused on this rank, or without the name, or too late; and those
    behind which a step is wrong, which is looked at after every twelfth, and the last."""
    wrong = []
    for number, (name, edit, call) in enumerate(cases):
        dist.barrier()
        with edited(edit, shared, everywhere or shared.second):
            began, said = time.monotonic(), "it was not refused"
            try:
                call(shared)
            except (UnsupportedError, RuntimeError) as error:
                said = str(error)
            seconds = time.monotonic() - began
        if name not in said or seconds > AT_MOST:
            wrong.append(f"{number} {name}: {said[:600]} ({seconds:.2f} s)")
        if number % CHECKED and number + 1 < len(cases):
            continue
        try:
            shared.check()
        except (AssertionError, UnsupportedError, RuntimeError) as error:
            wrong.append(f"behind {number} {name}: {error}"[:600])
    return wrong


def differences(layout: Layout, stage: Stage | None, cases: list[Case]) -> list[str]:
    shared = Shared(layout, stage, adapted=cases is ADAPTED)
    if cases is not ADAPTED:
        shared.step.head = shared.head = Value(head())  # type: ignore[assignment]
    return wrong_cases(shared, cases)


def of_one_rank(layout: Layout, stage: Stage | None) -> list[str]:
    found = differences(layout, stage, DIFFERENCES + WHOLE * (layout.ulysses > 1 and stage is None))
    return found + differences(layout, stage, ADAPTED)


# -- what is edited on every rank once the model is shared ---------------------------------------


def replaced(parent: Callable[[Any], Any], name: str) -> Callable[[Any], Undo]:
    """A module is replaced by one with other weights."""

    def edit(shared: Any) -> Undo:
        of = parent(shared)
        before = getattr(of, name)
        # Not a copy of what is there: that may be a shard.
        fresh = made(False)
        path = next(n for n, m in shared.model.named_modules() if m is before)
        setattr(of, name, fresh.get_submodule(path))
        return partial(setattr, of, name, before)

    return edit


def other_parameter(shared: Any) -> Undo:
    mlp = layer(shared).mlp.up_proj
    before = mlp.weight
    mlp.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.float64))
    return partial(setattr, mlp, "weight", before)


def other_memory(shared: Any) -> Undo:
    """As `model.to(...)` does: the same parameter, in other memory."""
    weight = inner(shared).norm.weight
    before = weight._local_tensor
    weight._local_tensor = before.clone()
    return partial(setattr, weight, "_local_tensor", before)


def swapped(shared: Any) -> Undo:
    layers = inner(shared).layers
    first, last = layers[0], layers[3]

    def swap(one: nn.Module, other: nn.Module) -> None:
        layers[0], layers[3] = one, other

    swap(last, first)
    return partial(swap, first, last)


def longer(shared: Any) -> Undo:
    """A parameter that the model did not have."""
    mlp = layer(shared).mlp
    mlp.down_proj.bias = nn.Parameter(torch.ones(32, dtype=torch.float64))
    return partial(setattr, mlp.down_proj, "bias", None)


def assigned(shared: Any) -> Undo:
    before = dict(shared.model.named_parameters())
    shared.model.load_state_dict(made(False).state_dict(), assign=True)

    def undo() -> None:
        for name, parameter in before.items():
            path, _, leaf = name.rpartition(".")
            setattr(shared.model.get_submodule(path), leaf, parameter)

    return undo


EDITS: list[Case] = [
    ("model.layers.1.mlp.up_proj.weight: replaced after parallelize", other_parameter, steps),
    ("model.layers.1.mlp", replaced(layer, "mlp"), steps),
    ("model.layers.0", replaced(lambda s: inner(s).layers, "0"), steps),
    ("lm_head", replaced(lambda s: s.model, "lm_head"), steps),
    ("model.embed_tokens", replaced(inner, "embed_tokens"), steps),
    ("model.norm", replaced(inner, "norm"), evaluates),
    ("model.layers", swapped, steps),
    ("model.layers.1.mlp.down_proj", longer, steps),
    ("model.norm.weight", frozen, asks("logprobs")),
]
MEMORY: list[Case] = [("model.norm.weight: its .data was replaced", other_memory, steps)]
LOADED: list[Case] = [("model.embed_tokens.weight: replaced after parallelize", assigned, steps)]


def of_all_ranks(layout: Layout, stage: Stage | None) -> list[str]:
    shared = Shared(layout, stage)
    cases = EDITS + MEMORY * (stage not in (None, Stage.ZERO_0)) + LOADED * (layout.tensor == 1)
    found = wrong_cases(shared, cases, everywhere=True)
    return found + wrong_cases(shared, cases[::3])  # and by the second rank alone


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (Layout(ulysses=2), None),
        exhaustive(Layout(ulysses=2), Stage.ZERO_1),
        exhaustive(Layout(data=2), Stage.ZERO_2),
        (Layout(ulysses=2), Stage.ZERO_3),
        exhaustive(Layout(pipeline=2), None),
        exhaustive(Layout(pipeline=2), Stage.ZERO_3),
        exhaustive(Layout(tensor=2), Stage.ZERO_0),
        exhaustive(Layout(tensor=2), Stage.ZERO_3),
    ],
)
def test_what_is_replaced_in_a_shared_model_is_refused_by_name(
    layout: Layout, stage: Stage | None
) -> None:
    assert run_ranks(2, of_all_ranks, layout, stage) == [[], []]


def written(layout: Layout, stage: Stage | None) -> None:
    """Weights that every rank writes into."""
    shared = Shared(layout, stage)
    shared.check()
    with torch.no_grad():
        for model in (shared.model, shared.whole):
            model.model.norm.weight.mul_(1.5)
            model.lm_head.weight.copy_(model.lm_head.weight.detach() * 0.5)
    if stage is None:
        weight = inner(shared).layers[1].mlp.up_proj.weight
        weight.data = weight.data * 3
        shared.model.load_state_dict(shared.model.state_dict())
        with torch.no_grad():
            shared.whole.model.layers[1].mlp.up_proj.weight.mul_(3)
    shared.expected = run_oracle(shared.whole, DATA)
    shared.check()


@pytest.mark.parametrize("stage", [None, exhaustive(Stage.ZERO_3)])
def test_what_is_written_into_a_shared_model_is_trained(stage: Stage | None) -> None:
    run_ranks(2, written, Layout(ulysses=2), stage)


def refused_stages() -> list[str]:
    said = []
    for layout in (Layout(ulysses=2, fsdp=False), Layout(pipeline=2, fsdp=False)):
        ranks = ParallelContext(layout, CPU)
        for stage in (Stage.ZERO_1, Stage.ZERO_2, Stage.ZERO_3):
            with pytest.raises(UnsupportedError) as told:
                parallelize(made(False), SCHEDULE, ranks, stage=stage)
            said.append(str(told.value))
    return said


def test_a_stage_that_shards_contradicts_a_layout_without_fsdp() -> None:
    for said in run_ranks(2, refused_stages):
        assert all(words.startswith("stage: zero-") and "fsdp=False" in words for words in said)
        assert len(said) == 6


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        exhaustive(Layout(ulysses=2), None),
        (Layout(ulysses=2), Stage.ZERO_3),
        (Layout(pipeline=2), None),
    ],
)
def test_what_one_rank_has_otherwise_is_named_on_both(layout: Layout, stage: Stage | None) -> None:
    assert run_ranks(2, of_one_rank, layout, stage) == [[], []]
