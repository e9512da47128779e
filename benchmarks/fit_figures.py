"""The plots of docs/evidence/longest-contexts.md, from the committed results."""

from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.fit_page import MEGA, Record

# Okabe and Ito's colours, told apart by readers who are blind to red and green.
COLOURS = {
    "plain": "#999999",
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
    axis.spines[["top", "right"]].set_visible(False)
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
        axis.spines[["top", "right"]].set_visible(False)
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


DRAWINGS = {
    "fit-longest": (draw_longest, "fit"),
    "fit-bytes": (draw_bytes, "fit"),
    "cluster-longest": (draw_cluster_longest, "cluster"),
    "cluster-mfu": (draw_cluster_mfu, "cluster"),
}
