"""`farspan plan --timeline` from end to end."""

import json
from pathlib import Path

from typer.testing import CliRunner

from farspan import cli

ASKED = ("plan", "--model", "Qwen2.5-0.5B", "--machine", "h200", "--strategy", "fpdt")


def test_the_step_that_is_planned_is_written(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    done = CliRunner().invoke(
        cli.app, (*ASKED, "--context", "64K", "--json", "--timeline", str(file))
    )
    assert done.exit_code == 0, done.output
    plan, trace = json.loads(done.output), json.loads(file.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in events)
    assert abs(end - plan["seconds_per_step"] * 1e6) <= 1e-3
    assert {event["cat"] for event in events} == {"compute", "fetch", "evict"}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "step.json"
    done = CliRunner().invoke(cli.app, (*ASKED, "--context", "8K", "--timeline", str(file)))
    assert done.exit_code != 0
    assert "timeline: " in str(done.exception)
