"""What a program takes: bytes alive on each tier, bytes across the link, forward work.

Nothing here knows the schedule: the program is read instruction by instruction. Counts are for one
document a row; a cut into documents reads and computes less."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from farspan.program.attention_blocks import chunk_pairs
from farspan.program.dependencies import TiledCells
from farspan.program.layout import Range
from farspan.program.program import (
    Allocate,
    AttentionMode,
    Backward,
    Close,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Program,
    group_bytes,
)
from farspan.program.residency import RESIDENCY, Kind
from farspan.program.work import copied_bytes, streamed_bytes
from farspan.spec import Tier

Change = tuple[int, int]  # index of an instruction, bytes alive from then on
Transfer = tuple[bool, Kind, int]  # to the device, what, bytes


@dataclass(frozen=True, slots=True)
class Simulation:
    """One walk through a program. Passes are forward passes over the whole grid: 1 is what a model
    without recomputation takes, and the backward's own products are not among them."""

    live: dict[Tier, tuple[Change, ...]]  # every buffer, those that torch's allocator holds too
    peak: dict[Tier, int]  # the most bytes alive
    fetched: dict[Kind, int]  # bytes host to device, streamed blocks of the prefix included
    evicted: dict[Kind, int]  # bytes device to host
    attention_passes: Fraction  # in query-key pairs that are seen, weighted by the heads' width
    linear_passes: Fraction  # cells that run the whole layer, in tokens
    projection_passes: Fraction  # cells that stop at K, V, in tokens

    def fetched_bytes(self) -> int:
        return sum(self.fetched.values())

    def evicted_bytes(self) -> int:
        return sum(self.evicted.values())


def simulate(program: Program) -> Simulation:
    """Walk the program once."""
    live = {tier: tuple(_live(program, tier)) for tier in Tier}
    fetched, evicted = dict.fromkeys(RESIDENCY, 0), dict.fromkeys(RESIDENCY, 0)
    for to_device, kind, size in _transfers(program):
        (fetched if to_device else evicted)[kind] += size
    attention, linear, projection = _passes(program)
    return Simulation(
        live,
        {tier: max((size for _, size in live[tier]), default=0) for tier in Tier},
        fetched,
        evicted,
        attention,
        linear,
        projection,
    )


def _live(program: Program, tier: Tier) -> Iterator[Change]:
    alive = 0
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Allocate | Free):
            buffer = program.buffers[instruction.buffer]
            if buffer.tier is tier:
                alive += buffer.bytes if isinstance(instruction, Allocate) else -buffer.bytes
                yield index, alive


def _transfers(program: Program) -> Iterator[Transfer]:
    for instruction in program.instructions:
        match instruction:
            case Fetch(source, target, chunk) | Evict(source, target, chunk):
                kind = program.buffers[source].kind
                size = copied_bytes(program, source, target, chunk)
                yield isinstance(instruction, Fetch), kind, size
            case Forward(layer, chunk, mode, prefix):
                if mode is AttentionMode.COMPUTE or program.model.layers[layer].state:
                    yield True, Kind.KV, streamed_bytes(program, layer, chunk, prefix)
            case Backward(layer, chunk, prefix, accumulator):
                yield True, Kind.KV, streamed_bytes(program, layer, chunk, prefix)
                size = streamed_bytes(program, layer, chunk, accumulator)
                yield True, Kind.DKV, size
                yield False, Kind.DKV, size
            case Gather(group, outer, False) if program.streams():
                units = [program.groups[group], *[None] * outer]
                yield True, Kind.WEIGHTS, _weight_bytes(program, units, gradients=False)
            case Close(group) if program.streams():
                shared = group == 0 or program.share.rank.layout.pipeline > 1
                units = [program.groups[group], *[None] * shared]
                yield False, Kind.WEIGHT_GRADIENTS, _weight_bytes(program, units, gradients=True)
            case _:
                pass


def _weight_bytes(program: Program, units: list[Range | None], *, gradients: bool) -> int:
    return sum(group_bytes(program.model, unit, gradients) for unit in units)


def _passes(program: Program) -> tuple[Fraction, Fraction, Fraction]:
    """Attention, linear and K, V-only forward passes."""
    done: Counter[str] = Counter()
    for instruction in program.instructions:
        if isinstance(instruction, Forward):
            start, stop = program.chunks[instruction.chunk]
            if instruction.mode is AttentionMode.COMPUTE:
                done["attention"] += _pairs(program, instruction.layer, instruction.chunk)
            only_kv = instruction.mode is AttentionMode.NONE
            done["projection" if only_kv else "linear"] += stop - start
    layers, tokens = len(program.model.layers), program.run.tokens
    chunks = range(len(program.chunks))
    once = sum(_pairs(program, layer, chunk) for layer in range(layers) for chunk in chunks)
    return (
        Fraction(done["attention"], once or 1),
        Fraction(done["linear"], layers * tokens),
        Fraction(done["projection"], layers * tokens),
    )


def _pairs(program: Program, layer: int, chunk: int) -> int:
    spec = program.model.layers[layer]
    pairs = chunk_pairs(program, spec, chunk)
    return pairs * spec.query_heads * (spec.head_dim + spec.value_dim)


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
