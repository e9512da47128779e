"""Layers are of one kind where nothing that was given to them tells them apart."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from farspan.hf.edits import layer_signature
from farspan.hf.load import add_adapters
from tests.zoo import make_model


class Layer(nn.Module):
    def __init__(self, index: int, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.layer_idx, self.pattern, self.table = index, [1, (2,)], {"a": 0.5}
        self.act, self.own = partial(nn.functional.gelu, approximate="tanh"), self.other
        self.scale = torch.ones(2)
        for name, value in settings.items():
            setattr(self, name, value)

    def other(self) -> None:
        """What `own` calls."""


def frozen(layer: Layer) -> None:
    layer.linear.bias.requires_grad_(False)


def hooked(layer: Layer) -> None:
    layer.linear.register_forward_hook(lambda *_: None)


def buffered(layer: Layer) -> None:
    layer.register_buffer("seen", torch.zeros(3))


def told_inside(layer: Layer) -> None:
    layer.linear.flag = True  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Layer], None]] = {
    change.__name__: change for change in (frozen, hooked, buffered, told_inside)
}
SETTINGS: dict[str, Any] = {
    "flag": True,
    "pattern": [1, (3,)],
    "table": {"a": 0.25},
    "act": partial(nn.functional.gelu, approximate="none"),
    "own": print,
    "scale": torch.ones(3),
    "what cannot be looked into": object(),
}


def test_a_layer_s_place_alone_makes_no_kind() -> None:
    assert layer_signature(Layer(0), 0) == layer_signature(Layer(1), 1)
    layers = make_model("gemma").model.layers  # its activation is a partial of its own
    assert len({layer_signature(layer, index) for index, layer in enumerate(layers)}) == 1


def test_nor_do_adapters() -> None:
    """peft tells each the name of the module that it is beside."""
    model = make_model("qwen3")
    before = len({layer_signature(layer, i) for i, layer in enumerate(model.model.layers)})
    add_adapters(model, rank=2, alpha=2)
    layers = model.model.layers
    assert len(layers) > 1
    assert len({layer_signature(layer, i) for i, layer in enumerate(layers)}) == before == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_makes_a_kind(name: str) -> None:
    assert layer_signature(Layer(0), 0) != layer_signature(Layer(1, **{name: SETTINGS[name]}), 1)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_makes_a_kind(name: str) -> None:
    layer = Layer(1)
    CHANGES[name](layer)
    assert layer_signature(Layer(0), 0) != layer_signature(layer, 1)
