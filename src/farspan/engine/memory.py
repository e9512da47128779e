"""Estimate a step's memory from its program and its model's profile, and measure its peak."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import gradient_dtype, local
from farspan.engine.runner import ADVICE
from farspan.engine.step import Step
from farspan.engine.tiers import DeviceTooSmall, refuse_beyond_together
from farspan.hf.compiled import UncompiledMode, uncompiled
from farspan.hf.indexer import indexed_parameters
from farspan.hf.quantized import state_bytes
from farspan.host import GIB, UNLIMITED
from farspan.planner.walk import cast_bytes
from farspan.program.program import Program, made_bytes
from farspan.spec import Tier


class LiveStorage(UncompiledMode):
    """Counter of the bytes of all storages created in the context and still alive. It costs about 6
    microseconds per operation, and misses memory that an operator allocates and frees itself."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # An unknown input existed before the context: a view of it, such as a weight's transpose,
        # is no new memory.
        self._meet(args, born=False)
        if kwargs:
            self._meet(kwargs.values(), born=False)
        out = func(*args, **(kwargs or {}))
        self._meet((out,), born=True)
        return out

    def _meet(self, values: Iterable[Any], *, born: bool) -> None:
        """Register the storages of an operator's arguments or results. Only lists and tuples are
        searched: `tree_leaves`, which handles every type, took half the time of a metered step."""
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    size = storage.nbytes() if born else 0
                    self._known[key] = weakref.ref(storage, partial(self._leave, key, size))
                    self.live += size
                    self.peak = max(self.peak, self.live)
            elif isinstance(value, (list, tuple)):
                self._meet(value, born=born)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._known.clear()  # stop counting storages that die later

    def _leave(self, key: int, size: int, _: object) -> None:
        self.live -= size
        self._known.pop(key, None)


class PeakMemory:
    """Meter of the peak bytes of new tensors on a device, inside a context. On a CPU it counts
    everything that torch allocates, for both tiers; on a GPU, bytes beyond those at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage = LiveStorage() if device.type == "cpu" else None
        self._uncompiled = uncompiled()
        self._before = 0
        self.peak = 0

    def __enter__(self) -> Self:
        if self._storage is not None:
            self._uncompiled.__enter__()
            self._storage.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def lap(self) -> int:
        """Return the peak bytes since the previous lap, or since the start."""
        if self._storage is not None:
            found, self._storage.peak = self._storage.peak, self._storage.live
        else:
            found = torch.cuda.max_memory_allocated(self._device) - self._before
            torch.cuda.reset_peak_memory_stats(self._device)
        self.peak = max(self.peak, found)
        return found

    def __exit__(self, *error: Any) -> None:
        if self._storage is not None:
            self._storage.__exit__(*error)
            self._uncompiled.__exit__(*error)
        self.lap()


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Expected bytes of one step, by use."""

    device_arena: int
    host_arena: int
    inputs: int  # targets and positions, made from the batch, which is not counted
    weights: int
    gradients: int
    accumulators: int  # fp32 sums of the widest open group, if `.grad` is narrower
    transient: int  # of a cell: activations, logits, one layer's weight gradients
    # Weights and gradients in main memory; `weights` and `gradients` are then 0, and `accumulators`
    # has only sums of shards.
    host_weights: int = 0
    host_gradients: int = 0
    index: int = 0  # maps that rank pages in sparse attention, built before the step

    @property
    def host(self) -> int:
        """Bytes of main memory that a step needs, without optimizer states."""
        return self.new_host + self.host_weights

    @property
    def new_host(self) -> int:
        """Bytes of main memory that the first step allocates, in addition to the weights."""
        return self.host_arena + self.host_gradients

    @property
    def device(self) -> int:
        """Device bytes at the peak of a step, without optimizer states and the batch."""
        return self.new_device + self.weights + self.index

    @property
    def new_device(self) -> int:
        """Device bytes that the first step allocates, in addition to the weights."""
        return self.device_arena + self.inputs + self.gradients + self.accumulators + self.transient

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "device": self.device, "host": self.host}


def estimate_memory(
    step: Step,
    batch: int,
    tokens: int,
    *,
    values: int = 0,
    cells: Callable[[Program], int],
) -> MemoryEstimate:
    """Estimate the memory of a step on a batch of this shape, from its program and the model's
    profile.

    Args:
        values: Log-probabilities per token from which the loss is computed; 0: a step of one pass.
        cells: Returns the bytes that a program's cells hold, by the profile of the model.

    Raises:
        TooLarge: Main memory cannot hold the step.
    """
    refuse_known(step, batch, tokens)
    whole = step.prepared(batch, tokens, is_cut=values > 0).program
    static, found = _static(step, whole), cells(whole) + _casts(step, whole)
    # Cells may be fullest before some gradients exist.
    sums = max(0, static.accumulators + min(0, found))
    return replace(static, transient=max(0, found), accumulators=sums)


def _casts(step: Step, program: Program) -> int:
    """Return the bytes of casts for FP8 products, which the model's profile lacks."""
    if step.products is None:
        return 0
    start, stop = program.share.cells[0]
    modules = (m for layer in step.stages.layers for m in layer.modules())
    widths = {(m.in_features, m.out_features) for m in modules if isinstance(m, nn.Linear)}
    return cast_bytes(widths, program.run.batch * (stop - start))


