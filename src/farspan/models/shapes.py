"""A model whose weights are nowhere near, described by running its layers on stand-ins for them."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.models.boundary import Boundary
from farspan.models.describe import describe_unproven
from farspan.models.load import blank_model, config_from_fields
from farspan.models.lora import add_adapters
from farspan.models.refuse import refuse_dropout
from farspan.models.work import with_work
from farspan.spec import ModelSpec


def describe_config(fields: Mapping[str, Any], dtype: str, rank: int = 0) -> ModelSpec:
    """The ModelSpec of the model that the content of a config.json stands for, in a dtype of
    torch's name, with LoRA of `rank` on every linear module of its layers; 0: none. Raises Refused.
    """
    model = blank_model(config_from_fields(fields), getattr(torch, dtype))
    if rank:
        add_adapters(model, rank=rank, alpha=rank)
    return describe_shapes(model)


@torch.no_grad()
def describe_shapes(model: PreTrainedModel) -> ModelSpec:
    """The ModelSpec of a model whose parameters are on the meta device, with its layers' work.

    Its parameters become stand-ins, in place. What takes the weights' own numbers, that chunks are
    exact, is not looked at. Raises Refused for what is refused of any weights.
    """
    refuse_dropout(model)
    _stand_in(model)
    boundary = Boundary(model)
    return with_work(boundary, describe_unproven(boundary))


def _stand_in(model: PreTrainedModel) -> None:
    """Gives every parameter zeros: those of a dtype lie in one run of memory, as large as the
    largest matrix of a layer; embeddings and the head, which no layer reads, are one element."""
    tables = {id(p) for p in _tables(model)}
    largest = max(_matrix(p) for p in model.parameters() if id(p) not in tables)
    zeros: dict[torch.dtype, Tensor] = {}
    made: dict[int, nn.Parameter] = {}

    def stand_in(parameter: nn.Parameter) -> Tensor:
        shape, dtype = parameter.shape, parameter.dtype
        if id(parameter) in tables:
            return torch.zeros((), dtype=dtype).expand(shape)
        if dtype not in zeros:
            zeros[dtype] = torch.zeros(largest, dtype=dtype)
        return zeros[dtype][: _matrix(parameter)].view(shape[-2:]).expand(shape)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(stand_in(parameter), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _tables(model: PreTrainedModel) -> list[Any]:
    """Weights of embeddings and of the head."""
    found = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    head = model.get_output_embeddings()
    return found if head is None else [*found, head.weight]


def _matrix(parameter: Tensor) -> int:
    """Elements of a weight, or of one of stacked ones."""
    return prod(parameter.shape[-2:])
