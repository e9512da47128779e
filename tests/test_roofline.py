"""What a step's operations take beside their floor: counted again, and as it was recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import roofline
from benchmarks.gpu.floor import Ceilings, floor
from benchmarks.roofline import AFTER, BEFORE, MODEL, SCHEDULE, count_step, lines
from farspan.planner.machines import machine
from farspan.planner.request import Question
from farspan.spec import Curve, RunSpec
from tests.profiles import spec_of
from tests.versions import FLOAT_POSITIONS

RECORD = Path(roofline.__file__).parent / "results" / "roofline.json"
# Of the floor; a schedule that keeps O.
LEAST = {(131072, "h100"): 0.89, (131072, "h200"): 0.90, (262144, "h100"): 0.91}


def test_the_record_has_what_is_promised() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    shares = {(r["tokens"], r["machine"], r["kernels"]): r["share"] for r in rows}
    for (tokens, card), least in LEAST.items():
        assert shares[tokens, card, AFTER] >= least > shares[tokens, card, BEFORE]


@pytest.mark.slow
@pytest.mark.skipif(FLOAT_POSITIONS, reason="of transformers with another rotary table")
@pytest.mark.parametrize("how", [BEFORE, AFTER])
def test_the_record_is_what_runs(how: str) -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    row = next(r for r in rows if (r["tokens"], r["kernels"]) == (131072, how))
    found = lines(count_step(131072, how), machine(row["machine"]))
    assert [[x.name, x.seconds, x.floor] for x in found] == row["lines"]


def test_the_floor_is_the_formula_s() -> None:
    """With one rate for all products and one for all attention, the floor is that of a step in
    which nothing is computed twice (`benchmarks.gpu.floor`)."""
    tokens, card, flat = 2048, machine("h200"), Curve(((1.0, 1e15),))
    rates = replace(
        card.rates["bfloat16"],
        matmul=flat,
        weights=None,
        logit=0.0,
        attention_forward=flat,
        attention_backward=flat,
        causal_forward=None,
        causal_backward=None,
    )
    card = replace(card, rates={"bfloat16": rates})
    question = Question(spec_of(MODEL), RunSpec(1, tokens), card)
    needed = floor(question, Ceilings(1e15, 1e15, 1e15)).total
    for how in (BEFORE, AFTER):
        counted = lines(count_step(tokens, how, replace(SCHEDULE, chunk=512, kv_block=512)), card)
        assert sum(line.floor for line in counted) == pytest.approx(
            needed, rel=1e-7
        )  # a rotary table may be a product
        assert sum(line.seconds for line in counted) > needed
