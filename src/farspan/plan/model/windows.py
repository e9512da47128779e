"""Which layers see a window only: what each family makes of the configuration's fields.

Each function takes the fields, the number of layers and the default of `sliding_window`, and gives
the window of each layer, None where it sees everything (transformers 5.23).
"""

from collections.abc import Callable

from farspan.plan.model.fields import Fields
from farspan.spec import UnsupportedError

LAYER_TYPES = ("full_attention", "sliding_attention")
LAYERS_BELOW = 28  # Qwen's default of `max_window_layers`

Windows = tuple[int | None, ...]
Pattern = Callable[[Fields, int, int | None], Windows]


def nowhere(_: Fields, layers: int, __: int | None) -> Windows:
    return (None,) * layers


def everywhere(fields: Fields, layers: int, default: int | None) -> Windows:
    return (_window(fields, default),) * layers


def switched(fields: Fields, layers: int, default: int | None) -> Windows:
    """Everywhere, where `use_sliding_window` says so (Qwen3-MoE)."""
    return (_used_window(fields, default),) * layers


def alternating(fields: Fields, layers: int, default: int | None) -> Windows:
    """In the first layer and every other one after it (Gemma2, GPT-OSS)."""
    slides = [index % 2 == 0 for index in range(layers)]
    return _of_types(fields, slides, _window(fields, default))


def from_layer(fields: Fields, layers: int, default: int | None) -> Windows:
    """From layer `max_window_layers` on, where `use_sliding_window` says so (Qwen2, Qwen3)."""
    used = _used_window(fields, default)
    first = fields.number("max_window_layers", LAYERS_BELOW)
    return _of_types(fields, [used is not None and i >= first for i in range(layers)], used)


def below_layer(fields: Fields, layers: int, default: int | None) -> Windows:
    """Every other layer below `max_window_layers`, where `use_sliding_window` says so
    (Qwen2-MoE)."""
    used = _used_window(fields, default)
    end = fields.number("max_window_layers", LAYERS_BELOW)
    slides = [used is not None and i % 2 == 0 and i < end for i in range(layers)]
    return _of_types(fields, slides, used)


def _window(fields: Fields, default: int | None) -> int | None:
    if fields.get("sliding_window", default) is None:
        return None
    return fields.count("sliding_window", default)


def _used_window(fields: Fields, default: int | None) -> int | None:
    """Qwen2-MoE writes 0 where its window is not used, so that is when it is read."""
    return _window(fields, default) if fields.flag("use_sliding_window", False) else None


def _of_types(fields: Fields, slides: list[bool], window: int | None) -> Windows:
    """`layer_types` has the last word; `slides` is what the family does without it."""
    types = fields.get("layer_types")
    if types is not None:
        slides = _named(types, len(slides))
    if any(slides) and window is None:
        raise UnsupportedError(
            "sliding_window: layers with sliding_attention need a number of tokens, got none; set "
            "sliding_window (and use_sliding_window: true where the model has that field)"
        )
    return tuple(window if slide else None for slide in slides)


def _named(types: object, layers: int) -> list[bool]:
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise UnsupportedError(
            f"layer_types: expected a list of {layers} names, one a layer, got {types!r}"
        )
    for name in types:
        if name not in LAYER_TYPES:
            raise UnsupportedError(
                f"layer_types: expected {' or '.join(LAYER_TYPES)}, got {name!r}, a kind of layer "
                "that planning does not know"
            )
    return [name == "sliding_attention" for name in types]
