"""Benchmarks run, at sizes that say nothing about speed."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import checkpoints, step
from benchmarks.tables import load

ROOT = Path(__file__).parent.parent


def test_step_trains_the_same_on_both_sides() -> None:
    record = step.measure(tokens=96, repeats=1)
    assert record["ratio"].keys() == {"attention_save_fraction", "attention_recomputed"}
    for loss in record["loss"].values():
        assert loss == pytest.approx(record["loss"]["huggingface"], rel=1e-5)


# Each script in a process as `python -m MODULE` makes it, but that what takes seconds to import is
# there: it is forked from one that has imported it.
BEGUN = """
import os, runpy, sys
import farspan.engine.verify, farspan.hf.load, farspan.train.trainer
sys.path[0] = os.getcwd()
for script in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.argv = [script, "--help"]
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    assert os.waitpid(child, 0)[1] == 0, script
"""


@pytest.mark.exhaustive
def test_scripts_run() -> None:
    scripts = ["benchmarks.step", "benchmarks.cells", "benchmarks.agreement"]
    scripts += ["benchmarks.sparse.retrieval", "benchmarks.sparse.evidence"]
    command = [sys.executable, "-c", BEGUN, *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("--out OUT") >= len(scripts)


def test_log_probabilities_cost_what_the_page_says() -> None:
    found = load("logprobs")
    page = " ".join((ROOT / "docs" / "how-to" / "any-loss.md").read_text("utf-8").split())
    ratio, peaks = found["cpu_ratio"]["logprobs"], found["peak_bytes"]
    memory = peaks["logprobs"] / peaks["one pass"]
    assert ratio <= 1.05
    assert memory <= 1.02
    assert f"took {ratio:.2f} times the processor seconds of one pass, and {memory:.3f}" in page


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short_step", "step takes {:.2f} of the CPU seconds of transformers without"),
        ("short_step_8k", "At 8K tokens it takes {:.2f},"),
    ],
)
def test_short_steps_take_what_their_page_says(name: str, words: str) -> None:
    ratio = load(name)["cpu_ratio"]["one chunk"]
    page = (ROOT / "docs" / "evidence" / "performance.md").read_text("utf-8")
    assert ratio <= 1.02
    assert words.format(ratio) in " ".join(page.split())


def test_cells_take_what_their_page_says() -> None:
    record = load("cells")
    rows = record["cpu_microseconds_a_cell"].values()
    before, now = ("; ".join(f"{row[when]:,.0f}" for row in rows) for when in ("before", "now"))
    assert all(row["now"] < row["before"] for row in rows)
    row = (
        "| CPU microseconds of a cell (forward, forward again, backward) of models 16 wide with 2; "
        f"4; 8 layers, in chunks of 4 tokens: at commit {record['before']}; now | {before}; {now} "
        "| `cells.json` |"
    )
    assert row in checkpoints.PAGE.read_text(encoding="utf-8").splitlines()


def test_kills_are_as_many_as_their_page_says() -> None:
    record = load("kills")
    found = Counter[str]()
    for mode in (*record["modes"], {"trials": record["disks"]["trials"]}):
        found.update(mode["trials"])
    assert not [name for name in found if "lost" in name.lower()]
    killed, before = found["the same bits, killed"], found["the same bits, ended before"]
    disks = found["a named error, then the same bits"]
    row = (
        f"| lost: of {killed + before} runs in {len(record['modes'])} modes ({killed} killed "
        f"before they ended); of {disks} on a full disk | 0; 0 | `kills.json` |"
    )
    assert row in checkpoints.PAGE.read_text(encoding="utf-8").splitlines()


def test_strangers_at_a_store_do_what_their_page_says() -> None:
    record = load("network")
    found = Counter[str]()
    for results in record["ways"].values():
        assert results
        found.update(results)
    assert record["seconds"] >= 60
    silent, named = (
        found.pop(f"{how}, the same bits")
        for how in ("as if nothing had been said", "a named error")
    )
    assert not found
    row = (
        f"to whose store strangers spoke for {record['seconds']} s in all: ended as if nothing had "
        f"been said; by a named error; otherwise | {silent}; {named}; 0 | `network.json` |"
    )
    assert row in checkpoints.PAGE.read_text(encoding="utf-8")


def test_checkpoints_are_as_fast_as_their_page_says(tmp_path: Path) -> None:
    """By the record, which the command writes."""
    record = load("checkpoints")
    assert record["save"]["ratio"] <= 1.15
    assert record["resume"]["ratio"] <= 1.5
    assert checkpoints.row(record) in checkpoints.PAGE.read_text(encoding="utf-8").splitlines()
    again = checkpoints.measure(0.03, 2, tmp_path)
    assert again.keys() == record.keys()
    assert len(again["turns"]) == 2
    assert not any(tmp_path.iterdir())
