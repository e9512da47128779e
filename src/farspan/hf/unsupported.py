"""Refuse models that cannot be trained exactly in chunks, and explain why.

The module also describes two properties of a model on which exactness depends: its RoPE, and the
modules that text passes through.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan.hf.indexer import indexed_parameters, is_indexer
from farspan.hf.swap import shell_of
from farspan.spec import UnsupportedError

LONG_ROPE = "longrope"  # one of two tables, by the longest position of a sequence
# A chunk's table is a slice of the sequence's, once the sequence's longest position is known.
SLICEABLE_ROPE = ("default", "linear", "llama3", "yarn", "proportional", LONG_ROPE)
# Types whose `factor` stretches the positions; others ignore it.
STRETCHED = ("linear", "llama3", "yarn", LONG_ROPE)
_ORIGINAL = "original_max_position_embeddings"

# Attributes of modules with a probability of random effects in training.
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

# Endings of modules that drop attention weights, which no kernel exposes.
ATTENTION_DROPOUTS = ("attn_drop", "attention_drop")
IN_LAYERS = re.compile(r"\.\d+\.")  # in the name of a module inside a list of layers

# Names of modules that attend to an encoder's output.
CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")

# Fields of PEFT's configurations whose adapters see more than a chunk, and how.
BEYOND_CHUNKS = {
    "is_prompt_learning": "puts tokens of its own before a sequence",
    "alora_invocation_tokens": "begins where a token is found in the whole sequence",
    "velora_config": "approximates gradients by an average over all tokens of a call",
}


# Fields of a model's configuration that must be false, and the error if one is not.
_MUST_BE_FALSE = {
    "is_encoder_decoder": "model: {} is an encoder-decoder; expected a decoder-only causal LM",
    "add_cross_attention": "model: {} has cross-attention; set add_cross_attention to false",
}


def refuse_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if the model's configuration rules out exact training in chunks."""
    config, name = model.config, type(model).__name__
    for field, error in _MUST_BE_FALSE.items():
        if getattr(config, field, False):
            raise UnsupportedError(error.format(name))
    # First, for its reason: decoders of encoder-decoders are not causal by their flags either.
    _refuse_modules(model)
    # Gemma4's "vision" applies to the tokens of an image alone.
    sees_later = getattr(config, "use_bidirectional_attention", None)
    only = "only a causal model can be processed in chunks"
    if sees_later not in (None, False, "vision") or getattr(config, "is_causal", True) is False:
        raise UnsupportedError(f"model: {name} attends to later tokens (bidirectional); {only}")
    for path, module in text_modules(model):
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedError(
                f"model: {path} of {name} is not causal (is_causal=False); {only}"
            )
    for rope_type in rope_types(config):
        if rope_type not in SLICEABLE_ROPE:
            raise UnsupportedError(
                f"rope_parameters.rope_type: {rope_type!r} depends on the longest position seen "
                "so far, even in earlier steps, so no chunk can know its table; expected one of "
                f"{', '.join(SLICEABLE_ROPE)} (yarn extends the context and is exact)"
            )
    _refuse_attention(config)


