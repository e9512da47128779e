"""What a layer saves, from its shapes alone, is what autograd saves of the real one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from farspan.hf.attention_interface import answering, routed
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.plan.cell.layer import layer_costs
from farspan.plan.model.families import architecture_from
from farspan.program.program import aligned
from tests.versions import MASKED_EXPERTS
from tests.zoo import make_model

EXPERTS = ("mixtral", "gpt_oss", "qwen3_moe")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma", "gemma2", *EXPERTS)
TOKENS = 64
# Copies, reductions and casts are counted to the byte; what differs is counted otherwise, not
# missed: a mask read once or twice, zeros that are only written.
TRAFFIC = 0.08


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model = make_model(name, dtype, num_hidden_layers=2, **_layer_types(name))
    if name in EXPERTS:
        model.set_experts_implementation("grouped_mm")  # what a model that is loaded runs
    return model


def _layer_types(name: str) -> dict[str, Any]:
    both = name in ("gemma2", "gpt_oss")
    return {"layer_types": ["sliding_attention", "full_attention"]} if both else {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_saves_what_the_probe_finds(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    found = describe(CausalLMStages(model))
    architecture = architecture_from(model.config)
    for block, layer in zip(architecture.blocks, found.layers, strict=True):
        costs = layer_costs(architecture, block, dtype.itemsize)
        masks = block.feed_forward.active if MASKED_EXPERTS and name in EXPERTS else 0
        assert costs.activation_bytes + masks == layer.activation_bytes
        rounding = aligned(1) if masks else 0  # of one tensor more
        assert costs.activation_constant + rounding == layer.activation_constant
        assert costs.saves_input == layer.saves_input


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, views and products aside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        ins = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {x.untyped_storage()._cdata for x in ins}
        is_view = all(x.untyped_storage()._cdata in known for x in outs)
        is_product = func._opname in ("mm", "addmm", "_grouped_mm")
        if not is_product and not (is_view and not func._opname.endswith("_")):
            # A tensor that is expanded is read as often as it has rows, but from a cache.
            self.bytes += sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in (*ins, *outs))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2", "mixtral"])
def test_a_layer_moves_the_bytes_that_it_is_said_to_move(name: str, dtype: torch.dtype) -> None:
    if name in EXPERTS and MASKED_EXPERTS:
        pytest.skip("experts write more in this version of transformers")
    model = model_of(name, dtype)
    architecture = architecture_from(model.config)
    costs = layer_costs(architecture, architecture.blocks[0], dtype.itemsize)
    for backward, said in ((False, costs.forward_traffic), (True, costs.backward_traffic)):
        few, many = (_moved(model, tokens, backward=backward) for tokens in (TOKENS, 2 * TOKENS))
        assert said == pytest.approx((many - few) / TOKENS, rel=TRAFFIC)


def _moved(model: PreTrainedModel, tokens: int, *, backward: bool) -> int:
    boundary = CausalLMStages(model)
    with routed(model):
        call = boundary.calls(1, torch.arange(tokens)[None])[0]
        hidden = torch.randn(1, tokens, boundary.width).to(boundary.dtype).requires_grad_()
        with answering(_Stand()), Traffic() as forward:
            out = boundary.run_layer(0, hidden, call)
        with Traffic() as back:
            out.backward(torch.ones_like(out))
    return back.bytes if backward else forward.bytes


class _Stand:
    """Answers for attention with nothing to do: views of its inputs."""

    def __call__(self, _: Any, q: Tensor, k: Tensor, v: Tensor, __: float, **___: Any) -> Tensor:
        return _Nothing.apply(q, k, v)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)
