"""Which budget keeps enough: masses against a softmax and a mask written out, and the words."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.attention.backends import reference
from farspan.cli.with_torch import kept_words
from farspan.engine.loss import IGNORED
from farspan.engine.reference import reference_logits, reference_loss
from farspan.formatting import read_sparse, write_sparse
from farspan.sparse.budget import RANDOM, KeptMass, kept_masses, sparse_losses
from farspan.sparse.index import Index, LayerIndex
from farspan.sparse.pages import TopK
from farspan.sparse.reference import SparseReference
from farspan.spec import INDEX, MEAN, SELECTORS, SUBMEANS, Schedule, Sparse, UnsupportedError
from tests.grids import part_of
from tests.numerics import EXACT, relative_error
from tests.zoo import VOCAB, shared_model

SPARSE = Sparse(page=4, budget=8, recent=4, sinks=4, query_page=2)
SCHEDULE = Schedule(chunk=16, groups=2, kv_block=24, sparse=SPARSE)
TOKENS, START = 60, 48  # in whole pages, and where the last chunk begins
FAR = range(1, 11)  # between sinks and recent tokens


def drawn(rows: int = 1, tokens: int = TOKENS + 1) -> Tensor:
    return torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(3))


Call = dict[str, Any]


def calls_of(model: Any, ids: Tensor) -> list[Call]:
    """What each dense layer attends with: q, k, scale, softcap, sinks."""
    found: list[Call] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        found.append({"q": q, "k": k, **rest})
        return reference(q, k, v, **rest)

    with torch.no_grad():
        reference_logits(model, ids, attend=attend)
    return [call for call in found if call["window"] is None]


def votes_of(q: Tensor, k: Tensor, scale: float, selector: str) -> list[float]:
    """Of queries [n, D], of several tokens and heads, for the far pages of keys k [T, D]."""
    votes = [0.0] * len(FAR)
    for query in q:
        scores = []
        for page in FAR:
            keys = k[page * 4 : page * 4 + 4]
            means = [keys.mean(0)] if selector == MEAN else [keys[:2].mean(0), keys[2:].mean(0)]
            means = list(keys) if selector == INDEX else means
            scores.append(max(scale * float(query @ mean) for mean in means))
        total = sum(math.exp(score) for score in scores)
        for place, score in enumerate(scores):
            weight = math.exp(score) / total
            votes[place] = max(votes[place], weight) if selector != MEAN else (
                votes[place] + weight
            )  # fmt: skip
    return votes


def seen_by(query: Tensor, keys: Tensor, call: Call, sink: float | None, pages: set[int]) -> float:
    """What a query [D] that sees these far pages sees of its softmax over all keys [t, D]."""
    scores = [call["scale"] * float(query @ key) for key in keys]
    if (cap := call["softcap"]) is not None:
        scores = [cap * math.tanh(score / cap) for score in scores]
    weights = [math.exp(score) for score in scores]
    rest = 0.0 if sink is None else math.exp(sink)
    mask = [key // 4 not in FAR or key // 4 in pages for key in range(len(weights))]
    seen = sum(weight for weight, visible in zip(weights, mask, strict=True) if visible)
    return (rest + seen) / (rest + sum(weights))


def plain_mass(call: Call, selector: str, budget: int) -> float:
    """The mean over queries and heads of what is seen: softmaxes over lists, explicit masks."""
    q, k, found = call["q"][0], call["k"][0], []
    sinks = None if call["sinks"] is None else call["sinks"].tolist()
    group = q.shape[0] // k.shape[0]
    for first, kv_head in product(range(START, TOKENS, 2), range(len(k))):
        heads = range(kv_head * group, kv_head * group + group)
        together = torch.cat([q[head, first : first + 2] for head in heads])
        keys = k[kv_head]
        if selector == INDEX:
            together, keys = together[:, :3], keys[:, :3]
        votes = votes_of(together, keys, call["scale"], selector)
        best = sorted(range(len(FAR)), key=lambda page: (-votes[page], page))
        chosen = {FAR[place] for place in best[: budget // 4]}
        for head, token in product(heads, (first, first + 1)):
            sink = None if sinks is None else sinks[head]
            found.append(seen_by(q[head, token], k[kv_head, : token + 1], call, sink, chosen))
    return sum(found) / len(found)


FAMILIES = ["gemma2", "gpt_oss", "qwen3_next", "qwen2", "deepseek_v3"]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", part_of(FAMILIES, *FAMILIES[:1]))
def test_masses_are_those_of_a_softmax_and_a_mask(name: str) -> None:
    """Groups of heads, soft caps, sinks, latent keys; windows and recurrent layers beside them."""
    model, ids = shared_model(name), drawn()
    found, calls = kept_masses(model, ids, SCHEDULE, seed=0), calls_of(model, ids[:, :TOKENS])
    assert found.budgets == (0, 4, 8, 16, 32, 40)
    assert (found.tokens, found.pages, found.own, found.queries) == (TOKENS, 10, 12, 12)
    assert len(found.layers) == len(calls)
    assert len(calls) + found.others == 4
    for selector in SELECTORS:
        expected = [
            [plain_mass(call, selector, budget) for budget in found.budgets] for call in calls
        ]
        assert relative_error(torch.tensor(found.kept[selector]), torch.tensor(expected)) <= EXACT
    for layer, own in zip(found.kept[RANDOM], found.kept[MEAN], strict=True):
        assert layer == sorted(layer)
        assert layer[0] == pytest.approx(own[0], rel=EXACT)
        assert layer[-1] == pytest.approx(1.0, rel=EXACT)


@pytest.mark.usefixtures("float64_throughout")
def test_losses_are_those_of_the_last_quarter() -> None:
    model, ids = shared_model("qwen2"), drawn(rows=2)
    labels = ids[:, :TOKENS].clone()
    labels[:, :45] = IGNORED
    found = kept_masses(model, ids, SCHEDULE, seed=0)
    dense = reference_loss(model, ids[:, :TOKENS], labels).detach()
    assert found.dense_loss == pytest.approx(float(dense), rel=EXACT)
    told: list[str] = []
    losses = sparse_losses(model, ids, SCHEDULE, 8, 0, begin=told.append)
    assert told == [SUBMEANS, MEAN, RANDOM] == list(losses)
    attend = SparseReference(replace(SPARSE, selector=MEAN), 16, TopK(2))
    own = reference_loss(model, ids[:, :TOKENS], labels, attend=attend).detach()
    assert losses[MEAN] == pytest.approx(float(own), rel=EXACT)
    assert losses[RANDOM] != losses[SUBMEANS]


@pytest.mark.usefixtures("float64_throughout")
def test_an_index_is_compared_too() -> None:
    """One whose maps take out the first three dims of each head."""
    model, ids = shared_model("gemma2"), drawn()
    calls = calls_of(model, ids[:, :TOKENS])
    _, kv_heads, _, dim = calls[0]["k"].shape
    group = calls[0]["q"].shape[1] // kv_heads
    keys = torch.eye(dim, 3, dtype=torch.float64).expand(kv_heads, dim, 3)
    queries = keys[:, None].expand(-1, group, -1, -1)
    schedule = replace(SCHEDULE, sparse=replace(SPARSE, index_dim=3))
    layers = kept_masses(model, ids, schedule, 0).layers
    index = Index({layer: LayerIndex(queries, keys) for layer in layers})
    found = kept_masses(model, ids, schedule, 0, index)
    assert found.names == (SUBMEANS, MEAN, INDEX, RANDOM)
    expected = [[plain_mass(call, INDEX, budget) for budget in found.budgets] for call in calls]
    assert relative_error(torch.tensor(found.kept[INDEX]), torch.tensor(expected)) <= EXACT
    losses = sparse_losses(model, ids, schedule, 8, 0, index)
    assert set(losses) == set(found.names)
    assert len(set(losses.values())) == 4
    with pytest.raises(UnsupportedError, match="index: it has no layer"):
        kept_masses(model, ids, schedule, 0, Index({layers[0]: index.layers[layers[0]]}))


@pytest.mark.parametrize(
    ("schedule", "tokens", "message"),
    [
        (
            SCHEDULE,
            4,
            r"sparse.page: a page of 4 tokens does not fit into a text of 4; give more text",
        ),
        (replace(SCHEDULE, sparse=replace(SPARSE, recent=48)), 60, "or recent=12 in --sparse"),
        (
            SCHEDULE,
            16,
            r"token 0 on, sees all tokens before it .*; give a longer .* a smaller --chunk, page",
        ),
    ],
)
def test_where_nothing_is_to_be_chosen(schedule: Schedule, tokens: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        kept_masses(shared_model("qwen2"), drawn(tokens=tokens), schedule, seed=0)


def test_a_model_of_windows_has_nothing_to_choose() -> None:
    with pytest.raises(UnsupportedError, match="model: each of its layers has a window"):
        kept_masses(shared_model("mistral"), drawn(), SCHEDULE, seed=0)


def kept(**masses: list[list[float]]) -> KeptMass:
    """Of layers 1 and 5, four pages and budgets of 0, 128, 256 and 512 tokens."""
    sparse = Sparse(budget=0, recent=256)
    rest = {name: masses.get(name, masses[SUBMEANS]) for name in (*SELECTORS, RANDOM)}
    return KeptMass(
        sparse, 256, 1024, 16, 4, (0, 128, 256, 512), (1, 5), 2, rest, dense_loss=2.0
    )  # fmt: skip


LOSSES = dict.fromkeys((*SELECTORS, RANDOM), 2.5)
SLOW = [[0.5, 0.6, 0.7, 1.0], [0.5, 0.6, 0.7, 1.0]]


class TestWords:
    def test_a_budget_is_enough(self) -> None:
        found = kept(submeans=[[0.5, 0.97, 0.98, 1.0], [0.5, 0.85, 0.91, 1.0]], mean=SLOW)
        said = kept_words(found, found.judged(), LOSSES)
        assert found.best() == SUBMEANS
        assert said[0] == (
            "submeans keeps 0.9 of dense attention in the whole model (the mean over its layers) "
            "with budget=128, 1 of 4 pages; others need: mean all pages, random pages 128"
        )
        assert said[1] == "layer 5 needs the most pages: budget=256 with submeans"
        assert said[2].startswith("2 other layers have a window or no attention")
        assert said[3] == (
            "loss of the last 256 tokens: dense 2.0000; at budget=128 in all layers and for all "
            "tokens: submeans 2.5000 (+0.5000), mean 2.5000 (+0.5000), random pages 2.5000 "
            "(+0.5000)"
        )
        assert said[4] == "to train with this: --sparse page=128,budget=128,recent=256"
        assert said[5] == "to do so in every layer: --sparse page=128,budget=256,recent=256"
        assert said[6].startswith("this holds for 1K tokens; longer sequences have more pages")

    def test_no_pages_are_needed(self) -> None:
        found = kept(submeans=[[0.96, 0.97, 0.98, 1.0], [0.88, 0.89, 0.92, 1.0]])
        said = kept_words(found, found.judged(), LOSSES)
        assert said[0].startswith(
            "without any page, sparse attention sees 0.920 of dense attention"
        )
        assert said[1] == "layer 5 needs the most pages: budget=256 with submeans"
        assert "to train with this: --sparse page=128,budget=256,recent=256" in said
        found = kept(submeans=[[0.96, 0.97, 0.98, 1.0], [0.91, 0.92, 0.93, 1.0]])
        said = kept_words(found, found.judged(), LOSSES)
        assert said[1] == "this holds in every layer; layer 5 sees the least attention"
        assert "to train with this: --sparse page=128,budget=0,recent=256" in said


def test_what_is_to_be_typed_is_read_back() -> None:
    for sparse in (Sparse(), SPARSE, Sparse(selector=MEAN, budget=1280, recent=0, sinks=0)):
        assert read_sparse(write_sparse(sparse)) == sparse
