"""What is asked of a GPU first is asked of a CPU here, at tiny sizes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import probe


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
