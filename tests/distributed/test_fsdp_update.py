"""Updates of a model that is cut over ranks are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.distributed.fsdp import Stage, local, square_norm
from tests.distributed.cut import CPU, Model, sharded, values
from tests.grids import part_of
from tests.numerics import assert_exact
from tests.ranks import run_ranks


def batch(rank: int) -> Tensor:
    torch.manual_seed(rank + 50)
    return torch.randn(4, 6, dtype=torch.float64)


def loss_of(model: Model, rank: int) -> Tensor:
    x = batch(rank)
    for layer in model.layers:
        x = layer(x)
    return (model.head(model.norm(x)) ** 2).sum()


def plain_steps(ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    model = Model()
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    norms = []
    for _ in range(2):
        parameters = [p for p in model.parameters() if p.requires_grad]
        for rank in range(ranks):
            found = torch.autograd.grad(loss_of(model, rank), parameters, allow_unused=True)
            for p, g in zip(parameters, found, strict=True):
                if g is not None:
                    p.grad = g.clone() if p.grad is None else p.grad + g
        grads = [p.grad for p in parameters if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        adam.step()
        adam.zero_grad()
    return values(model.named_parameters()), norms


def cut_steps(
    stage: Stage, offload: bool, as_locals: bool
) -> tuple[dict[str, Tensor], list[float]]:
    model = Model()
    cut = sharded(model, stage, offload=offload)
    trained = [p for p in cut.parameters().values() if p.requires_grad]
    given = [nn.Parameter(local(p)) for p in trained] if as_locals else trained
    adam = torch.optim.AdamW(given, 1e-2)
    norms = []
    for _ in range(2):
        for unit in range(3):
            cut.gather(unit)
        parameters = [p for p in model.parameters() if p.requires_grad]
        # The graph outlives the weights: it goes on with what is gathered again.
        loss = loss_of(model, dist.get_rank())
        for unit in range(3):
            cut.release(unit)
            cut.gather(unit)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        totals = {p: g for p, g in zip(parameters, found, strict=True) if g is not None}
        for unit in range(3):
            cut.reduce(unit, totals)
            cut.release(unit)
        cut.end()
        square = square_norm([p.grad for p in trained if p.grad is not None], CPU)
        if stage is not Stage.ZERO_0:
            cut.peers.sum(square)
        norms.append(float(square.sqrt()))
        for own, p in zip(trained, given, strict=True):
            if as_locals and own.grad is not None:
                p.grad = local(own.grad)
        adam.step()
        for p in (*trained, *given):
            p.grad = None
    return {name: whole.clone() for name, whole in cut.wholes()}, norms


def train_all() -> None:
    cases = [(stage, False, False) for stage in Stage]
    cases += [(Stage.ZERO_3, True, False), (Stage.ZERO_3, False, True)]
    should, norms = plain_steps(dist.get_world_size())
    for stage, offload, as_locals in cases:
        found, measured = cut_steps(stage, offload, as_locals)
        assert found.keys() == should.keys()
        for name in should:
            assert torch.equal(found[name], should[name]), (stage, name)
        assert_exact(torch.tensor(measured), torch.tensor(norms))


@pytest.mark.parametrize("ranks", part_of([1, 3], 3))
def test_two_updates_are_those_of_one_process(ranks: int) -> None:
    run_ranks(ranks, train_all)
