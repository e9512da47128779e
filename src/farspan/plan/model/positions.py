"""How far a model's positions reach, read from its configuration."""

from collections.abc import Iterator, Mapping
from typing import Any

from farspan.plan.model.fields import Fields
from farspan.spec import UnsupportedError

LONG_ROPE = "longrope"  # one of two tables, by the longest position of a sequence
# A chunk's table of these is the sequence's, sliced, once the sequence's longest position is known.
SLICEABLE_ROPE = ("default", "linear", "llama3", "yarn", "proportional", LONG_ROPE)
# transformers lets these begin at max_position_embeddings where they do not say.
STRETCHED_ROPE = ("llama3", "yarn", LONG_ROPE)


def longest(fields: Fields, default: int, kinds: tuple[str, ...], unsaid: Mapping[str, Any]) -> int:
    """Tokens that the configuration claims the positions reach: `max_position_embeddings`, or
    `default`, stretched by a scaled RoPE, or by `unsaid` where none is named. Raises
    UnsupportedError for a RoPE of another kind than `kinds`."""
    claimed = reach = fields.count("max_position_embeddings", default)
    for rope in _ropes(fields, unsaid):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in kinds:
            raise UnsupportedError(
                f"rope_parameters.rope_type: {kind!r} is not of this family, or its table depends "
                "on sequences seen before; expected one of "
                f"{', '.join(kinds)}"
            )
        begin = rope.get("original_max_position_embeddings")
        if begin is None and kind in STRETCHED_ROPE:
            begin = claimed
        factor = rope.get("factor")
        if begin and factor:
            reach = max(reach, int(begin * factor))
    return reach


def rotated(fields: Fields, head_dim: int, name: str, default: float) -> int | None:
    """The leading part of a head that is rotated; None where all of it is. Its share stands in
    the RoPE, or in the field `name` before transformers 5."""
    share = fields.positive(name, default)
    for rope in _ropes(fields, {}):
        share = rope.get("partial_rotary_factor", share)
    if not isinstance(share, int | float) or not head_dim * share >= 1 or share > 1:
        raise UnsupportedError(
            f"{name}: expected the share of a head of {head_dim} that is rotated, at most 1, got "
            f"{share!r}"
        )
    return int(head_dim * share) if share < 1 else None


def _ropes(fields: Fields, default: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One RoPE, or one for each type of layer. `rope_scaling` is its name before transformers 5."""
    found = fields.get("rope_scaling") or fields.get("rope_parameters") or default
    if not isinstance(found, Mapping):
        raise UnsupportedError(f"rope_parameters: expected a mapping, got {found!r}")
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    yield from nested or ([found] if found else [])
