"""What a rank updates of a model that is dealt over ranks: its own part of each weight, as a plain
parameter that shares the weight's memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farspan.distributed.fsdp import (
    ShardPlacement,
    Stage,
    gradient_dtype,
    local,
    placement_along,
    square_norm,
)
from farspan.distributed.tensor_plan import ParameterCut
from farspan.engine.parallelize import WHOLE, ShardedModel
from farspan.plan.layout import AXES, part
from farspan.train.optimizer_parts import Parameters


@dataclass(frozen=True, slots=True)
class Pieces:
    """AdamW is elementwise: what all ranks make of their pieces is what one makes of the whole.

    Invariant: a piece's `.grad`, where it has one, is the piece of the weight's.
    """

    dealt: ShardedModel
    trained: Parameters  # by the names of the model; no weights of other pipeline stages
    pieces: Parameters  # the frozen ones too
    places: dict[str, ShardPlacement]  # of the pieces, in the whole
    counted: frozenset[str]  # those whose gradient this rank counts: of several that hold it, one

    def take(self) -> None:
        """Gradients of the weights become those of the pieces."""
        for name, own in self.dealt.sharded.parameters().items():
            piece = self.pieces[name]
            if piece is not own:
                piece.grad = None if own.grad is None else local(own.grad)

    def clear(self) -> None:
        """Drops all gradients."""
        for name, own in self.dealt.sharded.parameters().items():
            own.grad = self.pieces[name].grad = None

    def widen(self) -> None:
        """Weights take gradients in the dtype in which their pieces do."""
        for name, own in self.dealt.sharded.parameters().items():
            wanted = gradient_dtype(self.pieces[name])
            if wanted != gradient_dtype(own):
                own.grad_dtype = wanted

    def norm(self) -> Tensor:
        """L2 norm of the gradient of the whole model, the same bits on every rank; fp32, or float64
        of a float64 model."""
        ranks = self.dealt.ranks
        gradients = [p.grad for n, p in self.trained.items() if n in self.counted]
        square = square_norm((g for g in gradients if g is not None), ranks.device)
        peers = ranks.among(*AXES)
        total = peers.gather(square[None], [1] * peers.size).sum()  # in the order of ranks
        wide = torch.float64 if self.dealt.dtype == torch.float64 else torch.float32
        return total.sqrt().to(wide)

    def held_bytes(self) -> int:
        """Of this rank's weights between steps."""
        return sum(piece.nbytes for piece in self.pieces.values())


def pieces_of(dealt: ShardedModel) -> Pieces:
    sharded = dealt.sharded
    pieces = {name: _piece(own) for name, own in sharded.parameters().items()}
    trained = {name: piece for name, piece in pieces.items() if piece.requires_grad}
    outer = sharded.whole(sharded.outer).keys()
    counted = frozenset(name for name in trained if _counts(dealt, name, outer=name in outer))
    return Pieces(dealt, trained, pieces, sharded.places(_slices(dealt)), counted)


def _piece(own: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(own), own.requires_grad) if isinstance(own, DTensor) else own


def _counts(dealt: ShardedModel, name: str, *, outer: bool) -> bool:
    tensor = dealt.tensor
    if tensor is not None and not tensor.is_cut(name) and tensor.peers.index > 0:
        return False
    holders = dealt.ranks.among(*WHOLE, *("pipeline",) * outer)
    return dealt.sharded.stage is not Stage.ZERO_0 or holders.index == 0


def _slices(dealt: ShardedModel) -> dict[str, ShardPlacement]:
    """Where this rank's slices of the weights that are cut over `tensor` lie."""
    tensor = dealt.tensor
    if tensor is None:
        return {}

    def place(cut: ParameterCut) -> ShardPlacement:
        ranges, start = [], 0
        for size in cut.parts:
            ranges.append(part((start, start + size), tensor.peers.index, tensor.peers.size))
            start += size
        return placement_along(cut.shape, cut.dim, ranges)

    return {name: place(cut) for name, cut in tensor.plan.cuts.items()}


def first_of_stage(dealt: ShardedModel) -> bool:
    """Whether this rank is the one that speaks for its pipeline stage."""
    return all(i == 0 for axis, i in dealt.ranks.rank.along.items() if axis != "pipeline")


def gather_wholes(dealt: ShardedModel, keep: Callable[[str, Tensor], None]) -> None:
    """Every weight of this rank's pipeline stage whole, one unit on the device at a time; all ranks
    call it. `keep` is called on the stage's first rank alone."""
    speaks = first_of_stage(dealt)
    for name, own in dealt.sharded.wholes():
        whole = own if dealt.tensor is None else dealt.tensor.whole(name, own)
        if speaks:
            keep(name, whole)
