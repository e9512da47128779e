"""Weights, gradients and optimizer states sharded over ranks as by FSDP2 (ZeRO, arXiv 1910.02054);
the program of a step says when to gather weights and reduce gradients.

A unit is a decoder layer, or everything outside the layers. Each of its parameters becomes a
DTensor sharded along dimension 0: rank r of P holds rows [r * c, (r + 1) * c), c = ceil(rows / P),
as `fully_shard` leaves it, with fewer rows or none on the last ranks. See docs/decisions/023.
`ShardPlacement` locates a rank's part of a tensor in the whole.

Note: [One parameter at a time]. The gathered rows of all ranks, padded to c each, are the parameter
followed by padding. So each parameter is gathered straight into its place, and summed from where
its gradient was accumulated: a unit needs no second copy of its weights or gradients.

Note: [Wholes keep their storage]. A unit's whole parameters are views of one storage, which is
emptied when the unit is released and has the same bytes when it is gathered again. Whole parameters
stay the same objects for good: accumulators are found by them, and graphs that saved them run
backward in a later pass. They have version counters of their own, so that filling the storage does
not count as a change.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.collectives import Communicator
from farspan.hf.swap import put
from farspan.spec import UnsupportedError

LINE = 16  # bytes: the widest load of a kernel; every parameter starts at a multiple

ParameterSlot = tuple[nn.Module, str]  # a module and the name of a parameter in it
UnitParameters = dict[nn.Parameter, tuple[str, list[ParameterSlot]]]  # first name, and all slots


def rows_of_rank(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows [start, stop) of a sharded tensor that `rank` holds, as in torch.chunk."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def shard_bytes(shape: Sequence[int], itemsize: int, ranks: int) -> int:
    """Return the bytes of a rank's shard of a parameter, padded to the largest shard, rank 0's."""
    rows = shape[0] if shape else 1
    width = torch.Size(shape[1:]).numel()
    return -(-rows // ranks) * width * itemsize


def line_aligned(size: int) -> int:
    return -(-size // LINE) * LINE


# -- parameters of a model ----------------------------------------------------------------------


def find_parameters(
    model: nn.Module,
    layers: Sequence[nn.Module],
    here: Collection[int],
    field: str = "fsdp",
    otherwise: str = "fsdp: false",
) -> list[UnitParameters]:
    """Return the parameters of each layer (layers not in `here`: none), then those outside the
    layers, each with its first name and the modules that have it. Raises UnsupportedError, naming
    the setting `field`, for shared or overlapping parameters, which cannot be moved."""
    unit_of: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if unit_of.setdefault(id(module), index) != index:
                raise UnsupportedError(
                    f"{field}: layers {unit_of[id(module)]} and {index} share a "
                    f"{type(module).__name__}; set {otherwise}"
                )
    units: list[UnitParameters] = [{} for _ in range(len(layers) + 1)]
    seen: dict[nn.Parameter, int] = {}
    for path, module in model.named_modules():
        index = unit_of.get(id(module), len(layers))
        if index not in here and index < len(layers):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            if seen.setdefault(parameter, index) != index:
                raise UnsupportedError(
                    f"{field}: {full} is shared by several layers; set {otherwise}"
                )
            units[index].setdefault(parameter, (full, []))[1].append((module, name))
    _refuse_overlaps(units, field, otherwise)
    return units


def parameter_slots(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return (module, id, dtype, shape, requires_grad) by name, to detect replaced parameters."""
    return {
        f"{path}.{leaf}" if path else leaf: (module, id(p), p.dtype, p.shape, p.requires_grad)
        for path, module in model.named_modules()
        for leaf, p in module._parameters.items()
        if p is not None
    }


