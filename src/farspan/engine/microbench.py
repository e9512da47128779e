"""Measure the speed of this device on the operations of a step, and describe its hardware.

Another process can halve the speed of a CPU for seconds. It can only add to the time of a call, so
the fastest run counts. Every call is measured in several passes, far apart, until the best two
measurements agree.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.backends import BackwardQueries, BlockKernel, Directed, accumulate_dtype
from farspan.engine.float8 import float8_linears
from farspan.engine.kernels import select_kernel
from farspan.engine.memory import PeakMemory
from farspan.engine.tiers import Arena, CopyEngine
from farspan.hf.swap import shell_of
from farspan.program.attention_blocks import Block
from farspan.spec import BACKWARD_PRODUCTS, AttentionKernel, Curve, Tier

Call = Callable[[], object]
Points = Iterator[tuple[float, int, Call]]  # size of a call, how many are made, the call

AGREE = 1.1  # the second-best look takes at most this multiple of the best one
SHORTEST = 1e-3  # seconds of one measurement at least: shorter calls are repeated
HEAVY = 3e-4  # seconds of a call that can bring a GPU to its power limit
KV_SHARE = 4  # query heads that share a K, V head, as in most current models
HEAD_DIM = 128  # of attention's curves
WIDEST_PRODUCT = 8192  # rows and columns of a weight
LONGEST = 16384  # tokens of an attention call


@dataclass(frozen=True, slots=True)
class Effort:
    """Duration of a calibration, and the sizes of the calls that it times."""

    about: str  # description in a machine file
    longest: float  # seconds of a call at which sizes stop growing
    tries: int  # runs in a look
    passes: int  # looks at every call, two at least
    most: int  # passes at most; those beyond `passes` measure unsettled calls
    seconds: float  # a third pass that would end later only resolves contradictions
    copied: int  # bytes of each arena of timed copies
    queries: int  # of the calls that isolate the softmax; times 8 on a GPU
    moved: int = 2**22  # bytes of a tensor of elementwise work; times 64 on a GPU
    chunk: int = 1024  # tokens of timed cells on a GPU: cuDNN's blocks are no shorter
    held: int = 4096  # tokens of the call whose memory is measured: 32 MiB of queries on a GPU
    loaded: float = 0.6  # seconds of a long call under load on a GPU; the last half counts


THOROUGH = Effort(
    "measured", longest=0.06, tries=3, passes=3, most=10, seconds=60.0, copied=2**28, queries=1024
)
QUICK = Effort(
    "measured quickly",
    longest=0.004,
    tries=2,
    passes=2,
    most=10,
    seconds=15.0,
    copied=2**26,
    queries=512,
    loaded=0.4,
)
# Checks that everything runs, also with a simulated GPU: its rates do not describe a machine.
GLANCE = Effort(
    "measured only to check that everything runs: do not plan with these rates",
    longest=1e-4,
    tries=1,
    passes=2,
    most=30,  # passes are too short to agree sooner
    seconds=1.0,
    copied=2**20,
    queries=64,
    moved=2**12,
    chunk=128,
    held=256,
    loaded=0.0,
)


@dataclass(slots=True)
class Bench:
    """Timer of calls on one device. `looks` has each call's fastest time in every pass, in seconds,
    by the machine file's field that the call measures and the call's size."""

    device: torch.device
    effort: Effort
    clock: Callable[[], float] = time.perf_counter
    generator: torch.Generator = field(init=False)
    looks: dict[tuple[str, float], list[float]] = field(init=False, default_factory=dict)
    kernel: AttentionKernel = AttentionKernel.AUTO  # kernel of the measured attention
    backward_kernel: AttentionKernel | None = None  # of its backward; None: the same
    _curves: dict[str, Curve] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def seconds(self, name: str, call: Call, size: float = 1.0) -> float:
        """Return the seconds of one call. `name` and `size` identify the call in later passes."""
        if self._agreed(name, size):
            return min(self.looks[name, size])
        first = min(self._run(call, 1) for _ in range(2))
        if self._is_heavy(first):
            return self.note(name, self._under_load(call, first), size)
        repeats = max(1, math.ceil(SHORTEST / max(first, 1e-9)))
        fastest = min(self._run(call, repeats) for _ in range(self.effort.tries))
        return self.note(name, fastest, size)

    def _is_heavy(self, first: float) -> bool:
        return not self.on_cpu and first >= HEAVY and self.effort.loaded > 0

    def _under_load(self, call: Call, first: float) -> float:
        """Return the seconds of a call when calls follow each other without pause. A GPU lowers its
        clock at its power limit, some tenths of a second after work begins: an H200 falls from 740
        to 690 TFLOP/s in products, and from 590 to 530 in the backward of attention."""
        repeats = math.ceil(self.effort.loaded / 2 / first)
        self._run(call, repeats)
        return self._run(call, repeats)

    def difference(self, name: str, long: Call, short: Call) -> float:
        """Return the seconds that two calls share, 2 * short - long: all other work of `short` is
        half that of `long`. Each time is the fastest of several, run by turns."""
        if not (self._agreed(name, 1.0) and self._agreed(name, 0.5)):
            for call in (long, short):
                self._run(call, 1)
            turns = range(3 * self.effort.tries)
            runs = [(self._run(long, 1), self._run(short, 1)) for _ in turns]
            self.note(name, min(run[0] for run in runs), 1.0)
            self.note(name, min(run[1] for run in runs), 0.5)
        return 2 * min(self.looks[name, 0.5]) - min(self.looks[name, 1.0])

    def glance(self, call: Call) -> float:
        """Return the seconds of one call, without recording the time."""
        self._run(call, 1)
        first = min(self._run(call, 1) for _ in range(self.effort.tries))
        return self._under_load(call, first) if self._is_heavy(first) else first

    def note(self, name: str, seconds: float, size: float = 1.0) -> float:
        """Record the seconds of a call in this pass, and return its fastest time in all passes."""
        looks = self.looks.setdefault((name, size), [])
        looks.append(seconds)
        return min(looks)

    def settled(self, name: str | None = None) -> bool:
        """Return whether the two fastest passes agree on every call (of one field, if given)."""
        keys = [key for key in self.looks if name in (None, key[0])]
        return bool(keys) and all(self._agreed(*key) for key in keys)

    def spread(self) -> dict[str, float]:
        """Return, per field, the largest ratio of a call's slowest pass to its fastest."""
        found: dict[str, float] = {}
        for (name, _), looks in self.looks.items():
            found[name] = max(found.get(name, 1.0), max(looks) / max(min(looks), 1e-9))
        return found

    def _agreed(self, name: str, size: float) -> bool:
        best = sorted(self.looks.get((name, size), ()))
        return len(best) >= max(2, self.effort.passes) and best[1] <= AGREE * best[0]

    def _run(self, call: Call, repeats: int) -> float:
        self.wait()
        start = self.clock()
        for _ in range(repeats):
            call()
        self.wait()
        return (self.clock() - start) / repeats

    def wait(self) -> None:
        if not self.on_cpu:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype)

    def curve(self, name: str, points: Points) -> Curve:
        """Return a call's rate for each size; sizes rise until one call takes too long."""
        if self.settled(name):
            return self._curves[name]
        found = []
        for size, count, call in points:
            seconds = self.seconds(name, call, size)
            found.append((size, count * size / seconds))
            if seconds > self.effort.longest:
                break
        self._curves[name] = Curve(tuple(found))
        return self._curves[name]


