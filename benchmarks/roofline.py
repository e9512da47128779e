"""What the operations of a step take by a card's rates, laid beside the least that any step takes.

    python -m benchmarks.roofline [--out benchmarks/results/roofline.json]

Nothing is measured: the engine runs its program on tensors without memory, at real width, and every
operation that it calls is counted: products by their FLOP, attention calls by their pairs, all else
by the bytes of its arguments and results (fused kernels by those of theirs). A preset's rates make
seconds of them. One layer and one chunk of Qwen2.5-7B, the mean over all chunks; K, V on the
device, O kept, so that nothing quadratic is computed twice.

The floor has the products and the attention of one forward and one backward, and nothing else.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.attention.backends import BackwardQueries, BlockKernel, Gradients
from farspan.engine import gradients as sums
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.gradients import AccumulatingLinears
from farspan.engine.interpreter import Interpreter, Layers, SparingLayers
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.tiers import Arena, CopyEngine
from farspan.hf.attention_interface import routed
from farspan.hf.fused_layers import in_shells, rules
from farspan.hf.load import blank_model, config_from_fields
from farspan.hf.stages import CausalLMStages
from farspan.kernels.launch import Launch
from farspan.planner.evaluate import stage_model
from farspan.planner.machines import machine
from farspan.profile.catalog import find_config
from farspan.profile.model import Variant
from farspan.profile.store import find_profiles
from farspan.program import program as instructions
from farspan.program.attention_blocks import Block
from farspan.program.builder import build_program
from farspan.program.dependencies import unread_outputs
from farspan.program.program import Instruction, Program
from farspan.spec import LayerSpec, MachineSpec, RunSpec, Schedule, Tier

MODEL = "Qwen2.5-7B"
META = torch.device("meta")
LAYERS = 2  # of the model are run; the others are alike
SCHEDULE = Schedule(
    chunk=16384,
    boundary_inputs=Tier.DEVICE,
    attention=Tier.DEVICE,
    attention_save_fraction=1.0,
    loss_chunk_size=4096,
)
LENGTHS, MACHINES = (131072, 262144), ("h100", "h200")
# PyTorch's operators, with a cast of every weight gradient as training had it; and what a step on a
# GPU runs by default.
BEFORE, AFTER = "before", "after"

Kind = tuple[str, int | None]  # of an instruction, and the layer it is of
Call = tuple[int, int, bool, str]  # of attention: queries, keys, causal, way


@dataclass(slots=True)
class Work:
    """What one kind of instruction had run, in all."""

    products: Counter[int] = field(default_factory=Counter)  # by their FLOP
    attention: Counter[Call] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)  # of all else, by its name


# -- counting ----------------------------------------------------------------------------------

PRODUCTS = ("mm", "addmm", "bmm", "addmm_")
# They give memory, or views of it, and move nothing.
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "set_", "detach", "_unsafe_view")
# They do not read the first tensor that they are given: it is written, or a likeness.
UNREAD = ("copy_", "zero_", "fill_", "new_full", "new_zeros", "zeros_like")
ROWS = ("embedding",)  # of a table they read as much as they give
LINES = {"rotate": "rotary", "add": "joining", "merge": "joining"}  # by the kernel's first word
# What kernels read and write, beside what they only read or only write.
TWICE = {"merge_kernel": ("lse",)}


class Count(TorchDispatchMode):
    """Counts what runs, by the kind of the instruction at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.works: dict[Kind, Work] = {}
        self.kind: Kind = "", None

    @property
    def work(self) -> Work:
        return self.works.setdefault(self.kind, Work())

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            first, second = args[-2:]
            self.work.products[2 * first.numel() * second.shape[-1]] += 1
            if name == "addmm_":  # what it adds to
                self.work.bytes["sums in products"] += _size(out)
        elif not func.is_view and name not in FREE:
            self.work.bytes[name] += _moved(name, args, out)
        return out

    def launch(self, launch: Launch) -> None:
        """One of farspan's own kernels, in place of running it."""
        name = launch.kernel.fn.__name__
        tensors = {key: getattr(x, "base", x) for key, x in launch.arguments.items()}
        if not launch.arguments.get("two", True):  # one part is given in the place of the next
            del tensors["next_part"]
            tensors.pop("next_lse", None)
        twice = TWICE.get(name, ())
        if name == "loss_kernel":  # logits are read twice, and may be written
            twice = ("logits",) * (1 + launch.arguments["shape"].write)
        read = [*(key for key, x in tensors.items() if isinstance(x, Tensor)), *twice]
        first = name.partition("_")[0]
        line = f"{LINES.get(first, first)} kernel"
        self.work.bytes[line] += sum(_size(tensors[key]) for key in read)

    def add_product(self, total: Tensor, dout: Tensor, x: Tensor, *, fresh: bool) -> None:
        """A product that adds to a sum, which it reads and writes where another writes a gradient;
        that one is in a product's rate."""
        del fresh
        self.work.products[2 * dout.numel() * x.shape[1]] += 1
        self.work.bytes["sums of weight gradients"] += 2 * _size(total) - total.numel() * x.itemsize


