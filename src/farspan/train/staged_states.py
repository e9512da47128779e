"""AdamW states in main memory or on a drive, updated in main memory slice by slice.

`HostStates` cuts parameters into slices, which pass through a few pinned staging buffers:

    evict   g0   g1   g2   g3           gradients to the host, a buffer each
    CPU          u0   u1   u2   u3      fused AdamW on master and moments; the weight rounded
    fetch             w0   w1   w2      new weights back to the device

AdamW is elementwise, so slices change nothing; on a CPU the bits are those of `ResidentStates`.

`DiskStates` does the same in the same order; its buffers also hold a slice's master and moments:

    read    s0   s1   s2   s3   s4      several extents at a time, past the page cache
    CPU               u0   u1   u2
    write                  s0   s1      a buffer is read into again after it was written

Gradients and weights in main memory need no buffers. The file is scratch: it has no name, so it
vanishes with the process, however that ends, and nothing resumes from it. Checkpoints read and
restore it through a mapping, whose pages the kernel takes back.

Note: [A gradient that has not arrived]. The CPU waits for the event after a slice's copies before
it reads their buffer.
Note: [A weight that has not left]. A buffer's weight is overwritten (by the CPU, or by an evict if
the parameter has no master) only after the event of the last fetch that read it.
Note: [A mapping and direct reads]. Writes through the mapping are flushed before a slice is read
past the page cache; the kernel drops pages that are written past the cache.
"""

import fcntl
import math
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.context import ParallelContext
from farspan.durable import WriteFailed, write_failure
from farspan.engine.tiers import Arena, CopyEngine, pages, refuse_beyond_together
from farspan.host import GIB
from farspan.planner.states import DISK_SLOTS, MOMENTS, SECTOR, SLOTS, sectors, staged_elements
from farspan.program.dependencies import Lane
from farspan.spec import Tier, UnsupportedError
from farspan.train.config import OptimizerConfig, StatesPlace

# Below 32 bits, adding a small update to a weight may not change it.
LOW_PRECISION = (torch.bfloat16, torch.float16)

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of an optimizer's states. On a CPU both tiers are main memory."""

    device: int
    host: int
    untouched: int  # zeros among them, which the system hands out only at the first write


@dataclass(frozen=True, slots=True)
class Rule:
    """AdamW's hyperparameters without learning rate; `decays` says where weight decay applies."""

    config: OptimizerConfig
    decays: Mapping[str, bool]

    def weight_decay(self, name: str) -> float:
        return self.config.weight_decay if self.decays[name] else 0.0

    def groups(self, weights: Mapping[str, Tensor]) -> list[dict[str, object]]:
        """Return two parameter groups for a torch optimizer: with and without weight decay."""
        return [
            {
                "params": [weights[name] for name in weights if self.decays[name] is chosen],
                "weight_decay": self.config.weight_decay if chosen else 0.0,
            }
            for chosen in (True, False)
        ]


