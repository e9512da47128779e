"""Run folders and a run file that an earlier version wrote are read, and the runs go on to the same
bits. `write_set` wrote the set, all but run.yaml."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from farspan.data.config import DataConfig, SourceKind
from farspan.program.layout import Parallel
from farspan.spec import MEAN, Sparse
from farspan.train.config import (
    CheckpointConfig,
    Decay,
    DType,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    load_run,
)
from farspan.train.trainer import train
from farspan.train.yaml_config import RENAMED, flatten, to_mapping
from tests.numerics import assert_exact
from tests.ranks import run_ranks
from tests.train.tiny import MODEL, Quiet, write_documents

FIXTURES = Path(__file__).parent / "fixtures"
STOPPED, STEPS = 2, 4
SMALL = MODEL | {"hidden_size": 4, "intermediate_size": 8}


def a_run(folder: str) -> RunConfig:
    """Paths are relative: the text's belongs to what a checkpoint must find again."""
    return RunConfig(
        model=ModelConfig(config=SMALL, dtype=DType.FLOAT64),
        data=DataConfig(source=SourceKind.TEXT, path="text", held_out=0.2, cache="cache"),
        folder=folder,
        steps=STEPS,
        context=48,
        batch=2,
        schedule=ScheduleConfig(strategy="grouped", chunk=16, groups=1),
        optimizer=OptimizerConfig(lr=1e-2, warmup=1, decay=Decay.CONSTANT),
        evaluation=EvaluationConfig(every=2, sequences=2),
        checkpoints=CheckpointConfig(every=2, keep=1),
    )


def train_quietly(run: RunConfig) -> None:
    assert train(run, reporter=Quiet()).step == run.steps


def on_two_ranks(folder: str) -> RunConfig:
    return replace(a_run(folder), batch=1, parallel=Parallel(data=2))


def write_set(root: Path) -> None:
    """In a folder with a `text`: half of the run, by one process and by two ranks, and the weights
    that all of it comes to."""
    train_quietly(replace(a_run("alone"), steps=STOPPED))
    run_ranks(2, train_quietly, replace(on_two_ranks("ranks"), steps=STOPPED))
    train_quietly(a_run("whole"))
    weights = load_file(Path("whole/model/model.safetensors"))
    for name in ("alone", "ranks"):
        shutil.rmtree(root / name, ignore_errors=True)
        shutil.copytree(name, root / name)
        (root / name / ".lock").unlink(missing_ok=True)
        shutil.rmtree(root / name / "model")
    save_file(weights, root / "weights.safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FIXTURES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    write_documents(Path("text"))
    return tmp_path


@pytest.mark.parametrize("name", ["alone", "ranks"])
def test_an_earlier_run_goes_on(folder: Path, name: str) -> None:
    """A processor with other instructions rounds otherwise, hence the limit; on one that made the
    set the bits are the same."""
    quiet = Quiet()
    assert train(a_run(name), reporter=quiet).step == STEPS
    assert f"resuming after step {STOPPED} of {STEPS}" in quiet.notes
    expected = load_file(folder / "weights.safetensors")
    found = load_file(folder / name / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert_exact(tensor, expected[key])


@pytest.mark.exhaustive
def test_ranks_go_on_with_an_earlier_run(folder: Path) -> None:
    for name in ("alone", "ranks"):
        run_ranks(2, train_quietly, on_two_ranks(name))
        expected = load_file(folder / "weights.safetensors")
        for key, tensor in load_file(folder / name / "model" / "model.safetensors").items():
            assert_exact(tensor, expected[key])


def test_an_earlier_run_file_says_the_same(folder: Path) -> None:
    written = json.loads((folder / "run.json").read_text())
    for section, names in RENAMED.items():
        part = written[section] if section else written
        for old in names.keys() & part.keys():
            part[names[old]] = part.pop(old)
    # Sinks were pages, pages of queries those of keys, and their mean keys were compared.
    sparse = written["sparse"]
    sparse |= {"sinks": sparse.pop("sink_pages") * sparse["page"], "query_page": sparse["page"]}
    sparse["selector"] = MEAN
    found, written = flatten(to_mapping(load_run(folder / "run.yaml"))), flatten(written)
    assert {key: found[key] for key in written} == written
    # What came later is as if it were not there; the bound is of states on a drive alone, and the
    # least improvement is of early stopping.
    assert found.pop("sparse.index_dim") == Sparse().index_dim  # of `index` alone
    assert found.pop("optimizer.disk_seconds") == OptimizerConfig().disk_seconds
    assert (found.pop("evaluation.min_delta"), found.pop("checkpoints.best")) == (0.0, False)
    assert not found.pop("evaluation.on_start")
    assert (found.pop("kernels.remake"), found.pop("kernels.graphs")) == (True, False)
    assert {key: found[key] for key in found.keys() - written.keys()} == dict.fromkeys(
        found.keys() - written.keys()
    )
