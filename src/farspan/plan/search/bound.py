"""Lower bounds of time and memory of many schedules at once: what the search prunes with.

One `Frame` fixes the chunk, the groups and the switches of a schedule. Left open are F choices of
how many chunks keep O, LSE and activations, and T = 8 choices of tiers for x, attention and
activations; every result is [F, T]. The time is that of the program when nothing overlaps, and the
busiest lane's when everything does; both are sums over cells, so nothing is simulated. Memory is
the fullest of a few phases of the program (formulas has them all), without padding.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from farspan.plan.grid import group_ranges
from farspan.plan.search.roles import Cells, Kept, Role, cells
from farspan.plan.search.ruler import Array, Ruler
from farspan.spec import LayerSpec, Schedule, Tier

TIERS = tuple(product(Tier, repeat=3))  # of x, attention, activations
ON_HOST = np.array([[tier is Tier.HOST for tier in tiers] for tiers in TIERS], dtype=np.float64)
INPUT_BYTES = 3 * 8  # a token
EVERY = 8  # groups up to which the memory of each is looked at
LINK = 2  # directions: fetch, evict


@dataclass(frozen=True, slots=True)
class Bounds:
    """At least so much, for each choice of fractions and tiers, [F, T] each."""

    seconds: Array
    device: Array
    host: Array


def _spread(free: Array, counted: Array) -> Array:
    """[..., F, T] from [..., 3, F]: the sum over those of the three that T's tiers count."""
    return np.asarray(np.swapaxes(free, -1, -2) @ counted.T)