def is_low(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has 16 bits, and therefore an fp32 master copy."""
    return parameter.dtype in LOW_PRECISION


def widen_gradient(parameter: nn.Parameter) -> None:
    """Make autograd accumulate `.grad` of a 16-bit parameter in fp32."""
    if is_low(parameter):
        parameter.grad_dtype = torch.float32


def lasting_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a parameter's two moments, and of its fp32 master copy if it has one."""
    wide = accumulate_dtype(parameter.dtype).itemsize
    return parameter.numel() * wide * (MOMENTS + is_low(parameter))


STATES_THERE = "keeping the optimizer's states in main memory"
ADVICE = (
    "set optimizer.states to device, or to 8bit (whose results differ from AdamW's), or train "
    "fewer parameters"
)
ADVICE_BESIDE = "train fewer parameters (model.lora), or a smaller model"  # with weights there


@dataclass(frozen=True, slots=True)
class _ParameterSlice:
    """Elements [start, stop) of a parameter, counted in the order of its memory."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class _StagingSlot:
    """Pinned buffers for the gradient and the weight of one slice while these are copied.
    Invariant: the weight is overwritten only after `sent`, the event of its copy to the device."""

    gradient: Tensor  # uint8
    weight: Tensor  # uint8
    arrived: Any = None
    sent: Any = None

    def view(self, memory: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return memory[: count * dtype.itemsize].view(dtype)


class HostStates:
    """AdamW states in main memory. Invariant: between updates a bfloat16 or float16 parameter
    equals its rounded fp32 master copy, and no copy is running."""

    def __init__(
        self,
        parameters: Parameters,
        rule: Rule,
        copies: CopyEngine | None = None,
        ranks: ParallelContext | None = None,
        room: int | None = None,
        weights: Tier = Tier.DEVICE,
    ) -> None:
        """Allocate all memory; weights in main memory need no staging buffers. Raises TooLarge if
        the host cannot hold the states of all its ranks, or if they exceed `room` bytes."""
        for name, parameter in parameters.items():
            if not parameter.is_contiguous():
                raise UnsupportedError(
                    f"optimizer.states: {rule.config.states} needs contiguous parameters, but "
                    f"{name} has strides {parameter.stride()}; set states to device"
                )
        self._parameters = parameters
        self._rule = rule
        self._stages_weights = weights is Tier.DEVICE
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._copies = copies or CopyEngine(device, overlap=device.type == "cuda")
        # In-order copies on CUDA have no events for the CPU to wait for.
        assert self._copies.overlap or device.type != "cuda"
        self._arena = Arena(Tier.HOST, device)
        self._states: dict[str, Tensor] = {}
        self._updates = {name: torch.zeros(()) for name in parameters}
        self._staged = staged_elements(sum(p.numel() for p in parameters.values()))
        self._slots: list[_StagingSlot] = []
        self._allocate(ranks, room)
        self._began = False
        for name, parameter in parameters.items():
            widen_gradient(parameter)
            if is_low(parameter):
                self._states[f"master/{name}"].copy_(parameter.detach())

    def _allocate(self, ranks: ParallelContext | None, room: int | None) -> None:
        lasting, address = sum(lasting_bytes(p) for p in self._parameters.values()), 0
        self._reserve(lasting, 0, ranks, room)
        for key, shape, dtype in self._arrays():
            view = self._arena.view(address, shape, dtype)
            self._states[key] = view.zero_()
            address += view.nbytes

    def _arrays(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield (name, shape, dtype) of each master copy and moment. The widest dtype comes first,
        so that every array is aligned."""
        wide = {name: accumulate_dtype(p.dtype) for name, p in self._parameters.items()}
        for name in sorted(wide, key=lambda name: -wide[name].itemsize):
            for key in self._keys(name):
                yield key, tuple(self._parameters[name].shape), wide[name]

    def _reserve(
        self, lasting: int, beside: int, ranks: ParallelContext | None, room: int | None
    ) -> None:
        """Reserve an arena of `lasting` bytes plus the staging buffers; main memory must also hold
        `beside` bytes that are allocated elsewhere."""
        parameters, staged = self._parameters.values(), self._staged * self._stages_weights
        widths = (accumulate_dtype(p.dtype).itemsize for p in parameters)
        gradient = staged * max(widths, default=0)
        weight = staged * max((p.itemsize for p in parameters), default=0)
        size = lasting + SLOTS * (gradient + weight)
        advice = ADVICE if self._stages_weights else ADVICE_BESIDE
        refuse_beyond_together(ranks, size + beside, STATES_THERE, advice, room)
        self._arena.reserve(size)
        for i in range(SLOTS):
            at, behind = lasting + i * gradient, lasting + SLOTS * gradient + i * weight
            of_gradient = self._arena.view(at, (gradient,), torch.uint8)
            of_weight = self._arena.view(behind, (weight,), torch.uint8)
            self._slots.append(_StagingSlot(of_gradient, of_weight))

    def tensors(self) -> dict[str, Tensor]:
        return self._states | {f"step/{name}": count for name, count in self._updates.items()}

    def held(self) -> StateBytes:
        counters = sum(count.nbytes for count in self._updates.values())
        slots = sum(slot.gradient.nbytes + slot.weight.nbytes for slot in self._slots)
        pinned = self._copies.device.type == "cuda"
        return StateBytes(0, self._arena.nbytes + counters, 0 if pinned or self._began else slots)

    @torch.no_grad()
    def update(
        self,
        lr: float,
        begins: Callable[[nn.Parameter], None] | None = None,
        ends: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        """Update every parameter that has a `.grad`, in order. For weights in main memory, call
        `begins` with each parameter before its gradient is read, and `ends` after its update."""
        pieces = list(self._pieces())
        for parameter in self._parameters.values():
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        states = self._states_of(pieces)
        self._copies.begin()
        try:
            for index in range(len(pieces) + SLOTS - 1):
                if index < len(pieces):
                    self._copy_to_host(pieces[index], self._slots[index % SLOTS])
                done = index - SLOTS + 1
                if done >= 0:
                    piece, states_of = pieces[done], next(states)
                    parameter = self._parameters[piece.name]
                    if begins is not None and piece.start == 0:
                        begins(parameter)
                    self._update(piece, self._slots[done % SLOTS], states_of, lr)
                    if ends is not None and piece.stop == parameter.numel():
                        ends(parameter)
            next(states, None)  # release the last piece
        finally:
            try:
                states.close()
            finally:
                self._copies.end()
        self._began = True

    def _pieces(self) -> Iterator[_ParameterSlice]:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._updates[name] += 1
                for start in range(0, parameter.numel(), self._staged):
                    yield _ParameterSlice(name, start, min(start + self._staged, parameter.numel()))

    def _copy_to_host(self, piece: _ParameterSlice, slot: _StagingSlot) -> None:
        """Start to copy a slice's gradient to main memory, and its weight if that has no master
        copy. See Note: [A weight that has not left]."""
        if not self._stages_weights:
            return
        parameter = self._parameters[piece.name]
        assert parameter.grad is not None, "a piece is of a parameter with a gradient"
        gradient = _part(parameter.grad, piece)
        self._copies.evict(slot.view(slot.gradient, len(gradient), gradient.dtype), gradient)
        if not is_low(parameter):
            self._copies.wait(Lane.EVICT, slot.sent)
            weight = _part(parameter, piece)
            self._copies.evict(slot.view(slot.weight, len(weight), weight.dtype), weight)
        slot.arrived = self._copies.record(Lane.EVICT)

    def _states_of(self, pieces: list[_ParameterSlice]) -> Generator[list[Tensor], None, None]:
        """Yield the states of each slice in main memory: the master copy, if any, and both moments.
        They are valid until the next slice is requested."""
        for piece in pieces:
            yield [_part(self._states[key], piece) for key in self._keys(piece.name)]

    def _keys(self, name: str) -> list[str]:
        kinds = ("master",) * is_low(self._parameters[name]) + ("exp_avg", "exp_avg_sq")
        return [f"{kind}/{name}" for kind in kinds]

    def _update(
        self, piece: _ParameterSlice, slot: _StagingSlot, states: list[Tensor], lr: float
    ) -> None:
        """Update a slice in main memory, and start to copy its weight back to the device."""
        config, parameter = self._rule.config, self._parameters[piece.name]
        assert parameter.grad is not None, "a piece is of a parameter with a gradient"
        count, weights = piece.stop - piece.start, _part(parameter, piece)
        out = slot.view(slot.weight, count, parameter.dtype) if self._stages_weights else weights
        _await(slot.arrived)  # Note: [A gradient that has not arrived]
        *master, first, second = states
        weight = master[0] if master else out
        gradient = _part(parameter.grad, piece)
        if self._stages_weights:
            gradient = slot.view(slot.gradient, count, weight.dtype)
        adamw(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [self._updates[piece.name] - 1],  # a copy: adamw increments it for each piece
            fused=True,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=self._rule.weight_decay(piece.name),
            eps=config.eps,
            maximize=False,
        )
        if master:
            _await(slot.sent)  # Note: [A weight that has not left]
            out.copy_(weight)
        if self._stages_weights:
            self._copies.fetch(weights, out)
            slot.sent = self._copies.record(Lane.FETCH)


def _part(tensor: Tensor | nn.Parameter, piece: _ParameterSlice) -> Tensor:
    return tensor.detach().view(-1)[piece.start : piece.stop]


def _await(event: Any) -> None:
    """Block the CPU until a copy's event has happened; None stands for no copy."""
    if event is not None:
        event.synchronize()


# -- on a drive ----------------------------------------------------------------------------------

THREADS = 8  # concurrent requests to the drive, of at most 64 MiB each
TRIED = 2**28  # bytes to measure the speed of a drive


class ScratchFile:
    """A file of a fixed size without a name, for one process.

    If `direct`, it is read and written past the page cache, which some file systems do not support
    (such as tmpfs of older kernels). Addresses, sizes and memory are then whole sectors of 4,096
    bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Create the file and allocate its space. Raises UnsupportedError if the folder does not
        exist, cannot be written, or the drive is too full."""
        self.folder, self.size = folder, size
        try:
            folder.mkdir(exist_ok=True)  # not its parents: the drive may be unmounted
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                self._number = os.dup(file.fileno())
        except OSError as error:
            raise UnsupportedError(
                f"optimizer.disk: cannot make a file in {folder}: {error.strerror}; name a "
                "writable folder on a local drive"
            ) from error
        weakref.finalize(self, os.close, self._number)
        free = os.fstatvfs(self._number)
        try:
            os.posix_fallocate(self._number, 0, size)
        except OSError as error:
            raise UnsupportedError(
                f"optimizer.disk: states on disk need {size:,} bytes, but {folder} has "
                f"{free.f_bavail * free.f_frsize:,} free ({error.strerror}); free some, or name a "
                "folder on another drive"
            ) from error
        try:
            self.memory = mmap.mmap(self._number, size)
        except OSError as error:
            raise UnsupportedError(
                f"optimizer.disk: a file in {folder} cannot be mapped: {error.strerror}; name a "
                "folder on a local drive"
            ) from error
        self.direct = self._go_direct()
        self._pool = ThreadPoolExecutor(THREADS, "farspan-disk")

    def _go_direct(self) -> bool:
        flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._number, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._number, [mmap.mmap(-1, SECTOR)], 0)
        except OSError:
            fcntl.fcntl(self._number, fcntl.F_SETFL, flags)
            return False
        return True

    def read(self, memory: Tensor, address: int) -> "Future[None]":
        """Start to fill uint8 `memory` from the file, beginning at byte `address`."""
        return self._pool.submit(self._move, os.preadv, memory, address)

    def write(self, memory: Tensor, address: int) -> "Future[None]":
        """Start to write uint8 `memory` to the file, beginning at byte `address`."""
        return self._pool.submit(self._move, os.pwritev, memory, address)

    def _move(self, call: Callable[[int, list[Any], int], int], memory: Tensor, start: int) -> None:
        """Read or write all bytes; one call may move fewer, at most 2 GiB. Raises WriteFailed."""
        left = memoryview(memory.numpy())  # type: ignore[arg-type]
        try:
            while left:
                moved = call(self._number, [left], start)
                if not moved:
                    raise OSError("the file ends too early")
                left, start = left[moved:], start + moved
        except OSError as error:
            reason = error.strerror or str(error)
            if call is os.preadv:
                raise WriteFailed(
                    f"cannot read states on disk in {self.folder}: {reason}; the drive may be "
                    "failing: name another folder in optimizer.disk, then run the same command "
                    "again"
                ) from error
            raise write_failure(self.folder, reason) from error

    def flush(self) -> None:
        """Write changes in the memory-mapped file to the drive, where direct reads see them, and
        free the mapping's pages."""
        if self.direct:
            self.memory.flush()
            self.memory.madvise(mmap.MADV_DONTNEED)

    def rates(self, buffer: Tensor) -> tuple[float, float]:
        """Return bytes per second (written, read), with as many requests at once as in an update.
        Overwrites the file's beginning with zeros. `buffer` is of uint8 and whole sectors."""
        size = min(len(buffer), self.size, TRIED)
        extent = sectors(-(-size // THREADS))
        buffer[:size].random_(generator=torch.Generator())  # the run's generator is unchanged

        def move(begin: Callable[[Tensor, int], "Future[None]"]) -> float:
            began, places = time.perf_counter(), range(0, size, extent)
            requests = [begin(buffer[at : min(at + extent, size)], at) for at in places]
            settle(requests)
            return size / (time.perf_counter() - began)

        written, read = move(self.write), move(self.read)
        buffer[:size].zero_()
        move(self.write)
        return written, read


@dataclass(slots=True)
class _DiskSlot:
    """Buffer of a slice's master copy and moments, with the pending requests to read or write it.
    Invariant: `memory` is accessed only after `wait`."""

    memory: Tensor  # uint8 [3 or 2, bytes]
    requests: list["Future[None]"] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the buffer's requests. Raises WriteFailed."""
        requests, self.requests = self.requests, []
        settle(requests)


def settle(requests: Iterable["Future[None]"]) -> None:
    """Wait for all requests to the drive. Raises the exception of the first that failed."""
    failed = [error for request in requests if (error := request.exception()) is not None]
    if failed:
        raise failed[0]


class DiskStates(HostStates):
    """AdamW states on a drive. Invariant: between updates a bfloat16 or float16 parameter equals
    its rounded fp32 master copy, and no copy or request to the drive is running."""

    def _allocate(self, ranks: ParallelContext | None, room: int | None) -> None:
        """Allocate staging memory; open the states' file. Raises UnsupportedError on all ranks."""
        each = sectors(self._staged * max((d.itemsize for _, _, d in self._arrays()), default=0))
        kept = MOMENTS + any(map(is_low, self._parameters.values()))
        self._reserve(0, DISK_SLOTS * kept * each, ranks, room)
        self._slab = pages(max(SECTOR, DISK_SLOTS * kept * each))
        self._disk_slots = [
            _DiskSlot(memory.view(kept, each))
            for memory in self._slab[: DISK_SLOTS * kept * each].chunk(DISK_SLOTS)
        ]
        refusal = None
        try:
            self._open_file()
        except UnsupportedError as error:
            refusal = error
        except WriteFailed as error:
            refusal = UnsupportedError(f"optimizer.disk: {error}")
        if ranks is not None and ranks.layout.devices() > 1:
            failed = [rank for rank, (no,) in enumerate(ranks.figures([refusal is not None])) if no]
            if failed and refusal is None:
                refusal = UnsupportedError(
                    f"optimizer.disk: rank {failed[0]} refused it; see the output of that rank"
                )
        if refusal is not None:
            raise refusal

    def _open_file(self) -> None:
        config, size = self._rule.config, 0
        addresses: dict[str, int] = {}
        for key, shape, dtype in self._arrays():
            addresses[key] = size
            size += sectors(math.prod(shape) * dtype.itemsize)
        assert config.disk is not None, "a run has a folder"
        self._addresses = addresses
        self._file = ScratchFile(Path(config.disk).expanduser(), max(SECTOR, size))
        self._rates = self._file.rates(self._slab)
        seconds = sum(self._file.size / rate for rate in self._rates)
        if seconds > config.disk_seconds:
            raise UnsupportedError(
                f"optimizer.disk: {self.describe()}, more than "
                f"optimizer.disk_seconds ({config.disk_seconds:g}); name a folder on a faster "
                "drive, or raise optimizer.disk_seconds"
            )
        mapped = torch.frombuffer(self._file.memory, dtype=torch.uint8)
        for key, shape, dtype in self._arrays():
            at = addresses[key]
            part = mapped[at : at + math.prod(shape) * dtype.itemsize]
            self._states[key] = part.view(dtype).view(shape)

    def describe(self) -> str:
        """Return words for the states' folder, measured speeds, and the drive's time per update."""
        size, (written, read) = self._file.size, self._rates
        how = "" if self._file.direct else ", through the page cache: no direct I/O there"
        return (
            f"{size / GIB:,.2f} GiB in {self._file.folder}{how}, measured at {written / 1e9:.2f} "
            f"GB/s written and {read / 1e9:.2f} read: the drive takes "
            f"{size / written + size / read:,.1f} s of an update"
        )

    def held(self) -> StateBytes:
        staged = super().held()
        return StateBytes(0, staged.host + len(self._slab), staged.untouched)

    def _states_of(self, pieces: list[_ParameterSlice]) -> Generator[list[Tensor], None, None]:
        self._file.flush()  # Note: [A mapping and direct reads]
        slots, ahead = self._disk_slots, DISK_SLOTS - 1
        try:
            for index, piece in enumerate(pieces[:ahead]):
                self._begin(self._file.read, piece, slots[index])
            for index, piece in enumerate(pieces):
                slot = slots[index % DISK_SLOTS]
                slot.wait()
                yield [memory for _, memory in self._extents(piece, slot)]
                self._begin(self._file.write, piece, slot)
                if index + ahead < len(pieces):
                    following = slots[(index + ahead) % DISK_SLOTS]
                    self._begin(self._file.read, pieces[index + ahead], following)
        finally:
            settle([request for slot in slots for request in slot.requests])

    def _begin(
        self,
        move: Callable[[Tensor, int], "Future[None]"],
        piece: _ParameterSlice,
        slot: _DiskSlot,
    ) -> None:
        slot.wait()
        for row, (address, part) in enumerate(self._extents(piece, slot)):
            memory = slot.memory[row, : sectors(part.nbytes)]
            slot.requests.append(move(memory, address))

    def _extents(self, piece: _ParameterSlice, slot: _DiskSlot) -> list[tuple[int, Tensor]]:
        """Return a pair (offset in the file, view of the buffer `slot`) for each array of a slice:
        its master copy, if any, and both moments."""
        wide = accumulate_dtype(self._parameters[piece.name].dtype)
        start, size = piece.start * wide.itemsize, (piece.stop - piece.start) * wide.itemsize
        return [
            (self._addresses[key] + start, slot.memory[row, :size].view(wide))
            for row, key in enumerate(self._keys(piece.name))
        ]


MEASURED, PASSES = 2**27, 3  # elements of the measured states (1.6 GB), and passes


def drive_rate(folder: Path, elements: int = MEASURED, passes: int = PASSES) -> float:
    """Measure a folder's drive: return bytes per second, read and written together, the median of
    several updates without computation. Raises WriteFailed, or UnsupportedError, as for a drive
    without direct I/O."""
    weight = nn.Parameter(torch.empty(elements, dtype=torch.bfloat16))
    config = OptimizerConfig(states=StatesPlace.DISK, disk=str(folder))
    rule = Rule(config, {"weight": False})
    try:
        states = DiskStates({"weight": weight}, rule, weights=Tier.HOST)
    except UnsupportedError as error:  # the caller has no key of a run file
        raise UnsupportedError(str(error).replace("optimizer.disk:", "disk:", 1)) from error
    if not states._file.direct:
        raise UnsupportedError(
            f"disk: {folder} has no direct I/O, so main memory would be measured; name a folder on "
            "a local drive"
        )
    starts = range(0, elements, states._staged)
    pieces = [_ParameterSlice("weight", at, min(at + states._staged, elements)) for at in starts]

    def seconds() -> float:
        began = time.perf_counter()
        for _ in states._states_of(pieces):
            pass
        return time.perf_counter() - began

    seconds()  # empty the page cache of the file first
    return 2 * states._file.size / median(seconds() for _ in range(passes))
