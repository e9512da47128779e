"""Descriptions that tests share: an equal model has that of the first, and no other has."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from tests import described
from tests.zoo import make_model


def computed(*models: Any) -> int:
    """How many of these are probed."""
    with patch.object(described, "COMPUTED", wraps=described.COMPUTED) as probed:
        with described.remembered():
            found = [describe(CausalLMStages(model)) for model in models]
        assert found == [describe(CausalLMStages(model)) for model in models]
    return probed.call_count


def tiny() -> Any:
    layers = ["sliding_attention", "full_attention"]
    return make_model("gemma3_text", num_hidden_layers=2, layer_types=layers)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(described, "_known", {})
    monkeypatch.setenv(described.SHARED, str(tmp_path))


def test_equal_models_are_probed_once() -> None:
    assert computed(tiny(), tiny(), tiny()) == 1


def scale_outputs(model: Any, factor: float) -> None:
    own = type(model.model.layers[0].mlp).forward
    model.model.layers[0].mlp.forward = lambda x: factor * own(model.model.layers[0].mlp, x)


def test_another_process_reads_what_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = tiny()
    scale_outputs(scaled, 2.0)
    assert computed(tiny(), scaled) == 2
    monkeypatch.setattr(described, "_known", {})
    again = tiny()
    scale_outputs(again, 2.0)
    assert computed(tiny(), again) == 0


def test_functions_differ_by_what_they_close_over() -> None:
    models = [tiny() for _ in range(2)]
    scale_outputs(models[0], 2.0)
    scale_outputs(models[1], 3.0)
    assert computed(*models) == 2


def test_a_wrapper_of_a_method_is_not_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computed(tiny()) == 1
    kind = type(tiny().model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", wraps(own)(lambda *given: 2 * own(*given)))
    assert computed(tiny()) == 1


class Repeated:
    """A number of times that a module's forward is applied."""

    def __init__(self, mlp: nn.Module) -> None:
        self.times, self.own = 1, mlp.forward

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.own(x)
        return x


def test_an_object_s_state_may_change() -> None:
    model = tiny()
    mlp = model.model.layers[0].mlp
    repeated = Repeated(mlp)
    mlp.forward = repeated.forward
    with described.remembered():
        found = [saved_bytes(model)]
        repeated.times = 3
        found += [saved_bytes(model)]
    assert found[0] < found[1] == saved_bytes(model)


def saved_bytes(model: Any) -> int:
    return describe(CausalLMStages(model)).layers[0].activation_bytes


def test_modules_outside_a_model_differ() -> None:
    """Two whose forwards a model calls, without having them among its modules."""
    models, others = [tiny(), tiny()], []
    for model, width in zip(models, (8, 64), strict=True):
        hidden = model.config.hidden_size
        layers = nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden)
        others.append(nn.Sequential(*layers).to(model.dtype))
        model.model.layers[0].mlp.forward = others[-1].forward
    assert computed(*models) >= 2


def test_functions_of_one_line_differ() -> None:
    models = [tiny(), tiny()]
    functions = [lambda x: torch.neg(x), lambda x: torch.tanh(x)]
    for model, function in zip(models, functions, strict=True):
        model.model.layers[0].mlp.forward = function
    assert computed(*models) == 2


@pytest.mark.parametrize("name", ["farspan.hf.describe.ALIGNMENT", "rotate_half"])
def test_what_a_test_replaces_in_a_module_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert computed(tiny()) == 1
    if name == "rotate_half":  # which a function calls that the attention calls
        name = f"{sys.modules[type(tiny()).__module__].__name__}.{name}"
        monkeypatch.setattr(name, lambda x: x.roll(x.shape[-1] // 2, -1).tanh())
    else:
        monkeypatch.setattr(name, 4096)
    assert computed(tiny()) >= 1


def move_a_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1


def freeze(model: Any) -> None:
    model.model.layers[0].requires_grad_(False)


def cap_the_logits(model: Any) -> None:
    model.config.final_logit_softcapping = 30.0


def set_a_forward(model: Any) -> None:
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: own(x)


@pytest.mark.parametrize("change", [move_a_weight, freeze, cap_the_logits, set_a_forward])
def test_a_model_that_differs_is_probed(change: Callable[[Any], None]) -> None:
    model = tiny()
    change(model)
    assert computed(tiny(), model) == 2
