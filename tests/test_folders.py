"""Folders of others: no command writes outside of what the user named, or through a link.

A process runs the commands one after the other under an audit hook, which sees every file that
Python opens, makes, renames or removes, in folders where links lie in wait under each name that
farspan writes.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.cli import COMMANDS, LazyCommand, app
from farspan.cli.evaluate import subject_of
from farspan.data.tokenizers import load_tokenizer
from farspan.durable import PARTIAL, shown, write_output, write_whole
from farspan.hf.load import load_model
from farspan.hf.merge import ADAPTER_CONFIG, ADAPTER_TENSORS, merge
from farspan.report.run import read_run
from farspan.spec import UnsupportedError
from farspan.train.config import (
    HubConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    load_run,
)
from farspan.train.hub import push
from farspan.train.observer import Reporter
from farspan.train.origin import with_base
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping, write_mapping
from tests.train.tiny import Quiet, fit, tiny_run

WATCHED = """
import json, os, sys, types
import farspan, huggingface_hub
allowed, record = json.loads(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OWN = os.path.join(os.path.dirname(farspan.__file__), "")

class Hub:
    def __init__(self, **_): pass
    def repo_exists(self, repo): return False
    def create_repo(self, *_, **__): pass
    def create_commit(self, *_, **__): return types.SimpleNamespace(commit_url="there")

def real(path):
    path = os.fsdecode(path)
    return os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))

def note(what, path, link=False):
    if isinstance(path, int) or path is None or real(path).startswith(("/dev/", "/proc/")):
        return
    path = os.fsdecode(path)
    through = link and os.path.islink(path)
    inside = any(real(path) == one or real(path).startswith(one + "/") for one in allowed)
    if through or not inside:
        record.write(json.dumps([what, real(path), through]) + "\\n")
    counts[what] = counts.get(what, 0) + 1

def by_farspan():
    frame = sys._getframe(2)
    while frame and (frame.f_code.co_filename[:1] == "<" or "python3" in frame.f_code.co_filename
                     and "site-packages" not in frame.f_code.co_filename):
        frame = frame.f_back  # the standard library's
    return frame and frame.f_code.co_filename.startswith(OWN)

def hook(event, args):
    if event == "open" and args[2] is not None and args[2] & WRITES:
        follows = not args[2] & (os.O_NOFOLLOW | os.O_EXCL)
        note("open", args[0], link=follows)
        if follows and args[2] & os.O_CREAT and not isinstance(args[0], int) and by_farspan():
            place = real(args[0])
            if os.path.dirname(place) not in made and place[:5] not in ("/dev/", "/proc"):
                record.write(json.dumps(["would follow", place]) + "\\n")
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
        if event == "os.mkdir" and args[-1] in (-1, None) and not os.path.lexists(args[0]):
            place = real(args[0])  # a hidden one, until it is renamed, is nobody else's
            made.update([place] * os.path.basename(place).startswith("."))
        if event in ("os.remove", "os.rmdir", "os.mkdir") and args[-1] not in (-1, None):
            return  # relative to a folder that is held open
        note(event, args[0], link=event in ("os.truncate", "os.chmod"))
    elif event in ("os.rename", "os.link", "os.symlink"):
        note(event, args[1])

counts, made = {}, set()
huggingface_hub.HfApi = Hub
sys.addaudithook(hook)
from farspan.cli import app
from farspan.engine import calibrate, microbench
calibrate.QUICK = microbench.GLANCE  # where a file is written, and not what is in it
for command in json.loads(sys.stdin.read()):
    try:
        app(command, standalone_mode=False)
        code = 0
    except BaseException as error:
        code = getattr(error, "exit_code", getattr(error, "code", repr(error)))
    record.write(json.dumps(["ran", command, code]) + "\\n")
record.write(json.dumps(["counts", counts]) + "\\n")
"""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user that nobody may touch."""
    path = tmp_path / "victim" / "precious.txt"
    path.parent.mkdir()
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"
    assert os.listdir(path.parent) == [path.name]


