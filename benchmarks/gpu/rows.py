"""What a measurement's row is made of, and what is read off it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.children import Row
from benchmarks.gpu.planned import LESS_ROOM
from benchmarks.gpu.work import Item
from farspan.spec import Schedule


def as_row(schedule: Schedule) -> Row:
    """Fields of a schedule, as JSON has them."""
    names = schedule.__dataclass_fields__
    found = {name: getattr(schedule, name) for name in names}
    found["sparse"] = None if schedule.sparse is None else asdict(schedule.sparse)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def merged(rows: Iterable[Row]) -> Row:
    """One row of a child's rows: steps under `runs`."""
    found: Row = {"runs": []}
    for row in rows:
        if "step" in row:
            found["runs"].append(row)
        else:
            found |= row
    return found


def is_done(row: Mapping[str, Any]) -> bool:
    """Whether measuring it again would tell nothing new."""
    is_final = row["out_of_memory"] and not may_take_less(row)
    return bool(row["child"]["ended"] == "completed" or is_final)


def has_fewer(row: Mapping[str, Any], item: Item) -> bool:
    """Whether a step was measured, fewer times than the item asks for."""
    return 0 < len(row.get("runs", ())) < item.steps


def may_take_less(row: Mapping[str, Any]) -> bool:
    """Whether the device ran out with the first plan of a schedule: there is a second."""
    return bool(row["out_of_memory"] and row.get("room", LESS_ROOM) > LESS_ROOM)


def short_of(row: Mapping[str, Any]) -> Row:
    """What is kept of a measurement for which the device ran out."""
    planned = {key: row["planned"][key] for key in ("schedule", "device_bytes")}
    return {"room": row["room"], "layers": row["layers"], **planned, **row["child"]}


def is_cut(row: Mapping[str, Any]) -> bool:
    """Whether a step was measured, on fewer layers than there are."""
    return row.get("seconds") is not None and row["layers"] < row["of_layers"]


def variance(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """The slowest of a measurement's steps over its fastest; None of one step."""
    seconds = [run["seconds"] for run in runs]
    return max(seconds) / min(seconds) if len(seconds) > 1 else None


def words_of(row: Mapping[str, Any]) -> str:
    """What a row says in a line."""
    if row.get("seconds") is not None:
        depth = "" if row["layers"] == row["of_layers"] else f" on {row['layers']} layers"
        return f"{row['seconds']:.2f} s a step{depth}"
    last = row["child"]["words"].splitlines()[-1:]
    return last[0] if last else f"{row['child']['seconds']:.0f} s"
