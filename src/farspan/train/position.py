"""How far a run has come, and the tensors that say so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from farspan.spec import Refused
from farspan.train.checkpoint import Restored


@dataclass(frozen=True, slots=True)
class Position:
    """How far the run has come; with the seed it decides every batch that follows."""

    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # read in them
    skipped: int = 0


def position_of(restored: Restored) -> Position:
    """Where a checkpoint stands. Raises Refused when it does not say."""
    given: Any = restored.state.get("position")
    whole = isinstance(given, dict) and given.keys() == {"step", "tokens", "skipped"}
    if not whole or any(not isinstance(value, int) for value in given.values()):
        raise Refused(
            f"{restored.path / 'state.json'}: position: expected step, tokens and skipped, got "
            f"{given!r}; move this folder away"
        )
    return Position(**given)


def model_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters that are trained, each under its first name, and the buffers that belong to the
    weights. Frozen ones come from where the run has them."""
    kept = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return {
        **{name: p.detach() for name, p in model.named_parameters() if p.requires_grad},
        **buffers,
    }
