"""The index: exact for its choice like any selector, saved and loaded, refused where it does not
fit."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan.attention.backends import reference
from farspan.distributed.context import ParallelContext
from farspan.engine.parallelize import parallelize
from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.attention_interface import answering, routed
from farspan.program.layout import Layout, Rank
from farspan.sparse.attend import sampled, seen_mask
from farspan.sparse.index import (
    CONFIG,
    FORMAT,
    LESSONS,
    TENSORS,
    Index,
    LayerIndex,
    _Moments,
    principal_index,
)
from farspan.sparse.pages import Fraction, TopK
from farspan.sparse.reference import SparseReference
from farspan.spec import LayerSpec, Schedule, Sparse, UnsupportedError
from farspan.train.config import SparseConfig
from farspan.train.sparse import selector_for
from tests.engine.checks import assert_close, assert_same_bits, draw, run_step
from tests.engine.test_ranks import check
from tests.grids import exhaustive, part_of
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.sparse.test_engine import SCHEDULES, SPARSE, run_sparse_oracle
from tests.zoo import make_model, shared_model

INDEXED = replace(SPARSE, selector="index", index_dim=3)
DATA = draw(101, batch=2, documents=3)


def random_index(layers: tuple[LayerSpec, ...], dim: int, seed: int = 0) -> Index:
    generator = torch.Generator().manual_seed(seed)

    def maps(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = {}
    for number, of in enumerate(layers):
        if of.window is None:
            group, narrow = of.query_heads // of.kv_heads, min(dim, of.head_dim)
            queries = maps(of.kv_heads, group, of.head_dim, narrow)
            found[number] = LayerIndex(queries, maps(of.kv_heads, of.head_dim, narrow))
    return Index(found)


def index_of_family(name: str, dim: int = 3) -> Index:
    return random_index(Step(shared_model(name), Schedule()).model_spec.layers, dim)


def reads_votes(index: Index, sparse: Sparse) -> Index:
    return replace(index, select=TopK(sparse.budget // sparse.page))


@pytest.mark.parametrize("name", part_of(SCHEDULES, "host", "graphs"))
def test_a_step_is_exact_for_its_choice(name: str) -> None:
    """Twice, of documents, of groups of heads that share keys; rebuilds have the same choice."""
    model, index = shared_model("qwen2"), index_of_family("qwen2")
    schedule = replace(SCHEDULES[name], sparse=INDEXED)
    step = Step(model, schedule, selector=index, poison=True)
    for seed, tokens in enumerate((77, 45)):
        data = draw(tokens, batch=2, documents=3, seed=seed)
        expected = run_sparse_oracle(model, schedule, data, reads_votes(index, INDEXED))
        assert_close(run_step(model, step, data), expected)
        assert relative_error(step.evaluate(*data), expected.loss) <= EXACT


@pytest.mark.usefixtures("float64_throughout")
def test_layers_with_a_window_have_none() -> None:
    model, index, data = shared_model("gpt_oss"), index_of_family("gpt_oss"), draw(61)
    assert list(index.layers) == [1, 3]
    schedule = Schedule(chunk=16, groups=2, sparse=INDEXED)
    expected = run_sparse_oracle(model, schedule, data, reads_votes(index, INDEXED))
    assert_close(run_step(model, Step(model, schedule, selector=index), data), expected)


def test_maps_are_linear_maps_of_each_head() -> None:
    index = index_of_family("qwen2").layers[0]
    kv_heads, group, dims, _ = index.queries.shape
    q = torch.randn(2, kv_heads * group, 5, dims, dtype=torch.float64)
    k = torch.randn(5, 2, kv_heads, dims, dtype=torch.float64)
    heads = range(kv_heads * group)
    queries = torch.stack([q[:, h] @ index.queries[h // group, h % group] for h in heads], 1)
    keys = torch.stack([k[:, :, h] @ index.keys[h] for h in range(kv_heads)], 2)
    assert relative_error(index.of_queries(q), queries) <= EXACT
    assert relative_error(index.of_keys(k), keys) <= EXACT
    compared = index.compared(q, k.permute(1, 2, 0, 3))
    assert relative_error(compared[0], queries) <= EXACT
    assert relative_error(compared[1], keys.permute(1, 2, 0, 3)) <= EXACT


def products(maps: LayerIndex) -> torch.Tensor:
    """[Hk, r, D, D], which do not depend on the signs of dims."""
    return maps.queries @ maps.keys.mT.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Recording(SparseReference):
    """What attention of each layer is given."""

    calls: list["Call"] = field(default_factory=list)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Any:
        ids = how["document_ids"]
        if ids is None:
            ids = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64)
        choice = self.choice(q.detach(), k.detach(), how["scale"], ids)
        self.calls.append((self.layer, q.detach(), k.detach(), how["scale"], ids, choice))
        return SparseReference.__call__(self, q, k, v, **how)


Call = tuple[int, torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor]


def taught(recorded: Recording) -> Iterator[tuple[Call, int, range]]:
    """Calls, and of each the pages of queries that teach: their number, and their tokens."""
    sparse, chunk = recorded.sparse, recorded.chunk
    for call in recorded.calls:
        first, tokens = 0, call[1].shape[2]
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            count = -(-(stop - start) // sparse.query_tokens)
            for number in sampled(count, LESSONS) if sparse.width(start) else ():
                begin = start + number * sparse.query_tokens
                yield call, first + number, range(begin, min(begin + 4, stop))
            first += count


def plain_divergence(recorded: Recording, index: Index) -> torch.Tensor:
    """Of all layers and of the queries that teach, one query of one head at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for call, number, tokens in taught(recorded):
        layer, q, k, _, ids, choice = call
        seen = seen_mask(choice, recorded.sparse, recorded.chunk, ids)
        for b, head, t in product(range(q.shape[0]), range(q.shape[1]), tokens):
            h, one = divmod(head, q.shape[1] // k.shape[1])
            of = q[b, head, t], k[b, h], seen[b, h, t]
            pages = [p for p in choice[b, h, number].tolist() if p >= 0]
            maps = index.layers[layer]
            total = total + divergence_of(
                LayerIndex(maps.queries[h, one], maps.keys[h]), *of, pages, call[3]
            )
    return total


def divergence_of(
    maps: LayerIndex,
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    pages: list[int],
    scale: float,
) -> torch.Tensor:
    """Of a head's query q [D] at one token, which sees these of k [T, D]."""
    attended = (scale * k @ q).masked_fill(~seen, -torch.inf).softmax(0)
    query = q @ maps.queries
    spans = [torch.arange(4 * page, 4 * page + 4) for page in pages]
    spans = [own[seen[own]] for own in spans if seen[own].any()]
    if not spans:
        return torch.zeros((), dtype=torch.float64)
    mass = torch.stack([attended[own].sum() for own in spans])
    log = torch.stack([(scale * (k[own] @ maps.keys) @ query).max() for own in spans])
    return (mass * ((mass / mass.sum()).log() - log.log_softmax(0))).sum()


def indexed_as_alone() -> None:
    """Replicas and stages have all heads of a layer, others their own; each replica would learn
    for itself."""
    schedule, index = replace(SCHEDULES["device"], sparse=INDEXED), index_of_family("qwen2")
    expected = run_step(one := make_model("qwen2"), Step(one, schedule, selector=index), DATA)
    for layout in Layout(pipeline=2), Layout(ulysses=2), Layout(tensor=2), Layout(data=2):
        model, ranks = make_model("qwen2"), ParallelContext(layout, torch.device("cpu"))
        team = parallelize(model, schedule, ranks) if layout.tensor == 2 else ranks
        check(model, Step(model, schedule, selector=index, ranks=team), DATA, expected)
        if layout.data == 2:
            learner = Step(model, schedule, selector=index.learning(), ranks=ranks)
            with pytest.raises(UnsupportedError, match=r"^index: each rank would learn .* process"):
                learner(*DATA)


def test_ranks_choose_as_one_does() -> None:
    run_ranks(2, indexed_as_alone)


def test_ranks_that_spread_heads_twice_have_their_own_maps() -> None:
    """Tensor parallelism cuts heads into runs, Ulysses each of these."""
    whole = LayerIndex(torch.arange(8.0).view(8, 1, 1, 1), torch.arange(8.0).view(8, 1, 1))
    layout = Layout(ulysses=2, tensor=2, data=2)
    for number in range(layout.devices()):
        rank = Rank(layout, number)
        first = 4 * rank.along["tensor"] + 2 * rank.along["ulysses"]
        own = whole.of_rank(rank)
        assert own.queries.flatten().tolist() == own.keys.flatten().tolist() == [first, first + 1]


class TestLearning:
    @pytest.mark.parametrize("name", ["device", exhaustive("graphs")])
    def test_gradients_are_plain_autograd_s(self, name: str) -> None:
        """Of documents, of groups of heads, in a second step as in the first."""
        model, index = shared_model("qwen2"), index_of_family("qwen2").learning()
        schedule = replace(SCHEDULES[name], sparse=INDEXED)
        step = Step(model, schedule, selector=index, poison=True)
        for tokens, documents in ((45, 0), (77, 2)):
            data = draw(tokens, batch=2, documents=documents)
            recorded = Recording(INDEXED, schedule.chunk, reads_votes(index, INDEXED))
            with torch.no_grad():
                reference_loss(model, *data, attend=recorded)
            expected = torch.autograd.grad(plain_divergence(recorded, index), index.parameters())
            for trains in (True, False):
                if trains:
                    run_step(model, step, data)
                else:
                    step.evaluate(*data)
                for parameter, gradient in zip(index.parameters(), expected, strict=True):
                    assert gradient.abs().max() > 0
                    assert parameter.grad is not None
                    assert relative_error(parameter.grad, gradient) <= EXACT
                    parameter.grad = None

    def test_the_model_s_gradients_are_the_same_bits(self) -> None:
        model, schedule = shared_model("qwen2"), replace(SCHEDULES["graphs"], sparse=INDEXED)
        index = index_of_family("qwen2")
        without = run_step(model, Step(model, schedule, selector=index), DATA)
        assert all(x.grad is None for x in index.parameters())
        found = run_step(model, Step(model, schedule, selector=index.learning()), DATA)
        assert all(x.grad is not None for x in index.parameters())
        assert_same_bits(found, without)

    def test_keys_are_on_host(self) -> None:
        """It is told as the step is made; of what learns since then, before its first cell."""
        model, index = shared_model("qwen2"), index_of_family("qwen2")
        schedule, begun = replace(SCHEDULES["host"], sparse=INDEXED), list[object]()
        step = Step(model, schedule, selector=index, progress=begun.append)
        index.learning()
        message = r"^index: learns from keys on the device.* set schedule.kv to device"
        with pytest.raises(UnsupportedError, match=message):
            Step(model, schedule, selector=index)
        with pytest.raises(UnsupportedError, match=message):
            step(*DATA)
        assert not begun


class TestPrincipal:
    def test_all_dims_give_the_products(self) -> None:
        """But for what is the same for all keys of a query."""
        q, k = torch.randn(1, 4, 60, 6), torch.randn(1, 2, 60, 6)
        maps = _Moments.of(q, k).principal(6, 1)
        queries, keys = maps.compared(q, k)
        wide_keys, wide = (x.repeat_interleave(2, 1) for x in (keys, k))
        assert relative_error(queries @ wide_keys.mT, q @ wide.mT) < 1e-5

    def test_of_places_in_a_context(self) -> None:
        """As if the queries and keys of all places were of one text."""
        model, (input_ids, *_) = shared_model("qwen2"), draw(31)
        read: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

        def noting(
            module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **_: Any
        ) -> torch.Tensor:
            read.setdefault(module.layer_idx, []).append((q, k))
            return reference(q, k, v, scale=scale).transpose(1, 2)

        positions = torch.arange(31)[None].expand_as(input_ids)
        with torch.no_grad(), routed(model), answering(noting):
            for start in (0, 74, 149, 224):
                model.model(input_ids, position_ids=positions + start, use_cache=False)
        index = principal_index(model, input_ids, 4, 255)
        for number, pairs in read.items():
            q, k = (torch.cat(x) for x in zip(*pairs, strict=True))
            expected = products(_Moments.of(q, k).principal(4, 1))
            assert relative_error(products(index.layers[number]), expected) < 1e-5
        for context in (30, 255.0):
            with pytest.raises(UnsupportedError, match=r"^context: expected .* the text's 31 tok"):
                principal_index(model, input_ids, 4, context)  # type: ignore[arg-type]
        near = products(principal_index(model, input_ids, 4).layers[0])
        assert relative_error(near, products(index.layers[0])) > 0.1

    def test_of_keys_that_are_all_the_same(self) -> None:
        q, k = torch.randn(1, 2, 60, 6), torch.randn(1, 2, 1, 6).expand(-1, -1, 60, -1).clone()
        q[:, 1], k[:, 1] = 0.0, 0.0
        maps = _Moments.of(q, k).principal(6, 1)
        assert maps.queries.isfinite().all()
        assert maps.keys.isfinite().all()

    def test_of_a_model(self) -> None:
        model, (input_ids, *_) = shared_model("gpt_oss"), draw(61)
        index = principal_index(model, input_ids, 3)
        assert list(index.layers) == [1, 3]
        index.refuse_misfit(Step(model, Schedule()).model_spec.layers, 3)
        assert all(x.isfinite().all() for x in index.parameters())
        assert principal_index(model, input_ids, 99).dim == index.layers[1].keys.shape[1]
        dims: tuple[Any, ...] = 0, -1, 2.5
        for dim in dims:
            with pytest.raises(UnsupportedError, match=r"^dim: expected a whole number of at leas"):
                principal_index(model, input_ids, dim)
        with pytest.raises(UnsupportedError, match=r"^input_ids: expected \[batch, tokens\] wi"):
            principal_index(model, input_ids[0], 3)


class TestFolder:
    def test_what_is_saved_is_loaded(self, tmp_path: Path) -> None:
        index = index_of_family("gpt_oss")
        index.save(str(tmp_path / "index"))
        found = Index.load(str(tmp_path / "index"))
        assert list(found.layers) == list(index.layers)
        for number, layer in found.layers.items():
            assert torch.equal(layer.queries, index.layers[number].queries.float())
            assert torch.equal(layer.keys, index.layers[number].keys.float())

    def test_there_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match=r"^index: .* holds no index of format 2"):
            Index.load(tmp_path)
        (tmp_path / CONFIG).write_text(json.dumps({"format": FORMAT}))
        with pytest.raises(UnsupportedError, match=r"^index: cannot read .*; save the index again"):
            Index.load(tmp_path)

    @pytest.mark.parametrize("name", ["layers.0.queries", "lora_A.weight"])
    def test_it_holds_something_else(self, tmp_path: Path, name: str) -> None:
        (tmp_path / CONFIG).write_text(json.dumps({"format": FORMAT}))
        save_file({name: torch.zeros(2, 3, 4)}, tmp_path / TENSORS)
        with pytest.raises(UnsupportedError, match=r"^index: .* has tensors other than queries"):
            Index.load(tmp_path)

    @pytest.mark.parametrize("wrong", [torch.inf, 1])
    def test_it_holds_no_finite_numbers(self, tmp_path: Path, wrong: float) -> None:
        index_of_family("qwen2").save(tmp_path)
        tensors = load_file(tmp_path / TENSORS)
        tensors["layers.0.keys"] = torch.full(tensors["layers.0.keys"].shape, wrong)
        save_file(tensors, tmp_path / TENSORS)
        with pytest.raises(UnsupportedError, match=r"^index: layers.0.keys of .* must have fini"):
            Index.load(tmp_path)


