"""What benchmarks/results/fit.json and cluster.json say: commands with what they print in
docs/tutorials/will-it-fit.md, tables in docs/evidence/longest-contexts.md.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farspan.formatting import write_seconds

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs" / "tutorials" / "will-it-fit.md"
TABLES = ROOT / "docs" / "evidence" / "longest-contexts.md"
RESULTS = ROOT / "benchmarks" / "results"
OPENING, CLOSING = "<!-- table {} -->", "<!-- end -->"
MEGA, KILO = 2**20, 1e3

Record = dict[str, Any]


def load(name: str) -> Record:
    """A result file."""
    found: Record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def write() -> None:
    """Put commands and tables into their pages."""
    fit = load("fit")
    for page, made in ((COMMANDS, commands(fit)), (TABLES, tables(fit, load("cluster")))):
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def filled(text: str, made: dict[str, str]) -> str:
    """A page with each of these in its place. Raises ValueError where a mark is missing."""
    for name, table in made.items():
        opening = OPENING.format(name)
        before, mark, rest = text.partition(opening)
        if not mark or CLOSING not in rest:
            raise ValueError(f"the page has no place for {opening}")
        text = f"{before}{opening}\n\n{table}\n\n{rest[rest.index(CLOSING) :]}"
    return text


def commands(fit: Record) -> dict[str, str]:
    """Every command and what it printed, by its name in the page."""
    return {f"command {index}": command(entry) for index, entry in enumerate(fit["commands"])}


def tables(fit: Record, cluster: Record) -> dict[str, str]:
    """Every generated table by its name in the page."""
    return {
        "longest": longest(fit),
        "on host": on_host(fit),
        "bytes": bytes_a_token(fit),
        "cluster longest": reach(cluster),
        "cluster mfu": mfu(cluster),
        "cluster planning": planning(cluster),
    }


def command(entry: Record) -> str:
    """A command and what it printed."""
    return f"```\n$ {entry['command']}\n{entry['output'].strip()}\n```"


def _grid(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- one device ------------------------------------------------------------------------------------


def longest(fit: Record) -> str:
    """A table for each model and way to train it."""
    parts = []
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in fit["longest"]):
        own = [row for row in fit["longest"] if (row["model"], row["way"]) == (model, way)]
        names = list(own[0]["strategies"])
        rows = [
            [row["machine"], *(_tokens(row["strategies"][name]) for name in names)] for row in own
        ]
        parts.append(f"{model}, {way}:\n\n{_grid(['', *names], rows)}")
    return "\n\n".join(parts)


def on_host(fit: Record) -> str:
    """Large models on one device, with its main memory."""
    rows = fit["on_host"]
    nodes = list(dict.fromkeys((row["machine"], row["host_gib"]) for row in rows))
    by_place = {(r["model"], r["way"], r["machine"], r["host_gib"]): r["longest"] for r in rows}
    body = [
        [f"{model}, {way}", *(_reach(by_place[model, way, *node]) for node in nodes)]
        for model, way in dict.fromkeys((row["model"], row["way"]) for row in rows)
    ]
    return _grid(["", *(f"{machine}, {memory} GiB" for machine, memory in nodes)], body)


def steps_on_host(fit: Record) -> str:
    """Rows of the table of docs/explanation/comparison.md."""
    rows = []
    for row in fit["steps_on_host"]:
        gib = row["host_gib"]
        memory = f"{gib / 1024:g} TiB" if gib > 1024 else f"{gib} GiB"
        card = row["machine"].upper().replace("RTX", "RTX ")
        name = f"{row['model']}, {row['context']} tokens, {card}"
        times = (write_seconds(row[part]) for part in ("seconds", "compute", "update"))
        rows.append(f"| {name} | {memory} | {' | '.join(times)} |")
    return "\n".join(rows)


def _reach(cell: Record | None) -> str:
    return f"{_short(cell['tokens'])}, {write_seconds(cell['seconds'])}" if cell else "-"


def _tokens(cell: Record | None) -> str:
    return _short(cell["tokens"]) if cell else "-"


def _short(tokens: int) -> str:
    """Three digits at most: contexts are found to within a sixty-fourth."""
    size, unit = (tokens / MEGA, "M") if tokens >= MEGA else (tokens / 1024, "K")
    return f"{size:.0f}{unit}" if size >= 10 else f"{size:.1f}{unit}"


def bytes_a_token(fit: Record) -> str:
    """KB a token on device and on host."""
    rows = fit["bytes_a_token"]["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_place = {(row["strategy"], row["model"]): row for row in rows}
    body = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        found = (by_place[strategy, model] for model in models)
        body.append([strategy, *(f"{_kilo(c['device'])} + {_kilo(c['host'])}" for c in found)])
    return _grid(["KB a token, device + host", *models], body)


def _kilo(size: float) -> str:
    return f"{size / KILO:,.0f}" if size >= 10 * KILO else f"{size / KILO:.1f}"


# -- many devices ----------------------------------------------------------------------------------


def reach(cluster: Record) -> str:
    """Longest contexts."""

    def show(row: Record) -> str:
        return _mega(row["longest"]["tokens"]) if row["longest"] else "-"

    return _systems(cluster, show)


def mfu(cluster: Record) -> str:
    """MFU at 4M tokens, with N where the network takes over a tenth of the step."""
    return _systems(cluster, lambda row: _mfu(row["at"][str(4 * MEGA)]))


def _mfu(cell: Record | None) -> str:
    if cell is None:
        return "-"
    return f"{100 * cell['mfu']:.0f}%" + (" N" if cell["network"] > 0.1 else "")


def _systems(cluster: Record, show: Any) -> str:
    sizes = list(dict.fromkeys(row["gpus"] for row in cluster["rows"]))
    by_place = {(row["model"], row["system"], row["gpus"]): row for row in cluster["rows"]}
    body = []
    for model, system in dict.fromkeys((row["model"], row["system"]) for row in cluster["rows"]):
        found = (show(by_place[model, system, size]) for size in sizes)
        body.append([f"{model.removeprefix('Llama-3-')} {system}", *found])
    return _grid(["GPUs", *map(str, sizes)], body)


def planning(cluster: Record) -> str:
    """Seconds of the full search."""
    rows = [
        [
            str(entry["gpus"]),
            f"{entry['cpu_seconds']:.1f} s",
            f"{100 * entry['mfu']:.0f}%",
            write_seconds(entry["seconds"]),
            f"{100 * entry['gap']:.1f}%",
        ]
        for entry in cluster["planning"]
    ]
    return _grid(["GPUs", "search, processor time", "MFU", "step", "gap at most"], rows)


def _mega(tokens: int) -> str:
    return f"{tokens / MEGA:g}M" if tokens >= MEGA else f"{tokens // 1024}K"
