"""Runs whose data are read a window at a time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farspan.data.config import DataConfig, LossConfig, RecordFormat, SourceKind
from farspan.program.layout import Parallel
from farspan.spec import LossKind, Reference, UnsupportedError
from farspan.train.config import ModelConfig, RunConfig
from tests.ranks import run_ranks
from tests.train.test_ranks import a_run, fit_all, same_run
from tests.train.tiny import MODEL, Quiet, Stopped, Stopping, fit, metrics, tiny_run


def streamed(root: Path, **changes: Any) -> RunConfig:
    """Of about five windows, and of ten sequences or so."""
    run = tiny_run(root, **changes)
    return replace(run, data=replace(run.data, streaming=True, window="70B"))


def test_a_run_says_what_it_streams(tmp_path: Path) -> None:
    reporter = Quiet()
    fit(streamed(tmp_path), reporter=reporter)
    words = "\n".join(reporter.notes)
    assert f"streamed: {tmp_path}/text in windows of 70 B; the first has" in words
    assert "in the first window; " in words
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["sequences_per_epoch"] is about["tokens_per_epoch"] is None
    read = json.loads((tmp_path / "run" / "windows.json").read_text())
    assert len(read["0"]) > 3


def test_data_that_changed_since_a_checkpoint_are_named(tmp_path: Path) -> None:
    run = streamed(tmp_path)
    with pytest.raises(Stopped):
        fit(run, reporter=Stopping(5))
    read = json.loads((tmp_path / "run" / "windows.json").read_text())["0"]
    assert len(read) > 2
    text = tmp_path / "text" / "05.txt"  # of the second window
    text.write_text(text.read_text().replace("document", "Document"))
    with pytest.raises(UnsupportedError, match=r"the documents of window 1 have changed"):
        fit(run)


@pytest.mark.exhaustive
def test_ranks_read_the_sequences_of_one_process(tmp_path: Path) -> None:
    def of(name: str, **changes: Any) -> RunConfig:
        run = a_run(tmp_path, name, steps=3, batch=1, **changes)
        data = replace(run.data, streaming=True, window="70B", cache=str(tmp_path / f"of-{name}"))
        return replace(run, data=data)

    alone = of("alone", accumulate=4)
    fit_all([alone])
    run = of("replicas", accumulate=2, parallel=Parallel(data=2))
    run_ranks(2, fit_all, [run])
    same_run(run, alone)
    facts = [next((tmp_path / f"of-{n}").rglob("windows.json")) for n in ("alone", "replicas")]
    one, two = (json.loads(path.read_text())["windows"] for path in facts)
    known = min(len(one), len(two))
    assert one[:known] == two[:known]
    assert known > 3


def test_an_id_beyond_the_vocabulary_is_named_before_its_step(tmp_path: Path) -> None:
    run = streamed(tmp_path, model=ModelConfig(config=MODEL | {"vocab_size": 257}))
    path = tmp_path / "ids.jsonl"
    rows = [{"input_ids": [n % 200] * 40} for n in range(12)]
    rows[7]["input_ids"][3] = 257
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = replace(
        run.data,
        source=SourceKind.AUTO,
        path=str(path),
        window="640B",
        held_out=0.0,
        format=RecordFormat.TOKENS,
    )
    words = rf"input_ids of {path} go up to 257, but the model embeds only 257.*\({path}:8\)"
    with pytest.raises(UnsupportedError, match=words):
        fit(replace(run, data=data))
    assert {line["step"] for line in metrics(run)} >= {1, 2}


def test_stored_references_refuse_a_stream() -> None:
    data = DataConfig(path="pairs.jsonl", format=RecordFormat.PREFERENCE, streaming=True)
    model = ModelConfig(config=MODEL)
    with pytest.raises(UnsupportedError, match=r"loss.reference: stored .* leave data.streaming"):
        RunConfig(model=model, data=data, loss=LossConfig(LossKind.DPO))
    frozen = LossConfig(LossKind.DPO, reference=Reference.FROZEN)
    for loss in (frozen, LossConfig(LossKind.ORPO)):
        assert RunConfig(model=model, data=data, loss=loss).data.streaming
