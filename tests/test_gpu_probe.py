"""What is asked of a GPU first is asked of a CPU here, at tiny sizes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import children
from benchmarks.gpu import probe
from benchmarks.gpu.hour import Part, left_over, parts, run_part, same_losses


def test_every_probe_runs_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "probe.json"
    monkeypatch.setattr("sys.argv", ["probe", "--tiny", "--out", str(out)])
    probe.main()
    record = json.loads(out.read_text())
    assert record["tiny"] is True
    assert list(record["probes"]) == [one.__name__ for one in probe.PROBES]
    for name, found in record["probes"].items():
        assert found["ended"] == "completed" or found["ended"].startswith("skipped: "), name
        assert found["ended"] != "completed" or found["lines"], name
    assert "the same bits twice: " in capsys.readouterr().out


def test_a_probe_that_fails_stops_no_other() -> None:
    def breaks(_: probe.Bench) -> Iterator[str]:
        """A probe."""
        yield "a line"
        raise ValueError("on purpose")

    def lacks(_: probe.Bench) -> Iterator[str]:
        """A probe."""
        yield str(probe._named("nowhere", "nothing"))

    found = probe.probe(probe.Bench("cpu", True), breaks)
    assert (found["ended"][:8], found["lines"]) == ("failed: ", ["a line"])
    assert "on purpose" in found["ended"]
    assert probe.probe(probe.Bench("cpu", True), lacks)["ended"].startswith("failed: ")


def test_an_hour_goes_on_where_it_ended(tmp_path: Path) -> None:
    made = parts(tmp_path, True, "3GiB")
    names = [part.name for part in made]
    assert names[:2] == ["probe", "tests"]
    assert len(set(names)) == len(names)
    assert ("--host-memory", "3GiB") in zip(made[-2].command, made[-2].command[1:], strict=False)
    done = {"probe": {"ended": "completed"}, "tests": {"ended": "timed out"}}
    failed = {"calibrate": {"ended": "exit status 1"}, "steps": {"ended": "completed"}}
    left = [part.name for part in made if left_over(done | failed, part)]
    assert not {"probe", "calibrate"} & set(left)
    assert {"tests", "steps", "allocators"} <= set(left)  # steps resume by themselves


def test_a_part_ends_in_time_and_says_how(tmp_path: Path) -> None:
    log = tmp_path / "log"
    slow = Part("slow", 0.5, ("-c", "print('begun', flush=True); import time; time.sleep(60)"))
    found = run_part(slow, 100, log)
    assert (found["ended"], found["said"]) == ("timed out", ["begun"])
    assert run_part(Part("bad", 60, ("-c", "raise SystemExit(3)")), 60, log)["ended"] == (
        "exit status 3"
    )
    assert run_part(Part("good", 60, ("-c", "print(1)")), 60, log)["ended"] == "completed"


def test_losses_of_allocators_are_compared(tmp_path: Path) -> None:
    def write(name: str, *losses: float) -> None:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"loss": loss}) for loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"other": 1}']))

    write("default", 1.0, 0.5)
    assert same_losses(tmp_path) == ""
    write("stitch", 1.0, 0.5)
    write("replay", 1.0, 0.25)
    assert same_losses(tmp_path).endswith("stitch: yes, replay: NO")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_minute_of_an_hour(tmp_path: Path) -> None:
    """As far as it comes: the run files are read, and each part says how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.hour", "--tiny", "--out", str(tmp_path)]
    subprocess.run(
        [*command, "--minutes", "1"],
        cwd=children.ROOT,
        env=children.environment(""),
        check=True,
        timeout=200,
    )
    made = json.loads((tmp_path / "hour.json").read_text())
    assert made["probe"]["ended"] == "completed"
    first = next(part for part in parts(tmp_path, True, None) if left_over(made, part))
    assert first.name != "probe"
