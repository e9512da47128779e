"""Ways over the same batch are held to plain autograd, and the page shows what the file has."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import farspan
from benchmarks.peers import __main__ as command
from benchmarks.peers import alone, bed, page, together
from benchmarks.peers.bed import BATCHES, MODELS, Case, Found
from benchmarks.peers.ways import WAYS, Way
from benchmarks.tables import DOCS, load
from tests.ranks import run_ranks

SHARE = 0.4  # of every document
LEFT_OUT = 0.05  # least error of the gradient that is furthest off, where something is left out


def case(model: str, batch: str = "five, odd length") -> Case:
    return Case(model, batch, "float32", SHARE)


@pytest.mark.parametrize("model", MODELS)
def test_farspan_is_plain_autograd(model: str) -> None:
    found = bed.errors(alone.far(case(model)), bed.expected(case(model)))
    assert found["gradients"] < page.EXACT
    assert found["loss"] < 1e-6


@pytest.mark.parametrize("model", ["dense", "windows"])
@pytest.mark.parametrize("way", [alone.eager, alone.sdpa])
def test_transformers_separates_documents(way: Any, model: str) -> None:
    assert bed.errors(way(case(model)), bed.expected(case(model)))["gradients"] < page.EXACT


def all_layouts(asked: Case) -> list[Found]:
    ways = (together.far_ulysses, together.far_shards, together.far_ring)
    return [way(asked) for way in ways]


@pytest.mark.exhaustive
def test_two_ranks_of_farspan_are_plain_autograd() -> None:
    asked = case("windows and sinks")
    for rank in run_ranks(2, all_layouts, asked):
        for found in rank:
            assert bed.errors(found, bed.expected(asked))["gradients"] < page.EXACT


@pytest.mark.parametrize("model", MODELS)
def test_what_is_left_out_shows(model: str) -> None:
    """Borders of documents, windows and sinks are more than rounding, and so is a wrong scale."""
    asked = case(model)
    right = bed.expected(asked)
    ids, labels, numbers = alone.batch_of(asked)
    labels = torch.where(bed.Flat.of(asked).labels == bed.IGNORED, bed.IGNORED, labels)
    broken = asked.built(alone.attention_of(asked))
    loss = farspan.Step(broken, alone.SCHEDULE)(ids, labels, torch.zeros_like(numbers))
    assert bed.errors(bed.of_model(broken, loss), right)["gradients"] > LEFT_OUT
    name = next(iter(right.gradients))
    halved = right.gradients | {name: right.gradients[name] / 2}
    assert bed.errors(replace(right, gradients=halved), right)["gradients"] == pytest.approx(0.5)
    del halved[name]
    assert bed.errors(replace(right, gradients=halved), right)["gradients"] == 1.0


def test_the_page_names_the_packages_of_the_file() -> None:
    record = load("peers")
    text = (DOCS / "explanation/comparison.md").read_text(encoding="utf-8")
    for package, version in record["packages"].items():
        assert f"{package}=={version}" in text or package == "datasets"
    assert record["machine"]["date"].startswith("20")


def test_the_file_has_every_way_and_case() -> None:
    record = load("peers")
    assert list(record["ways"]) == list(WAYS)
    for name in WAYS:
        assert record["ways"][name]["calls"] == WAYS[name].calls
        cases = {(c.model, c.batch, c.dtype) for c in command.cases(name)}
        rows = [row for row in record["rows"] if row["way"] == name]
        assert {(row["model"], row["batch"], row["dtype"]) for row in rows} == cases
        assert len(rows) == len(cases)
        if name.startswith("farspan"):
            assert all(row["gradients"] < page.EXACT for row in rows)
    assert record["batches"] == {name: list(lengths) for name, lengths in BATCHES.items()}


def test_a_way_without_its_package_is_skipped() -> None:
    assert Way(alone.far, ("no_such_package", "torch")).missing() == ["no_such_package"]
    assert not WAYS["farspan"].missing()
