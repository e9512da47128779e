"""The tables of docs/explanation/comparison.md, from benchmarks/results/peers.json."""

import json
from typing import Any

from benchmarks.fit_page import CLOSING, OPENING, RESULTS, ROOT

PAGE = ROOT / "docs" / "explanation" / "comparison.md"
EXACT = 1e-4  # an error in float32 below it is of rounding; what is left out shows in more
MODELS = ("dense", "windows", "windows and sinks")

Record = dict[str, Any]


def load() -> Record:
    found: Record = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))
    return found


def write() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), load()), encoding="utf-8")


def filled(text: str, record: Record) -> str:
    """The page with every table in its place. Raises ValueError where a mark is missing."""
    for name, table in tables(record).items():
        opening = OPENING.format(name)
        before, mark, rest = text.partition(opening)
        if not mark or CLOSING not in rest:
            raise ValueError(f"the page has no place for {opening}")
        text = f"{before}{opening}\n\n{table}\n\n{rest[rest.index(CLOSING) :]}"
    return text


def tables(record: Record) -> dict[str, str]:
    """Every generated table by its name in the page."""
    said: list[str] = []
    found = {
        "peers alone": grid(record, 1, [(model, "five documents") for model in MODELS], said),
        "peers together": grid(record, 2, [(model, "five documents") for model in MODELS], said),
        "peers one document": grid(
            record,
            2,
            [("dense", "one document"), ("dense", "odd length")]
            + [(model, "one document") for model in MODELS[1:]],
            said,
        ),
    }
    return found | {"peers said": "\n".join(f"{i}. {line}" for i, line in enumerate(said, 1))}


def grid(record: Record, ranks: int, columns: list[tuple[str, str]], said: list[str]) -> str:
    """A table of ways by columns; what was raised is noted by its number in `said`."""
    rows = {(row["way"], row["model"], row["batch"], row["dtype"]): row for row in record["rows"]}
    heads = [model if batch != "odd length" else f"{model}, odd length" for model, batch in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for way, about in record["ways"].items():
        if about["ranks"] == ranks:
            asked = [rows.get((way, model, batch, "float32")) for model, batch in columns]
            cells = ["" if row is None else cell(row, said) for row in asked]
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: Record, said: list[str]) -> str:
    """An error that is of rounding, one that is not, or why there is none."""
    if "raised" not in row:
        right = row["gradients"] < EXACT
        return f"{row['gradients']:.0e}" if right else f"**wrong: {row['gradients']:.2g}**"
    message = f"`{row['raised'].replace('`', chr(39)).replace('|', '/')}`"
    if message not in said:
        said.append(message)
    return f"{verdict(row)} ({said.index(message) + 1})"


def verdict(row: Record) -> str:
    """Whether it takes what a CPU has not, was refused, or failed."""
    raised = row["raised"]
    if "through torch.nn.functional.scaled_dot_product_attention" in raised:
        return "no SDPA"
    if any(word in raised for word in ("_for_cpu", "MULTI_CPU", "on CPU")):
        return "needs a GPU"
    kinds = ("ValueError", "NotImplementedError", "UnsupportedError", "ImportError")
    return "refused" if raised.startswith(kinds) else "fails"


def words(row: Record) -> str:
    """One row, for the terminal."""
    about = f"{row['way']}: {row['model']}, {row['batch']}, {row['dtype']}: "
    if "raised" in row:
        return about + row["raised"]
    return f"{about}loss {row['loss']:.1e}, gradients {row['gradients']:.1e} ({row['worst']})"
