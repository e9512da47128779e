"""What farspan refuses to train, because it could not be exact, and why."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from farspan.models.rope import rope_types, ropes
from farspan.models.text import text_modules
from farspan.plan.model.positions import SLICEABLE_ROPE
from farspan.spec import Refused

# Attributes of modules that hold the probability of something random in training.
DROPOUTS = (
    "attention_dropout",
    "attn_dropout",
    "dropout",
    "dropout_p",
    "jitter_noise",
    "layerdrop",
    "residual_dropout",
    "router_jitter_noise",
)

# Fields of PEFT's configurations whose adapters see more than a chunk, and what that is.
BEYOND_CHUNKS = {
    "is_prompt_learning": "puts tokens of its own before a sequence",
    "alora_invocation_tokens": "begins where a token is found in the whole sequence",
    "velora_config": "approximates gradients by an average over all tokens of a call",
}


def refuse_model(model: PreTrainedModel) -> None:
    """Raises Refused when the model's configuration rules out exact training in chunks."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise Refused(f"model: {name} is an encoder-decoder; expected a decoder-only causal LM")
    if getattr(config, "add_cross_attention", False):
        raise Refused(f"model: {name} has cross-attention; set add_cross_attention to false")
    # Gemma4's "vision" is of the tokens of an image alone.
    sees_later = getattr(config, "use_bidirectional_attention", None)
    if sees_later not in (None, False, "vision") or not _is_causal(model):
        raise Refused(
            f"model: {name} attends to later tokens (bidirectional); chunks of a causal model are "
            "the only ones that can be processed in order"
        )
    for rope_type in rope_types(config):
        if rope_type not in SLICEABLE_ROPE:
            raise Refused(
                f"rope_parameters.rope_type: {rope_type!r} depends on the longest position seen "
                "so far, also in steps before, so no chunk can know its table; expected one of "
                f"{', '.join(SLICEABLE_ROPE)} (yarn extends the context and is exact)"
            )
    # The model's own property has another name in every other release; its layers' flag has not.
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise Refused(
            "model: its own gradient checkpointing is on, and the schedule already decides what "
            "is recomputed; call model.gradient_checkpointing_disable()"
        )
    if getattr(config, "output_router_logits", False):
        raise Refused(
            "output_router_logits: the router's load-balancing loss needs statistics of the whole "
            "sequence and is not computed; set output_router_logits to false"
        )


def refuse_dropout(model: PreTrainedModel) -> None:
    """Raises Refused when a dropout would draw: a recomputed cell would draw other numbers."""
    if not model.training:
        return
    for name, module in text_modules(model):
        for what, probability in _dropouts(module):
            if probability > 0:
                where = f"{name}.{what}" if what else name
                raise Refused(
                    f"model: dropout {probability} at {where} cannot be repeated exactly when a "
                    "cell is recomputed; set the model's dropout options to 0 (in a run file: "
                    "model.overrides, for example attention_dropout: 0.0) or call model.eval()"
                )


def refuse_adapters(model: nn.Module) -> None:
    """Raises Refused for adapters of PEFT that do more than change modules within a causal LM, such
    as a model's own forward that adds to the loss: a step calls the causal LM alone."""
    configs = getattr(model, "peft_config", {})
    for config in configs.values():
        for name, what in BEYOND_CHUNKS.items():
            if getattr(config, name, None):
                raise Refused(
                    f"model: its {type(config).__name__} ({name}) {what}, which chunks cannot "
                    "repeat; use adapters within the layers, such as plain LoRA"
                )
    if not configs or not hasattr(model, "get_base_model"):
        return
    tuner: Any = model.base_model
    # That of PEFT's BaseTuner hands its arguments on.
    if not type(tuner).forward.__qualname__.startswith("BaseTuner."):
        raise Refused(
            f"model: {type(tuner).__name__} has a forward of its own around the causal LM, which a "
            "step does not call; use adapters that change its modules alone, such as LoRA"
        )


def refuse_untrained(model: nn.Module) -> None:
    """Raises Refused where a training step would give no gradients at all, or none to adapters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Refused(
            "model: no parameter requires a gradient, so there is nothing to train; adapters are "
            "loaded to be trained by PeftModel.from_pretrained(..., is_trainable=True)"
        )
    for name, module in model.named_modules():
        if not getattr(module, "merged_adapters", None):
            continue
        adapters = (p for key, p in module.named_parameters() if not key.startswith("base_layer."))
        if any(p.requires_grad for p in adapters):
            raise Refused(
                f"model: the adapters of {name} are merged into its weights and would get no "
                "gradients; call unmerge_adapter()"
            )


def refuse_context(config: PretrainedConfig, tokens: int) -> None:
    """Raises Refused when a document of this many tokens has positions the model does not know."""
    limit = context_limit(config)
    if limit is not None and tokens > limit:
        beyond = (
            f"context: a document of {tokens:,} tokens is beyond the model's "
            f"max_position_embeddings of {limit:,}"
        )
        if not rope_types(config):
            raise Refused(
                f"{beyond}, and it has no RoPE that could be stretched; set context to at most "
                f"{limit}, or take a model with one"
            )
        factor = math.ceil(100 * tokens / limit) / 100
        raise Refused(
            f"{beyond}; set rope_parameters (for example rope_type "
            f"yarn, factor {factor}, original_max_position_embeddings {limit}) or, with a larger "
            f"rope_theta, max_position_embeddings: {tokens}"
        )


def context_limit(config: PretrainedConfig) -> int | None:
    """Positions the configuration claims to support: max_position_embeddings, stretched by a
    scaled RoPE that names the length it starts from."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    for rope in ropes(config):
        original = rope.get("original_max_position_embeddings")
        factor = rope.get("factor")
        if original and factor:
            limit = max(limit, int(original * factor))
    return int(limit)


def _is_causal(model: PreTrainedModel) -> bool:
    if getattr(model.config, "is_causal", True) is False:
        return False
    modules = (module for _, module in text_modules(model))
    return all(getattr(module, "is_causal", True) is not False for module in modules)


def _dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield "", float(module.p)
    for name in DROPOUTS:
        value = getattr(module, name, None)
        if isinstance(value, float):
            yield name, value
