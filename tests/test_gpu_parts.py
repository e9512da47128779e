"""What a GPU benchmark's record is worked out from, piece by piece."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.children import Row, read_rows
from benchmarks.gpu import child
from benchmarks.gpu.device import make_model, peaks, reset_peaks
from benchmarks.gpu.planned import Ceilings, Planner, ceilings_of, floor
from benchmarks.gpu.steps import reserve
from benchmarks.gpu.work import Work, full, tiny
from farspan import Step
from farspan.host import TooLarge
from farspan.planner.machines import from_json, machine
from farspan.spec import Schedule, Tier

GIB = 2**30


def planner() -> Planner:
    return Planner(full(), replace(machine("h200"), host_bytes=118 * GIB))


# By hand: GEMM 790, cuDNN 690 and 575 TFLOP/s.
@pytest.mark.parametrize(("tokens", "seconds"), [(65536, 8.5), (131072, 27.0), (262144, 94.0)])
def test_floors_are_those_worked_out_by_hand(tokens: int, seconds: float) -> None:
    question = planner().question(tokens, 28)
    assert floor(question, Ceilings(790e12, 690e12, 575e12)) == pytest.approx(seconds, rel=0.01)


def test_ceilings_are_the_best_rates_of_the_machine() -> None:
    found = ceilings_of(planner().question(65536, 28))
    assert 600e12 < found.linear < 990e12
    assert found.backward < found.forward < found.linear


# Heads as wide as the model's, seven to a K, V head as there, and little of everything else.
NARROW = {
    **{"model_type": "qwen2", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256},
    **{"num_hidden_layers": 1, "num_attention_heads": 7, "num_key_value_heads": 1},
    "head_dim": 128,
}


@pytest.mark.gpu
def test_ceilings_are_measured_to_their_end(tmp_path: Path) -> None:
    """At a glance: every call that a step is planned from runs."""
    settings = {"device": "cuda", "dtype": "bfloat16", "tiny": True, "config": NARROW}
    child.ceilings(settings | {"rows": str(tmp_path / "rows")})
    (row,) = read_rows(tmp_path / "rows")
    spec = from_json(row["machine_file"], "ceilings").spec
    assert spec.rates["bfloat16"].attention_backward.points
    assert spec.overhead > 0


def tiny_settings() -> Row:
    work: Work = tiny()
    return {"config": work.config, "dtype": "float64", "device": "cpu", "tiny": True}


def test_what_a_machine_cannot_lock_is_refused() -> None:
    settings = tiny_settings() | {"tokens": 50, "layers": 4, "host_memory": 1000}
    step = Step(make_model(settings), Schedule(chunk=16, boundary_inputs=Tier.HOST))
    with pytest.raises(TooLarge, match=r"a step of 50 tokens needs.*--host-memory"):
        reserve(settings, step)
    row = reserve(settings | {"host_memory": 10 * GIB}, step)
    assert row["arenas"] == {tier.value: size for tier, size in step.arena_bytes().items()}
    assert row["arenas"]["host"] > 1000


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (TooLarge("host memory: a step needs"), "out_of_main_memory"),
    ],
)
def test_what_ran_out_is_told_apart(
    error: Exception, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: Row) -> None:
        raise error

    monkeypatch.setitem(child.WORKS, "step", fails)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(SystemExit, match="out of memory"):
        child.run({"device": "cpu", "work": "step", "rows": str(tmp_path / "rows")})
    assert name in read_rows(tmp_path / "rows")[-1]
    monkeypatch.setitem(child.WORKS, "step", lambda _: [].pop())
    with pytest.raises(IndexError):
        child.run({"device": "cpu", "work": "step", "rows": str(tmp_path / "rows")})


def test_peaks_of_a_gpu_are_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[int] = []
    found = {
        "reset_peak_memory_stats": lambda: reset.append(1),
        "max_memory_allocated": lambda: 70,
        "max_memory_reserved": lambda: 80,
        "memory_reserved": lambda: 75,
        "mem_get_info": lambda: (20, 100),
    }
    for name, answer in found.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    reset_peaks("cuda")
    assert reset == [1]
    row = peaks("cuda")
    assert (row["allocated"], row["reserved"], row["outside"]) == (70, 80, 5)
    assert row["host"] > 2**20
