"""Decoder layers as cells run them: the model's own, or in shells whose token-wise modules run on
tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from farspan.engine.linear import Adding
from farspan.hf.stages import CausalLMStages, LayerCall, run_layer
from farspan.hf.tiled_mlp import Add, Tokenwise, tiled
from farspan.parallel.tensor import TensorParallel
from farspan.plan.layout import Rank
from farspan.plan.program import Forward, Program
from farspan.plan.unread import Cell


@dataclass(frozen=True, slots=True)
class Layers:
    """The model's layers as they are."""

    boundary: CausalLMStages

    def run(self, i: Forward, hidden: Tensor, call: LayerCall) -> Tensor:
        """The layer of a cell on its chunk, [B, C, hidden] in and out."""
        return self.boundary.run_layer(i.layer, hidden, call)


@dataclass(frozen=True, slots=True)
class SparingLayers(Layers):
    """Layers that leave out their last product in cells whose output nobody reads."""

    adding: Adding
    unread: frozenset[Cell]  # outputs that only autograd asks for
    spared: frozenset[int]  # layers that may

    def run(self, i: Forward, hidden: Tensor, call: LayerCall) -> Tensor:
        self.adding.unread = i.layer in self.spared and (i.layer, i.chunk) in self.unread
        try:
            return self.boundary.run_layer(i.layer, hidden, call)
        finally:
            self.adding.unread = False


@dataclass(frozen=True, slots=True)
class CutLayers(Layers):
    """Layers whose weights are cut over ranks, each on its own tokens."""

    tensor: TensorParallel
    program: Program

    def run(self, i: Forward, hidden: Tensor, call: LayerCall) -> Tensor:
        rank, chunk = self.program.share.rank, self.program.chunks[i.chunk]
        peers = [Rank(rank.layout, number) for number in rank.peers("tensor")]
        counts = [stop - start for start, stop in (peer.tokens(chunk) for peer in peers)]
        if not any(counts):  # each runs a filler (engine.attending)
            counts = [1] * len(counts)
        shell = self.tensor.shell(i.layer, self.boundary.layers[i.layer], counts)
        return run_layer(shell, hidden, call)


@dataclass(frozen=True, slots=True)
class TiledLayers(Layers):
    """Layers in shells, for one step. A kept graph keeps all that autograd saves, which is what it
    is for: its layer runs as it is."""

    children: Sequence[Sequence[Tokenwise]]  # of each layer
    tokens: int
    unread: frozenset[Cell]  # outputs that only autograd asks for
    add: Add
    shells: dict[tuple[int, bool], nn.Module] = field(default_factory=dict)

    def run(self, i: Forward, hidden: Tensor, call: LayerCall) -> Tensor:
        if i.kept:
            return self.boundary.run_layer(i.layer, hidden, call)
        key = i.layer, not (i.graph and (i.layer, i.chunk) in self.unread)
        if key not in self.shells:
            layer = self.boundary.running[i.layer]
            children = self.children[i.layer]
            self.shells[key] = tiled(layer, children, self.tokens, self.add, value=key[1])
        return run_layer(self.shells[key], hidden, call)
