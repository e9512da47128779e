"""Seconds of each instruction of a program, and the memory of attention's kernels.

A program belongs to one rank. Everything except attention counts the rank's own tokens, C / P of
every chunk of C tokens, where P = `layout.sequence()`; a layer's products, and messages between
ranks, have all heads of the model. Attention counts whole chunks: a rank's heads and keys see a
P-th of all pairs.

A backward on CUDA holds the fp32 sum of dQ as well as its result, and dK, dV of every query head
where heads share keys: about 14 KB a query and as much a key with the 28 heads of 7B, half a GB for
chunks and blocks of 16K. `farspan calibrate` measures it on a GPU; presets lack it, and their plans
leave it out. Flash attention 2 is deterministic by keeping several sums of dQ, enough to occupy
every processor, and adding them in a fixed order: 5 sums with 28 heads on an H100, 1.2 GB at 16K
queries. Plans count these for every machine, since no other kernel has more.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from farspan.planner.collectives import Collectives, fsdp_ranks
from farspan.planner.request import Question
from farspan.planner.states import update_seconds
from farspan.program.attention_blocks import chosen_pages, layer_pairs, sparse_of
from farspan.program.dependencies import TiledCells
from farspan.program.layout import Range
from farspan.program.program import (
    MODE_COMPUTE,
    MODE_NONE,
    Backward,
    Clear,
    Close,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Gather,
    Head,
    Instruction,
    Load,
    Program,
    Reduce,
    aligned,
    group_bytes,
    row_bytes,
)
from farspan.program.residency import Kind
from farspan.program.work import copied_bytes, pieces_of, streamed_bytes
from farspan.spec import HOST, LayerSpec, Rates, UnsupportedError, value


@dataclass(slots=True)
class TiledPrices:
    """Seconds of a layer's matrix products, with the feed-forward run tile by tile or whole."""

    program: Program
    products: Callable[[tuple[tuple[int, int], ...], int], float]  # seconds, for a number of tokens
    moved: Callable[[float], float]  # seconds of a number of bytes
    traffic: int  # bytes that an element of a weight's gradient moves on its way to the sum
    cells: TiledCells = field(init=False)

    def __post_init__(self) -> None:
        self.cells = TiledCells(self.program)

    def forward(self, i: Forward) -> float:
        """Seconds of the layer's matrix products in a forward; skipped products cost nothing."""
        work, tokens = self.program.model.layers[i.layer].work, self._tokens(i)
        if not self.cells.has_tiles(i):
            return self.products(work.products, tokens)
        cut = len(work.products) - work.feed_forward
        seconds = self.products(work.products[:cut], tokens)
        return seconds if self.cells.skips(i) else seconds + self._feed_forward(i)

    def again(self, i: Backward) -> float:
        """Seconds that tiles add to a backward. Token-wise modules run their forward once more, and
        each tile but one adds another pass over the sums of weight gradients."""
        if not self.cells.has_tiles(i):
            return 0.0
        work, rows = self.program.model.layers[i.layer].work, self.program.run.batch
        others = work.products[: len(work.products) - work.feed_forward]
        elements = max(0, work.parameters - sum(inner * outer for inner, outer in others))
        trained = work.trainable / work.parameters if work.parameters else 1.0
        passes = len(self.cells.sizes(i)) - 1
        # All of the layer's traffic, though a sixth (rotations, residual sums) is not repeated.
        moved = float(work.forward_traffic * self._tokens(i) * rows)
        moved += passes * trained * elements * self.traffic
        return self._feed_forward(i) + self.moved(moved)

    def _feed_forward(self, i: Forward | Backward) -> float:
        work = self.program.model.layers[i.layer].work
        products = work.products[len(work.products) - work.feed_forward :]
        return sum(self.products(products, tokens) for tokens in self.cells.sizes(i))

    def _tokens(self, i: Forward | Backward) -> int:
        return len(range(*self.program.share.tokens.rows[i.chunk]))


