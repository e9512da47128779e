"""Draw the figures of the documentation from committed data and from real programs.

    python -m benchmarks.figures

Needs matplotlib (the `figures` extra). Writes docs/figures/*.svg, and the tables of
docs/evidence/longest-contexts.md from the same data.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from benchmarks import fit_figures, fit_page, performance_figures
from farspan.program.builder import build_program
from farspan.program.program import AttentionMode, Backward, Forward
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
COLOURS = {"forward": "#7fb3d5", "kv": "#d4e6f1", "backward": "#e59866"}


def draw_grid(name: str, rows: int, columns: int, size: tuple[float, float]) -> None:
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
    _save(figure, name)


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
            colour = {"F": "forward", "k": "kv", "B": "backward"}[mark[0]]
            box = Rectangle(
                (chunk, layer + place * height),
                1,
                height,
                facecolor=COLOURS[colour],
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


def draw_curves() -> None:
    """Loss of every strategy over autograd's, and how far they are apart."""
    record = json.loads((RESULTS / "curves.json").read_text())
    reference = record["loss"]["autograd"]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    for index, (name, losses) in enumerate(record["loss"].items()):
        style = (
            {"lw": 4, "color": "#cccccc"}
            if name == "autograd"
            else {"lw": 1, "ls": (index, (4, 8))}
        )
        above.plot(losses, label=name, **style)
        if name != "autograd":
            below.plot(
                [max(abs(a - b), 1e-9) for a, b in zip(losses, reference, strict=True)], lw=1
            )
    above.set_ylabel("loss, nats a byte")
    above.legend(ncol=3, fontsize=8, frameon=False)
    below.set_yscale("log")
    below.set_ylabel("distance from autograd")
    below.set_xlabel("step")
    _save(figure, "curves")


def _save(figure: Any, name: str) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    # No date in the file: the same data draws the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    print(f"docs/figures/{name}.svg")


if __name__ == "__main__":
    draw_grid("grid", 1, 3, (11, 4.2))
    draw_grid("grid-narrow", 3, 1, (3.8, 10))  # 360 pixels wide, its type is 10 pixels high
    draw_curves()
    _save(performance_figures.draw_timeline(), "timeline")
    for name, (draw, data) in fit_figures.DRAWINGS.items():
        _save(draw(fit_page.load(data)), name)
    fit_page.write()
