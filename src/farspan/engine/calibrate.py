"""Measure this machine's speeds for `farspan plan` and `farspan train`.

Every rate is measured on the code that the engine runs: torch's products in the orders a linear
layer needs, attention through `select_kernel`, elementwise work that allocates its results, copies
between the arenas of a step, cells of a tiny model. Sizes grow until one call takes too long, so
that the curves of a laptop and of an H100 both end where the machine reaches its full speed. On a
GPU the installed attention kernels are compared, in each direction.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from farspan.durable import write_whole
from farspan.engine.far import far_curves
from farspan.engine.float8 import float8_fault
from farspan.engine.kernels import AttentionKernels, deterministic_algorithms
from farspan.engine.microbench import (
    HEAD_DIM,
    QUICK,
    THOROUGH,
    Bench,
    Links,
    attention,
    attentions,
    float8_products,
    links,
    logit,
    memory,
    products,
    softmax,
    weight_products,
    workspace,
)
from farspan.engine.microbench import describe_machine as versions
from farspan.engine.step import Step
from farspan.formatting import write_seconds
from farspan.host import available_host_bytes
from farspan.planner.machines import (
    BUSY_RATES,
    MachineFile,
    busy_words,
    contradictions,
    machine,
    pair_seconds,
    preset_of_gpu,
    read,
    to_json,
    user_file,
)
from farspan.program.program import Backward, Forward
from farspan.spec import (
    AttentionKernel,
    Curve,
    LayerSpec,
    MachineSpec,
    ModelSpec,
    Rates,
    Schedule,
    UnsupportedError,
)

LOG = logging.getLogger(__name__)
CANDIDATES = [kernel for kernel in AttentionKernel if kernel is not AttentionKernel.AUTO]
KERNEL_TOKENS = (2048, 16384)  # of the calls that compare kernels
# Two kernels for the two directions, of which PyTorch has one at a time.
APART = {AttentionKernel.FA3, AttentionKernel.FLASH}
KERNEL_MODEL = ModelSpec("", 0, 0, (LayerSpec(1, 1, HEAD_DIM, HEAD_DIM),), 2)


@dataclass(frozen=True, slots=True)
class FastestKernel:
    """Fastest attention kernels on one device in one dtype, and the slowdown of determinism."""

    kernel: AttentionKernel | None = None  # None: no kernels to choose from
    deterministic: float = 1.0  # time of the fastest deterministic kernels over that of the fastest
    backward: AttentionKernel | None = None  # None: `kernel`
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # forward, backward


def fastest_attention(
    bench: Bench, dtype: torch.dtype, progress: Callable[[str], None]
) -> FastestKernel:
    """Return the kernels with the least time for the forward and for the backward, over causal and
    full attention at each length in KERNEL_TOKENS, under load. Kernels that are missing or fail are
    skipped."""
    if bench.on_cpu or dtype not in (torch.bfloat16, torch.float16):
        return FastestKernel()
    seconds: dict[AttentionKernel, tuple[float, float]] = {}
    same: dict[AttentionKernel, tuple[float, float]] = {}
    for kernel in CANDIDATES:
        progress(f"attention by {kernel.value}")
        for found, deterministic in ((seconds, False), (same, True)):
            try:
                AttentionKernels(bench.device, dtype, kernel).refuse(KERNEL_MODEL)
                with (
                    deterministic_algorithms(deterministic),
                    measuring_kernel(bench, dtype, kernel),
                ):
                    found[kernel] = _kernel_seconds(bench, dtype)
            except (UnsupportedError, RuntimeError, AssertionError):  # a kernel refused
                continue
    if not seconds:
        return FastestKernel()
    pairs = [pair for pair in product(seconds, repeat=2) if set(pair) != APART]
    best = min(pairs, key=partial(_pair_seconds, seconds))
    # A deterministic run takes the fastest, or flash attention if the fastest is cuDNN.
    flash = AttentionKernel.FA3 if AttentionKernel.FA3 in best else AttentionKernel.FLASH
    second = tuple(kernel if kernel in same else flash for kernel in best)
    slower = 1.0
    if all(kernel in same for kernel in second):
        slower = _pair_seconds(same, second) / _pair_seconds(seconds, best)
    back = best[1] if best[1] is not best[0] else None
    measured = {kernel.value: ways for kernel, ways in seconds.items()}
    return FastestKernel(best[0], max(1.0, slower), back, measured)


def _pair_seconds(
    seconds: dict[AttentionKernel, tuple[float, float]], pair: tuple[AttentionKernel, ...]
) -> float:
    """Return the seconds of a forward by the first kernel and a backward by the second."""
    return seconds[pair[0]][0] + seconds[pair[1]][1]


def _kernel_seconds(bench: Bench, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of all compared calls of the bench's kernel: forwards, backwards."""
    made = [
        attention(bench, dtype, tokens, HEAD_DIM, causal=causal)
        for tokens in KERNEL_TOKENS
        for causal in (False, True)
    ]
    forward, backward = (
        sum(bench.glance(a.call(backward=way)) for a in made) for way in (False, True)
    )
    return forward, backward


