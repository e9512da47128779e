"""The command line from end to end, in this process: what it prints and how it ends."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from farspan import cli
from farspan.cli.verify import base_schedule
from farspan.durable import WriteFailed
from farspan.program.strategies import strategy
from farspan.spec import VERSION
from farspan.train.config import RunConfig, ScheduleConfig
from farspan.train.step_runner import PlanComparison, TrainingResult

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
    "bos_token_id": None,
}


RESULT = TrainingResult(Path("out"), 3, 3, 1.0, float("nan"), 0, None)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `farspan ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "model_type"}).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_verify_reports_json_and_passes(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--context", "50", "--chunk", "16", "--batch", "2", "--documents", "3"]
    flags = ["--dtype", dtype, "--groups", "1,2", "--json"]
    assert run(monkeypatch, "verify", str(folder), *shape, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["checked_parameters"] == len(list(_model(folder).parameters()))
    assert {"loss_error", "max_relative_error", "worst"} <= found.keys()
    if dtype == "float64":
        assert found["max_relative_error"] <= 1e-12


def test_verify_fails_with_exit_code_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farspan.engine.buffers.KVPrefix.add_gradient", lambda *_: None)
    assert run(monkeypatch, "verify", str(folder), "--context", "50", "--chunk", "16") == 1
    said = capsys.readouterr().out
    assert "NOT exact" in said
    assert said.splitlines()[0].startswith("RoPE: default, theta 10,000, reaches ")
    assert said.splitlines()[1].strip() == "gradients furthest from plain autograd's"
    assert "limit: relative L2 error <= 1e-12" in said


PLANNED = ("--model", "Llama-3.1-70B", "--context", "1M", "--machine", "rtx4090")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("verify", "FOLDER", "--context", "50"),
            "parameters in float64, worst relative error .*, loss ",
        ),
        (
            ("plan", *PLANNED, "--strategy", "memo", "--all"),
            "MFU .* over the datasheet's dense rate",
        ),
        (("plan", *PLANNED, "--strategy", "memo", "--all"), "^host: .* in reserve$"),
        (("data", "RUN"), "sequence 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_no_terminal_shows_is_in_lines_that_grep_finds(
    arguments: tuple[str, ...],
    line: str,
    folder: Path,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    places = {"FOLDER": str(folder), "RUN": str(run_file)}
    run(monkeypatch, *(places.get(argument, argument) for argument in arguments))
    lines = capsys.readouterr().out.splitlines()
    assert [text for text in lines if text != text.rstrip()] == []
    assert any(re.search(line, text) for text in lines), lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--strategy", "nonsense"], "strategy: 'nonsense' is not known"),
        (["verify", "--groups", "two"], "groups: expected a number"),
        (["verify", "--groups", "2,1"], "groups: [2, 1] holds 3 layers, but the model has 4"),
        (["verify", "--dtype", "int8"], "dtype: expected float64, float32 or bfloat16"),
        (["verify", "--context", "many"], "context: expected tokens such as 131072, 128K"),
        (["verify", "--documents", "999"], "documents: 999 do not fit"),
        (["verify", "--context", "9000"], "exceeds the model's max_position_embeddings of 8,192"),
        (["verify", "nowhere/at/all.yaml"], "nowhere/at/all.yaml: cannot be read"),
        (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_two(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("farspan: ")
    assert message in lines[0]


def test_a_file_that_may_not_be_read_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/other/model")

    with pytest.raises(SystemExit, match="2"):
        cli.main(refuse)
    assert capsys.readouterr().err.startswith("farspan: /other/model: Permission denied; fix")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libgfortran.so.5: failed to map segment from shared object"),
    ],
)
def test_a_limit_of_memory_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def refuse() -> None:
        raise error

    with pytest.raises(SystemExit, match="1"):
        cli.main(refuse)
    said = capsys.readouterr().err
    assert said.startswith("farspan: main memory: this process can get no more")
    assert "ulimit -v" in said


def test_train_from_a_run_file_to_a_model_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    values: dict[str, Any] = {
        "model": {"config": CONFIG},
        "data": {"source": "text", "path": str(tmp_path / "text.txt"), "tokenizer": "bytes"},
        "steps": 3,
        "context": 96,
        "schedule": {"strategy": "memo", "chunk": 40},
        "optimizer": {"lr": 0.01},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(values))
    out = tmp_path / "out"
    arguments = ["train", str(run_file), "--folder", str(out), "--strategy", "oomb", "--json"]
    assert run(monkeypatch, *arguments) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["step"] == 3
    AutoModelForCausalLM.from_pretrained(out / "model")
    assert run(monkeypatch, *arguments, "--steps", "3") == 0  # nothing left to do


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, list[str]]]:
    """Runs that were to be trained, with what is said first; each ends at once, as RESULT."""
    runs: list[tuple[RunConfig, list[str]]] = []

    def end(asked: RunConfig, *, notes: list[str], **_: Any) -> TrainingResult:
        runs.append((asked, notes))
        return RESULT

    monkeypatch.setattr("farspan.cli.with_torch.train", end)
    return runs


@pytest.mark.parametrize("name", ["auto", "oomb"])
def test_a_strategy_comes_whole(
    name: str, trained: list[tuple[RunConfig, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default run gives its strategy a chunk, which means nothing to another one."""
    assert run(monkeypatch, "train", "--strategy", name) == 0
    assert run(monkeypatch, "train") == 0
    (other, notes), (default, no_notes) = trained
    assert other.schedule == ScheduleConfig(strategy=name)
    assert notes == [f"schedule: {name} replaces grouped and drops its chunk: 2048"]
    assert replace(other, schedule=default.schedule) == default
    assert no_notes == []


