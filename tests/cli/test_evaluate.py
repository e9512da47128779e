"""`farspan evaluate` against plain passes over whole documents."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from farspan.cli import app
from farspan.cli.evaluate import ANSWERS, NEEDLE, PLACES, QUESTION, Needle
from farspan.hf.load import load_model
from farspan.sparse.index import principal_index
from farspan.spec import UnsupportedError
from farspan.train.config import (
    DType,
    LoraConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    SparseConfig,
)
from farspan.train.trainer import train
from tests.ranks import RankError, run_ranks
from tests.train.test_ranks import WIDE
from tests.train.tiny import MODEL, Quiet, tiny_run

TEXTS = {"a": "to be or not " * 9, "b": "short", "c": "whether it is nobler " * 20, "d": "x"}
CONTEXT = 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of bytes in float64, and texts, one longer than the context."""
    config = MODEL | {"max_position_embeddings": 256}
    load_model(config=config, dtype=torch.float64, seed=3).save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    return tmp_path


def evaluated(folder: Path, model: Path, *more: str) -> dict[str, Any]:
    given = ["--text", str(folder / "text"), "--context", str(CONTEXT), "--tokenizer", "bytes"]
    result = CliRunner().invoke(app, ["evaluate", str(model), *given, "--json", *more])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def ids_of(text: str, end: bool = True) -> list[int]:
    return [*text.encode(), *([256] * end)]


def test_losses_are_those_of_plain_passes(folder: Path) -> None:
    found = evaluated(folder, folder / "model", "--needles", "0", "--strategy", "oomb")
    model = load_model(path=str(folder / "model"), dtype=torch.float64)
    losses = []
    for name, text in TEXTS.items():
        ids = torch.tensor(ids_of(text)[:CONTEXT])
        logits = model(input_ids=ids[None]).logits[0, :-1]
        losses.append(cross_entropy(logits, ids[1:], reduction="none").detach().numpy())
        (read,) = (d for d in found["documents"] if Path(d["name"]).stem == name)
        assert read["tokens"] == len(ids) - 1
        assert read["loss"] == pytest.approx(losses[-1].mean(), rel=1e-12)
        assert read["perplexity"] == pytest.approx(math.exp(losses[-1].mean()), rel=1e-12)
    every = np.concatenate(losses)
    assert found["tokens"] == len(every)
    assert found["loss"] == pytest.approx(every.mean(), rel=1e-12)
    assert (found["cut"], found["dtype"]) == (1, "float64")
    spans = [(1, 64), (64, 128), (128, 200)]  # tokens before
    assert [(r["begin"], r["end"]) for r in found["positions"]] == spans
    for part, (begin, end) in zip(found["positions"], spans, strict=True):
        own = np.concatenate([row[begin - 1 : end - 1] for row in losses])
        assert (part["tokens"], part["loss"]) == (len(own), pytest.approx(own.mean(), rel=1e-12))


def test_sentences_are_asked_for(folder: Path) -> None:
    found = evaluated(folder, folder / "model", "--needles", "3")["needles"]
    model = load_model(path=str(folder / "model"), dtype=torch.float64)
    hay = [n for text in TEXTS.values() for n in ids_of(text)[:CONTEXT]]
    assert [needle["depth"] for needle in found] == [0.0, 0.5, 1.0]
    for number, needle in enumerate(found):
        sentence = ids_of(NEEDLE.format(PLACES[number], ANSWERS[number].strip()), end=False)
        asked = ids_of(QUESTION.format(PLACES[number]) + " ", end=False)
        room = CONTEXT - len(sentence) - len(asked) - 1
        at = round(needle["depth"] * room)
        assert needle["tokens"] == room - at
        ids = torch.tensor([*hay[:at], *sentence, *hay[at:room], *asked])
        assert len(ids) == CONTEXT - 1
        logits = model(input_ids=ids[None]).logits[0, -1].log_softmax(-1)
        given = {needle["answer"]: needle["logprob"], **needle["wrong"]}
        assert set(given) == {answer.strip() for answer in ANSWERS}
        for word, value in given.items():
            assert value == pytest.approx(float(logits[ord(word[0])].detach()), rel=1e-10)


def test_the_likeliest_answer_is_found() -> None:
    needle = Needle(0.5, 9, "apple", -1.0, {"bridge": -1.5, "candle": -2.0})
    assert needle.found
    assert not Needle(0.5, 9, "apple", -1.7, needle.wrong).found


def test_a_run_is_evaluated_with_its_adapters(folder: Path) -> None:
    run = tiny_run(
        folder / "runs",
        model=ModelConfig(path=str(folder / "model"), dtype=DType.FLOAT64, lora=LoraConfig(rank=4)),
        schedule=ScheduleConfig(strategy="grouped", chunk=24, groups=1),
    )
    run = replace(run, data=replace(run.data, tokenizer="bytes"))
    train(run, reporter=Quiet())
    found = evaluated(folder, Path(run.folder), "--needles", "0")
    assert found["schedule"]["chunk"] == 24
    before = evaluated(folder, folder / "model", "--needles", "0")
    merged = folder / "merged"
    result = CliRunner().invoke(app, ["merge", run.folder, "-o", str(merged)])
    assert result.exit_code == 0, result.output
    after = evaluated(folder, merged, "--needles", "0")
    assert found["loss"] == pytest.approx(after["loss"], rel=1e-12)
    assert abs(found["loss"] - before["loss"]) > 1e-3


def outputs(folder: Path, models: list[Path]) -> list[str]:
    """What a rank prints of each model."""
    given = ["--text", str(folder / "text"), "--context", str(CONTEXT), "--tokenizer", "bytes"]
    found = []
    for model in models:
        result = CliRunner().invoke(app, ["evaluate", str(model), *given, "--json"])
        assert result.exit_code == 0, (result.output, result.exception)
        found.append(result.stdout)
    return found


