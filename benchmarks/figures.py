"""Draws the figures of the documentation from committed data, real programs and plans.

    python -m benchmarks.figures [--screens runs/first]

Needs matplotlib (the `figures` extra). Writes docs/figures/*.svg. With `--screens` also pictures of
`farspan plan --html` and of a run's page, that of docs/tutorials/first-long-run.md, by a headless
Chromium, which needs Chromium, playwright and Pillow.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.performance import planner
from benchmarks.tables import DOCS, MEGA, Record, load
from farspan.lazy import load as lazily
from farspan.planner.evaluate import evaluate
from farspan.program.builder import build_program
from farspan.program.program import AttentionMode, Backward, Forward
from farspan.report.plan import step_spans
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Tier

FIGURES = DOCS / "figures"
GREY = "#999999"


def bare(axis: Any) -> None:
    """Without the frame's upper and right sides."""
    axis.spines[["top", "right"]].set_visible(False)


def drawn(name: str, figure: Any) -> None:
    """Write a figure. The same data draws the same bytes: there is no date in the file."""
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    print(f"docs/figures/{name}.svg")


# -- the grid ------------------------------------------------------------------------------------

CELLS = {"F": "#7fb3d5", "k": "#d4e6f1", "B": "#e59866"}


def draw_grid(rows: int, columns: int, size: tuple[float, float]) -> Any:
    """The grid of cells with the order in which three schedules walk it, in rows and columns."""
    layer = LayerSpec(2, 1, 8, 8)
    model = ModelSpec("drawn", 16, 32, (layer,) * 6, 4)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharey=True, layout="constrained")
    for axis, (title, groups) in zip(
        axes,
        (("g = 1: MEMO, FPDT", 1), ("g = 2: between", 2), ("g = L: OOMB", 6)),
        strict=True,
    ):
        program = build_program(model, RunSpec(1, 5), Schedule(chunk=1, groups=groups))
        orders: dict[tuple[int, int], list[str]] = {}
        count = 0
        for instruction in program.instructions:
            if not isinstance(instruction, Forward | Backward):
                continue
            if isinstance(instruction, Forward) and instruction.graph:
                continue  # drawn with its backward
            count += 1
            kind = _kind(instruction)
            orders.setdefault((instruction.layer, instruction.chunk), []).append(f"{kind}{count}")
        _draw_cells(axis, orders)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("chunk of the sequence")
        axis.set_ylabel("layer")
    gap = " " if rows == 1 else "\n"
    figure.suptitle(
        f"F forward, k only K and V, B backward{gap}(with its own forward); numbers tell the order",
        fontsize=10,
    )
    return figure


def _kind(instruction: Forward | Backward) -> str:
    if isinstance(instruction, Backward):
        return "B"
    return "k" if instruction.mode is AttentionMode.NONE else "F"


def _draw_cells(axis: Any, orders: dict[tuple[int, int], list[str]]) -> None:
    layers = 1 + max(layer for layer, _ in orders)
    chunks = 1 + max(chunk for _, chunk in orders)
    for (layer, chunk), marks in orders.items():
        for place, mark in enumerate(marks):
            height = 1 / len(marks)
            box = Rectangle(
                (chunk, layer + place * height),
                1,
                height,
                facecolor=CELLS[mark[0]],
                edgecolor="white",
            )
            axis.add_patch(box)
            middle = layer + (place + 0.5) * height
            axis.text(chunk + 0.5, middle, mark, ha="center", va="center", fontsize=7)
        axis.add_patch(Rectangle((chunk, layer), 1, 1, facecolor="none", edgecolor="#555555", lw=1))
    axis.set_xlim(0, chunks)
    axis.set_ylim(0, layers)
    axis.set_xticks([c + 0.5 for c in range(chunks)], range(chunks))
    axis.set_yticks([level + 0.5 for level in range(layers)], range(layers))
    axis.tick_params(length=0)


# -- a step's lanes -------------------------------------------------------------------------------


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
KINDS = {"Forward": "#7fb3d5", "Backward": "#e59866", "Head": "#a9d18e"}


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
            colour = KINDS.get(kind, GREY) if span.lane == "compute" else GREY
            place = (span.start, span.end - span.start)
            axis.broken_barh([place], (LANES.index(span.lane), 0.8), facecolor=colour, lw=0)
        axis.set_yticks([row + 0.4 for row in range(len(LANES))], LANES)
        axis.set_title(title, fontsize=10, loc="left")
        bare(axis)
        axis.set_xlim(0, plan.seconds.total)
    axes[-1].set_xlabel("seconds, planned")
    return figure


