"""The tables of docs/evidence/record.md, from the cells."""

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.record import fpdt, memo, oomb
from benchmarks.record.cells import GIB, KILO, WITHIN, Cell, Kind, misses

OPENING, CLOSING = "<!-- table {} -->", "<!-- end -->"


def tables(cells: list[Cell]) -> dict[str, str]:
    """Every generated table by its name in the page."""
    found = {
        f"{table} {kind}": _matrix([c for c in cells if (c.table, c.kind) == (table, kind)])
        for table, kind in dict.fromkeys((cell.table, cell.kind) for cell in cells)
        if (table, kind) != ("OOMB 2", Kind.FEASIBLE)  # all agree
    }
    found["calibration"] = _calibration()
    found["summary"] = _summary(cells)
    found["misses"] = _misses(cells)
    found["host"] = _host()
    return found


def write(path: Path, cells: list[Cell]) -> None:
    """Put the tables between their marks."""
    text = path.read_text(encoding="utf-8")
    path.write_text(filled(text, cells), encoding="utf-8")


def filled(text: str, cells: list[Cell]) -> str:
    """The page with every table in its place. Raises ValueError where a mark is missing."""
    for name, table in tables(cells).items():
        opening = OPENING.format(name)
        before, mark, rest = text.partition(opening)
        if not mark or CLOSING not in rest:
            raise ValueError(f"the page has no place for {opening}")
        after = rest[rest.index(CLOSING) :]
        text = f"{before}{opening}\n\n{table}\n\n{after}"
    return text


