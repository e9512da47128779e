"""Several ranks: the loss and every gradient of one process, to 1e-12 in float64."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import Stage
from farspan.engine.loss import trained_token_count
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.engine.reference import gradients_of, reference_loss
from farspan.engine.step import Step
from farspan.hf.probe import Float64Mode
from farspan.program.layout import AXES, Layout
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from tests.engine.checks import Data, Outcome, assert_close, draw, run_oracle, run_step
from tests.grids import exhaustive
from tests.oracles.sent_bytes import sent_bytes
from tests.ranks import run_ranks
from tests.zoo import make_model

CPU = torch.device("cpu")
Dealing = dict[str, Any]  # options of `parallelize`


@dataclass(frozen=True)
class Case:
    """One model by one schedule, on two inputs one after the other: arenas grow in between."""

    name: str
    schedule: Schedule
    inputs: tuple[Data, Data]
    family: str = "qwen2"
    fields: dict[str, Any] = field(default_factory=dict)


def outcomes_of(layout: Layout, cases: list[Case], dealing: Dealing | None = None) -> list[str]:
    """On each rank: what is wrong, case by case. Without a dealing weights stay whole."""
    ranks = ParallelContext(layout, CPU)
    wrong = []
    for case in cases:
        with float64_of(case.family):
            wrong += differences(case, ranks, dealing)
    return wrong


def float64_of(family: str) -> AbstractContextManager[object]:
    """What a family's own code computes in float32. Ours would show in qwen2."""
    return nullcontext() if family == "qwen2" else Float64Mode()


def differences(case: Case, ranks: ParallelContext, dealing: Dealing | None) -> list[str]:
    wrong = []
    model, whole = (make_model(case.family, **case.fields) for _ in range(2))
    team: ParallelContext | ShardedModel = ranks
    if dealing is not None:
        team = parallelize(model, case.schedule, ranks, **dealing)
    step = Step(model, case.schedule, poison=True, ranks=team)
    for number, data in enumerate(case.inputs):
        expected = run_oracle(whole, data)
        try:
            check(model, step, data, expected)
            if number:
                evaluation = Outcome(step.evaluate(*rows_of(ranks, data)), {})
                assert_close(evaluation, replace(expected, gradients={}))
        except AssertionError as error:
            wrong.append(f"{case.name}, step {number}: {error}"[:400])
    return wrong


def check(model: Any, step: Step, data: Data, expected: Outcome) -> None:
    assert step.sharded_model is not None
    own, others = rows_of(step.sharded_model.ranks, data), stage_of_others(step, expected)
    model.zero_grad(set_to_none=True)
    before = sent(step.sharded_model.ranks)
    loss = step(*own)
    assert_sent(
        step, own, {axis: n - before[axis] for axis, n in sent(step.sharded_model.ranks).items()}
    )
    found = Outcome(loss, whole_gradients(model, step.sharded_model, others))
    expected = replace(expected, gradients=without(expected.gradients, others))
    assert_close(found, expected)


def sent(ranks: ParallelContext) -> dict[str, int]:
    return {axis: ranks.among(axis).sent for axis in ("ulysses", "shards", "ring", "pipeline")}


def assert_sent(step: Step, data: Data, found: dict[str, int]) -> None:
    """What was counted as it left is what the program says, instruction by instruction."""
    program = step.program(*data.input_ids.shape)
    expected = dict.fromkeys(found, 0)
    for instruction in program.instructions:
        for axis, size in sent_bytes(program, instruction).items():
            expected[axis] += size
    assert found == expected


def whole_gradients(model: Any, sharded_model: ShardedModel, others: set[str]) -> dict[str, Tensor]:
    """Of the layers that run here, put together from all ranks. Others have none."""
    found = {}
    for name, p in model.named_parameters():
        if name in others or not p.requires_grad:
            assert p.grad is None, name
            continue
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        found[name] = (
            gradient if sharded_model.tensor is None else sharded_model.tensor.whole(name, gradient)
        )
    return found


def without(gradients: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if name not in names}


def stage_of_others(step: Step, expected: Outcome) -> set[str]:
    """Parameters of layers that other pipeline stages run."""
    program = step.program(1, 8)
    groups = [program.groups[index] for index in program.own_groups()]
    own = {layer for start, stop in groups for layer in range(start, stop)}
    layers = {name: re.search(r"(?:layers|h)\.(\d+)\.", name) for name in expected.gradients}
    return {name for name, match in layers.items() if match and int(match[1]) not in own}


def rows_of(ranks: ParallelContext, data: Data) -> Data:
    """The sequences of a replica."""
    index, count = ranks.rank.along["data"], ranks.layout.data
    documents = data.document_ids
    return Data(
        data.input_ids[index::count],
        data.labels[index::count],
        None if documents is None else documents[index::count],
    )