# -- what fits -----------------------------------------------------------------------------------

# Okabe and Ito's colours, told apart by readers who are blind to red and green.
COLOURS = {
    "plain": GREY,
    "recompute": "#56B4E9",
    "offload": "#0072B2",
    "swap": "#000000",
    "memo": "#F0E442",
    "fpdt": "#E69F00",
    "oomb": "#CC79A7",
    "grouped": "#009E73",
}
LINES = ("#009E73", "#56B4E9", "#0072B2", "#E69F00", "#CC79A7")
MARKERS = ("o", "v", "^", "s", "D")
SHOWN = (
    ("Qwen2.5-0.5B", "full"),
    ("Qwen2.5-7B", "LoRA, rank 16"),
)
LABELS = {"grouped": "grouped (farspan)"}


def _tokens(value: float, _: Any = None) -> str:
    return f"{value / MEGA:g}M" if value >= MEGA else f"{value / 1024:g}K"


def _token_axis(axis: Any, powers: range) -> None:
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_locator(FixedLocator([2.0**power for power in powers]))
    axis.yaxis.set_major_formatter(FuncFormatter(_tokens))
    axis.yaxis.set_minor_locator(NullLocator())


def _plain(axis: Any) -> None:
    bare(axis)
    axis.grid(axis="y", color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)


