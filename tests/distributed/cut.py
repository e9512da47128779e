"""A small model whose parameters are awkward to cut."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.distributed.collectives import Communicator
from farspan.distributed.fsdp import ShardedParameters, Stage

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, two dtypes, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.one = nn.Parameter(torch.randn(1))
        self.down = nn.Linear(7, 6, bias=False)
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        bend = (self.frozen * self.frozen).sum().to(x.dtype)
        return x + self.down(torch.tanh(self.up(x))) * self.one * scale + bend


class Model(nn.Module):
    """Two layers between an embedding and a head that are tied."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.to(dtype)
        self.layers[1].frozen = nn.Parameter(torch.randn(5, 2, dtype=torch.float32), False)
        self.head.weight = self.embedding.weight


def sharded(
    model: Model, stage: Stage = Stage.ZERO_3, *, offload: bool = False
) -> ShardedParameters:
    peers = Communicator(dist.group.WORLD)
    return ShardedParameters(model, list(model.layers), peers, CPU, stage=stage, offload=offload)


def values(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}
