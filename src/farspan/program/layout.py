"""Layout of the devices that share one step, a rank's place in it, and its part of every chunk.

Ranks lie in the order tensor, ulysses, shards, ring, data, pipeline, neighbours in the first axis
being neighbours in number. Outside attention the tokens of every chunk are dealt in that order too:
rank i of the P that share a sequence has the i-th of P parts, as equal as whole tokens allow. So
the parts of ranks that are neighbours in an axis are one range, and chunk c of all ranks together
is a contiguous range of the sequence (FPDT 4.1), whatever its length.

States of recurrent layers lie in buffers of K, V, in the rows of the chunk that produced them. A
state does not grow with tokens, and every chunk but the last produces one that is read. So a
layer's buffer has as many elements a token as its state takes in the shortest of those chunks, and
the rules for K, V hold for states too: their lifetime, their tier, and the instruction that frees
them. A chunk's rows hold the state of all sequences from their first byte on.

Two sets of rows. A rank's tokens are its part of each chunk: rows of x, activations and the loss.
Its keys are the tokens whose K, V, dK, dV, O and LSE it keeps, for its part of the heads: all of a
chunk's with Ulysses alone, a shard's or a ring member's part of each chunk otherwise. Buffers hold
the rows of all chunks one after the other, so a row is not a position in the sequence.

Every rank of a sequence runs the same instructions; only the rows differ. Parts may be empty.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil, gcd, prod

from farspan.spec import LayerSpec, ModelSpec, Schedule, Tier, UnsupportedError

AXES = ("tensor", "ulysses", "shards", "ring", "data", "pipeline")  # the innermost first
SEQUENCE = AXES[:4]  # those that share the tokens of a sequence

CHUNKS_UNDER_WAY = 2  # that a stage of a pipeline sends ahead of the next

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of devices along each axis of parallelism.

    Their product is the number of devices. With `fsdp`, weights, gradients and optimizer states are
    sharded over all devices except along `tensor` and `pipeline`, whose devices hold different
    weights anyway; modules outside the layers are also sharded over the stages of `pipeline`.
    """

    ulysses: int = 1  # tokens outside attention, heads inside (FPDT 4.1)
    shards: int = 1  # K, V of each chunk stay cut by tokens; queries travel
    ring: int = 1  # K, V of the whole prefix travel round
    tensor: int = 1  # weights and heads; tokens outside (sequence parallelism)
    pipeline: int = 1  # groups of layers
    data: int = 1  # replicas with their own sequences
    fsdp: bool = True

    def __post_init__(self) -> None:
        for name in AXES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedError(
                    f"{name}: expected a whole number of devices >= 1, got {value!r}"
                )
        if not isinstance(self.fsdp, bool):
            raise UnsupportedError(f"fsdp: expected true or false, got {self.fsdp!r}")

    def sequence(self) -> int:
        """Return the number of devices that share one sequence's tokens outside attention."""
        return self.ulysses * self.shards * self.ring * self.tensor

    def cuts_weights(self) -> bool:
        """Return whether ranks hold shards of weights (FSDP) and gather them for use."""
        return self.fsdp and self.devices() > 1

    def devices(self) -> int:
        return self.sequence() * self.pipeline * self.data


