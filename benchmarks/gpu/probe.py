"""What the first two minutes on a GPU should tell, before anything long begins there.

    python -m benchmarks.gpu.probe [--out FILE]

Attention in blocks, products that add in fp32, fused kernels beside the bytes that they must move,
locked memory, what a launch costs: a few lines each. A probe that fails, or asks for something that
is not there, stops no other one. On a CPU, and with --tiny, sizes are tiny and times mean nothing.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from benchmarks.gpu.device import give_back, synchronize
from farspan.attention.backends import BackwardQueries, BlockKernel, CudaCudnn, CudaFlash, merge_
from farspan.engine.kernels import select_kernel
from farspan.engine.microbench import describe_machine
from farspan.engine.tiers import Arena
from farspan.program.attention_blocks import Block
from farspan.spec import Tier

BF16 = torch.bfloat16
MIB, GIB = 2**20, 2**30
RUNS = 3
LEAST_MS, MOST_CALLS = 10.0, 100  # of a run
LAUNCHES = 1000


class Skipped(Exception):
    """What a probe asks for is not there."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, and the sizes of a 7B model or tiny ones."""

    device: str
    tiny: bool

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, K and V heads, width."""
        return (4, 2, 16) if self.tiny else (28, 4, 128)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def ms(self, call: Callable[[], object]) -> float:
        """The fastest of a few runs, after one that loads kernels. What is short is called often in
        a run: to wait for the device takes some 20 us."""
        self.run(call, 1)
        once = self.run(call, 1)
        count = max(1, min(MOST_CALLS, int(LEAST_MS / once)))
        return min(self.run(call, count) for _ in range(RUNS))

    def run(self, call: Callable[[], object], count: int) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - began) / count

    def memory(self) -> float:
        """Bytes a millisecond that a copy reads and writes."""
        x = torch.zeros(self.size(GIB, MIB), dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.ms(lambda: y.copy_(x))


Lines = Iterator[str]


def memory(bench: Bench) -> Lines:
    """What a copy on the device reaches: the floors below are at this rate."""
    yield f"{bench.memory() / 1e6:.0f} GB/s"


# -- attention -----------------------------------------------------------------------------------


def kernels(bench: Bench) -> tuple[BlockKernel, ...]:
    if bench.device == "cuda":
        return CudaCudnn(CudaFlash()), CudaFlash()
    width = bench.heads[-1]
    return (select_kernel("cpu", BF16, width, width, None, (0, 0)),)


def laid_out(bench: Bench, tokens: int, *, prefix: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, H, T, D], k and v [1, Hk, T, D] as the engine has them: queries token-first, K and V
    of a prefix [T, 1, Hk, D] in memory, those of the chunk itself heads-first."""
    many, few, width = bench.heads
    q = bench.random(1, tokens, many, width).transpose(1, 2)
    if prefix:
        k, v = (bench.random(tokens, 1, few, width).permute(1, 2, 0, 3) for _ in range(2))
    else:
        k, v = (bench.random(1, few, tokens, width) for _ in range(2))
    return q, k, v


