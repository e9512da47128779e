"""Attention as a probe answers it: densely, and with a note of what was asked."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.reference import reference
from farspan.spec import LayerSpec, Refused

# Keywords of an attention call that change no mathematics, or that farspan honours.
KNOWN = {
    "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
    "output_attentions", "output_router_logits", "output_hidden_states", "cache_position",
    "past_key_values", "logits_to_keep",
}  # fmt: skip


@dataclass(slots=True)
class Dense:
    """Answers attention calls densely, over the keys of the chunks seen so far, and notes them."""

    layer: int | None = None  # None: count layers by calls, while the model itself runs
    seen: dict[int, LayerSpec] = field(default_factory=dict)
    calls: int = 0
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        _check_keywords(module, keywords)
        layer = self.calls if self.layer is None else self.layer
        self.calls += 1
        window = keywords.get("sliding_window")
        sinks = keywords.get("s_aux")
        softcap = keywords.get("softcap")
        self.seen[layer] = LayerSpec(
            q.shape[1], k.shape[1], q.shape[3], v.shape[3], window, sinks is not None, softcap
        )
        if layer in self.past:
            before = self.past[layer]
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        self.past[layer] = k, v
        earlier = k.shape[2] - q.shape[2]
        # The reference takes whole sequences: rows before the chunk are computed and dropped.
        q = nn.functional.pad(q, (0, 0, earlier, 0))
        out = reference(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out[:, :, earlier:].transpose(1, 2)


def _check_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    name = type(module).__name__
    if keywords.get("is_causal") is False:
        raise Refused(f"model: {name} asks for attention to later tokens (is_causal=False)")
    if (keywords.get("dropout") or 0.0) > 0:
        raise Refused(
            f"model: {name} drops attention weights ({keywords['dropout']}), which cannot be "
            "repeated when a cell is recomputed; set its attention dropout to 0"
        )
    window = keywords.get("sliding_window")
    if window is not None and window < 1:
        raise Refused(
            f"model: {name} lets a token see {window} tokens; set its sliding_window to 1 or more, "
            "or to null for full attention"
        )
    for keyword, value in keywords.items():
        if keyword not in KNOWN and isinstance(value, Tensor | float | int) and value is not False:
            raise Refused(
                f"model: {name} passes {keyword!r} to attention, which farspan does not know how "
                "to honour exactly"
            )