def _size(x: Tensor) -> int:
    """Bytes; of what is expanded, once."""
    extents = zip(x.shape, x.stride(), strict=True)
    return prod(extent for extent, stride in extents if stride) * x.element_size()


def _moved(name: str, args: Sequence[Any], out: Any) -> int:
    if name in ROWS:
        return 2 * _size(out) + _size(args[1])
    lists = [list(x) if isinstance(x, list | tuple) else [x] for x in (*args, out)]
    given = [x for xs in lists for x in xs if isinstance(x, Tensor)]
    return sum(map(_size, given[1:] if name in UNREAD else given))


@dataclass(frozen=True, slots=True)
class Counted:
    """A vendor kernel, of which calls and results are known."""

    count: Count
    softcap: None = None

    def split(self, block: Block) -> tuple[Block, ...]:
        return (block,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        del k, v, scale
        self.count.work.attention[block.queries, block.keys, block.causal, "forward"] += 1
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        del scale
        self.count.work.attention[block.queries, block.keys, block.causal, "backward"] += 1
        return torch.empty_like(queries.q), torch.empty_like(k), torch.empty_like(v)


@dataclass(frozen=True)
class CountedKernels(AttentionKernels):
    """Attention of all layers is counted."""

    count: Count | None = None

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        del spec, program
        assert self.count is not None
        return Counted(self.count)


def count_step(tokens: int, how: str, schedule: Schedule = SCHEDULE) -> dict[Kind, Work]:
    """What a step of the first layers runs, by kind of instruction."""
    fields = {**find_config(MODEL), "num_hidden_layers": LAYERS}
    model = blank_model(config_from_fields(fields), torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.empty_like(parameter, dtype=torch.float32)  # of an earlier chunk
    spec = stage_model(find_profiles(MODEL).of(Variant()).spec, (0, LAYERS))
    program = build_program(spec, RunSpec(1, tokens), schedule)
    count, boundary = Count(), CausalLMStages(model)
    with _as(how, count, model):
        _run(boundary, program, count, how)
    return count.works


@contextmanager
def _as(how: str, count: Count, model: nn.Module) -> Iterator[None]:
    """Kernels take tensors without memory, and are counted in place of running."""
    if how == BEFORE:
        yield
        return
    with ExitStack() as stack:
        for place in ("hf.fused_layers", "engine.loss", "attention.backends", "attention.chunk"):
            stack.enter_context(patch(f"farspan.{place}.fused_for", lambda *_: True))
        run = patch.object(Launch, "run", lambda launch, _: count.launch(launch))
        stack.enter_context(run)
        stack.enter_context(patch.object(sums, "add_product", count.add_product))
        stack.enter_context(sums.uncast(model.parameters()))
        yield


def _run(boundary: CausalLMStages, program: Program, count: Count, how: str) -> None:
    fused, gradients = how == AFTER, sums.GradientAccumulator()
    layers = Layers(boundary)
    if fused:
        adding = AccumulatingLinears(gradients=gradients)
        found = adding.forward_of, *rules(adding)
        boundary.run_in(partial(in_shells, rules=found))
        every = frozenset(range(LAYERS))
        layers = SparingLayers(boundary, adding, unread_outputs(program), every)
    ids = torch.zeros(1, program.run.tokens, dtype=torch.long, device=META)
    arenas = {tier: Arena(Tier.DEVICE, META) for tier in Tier}
    for tier, arena in arenas.items():
        arena.reserve(program.arena_bytes[tier])
    outer = tuple(boundary.outer_parameters())
    kinds = iter([*_kinds(program), ("", None)])

    def mark(_: object = None) -> None:
        count.kind = next(kinds)

    mark()
    with routed(boundary.model):
        boundary.calls(1, ids[:, :1])  # the first call asks once for what no step asks again
    with routed(boundary.model), count:
        Interpreter(
            boundary=boundary,
            program=program,
            storage=ProgramBuffers(program, arenas, boundary.dtype, CopyEngine(META)),
            inputs=StepInputs(ids, ids, ids, None),
            head=LossHead(
                boundary, program.run.tokens, program.schedule.loss_chunk_size, outer, fused
            ),
            gradients=gradients,
            after=mark,
            layers=layers,
            kernels=CountedKernels(META, boundary.dtype, fused=fused, count=count),
        ).run()


def _kinds(program: Program) -> Iterator[Kind]:
    done: set[tuple[int, int]] = set()
    for i in program.instructions:
        if isinstance(i, instructions.Forward):
            # A pass for K, V alone is made again whole: the last layer has one.
            again = (i.layer, i.chunk) in done or i.mode is instructions.AttentionMode.NONE
            if not again:
                done.add((i.layer, i.chunk))
            yield "forward again" if again else "forward", i.layer
        else:
            yield _kind(i)


def _kind(i: Instruction) -> Kind:
    match i:
        case instructions.Backward(layer):
            return "backward", layer
        case instructions.Head():
            return "head", None
    return "else", None  # embeddings, copies and what is cleared


# -- seconds -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step of the whole model, and of its floor."""

    name: str
    seconds: float
    floor: float = 0.0


def lines(works: dict[Kind, Work], card: MachineSpec) -> list[Line]:
    """All of a step, longest first. All layers but the last are as the first."""
    layers = find_config(MODEL)["num_hidden_layers"]
    rates = card.rates["bfloat16"]
    layer = find_profiles(MODEL).of(Variant()).spec.layers[0]
    found: dict[str, Line] = {}

    def add(name: str, seconds: float, floor: float = 0.0) -> None:
        before = found.get(name, Line(name, 0.0))
        found[name] = Line(name, before.seconds + seconds, before.floor + floor)

    for (kind, index), work in works.items():
        times = layers - LAYERS + 1 if index == 0 else 1
        needed = kind != "forward again"
        seconds = times * sum(n * rates.product(flop) for flop, n in work.products.items())
        add(f"{kind}: products", seconds, seconds * needed)
        seconds = times * sum(
            n * rates.attention(pairs(call), layer, causal=call[2], backward=call[3] == "backward")
            for call, n in work.attention.items()
        )
        add(f"{kind}: attention", seconds, seconds * needed)
        for name, size in work.bytes.items():
            add(f"{kind}: {name}", times * size / card.memory)
    return sorted((line for line in found.values() if line.seconds), key=lambda line: -line.seconds)


def pairs(call: Call) -> float:
    """(query, key) that see each other."""
    queries, keys, causal, _ = call
    return queries * (queries + 1) / 2 if causal else queries * keys


def record() -> dict[str, Any]:
    """Every length, card and way."""
    rows = []
    for tokens in LENGTHS:
        for how in (BEFORE, AFTER):
            works = count_step(tokens, how)
            for name in MACHINES:
                found = lines(works, machine(name))
                rows.append(_row(tokens, how, name, found))
    return {
        "benchmark": "roofline",
        "measured": False,
        "model": MODEL,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "triton")},
        "rows": rows,
    }


def _row(tokens: int, how: str, card: str, found: list[Line]) -> dict[str, Any]:
    seconds, floor = sum(line.seconds for line in found), sum(line.floor for line in found)
    return {
        "tokens": tokens,
        "kernels": how,
        "machine": card,
        "seconds": seconds,
        "floor": floor,
        "share": floor / seconds,
        "lines": [[line.name, line.seconds, line.floor] for line in found],
    }


def text(row: dict[str, Any], most: int = 14) -> str:
    """A table for people."""
    head = (
        f"{row['tokens']:,} tokens, {row['machine']}, {row['kernels']}: {row['seconds']:.2f} s, "
        f"floor {row['floor']:.2f} s, {row['share']:.3f} of it"
    )
    rest = sum(seconds for _, seconds, _ in row["lines"][most:])
    shown = [*row["lines"][:most], ["the rest", rest, 0.0]]
    body = [f"  {name:<42} {seconds:8.3f} {floor:8.3f}" for name, seconds, floor in shown]
    return "\n".join([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = record()
    print("\n\n".join(text(row) for row in found["rows"]))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
