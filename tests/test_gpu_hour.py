"""A quarter of an hour on a GPU: its order, its two calls, and that a kill loses no row."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import psutil
import pytest
import torch

from benchmarks import children, performance
from benchmarks.children import Clock, Row
from benchmarks.gpu import hour, pack, planned, steps
from benchmarks.gpu.__main__ import saving
from benchmarks.gpu.hour import Asked, Part, calls_of, in_groups, left_over, parts, run_part
from benchmarks.gpu.power import PowerLog
from benchmarks.gpu.rows import as_row
from benchmarks.gpu.work import LOGPROBS, QLORA, STREAMED, Place, full, named, quarter, tiny
from farspan.planner.machines import machine
from farspan.program.strategies import strategy
from farspan.spec import UnsupportedError
from farspan_memory.native import LIBRARY
from tests.test_gpu_benchmark import Left, Simulated, h200, names_of, simulate

__all__ = ["h200"]
RECORDS = {"h100": performance.H100, "h200": performance.RECORD}
PAIR = (f"auto at {64 * 1024}", f"huggingface at {64 * 1024}, {Place.KEPT}")
LONG, LAST = f"auto at {512 * 1024}", f"Qwen2.5-0.5B auto at {1024 * 1024}"


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path, full(), begins=performance.H100)


def test_what_no_record_has_comes_first(asked: Asked) -> None:
    names = [part.name for part in parts(asked)]
    assert names[:4] == [LONG, *PAIR, f"update at {128 * 1024}"]
    assert names[4:8] == [
        f"sparse at {128 * 1024}",
        f"Qwen3-14B streamed at {32 * 1024}",
        f"Qwen3-8B qlora at {64 * 1024}",
        f"logprobs at {64 * 1024}",
    ]
    short = names[8:20]
    for model in ("Qwen3-0.6B", "Qwen3-1.7B"):
        for tokens in (8192, 16384):
            for way in (
                "auto at {}",
                "huggingface at {}, nothing computed again",
                "huggingface at {}, inputs on the device",
            ):
                assert f"{model} {way.format(tokens)}" in short
    assert names[20:] == ["allocators", "longest", LAST]
    assert next(part.name for part in parts(replace(asked, begins=None))) == "ceilings"
    assert parts(replace(asked, tests=True))[-1].name == "tests"
    with pytest.raises(UnsupportedError, match=r"only: nothing is called 'auto'; give .*probe"):
        parts(replace(asked, only=("auto",)))
    chosen = ("probe", f"memo at {128 * 1024}", "calibrate")
    assert tuple(part.name for part in parts(replace(asked, only=chosen))) == chosen


@pytest.mark.exhaustive
@pytest.mark.parametrize("card", RECORDS)
def test_two_calls_hold_a_quarter_of_an_hour(card: str, asked: Asked) -> None:
    """By simulated seconds of each card, imports and the start of the machine included."""
    asked = replace(asked, begins=RECORDS[card])
    seconds = hour.expected(asked, asked.known())
    assert {part.name for part in left_over(asked, {})} == seconds.keys()
    # Alone is what takes most of a call, and nothing else does.
    assert {n for n, took in seconds.items() if took > 300} == {LONG, LAST}
    check_calls(asked, seconds)


def test_calls_are_filled_in_order(asked: Asked) -> None:
    seconds = {part.name: 30.0 for part in parts(asked)}
    seconds |= {LONG: 491.0, LAST: 494.0, "allocators": 120.0, "longest": 150.0}
    check_calls(asked, seconds)


def check_calls(asked: Asked, seconds: dict[str, float]) -> None:
    left = left_over(asked, {})
    calls = calls_of(left, seconds, hour.MINUTES)
    assert [name for name, call in calls.items() if call == 1] == [LONG]
    second = [name for name, call in calls.items() if call == 2]
    assert [part.name for part in left[1:5]] == second[:4]  # the pair, the update, sparse
    assert max(calls.values()) == 2
    for number in (1, 2):
        took = sum(seconds[name] for name, call in calls.items() if call == number)
        assert took + hour.IMPORT_SECONDS + hour.END_SECONDS < 600
    total = sum(seconds[name] for name, call in calls.items() if call)
    overhead = 2 * (hour.IMPORT_SECONDS + hour.END_SECONDS) + hour.START_SECONDS
    assert total + overhead <= hour.QUARTER_SECONDS
    text = hour.plan_text(left, seconds, hour.MINUTES)
    assert text.splitlines()[1].split()[-2:] == ["1", "alone"]
    assert "later" in text


def test_what_fills_a_call_has_it_alone(asked: Asked) -> None:
    groups = [[part.name for part in group] for group in in_groups(parts(asked))]
    assert groups[0] == [LONG]
    assert groups[1][:2] == list(PAIR)
    assert groups[2:] == [["allocators"], ["longest"], [LAST]]
    command = hour.command_of(asked, in_groups(parts(asked))[2], 300).command
    assert command[:2] == ("-m", "benchmarks.gpu_allocator")
    command = hour.command_of(
        replace(asked, host_memory="3GiB"), in_groups(parts(asked))[0], 564
    ).command
    assert command[-2:] == ("--only", LONG)
    assert command[-6:-3] == ("--host-memory", "3GiB", "--until")
    assert float(command[-3]) == pytest.approx(time.time() + 564 - hour.END_SECONDS, abs=5)


class Killed(BaseException):
    """The process is gone."""


def killed_after_each(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs the hour again and again, each run ended behind one row; what was run, in order."""
    made: list[str] = []

    def one_row(part: Part, *_: object) -> Row:
        if "--only" not in part.command:
            made.append(part.name)
            return {"ended": "completed", "seconds": 1.0, "said": []}
        first = part.command[part.command.index("--only") + 1]
        made.append(first)
        record = asked.known()
        runs = [{"seconds": 1.0}] * 2
        ended = {"ended": "completed", "words": "", "seconds": 1.0}
        row = {"name": first, "work": "step", "runs": runs, "child": ended, "out_of_memory": False}
        rows = [old for old in record["measurements"] if old["name"] != first]
        record["measurements"] = [*rows, row]
        saving(asked.record)(record)
        raise Killed

    monkeypatch.setattr(hour, "run_part", one_row)
    for _ in range(50):
        if not left_over(asked, asked.ended()):
            return made
        try:
            hour.run(asked, Clock.of(600))
        except Killed:
            continue
    raise AssertionError(made)


