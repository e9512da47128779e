"""Weights and their gradients in main memory, those of two groups of layers on the device.

    fetch     weights 0 | weights 1 |           weights 2 |
    compute              group 0                           | group 1
    evict                                                    (backward)  gradients 1 |

A model's parameters stay the objects they are, in one slab of main memory, which is locked where a
GPU copies from it. While a step runs, modules have others in their place: views of slots of the
program's device arena, one for the groups of even numbers and one for those of odd numbers, so that
the next group comes while this one computes. A parameter's place in its slot is the same all step
long: graphs that saved it find it there when its group has come again.

Gradients are added up in slots like them, in fp32, and leave once, when their group closes. Where
`.grad` holds those of earlier batches, they come first, so that sums are added in the order, and to
the bits, of a step whose gradients stay on the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.fsdp import ParameterSlot, find_parameters
from farspan.engine.gradients import GradientAccumulator
from farspan.engine.tiers import Arena, CopyEngine
from farspan.hf.stages import CausalLMStages
from farspan.program import buffer_names as names
from farspan.program.program import Gather, Program, aligned
from farspan.spec import ModelSpec, Tier, UnsupportedError


@dataclass(slots=True)
class _Streamed:
    """A parameter."""

    own: nn.Parameter  # the user's, in main memory
    used: nn.Parameter  # what modules have while a step runs, in a slot
    slots: list[ParameterSlot]
    offset: int  # in elements, of its unit's weights
    sum_offset: int  # and of their gradients
    address: int = 0  # where it is in main memory
    home: Tensor | None = None  # where its gradient's sum is kept in main memory
    sum: Tensor | None = None  # where it is added up, in a slot


@dataclass(slots=True)
class _StreamedUnit:
    """A layer, or everything outside the layers."""

    parameters: list[_Streamed] = field(default_factory=list)
    memory: Tensor | None = None  # uint8: the weights of all, in main memory
    place: Tensor | None = None  # uint8: where they come to


class StreamedWeights:
    """The weights of a model that live in main memory. Unit l is layer l, the last is everything
    outside the layers."""

    def __init__(self, boundary: CausalLMStages) -> None:
        """Moves the parameters to main memory, in place. Raises UnsupportedError for a model on a
        GPU, one whose parameters are of several dtypes, or of which layers share one."""
        if boundary.device.type != "cpu":
            raise UnsupportedError(
                f"weights: host is for models on a CPU so far, this one is on {boundary.device}; "
                "use device"
            )
        self._dtype = boundary.dtype
        self._weights, self._sums = (Arena(Tier.HOST, boundary.device) for _ in range(2))
        layers = list(boundary.layers)
        found = find_parameters(boundary.model, layers, range(len(layers)))
        self._units = [_StreamedUnit() for _ in found]
        self._left: list[_Streamed] = []  # whose gradients have left in this step
        sizes, sums = [0] * len(found), [0] * len(found)
        for unit, (one, parameters) in enumerate(zip(self._units, found, strict=True)):
            for own, (name, slots) in parameters.items():
                if own.dtype != boundary.dtype:
                    raise UnsupportedError(
                        f"weights: {name} is in {own.dtype} and others in {boundary.dtype}; load "
                        "the model in one dtype, or set weights: device"
                    )
                used = nn.Parameter(own.new_empty(0), own.requires_grad)
                one.parameters.append(_Streamed(own, used, slots, sizes[unit], sums[unit]))
                sizes[unit] += own.numel()
                sums[unit] += own.numel() * own.requires_grad
        self._move(sizes, sums)

    def _move(self, sizes: Sequence[int], sums: Sequence[int]) -> None:
        """Have the parameters lie one behind the other, and make room for their gradients."""
        dtype, wide = self._dtype, accumulate_dtype(self._dtype)
        self._weights.reserve(sum(aligned(size * dtype.itemsize) for size in sizes))
        self._sums.reserve(sum(aligned(size * wide.itemsize) for size in sums))
        start = start_of_sums = 0
        for one, size, size_of_sums in zip(self._units, sizes, sums, strict=True):
            one.memory = self._weights.view(start, (size * dtype.itemsize,), torch.uint8)
            for p in one.parameters:
                place = start + p.offset * dtype.itemsize
                kept = self._weights.view(place, tuple(p.own.shape), dtype)
                kept.copy_(p.own.detach())
                p.own.data = kept
                p.address = kept.data_ptr()
                if p.own.requires_grad:
                    place = start_of_sums + p.sum_offset * wide.itemsize
                    p.home = self._sums.view(place, tuple(p.own.shape), wide)
            start += aligned(size * dtype.itemsize)
            start_of_sums += aligned(size_of_sums * wide.itemsize)

    def is_current(self) -> bool:
        """Whether modules still have these parameters, and they still lie here: another step may
        have moved them, or somebody put others in their place."""
        return all(
            module._parameters.get(name) is p.own and p.own.data_ptr() == p.address
            for one in self._units
            for p in one.parameters
            for module, name in p.slots
        )

    def counted(self, spec: ModelSpec) -> ModelSpec:
        """The description of the model with the elements of each layer's weights."""
        layers = []
        for layer, one in zip(spec.layers, self._units, strict=False):
            elements = [(p.own.numel(), p.own.requires_grad) for p in one.parameters]
            work = replace(
                layer.work,
                parameters=sum(count for count, _ in elements),
                trainable=sum(count for count, trained in elements if trained),
            )
            layers.append(replace(layer, work=work))
        return replace(spec, layers=tuple(layers))

    # -- a step ---------------------------------------------------------------------------------

    def begin(self, program: Program, device: Arena) -> None:
        """Modules have the parameters that lie in the program's slots of the device's arena."""
        for number, group in enumerate(program.groups):
            units = [self._units[layer] for layer in range(*group)]
            self._place(program, device, units, number % 2)
        self._place(program, device, self._units[-1:], None)
        self._put(used=True)

    def _place(
        self, program: Program, device: Arena, units: list[_StreamedUnit], slot: int | None
    ) -> None:
        buffers, dtype, wide = program.buffers, self._dtype, accumulate_dtype(self._dtype)
        outer = names.WEIGHTS_OUTER, names.WEIGHT_GRADIENTS_OUTER
        weights, sums = outer if slot is None else (w[slot] for w in _RINGS)
        start = buffers[weights].address
        start_of_sums = buffers[sums].address if sums in buffers else None
        for one in units:
            assert one.memory is not None
            one.place = device.view(start, tuple(one.memory.shape), torch.uint8)
            for p in one.parameters:
                shape = tuple(p.own.shape)
                p.used.data = device.view(start + p.offset * dtype.itemsize, shape, dtype)
                p.used.requires_grad_(p.own.requires_grad)
                p.used.grad_dtype = p.own.grad_dtype
                p.sum = None
                if start_of_sums is not None and p.own.requires_grad:
                    place = start_of_sums + p.sum_offset * wide.itemsize
                    p.sum = device.view(place, shape, wide)
            start += len(one.memory)
            if start_of_sums is not None:
                trained = sum(p.own.numel() for p in one.parameters if p.own.requires_grad)
                start_of_sums += trained * wide.itemsize

    def fetch(self, program: Program, i: Gather, copies: CopyEngine) -> None:
        """The weights of a group come to their slot."""
        for one in self._of(program, i.group, outer=i.outer):
            assert one.memory is not None
            assert one.place is not None
            copies.fetch(one.place, one.memory)

    def open(
        self, program: Program, i: Gather, copies: CopyEngine, sums: GradientAccumulator
    ) -> None:
        """Sums begin in their slot, with what `.grad` holds where that is added to as it is."""
        for p in self._trained(program, i.group, outer=i.outer):
            assert p.sum is not None
            before = p.own.grad if _takes_sums(p.own) else None
            if before is not None:
                copies.fetch(p.sum, before)
            sums.place(p.used, p.sum, fresh=before is None)

    def close(
        self, program: Program, group: int, copies: CopyEngine, sums: GradientAccumulator
    ) -> None:
        """The sums leave for main memory, with the first group those of what is outside."""
        for p in self._trained(program, group, outer=group == 0):
            total = sums.take(p.used)
            if total is not None:
                assert p.home is not None
                copies.evict(p.home, total)
                self._left.append(p)

    def end(self, copies: CopyEngine) -> None:
        """A step is over: modules have the user's parameters again, and these their gradients, for
        which the CPU waits."""
        self._put(used=False)
        copies.synchronize()
        for p in self._left:
            assert p.home is not None
            if _takes_sums(p.own):
                p.own.grad = p.home
                continue
            if p.own.grad is not None:
                p.home.add_(p.own.grad)
            p.own.grad = p.home.to(p.own.grad_dtype or p.home.dtype)
        self._left.clear()

    def abandon(self) -> None:
        """A step was not finished."""
        self._put(used=False)
        self._left.clear()

    def trained_outside(self) -> tuple[nn.Parameter, ...]:
        """What modules outside the layers have while a step runs, and is trained."""
        return tuple(p.used for p in self._units[-1].parameters if p.own.requires_grad)

    def _of(self, program: Program, group: int, *, outer: bool) -> list[_StreamedUnit]:
        start, stop = program.groups[group]
        return [*self._units[start:stop], *self._units[-1:] * outer]

    def _trained(self, program: Program, group: int, *, outer: bool) -> Iterator[_Streamed]:
        for one in self._of(program, group, outer=outer):
            yield from (p for p in one.parameters if p.own.requires_grad)

    def _put(self, *, used: bool) -> None:
        for one in self._units:
            for p in one.parameters:
                for module, name in p.slots:
                    module._parameters[name] = p.used if used else p.own


_RINGS = names.WEIGHTS, names.WEIGHT_GRADIENTS


def _takes_sums(parameter: nn.Parameter) -> bool:
    """Whether `.grad` is in the dtype of sums."""
    return parameter.grad_dtype in (None, accumulate_dtype(parameter.dtype))
