"""What a model costs, as a value: measured once by the engine's own cells on the meta device
(`farspan.engine.profile`), read by planning, which has no torch.

A quantity is a line in the tokens of a cell, or several of which the highest counts. What attention
itself holds depends on the blocks of keys that a chunk sees, so it is left out here and added where
these are known (`farspan.profile.cells`): before it begins a cell holds `at`, and what follows
is counted without O and LSE.
"""

from dataclasses import dataclass
from math import ceil

from farspan.spec import ModelSpec

Line = tuple[float, ...]  # bytes: constant, then for a token of every length that it depends on
Peak = tuple[Line, ...]  # moments of which any may be the fullest


def at(line: Line, *tokens: int) -> int:
    """Bytes for so many tokens of each length; those of a chunk are of all its sequences."""
    constant, *slopes = line
    return ceil(constant + sum(a * b for a, b in zip(slopes, tokens, strict=True)) - 1e-6)


def highest(peak: Peak, *tokens: int) -> int:
    """Bytes at the fullest of these moments, 0 of none."""
    return max((at(line, *tokens) for line in peak), default=0)


@dataclass(frozen=True, slots=True)
class Variant:
    """In what way a model is trained, as far as its cells know it."""

    dtype: str = "bfloat16"  # as torch names it
    # Of LoRA on every linear module of the layers; 0: all is trained; None: the model has others.
    rank: int | None = 0
    fused: bool = False  # norms, gates, rotations and the loss by farspan's own kernels
    adds: bool = False  # products add weight gradients to their sums
    tiled: bool = False  # token-wise modules may run on tiles, too
    nf4: bool = False  # frozen weights of linear modules have four bits

    def key(self) -> str:
        """A name for it."""
        words = [self.dtype, *[f"lora{self.rank}"] * bool(self.rank)]
        words += [name for name in ("fused", "adds", "tiled", "nf4") if getattr(self, name)]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class CellLines:
    """One way in which a layer's cell runs. Lines are in tokens, and where its token-wise modules
    run on tiles in those of a tile, too; a backward's count what the graph holds."""

    asked: Peak  # until attention is asked for, at which a pass for K, V stops
    before: Peak  # until kernels attend
    at: Line  # when they do
    after: Peak  # from then on, O and LSE left out
    graph: Line  # what the graph holds, O, LSE and the layer's input left out
    saves_input: bool  # does it hold that input?
    backward_before: Peak
    backward_at: Line
    backward_after: Peak
    weight_gradients: int = 0  # alive together when autograd returns
    sums: int = 0  # of weight gradients, made while autograd runs


@dataclass(frozen=True, slots=True)
class KindProfile:
    """Layers that are made and called alike."""

    weights: tuple[int, ...]  # elements of each trained tensor
    heads_first: bool  # how queries lie in memory: kernels lay out O as they
    cells: dict[str, CellLines]  # by `form`


def form(
    *,
    graph: bool,
    kept: bool = False,
    fresh: bool = False,
    unread: bool = False,
    tiled: bool = False,
) -> str:
    """The name of a way to run a cell: with a graph, one that outlives its chunk, with sums of
    weight gradients that begin in its backward, without the product that nobody reads, and with
    token-wise modules on tiles."""
    if not graph:
        return "plain tiled" if tiled else "plain"
    words = ["kept" if kept else "graph", *["fresh"] * fresh, *["unread"] * (unread and not kept)]
    return " ".join([*words, *["tiled"] * tiled])


@dataclass(frozen=True, slots=True)
class OuterProfile:
    """What lies outside the layers. The head's lines are in tokens of a chunk and of a piece."""

    weights: tuple[int, ...]  # elements of each trained tensor
    by_head: tuple[bool, ...]  # does the head begin their sums, or the embedding's backward?
    embed: Peak
    tables: Line  # what layers are handed beside their input
    tables_peak: Peak
    head: Peak  # where the sums exist
    head_fresh: Peak
    head_once: Peak  # of a chunk that is one piece, in its tokens
    head_once_fresh: Peak
    evaluation: Peak
    embed_backward: Peak
    embed_backward_fresh: Peak


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """A model in one dtype, trained in one way, on one choice of kernels. There is one of each, and
    it is told from others as an object."""

    spec: ModelSpec
    kinds: tuple[KindProfile, ...]
    kind_of: tuple[int, ...]  # of every layer
    outer: OuterProfile
    variant: Variant
    longest: int | None = None  # tokens the positions reach, where they are bounded
    learned_positions: bool = False  # they are embedded: there are no more
