"""The picture of docs/evidence/performance.md: lanes of two planned steps on an H200."""

from dataclasses import replace
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.performance import planner
from farspan.planner.evaluate import evaluate
from farspan.report.plan import step_spans
from farspan.spec import Schedule, Tier

DRAWN = (
    (
        "layer by layer; inputs and O, LSE on host",
        Schedule(chunk=16384, groups=1, attention=Tier.HOST, attention_save_fraction=1.0),
    ),
    (
        "K, V on host, streamed in blocks",
        Schedule(chunk=32768, groups=1, kv=Tier.HOST, kv_block=16384),
    ),
)
DRAWN_LAYERS, DRAWN_TOKENS = 2, 131072
LANES = ("evict", "fetch", "compute")  # from below
COLOURS = {"Forward": "#7fb3d5", "Backward": "#e59866", "Head": "#a9d18e"}
OTHER = "#999999"


def draw_timeline() -> Any:
    """The lanes of two planned steps of two layers."""
    figure, axes = plt.subplots(len(DRAWN), 1, figsize=(11, 4.2), layout="constrained")
    question = replace(planner().question(DRAWN_TOKENS, DRAWN_LAYERS), overlap=True)
    for axis, (title, schedule) in zip(axes, DRAWN, strict=True):
        plan = evaluate(question, "drawn", schedule)
        program, spans = step_spans(plan)
        for span in spans:
            if span.lane not in LANES:
                continue
            kind = type(program.instructions[span.index]).__name__
            colour = COLOURS.get(kind, OTHER) if span.lane == "compute" else OTHER
            place = (span.start, span.end - span.start)
            axis.broken_barh([place], (LANES.index(span.lane), 0.8), facecolor=colour, lw=0)
        axis.set_yticks([row + 0.4 for row in range(len(LANES))], LANES)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, plan.seconds.total)
    axes[-1].set_xlabel("seconds, planned")
    return figure
