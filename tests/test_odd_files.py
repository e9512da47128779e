"""Folders of others, whose files say odd things: whatever stands in place of a value, commands end
with a named error of one line, or go on."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml

from farspan.checkpoint.format import LIST
from farspan.cli.evaluate import subject_of
from farspan.durable import parse_object
from farspan.hf.load import add_adapters, load_model, save_model
from farspan.hf.merge import ADAPTER_CONFIG, SOURCE, merge
from farspan.report.run import read_run, run_page
from farspan.spec import UnsupportedError
from farspan.train.config import (
    HubConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StartConfig,
)
from farspan.train.hub import push
from farspan.train.origin import copy_adapters, with_base
from farspan.train.setup import show_data
from tests.checkpoint.saved import relist
from tests.grids import WHOLE, examples
from tests.train.test_hub import StandIn
from tests.train.tiny import fit, tiny_run

Place = tuple[str | int, ...]  # of a value, from the outermost on
Command = Callable[[Path], object]


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


ODD = [None, -1.5, "a\0b", [1], {}, float("nan"), 10**400, nested(900)]
# What a run of real components writes, in short.
STEP = {
    "step": 2,
    "grid": {"layers": 2, "chunks": 1},
    "memory": {
        "tier": "device",
        "planned": {"peak": 10, "parts": {"weights": 10}},
        "measured": {"peak": 11, "parts": {"weights": 11}},
        "host": {"weights": 3},
    },
    "seconds": {"total": 2.0, "parts": {"products": 1.5}},
    "planned": {"total": 1.0, "parts": {"products": 1.0}, "attention": 0.1},
}
OTHERS = {"step.json": STEP, "plan.json": {"reason": "it fits"}, "comparison.json": {"a": 1.0}}


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Of a value, and of each in it; of a list the first."""
    yield at
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value[:1]) if isinstance(value, list) else items:
        yield from places(inner, (*at, key))


def with_odd(value: Any, at: Place, odd: Any) -> Any:
    if not at:
        return odd
    copy = value.copy()
    copy[at[0]] = with_odd(value[at[0]], at[1:], odd)
    return copy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("odd")
    run = tiny_run(root, steps=2, optimizer=OptimizerConfig(lr=1e-2, warmup=1))
    fit(run)
    for name, values in OTHERS.items():
        (Path(run.folder) / name).write_text(json.dumps(values))
    return run


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", StandIn)


def sound(command: Command, folder: Path, what: object) -> None:
    """It ends as it should, or with an error that names a file of the folder on one line."""
    try:
        command(folder)
    except UnsupportedError as error:
        text = str(error)
        assert "\n" not in text, what
        assert str(folder) in text, (what, text)
        assert len(text) < 1000, (what, len(text))
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error


def tried(
    folder: Path, work: Path, name: str, before: Any, write: Callable[[Path, Any], object],
    *commands: Command, depth: int = 0,
) -> None:  # fmt: skip
    """Each value of a file replaced by each odd one and read by one command in turn; with a `depth`
    those down to there, by one odd value in turn. By default outer ones meet two in turn and inner
    ones one; where examples are not cut, they meet each, and the outer ones are read by all
    commands."""
    text, cut = (folder / name).read_text(), examples(WHOLE) < WHOLE
    for number, at in enumerate(places(before)):
        count = len(ODD) if not (depth or cut) else 1 if depth or len(at) > 1 else 2
        odds = [ODD[(number + n) % len(ODD)] for n in range(count)]
        for turn, odd in enumerate(odds if not depth or len(at) <= depth else ()):
            one = (commands[(number + turn) % len(commands)],)
            for command in one if cut or len(at) > 1 else commands:
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(folder, work, copy_function=os.link)
                (work / "model" / "README.md").unlink(missing_ok=True)  # made by push
                (work / name).unlink()
                (work / name).write_text(text)
                write(work / name, with_odd(before, at, odd))
                sound(command, work, (name, at, repr(odd)[:20]))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def report(folder: Path) -> str:
    return run_page([read_run(folder)])


def evaluate(folder: Path) -> object:
    return subject_of(str(folder), None, None)


def upload(folder: Path) -> str:
    return push(folder, HubConfig("someone/model"))


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("about.json", (report, evaluate, upload)),
        ("history.json", (report,)),
        ("step.json", (report,)),
        ("plan.json", (report,)),
        ("comparison.json", (report,)),
        (f"model/{SOURCE}", (upload, evaluate)),
    ],
)
def test_files_of_a_run_that_say_odd_things(
    made: RunConfig, tmp_path: Path, name: str, commands: tuple[Command, ...]
) -> None:
    folder = Path(made.folder)
    before = json.loads((folder / name).read_text())
    tried(folder, tmp_path / "run", name, before, write_json, *commands)