def blocks(bench: Bench) -> Lines:
    """A square and a prefix with one LSE over both, against fp32, twice: right? the same bits?"""
    tokens, (many, few, width) = bench.size(2048, 64), bench.heads
    scale = width**-0.5
    square = Block(0, None, tokens, 2 * tokens, tokens, 2 * tokens, True)
    before = Block(0, None, tokens, 2 * tokens, 0, tokens, False)
    for kernel in kernels(bench):
        q, k, v = laid_out(bench, tokens, prefix=True)
        _, own_k, own_v = laid_out(bench, tokens, prefix=False)
        dout = bench.random(1, tokens, many, width).transpose(1, 2)
        out, lse = kernel.forward(q, own_k, own_v, square, scale)
        wide = out.float()
        merge_(wide, lse, *kernel.forward(q, k, v, before, scale))
        out = wide.to(BF16)
        joined = (q, torch.cat([k, own_k], 2), torch.cat([v, own_v], 2))
        leaves = [x.detach().float().requires_grad_() for x in joined]
        keys, values = (x.repeat_interleave(many // few, 1) for x in leaves[1:])
        hidden = torch.ones(tokens, 2 * tokens, dtype=torch.bool, device=bench.device)
        scores = leaves[0] @ keys.mT * scale
        exact = scores.masked_fill(hidden.triu(tokens + 1), -torch.inf).softmax(-1) @ values
        dq, dk, dv = torch.autograd.grad(exact, leaves, dout.float())
        runs = []
        for _ in range(2):
            queries = BackwardQueries(dout, q, out, lse)
            near = kernel.backward(queries, own_k, own_v, square, scale)
            runs.append((*near, *kernel.backward(queries, k, v, before, scale)))
        found = runs[0]
        errors = {
            "out": (out, exact),
            "dq": (found[0].float() + found[3].float(), dq),
            "dk": (torch.cat([found[4], found[1]], 2), dk),
            "dv": (torch.cat([found[5], found[2]], 2), dv),
        }
        said = ", ".join(f"{name} {error(*pair):.1e}" for name, pair in errors.items())
        same = all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
        yield f"{type(kernel).__name__}: errors {said}; the same bits twice: {same}"


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, L2."""
    exact = exact.detach().float()
    return float((found.float() - exact).norm() / exact.norm())


def rectangles(bench: Bench) -> Lines:
    """A chunk by ever more keys: is one long call faster than several, and what does it take?"""
    kernel, chunk = kernels(bench)[0], bench.size(16384, 64)
    many, _, width = bench.heads
    for keys in (chunk, 2 * chunk, 4 * chunk, 8 * chunk):
        q, _, _ = laid_out(bench, chunk, prefix=False)
        _, k, v = laid_out(bench, keys, prefix=True)
        dout = bench.random(1, chunk, many, width).transpose(1, 2)
        given = Block(0, None, keys, keys + chunk, 0, keys, False), width**-0.5
        began = time.perf_counter()
        out, lse = kernel.forward(q, k, v, *given)
        queries = BackwardQueries(dout, q, out, lse)
        kernel.backward(queries, k, v, *given)
        synchronize(bench.device)
        first = time.perf_counter() - began
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        forward = bench.ms(partial(kernel.forward, q, k, v, *given))
        backward = bench.ms(partial(kernel.backward, queries, k, v, *given))
        taken = torch.cuda.max_memory_allocated() / MIB if bench.device == "cuda" else 0.0
        flop = 4e-9 * many * width * chunk * keys
        yield (
            f"{chunk} x {keys}: {forward:.2f} ms, {flop / forward:.0f} TFLOP/s forward; "
            f"{backward:.2f} ms, {2.5 * flop / backward:.0f} backward; the first call {first:.1f} "
            f"s; {taken:.0f} MiB at most"
        )


def sustained(bench: Bench) -> Lines:
    """A product and attention at first, and after a second in which a GPU reaches its limit of
    power and lowers its clock."""
    tokens, (many, _, width) = bench.size(16384, 64), bench.heads
    inner, outer = bench.size(3584, 32), bench.size(18944, 48)
    x, weight = bench.random(tokens, inner), bench.random(outer, inner)
    flop = 2e-12 * tokens * inner * outer
    yield f"product: {at_first_and_later(bench, flop, lambda: x @ weight.t())}"
    kernel = kernels(bench)[0]
    given = Block(0, None, tokens, 2 * tokens, 0, tokens, False), width**-0.5
    q, k, v = laid_out(bench, tokens, prefix=True)
    queries = BackwardQueries(q, q, *kernel.forward(q, k, v, *given))
    flop = 4e-12 * many * width * tokens**2
    forward = partial(kernel.forward, q, k, v, *given)
    backward = partial(kernel.backward, queries, k, v, *given)
    yield f"attention forward: {at_first_and_later(bench, flop, forward)}"
    yield f"attention backward: {at_first_and_later(bench, 2.5 * flop, backward)}"


def at_first_and_later(bench: Bench, tera: float, call: Callable[[], object]) -> str:
    """Rates of a call of so many TFLOP."""
    time.sleep(bench.size(300, 0) / 1e3)  # in which a GPU cools down
    bench.run(call, 1)
    first = bench.run(call, 1)
    bench.run(call, max(1, int(bench.size(1000, 1) / first)))
    later = bench.run(call, max(1, int(bench.size(500, 1) / first)))
    return f"{1e3 * tera / first:.0f} TFLOP/s at first, {1e3 * tera / later:.0f} after a second"


def joins(bench: Bench) -> Lines:
    """A part that joins a softmax, and one that joins a sum of gradients, by PyTorch."""
    tokens, (many, _, width) = bench.size(16384, 64), bench.heads
    out, part = (bench.random(1, tokens, many, width).transpose(1, 2) for _ in range(2))
    lse, other = (torch.zeros(1, many, tokens, device=bench.device) for _ in range(2))
    wide = out.float()
    least = 10 * out.numel() / bench.memory()
    merged = bench.ms(lambda: merge_(wide, lse, part, other))
    added = bench.ms(lambda: wide.add_(part))
    yield f"merge_ {merged:.3f} ms, add_ of bf16 to fp32 {added:.3f} ms; floor {least:.3f} each"


# -- products ------------------------------------------------------------------------------------


def weight_gradients(bench: Bench) -> Lines:
    """dW of an MLP's product into an fp32 sum: cast then added, added, or added by the product."""
    tokens, inner, outer = (bench.size(*s) for s in ((16384, 64), (3584, 32), (18944, 48)))
    x, dy = bench.random(tokens, inner), bench.random(tokens, outer)
    total = torch.zeros(outer, inner, device=bench.device)
    alone = bench.ms(lambda: dy.t() @ x)
    cast = bench.ms(lambda: total.add_((dy.t() @ x).float()))
    added = bench.ms(lambda: total.add_(dy.t() @ x))
    yield f"alone {alone:.2f} ms, cast and added {cast:.2f}, added {added:.2f}"

    def fused() -> None:
        torch.ops.aten.addmm.dtype_out(total, dy.t(), x, torch.float32, out=total)

    try:
        yield f"added by the product {bench.ms(fused):.2f} ms"
    except (RuntimeError, AttributeError) as refused:
        yield f"this PyTorch does not add bf16 products into fp32: {str(refused)[:120]}"
        return
    total.zero_()
    fused()
    fused()
    yield f"its error {error(total, 2 * (dy.float().t() @ x.float())):.1e}"


def head(bench: Bench) -> Lines:
    """Loss and gradients of a piece of the head, by tokens of a piece."""
    vocab, hidden = bench.size(152064, 256), bench.size(3584, 32)
    weight = (bench.random(vocab, hidden) * 0.02).requires_grad_()
    total = torch.zeros(vocab, hidden, device=bench.device)
    for tokens in (bench.size(count, 8) for count in (1024, 4096)):
        x = bench.random(tokens, hidden).requires_grad_()
        y = torch.randint(0, vocab, (tokens,), device=bench.device)

        def step(x: Tensor = x, y: Tensor = y) -> None:
            logits = functional.linear(x, weight).float()
            loss = functional.cross_entropy(logits, y, reduction="sum")
            total.add_(torch.autograd.grad(loss, [x, weight])[1])

        yield f"{tokens} tokens: {bench.ms(step) * 1024 / tokens:.2f} ms for 1,024"


# -- passes over memory --------------------------------------------------------------------------


def compiled(bench: Bench) -> Lines:
    """A norm and an MLP of transformers, forward and backward, as they are and by torch.compile."""
    tokens, hidden, inner = (bench.size(*s) for s in ((16384, 32), (3584, 32), (18944, 64)))
    config = Qwen2Config(hidden_size=hidden, intermediate_size=inner)
    modules: dict[str, nn.Module] = {"norm": Qwen2RMSNorm(hidden), "mlp": Qwen2MLP(config)}
    for name, module in modules.items():
        module.to(bench.device, BF16)
        x, dy = bench.random(1, tokens, hidden).requires_grad_(), bench.random(1, tokens, hidden)

        def both(x: Tensor = x, dy: Tensor = dy, module: nn.Module = module) -> None:
            torch.autograd.grad(module(x), [x, *module.parameters()], dy)

        plain = bench.ms(both)
        if bench.device != "cuda":
            yield f"{name} {plain:.2f} ms; not compiled on a CPU"
            continue
        module.compile(dynamic=True)
        began = time.perf_counter()
        both()
        synchronize(bench.device)
        built = time.perf_counter() - began
        yield f"{name} {plain:.2f} ms, compiled {bench.ms(both):.2f} (built in {built:.0f} s)"


def fused(bench: Bench) -> Lines:
    """farspan's fused kernels beside the time in which their bytes can be moved."""
    if find_spec("farspan.kernels") is None:
        raise Skipped("this farspan has no fused kernels")
    if not _named("launch", "fused_for")(torch.device(bench.device), BF16):
        raise Skipped("fused kernels do not run on this device")
    rate = bench.memory()
    for name, size, call in _fused_calls(bench):
        found, least = bench.ms(call), size / rate
        yield f"{name} {found:.3f} ms, floor {least:.3f}: {found / least:.2f}"


def _named(module: str, name: str) -> Any:
    """A fused kernel. Raises Skipped where it is not there."""
    found = getattr(import_module(f"farspan.kernels.{module}"), name, None)
    if found is None:
        raise Skipped(f"farspan.kernels.{module} has no {name}")
    return found


def _fused_calls(bench: Bench) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes that are read and written once, and the call."""
    tokens, hidden, inner = (bench.size(*s) for s in ((16384, 32), (3584, 32), (18944, 64)))
    many, few, width = bench.heads
    x, gate, up = bench.random(tokens, hidden), *(bench.random(tokens, inner) for _ in range(2))
    norm, weight = _named("operations", "Norm")(1e-6), bench.random(hidden)
    _, rstd = _named("operations", "rms_norm")(x, weight, norm)
    yield "norm", 4 * x.numel(), lambda: _named("operations", "rms_norm")(x, weight, norm)
    back = _named("operations", "rms_norm_backward")
    yield "norm backward", 6 * x.numel(), lambda: back(x, x, weight, rstd, norm)
    yield "swiglu", 6 * up.numel(), lambda: _named("operations", "swiglu")(gate, up)
    gated = _named("operations", "swiglu_backward")
    yield "swiglu backward", 10 * up.numel(), lambda: gated(up, gate, up)
    q, k = (bench.random(1, tokens, heads, width).transpose(1, 2) for heads in (many, few))
    cos, sin = (bench.random(1, tokens, width) for _ in range(2))
    rotate = _named("operations", "rotate")
    yield "rope", 4 * (q.numel() + k.numel()), lambda: rotate(q, k, cos, sin)
    wide, lse = q.float(), torch.zeros(1, many, tokens, device=bench.device)
    part = torch.zeros_like(lse)
    yield "merge_", 10 * q.numel(), lambda: _named("joining", "merge_")(wide, lse, (q, part))
    yield "add_", 10 * q.numel(), lambda: _named("joining", "add_")(wide, q)
    logits = bench.random(bench.size(4096, 8), bench.size(152064, 256))
    targets = torch.zeros(len(logits), dtype=torch.long, device=bench.device)
    loss = _named("operations", "cross_entropy_")
    # Read twice, and the gradient written once.
    yield "loss", 6 * logits.numel(), lambda: loss(logits, targets, 1.0)


# -- the host ------------------------------------------------------------------------------------


def locked(bench: Bench) -> Lines:
    """How fast main memory is locked for an arena, and copies in each direction."""
    size, part = bench.size(8 * GIB, MIB), bench.size(GIB // 4, MIB // 4)
    arena = Arena(Tier.HOST, torch.device(bench.device))
    began = time.perf_counter()
    arena.reserve(size)
    synchronize(bench.device)
    yield f"{size / MIB:.0f} MiB ready in {time.perf_counter() - began:.2f} s"
    host = arena.view(0, (part,), torch.uint8)
    device = torch.empty_like(host, device=bench.device)
    for name, to, of in (("fetch", device, host), ("evict", host, device)):
        began = time.perf_counter()
        to.copy_(of, non_blocking=True)
        issued = time.perf_counter() - began
        rate = part / bench.ms(partial(to.copy_, of, non_blocking=True)) / 1e6
        yield f"{name} {rate:.1f} GB/s, issued in {1e6 * issued:.0f} us"
    del host
    arena.release()


def launches(bench: Bench) -> Lines:
    """What the process takes to issue one kernel."""
    x = torch.zeros(64, device=bench.device)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1)
    yield f"{(time.perf_counter() - began) / LAUNCHES * 1e6:.1f} us"


PROBES: tuple[Callable[[Bench], Lines], ...] = (
    *(memory, blocks, rectangles, sustained, joins, weight_gradients),
    *(head, fused, locked, launches, compiled),
)


def probe(bench: Bench, one: Callable[[Bench], Lines]) -> dict[str, Any]:
    """Runs one probe and says its lines as they come. Raises nothing of the probe's."""
    print(f"{one.__name__}: {one.__doc__}", flush=True)
    lines: list[str] = []
    ended, began = "completed", time.perf_counter()
    try:
        for line in one(bench):
            lines.append(line)
            print(f"  {line}", flush=True)
    except Skipped as why:
        ended = f"skipped: {why}"
    except Exception:
        ended = f"failed: {traceback.format_exc()[-600:]}"
    seconds = time.perf_counter() - began
    print(f"  {ended}, {seconds:.1f} s", flush=True)
    give_back(bench.device)
    return {"ended": ended, "seconds": round(seconds, 1), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see the script run")
    every = {one.__name__: one for one in PROBES}
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="these alone")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench = Bench(device, given.tiny or device == "cpu")
    record: dict[str, Any] = {
        "benchmark": "gpu probe",
        "tiny": bench.tiny,
        "machine": describe_machine(),
    }
    record["probes"] = {name: probe(bench, every[name]) for name in given.only}
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
