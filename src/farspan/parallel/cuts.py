"""What of a model is cut over ranks, into which rows, and the bytes that travel for it."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from farspan.spec import Refused

LINE = 16  # bytes: the widest load of a kernel; every parameter starts on a multiple of it

Slot = tuple[nn.Module, str]  # a module and the name of a parameter in it
Found = dict[nn.Parameter, tuple[str, list[Slot]]]  # first name, and everywhere it is


def dealt(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of `rank`, as torch.chunk deals them."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def shard_bytes(shape: Sequence[int], itemsize: int, ranks: int) -> int:
    """Of a rank's rows of a parameter, padded to as many as the first rank has."""
    rows = shape[0] if shape else 1
    width = torch.Size(shape[1:]).numel()
    return -(-rows // ranks) * width * itemsize


def gather_bytes(shapes: Iterable[tuple[Sequence[int], int]], ranks: int) -> int:
    """That a rank gives to others when a unit of these shapes and item sizes is gathered: (P - 1)/P
    of its weights where P divides all rows."""
    return (ranks - 1) * sum(shard_bytes(shape, size, ranks) for shape, size in shapes)


def reduce_bytes(shapes: Sequence[Sequence[int]], itemsize: int, ranks: int) -> int:
    """That a rank gives to others when the gradients of a unit's trainable parameters are reduced,
    `itemsize` bytes an element: (P - 1)/P of them, and 4 bytes a parameter that say whether there
    is one, there and back. Where they are replicated, twice the gradients."""
    said = 2 * 4 * len(shapes) * (ranks - 1) // ranks
    return said + (ranks - 1) * sum(shard_bytes(shape, itemsize, ranks) for shape in shapes)


def lined(size: int) -> int:
    return -(-size // LINE) * LINE


# -- parameters of a model ----------------------------------------------------------------------


def find_parameters(
    model: nn.Module, layers: Sequence[nn.Module], here: Collection[int]
) -> list[Found]:
    """The parameters of each unit, with their first names and everywhere they are; none of layers
    that are not `here`."""
    unit_of = {id(m): index for index, layer in enumerate(layers) for m in layer.modules()}
    units: list[Found] = [{} for _ in range(len(layers) + 1)]
    seen: dict[nn.Parameter, int] = {}
    for path, module in model.named_modules():
        index = unit_of.get(id(module), len(layers))
        if index not in here and index < len(layers):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            if seen.setdefault(parameter, index) != index:
                raise Refused(f"fsdp: {full} is part of several layers; set fsdp: false")
            units[index].setdefault(parameter, (full, []))[1].append((module, name))
    return units


def refuse_uncut(parameter: nn.Parameter, name: str) -> None:
    why = None
    if type(parameter) is not nn.Parameter:
        why = f"a {type(parameter).__name__}, not a plain parameter"
    elif parameter.ndim == 0:
        why = "a scalar, which has no rows"
    elif not parameter.is_contiguous():
        why = f"not contiguous: its strides are {parameter.stride()}"
    elif parameter.grad is not None:
        why = "in use: it has a gradient; clear gradients first"
    if why is not None:
        raise Refused(f"fsdp: {name} cannot be cut over ranks: it is {why}; or set fsdp: false")
