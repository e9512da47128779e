"""What is counted from a configuration is what transformers builds from it, to the element."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.plan.cell.describe import dtype_name, model_spec
from farspan.plan.cell.layer import LayerCosts, layer_costs
from farspan.plan.model.architecture import Architecture
from farspan.plan.model.catalog import presets
from farspan.plan.model.families import FAMILIES, architecture_from
from farspan.spec import LayerSpec, LayerWork, UnsupportedError
from tests.planner.configurations import (
    CONFIGURATIONS,
    Config,
    config_of,
    elements,
    layers_of,
    linears_of,
    real_model,
)

PRESETS = {p.name: p.config for p in presets() if p.config["model_type"] in FAMILIES}
EVERY = pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
TOKENS = 24
RANK = 3


def only_attention(layer: LayerSpec) -> LayerSpec:
    """A layer's shapes and its mask, without what it saves and computes."""
    return replace(
        layer, activation_bytes=0, activation_constant=0, saves_input=True, work=LayerWork()
    )


@pytest.mark.parametrize(
    "config", [*CONFIGURATIONS.values(), *PRESETS.values()], ids=[*CONFIGURATIONS, *PRESETS]
)
def test_parameters_are_the_real_model_s(config: Config) -> None:
    model, spec = real_model(config), model_spec(architecture_from(config))
    layers = layers_of(model)
    assert [layer.work.parameters for layer in spec.layers] == [elements(one) for one in layers]
    assert spec.parameters == spec.trainable == elements(model)
    assert spec.vocab == model.get_input_embeddings().weight.shape[0]
    assert spec.hidden == model.get_input_embeddings().weight.shape[1]
    for layer, real in zip(spec.layers, layers, strict=True):
        assert not Counter(linears_of(real)) - Counter(layer.work.products)
        assert layer.work.trainable == layer.work.parameters


# Their models make a mask with a window that no layer tells attention, or that no layer uses, and
# are not trained; what their layers are given is read off the models.
UNPROBED = ("gemma2 of one kind", *(name for name in CONFIGURATIONS if "qwen2_moe" in name))


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in UNPROBED])
def test_attention_is_what_a_probe_of_the_model_finds(name: str) -> None:
    config = CONFIGURATIONS[name]
    found = describe(CausalLMStages(real_model(config, "cpu")))
    spec = model_spec(architecture_from(config), "fp32")
    assert [only_attention(one) for one in spec.layers] == [
        only_attention(one) for one in found.layers
    ]
    names = ("hidden", "vocab", "element_bytes", "parameters", "trainable")
    assert [getattr(spec, name) for name in names] == [getattr(found, name) for name in names]


@pytest.mark.parametrize("name", UNPROBED)
def test_attention_is_what_the_model_s_layers_are_given(name: str) -> None:
    config = CONFIGURATIONS[name]
    model, spec = real_model(config), model_spec(architecture_from(config))
    made = model.config
    for layer, real, kind in zip(spec.layers, layers_of(model), made.layer_types, strict=True):
        assert layer.window == (made.sliding_window if kind == "sliding_attention" else None)
        assert layer.head_dim == layer.value_dim == real.get_submodule("self_attn").head_dim
        assert layer.query_heads == made.num_attention_heads
        assert layer.kv_heads == made.num_key_value_heads


@EVERY
def test_products_are_the_operations_of_a_forward(config: Config) -> None:
    """torch counts two operations a multiply-add; attention's own products are batched ones."""
    model, spec = real_model(config, "cpu"), model_spec(architecture_from(config))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(TOKENS)[None] % spec.vocab, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    found = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    products = [product for layer in spec.layers for product in layer.work.products]
    head = (spec.hidden, spec.vocab)
    assert found == 2 * TOKENS * sum(inner * outer for inner, outer in (*products, head))


@EVERY
def test_projections_come_first(config: Config) -> None:
    spec = model_spec(architecture_from(config))
    for layer in spec.layers:
        before = layer.work.products[: layer.work.projections]
        queries = layer.query_heads * layer.head_dim
        assert sum(outer for _, outer in before) == queries + layer.kv_elements()
        assert layer.work.products[layer.work.projections] == (
            layer.query_heads * layer.value_dim,
            spec.hidden,
        )


@EVERY
def test_adapters_stand_beside_every_linear_module(config: Config) -> None:
    architecture = architecture_from(config)
    plain, spec = model_spec(architecture), model_spec(architecture, adapter_rank=RANK)
    model = real_model(config)
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
    assert model_spec(architecture_from(PRESETS[name]), adapter_rank=16).trainable == trained


def test_an_architecture_s_own_adapters_count() -> None:
    architecture = architecture_from(config_of("llama"))
    asked = model_spec(architecture, adapter_rank=RANK)
    assert model_spec(replace(architecture, adapter_rank=RANK)) == asked


def test_a_seventy_billion_model_is_two_layers_of_work() -> None:
    """Equal layers are one object: a search that asks for a layer's costs asks once."""
    spec = model_spec(architecture_from(PRESETS["GPT-OSS-20B"]))
    assert len({id(layer) for layer in spec.layers}) == 2


@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_oss", "llama", "qwen3_moe sparse"])
def test_what_a_layer_holds_and_moves_is_its_costs(name: str, rank: int) -> None:
    architecture = architecture_from(CONFIGURATIONS[name])
    adapted = replace(architecture, adapter_rank=rank)
    spec = model_spec(architecture, "bf16", adapter_rank=rank)
    for layer, block in zip(spec.layers, architecture.blocks, strict=True):
        work = layer.work
        assert layer_costs(adapted, block, element_bytes=2) == LayerCosts(
            activation_bytes=layer.activation_bytes,
            activation_constant=layer.activation_constant,
            saves_input=layer.saves_input,
            forward_traffic=work.forward_traffic,
            backward_traffic=work.backward_traffic,
        )


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("bfloat16", 2), ("fp32", 4)])
def test_names_of_dtypes(dtype: str, size: int) -> None:
    assert model_spec(llama(), dtype).element_bytes == size


def llama() -> Architecture:
    return architecture_from(config_of("llama"))


@pytest.mark.parametrize("dtype", ["int8", "BF16", "", "fp8"])
def test_unknown_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^dtype: expected one of bfloat16, .*, got"):
        dtype_name(dtype)


@pytest.mark.parametrize("rank", [-1, 1.5, True, "8"])
def test_nonsense_ranks_are_refused(rank: int) -> None:
    with pytest.raises(UnsupportedError, match=r"^adapter_rank: expected a whole number"):
        model_spec(llama(), adapter_rank=rank)
