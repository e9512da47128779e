"""Stream weights and their gradients between main memory and two slots on the device.

    fetch     weights 0 | weights 1 |           weights 2 |
    compute              group 0                           | group 1
    evict                                                    (backward)  gradients 1 |

A model's parameters stay the same objects, in one block of main memory, which is locked if a GPU
copies from it. While a step runs, modules have other parameters instead: views of slots of the
program's device arena, one for the groups of even numbers and one for those of odd numbers, so that
the next group arrives while this one computes. A parameter keeps its address in its slot during a
step: graphs that saved it find it there when its group has been fetched again. Scales and tables of
packed weights are stored and fetched with them.

Gradients are summed in slots of the same layout, in fp32, and evicted once, when their group
closes. If `.grad` holds those of earlier batches, sums begin with them, so that they are added in
the order, and to the bits, of a step whose gradients stay on the device. Each of several ranks has
all weights in its own main memory; ranks' sums are added before eviction, and those of earlier
batches after that.

An update may still be running when the next step begins (`await_update`): a unit (the parameters of
one layer, or those outside the layers) is fetched after its update. No gradient is evicted before
that, since every group runs forward first.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import (
    ParameterSlot,
    ShardedParameters,
    find_parameters,
    gradient_dtype,
)
from farspan.engine.gradients import GradientAccumulator, accumulate, is_hooked
from farspan.engine.tiers import Arena, CopyEngine, refuse_beyond_together
from farspan.hf.quantized import (
    BITSANDBYTES,
    elements,
    empty_like,
    empty_parts,
    format_of,
    is_known,
    parts_of,
    put_parts,
)
from farspan.hf.stages import CausalLMStages
from farspan.hf.swap import Part, put, put_in
from farspan.program import buffer_names as names
from farspan.program.program import Gather, Program, aligned
from farspan.program.work import linear_products
from farspan.spec import ModelSpec, Tier, UnsupportedError


@dataclass(slots=True)
class _Streamed:
    """A parameter in main memory whose weights are copied to slots for each pass of its group."""

    own: nn.Parameter  # the user's parameter, in main memory
    used: nn.Parameter  # the modules' parameter during a step, in a slot
    slots: list[ParameterSlot]
    trained: bool
    offsets: list[int] = field(default_factory=list)  # of its parts, in bytes of its unit's weights
    sum_offset: int = 0  # of its gradient's sum, in bytes
    addresses: list[int] = field(default_factory=list)  # of its parts in main memory
    home: Tensor | None = None  # its gradient's sum in main memory
    sum: Tensor | None = None  # its gradient's sum in a slot
    norm: Tensor | None = None  # L2 norm of `home`, a scalar on the device

    def parts_in(self, memory: Arena, start: int) -> list[Tensor]:
        """Return views of the parameter's tensors in an arena; its unit begins at byte `start`."""
        parts = zip(self.offsets, parts_of(self.own), strict=True)
        return [memory.view(start + o, tuple(part.shape), part.dtype) for o, part in parts]

    def sum_bytes(self) -> int:
        return self.own.numel() * accumulate_dtype(self.own.dtype).itemsize * self.trained


