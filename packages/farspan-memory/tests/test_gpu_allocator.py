"""The benchmark of a GPU's allocators runs to its end without one, and what fails stays alone."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import children
from benchmarks.children import read_rows
from benchmarks.gpu_allocator import __main__ as program
from benchmarks.gpu_allocator.mapping import CHUNKS
from benchmarks.gpu_allocator.prepared import Prepared, mallocs
from benchmarks.gpu_allocator.replayed import COMPLETED, OUT_OF_MEMORY, Pass, smallest
from benchmarks.gpu_allocator.served import CONTENDERS, Contender, limit_pytorch
from farspan_memory.compare.compare import FREED
from farspan_memory.formatting import MIB
from tests.pytorch.cpu_allocator import build_driver, once

COMMAND = [sys.executable, "-m", "benchmarks.gpu_allocator"]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=children.ROOT,
        env=children.environment(""),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tiny_run_goes_through_all_of_it(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    done = run_benchmark("--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert (record["device"], record["tiny"]) == ("cpu", True)
    assert record["machine"]["versions"]["torch"] == torch.__version__
    check_replay(record["replay"])
    assert [row["chunk"] for row in record["mapping"]["rows"]] == list(CHUNKS)
    for row in record["mapping"]["rows"]:
        assert {"fresh", "stitched", "given back"} == row["allocator"].keys(), row
        assert ("driver" in row) == (record["driver"] == "fake")
    check_finetune(record["finetune"])


def check_replay(found: dict[str, Any]) -> None:
    assert [row["name"] for row in found["contenders"]] == [c.name for c in CONTENDERS]
    for contender in found["contenders"]:
        assert contender["ended"] == COMPLETED, contender["words"]
        assert len(contender["traces"]) == len(found["prepared"]["traces"]) == 2
        for trace in contender["traces"]:
            assert trace["ended"] == COMPLETED, trace
            # What the allocator says it reserved was within the limit it was given.
            ends = [p for p in trace["probes"] if p["capacity"] == trace["completes_with"]]
            assert ends[0]["reserved_peak"] <= trace["completes_with"]
            assert trace["completes_with"] >= trace["live_peak"] > 0
            assert trace["modelled"] == (contender["mode"] == "")
            if contender["mode"] == "replay":
                assert trace["again"]["replay_hits"] * 2 >= trace["events"]
                assert trace["first"]["replay_misses"] == trace["again"]["replay_misses"] == 0


def check_finetune(found: dict[str, Any]) -> None:
    runs = {run["contender"]: run for run in found["runs"]}
    assert runs["caching allocator"]["steps"] == found["work"]["steps"]
    assert (found["completed"], found["losses_equal"]) == (1, True)
    # A contender that cannot be is recorded as failed, with the reason.
    assert runs["stitching, 2 MiB"]["ended"] == "failed"
    why = "libcuda.so.1" if torch.version.cuda else "built without CUDA"
    assert why in runs["stitching, 2 MiB"]["words"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_allocator"])
    with pytest.raises(SystemExit, match=r"^farspan: .*finds no CUDA device.*--tiny"):
        program.main()


@pytest.mark.slow
def test_installed_allocators_are_measured(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """As on a GPU: installed in PyTorch, over a driver that is a fake."""
    driver = once(tmp_path_factory, build_driver)
    # The last request, number 4, lies where the first and the third were.
    sizes = (40, 70, 30, 90)
    steps = [(i, size * MIB) for i, size in enumerate(sizes)] + [(0, FREED), (2, FREED)]
    steps += [(4, 64 * MIB), (1, FREED), (3, FREED), (4, FREED)]
    places = [place * MIB for place in (0, 70, 40, 140, 0)]
    prepared = Prepared("five", 1, 230 * MIB, steps, places, 230 * MIB, True)
    file = tmp_path / "trace.json"
    prepared.write(file)
    installed = [contender for contender in CONTENDERS if contender.mode]
    given = []
    for n, contender in enumerate(installed):
        settings = {
            "contender": asdict(contender),
            "device": "cuda",
            "driver": None,
            "capacity": 0,
            "traces": [str(file)],
            "start_seconds": 0.0,
            "seconds": 60.0,
            "rows": str(tmp_path / f"rows {n}"),
        }
        given.append(tmp_path / f"settings {n}.json")
        given[-1].write_text(json.dumps(settings))
    environment = children.environment("") | {"LD_LIBRARY_PATH": str(driver.parent)}
    command = [sys.executable, "-m", "tests.gpu_allocator_program", *map(str, given)]
    done = subprocess.run(
        command, cwd=children.ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for n, contender in enumerate(installed):
        (row,) = read_rows(tmp_path / f"rows {n}")
        check_installed(row, contender, len(mallocs(prepared)))


def check_installed(row: dict[str, Any], contender: Contender, requests: int) -> None:
    assert row["ended"] == COMPLETED, (contender, row)
    assert row["first"]["creates"] > 0
    assert row["again"]["creates"] == 0
    least = -(-230 * MIB // contender.chunk) * contender.chunk
    assert 230 * MIB <= row["completes_with"] <= least + 32 * MIB
    if contender.mode == "replay":
        assert row["again"]["replay_hits"] == requests
    elif contender.chunk == 2 * MIB:
        assert any(probe["stitches"] for probe in row["probes"])


@pytest.mark.parametrize("needed", [1000, 1003, 1075, 1180, 1500, 2000])
def test_the_least_capacity_is_found(needed: int) -> None:
    needed *= MIB
    asked = []

    def probe(capacity: int) -> Pass:
        asked.append(capacity)
        return Pass(COMPLETED if capacity >= needed else OUT_OF_MEMORY, 1, 1.0, {})

    found = smallest(probe, 1000 * MIB, 2000 * MIB, 4000 * MIB)
    assert found["completes_with"] >= needed
    assert found["completes_with"] in asked
    assert (found["fails_with"] or 0) < needed
    assert found["completes_with"] - needed <= 26 * MIB  # 2.6% of the peak, with all probes spent
    assert len(asked) == len(found["probes"]) <= 12


def test_a_limit_is_a_share_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 150_109_880_320
    shares: list[float] = []
    properties = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    wanted = [chunks * 2 * MIB for chunks in range(1, 70_000, 37)]
    for capacity in (*wanted, 2 * total):
        limit_pytorch(capacity)
    # What PyTorch makes of a share, in whole segments of 2 MiB.
    assert [int(share * total) // (2 * MIB) * (2 * MIB) for share in shares[:-1]] == wanted
    assert shares[-1] == 1.0