def refuse_cross_attention(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if text passes through attention to an encoder's output."""
    for path, _ in text_modules(model):
        if path.rpartition(".")[2] in CROSS_ATTENTION:
            raise UnsupportedError(
                f"model: {type(model).__name__} is the decoder of an encoder-decoder model ({path} "
                "attends to an encoder); expected a decoder-only causal LM"
            )


def _refuse_modules(model: PreTrainedModel) -> None:
    refuse_cross_attention(model)
    name = type(model).__name__
    for path, module in text_modules(model):
        last = path.rpartition(".")[2]
        if last == "compressor" and list(module.parameters()):
            raise UnsupportedError(
                f"model: {name} attends to keys that {path} makes of several tokens each, and "
                "hides them by its mask alone; expected layers with a key for each token"
            )
        if last == "indexer" and list(module.parameters()) and not is_indexer(module):
            raise UnsupportedError(
                f"model: {name} attends to the tokens that {path} chooses, and does not pass "
                "them to the attention interface; expected a model whose layers attend to all "
                "tokens or to a window"
            )
    for path, module in model.named_modules():
        # The model's own property changes its name between releases; its layers' flag does not.
        if getattr(module, "gradient_checkpointing", False):
            raise UnsupportedError(
                "model: its own gradient checkpointing is on, but the schedule already decides "
                "what is recomputed; call model.gradient_checkpointing_disable(), and in a Trainer "
                "set gradient_checkpointing=False in its arguments"
            )
        if _packs_for_inference(module):
            raise UnsupportedError(
                f"model: bitsandbytes repacks the weight of {path} for inference on this CPU, "
                "which leaves no gradients; load the model again, and call model.train() before "
                "anything else"
            )


def _refuse_attention(config: PretrainedConfig) -> None:
    """Raise UnsupportedError for a user's attention or mask function, which a step would not call.
    Those that transformers has or loads as kernels compute the same as a step."""
    name = config._attn_implementation
    for known in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        function = known.get(name)
        function = getattr(function, "func", function)  # a partial's
        module = getattr(function, "__module__", type(function).__module__)
        if function is not None and not module.startswith(("transformers.", "farspan.", "kernels")):
            called = getattr(function, "__qualname__", type(function).__qualname__)
            raise UnsupportedError(
                f"attention: the model uses {name!r}, which calls {module}.{called}; a step uses "
                "its own attention kernels and would not make this call; use "
                "model.set_attn_implementation('eager')"
            )


def drawing_dropouts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Dropout]]:
    """Yield by name the dropouts that can draw the same numbers again (`hf.dropout`): plain
    nn.Dropout modules in layers and in adapters."""
    if not model.training:
        return
    for name, module in text_modules(model):
        if not isinstance(module, nn.Dropout) or type(module).forward is not nn.Dropout.forward:
            continue
        of_weights = any(kind in name.rpartition(".")[2] for kind in ATTENTION_DROPOUTS)
        own = "forward" in module.__dict__
        if module.p > 0 and module.training and IN_LAYERS.search(name) and not (of_weights or own):
            yield name, module


def refuse_dropout(model: PreTrainedModel, *, is_cut: bool = False) -> None:
    """Raise UnsupportedError for a dropout that cannot draw the same numbers again when a cell is
    recomputed. `is_cut`: the layers hold slices of their weights (tensor parallelism)."""
    if not model.training:
        return
    known = {id(module): name for name, module in drawing_dropouts(model)}
    for name, module in text_modules(model):
        if module._compiled_call_impl is not None or is_cut:
            inside = [known[id(m)] for m in module.modules() if id(m) in known]
            if inside:
                what = "tensor parallelism" if is_cut else "torch.compile"
                raise UnsupportedError(
                    f"model: dropout at {inside[0]} cannot be repeated under {what}; set it to 0, "
                    f"or do without {what}"
                )
        for what, probability in _dropouts(module):
            if probability > 0 and id(module) not in known:
                where = f"{name}.{what}" if what else name
                raise UnsupportedError(
                    f"model: dropout {probability} at {where} cannot be repeated when a cell is "
                    "recomputed; set the model's dropout options to 0 (in a run file: "
                    "model.overrides, for example attention_dropout: 0.0) or call model.eval()"
                )


def refuse_dropout_of_head(head: nn.Module) -> None:
    """Raise UnsupportedError if dropout is active in the head, which runs again in the backward."""
    for name, module in head.named_modules():
        if module.training and any(probability > 0 for _, probability in _dropouts(module)):
            raise UnsupportedError(
                f"head: its dropout at {name or type(module).__name__} cannot be repeated when the "
                "head is computed again; set it to 0, or call head.eval()"
            )