def test_what_nests_deeply_is_named() -> None:
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_object(json.dumps({"a": nested(900)}).encode())


def test_metrics_that_say_odd_things(made: RunConfig, tmp_path: Path) -> None:
    folder = Path(made.folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = {tuple(sorted(line)): number for number, line in enumerate(lines)}
    for number in kinds.values():

        def write(path: Path, value: Any, number: int = number) -> None:
            rows = [*lines[:number], value, *lines[number + 1 :]]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

        tried(folder, tmp_path / "run", "metrics.jsonl", lines[number], write, report, upload)


def test_a_run_resumes_or_names_what_is_odd(made: RunConfig, tmp_path: Path) -> None:
    folder, work = Path(made.folder), tmp_path / "run"

    def resume(folder: Path) -> object:
        return fit(replace(made, folder=str(folder)))

    for name in ("about.json", "history.json", f"model/{SOURCE}"):
        before = json.loads((folder / name).read_text())
        tried(folder, work, name, before, write_json, resume, depth=2)


def test_run_files_that_say_odd_things(made: RunConfig, tmp_path: Path) -> None:
    folder, work = Path(made.folder), tmp_path / "run"
    before = yaml.safe_load((folder / "config.yaml").read_text())

    def write(path: Path, value: Any) -> None:
        path.write_text(json.dumps(value))  # which YAML is, too

    def read(folder: Path) -> object:
        return list(show_data(replace(made, folder=str(folder)), 0, False))

    tried(folder, work, "config.yaml", before, write, evaluate, report, depth=1)
    outer = {name: before[name] for name in ("data", "start", "folder")}
    tried(folder, work, "config.yaml", outer, write, read, depth=2)


def test_checkpoints_that_say_odd_things(made: RunConfig, tmp_path: Path) -> None:
    """Whoever wrote them: their own sums are right."""
    folder, work, begun = Path(made.folder), tmp_path / "run", tmp_path / "begun"
    (last,) = list((folder / "checkpoints").iterdir())[-1:]
    name = f"checkpoints/{last.name}/{LIST}"
    listed = json.loads((last / LIST).read_text())
    del listed["xxh3"]
    few = dict(list(listed["tensors"].items())[:1])

    def write(path: Path, value: Any) -> None:
        whole = value if isinstance(value, dict) else {}
        tensors = whole.get("tensors")
        both = {**listed["tensors"], **tensors} if isinstance(tensors, dict) else tensors

        def change(found: dict[str, Any]) -> None:
            found.clear()
            found.update(whole, tensors=both)

        relist(path.parent, change)

    def start(folder: Path) -> object:
        shutil.rmtree(begun, ignore_errors=True)
        run = replace(made, folder=str(begun), steps=1, optimizer=OptimizerConfig(warmup=0))
        return fit(replace(run, start=StartConfig(str(folder))))

    small = {**listed, "tensors": few}
    tried(folder, work, name, small, write, start, depth=2)
    boxes = few.popitem()
    within = {**listed, "tensors": {boxes[0]: boxes[1]}}
    for odd in ODD:
        for field in ("offset", "shape", "file", "start", "xxh3"):
            at = ("tensors", boxes[0], "boxes", 0, field)
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(folder, work)
            write(work / name, with_odd(within, at, odd))
            with pytest.raises(UnsupportedError, match=LIST):
                start(work)


def test_adapters_that_say_odd_things(made: RunConfig, tmp_path: Path) -> None:
    folder, work, out = tmp_path / "adapters", tmp_path / "work", tmp_path / "merged"
    model = load_model(path=f"{made.folder}/model", dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4.0, targets="linear")
    save_model(model, folder)
    write_json(folder / SOURCE, {"overrides": {}, "files": {}})
    lora = LoraConfig(rank=2, alpha=4.0, targets="linear")
    asked = replace(made, model=ModelConfig(path=f"{made.folder}/model", lora=lora))

    def join(folder: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)
        merge(folder, out)

    for name in (ADAPTER_CONFIG, SOURCE):
        before = json.loads((folder / name).read_text())
        commands: tuple[Command, ...] = (
            lambda place: with_base(ModelConfig(path=str(place))),
            lambda place: copy_adapters(place, model, asked),
        )
        tried(folder, work, name, before, write_json, *commands)
        tried(folder, work, name, before, write_json, join, depth=2)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    for change in ({"r": None}, {"r": "2"}, {"lora_alpha": "4"}, {"lora_alpha": None}):
        write_json(work / ADAPTER_CONFIG, config | change)
        with pytest.raises(UnsupportedError, match=rf"{ADAPTER_CONFIG}: {next(iter(change))}: exp"):
            copy_adapters(work, model, asked)
