"""Work that progress is measured in: MFU's, and what a schedule computes again."""

from dataclasses import replace
from pathlib import Path

import pytest

from farspan.planner.evaluate import useful_flop
from farspan.planner.machines import machine
from farspan.planner.request import Question
from farspan.program.attention_blocks import seen_pairs
from farspan.program.builder import build_evaluation, build_program
from farspan.program.program import Program
from farspan.program.work import work_of
from farspan.spec import Cut, LayerWork, ModelSpec, RunSpec, Schedule, Tier
from tests.oracles.simulate import simulate
from tests.profiles import spec_of

RUN = RunSpec(batch=3, tokens=9000)
SCHEDULES = [
    Schedule(chunk=4096),
    Schedule(chunk=1024, groups=7, attention_save_fraction=0.5),
    Schedule(
        chunk=2048,
        groups=5,
        kv=Tier.HOST,
        activation_save_fraction=0.3,
        attention_save_fraction=0.3,
    ),
]
# Tied, with a head of its own, with windows and experts.
NAMES = ["Qwen2.5-0.5B", "Llama-3-8B", "GPT-OSS-20B"]


def total(program: Program) -> float:
    return sum(work_of(program, i) for i in program.instructions)


def forward_attention(model: ModelSpec) -> float:
    return sum(
        2.0
        * RUN.batch
        * seen_pairs(RUN.tokens, layer.window)
        * layer.query_heads
        * (layer.head_dim + layer.value_dim)
        for layer in model.layers
    )


def forward_products(model: ModelSpec, *, projections: bool = False) -> float:
    """FLOP of all layers, or of what makes q, k and v alone."""
    found = 0.0
    for layer in model.layers:
        products = layer.work.products[: layer.work.projections if projections else None]
        found += 2.0 * RUN.batch * RUN.tokens * sum(inner * outer for inner, outer in products)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_what_mfu_counts_and_what_is_done_again(
    name: str, rank: int, schedule: Schedule
) -> None:
    model = spec_of(name, rank=rank)
    program = build_program(model, RUN, schedule)
    passes = simulate(program)
    again = (float(passes.attention_passes) - 0.5) * forward_attention(model)
    again += (float(passes.linear_passes) - 1) * forward_products(model)
    again += float(passes.projection_passes) * forward_products(model, projections=True)
    useful = useful_flop(Question(model, RUN, machine("h200")))
    assert total(program) == pytest.approx(useful + again, rel=1e-9)


def test_an_evaluation_is_one_forward() -> None:
    model = spec_of(NAMES[0])
    found = total(build_evaluation(model, RUN, SCHEDULES[1]))
    head = 2.0 * RUN.batch * RUN.tokens * model.hidden * model.vocab
    assert found == forward_attention(model) + forward_products(model) + head


def uncounted(model: ModelSpec, *, parameters: bool) -> ModelSpec:
    """As a model is described by running it: nobody counted its products."""
    layers = tuple(
        replace(
            layer,
            work=LayerWork(layer.work.parameters, layer.work.trainable)
            if parameters
            else LayerWork(),
        )
        for layer in model.layers
    )
    return replace(model, layers=layers)


@pytest.mark.parametrize(
    ("name", "parameters"), [(NAMES[0], True), (NAMES[1], True), (NAMES[0], False)]
)
def test_weights_stand_for_products_that_nobody_counted(name: str, parameters: bool) -> None:
    """A tied table is one of the parameters, and multiplies once more as the head. Norms and biases
    are the difference: 1 / 1000 of the weights of a small model, less of a large one."""
    model = spec_of(name)
    bare = uncounted(model, parameters=parameters)
    found, expected = (total(build_program(m, RUN, SCHEDULES[0])) for m in (bare, model))
    assert expected <= found <= 1.001 * expected


@pytest.mark.parametrize(
    ("name", "tokens", "chunks", "percent"),
    [("Qwen2.5-7B", 131072, 16, 2), ("Qwen2.5-0.5B", 16384, 1, 31)],
)
def test_what_a_cut_costs_in_one_group(name: str, tokens: int, chunks: int, percent: int) -> None:
    """The last chunk runs twice: a little of many, a whole forward of one, as 038 says."""
    model, run = spec_of(name), RunSpec(1, tokens)
    kept = 1.0 if chunks > 1 else 0.0
    groups = len(model.layers)
    schedule = Schedule(chunk=tokens // chunks, groups=groups, attention_save_fraction=kept)
    one_pass, cut = (
        sum(work_of(program, i) for i in program.instructions)
        for program in (
            build_program(model, run, schedule, cut=cut) for cut in (Cut.NONE, Cut.AFTER_HEAD)
        )
    )
    assert round(100 * (cut / one_pass - 1)) == percent
    words = f"{percent}% of the work of {name}"
    page = Path(__file__).parents[2] / "docs" / "decisions" / "038-cut-steps.md"
    assert words in " ".join(page.read_text("utf-8").split())
