"""Descriptions that tests share: an equal model has that of the first, and no other has."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

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