def test_maps_of_another_are_not_taken_for_its_own() -> None:
    index, there = index_of_family("qwen2"), (torch.device("cpu"), torch.bfloat16)
    first, layers = index.at(*there), {n: replace(x, keys=-x.keys) for n, x in index.layers.items()}
    assert replace(index, select=TopK(1)).at(*there) is first
    for number, maps in replace(index, layers=layers).at(*there).items():
        assert torch.equal(maps.keys, -first[number].keys)


def test_fused_optimizers_change_its_maps() -> None:
    """Which they do without telling the tensors (`_version`)."""
    index, there = index_of_family("qwen2").learning(), (torch.device("cpu"), torch.bfloat16)
    before = index.at(*there)
    for parameter in index.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(index.parameters(), 1.0, fused=True).step()
    for number, maps in index.at(*there).items():
        assert torch.equal(maps.keys, index.layers[number].keys.bfloat16())
        assert not torch.equal(maps.keys, before[number].keys)


class TestFit:
    def test_another_model_s(self) -> None:
        model = shared_model("qwen2")
        spec = Step(model, Schedule()).model_spec.layers
        index = random_index(spec, 3)
        refused = {
            r"it has no layer 3, but the model has 4": {n: index.layers[n] for n in (0, 1, 2)},
            r"layer 4 does not exist in this model": {**index.layers, 4: index.layers[0]},
            r"its layer 0 is for 1 query heads": random_index(
                (replace(spec[0], query_heads=1, kv_heads=1), *spec[1:]), 3
            ).layers,
            r"2 dims in layer 0, but .* asks for 3; set sparse.index_dim to 2": random_index(
                spec, 2
            ).layers,
        }
        for message, layers in refused.items():
            step = Step(model, replace(SCHEDULES["device"], sparse=INDEXED), selector=Index(layers))
            with pytest.raises(UnsupportedError, match=message):
                step(*DATA)

    def test_one_is_asked_for(self) -> None:
        model, schedule = shared_model("qwen2"), SCHEDULES["device"]
        with pytest.raises(UnsupportedError, match=r"sparse.selector is index, which needs an in"):
            Step(model, replace(schedule, sparse=INDEXED))
        with pytest.raises(UnsupportedError, match=r"sparse.selector is submeans; set it to ind"):
            Step(model, schedule, selector=index_of_family("qwen2"))


class TestOfARun:
    def test_takes_it_as_it_was_saved(self, tmp_path: Path) -> None:
        index = index_of_family("qwen2")
        index.save(tmp_path / "index")
        given = SparseConfig(
            **asdict(replace(INDEXED, budget=80)), index=str(tmp_path / "index"), sparsity=0.7
        )
        schedule = Schedule(chunk=16, sparse=given.spec())
        found = selector_for(given, schedule, 101)
        assert isinstance(found, Index)
        assert found.select == Fraction(0.7)
        assert torch.equal(found.layers[2].keys, index.layers[2].keys.float())
        Step(shared_model("qwen2"), schedule, selector=found)