def with_layout(run: RunConfig, layout: str) -> Path:
    """A copy of a run's folder, with `parallel` in its run file."""
    copied = Path(f"{run.folder} {layout[:6]}")
    shutil.copytree(run.folder, copied)
    text = (copied / "config.yaml").read_text()
    assert "parallel: null\n" in text
    (copied / "config.yaml").write_text(text.replace("parallel: null", f"parallel: {{{layout}}}"))
    return copied


ADAPTED = "ulysses: 2", "data: 2, fsdp: false"
WHOLE = "shards: 2, fsdp: false", "data: 2", "pipeline: 2", "tensor: 2", "ring: 2"


@pytest.mark.slow
def test_ranks_print_what_one_prints(folder: Path) -> None:
    """A run by its own layout, another model by heads; rank 0 prints."""
    config = WIDE | {"max_position_embeddings": 256}
    load_model(config=config, dtype=torch.float64, seed=3).save_pretrained(folder / "wide")
    whole = tiny_run(
        folder / "whole",
        model=ModelConfig(path=str(folder / "wide"), dtype=DType.FLOAT64),
        schedule=ScheduleConfig(strategy="grouped", chunk=24, groups=1),
    )
    whole = replace(whole, data=replace(whole.data, tokenizer="bytes"))
    model = replace(whole.model, lora=LoraConfig(rank=4))
    adapted = replace(whole, model=model, folder=str(folder / "adapted"))
    wanted, models = [evaluated(folder, folder / "wide")], [folder / "wide"]
    for run, layouts in ((adapted, ADAPTED), (whole, WHOLE)):
        train(run, reporter=Quiet())
        wanted += [evaluated(folder, Path(run.folder))] * len(layouts)
        models += [with_layout(run, layout) for layout in layouts]
    printed, nothing = run_ranks(2, outputs, folder, models)
    assert nothing == [""] * len(models)
    for text, layout, alone in zip(printed, models, wanted, strict=True):
        found = json.loads(text)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12), layout
        for part, key in (("documents", "loss"), ("positions", "loss"), ("needles", "logprob")):
            ours, theirs = ([one[key] for one in own[part]] for own in (found, alone))
            assert ours == pytest.approx(theirs, rel=1e-12), (layout, part)
    with pytest.raises(RankError, match=r"parallel: ulysses 2 needs .* but there are 3"):
        run_ranks(3, outputs, folder, models[1:2])


def test_a_run_is_evaluated_by_its_index(folder: Path) -> None:
    """That beside its model, whatever became of the one that it was given."""
    model = load_model(path=str(folder / "model"), dtype=torch.float64)
    index = principal_index(model, torch.arange(60)[None], 4)
    index.save(folder / "index")
    run = tiny_run(
        folder / "runs",
        model=ModelConfig(path=str(folder / "model"), dtype=DType.FLOAT64),
        schedule=ScheduleConfig(strategy="grouped", chunk=8, groups=1),
        sparse=SparseConfig(8, 8, 8, 8, selector="index", index_dim=4, index=str(folder / "index")),
    )
    run = replace(run, data=replace(run.data, tokenizer="bytes"))
    train(run, reporter=Quiet())
    found = evaluated(folder, Path(run.folder), "--needles", "0")
    assert found["schedule"]["sparse"]["selector"] == "index"
    for layer in index.layers.values():
        layer.keys.neg_()
    index.save(folder / "index")
    assert evaluated(folder, Path(run.folder), "--needles", "0")["loss"] == found["loss"]
    index.save(Path(run.folder) / "model" / "index")
    assert evaluated(folder, Path(run.folder), "--needles", "0")["loss"] != found["loss"]


def test_tables_and_a_picture(folder: Path) -> None:
    picture = folder / "loss.svg"
    given = ["--text", str(folder / "text"), "--context", "200", "--tokenizer", "bytes"]
    more = ["--picture", str(picture), "--needles", "2"]
    result = CliRunner().invoke(app, ["evaluate", str(folder / "model"), *given, *more])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("1 to 64 ") for line in lines)
    assert any(line.startswith(f"{folder}/text/b.txt 5 ") for line in lines)
    assert any(line.startswith("hidden sentences: ") for line in lines)
    assert "1 document is longer than the context and evaluated only up to its length" in lines
    drawn = ElementTree.parse(picture).getroot()
    points = drawn.find("{http://www.w3.org/2000/svg}polyline")
    assert points is not None
    assert len(points.attrib["points"].split()) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--context", "30"], "--needles: a context of 30 tokens is too short"),
        (["--context", "1"], "context: expected at least 2 tokens"),
        (["--dtype", "float16"], "dtype: expected float64, float32 or bfloat16"),
        (["--text", "nothing.txt"], "--text: no file matches"),
        (["--strategy", "fast"], "strategy"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(folder: Path, more: list[str], message: str) -> None:
    given = ["--text", str(folder / "text"), "--context", "200", "--tokenizer", "bytes"]
    with pytest.raises(UnsupportedError, match=message):
        CliRunner().invoke(
            app, ["evaluate", str(folder / "model"), *given, *more], catch_exceptions=False
        )


def test_a_run_without_a_model_is_refused(folder: Path) -> None:
    (folder / "config.yaml").write_text("model: {config: {model_type: qwen2}}\ndata: {}\n")
    (folder / "model").rename(folder / "elsewhere")
    with pytest.raises(UnsupportedError, match="this run has no model yet"):
        CliRunner().invoke(
            app, ["evaluate", str(folder), "--text", str(folder)], catch_exceptions=False
        )
