"""The dumb checker of waits: no two accesses of the same bytes race.

Every access of a program is a range of bytes of an arena. Any two that share a byte, one of them a
write, on different lanes, must be ordered by the lanes' own order and the waits. The checker
shares the types with what it checks and nothing else; its time grows with the accesses squared.
Slots that cells stream blocks through are left out, as the waits leave them out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from farspan.program.dependencies import Lane, Order
from farspan.program.program import (
    Allocate,
    AttentionMode,
    Backward,
    Buffer,
    Clear,
    Close,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Reduce,
    Send,
    Store,
    StoreGradient,
)
from farspan.program.residency import Kind
from farspan.spec import LayerSpec, Tier
from tests.oracles.contents import ProgramError

LINE = 64
Range = tuple[Tier, int, int]  # bytes [low, high) of an arena
Use = tuple[Lane, bool, Range]  # True: writes


def check_order(program: Program, orders: tuple[Order, ...]) -> None:
    """Raise ProgramError, with the later instruction's index, at the first race."""
    uses = _Uses(program)
    seen = _Seen()
    reached: dict[tuple[Lane, int], tuple[int, ...]] = {}
    newest = {lane: (-1,) * len(Lane) for lane in Lane}
    for index, instruction in enumerate(program.instructions):
        order = orders[index]
        for lane, after in order.items():
            past = [newest[lane]]
            for other, awaited in after:
                if not awaited < index:
                    raise ProgramError(index, f"waits for instruction {awaited}, which is later")
                past.append(reached[other, awaited])
            before = [max(column) for column in zip(*past, strict=True)]
            before[lane] = index
            newest[lane] = reached[lane, index] = tuple(before)
        found = list(uses.of(instruction))
        for use in found:
            if use[0] not in order:
                raise ProgramError(index, f"works on {use[0].name}, of which its order is silent")
            other_index = seen.race(use, newest[use[0]])
            if other_index is not None:
                raise ProgramError(index, f"{use} races with instruction {other_index}")
        for use in found:
            seen.add(use, index)


class _Seen:
    """All accesses so far, a column each."""

    def __init__(self) -> None:
        self.columns = np.zeros((6, 1024), dtype=np.int64)
        self.count = 0

    def race(self, use: Use, reached: tuple[int, ...]) -> int | None:
        """An earlier instruction that this access is not ordered after."""
        lane, writes, (tier, low, high) = use
        lanes, wrote, tiers, lows, highs, indices = self.columns[:, : self.count]
        meet = (tiers == _number(tier)) & (lows < high) & (highs > low) & (lanes != lane)
        meet &= (wrote == 1) | writes
        meet &= indices > np.asarray(reached)[lanes]
        found = indices[meet]
        return int(found[0]) if len(found) else None

    def add(self, use: Use, index: int) -> None:
        lane, writes, (tier, low, high) = use
        if self.count == self.columns.shape[1]:
            self.columns = np.concatenate([self.columns, np.zeros_like(self.columns)], axis=1)
        self.columns[:, self.count] = lane, writes, _number(tier), low, high, index
        self.count += 1


def _number(tier: Tier) -> int:
    return list(Tier).index(tier)


