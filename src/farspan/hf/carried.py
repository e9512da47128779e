"""Pack everything that decoder layers pass on into one tensor, [batch, tokens, width].

Some families give a layer more than the hidden state of the layer before: an input of its own that
the model makes of the tokens (per-layer inputs), keys and values of an earlier layer (shared K, V),
several streams of hidden states (AltUp, hyper-connections), the embeddings (Zamba), or the tokens
that an earlier layer's indexer chose (GLM-MoE-DSA, HY-V4). A packed tensor has them side by side
for each token:

    | hidden state, all streams | input of layer 0 | 1 | ... | K | V | K | V | embedding | choice |

Per-layer inputs are left out if the modules that make them are frozen, as with adapters: each
chunk's calls make them again.

Whatever runs between layers sees one hidden state: chunks, groups, copies to main memory, ranks. On
the way down gradients of shared K, V, of per-layer inputs and of embeddings add up in the packed
gradient, so they are complete when the layer, or the embedding, that made these tensors runs its
backward.

Names of modules and arguments are those of Gemma 3n, Gemma 4 and Zamba in transformers 5.24.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

INPUT, SHARED = "per_layer_input", "shared_kv_states"  # arguments of a layer
CHOICE = "prev_topk_indices"  # the same: tokens that an earlier layer chose, [B, T, n] int32
EMBEDDING = "original_hidden_states"  # the same: layer 0's input
_PIECES = 4  # before shared K, V: hidden state, inputs of layers before, own input, of layers after


@dataclass(frozen=True, slots=True)
class Carried:
    """Layout of a packed tensor."""

    hidden: int  # elements of a hidden state
    streams: int  # hidden states of a token; 0: one, without a dimension for streams
    inputs: int  # elements of a layer's own input
    trains_inputs: bool  # else each call brings its input, and no packed tensor has it
    layers: int
    shared: tuple[tuple[str, int, int], ...]  # attention type, heads, head dim, of each shared K, V
    embedding: int = 0  # elements of the embedding, if layers read it
    choice: int = 0  # elements whose bytes are the tokens that a query chose
    streams_last: bool = False  # a token's streams lie side by side, not the tokens of a stream

    @property
    def width(self) -> int:
        """Number of elements of a token in a packed tensor."""
        return sum(self.sizes(0))

    @property
    def again(self) -> int:
        """Number of elements per token of layers' inputs that each call makes again; 0: none."""
        return 0 if self.trains_inputs else self.inputs * self.layers

    @property
    def _of_shared(self) -> list[int]:
        return [heads * dim for _, heads, dim in self.shared for _ in "kv"]

    def packed(self, hidden: Tensor, inputs: Iterable[Tensor]) -> Tensor:
        """Return layer 0's input as a packed tensor, with zeros where later layers put K, V."""
        flat = self.flat(hidden)
        blank = flat.new_zeros(()).expand(*flat.shape[:2], sum(self._of_shared) + self.choice)
        shared, choice = blank.split([sum(self._of_shared), self.choice], -1)
        embedding = [flat] if self.embedding else []
        return torch.cat([flat, *inputs, shared, *embedding, choice], -1)

    def sizes(self, layer: int) -> list[int]:
        """Return the number of elements of each piece into which a layer splits a packed tensor."""
        own = self.inputs * self.trains_inputs
        before, after = layer * own, (self.layers - 1 - layer) * own
        return [
            self.hidden * max(1, self.streams),
            before,
            own,
            after,
            *self._of_shared,
            self.embedding,
            self.choice,
        ]

    def flat(self, hidden: Tensor) -> Tensor:
        """Flatten hidden states of the layers' shape to [B, T, elements]."""
        if self.streams_last:
            return hidden.flatten(2)
        return hidden.permute(1, 2, 0, 3).flatten(2) if self.streams else hidden

    def hidden_states(self, packed: Tensor) -> Tensor:
        """Return the hidden states in a packed tensor, as the model's own code expects them."""
        first = self.sizes(0)[0]
        return self.apart(packed.split([first, packed.shape[-1] - first], -1)[0])

    def apart(self, flat: Tensor) -> Tensor:
        """Return a copy of flat hidden states as the layers expect them: [B, T, hidden] or, of
        several streams, [streams, B, T, hidden] or [B, T, streams, hidden]."""
        if self.streams_last:
            flat = flat.unflatten(2, (self.streams, self.hidden))
        elif self.streams:
            flat = flat.unflatten(2, (self.streams, self.hidden)).permute(2, 0, 1, 3)
        return flat.contiguous()

    def blank(self) -> dict[str, Any]:
        """Return attributes with which a copy of the decoder makes blank per-layer inputs, for a
        forward that serves only to record the layers' calls, or to run the modules above them."""

        def project(embeds: Tensor, *_: Any) -> Tensor:
            return embeds.new_ones(()).expand(*embeds.shape[:2], self.layers, self.inputs)

        if not self.inputs:
            return {}
        return {"get_per_layer_inputs": lambda *_: None, "project_per_layer_inputs": project}

    def blank_modules(self) -> dict[str, nn.Module]:
        """Return modules with which a copy of the decoder makes streams of blank embeddings."""
        same = nn.ModuleList([nn.Identity() for _ in range(1, self.streams)])
        return {"altup_projections": same} if self.streams and not self.streams_last else {}