INDEX_PASSES = 6  # times that an indexer reads or writes its scores: product, ReLU, weighted sum
WIDE_PASSES = 4  # times that votes read or write their scores: product, softmax, sum
RANKING_PASSES = 6  # elements moved per element of a ranking key: two means, minus the mean
FUSED_VOTES = 2.9  # seconds of fused votes over a product: 690 TFLOP/s over 239 on an H100


@dataclass(frozen=True, slots=True)
class SparsePrices:
    """Seconds of page-sparse attention on one device."""

    program: Program
    rates: Rates
    moved: Callable[[float], float]
    fused: bool = False  # a GPU's kernel counts votes and writes no scores

    def votes(self, spec: LayerSpec, chunk: int) -> float:
        """Seconds of choosing pages: a score per query, head and key; superpages' keys count
        half."""
        program, known = self.program, self.rates.votes
        (start, stop), sparse = program.chunks[chunk], sparse_of(program.schedule, spec)
        assert sparse is not None
        keys, ranking = sparse.compared(len(sparse.candidates(start)))
        scores = program.run.batch * spec.query_heads * (stop - start) * (keys + ranking / 2)
        flop = 2.0 * scores * sparse.key_dim(spec)
        made = RANKING_PASSES * ranking * program.run.batch * spec.kv_heads * sparse.key_dim(spec)
        ready = self.moved(float(made * program.model.element_bytes))
        if known is None and not self.fused:
            written = WIDE_PASSES * scores * program.model.accumulate_bytes()
            return ready + self.rates.product(flop) + self.moved(written)
        fused = FUSED_VOTES * self.rates.product(flop) if known is None else flop / known.at(flop)
        rows = sparse.query_tokens * spec.query_heads // spec.kv_heads  # that share one read
        read = sparse.indexed * flop / rows * program.model.element_bytes  # keys are read twice
        return ready + max(fused, self.moved(read))

    def chosen(self, spec: LayerSpec, chunk: int, *, backward: bool) -> float:
        """Seconds of attention to chosen pages, with gathers; a backward scatters dK, dV too."""
        start, stop = self.program.chunks[chunk]
        sparse, run = sparse_of(self.program.schedule, spec), self.program.run
        assert sparse is not None
        pairs = float((stop - start) * sparse.width(start) * sparse.page)
        if not pairs:
            return 0.0
        model = self.program.model
        rows = run.batch * chosen_pages(sparse, start, stop) * sparse.page * spec.kv_elements()
        width = 2 * model.element_bytes + backward * 3 * model.accumulate_bytes()
        seconds = self.rates.attention(pairs, spec, backward=backward, chosen=True)
        return run.batch * seconds + self.moved(rows * width)


@value
class Cost:
    """Seconds that one instruction keeps each queue of the machine busy."""

    compute: float = 0.0
    fetch: float = 0.0
    evict: float = 0.0
    collective: float = 0.0
    host: float = 0.0  # issuing it; on a GPU in parallel with the cells before it

    def in_line(self) -> float:
        """Return the sum over all queues: the seconds if nothing overlaps."""
        return self.compute + self.fetch + self.evict + self.collective + self.host


NOTHING = Cost()


def rates_of(question: Question) -> Rates:
    """Return the machine's rates in the question's dtype, or raise UnsupportedError."""
    found = question.machine.rates.get(question.dtype)
    if found is None:
        raise UnsupportedError(
            f"dtype: {question.machine.name} has no rates for {question.dtype}, only for "
            f"{', '.join(question.machine.rates)}; run farspan calibrate, or choose one of these"
        )
    if question.kernels.products is not None:
        _refuse_products(question, found)
    return found