def two(tokens: int, **options: Any) -> tuple[Data, Data]:
    return draw(tokens // 3, **options), draw(tokens, **options, seed=1)


SCHEDULES = {
    "layers": Schedule(chunk=16),
    "groups": Schedule(chunk=7, groups=2, kv_block=8),
    "kept": Schedule(
        chunk=16,
        groups=2,
        attention_save_fraction=0.5,
        attention_open=True,
        activation_save_fraction=0.4,
    ),
    "evenly": Schedule(
        chunk=16, groups=1, activation_save_fraction=0.6, activation_save_layers=0.5
    ),
    "host": Schedule(chunk=9, groups=(1, 3), kv=Tier.HOST, kv_kept=True, kv_block=5),
    "home": Schedule(
        chunk=16, groups=2, kv_kept=True, layer_checkpoint=True, boundary_inputs=Tier.DEVICE
    ),
    "tiny": Schedule(chunk=1, groups=1, kv_block=3),
}
# What depends neither on the number of layers nor on that of groups.
SHALLOW = {"num_hidden_layers": 2}
OF_FAMILIES = replace(SCHEDULES["groups"], groups=1)


def of_family(name: str) -> Case:
    return Case(name, OF_FAMILIES, two(19, batch=2, documents=3), name, SHALLOW)


CASES = [
    *(Case(name, schedule, two(29)) for name, schedule in SCHEDULES.items() if name != "tiny"),
    Case("tiny", SCHEDULES["tiny"], two(6)),  # a hundred messages a token
    Case("documents", SCHEDULES["groups"], two(29, batch=2, documents=5)),
    *(Case(name, strategy(name, 2, 19), two(19), fields=SHALLOW) for name in STRATEGIES),
]
HEADS = {"num_key_value_heads": 4}
# Of each kind one: what a family is does not reach the ranks beyond its attention call.
KINDS = ("gemma2", "gpt_oss", "deepseek_v3", "gpt2")
WHOLE_GRAPHS = Schedule(
    chunk=64, groups=1, activation_save_fraction=1.0, attention_save_fraction=1.0, alltoall_splits=1
)
ON_TWO = [
    *CASES,
    *map(of_family, KINDS),
    *(Case(name, WHOLE_GRAPHS, two(29), name, SHALLOW) for name in ("opt", "deepseek_v3")),
]
# A strategy of each kind, where all eight run along another axis.
ONCE = ("plain", "recompute", "offload", "swap", "layers")
SOME = [case for case in CASES if case.name not in ONCE]
FEW = [
    Case("groups", SCHEDULES["groups"], two(19, batch=2, documents=5), fields=HEADS),
    Case("kept", SCHEDULES["kept"], two(19, batch=2), fields=HEADS),
    Case("host", SCHEDULES["host"], two(22, batch=2), fields=HEADS),
]


# Messages of one head of one sequence.
THIN = Case("thin", SCHEDULES["kept"], two(29), fields=HEADS | SHALLOW)
SPREAD = [of_family(name) for name in ("mistral", "gpt_oss", "deepseek_v3")]
ON_DEVICE = [case for case in SOME if case.schedule.kv is Tier.DEVICE]
STAGED = [case for case in SOME if case.schedule.activation_save_layers == 1]  # others are refused


FLAT = [c for c in SOME if not c.schedule.activation_save_fraction and c.name != "tiny"]
FEW_FLAT = [case for case in FEW if not case.schedule.activation_save_fraction]
FEW_FLAT.append(Case("grouped", strategy("grouped", 4, 33), two(33, batch=2), fields=HEADS))
TENSOR = [of_family(name) for name in ("gemma2", "phi3", "olmo2")]


def one_long_row(seed: int) -> Data:
    """Two rows of 29 tokens; documents of the first are short, those of the second are not."""
    rows = torch.arange(29) // 6, torch.arange(29) // 20
    return replace(draw(29, batch=2, seed=seed), document_ids=torch.stack(rows))


# The table of every replica is that of the longest document of all.
LONG_ROPE = Case(
    "longrope",
    SCHEDULES["groups"],
    (one_long_row(0), one_long_row(1)),
    "llama",
    {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 16,
        }
    },
)

# Stages and replicas each hand on states of their own.
STATES = [
    Case("states", SCHEDULES["groups"], two(29, batch=2, documents=5), "lfm2"),
    Case("kept states", SCHEDULES["kept"], two(29, batch=2), "lfm2"),
    Case("states on host", SCHEDULES["host"], two(29, batch=2), "lfm2"),
    Case("states beside keys", SCHEDULES["host"], two(29, batch=2, documents=5), "falcon_h1"),
]

