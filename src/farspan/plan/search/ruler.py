"""What one chunk size costs: the price of every kind of cell in every chunk, and rows in bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from farspan.plan.grid import are_equal, group_ranges
from farspan.plan.price.local import local_chunks, local_model, local_run, local_schedule
from farspan.plan.price.seconds import Cost, Prices
from farspan.plan.price.states import update_seconds
from farspan.plan.program import (
    AttentionMode,
    Backward,
    Buffer,
    Clear,
    Embed,
    EmbedBackward,
    Forward,
    Head,
    Kind,
    Program,
)
from farspan.plan.question import Question
from farspan.plan.search.roles import Kept
from farspan.plan.share import share_of
from farspan.plan.sizes import activation_cell_bytes, regions, regions_bytes, row_bytes
from farspan.plan.states import with_states
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Tier

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lane:
    """Seconds of one cell in every chunk, [chunks] each."""

    compute: Array
    fetch: Array
    evict: Array
    collective: Array
    host: Array

    def total(self, counts: Array, choices: Kept) -> Array:
        """[5, F]: each of cells that run `counts` [F, spans] times."""
        lanes = (self.compute, self.fetch, self.evict, self.collective, self.host)
        return np.stack([counts @ choices.over(lane) for lane in lanes])

    def seconds(self, *, overlap: bool) -> float:
        """Of the cells of all chunks, copies left out; issuing them goes on beside where lanes
        overlap."""
        busy = self.compute + self.collective
        both = np.maximum(busy, self.host) if overlap else busy + self.host
        return float(both.sum())


@dataclass(frozen=True, slots=True)
class Sums:
    """Bytes of the layers before each, [L + 1]: of the device's whole run for `kv` and `dkv`, a
    token for `attention`, a kept cell for the others."""

    kv: Array
    dkv: Array
    attention: Array
    wide: Array  # cells that hold O and LSE
    narrow: Array


class Ruler:
    """Prices of one question at one chunk size and one tier of K, V; frames share them."""

    def __init__(self, question: Question, schedule: Schedule) -> None:
        local = local_model(question)
        self.chunks = local_chunks(question, schedule)
        self.model: ModelSpec = with_states(local, self.chunks)
        self.question = replace(question, model=self.model)
        # A layer as this chunk size has it: the rows of a state depend on it.
        self.held = dict(zip(local.layers, self.model.layers, strict=True))
        self.held |= {spec: spec for spec in self.model.layers}
        self.run: RunSpec = local_run(question, schedule)
        own = local_schedule(schedule, question.layout)
        self.schedule = own
        self._are_equal = are_equal(self.chunks)
        self.sizes = np.array([stop - start for start, stop in self.chunks], dtype=np.float64)
        self.classes = list(dict.fromkeys(self.model.layers))
        self.prices = Prices(self.question, self._shell(), together=question.overlap)
        self.sums = self._sums()
        self.known: dict[tuple[object, ...], tuple[Array, Array]] = {}  # lanes, bytes moved
        self._shared: dict[tuple[object, ...], Array] = {}
        self._latest = np.concatenate([[0.0], np.cumsum(self.sizes[::-1])])

    # -- prices, looked up when somebody asks for time: memory alone needs none ------------------

    @cached_property
    def forward(self) -> dict[LayerSpec, Lane]:
        return {k: self._cell(k, AttentionMode.COMPUTE) for k in self.classes}

    @cached_property
    def given(self) -> dict[LayerSpec, Lane]:
        return {k: self._cell(k, AttentionMode.GIVEN) for k in self.classes}

    @cached_property
    def project(self) -> dict[LayerSpec, Lane]:
        return {k: self._cell(k, AttentionMode.NONE) for k in self.classes}

    @cached_property
    def backward(self) -> dict[LayerSpec, Lane]:
        return {k: self._backward(k) for k in self.classes}

    @cached_property
    def head(self) -> Array:
        return np.array([self.prices.of(Head(c)).in_line() for c in range(len(self.chunks))])

    @cached_property
    def embed(self) -> Array:
        return np.array([self.prices.of(Embed(c)).in_line() for c in range(len(self.chunks))])

    @cached_property
    def embed_backward(self) -> Array:
        count = range(len(self.chunks))
        return np.array([self.prices.of(EmbedBackward(c)).in_line() for c in count])

    @cached_property
    def clear(self) -> float:
        return self._clear_seconds()

    @cached_property
    def zeros(self) -> float:
        """Copying them to host, for every layer."""
        row = sum(self.dkv_row(spec) for spec in self.model.layers)
        return row * self.run.tokens / self.prices.evict_rate()

    @cached_property
    def update(self) -> float:
        return update_seconds(self.question)

    def _shell(self) -> Program:
        """A program without instructions: prices ask it for sizes only."""
        tier = self.schedule.kv
        whole = (0, self.run.tokens)
        buffers = {
            name: Buffer(name, kind, 0, tier, *whole, 0, 0, 0, 0, 0)
            for name, kind in (("kv", Kind.KV), ("dkv", Kind.DKV))
        }
        groups = group_ranges(self.schedule, len(self.model.layers))
        arenas = dict.fromkeys(Tier, 0)
        share = share_of(self.chunks)
        return Program(
            self.model, self.run, self.schedule, self.chunks, groups, (), buffers, arenas, share
        )

    def _cell(self, spec: LayerSpec, mode: AttentionMode) -> Lane:
        layer = self.model.layers.index(spec)
        count = range(len(self.chunks))
        return _lane([self.prices.of(Forward(layer, c, mode, prefix="kv")) for c in count])

    def _backward(self, spec: LayerSpec) -> Lane:
        layer = self.model.layers.index(spec)
        count = range(len(self.chunks))
        return _lane([self.prices.of(Backward(layer, c, "kv", "dkv", "dkv")) for c in count])

    # -- what frames have in common -------------------------------------------------------------

    def once(self, key: tuple[object, ...], make: Callable[[], Array]) -> Array:
        """What frames with this key have in common, made once."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def latest(self, chunks: NDArray[np.int64]) -> Array:
        """[F]: tokens of the latest `chunks` chunks."""
        return np.asarray(self._latest[chunks])

    def cells(self, chunks: NDArray[np.int64]) -> Array:
        """How many of the first chunk's cells those of the latest `chunks` are, in bytes that grow
        where chunks differ; of any shape."""
        if self._are_equal:
            return np.asarray(chunks, dtype=np.float64)
        return np.asarray(self._latest[chunks] / self.sizes[0])

    def _sums(self) -> Sums:
        def before(values: list[int]) -> Array:
            return np.concatenate([[0.0], np.cumsum(values)])

        layers, tokens = self.model.layers, self.run.tokens
        return Sums(
            before([self.kv_row(spec) * tokens for spec in layers]),
            before([self.dkv_row(spec) * tokens for spec in layers]),
            before([self.attention_row(spec) for spec in layers]),
            before([self.cell_bytes(spec, with_attention=True) for spec in layers]),
            before([self.cell_bytes(spec, with_attention=False) for spec in layers]),
        )

    # -- bytes a token, batch included -----------------------------------------------------------

    def x_row(self) -> int:
        return self.run.batch * self.model.hidden * self.model.element_bytes

    def kv_row(self, spec: LayerSpec) -> int:
        return row_bytes(Kind.KV, self.model, spec, self.run.batch)

    def dkv_row(self, spec: LayerSpec) -> int:
        return row_bytes(Kind.DKV, self.model, spec, self.run.batch)

    def attention_row(self, spec: LayerSpec) -> int:
        out = spec.output_elements() * self.model.element_bytes
        return self.run.batch * (out + spec.query_heads * self.model.accumulate_bytes())

    def cell_bytes(self, spec: LayerSpec, *, with_attention: bool) -> int:
        """Of one kept cell of activations, the layer's input left out."""
        tokens, batch = int(self.sizes[0]), self.run.batch
        return activation_cell_bytes(self.model, spec, batch, tokens, with_attention)

    def _clear_seconds(self) -> float:
        """Zeroing dK, dV of every layer, or the slot that the zeros on host come from."""
        on_host, tokens = self.schedule.kv is Tier.HOST, self.run.tokens
        if on_host:
            tokens = self.chunks[0][1]
        sizes = [self._sums_bytes(spec, tokens) for spec in self.model.layers]
        if on_host:
            sizes = [max(sizes)] * len(sizes)
        return sum(self._cleared(size) for size in sizes)

    def _sums_bytes(self, spec: LayerSpec, tokens: int) -> int:
        found = regions(Kind.DKV, self.model, spec, self.run.batch, tokens)
        return regions_bytes(found, tokens)

    def _cleared(self, size: int) -> float:
        buffers = self.prices.program.buffers
        buffers["slot"] = replace(buffers["dkv"], tier=Tier.DEVICE, bytes=size)
        return self.prices.of(Clear("slot")).in_line()


def _lane(costs: list[Cost]) -> Lane:
    return Lane(
        np.array([cost.compute for cost in costs]),
        np.array([cost.fetch for cost in costs]),
        np.array([cost.evict for cost in costs]),
        np.array([cost.collective for cost in costs]),
        np.array([cost.host for cost in costs]),
    )