def test_a_result_is_valid_json_whatever_the_loss(
    trained: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del trained
    assert run(monkeypatch, "train", "--json") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["heldout_loss"] == "nan"
    assert found["comparison"] is None
    planned = replace(RESULT, heldout_loss=1.5, comparison=PlanComparison(5, 4, 2.0, None))
    monkeypatch.setattr("farspan.cli.with_torch.train", lambda *_, **__: planned)
    assert run(monkeypatch, "train", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["heldout_loss"] == 1.5
    assert found["comparison"] == {
        "predicted_bytes": 5,
        "measured_bytes": 4,
        "predicted_seconds": 2.0,
        "measured_seconds": None,
    }


@pytest.mark.parametrize(
    ("schedule", "arguments", "stands_in"),
    [
        ({"strategy": "auto"}, [], True),
        ({"strategy": "auto"}, ["--strategy", "oomb"], False),
        ({"strategy": "memo", "chunk": 40}, ["--strategy", "auto"], True),
        ({"strategy": "memo", "chunk": 40}, [], False),
    ],
)
def test_verify_takes_grouped_for_auto_and_says_so(
    schedule: dict[str, Any],
    arguments: list[str],
    stands_in: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"model": {"config": CONFIG}, "data": {"source": "stdlib"}, "schedule": schedule}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    assert run(monkeypatch, "verify", str(file), "--context", "64", "--json", *arguments) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["passed"]
    assert ("grouped instead of auto" in said.err) == stands_in


@pytest.mark.parametrize("parallel", [None, "auto", {"ulysses": 2}])
def test_verify_says_that_it_leaves_ranks_out(
    parallel: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"model": {"config": CONFIG}, "data": {"source": "stdlib"}, "parallel": parallel}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    assert run(monkeypatch, "verify", str(file), "--context", "64", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["passed"]
    assert ("parallel: ignored: one process" in said.err) == (parallel is not None)


def test_the_schedule_that_is_verified() -> None:
    assert base_schedule(None, "auto", 4, 64)[0] == strategy("grouped", 4, 64)
    assert base_schedule(None, None, 4, 64) == (strategy("grouped", 4, 64), None)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of eight quick steps."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    values: dict[str, Any] = {
        "model": {"config": CONFIG},
        "data": {"source": "text", "path": str(tmp_path / "text.txt"), "tokenizer": "bytes"},
        "folder": str(tmp_path / "out"),
        "steps": 8,
        "context": 96,
        "schedule": {"strategy": "grouped", "chunk": 48},
        "checkpoints": {"every": 0},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_every_command_that_reads_a_run_file_sets_its_keys(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["--set", "steps=2", "--set", "model.config.num_hidden_layers=1"]
    assert run(monkeypatch, "train", str(run_file), "--json", *one) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    config = json.loads((run_file.parent / "out" / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert run(monkeypatch, "verify", str(run_file), "--context", "32", "--json", *one) == 0
    assert json.loads(capsys.readouterr().out)["checked_parameters"] == 15
    assert run(monkeypatch, "data", str(run_file), "--set", "context=50") == 0
    assert "sequences of 50" in capsys.readouterr().out
    assert run(monkeypatch, "plan", str(run_file), "--machine", "h100", "--json", *one) == 0
    assert json.loads(capsys.readouterr().out)["run"]["steps"] == 2
    for command in (["plan", "--model", "Qwen3-8B", "--context", "8K"], ["verify", "Qwen3-8B"]):
        assert run(monkeypatch, *command, "--set", "steps=2") == 2
        assert "--set steps=2: needs a run file" in capsys.readouterr().err


def test_a_run_begins_from_another_and_resumes_by_its_own_command(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run_file.parent
    short = ["train", str(run_file), "--json", "--steps"]
    assert run(monkeypatch, *short, "2") == 0
    other = ["3", "--folder", str(root / "other")]
    assert run(monkeypatch, *short, *other, "--from", f"{root}/out/", "--with-states") == 0
    said = capsys.readouterr().err
    assert f"start: resumes from {root}/out/checkpoints/step-00000002, after step 2 of 3" in said
    assert run(monkeypatch, *short, *other) == 0
    assert "resuming after step 3 of 3" in capsys.readouterr().err
    assert run(monkeypatch, *short, "3", "--with-states") == 2
    assert "--with-states: needs a run to continue; name it with --from" in capsys.readouterr().err


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own; its output, errors too, is a pipe."""
    whole = [sys.executable, "-W", "ignore", "-m", *arguments]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **paths},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:
        yield process


@pytest.mark.exhaustive
def test_a_pipe_that_nobody_reads_any_more_ends_no_run(run_file: Path) -> None:
    """`farspan train run.yaml 2>&1 | head -1`, whose weights are loaded from a folder."""
    saved = run_file.parent / "saved"
    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    AutoModelForCausalLM.from_config(Qwen2Config(**fields)).save_pretrained(saved)
    given = ["--set", f"model={{path: {saved}}}"]
    with started("farspan", "train", str(run_file), *given) as process:
        assert process.stdout is not None
        assert "parameters on cpu" in process.stdout.readline()  # no bar of loading before it
        process.stdout.close()
        assert process.wait(240) == 0
    assert (run_file.parent / "out" / "model" / "model.safetensors").is_file()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_terminal_that_closes_has_torchrun_save(run_file: Path) -> None:
    """All processes are hung up, and what they say goes nowhere."""
    long = [*("--nproc-per-node=2", "-m", "farspan", "train", str(run_file)), "--steps", "100000"]
    run_file.write_text(run_file.read_text() + "parallel: {ulysses: 2, timeout: 60}\n")
    with started("torch.distributed.run", *long) as process:
        assert process.stdout is not None
        assert any("step 3/" in line for line in process.stdout)
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(240) != 0
    (saved,) = (run_file.parent / "out" / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) >= 3


def test_only_a_reader_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with cli.Lasting(writing, "w") as stream:
        assert [stream.write(b"twice"), stream.write(b"")] == [5, 0]
    with cli.Lasting("/dev/full", "w") as stream:  # a log file's disk may have room later
        assert stream.write(b"no") == 2
    with cli.Lasting("/dev/full", "r") as stream, pytest.raises(OSError, match="not open for"):
        stream.write(b"no")
    held = io.StringIO()
    assert cli.lasting(held) is held


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_config(Qwen2Config.from_pretrained(folder))


def test_help_of_the_group_says_what_each_command_says() -> None:
    for name, lazy in cli.COMMANDS.items():
        command = typer.main.get_command(getattr(import_module(lazy.module), lazy.app))
        assert command.name == name
        assert (command.help or "").splitlines()[0] == lazy.help


def test_version_and_unknown_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"farspan {VERSION}"
    assert run(monkeypatch, "trian") == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_what_training_could_not_write_is_one_line_and_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise WriteFailed("disk full")

    monkeypatch.setattr("farspan.cli.with_torch.train", fail)
    assert run(monkeypatch, "train", "--folder", str(tmp_path)) == 1
    assert capsys.readouterr().err.strip() == "farspan: disk full"


COMPLETING = "import sys; sys.argv = ['farspan']; from farspan.cli import main; main()"


@pytest.mark.parametrize(
    ("typed", "found"), [("farspan pl", "plan"), ("farspan plan --qlo", "--qlora")]
)
def test_a_shell_completes_commands_and_options(typed: str, found: str) -> None:
    """As typer's own script asks; a command's module is loaded for its options alone."""
    asked = {
        "_FARSPAN_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETING],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [found]
    assert done.stderr == ""