def test_a_kill_behind_each_row_loses_none_and_repeats_none(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saving(asked.record)(asked.known())
    wanted = [part.name for part in parts(asked)]
    assert killed_after_each(asked, monkeypatch) == wanted
    capsys.readouterr()
    assert not left_over(asked, asked.ended())


def test_what_failed_comes_last_and_a_command_not_again(asked: Asked) -> None:
    record = asked.known()
    failed = {"ended": "failed", "words": "broken", "seconds": 1.0}
    record["measurements"].append(
        {"name": LONG, "work": "step", "child": failed, "out_of_memory": False, "runs": []}
    )
    saving(asked.record)(record)
    left = [part.name for part in left_over(asked, {})]
    assert (left[0], left[-1]) == (PAIR[0], LONG)
    made = {"allocators": {"ended": "exit status 1"}}
    assert "allocators" not in [part.name for part in left_over(asked, made)]
    made = {"allocators": {"ended": "timed out"}}
    assert [part.name for part in left_over(asked, made)][-2:] == [LONG, "allocators"]


def test_a_record_of_another_card_or_version_is_named(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = asked.known()["machine"]
    monkeypatch.setattr(hour, "version", lambda name: was["versions"][name])
    monkeypatch.setattr(torch, "__version__", was["versions"]["torch"])
    monkeypatch.setattr(hour, "card_name", lambda: "NVIDIA H200")
    with pytest.raises(UnsupportedError, match=r"the card is NVIDIA H100 .*, here it is NVIDIA H2"):
        hour.seed(asked)
    # Of several records the one of this card is taken.
    assert hour.of_this_card(list(RECORDS.values())) == performance.RECORD
    with pytest.raises(UnsupportedError, match="there is no file typo"):
        hour.of_this_card([Path("typo.json")])
    monkeypatch.setattr(hour, "card_name", lambda: was["gpu"])
    row = {"name": LONG, "work": "step", "child": {"ended": "failed"}, "out_of_memory": False}
    own = asked.known() | {"measurements": [row]}  # without ceilings, such as of tests alone
    saving(asked.record)(own)
    hour.seed(asked)
    names = [one["name"] for one in asked.known()["measurements"]]
    assert (names[0], names[-1]) == ("ceilings", LONG)
    # A folder of another card is refused before anything is measured, with and without a record.
    monkeypatch.setattr(hour, "card_name", lambda: "NVIDIA H200")
    for begins in (None, performance.H100):
        with pytest.raises(UnsupportedError, match="the card is NVIDIA H100"):
            hour.seed(replace(asked, begins=begins))
    monkeypatch.setattr(hour, "card_name", lambda: None)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(UnsupportedError, match=r"torch is 2\.11\.0\+cu130, here it is 2\.99"):
        hour.seed(asked)


@pytest.mark.parametrize("text", ["{", "[]", '{"measurements": 3}'])
def test_a_broken_record_is_named(text: str, asked: Asked) -> None:
    asked.record.write_text(text)
    with pytest.raises(
        UnsupportedError, match=r"gpu.json (cannot be read as a record|is a record)"
    ):
        left_over(asked, {})
    (asked.folder / "hour.json").write_text("{")
    with pytest.raises(UnsupportedError, match=r"hour.json cannot be read.*delete it"):
        asked.ended()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--minutes", "nan"), "minutes: expected a number above 0"),
        (("--minutes", "-1"), "minutes: expected a number above 0"),
        (("--only", "nothing"), "only: nothing is called 'nothing'"),
        (("--site", "nowhere"), r"site: .*nowhere has no liger_kernel; write it by"),
        (("--record", "typo.json"), "record: there is no file"),
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
    left = [part.name for part in left_over(asked, {})]
    assert (left[0], left[-1]) == (PAIR[0], LONG)


def test_a_record_of_another_card_ends_the_call(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def fails(part: Part, *_: object) -> Row:
        ran.append(part.name)
        return {"ended": "exit status 1", "seconds": 1.0, "said": []}

    monkeypatch.setattr(hour, "run_part", fails)
    assert not hour.run(asked, Clock.of(600))
    assert ran == [LONG]
    # A command that has less than it may take is left to the next call.
    ran.clear()
    assert hour.run(replace(asked, only=("allocators",)), Clock.of(200))
    assert not ran
    assert "allocators: left to the next call" in capsys.readouterr().out


# -- measurements --------------------------------------------------------------------------------


@pytest.mark.usefixtures("h200")
def test_the_pair_has_two_steps_and_a_failure_replaces_none() -> None:
    """Though a second one takes more than a tenth of the time left; one that a former run measured
    once is measured again."""
    record = simulate(100, only=PAIR)
    assert names_of(record) == list(PAIR)
    assert [len(row["runs"]) for row in record["measurements"]] == [2, 2]
    assert record["planned_with"] == "preset h200"
    before = json.loads(json.dumps(record))
    for row in record["measurements"]:
        del row["runs"][1:]
        assert row["planned"]["seconds"] > 0
    broken = simulate(100, json.loads(json.dumps(record)), only=PAIR, broken=PAIR)
    assert broken["measurements"] == json.loads(json.dumps(record["measurements"]))
    again = simulate(100, record, only=PAIR)
    assert [len(row["runs"]) for row in again["measurements"]] == [2, 2]
    known = simulate(100, before, only=PAIR)
    assert len(known["measurements"]) == 2
    assert known["measurements"] == json.loads(json.dumps(before["measurements"]))


@pytest.mark.usefixtures("h200")
def test_the_search_for_the_longest_has_what_is_left() -> None:
    """Of a call that is nearly over, too; a run that is killed leaves the name of what it began."""
    record = simulate(142, only=("longest",))
    assert names_of(record) == ["longest"]
    assert "begun" not in record
    assert simulate(20, only=("longest",))["runs"][0]["skipped"]

    class Stopped(Simulated):
        def _child(self, *_: object) -> Any:
            raise Killed

    record = {"runs": [], "measurements": []}
    clock: Any = Left(100)
    made = Stopped(full(), "cuda", clock, record, lambda _: None, lambda _: None, only=PAIR[:1])
    with pytest.raises(Killed):
        made.run()
    assert record["begun"] == PAIR[0]


@pytest.mark.usefixtures("h200")
def test_a_card_that_is_not_the_records_is_refused_before_it_measures() -> None:
    record = {"machine": {"gpu": "NVIDIA A40", "versions": {}}, "runs": [], "measurements": []}
    with pytest.raises(UnsupportedError, match="the record is of gpu NVIDIA A40, here is NVIDIA H"):
        simulate(100, record, only=PAIR)
    assert not record["runs"]


@pytest.mark.usefixtures("h200")
def test_what_is_asked_for_by_name_is_measured_at_full_depth_or_skipped() -> None:
    record = simulate(200, only=(LONG, f"auto at {32 * 1024}"))
    (row,) = record["measurements"]
    assert (row["name"], row["layers"]) == (f"auto at {32 * 1024}", 28)
    (skipped,) = record["runs"][0]["skipped"]
    assert skipped["name"] == LONG
    assert "28 layers take about" in skipped["why"]


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


def test_every_measurement_of_the_quarter_has_a_plan() -> None:
    """Other models as they are, NF4 beside adapters, a backward apart from its forward."""
    (qlora,) = (i for i in quarter(tiny()) if i.strategy == QLORA)
    (logprobs,) = (i for i in quarter(tiny()) if i.strategy == LOGPROBS)
    (streamed,) = (i for i in quarter(tiny()) if i.strategy == STREAMED)
    spec = machine("h100")
    plan = planned.Planner(tiny().of(qlora.model), spec).plan(qlora)
    assert plan.question.nf4
    assert plan.question.adapter_rank() == 16
    plan = planned.Planner(tiny(), spec).plan(logprobs)
    assert plan.question.loss.is_cut
    plan = planned.Planner(tiny().of(streamed.model), spec).plan(streamed)
    assert plan.schedule.weights == "host"
    update = planned.Planner(tiny(), spec).update(2)
    assert update.placed.states == "device"
    assert update.fits
    assert full().of("Qwen3-14B").layers == 40
    assert full().of("").config == full().config
    assert len(named(full())) > len(set(quarter(full())))


# -- clock and power -----------------------------------------------------------------------------


def test_clock_and_power_are_those_of_the_window() -> None:
    lines = "print('1500, 600.5, 50', flush=True); print('[N/A], 1, 2', flush=True)"
    words = f"import time; {lines}; time.sleep(0.5); print('1700, 700.5, 60', flush=True)"
    began = time.time()
    log = PowerLog([sys.executable, "-c", f"{words}; time.sleep(60)"])
    while len(log._samples) < 2 and time.time() < began + 30:
        time.sleep(0.01)
    found = log.between(began, time.time())
    assert found == {
        "samples": 2, "clock_mhz": 1600, "least_clock_mhz": 1500, "watts": 650, "most_watts": 700,
        "celsius": 60,
    }  # fmt: skip
    second = log._samples[1][0]
    late = log.between(second - 0.1, second)
    assert late is not None
    assert (late["samples"], late["clock_mhz"]) == (1, 1700)
    assert log.between(0, 1) is None
    log.close()
    nothing = PowerLog(["no-such-command-anywhere"])
    assert nothing.between(0, time.time()) is None
    nothing.close()


# -- tests that need a GPU -----------------------------------------------------------------------


def test_only_tests_that_changed_since_they_passed_are_run(asked: Asked) -> None:
    every = hour.changed_tests(asked)
    assert len(every) > 5
    first, second = every[:2]
    saving(asked.record)(asked.known())
    name = first.removesuffix(".py").replace("/", ".")
    other = second.removesuffix(".py").replace("/", ".")
    (asked.folder / "tests.xml").write_text(
        f'<testsuites><testsuite><testcase classname="{name}" name="a"/>'
        f'<testcase classname="{name}.TestOf" name="b"><skipped/></testcase>'
        f'<testcase classname="{other}" name="a"/>'
        f'<testcase classname="{other}" name="b"><failure/></testcase></testsuite></testsuites>'
    )
    hour.note_tests(asked)
    assert hour.changed_tests(asked) == every[1:]
    record = asked.known()
    record["tests"][first] = "of other bytes"
    saving(asked.record)(record)
    assert hour.changed_tests(asked) == every
    record["tests"] = {file: hour.digest_of(file) for file in every}
    saving(asked.record)(record)
    assert "tests" not in [part.name for part in parts(replace(asked, tests=True))]
    (asked.folder / "tests.xml").write_text("<testsuites><testsu")  # pytest was stopped
    hour.note_tests(asked)


def test_a_part_ends_in_time_and_says_how(tmp_path: Path) -> None:
    log = tmp_path / "log"
    slow = Part("slow", 0.5, ("-c", "print('begun', flush=True); import time; time.sleep(60)"))
    found = run_part(slow, 100, log)
    assert (found["ended"], found["said"]) == ("timed out", ["begun"])
    # Nothing of it lives on, in a session of its own neither.
    sleeps = "subprocess.Popen(['sleep', '61.7'], start_new_session=True)"
    words = f"import subprocess, time; print({sleeps}.pid, flush=True); time.sleep(60)"
    (pid,) = run_part(Part("slow", 2, ("-c", words)), 100, log)["said"]
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie"
    assert run_part(Part("bad", 60, ("-c", "raise SystemExit(3)")), 60, log)["ended"] == (
        "exit status 3"
    )
    shown = Part("good", 60, ("-c", "import sys; print(sys.path)"))
    found = run_part(shown, 60, log, tmp_path / "site")
    assert found["ended"] == "completed"
    assert str(tmp_path / "site") in found["said"][-1]


def test_losses_of_allocators_are_compared(tmp_path: Path) -> None:
    def write(name: str, *losses: float) -> None:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"loss": loss}) for loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"other": 1}']))

    write("default", 1.0, 0.5)
    assert hour.same_losses(tmp_path) == ""
    write("stitch", 1.0, 0.5)
    write("replay", 1.0, 0.25)
    assert hour.same_losses(tmp_path).endswith("stitch: yes, replay: NO")


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
    command = [sys.executable, "-m", "benchmarks.gpu.hour", "--tiny", "--out", str(tmp_path)]
    asked = Asked(tmp_path, tiny())
    seen: list[str] = []
    for _ in range(60):
        if not left_over(asked, asked.ended()):
            break
        process = subprocess.Popen(
            command, cwd=children.ROOT, env=children.environment(""), start_new_session=True
        )
        before = rows_of(asked)
        while process.poll() is None and rows_of(asked) == before:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
        new = [name for name in rows_of(asked) if name not in before]
        assert set(before) <= set(rows_of(asked))
        seen += new
    expected = [part.name for part in parts(asked)]
    assert sorted(seen) == sorted({*expected, "ceilings"})
    rows = {row["name"]: row for row in asked.known()["measurements"]}
    assert all(row["child"]["ended"] == "completed" for row in rows.values())
    assert all("card" in row for row in rows.values())
    for name in (
        f"auto at {tiny().lengths[0]}",
        f"huggingface at {tiny().lengths[0]}, {Place.KEPT}",
    ):
        assert len(rows[name]["runs"]) == 2
    models = {"Qwen3-14B", "Qwen3-8B", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen2.5-0.5B"}
    assert {row.get("model") for row in rows.values()} == {None, *models}


def rows_of(asked: Asked) -> list[str]:
    rows = [row["name"] for row in asked.known()["measurements"]]
    return rows + list(asked.ended())
