"""Attention to some of the earlier keys only (sparse): the protocol by which the engine runs it.

A layer that has a `FarAttention` sees near keys, which stream block by block as in dense attention
(`FarRun.near` says which), and those of the other keys that its `FarAttention` chooses. A cell of
the engine calls, in this order:

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
    """Attention of one cell (layer, chunk) to near keys and to chosen far keys."""

    def begin(self, keys: Keys) -> None:
        """Prepare for `attend`: start fetching far keys that are already known to be needed."""

    def note(self, k: Tensor) -> None:
        """Record the chunk's own keys k [C, B, Hk, D], just written to the buffer of keys."""

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute sparse attention; return out and lse as `attention.chunk.attend` does."""

    def begin_backward(self, i: Backward, keys: Keys) -> None:
        """Prepare for `attend_backward`: start fetching the far keys chosen in the forward."""

    def attend_backward(
        self,
        call: AttentionCall,
        dout: Tensor,
        of_keys: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gradients as `attention.chunk.attend_backward` does; `of_keys` are q, k and v."""


class FarRun(Protocol[Keys]):
    """Maker of each cell's far attention, in one run of a program."""

    def cell(self, i: Forward) -> FarAttention[Keys] | None:
        """Return the far attention of a cell's forward; None if its layer's attention is dense."""

    def near(self, spec: LayerSpec, blocks: tuple[Block, ...], start: int) -> tuple[Block, ...]:
        """Return the blocks of the chunk at token `start` that have keys near the chunk."""

    @property
    def seen(self) -> Callable[[], "Seen"] | None:
        """Function that waits for the measured share of attention weight and returns it; None if no
        cell is measured."""


@dataclass(frozen=True, slots=True)
class Mass:
    """Share of dense attention's weight on the keys that a query sees: mean and minimum over
    sampled queries and all heads."""

    mean: float
    minimum: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Share of attention weight on the keys that far attention sees, measured in one cell."""

    layer: int
    chunk: int
    mass: Mass
