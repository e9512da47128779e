"""What a model's own plan cuts, and what is refused: in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from farspan.distributed.tensor import check_layers
from farspan.distributed.tensor_plan import ParameterCut, plan_tensor
from farspan.hf.stages import CausalLMStages
from farspan.spec import UnsupportedError
from tests.distributed.tensor_cases import make_stages, random_run
from tests.zoo import make_model

# What of the first layer is cut, with the parts of what stands in one weight.
PLANS = {
    "qwen2": "k_proj.bias k_proj.weight q_proj.bias q_proj.weight v_proj.bias v_proj.weight "
    "o_proj.weight gate_proj.weight up_proj.weight down_proj.weight",
    "gpt_neox": "query_key_value.bias query_key_value.weight dense.weight "
    "dense_h_to_4h.bias dense_h_to_4h.weight dense_4h_to_h.weight",
    "phi3": "qkv_proj.weight(64,32,32) o_proj.weight gate_up_proj.weight(48,48) down_proj.weight",
    "olmo2": "q_proj.weight k_proj.weight v_proj.weight o_proj.weight "
    "gate_proj.weight up_proj.weight down_proj.weight",
}


def described(name: str, cut: ParameterCut) -> str:
    short = ".".join(name.split(".")[1:])
    return short + (f"({','.join(map(str, cut.parts))})" if len(cut.parts) > 1 else "")


@pytest.mark.parametrize("family", PLANS)
def test_what_is_cut(family: str) -> None:
    stages = make_stages(family)
    plan = plan_tensor(stages.model, stages.layers, 4)
    found = {described(name, cut) for name, cut in plan.layers[0].cuts.items()}
    assert found == set(PLANS[family].split())
    named = dict(stages.model.named_parameters())
    assert set(plan.cuts) <= set(named)
    assert all(tuple(named[name].shape) == cut.shape for name, cut in plan.cuts.items())
    outside = [name for name in plan.cuts if ".layers." not in name]
    assert len(plan.cuts) == 2 * len(found)
    assert not outside


def test_parameters_of_attention_s_own_are_cut() -> None:
    """Sinks, a number a head, as the plan of some families and here of an instance names them."""
    stages = make_stages("llama")
    for layer in stages.layers:
        layer.get_submodule("self_attn").register_parameter("sinks", nn.Parameter(torch.zeros(8)))
    stages.decoder._tp_plan = {"layers.*.self_attn.sinks": "colwise"}
    plan = plan_tensor(stages.model, stages.layers, 4)
    assert plan.layers[1].cuts["self_attn.sinks"] == ParameterCut((8,), 0, (8,))
    assert "mlp.down_proj.weight" in plan.layers[1].cuts


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("dim", "parts"), [(0, (16,)), (1, (8,)), (0, (8, 4, 4))])
def test_slices_are_the_whole_again(dim: int, parts: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(16.0 * 8).view(16, 8)
    cut = ParameterCut((16, 8), dim, parts)
    slices = [cut.slice(whole, index, ranks) for index in range(ranks)]
    assert {own.numel() for own in slices} == {whole.numel() // ranks}
    assert torch.equal(cut.join(slices), whole)
    if len(parts) == 3 and ranks == 2:
        assert slices[1][:, 0].div(8).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


REFUSED = {
    "gpt2": "GPT2LMHeadModel has no tensor parallel plan of its own.*use ulysses",
    "stablelm": "StableLmForCausalLM has no tensor parallel plan",
    "mixtral": r"model.layers.0.mlp.experts \(moe_tp_experts\) has a style.*use ulysses",
    "qwen3_moe": r"mlp.experts \(moe_tp_experts\) has a style",
    "deepseek_v3": r"layers.0.self_attn attends and has no plan of its own",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_plan_serves_is_refused(family: str) -> None:
    stages = CausalLMStages(make_model(family))
    with pytest.raises(UnsupportedError, match=REFUSED[family]):
        plan_tensor(stages.model, stages.layers, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "4 devices do not divide 8 query heads and 2 key-value heads"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "2 query heads.*use tensor: 2 and"),
        ({"intermediate_size": 42}, "the 42 features of .*mlp.down_proj.weight.*use tensor: 2"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, Any], message: str) -> None:
    stages = make_stages("llama", **changes)
    with pytest.raises(UnsupportedError, match=message):
        plan_tensor(stages.model, stages.layers, 4)


class _Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_modules_that_are_not_plain_are_refused() -> None:
    stages = make_stages("llama")
    stages.layers[1].self_attn.q_proj = _Twice(32, 64).double()  # type: ignore[union-attr]
    with pytest.raises(
        UnsupportedError, match=r"layers.1.self_attn.q_proj \(colwise\) is a _Twice"
    ):
        plan_tensor(stages.model, stages.layers, 2)


def test_tied_weights_are_refused() -> None:
    stages = make_stages("llama")
    first, second = (layer.get_submodule("self_attn.q_proj") for layer in stages.layers)
    second.weight = first.weight
    with pytest.raises(
        UnsupportedError,
        match=r"0.self_attn.q_proj.weight and .*1.self_attn.q_proj.weight are tied",
    ):
        plan_tensor(stages.model, stages.layers, 2)


class _Later(nn.Module):
    """Something after the rowwise module: of a sum it does not give the sum."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj: nn.Linear = mlp.gate_proj
        self.up_proj: nn.Linear = mlp.up_proj
        self.down_proj: nn.Linear = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down_proj(self.gate_proj(x) * self.up_proj(x)))


class _Between(_Later):
    """Features that meet their neighbours before the rowwise module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.softmax(self.gate_proj(x) * self.up_proj(x), -1))


class _Fixed(_Later):
    """Features in a number that is written down."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj((self.gate_proj(x) * self.up_proj(x)).view(*x.shape[:2], 48))


class _Offset(_Later):
    """A bias after the rowwise module, which shows only when it is not the zero it begins with."""

    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self.offset = nn.Parameter(torch.zeros(32, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x)) + self.offset


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Later, r"layers.1 \(LlamaDecoderLayer\) changes by .* shards it over 2 devices"),
        (_Between, "changes by"),
        (_Offset, "changes by"),
        (_Fixed, r"layers.1 \(LlamaDecoderLayer\) fails when .* shards it.*invalid for input"),
    ],
)
def test_the_probe_refuses_what_a_cut_changes(kind: type[_Later], message: str) -> None:
    stages = make_stages("llama")
    layer = stages.layers[1]
    layer.mlp = kind(layer.mlp)
    plan = plan_tensor(stages.model, stages.layers, 2)
    with pytest.raises(UnsupportedError, match=message):
        check_layers(plan, stages.layers, random_run(stages))