def refuse_adapters(model: nn.Module) -> None:
    """Raise UnsupportedError for PEFT adapters that do more than change modules within a causal LM.
    A step calls the causal LM alone, not a PEFT model's own forward that adds to the loss."""
    configs = getattr(model, "peft_config", {})
    for config in configs.values():
        for name, what in BEYOND_CHUNKS.items():
            if getattr(config, name, None):
                raise UnsupportedError(
                    f"model: its {type(config).__name__} ({name}) {what}, which chunks cannot "
                    "repeat; use adapters within the layers, such as plain LoRA"
                )
    if not configs or not hasattr(model, "get_base_model"):
        return
    tuner: Any = model.base_model
    # PEFT's BaseTuner passes its arguments on.
    if not type(tuner).forward.__qualname__.startswith("BaseTuner."):
        raise UnsupportedError(
            f"model: {type(tuner).__name__} wraps the causal LM in a forward of its own, which a "
            "step does not call; use adapters that only change modules, such as LoRA"
        )


def refuse_untrained(model: nn.Module) -> None:
    """Raise UnsupportedError if no parameter requires gradients, or trained adapters are merged."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedError(
            "model: no parameter requires a gradient, so there is nothing to train; load "
            "adapters for training by PeftModel.from_pretrained(..., is_trainable=True)"
        )
    for name, module in model.named_modules():
        if not getattr(module, "merged_adapters", None):
            continue
        adapters = (p for key, p in module.named_parameters() if not key.startswith("base_layer."))
        if any(p.requires_grad for p in adapters):
            raise UnsupportedError(
                f"model: the adapters of {name} are merged into its weights and would get no "
                "gradients; call unmerge_adapter()"
            )


def refuse_backward_hooks(model: nn.Module, *, over_ranks: bool) -> None:
    """Raise UnsupportedError for hooks that would get gradients of a chunk instead of a sequence.
    With `over_ranks` also for hooks on parameters: each rank has only a part of the gradient."""
    everywhere = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    for name, module in model.named_modules():
        if everywhere or module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedError(
                f"model: a backward hook on {name or type(module).__name__} would be called once "
                "per chunk, with the gradients of that chunk; remove the hook, or use "
                "register_post_accumulate_grad_hook on parameters, which is called once"
            )
    for name, parameter in model.named_parameters() if over_ranks else ():
        if parameter.requires_grad and parameter._backward_hooks:
            raise UnsupportedError(
                f"model: a hook on the gradient of {name} (register_hook) would get parts of the "
                "gradient; use register_post_accumulate_grad_hook, which gets all of it at once"
            )


def _packs_for_inference(module: nn.Module) -> bool:
    """Return whether bitsandbytes 0.50 has repacked the weights of a 4-bit linear module for
    AVX512-BF16, or would in eval mode."""
    weight: Any = module._parameters.get("weight")
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        return True
    here = weight is not None and weight.device.type == "cpu" and not module.training
    return here and bool(getattr(module, "support_avx512bf16_for_cpu", False))


def refuse_places(model: nn.Module) -> None:
    """Raise UnsupportedError for weights on several devices, as `device_map` leaves them."""
    where = {str(parameter.device): name for name, parameter in model.named_parameters()}
    if len(where) > 1 or "meta" in where:
        found = ", ".join(f"{name} on {device}" for device, name in where.items())
        raise UnsupportedError(
            f"model: a step needs all weights on one device, but found {found}; load the model "
            "without device_map or offloading: the schedule says what leaves the device"
        )


def _dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield "", float(module.p)
    for name in DROPOUTS:
        value = getattr(module, name, None)
        if isinstance(value, float):
            yield name, value


# -- positions ----------------------------------------------------------------------------------


def rope_types(config: PretrainedConfig) -> list[str]:
    """Return the model's types of RoPE, one for each kind of layer (full or sliding attention)."""
    return [str(rope["rope_type"]) for rope in ropes(config).values()]