@contextmanager
def measuring_kernel(
    bench: Bench,
    dtype: torch.dtype,
    kernel: AttentionKernel | None,
    backward: AttentionKernel | None = None,
) -> Iterator[None]:
    """Run the body with these kernels for the attention calls that the bench times; by default the
    backward's is the forward's."""
    bench.kernel, bench.backward_kernel = kernel or AttentionKernel.AUTO, backward
    third = AttentionKernel.FA3  # it is registered if one direction needs it
    try:
        needs = third if backward is third else bench.kernel
        with AttentionKernels(bench.device, dtype, needs).ready():
            yield
    finally:
        bench.kernel, bench.backward_kernel = AttentionKernel.AUTO, None


DTYPES = (torch.bfloat16, torch.float32, torch.float64)
CHUNKS = 4  # of the steps that time a cell
LATENCY = 2e-5  # seconds of a collective, which one process cannot measure
ASSUMED = {
    "peer": "assumed: through main memory, as fast as the slower direction",
    "network": "assumed: as fast as the link; one process cannot measure it",
    "latency": "assumed: one process cannot measure it",
    "disk": "assumed: farspan calibrate --disk FOLDER measures it",
}
PAGEABLE = "measured with pageable memory, since none can be locked here; copies do not overlap"

Progress = Callable[[str], None]


def calibrate(
    device: torch.device,
    dtypes: Sequence[torch.dtype] | None = None,
    progress: Progress = lambda _: None,
    *,
    quick: bool = False,
) -> MachineFile:
    """Measure the rates of one device and of main memory, which takes up to about a minute, or a
    few seconds if `quick`.

    Without `dtypes` it measures bfloat16 and float32, and float64 on a CPU unless `quick`.
    `progress` receives a message before each measurement.

    Returns:
        This node with all its devices, each as fast as the measured one. `sources` names values
        that one process cannot measure, which are assumed. Values that vary are measured again;
        `spread` says by how much they vary.

    Raises:
        UnsupportedError: Rates still contradict each other: the machine was too busy.
    """
    if dtypes is None:
        dtypes = DTYPES[:2] if quick or device.type != "cpu" else DTYPES
    start = time.perf_counter()
    calibration = Calibration(Bench(device, QUICK if quick else THOROUGH), tuple(dtypes))
    effort = calibration.bench.effort
    for turn in range(1, effort.most + 1):
        each = (time.perf_counter() - start) / max(1, turn - 1)
        left = f", {write_seconds(each * (effort.passes - turn + 1))} left" if turn > 1 else ""
        prefix = f"{turn} of {effort.passes}{left}: " if turn <= effort.passes else "once more: "
        calibration.look(_after(prefix, progress))
        file = calibration.file()
        wrong = next(contradictions(file.spec), None)
        spent = time.perf_counter() - start
        is_late = turn > 1 and spent * (turn + 1) / turn > effort.seconds
        is_settled = turn >= effort.passes and calibration.bench.settled()
        if wrong is None and (is_late or is_settled):
            break
    if wrong is not None:
        raise UnsupportedError(
            f"machine: the measurements contradict each other ({wrong}); the machine was probably "
            "busy: measure again when it is idle, or name a machine"
        )
    return file