@dataclass(frozen=True, slots=True)
class LayerCarry:
    """Pieces of a packed tensor that one layer reads and writes."""

    layout: Carried
    layer: int
    reads: str | None  # attention type of the shared K, V that the layer attends to
    writes: str | None  # of those that it makes
    embedding: bool = False  # reads the embedding
    follows: bool = False  # attends to the tokens that an earlier layer chose

    def run(self, layer: nn.Module, packed: Tensor, keywords: dict[str, Any]) -> Tensor:
        """Call the layer, and return its output as a packed tensor."""
        layout = self.layout
        pieces = list(packed.split(layout.sizes(self.layer), -1))
        shared: dict[str | int, tuple[Tensor, Tensor]] = {}
        if self.reads is not None:
            at, (_, heads, dim) = self._place(self.reads)
            k, v = (x.unflatten(2, (heads, dim)).transpose(1, 2) for x in pieces[at : at + 2])
            given = k.contiguous(), v.contiguous()
            # The key is the type of attention; in Gemma 3n of 5.20 the layer that made them.
            shared = defaultdict(lambda: given)
        if layout.embedding:
            keywords = {**keywords, EMBEDDING: pieces[-2].contiguous() if self.embedding else None}
        else:
            keywords = {**keywords, SHARED: shared}
        if layout.inputs:
            own = pieces[2] if layout.trains_inputs else keywords[INPUT]
            keywords[INPUT] = own.contiguous()  # a saved view would keep the inputs of all layers
        if self.follows:
            keywords[CHOICE] = pieces[-1].detach().contiguous().view(torch.int32)
        out = layer(layout.apart(pieces[0]), **keywords)
        if layout.choice:
            out, chosen = out
            pieces[-1] = pieces[-1] if self.follows else _as_elements(chosen, pieces[-1])
        pieces[0] = layout.flat(out)
        if self.writes is not None:
            at, _ = self._place(self.writes)
            (made,) = shared.values()
            pieces[at : at + 2] = (x.transpose(1, 2).flatten(2) for x in made)
        return torch.cat(pieces, -1)

    def _place(self, key: str) -> tuple[int, tuple[str, int, int]]:
        number = [name for name, _, _ in self.layout.shared].index(key)
        return _PIECES + 2 * number, self.layout.shared[number]


def _as_elements(chosen: Tensor, like: Tensor) -> Tensor:
    """Return int32 token indices, bit for bit, as elements of the shape and dtype of `like`."""
    places = like.shape[2] * like.element_size() // chosen.element_size()
    whole = nn.functional.pad(chosen, (0, places - chosen.shape[2]))
    return whole.view(like.dtype)


def carries_of(decoder: nn.Module, layers: nn.ModuleList) -> tuple[LayerCarry, ...]:
    """Return, for each layer, the pieces that it reads and writes besides the hidden state; empty
    if layers pass on nothing else."""
    config: Any = decoder.config
    shared: dict[str, tuple[str, int, int]] = {}
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    for module in attentions:
        if _shares(module, "is_kv_shared_layer"):
            heads = config.num_attention_heads // module.num_key_value_groups
            shared.setdefault(module.layer_type, (module.layer_type, heads, module.head_dim))
    inputs = config.hidden_size_per_layer_input if hasattr(decoder, _PROJECTION) else 0
    streams = config.altup_num_inputs if hasattr(decoder, "altup_projections") else 0
    hybrid = [any(hasattr(layer, name) for name in _HYBRID) for layer in layers]
    if last := hasattr(decoder, "hc_head"):
        streams = config.hc_mult
    choice = 0
    if any(getattr(module, "skip_topk", False) for module in attentions):
        choice = -(-4 * config.index_topk // decoder.dtype.itemsize)
    if not (shared or inputs or streams or choice or any(hybrid)):
        return ()
    makers = (child for name, child in decoder.named_children() if _MAKES_INPUTS.match(name))
    trains = inputs > 0 and any(p.requires_grad for m in makers for p in m.parameters())
    layout = Carried(
        config.hidden_size,
        streams,
        inputs,
        trains,
        len(layers),
        (*shared.values(),),
        embedding=config.hidden_size if any(hybrid) else 0,
        choice=choice,
        streams_last=last,
    )
    return tuple(
        LayerCarry(
            layout,
            index,
            module.layer_type if _shares(module, "is_kv_shared_layer") else None,
            module.layer_type
            if _shares(module, "store_full_length_kv") and module.layer_type in shared
            else None,
            hybrid[index],
            bool(getattr(module, "skip_topk", False)),
        )
        for index, module in enumerate(attentions)
    )


_HYBRID = "shared_transf", "shared_transformer"  # of Zamba's and Zamba 2's hybrid layers
_PROJECTION = "per_layer_model_projection"
_MAKES_INPUTS = re.compile("embed_tokens|per_layer_")


def _shares(module: Any, flag: str) -> bool:
    return getattr(module, flag, False) is True and hasattr(module, "layer_type")


def named_arguments(layer: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return a layer's positional arguments, after the hidden state, by their names."""
    names = [*signature(type(layer).forward).parameters][2:]
    return dict(zip(names, arguments, strict=False))
