"""Prices of one chunk size: seconds of every kind of cell in every chunk, and bytes per token."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from farspan.planner.collectives import exchange_bytes
from farspan.planner.evaluate import RankKind, kinds_of, own_schedule, part_of, stage_model
from farspan.planner.pass_counts import SaveCounts
from farspan.planner.prices import Prices
from farspan.planner.request import Question
from farspan.planner.states import update_seconds
from farspan.planner.walk import workspace_bytes
from farspan.program.attention_blocks import sparse_of
from farspan.program.builder import chunks_of
from farspan.program.layout import (
    Rank,
    Spans,
    are_equal,
    group_ranges,
    local_heads,
    share_of,
    with_states,
)
from farspan.program.program import (
    AttentionMode,
    Backward,
    Buffer,
    Clear,
    Embed,
    EmbedBackward,
    Forward,
    Head,
    Instruction,
    Program,
    activation_cell_bytes,
    regions,
    regions_bytes,
    row_bytes,
)
from farspan.program.residency import Kind
from farspan.spec import LayerSpec, ModelSpec, Schedule, Tier

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LaneSeconds:
    """Seconds that a cell keeps each of five queues busy, for every chunk: five arrays [chunks]."""

    compute: Array
    fetch: Array
    evict: Array
    collective: Array
    host: Array
    known: dict[SaveCounts, list[Array]] = field(
        default_factory=dict
    )  # sums over spans, lane by lane

    def total(self, counts: Array, choices: SaveCounts) -> Array:
        """Return the seconds that each queue is busy, [5, save counts]. `counts` [save counts,
        spans] says how often the cells of each span (range of chunks) run."""
        if choices not in self.known:
            lanes = (self.compute, self.fetch, self.evict, self.collective, self.host)
            self.known[choices] = [choices.over(lane) for lane in lanes]
        return np.stack([counts @ lane for lane in self.known[choices]])

    def seconds(self, *, overlap: bool) -> float:
        """Seconds of computing the cells of all chunks, without copies. With `overlap` the CPU
        launches each cell while the one before is computed, so the longer time counts."""
        busy = self.compute + self.collective
        both = np.maximum(busy, self.host) if overlap else busy + self.host
        return float(both.sum())


@dataclass(frozen=True, slots=True)
class Sums:
    """Running sums of bytes: entry i counts the first i layers, [layers + 1] each."""

    kv: Array  # K, V of all keys
    dkv: Array
    attention: Array  # O and LSE of one key
    wide: Array  # one saved cell with O and LSE
    narrow: Array  # one without


class CellSeconds:
    """Seconds of every cell at one chunk size, for all kinds of rank; K, V lie on the host."""

    def __init__(
        self, question: Question, schedule: Schedule, model: ModelSpec, rank: Rank
    ) -> None:
        chunks = chunks_of(question.model, question.run.tokens, schedule, question.layout)
        self.count = range(len(chunks))
        share, whole = share_of(chunks, rank), (0, question.run.tokens)
        buffers = {
            name: Buffer(name, kind, 0, Tier.HOST, *whole, 0, 0, 0, 0, 0)
            for name, kind in (("kv", Kind.KV), ("dkv", Kind.DKV))
        }
        groups = group_ranges(schedule, len(model.layers), question.layout.pipeline)
        arenas = dict.fromkeys(Tier, 0)
        # A program without instructions: prices ask it for sizes only.
        shell = Program(model, question.run, schedule, chunks, groups, (), buffers, arenas, share)
        self.prices = Prices(question, shell, together=question.overlap)
        self.places = {spec: place for place, spec in enumerate(model.layers)}

    # Computed on first use: questions about memory alone never need them.

    @cached_property
    def forward(self) -> dict[LayerSpec, LaneSeconds]:
        return {spec: self._cell(spec, AttentionMode.COMPUTE) for spec in self.places}

    @cached_property
    def given_attention(self) -> dict[LayerSpec, LaneSeconds]:
        return {spec: self._cell(spec, AttentionMode.GIVEN) for spec in self.places}

    @cached_property
    def project(self) -> dict[LayerSpec, LaneSeconds]:
        return {spec: self._cell(spec, AttentionMode.NONE) for spec in self.places}

    @cached_property
    def backward(self) -> dict[LayerSpec, LaneSeconds]:
        return {spec: self._back(spec) for spec in self.places}

    @cached_property
    def head(self) -> Array:
        return self._in_line(Head)

    @cached_property
    def values(self) -> Array:
        """Seconds of the head without its gradient, for each chunk, [chunks]."""
        return self._in_line(partial(Head, gradient=False))

    @cached_property
    def embed(self) -> Array:
        return self._in_line(Embed)

    @cached_property
    def embed_backward(self) -> Array:
        return self._in_line(EmbedBackward)

    @cached_property
    def votes(self) -> dict[LayerSpec, float]:
        """Seconds of choosing the pages of sparse attention once for each chunk; 0 without it."""
        return {spec: self._votes(spec) for spec in self.places}

    def _votes(self, spec: LayerSpec) -> float:
        program = self.prices.program
        sparse = sparse_of(program.schedule, spec)
        if sparse is None or not spec.attends():
            return 0.0
        choosing = sparse.choosing(program.chunks)
        return sum(self.prices.sparse.votes(spec, chunk) for chunk in choosing)

    def _cell(self, spec: LayerSpec, mode: AttentionMode) -> LaneSeconds:
        layer = self.places[spec]
        return self._lane(lambda c: Forward(layer, c, mode, prefix="kv"))

    def _back(self, spec: LayerSpec) -> LaneSeconds:
        layer = self.places[spec]
        return self._lane(lambda c: Backward(layer, c, "kv", "dkv", "dkv"))

    def _lane(self, cell: Callable[[int], Instruction]) -> LaneSeconds:
        costs = [self.prices.of(cell(chunk)) for chunk in self.count]
        return LaneSeconds(
            np.array([cost.compute for cost in costs]),
            np.array([cost.fetch for cost in costs]),
            np.array([cost.evict for cost in costs]),
            np.array([cost.collective for cost in costs]),
            np.array([cost.host for cost in costs]),
        )

    def _in_line(self, kind: Callable[[int], Instruction]) -> Array:
        return np.array([self.prices.of(kind(chunk)).in_line() for chunk in self.count])


class CellPrices:
    """Seconds and bytes of the cells of one kind of rank, with one chunk size and one tier of K, V.
    All grids with these choices share the object. The default `kind` is the last pipeline stage."""

    def __init__(
        self,
        question: Question,
        schedule: Schedule,
        kind: RankKind | None = None,
        like: "CellPrices | None" = None,
    ) -> None:
        """Price the cells. `like`: another rank's prices, whose seconds are taken over."""
        kind = kinds_of(question, schedule)[-1] if kind is None else kind
        layout = question.layout
        chunks = chunks_of(question.model, question.run.tokens, schedule, layout)
        whole = with_states(local_heads(question.model, layout), chunks)
        self.kind, self.chunks, self.whole = kind, chunks, question
        self.share = share_of(chunks, kind.rank)
        self.model: ModelSpec = stage_model(whole, kind.layers)
        self.question = part_of(question, kind)
        # The layers of this rank at this chunk size: its own heads, and the rows of a state.
        self.local_layers = dict(zip(self.question.model.layers, self.model.layers, strict=True))
        self.run, self.schedule = question.run, schedule
        self.are_equal = are_equal(chunks)
        self.sizes = _sizes(self.share.tokens)
        self.keys = _sizes(self.share.keys)
        self.classes = list(dict.fromkeys(self.model.layers))
        lanes = None if like is None else like.lanes
        self.lanes: CellSeconds = lanes or CellSeconds(question, schedule, whole, kind.rank)
        self.prices = self.lanes.prices
        self.sums = self._sums()
        self.known: dict[tuple[object, ...], tuple[Array, Array]] = {}  # lanes, bytes moved
        self._shared: dict[tuple[object, ...], Array] = {}
        self._latest = np.concatenate([[0.0], np.cumsum(self.sizes[::-1])])
        self._latest_keys = np.concatenate([[0.0], np.cumsum(self.keys[::-1])])

    @property
    def tokens(self) -> int:
        """Number of tokens that this rank has of the whole sequence."""
        return self.share.tokens.total

    @cached_property
    def passing(self) -> int:
        """Device bytes of messages in flight and of kernels' workspaces."""
        own = own_schedule(self.schedule, self.question.layout)
        return exchange_bytes(self.question, own.chunk) + workspace_bytes(self.question, own)

    @cached_property
    def update(self) -> float:
        return update_seconds(self.question)

    # -- arrays that grids share -----------------------------------------------------------------

    def once(self, key: tuple[object, ...], make: Callable[[], Array]) -> Array:
        """Return the array cached under `key`; call `make` for it the first time."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def latest(self, chunks: NDArray[np.int64]) -> Array:
        """Return this rank's tokens in the last n chunks, for each n in the array `chunks`."""
        return np.asarray(self._latest[chunks])

    def latest_keys(self, chunks: NDArray[np.int64]) -> Array:
        return np.asarray(self._latest_keys[chunks])

    def cells(self, chunks: NDArray[np.int64]) -> Array:
        """Return how many cells of the first chunk's size the last n chunks amount to, for each n
        in the array `chunks`. A cell counts in proportion to its tokens."""
        if self.are_equal:
            return np.asarray(chunks, dtype=np.float64)
        return np.asarray(self._latest[chunks] / self.sizes[0])

    def _sums(self) -> Sums:
        def before(values: list[int]) -> Array:
            return np.concatenate([[0.0], np.cumsum(values)])

        layers, keys = self.model.layers, self.share.keys.total
        return Sums(
            before([self.row(Kind.KV, spec) * keys for spec in layers]),
            before([self.row(Kind.DKV, spec) * keys for spec in layers]),
            before([self.row(Kind.ATTENTION, spec) for spec in layers]),
            before([self.cell_bytes(spec, with_attention=True) for spec in layers]),
            before([self.cell_bytes(spec, with_attention=False) for spec in layers]),
        )

    # -- bytes a token, batch included -----------------------------------------------------------

    def x_row(self) -> int:
        return self.run.batch * self.model.passed() * self.model.element_bytes

    def row(self, kind: Kind, spec: LayerSpec) -> int:
        return row_bytes(kind, self.model, spec, self.run.batch)

    def cell_bytes(self, spec: LayerSpec, *, with_attention: bool) -> int:
        """Return the bytes of the activations that one cell saves, without the layer's input."""
        start, stop = self.share.cells[0]
        layout = self.question.layout
        return activation_cell_bytes(
            self.model,
            spec,
            self.run.batch,
            stop - start,
            with_attention,
            layout.ulysses * layout.tensor,
        )

    @cached_property
    def clear(self) -> float:
        """Seconds of zeroing dK, dV of every layer. If they lie on the host, a device slot is
        zeroed instead and copied there."""
        on_host, keys = self.schedule.kv is Tier.HOST, self.share.keys
        rows = keys.most if on_host else keys.total
        model, batch = self.model, self.run.batch
        found = (regions(Kind.DKV, model, spec, batch, rows) for spec in model.layers)
        sizes = [regions_bytes(one, rows) for one in found]
        if on_host:
            sizes = [max(sizes)] * len(sizes)
        return sum(self._cleared(size) for size in sizes)

    def _cleared(self, size: int) -> float:
        buffers = self.prices.program.buffers
        buffers["slot"] = replace(buffers["dkv"], tier=Tier.DEVICE, bytes=size)
        return self.prices.of(Clear("slot")).in_line()


def _sizes(spans: Spans) -> Array:
    return np.array([stop - start for start, stop in spans.rows], dtype=np.float64)