def draw_longest(fit: Record) -> Any:
    """Longest context of each strategy on each machine."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, (model, way) in zip(axes.flat, SHOWN, strict=True):
        rows = [row for row in fit["longest"] if (row["model"], row["way"]) == (model, way)]
        _bars(axis, rows)
        axis.set_title(f"{model}, {way}", fontsize=10, loc="left")
        _plain(axis)
        _token_axis(axis, range(10, 26, 3))
        axis.set_ylim(2**10, 2**25.5)
    axes[0].set_ylabel("longest context, tokens")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=8, fontsize=9, frameon=False)
    return figure


def _bars(axis: Any, rows: list[Record]) -> None:
    width = 0.8 / len(COLOURS)
    for place, (name, colour) in enumerate(COLOURS.items()):
        left = [index + (place - 3.5) * width for index in range(len(rows))]
        found = [row["strategies"][name] for row in rows]
        heights = [cell["tokens"] if cell else 0 for cell in found]
        axis.bar(
            left,
            heights,
            width,
            color=colour,
            edgecolor="#333333",
            lw=0.3,
            label=LABELS.get(name, name),
        )
    for index, row in enumerate(rows):
        if not any(row["strategies"].values()):
            axis.text(index, 2**10.4, "nothing\nfits", ha="center", fontsize=8, color="#666666")
    axis.set_xticks(range(len(rows)), [row["machine"] for row in rows])
    axis.tick_params(axis="x", length=0)


def draw_bytes(fit: Record) -> Any:
    """Bytes that a token takes on device and on host, by strategy."""
    rows = fit["bytes_a_token"]["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    figure, axes = plt.subplots(
        1, len(models), figsize=(11, 4.2), sharey=True, sharex=True, layout="constrained"
    )
    for axis, model in zip(axes, models, strict=True):
        by_name = {row["strategy"]: row for row in rows if row["model"] == model}
        for shift, tier, colour in ((-0.2, "device", "#D55E00"), (0.2, "host", "#56B4E9")):
            places = [index + shift for index in range(len(names))]
            sizes = [max(by_name[name][tier] / 1e3, 0.01) for name in names]
            axis.barh(places, sizes, 0.38, color=colour, label=tier)
            for place, size in zip(places, sizes, strict=True):
                shown = f"{size:,.0f}" if size >= 10 else f"{size:.1f}"
                shown = shown if size >= 0.1 else "no growth"
                axis.text(max(size, 0.5) * 1.12, place, shown, va="center", fontsize=7)
        axis.set_xscale("log")
        axis.set_xlim(0.5, 60000)
        axis.set_title(model, fontsize=10, loc="left")
        axis.set_xlabel("KB a token")
        bare(axis)
    axes[0].set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def draw_cluster_longest(cluster: Record) -> Any:
    """Longest context against GPUs."""
    models = list(dict.fromkeys(row["model"] for row in cluster["rows"]))
    figure, axes = plt.subplots(
        1, len(models), figsize=(11, 4.4), sharey=True, layout="constrained"
    )
    for axis, model in zip(axes, models, strict=True):
        _lines(axis, cluster, model, lambda row: row["longest"] and row["longest"]["tokens"])
        _token_axis(axis, range(18, 31, 2))
        axis.axhline(16 * MEGA, color="#888888", lw=0.8, ls=(0, (2, 3)))
        axis.set_title(f"{model} on {cluster['machine']}", fontsize=10, loc="left")
    axes[0].set_ylabel("longest context, tokens")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def draw_cluster_mfu(cluster: Record) -> Any:
    """MFU against GPUs at each context."""
    models = list(dict.fromkeys(row["model"] for row in cluster["rows"]))
    contexts = [str(tokens) for tokens in cluster["contexts"]]
    figure, axes = plt.subplots(
        len(models),
        len(contexts),
        figsize=(11, 5.6),
        sharey=True,
        sharex=True,
        layout="constrained",
    )
    for line, model in zip(axes, models, strict=True):
        for axis, key in zip(line, contexts, strict=True):
            _lines(
                axis, cluster, model, lambda row, k=key: row["at"][k] and 100 * row["at"][k]["mfu"]
            )
            axis.set_ylim(30, 56)
            axis.set_title(f"{model}, {_tokens(int(key))} tokens", fontsize=9, loc="left")
        line[0].set_ylabel("MFU, %")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=5, fontsize=9, frameon=False)
    return figure


def _lines(axis: Any, cluster: Record, model: str, value: Any) -> None:
    rows = [row for row in cluster["rows"] if row["model"] == model]
    names = list(dict.fromkeys(row["system"] for row in rows))
    sizes = list(dict.fromkeys(row["gpus"] for row in rows))
    for name, colour, marker in zip(names, LINES, MARKERS, strict=True):
        found = [value(row) or None for row in rows if row["system"] == name]
        heights = [float("nan") if one is None else one for one in found]
        axis.plot(sizes, heights, color=colour, marker=marker, ms=4, lw=1.6, label=name, alpha=0.9)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sizes))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    axis.set_xlabel("GPUs", fontsize=8)
    axis.tick_params(labelsize=8)
    _plain(axis)


# -- pictures of pages ---------------------------------------------------------------------------

ASKED = (
    *("--model", "Qwen2.5-7B", "--lora", "16", "--context", "1M", "--machine", "h100"),
    *("--host-memory", "200GiB"),
)
WIDTH, TOP = 1280, 1215  # pixels; of the page so many are shown
RUN_WIDTH, RUN_TOP = 1100, 1560
PLACE = 0.55  # of the walk, where some cells are done and others are not
SHADES = 160


def take_pictures(run: Path) -> None:
    """Pictures of a plan's page and of a run's. Colours are reduced to what keeps them small."""
    chromium_path = lazily("tests.report.browser", "CHROMIUM")
    sync_playwright = lazily("playwright.sync_api", "sync_playwright")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        command = [sys.executable, "-m", "farspan", "plan", *ASKED, "--html", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=chromium_path, args=["--no-sandbox", "--disable-gpu"]
            )
            window = chromium.new_page(viewport={"width": WIDTH, "height": TOP})
            window.goto(page.as_uri())
            window.wait_for_timeout(500)
            window.screenshot(path=FIGURES / "plan-page.png")
            slider = window.locator(".scrub input")
            slider.evaluate(
                "(of, to) => { of.value = of.max * to; of.dispatchEvent(new Event('input')) }",
                PLACE,
            )
            window.locator("section:has(.walk)").screenshot(path=FIGURES / "plan-walk.png")
            window.set_viewport_size({"width": RUN_WIDTH, "height": RUN_TOP})
            window.goto((run / "report.html").resolve().as_uri())
            window.wait_for_timeout(500)
            window.screenshot(path=FIGURES / "run-page.png")
            chromium.close()
    for name in ("plan-page.png", "plan-walk.png", "run-page.png"):
        picture = lazily("PIL.Image", "open")(FIGURES / name).convert("RGB")
        picture.quantize(SHADES).save(FIGURES / name, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--screens", type=Path, metavar="RUN", help="folder of a run to picture")
    given = parser.parse_args()
    fit, cluster = load("fit"), load("cluster")
    drawn("grid", draw_grid(1, 3, (11, 4.2)))
    # 360 pixels wide, its type is 10 pixels high.
    drawn("grid-narrow", draw_grid(3, 1, (3.8, 10)))
    drawn("timeline", draw_timeline())
    drawn("fit-longest", draw_longest(fit))
    drawn("fit-bytes", draw_bytes(fit))
    drawn("cluster-longest", draw_cluster_longest(cluster))
    drawn("cluster-mfu", draw_cluster_mfu(cluster))
    if given.screens is not None:
        take_pictures(given.screens.resolve())


if __name__ == "__main__":
    main()
