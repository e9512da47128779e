"""Rates of this device: how fast it runs what a step is made of, and what it is.

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
from torch import Tensor
from torch.nn import functional

from farspan.attention.backends import BackwardQueries, BlockKernel, accumulate_dtype
from farspan.engine.kernels import select_kernel
from farspan.engine.memory import PeakMemory
from farspan.engine.tiers import Arena, CopyEngine
from farspan.program.attention_blocks import Block
from farspan.sparse.attend import FarCall
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    attend_pages,
    attend_pages_backward,
    fused_votes,
    supports,
)
from farspan.sparse.pages import mean_keys
from farspan.spec import BACKWARD_PRODUCTS, MEAN, AttentionKernel, Curve, Sparse, Tier

Call = Callable[[], object]
Points = Iterator[tuple[float, int, Call]]  # size of a call, how many are made, what makes them

AGREE = 1.1  # the second-best look takes at most so many times the best one
SHORTEST = 1e-3  # seconds that one measurement takes at least: shorter calls are repeated
HEAVY = 3e-4  # seconds of a call that may bring a GPU to its limit of power
KV_SHARE = 4  # query heads that share a K, V head, as in most models of today
HEAD_DIM = 128  # of attention's curves
WIDEST_PRODUCT = 8192  # of a product
LONGEST = 16384  # tokens of an attention call


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look, and at how much."""

    about: str  # what a machine file says of itself
    longest: float  # seconds of a call that sizes grow up to
    tries: int  # runs in a look
    passes: int  # looks at every call, two at least
    most: int  # passes; those beyond `passes` look at what has not settled
    seconds: float  # after two passes, one that would end later only begins for a contradiction
    copied: int  # bytes of each arena that copies are timed on
    queries: int  # of the calls that tell the softmax apart, eight times as many on a GPU
    moved: int = 2**22  # bytes of a tensor of elementwise work, 64 times as many on a GPU
    chunk: int = 1024  # tokens of cells that are issued on a GPU: cuDNN's blocks are no shorter
    held: int = 4096  # tokens of the call whose memory is looked at: 32 MiB of queries on a GPU
    loaded: float = 0.6  # seconds of a long call, again and again, on a GPU; the last half counts


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
# To see that everything runs, also where a GPU is stood in for: its rates say nothing of a machine.
GLANCE = Effort(
    "measured at a glance: no rates to plan with",
    longest=1e-4,
    tries=1,
    passes=2,
    most=30,  # as little as can be told apart, until nothing contradicts itself
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
    """Times calls on one device.

    `looks` holds the fastest run of each look at a call, by the field of the machine file that it
    is for and its size.
    """

    device: torch.device
    effort: Effort
    clock: Callable[[], float] = time.perf_counter
    generator: torch.Generator = field(init=False)
    looks: dict[tuple[str, float], list[float]] = field(init=False, default_factory=dict)
    kernel: AttentionKernel = AttentionKernel.AUTO  # whose attention is looked at
    _curves: dict[str, Curve] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def seconds(self, name: str, call: Call, size: float = 1.0) -> float:
        """Of one call, which `name` and `size` tell from others in every pass."""
        if self._agreed(name, size):
            return min(self.looks[name, size])
        first = min(self._run(call, 1) for _ in range(2))
        if not self.on_cpu and first >= HEAVY and self.effort.loaded:
            return self.note(name, self._under_load(call, first), size)
        repeats = max(1, math.ceil(SHORTEST / max(first, 1e-9)))
        fastest = min(self._run(call, repeats) for _ in range(self.effort.tries))
        return self.note(name, fastest, size)

    def _under_load(self, call: Call, first: float) -> float:
        """As steps of many seconds see it. A GPU lowers its clock when it reaches its limit of
        power, some tenths of a second after work begins: an H200 then makes 690 TFLOP/s of the 740
        of its first products, and 530 of 590 in the backward of attention."""
        repeats = math.ceil(self.effort.loaded / 2 / first)
        self._run(call, repeats)
        return self._run(call, repeats)

    def difference(self, name: str, long: Call, short: Call) -> float:
        """2 short - long, of the fastest run of each; they take turns."""
        if not (self._agreed(name, 1.0) and self._agreed(name, 0.5)):
            for call in (long, short):
                self._run(call, 1)
            turns = range(3 * self.effort.tries)
            runs = [(self._run(long, 1), self._run(short, 1)) for _ in turns]
            self.note(name, min(run[0] for run in runs), 1.0)
            self.note(name, min(run[1] for run in runs), 0.5)
        return 2 * min(self.looks[name, 0.5]) - min(self.looks[name, 1.0])

    def glance(self, call: Call) -> float:
        """Seconds of one call, to choose between calls of one moment: no look that is kept."""
        self._run(call, 1)
        return min(self._run(call, 1) for _ in range(self.effort.tries))

    def note(self, name: str, seconds: float, size: float = 1.0) -> float:
        """One more look at a call; the fastest of all."""
        looks = self.looks.setdefault((name, size), [])
        looks.append(seconds)
        return min(looks)

    def settled(self, name: str | None = None) -> bool:
        """Do the best two looks agree at every call, or at every call for one field?"""
        keys = [key for key in self.looks if name in (None, key[0])]
        return bool(keys) and all(self._agreed(*key) for key in keys)

    def spread(self) -> dict[str, float]:
        """Slowest look over fastest, of the worst call for each field."""
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
        """Rates against size, sizes ascending, until a call takes too long."""
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
    """4w tokens by a w by w weight: y = x W, then dx = dy W'."""
    for x, dy, weight in _linears(bench, dtype):
        size = 2.0 * x.numel() * weight.shape[0]

        def call(x: Tensor = x, dy: Tensor = dy, weight: Tensor = weight) -> None:
            functional.linear(x, weight)
            dy @ weight

        yield size, 2, call


def weight_products(bench: Bench, dtype: torch.dtype) -> Points:
    """dW = dy' x of the same shapes."""
    for x, dy, weight in _linears(bench, dtype):
        size = 2.0 * x.numel() * weight.shape[0]
        yield size, 1, partial(torch.matmul, dy.t(), x)


def _linears(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    width = 64
    while width <= WIDEST_PRODUCT:
        x, dy = (bench.random(4 * width, width, dtype=dtype) for _ in range(2))
        yield x, dy, bench.random(width, width, dtype=dtype)
        width *= 2


# -- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention call of C queries on C keys, laid out as the engine's are."""

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
        """Visible (query, key)."""
        queries, keys = self.block.queries, self.block.keys
        return queries * (queries + 1) // 2 if self.block.causal else queries * keys

    def flop(self, *, backward: bool) -> float:
        """Of one head."""
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
    """A call with heads of `width`."""
    heads = KV_SHARE if bench.on_cpu else 8 * KV_SHARE
    capability = (0, 0) if bench.on_cpu else torch.cuda.get_device_capability(bench.device)
    start = 0 if causal else tokens
    q, dout = (bench.random(1, tokens, heads, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = (
        bench.random(tokens, 1, heads // KV_SHARE, width, dtype=dtype).permute(1, 2, 0, 3)
        for _ in range(2)
    )
    asked = width, width, None, capability, bench.kernel
    kernel = select_kernel(bench.device.type, dtype, *asked)
    return AttentionProblem(
        kernel, Block(0, None, start, start + tokens, 0, tokens, causal), q, k, v, dout
    )


def attentions(bench: Bench, dtype: torch.dtype, *, causal: bool, backward: bool) -> Points:
    """Calls of ever more tokens."""
    tokens = 256
    while tokens <= LONGEST:
        made = attention(bench, dtype, tokens, HEAD_DIM, causal=causal)
        yield made.flop(backward=backward), made.heads, made.call(backward=backward)
        tokens *= 2


def softmax(bench: Bench, name: str, dtype: torch.dtype, *, backward: bool) -> float:
    """Seconds of a query, key and head beside the products, for the field `name`.

    Heads half as wide take half of the products' time and all of this one's: t = p + s with wide
    heads, p / 2 + s with narrow ones. Both are timed in turns, since their difference is small.
    """
    tokens = bench.effort.queries * (1 if bench.on_cpu else 8)
    wide, narrow = (
        attention(bench, dtype, tokens, width, causal=False) for width in (HEAD_DIM, HEAD_DIM // 2)
    )
    found = bench.difference(name, wide.call(backward=backward), narrow.call(backward=backward))
    return max(0.0, found) / (wide.pairs * wide.heads)


def workspace(bench: Bench, dtype: torch.dtype) -> float:
    """Bytes of a query or key, head and element of it that a backward takes beside its inputs and
    results: the most of a call with a mask and one without."""
    return max(_workspace(bench, dtype, causal=causal) for causal in (False, True))


def _workspace(bench: Bench, dtype: torch.dtype, *, causal: bool) -> float:
    made = attention(bench, dtype, bench.effort.held, HEAD_DIM, causal=causal)
    call = made.call(backward=True)
    call()  # what libraries take once and keep is in the reserve
    bench.wait()
    with PeakMemory(bench.device) as meter:
        results: Any = call()
    taken = meter.peak - sum(result.nbytes for result in results)
    return max(0, taken) / (2 * bench.effort.held * made.heads * HEAD_DIM)


# -- chosen pages --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PagesProblem:
    """A chunk's attention to chosen pages, and its votes, by the kernels of sparse attention, with
    the pages of `Sparse()`; distinct pages are drawn for each page of queries."""

    call: PagedCall
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def flop(self, *, backward: bool) -> float:
        """Of one head."""
        table = self.call.table
        seen = table.choice.shape[3] * table.page
        flop = 4.0 * self.q.shape[2] * seen * self.q.shape[3]
        return flop * BACKWARD_PRODUCTS if backward else flop

    def attend(self, *, backward: bool) -> Call:
        forward = partial(attend_pages, self.call, self.q, self.k, self.v)
        if not backward:
            return forward
        out, lse = forward()
        totals = PageGradients(
            *(torch.zeros_like(x, dtype=torch.float32) for x in (self.k, self.v))
        )
        queries = BackwardQueries(self.dout, self.q, out, lse)
        return partial(attend_pages_backward, self.call, queries, self.k, self.v, totals)

    def vote(self) -> tuple[float, Call]:
        """Operations of one head, and the call: as `Sparse()` compares pages."""
        sparse, page = Sparse(), self.call.table.page
        means = mean_keys(self.k, sparse.mean_tokens).permute(1, 2, 0, 3).contiguous()
        pages, call = range(self.k.shape[0] // page), FarCall(self.call.scale, page)
        flop = 2.0 * self.q.shape[2] * means.shape[2] * self.q.shape[3]
        largest, rows = sparse.selector != MEAN, sparse.query_tokens
        return flop, partial(fused_votes, self.q, means, pages, call, rows, largest=largest)


def chosen_pages(bench: Bench, dtype: torch.dtype) -> PagesProblem | None:
    """None where sparse attention has no kernels of its own."""
    if dtype.itemsize != 2 or not supports(bench.device, dtype, HEAD_DIM, HEAD_DIM, None):
        return None
    sparse, queries, tokens = Sparse(), 2 * bench.effort.held, 8 * bench.effort.held
    kv_heads = 8
    heads = kv_heads * KV_SHARE
    q, dout = (
        bench.random(1, queries, heads, HEAD_DIM, dtype=dtype).transpose(1, 2) for _ in range(2)
    )
    k, v = (bench.random(tokens, 1, kv_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
    pages, chosen = tokens // sparse.page, min(tokens, sparse.budget) // sparse.page
    rows = 1, kv_heads, queries // sparse.query_tokens
    drawn = torch.rand(*rows, pages, device=bench.device).argsort(-1)[..., :chosen]
    choice = drawn.sort(-1).values.int().contiguous()
    table = PageTable(choice, sparse.page, tokens, tokens, None, sparse.query_tokens)
    return PagesProblem(PagedCall(table, HEAD_DIM**-0.5), q, k, v, dout)


def page_curves(bench: Bench, path: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Curves of one size; none where sparse attention has no kernels of its own."""
    made = chosen_pages(bench, dtype)
    if made is None:
        return {}
    found = {}
    for backward, way in ((False, "forward"), (True, "backward")):
        point = made.flop(backward=backward), made.heads, made.attend(backward=backward)
        found[f"chosen_{way}"] = bench.curve(f"{path}.chosen_{way}", iter([point]))
    flop, vote = made.vote()
    found["votes"] = bench.curve(f"{path}.votes", iter([(flop, made.heads, vote)]))
    return found


# -- memory and copies ---------------------------------------------------------------------------


def memory(bench: Bench) -> float:
    """Bytes a second that elementwise work reads and writes. Results are fresh, as a model's are:
    on a CPU their pages may have to be made first."""
    size = bench.effort.moved * (1 if bench.on_cpu else 64)
    x, y = (bench.random(size // 4, dtype=torch.float32) for _ in range(2))

    def call() -> Tensor:
        product = x * y
        total = product + x
        return functional.silu(total)

    return (3 + 3 + 2) * size / bench.seconds("memory", call)


def logit(bench: Bench, name: str, dtype: torch.dtype) -> float:
    """Seconds of a logit's cross-entropy and its gradient, as the engine's head asks for them; for
    the field `name`."""
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
    """Bytes a second between the tiers."""

    fetch: float
    evict: float
    fetch_together: float
    evict_together: float
    pinned: float  # host memory made usable for copies
    locks: bool  # it is locked for them


def _reserved(bench: Bench, arena: Arena, size: int) -> float:
    """Seconds until an arena's memory is there and was written."""
    start = bench.clock()
    arena.reserve(size)
    arena.poison()
    bench.wait()
    return bench.clock() - start


def links(bench: Bench) -> Links:
    """Copies between two arenas as a step makes them, chunk after chunk."""
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
    # A direction is as fast alone as beside the other one, if a busy moment says otherwise.
    fetched, evicted = max(fetched, both[0]), max(evicted, both[1])
    return Links(fetched, evicted, both[0], both[1], pinned, locks)


def _together(bench: Bench, whole: int, fetch: Call, evict: Call) -> tuple[float, float]:
    """Each direction while the other one is kept busy on a stream of its own."""
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
    """Hardware, versions and date."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        # Which CUDA torch is built for is a part of its version, and not of its package's.
        "versions": {"torch": torch.__version__} | {name: version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
