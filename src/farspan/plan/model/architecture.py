"""A decoder's architecture: what decides its sizes and its work, and nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention."""

    query_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over the head dimension of q and k, before they are rotated
    rotary: bool = True  # False: positions are embedded and added to the tokens
    rotated: int | None = None  # leading part of a head that is rotated (GPT-NeoX); None: all
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    fused: bool = False  # q, k and v are one product


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One layer's MLP, or its experts."""

    width: int  # of one expert where there are any
    gated: bool = True  # act(gate) * up, rather than act(up)
    activation: str = "silu"  # as Hugging Face's `hidden_act` names it
    bias: bool = False
    experts: int = 0  # 0: one dense MLP
    active: int = 0  # experts a token is sent to
    shared: int = 0  # width of an MLP beside the experts that every token passes (Qwen2-MoE)
    fused: bool = False  # gate and up are one product; experts' always are


@dataclass(frozen=True, slots=True)
class ArchitectureBlock:
    """One decoder layer: norms, attention, MLP, two residuals."""

    attention: Attention
    feed_forward: FeedForward
    norms: int = 2  # 4: what attention and MLP give is normed too (Gemma2)
    parallel: bool = False  # the MLP reads the layer's input, not attention's sum (GPT-NeoX)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A causal decoder."""

    name: str
    family: str  # Hugging Face's `model_type`
    hidden: int
    vocab: int
    blocks: tuple[ArchitectureBlock, ...]
    norm: str = "rms"  # or "layer", which has a bias
    tied: bool = False  # the head is the embedding
    positions: int = 0  # rows of a table of learned positions; 0: none
    # How it is run:
    fused: bool = False  # norms, gates, rotations and the loss by farspan's own kernels
    adds: bool = False  # products add weight gradients to their sums
    longest: int | None = None  # tokens the positions reach, where they are bounded
    adapter_rank: int = 0  # LoRA on every linear of the layers, all else frozen; 0: all is trained
