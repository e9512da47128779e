"""Messages between the devices of a layout: their bytes and their seconds.

The communication model. A device sends `peer` bytes a second to devices of its own node and
`network` bytes a second to others; traffic inside and between nodes overlaps, so the slower of the
two counts. Ranks lie in the order tensor, ulysses, shards, ring, data, pipeline: neighbours in the
first are neighbours in a node. Every collective costs `latency` on top, however many devices take
part. In an all-to-all or all-gather over P devices each keeps 1 / P of the bytes and moves the
rest. Collectives inside a cell delay its attention, except for the ring's, which overlap with it,
and for heads that are exchanged in pieces (program/work.py); FSDP's are issued one layer ahead.

Where the tensors live decides who sends what. Ulysses keeps K, V, dK, dV, O and LSE by heads and
everything else by tokens; shards keep K, V of a chunk where they are and send queries to them; a
ring sends K, V of the whole prefix; tensor parallelism gathers the chunk's tokens before each
product whose weights are cut by columns and scatters sums after the next (sequence parallelism,
Korthikanti et al. 2022, 4.2.2). `exchange_bytes` is the memory of messages in flight.
"""

from dataclasses import dataclass

from farspan.planner.request import Question
from farspan.program.layout import CHUNKS_UNDER_WAY
from farspan.program.program import AttentionMode
from farspan.program.work import exposed
from farspan.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds that one device of the layout spends in its collectives."""

    question: Question

    def forward(
        self, spec: LayerSpec, tokens: int, mode: AttentionMode, pieces: int = 1, work: float = 0.0
    ) -> float:
        """Seconds of all collectives in a cell's forward except ring attention's. `tokens` is the
        device's share of the chunk. If Ulysses exchanges heads in several `pieces` during `work`
        seconds of attention, only the seconds that attention does not hide count."""
        query, kv, out = _elements(spec)
        if mode is AttentionMode.NONE:
            # Only K, V are computed, from gathered tokens, and become heads.
            return self._ulysses(tokens, kv) + self._tensor(tokens, passes=1)
        tensor = self._tensor(tokens, passes=4)
        if mode is not AttentionMode.COMPUTE:
            # O comes back as tokens; K, V of a rebuild or q of a backward become heads.
            return self._ulysses(tokens, max(query, kv), out) + tensor
        indexed = _indexed_bytes(spec, self.question) // self._width()
        heads = self._exchange(tokens, query + kv + indexed, out, pieces, work)
        return heads + self._shards_forward(spec, tokens) + tensor

    def backward(self, spec: LayerSpec, tokens: int, pieces: int = 1, work: float = 0.0) -> float:
        """Return the seconds of all collectives in a cell's backward except ring attention's."""
        query, kv, out = _elements(spec)
        # The two inputs gathered again for weight gradients travel while a product runs.
        heads = self._exchange(tokens, out, query + kv, pieces, work)
        return heads + self._tensor(tokens, passes=4) + self._shards_backward(spec, tokens)

    def ring(self, spec: LayerSpec, stop: int, *, backward: bool) -> float:
        """Return the seconds of passing K, V of the tokens before `stop` around the ring while
        attention runs. The device's own part is not sent; the backward passes dK, dV too."""
        layout = self.question.layout
        if layout.ring == 1:
            return 0.0
        width = self._width() + (self._wide() if backward else 0)
        prefix = stop // layout.sequence() * layout.ring
        size = self._batch() * prefix * spec.kv_elements() * width
        # Every step waits for the slowest hop, which crosses nodes as soon as the ring does.
        machine = self.question.machine
        stride = layout.tensor * layout.ulysses * layout.shards
        rate = machine.peer if layout.ring * stride <= machine.devices else machine.network
        return machine.latency + (layout.ring - 1) / layout.ring * size / rate

    def gather(self, elements: int) -> float:
        """Return the seconds of the all-gather of weights that the FSDP devices share."""
        return self._cut(elements * self._width())

    def reduce(self, elements: int, element_bytes: int) -> float:
        """Return the seconds of the reduce-scatter of gradients over the FSDP devices."""
        return self._cut(elements * element_bytes)

    def boundary(self, tokens: int) -> float:
        """Seconds of sending a chunk's hidden states to the next pipeline stage, or their gradient
        back. `tokens` is the device's share. A stage that fills a node sends to another node."""
        layout, machine = self.question.layout, self.question.machine
        if layout.pipeline == 1:
            return 0.0
        is_near = layout.sequence() * 2 <= machine.devices
        rate = machine.peer if is_near else machine.network
        size = self._batch() * tokens * self.question.model.passed() * self._width()
        return machine.latency + size / rate

    def replicas(self, elements: int, element_bytes: int) -> float:
        """Return the seconds of the all-reduce of gradients over devices with equal weights; 0 with
        FSDP, whose reduce-scatter already adds these gradients."""
        layout = self.question.layout
        if layout.fsdp:
            return 0.0
        size, ranks = elements * element_bytes / layout.tensor, layout.sequence() * layout.data
        return 2 * self._over(ranks // layout.tensor, size, layout.tensor, same=True)

    # -- one kind each ---------------------------------------------------------------------------

    def _exchange(self, tokens: int, into: int, out: int, pieces: int, work: float) -> float:
        """Seconds of the all-to-alls around attention that attention does not hide. `into` and
        `out`: elements per token that are exchanged before and after attention."""
        if self.question.layout.ulysses == 1:
            return 0.0
        later = (pieces - 1) * self.question.machine.latency  # each piece has its own latency
        before, after = (self._ulysses(tokens, elements) + later for elements in (into, out))
        return exposed(before, work, after, pieces)

    def _ulysses(self, tokens: int, *elements: int) -> float:
        """Seconds of Ulysses' all-to-alls, one for each entry of `elements` (elements per token).
        Each exchanges all heads of some tokens for some heads of all tokens, or back."""
        ranks, row = self.question.layout.ulysses, self._batch() * tokens * self._width()
        stride = self.question.layout.tensor
        return sum(self._over(ranks, row * count, stride) for count in elements)

    def _shards_forward(self, spec: LayerSpec, tokens: int) -> float:
        """Seconds of sending q to the shards of K, V and outputs back (accumulate dtype)."""
        query, _, out = _elements(spec)
        return self._shards(tokens, query * self._width(), out * self._wide())

    def _shards_backward(self, spec: LayerSpec, tokens: int) -> float:
        """Seconds of sending q, O, dO to the shards of K, V and dQ back (accumulate dtype)."""
        query, _, out = _elements(spec)
        return self._shards(tokens, (query + 2 * out) * self._width(), query * self._wide())

    def _shards(self, tokens: int, *rows: int) -> float:
        """Seconds of collectives over the shards, one for each of `rows`, its bytes per token."""
        layout = self.question.layout
        size = self._batch() * tokens * layout.shards
        stride = layout.tensor * layout.ulysses
        return sum(self._over(layout.shards, size * row, stride) for row in rows)

    def _tensor(self, tokens: int, passes: int) -> float:
        """Seconds of tensor parallelism's all-gathers and reduce-scatters around attention and MLP.
        Across nodes each rank is counted as receiving its own copy of the data over the network."""
        layout = self.question.layout
        if layout.tensor == 1:
            return 0.0
        # FPDT's runs took that long (Table 3), three times as long as a ring of NCCL took in MEMO's
        # (120.4 s, section 5.2).
        size = self._batch() * tokens * layout.tensor * self.question.model.hidden * self._width()
        return passes * self._over(layout.tensor, size, 1)

    def _cut(self, size: float) -> float:
        layout = self.question.layout
        if not layout.fsdp:
            return 0.0
        return self._over(fsdp_ranks(self.question), size / layout.tensor, layout.tensor, same=True)

    def _over(self, ranks: int, size: float, stride: int, *, same: bool = False) -> float:
        """Return the seconds of a collective over `ranks` devices, `stride` ranks apart. It moves
        `size` bytes; each device keeps 1 / ranks of them. With `same`, all devices of a node need
        the same bytes, so each receives only its part from other nodes."""
        if ranks == 1:
            return 0.0
        machine = self.question.machine
        inside = max(1, min(ranks, machine.devices // stride))
        away = (ranks - inside) / ranks * size / machine.network if ranks > inside else 0.0
        away /= inside if same else 1
        # Parts that other ranks brought into the node come from those ranks.
        near = (inside - 1) / (inside if same else ranks) * size / machine.peer
        return machine.latency + max(away, near)

    def _batch(self) -> int:
        return self.question.run.batch

    def _width(self) -> int:
        return self.question.model.element_bytes

    def _wide(self) -> int:
        return self.question.model.accumulate_bytes()


def _elements(spec: LayerSpec) -> tuple[int, int, int]:
    """Return the elements per token of q, of K and V together, and of O."""
    return spec.query_heads * spec.head_dim, spec.kv_elements(), spec.output_elements()


def _indexed_bytes(spec: LayerSpec, question: Question) -> int:
    """Return the bytes per token of index keys and choices, of which each rank gets a copy."""
    if spec.indexer is None or question.layout.ulysses == 1:
        return 0
    key = spec.indexer.dim * question.model.element_bytes
    return question.layout.ulysses * (key + 4 * spec.indexer.tokens)


def exchange_bytes(question: Question, chunk: int) -> int:
    """Return the most device bytes that messages between devices take, outside the program's
    buffers. `chunk` is the device's share of a chunk, in tokens. The sum is over kinds of messages,
    each at its own peak:

    - Ulysses: q, K, V and O, index keys and choices, once packed to be sent and once received;
    - shards: the chunk's queries from all shards, in the backward O and dO too, and partial sums in
      the accumulate dtype;
    - ring: K, V of two other devices, in use and arriving, and dK, dV that travel with them;
    - tensor: the chunk's tokens gathered, the input of a product and the sum after the next;
    - pipeline: hidden states of chunks that a stage has sent ahead of the next;
    - FSDP: the weights of one layer, which are gathered ahead of those in use.
    """
    layout, model = question.layout, question.model
    width, wide = model.element_bytes, model.accumulate_bytes()
    own = -(-question.run.tokens // layout.sequence())
    tokens = min(own, chunk)
    rows = 0
    for spec in dict.fromkeys(model.layers):
        query, kv, out = _elements(spec)
        row = 2 * tokens * (query + kv + out) * width * (layout.ulysses > 1)
        row += 2 * tokens * _indexed_bytes(spec, question)
        if layout.shards > 1:
            forward = query * width + (out + spec.query_heads) * wide
            backward = (query + 2 * out) * width + query * wide
            row += tokens * layout.shards * max(forward, backward)
        row += 2 * own * kv * (width + wide) * (layout.ring > 1)
        rows = max(rows, row)
    rows += 2 * tokens * layout.tensor * model.hidden * width * (layout.tensor > 1)
    rows += CHUNKS_UNDER_WAY * tokens * model.passed() * width * (layout.pipeline > 1)
    ahead = max(layer.work.parameters for layer in model.layers) * width // layout.tensor
    return question.run.batch * rows + ahead * (fsdp_ranks(question) > 1)


def fsdp_ranks(question: Question) -> int:
    """Return the number of devices that share weights, gradients and optimizer states by FSDP."""
    layout = question.layout
    if not layout.fsdp:
        return 1
    return layout.devices() // (layout.pipeline * layout.tensor)
