"""The benchmark on a GPU, all of it, on a CPU with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import children
from benchmarks.children import Row
from benchmarks.gpu.planned import ROOM
from benchmarks.gpu.split import LINES
from benchmarks.gpu.work import Place, items, tiny
from farspan.program.strategies import STRATEGIES

GIB = 2**30


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=children.ROOT,
        env=children.environment(""),
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tiny_run_goes_through_all_of_it(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    given = ["--tiny", "--out", str(out), "--host-memory", "3GiB"]
    done = run_benchmark(*given, "--traces", str(tmp_path / "traces"))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["tiny"] is True
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert record["runs"][0]["skipped"] == []
    assert record["runs"][0]["main_memory"]["given"] == 3 * GIB
    assert record["planned_with"] == "this machine's ceilings"
    rows = {row["name"]: row for row in record["measurements"]}
    assert list(rows) == [item.name for item in items(tiny())]
    for row in rows.values():
        assert row["child"]["ended"] == "completed", row["child"]["words"]
        if "planned" in row and row["work"] != "split":
            check_step(row)
    check_exact(rows["exact"])
    check_split(rows["split at 128"])
    check_update(rows["update at 128"])
    places = {row["place"] for row in rows.values() if row["work"] == "huggingface"}
    assert places == {*Place} - {Place.NONE}
    found = {key: value for one in rows["longest"]["rows"] for key, value in one.items()}
    assert (found["longest"], found["fails_at"]) == (192, 208)  # three times 64 were let be
    assert "farspan s" in done.stdout
    (trace,) = (tmp_path / "traces").iterdir()
    assert json.loads(trace.read_text())["traceEvents"]


def check_step(row: Row) -> None:
    assert row["seconds"] == row["runs"][-1]["seconds"] > 0
    assert row["tokens_a_second"] == row["tokens"] / row["seconds"]
    assert 0 < row["mfu"] < 1
    if row.get("strategy") == "sparse":
        assert row["planned"]["schedule"]["sparse"]["budget"] == tiny().sparse.budget
        assert row["floor_seconds"] is None
    else:
        assert row["floor_seconds"] > 0
    assert row["planned"]["seconds"] > 0
    assert row["planned"]["fits"] is True
    # Scaled seconds have a field of their own, where not all layers were measured.
    assert ("scaled_to_full_depth" in row) == (row["layers"] < row["of_layers"])
    assert {"ready_seconds", "warm_seconds"} <= row.keys()
    assert row["warm_layers"] == 1
    if row["work"] == "huggingface":
        assert ("locked_bytes" in row) == row["place"].endswith("on host")
        assert row["layers_by"] == "torch.compile" or row["layers_by"].startswith("transformers (")
    else:
        assert row["room"] == ROOM
        assert row["arenas"]["device"] > 0
    assert len(row["runs"]) == 2
    times = [run["seconds"] for run in row["runs"]]
    assert row["variance"] == max(times) / min(times)
    for run in row["runs"]:
        assert run["allocated"] > 0
        assert run["host"] > 0


def check_exact(row: Row) -> None:
    assert [one["strategy"] for one in row["rows"]] == list(STRATEGIES)
    assert all(one["within"] for one in row["rows"])


def check_update(row: Row) -> None:
    found = {key: value for one in row["rows"] for key, value in one.items()}
    assert (found["states"], found["layers"]) == ("device", 4)
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0
    # Two moments of fp32 weights, and a counter for each tensor of parameters.
    assert 0 < found["held"]["device"] - 8 * found["parameters"] < 1024
    assert found["held"]["host"] == 0


def check_split(row: Row) -> None:
    assert row["lines"].keys() == set(LINES)
    assert row["lines"]["linear"] > 0
    assert row["lines"]["attention backward"] > 0
    for line in row["gap"]:
        parts = line["floor"] + line["again"] + line["slower"]
        assert parts == pytest.approx(line["measured"])