@dataclass(slots=True)
class Frame:
    """Bounds of all fractions and tiers for one cut into groups and one set of switches."""

    ruler: Ruler
    schedule: Schedule  # in the device's own tokens; fractions and three tiers are left open
    kept: Kept
    groups: tuple[tuple[int, int], ...] = field(init=False)
    alone: Kept = field(init=False)  # of a last group of one layer

    def __post_init__(self) -> None:
        self.groups = group_ranges(self.schedule, len(self.ruler.model.layers))
        self.alone = self.ruler.alone(self.kept)

    def bounds(self) -> Bounds:
        """Seconds and bytes, [F, T]."""
        device, host = self.memory()
        return Bounds(self.seconds(), device, host)

    def _roles(self) -> dict[tuple[Role, LayerSpec], int]:
        """How many layers play each role; equal ones are counted together."""
        known = self.ruler.roles
        if self.groups not in known:
            tops = {stop - 1 for _, stop in self.groups}
            first, _ = self.groups[-1]
            known[self.groups] = Counter(
                (Role(2 * (layer >= first) + (layer in tops)), spec)
                for layer, spec in enumerate(self.ruler.model.layers)
            )
        return known[self.groups]

    def _choices(self, role: Role) -> Kept:
        first, stop = self.groups[-1]
        return self.alone if role is Role.LAST_TOP and stop - first == 1 else self.kept

    @property
    def _zero(self) -> Array:
        return np.zeros(len(self.kept.graphs))

    # -- time ------------------------------------------------------------------------------------

    def seconds(self) -> Array:
        """[F, T], without looking at memory."""
        ruler, question = self.ruler, self.ruler.question
        lanes = np.zeros((1 + LINK, len(self.kept.graphs)))
        cut = self.groups, self.schedule.kv_kept
        moved = ruler.once(("x", *cut), self._boundaries).copy()
        for (role, spec), count in self._roles().items():
            own_lanes, own_moved = self._layer(role, spec)
            lanes += count * own_lanes
            moved += count * own_moved
        lanes[0] += ruler.once(("outside", *cut), self._outside)
        rates = np.array([ruler.prices.fetch_rate(), ruler.prices.evict_rate()])
        copies = _spread(moved / rates[:, None, None], ON_HOST)
        fetch, evict = lanes[1][:, None] + copies[0], lanes[2][:, None] + copies[1]
        compute = lanes[0][:, None] + np.zeros_like(fetch)
        gathers = ruler.gathers_of(self.groups)
        if question.overlap:
            total = np.maximum(np.maximum(compute, gathers), np.maximum(fetch, evict))
        else:
            total = compute + gathers + fetch + evict
        stages, count = question.layout.pipeline, len(ruler.chunks)
        return np.asarray(total * (count + stages - 1) / count + ruler.update)

    def _layer(self, role: Role, spec: LayerSpec) -> tuple[Array, Array]:
        """Lanes [3, F] and bytes [2, 3, F] of one layer; frames that differ in their cut only
        have them in common."""
        s, choices = self.schedule, self._choices(role)
        alone = choices is not self.kept
        key = role, spec, s.kv_kept, s.kv_home, s.attention_open, s.layer_checkpoint, alone
        known = self.ruler.known
        if key not in known:
            found = cells(role, s, choices)
            known[key] = self._cells(role, found, spec), self._moved(role, found, spec)
        return known[key]

    def _cells(self, role: Role, found: Cells, spec: LayerSpec) -> Array:
        """[3, F]: one layer's cells, and the copies of its K, V."""
        ruler = self.ruler
        lanes = ruler.forward[spec].total(found.compute)
        lanes += ruler.given[spec].total(found.given)
        lanes += ruler.project[spec].total(found.project)
        lanes += ruler.backward[spec].total(np.ones_like(found.compute))
        kv, dkv = ruler.kv_row(spec) * ruler.sizes, ruler.dkv_row(spec) * ruler.sizes
        lanes[0] += self._put_away(found, spec)
        if self.schedule.kv is Tier.HOST:
            lanes[1] += (found.graph @ kv + dkv.sum()) / ruler.prices.fetch_rate()
            lanes[2] += found.kv_written @ kv / ruler.prices.evict_rate()
        if self._goes_home(role):
            lanes[1] += kv.sum() / ruler.prices.fetch_rate()
            lanes[2] += kv.sum() / ruler.prices.evict_rate()
        return lanes

    def _put_away(self, found: Cells, spec: LayerSpec) -> Array:
        """[F]: copies on the device into the program's buffers."""
        ruler = self.ruler
        size = found.kv_written @ ruler.sizes * ruler.kv_row(spec)
        size += found.attention_out @ ruler.sizes * ruler.attention_row(spec)
        size += found.graph @ ruler.sizes * ruler.prices.saved_row(spec)
        return np.asarray(2 * size / ruler.question.machine.memory)

    def _moved(self, role: Role, found: Cells, spec: LayerSpec) -> Array:
        """[2, 3, F]: bytes of one layer's O, LSE and activations, where they are on host."""
        row = self.ruler.attention_row(spec) * self.ruler.sizes
        cell = found.graph.sum(1) * self._cell_bytes(role, spec)
        fetched = np.stack([self._zero, found.attention_in @ row, cell])
        evicted = np.stack([self._zero, found.attention_out @ row, cell])
        return np.stack([fetched, evicted])

    def _cell_bytes(self, role: Role, spec: LayerSpec) -> Array:
        """[F]: O and LSE are in the cell unless their own buffer holds them for all its chunks."""
        covered = (self.kept.attention >= self.kept.graphs) & (role is not Role.LAST_TOP)
        wide = self.ruler.cell_bytes(spec, with_attention=True)
        narrow = self.ruler.cell_bytes(spec, with_attention=False)
        return np.where(covered, narrow, wide).astype(np.float64)

    def _goes_home(self, role: Role) -> bool:
        schedule = self.schedule
        waits = schedule.kv_kept and role in (Role.INNER, Role.TOP)
        return waits and schedule.kv is Tier.DEVICE and schedule.kv_home is Tier.HOST

    def _boundaries(self) -> Array:
        """[2, 3, F]: bytes of x, its gradient, and the inputs inside kept cells."""
        ruler, groups = self.ruler, len(self.groups)
        row = ruler.x_row() * ruler.sizes
        graphs = ruler.latest(self._choices(Role.LAST_TOP).graphs) * ruler.x_row()
        skipped = row[-1] * self._skips(self._choices(Role.LAST_TOP))
        middle = row[-1] * self._skips(self.kept)
        whole = row.sum()
        fetched = graphs + 3 * (groups - 1) * whole
        if groups > 1:
            # The rebuild of a middle group and the first pass of the last begin without it.
            fetched = fetched - skipped
            rebuilt = 0 if self.schedule.kv_kept else groups - 2
            fetched = fetched + rebuilt * (whole - middle)
        evicted = graphs + 2 * (groups - 1) * whole
        cells = self.kept.graphs * ruler.x_row() * ruler.sizes[0]
        inputs = cells * sum(
            spec.saves_input
            for layer, spec in enumerate(ruler.model.layers)
            if layer not in {first for first, _ in self.groups}
        )
        return np.stack([np.stack([moved, self._zero, inputs]) for moved in (fetched, evicted)])

    @staticmethod
    def _skips(choices: Kept) -> Array:
        """[F]: 1 where the last chunk's graph is not kept, so that its cells are left out of the
        passes before the backward."""
        return np.asarray(choices.graphs == 0, dtype=np.float64)

    def _outside(self) -> Array:
        """[F]: embedding, head, zeroing dK, dV."""
        ruler = self.ruler
        skipped = ruler.embed[-1] * self._skips(self._choices(Role.LAST_TOP))
        rebuilt = ruler.embed[-1] * self._skips(self.kept)
        once = ruler.embed.sum()
        passes = 2 * once - skipped if len(self.groups) == 1 else 2 * once
        if len(self.groups) > 1 and not self.schedule.kv_kept:
            passes = passes + once - rebuilt
        fixed = ruler.head.sum() + ruler.embed_backward.sum() + ruler.clear
        return np.asarray(passes + fixed)

    # -- memory ----------------------------------------------------------------------------------

    def memory(self) -> tuple[Array, Array]:
        """[F, T] on device and host: the fullest of the phases looked at, time not asked for."""
        last = len(self.groups) - 1
        # Of more groups, those where even and tapered cuts are fullest.
        few = {0, 1, last // 2, last - 1, last} & set(range(last + 1))
        looked_at = range(last + 1) if last < EVERY else sorted(few)
        phases = [phase for group in looked_at for phase in self._phases(group)]
        device, host = self._fixed()
        most = np.zeros((2, len(self.kept.graphs), len(TIERS)))
        for kv_device, kv_host, free in phases:
            np.maximum(most[0], kv_device + _spread(free, 1 - ON_HOST), out=most[0])
            np.maximum(most[1], kv_host + _spread(free, ON_HOST), out=most[1])
        return most[0] + device, most[1] + host

    def _phases(self, group: int) -> list[tuple[float, float, Array]]:
        """(K, V on device, on host, [3, F] x, attention, activations) of a group's passes."""
        ruler, (first_layer, stop) = self.ruler, self.groups[group]
        below = ruler.once(("kept", self.groups, group), lambda: self._to_backward(group))
        own = ruler.sums.kv[stop] - ruler.sums.kv[first_layer]
        dkv = ruler.sums.dkv[stop] - ruler.sums.dkv[first_layer]
        waiting = ruler.sums.kv[first_layer] if self.schedule.kv_kept else 0.0
        on_host = self.schedule.kv is Tier.HOST
        home = on_host or self.schedule.kv_home is Tier.HOST
        goes_home = self._goes_home(Role.TOP) and group < len(self.groups) - 1

        def tiers(size: float, homeward: float = 0.0) -> tuple[float, float]:
            device = (0.0 if on_host else size) + (0.0 if home else waiting)
            return device, (size if on_host else 0.0) + (waiting if home else 0.0) + homeward

        first = tiers(own, own if goes_home else 0.0)
        return [(*first, below), (*tiers(own + dkv), below + self._open(group))]

    def _to_backward(self, group: int) -> Array:
        """[3, F]: what this group and those below it keep from first pass to backward."""
        ruler, is_last = self.ruler, group == len(self.groups) - 1
        sums, layers = ruler.sums, len(ruler.model.layers)
        start, stop = self.groups[group]
        choices = self._choices(Role.LAST_TOP) if is_last else self.kept
        graphs = ruler.latest(choices.graphs)
        x = ruler.x_row() * (graphs if is_last else np.full_like(graphs, ruler.run.tokens))
        x = x + ruler.x_row() * ruler.run.tokens * group
        # The last group's only kept O would be the left out chunk's: then there is no buffer.
        written = (self.kept.attention > 1) | (choices.graphs > 0) | (not is_last)
        end = layers - 1 if is_last else stop
        rows = sums.attention[start] + (sums.attention[end] - sums.attention[start]) * written
        attention = rows * ruler.latest(self.kept.attention)
        covered = self.kept.attention >= self.kept.graphs
        cells = np.where(covered, sums.narrow[end], sums.wide[end])
        if is_last:
            cells = cells + sums.wide[layers] - sums.wide[end]
        firsts = [first for first, _ in self.groups[: group + 1]]
        inputs = sums.inputs[stop] - sum(sums.inputs[f + 1] - sums.inputs[f] for f in firsts)
        activations = (cells + inputs) * self.kept.graphs
        if choices is not self.kept:
            # The last group, of one layer, keeps none.
            activations = activations - (sums.wide[layers] - sums.wide[end]) * self.kept.graphs
        return np.stack([x, attention, activations])

    def _open(self, group: int) -> Array:
        """[3, F]: O and LSE kept while the group is open."""
        ruler, schedule = self.ruler, self.schedule
        rebuilt = group == len(self.groups) - 1 or not schedule.kv_kept
        first, stop = self.groups[group]
        rows = ruler.sums.attention[stop - 1] - ruler.sums.attention[first]
        tokens = ruler.run.tokens - ruler.latest(self.kept.attention)
        tokens = tokens * (self.kept.attention < len(ruler.chunks) - 1)
        size = rows * tokens * (schedule.attention_open and rebuilt)
        return np.stack([self._zero, size, self._zero])

    def _fixed(self) -> tuple[Array, Array]:
        """[F, T] on the device, whatever the phase: states, slots, graphs of a chunk, reserve.
        [1, 1] on host: optimizer states there."""
        ruler = self.ruler
        held = ruler.states_of(self.groups)
        parts = held.weights + held.gathered + held.optimizer
        inputs = INPUT_BYTES * ruler.run.batch * ruler.run.tokens
        fixed = parts + inputs + ruler.question.machine.reserve
        switches = self.schedule.kv_kept, self.schedule.attention_open
        slots = ruler.once(("slots", self.groups, *switches), self._slots)
        device = fixed + slots + self._momentary()[:, None]
        return device, np.full((1, 1), float(held.optimizer_on_host))

    def momentary(self) -> float:
        """What the bounds count beside arenas, weights and optimizer, of the first choice."""
        return float(self._momentary()[0])

    def _momentary(self) -> Array:
        """[F]: the graphs of the first chunk that runs backward, when no layer may have gradients
        yet; or those of the last, in the first group, when all layers have some. Of a single chunk
        the second is only the end of the step."""
        gradients = float(self.ruler.states_of(self.groups).gradients)
        widest = max(self._graphs(group) for group in range(len(self.groups)))
        last = self._graphs(0) * (len(self.ruler.chunks) > 1)
        # Where every chunk's graphs are kept there are none.
        some = self.kept.graphs < len(self.ruler.chunks)
        return np.asarray(np.maximum(widest * some, gradients + last * some))

    def _graphs(self, group: int) -> float:
        """Bytes of one chunk's graphs, from its forward to its backward, at least: what the probe
        saw layers save."""
        layers = self.ruler.model.layers[slice(*self.groups[group])]
        saved = [layer.activation_bytes for layer in layers]
        row = max(saved) if self.schedule.layer_checkpoint else sum(saved)
        return float(self.ruler.run.batch * self.ruler.sizes[0] * row)

    def _slots(self) -> Array:
        """[F, T]: device buffers that serve any layer, for what is on host."""
        ruler, chunk = self.ruler, self.ruler.sizes[0]
        layers, kept = ruler.model.layers, self.kept
        many = len(self.groups) > 1
        head = self._choices(Role.LAST_TOP).graphs
        graphs = np.maximum(head, kept.graphs * many)
        pair = min(2, len(ruler.chunks))
        x = (2 * pair if many else np.minimum(pair, head)) * ruler.x_row() * chunk
        row = max(ruler.attention_row(spec) for spec in layers)
        cell = max(ruler.cell_bytes(spec, with_attention=False) for spec in layers)
        free = np.stack(
            [x + self._zero, self._attention_slots() * row * chunk, 2.0 * cell * (graphs > 1)]
        )
        size = _spread(free, ON_HOST)
        if self.schedule.kv is Tier.HOST:
            block = min(self.schedule.kv_block, ruler.run.tokens) * (len(ruler.chunks) > 1)
            kv, dkv = max(map(ruler.kv_row, layers)), max(map(ruler.dkv_row, layers))
            size = size + (chunk + 2 * block) * kv + (chunk + block) * dkv
        return np.asarray(size)

    def _attention_slots(self) -> Array:
        """[F]: one for each place in a group whose O and LSE cross the link."""
        sizes = [stop - first for first, stop in self.groups]
        graphs = self._choices(Role.LAST_TOP).graphs
        several = len(self.ruler.chunks) > 1
        is_open = self.schedule.attention_open and several
        written = (self.kept.attention > 1) | ((self.kept.attention > 0) & (graphs > 0)) | is_open
        last = (sizes[-1] - 1) * written
        earlier = max(sizes[:-1], default=0)
        kept = earlier * (self.kept.attention > 0)
        opened = max(0, earlier - 1) * (is_open and not self.schedule.kv_kept)
        return np.asarray(np.maximum(np.maximum(last, kept), opened), dtype=np.float64)