# Routers' losses count tokens of all ranks, except those that keep a rank in step with others.
LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
ROUTERS = [
    Case("routers", SCHEDULES["kept"], two(29, batch=2), "mixtral", LOSSES),
    Case("routers of tiny chunks", SCHEDULES["tiny"], two(6), "mixtral", LOSSES),
]


def words(value: object) -> str:
    """The axes of a layout that have several ranks."""
    if not isinstance(value, Layout):
        return ""
    if value.devices() == 1:
        return "alone"
    return "-".join(f"{axis}{getattr(value, axis)}" for axis in AXES if getattr(value, axis) > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (Layout(ulysses=2), [FEW[0], of_family("gpt_oss"), *ROUTERS]),
        exhaustive(Layout(ulysses=2), ON_TWO),
        exhaustive(Layout(ulysses=4), FEW),
        exhaustive(Layout(ulysses=2, data=2), FEW),
        (Layout(pipeline=2), [FEW[1], STATES[0], ROUTERS[0]]),
        exhaustive(Layout(pipeline=2), STAGED),
        exhaustive(Layout(pipeline=4), FEW[:2]),
        exhaustive(Layout(pipeline=2), STATES[1:]),
        (Layout(data=2), [*STATES[:1], LONG_ROPE]),
        exhaustive(Layout(pipeline=2, ulysses=2), [*FEW[1:], *ROUTERS]),
        (Layout(shards=2), [FEW[2], SPREAD[1]]),
        exhaustive(Layout(shards=2), [*FEW[:1], *ROUTERS]),
        exhaustive(Layout(shards=2), [*SOME, *SPREAD]),
        exhaustive(Layout(shards=4), FEW[:2]),
        (Layout(ulysses=2, shards=2), [THIN]),
        exhaustive(Layout(ulysses=2, shards=2), FEW[:2]),
        (Layout(ring=2), [FEW[1], SPREAD[1]]),
        exhaustive(Layout(ring=2), [*ON_DEVICE, *SPREAD, *ROUTERS]),
        exhaustive(Layout(ring=2, shards=2), FEW[:2]),
        exhaustive(Layout(ulysses=2, ring=2), FEW[:2]),
    ],
    ids=words,
)
def test_every_layout_is_exact(layout: Layout, cases: list[Case]) -> None:
    wrong = run_ranks(layout.devices(), outcomes_of, layout, cases)
    assert not any(wrong), "\n".join(line for rank in wrong for line in rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "cases", "dealing"),
    [
        (Layout(ulysses=2), [FEW[2], SPREAD[0]], {}),
        exhaustive(Layout(ulysses=2), [*CASES[:5], *ROUTERS], {}),
        (Layout(data=2), FEW[:2], {"stage": Stage.ZERO_2, "offload": True}),
        exhaustive(Layout(pipeline=2, ulysses=2), FEW[:1], {}),
        exhaustive(Layout(pipeline=2, data=2), [*FEW[:2], LONG_ROPE], {}),
        exhaustive(Layout(data=2), STATES, {"stage": Stage.ZERO_2, "offload": True}),
        exhaustive(Layout(pipeline=2, data=2), STATES[:2], {}),
        exhaustive(Layout(pipeline=4), FEW[:2], {}),
        (Layout(tensor=2), [FEW_FLAT[1], TENSOR[0]], {}),
        exhaustive(Layout(tensor=2), [*FLAT, *TENSOR], {}),
        exhaustive(Layout(tensor=2, ulysses=2), FEW_FLAT, {}),
        exhaustive(Layout(tensor=2, data=2, fsdp=False), FEW_FLAT[:2], {}),
        exhaustive(Layout(tensor=2, pipeline=2), FEW_FLAT[:2], {}),
    ],
    ids=words,
)
def test_dealt_models_are_exact(layout: Layout, cases: list[Case], dealing: Dealing) -> None:
    wrong = run_ranks(layout.devices(), outcomes_of, layout, cases, dealing)
    assert not any(wrong), "\n".join(line for rank in wrong for line in rank)


def outcomes_with_sums(layout: Layout, cases: list[Case], dealing: Dealing | None) -> list[str]:
    """As a GPU has them: products add weight gradients to sums."""
    with patch("farspan.engine.preparation.adds_products", lambda *_: True):
        return outcomes_of(layout, cases, dealing)


def test_products_that_add_to_sums_are_exact() -> None:
    wrong = run_ranks(2, outcomes_with_sums, Layout(ulysses=2), FEW[1:2], {})
    assert not any(wrong), "\n".join(line for rank in wrong for line in rank)


