"""Seconds of products of cells whose token-wise modules run on tiles."""

from collections.abc import Callable
from dataclasses import dataclass, field

from farspan.plan.program import Backward, Forward, Program
from farspan.plan.tiled import TiledCells


@dataclass(slots=True)
class TiledPrices:
    """What a feed-forward costs, with tiles or without."""

    program: Program
    products: Callable[[tuple[tuple[int, int], ...], int], float]  # seconds, for so many tokens
    moved: Callable[[float], float]  # seconds of these bytes
    traffic: int  # bytes that an element of a weight's gradient moves on its way to the sum
    cells: TiledCells = field(init=False)

    def __post_init__(self) -> None:
        self.cells = TiledCells(self.program)

    def forward(self, i: Forward) -> float:
        """Of a layer's products, those that a cell computes."""
        work, tokens = self.program.model.layers[i.layer].work, self._tokens(i)
        if not self.cells.has_tiles(i):
            return self.products(work.products, tokens)
        cut = len(work.products) - work.feed_forward
        seconds = self.products(work.products[:cut], tokens)
        return seconds if self.cells.skips(i) else seconds + self._feed_forward(i)

    def again(self, i: Backward) -> float:
        """What tiles add to a backward: the token-wise modules' forward, and another pass over the
        sums of their weights' gradients for each tile but one. All that the layer moves counts for
        theirs: rotations and residual sums are a sixth of it and are not recomputed."""
        if not self.cells.has_tiles(i):
            return 0.0
        work, rows = self.program.model.layers[i.layer].work, self.program.run.batch
        others = work.products[: len(work.products) - work.feed_forward]
        elements = max(0, work.parameters - sum(inner * outer for inner, outer in others))
        trained = work.trainable / work.parameters if work.parameters else 1.0
        passes = len(self.cells.sizes(i)) - 1
        moved = float(work.forward_traffic * self._tokens(i) * rows)
        moved += passes * trained * elements * self.traffic
        return self._feed_forward(i) + self.moved(moved)

    def _feed_forward(self, i: Forward | Backward) -> float:
        """Forward, tile by tile."""
        work = self.program.model.layers[i.layer].work
        products = work.products[len(work.products) - work.feed_forward :]
        return sum(self.products(products, tokens) for tokens in self.cells.sizes(i))

    def _tokens(self, i: Forward | Backward) -> int:
        start, stop = self.program.share.tokens.rows[i.chunk]
        return stop - start
