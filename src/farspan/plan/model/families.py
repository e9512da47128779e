"""From a Hugging Face configuration to an architecture, as transformers 5 builds the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from farspan.plan.model import windows
from farspan.plan.model.architecture import Architecture, ArchitectureBlock, Attention, FeedForward
from farspan.plan.model.fields import Fields
from farspan.plan.model.positions import LONG_ROPE, SLICEABLE_ROPE, longest, rotated
from farspan.spec import UnsupportedError

Option = bool | tuple[str, bool]  # what always is, or a field of the configuration and its default


class Configuration(Protocol):
    """What a transformers configuration offers."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Family:
    """How models of one `model_type` are built, and what their configurations may leave out."""

    longest: int  # default of `max_position_embeddings`
    pattern: windows.Pattern = windows.nowhere
    window: int | None = None  # default of `sliding_window`
    qkv_bias: Option = False
    output_bias: Option = False
    mlp_bias: Option = False
    qk_norm: bool = False
    sinks: bool = False
    fused: bool = False
    gated: bool = True
    norm: str = "rms"
    norms: int = 2
    parallel: Option = False
    tied: bool = False
    grouped: bool = True  # K and V have a number of heads of their own
    lone_heads: bool = False  # that number may be missing: then it is the number of heads
    head_dim: int | None = None  # None: hidden / heads
    own_head_dim: bool = True  # a `head_dim` in the configuration counts
    whole_heads: bool = False  # hidden must be a multiple of heads whatever `head_dim` says
    softcap: float | None = None  # default of `attn_logit_softcapping`; None: no such field
    activation: tuple[str, str] = ("hidden_act", "silu")  # its field and default
    renamed: Mapping[str, str] = field(default_factory=dict)  # activations that mean another one
    learned: bool = False  # positions are embedded
    rotated: tuple[str, float] | None = None  # field and default of the share of a head that is
    width: str = "intermediate_size"
    expert_width: str | None = None  # None: no experts
    sparse: bool = False  # only some layers have experts
    shared: bool = False  # an MLP beside the experts
    ropes: tuple[str, ...] = SLICEABLE_ROPE  # kinds of RoPE that can be cut into chunks
    rope: Mapping[str, Any] = field(default_factory=dict)  # where the configuration names none
    aliases: Mapping[str, str] = field(default_factory=dict)


_BIAS: Option = ("attention_bias", False)
_BIASED: Option = ("attention_bias", True)
_EXPERTS = {"num_experts": "num_local_experts"}