def _refuse_products(question: Question, rates: Rates) -> None:
    """Raise UnsupportedError for FP8 products with no price. On a CPU they are emulated, at the
    price of products in the model's dtype, which is too low."""
    name, dtype = question.machine.name, question.dtype
    if dtype != "bfloat16":
        raise UnsupportedError(
            f"products: fp8 needs a model in bfloat16, got {dtype}; give dtype bfloat16, or leave "
            "products out"
        )
    if rates.fp8 is None and not question.machine.on_cpu:
        raise UnsupportedError(
            f"products: {name} has no rates for fp8 (rates.{dtype}.fp8), as cards before Hopper "
            "and machines that were calibrated without torchao; run farspan calibrate there, or "
            "leave products out"
        )
    if question.adapter_rank() or question.nf4:
        raise UnsupportedError(
            "products: fp8 needs trained weights, not adapters over frozen ones; leave products or "
            "lora out"
        )
    if question.layout.tensor > 1:
        raise UnsupportedError(
            "products: fp8 does not run with slices of weights (tensor); use ulysses instead, or "
            "leave products out"
        )


@dataclass(slots=True)
class _PriceRule:
    """Pricing rule for one type of instruction; `known` keeps the prices that it has computed."""

    decides: Callable[[Any], Hashable]  # instructions with equal keys cost the same
    price: Callable[[Any], Cost]
    known: dict[Hashable, Cost] = field(default_factory=dict)


