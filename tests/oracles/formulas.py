"""Closed forms of what a schedule takes: the dumb checker of programs and their simulation.

Written from the theory of the grid, not from the program. With a = x, kappa = K and V, delta = dK
and dV in fp32, o = O and LSE, all in bytes a token and layer, L layers in G groups of g, N tokens:

    device   g (kappa + delta), of the largest group
    host     (G - 1) a boundaries, + phi L o, + alpha L activations, + L kappa where K, V are kept,
             + g o while a group is open
    attention forward passes
             recompute all  2 - 1/L + sum over groups but the last of (g - 1)/L
             open group's O 2 - g_last/L
             K, V kept      2 - 1/L
             all O kept     1

`live_bytes` is this with every tier free to choose, and exact: tensors padded to 64 bytes, slots
left out (they do not grow with N). It is the most over the first pass, the rebuild and the
backward of each group, since a group that is not the last is open twice.

The program does better than the theory in four places, which the formulas here include:

- A pass before the backward leaves the last chunk out unless it keeps the chunk's graph: the
  backward begins with it. With w the last chunk's share of the pairs, recompute all takes
  w (L - G)/L less than above; where O is kept nothing changes, since the backward keeps none.
- The top layer of the last group keeps no O: its backward follows at once, and O is made once.
- A last group of one layer keeps no activations, for the same reason.
- A buffer that nothing would be written to is not there: O of the last group when only the left
  out chunk's would be kept, O of an open group when the left out chunk is the only one.

Where attention is sparse, the mean keys of pages live as long as cells run for the first time, and
the chosen pages until the backward; a query sees its own chunk, sinks, recent tokens and the pages.

The theory's phi is a fraction of tokens; here it is the chunks whose middle lies in the last phi
of the sequence.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import floor, prod
from typing import NamedTuple

from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Sparse, StateTensor, Tier


class Term(NamedTuple):
    """Bytes of one tier."""

    tier: Tier
    size: int


def live_bytes(model: ModelSpec, run: RunSpec, schedule: Schedule) -> dict[Tier, int]:
    """The most bytes alive on each tier in a training step, slots left out."""
    peak = dict.fromkeys(Tier, 0)
    for phase in _Case(model, run, schedule).phases():
        for tier in Tier:
            peak[tier] = max(peak[tier], sum(term.size for term in phase if term.tier is tier))
    return peak


def attention_passes(model: ModelSpec, run: RunSpec, schedule: Schedule) -> Fraction:
    """Forward attention passes of a training step, layers weighted by heads times width."""
    case = _Case(model, run, schedule)
    done = total = Fraction(0)
    for group in range(len(case.sizes)):
        for layer in case.layers(group):
            spec = model.layers[layer]
            weight = case.pairs(run.tokens, layer)
            weight *= spec.query_heads * (spec.head_dim + spec.value_dim)
            done += weight * case.attention_runs(group, layer)
            total += weight
    return done / total if total else total


def linear_passes(model: ModelSpec, run: RunSpec, schedule: Schedule) -> Fraction:
    """Forward passes of a training step through everything but attention, in tokens. Cells that
    end with K, V are not counted."""
    case = _Case(model, run, schedule)
    runs = (
        case.linear_runs(group, layer)
        for group in range(len(case.sizes))
        for layer in case.layers(group)
    )
    return sum(runs, Fraction(0)) / len(model.layers)


def feed_forward_passes(model: ModelSpec, run: RunSpec, schedule: Schedule) -> Fraction:
    """The same through the feed-forwards alone, which tiles recompute in the backward: once more
    for each graph that is not kept and whose output is read, by the next layer's or the loss."""
    case = _Case(model, run, schedule)
    total = linear_passes(model, run, schedule) * len(model.layers)
    for group in range(len(case.sizes)):
        for layer in case.layers(group):
            total += case.tiled_again(group, layer)
    return total / len(model.layers)


def latest_start(fraction: float, tokens: int, chunk: int) -> int:
    """First token of the chunks whose middle lies in the last `fraction` of the tokens."""
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        if tokens - (start + stop) / 2 <= fraction * tokens:
            return start
    return tokens


def _triangle(queries: int, window: int | None) -> int:
    """Query-key pairs of the first `queries` tokens."""
    if window is None or queries <= window:
        return queries * (queries + 1) // 2
    return queries * window - window * (window - 1) // 2