def sequence_layout(model: ModelSpec, devices: int) -> Layout:
    """Return a layout whose `devices` share every sequence: by heads (Ulysses) as far as the number
    of K, V heads allows, then by shards of each chunk's K, V. Recurrent layers get a pipeline, and
    layers with an indexer one instead of shards."""
    if model.is_recurrent():
        return Layout(pipeline=devices)
    ulysses = gcd(devices, *(layer.kv_heads for layer in model.layers))
    if any(layer.indexer for layer in model.layers):
        return Layout(ulysses=ulysses, pipeline=devices // ulysses)
    return Layout(ulysses=ulysses, shards=devices // ulysses)


ALONE = Layout()  # one device


def streams(schedule: Schedule, layout: Layout) -> bool:
    """Return whether the program copies whole weights from main memory into device buffers. With
    FSDP ranks gather shards from main memory instead, as they gather shards on the device."""
    return schedule.weights is Tier.HOST and not layout.cuts_weights()


def refuse_together(schedule: Schedule, layout: Layout) -> None:
    """Raise UnsupportedError for a schedule that the ranks of a layout cannot run."""
    if schedule.sparse is not None and layout.shards * layout.ring > 1:
        raise UnsupportedError(
            "sparse: pages are chosen from all keys of a head, which shards and rings spread over "
            "ranks; use ulysses"
        )
    if streams(schedule, layout) and layout.tensor > 1:
        raise UnsupportedError(
            "weights: host without fsdp needs whole weights, but tensor cuts them; set fsdp: true, "
            "use ulysses or shards instead of tensor, or set weights: device"
        )
    if layout.ring > 1 and schedule.kv is Tier.HOST:
        raise UnsupportedError(
            "kv: a ring sends K, V from the device; use device, or shards instead of ring"
        )
    if layout.pipeline > 1 and schedule.activation_save_layers < 1:
        raise UnsupportedError(
            "activation_save_layers: the stages of a pipeline keep activations alike; set 1, or "
            "use activation_save_fraction"
        )
    if layout.tensor > 1:
        if schedule.activation_save_fraction:
            raise UnsupportedError(
                "activation_save_fraction: saved activations are not supported with tensor; use "
                "0, or ulysses instead of tensor"
            )
        if schedule.mlp_chunk_size is not None:
            raise UnsupportedError(
                "mlp_chunk_size: not supported with tensor; use null, or ulysses instead of tensor"
            )


@dataclass(frozen=True)
class Rank:
    """A rank and its position in a layout."""

    layout: Layout = ALONE
    number: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.number < self.layout.devices(), (self.layout, self.number)

    @cached_property
    def along(self) -> dict[str, int]:
        """Position of the rank along each axis."""
        found, rest = {}, self.number
        for axis in AXES:
            rest, found[axis] = divmod(rest, getattr(self.layout, axis))
        return found

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Return this rank and those that differ from it only along these axes, ascending."""
        numbers, stride, base = [0], 1, 0
        for axis in AXES:
            extent = getattr(self.layout, axis)
            if axis in axes:
                numbers = [n + i * stride for i in range(extent) for n in numbers]
            else:
                base += self.along[axis] * stride
            stride *= extent
        return tuple(sorted(base + n for n in numbers))

    def tokens(self, chunk: Range, *axes: str) -> Range:
        """Return the tokens of a chunk that this rank and its peers along these axes have."""
        assert axes == SEQUENCE[: len(axes)], axes
        places = [n % self.layout.sequence() for n in self.peers(*axes)]
        return part(chunk, min(places), self.layout.sequence())[0], (
            part(chunk, max(places), self.layout.sequence())[1]
        )


ONLY = Rank()  # the rank of a single device


def part(span: Range, index: int, count: int) -> Range:
    """Return the `index`-th of `count` nearly equal parts of a range."""
    start, stop = span
    size = stop - start
    return start + size * index // count, start + size * (index + 1) // count


def chunk_ranges(tokens: int, chunk: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def are_equal(chunks: tuple[tuple[int, int], ...]) -> bool:
    """Return whether all chunks have the same length, except perhaps the last."""
    return chunks == chunk_ranges(chunks[-1][1], chunks[0][1])


def group_ranges(schedule: Schedule, layers: int, stages: int = 1) -> tuple[tuple[int, int], ...]:
    """Return the layer range of each group, in order. With a pipeline the groups are its stages."""
    ranges, start = [], 0
    sizes = schedule.group_sizes(layers) if stages == 1 else _stage_sizes(schedule, layers, stages)
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return tuple(ranges)


def _stage_sizes(schedule: Schedule, layers: int, stages: int) -> tuple[int, ...]:
    """Number of layers in each pipeline stage: the schedule's groups if given, else equal sizes."""
    if stages > layers:
        raise UnsupportedError(
            f"pipeline: {stages} stages for {layers} layers; use at most {layers}"
        )
    if isinstance(schedule.groups, tuple):
        if len(schedule.groups) != stages:
            raise UnsupportedError(
                f"groups: a pipeline of {stages} stages has one group each, got "
                f"{list(schedule.groups)}; give {stages} sizes, or one number to share equally"
            )
        return schedule.group_sizes(layers)
    return tuple(layers * (i + 1) // stages - layers * i // stages for i in range(stages))


def keeping_groups(share: float, groups: int) -> frozenset[int]:
    """Return the groups of layers that keep activations, if a `share` of them does: every n-th for
    1 / n, beginning with the first.

    The copies of a kept cell then have the time of n cells. The last group, which runs back at
    once, is among them only if nearly all are.
    """
    begun = [ceil(share * group - 1e-9) for group in range(groups + 1)]
    return frozenset(group for group in range(groups) if begun[group + 1] > begun[group])


def kept_chunks(fraction: float, chunks: tuple[tuple[int, int], ...]) -> range:
    """Return the chunks that hold the last `fraction` of the tokens, rounded to whole chunks.

    The last chunks are worth most: recomputing a token's attention costs in proportion to its
    position, so saving the last 30% removes 51% of that work.
    """
    wanted = fraction * chunks[-1][1]
    first = len(chunks)
    kept = 0
    while first > 0:
        start, stop = chunks[first - 1]
        if kept + (stop - start) / 2 > wanted:
            break
        kept += stop - start
        first -= 1
    return range(first, len(chunks))


def with_states(model: ModelSpec, chunks: tuple[Range, ...]) -> ModelSpec:
    """Return the model with the `row` of recurrent states set: elements per token, enough for the
    rows of any chunk but the last to hold a whole state. Raises UnsupportedError for a chunk
    of one token, which recurrent layers treat as generation."""
    if not model.is_recurrent():
        return model
    shortest = min((stop - start for start, stop in chunks[:-1]), default=0)
    if shortest == 1:
        raise UnsupportedError(
            "chunk: expected at least 2 tokens with recurrent layers, which treat a single token "
            "as generation, got 1"
        )
    return replace(model, layers=tuple(_with_rows(layer, shortest) for layer in model.layers))


def _with_rows(layer: LayerSpec, tokens: int) -> LayerSpec:
    state = (replace(s, row=-(-prod(s.shape) // tokens) if tokens else 0) for s in layer.state)
    return replace(layer, state=tuple(state)) if layer.state else layer


def refuse_shared_states(model: ModelSpec, layout: Layout, weights: Tier = Tier.DEVICE) -> None:
    """Raise UnsupportedError if ranks would share a sequence's tokens and a layer is recurrent, or
    would cut tensors that layers pass on besides the hidden state, or a layer chooses the tokens
    that it attends to, or layers share weights, which also stay on the device."""
    apart = layout.shards * layout.ring * layout.tensor
    if apart > 1 and any(layer.indexer for layer in model.layers):
        raise UnsupportedError(
            "parallel: an indexer chooses among the tokens of the whole prefix, whose keys shards "
            "and rings spread over ranks, and which tensor parallelism cannot slice; use ulysses, "
            "pipeline or data"
        )
    if layout.sequence() > 1 and model.is_recurrent():
        raise UnsupportedError(
            "parallel: recurrent layers hand their state from chunk to chunk, so ranks cannot "
            "share a chunk's tokens (ulysses, shards, ring, tensor); use pipeline or data"
        )
    if model.shares and layout.devices() > 1:
        raise UnsupportedError(
            f"parallel: layers of {model.name} share weights with one another, whose gradients "
            "ranks would not add up; use one device"
        )
    if model.shares and weights is Tier.HOST:
        raise UnsupportedError(
            "weights: layers that share weights cannot move to host one by one; set weights: device"
        )
    if (model.carried or model.embeds) and layout.tensor > 1:
        raise UnsupportedError(
            f"tensor: layers of {model.name} pass on keys and values, per-layer inputs or streams "
            "of hidden states, of which tensor parallelism would need slices; use ulysses, shards, "
            "ring or pipeline"
        )


# Tensors start on cache-line boundaries: vendor kernels need at least 16 bytes, and a packed tensor
# of any dtype must be viewable at its offset.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Spans:
    """A rank's part of every chunk: positions in the sequence, and rows in a buffer."""

    ranges: tuple[Range, ...]  # positions in the sequence
    rows: tuple[Range, ...]  # rows in a buffer that holds the parts of all chunks

    @property
    def total(self) -> int:
        """Number of rows in a buffer that holds the rank's parts of all chunks."""
        return self.rows[-1][1]

    @property
    def most(self) -> int:
        """Number of rows in the rank's longest part of a chunk."""
        return max(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's tokens and keys in every chunk, which this file's docstring explains."""

    rank: Rank
    tokens: Spans
    keys: Spans
    cells: tuple[Range, ...]  # rows reserved for each chunk's kept activations


@lru_cache(maxsize=64)
def share_of(chunks: tuple[Range, ...], rank: Rank = ONLY) -> Share:
    if rank.layout.sequence() == 1:
        whole = Spans(chunks, chunks)
        return Share(rank, whole, whole, chunks)
    return Share(
        rank,
        _spans(chunks, rank),
        _spans(chunks, rank, *AMONG_HEADS),
        cells_of(chunks, rank.layout),
    )


def own_groups(rank: Rank, groups: int) -> range:
    """Return the indices of the groups that a rank runs. A pipeline stage is one group."""
    if rank.layout.pipeline == 1:
        return range(groups)
    stage = rank.along["pipeline"]
    return range(stage, stage + 1)


AMONG_HEADS = SEQUENCE[:2]  # axes that share heads; the other axes of a sequence share keys


def _spans(chunks: tuple[Range, ...], rank: Rank, *axes: str) -> Spans:
    ranges = tuple(rank.tokens(chunk, *axes) for chunk in chunks)
    sizes = (stop - start for start, stop in ranges)
    return Spans(ranges, tuple(pairwise(accumulate(sizes, initial=0))))


def cells_of(chunks: tuple[Range, ...], layout: Layout) -> tuple[Range, ...]:
    """Return the rows that a rank reserves for each chunk's saved activations: an equal share of
    the chunk's tokens, rounded up. That is enough for all heads of the rank's own tokens, and for
    the rank's own heads of all tokens."""
    sizes = (-(-(stop - start) // layout.sequence()) for start, stop in chunks)
    return tuple(pairwise(accumulate(sizes, initial=0)))


def among_heads(rank: Rank, chunk: Range) -> tuple[int, ...]:
    """Return, for each Ulysses peer, how many of a chunk's tokens the peer has together with its
    tensor-parallel peers."""
    held = [Rank(rank.layout, n).tokens(chunk, "tensor") for n in rank.peers("ulysses")]
    return tuple(stop - start for start, stop in held)


@lru_cache(maxsize=64)
def local_heads(model: ModelSpec, layout: Layout) -> ModelSpec:
    """Return the model with a rank's share of heads. Raises UnsupportedError if it is uneven."""
    refuse_shared_states(model, layout)
    if layout.ulysses * layout.tensor == 1:
        return model
    layers = (local_layer(layer, layout) for layer in exchanging(model, layout).layers)
    return replace(model, layers=tuple(layers))


def exchanging(model: ModelSpec, layout: Layout) -> ModelSpec:
    """Return the model as ranks that exchange heads run it (Ulysses). Its activations are larger:
    cells save attention's output by heads and, as the output projection reads it, by tokens."""
    if layout.ulysses == 1:
        return model
    layers = (
        replace(
            layer,
            activation_bytes=layer.activation_bytes + layer.output_elements() * model.element_bytes,
            # Queries are saved in pieces, each padded.
            activation_constant=layer.activation_constant + ALIGNMENT * (1 + layer.kv_heads),
        )
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


def local_layer(layer: LayerSpec, layout: Layout) -> LayerSpec:
    ranks = layout.ulysses * layout.tensor
    if layer.kv_heads % ranks:
        raise UnsupportedError(
            f"ulysses: {layer.kv_heads} K, V heads cannot be shared by {ranks} devices; use a "
            f"divisor of {layer.kv_heads}, and shards for the rest"
        )
    if ranks == 1:
        return layer
    return replace(layer, kv_heads=layer.kv_heads // ranks, query_heads=layer.query_heads // ranks)


# -- as a run file asks for it ---------------------------------------------------------------------

COMMAND = "torchrun --nproc-per-node {} -m farspan train RUN.yaml"
LONGEST = 1e9  # seconds, 31 years; clocks count nanoseconds in 64 bits, 292 years


class Auto(StrEnum):
    """Value of `parallel` that leaves the layout to farspan: all ranks share every sequence."""

    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Parallel:
    """Number of ranks along each axis of `Layout`, as a run file gives it."""

    tensor: int = 1  # ranks that share the weights and heads of a layer
    ulysses: int = 1  # ranks that share tokens outside attention and heads inside
    shards: int = 1  # ranks that share the keys of every chunk
    ring: int = 1  # ranks around which keys travel
    pipeline: int = 1  # stages: ranks, or groups of ranks, with their own layers
    data: int | None = None  # groups of ranks with their own sequences; null: the ranks that remain
    fsdp: bool = True  # cut weights, gradients and optimizer states over the ranks, as FSDP2 does
    timeout: float = 600.0  # seconds after which ranks stop waiting for each other

    def __post_init__(self) -> None:
        data = 1 if self.data is None else self.data
        Layout(**self._extents(), data=data, fsdp=self.fsdp)
        if not 0 < self.timeout <= LONGEST:
            raise UnsupportedError(
                f"timeout: expected seconds above 0 and up to {LONGEST:.0e}, got {self.timeout!r}"
            )

    def asked(self) -> int:
        """Number of ranks that the axes need; with a null `data`, any multiple of this may run."""
        return prod(self._extents().values()) * (self.data or 1)

    def layout(self, ranks: int) -> Layout:
        """Return the layout of `ranks` ranks. Raises UnsupportedError if the axes do not fit."""
        asked = self.asked()
        if ranks % asked or (self.data is not None and ranks != asked):
            there = "there is 1" if ranks == 1 else f"there are {ranks}"
            raise UnsupportedError(f"{self.describe()}, but {there}")
        return Layout(**self._extents(), data=self.data or ranks // asked, fsdp=self.fsdp)

    def describe(self) -> str:
        extents = {**self._extents(), "data": self.data or 1}
        found = [f"{name} {n}" for name, n in extents.items() if n > 1] or ["1"]
        many = "" if self.data is not None else " or a multiple"
        return f"parallel: {' x '.join(found)} needs {self.asked()} rank(s){many}"

    def _extents(self) -> dict[str, int]:
        names = {f.name for f in fields(self)} & set(AXES) - {"data"}
        return {name: getattr(self, name) for name in AXES if name in names}


Given = Parallel | Auto | None  # `parallel` of a run file


def check_ranks(parallel: Given, ranks: int | None) -> Given:
    """Check a run file's `parallel` against the number of started ranks (None: no launcher). Return
    it with a null `data` replaced by the number of replicas. Raises UnsupportedError if the axes
    need another number of ranks."""
    if isinstance(parallel, Parallel):
        try:
            return replace(parallel, data=parallel.layout(ranks or 1).data)
        except UnsupportedError as error:
            many = parallel.asked()
            if parallel.data is None:  # as many of the started ranks as can share it
                many *= max(1, (ranks or 1) // many)
            raise UnsupportedError(f"{error}; start {many}: {COMMAND.format(many)}") from error
    if parallel is None and ranks is not None and ranks > 1:
        raise UnsupportedError(
            f"parallel: missing, but {ranks} ranks were started; set it to auto to share every "
            f"sequence, or to data: {ranks} for that many replicas"
        )
    return parallel


def layout_of(parallel: Given, ranks: int, model: Callable[[], ModelSpec]) -> Layout:
    """Return a run's layout on `ranks` ranks. `model` is called if the layout depends on it."""
    if isinstance(parallel, Parallel):
        return parallel.layout(ranks)
    return ALONE if ranks == 1 else sequence_layout(model(), ranks)


def packed_layout(parallel: Given, layout: Layout) -> Layout:
    """Return the layout for quantised weights, which every rank holds whole: it has no FSDP. Raises
    UnsupportedError if a run file's `parallel` cuts weights."""
    if layout.devices() == 1 or not isinstance(parallel, Parallel):
        return replace(layout, fsdp=False)
    if layout.fsdp:
        raise UnsupportedError(
            "parallel.fsdp: quantised weights stay whole on every rank; set fsdp: false"
        )
    return layout


def replicas(parallel: Given) -> int:
    """Return the number of data-parallel replicas that a run file sets."""
    return (parallel.data or 1) if isinstance(parallel, Parallel) else 1
