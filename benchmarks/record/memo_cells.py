"""The cells of MEMO's tables."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.record import memo
from benchmarks.record.cells import KILO, Cell, Kind, published, steps_between
from benchmarks.record.memo import Split, Way
from benchmarks.record.models import ask
from farspan.planner.space import solve_alpha

NAMES = {"deepspeed": "DeepSpeed-Ulysses", "megatron": "Megatron-LM", "memo": "MEMO"}
APPENDIX = {
    "deepspeed": "appendix_table5",
    "megatron": "appendix_table6",
    "memo": "appendix_table7",
}
DEVICES = {"7B": 8, "13B": 16, "30B": 32, "65B": 64}


def cells() -> list[Cell]:
    """Everything that is predicted."""
    return [*_table3(), *_table4(), *_table5(), *_table7(), *_figure11()]


def layouts(system: str, size: str) -> dict[int, tuple[Split, float]]:
    """The published layout of each length, and MEMO's alpha."""
    table = published("memo")["tables"][APPENDIX[system]]
    row = table["rows"][size]
    found = {}
    for place, length in enumerate(table["context_k"]):
        values = {k: v[place] if place < len(v) else None for k, v in row.items()}
        if values["dp"] is None:
            continue
        split = Split(
            values.get("tp") or 1,
            values.get("cp") or values.get("sp") or 1,
            values["dp"],
            values.get("pp") or 1,
        )
        found[length] = split, float(values.get("alpha") or 0.0)
    return found


def _way(system: str, alpha: float) -> Way:
    if system == "memo":
        return Way(alpha)
    if system == "deepspeed":
        return Way(swaps=False, ulysses=True)
    return Way(swaps=False, planned=False)


def table3(system: str, size: str) -> dict[int, dict[str, Any]]:
    """Cells of one column of Table 3 by length."""
    found = published("memo")["tables"]["table3"]["cells"]
    return {c["context_k"]: c for c in found if (c["system"], c["model"]) == (system, size)}


def _table3() -> Iterator[Cell]:
    for system in NAMES:
        for size, devices in DEVICES.items():
            row = f"{NAMES[system]} {size}"
            printed = table3(system, size)
            for length, (split, alpha) in layouts(system, size).items():
                if "mfu" not in printed[length]:
                    continue
                value, column = printed[length]["mfu"], f"{length}K"
                ours = memo.mfu(size, length * KILO, split, _way(system, alpha))
                used = system == "megatron" and (size, length, value) == memo.STOP_READ_OFF
                yield Cell("MEMO 3", row, column, Kind.MFU, "%", value, ours, used=used)
            grid = sorted(length for length in printed if length >= 128)
            ran = max(length for length in printed if "mfu" in printed[length])
            ours = memo.longest(size, devices, system, grid)
            yield _longest("MEMO 3", row, f"{devices} GPUs", grid, (ran, ours))


def _longest(table: str, row: str, column: str, grid: list[int], found: tuple[int, int]) -> Cell:
    theirs, ours = found
    steps = steps_between(grid, theirs, ours)
    return Cell(table, row, column, Kind.LONGEST, "K tokens", theirs, ours, steps)


def _table4() -> Iterator[Cell]:
    table = published("memo")["tables"]["table4"]
    grid = table["context_k"]
    alphas = {length: alpha for length, (_, alpha) in layouts("memo", "7B").items()}
    ways = {
        "recompute_planned": lambda _: Way(swaps=False),
        "swap_planned": lambda _: Way(1.0),
        "memo": lambda length: Way(alphas[length]),
    }
    names = {"recompute_planned": "recompute, planned", "swap_planned": "swap, planned"}
    for key, way in ways.items():
        row = names.get(key, "MEMO")
        for length, value in zip(grid, table["rows"][key], strict=True):
            yield from _ablation("MEMO 4", row, f"{length}K", length, (way(length), value))
    row = "recompute, unplanned"
    for length, value in zip(grid, table["rows"]["recompute"], strict=True):
        if value != "oom":
            way_here = Way(swaps=False, planned=False)
            ours = memo.mfu("7B", length * KILO, memo.ABLATION, way_here)
            yield Cell("MEMO 4", row, f"{length}K", Kind.MFU, "%", value, ours)


