"""The schedules that the search chooses from: every cut, every switch, on a grid.

Groups. For every number of groups G, layers are cut as evenly as they go; where boundaries lie on
the device, also tapered: the backward of an early group runs when the boundaries above it are
gone, so it may be larger by what they took. A cut is tapered when each group takes what fits under
the lowest level that holds all layers; no other cut into G groups has a lower one."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from farspan.planner.evaluate import most_layers
from farspan.planner.request import Question
from farspan.program.layout import group_ranges
from farspan.spec import ModelSpec, Schedule, Tier

Cut = tuple[int, ...]  # sizes of the groups, first group first

# A program of so many cells has about 200,000 instructions: three seconds to build and walk.
MOST_CELLS = 24_576
SMALLEST_CHUNK = 1024
MOST_CHUNKS = 512  # more of them cost more overhead, and save nothing that a chunk still holds
PARTS = 16  # of the sequence: fractions kept are multiples of 1 / PARTS, in whole chunks
PARTS_OF_ACTIVATIONS = 8


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen. Tiers of x, attention and activations and the fractions are left to
    `bound`."""

    chunks: tuple[int, ...]
    cuts: tuple[Cut, ...]
    attention: tuple[float, ...]
    activations: tuple[float, ...]
    kv: tuple[Tier, ...] = tuple(Tier)
    staged: bool = False  # its groups are stages, whose K, V stay where they are
    lean: bool = False  # only switches that keep nothing which can be made again
    weights: Tier = Tier.DEVICE

    def schedules(self) -> Iterator[Schedule]:
        """One for every chunk, cut and set of switches that makes a difference."""
        for chunk in self.chunks:
            for cut in self.cuts:
                for base in self._switches(cut):
                    yield replace(base, chunk=chunk, groups=cut)

    def families(self) -> Iterator[tuple[Schedule, tuple[Cut, ...]]]:
        """The same, those that differ in their cut together: all but the cut, and every cut."""
        found: dict[Schedule, list[Cut]] = {}
        for schedule in replace(self, chunks=self.chunks[:1]).schedules():
            assert isinstance(schedule.groups, tuple)
            found.setdefault(replace(schedule, groups=1), []).append(schedule.groups)
        for chunk in self.chunks:
            for base, of in found.items():
                yield replace(base, chunk=chunk), tuple(of)

    def _switches(self, cut: Cut) -> Iterator[Schedule]:
        is_deep = max(cut) > 1
        opens = (False, True) if is_deep and not self.lean else (False,)
        for kv in self.kv:
            for kept, home in self._homes(cut, kv):
                for is_open in opens:
                    for checkpoint in (False, True) if is_deep else (False,):
                        yield Schedule(
                            kv=kv,
                            kv_kept=kept,
                            kv_home=home,
                            attention_open=is_open,
                            layer_checkpoint=checkpoint,
                            weights=self.weights,
                        )

    def _homes(self, cut: Cut, kv: Tier) -> Iterator[tuple[bool, Tier]]:
        yield False, Tier.HOST
        if len(cut) > 1 and not self.lean and not self.staged:
            yield True, Tier.HOST
            if kv is Tier.DEVICE:
                yield True, Tier.DEVICE


def whole_space(question: Question) -> Space:
    """Everything that farspan can do for this question."""
    layout, model = question.layout, question.model
    stages = group_ranges(Schedule(), len(model.layers), layout.pipeline)
    activations = tuple(part / PARTS_OF_ACTIVATIONS for part in range(PARTS_OF_ACTIVATIONS + 1))
    return Space(
        chunk_sizes(question),
        # The stages of a pipeline are its groups.
        cuts(model) if layout.pipeline == 1 else (tuple(stop - start for start, stop in stages),),
        tuple(part / PARTS for part in range(PARTS + 1)),
        # What ranks cannot run (layout.refuse_together).
        activations if layout.tensor == 1 else (0.0,),
        kv=tuple(Tier) if layout.ring == 1 else (Tier.DEVICE,),
        staged=layout.pipeline > 1,
        weights=question.weights,
    )


def thriftiest(question: Question) -> Space:
    """The part of the space that takes the least memory: nothing is kept that can be recomputed,
    and what a cell holds grows with its chunk."""
    whole = whole_space(question)
    return replace(whole, chunks=whole.chunks[:2], attention=(0.0,), activations=(0.0,), lean=True)


def chunk_sizes(question: Question) -> tuple[int, ...]:
    """Powers of two, and the whole sequence, in tokens of the sequence."""
    tokens, layers = question.run.tokens, most_layers(question)
    smallest = max(SMALLEST_CHUNK * question.layout.sequence(), layers * tokens // MOST_CELLS)
    smallest = max(smallest, tokens // MOST_CHUNKS)
    sizes = [tokens]
    size = 1
    while size < tokens:
        if size >= smallest:
            sizes.append(size)
        size *= 2
    return tuple(sorted(sizes))


def cuts(model: ModelSpec) -> tuple[Cut, ...]:
    """Sizes of the groups: even and tapered for every number of groups that differs."""
    layers = len(model.layers)
    found: dict[Cut, None] = {}
    for size in range(1, layers + 1):
        count = -(-layers // size)
        found[even(layers, count)] = None
        found[tapered(model, count)] = None
    return tuple(found)


def even(layers: int, groups: int) -> tuple[int, ...]:
    """Sizes that differ by at most one; the larger ones last, where a layer is recomputed less."""
    size, more = divmod(layers, groups)
    return (size,) * (groups - more) + (size + 1,) * more


def tapered(model: ModelSpec, groups: int) -> tuple[int, ...]:
    """The cut into `groups` whose fullest backward holds the fewest bytes a token: of boundaries
    below, the gradient of the group's output unless that is the head's, and the group's own K, V,
    dK, dV."""
    layers, sizes = len(model.layers), [layer.kv_elements() for layer in model.layers]
    boundary = model.hidden * model.element_bytes
    # Recurrent layers have none; those that attend are dealt evenly among them.
    elements = sizes[0] or max(1, sum(sizes) // layers)
    own = elements * (model.element_bytes + model.accumulate_bytes())
    below = [(i + (i < groups - 1)) * boundary for i in range(groups)]

    def fitting(level: int) -> list[int]:
        """The largest groups under a level, at least a layer each."""
        return [min(layers, max(1, (level - size) // own)) for size in below]

    levels = sorted({size + count * own for size in below for count in range(1, layers + 1)})
    lowest = bisect_left(levels, True, key=lambda level: sum(fitting(level)) >= layers)
    sizes = fitting(levels[lowest])
    surplus = sum(sizes) - layers
    # The last groups recompute the most: they give back what is too much.
    for index in reversed(range(groups)):
        less = min(surplus, sizes[index] - 1)
        sizes[index] -= less
        surplus -= less
    return tuple(sizes)
