"""A sparse step's time grows with the tokens: as measured, and as the script measures."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sparse import scaling
from benchmarks.sparse.scaling import MODEL, exponent, measure

RECORD = json.loads(
    Path(__file__).parents[1].joinpath("benchmarks/results/sparse_scaling.json").read_text("utf-8")
)
LINEAR = 1.15  # an exponent up to this is called linear


def rows(name: str) -> list[dict[str, float]]:
    return [row for row in RECORD["rows"] if row["attention"] == name]


def test_the_exponent_is_the_slope() -> None:
    squares = [{"attention": "x", "tokens": n, "seconds": 3e-6 * n**2} for n in (10, 70, 200)]
    assert exponent(squares, "x") == pytest.approx(2)


def test_measured_time_is_linear_over_sixteen_times_the_tokens() -> None:
    sparse = rows("sparse")
    assert sparse[-1]["tokens"] == 16 * sparse[0]["tokens"]
    assert exponent(RECORD["rows"], "sparse") == RECORD["exponents"]["sparse"] <= LINEAR
    assert exponent(RECORD["rows"], "dense") == RECORD["exponents"]["dense"] > 1.7


def test_measured_memory_is_nearly_flat() -> None:
    """Device bytes without K, V: means, choices, inputs and votes grow, 0.15 KB a token."""
    sparse = rows("sparse")
    grown = sparse[-1]["device_bytes"] - sparse[0]["device_bytes"]
    assert grown <= 150 * (sparse[-1]["tokens"] - sparse[0]["tokens"])
    assert sparse[-1]["device_bytes"] < 2 * sparse[0]["device_bytes"]


def test_the_script_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "RUNS", 1)
    threads = torch.get_num_threads()
    model = LlamaForCausalLM(LlamaConfig(**MODEL | {"num_hidden_layers": 1}))
    row = measure(model, "sparse", 4096)
    assert torch.get_num_threads() == threads
    assert row["attention"] == "sparse"
    assert row["seconds"] > 0
    assert 0 < row["host_bytes"] < row["device_bytes"]