def _ablation(
    table: str, row: str, column: str, length: int, found: tuple[Way, float | str]
) -> Iterator[Cell]:
    """Whether one cell of the ablations runs, and its MFU if it did."""
    way, value = found
    ran = not isinstance(value, str)
    ours = _runs("7B", length * KILO, memo.ABLATION, way)
    used = table == "MEMO 5" and (length, way.alpha) in memo.host_bracket()
    yield Cell(table, row, column, Kind.FEASIBLE, "runs", float(ran), float(ours), used=used)
    if not isinstance(value, str):
        used = (length, way.alpha, value) in memo.CALIBRATION.values() and table == "MEMO 5"
        ours_mfu = memo.mfu("7B", length * KILO, memo.ABLATION, way)
        yield Cell(table, row, column, Kind.MFU, "%", value, ours_mfu, used=used)


def _runs(size: str, tokens: int, split: Split, way: Way) -> bool:
    model = memo.model_of(size)
    if not way.swaps:
        return memo.recompute_bytes(model, tokens, split) <= memo.usable_bytes()
    on_host = memo.node_bytes(size, tokens, split, way.alpha) <= memo.host_limit()
    return on_host and memo.memo_bytes(model, tokens, split) <= memo.usable_bytes()


def _table5() -> Iterator[Cell]:
    table = published("memo")["tables"]["table5"]
    for length, values in table["rows"].items():
        for alpha, value in zip(table["alpha"], values, strict=True):
            found = Way(alpha), value
            yield from _ablation("MEMO 5", f"{length}K", f"{alpha:g}", int(length), found)
        ran = [0.0 if isinstance(value, str) else value for value in values]
        theirs, grid = table["alpha"][ran.index(max(ran))], table["alpha"]
        ours = floored(allowed_alpha("7B", int(length), memo.ABLATION), grid)
        steps = grid.index(ours) - grid.index(theirs)
        row, column = "best alpha", f"{length}K"
        yield Cell("MEMO 5", row, column, Kind.BEST, "fraction", theirs, ours, steps)


def _table7() -> Iterator[Cell]:
    """Whether what the appendix says was run can run, and what ran out of host memory cannot."""
    for size in DEVICES:
        found = layouts("memo", size)
        for length, cell in table3("memo", size).items():
            if length in found:
                split, alpha = found[length]
                ours = _runs(size, length * KILO, split, Way(alpha))
                row, column = f"MEMO {size}", f"{length}K"
                yield Cell("MEMO 7", row, column, Kind.FEASIBLE, "runs", 1.0, float(ours))
            elif cell.get("failed") == "oohm":
                split, alpha = found[max(found)]
                ours = _runs(size, length * KILO, split, Way(0.0))
                row, column = f"MEMO {size}", f"{length}K"
                yield Cell("MEMO 7", row, column, Kind.FEASIBLE, "runs", 0.0, float(ours))


def _figure11() -> Iterator[Cell]:
    figure = published("memo")["tables"]["figure11"]
    grid = [1024 << k for k in range(5)]
    for devices, length in zip(figure["gpus"], figure["memo_k"], strict=True):
        ours = memo.longest("7B", devices, "memo", grid)
        yield _longest("MEMO 11a", "MEMO 7B", f"{devices} GPUs", grid, (length, ours))


def allowed_alpha(size: str, length: int, split: Split) -> float:
    """The largest alpha that the planner's own program for it allows (`farspan.planner.space`),
    on a node with the link and the host memory that were read off."""
    tokens = length * KILO
    on, link = memo.calibrated()
    on = replace(
        on,
        fetch_together=link,
        evict_together=link,
        host_memory=2 * link * on.devices,
        host_bytes=int(memo.host_limit()),
    )
    question = ask(memo.swapped_model(size), tokens, on, memo.layout_of(split, Way()))
    return solve_alpha(question, memo.schedule_of(tokens, 0.0)).value


def floored(value: float, grid: list[float]) -> float:
    """The largest of a grid up to a value."""
    return max(point for point in grid if point <= value)