def every_command(commands: Mapping[str, LazyCommand] = COMMANDS) -> Iterator[tuple[str, ...]]:
    """The words of each command of the command line."""
    for name, lazy in commands.items():
        within = getattr(import_module(lazy.module), "COMMANDS", {}) if lazy.app == "app" else {}
        if name in ("plan", "train") or not within:
            yield (name,)
        else:
            yield from ((name, *words) for words in every_command(within))


def calls_of(root: Path, run: RunConfig, adapted: RunConfig) -> list[list[str]]:
    """Each command, and what it writes in `root / 'out'`."""
    out, text, model = root / "out", str(root / "text"), f"{run.folder}/model"
    plan = ["plan", "--model", "Qwen3-8B", "--machine", "h100", "--context", "32K"]
    plan += ["--strategy", "oomb"]
    trace = ["--model", model, "--context", "48", "--output", str(out / "trace.txt")]
    index = ["--text", text, "--context", "48", "--dim", "4", "--output", str(out / "index")]
    placed = ["--output", str(out / "placed.json"), "--snapshot", str(out / "snapshot.pickle")]
    begun = ["--folder", str(root / "begun"), "--from", run.folder]
    return [
        ["train", str(root / "run.yaml"), "--trace", str(out / "spans.json")],
        ["report", run.folder],
        ["report", run.folder, "--output", str(out / "page.html")],
        ["data", str(root / "run.yaml")],
        ["evaluate", run.folder, "--text", text, "--needles", "0", "--picture", f"{out}/loss.svg"],
        [*plan, "--html", str(out / "plan.html"), "--write", str(out / "run.yaml")],
        ["train", str(root / "adapted.yaml")],
        ["merge", adapted.folder, "--output", str(out / "merged")],
        ["train", str(root / "run.yaml"), *begun],
        ["init", model, text, "--machine", "h100", "--output", str(out / "init.yaml")],
        ["verify", model, "--context", "48"],
        ["index", model, *index],
        ["push", run.folder, "--to", "someone/model"],
        ["profile", model],
        ["calibrate", "--quick", "--device", "cpu", "--output", str(out / "machine.json")],
        ["memory", "trace", *trace],
        ["memory", "place", str(out / "trace.txt"), "--method", "flat", *placed],
        ["memory", "compare", str(out / "trace.txt"), "--output", str(out / "compare.html")],
    ]


@pytest.mark.slow
def test_no_command_writes_elsewhere_or_through_a_link(tmp_path: Path, victim: Path) -> None:
    outputs, caches = tmp_path / "out", tmp_path / "cache"
    outputs.mkdir()
    run = replace(tiny_run(tmp_path), steps=3)
    lora = LoraConfig(rank=2, targets="linear")
    adapted = replace(
        tiny_run(tmp_path, folder=str(tmp_path / "adapted")),
        steps=3,
        model=ModelConfig(path=str(Path(run.folder) / "model"), lora=lora),
    )
    for one in (run, adapted):
        (tmp_path / f"{Path(one.folder).name}.yaml").write_text(write_mapping(to_mapping(one)))
    commands = calls_of(tmp_path, run, adapted)
    assert {tuple(c[: 1 + (c[0] == "memory")]) for c in commands} == set(every_command())
    for word in {word for command in commands for word in command if word.startswith(str(outputs))}:
        place = Path(word)
        target = victim if place.suffix else victim.parent
        place.with_name(f"{PARTIAL}{place.name}").symlink_to(target)
    record = tmp_path / "record.jsonl"
    allowed = [str(tmp_path / name) for name in ("run", "adapted", "begun", "out", "cache", "home")]
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "home" / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "home" / "config"),
        "TMPDIR": str(caches),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "none",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    caches.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(allowed), str(record)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env=environment,
        cwd=outputs,
        timeout=1800,
    )
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    ran = [line for line in lines if line[0] == "ran"]
    assert [line[1:] for line in ran] == [[c, 0] for c in commands], (ran, done.stderr[-3000:])
    strayed = [line for line in lines if line[0] not in ("ran", "counts")]
    assert not strayed, strayed
    counts = lines[-1][1]
    assert counts["open"] > 30, counts  # the hook was there
    assert counts["os.rename"] > 10, counts


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "checkpoints", "model", ".lock"])
def test_a_link_out_of_a_run_folder_is_refused(tmp_path: Path, victim: Path, name: str) -> None:
    run = tiny_run(tmp_path)
    folder = Path(run.folder)
    folder.mkdir()
    (folder / name).symlink_to(victim.parent if "." not in name else victim)
    with pytest.raises(UnsupportedError, match=rf"{name} is a link to .*remove the link"):
        fit(run)
    assert not (folder / "model").is_dir() or name == "model"


