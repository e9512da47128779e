"""What a model does, not what it says, decides whether it is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.spec import Schedule, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.hf.test_refused import SCHEDULE, refusal
from tests.zoo import COMMON, make_model, scatter_weights


class TestWhatCouldNotBeNoticedByName:
    """Randomness, lost gradients and settings that live elsewhere, found by what they do."""

    def test_prompt_tuning(self) -> None:
        inner = make_model("llama")

        class Prompted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = inner
                self.prompt = nn.Parameter(torch.zeros(3, 32))

            def get_base_model(self) -> nn.Module:
                return self.base

        assert "prompt is trained outside of the causal LM" in refusal(Prompted())

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("family", ["llama", "qwen3_next"])
    def test_weights_that_are_no_numbers(self, family: str, value: float) -> None:
        """A model with such weights differs from itself."""
        model = make_model(family)
        name = "model.layers.1.mlp.gate_proj.weight"
        if family == "qwen3_next":
            name = next(n for n, _ in model.named_parameters() if n.endswith("conv1d.weight"))
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3] = value
        words = refusal(model)
        assert f"model: {name} holds NaN or infinity, 1 of its " in words
        assert "use another one" in words

    def test_adapters_inside_the_layers_are_exact(self) -> None:
        model = make_model("llama")
        for parameter in model.parameters():
            parameter.requires_grad = False
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        data = draw(40)
        assert_close(run_step(model, SCHEDULE, data), run_oracle(model, data))

    def test_noise_under_any_name(self) -> None:
        model = make_model("llama")
        model.model.layers[2].mlp.register_forward_hook(lambda *given: given[2] * torch.rand(1))
        assert "draws random numbers" in refusal(model)

    @pytest.mark.parametrize("name", ["starcoder2", "mixtral"])
    def test_noise_that_starts_when_training_does(self, name: str) -> None:
        noisy = {"starcoder2": {"residual_dropout": 0.1}, "mixtral": {"router_jitter_noise": 0.1}}
        model = make_model(name, **noisy[name]).eval()  # type: ignore[arg-type]
        step, data = Step(model, SCHEDULE), draw(20)
        step(*data)
        model.train()
        with pytest.raises(UnsupportedError):
            step(*data)

    def test_weak_mixing_in_bf16(self) -> None:
        model = make_model("llama", torch.bfloat16)
        model.model.layers[1].mlp.register_forward_hook(
            lambda _, __, out: out + 0.05 * nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]
        )
        assert "mixes tokens outside the attention" in refusal(model)

    def test_mixing_that_a_setting_turns_on_in_one_layer(self) -> None:
        """Layers are made alike where their settings are, too: the first does not stand for all."""
        model = make_model("llama")
        for index, layer in enumerate(model.model.layers):
            layer.__class__, layer.shifts = Shifting, index == 2
        assert "layer 2 of LlamaForCausalLM mixes tokens" in refusal(model)

    @pytest.mark.parametrize("window", [0, -1])
    def test_a_window_of_nothing(self, window: int) -> None:
        said = refusal(make_model("mistral", sliding_window=window))
        assert f"a token see {window} tokens; set its sliding_window to 1 or more" in said

    def test_a_tie_between_a_layer_and_the_outside(self) -> None:
        model = make_model("llama")
        model.model.norm.weight = model.model.layers[0].input_layernorm.weight
        assert "is shared between a layer and a module outside" in refusal(model)

    def test_float16(self) -> None:
        assert "bfloat16 or float32" in refusal(make_model("llama", torch.float16))

    def test_autocast_and_inference_mode(self) -> None:
        step, data = Step(make_model("llama", torch.float32), SCHEDULE), draw(20)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(UnsupportedError, match="autocast"),
        ):
            step(*data)
        with torch.inference_mode(), pytest.raises(UnsupportedError, match="inference_mode"):
            step(*data)

    def test_a_schedule_by_name(self) -> None:
        with pytest.raises(
            UnsupportedError, match=r"expected a farspan\.Schedule or 'auto', got 'memo'"
        ):
            Step(make_model("llama"), "memo")

    def test_document_ids_of_a_narrow_type(self) -> None:
        step, data = Step(make_model("llama"), SCHEDULE), draw(20)
        down = torch.arange(20, 0, -1, dtype=torch.uint8)[None]
        with pytest.raises(UnsupportedError, match="must not decrease"):
            step(data.input_ids, data.labels, down)

    def test_a_step_within_another_in_one_memory(self) -> None:
        """Its buffers would overwrite those of the other."""
        data = draw(20)
        step = Step(make_model("llama"), SCHEDULE)
        other = Step(make_model("llama"), SCHEDULE, memory=step.memory)

        def within(_: Progress) -> None:
            other(*data)

        step.progress = within
        with pytest.raises(RuntimeError, match="a Step with this memory is running"):
            step(*data)
        step.progress = None
        step(*data)
        other(*data)


class Shifting(LlamaDecoderLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Where its setting says so, a token sees the one before it."""

    shifts: bool

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = super().forward(*given, **named)
        return out + nn.functional.pad(out, (0, 0, 1, 0))[:, :-1] if self.shifts else out


QWEN2_MOE = {
    **COMMON,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def qwen2_moe(**changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model("qwen2_moe", **QWEN2_MOE, **changes)
    config._experts_implementation = "eager"  # torch's grouped product has no float64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    scatter_weights(model)
    return model.train()


class TestAFamilyWithAWindowOfNothing:
    """Qwen2-MoE sets `sliding_window` to 0 where windows are off, and asks for a mask of it."""

    @pytest.mark.parametrize("schedule", [SCHEDULE, replace(SCHEDULE, groups=2, kv_block=8)])
    def test_without_windows_is_exact(self, schedule: Schedule) -> None:
        model, data = qwen2_moe(), draw(40)
        assert model.config.sliding_window == 0
        assert_close(run_step(model, schedule, data), run_oracle(model, data))

    def test_with_windows_is_refused(self) -> None:
        """Its attention does not tell the interface of them."""
        model = qwen2_moe(use_sliding_window=True, sliding_window=8, max_window_layers=4)
        assert "limits attention to [8] tokens only by its mask" in refusal(model)


class Adapted(nn.Module):
    """A frozen projection with a trained low-rank one beside it, as LoRA has."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(32, 4, bias=False, dtype=torch.float64)
        self.up = nn.Linear(4, 32, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))