@dataclass(slots=True)
class Calibration:
    """Measurement of a machine in several passes; each repeats the calls whose times still vary."""

    bench: Bench
    dtypes: tuple[torch.dtype, ...]
    _rates: dict[str, Rates] = field(init=False, default_factory=dict)
    _fastest: dict[str, FastestKernel] = field(init=False, default_factory=dict)
    _memory: float = field(init=False, default=0.0)
    _links: Links | None = field(init=False, default=None)
    _overhead: float = field(init=False, default=0.0)

    def look(self, progress: Progress = lambda _: None) -> None:
        """Run one pass over all measurements."""
        for dtype in self.dtypes:
            said, name = _after(f"{_name(dtype)}: ", progress), _name(dtype)
            if name not in self._fastest:  # once: one curve describes one kernel
                self._fastest[name] = fastest_attention(self.bench, dtype, said)
            fastest = self._fastest[name]
            with measuring_kernel(self.bench, dtype, fastest.kernel, fastest.backward):
                found = _rates(self.bench, dtype, said)
            self._rates[name] = replace(
                found,
                kernel=fastest.kernel,
                backward_kernel=fastest.backward,
                deterministic=fastest.deterministic,
            )
        progress("memory and copies")
        self._memory, self._links = memory(self.bench), links(self.bench)
        progress("overhead of a cell")
        self._overhead = _cell_seconds(self.bench)

    def file(self) -> MachineFile:
        """Return a machine file with the results of all passes so far."""
        link, record = self._links, versions()
        assert link is not None, "look first"
        on_cpu, device = self.bench.on_cpu, self.bench.device
        devices = 1 if on_cpu else torch.cuda.device_count()
        host = available_host_bytes()
        spec = MachineSpec(
            name=record["processor"] if on_cpu else torch.cuda.get_device_name(device),
            devices=devices,
            device_bytes=host if on_cpu else torch.cuda.mem_get_info(device)[1],
            host_bytes=host,
            rates=dict(self._rates),
            memory=self._memory,
            fetch=link.fetch,
            evict=link.evict,
            fetch_together=link.fetch_together,
            evict_together=link.evict_together,
            host_memory=devices * (link.fetch_together + link.evict_together),
            peer=min(link.fetch, link.evict),
            network=min(link.fetch, link.evict),
            latency=LATENCY,
            overhead=self._overhead,
            reserve=0 if on_cpu else _reserve(device),
            unified=on_cpu,
            processors=0
            if on_cpu
            else torch.cuda.get_device_properties(device).multi_processor_count,
            pinned=link.locks,
        )
        sources = ASSUMED if link.locks else ASSUMED | dict.fromkeys(("fetch", "evict"), PAGEABLE)
        record["pinned_bytes_a_second"] = link.pinned
        compared = {name: found.seconds for name, found in self._fastest.items() if found.seconds}
        if compared:  # seconds of the compared calls, [forward, backward] of each kernel
            record["attention_seconds"] = compared
        about = self.bench.effort.about
        return MachineFile(spec, about, sources, record, self.bench.spread())


def here(
    progress: Progress = lambda _: None,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES[:2],
) -> MachineSpec:
    """Return this machine's specification with measured rates, for a device (by default the GPU).

    Rates come from the file that `farspan calibrate` wrote; else they are measured quickly, once,
    in these dtypes, and saved next to that file. Measurements with other hardware, CPU threads or
    another version of torch are ignored. `progress` receives a message when a measurement starts,
    with the file that will have it.

    Raises:
        UnsupportedError: The file does not say which hardware it describes, and it is of another
            kind.
    """
    usual = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, path, now = device or usual, user_file(), versions()
    if device.type == usual.type and path.is_file():
        file = read(path)
        if _basis(file.measured_on, device) in (None, _basis(now, device)):
            return _of_this_kind(file.spec, path, device)
    return _kept(path.parent, device, dtypes, now, progress)


def _basis(record: dict[str, Any], device: torch.device) -> str | None:
    """Return a calibration's hardware and torch version, as text to compare; None for no record."""
    if not record:
        return None
    on_cpu = device.type == "cpu"
    names = ("processor", "threads") if on_cpu else ("gpu",)
    torch_version = dict(record.get("versions", {})).get("torch")
    return f"{device.type} {[record.get(name) for name in names]} {torch_version}"


def _of_this_kind(spec: MachineSpec, path: Path, device: torch.device) -> MachineSpec:
    if spec.unified != (device.type == "cpu"):
        has = "a GPU" if device.type == "cuda" else "no GPU"
        raise UnsupportedError(
            f"machine: {path} describes {spec.name}, but this machine has {has}; "
            "run farspan calibrate"
        )
    return spec


def _kept(
    folder: Path,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    now: dict[str, Any],
    progress: Progress,
) -> MachineSpec:
    """Return this machine's saved quick measurements, after measuring dtypes that are missing."""
    # Several machines may share a home.
    key = hashlib.sha256(str(_basis(now, device)).encode()).hexdigest()[:12]
    path, before = folder / f"measured-{key}.json", None
    with suppress(UnsupportedError):
        before = read(path)
    known = {} if before is None else before.spec.rates
    missing = [dtype for dtype in dtypes if _name(dtype) not in known]
    if before is not None and not missing:
        memory = available_host_bytes()  # current main memory
        on_device = memory if before.spec.unified else before.spec.device_bytes
        return replace(before.spec, host_bytes=memory, device_bytes=on_device)
    names = " and ".join(map(_name, missing))
    progress(
        f"no measurements yet for this {device.type} device and torch {torch.__version__}: "
        f"measuring {names} quickly; farspan keeps them in {path} if the machine is idle (farspan "
        "calibrate takes longer and is more accurate)"
    )
    file = calibrate(device, missing, progress, quick=True)
    file = replace(file, spec=replace(file.spec, rates={**known, **file.spec.rates}))
    if (words := busy_words(file.spread, "run farspan calibrate")) is not None:
        progress(BUSY_RATES)
        LOG.warning("%s; these measurements are used once and not kept", words)
        return file.spec
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(to_json(file), indent=1).encode("utf-8"))
    except OSError as error:  # the next run measures again
        LOG.warning("the measurements are not kept: %s", error)
    return file.spec