FAMILIES: dict[str, Family] = {
    "gemma": Family(
        8192,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        tied=True,
        head_dim=256,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        renamed={"gelu": "gelu_pytorch_tanh"},  # the first releases said gelu and meant this
    ),
    "gemma2": Family(
        8192,
        windows.alternating,
        window=4096,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        norms=4,
        tied=True,
        head_dim=256,
        whole_heads=True,
        softcap=50.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    "gpt2": Family(
        1024,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        fused=True,
        gated=False,
        norm="layer",
        tied=True,
        grouped=False,
        own_head_dim=False,
        activation=("activation_function", "gelu_new"),
        learned=True,
        width="n_inner",
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "gpt_neox": Family(
        2048,
        qkv_bias=_BIASED,
        output_bias=_BIASED,
        mlp_bias=True,
        fused=True,
        gated=False,
        norm="layer",
        parallel=("use_parallel_residual", True),
        rotated=("rotary_pct", 0.25),
        grouped=False,
        own_head_dim=False,
        activation=("hidden_act", "gelu"),
    ),
    "gpt_oss": Family(
        131072,
        windows.alternating,
        window=128,
        qkv_bias=_BIASED,
        output_bias=_BIASED,
        mlp_bias=True,
        sinks=True,
        head_dim=64,
        expert_width="intermediate_size",
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        aliases=_EXPERTS,
    ),
    "llama": Family(
        2048,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=("mlp_bias", False),
        lone_heads=True,
        whole_heads=True,
    ),
    "mistral": Family(131072, windows.everywhere, window=4096),
    "mixtral": Family(
        131072, windows.everywhere, expert_width="intermediate_size", aliases=_EXPERTS
    ),
    # Phi-3 reads yarn as longrope, which needs factors that yarn has not.
    "phi3": Family(
        4096,
        windows.everywhere,
        fused=True,
        lone_heads=True,
        rotated=("partial_rotary_factor", 1.0),
        ropes=("default", LONG_ROPE),
    ),
    "qwen2": Family(32768, windows.from_layer, window=4096, qkv_bias=True),
    "qwen2_moe": Family(
        32768,
        windows.below_layer,
        window=4096,
        qkv_bias=("qkv_bias", True),
        expert_width="moe_intermediate_size",
        sparse=True,
        shared=True,
    ),
    "qwen3": Family(
        32768,
        windows.from_layer,
        window=4096,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=True,
        head_dim=128,
    ),
    "qwen3_moe": Family(
        32768,
        windows.switched,
        window=4096,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm=True,
        expert_width="moe_intermediate_size",
        sparse=True,
        aliases=_EXPERTS,
    ),
}


class UnknownFamily(UnsupportedError):
    """A `model_type` whose layers are not known here."""


# Each changes what a layer is or sees, in a way that no field of an architecture tells.
_FOREIGN = (
    "is_encoder_decoder",
    "add_cross_attention",
    "use_bidirectional_attention",
    "per_layer_config",
)


def architecture_from(config: Mapping[str, Any] | Configuration, name: str = "") -> Architecture:
    """The architecture that a Hugging Face configuration describes.

    `config` is the content of a config.json, or a transformers configuration. Defaults are those
    of transformers 5.23. Raises UnknownFamily for a `model_type` that is not known here, and
    UnsupportedError, naming the field, for fields that are missing or make no sense.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnknownFamily(f"model_type: expected one of {', '.join(FAMILIES)}, got {kind!r}")
    family = FAMILIES[kind]
    fields = Fields(values, family.aliases)
    for foreign in _FOREIGN:
        if fields.get(foreign):
            raise UnsupportedError(f"{foreign}: expected none, got {fields.get(foreign)!r}")
    hidden = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    attention = _attention(family, fields, hidden)
    parallel = _option(fields, family.parallel)
    reach = longest(fields, family.longest, family.ropes, family.rope)
    return Architecture(
        name=name or fields.text("_name_or_path", "") or kind,
        family=kind,
        hidden=hidden,
        vocab=fields.count("vocab_size"),
        blocks=tuple(
            ArchitectureBlock(
                replace(attention, window=seen),
                _feed_forward(family, fields, hidden, layer),
                family.norms,
                parallel,
            )
            for layer, seen in enumerate(family.pattern(fields, layers, family.window))
        ),
        norm=family.norm,
        tied=fields.flag("tie_word_embeddings", family.tied),
        positions=reach if family.learned else 0,
        longest=reach,
    )


def _attention(family: Family, fields: Fields, hidden: int) -> Attention:
    heads = fields.count("num_attention_heads")
    kv_heads = heads
    lacking = None if family.lone_heads else 0
    if family.grouped and fields.get("num_key_value_heads", lacking) is not None:
        kv_heads = fields.count("num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedError(
            f"num_key_value_heads: expected a divisor of the {heads} attention heads, got "
            f"{kv_heads}"
        )
    given = fields.get("head_dim", family.head_dim) if family.own_head_dim else None
    if given is not None:
        given = fields.count("head_dim", family.head_dim)
    if hidden % heads and (given is None or family.whole_heads):
        raise UnsupportedError(
            f"num_attention_heads: expected a divisor of the hidden size {hidden}, got {heads}"
        )
    width = given or hidden // heads
    return Attention(
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        value_dim=width,
        qkv_bias=_option(fields, family.qkv_bias),
        output_bias=_option(fields, family.output_bias),
        qk_norm=family.qk_norm,
        rotary=not family.learned,
        rotated=None if family.rotated is None else rotated(fields, width, *family.rotated),
        sinks=family.sinks,
        softcap=_softcap(family, fields),
        fused=family.fused,
    )


def _softcap(family: Family, fields: Fields) -> float | None:
    if family.softcap is None:
        return None
    return fields.positive("attn_logit_softcapping", family.softcap)


def _feed_forward(family: Family, fields: Fields, hidden: int, layer: int) -> FeedForward:
    activation = fields.text(*family.activation)
    made = FeedForward(
        width=0,
        gated=family.gated,
        activation=family.renamed.get(activation, activation),
        bias=_option(fields, family.mlp_bias),
        fused=family.fused,
    )
    if family.expert_width is None or (family.sparse and not _has_experts(fields, layer)):
        inner = 4 * hidden if family.width == "n_inner" else None
        if inner is not None and fields.get(family.width) is None:
            return replace(made, width=inner)
        return replace(made, width=fields.count(family.width))
    experts, active = fields.count("num_experts"), fields.count("num_experts_per_tok")
    if active > experts:
        raise UnsupportedError(
            f"num_experts_per_tok: expected at most the {experts} experts there are, got {active}"
        )
    return replace(
        made,
        width=fields.count(family.expert_width),
        experts=experts,
        active=active,
        shared=fields.count("shared_expert_intermediate_size") if family.shared else 0,
        fused=True,
    )


def _has_experts(fields: Fields, layer: int) -> bool:
    """Whether this layer of a Qwen MoE has experts, rather than one dense MLP."""
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        raise UnsupportedError(f"mlp_only_layers: expected a list of layer numbers, got {dense!r}")
    step = fields.count("decoder_sparse_step", 1)
    return layer not in dense and fields.number("num_experts") > 0 and (layer + 1) % step == 0


def _option(fields: Fields, option: Option) -> bool:
    return option if isinstance(option, bool) else fields.flag(*option)
