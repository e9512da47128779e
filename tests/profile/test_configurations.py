"""A profile counts what transformers builds from a configuration, to the element."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from farspan.spec import ModelSpec
from tests.planner.configurations import (
    CONFIGURATIONS,
    elements,
    layers_of,
    linears_of,
    real_model,
)
from tests.profiles import spec_of

# Fields change what a family is: the plain ones, and of the others those that change sizes.
NAMES = (
    *("gemma2", "gpt2 inner", "gpt_neox", "gpt_oss", "llama biased", "llama old", "phi3"),
    *("qwen2 sliding", "qwen2_moe sparse", "qwen3_moe sparse"),
)
EVERY = pytest.mark.parametrize("name", NAMES)
TOKENS = 24
RANK = 3


@cache
def described(name: str, rank: int = 0) -> ModelSpec:
    return spec_of(CONFIGURATIONS[name], rank=rank)


@EVERY
def test_parameters_are_the_real_model_s(name: str) -> None:
    model, spec = real_model(CONFIGURATIONS[name]), described(name)
    layers = layers_of(model)
    assert [layer.work.parameters for layer in spec.layers] == [elements(one) for one in layers]
    assert spec.parameters == spec.trainable == elements(model)
    assert spec.vocab == model.get_input_embeddings().weight.shape[0]
    assert spec.hidden == model.get_input_embeddings().weight.shape[1]
    for layer, real in zip(spec.layers, layers, strict=True):
        assert not Counter(linears_of(real)) - Counter(layer.work.products)
        assert layer.work.trainable == layer.work.parameters


@EVERY
def test_products_are_the_operations_of_a_forward(name: str) -> None:
    """torch counts two operations a multiply-add; attention's own products are batched ones."""
    model, spec = real_model(CONFIGURATIONS[name], "cpu"), described(name)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(TOKENS)[None] % spec.vocab, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    found = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    products = [product for layer in spec.layers for product in layer.work.products]
    head = (spec.hidden, spec.vocab)
    assert found == 2 * TOKENS * sum(inner * outer for inner, outer in (*products, head))


@pytest.mark.parametrize("name", ["gpt_oss", "llama biased", "phi3", "qwen2_moe sparse"])
def test_adapters_stand_beside_every_linear_module(name: str) -> None:
    plain, spec = described(name), described(name, RANK)
    model = real_model(CONFIGURATIONS[name])
    for bare, layer, real in zip(plain.layers, spec.layers, layers_of(model), strict=True):
        linears = linears_of(real)
        assert layer.work.trainable == RANK * sum(inner + outer for inner, outer in linears)
        assert layer.work.parameters == elements(real) + layer.work.trainable
        adapters = [pair for i, o in linears for pair in ((i, RANK), (RANK, o))]
        assert Counter(layer.work.products) == Counter(bare.work.products) + Counter(adapters)
        assert layer.work.projections == 3 * bare.work.projections
    adapted = sum(layer.work.trainable for layer in spec.layers)
    assert spec.trainable == adapted
    assert spec.parameters == elements(model) + adapted


# What PEFT itself prints (print_trainable_parameters) for rank 16 on every linear module.
@pytest.mark.parametrize(
    ("name", "trained"), [("Qwen3-8B", 43_646_976), ("Llama-3.1-8B", 41_943_040)]
)
def test_adapters_are_as_many_as_peft_makes(name: str, trained: int) -> None:
    assert spec_of(name, rank=16).trainable == trained


def test_equal_layers_are_one_object() -> None:
    """A search that asks for a layer's costs asks once."""
    assert len({id(layer) for layer in spec_of("GPT-OSS-20B").layers}) == 2