def _after(prefix: str, progress: Progress) -> Progress:
    return lambda what: progress(prefix + what)


def _rates(bench: Bench, dtype: torch.dtype, progress: Progress) -> Rates:
    path = f"rates.{_name(dtype)}"
    progress("matrix products")
    curves: dict[str, Any] = {
        "matmul": bench.curve(f"{path}.matmul", products(bench, dtype)),
        "weights": bench.curve(f"{path}.weights", weight_products(bench, dtype)),
    }
    if not bench.on_cpu and dtype is torch.bfloat16 and _has_float8(bench.device):
        progress("matrix products in FP8")
        curves["fp8"] = bench.curve(f"{path}.fp8", float8_products(bench, dtype))
    progress("attention")
    for backward, way in ((False, "forward"), (True, "backward")):
        for causal, kind in ((False, "attention"), (True, "causal")):
            points = attentions(bench, dtype, causal=causal, backward=backward)
            curves[f"{kind}_{way}"] = bench.curve(f"{path}.{kind}_{way}", points)
    curves |= far_curves(bench, path, dtype)
    return Rates(
        **curves,
        peak=_peak(bench, dtype, (curve for name, curve in curves.items() if name != "fp8")),
        head_dim=HEAD_DIM,
        softmax_forward=_softmax(bench, path, dtype, curves, backward=False),
        softmax_backward=_softmax(bench, path, dtype, curves, backward=True),
        logit=logit(bench, f"{path}.logit", dtype),
        # On a CPU a plan counts torch's allocations, which include the workspace of kernels.
        attention_workspace=0.0 if bench.on_cpu else workspace(bench, dtype),
    )


def _has_float8(device: torch.device) -> bool:
    """Return whether torchao is installed, and its products work on this device."""
    with suppress(UnsupportedError):
        return float8_fault(device) is None
    return False


def _softmax(
    bench: Bench, path: str, dtype: torch.dtype, curves: dict[str, Curve], *, backward: bool
) -> float:
    """Return seconds of softmax per query, key and head, at most those of the whole attention."""
    way = "backward" if backward else "forward"
    seconds = softmax(bench, f"{path}.softmax_{way}", dtype, backward=backward)
    return min(seconds, pair_seconds(curves[f"attention_{way}"], HEAD_DIM, backward=backward))


def _peak(bench: Bench, dtype: torch.dtype, curves: Iterable[Curve]) -> float:
    """Return the peak FLOP per second, for MFU: the GPU preset's, or the fastest measured rate if
    that is higher or no preset matches."""
    preset = None if bench.on_cpu else preset_of_gpu(torch.cuda.get_device_name(bench.device))
    known = machine(preset).rates if preset is not None else {}
    datasheet = known[_name(dtype)].peak if _name(dtype) in known else 0.0
    return max(datasheet, *(rate for curve in curves for _, rate in curve.points))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cell_seconds(bench: Bench) -> float:
    """Measure the seconds that the CPU takes to launch a cell's operations, in steps of a tiny
    model. On a GPU the model's chunks are long enough for vendors' attention kernels; on a CPU,
    which also computes the operations, they have only a few tokens."""
    dtype, chunk = torch.bfloat16, bench.effort.chunk
    if bench.on_cpu:
        dtype, chunk = torch.float32, 16
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CHUNKS * chunk,
    )
    model: nn.Module = LlamaForCausalLM(config)
    step = Step(model.to(bench.device, dtype).train(), Schedule(chunk=chunk, kv_block=chunk))
    tokens = CHUNKS * chunk
    ids = torch.zeros(1, tokens, dtype=torch.long, device=bench.device)
    cells = sum(isinstance(i, Forward | Backward) for i in step.program(1, tokens).instructions)
    return bench.seconds("overhead", lambda: step(ids, ids)) / cells


def _reserve(device: torch.device) -> int:
    """Return the device bytes in use outside torch: the context, libraries, other processes."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
