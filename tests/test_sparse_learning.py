"""Sparse attention learns far retrieval and random pages do not: in small here, in the result file
at length."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sparse import evidence, retrieval, scaling
from benchmarks.sparse.retrieval import (
    ARMS,
    DENSE,
    LESSON,
    LONGER_PAGES,
    RANDOM,
    SPARSE,
    Attention,
    Haystack,
    Lesson,
    Stage,
)
from benchmarks.sparse.scaling import MODEL, exponent, measure
from benchmarks.tables import load
from farspan.spec import INDEX, MEAN, SUBMEANS, Sparse

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "sparse_learning.json"
# What random pages may reach: a question's page is among a tenth by chance, or its value guessed.
CHANCE = 0.2
SMALL_LEARNT, SMALL_CHANCE = 0.75, 0.3  # 0.86 and 0.09 were found

# Keys and values of 16 kinds, 256 pages.
SMALL = Lesson(
    Attention(128, Sparse(4, 64, 16, sinks=4, query_page=4, selector="mean")),
    (Stage(256, 16, 10), Stage(1024, 16, 30)),
    classes=16,
    warm_batch=16,
    step_tokens=1024,
    warm_steps=600,
    examined=8,
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """What the result file was made with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_votes_find_far_pages_and_chance_does_not() -> None:
    model, losses = retrieval.warm_up(SMALL, seed=0)
    assert retrieval.learnt(losses)
    sparse = retrieval.learn(SMALL, SPARSE, model, seed=0)
    # Learnt, not brought along from the warm-up.
    assert sparse["accuracy"] >= SMALL_LEARNT > sparse["accuracy_before"]
    assert retrieval.learn(SMALL, RANDOM, model, seed=0)["accuracy"] <= SMALL_CHANCE


def test_questions_are_far_and_pairs_within_reach_of_a_choice() -> None:
    sparse, chunk = LESSON.attention.sparse, LESSON.attention.chunk
    for sequence in retrieval.examination(LESSON):
        for asked, said in zip(sequence.asked.tolist(), sequence.said.tolist(), strict=True):
            # Far: a page that is chosen or not seen at all.
            assert (said + 1) // sparse.page in sparse.candidates(asked // chunk * chunk)
            assert 0.05 <= sparse.budget / asked <= 0.1
            assert (asked - said) // sparse.page >= 20


def test_a_question_is_answered_by_its_pair_alone() -> None:
    sequence = Haystack(512, 32).draw(Generator().manual_seed(0))
    ids = sequence.ids.tolist()
    pairs = {ids[i]: ids[i + 1] for i in sequence.said.tolist()}
    assert len(pairs) == 32
    for asked in sequence.asked.tolist():
        assert pairs[ids[asked]] == ids[asked + 1] == int(sequence.labels[asked + 1])
        # Once said and once asked: nothing later tells the value.
        assert ids.count(ids[asked]) == 2
    assert int((sequence.labels >= 0).sum()) == 32


@pytest.mark.parametrize("arm", ARMS)
def test_accuracy_counts_what_the_arm_answers(arm: str) -> None:
    """A model that always answers one value is right as often as that is the value."""
    model = retrieval.make_model(0)
    head = model.get_output_embeddings()
    answer = retrieval.FIRST_VALUE + 1
    torch.nn.init.zeros_(head.weight)
    head.bias = torch.nn.Parameter(torch.zeros(256).index_fill(0, torch.tensor(answer), 1.0))
    sequences = [Haystack(512, 4, 4).draw(Generator().manual_seed(seed)) for seed in range(6)]
    step = SMALL.attention.step(arm, model, 0)
    right = sum(int((s.labels == answer).sum()) for s in sequences)
    assert right > 0
    assert retrieval.accuracy(model, step, iter(sequences)) == right / 24


def test_arms_are_one_function_where_a_chunk_is_all() -> None:
    """So that they may share a warm-up."""
    model = retrieval.make_model(0)
    batch = Haystack(SMALL.warm_tokens, 8, 16).batch(2, Generator().manual_seed(0))
    losses = {float(SMALL.attention.step(arm, model, 0)(*batch)) for arm in ARMS}
    assert len(losses) == 1


# Of both pages; dense attention, which has none, is measured once.
LESSONS = {"retrieval": LESSON, "longer_pages": replace(LESSON, attention=LONGER_PAGES)}


@pytest.mark.parametrize("name", LESSONS)
def test_the_result_is_of_this_benchmark(result: dict[str, Any], name: str) -> None:
    again, kept = json.loads(json.dumps(asdict(LESSONS[name]))), result[name]["lesson"]
    assert {key: kept[key] for key in again} == again
    seeds = {(row["arm"], row["seed"]) for row in result[name]["arms"]}
    arms = ARMS if name == "retrieval" else (SPARSE, RANDOM)
    assert seeds == {(arm, seed) for arm in arms for seed in retrieval.SEEDS}


