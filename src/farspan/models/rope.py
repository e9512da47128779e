"""RoPE whose table depends on the longest position of a batch, chosen once for all chunks."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from farspan.plan.model.positions import LONG_ROPE
from farspan.spec import Refused


def rope_types(config: PretrainedConfig) -> list[str]:
    """The kinds of RoPE a model uses: one, or one for each type of layer."""
    return [str(rope.get("rope_type", rope.get("type", "default"))) for rope in ropes(config)]


def ropes(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The parameters of each of them."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or ([parameters] if parameters else [])


def chooses_by_length(config: PretrainedConfig) -> bool:
    """Whether tables depend on the longest position of a sequence, and on nothing before it."""
    return LONG_ROPE in rope_types(config)


def settled(decoder: nn.Module, longest: int, device: torch.device) -> dict[str, nn.Module]:
    """The decoder's children with such tables, as they are for a sequence of `longest` positions:
    of a chunk they give that part of the sequence's table. They share nothing with the decoder's
    own. Raises Refused where a table is chosen in another way."""
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
    twin: Any = copy.copy(rope)
    # A forward fills a buffer anew in one release of transformers and replaces it in another.
    buffers = {name: b if b is None else b.clone() for name, b in rope._buffers.items()}
    twin.__dict__["_buffers"] = buffers
    blank = torch.zeros((), device=device)
    ends = torch.tensor([[min(1, longest - 1), longest - 1]], device=device)
    whole = twin(blank, ends)
    twin.rope_type = "default"  # the frequencies stay as this call has set them
    part = twin(blank, ends[:, :1])
    if not all(torch.equal(p, w[:, :1]) for p, w in zip(part, whole, strict=True)):
        raise _not_honoured(rope)
    return twin


def _not_honoured(module: nn.Module) -> Refused:
    return Refused(
        f"rope_parameters.rope_type: {type(module).__name__} has a way of its own to choose the "
        f"table of {LONG_ROPE!r} by the longest position, so a chunk's is not a part of the "
        "sequence's; expected one rotary embedding beside the layers whose frequencies alone "
        "depend on it (yarn extends the context and is exact)"
    )