def test_an_output_takes_the_place_of_a_link(tmp_path: Path, victim: Path) -> None:
    for name in ("page.html", f"{PARTIAL}page.html"):
        (tmp_path / name).symlink_to(victim)
    write_output(tmp_path / "page.html", "page", "html")
    assert (tmp_path / "page.html").read_text() == "page"
    assert not (tmp_path / "page.html").is_symlink()
    write_whole(tmp_path / "page.html", b"again")
    assert sorted(os.listdir(tmp_path)) == ["page.html", "victim"]


class _Renames(Quiet):
    """Renames the folder of the run after its second step, and begins another under its name."""

    def __init__(self, run: RunConfig, other: RunConfig) -> None:
        super().__init__()
        self.run, self.other = run, other

    def end(self, values: Any) -> None:
        Reporter.end(self, values)
        if values["step"] == 2:
            folder = Path(self.run.folder)
            folder.rename(folder.with_name("renamed"))
            train(self.other, reporter=Quiet())


def test_a_run_goes_on_in_the_folder_that_it_locked(tmp_path: Path) -> None:
    alone = tiny_run(tmp_path, folder=str(tmp_path / "alone"))
    train(alone, reporter=Quiet())
    run = tiny_run(tmp_path)
    other = replace(tiny_run(tmp_path), seed=7)
    reporter = _Renames(run, other)
    result = train(run, reporter=reporter)
    assert result.folder == tmp_path / "renamed"
    assert not [note for note in reporter.notes if "/proc/" in note]
    for folder, like in ((result.folder, alone.folder), (Path(run.folder), None)):
        names = {p.name for p in Path(alone.folder).iterdir()}
        assert {p.name for p in folder.iterdir()} == names
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3, 4, 5]
        if like is not None:
            one, two = (Path(f) / "model" / "model.safetensors" for f in (folder, like))
            assert one.read_bytes() == two.read_bytes()
    assert shown("see /proc/self/fd/99999/x") == "see /proc/self/fd/99999/x"


def test_a_run_folder_runs_no_code_of_its_own(tmp_path: Path) -> None:
    """Only the user says so, and not the folder."""
    run = tiny_run(tmp_path)
    folder, flag = Path(run.folder), tmp_path / "ran"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "code.py").write_text(f"open({str(flag)!r}, 'w')")
    about = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "model" / "config.json").write_text(json.dumps(about))
    values = to_mapping(replace(run, model=ModelConfig(path="theirs", trust_remote_code=True)))
    (folder / "config.yaml").write_text(write_mapping(values))
    with pytest.raises(UnsupportedError, match="--trust-remote-code of farspan evaluate"):
        subject_of(str(folder), None, None)
    assert not flag.exists()


COMMANDS_OF_RUN_FILES = [
    *(["data"], ["verify"], ["train"], ["plan"]),
    ["index", "--text", "a.txt", "--output", "index"],
]


