"""Seconds of what sparse attention does beside dense calls: votes, attention to chosen pages."""

from collections.abc import Callable
from dataclasses import dataclass

from farspan.plan.program import Program
from farspan.plan.reach import chosen_pages, sparse_of
from farspan.spec import LayerSpec, Rates

WIDE_PASSES = 4  # times that votes read or write their scores: product, softmax, sum


@dataclass(frozen=True, slots=True)
class SparsePrices:
    """Prices of one device's program. `moved` are the seconds of bytes that the device moves."""

    program: Program
    rates: Rates
    moved: Callable[[float], float]

    def votes(self, spec: LayerSpec, chunk: int) -> float:
        """A choice: a score a query, head and candidate page (OOMB 4.2)."""
        start, stop = self.program.chunks[chunk]
        sparse, run = sparse_of(self.program.schedule, spec), self.program.run
        assert sparse is not None
        scores = run.batch * spec.query_heads * (stop - start) * len(sparse.candidates(start))
        written = WIDE_PASSES * scores * self.program.model.accumulate_bytes()
        return self.rates.product(2.0 * scores * spec.head_dim) + self.moved(written)

    def chosen(self, spec: LayerSpec, chunk: int, *, backward: bool) -> float:
        """Attention to chosen pages, which are gathered; in the backward dK, dV go back."""
        start, stop = self.program.chunks[chunk]
        sparse, run = sparse_of(self.program.schedule, spec), self.program.run
        assert sparse is not None
        pairs = float((stop - start) * sparse.width(start) * sparse.page)
        if not pairs:
            return 0.0
        model = self.program.model
        rows = run.batch * chosen_pages(sparse, start, stop) * sparse.page * spec.kv_elements()
        width = 2 * model.element_bytes + backward * 3 * model.accumulate_bytes()
        seconds = self.rates.attention(pairs, spec, rows=float(run.batch), backward=backward)
        return seconds + self.moved(rows * width)
