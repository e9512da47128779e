"""How devices share one step: the layout, a rank's place in it, and the tokens that are its own.

Ranks lie in the order tensor, ulysses, shards, ring, data, pipeline, neighbours in the first axis
being neighbours in number. Outside attention the tokens of every chunk are dealt in that order too:
rank i of the P that share a sequence has the i-th of P parts, as equal as whole tokens allow. So
the parts of ranks that are neighbours in an axis are one range, and chunk c of all ranks together
is a contiguous range of the sequence (FPDT 4.1), whatever its length.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from farspan.spec import ModelSpec, Refused, Schedule, Tier

AXES = ("tensor", "ulysses", "shards", "ring", "data", "pipeline")  # the innermost first
SEQUENCE = AXES[:4]  # those that share the tokens of a sequence

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the devices share one step; each field is a number of devices.

    Their product is the number of devices. With `fsdp`, weights, gradients and optimizer states
    are cut over all devices but those of `tensor` and `pipeline`, which hold their own part anyway.
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
                raise Refused(f"{name}: expected a whole number of devices >= 1, got {value!r}")
        if not isinstance(self.fsdp, bool):
            raise Refused(f"fsdp: expected true or false, got {self.fsdp!r}")

    def sequence(self) -> int:
        """Devices that share the tokens of one sequence outside attention."""
        return self.ulysses * self.shards * self.ring * self.tensor

    def devices(self) -> int:
        return self.sequence() * self.pipeline * self.data


def sequence_layout(model: ModelSpec, devices: int) -> Layout:
    """The layout in which `devices` share every sequence: as many as the K, V heads allow share the
    heads, the rest share each chunk's K, V. Of recurrent layers they share the layers."""
    if model.is_recurrent():
        return Layout(pipeline=devices)
    ulysses = gcd(devices, *(layer.kv_heads for layer in model.layers))
    return Layout(ulysses=ulysses, shards=devices // ulysses)


ALONE = Layout()  # of one device


def refuse_together(schedule: Schedule, layout: Layout) -> None:
    """Raises Refused for a schedule that the ranks of a layout cannot run."""
    if schedule.sparse is not None and layout.shards * layout.ring > 1:
        raise Refused(
            "sparse: pages are chosen from all keys of a head, which shards and rings spread over "
            "ranks; use ulysses"
        )
    if layout.ring > 1 and schedule.kv is Tier.HOST:
        raise Refused("kv: a ring sends K, V from the device; use device, or shards for the ring")
    if layout.tensor > 1:
        if schedule.activations_kept:
            raise Refused(
                "activations_kept: with tensor parallelism a layer saves gathered tokens, which "
                "are not planned for; use 0, or ulysses for tensor"
            )
        if schedule.mlp_tokens is not None:
            raise Refused("mlp_tokens: blocks cut by tensor have no tiles; use null, or ulysses")


@dataclass(frozen=True)
class Rank:
    """One of a layout's ranks."""

    layout: Layout = ALONE
    number: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.number < self.layout.devices(), (self.layout, self.number)

    @cached_property
    def along(self) -> dict[str, int]:
        """Its index along each axis."""
        found, rest = {}, self.number
        for axis in AXES:
            rest, found[axis] = divmod(rest, getattr(self.layout, axis))
        return found

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Numbers of the ranks that differ from it in these axes alone, ascending, itself too."""
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
        """The tokens of a chunk that belong to it and its peers along these axes, which must be the
        innermost ones."""
        assert axes == SEQUENCE[: len(axes)], axes
        places = [n % self.layout.sequence() for n in self.peers(*axes)]
        return part(chunk, min(places), self.layout.sequence())[0], (
            part(chunk, max(places), self.layout.sequence())[1]
        )


ONLY = Rank()  # where there is one device


def part(span: Range, index: int, count: int) -> Range:
    """The `index`-th of `count` parts of a range, as equal as whole tokens allow."""
    start, stop = span
    size = stop - start
    return start + size * index // count, start + size * (index + 1) // count
