"""The pages show their data, the data hold together, and the figures can be drawn from them."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster, fit
from benchmarks.cluster import Coarse
from benchmarks.tables import load
from farspan.planner.evaluate import evaluate, refuse_layout
from farspan.planner.plans import named_schedule
from farspan.planner.request import Fit
from farspan.planner.search import search
from farspan.program.layout import Layout
from farspan.program.strategies import STRATEGIES
from farspan.spec import UnsupportedError

ROOT = Path(__file__).parent.parent
# Slopes of bytes by hand leave out slots and what rounds to whole chunks.
BY_HAND = 0.02


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    return load("fit")


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    return load("cluster")


# -- one device ------------------------------------------------------------------------------------


def test_every_model_and_machine_was_asked_for(planned: dict[str, Any]) -> None:
    found = [(row["model"], row["way"], row["machine"]) for row in planned["longest"]]
    expected = [(m, way.name, name) for m, way in fit.MODELS for name in fit.MACHINES]
    assert found == expected
    assert all(list(row["strategies"]) == list(STRATEGIES) for row in planned["longest"])


def test_large_models_fit_one_device(planned: dict[str, Any]) -> None:
    """In full with weights in main memory, each on the largest node at least."""
    found = {
        (r["model"], r["way"], r["machine"], r["host_gib"]): r["longest"]
        for r in planned["on_host"]
    }
    every = product(fit.LARGE, fit.ON_HOST, fit.NODES)
    largest = fit.LARGE[-1]
    assert list(found) == [(m, w, *n) for m, w, n in every if w != fit.BOTH or m == largest]
    assert found[largest, "QLoRA", "rtx4090", 256] is None
    assert found[largest, fit.BOTH, "rtx4090", 256]["tokens"] >= 2**17
    assert all(found[model, "full", *fit.NODES[-1]]["tokens"] >= 2**17 for model in fit.LARGE)
    assert found["Qwen2.5-7B", "full", "rtx4090", 256]["tokens"] >= 2**17


def test_the_measured_step_of_the_comparison_is_the_datas() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "streamed_step.json").read_text())
    page = " ".join((ROOT / "docs/explanation/comparison.md").read_text(encoding="utf-8").split())
    least = {name: min(seconds) for name, seconds in found["cpu_seconds"].items()}
    peaks = found["peak_bytes"]
    deepspeed = f"(DeepSpeed {found['deepspeed']}) takes"
    for name, words in ("fsdp2", "step takes"), ("zero3", deepspeed):
        times, memory = least[name] / least["streamed"], peaks[name] / peaks["streamed"]
        assert f"{words} {times:.2f} times the processor seconds of farspan's" in page
        assert f"and {memory:.1f} times its bytes at the peak" in page
    ratio = least["streamed"] / least["resident"]
    assert ratio <= 1.05
    run_file = (ROOT / "docs/reference/run-file.md").read_text(encoding="utf-8")
    assert f"took {ratio:.2f} times the CPU seconds" in run_file


def test_planned_steps_of_the_comparison_are_the_datas(planned: dict[str, Any]) -> None:
    assert all(row["fits"] for row in planned["steps_on_host"])
    page = (ROOT / "docs" / "explanation" / "comparison.md").read_text(encoding="utf-8")
    assert fit.steps_table(planned) in page


@pytest.mark.parametrize("model", fit.SLOPES)
def test_bytes_a_token_are_those_of_the_closed_forms(planned: dict[str, Any], model: str) -> None:
    """Facts 2.2: x, O and LSE on host a layer or a group; K, V, dK, dV on the device."""
    found = {
        row["strategy"]: row for row in planned["bytes_a_token"]["rows"] if row["model"] == model
    }
    spec = fit.ask(model, fit.FULL, fit.one_device("h200"), 1024).model
    layers, first = len(spec.layers), spec.layers[0]
    x = 2 * spec.hidden
    out = 2 * first.output_elements() + 4 * first.query_heads
    kv = 6 * first.kv_elements()
    assert found["offload"]["host"] == pytest.approx((layers - 1) * x, rel=BY_HAND)
    assert found["recompute"]["host"] == 0
    assert found["memo"]["host"] >= (layers - 1) * (x + out) * (1 - BY_HAND)
    assert found["oomb"]["host"] == pytest.approx(layers * kv, rel=BY_HAND)
    groups = round(layers**0.5)
    count = -(-layers // groups)
    again = found[fit.RECOMPUTED]
    assert again["host"] == pytest.approx((count - 1) * x, rel=BY_HAND)
    assert again["device"] == pytest.approx(groups * kv, rel=BY_HAND)


def test_longest_contexts_are_those_of_the_planner(planned: dict[str, Any]) -> None:
    """Planned anew for one small model: nothing longer by a fortieth fits and leaves the margin."""
    row = planned["longest"][0]
    on = fit.one_device(row["machine"])
    for name in ("plain", "recompute", "offload"):
        tokens = row["strategies"][name]["tokens"]
        for asked, does_fit in ((tokens, True), (tokens + tokens // 40 + 1024, False)):
            question = fit.ask(row["model"], fit.FULL, on, asked)
            plan = evaluate(question, name, named_schedule(question, name))
            assert (plan.fit is Fit.ROOMY) is does_fit


# -- many devices ----------------------------------------------------------------------------------


def test_every_system_was_asked_for(simulated: dict[str, Any]) -> None:
    found = [(row["model"], row["system"], row["gpus"]) for row in simulated["rows"]]
    systems = [system.name for system in cluster.SYSTEMS]
    assert found == [(m, s, g) for m in cluster.MODELS for s in systems for g in cluster.GPUS]


def test_repeated_heads_are_what_a_rank_holds() -> None:
    """64 devices on 8 K, V heads: each holds one, so K, V are eight times as many."""
    question = cluster.ask("Llama-3-70B", 2**20, Layout(ulysses=64))
    refuse_layout(question)
    plain = cluster.ask("Llama-3-70B", 2**20, Layout(ulysses=8, shards=8))
    assert question.model.layers[0].kv_elements() == 8 * plain.model.layers[0].kv_elements()
    assert question.model.parameters == plain.model.parameters
    bare = replace(question, model=plain.model)
    with pytest.raises(UnsupportedError, match="cannot be shared by 64"):
        refuse_layout(bare)


def test_farspan_finds_a_schedule_on_a_node() -> None:
    question = cluster.ask("Llama-3-8B", 2**20, Layout(ulysses=8))
    space = cluster.coarse_space(question)
    assert isinstance(space, Coarse)
    assert max(question.run.tokens // chunk for chunk in space.chunks) == 64
    best = search(question, space, 5.0).best
    assert best is not None
    assert best.fits
    staged = cluster.coarse_space(cluster.ask("Llama-3-8B", 2**20, Layout(pipeline=4)))
    assert staged.splits == ((8, 8, 8, 8),)  # a group for each stage
    assert staged.staged
