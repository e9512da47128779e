"""Where a step's time goes: a profile of one step in a child, and what is read off it.

The profile is torch.profiler's trace of events. At every instant the device does what its latest
kernel does; a copy between the tiers counts only while no kernel runs beside it, which is when it
is exposed; an instant with neither is the host's, which has issued nothing yet.
"""

import heapq
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.children import add_row
from benchmarks.gpu.device import draw, make_model, synchronize
from benchmarks.gpu.steps import reserve, schedule_of, widened
from farspan import Step

STEP = "farspan step"  # what the profile calls it
HOST = "host"
COPIES = ("exposed fetch", "exposed evict")
# The first that a kernel's name holds decides, so attention's products come before other products.
KINDS = (
    (
        "attention backward",  # cuDNN's has helpers before and after its own kernel
        ("bprop", "dot_do_o", "convert_dq", "flash_bwd", "flashattnbwd", "_for_cpu_backward"),
    ),
    ("attention forward", ("fprop", "flash_fwd", "flashattnfwd", "attention_for_cpu")),
    ("loss", ("softmax", "nll_loss", "cross_entropy", "loss_kernel")),
    ("linear", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "aten::mm", "aten::addmm")),
)
OTHER = "elementwise"  # norms, rotations, activations, sums, copies on the device
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")
LINES = (*(name for name, _ in KINDS), OTHER, *COPIES, HOST)


class Busy(NamedTuple):
    """Something that ran from `start` to `end`, microseconds."""

    start: float
    end: float
    kind: str


def run(settings: Mapping[str, Any]) -> None:
    """A step as a profile sees it."""
    began = time.perf_counter()
    model = widened(make_model(settings, settings["layers"]))
    step = Step(model, schedule_of(settings["schedule"]))
    ids = draw(settings, settings["tokens"])
    add_row(settings, {"ready_seconds": time.perf_counter() - began})
    add_row(settings, reserve(settings, step))
    step(ids, ids)
    model.zero_grad(set_to_none=True)
    on_cuda = settings["device"] == "cuda"
    synchronize(settings["device"])
    activities = [ProfilerActivity.CUDA] if on_cuda else []
    with profile(activities=[ProfilerActivity.CPU, *activities], acc_events=True) as profiled:
        began = time.perf_counter()
        with record_function(STEP):
            step(ids, ids)
            synchronize(settings["device"])
        seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.get("trace") or Path(folder) / "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    window, busy = read(events, "gpu" if on_cuda else "cpu")
    add_row(settings, {"profiled_seconds": seconds, "lines": attributed(busy, window)})


def read(events: Iterable[Mapping[str, Any]], where: str) -> tuple[tuple[float, float], list[Busy]]:
    """From when to when the step was, and what ran in it on the device (or, where `where` is
    "cpu", on the threads that compute)."""
    window, found = (0.0, 0.0), []
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X":
            continue
        start, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))
        if category == "user_annotation" and event["name"] == STEP:
            window = start, end
        elif category in CATEGORIES and (category == "cpu_op") == (where == "cpu"):
            found.append(Busy(start, end, kind_of(event["name"], category)))
    return window, [busy for busy in found if busy.end > window[0] and busy.start < window[1]]


def kind_of(name: str, category: str) -> str:
    """The line that a kernel or a copy belongs to."""
    if category == "gpu_memcpy":
        directions = {"HtoD": COPIES[0], "DtoH": COPIES[1]}
        return next((kind for word, kind in directions.items() if word in name), OTHER)
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(w in lower for w in words)), OTHER)


def attributed(busy: Iterable[Busy], window: tuple[float, float]) -> dict[str, float]:
    """Seconds of the window by line; they add up to the window."""
    found = dict.fromkeys(LINES, 0.0)
    for start, end, kind in _instants(sorted(busy), window):
        found[kind] += (end - start) * 1e-6
    return found


def _instants(busy: list[Busy], window: tuple[float, float]) -> Iterator[Busy]:
    """The window cut where anything begins or ends, each piece with what it counts as: kernels
    before copies, and of either the latest to begin."""
    borders = {border for b in busy for border in b[:2]}
    cuts = sorted({*window, *(cut for cut in borders if window[0] < cut < window[1])})
    running: list[tuple[bool, float, float, str]] = []
    first = 0
    for start, end in pairwise(cuts):
        while first < len(busy) and busy[first].start <= start:
            begun = busy[first]
            heapq.heappush(running, (begun.kind in COPIES, -begun.start, begun.end, begun.kind))
            first += 1
        while running and running[0][2] <= start:
            heapq.heappop(running)
        yield Busy(start, end, running[0][3] if running else HOST)