def _refuse_overlaps(units: Sequence[UnitParameters], field: str, otherwise: str) -> None:
    """Raise UnsupportedError if two parameters share memory, which their shards would not share."""
    spans = []
    for unit in units:
        for x, (name, _) in unit.items():
            if x.numel() and x.data_ptr():  # has memory
                steps = zip(x.shape, x.stride(), strict=True)
                last = sum((extent - 1) * step for extent, step in steps)
                spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize, name))
    for (_, stop, first), (start, _, other) in pairwise(sorted(spans)):
        if start < stop:
            raise UnsupportedError(
                f"{field}: {other} and {first} are two parameters in the same memory; make them "
                f"one parameter, or set {otherwise}"
            )


def refuse_unshardable(parameter: nn.Parameter, name: str) -> None:
    why = None
    if type(parameter) is not nn.Parameter:
        why = f"a {type(parameter).__name__}, not a plain parameter"
    elif parameter.ndim == 0:
        why = "a scalar, which has no rows"
    elif not parameter.is_contiguous():
        why = f"not contiguous: its strides are {parameter.stride()}"
    elif parameter.grad is not None:
        why = "in use: it has a gradient; clear gradients first"
    if why is not None:
        raise UnsupportedError(f"fsdp: {name} cannot be sharded: it is {why}; or set fsdp: false")


Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ShardRegion:
    """A box of elements (a range per dimension): its place in a rank's tensor and in the whole."""

    here: tuple[int, ...]  # start in the rank's tensor
    there: tuple[int, ...]  # start in the whole
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return this box of the rank's tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.here, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Boxes (`ShardRegion`) of a tensor of `shape` that this rank holds; it may hold none."""

    shape: tuple[int, ...]
    boxes: tuple[ShardRegion, ...]

    def rows(self, start: int, stop: int) -> "ShardPlacement":
        """Return the placement that remains when the rank's tensor is cut to rows [start, stop)."""
        boxes = []
        for box in self.boxes:
            first, last = max(box.here[0], start), min(box.here[0] + box.sizes[0], stop)
            if first < last:
                there = box.there[0] + first - box.here[0]
                boxes.append(
                    ShardRegion(
                        (first - start, *box.here[1:]),
                        (there, *box.there[1:]),
                        (last - first, *box.sizes[1:]),
                    )
                )
        return ShardPlacement(self.shape, tuple(boxes))


def whole_placement(shape: Sequence[int]) -> ShardPlacement:
    """Return the placement of a tensor that the rank holds whole."""
    zeros = (0,) * len(shape)
    boxes = (ShardRegion(zeros, zeros, tuple(shape)),) if 0 not in shape else ()
    return ShardPlacement(tuple(shape), boxes)


def placement_along(shape: Sequence[int], dim: int, ranges: Sequence[Range]) -> ShardPlacement:
    """Return the placement of a rank's tensor that consists of several `ranges` along `dim`."""
    starts = accumulate((stop - start for start, stop in ranges), initial=0)
    boxes = []
    for here, (start, stop) in zip(starts, ranges, strict=False):
        if start < stop:
            before, after = (0,) * dim, (0,) * (len(shape) - dim - 1)
            sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
            boxes.append(ShardRegion((*before, here, *after), (*before, start, *after), sizes))
    return ShardPlacement(tuple(shape), tuple(boxes))


SLICE = 2**26  # bytes of a sum in flight at once

Totals = MutableMapping[nn.Parameter, Tensor]


class Stage(StrEnum):
    """ZeRO's stages of sharding: which tensors are sharded over ranks. Gradients are the same bits
    in every stage, except over several micro-batches in ZERO_1, which adds in another order.

    Optimizer states are sharded from ZERO_1 on, because the optimizer's parameters are.
    """

    ZERO_0 = "zero-0"  # nothing sharded: replicas whose gradients are summed, as in DDP
    # Weights are sharded between steps and whole within a step, and gradients are whole and summed
    # once for all micro-batches: set_requires_gradient_sync(False) until the last. The paper's
    # ZeRO-1 keeps weights whole between steps too, which FSDP2 does not offer.
    ZERO_1 = "zero-1"
    ZERO_2 = "zero-2"  # the same, gradients reduced each step: reshard_after_forward=False
    ZERO_3 = "zero-3"  # weights whole during a pass over their group: reshard_after_forward=True


