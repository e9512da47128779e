"""A quarter of an hour on a GPU: its order, its calls, and that a kill loses no row."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from benchmarks import children, performance
from benchmarks.children import Row
from benchmarks.gpu import hour, pack, steps
from benchmarks.gpu.hour import Asked, left_over, saving, wanted
from benchmarks.gpu.session import as_row
from benchmarks.gpu.work import LOGPROBS, QLORA, Place, full, quarter, tiny
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import UnsupportedError
from farspan_memory.native import LIBRARY

PAIR = (f"auto at {64 * 1024}", f"huggingface at {64 * 1024}, {Place.KEPT}")
LONG, LAST = f"auto at {512 * 1024}", f"Qwen2.5-0.5B auto at {1024 * 1024}"


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path, full(), begins=performance.H100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hour", "--out", str(tmp_path / "records")])
    with pytest.raises(SystemExit, match=r"reaches no CUDA device.*--tiny") as end:
        hour.main()
    assert str(end.value).startswith("farspan: gpu: ")
    assert list(tmp_path.iterdir()) == []


def test_what_no_record_has_comes_first(asked: Asked) -> None:
    names = [part.name for part in wanted(asked)]
    assert names[:4] == [LONG, *PAIR, f"update at {128 * 1024}"]
    assert names[-1] == LAST
    assert next(part.name for part in wanted(replace(asked, begins=None))) == "ceilings"
    with pytest.raises(UnsupportedError, match=r"only: nothing is called 'auto'; give .*exact"):
        wanted(replace(asked, only=("auto",)))


def test_what_failed_comes_last(asked: Asked) -> None:
    record = asked.known()
    failed = {"ended": "failed", "words": "broken", "seconds": 1.0}
    record["measurements"].append(
        {"name": LONG, "work": "step", "child": failed, "out_of_memory": False, "runs": []}
    )
    saving(asked.record)(record)
    left = [part.name for part in left_over(asked)]
    assert (left[0], left[-1]) == (PAIR[0], LONG)


@pytest.mark.parametrize("text", ["{", "[]", '{"measurements": 3}'])
def test_a_broken_record_is_named(text: str, asked: Asked) -> None:
    asked.record.write_text(text)
    with pytest.raises(
        UnsupportedError, match=r"gpu.json (cannot be read as a record|is a record)"
    ):
        left_over(asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--minutes", "nan"), "minutes: expected a number above 0"),
        (("--only", "nothing"), "only: nothing is called 'nothing'"),
        (("--site", "nowhere"), r"site: .*nowhere has no liger_kernel; write it by"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    options: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["hour", "--tiny", "--out", str(tmp_path / "out"), *options]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=words) as end:
        hour.main()
    assert str(end.value).startswith("farspan: ")
    assert not (tmp_path / "out" / "gpu.json").exists()


def test_a_folder_is_measured_in_by_one_call(tmp_path: Path) -> None:
    held = hour.locked(tmp_path)
    with pytest.raises(UnsupportedError, match="another call still measures in"):
        hour.locked(tmp_path)
    os.close(held)
    os.close(hour.locked(tmp_path))


def test_a_part_that_was_cut_off_comes_last(asked: Asked) -> None:
    """As a kill leaves the record: the name of what was measured, and no row."""
    saving(asked.record)(asked.known() | {"begun": LONG})
    left = [part.name for part in left_over(asked)]
    assert (left[0], left[-1]) == (PAIR[0], LONG)


@pytest.mark.parametrize("kind", [QLORA, LOGPROBS])
def test_adapters_and_losses_of_tokens_are_measured(kind: str, tmp_path: Path) -> None:
    if kind == QLORA:
        pytest.importorskip("bitsandbytes")
    item = next(i for i in quarter(tiny()) if i.strategy == kind)
    work = tiny().of(item.model)
    schedule = strategy("grouped", 4, item.tokens)
    settings = {
        "config": work.config, "dtype": "float32", "device": "cpu", "tiny": True, "layers": 4,
        "tokens": item.tokens, "strategy": kind, "steps": 2, "host_memory": None,
        "schedule": as_row(schedule), "rows": str(tmp_path / "rows"),
    }  # fmt: skip
    model = steps.prepared_model(settings, 4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained) == (kind == QLORA)
    assert any(not p.is_floating_point() for p in model.parameters()) == (kind == QLORA)
    steps.run(settings)
    rows = children.read_rows(tmp_path / "rows")
    timed = [row for row in rows if "step" in row]
    assert len(timed) == 2
    assert timed[0]["loss"] == timed[1]["loss"]
    assert 4.5 < timed[0]["loss"] < 6.5  # of 256 tokens, not trained
    assert timed[1]["ended_at"] >= timed[0]["ended_at"] + timed[1]["seconds"]


# -- what travels, and what comes back -----------------------------------------------------------


def test_what_travels_is_listed(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "bitsandbytes-1.whl", "w") as archive:
        for name in ("cuda130", "cuda118", "cpu"):
            archive.writestr(f"bitsandbytes/lib{name}.so", "x" * 100)
        archive.writestr("bitsandbytes/__init__.py", "")
    site = tmp_path / "site"
    pack.unpack(tmp_path, site)
    kept = {path.name for path in (site / "bitsandbytes").iterdir()}
    assert kept == {"libcuda130.so", "libcpu.so", "__init__.py"}
    assert (site / LIBRARY.name).exists() == LIBRARY.exists()
    found = pack.listing(site)
    assert found["bitsandbytes"] == 200
    assert found["tracked files"] > 2**20
    assert sum(found.values()) < 40 * 2**20  # of 64 MiB; packages take 8


def test_a_record_is_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = tmp_path / "benchmarks" / "results" / "gpu_h100.json"
    committed.parent.mkdir(parents=True)
    record = json.loads(performance.H100.read_text(encoding="utf-8"))
    committed.write_text(json.dumps(record))
    monkeypatch.setattr(performance, "H100", committed)
    monkeypatch.setattr(performance, "RESULTS", committed.parent)
    ended = {"ended": "completed", "words": "", "seconds": 1.0}
    new = {
        "name": LAST,
        "work": "step",
        "child": ended,
        "out_of_memory": False,
        "seconds": 4.0,
        "model": "Qwen2.5-0.5B",
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record | {"measurements": [*record["measurements"], new]}))
    assert performance.adopt(path) == committed
    assert json.loads(committed.read_text())["measurements"][-1] == new
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"lacks {LAST}, which gpu_h100\.json has; begin .*--rec"):
        performance.adopt(path)
    for fields, words in (
        ({"tiny": True}, "no record of an H100 or an H200"),
        ({"machine": {"gpu": "NVIDIA A40"}}, "no record of an H100 or an H200"),
        ({"model": {}}, "of another model"),
    ):
        path.write_text(json.dumps(record | fields))
        with pytest.raises(ValueError, match=words):
            performance.adopt(path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_hour_at_tiny_size_is_killed_behind_each_row(tmp_path: Path) -> None:
    """For real: a process group that is ended as soon as a row is on disk, until nothing is
    left."""
    kept = f"huggingface at {tiny().lengths[0]}, {Place.KEPT}"
    other = (f"{model} at 128" for model in ("Qwen3-14B streamed", "Qwen3-8B qlora"))
    only = ["ceilings", "auto at 128", kept, "update at 128", *other, "logprobs at 128", "exact"]
    words = ["--tiny", "--out", str(tmp_path), "--host-memory", "3GiB", "--only", *only]
    asked = Asked(tmp_path, tiny(), tuple(only))
    for _ in range(60):
        if not left_over(asked):
            break
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.hour", *words],
            cwd=children.ROOT, env=children.environment(""), start_new_session=True,
        )  # fmt: skip
        before = rows_of(asked)
        while process.poll() is None and rows_of(asked) == before:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
        assert set(before) <= set(rows_of(asked))
    record = asked.known()
    rows = {row["name"]: row for row in record["measurements"]}
    assert sorted(rows_of(asked)) == sorted(only)
    for row in rows.values():
        assert row["child"]["ended"] == "completed", row["child"]["words"]
    assert {row.get("model") for row in rows.values()} == {None, "Qwen3-14B", "Qwen3-8B"}
    assert record["planned_with"] == "this machine's ceilings"
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert record["runs"][0]["main_memory"]["given"] == 3 * 2**30
    for name in ("auto at 128", kept):
        check_step(rows[name])
    exact = rows["exact"]["rows"]
    assert [one["strategy"] for one in exact] == list(STRATEGIES)
    assert all(one["within"] for one in exact)
    check_update(rows[f"update at {tiny().middle}"])


def rows_of(asked: Asked) -> list[str]:
    return [row["name"] for row in asked.known()["measurements"]]


def check_step(row: Row) -> None:
    assert row["seconds"] == row["runs"][-1]["seconds"] > 0
    assert len(row["runs"]) == 2
    assert row["warm_layers"] == 1
    assert row["planned"]["fits"] is True
    assert row["planned"]["seconds"] > 0
    assert row["floor_seconds"] > 0
    assert all(run["host"] > 0 for run in row["runs"])
    if row["work"] == "step":
        assert row["arenas"]["device"] > 0


def check_update(row: Row) -> None:
    found = {key: value for one in row["rows"] for key, value in one.items()}
    assert (found["states"], found["layers"]) == ("device", 4)
    assert len(found["seconds"]) == 2
    # Two moments of fp32 weights, and a counter for each tensor of parameters.
    assert 0 < found["held"]["device"] - 8 * found["parameters"] < 1024
    assert found["held"]["host"] == 0