@pytest.mark.parametrize("command", COMMANDS_OF_RUN_FILES, ids=lambda words: words[0])
def test_the_file_of_a_run_folder_trusts_no_code(tmp_path: Path, command: list[str]) -> None:
    """It is the user's to say so, in the command or in a run file of their own."""
    run = replace(tiny_run(tmp_path), model=ModelConfig(path="theirs", trust_remote_code=True))
    folder = Path(run.folder)
    folder.mkdir()
    for path in (folder / "config.yaml", tmp_path / "run.yaml"):
        path.write_text(write_mapping(to_mapping(run)))
    words = [command[0], str(folder / "config.yaml"), *command[1:]]
    with pytest.raises(UnsupportedError, match=r"give --set model\.trust_remote_code=true"):
        app(words, standalone_mode=False)
    trusted = load_run(folder / "config.yaml", ["model.trust_remote_code=true"])
    assert trusted == load_run(tmp_path / "run.yaml") == run


def test_the_file_of_a_run_folder_names_no_cache(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    folder = Path(run.folder)
    folder.mkdir()
    (folder / "config.yaml").write_text(write_mapping(to_mapping(run)))
    with pytest.raises(UnsupportedError, match=r"data\.cache: .* give --set data\.cache="):
        app(["data", str(folder / "config.yaml")], standalone_mode=False)
    given = ["--set", f"data.cache={tmp_path / 'own'}"]
    app(["data", str(folder / "config.yaml"), *given], standalone_mode=False)
    assert (tmp_path / "own").is_dir()


def test_links_deep_in_a_run_folder_are_refused(tmp_path: Path, victim: Path) -> None:
    """By whoever reads or sends what is there."""
    run = tiny_run(tmp_path, steps=3)
    fit(run)
    folder = Path(run.folder)
    for name in ("model/notes.txt", "checkpoints/step-00000002/more", "report.html"):
        (folder / name).symlink_to(victim)
        for work in (
            lambda: push(folder, HubConfig("me/mine")),
            lambda: read_run(folder),
            lambda: subject_of(str(folder), None, None),
            lambda: fit(run),
        ):
            with pytest.raises(UnsupportedError, match=f"{name} is a link to"):
                work()
        (folder / name).unlink()
    (folder / "plan.json").symlink_to("plan.json")  # to itself
    with pytest.raises(UnsupportedError, match=r"plan\.json is damaged"):
        read_run(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_no_one_waits_for_a_pipe(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, steps=2, optimizer=OptimizerConfig(warmup=1))
    fit(run)
    folder = Path(run.folder)
    model = folder / "model"
    (model / name).unlink()
    os.mkfifo(model / name)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "none")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    os.mkfifo(adapters / ADAPTER_TENSORS)
    about = {"base_model_name_or_path": str(model), "peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (adapters / ADAPTER_CONFIG).write_text(json.dumps(about))
    plain: dict[str, Callable[[], object]] = {
        "model.safetensors": lambda: load_model(path=str(model), dtype=torch.float32),
        "tokenizer.json": lambda: load_tokenizer(str(model)),
    }
    signal.alarm(20)  # ends a test that waits
    for work in (
        plain[name],
        lambda: subject_of(str(folder), None, None),
        lambda: push(folder, HubConfig("me/mine")),
        lambda: read_run(folder),
        lambda: fit(run),
        lambda: merge(adapters, tmp_path / "merged"),
        lambda: with_base(ModelConfig(path=str(adapters))),
    ):
        with pytest.raises(UnsupportedError, match=r"neither a file nor a folder"):
            work()
    signal.alarm(0)


def test_a_report_waits_for_no_pipe_and_follows_no_alias(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, steps=3)
    fit(run)
    folder = Path(run.folder)
    os.mkfifo(folder / "hub.json")
    with pytest.raises(UnsupportedError, match=r"hub\.json: cannot be read: neither a file nor"):
        read_run(folder)
    (folder / "hub.json").unlink()
    (folder / "config.yaml").write_text("a: &a {b: *a}")
    with pytest.raises(UnsupportedError, match=r"config\.yaml is damaged: it has aliases"):
        read_run(folder)