class _Before(NamedTuple):
    """Tokens before a chunk that a query of it sees."""

    sinks: int
    chosen: int  # at most
    recent: int


def _seen_before(sparse: Sparse, start: int) -> _Before:
    border = max(0, start - sparse.recent) // sparse.page * sparse.page
    sinks = min(border, -(-sparse.sinks // sparse.page) * sparse.page)
    return _Before(sinks, min(sparse.budget, border - sinks), start - border)


def _padded(size: int) -> int:
    return size + -size % 64


@dataclass(frozen=True, slots=True)
class _Case:
    model: ModelSpec
    run: RunSpec
    schedule: Schedule

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.schedule.group_sizes(len(self.model.layers))

    @property
    def last(self) -> int:
        return len(self.sizes) - 1

    @property
    def last_start(self) -> int:
        """First token of the last chunk."""
        return (self.run.tokens - 1) // self.schedule.chunk * self.schedule.chunk

    def layers(self, group: int) -> range:
        first = sum(self.sizes[:group])
        return range(first, first + self.sizes[group])

    def is_top(self, layer: int) -> bool:
        return layer + 1 in {sum(self.sizes[: group + 1]) for group in range(len(self.sizes))}

    def attention_start(self, group: int, layer: int) -> int:
        """First token whose O and LSE are kept to the end."""
        if group == self.last and self.is_top(layer):
            return self.run.tokens
        return latest_start(
            self.schedule.attention_save_fraction, self.run.tokens, self.schedule.chunk
        )

    def keeps(self, group: int) -> bool:
        """Whether a group may keep activations: those at 0, 1 / share, 2 / share, ... do."""
        share = Fraction(self.schedule.activation_save_layers)
        turns = range(len(self.sizes)) if share else ()
        return group in {floor((turn + Fraction(1, 10**9)) / share) for turn in turns}

    def graph_start(self, group: int) -> int:
        """First token whose activations are kept."""
        if group == self.last and self.sizes[group] == 1:
            return self.run.tokens
        if not self.keeps(group):
            return self.run.tokens
        return latest_start(
            self.schedule.activation_save_fraction, self.run.tokens, self.schedule.chunk
        )

    @property
    def rebuilt(self) -> bool:
        return not self.schedule.kv_kept

    def sparse(self, layer: int) -> Sparse | None:
        """How a layer's attention is sparse. One with a window is not."""
        return None if self.model.layers[layer].window else self.schedule.sparse

    def pairs(self, queries: int, layer: int) -> int:
        """Query-key pairs of the first `queries` tokens."""
        sparse = self.sparse(layer)
        if sparse is None:
            return _triangle(queries, self.model.layers[layer].window)
        chunk = self.schedule.chunk
        return sum(
            query % chunk + 1 + sum(_seen_before(sparse, query // chunk * chunk))
            for query in range(queries)
        )

    # -- work --------------------------------------------------------------------------------------

    def attention_runs(self, group: int, layer: int) -> Fraction:
        """Times that the pairs of a layer are computed."""
        tokens = self.run.tokens

        def share(start: int) -> Fraction:
            return 1 - Fraction(self.pairs(start, layer), self.pairs(tokens, layer))

        if group == self.last and self.is_top(layer):
            return Fraction(1)
        kept, graphs = self.attention_start(group, layer), self.graph_start(group)
        again = 1 - share(min(kept, graphs))
        # The last chunk, where the pass before the backward leaves it out and nothing keeps it.
        left_out = share(self.last_start) * (graphs == tokens and kept == tokens)
        is_open = self.schedule.attention_open
        if group == self.last:
            return 1 + (again - left_out) * (not is_open)
        if self.is_top(layer) or not self.rebuilt:
            return 1 + again
        return 1 + (1 - share(kept) - left_out) + (left_out if is_open else again)

    def linear_runs(self, group: int, layer: int) -> Fraction:
        """Times that the tokens of a layer run through all of it."""
        tokens = self.run.tokens
        graphs = self.graph_start(group)
        again = Fraction(graphs, tokens)
        left_out = Fraction(tokens - self.last_start, tokens) * (graphs == tokens)
        top = self.is_top(layer)
        if group == self.last and top:
            return Fraction(1)
        backward = again * (2 if self.schedule.layer_checkpoint and not top else 1)
        if group == self.last:
            return 1 - left_out + backward
        return 1 + (1 - left_out) * (self.rebuilt and not top) + backward

    def tiled_again(self, group: int, layer: int) -> Fraction:
        """Share of the tokens whose feed-forward runs once more on tiles than in a graph."""
        schedule, tile, tokens = self.schedule, self.schedule.mlp_chunk_size, self.run.tokens
        if tile is None or min(schedule.chunk, tokens) <= tile:
            return Fraction(0)
        # The top layer's output is read where it is turned around into the loss.
        read = group == self.last if self.is_top(layer) else not schedule.layer_checkpoint
        if not read and self.model.layers[layer].work.skippable:
            return Fraction(0)
        graphs, ragged = self.graph_start(group), tokens % schedule.chunk
        whole = ragged if graphs == tokens and ragged <= tile else 0
        return Fraction(graphs - whole, tokens)

    # -- memory ------------------------------------------------------------------------------------

    def phases(self) -> Iterator[list[Term]]:
        """What lives at the fullest moment of each pass."""
        groups = range(len(self.sizes))
        for group in groups:
            below = [t for g in groups[:group] for t in self._closed(g)]
            yield [*below, *self._first(group)]
        for group in reversed(groups):
            below = [t for g in groups[:group] for t in self._closed(g)]
            for own in self._again(group):
                yield [*below, *own]

    def _first(self, group: int) -> list[Term]:
        """Own buffers of a group's first pass."""
        terms = [*self._to_backward(group), *self._kv(group, self.schedule.kv)]
        terms += self._means(group)
        if self._goes_home(group):
            terms += self._kv(group, Tier.HOST)
        return terms + (self._open(group) if group == self.last else [])

    def _again(self, group: int) -> Iterator[list[Term]]:
        """Own buffers of the rebuild, and of the backward, where dK, dV join K, V."""
        kept = [*self._to_backward(group), *self._kv(group, self.schedule.kv)]
        # Only the last group has cells that run for the first time after its first pass.
        kept += self._means(group) if group == self.last else []
        if self._goes_home(group):
            yield [*kept, *self._kv(group, Tier.HOST)]
        is_open = group == self.last or self.rebuilt
        yield [*kept, *(self._open(group) if is_open else []), *self._dkv(group)]

    def _closed(self, group: int) -> list[Term]:
        """What a group keeps between its first pass and its backward."""
        on_host = self.schedule.kv is Tier.HOST
        kv = self._kv(group, Tier.HOST if on_host else self.schedule.kv_home)
        return self._to_backward(group) + (kv if self.schedule.kv_kept else [])

    def _to_backward(self, group: int) -> list[Term]:
        """What lives from the first pass to the backward: the group's output (its gradient, later),
        kept attention and kept activations."""
        schedule, tokens = self.schedule, self.run.tokens
        graphs = self.graph_start(group)
        rows = tokens if group < self.last else tokens - graphs
        terms = [Term(schedule.boundary_inputs, _padded(self._x_row() * rows))]
        cells = -(-tokens // schedule.chunk) - graphs // schedule.chunk if graphs < tokens else 0
        for layer in self.layers(group):
            kept = self.attention_start(group, layer)
            unwritten = group == self.last and graphs == tokens and kept >= self.last_start
            if not unwritten:
                terms.append(Term(schedule.attention, self._attention(layer, tokens - kept)))
            cell = _padded(self._activations(group, layer))
            terms.append(Term(schedule.activations, cell * cells))
        return terms + self._choices(group)

    def _open(self, group: int) -> list[Term]:
        """O and LSE of the layers below the top, for the tokens whose O is not kept anyway."""
        kept = latest_start(
            self.schedule.attention_save_fraction, self.run.tokens, self.schedule.chunk
        )
        left_out = self.graph_start(group) == self.run.tokens == kept
        written = self.last_start if left_out else kept
        if not self.schedule.attention_open or not written:
            return []
        below = self.layers(group)[:-1]
        return [Term(self.schedule.attention, self._attention(layer, kept)) for layer in below]

    def _goes_home(self, group: int) -> bool:
        schedule = self.schedule
        there = schedule.kv is Tier.DEVICE and schedule.kv_home is Tier.HOST
        return schedule.kv_kept and group < self.last and there

    def _means(self, group: int) -> list[Term]:
        """The mean keys of every page, or of 2 tokens, where some chunk chooses among them."""
        width, terms = self.model.element_bytes, []
        for layer in self.layers(group):
            sparse, spec = self.sparse(layer), self.model.layers[layer]
            if sparse is None or not _seen_before(sparse, self.last_start).chosen:
                continue
            tokens = sparse.page if sparse.selector == "mean" else math.gcd(sparse.page, 2)
            means = min(self.schedule.chunk, self.run.tokens) // tokens
            cell = means * self.run.batch * spec.kv_heads * spec.head_dim * width
            chunks = self.last_start // self.schedule.chunk + 1
            terms.append(Term(Tier.DEVICE, _padded(cell) * chunks))
        return terms

    def _choices(self, group: int) -> list[Term]:
        """Four bytes a chosen page, for each page of queries and K, V head of chunks that do."""
        terms, chunk = [], self.schedule.chunk
        for layer in self.layers(group):
            sparse, heads = self.sparse(layer), self.model.layers[layer].kv_heads
            if sparse is None:
                continue
            most = _seen_before(sparse, self.last_start).chosen // sparse.page
            starts = range(0, self.run.tokens, chunk)
            chunks = sum(_seen_before(sparse, start).chosen > 0 for start in starts)
            pages = -(-min(chunk, self.run.tokens) // math.gcd(sparse.page, sparse.query_page))
            cell = 4 * self.run.batch * heads * pages * most
            terms.append(Term(Tier.DEVICE, _padded(cell) * chunks))
        return terms

    # -- one tensor --------------------------------------------------------------------------------

    def _x_row(self) -> int:
        return self.run.batch * self.model.passed() * self.model.element_bytes

    def _kv(self, group: int, tier: Tier) -> list[Term]:
        width = self.model.element_bytes
        return [Term(tier, self._key_value(layer, width)) for layer in self.layers(group)]

    def _dkv(self, group: int) -> list[Term]:
        width = max(4, self.model.element_bytes)
        tier = self.schedule.kv
        return [Term(tier, self._key_value(layer, width)) for layer in self.layers(group)]

    def _key_value(self, layer: int, width: int) -> int:
        spec, rows = self.model.layers[layer], self.run.batch * self.run.tokens
        if spec.state:
            return sum(_padded(self._state(state, width)) for state in spec.state)
        heads = rows * spec.kv_heads * width
        return _padded(heads * spec.head_dim) + _padded(heads * spec.value_dim)

    def _state(self, state: StateTensor, width: int) -> int:
        """A state a chunk, spread evenly over all but the last one's tokens; its gradient, and what
        is not of the model's dtype, in the accumulate dtype."""
        model, tokens = self.model, self.run.tokens
        if state.element_bytes != model.element_bytes:
            width = max(4, model.element_bytes)
        several = tokens > self.schedule.chunk
        row = several * -(-prod(state.shape) // self.schedule.chunk)
        return tokens * self.run.batch * row * width

    def _attention(self, layer: int, tokens: int) -> int:
        spec, rows = self.model.layers[layer], self.run.batch * tokens
        out = rows * spec.query_heads * spec.value_dim * self.model.element_bytes
        return _padded(out) + _padded(rows * spec.query_heads * max(4, self.model.element_bytes))

    def _activations(self, group: int, layer: int) -> int:
        """Bytes of one cell: what autograd saves, with O and LSE unless an attention buffer holds
        them for every such chunk, and the layer's input unless it is a boundary."""
        spec, schedule = self.model.layers[layer], self.schedule
        rows = self.run.batch * min(schedule.chunk, self.run.tokens)
        size = rows * spec.activation_bytes
        size += spec.activation_constant * (self.run.batch if spec.state else 1)
        top = group == self.last and self.is_top(layer)
        if top or schedule.attention_save_fraction < schedule.activation_save_fraction:
            size += rows * _output_row(spec, self.model)
        inner = spec.saves_input and layer != self.layers(group)[0]
        return _padded(size) + inner * rows * self.model.passed() * self.model.element_bytes


def _output_row(spec: LayerSpec, model: ModelSpec) -> int:
    out = spec.query_heads * spec.value_dim * model.element_bytes
    return out + spec.query_heads * max(4, model.element_bytes)
