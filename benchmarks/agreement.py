"""Seconds and peak bytes of a step, predicted beside measured, for every strategy and length.

    python -m benchmarks.agreement [--out FILE] [--tokens N ...] [--rounds R] [--strategies S ...]

The machine that predicts is calibrated in the same run: passes of the calibration and steps take
turns, and the fastest count on both sides. On a CPU one thread computes, and seconds are those that
the process spends computing: on a machine of its own they are the clock's. Beside the widest dtype
with one sequence a step there are rows of two sequences, and on a CPU of bfloat16.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.tables import save
from farspan.ask import measuring
from farspan.engine.calibrate import Calibration
from farspan.engine.memory import PeakMemory
from farspan.engine.microbench import THOROUGH, Bench, describe_machine
from farspan.engine.step import Step
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import MachineFile, to_json
from farspan.planner.request import Optimizer, Plan, Question
from farspan.profile.model import Variant
from farspan.profile.store import profiles_of
from farspan.program.strategies import STRATEGIES
from farspan.spec import MachineSpec, RunSpec, Schedule

SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}
LARGE: dict[str, Any] = SMALL | {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


class Bed:
    """One model on one device, and a step of it for each case."""

    def __init__(self, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.config = Qwen2Config(**config)
        self.device, self.dtype = device, dtype
        model: nn.Module = Qwen2ForCausalLM(self.config)
        self.model = model.to(device=device, dtype=dtype).train()
        profiles = profiles_of(self.config.to_dict(), "agreement", measuring=measuring)
        self.profile = profiles.of(Variant(self.dtype_name))
        self.clock: Callable[[], float] = time.perf_counter
        if device.type == "cpu":
            torch.set_num_threads(1)
            self.clock = time.process_time

    def schedule(self, name: str, tokens: int) -> Schedule:
        return STRATEGIES[name].schedule(self.config.num_hidden_layers, tokens)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def ids(self, tokens: int, batch: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.config.vocab_size, (batch, tokens), generator=generator)
        return ids.to(self.device)

    def seconds(self, step: Step, ids: torch.Tensor) -> float:
        """Of one step from fresh gradients."""
        self.model.zero_grad(set_to_none=True)
        start = self.clock()
        step(ids, ids).item()  # waits for the device
        return self.clock() - start

    def peak(self, step: Step, ids: torch.Tensor) -> int:
        """Bytes at the fullest moment of a step, weights and tokens included: of both tiers on a
        CPU, of the device on a GPU."""
        self.model.zero_grad(set_to_none=True)
        step.release()
        with PeakMemory(self.device) as meter:
            step(ids, ids)
        step.release()
        self.model.zero_grad(set_to_none=True)
        return meter.peak + ids.nbytes + sum(p.nbytes for p in self.model.parameters())

    def plan(self, name: str, tokens: int, spec: MachineSpec, batch: int = 1) -> Plan:
        """What planning says of the same step."""
        question = Question(
            model=self.profile.spec,
            run=RunSpec(batch, tokens),
            machine=spec,
            optimizer=Optimizer.NONE,
            dtype=self.dtype_name,
            profile=self.profile,
        )
        return evaluate(question, name, self.schedule(name, tokens))


@dataclass(frozen=True, slots=True)
class Case:
    """One step that is predicted and measured."""

    bed: Bed
    strategy: str
    tokens: int
    batch: int = 1

    def ids(self) -> torch.Tensor:
        return self.bed.ids(self.tokens, self.batch)

    def step(self) -> Step:
        return Step(self.bed.model, self.bed.schedule(self.strategy, self.tokens))

    def words(self) -> str:
        return f"{self.bed.dtype_name} {self.strategy} {self.batch} x {self.tokens}"


def measure(cases: Sequence[Case], rounds: int) -> tuple[MachineFile, list[dict[str, Any]]]:
    """The calibrated machine, and a row for each case; all are on one device."""
    effort = replace(THOROUGH, copied=2**26)
    bed = cases[0].bed
    dtypes = tuple(dict.fromkeys(case.bed.dtype for case in cases))
    calibration = Calibration(Bench(bed.device, effort, bed.clock), dtypes)
    steps = [case.step() for case in cases]
    runs: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds + 1):
        calibration.look()
        for case, step, seconds in zip(cases, steps, runs, strict=True):
            seconds.append(case.bed.seconds(step, case.ids()))
            print(f"{turn} of {rounds}: {case.words()}: {seconds[-1]:.3f} s", flush=True)
    file = calibration.file()
    # The first step also takes the arenas from the system.
    return file, [
        row(case, file.spec, seconds[1:]) for case, seconds in zip(cases, runs, strict=True)
    ]


def row(case: Case, spec: MachineSpec, runs: list[float]) -> dict[str, Any]:
    """One case, predicted beside measured."""
    bed = case.bed
    plan = bed.plan(case.strategy, case.tokens, spec, case.batch)
    on_cpu = bed.device.type == "cpu"
    parts = dict(plan.device.parts) | ({"host": plan.host.total} if on_cpu else {})
    predicted = sum(size for part, size in parts.items() if part != "reserve")
    peak = bed.peak(case.step(), case.ids())
    seconds = min(runs)
    return {
        "strategy": case.strategy,
        "tokens": case.tokens,
        "batch": case.batch,
        "dtype": bed.dtype_name,
        "schedule": asdict(bed.schedule(case.strategy, case.tokens)),
        "seconds": {"predicted": plan.seconds.total, "measured": seconds, "runs": runs},
        "bytes": {"predicted": predicted, "measured": peak, "parts": parts},
        "seconds_ratio": plan.seconds.total / seconds,
        "bytes_ratio": predicted / peak,
    }


def cases_of(beds: Sequence[Bed], names: Sequence[str], lengths: Sequence[int]) -> list[Case]:
    """Every strategy at every length in the first bed's dtype; at the shortest length two sequences
    a step too, and the other beds."""
    whole = [Case(beds[0], name, tokens) for tokens in lengths for name in names]
    pairs = [Case(beds[0], name, min(lengths), batch=2) for name in names]
    others = [Case(bed, name, min(lengths)) for bed in beds[1:] for name in names]
    return whole + pairs + others


def record(names: Sequence[str], lengths: Sequence[int] | None, rounds: int) -> dict[str, Any]:
    """Everything, for the device at hand."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtypes = (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16)
    beds = [Bed(LARGE if on_gpu else SMALL, device, dtype) for dtype in dtypes]
    if lengths is None:
        lengths = (32768, 65536, 131072) if on_gpu else (2048, 4096, 8192)
    file, rows = measure(cases_of(beds, names, lengths), rounds)
    return {
        "benchmark": "agreement",
        "machine": describe_machine(),
        "clock": "wall" if on_gpu else "seconds that one thread computed",
        "model": LARGE if on_gpu else SMALL,
        "dtype": beds[0].dtype_name,
        "rounds": rounds,
        "calibration": to_json(file),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    given = parser.parse_args()
    found = record(given.strategies, given.tokens, given.rounds)
    save(given.out, found)
    print(f"{'step':40}{'predicted s':>13}{'measured s':>12}{'bytes':>8}")
    for case in found["rows"]:
        step = f"{case['dtype']} {case['strategy']} {case['batch']} x {case['tokens']}"
        seconds = "{predicted:13.3f}{measured:12.3f}".format(**case["seconds"])
        print(f"{step:40}{seconds}{case['bytes_ratio']:8.4f}")


if __name__ == "__main__":
    main()
