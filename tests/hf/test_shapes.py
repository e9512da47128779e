"""A model without weights is described as the one with them."""

import gc
import json
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from farspan.ask import Request
from farspan.hf.describe import describe, describe_config, describe_shapes, with_work
from farspan.hf.fused_layers import fuse
from farspan.hf.load import blank_model
from farspan.hf.stages import CausalLMStages
from farspan.spec import Kernels, LayerWork, ModelSpec, UnsupportedError
from tests.grids import part_of
from tests.zoo import COMMON, FAMILIES, make_model

# Which experts tokens are sent to is up to the weights, and each expert's rows are padded to lines.
ROUTED = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
TINY = {**COMMON, "model_type": "olmo2"}


def unread(name: str, dtype: torch.dtype) -> ModelSpec:
    config = make_model(name, dtype).config
    return describe_shapes(blank_model(config, dtype))


def in_shells(model: PreTrainedModel) -> CausalLMStages:
    """The model's stages as a step on PyTorch's operators runs them."""
    stages = CausalLMStages(model)
    fuse(stages, PLAIN, stages.device)
    return stages


def read(name: str, dtype: torch.dtype) -> ModelSpec:
    stages = in_shells(make_model(name, dtype))
    return with_work(stages, describe(stages))


UNROUTED = [name for name in FAMILIES if name not in ROUTED]
DTYPES = [torch.float64, torch.bfloat16]
PLAIN = Kernels(fused=False, accumulate=False)


def bare(spec: ModelSpec) -> ModelSpec:
    """A model's layers by their heads and what they save, its name aside."""
    layers = tuple(replace(layer, work=LayerWork()) for layer in spec.layers)
    return replace(spec, layers=layers, name="")


@pytest.mark.parametrize(
    ("name", "dtype"),
    part_of(product(UNROUTED, DTYPES), *zip(UNROUTED[::3], cycle(DTYPES), strict=False)),
)
def test_it_is_that_of_the_model_with_weights(name: str, dtype: torch.dtype) -> None:
    assert unread(name, dtype) == read(name, dtype)


@pytest.mark.parametrize("name", ROUTED)
def test_experts_save_as_much(name: str) -> None:
    """But for the padding of each expert's rows to lines of 64 bytes."""
    found, expected = unread(name, torch.float64), read(name, torch.float64)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.activation_bytes == pytest.approx(other.activation_bytes, rel=0.02)
        assert layer.work.products == other.work.products
        assert layer == replace(
            other,
            activation_bytes=layer.activation_bytes,
            activation_constant=layer.activation_constant,
            work=layer.work,
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "none"}, "model_type: transformers .* has no 'none'"),
        ({"model_type": "qwen3", "hidden_size": "many"}, "cannot read these fields of a qwen3"),
        ({"attention_dropout": 0.1}, r"dropout 0\.1 at .*attention_dropout"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        describe_config({**TINY, **changes}, "float32")


def test_a_recurrent_model_as_it_is_saved(tmp_path: Path) -> None:
    """Its limits of a time step are a number that JSON has not."""
    model = make_model("nemotron_h", torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    found = Request(str(tmp_path), 64, "h200").question().model
    stages = in_shells(model)
    expected = with_work(stages, describe(stages))
    assert bare(found).layers[:3] == bare(expected).layers[:3]  # the last has experts
    assert found.parameters == expected.parameters
    assert [layer.attends() for layer in found.layers] == [False, False, True, False]
    assert [bool(layer.state) for layer in found.layers] == [True, False, False, False]


def test_planning_looks_at_a_family_that_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    question = Request(str(tmp_path), 64, "h200", dtype="fp32").question()
    assert question.model.name == str(tmp_path)
    whole = Request(TINY, 64, "h200", dtype="fp32", kernels=PLAIN).question().model
    adapted = Request(TINY, 64, "h200", dtype="fp32", lora=2, kernels=PLAIN).question().model
    for found, rank in ((whole, 0), (adapted, 2)):
        assert bare(found) == bare(describe_config(TINY, "float32", rank))
    assert adapted.trainable < adapted.parameters
    with pytest.raises(UnsupportedError, match="lora: expected the rank"):
        Request(TINY, 64, "h200", lora=-1).question()


def test_what_was_saved_to_be_counted_is_gone() -> None:
    """The graphs of a model of four bits' description kept 117 MiB of activations."""
    stages = CausalLMStages(make_model("llama", torch.float32))

    def held() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    describe(stages)  # what is made once, is made
    before = held()
    describe(stages)
    assert held() <= before