@dataclass(slots=True)
class Prices:
    """Seconds of every instruction in one rank's program. `question` is about all ranks.

    With `together`, copies run in both directions at once, at rates measured that way. Equal layers
    at the same chunk cost the same and are priced once.
    """

    question: Question
    program: Program
    together: bool = True
    counts: Sequence[int] = ()  # layers that each layer represents in a fold (timeline.fold)
    rates: Rates = field(init=False)
    collectives: Collectives = field(init=False)
    sparse: SparsePrices = field(init=False)
    _classes: list[int] = field(init=False)
    _sizes: list[int] = field(init=False)
    _pieces: list[int] = field(init=False)  # by layer: pieces in which a cell's heads are exchanged
    _tiled: TiledPrices = field(init=False)
    _rules: dict[type[Instruction], _PriceRule] = field(init=False)
    _known: dict[Hashable, float] = field(init=False, default_factory=dict)  # seconds of products
    _sums: dict[tuple[Range | None, bool], int] = field(init=False, default_factory=dict)  # bytes

    def __post_init__(self) -> None:
        self.rates = rates_of(self.question)
        self.collectives = Collectives(self.question)
        gpu = not self.question.machine.on_cpu
        self.sparse = SparsePrices(self.program, self.rates, self._moved, gpu)
        seen: dict[LayerSpec, int] = {}
        self._classes = [seen.setdefault(spec, len(seen)) for spec in self.program.model.layers]
        self._sizes = [stop - start for start, stop in self.program.share.tokens.rows]
        schedule, layout = self.program.schedule, self.question.layout
        pieces = [len(pieces_of(schedule, layout, spec)) for spec in seen]
        self._pieces = [pieces[kind] for kind in self._classes]
        traffic = self._gradient_traffic(product=True)
        self._tiled = TiledPrices(self.program, self._products, self._moved, traffic)
        self._rules = self._all_rules()

    def _all_rules(self) -> dict[type[Instruction], _PriceRule]:
        classes, sizes, buffers = self._classes, self._sizes, self.program.buffers
        keys = [stop - start for start, stop in self.program.share.keys.rows]
        layers = self.program.model.layers

        def forward(i: Forward) -> Hashable:
            put_away = i.kept, i.write_kv is not None, i.attention is not None, i.chooses, i.graph
            reads = i.mode is MODE_COMPUTE or layers[i.layer].state or layers[i.layer].indexer
            size = i.chunk if reads else (sizes[i.chunk], keys[i.chunk])
            return classes[i.layer], size, i.mode, put_away, self._tiled.cells.skips(i)

        def backward(i: Backward) -> Hashable:
            return classes[i.layer], i.chunk, self._tiled.cells.has_tiles(i), i.activations is None

        def copy(i: Fetch | Evict) -> Hashable:
            return i.source, i.target, sizes[i.chunk]

        def clear(i: Clear) -> Hashable:
            # By size, not by name: bounds use one buffer for every layer in turn.
            return buffers[i.buffer].bytes, buffers[i.buffer].tier

        streamed = {
            Gather: _PriceRule(lambda i: i, self._gather),
            Reduce: _PriceRule(lambda i: i, lambda i: Cost(collective=self.reduce(i.group))),
            Close: _PriceRule(lambda i: i, self._close),
        }
        top = len(self.program.model.layers)
        load = _PriceRule(lambda i: (sizes[i.chunk], i.layer < top), self._load)
        return (streamed if self.program.streams() else {}) | {
            Load: load,
            Forward: _PriceRule(forward, self._forward),
            Backward: _PriceRule(backward, self._backward),
            Fetch: _PriceRule(copy, self._fetch),
            Evict: _PriceRule(copy, self._evict),
            Head: _PriceRule(lambda i: (sizes[i.chunk], i.gradient), self._head),
            Embed: _PriceRule(lambda i: sizes[i.chunk], self._embed),
            EmbedBackward: _PriceRule(lambda i: sizes[i.chunk], self._embed_backward),
            Clear: _PriceRule(clear, self._clear),
        }

    def of(self, instruction: Instruction) -> Cost:
        rule = self._rules.get(type(instruction))
        if rule is None:
            return NOTHING
        key = rule.decides(instruction)
        cost = rule.known.get(key)
        if cost is None:
            cost = rule.known[key] = rule.price(instruction)
        return cost

    # -- copies ----------------------------------------------------------------------------------

    def _fetch(self, i: Fetch) -> Cost:
        size = copied_bytes(self.program, i.source, i.target, i.chunk)
        return Cost(fetch=size / self.fetch_rate())

    def _evict(self, i: Evict) -> Cost:
        size = copied_bytes(self.program, i.source, i.target, i.chunk)
        return Cost(evict=size / self.evict_rate())

    # -- cells -----------------------------------------------------------------------------------

    def _forward(self, i: Forward) -> Cost:
        spec, tokens = self._layer(i), self._tokens(i.chunk)
        if i.mode is MODE_NONE:
            products = spec.work.products[: spec.work.projections]
            share = len(products) / max(1, len(spec.work.products))
            compute = self._products(products, tokens) + self._put_away(i)
            moved = share * spec.work.forward_traffic * tokens * self.program.run.batch
            compute += self._moved(moved)
            fetch = self._earlier(i) if spec.state else 0.0
            return Cost(compute, fetch, host=self.question.machine.overhead)
        compute = self._tiled.forward(i) + self._put_away(i) + self._choice(i)
        compute += self._moved(spec.work.forward_traffic * tokens * self.program.run.batch)
        attends = i.mode is MODE_COMPUTE
        attention = self.attention(i.layer, i.chunk, backward=False) if attends else 0.0
        moved = self.collectives.forward(spec, tokens, i.mode, self._pieces[i.layer], attention)
        if attends:
            ring = self.collectives.ring(spec, self.program.chunks[i.chunk][1], backward=False)
            compute += attention
            if i.chooses:
                compute += self.sparse.votes(spec, i.chunk)
            moved += max(0.0, ring - attention)
        fetch = self._earlier(i) if attends or spec.state else 0.0
        return Cost(compute, fetch, 0.0, moved, self.question.machine.overhead)

    def _choice(self, i: Forward) -> float:
        """Return the seconds of an indexer's scores, one per head, query and token before it."""
        index, stop = self._layer(i).indexer, self.program.chunks[i.chunk][1]
        if index is None or not self._layer(i).chosen(stop):
            return 0.0
        needed = i.mode is MODE_COMPUTE or i.graph or index.passed
        scores = float(needed * self.program.run.batch * self._tokens(i.chunk) * stop * index.heads)
        flop = 2.0 * scores * index.dim  # 0 in layers to which an earlier layer passes its choice
        return self.rates.product(flop) + self._moved(INDEX_PASSES * 4 * scores) if flop else 0.0

    def _earlier(self, i: Forward) -> float:
        """Return the seconds of fetching the earlier chunks' keys that a cell reads."""
        return streamed_bytes(self.program, i.layer, i.chunk, i.prefix) / self.fetch_rate()

    def _backward(self, i: Backward) -> Cost:
        spec = self._layer(i)
        work, tokens = spec.work, self._tokens(i.chunk)
        trained = work.trainable / work.parameters if work.parameters else 1.0
        compute = self._products(work.products, tokens)
        compute += trained * self._products(work.products, tokens, weights=True)
        traffic = work.backward_traffic + work.remade_traffic * (i.activations is not None)
        compute += self._moved(traffic * tokens * self.program.run.batch)
        compute += self._moved(work.trainable * self._gradient_traffic(product=True))
        compute += self._tiled.again(i)
        attention = self.attention(i.layer, i.chunk, backward=True)
        ring = self.collectives.ring(spec, self.program.chunks[i.chunk][1], backward=True)
        moved = self.collectives.backward(spec, tokens, self._pieces[i.layer], attention)
        moved += max(0.0, ring - attention)
        kv = streamed_bytes(self.program, i.layer, i.chunk, i.prefix)
        dkv = streamed_bytes(self.program, i.layer, i.chunk, i.accumulator)
        return Cost(
            compute=compute + attention,
            fetch=(kv + dkv) / self.fetch_rate(),
            evict=dkv / self.evict_rate(),
            collective=moved,
            host=self.question.machine.overhead,
        )

    def _put_away(self, i: Forward) -> float:
        """Return the seconds of copying a cell's results into the program's buffers."""
        spec, tokens = self.program.model.layers[i.layer], self._tokens(i.chunk)
        start, stop = self.program.share.keys.rows[i.chunk]
        size = tokens * self.saved_row(spec) if i.kept else 0
        if i.write_kv is not None:
            size += (stop - start) * self.row(Kind.KV, spec)
        if i.attention is not None and i.mode is MODE_COMPUTE:
            size += (stop - start) * self.row(Kind.ATTENTION, spec)
        return self._moved(2 * size)

    def _products(
        self, products: tuple[tuple[int, int], ...], tokens: int, *, weights: bool = False
    ) -> float:
        key = products, tokens, weights
        if key not in self._known:
            rows = self.program.run.batch * tokens
            fp8 = self.question.kernels.products is not None
            self._known[key] = sum(
                self.rates.product(2.0 * rows * inner * outer, weights=weights, fp8=fp8)
                for inner, outer in products
            )
        return self._known[key]

    def attention(self, layer: int, chunk: int, *, backward: bool) -> float:
        """Return the seconds of attention in one cell: a call per block of earlier keys, then a
        causal call on the chunk's own keys. Sparse attention adds the chosen pages."""
        spec, layout = self.question.model.layers[layer], self.question.layout
        ranks = layout.sequence()
        start, stop = self.program.chunks[chunk]
        diagonal = layer_pairs(stop - start, spec)
        earlier = layer_pairs(stop, spec) - layer_pairs(start, spec) - diagonal
        # Blocks count the keys that a rank holds.
        block = self.program.schedule.kv_block * layout.shards * layout.ring
        prefix = start
        if spec.window is not None:
            prefix = start % spec.window if spec.chunked else min(start, spec.window)
        sparse = sparse_of(self.program.schedule, spec)
        seconds = 0.0
        if sparse is not None:
            prefix = sparse.near(start)
            earlier = (stop - start) * prefix
            seconds = self.sparse.chosen(spec, chunk, backward=backward)
        calls = -(-prefix // block)
        rows = self.program.run.batch / ranks
        seconds += self.rates.attention(diagonal, spec, rows=rows, causal=True, backward=backward)
        if calls:
            one = self.rates.attention(earlier / calls, spec, rows=rows, backward=backward)
            seconds += calls * one
            seconds += calls * self._merge(spec, (stop - start) // ranks, prefix // calls, backward)
        return seconds

    def _merge(self, spec: LayerSpec, queries: int, keys: int, backward: bool) -> float:
        """Return the seconds of adding one block's partial result to that of earlier blocks."""
        model, batch = self.program.model, self.program.run.batch
        one = model.element_bytes + 2 * model.accumulate_bytes()
        keys //= self.question.layout.sequence()
        rows = queries * spec.output_elements()
        if backward:
            rows = queries * spec.query_heads * spec.head_dim + keys * spec.kv_elements()
        return self._moved(batch * rows * one)

    # -- stages outside the layers ---------------------------------------------------------------

    def _embed(self, i: Embed) -> Cost:
        moved = self._moved(2 * self._hidden_bytes(i.chunk))
        return Cost(compute=moved + self._inputs_of_layers(i.chunk))

    def _load(self, i: Load) -> Cost:
        """Price loading a group's input. Layers may need inputs of their own, which are made from
        the tokens again; the head needs none."""
        is_called = self.program.model.embeds and i.layer < len(self.program.model.layers)
        return Cost(compute=self._inputs_of_layers(i.chunk)) if is_called else NOTHING

    def _inputs_of_layers(self, chunk: int) -> float:
        model, rows = self.program.model, self.program.run.batch * self._tokens(chunk)
        if not model.embeds:
            return 0.0
        flop = 2.0 * rows * model.hidden * model.embeds
        # A table is looked up and scaled; a projection is scaled, normed and added.
        moved = 16 * rows * model.embeds * model.element_bytes
        return self.rates.product(flop) + self._moved(moved)

    def _head(self, i: Head) -> Cost:
        tokens, gradient = self._tokens(i.chunk), i.gradient
        model, rows = self.program.model, self.program.run.batch * tokens
        piece = min(self.program.schedule.loss_chunk_size, tokens) * self.program.run.batch
        flop = 2.0 * piece * model.hidden * model.vocab
        trained = bool(model.outer_trainable())
        products = 2 if gradient else 1
        seconds = products * self.rates.product(flop)
        if gradient and trained:
            seconds += self.rates.product(flop, weights=True)
        seconds *= rows / piece
        seconds += rows * model.vocab * self._logit(gradient)
        if gradient and trained:
            seconds += self._moved(
                rows / piece * model.hidden * model.vocab * self._gradient_traffic(product=True)
            )
        return Cost(compute=seconds)

    def _logit(self, gradient: bool) -> float:
        """Return the seconds of cross-entropy per logit, with or without the gradient."""
        model = self.program.model
        if self.question.fused:
            # Read twice; the gradient overwrites the logit.
            return self._moved((3 if gradient else 1) * model.element_bytes)
        if self.rates.logit:
            return self.rates.logit if gradient else self.rates.logit / 2
        wide, narrow = model.accumulate_bytes(), model.element_bytes
        cast = 2 * (narrow + wide) if wide != narrow else 0
        # log_softmax reads and writes; its gradient is zeroed, read with the output, and written.
        return self._moved(6 * wide + cast if gradient else 2 * wide + cast // 2)

    def _embed_backward(self, i: EmbedBackward) -> Cost:
        model = self.program.model
        if not model.outer_trainable():
            return NOTHING
        dense = model.vocab * model.hidden
        zeroed = dense * model.element_bytes
        moved = zeroed + dense * self._gradient_traffic() + 3 * self._hidden_bytes(i.chunk)
        return Cost(compute=self._moved(moved))

    def _clear(self, i: Clear) -> Cost:
        return Cost(compute=self._moved(self.program.buffers[i.buffer].bytes))

    # -- devices together --------------------------------------------------------------------------

    def gather(self, layer: int) -> float:
        """Return the seconds of the all-gather of a layer's weights before a pass of its group."""
        elements = self.question.model.layers[layer].work.parameters
        fetched = self._own_bytes(elements, self.question.model.element_bytes) / self.fetch_rate()
        return self.collectives.gather(elements) + fetched

    def _own_bytes(self, elements: int, width: int) -> float:
        """Return the bytes of a rank's shard if it is copied to or from main memory, else 0."""
        away = self.question.weights is HOST and not self.program.streams()
        return elements * width * away / (fsdp_ranks(self.question) * self.question.layout.tensor)

    def reduce(self, group: int) -> float:
        """Return the seconds of the reduce-scatter of a group's weight gradients after its
        backward. Every pipeline stage has a shard of the modules outside the layers."""
        first = self.program.own_groups()[0]
        return self._reduce(self.program.groups[group], is_first=group == first)

    def _times(self, layers: Range) -> Iterator[tuple[int, int]]:
        """Yield the group's layers, each with the number of layers it represents (see `fold`)."""
        counts = self.counts or (1,) * len(self.question.model.layers)
        return ((layer, counts[layer] // counts[layers[0]]) for layer in range(*layers))

    def _reduce(self, layers: Range, *, is_first: bool) -> float:
        model, width = self.question.model, self.question.model.accumulate_bytes()
        elements = model.outer_trainable() * is_first
        elements += sum(n * model.layers[at].work.trainable for at, n in self._times(layers))
        sent = self.collectives.reduce(elements, width) + self.collectives.replicas(elements, width)
        if not self.program.streams():
            return sent + self._own_bytes(elements, width) / self.evict_rate()
        # Each of several ranks fetches its own part of earlier batches' sums.
        layout = self.question.layout
        part = elements * width * layout.pipeline / layout.devices() * (layout.devices() > 1)
        return sent + part * self.question.accumulates / self.fetch_rate()

    def gathers(self) -> float:
        """Seconds per step of FSDP's gathers and reductions, which overlap with cells."""
        beside = () if self.program.streams() else self.program.own_groups()
        groups = [self.program.groups[group] for group in beside]
        return self.gathers_of(groups) if self.program.trains() else self.gathered_once(groups)

    def gathers_of(self, groups: Sequence[Range]) -> float:
        """Return the seconds per step of FSDP's gathers and reductions with these groups. A group's
        weights are gathered for its forward and again for its backward; those of the last group
        only once, unless the head runs in between."""
        last = len(groups) - (not self.question.loss.is_cut)
        seconds = 0.0
        for group, layers in enumerate(groups):
            seconds += self.gathered_once([layers]) * (1 if group == last else 2)
            seconds += self._reduce(layers, is_first=group == 0)
        return seconds

    def gathered_once(self, groups: Sequence[Range]) -> float:
        """Return the seconds of gathering the weights of these groups for one pass."""
        return sum(self.gather(layer) for group in groups for layer in range(*group))

    # -- weights in main memory --------------------------------------------------------------------

    def _group_bytes(self, layers: Range | None, *, gradients: bool) -> int:
        if (layers, gradients) not in self._sums:  # the splits of a search share many groups
            bytes_of = partial(group_bytes, self.question.model, gradients=gradients)
            each = () if layers is None else self._times(layers)
            size = sum(bytes_of((i, i + 1)) * times for i, times in each)
            self._sums[layers, gradients] = bytes_of(None) if layers is None else size
        return self._sums[layers, gradients]

    def _bytes_of(self, group: int, outer: bool, *, gradients: bool) -> int:
        size = self._group_bytes(self.program.groups[group], gradients=gradients)
        return size + self._group_bytes(None, gradients=gradients) * outer

    def _gather(self, i: Gather) -> Cost:
        size = self._bytes_of(i.group, i.outer, gradients=i.gradients)
        return Cost(fetch=self._begin(size) if i.gradients else size / self.fetch_rate())

    def _begin(self, size: int) -> float:
        """Return the seconds of preparing sums of gradients: one device fetches those of earlier
        batches, if any; else they are zeroed (ranks add earlier batches after the backward)."""
        fetched = self.question.accumulates and self.question.layout.devices() == 1
        return size / (self.fetch_rate() if fetched else self.question.machine.memory)

    def _close(self, i: Close) -> Cost:
        size = self._bytes_of(i.group, self.program.closes_outer(i.group), gradients=True)
        return Cost(evict=size / self.evict_rate())

    def updated(self) -> tuple[float, ...]:
        """Return, for each group, the seconds until its weights are updated, if the step and the
        update start together. The modules outside the layers are updated first."""
        model = self.question.model
        rate = update_seconds(self.question) / max(1, model.trainable)
        sizes = [
            sum(n * model.layers[layer].work.trainable for layer, n in self._times(layers))
            for layers in self.program.groups
        ]
        outer = model.outer_trainable()
        return tuple(rate * (outer + size) for size in accumulate(sizes))

    def streamed(self, groups: Sequence[Range]) -> tuple[float, float]:
        """Seconds per step of fetching these groups' weights, and of evicting their gradients. The
        backward does not fetch the last two groups again: they are still on the device."""
        fetched = self.streamed_once((*groups, *groups[:-2]))
        sums = sum(self._group_bytes(group, gradients=True) for group in (*groups, None))
        return fetched + self._begin(sums), sums / self.evict_rate()

    def streamed_once(self, groups: Sequence[Range]) -> float:
        """Seconds of fetching once the weights of these groups and those outside the layers."""
        size = sum(self._group_bytes(group, gradients=False) for group in (*groups, None))
        return size / self.fetch_rate()

    def weight_slots(self, groups: Sequence[Range], gradients: bool) -> int:
        """Return the device bytes of the slots for weights from main memory: two that groups use in
        turn, and one for the modules outside the layers."""
        rings = [groups[0::2], groups[1::2], [None]]
        found = [
            [self._group_bytes(group, gradients=gradients) for group in ring] for ring in rings
        ]
        return sum(aligned(max(sizes)) for sizes in found if sizes)

    # -- bytes a token, batch included -----------------------------------------------------------

    def row(self, kind: Kind, spec: LayerSpec) -> int:
        return row_bytes(kind, self.program.model, spec, self.program.run.batch)

    def saved_row(self, spec: LayerSpec) -> int:
        """Bytes per token of the activations that a cell copies if it saves its graph."""
        return self.program.run.batch * spec.activation_bytes

    # -- rates -----------------------------------------------------------------------------------

    def fetch_rate(self) -> float:
        """Return the bytes per second from host to device while all devices use main memory."""
        machine = self.question.machine
        return self._shared(machine.fetch_together if self.together else machine.fetch)

    def evict_rate(self) -> float:
        """Return the bytes per second from device to host while all devices use main memory."""
        machine = self.question.machine
        return self._shared(machine.evict_together if self.together else machine.evict)

    def _shared(self, rate: float) -> float:
        machine = self.question.machine
        ranks = min(machine.devices, self.question.layout.devices())
        return min(rate, machine.host_memory / (ranks * (2 if self.together else 1)))

    def _moved(self, size: float) -> float:
        return size / self.question.machine.memory

    def _gradient_traffic(self, *, product: bool = False) -> int:
        """Return the bytes per element that are read and written to add a weight's gradient to its
        sum. A product that adds to the sum itself does not write the gradient."""
        model, written = self.program.model, -1 if product and self.question.adds else 1
        return 2 * model.accumulate_bytes() + written * model.element_bytes

    def _tokens(self, chunk: int) -> int:
        return self._sizes[chunk]

    def _layer(self, i: Forward | Backward) -> LayerSpec:
        return self.question.model.layers[i.layer]

    def _hidden_bytes(self, chunk: int) -> int:
        tokens, model = self._tokens(chunk), self.program.model
        return tokens * self.program.run.batch * model.passed() * model.element_bytes