# -- products ------------------------------------------------------------------------------------


def products(bench: Bench, dtype: torch.dtype) -> Points:
    """Yield calls of growing w that compute y = x W.T and dx = dy W for x [4w, w], W [w, w]."""
    for x, dy, weight in _linears(bench, dtype):
        size = 2.0 * x.numel() * weight.shape[0]

        def call(x: Tensor = x, dy: Tensor = dy, weight: Tensor = weight) -> None:
            functional.linear(x, weight)
            dy @ weight

        yield size, 2, call


def weight_products(bench: Bench, dtype: torch.dtype) -> Points:
    """Yield calls that compute a linear layer's dW = dy.T x for the shapes of `products`."""
    for x, dy, weight in _linears(bench, dtype):
        size = 2.0 * x.numel() * weight.shape[0]
        yield size, 1, partial(torch.matmul, dy.t(), x)


def float8_products(bench: Bench, dtype: torch.dtype) -> Points:
    """Yield calls of a linear module's three products in FP8, casts included, for the shapes of
    `products`."""
    forward = float8_linears(bench.device.type).forward
    for x, dy, weight in _linears(bench, dtype):
        size = 2.0 * x.numel() * weight.shape[0]
        outer, inner = weight.shape
        module = nn.Linear(inner, outer, bias=False, device="meta")
        module = shell_of(module, parameters={"weight": weight.requires_grad_()})
        x.requires_grad_()

        def call(x: Tensor = x, dy: Tensor = dy, module: nn.Linear = module) -> None:
            torch.autograd.grad(forward(module, x), (x, module.weight), dy)

        yield size, 3, call


