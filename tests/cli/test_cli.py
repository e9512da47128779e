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
from farspan.durable import WriteFailed
from farspan.spec import VERSION
from farspan.train.config import ScheduleConfig
from farspan.train.step_runner import PlanComparison
from tests.cli.conftest import CONFIG, RESULT, Begun, Command, run

__all__ = ["run"]  # of other folders


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_verify_reports_json_and_passes(command: Command, folder: Path, dtype: str) -> None:
    shape = ["--context", "50", "--chunk", "16", "--batch", "2", "--documents", "3"]
    flags = ["--dtype", dtype, "--groups", "1,2", "--json"]
    found = command("verify", str(folder), *shape, *flags).json()
    assert found["passed"] is True
    assert found["checked_parameters"] == len(list(_model(folder).parameters()))
    assert {"loss_error", "max_relative_error", "worst"} <= found.keys()
    if dtype == "float64":
        assert found["max_relative_error"] <= 1e-12


def test_verify_fails_with_exit_code_one(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.engine.buffers.KVPrefix.add_gradient", lambda *_: None)
    said = command("verify", str(folder), "--context", "50", "--chunk", "16", code=1).out
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
    command: Command,
    arguments: tuple[str, ...],
    line: str,
    folder: Path,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    places = {"FOLDER": str(folder), "RUN": str(run_file)}
    code = int(arguments[0] == "plan")
    found = command(*(places.get(argument, argument) for argument in arguments), code=code)
    lines = found.out.splitlines()
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
    command: Command, arguments: list[str], message: str
) -> None:
    lines = command(*arguments, code=2).err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("farspan: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/other/model"),
            "2",
            "/other/model: Permission denied; fix",
        ),
        (MemoryError(), "1", "main memory: this process can get no more"),
        (
            ImportError("libgfortran.so.5: failed to map segment from shared object"),
            "1",
            "main memory: this process can get no more",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception, code: str, words: str
) -> None:
    def refuse() -> None:
        raise error

    with pytest.raises(SystemExit, match=code):
        cli.main(refuse)
    assert capsys.readouterr().err.startswith(f"farspan: {words}")


def test_train_from_a_run_file_to_a_model_that_loads(command: Command, tmp_path: Path) -> None:
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
    result = json.loads(command(*arguments).out.strip().splitlines()[-1])
    assert result["step"] == 3
    AutoModelForCausalLM.from_pretrained(out / "model")
    command(*arguments, "--steps", "3")  # nothing left to do


@pytest.mark.parametrize("name", ["auto", "oomb"])
def test_a_strategy_comes_whole(command: Command, name: str, trained: Begun) -> None:
    """The default run gives its strategy a chunk, which means nothing to another one."""
    command("train", "--strategy", name)
    command("train")
    (other, notes), (default, no_notes) = trained
    assert other.schedule == ScheduleConfig(strategy=name)
    assert notes == [f"schedule: {name} replaces grouped and drops its chunk: 2048"]
    assert replace(other, schedule=default.schedule) == default
    assert no_notes == []


def test_a_result_is_valid_json_whatever_the_loss(
    command: Command, trained: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del trained
    found = json.loads(command("train", "--json").out, parse_constant=pytest.fail)
    assert found["heldout_loss"] == "nan"
    assert found["comparison"] is None
    planned = replace(RESULT, heldout_loss=1.5, comparison=PlanComparison(5, 4, 2.0, None))
    monkeypatch.setattr("farspan.cli.with_torch.train", lambda *_, **__: planned)
    found = command("train", "--json").json()
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
    command: Command,
    schedule: dict[str, Any],
    arguments: list[str],
    stands_in: bool,
    tmp_path: Path,
) -> None:
    values = {"model": {"config": CONFIG}, "data": {"source": "stdlib"}, "schedule": schedule}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    said = command("verify", str(file), "--context", "64", "--json", *arguments)
    assert json.loads(said.out)["passed"]
    assert ("grouped instead of auto" in said.err) == stands_in


def test_verify_says_that_it_leaves_ranks_out(command: Command, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": {"config": CONFIG}, "data": {"source": "stdlib"}}
    values["parallel"] = {"ulysses": 2}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    said = command("verify", str(file), "--context", "64", "--json")
    assert json.loads(said.out)["passed"]
    assert "parallel: ignored: one process" in said.err


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
    command: Command, run_file: Path
) -> None:
    one = ["--set", "steps=2", "--set", "model.config.num_hidden_layers=1"]
    assert command("train", str(run_file), "--json", *one).json()["steps"] == 2
    config = json.loads((run_file.parent / "out" / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert (
        command("verify", str(run_file), "--context", "32", "--json", *one).json()[
            "checked_parameters"
        ]
        == 15
    )
    assert "sequences of 50" in command("data", str(run_file), "--set", "context=50").out
    assert (
        command("plan", str(run_file), "--machine", "h100", "--json", *one).json()["run"]["steps"]
        == 2
    )
    for words in (["plan", "--model", "Qwen3-8B", "--context", "8K"], ["verify", "Qwen3-8B"]):
        assert "--set steps=2: needs a run file" in command(*words, "--set", "steps=2", code=2).err


def test_a_run_begins_from_another_and_resumes_by_its_own_command(
    command: Command, run_file: Path
) -> None:
    root = run_file.parent
    short = ["train", str(run_file), "--json", "--steps"]
    command(*short, "2")
    other = ["3", "--folder", str(root / "other")]
    said = command(*short, *other, "--from", f"{root}/out/", "--with-states").err
    assert f"start: resumes from {root}/out/checkpoints/step-00000002, after step 2 of 3" in said
    assert "resuming after step 3 of 3" in command(*short, *other).err
    assert (
        "--with-states: needs a run to continue; name it with --from"
        in command(*short, "3", "--with-states", code=2).err
    )


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
        own = typer.main.get_command(getattr(import_module(lazy.module), lazy.app))
        assert own.name == name
        assert (own.help or "").splitlines()[0] == lazy.help


def test_version_and_unknown_command(command: Command) -> None:
    assert command("--version").out.strip() == f"farspan {VERSION}"
    assert "Did you mean 'train'" in command("trian", code=2).err


def test_what_training_could_not_write_is_one_line_and_exit_code_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise WriteFailed("disk full")

    monkeypatch.setattr("farspan.cli.with_torch.train", fail)
    said = command("train", "--folder", str(tmp_path), code=1)
    assert said.err.strip() == "farspan: disk full"


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