def sparse_as_alone() -> None:
    """Pages are chosen by the heads of one K, V head, which Ulysses keeps together."""
    schedule = Schedule(chunk=8, groups=2, sparse=Sparse(page=4, budget=8, recent=4, sinks=4))
    one, several = (make_model("qwen2", num_key_value_heads=4) for _ in range(2))
    steps = (
        Step(one, schedule),
        Step(several, schedule, ranks=ParallelContext(Layout(ulysses=2), CPU)),
    )
    for data in two(29, batch=2, documents=3):
        expected = run_step(one, steps[0], data)
        assert_close(run_step(several, steps[1], data), expected)


def test_sparse_attention_over_heads() -> None:
    run_ranks(2, sparse_as_alone)


def refused_on_ranks() -> list[str]:
    """What is refused on two ranks, in words."""
    found = []

    def refuse(call: Callable[[], Any]) -> None:
        try:
            call()
        except UnsupportedError as error:
            found.append(str(error).split("\n")[0])

    model, number = make_model("qwen2"), dist.get_rank()
    layouts = Layout(ulysses=2), Layout(shards=2), Layout(ring=2)
    heads, shards, ring = (ParallelContext(layout, CPU) for layout in layouts)
    refuse(lambda: ParallelContext(Layout(ulysses=3), CPU))
    refuse(lambda: Step(model, Schedule(kv=Tier.HOST), ranks=ring))
    refuse(lambda: Step(model, Schedule(chunk=8 + number), ranks=shards))
    refuse(lambda: Step(make_model("qwen2", num_key_value_heads=1), Schedule(), ranks=heads))
    refuse(lambda: Step(make_model("lfm2"), Schedule(), ranks=shards))
    step = Step(model, Schedule(chunk=8), ranks=shards)
    data = draw(20, seed=number)
    refuse(lambda: step(*data))
    refuse(lambda: step(*draw(20), trained_tokens=10 + number))
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        if number:
            weight.copy_(weight.flip(0))  # the same numbers elsewhere
    refuse(lambda: Step(model, Schedule(), ranks=shards))
    stages = ParallelContext(Layout(pipeline=2), CPU)
    refuse(lambda: Step(model, Schedule(), ranks=stages))
    same = Step(make_model("qwen2"), Schedule(chunk=8), ranks=stages)
    refuse(lambda: same(*draw(20 + number)))
    return found


def test_what_ranks_refuse() -> None:
    """On all ranks alike: nobody is left waiting."""
    first, second = run_ranks(2, refused_on_ranks)
    assert first == second
    words = [line.partition(":")[0] for line in first]
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert words == [
        *("layout", "kv", "schedule", "ulysses", "parallel"),
        *("input_ids", "trained_tokens", weight, weight, "input_ids"),
    ]
    assert first[0] == (
        "layout: 3 devices, but 2 ranks were started; start 3, or make the product of "
        "pipeline, data, ring, shards, ulysses, tensor equal 2"
    )
    assert "differs between ranks [0] and ranks [1]" in first[-1]


def replicas_of_unlike_length() -> None:
    """One replica has more tokens than the other, then none that is trained; what is frozen stays
    so, and gradients add up over steps that do not clear them."""
    ranks = ParallelContext(Layout(data=2), CPU)
    model, whole = (make_model("qwen2") for _ in range(2))
    for one in (model, whole):
        one.get_input_embeddings().requires_grad_(False)
        one.model.layers[1].requires_grad_(False)
    schedule = Schedule(chunk=8, groups=2)
    step = Step(model, schedule, ranks=parallelize(model, schedule, ranks))
    total: dict[str, Tensor] = {}
    for number, lengths in enumerate(((5, 31), (17, 9))):
        datas = [draw(tokens, seed=10 * number + i) for i, tokens in enumerate(lengths)]
        if number:
            datas[1] = replace(datas[1], labels=torch.full_like(datas[1].labels, -100))
        counts = [trained_token_count(data.labels) for data in datas]
        # Scaled before the backward: norms round gradients to fp32.
        shares = [count / sum(counts) for count in counts]
        losses = [reference_loss(whole, *data) * n for data, n in zip(datas, shares, strict=True)]
        for share in losses:
            for name, gradient in gradients_of(whole, share).items():
                total[name] = total.get(name, torch.zeros(())) + gradient
        found = step(*datas[dist.get_rank()])
        assert step.sharded_model is not None
        gradients = whole_gradients(model, step.sharded_model, set())
        gradients = {name: g for name, g in gradients.items() if name in total}
        loss = torch.stack(losses).sum().detach()
        assert_close(Outcome(found, gradients), Outcome(loss, total))
    assert model.get_input_embeddings().weight.grad is None


def test_replicas_of_unlike_length_are_exact() -> None:
    run_ranks(2, replicas_of_unlike_length)
