"""Weights that rank 0 alone has, sharded as if all ranks had them."""

import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.distributed.context import ParallelContext, broadcast_from_rank0
from farspan.distributed.fsdp import local
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.hf.load import Weights, load_model
from farspan.program.layout import Layout
from farspan.spec import Schedule, UnsupportedError
from tests.grids import part_of
from tests.ranks import run_ranks
from tests.zoo import COMMON, FAMILIES

CPU = torch.device("cpu")
SCHEDULE = Schedule(chunk=8, groups=2)
TILED = Schedule(chunk=8, groups=2, mlp_chunk_size=4)
Dealing = dict[str, Any]  # options of `parallelize`
LAYOUTS: list[tuple[Layout, Dealing]] = [
    (Layout(ulysses=2), {}),
    (Layout(ulysses=2), {"offload": True}),
    (Layout(tensor=2, fsdp=False), {}),
    (Layout(pipeline=2), {}),
    (Layout(pipeline=2, fsdp=False), {}),
    (Layout(data=2, fsdp=False), {"keep": True}),
]
# Tied embeddings and a scale in a buffer; experts.
KINDS = ["gemma2", "mixtral"]


def load_held(fields: dict[str, Any], ranks: ParallelContext) -> Any:
    weights = Weights.NONE if ranks.rank.number else Weights.SAVED
    return load_model(config=fields, dtype=torch.float32, weights=weights)


def model_of(kind: str, *, blank: bool) -> Any:
    """The same of all ranks, unless it is blank."""
    fields = {"model_type": kind, **COMMON, **FAMILIES[kind].fields}
    weights = Weights.NONE if blank else Weights.SAVED
    model: Any = load_model(config=fields, dtype=torch.float32, weights=weights)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name)
    return model


def bits_of(model: nn.Module, sharded_model: ShardedModel) -> dict[str, Any]:
    """Everything that a rank has, in its places."""
    parameters = model.named_parameters(remove_duplicate=False)
    held = {name: (local(p), p.requires_grad, type(p)) for name, p in parameters if not p.is_meta}
    buffers = {name: b for name, b in model.named_buffers() if not b.is_meta}
    wholes = {name: whole.clone() for name, whole in sharded_model.sharded.wholes()}
    first = dict(model.named_parameters())
    ties = {n: first.get(n) is p for n, p in model.named_parameters(remove_duplicate=False)}
    return {
        **{name: found for name, (found, *_) in held.items()},
        **{f"{name} as it is": repr(rest) for name, (_, *rest) in held.items()},
        **buffers,
        **{f"{name} whole": whole for name, whole in wholes.items()},
        "ties": repr(ties),
        "spec": repr(sharded_model.spec),
        "tiles": repr(sharded_model.tiles),
    }


def differences(layouts: list[tuple[Layout, Dealing]], kinds: list[str]) -> list[str]:
    """Between a model that all ranks have and one that the first has."""
    wrong = []
    for layout, dealing in layouts:
        ranks = ParallelContext(layout, CPU)
        schedule = TILED if layout == Layout(ulysses=2) else SCHEDULE
        for kind in kinds if layout == Layout(ulysses=2) else kinds[:1]:
            ours, theirs = model_of(kind, blank=ranks.rank.number > 0), model_of(kind, blank=False)
            found = bits_of(ours, parallelize(ours, schedule, ranks, **dealing))
            expected = bits_of(theirs, parallelize(theirs, schedule, ranks, **dealing))
            assert found.keys() == expected.keys()
            wrong += [
                f"{kind}, {layout}, {dealing}: {name}"
                for name, value in expected.items()
                if not _same(found[name], value)
            ]
    return wrong


def _same(found: Tensor | str, expected: Tensor | str) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return found.dtype == expected.dtype and torch.equal(found, expected)


def test_every_rank_has_what_it_would_have_of_a_whole_model() -> None:
    for wrong in run_ranks(2, differences, LAYOUTS, KINDS):
        assert wrong == []


