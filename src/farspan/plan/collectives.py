"""What devices of a layout send each other, and how long it takes.

The communication model. A device sends `peer` bytes a second to devices of its own node and
`network` bytes a second to others; what crosses nodes and what does not go on at the same time, so
the slower of the two counts. Every collective costs `latency` on top. Bytes are those of facts 2.5:
a device of an all-to-all or all-gather over P keeps 1 / P and moves (P - 1) / P. Collectives inside
a cell stand in the way of its attention and are not overlapped, but for the ring's, which goes on
beside the attention; FSDP's are issued one layer ahead.
"""

from dataclasses import dataclass

from farspan.plan.program import AttentionMode
from farspan.plan.question import Question
from farspan.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds and bytes of one device's collectives."""

    question: Question

    def forward(self, spec: LayerSpec, tokens: int, mode: AttentionMode) -> float:
        """Of a forward cell, the ring's left out; `tokens` is the device's share of the chunk."""
        if mode is not AttentionMode.COMPUTE:
            return self._tensor(tokens, passes=2)
        seconds = self._ulysses(spec, tokens) + self._tensor(tokens, passes=4)
        query = spec.query_heads * spec.head_dim
        out = spec.output_elements()
        return seconds + self._shards(tokens, query * self._width() + out * self._wide())

    def backward(self, spec: LayerSpec, tokens: int) -> float:
        """Of a backward cell, the ring's left out."""
        seconds = self._ulysses(spec, tokens) + self._tensor(tokens, passes=5)
        width = self._width()
        query = spec.query_heads * spec.head_dim
        out = spec.output_elements()
        # q, O and dO are gathered, dQ comes back in the accumulate dtype.
        return seconds + self._shards(tokens, (query + 2 * out) * width + query * self._wide())

    def ring(self, spec: LayerSpec, stop: int, *, backward: bool) -> float:
        """K, V of the tokens before `stop`, all but the device's own, past every device; in the
        backward dK, dV with them. It goes on while the device attends to what it has."""
        layout = self.question.layout
        if layout.ring == 1:
            return 0.0
        width = self._width() + (self._wide() if backward else 0)
        prefix = stop // layout.sequence() * layout.ring
        size = self._batch() * prefix * spec.kv_elements() * width
        return self._over(layout.ring, size, layout.ulysses)

    def gather(self, elements: int) -> float:
        """All-gather of weights cut over the FSDP devices."""
        return self._cut(elements * self._width())

    def reduce(self, elements: int, element_bytes: int) -> float:
        """Reduce-scatter of their gradients."""
        return self._cut(elements * element_bytes)

    def replicas(self, elements: int, element_bytes: int) -> float:
        """All-reduce of gradients over data-parallel replicas, where FSDP does not do it."""
        layout = self.question.layout
        if layout.fsdp or layout.data == 1:
            return 0.0
        return 2 * self._over(layout.data, elements * element_bytes, layout.sequence())

    # -- one kind each ---------------------------------------------------------------------------

    def _ulysses(self, spec: LayerSpec, tokens: int) -> float:
        """q, k, v in as heads, the output back as tokens; in the backward their gradients."""
        ranks = self.question.layout.ulysses
        elements = spec.query_heads * spec.head_dim + spec.kv_elements() + spec.output_elements()
        size = self._batch() * tokens * elements * self._width()
        # Two collectives: q, k, v fused into one, and the output.
        return self._over(ranks, size, 1) + (self.question.machine.latency if ranks > 1 else 0.0)

    def _shards(self, tokens: int, row: int) -> float:
        """Queries gathered and partial results scattered among the shards of a chunk."""
        layout = self.question.layout
        if layout.shards == 1:
            return 0.0
        size = self._batch() * tokens * row * layout.shards
        return self._over(layout.shards, size, layout.ulysses)

    def _tensor(self, tokens: int, passes: int) -> float:
        """All-gathers and reduce-scatters of the chunk around attention and MLP."""
        layout = self.question.layout
        if layout.tensor == 1:
            return 0.0
        size = self._batch() * tokens * layout.tensor * self.question.model.hidden * self._width()
        return passes * self._over(layout.tensor, size, 1)

    def _cut(self, size: float) -> float:
        layout = self.question.layout
        return self._over(fsdp_ranks(self.question), size, 1, same=True) if layout.fsdp else 0.0

    def _over(self, ranks: int, size: float, stride: int, *, same: bool = False) -> float:
        """`size` bytes, of which each device keeps 1 / ranks; the ranks lie `stride` apart. Where
        all of a node get the `same` bytes, each brings its part of them into the node."""
        if ranks == 1:
            return 0.0
        machine = self.question.machine
        inside = max(1, min(ranks, machine.devices // stride))
        away = (ranks - inside) / ranks * size / machine.network if ranks > inside else 0.0
        away /= inside if same else 1
        near = (inside - 1) / ranks * size / machine.peer if inside > 1 else 0.0
        return machine.latency + max(away, near)

    def _batch(self) -> int:
        return self.question.run.batch

    def _width(self) -> int:
        return self.question.model.element_bytes

    def _wide(self) -> int:
        return self.question.model.accumulate_bytes()


def fsdp_ranks(question: Question) -> int:
    """Devices that weights, gradients and optimizer states are cut over."""
    layout = question.layout
    if not layout.fsdp:
        return 1
    return layout.devices() // (layout.pipeline * layout.tensor)
