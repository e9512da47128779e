"""Parameters cut as FSDP2 cuts them, gathered by the same bits, reduced to the sum over ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from farspan.distributed import fsdp
from farspan.distributed.fsdp import (
    ShardedParameters,
    Stage,
    local,
    rows_of_rank,
)
from farspan.spec import UnsupportedError
from tests.distributed.cut import Model, sharded, values
from tests.distributed.traffic import gather_bytes, reduce_bytes
from tests.grids import exhaustive, part_of
from tests.ranks import run_ranks

# -- cut and gathered ---------------------------------------------------------------------------


def cut_and_gather(dtype: torch.dtype) -> None:
    before = values(Model(dtype).named_parameters())
    model = Model(dtype)
    cut = sharded(model)
    theirs = fully_sharded(dtype)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, own in cut.parameters().items():
        assert isinstance(own, DTensor)
        assert isinstance(own, nn.Parameter)
        first, last = rows_of_rank(before[name].shape[0], rank, ranks)
        assert torch.equal(local(own), before[name][first:last])
        same_as_theirs(own, theirs[name])
    whole = cut_twice(model, cut)
    assert whole.keys() == before.keys()
    assert all(torch.equal(whole[name], before[name]) for name in before)


def fully_sharded(dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model(dtype)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return dict(model.named_parameters())


def same_as_theirs(own: DTensor, theirs: Any) -> None:
    assert torch.equal(local(own), local(theirs))
    assert local(own).shape == local(theirs).shape
    assert (own.shape, own.stride(), own.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert own.placements == theirs.placements
    assert own.requires_grad == theirs.requires_grad


def cut_twice(model: Model, cut: ShardedParameters) -> dict[str, Tensor]:
    """Whole parameters of the second gathering; the first one's bytes are counted, its objects
    kept."""
    units = [unit_of(model, unit) for unit in range(3)]
    objects = []
    for unit, parameters in enumerate(units):
        shapes = [(tuple(p.shape), p.itemsize) for p in parameters]
        sent = cut.peers.sent
        assert not cut.gathered(unit)
        cut.gather(unit)
        cut.gather(unit)  # once: it is gathered
        assert cut.gathered(unit)
        assert cut.peers.sent - sent == gather_bytes(shapes, cut.peers.size)
        objects.append([id(p) for p in model.parameters() if not isinstance(p, DTensor)])
        cut.release(unit)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    for unit in range(len(units)):
        cut.gather(unit)
        now = {id(p) for p in model.parameters() if not isinstance(p, DTensor)}
        assert now >= set(objects[unit])
    assert model.head.weight is model.embedding.weight
    found = values(model.named_parameters())
    cut.end()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert {name: w.clone() for name, w in cut.wholes()}.keys() == found.keys()
    assert not any(cut.gathered(unit) for unit in range(len(units)))
    return found


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), exhaustive(4, torch.float64)])
def test_cut_as_fully_shard_cuts_and_gathered_by_the_same_bits(
    ranks: int, dtype: torch.dtype
) -> None:
    run_ranks(ranks, cut_and_gather, dtype)


# -- reduced ------------------------------------------------------------------------------------


def gradient(name: str, like: Tensor, rank: int, turn: int) -> Tensor:
    """Of a parameter on a rank, as wide as accumulators are."""
    torch.manual_seed(1000 * rank + 100 * turn + sum(map(ord, name)))
    return torch.randn(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))


def has(name: str, rank: int) -> bool:
    """`unused` has a gradient nowhere in layer 0 and on rank 1 alone in layer 1."""
    return not name.endswith("unused") or (rank == 1 and ".1." in name)


def totals_of(
    cut: ShardedParameters, model: Model, unit: int, turn: int
) -> dict[nn.Parameter, Tensor]:
    cut.gather(unit)
    rank = cut.peers.index
    found = {
        p: gradient(name, p, rank, turn)
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and has(name, rank)
    }
    own = {id(p) for p in unit_of(model, unit)}
    cut.release(unit)
    return {p: g for p, g in found.items() if id(p) in own}


def unit_of(model: Model, unit: int) -> list[nn.Parameter]:
    if unit < 2:
        return list(model.layers[unit].parameters())
    return [*model.embedding.parameters(), *model.norm.parameters()]


def expected(name: str, like: Tensor, ranks: int, turns: int) -> Tensor | None:
    """Sums in the order of ranks; rounded into `.grad` once a turn, as wide as it is."""
    grad: Tensor | None = None
    for turn in range(turns):
        parts = [gradient(name, like, r, turn) for r in range(ranks) if has(name, r)]
        if not parts:
            return None
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        grad = (total if grad is None else total + grad).to(like.dtype)
    return grad


def reduce_twice(dtype: torch.dtype, stage: Stage) -> None:
    before = values(Model(dtype).named_parameters())
    model = Model(dtype)
    cut = sharded(model, stage)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for turn in range(2):
        for unit in (2, 1, 0):
            sizes = [tuple(p.shape) for p in unit_of(model, unit) if p.requires_grad]
            totals = totals_of(cut, model, unit, turn)
            sent = cut.peers.sent
            cut.reduce(unit, totals)
            assert not totals
            if unit == 2 and stage is not Stage.ZERO_1:
                factor = 2 if stage is Stage.ZERO_0 else 1
                whole = reduce_bytes(sizes, 4 if dtype != torch.float64 else 8, ranks)
                said = 2 * 4 * len(sizes) * (ranks - 1) // ranks
                assert cut.peers.sent - sent == factor * (whole - said) + said
        cut.end()
        assert stage is Stage.ZERO_0 or all(isinstance(p, DTensor) for p in model.parameters())
    for name, own in cut.parameters().items():
        trained = own.requires_grad
        should = expected(name, before[name], ranks, 2) if trained else None
        assert (own.grad is None) == (should is None), name
        if own.grad is not None and should is not None:
            rows = slice(*rows_of_rank(should.shape[0], rank, ranks))
            assert own.grad.dtype == dtype
            assert own.grad.shape == should.shape
            part = should if stage is Stage.ZERO_0 else should[rows]
            assert torch.equal(local(own.grad), part), name


def reduce_all() -> None:
    for stage in Stage:
        reduce_twice(torch.float64, stage)
    reduce_twice(torch.bfloat16, Stage.ZERO_3)
    fsdp.SLICE = 40  # sums come in slices of one or two elements a rank
    reduce_twice(torch.float64, Stage.ZERO_3)


@pytest.mark.parametrize("ranks", part_of([2, 4], 2))
def test_gradients_are_summed_over_ranks_into_the_shards(ranks: int) -> None:
    run_ranks(ranks, reduce_all)


# -- stages -------------------------------------------------------------------------------------


def stages() -> None:
    for stage in Stage:
        model = Model()
        cut = sharded(model, stage)
        cut.gather(0)
        cut.release(0)
        assert cut.gathered(0) == (stage is not Stage.ZERO_3)
        first = cut.peers.sent
        cut.gather(0)
        assert (cut.peers.sent > first) == (stage is Stage.ZERO_3)
        totals = totals_of(cut, model, 0, 0)
        cut.reduce(0, totals)
        cut.end(sync=False)
        weight = cut.parameters()["layers.0.up.weight"]
        assert (weight.grad is None) == (stage is Stage.ZERO_1)
        cut.abandon()
        cut.end()
        assert stage is Stage.ZERO_0 or (weight.grad is None) == (stage is Stage.ZERO_1)


def micro_batches() -> None:
    """Of ZERO_1: gradients of two steps add up whole, and are reduced once."""
    model = Model()
    cut = sharded(model, Stage.ZERO_1)
    first, second = (totals_of(cut, model, 0, turn) for turn in range(2))
    mine = {p: first[p] + second[p] for p in first}
    shares = {p: [torch.empty_like(g) for _ in range(2)] for p, g in mine.items()}
    for p, share in shares.items():
        dist.all_gather(share, mine[p])
    cut.reduce(0, first)
    cut.end(sync=False)
    before = cut.peers.sent
    cut.reduce(0, second)
    assert cut.peers.sent == before
    cut.end()
    cut.gather(0)
    named = {p: name for name, p in model.named_parameters()}
    for p, (one, two) in shares.items():
        grad = cut.parameters()[named[p]].grad
        assert grad is not None
        rows = slice(*rows_of_rank(p.shape[0], cut.peers.index, 2))
        assert torch.equal(local(grad), (one + two)[rows])


def freeze() -> None:
    """What an optimizer's parameter says of itself is so of the whole one, from the next time."""
    model = Model()
    cut = sharded(model)
    cut.parameters()["layers.0.up.weight"].requires_grad_(False)
    cut.gather(0)
    layer: Any = model.layers[0]
    assert not layer.up.weight.requires_grad
    assert layer.down.weight.requires_grad


def stages_and_states() -> None:
    stages()
    micro_batches()
    freeze()


def test_stages_differ_in_what_they_keep() -> None:
    run_ranks(2, stages_and_states)


# -- refused ------------------------------------------------------------------------------------


def refusals() -> list[str]:
    said = []
    for spoil in (scalar, strided, shared, used):
        model = Model()
        spoil(model)
        with pytest.raises(UnsupportedError) as refused:
            sharded(model)
        said.append(str(refused.value))
    return said


def scalar(model: Any) -> None:
    model.layers[0].gate = nn.Parameter(torch.ones(()))


def strided(model: Any) -> None:
    model.layers[0].up.weight = nn.Parameter(torch.randn(6, 7, dtype=torch.float64).t())


def shared(model: Any) -> None:
    model.layers[1].up.weight = model.layers[0].up.weight


def used(model: Any) -> None:
    model.norm.weight.grad = torch.ones(6, dtype=torch.float64)


def test_what_cannot_be_cut_is_named() -> None:
    words = ("layers.0.gate", "layers.0.up.weight", "layers.1.up.weight", "norm.weight")
    for text, word in zip(run_ranks(1, refusals)[0], words, strict=True):
        assert word in text