@pytest.mark.exhaustive
def test_slices_are_cut_into_rows() -> None:
    layouts: list[tuple[Layout, Dealing]] = [
        (Layout(tensor=2, shards=2), {}),
        (Layout(pipeline=2, ulysses=2), {}),
    ]
    for wrong in run_ranks(4, differences, layouts, ["gemma2"]):
        assert wrong == []


def handed_out() -> list[str]:
    ranks = ParallelContext(Layout(data=2, fsdp=False), CPU)
    model, whole = model_of("gemma2", blank=ranks.rank.number > 0), model_of("gemma2", blank=False)
    whole.model.embed_tokens.weight.requires_grad_(False)
    if ranks.rank.number == 0:
        model.model.embed_tokens.weight.requires_grad_(False)
        model.lm_head.to(torch.bfloat16)  # tied: the embedding too
    whole.lm_head.to(torch.bfloat16)
    for changed in [whole, *[model] * (ranks.rank.number == 0)]:
        for buffer in changed.buffers():
            buffer += 1.0
    broadcast_from_rank0(ranks, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found, expected = (
        {**m.state_dict(keep_vars=True), **dict(m.named_buffers())} for m in (model, whole)
    )
    return [
        name
        for name, value in expected.items()
        if not _same(found[name], value) or found[name].requires_grad != value.requires_grad
    ]


def test_whole_weights_are_those_of_the_first_in_its_dtypes() -> None:
    assert run_ranks(2, handed_out) == [[], []]


def with_a_head_of_its_own() -> bool:
    """As a folder may have it although its configuration ties the head."""
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    model = model_of("gemma2", blank=ranks.rank.number > 0)
    if ranks.rank.number == 0:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1.0)
    broadcast_from_rank0(ranks, model)
    embedding = model.model.embed_tokens.weight
    assert model.lm_head.weight is not embedding
    return torch.equal(model.lm_head.weight, embedding + 1.0)


def test_ties_are_those_of_the_first() -> None:
    assert run_ranks(2, with_a_head_of_its_own) == [True, True]


HELD = {
    "model_type": "llama",
    **COMMON,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "head_dim": 128,
    "num_hidden_layers": 18,  # of 15.7 MB; what else grows (18 to 25 MB) must not decide
}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4}


def memory_taken() -> tuple[int, int, int]:
    """Bytes of all weights, of this rank's, and by how many its memory grew in dealing them."""
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    # Code that is imported and groups that are made take memory too.
    parallelize(load_held(HELD | SMALL, ranks), SCHEDULE, ranks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = load_held(HELD, ranks)
    whole = sum(p.nbytes for p in model.parameters())
    sharded_model = parallelize(model, SCHEDULE, ranks)
    own = sum(local(p).nbytes for p in sharded_model.sharded.parameters().values())
    return whole, own, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.exhaustive
def test_no_rank_but_the_first_has_the_model_whole() -> None:
    whole, own, grew = run_ranks(2, memory_taken)[1]
    assert own == whole // 2
    assert own < grew < 0.8 * whole  # 158 to 166 MB of 283


def refused(have: list[str]) -> str:
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    mine = have[ranks.rank.number]
    model = model_of("gemma2", blank=mine == "none")
    if mine == "some":
        model.model.norm.to("meta")
    with pytest.raises(UnsupportedError) as found:
        parallelize(model, SCHEDULE, ranks)
    return str(found.value)


HAVE = [["none", "none"], ["none", "all"], ["some", "none"]]


@pytest.mark.parametrize("have", part_of(HAVE, HAVE[1]))
def test_weights_that_nobody_has_are_missed_on_all_ranks(have: list[str]) -> None:
    for words in run_ranks(2, refused, have):
        assert "load the whole model on rank 0" in words


def of_others() -> str:
    ranks = ParallelContext(Layout(ulysses=2), CPU)
    kind = ["gemma2", "mixtral"][ranks.rank.number]
    model = model_of(kind, blank=ranks.rank.number > 0)
    with pytest.raises(UnsupportedError) as found:
        parallelize(model, SCHEDULE, ranks)
    return str(found.value)


def test_models_of_other_modules_are_refused() -> None:
    for words in run_ranks(2, of_others):
        assert "(48, 32) on rank 0, missing on rank 1" in words