@dataclass(slots=True)
class _StreamedUnit:
    """Parameters that are copied together: those of one layer, or all outside the layers."""

    parameters: list[_Streamed] = field(default_factory=list)
    size: int = 0  # bytes of the weights
    sum_size: int = 0  # bytes of the gradients' sums
    memory: Tensor | None = None  # uint8: all weights, in main memory
    place: Tensor | None = None  # uint8: all weights, in their slot
    updated: "Future[None] | None" = None  # the running update of this unit

    def lay_out(self) -> None:
        """Assign each parameter an offset, without gaps. Parameters are placed by the largest power
        of two that divides their bytes, up to 4 KiB, largest first: so each is aligned for the
        widest loads, whatever the dtypes."""
        sizes = [(p, [part.nbytes for part in parts_of(p.own)]) for p in self.parameters]
        for p, of in sizes:
            p.offsets = [0] * len(of)
        every = ((p, place, size) for p, of in sizes for place, size in enumerate(of))
        for p, place, size in sorted(every, key=lambda part: _divides(part[2])):
            p.offsets[place], self.size = self.size, self.size + size
        for p in sorted(self.parameters, key=lambda p: _divides(p.sum_bytes())):
            p.sum_offset, self.sum_size = self.sum_size, self.sum_size + p.sum_bytes()
        self.size, self.sum_size = (-(-n // _LOAD) * _LOAD for n in (self.size, self.sum_size))

    def settle(self) -> None:
        """Wait for the optimizer's update of this unit, if one runs. Raises the update's error."""
        updated, self.updated = self.updated, None
        if updated is not None:
            updated.result()


class StreamedWeights:
    """Weights of a model in main memory, copied to the device layer by layer. Unit l is layer l,
    the last unit all modules outside. Memory for gradients is allocated by the first step that has
    them."""

    def __init__(self, stages: CausalLMStages, ranks: ParallelContext | None = None) -> None:
        """Move the model to main memory, in place; steps compute on the device of `stages`. Raises
        UnsupportedError for parameters that layers share, or whose class may hold other data."""
        packed = format_of(stages.model.config) or {}
        by = packed.get("quant_method", BITSANDBYTES)
        if by != BITSANDBYTES:  # some keep numbers in buffers, too
            raise UnsupportedError(
                f"weights: the model is quantised by {by}, but host supports only plain weights "
                f"and those of {BITSANDBYTES}; use device"
            )
        self.device = stages.device
        self._model, self._layers = stages.model, list(stages.layers)
        self._weights, self._sums = (Arena(Tier.HOST, stages.device) for _ in range(2))
        layers = self._layers
        # A pipeline stage has other stages' layers on the meta device.
        here = [i for i, of in enumerate(layers) if not any(p.is_meta for p in of.parameters())]
        found = find_parameters(stages.model, layers, here, "weights", "weights: device")
        self._units = [_StreamedUnit() for _ in found]
        self._left: list[_Streamed] = []  # with gradients evicted in this step
        self._received: list[nn.Parameter] = []
        for one, parameters in zip(self._units, found, strict=True):
            for own, (name, slots) in parameters.items():
                if not is_known(own):
                    raise UnsupportedError(
                        f"weights: {name} is a {type(own).__name__}, not a plain parameter, and "
                        "host supports only plain parameters; use device"
                    )
                used = empty_like(own, self.device)
                one.parameters.append(_Streamed(own, used, slots, own.requires_grad))
            one.lay_out()
        self._move(ranks)
        put((table, name, buffer.cpu()) for table, name, buffer in _buffers_of(self._model))

    def _move(self, ranks: ParallelContext | None) -> None:
        """Move all parameters into one block of main memory. Raises TooLarge."""
        size = sum(aligned(one.size) for one in self._units)
        if self.device.type != "cpu":  # a CPU frees the old pages as new ones fill
            what = "moving the model's weights to main memory"
            advice = "use a smaller model, or a machine with more main memory"
            refuse_beyond_together(ranks, size, what, advice)
        self._weights.reserve(size)
        start = 0
        for one in self._units:
            one.memory = self._weights.view(start, (one.size,), torch.uint8)
            for p in one.parameters:
                kept = p.parts_in(self._weights, start)
                for place, part in zip(kept, parts_of(p.own), strict=True):
                    place.copy_(part.detach())
                put_parts(p.own, kept)
                p.addresses = _addresses(p.own)
            start += aligned(one.size)

    def reserve_sums(self) -> None:
        self._sums.reserve(self._sum_bytes())
        start = 0
        for one in self._units:
            for p in one.parameters:
                if p.trained and p.home is None:
                    wide = accumulate_dtype(p.own.dtype)
                    p.home = self._sums.view(start + p.sum_offset, tuple(p.own.shape), wide)
            start += aligned(one.sum_size)

    def release(self) -> None:
        """Drop and unlock the memory of gradients. A `.grad` that views this memory stays valid."""
        for one in self._units:
            one.settle()
        for p in self._all():
            p.home = None
        self._sums.release()

    def is_of(self, stages: CausalLMStages) -> bool:
        """Return whether these are the model's weights in its present state: the same parameters in
        the same modules, the same ones trained, and all in this block of memory. Another step may
        have moved them, or the user replaced them."""
        here = self._model is stages.model and self.device == stages.device
        if not here or self._layers != list(stages.layers):
            return False
        known = {(id(module), name): p for p in self._all() for module, name in p.slots}
        for module in stages.model.modules():
            for name, own in module._parameters.items():
                if own is None or own.is_meta:  # of another pipeline stage
                    continue
                p = known.pop((id(module), name), None)
                if p is None or p.own is not own or own.requires_grad != p.trained:
                    return False
        return not known and self.has_all()

    def has_all(self) -> bool:
        """Return whether the values of all parameters are still in this block of memory."""
        return all(_addresses(p.own) == p.addresses for p in self._all())

    def is_updating(self) -> bool:
        """Return whether an optimizer's update since the last step may still write to weights."""
        return any(one.updated is not None for one in self._units)

    def counted(self, spec: ModelSpec) -> ModelSpec:
        """Return `spec` with the true number and bytes of the weights in this stage's layers."""
        wide = spec.accumulate_bytes()
        works = []
        for layer, one in zip(spec.layers, self._units, strict=False):
            count = sum(elements(p.own) for p in one.parameters)
            less = count * spec.element_bytes - one.size
            # Ranks of a pipeline cut chunks by products, so all ranks count the same.
            products = layer.work.products or ((1, linear_products(spec, layer)),)
            known = replace(layer.work, parameters=count, trainable=one.sum_size // wide)
            works.append(replace(known, products=products, packed=less))
        pairs = zip(spec.layers, works, strict=True)
        outer = self._units[-1].size // spec.element_bytes
        return replace(
            spec,
            layers=tuple(replace(layer, work=work) for layer, work in pairs),
            parameters=sum(work.parameters for work in works) + outer,
            trainable=sum(one.sum_size for one in self._units) // wide,
        )

    def trained(self) -> list[list[nn.Parameter]]:
        """Return the user's trained parameters by unit, in the order of a step's fetches."""
        units = [*self._units[-1:], *self._units[:-1]]
        return [[p.own for p in one.parameters if p.trained] for one in units]

    def norms(self) -> dict[int, Tensor]:
        """Return the norms of gradients that the device computed in the latest step, by the id of
        the user's parameter. They exclude parameters whose `.grad` is no longer that step's sum."""
        return {
            id(p.own): p.norm
            for p in self._all()
            if p.norm is not None and p.own.grad is not None and p.own.grad is p.home
        }

    def await_update(self, updated: "Sequence[Future[None]]") -> None:
        """Make the next step wait for each unit's future, in the order of `trained`, before it
        fetches the unit's weights."""
        units = [*self._units[-1:], *self._units[:-1]]
        for one, done in zip(units, updated, strict=True):
            one.updated = done

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in main memory."""
        return self._weights.nbytes

    def gradient_bytes(self) -> int:
        """Return the main memory for gradients: sums, and each `.grad` of a narrower dtype."""
        trained = [p.own for p in self._all() if p.trained]
        narrow = (p.numel() * gradient_dtype(p).itemsize for p in trained if not _takes_sums(p))
        return self._sum_bytes() + sum(narrow)

    def missing_bytes(self) -> int:
        """Return the bytes of main memory that the next step allocates for gradients."""
        return self._sum_bytes() - self._sums.nbytes

    def _sum_bytes(self) -> int:
        return sum(aligned(one.sum_size) for one in self._units)

    def _all(self) -> Iterator[_Streamed]:
        for one in self._units:
            yield from one.parameters

    # -- a step ---------------------------------------------------------------------------------

    @contextmanager
    def in_slots(self, program: Program, device: Arena) -> Iterator[None]:
        """Run the body with modules' parameters in device slots, and buffers on the device."""
        self._received.clear()
        self._left.clear()
        if program.trains():
            self.reserve_sums()
        for p in self._all() if program.trains() else ():
            if is_hooked(p.own) and p.own.grad is p.home and p.home is not None:
                p.own.grad = p.home.clone()  # hooks see the new gradient without the old
        for number in program.own_groups():
            units = [self._units[layer] for layer in range(*program.groups[number])]
            self._place(program, device, units, number % 2)
        self._place(program, device, self._units[-1:], None)
        parts: list[Part] = [
            (module._parameters, name, p.used) for p in self._all() for module, name in p.slots
        ]
        parts += [(table, name, b.to(self.device)) for table, name, b in _buffers_of(self._model)]
        try:
            with put_in(parts):
                yield
        finally:  # free references to the slots' memory
            for p in self._all():
                put_parts(p.used, empty_parts(p.used, self.device))
                p.sum = None
            for one in self._units:
                one.place = None

    def _place(
        self, program: Program, device: Arena, units: list[_StreamedUnit], slot: int | None
    ) -> None:
        buffers = program.buffers
        outer = names.WEIGHTS_OUTER, names.WEIGHT_GRADIENTS_OUTER
        weights, sums = outer if slot is None else (w[slot] for w in _RINGS)
        start = buffers[weights].address
        start_of_sums = buffers[sums].address if sums in buffers else None
        for one in units:
            assert one.memory is not None
            one.place = device.view(start, tuple(one.memory.shape), torch.uint8)
            for p in one.parameters:
                shape, dtype = tuple(p.own.shape), p.own.dtype
                put_parts(p.used, p.parts_in(device, start))
                p.used.grad_dtype = p.own.grad_dtype
                p.sum = None
                if start_of_sums is not None and p.trained:
                    place = start_of_sums + p.sum_offset
                    p.sum = device.view(place, shape, accumulate_dtype(dtype))
            start += one.size
            if start_of_sums is not None:
                start_of_sums += one.sum_size

    def fetch(self, program: Program, i: Gather, copies: CopyEngine) -> None:
        """Start copying the weights of a group of layers into its slot."""
        for one in self._of(program, i.group, outer=i.outer):
            assert one.memory is not None
            assert one.place is not None
            one.settle()
            copies.fetch(one.place, one.memory)

    def open(
        self, program: Program, i: Gather, copies: CopyEngine, sums: GradientAccumulator
    ) -> None:
        """Set the gradient sums of a group to zero in their slot or, on a single rank, to the value
        of `.grad` if its dtype allows."""
        alone = program.share.rank.layout.devices() == 1
        for p in self._trained(program, i.group, outer=i.outer):
            assert p.sum is not None
            begins = alone and _takes_sums(p.own) and not is_hooked(p.own)
            before = p.own.grad if begins else None
            if before is not None:
                copies.fetch(p.sum, before)
            sums.place(p.used, p.sum, fresh=before is None)

    def reduce(
        self, program: Program, group: int, sums: GradientAccumulator, sharded: ShardedParameters
    ) -> None:
        """Sum a group's gradients over ranks, in the order of ranks, and add `.grad` if it has the
        dtype of the sums. No copy may read or write the sums meanwhile."""
        outer = [len(self._units) - 1] * program.closes_outer(group)
        for unit in (*range(*program.groups[group]), *outer):
            own = {p.own: p for p in self._units[unit].parameters if p.trained}
            taken = {p.own: sums.take(p.used) for p in own.values()}
            totals = {p: total for p, total in taken.items() if total is not None}
            before = {p: p.grad for p in own if p.grad is not None and _takes_sums(p)}
            places = {p: one.sum for p, one in own.items() if one.sum is not None}
            for parameter, total in sharded.sums(unit, totals, places, before):
                p = own[parameter]
                assert p.sum is not None
                if total.data_ptr() != p.sum.data_ptr():
                    p.sum.copy_(total)
                sums.place(p.used, p.sum, fresh=False)

    def close(
        self, program: Program, group: int, copies: CopyEngine, sums: GradientAccumulator
    ) -> None:
        """Start copying the gradient sums of a group to main memory; the first group's include
        those of the modules outside the layers."""
        for p in self._trained(program, group, outer=program.closes_outer(group)):
            total = sums.take(p.used)
            if total is not None:
                assert p.home is not None
                p.norm = get_total_norm([total])
                copies.evict(p.home, total)
                self._left.append(p)

    def end(self, copies: CopyEngine) -> None:
        """Finish a step: wait for the copies, then set `.grad` of the user's parameters."""
        copies.synchronize()
        for p in self._left:
            assert p.home is not None
            self._received.append(p.own)
            if is_hooked(p.own):
                p.norm = None
                accumulate(p.own, p.home.to(p.own.grad_dtype or p.home.dtype))
                continue
            if _takes_sums(p.own):
                p.own.grad = p.home
                continue
            if p.own.grad is not None:
                p.home.add_(p.own.grad)
            p.own.grad = p.home.to(p.own.grad_dtype or p.home.dtype)
        self._left.clear()

    def received(self) -> list[nn.Parameter]:
        """Return the user's parameters to whose `.grad` the latest step has added."""
        return self._received

    def trained_outside(self) -> tuple[nn.Parameter, ...]:
        """Return trained parameters outside the layers, as steps use them: those in slots."""
        return tuple(p.used for p in self._units[-1].parameters if p.trained)

    def _of(self, program: Program, group: int, *, outer: bool) -> list[_StreamedUnit]:
        start, stop = program.groups[group]
        return [*self._units[start:stop], *self._units[-1:] * outer]

    def _trained(self, program: Program, group: int, *, outer: bool) -> Iterator[_Streamed]:
        for one in self._of(program, group, outer=outer):
            yield from (p for p in one.parameters if p.trained)


def _buffers_of(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Yield each buffer, such as a rotary table, with its name and its module's dictionary. Buffers
    of other pipeline stages are left out."""
    for module in model.modules():
        table = module._buffers
        yield from (
            (table, name, b) for name, b in table.items() if b is not None and not b.is_meta
        )


def computing_device(
    current: torch.device, wanted: torch.device | str | None, on_host: bool, ranks: object
) -> torch.device:
    """Return the device, with its index, on which a step computes: `wanted` if weights are streamed
    from main memory, else the model's `current` device. Raises UnsupportedError."""
    device = current if wanted is None else torch.empty(0, device=wanted).device
    if device != current and ranks is not None:
        raise UnsupportedError(
            f"device: the ranks compute on {current}, not on {device}; make their ParallelContext "
            "with that device"
        )
    if device != current and not on_host:
        raise UnsupportedError(
            f"device: the model is on {current}, not on {device}; move it there (model.to), or set "
            "schedule.weights to host"
        )
    return device


def _addresses(weight: nn.Parameter) -> list[int]:
    return [part.data_ptr() for part in parts_of(weight)]


_RINGS = names.WEIGHTS, names.WEIGHT_GRADIENTS
_LOAD = 16  # bytes, the widest load of a kernel


def _divides(size: int) -> int:
    """Return a sort key for bytes: multiples of larger powers of two, up to 4 KiB, come first."""
    return -(size & -size & 4095 or 4096)


def _takes_sums(parameter: nn.Parameter) -> bool:
    """Return whether `.grad` has the dtype of the gradient sums, fp32 or wider."""
    return parameter.grad_dtype in (None, accumulate_dtype(parameter.dtype))