def _linears(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    width = 64
    while width <= WIDEST_PRODUCT:
        x, dy = (bench.random(4 * width, width, dtype=dtype) for _ in range(2))
        yield x, dy, bench.random(width, width, dtype=dtype)
        width *= 2


# -- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Inputs of one attention call, C queries on C keys, strided as the engine's tensors."""

    kernel: BlockKernel
    block: Block
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs for which attention computes a score."""
        queries, keys = self.block.queries, self.block.keys
        return queries * (queries + 1) // 2 if self.block.causal else queries * keys

    def flop(self, *, backward: bool) -> float:
        """Return the FLOP of the forward or backward per head."""
        flop = 4.0 * self.pairs * self.q.shape[3]
        return flop * BACKWARD_PRODUCTS if backward else flop

    def call(self, *, backward: bool) -> Call:
        scale = self.q.shape[3] ** -0.5

        def forward() -> tuple[Tensor, Tensor]:
            return self.kernel.forward(self.q, self.k, self.v, self.block, scale)

        if not backward:
            return forward
        out, lse = forward()
        queries = BackwardQueries(self.dout, self.q, out, lse)
        return lambda: self.kernel.backward(queries, self.k, self.v, self.block, scale)


def attention(
    bench: Bench, dtype: torch.dtype, tokens: int, width: int, *, causal: bool
) -> AttentionProblem:
    """Return the inputs of an attention call with heads of `width` elements."""
    heads = KV_SHARE if bench.on_cpu else 8 * KV_SHARE
    capability = (0, 0) if bench.on_cpu else torch.cuda.get_device_capability(bench.device)
    start = 0 if causal else tokens
    q, dout = (bench.random(1, tokens, heads, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = (
        bench.random(tokens, 1, heads // KV_SHARE, width, dtype=dtype).permute(1, 2, 0, 3)
        for _ in range(2)
    )
    ahead, back = (
        select_kernel(bench.device.type, dtype, width, width, None, capability, choice)
        for choice in (bench.kernel, bench.backward_kernel or bench.kernel)
    )
    kernel = ahead if ahead == back else Directed(ahead, back)
    return AttentionProblem(
        kernel, Block(0, None, start, start + tokens, 0, tokens, causal), q, k, v, dout
    )


def attentions(bench: Bench, dtype: torch.dtype, *, causal: bool, backward: bool) -> Points:
    """Yield attention calls on growing numbers of tokens, as points of a curve."""
    tokens = 256
    while tokens <= LONGEST:
        made = attention(bench, dtype, tokens, HEAD_DIM, causal=causal)
        yield made.flop(backward=backward), made.heads, made.call(backward=backward)
        tokens *= 2


def softmax(bench: Bench, name: str, dtype: torch.dtype, *, backward: bool) -> float:
    """Measure the seconds of softmax per query, key and head, recorded for the field `name`: the
    part of attention's time that heads of half the width do not halve."""
    tokens = bench.effort.queries * (1 if bench.on_cpu else 8)
    wide, narrow = (
        attention(bench, dtype, tokens, width, causal=False) for width in (HEAD_DIM, HEAD_DIM // 2)
    )
    # Heads half as wide take half of the products' time p, and all of the softmax's time s:
    # t = p + s, and p / 2 + s. Both run by turns, since their difference is small.
    found = bench.difference(name, wide.call(backward=backward), narrow.call(backward=backward))
    return max(0.0, found) / (wide.pairs * wide.heads)


def workspace(bench: Bench, dtype: torch.dtype) -> float:
    """Return the bytes that an attention backward allocates internally, per token (queries plus
    keys), head and element of a head: the larger of a call with a mask and one without."""
    return max(_workspace(bench, dtype, causal=causal) for causal in (False, True))


def _workspace(bench: Bench, dtype: torch.dtype, *, causal: bool) -> float:
    made = attention(bench, dtype, bench.effort.held, HEAD_DIM, causal=causal)
    call = made.call(backward=True)
    call()  # buffers that libraries allocate once count as reserve
    bench.wait()
    with PeakMemory(bench.device) as meter:
        results: Any = call()
    taken = meter.peak - sum(result.nbytes for result in results)
    return max(0, taken) / (2 * bench.effort.held * made.heads * HEAD_DIM)


# -- memory and copies ---------------------------------------------------------------------------


def memory(bench: Bench) -> float:
    """Return the bytes per second that element-wise operations read and write. Their results are
    newly allocated, as in a model: a CPU may have to map the pages first."""
    size = bench.effort.moved * (1 if bench.on_cpu else 64)
    x, y = (bench.random(size // 4, dtype=torch.float32) for _ in range(2))

    def call() -> Tensor:
        product = x * y
        total = product + x
        return functional.silu(total)

    return (3 + 3 + 2) * size / bench.seconds("memory", call)


def logit(bench: Bench, name: str, dtype: torch.dtype) -> float:
    """Return the seconds of cross-entropy and its gradient per logit, computed as in a step."""
    rows, vocab = 1024, 4096
    logits = bench.random(rows, vocab, dtype=dtype).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.long, device=bench.device)

    def call() -> None:
        wide = logits.to(accumulate_dtype(dtype))
        loss = functional.cross_entropy(wide, targets, reduction="sum")
        torch.autograd.grad(loss, logits)

    return bench.seconds(name, call) / (rows * vocab)


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of copies between device and main memory, in bytes per second."""

    fetch: float
    evict: float
    fetch_together: float
    evict_together: float
    pinned: float  # allocation of host memory for copies
    locks: bool  # that memory is page-locked


def _reserved(bench: Bench, arena: Arena, size: int) -> float:
    """Return the seconds that a new arena takes to allocate its memory and touch each page."""
    start = bench.clock()
    arena.reserve(size)
    arena.poison()
    bench.wait()
    return bench.clock() - start


def links(bench: Bench) -> Links:
    """Return the rates of copies between two arenas, a chunk at a time as in a step."""
    whole = bench.effort.copied
    arenas = {tier: Arena(tier, bench.device) for tier in Tier}
    seconds = {tier: _reserved(bench, arena, whole) for tier, arena in arenas.items()}
    pinned, locks = whole / seconds[Tier.HOST], not arenas[Tier.HOST].is_pageable
    copies = CopyEngine(bench.device)
    piece = whole // 16
    device, host = (
        [arenas[tier].view(i * piece, (piece,), torch.uint8) for i in range(16)]
        for tier in (Tier.DEVICE, Tier.HOST)
    )

    def fetch() -> None:
        for target, source in zip(device, host, strict=True):
            copies.fetch(target, source)

    def evict() -> None:
        for target, source in zip(host, device, strict=True):
            copies.evict(target, source)

    fetched, evicted = (whole / bench.seconds(call.__name__, call) for call in (fetch, evict))
    both = (fetched, evicted) if bench.on_cpu else _together(bench, whole, fetch, evict)
    for arena in arenas.values():
        arena.release()
    # Alone a direction is at least as fast as with the other; a busy moment may measure otherwise.
    fetched, evicted = max(fetched, both[0]), max(evicted, both[1])
    return Links(fetched, evicted, both[0], both[1], pinned, locks)


def _together(bench: Bench, whole: int, fetch: Call, evict: Call) -> tuple[float, float]:
    """Return the rate of each copy direction while copies in the other direction run, too."""
    rates = []
    for mine, other in ((fetch, evict), (evict, fetch)):
        here, there = torch.cuda.Stream(bench.device), torch.cuda.Stream(bench.device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        bench.wait()
        with torch.cuda.stream(there):
            for _ in range(4 * bench.effort.tries):
                other()
        with torch.cuda.stream(here):
            start.record()
            for _ in range(bench.effort.tries):
                mine()
            stop.record()
        bench.wait()
        seconds = start.elapsed_time(stop) * 1e-3 / bench.effort.tries
        rates.append(whole / bench.note(f"{mine.__name__}_together", seconds))
    return rates[0], rates[1]


PACKAGES = ("transformers", "safetensors")


def describe_machine() -> dict[str, Any]:
    """Return this machine's hardware and versions, with the date."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        # torch's own version names its CUDA; that of its package does not.
        "versions": {"torch": torch.__version__} | {name: version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