@dataclass(slots=True, eq=False)
class _ShardedParameter:
    """One parameter: this rank's shard, the whole (when gathered), and the memory of each."""

    name: str
    slots: list[ParameterSlot]
    own: nn.Parameter  # the optimizer's: the shard, or the whole in ZERO_0
    whole: nn.Parameter
    rows: tuple[int, int]  # this rank's rows of the whole
    shard: Tensor  # uint8: these rows, padded
    place: Tensor  # uint8 [ranks * shard]: the whole, padded


@dataclass(slots=True)
class _FsdpUnit:
    peers: Communicator
    mesh: DeviceMesh
    cuts: list[_ShardedParameter] = field(default_factory=list)
    memory: Tensor | None = None  # uint8, of whole parameters; its storage is empty unless gathered
    gathered: bool = False
    held: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # totals of ZERO_1

    def put(self, gathered: bool) -> None:
        self.gathered = True  # until all are back, also if this is interrupted
        put(
            (module._parameters, name, cut.whole if gathered else cut.own)
            for cut in self.cuts
            for module, name in cut.slots
        )
        self.gathered = gathered


class ShardedParameters:
    """A model's parameters, sharded over the ranks of `peers`, and gathered and reduced by units: a
    unit is a layer, or everything outside the layers.

    Unit l is `layers[l]`; unit `outer` is everything outside the layers. Layers of other pipeline
    stages are left alone. Parameters without requires_grad are sharded too, buffers are not. A
    parameter on the meta device has no values until it is filled. Every rank makes the same calls
    in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        peers: Communicator,
        device: torch.device,
        *,
        stage: Stage = Stage.ZERO_3,
        offload: bool = False,
        outer: Communicator | None = None,
        here: Collection[int] | None = None,
    ) -> None:
        """Replace the model's parameters by this rank's shards, in place.

        Whole parameters lie on `device`; with `offload` the shards, and so the optimizer states,
        lie in main memory between steps. `outer` are the ranks that share the unit outside the
        layers, if more than `peers`: those of all pipeline stages. `here` are the layers of this
        rank, None for all. Raises UnsupportedError for a parameter that cannot be sharded.
        """
        self.peers, self.device, self.stage, self.offload = peers, device, stage, offload
        self.outer = len(layers)
        self._home = torch.device("cpu") if offload else device
        # Shards in main memory belong to a mesh of CPUs, so that their operations stay there.
        inner = peers, self._mesh(peers)
        beyond = inner if outer is None else (outer, self._mesh(outer))
        self._units = [*(_FsdpUnit(*inner) for _ in layers), _FsdpUnit(*beyond)]
        here = range(len(layers)) if here is None else here
        for unit, parameters in zip(self._units, find_parameters(model, layers, here), strict=True):
            self._cut(unit, parameters)
        self._slots = parameter_slots(model)

    def refuse_replaced(self, model: nn.Module) -> None:
        """Raise UnsupportedError if a parameter was replaced, added, removed, frozen or given other
        memory since it was sharded: gradients and gathered weights belong to the old parameters.
        Call this while no unit is gathered."""
        now = parameter_slots(model)
        for name in {**self._slots, **now}:
            old, new = self._slots.get(name), now.get(name)
            if old != new:
                how = "added" if old is None else "removed" if new is None else "replaced"
                if old is not None and new is not None and old[:2] == new[:2]:
                    how = "changed its dtype, shape or requires_grad"
                raise UnsupportedError(
                    f"{name}: {how} after parallelize had sharded the parameters; edit the model "
                    "before parallelize, or write into the parameter (copy_)"
                )
        for cut in (cut for unit in self._units for cut in unit.cuts):
            mine = local(cut.own)
            if self.stage is Stage.ZERO_0 or not mine.numel():
                continue
            if mine.data_ptr() != cut.shard.data_ptr() or mine.dtype != cut.whole.dtype:
                raise UnsupportedError(
                    f"{cut.name}: its .data was replaced after parallelize, but ranks still gather "
                    "from the old memory; write into the parameter instead (copy_)"
                )

    @torch.no_grad()
    def fill(self, name: str, whole: Tensor) -> None:
        """Set this rank's shard of the parameter `name`, if it has one, from the whole value."""
        for cut in (cut for unit in self._units for cut in unit.cuts if cut.name == name):
            local(cut.own).copy_(whole if self.stage is Stage.ZERO_0 else whole[slice(*cut.rows)])

    # -- the program ----------------------------------------------------------------------------

    def gathered(self, unit: int) -> bool:
        """Return whether the modules of a unit (see the class) now have their whole parameters."""
        return self.stage is Stage.ZERO_0 or self._units[unit].gathered

    @torch.no_grad()
    def gather(self, unit: int) -> None:
        """All-gather the parameters of a unit (a layer, or all outside the layers), bit for bit."""
        state = self._units[unit]
        if self.gathered(unit) or state.memory is None:
            return
        state.memory.untyped_storage().resize_(state.memory.nbytes)
        for cut in state.cuts:
            cut.whole.requires_grad_(cut.own.requires_grad)
            # The host writes here after it has read the gradients, which waits for this copy.
            mine = cut.shard.to(self.device, non_blocking=True)
            state.peers.gather_into(cut.place, mine)
        state.put(True)

    def release(self, unit: int) -> None:
        """Put shards in place of the whole parameters of a unit (see the class), in ZERO_3. The
        other stages keep weights whole until the step ends."""
        if self.stage is Stage.ZERO_3:
            self._release(self._units[unit])

    @torch.no_grad()
    def reduce(self, unit: int, totals: Totals) -> None:
        """Reduce-scatter a unit's gradients: take them out of `totals` (by whole parameter), sum
        them over ranks, in the order of ranks, and add this rank's rows to the shards' `.grad`.

        A rank without a gradient of a parameter contributes zeros; if no rank has one, `.grad`
        stays as it is. In ZERO_1 gradients add up until the step's end.
        """
        state = self._units[unit]
        gradients = {cut.whole: totals.pop(cut.whole) for cut in state.cuts if cut.whole in totals}
        if self.stage is not Stage.ZERO_1:
            self._reduce(state, gradients)
            return
        for parameter, total in gradients.items():
            if parameter in state.held:
                state.held[parameter] += total
            else:
                state.held[parameter] = total

    @torch.no_grad()
    def sums(
        self,
        unit: int,
        totals: Totals,
        places: Mapping[nn.Parameter, Tensor],
        before: Mapping[nn.Parameter, Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """For ZERO_0: yield a unit's parameters that have a gradient on some rank. Each comes with
        the sum of its gradients over ranks, in the order of ranks, which includes its entry in
        `before`, if any.

        Use a sum before the next is requested; all ranks iterate to the end. Gradients are taken
        out of `totals`; a rank without one uses the memory in `places`, zeroed.
        """
        state = self._units[unit]
        for cut in self._summed(state, totals):
            total = totals.pop(cut.whole, None)
            total = places[cut.own].zero_() if total is None else total
            yield cut.own, self._sum(state, cut, total, before.get(cut.own))

    @torch.no_grad()
    def end(self, *, sync: bool = True) -> None:
        """End a step: put shards in place of all whole parameters. In ZERO_1 gradients are also
        reduced if `sync`, which is False for each micro-batch of an update but the last."""
        for unit in self._units:
            self._release(unit)
            if self.stage is Stage.ZERO_1 and sync:
                self._reduce(unit, unit.held)

    def abandon(self) -> None:
        """End an unfinished step: put shards back, and drop gradients that were not reduced."""
        for unit in self._units:
            self._release(unit)
            unit.held.clear()

    # -- held parameters ------------------------------------------------------------------------

    def whole(self, unit: int) -> dict[str, nn.Parameter]:
        """Return a unit's whole parameters by name: always the same objects (see the class)."""
        return {cut.name: cut.whole for cut in self._units[unit].cuts}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters for the optimizer, by name: DTensors, or in ZERO_0 plain ones."""
        return {cut.name: cut.own for unit in self._units for cut in unit.cuts}

    def places(
        self, before: Mapping[str, ShardPlacement] | None = None
    ) -> dict[str, ShardPlacement]:
        """Return where this rank's part of each parameter lies in the whole. `before` has these
        places for parameters that tensor parallelism has already split."""
        placements = {}
        for cut in (cut for unit in self._units for cut in unit.cuts):
            placement = (before or {}).get(cut.name) or whole_placement(cut.whole.shape)
            placements[cut.name] = (
                placement if self.stage is Stage.ZERO_0 else placement.rows(*cut.rows)
            )
        return placements

    def wholes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's name and whole value, valid until the next is requested. One unit
        at a time is gathered. Every rank must iterate to the end, even if it uses no value."""
        for index, unit in enumerate(self._units):
            before = unit.gathered
            self.gather(index)
            yield from ((cut.name, cut.whole.detach()) for cut in unit.cuts)
            if not before:
                self._release(unit)

    # -- how ------------------------------------------------------------------------------------

    def _cut(self, unit: _FsdpUnit, parameters: UnitParameters) -> None:
        if self.stage is Stage.ZERO_0:
            empty = torch.empty(0, dtype=torch.uint8)
            for p, (name, slots) in parameters.items():
                rows = (0, p.shape[0] if p.ndim else 1)
                own = p
                if p.is_meta:
                    blank = torch.empty_like(p, device=self._home)
                    own = nn.Parameter(blank, p.requires_grad)
                unit.cuts.append(_ShardedParameter(name, slots, own, own, rows, empty, empty))
            unit.put(True)
            return
        for parameter, (name, _) in parameters.items():
            refuse_unshardable(parameter, name)
        sizes = [shard_bytes(p.shape, p.itemsize, unit.peers.size) for p in parameters]
        wholes = [line_aligned(size * unit.peers.size) for size in sizes]
        unit.memory = torch.empty(sum(wholes), dtype=torch.uint8, device=self.device)
        pinned = self._home.type == "cpu" and self.device.type == "cuda"
        shards = torch.zeros(
            sum(map(line_aligned, sizes)), dtype=torch.uint8, device=self._home, pin_memory=pinned
        )
        shard_start = start = 0
        for (p, (name, slots)), size, whole in zip(parameters.items(), sizes, wholes, strict=True):
            shard = shards[shard_start : shard_start + size]
            place = _typed_view(unit.memory, start, (size * unit.peers.size,), torch.uint8)
            gathered = nn.Parameter(
                _typed_view(unit.memory, start, p.shape, p.dtype), p.requires_grad
            )
            rows = rows_of_rank(p.shape[0], unit.peers.index, unit.peers.size)
            own = self._own(unit, p, shards, shard_start, rows)
            unit.cuts.append(_ShardedParameter(name, slots, own, gathered, rows, shard, place))
            shard_start, start = shard_start + line_aligned(size), start + whole
        unit.memory.untyped_storage().resize_(0)
        unit.put(False)

    def _mesh(self, peers: Communicator) -> DeviceMesh:
        assert peers.group is not None, "DTensors are of a mesh, and a mesh of a group"
        return DeviceMesh.from_group(peers.group, self._home.type, mesh_dim_names=("fsdp",))

    @torch.no_grad()
    def _own(
        self,
        unit: _FsdpUnit,
        parameter: nn.Parameter,
        shards: Tensor,
        start: int,
        rows: tuple[int, int],
    ) -> nn.Parameter:
        first, last = rows
        shape = (last - first, *parameter.shape[1:])
        local = _typed_view(shards, start, shape, parameter.dtype)
        if not parameter.is_meta:
            local.copy_(parameter[first:last])
        own = nn.Parameter(self._dtensor(unit, local, parameter), parameter.requires_grad)
        if gradient_dtype(parameter) != parameter.dtype:
            own.grad_dtype = gradient_dtype(parameter)
        return own

    def _dtensor(self, unit: _FsdpUnit, local: Tensor, like: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            unit.mesh,
            (Shard(0),),
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def _release(self, unit: _FsdpUnit) -> None:
        if unit.memory is not None:
            if unit.gathered:  # else memory may have run out while gathering
                unit.put(False)
            unit.memory.untyped_storage().resize_(0)

    def _reduce(self, unit: _FsdpUnit, totals: Totals) -> None:
        for cut in self._summed(unit, totals):
            self._add(unit, cut, self._sum(unit, cut, totals.pop(cut.whole, None)))

    def _summed(self, unit: _FsdpUnit, totals: Totals) -> list[_ShardedParameter]:
        cuts = [cut for cut in unit.cuts if cut.own.requires_grad]
        if not cuts:
            totals.clear()
            return []
        have = [cut.whole in totals for cut in cuts]
        counts = unit.peers.sum(torch.tensor(have, dtype=torch.int32, device=self.device))
        # A rank with all gradients need not wait for the device to know.
        has_gradient = have if all(have) else counts.tolist()
        return [cut for cut, count in zip(cuts, has_gradient, strict=True) if count]

    def _sum(
        self,
        unit: _FsdpUnit,
        cut: _ShardedParameter,
        total: Tensor | None,
        before: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's rows of `total`, summed over ranks, plus the same rows of `before`. In
        ZERO_0 return all rows, in the memory of `total` if its size fits."""
        ranks, shape = unit.peers.size, cut.whole.shape
        rows = shape[0] if shape else 1
        width = cut.whole.numel() // max(rows, 1)
        share = -(-rows // ranks) * width
        dtype = accumulate_dtype(cut.whole.dtype) if total is None else total.dtype
        if total is None or total.numel() != ranks * share:
            padded = torch.zeros(ranks * share, dtype=dtype, device=self.device)
            if total is not None:
                padded[: total.numel()] = total.reshape(-1)
            total = padded
        parts = total.reshape(ranks, share)
        whole, first = self.stage is Stage.ZERO_0, unit.peers.index * share
        own = parts.new_empty(0 if whole else share)
        added = None if before is None else before.reshape(-1)[first : first + share]
        step = max(1, SLICE // (ranks * own.itemsize))
        for start in range(0, share, step):
            part = parts[:, start : start + step]
            summed = unit.peers.scatter_sum(part.contiguous(), [1] * ranks)
            if added is not None:
                more = added[start : start + step].to(self.device)
                summed[0, : len(more)] += more
            if whole:
                part.copy_(unit.peers.gather(summed, [1] * ranks))
            else:
                own[start : start + step] = summed[0]
        if whole:
            return parts.view(-1)[: rows * width].view(shape)
        count = cut.rows[1] - cut.rows[0]
        return own[: count * width].view(count, *shape[1:])

    def _add(self, unit: _FsdpUnit, cut: _ShardedParameter, total: Tensor) -> None:
        """Add a summed gradient to a shard's `.grad`, in the dtype of the sum, and round once."""
        total = total.to(self._home)
        if cut.own.grad is not None:
            total += local(cut.own.grad)
        total = total.to(gradient_dtype(cut.own))
        cut.own.grad = (
            total if self.stage is Stage.ZERO_0 else self._dtensor(unit, total, cut.own.detach())
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view without autograd."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype for a parameter's `.grad`: its `grad_dtype` if set, or else the accumulate
    dtype, which may be wider than autograd's gradients."""
    dtype = parameter.grad_dtype
    return accumulate_dtype(parameter.dtype) if dtype is None else dtype


def square_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's parts of gradients, a float64 scalar on `device`.
    The caller sums these over ranks, and counts parts that several ranks hold only once."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(local(gradient), dtype=torch.float64)
        total += norm.to(device).square()
    return total


def _typed_view(memory: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in `memory` from byte `start` on, with a version counter of its own."""
    shape = torch.Size(shape)
    view = torch.empty(0, dtype=dtype, device=memory.device)
    strides = torch.empty(shape, device="meta").stride()
    return view.set_(memory.untyped_storage(), start // view.itemsize, shape, strides)
