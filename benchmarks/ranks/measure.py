"""What one rank holds, computes and sends in a step of one layout, at one length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks.clock import Clock, Event
from benchmarks.ranks.counting import Counted
from farspan import Schedule, Step
from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import ShardedParameters
from farspan.engine.memory import LiveStorage
from farspan.engine.parallelize import parallelize
from farspan.engine.runner import Counter
from farspan.program.layout import Layout
from farspan.program.program import AttentionMode, Backward, Forward, Program, Send
from tests.oracles.sent_bytes import sent_bytes

CPU = torch.device("cpu")
MODEL: dict[str, Any] = {  # Llama's layers, bytes for tokens; as many K, V heads as ranks
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2**20,
}
ALONE = "one process"
LAYOUTS = ("ulysses", "shards", "ring", "pipeline", "tensor", "fsdp")


@dataclass(frozen=True, slots=True)
class Size:
    """How large the benchmark is."""

    chunk: int
    lengths: dict[int, int]  # tokens, and how often a step of them is timed
    ranks: tuple[int, ...]
    counted_chunk: int  # where work is counted, which needs no long sequences
    counted: tuple[int, ...]  # lengths


FULL = Size(
    chunk=1024,
    lengths={4096: 3, 8192: 2, 16384: 1},
    ranks=(1, 2, 4),
    counted_chunk=256,
    counted=(1024, 2048, 4096),
)
TINY = Size(chunk=64, lengths={128: 1}, ranks=(1, 2), counted_chunk=64, counted=(128, 192, 256))

Row = dict[str, Any]


def layout_of(name: str, ranks: int) -> Layout:
    """FSDP lies over Ulysses; the others leave weights whole, but for the parts that they cut."""
    axis = "ulysses" if name == "fsdp" else name
    return Layout(**{axis: ranks}, fsdp=name == "fsdp")


def schedule_of(name: str, ranks: int, chunk: int) -> Schedule:
    """A layer a group, and every attention output kept. Groups of a pipeline are its stages."""
    layers = MODEL["num_hidden_layers"]
    groups = ranks if name == "pipeline" and ranks > 1 else layers
    return Schedule(chunk=chunk, groups=groups, attention_save_fraction=1.0)


def rows_of_rank(size: Size, ranks: int) -> list[tuple[Row, list[Event]]]:
    """Every layout and length, on one of the ranks of the process group; one process has none."""
    torch.set_num_threads(1)
    found = []
    for name in names(ranks):
        work = Work.of(name, ranks, size.chunk)
        found += [work.measure(tokens, runs) for tokens, runs in size.lengths.items()]
    return found


def counts_of_rank(size: Size, ranks: int) -> list[Row]:
    """The work of every layout and counted length."""
    found = []
    for name in names(ranks):
        work = Work.of(name, ranks, size.counted_chunk)
        found += [work.count(tokens) for tokens in size.counted]
    return found


def names(ranks: int) -> tuple[str, ...]:
    return (ALONE,) if ranks == 1 else LAYOUTS


@dataclass(slots=True)
class Work:
    """A step of one layout."""

    name: str
    ranks: ParallelContext | None
    model: nn.Module
    step: Step

    @classmethod
    def of(cls, name: str, count: int, chunk: int) -> "Work":
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
        schedule = schedule_of(name, count, chunk)
        ranks = None if count == 1 else ParallelContext(layout_of(name, count), CPU)
        # Weights of layers are cut by tensor and pipeline themselves, by all else with fsdp alone.
        cut = name in ("fsdp", "tensor", "pipeline")
        team = parallelize(model, schedule, ranks) if ranks is not None and cut else ranks
        return cls(name, ranks, model, Step(model, schedule, ranks=team))

    def measure(self, tokens: int, runs: int) -> tuple[Row, list[Event]]:
        """The run that took the process least, and bytes of a step before it. Building a length's
        program is counted by itself."""
        ids = _tokens(tokens)
        building = Clock()
        with building.running():
            program = self.step.program(1, tokens)
        self.step.release()
        with self._sending() as sent:
            memory = self._memory(ids)
        clocks = [self._timed(ids) for _ in range(runs)]
        best = min(clocks, key=lambda clock: clock.total)
        row = {
            **self._key(tokens),
            "build_seconds": building.total,
            "seconds": best.seconds(),
            "tail": best.tail,
            "memory": memory,
            "planned": {str(t): n for t, n in program.arena_bytes.items()},
            "sent": self._sent_by_cells(program, sent),
        }
        return row, best.events

    def count(self, tokens: int) -> Row:
        """What a step is made of; gradients are there before."""
        ids = _tokens(tokens)
        self._parameters_with_gradients()
        with Counted() as work:
            self.step(ids, ids)
        return {**self._key(tokens), "work": work.found}

    def _key(self, tokens: int) -> Row:
        ranks = 1 if self.ranks is None else self.ranks.layout.devices()
        return {"layout": self.name, "ranks": ranks, "tokens": tokens}

    def _timed(self, ids: Tensor) -> Clock:
        self.model.zero_grad(set_to_none=True)
        if self.ranks is not None:
            dist.barrier()
        clock = Clock()
        with clock.running():
            self.step(ids, ids)
        return clock

    def _memory(self, ids: Tensor) -> dict[str, int]:
        """Bytes: arenas, the peak of everything else that a step makes, and what lies between
        steps, whose gradients are there before."""
        parameters = self._parameters_with_gradients()
        with LiveStorage() as meter, gathered(meter):
            self.step(ids, ids)
        arenas = self.step.arena_bytes()
        gradients = [p.grad for p in parameters if p.grad is not None]
        return {
            **{str(tier): n for tier, n in arenas.items()},
            "beside": meter.peak - sum(arenas.values()),
            "weights": sum(_local(p).nbytes for p in parameters),
            "gradients": sum(_local(g).nbytes for g in gradients),
        }

    def _parameters_with_gradients(self) -> list[nn.Parameter]:
        """Those that are here, with gradients of zero."""
        found = [p for p in self.model.parameters() if p.device.type != "meta"]
        for p in found:
            p.grad = torch.zeros_like(p)
        return found

    @contextmanager
    def _sending(self) -> Iterator[list[dict[str, int]]]:
        """Bytes sent along each axis, at first and after every instruction."""
        found = [_sent(self.ranks)]

        def after(*_: object) -> None:
            found.append(_sent(self.ranks))

        with patch.object(Counter, "__call__", after):
            yield found
        found.append(_sent(self.ranks))

    def _sent_by_cells(self, program: Program, sent: list[dict[str, int]]) -> Row | None:
        """Bytes sent in a step, and in each cell of a layer that attends there, as counted and as
        planned; of a pipeline, in what follows a cell."""
        if self.ranks is None:
            return None
        axis = "ulysses" if self.name == "fsdp" else self.name
        pairs = zip(sent, sent[1:], program.instructions, strict=False)
        cells = [(after[axis] - before[axis], i) for before, after, i in pairs]
        layer = program.groups[program.own_groups()[-1]][0]
        found: Row = {"step": sum(sent[-1].values()) - sum(sent[0].values())}
        for name in ("forward", "backward"):
            chosen = {
                i.chunk: n
                for n, i in cells
                if isinstance(i, (Forward, Backward, Send)) and _is(name, i, self.name, layer)
            }
            found[name] = [chosen[chunk] for chunk in sorted(chosen)]
        if axis != "tensor":  # whose bytes are not planned by instruction
            planned = [sent_bytes(program, i).get(axis, 0) for _, i in cells]
            found["as_planned"] = planned == [n for n, _ in cells]
        return found


def _is(name: str, i: Forward | Backward | Send, layout: str, layer: int) -> bool:
    if isinstance(i, Send):
        return layout == "pipeline" and i.gradient == (name == "backward")
    if layout == "pipeline" or i.layer != layer:
        return False
    if isinstance(i, Backward):
        return name == "backward"
    return name == "forward" and i.mode is AttentionMode.COMPUTE


@contextmanager
def gathered(meter: LiveStorage) -> Iterator[None]:
    """Counts weights that FSDP gathers, which grow within a storage that was born before."""

    def count(function: Callable[..., None], sign: int) -> Callable[..., None]:
        def counted(sharded: ShardedParameters, unit: Any) -> None:
            one = sharded._units[unit] if isinstance(unit, int) else unit
            before = one.gathered
            function(sharded, unit)
            if one.gathered != before and one.memory is not None:
                meter.live += sign * one.memory.nbytes
                meter.peak = max(meter.peak, meter.live)

        return counted

    with (
        patch.object(ShardedParameters, "gather", count(ShardedParameters.gather, 1)),
        patch.object(ShardedParameters, "_release", count(ShardedParameters._release, -1)),
    ):
        yield


def _sent(ranks: ParallelContext | None) -> dict[str, int]:
    """Bytes sent along axes so far."""
    return {} if ranks is None else {"+".join(k): p.sent for k, p in ranks.groups.items()}


def _tokens(count: int) -> Tensor:
    return torch.randint(256, (1, count), generator=torch.manual_seed(count))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