def _grid(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _matrix(cells: list[Cell]) -> str:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    by_place = {(cell.row, cell.column): cell for cell in cells}
    show = _SHOWN[cells[0].kind]
    body = []
    for row in rows:
        found = (by_place.get((row, column)) for column in columns)
        body.append([row, *(_show(cell, show) for cell in found)])
    return _grid(["", *columns], body)


def _show(cell: Cell | None, show: Callable[[Cell], str]) -> str:
    if cell is None:
        return ""
    mark = "" if cell.agrees else " **miss**"
    return f"{show(cell)}{' (used)' if cell.used else ''}{mark}"


def _ratio(cell: Cell) -> str:
    return f"{cell.ratio:.2f}"


def _lengths(cell: Cell) -> str:
    ours, theirs = (_length(value) for value in (cell.predicted, cell.published))
    return f"{ours} / {theirs}" + (f" ({cell.steps:+d})" if cell.steps else "")


def _fractions(cell: Cell) -> str:
    return f"{cell.predicted:g} / {cell.published:g}" + (
        f" ({cell.steps:+d})" if cell.steps else ""
    )


def _length(value: float) -> str:
    if not value:
        return "none"
    return f"{value / KILO:g}M" if value % KILO == 0 else f"{value:g}K"


def _answers(cell: Cell) -> str:
    ours, theirs = ("runs" if value else "no" for value in (cell.predicted, cell.published))
    return ours if cell.agrees else f"{ours} / {theirs}"


_SHOWN: dict[Kind, Callable[[Cell], str]] = {
    Kind.MEMORY: _ratio,
    Kind.GROWTH: _ratio,
    Kind.LATENCY: _ratio,
    Kind.MFU: _ratio,
    Kind.LONGEST: _lengths,
    Kind.BEST: _fractions,
    Kind.FEASIBLE: _answers,
}


def _calibration() -> str:
    kernel = oomb.calibrated().rates["bfloat16"]
    ours, link = memo.calibrated()
    rates = ours.rates["bfloat16"]
    forward, backward = (
        curve.points[0][1] for curve in (rates.attention_forward, rates.attention_backward)
    )
    tera = 1e12
    own = (kernel.attention_forward.points[0][1], kernel.attention_backward.points[0][1])
    rows = [
        [
            "H200, OOMB's kernel",
            f"attention {own[0] / tera:.0f} TFLOP/s forward, {own[1] / tera:.0f} backward",
            "Table 2, 4K at 256K: offload, and checkpoint with offload",
        ],
        [
            "A800, MEMO",
            f"attention {forward / memo.PEAK:.2f} and {backward / memo.PEAK:.2f} of the peak",
            "Table 5, 256K, alpha 1",
        ],
        ["", f"one rank's link, eight copying: {link / 1e9:.1f} GB/s", "Table 5, 192K, alpha 1"],
        [
            "",
            f"host memory to swap to: {memo.host_limit() / GIB:.0f} GiB a node",
            "Table 5, between what ran and what did not",
        ],
        [
            "",
            f"device memory without a plan: {memo.unplanned_share():.2f} of it",
            "Table 4, first row, the longest that ran",
        ],
        [
            "",
            f"one port between nodes: {ours.network / 1e9:.1f} GB/s",
            "section 5.2, 120.4 s of communication",
        ],
        [
            "",
            f"a reorganisation of memory: {memo.stop_seconds():.2f} s",
            "Table 3, Megatron-LM 7B at 128K",
        ],
        [
            "A100, FPDT",
            f"{fpdt.whole_tensors():.1f} h-wide tensors of all of a rank's tokens",
            "Table 3, FPDT's HBM",
        ],
        [
            "",
            f"tensor parallelism: {fpdt.tensor_whole():.1f} of them, of all tokens",
            "Table 3, its second row's HBM",
        ],
        [
            "",
            f"a checkpoint to host and back: {fpdt.copy_pace() * 1e9:.2f} s a GB",
            "Table 4, 8B",
        ],
        ["", "attention's rate: as on MEMO's A800", ""],
    ]
    return _grid(["machine", "constant", "read off"], rows)


def _summary(cells: list[Cell]) -> str:
    rows = []
    for group, kind in dict.fromkeys((_group(cell), cell.kind) for cell in cells):
        own = [c for c in cells if (_group(c), c.kind) == (group, kind) and not c.used]
        agree = sum(cell.agrees for cell in own)
        off = sorted(abs(cell.ratio - 1) for cell in own)
        middle = f"{100 * off[len(off) // 2]:.1f}%" if off and kind in WITHIN else ""
        rows.append([group, str(kind), str(len(own)), str(agree), str(len(own) - agree), middle])
    return _grid(["table", "number", "cells", "agree", "miss", "median off by"], rows)


def _group(cell: Cell) -> str:
    """The table, and whether it is the paper's own system or a baseline."""
    baselines = ("baseline", "DeepSpeed", "Megatron", "tensor parallel", "Ulysses")
    if cell.table not in ("OOMB 2", "MEMO 3", "FPDT 3"):
        return cell.table
    return f"{cell.table}, {'baselines' if cell.row.startswith(baselines) else 'own'}"


def _misses(cells: list[Cell]) -> str:
    """Misses that nothing explains; the result file has all of them, each with its reason."""
    lines: list[str] = []
    for miss in misses():
        if miss.explained:
            continue
        hit = [cell for cell in cells if not cell.agrees and miss.covers(cell)]
        places: dict[str, list[str]] = {}
        for cell in hit:
            places.setdefault(cell.row, []).append(cell.column)
        shown = "; ".join(f"{row}: {', '.join(columns)}" for row, columns in places.items())
        heading = f"### {miss.table}, {miss.kind}"
        lines += [] if heading in lines else [heading]
        lines.append(f"**{shown}.** {miss.why}")
    return "\n\n".join(lines)


def _host() -> str:
    """Host memory that the papers' headline runs need and do not state."""
    four = 4096 * KILO
    token = oomb.kv_bytes(memo.SAMPLE) / memo.SAMPLE
    rows = [
        ["OOMB, Qwen2.5-7B at 4M, offload", f"{token * four / GIB:.0f} GiB", "not stated"],
        [
            "FPDT, 8B at 4M on two nodes, a node",
            f"{fpdt.fpdt_node_bytes('8B', four, 8) / GIB:.0f} GiB",
            "1 TB",
        ],
    ]
    return _grid(["run", "predicted", "the machine's"], rows)
