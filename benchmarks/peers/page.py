"""The tables of docs/explanation/comparison.md, from benchmarks/results/peers.json."""

from benchmarks.tables import Record, grid

EXACT = 1e-4  # an error in float32 below it is of rounding; what is left out shows in more
MODELS = ("dense", "windows", "windows and sinks")


def tables(record: Record) -> dict[str, str]:
    """Every generated table by its name in the page."""
    said: list[str] = []
    several = [(model, "five documents") for model in MODELS]
    found = {
        "peers alone": ways_table(record, 1, several, said),
        "peers together": ways_table(record, 2, several, said),
        "peers one document": ways_table(
            record,
            2,
            [("dense", "one document"), ("dense", "odd length")]
            + [(model, "one document") for model in MODELS[1:]],
            said,
        ),
    }
    return found | {"peers said": "\n".join(f"{i}. {line}" for i, line in enumerate(said, 1))}


def ways_table(record: Record, ranks: int, columns: list[tuple[str, str]], said: list[str]) -> str:
    """A table of ways by columns; what was raised is noted by its number in `said`."""
    rows = {(row["way"], row["model"], row["batch"], row["dtype"]): row for row in record["rows"]}
    heads = [model if batch != "odd length" else f"{model}, odd length" for model, batch in columns]
    lines = []
    for way, about in record["ways"].items():
        if about["ranks"] == ranks:
            asked = [rows.get((way, model, batch, "float32")) for model, batch in columns]
            cells = ["" if row is None else cell(row, said) for row in asked]
            lines.append([way, *cells])
    return grid(["", *heads], lines)


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