def ropes(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the RoPE parameters for each kind of layer, under "" if all layers share one RoPE."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_kind = {kind: part for kind, part in parameters.items() if isinstance(part, dict)}
    found = by_kind or ({"": parameters} if parameters else {})
    # A configuration that transformers has not read may use the older name of the type.
    return {
        kind: {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
        for kind, rope in found.items()
    }


def first_position(model: PreTrainedModel) -> int:
    """Return the number of a document's first position: 0, or behind the padding token's id in
    models like RoBERTa, whose position embeddings have a row for padding."""
    words = model.get_input_embeddings()
    for path, module in text_modules(model):
        if not isinstance(module, nn.Embedding) or module is words or module.padding_idx is None:
            continue
        if path.endswith("position_embeddings"):
            return int(module.padding_idx) + 1
    return 0


def refuse_padding_inside(model: PreTrainedModel, input_ids: Tensor, positions: Tensor) -> None:
    """Raise UnsupportedError if `input_ids` [B, T] have padding inside a document, in a model whose
    `first_position` is not 0: such a model leaves padding out when it numbers positions."""
    padding = input_ids == first_position(model) - 1
    inside = padding[:, :-1] & ~padding[:, 1:] & (positions[:, 1:] > 0)
    if bool(inside.any()):
        raise UnsupportedError(
            f"input_ids: a document goes on after padding (id {first_position(model) - 1}), which "
            f"{type(model).__name__} leaves out of its positions; give padding at a document's "
            "end, or document_ids of its own"
        )


def context_limit(model: PreTrainedModel | PretrainedConfig) -> int | None:
    """Return the longest document in tokens, None without a limit: max_position_embeddings, or more
    if RoPE is stretched, as by yarn. In a model (not a mere configuration) stretching counts only
    if the model's frequencies are those of its configuration."""
    config = (model.config if isinstance(model, PreTrainedModel) else model).get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    made = model if isinstance(model, PreTrainedModel) else None
    limit -= 0 if made is None else first_position(made)
    reached = [_reach(config, kind, limit, made) for kind in _far_kinds(config)]
    return min(reached, default=int(limit))


def _far_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kinds of layers that attend over any distance. Layers of other kinds attend within
    a window, where positions differ by less."""
    return [kind for kind in ropes(config) if not kind.startswith(("sliding", "chunked"))]


def _reach(
    config: PretrainedConfig, kind: str, limit: int, model: PreTrainedModel | None = None
) -> int:
    rope = ropes(config)[kind]
    original, factor = (rope.get(name) for name in (_ORIGINAL, "factor"))
    if rope["rope_type"] not in STRETCHED or not original or not factor:
        return int(limit)
    if model is not None and not _has_frequencies(model, kind, rope["rope_type"]):
        return int(limit)
    return max(int(limit), int(original * factor))


def _has_frequencies(model: PreTrainedModel, kind: str, rope_type: str) -> bool:
    """Return whether the model's RoPE frequencies are those of its configuration, which may have
    been changed later. True for a family that keeps its frequencies elsewhere."""
    name, keywords = ("inv_freq", {}) if not kind else (f"{kind}_inv_freq", {"layer_type": kind})
    for _, module in text_modules(model):
        found, config = getattr(module, name, None), getattr(module, "config", None)
        if not isinstance(found, Tensor) or found.is_meta or rope_type == LONG_ROPE:
            continue
        try:
            asked = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", **keywords)[0]
        except Exception:  # a family with its own fields
            continue
        # A model cast to bfloat16 has rounded them, by 0.4% at most.
        given = found.detach().to("cpu", torch.float32)
        if given.shape == asked.shape and bool(((given - asked).abs() > 0.01 * asked.abs()).any()):
            return False
    return True


def refuse_context(model: PreTrainedModel | PretrainedConfig, tokens: int) -> None:
    """Raise UnsupportedError if the model lacks positions for a document of this many tokens."""
    limit = context_limit(model)
    if limit is None or tokens <= limit:
        return
    config = model.config if isinstance(model, PreTrainedModel) else model
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    what = "max_position_embeddings" if limit == own else "RoPE, which reaches"
    beyond = (
        f"context: a document of {tokens:,} tokens exceeds the model's {what}"
        f"{' of' if limit == own else ''} {limit:,}"
    )
    if tokens <= (context_limit(config) or tokens):
        raise UnsupportedError(
            f"{beyond}: its configuration stretches RoPE further, but was changed after the model "
            "was made, so its frequencies are still the old ones; load the model with this "
            "configuration: AutoModelForCausalLM.from_pretrained(path, config=config)"
        )
    if not rope_types(config):
        raise UnsupportedError(
            f"{beyond}, and it has no RoPE to extend; set context to at most {limit}, or use a "
            "model with RoPE"
        )
    fields = stretched(config, tokens)
    raise UnsupportedError(
        f"{beyond}; set context to at most {limit}, or set model.overrides: {in_yaml(fields)}; in "
        f"a program, load the model again: {_in_python(fields)} (changing the model.config of a "
        "loaded model does not change its RoPE frequencies)"
    )


def stretched(config: PretrainedConfig, tokens: int) -> dict[str, Any]:
    """Return overrides that let a model with RoPE read a document of this many tokens: yarn if its
    RoPE has no scaling yet, else a larger factor of the scaling that it has."""
    text = config.get_text_config()
    limit: int = text.max_position_embeddings
    wider = {"max_position_embeddings": tokens}
    fields: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for kind in _far_kinds(text):
        rope = ropes(text)[kind]
        original = rope.get(_ORIGINAL)
        if rope["rope_type"] in ("yarn", "llama3") and original:
            parts[kind] = {"factor": _rounded(tokens / original)}
        elif rope["rope_type"] == LONG_ROPE or not _takes_yarn(text, kind):
            fields = wider
            if rope["rope_type"] != LONG_ROPE:
                parts[kind] = {"rope_theta": float(math.ceil(rope["rope_theta"] * tokens / limit))}
        elif rope.get("factor"):
            fields = wider
            parts[kind] = {"factor": _rounded(rope["factor"] * tokens / limit)}
        else:
            factor = _rounded(tokens / limit)
            parts[kind] = {"rope_type": "yarn", "factor": factor, _ORIGINAL: limit}
    if parts:
        fields = {"rope_parameters": parts.get("", parts), **fields}
    return fields


def _rounded(factor: float) -> float:
    return math.ceil(100 * factor) / 100


def _takes_yarn(config: PretrainedConfig, kind: str) -> bool:
    """Return whether a family's RoPE is yarn if its config says so; Phi-3's is longrope."""
    rope = {**ropes(config)[kind], "rope_type": "yarn", "factor": 2.0}
    given = {**ropes(config), kind: rope} if kind else rope
    try:
        made = type(config).from_dict({**config.to_dict(), "rope_parameters": given})
    except Exception:  # each family checks its own fields
        return False
    return ropes(made)[kind]["rope_type"] == "yarn"


def _in_python(fields: dict[str, Any]) -> str:
    """Return Python statements that load a model with these configuration fields."""
    lines = ["config = AutoConfig.from_pretrained(path)", "text = config.get_text_config()"]
    for name, value in fields.items():
        if not isinstance(value, dict):
            lines.append(f"text.{name} = {value!r}")
            continue
        by_kind = {f"[{kind!r}]": part for kind, part in value.items() if isinstance(part, dict)}
        lines += [f"text.{name}{k} |= {part!r}" for k, part in (by_kind or {"": value}).items()]
    return "; ".join([*lines, "model = AutoModelForCausalLM.from_pretrained(path, config=config)"])


def in_yaml(value: Any) -> str:
    """Return a value as one line of YAML for a run file."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {in_yaml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(in_yaml, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def describe_positions(model: PreTrainedModel | PretrainedConfig) -> list[str]:
    """Return one line of text about the layers' RoPE and the longest document."""
    config = (model.config if isinstance(model, PreTrainedModel) else model).get_text_config()
    limit, found = context_limit(model), ropes(config)
    if limit is None and not found:
        return ["positions: the model has no position table, so a document may have any length"]
    many = "any number of positions" if limit is None else f"{limit:,} positions"
    if not found:
        return [f"positions: no RoPE; a document may have {many}"]
    made = model if isinstance(model, PreTrainedModel) else None
    parts = []
    for kind, rope in found.items():
        words = [_in_words(rope)]
        if limit is not None and kind in _far_kinds(config):
            own = _reach(config, kind, config.max_position_embeddings, made)
            words.append(f"reaches {own:,}")
        parts.append(", ".join(words) + (f" ({kind})" if kind else ""))
    return [f"RoPE: {'; '.join(parts)}; a document may have {many}"]


def _in_words(rope: dict[str, Any]) -> str:
    factor, original = rope.get("factor"), rope.get(_ORIGINAL)
    scaled = rope["rope_type"] != "default"
    stretch = f" x{factor:g}" if scaled and factor else ""
    over = f" over {original:,} positions" if scaled and original else ""
    theta = rope.get("rope_theta")
    base = f", theta {theta:,.10g}" if isinstance(theta, int | float) else ""
    return f"{rope['rope_type']}{stretch}{over}{base}"


# -- RoPE by the longest position ---------------------------------------------------------------
#
# Some tables depend on the longest position of a batch, which is chosen once for all chunks.


def chooses_by_length(config: PretrainedConfig) -> bool:
    """Return whether the model's RoPE chooses its table by the longest position of a sequence."""
    return LONG_ROPE in rope_types(config)


def settled(decoder: nn.Module, longest: int, device: torch.device) -> dict[str, nn.Module]:
    """Return copies of the decoder's RoPE modules whose tables are those of a sequence of `longest`
    positions, so that each chunk gets its part of the sequence's table. Raises UnsupportedError if
    a RoPE chooses its table in another way."""
    found = {
        name: _settle(child, longest, device)
        for name, child in decoder.named_children()
        if getattr(child, "rope_type", None) == LONG_ROPE
    }
    if not found:
        raise _not_honoured(decoder)
    return found


@torch.no_grad()
def _settle(rope: nn.Module, longest: int, device: torch.device) -> nn.Module:
    # A forward refills a buffer in one release of transformers and replaces it in another.
    buffers = {
        name: b if b is None else b.to(device, copy=True) for name, b in rope._buffers.items()
    }
    twin: Any = shell_of(rope, buffers=buffers, own_forward=True)
    blank = torch.zeros((), device=device)
    ends = torch.tensor([[min(1, longest - 1), longest - 1]], device=device)
    whole = twin(blank, ends)
    twin.rope_type = "default"  # keeps the frequencies that this call has set
    part = twin(blank, ends[:, :1])
    if not all(torch.equal(p, w[:, :1]) for p, w in zip(part, whole, strict=True)):
        raise _not_honoured(rope)
    return twin


def _not_honoured(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"rope_parameters.rope_type: {type(module).__name__} chooses the table of {LONG_ROPE!r} by "
        "the longest position in its own way, so a chunk would get another table than the whole "
        "sequence; expected one rotary embedding next to the layers whose frequencies alone depend "
        "on it (yarn extends the context and is exact)"
    )


# -- text in a model that also reads images -----------------------------------------------------


def reads_text_alone(model: PreTrainedModel) -> bool:
    """Return whether text passes through every part of the model, as in a model without images."""
    return model.config.get_text_config() is model.config


def text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that text passes through, by name. In a model that also reads images these
    are its decoder and its head."""
    decoder = model.get_decoder()
    if reads_text_alone(model) or decoder is None:
        yield from model.named_modules()
        return
    met = {id(module) for module in decoder.modules()}
    met |= {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    yield from ((name, module) for name, module in model.named_modules() if id(module) in met)


def freeze_unmet(model: PreTrainedModel) -> None:
    """Freeze parameters to which text gives no gradients, so that optimizers hold no states for
    these."""
    met = {id(p) for _, module in text_modules(model) for p in module.parameters()}
    met -= indexed_parameters(model)
    for parameter in model.parameters():
        if id(parameter) not in met:
            parameter.requires_grad_(False)