@pytest.mark.parametrize(("name", "gap"), [("retrieval", 0.02), ("longer_pages", 0.03)])
def test_the_result_learns(result: dict[str, Any], name: str, gap: float) -> None:
    """On each seed, by pages of either length."""
    rows = result["retrieval"]["arms"]
    dense = {row["seed"]: row["accuracy"] for row in rows if row["arm"] == DENSE}
    for row in result[name]["arms"]:
        if row["arm"] == RANDOM:
            assert row["accuracy"] <= CHANCE
        else:
            assert row["accuracy"] >= dense[row["seed"]] - gap
    means = result["retrieval"]["accuracy"]
    assert means == retrieval.gap(rows)
    page = (ROOT / "docs" / "evidence" / "cpu.md").read_text(encoding="utf-8")
    assert f"| {'; '.join(f'{means[arm]:.3f}' for arm in ARMS)} | `{RESULT.name}` |" in page


def test_the_page_says_what_was_learnt(result: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "evidence" / "sparse.md").read_text(encoding="utf-8")
    for name, lesson in LESSONS.items():
        tokens = f"{lesson.attention.sparse.page} tokens"
        for arm in ARMS if name == "retrieval" else (SPARSE, RANDOM):
            own = [row["accuracy"] for row in result[name]["arms"] if row["arm"] == arm]
            of = "" if arm == DENSE else f" {tokens}"
            assert f"|{of} | {', '.join(f'{share:.3f}' for share in own)} |" in page


# -- what was never trained sparsely (benchmarks/sparse/evidence.py) -----------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((RESULT.parent / "sparse_evidence.json").read_text("utf-8"))
    return kept


def test_a_needle_is_found_that_a_mean_key_hides() -> None:
    drawn = {name: Generator().manual_seed(1) for name in (SUBMEANS, MEAN)}
    seen = {name: evidence.needle(Sparse(selector=name), 1, drawn[name]) for name in drawn}
    assert seen == {SUBMEANS: True, MEAN: False}


def test_the_default_finds_needles(found: dict[str, Any]) -> None:
    recall = {
        row["needed_by"]: row["recall"] for row in found["needle"] if default(row["selector"])
    }
    assert recall[1] >= 0.9
    assert recall[8] == recall[Sparse().query_tokens] == 1.0


@pytest.mark.parametrize(
    ("what", "tokens", "seeds", "most"),
    [("pass key", 4096, 16, 0.3), ("pass key", 8192, 2, 0.5), ("text", 4096, 4, 0.02)],
)
def test_a_real_model_reads_by_chosen_pages(
    found: dict[str, Any], what: str, tokens: int, seeds: int, most: float
) -> None:
    """In nats a token above dense attention."""
    rows = [r for r in found["gaps"] if (r["what"], r["tokens"]) == (what, tokens)]
    own = [row for row in rows if default(row["attention"]) or row["attention"] == INDEX]
    assert len(own) == 2
    assert all(row["seeds"] >= seeds and row["above_dense"] <= most for row in own)
    assert found["gaps"] == evidence.gaps(found["rows"])


def default(selector: str) -> bool:
    return selector == Sparse().selector


def test_the_page_says_what_was_found(found: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "evidence" / "sparse.md").read_text(encoding="utf-8")
    for name in dict.fromkeys(row["selector"] for row in found["needle"]):
        recall = [f"{row['recall']:.2f}" for row in found["needle"] if row["selector"] == name]
        assert f"| `{name}` | {' | '.join(recall)} |" in page
        mass = [
            sum(row["mass"]) / len(row["mass"]) for row in found["mass"] if row["selector"] == name
        ]
        assert f"| `{name}` | {' | '.join(f'{share:.3f}' for share in mass)} |" in page
    for row in found["gaps"]:
        of = f"{row['what']}, {row['tokens']:,} | {row['attention']} | {row['seeds']}"
        assert f"| {of} | {row['loss']:.3f} | {row['above_dense']:+.3f} |" in page


# -- time grows with the tokens --------------------------------------------------------------------

RECORD = load("sparse_scaling")
LINEAR = 1.15  # an exponent up to this is called linear


def rows(name: str) -> list[dict[str, float]]:
    return [row for row in RECORD["rows"] if row["attention"] == name]


def test_the_exponent_is_the_slope() -> None:
    squares = [{"attention": "x", "tokens": n, "seconds": 3e-6 * n**2} for n in (10, 70, 200)]
    assert exponent(squares, "x") == pytest.approx(2)


def test_measured_time_is_linear_over_sixteen_times_the_tokens() -> None:
    sparse = rows("sparse")
    assert sparse[-1]["tokens"] == 16 * sparse[0]["tokens"]
    assert exponent(RECORD["rows"], "sparse") == RECORD["exponents"]["sparse"] <= LINEAR
    assert exponent(RECORD["rows"], "dense") == RECORD["exponents"]["dense"] > 1.7


def test_measured_memory_is_nearly_flat() -> None:
    """Device bytes without K, V: means, choices, inputs and votes grow, 0.15 KB a token."""
    sparse = rows("sparse")
    grown = sparse[-1]["device_bytes"] - sparse[0]["device_bytes"]
    assert grown <= 150 * (sparse[-1]["tokens"] - sparse[0]["tokens"])
    assert sparse[-1]["device_bytes"] < 2 * sparse[0]["device_bytes"]


def test_the_script_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "RUNS", 1)
    threads = torch.get_num_threads()
    model = LlamaForCausalLM(LlamaConfig(**MODEL | {"num_hidden_layers": 1}))
    row = measure(model, "sparse", 4096)
    assert torch.get_num_threads() == threads
    assert row["attention"] == "sparse"
    assert row["seconds"] > 0
    assert 0 < row["host_bytes"] < row["device_bytes"]
