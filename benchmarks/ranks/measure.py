"""What one rank holds and sends in a step of one layout, at one length; ranks are processes of one
machine."""

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.tables import Record, grid
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
MB = 1e6
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
    lengths: tuple[int, ...]  # tokens
    ranks: tuple[int, ...]


FULL = Size(chunk=1024, lengths=(4096, 8192, 16384), ranks=(1, 2, 4))
TINY = Size(chunk=64, lengths=(128,), ranks=(1, 2))

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


def rows_of_rank(size: Size, ranks: int) -> list[Row]:
    """Every layout and length, on one of the ranks of the process group; one process has none."""
    torch.set_num_threads(1)
    found = []
    for name in names(ranks):
        work = Work.of(name, ranks, size.chunk)
        found += [work.measure(tokens) for tokens in size.lengths]
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

    def measure(self, tokens: int) -> Row:
        """Bytes of a step."""
        ids = torch.randint(256, (1, tokens), generator=torch.manual_seed(tokens))
        program = self.step.program(1, tokens)
        self.step.release()
        with self._sending() as sent:
            memory = self._memory(ids)
        return {
            "layout": self.name,
            "ranks": 1 if self.ranks is None else self.ranks.layout.devices(),
            "tokens": tokens,
            "memory": memory,
            "planned": {str(t): n for t, n in program.arena_bytes.items()},
            "sent": self._sent_by_cells(program, sent),
        }

    def _memory(self, ids: Tensor) -> dict[str, int]:
        """Bytes: arenas, the peak of everything else that a step makes, and what lies between
        steps, whose gradients are there before."""
        parameters = [p for p in self.model.parameters() if p.device.type != "meta"]
        for p in parameters:
            p.grad = torch.zeros_like(p)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- processes -----------------------------------------------------------------------------------


def measured(size: Size, ranks: int) -> list[Row]:
    """Rows of all layouts and lengths on so many processes, each with what all ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (size, ranks, folder), nprocs=ranks, start_method="forkserver")
        found = pickle.loads(Path(folder, "found").read_bytes())
    rows = []
    for same in zip(*found, strict=True):
        row = {name: same[0][name] for name in ("layout", "ranks", "tokens")}
        row |= {name: [each[name] for each in same] for name in ("memory", "planned", "sent")}
        rows.append(row)
    return rows


def _rank(number: int, size: Size, ranks: int, folder: str) -> None:
    """One of the processes. The first writes what all of them found."""
    where, waits = f"file://{folder}/store", timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=ranks, timeout=waits)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, rows_of_rank(size, ranks))
    if number == 0:
        Path(folder, "found").write_bytes(pickle.dumps(everyone))
    dist.destroy_process_group()


# -- the page ------------------------------------------------------------------------------------


class Found:
    """A record's rows, and what follows from them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["layout"], row["ranks"], row["tokens"]): row for row in rows}
        self.lengths = sorted({row["tokens"] for row in rows})
        self.ranks = sorted({row["ranks"] for row in rows} - {1})

    def row(self, layout: str, ranks: int, tokens: int) -> Row:
        return self._rows[ALONE if ranks == 1 else layout, ranks, tokens]

    def most(self, layout: str, ranks: int, tokens: int, *names: str) -> int:
        """Bytes of these parts of memory, of the rank with most."""
        memory = self.row(layout, ranks, tokens)["memory"]
        return max(sum(each[name] for name in names) for each in memory)

    def arenas(self, layout: str, ranks: int, tokens: int) -> int:
        """Bytes, of the rank with most, on both tiers."""
        return self.most(layout, ranks, tokens, "device", "host")


def tables(record: Record) -> dict[str, str]:
    """Tables of docs/evidence/several-gpus.md by the names of their places."""
    found = Found(record["rows"])
    return {"memory": memory_table(found), "sent": sent_table(found)}


def memory_table(found: Found) -> str:
    shortest, longest = found.lengths[0], found.lengths[-1]
    whole = found.arenas(ALONE, 1, longest)

    def line(name: str, counts: list[int]) -> list[str]:
        most = counts[-1]
        held = [found.arenas(name, ranks, longest) / whole for ranks in counts]
        sizes = [
            found.arenas(name, most, longest),
            *(found.most(name, most, n, "beside") for n in (shortest, longest)),
            found.most(name, most, longest, "weights", "gradients"),
        ]
        return [name, *(f"{n:.3f}" for n in held), *(f"{n / MB:.1f}" for n in sizes)]

    head = ["layout", *(f"arenas of one, {n} ranks" for n in found.ranks), "arenas, MB"]
    head += [f"beside, {tokens // 1024}K" for tokens in (shortest, longest)]
    lines = [line(ALONE, [1] * len(found.ranks)), *(line(n, found.ranks) for n in LAYOUTS)]
    return grid([*head, "weights, gradients"], lines)


def sent_table(found: Found) -> str:
    longest, ranks = found.lengths[-1], found.ranks[-1]

    def line(name: str) -> list[str]:
        sent = found.row(name, ranks, longest)["sent"]
        kinds = [max((each[kind] for each in sent), key=sum) for kind in ("forward", "backward")]
        cells = [f"{kind[n]:,}" for kind in kinds for n in (1, -1)]
        return [name, *cells, f"{max(each['step'] for each in sent) / MB:.1f}"]

    head = ["layout", "forward, 2nd chunk", "last", "backward, 2nd chunk", "last", "a step, MB"]
    return grid(head, [line(name) for name in LAYOUTS])
