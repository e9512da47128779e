"""Attention that does not see every key: the protocol by which the engine runs it.

A layer that has a `FarAttention` sees near keys, which stream block by block as in dense attention
(`FarRun.near` says which), and of the others those that its `FarAttention` finds. A cell of the
engine calls, in this order:

    forward     begin, note, attend
    backward    begin_backward, attend_backward

`farspan.sparse` implements it by pages of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from farspan.attention.chunk import AttentionCall, KeyValues
from farspan.program.attention_blocks import Block
from farspan.program.program import Backward, Forward
from farspan.spec import LayerSpec

Keys = TypeVar("Keys", bound=KeyValues, contravariant=True)  # how the engine holds earlier keys
GivenSelector = Callable[..., Tensor]  # a user's, which chooses the far keys


class FarAttention(Protocol[Keys]):
    """The attention of one cell (layer, chunk) to near keys and selected far keys."""

    def begin(self, keys: Keys) -> None:
        """Prepare for `attend`: begin to fetch the far keys that are known to be needed."""

    def note(self, k: Tensor) -> None:
        """Record the chunk's own keys k [C, B, Hk, D], which were just written to their buffer."""

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse as `attention.chunk.attend` does."""

    def begin_backward(self, i: Backward, keys: Keys) -> None:
        """Prepare for `attend_backward`, as `begin` does."""

    def attend_backward(
        self,
        call: AttentionCall,
        dout: Tensor,
        of_keys: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gradients as `attention.chunk.attend_backward` does; `of_keys`: q, k, v."""


class FarRun(Protocol[Keys]):
    """Creates the far attention of each cell in one run of a program."""

    def cell(self, i: Forward) -> FarAttention[Keys] | None:
        """Return the far attention of a forward cell; None if its layer sees every key."""

    def near(self, spec: LayerSpec, blocks: tuple[Block, ...], start: int) -> tuple[Block, ...]:
        """Return the blocks with near keys, among all those of the chunk at token `start`."""

    @property
    def seen(self) -> Callable[[], "Seen"] | None:
        """A function that waits for the measured attention mass; None if none was measured."""


@dataclass(frozen=True, slots=True)
class Mass:
    """Shares of dense attention's mass that sampled queries see, over all heads; 1: all mass."""

    mean: float
    minimum: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The attention mass that one measured cell sees with far attention."""

    layer: int
    chunk: int
    mass: Mass
