"""Models that also read images, trained on text: exact, and all else stays as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.engine.step import Step
from farspan.hf.describe import describe, describe_config, with_work
from farspan.hf.fused_layers import fuse
from farspan.hf.load import load_config, load_model
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import reads_text_alone, refuse_dropout, refuse_model
from farspan.spec import Kernels, Schedule, Tier, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.grids import part_of
from tests.zoo import (
    COMMON,
    GEMMA3,
    GEMMA4,
    GEMMA4_31B,
    RECURRENT,
    WINDOW,
    scatter_weights,
)

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
}
ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}


def text(kind: str, **fields: Any) -> dict[str, Any]:
    return {**COMMON, "model_type": kind, **fields}


KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": text("gemma3_text", **GEMMA3),
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
    },
    "gemma4": {  # which reads padding where a token stands for an image, a video or a sound
        "text_config": text("gemma4_text", **GEMMA4, **GEMMA4_31B),
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
        "audio_config": None,
        "image_token_id": 60,
        "video_token_id": 59,
        "audio_token_id": 58,
    },
    "mistral3": {
        "text_config": text("mistral", sliding_window=WINDOW),
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 60,
    },
    "llava": {
        "text_config": text("llama"),
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": 60,
    },
    "internvl": {
        "text_config": text("qwen2"),
        "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 60,
    },
    "idefics3": {"text_config": text("llama"), "vision_config": VISION, "image_token_id": 60},
    "aya_vision": {
        "text_config": text("cohere2", sliding_window=WINDOW),
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "image_token_index": 60,
    },
    "lfm2_vl": {
        "text_config": text("lfm2", **RECURRENT["lfm2"].fields),
        "vision_config": {**VISION, "model_type": "siglip2_vision_model"},
        "image_token_id": 60,
    },
    "glm4v": {
        "text_config": text("glm4v_text", **ROPE),
        "vision_config": {**QWEN_VISION, "image_size": 28},
    },
    "qwen2_vl": {
        "text_config": text("qwen2_vl_text", **ROPE),
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32},
    },
    "qwen2_5_vl": {"text_config": text("qwen2_5_vl_text", **ROPE), "vision_config": QWEN_VISION},
    "qwen3_vl": {
        "text_config": text("qwen3_vl_text", **ROPE),
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    },
}
SCHEDULES = (
    Schedule(
        chunk=13,
        groups=(1, 3),
        attention_save_fraction=0.4,
        activation_save_fraction=0.5,
        kv_block=16,
    ),
    Schedule(chunk=10, groups=4, kv=Tier.HOST, kv_block=12, layer_checkpoint=True),
)


def fields(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **KINDS[kind]}


def make(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = load_model(config=fields(kind), dtype=dtype)
    scatter_weights(model)
    return model


def unmet(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("kind", part_of(KINDS, *list(KINDS)[::10]))
@pytest.mark.usefixtures("float64_throughout")
def test_two_steps_of_text_are_exact(kind: str) -> None:
    """Against the whole model's own forward."""
    model = make(kind)
    assert not reads_text_alone(model)
    for schedule in SCHEDULES:
        step = Step(model, schedule, poison=True)
        for tokens, seed in ((53, 0), (38, 1)):
            data = draw(tokens, batch=2, documents=3 * seed, seed=seed)
            assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.parametrize("kind", part_of(KINDS, *list(KINDS)[::4]))
def test_what_text_does_not_meet_is_frozen(kind: str) -> None:
    """It is what plain autograd gives no gradient."""
    model = make(kind)
    frozen = set(unmet(model))
    model.requires_grad_(True)
    model(input_ids=torch.arange(12)[None]).logits.sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == without
    assert without


@pytest.mark.parametrize("kind", part_of(KINDS, *list(KINDS)[1::4]))
def test_without_weights_it_is_described_as_it_is(kind: str) -> None:
    stages = CausalLMStages(make(kind, torch.bfloat16))
    fuse(stages, Kernels(fused=False), stages.device)
    assert describe_config(fields(kind), "bfloat16") == with_work(stages, describe(stages))


def test_only_text_must_be_causal_and_without_dropout() -> None:
    """SigLIP's own attention looks both ways, and images are not seen."""
    model = make("gemma3")
    vision: Any = model.model.vision_tower
    vision.encoder.layers[0].self_attn.dropout = 0.5
    refuse_model(model)
    refuse_dropout(model)
    attention = model.get_decoder().layers[2].self_attn
    attention.attention_dropout = 0.5
    with pytest.raises(UnsupportedError, match=r"dropout 0\.5 at model\.language_model\.layers\.2"):
        refuse_dropout(model)
    attention.is_causal = False
    with pytest.raises(UnsupportedError, match=r"layers\.2.self_attn of .* is not causal"):
        refuse_model(model)


def test_overrides_reach_the_text() -> None:
    """By the names that they have in a model of text; a part of a rope keeps the rest of it."""
    ropes = {"full_attention": {"rope_type": "linear", "factor": 4.0}}
    changes = {
        "rope_parameters": ropes,
        "num_hidden_layers": 2,
        "vision_config": {"num_hidden_layers": 3},
    }
    config = load_config(path=None, config=fields("gemma3"), overrides=changes)
    of_text = config.get_text_config()
    assert of_text.rope_parameters["full_attention"] == {
        **{"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    }
    assert of_text.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert len(of_text.layer_types) == of_text.num_hidden_layers == 2
    assert config.vision_config.num_hidden_layers == 3
    assert config.vision_config.hidden_size == 16
    with pytest.raises(
        UnsupportedError, match=r"overrides\.rope_parms: Gemma3Config has no such field"
    ):
        load_config(path=None, config=fields("gemma3"), overrides={"rope_parms": 1})
    with pytest.raises(UnsupportedError, match=r"overrides\.vision_config\.widht: .*no such field"):
        load_config(path=None, config=fields("gemma3"), overrides={"vision_config": {"widht": 1}})