@dataclass(slots=True)
class _Uses:
    """The accesses of instructions in the program's order; what registers and graphs are views
    of is kept as ranges."""

    program: Program
    views: dict[tuple[str, int], list[Range]] = field(default_factory=dict)
    graphs: dict[tuple[int, int], list[Range]] = field(default_factory=dict)

    def of(self, i: Instruction) -> Iterator[Use]:
        if isinstance(i, Allocate | Free):
            return
        if "weights.outer" in self.program.buffers:
            yield from self._weights(i)
        if isinstance(i, Fetch | Evict):
            lane = Lane.FETCH if isinstance(i, Fetch) else Lane.EVICT
            ends = self.program.buffers[i.source], self.program.buffers[i.target]
            layer = max(end.layer for end in ends)
            yield from _all(lane, False, self._chunk(i.source, i.chunk, layer))
            yield from _all(lane, True, self._chunk(i.target, i.chunk, layer))
        elif isinstance(i, Clear):
            buffer = self.program.buffers[i.buffer]
            whole = buffer.tier, buffer.address, buffer.address + buffer.bytes
            yield Lane.COMPUTE, True, whole
        elif isinstance(i, Forward):
            yield from self._forward(i)
        elif isinstance(i, Backward):
            yield from self._backward(i)
        else:
            yield from self._stage(i)

    def _weights(self, i: Instruction) -> Iterator[Use]:
        """Weights that come from main memory, and their gradients that go there."""
        groups = enumerate(self.program.groups)
        group = getattr(i, "group", None)
        if isinstance(i, Forward | Backward):
            group = next(g for g, (start, stop) in groups if start <= i.layer < stop)
        place = "outer" if group is None else f"slot.{group % 2}"
        coming = isinstance(i, Gather)
        lane = Lane.FETCH if coming else Lane.EVICT if isinstance(i, Close) else Lane.COMPUTE
        if isinstance(i, Forward | Backward | Embed | EmbedBackward | Head):
            yield lane, False, self._whole(f"weights.{place}")
        adds = isinstance(i, Backward | EmbedBackward) or (isinstance(i, Head) and i.gradient)
        adds = adds or isinstance(i, Reduce)
        if adds or isinstance(i, Close):
            yield lane, adds, self._whole(f"weight_gradients.{place}")
        stages = self.program.share.rank.layout.pipeline
        if isinstance(i, Reduce | Close) and (i.group == 0 or stages > 1):
            yield lane, adds, self._whole("weight_gradients.outer")
        if isinstance(i, Gather):
            what = "weight_gradients" if i.gradients else "weights"
            for name in (place, *["outer"] * i.outer):
                yield lane, True, self._whole(f"{what}.{name}")

    def _whole(self, name: str) -> Range:
        buffer = self.program.buffers[name]
        return buffer.tier, buffer.address, buffer.address + buffer.bytes

    def _stage(self, i: Instruction) -> Iterator[Use]:
        if isinstance(i, Load | LoadGradient | Store | StoreGradient):
            bank = "hidden" if isinstance(i, Load | Store) else "gradient"
            place = self._chunk(i.buffer, i.chunk, 0)
            if isinstance(i, Load | LoadGradient):
                self.views[bank, i.layer] = place
                yield from _all(Lane.COMPUTE, False, place)
            else:
                yield from self._take(bank, i.layer)
                yield from _all(Lane.COMPUTE, True, place)
        elif isinstance(i, Head):
            yield from self._take("hidden", len(self.program.model.layers))
        elif isinstance(i, EmbedBackward):
            yield from self._take("gradient", 0)
        elif isinstance(i, Send):
            yield from self._take("gradient" if i.gradient else "hidden", i.layer)

    def _take(self, bank: str, layer: int) -> Iterator[Use]:
        yield from _all(Lane.COMPUTE, False, self.views.pop((bank, layer), []))

    def _forward(self, i: Forward) -> Iterator[Use]:
        seen = self.views.get(("hidden", i.layer), [])
        yield from self._take("hidden", i.layer)
        if i.hold:
            self.views["hidden", i.layer] = seen
        noted = i.means if i.write_kv is not None else None
        for name in (i.write_kv, i.activations, noted):
            if name is not None:
                yield from _all(Lane.COMPUTE, True, self._chunk(name, i.chunk, i.layer))
        if i.choice is not None:
            yield from _all(Lane.COMPUTE, i.chooses, self._chunk(i.choice, i.chunk, i.layer))
            if not i.chooses:
                yield from self._gathers(i.choice, i)
        if i.chooses and i.means is not None:
            for earlier in range(i.chunk):
                yield from _all(Lane.COMPUTE, False, self._chunk(i.means, earlier, i.layer))
        if i.mode is AttentionMode.COMPUTE or self.program.model.layers[i.layer].state:
            yield from self._prefix(i.prefix, i.chunk, i.layer, adds=False)
        output: list[Range] = []
        if i.attention is not None:
            output = self._chunk(i.attention, i.chunk, i.layer)
            yield from _all(Lane.COMPUTE, i.mode is not AttentionMode.GIVEN, output)
        elif i.mode is AttentionMode.HELD:
            output = self.views.pop(("held", i.layer), [])
        if i.hold:
            self.views["held", i.layer] = output
        if i.graph and not i.kept:
            self.graphs[i.layer, i.chunk] = [*seen, *output]

    def _backward(self, i: Backward) -> Iterator[Use]:
        self.views.pop(("hidden", i.layer + 1), None)
        yield from _all(Lane.COMPUTE, False, self.graphs.pop((i.layer, i.chunk), []))
        yield from self._take("gradient", i.layer + 1)
        if i.activations is not None:
            yield from self._take("hidden", i.layer)
        for name in (i.own_kv, i.own_dkv, i.attention, i.activations, i.choice):
            if name is not None:
                yield from _all(Lane.COMPUTE, False, self._chunk(name, i.chunk, i.layer))
        if i.choice is not None:
            yield from self._gathers(i.choice, i)
        yield from self._prefix(i.prefix, i.chunk, i.layer, adds=False)
        yield from self._prefix(i.accumulator, i.chunk, i.layer, adds=True)

    def _gathers(self, choice: str, i: Forward | Backward) -> Iterator[Use]:
        """A lane that fetches chosen pages reads which those are."""
        if self.program.buffers[i.prefix].tier is Tier.HOST:
            yield from _all(Lane.FETCH, False, self._chunk(choice, i.chunk, i.layer))

    def _prefix(self, name: str, chunk: int, layer: int, *, adds: bool) -> Iterator[Use]:
        """All chunks before one, streamed by other lanes where they are on host."""
        on_host = self.program.buffers[name].tier is Tier.HOST
        for earlier in range(chunk):
            place = self._chunk(name, earlier, layer)
            yield from _all(Lane.FETCH if on_host else Lane.COMPUTE, False, place)
            if adds:
                yield from _all(Lane.EVICT if on_host else Lane.COMPUTE, True, place)

    # -- bytes -----------------------------------------------------------------------------------

    def _chunk(self, name: str, chunk: int, layer: int) -> list[Range]:
        """Where a buffer holds a chunk; a slot holds any at its start."""
        buffer = self.program.buffers[name]
        start, stop = self.program.rows(buffer.kind, chunk)
        first = start if buffer.layer < 0 else buffer.start
        if buffer.cell_bytes:
            rows = [self.program.rows(buffer.kind, c) for c in range(len(self.program.chunks))]
            held = [end - begin for begin, end in rows if first <= begin <= start]
            sizes = [buffer.cell_bytes - buffer.cell_row * (held[0] - tokens) for tokens in held]
            low = buffer.address + sum(-(-size // LINE) * LINE for size in sizes[:-1])
            return [(buffer.tier, low, low + sizes[-1])]
        found, low = [], buffer.address
        spec = self.program.model.layers[min(max(layer, 0), len(self.program.model.layers) - 1)]
        for row in self._rows(buffer, spec):
            begin = low + (start - first) * row
            found.append((buffer.tier, begin, begin + (stop - start) * row))
            low += -(-row * (buffer.stop - buffer.start) // LINE) * LINE
        return found

    def _rows(self, buffer: Buffer, layer: LayerSpec) -> list[int]:
        """Bytes a token of each tensor that a buffer holds."""
        model, batch = self.program.model, self.program.run.batch
        narrow, wide = batch * model.element_bytes, batch * model.accumulate_bytes()
        keys, values = layer.kv_heads * layer.head_dim, layer.kv_heads * layer.value_dim
        match buffer.kind:
            case Kind.KV if layer.state:
                same = [state.element_bytes == model.element_bytes for state in layer.state]
                widths = [narrow if alike else wide for alike in same]
                return [s.row * width for s, width in zip(layer.state, widths, strict=True)]
            case Kind.DKV if layer.state:
                return [state.row * wide for state in layer.state]
            case Kind.KV:
                return [keys * narrow, values * narrow]
            case Kind.DKV:
                return [keys * wide, values * wide]
            case Kind.ATTENTION:
                out = layer.query_heads * layer.value_dim
                return [out * narrow, layer.query_heads * wide]
        return [model.passed() * narrow]


def _all(lane: Lane, writes: bool, places: list[Range]) -> Iterator[Use]:
    return ((lane, writes, place) for place in places)