def refuse_known(step: Step, batch: int, tokens: int) -> None:
    """Refuse a step if even a lower bound of its memory, known without a profile, does not fit."""
    program = step.program(batch, tokens)
    static = _static(step, program)
    refuse_too_large(step, replace(static, transient=least_transient(program)), optimizer=0)


def refuse_too_large(step: Step, expected: MemoryEstimate, optimizer: int) -> None:
    """Raise the same error on all ranks if the step does not fit one of them; all ranks call it.
    Raises DeviceTooSmall if a GPU cannot hold what the first step allocates, and TooLarge if main
    memory or `step.host_room` cannot; on a CPU, `optimizer` bytes of optimizer states count too."""
    ranks = None if step.sharded_model is None else step.sharded_model.ranks
    _refuse_too_small(step.stages.device, expected, ranks)
    needed = expected.new_host
    what = f"the host arena ({expected.host_arena:,} bytes)"
    if expected.host_gradients:
        what += f" with the gradients ({expected.host_gradients:,})"
    if step.stages.device.type == "cpu":
        needed += expected.new_device + optimizer
        what = (
            f"a step (arenas {expected.host_arena + expected.device_arena:,} bytes, gradients "
            f"{expected.gradients + expected.host_gradients:,}, optimizer {optimizer:,}, cells "
            f"{expected.transient:,})"
        )
    refuse_beyond_together(ranks, needed, what, ADVICE, step.host_room)


def _refuse_too_small(
    device: torch.device, expected: MemoryEstimate, ranks: ParallelContext | None
) -> None:
    room = available_device_bytes(device)
    mine = [
        UNLIMITED if room is None else room,
        expected.new_device,
        expected.device_arena,
        expected.gradients,
        expected.transient,
    ]
    # If one rank raised alone, the others would wait for it in the next exchange.
    figures = [mine] if ranks is None else ranks.figures(mine)
    number = max(range(len(figures)), key=lambda rank: figures[rank][1] - figures[rank][0])
    free, needed, arena, gradients, cells = figures[number]
    if needed > free:
        whose = f" of rank {number}" if len(figures) > 1 else ""
        raise DeviceTooSmall(
            f"device memory{whose}: a step (arena {arena:,} bytes, gradients {gradients:,}, cells "
            f"{cells:,}) needs {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free; {ADVICE}"
        )


def available_device_bytes(device: torch.device) -> int | None:
    """Bytes that torch can still allocate on a GPU; None for a CPU, which has main memory only."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def least_transient(program: Program) -> int:
    """Return the least bytes of a chunk's graphs: the activations that its layers save."""
    tokens = program.run.batch * program.share.tokens.most
    layers = program.model.layers
    saved = [sum(layers[i].activation_bytes for i in range(*group)) for group in program.groups]
    if program.schedule.layer_checkpoint:
        saved = [layer.activation_bytes for layer in layers]
    return tokens * max(saved)


def _static(step: Step, program: Program) -> MemoryEstimate:
    # Counts this rank's shards of a sharded model; layers of other stages are on meta.
    parameters = {id(p): p for p in step.stages.model.parameters() if not p.is_meta}.values()
    without = indexed_parameters(step.stages.model)
    trained = [p for p in parameters if p.requires_grad and id(p) not in without]
    found = MemoryEstimate(
        device_arena=program.arena_bytes[Tier.DEVICE],
        host_arena=program.arena_bytes[Tier.HOST],
        inputs=made_bytes(program.run.batch, program.run.tokens, documents=True),
        weights=0,
        gradients=0,
        accumulators=0,
        transient=0,
    )
    if step.far is not None:
        held = step.far.held_bytes(step.stages.device, step.stages.dtype)
        found = replace(found, index=held)
    if step.weights is not None:
        return replace(
            found,
            host_weights=step.weights.nbytes,
            host_gradients=step.weights.gradient_bytes(),
        )
    weights = sum(local(p).nbytes + state_bytes(p) for p in parameters)
    gradients = sum(local(p).numel() * gradient_dtype(p).itemsize for p in trained)
    sums = _accumulators(step, program)
    if step.sharded_model is not None and step.sharded_model.sharded.offload:
        return replace(found, host_weights=weights, host_gradients=gradients, accumulators=sums)
    return replace(found, weights=weights, gradients=gradients, accumulators=sums)


def _accumulators(step: Step, program: Program) -> int:
    """Return the bytes of fp32 gradient sums, for the widest group and parameters outside the
    layers. The sums exist if gradients are narrower than fp32 or are added over ranks."""
    sharded_model, layers = step.sharded_model, step.stages.layers
    without = indexed_parameters(step.stages.model)

    def size(parameters: Iterable[nn.Parameter]) -> int:
        return sum(
            p.numel() * accumulate_dtype(p.dtype).itemsize
            for p in parameters
            if p.requires_grad
            and id(p) not in without
            and (sharded_model is not None or gradient_dtype(p) != accumulate_dtype(p.dtype))
        )

    def of_layer(layer: int) -> Iterable[nn.Parameter]:
        return (
            layers[layer].parameters()
            if sharded_model is None
            else sharded_model.sharded.whole(layer).values()
        )

    groups = [program.groups[group] for group in program.own_groups()]
    widest = max(sum(size(of_layer(layer)) for layer in range(*group)) for group in groups)
    outer = (
        step.stages.outer_parameters()
        if sharded_model is None
        else sharded_model.outer_parameters()
    )
    return size(outer) + widest
