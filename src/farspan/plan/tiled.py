"""Which cells run their token-wise modules on tiles, and how often a feed-forward runs."""

from dataclasses import dataclass, field
from fractions import Fraction

from farspan.plan.program import AttentionMode, Backward, Forward, Program
from farspan.plan.unread import Cell, unread_outputs


@dataclass(slots=True)
class TiledCells:
    """The cells of a program by how their feed-forwards run (see `models.tiles`)."""

    program: Program
    tile: int | None = field(init=False)  # tokens
    unread: frozenset[Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.tile = self.program.schedule.mlp_tokens
        self.unread = frozenset() if self.tile is None else unread_outputs(self.program)

    def sizes(self, i: Forward | Backward) -> tuple[int, ...]:
        """Tokens of each tile of a cell; of one that runs whole, its chunk's."""
        tokens = self._tokens(i)
        if not self.has_tiles(i):
            return (tokens,)
        assert self.tile is not None
        full, rest = divmod(tokens, self.tile)
        return (self.tile,) * full + (rest,) * bool(rest)

    def has_tiles(self, i: Forward | Backward) -> bool:
        """Its chunk is longer than a tile, and its graph is not kept."""
        kept = i.kept if isinstance(i, Forward) else i.activations is not None
        return self.tile is not None and not kept and self._tokens(i) > self.tile

    def _tokens(self, i: Forward | Backward) -> int:
        start, stop = self.program.share.tokens.rows[i.chunk]
        return stop - start

    def skips(self, i: Forward) -> bool:
        """The feed-forward is left out: only the backward, which recomputes it, needs it."""
        skippable = self.program.model.layers[i.layer].work.skippable
        built = i.graph and (i.layer, i.chunk) in self.unread
        return built and skippable and self.has_tiles(i)


def feed_forward_passes(program: Program) -> Fraction:
    """Times that the tokens of a step run forward through the layers' feed-forwards, tiles that a
    backward recomputes included."""
    cells, done = TiledCells(program), 0
    for i in program.instructions:
        match i:
            case Forward():
                runs = i.mode is not AttentionMode.NONE and not cells.skips(i)
            case Backward():
                runs = cells.has_tiles(i)
            case _:
                continue
        start, stop = program.chunks[i.chunk]
        done += runs * (stop - start)
    return Fraction(done, len(program.model.layers) * program.run.tokens)
