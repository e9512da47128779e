"""The tables of docs/evidence/record.md, from the cells."""

from collections.abc import Callable

from benchmarks.record import fpdt, memo, oomb
from benchmarks.record.cells import GIB, KILO, WITHIN, Cell, Kind, misses
from benchmarks.tables import grid


def all_cells() -> list[Cell]:
    """Every cell of every table."""
    return [*oomb.cells(), *fpdt.cells(), *memo.cells()]


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


def _matrix(cells: list[Cell]) -> str:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    by_place = {(cell.row, cell.column): cell for cell in cells}
    show = _SHOWN[cells[0].kind]
    body = []
    for row in rows:
        found = (by_place.get((row, column)) for column in columns)
        body.append([row, *(_show(cell, show) for cell in found)])
    return grid(["", *columns], body)


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


def constants() -> dict[str, float]:
    """What was read off a few published numbers."""
    machine, link = memo.calibrated()
    h200, a800 = (of.rates["bfloat16"] for of in (oomb.calibrated(), machine))
    return {
        "h200_attention": h200.attention_forward.points[0][1],
        "h200_attention_backward": h200.attention_backward.points[0][1],
        "a800_attention": a800.attention_forward.points[0][1],
        "a800_attention_backward": a800.attention_backward.points[0][1],
        "a800_link": link,
        "a800_host_bytes": memo.host_limit(),
        "a800_unplanned_share": memo.unplanned_share(),
        "a800_port": machine.network,
        "a800_stop_seconds": memo.stop_seconds(),
        "a100_whole_tensors": fpdt.whole_tensors(),
        "a100_tensor_whole": fpdt.tensor_whole(),
        "a100_copy_seconds_a_byte": fpdt.copy_pace(),
    }


def _calibration() -> str:
    found = constants()
    ours, theirs = (
        [found[f"{card}_attention{way}"] for way in ("", "_backward")] for card in ("h200", "a800")
    )
    swap, free = found["a800_host_bytes"] / GIB, found["a800_unplanned_share"]
    link, port = (found[f"a800_{name}"] / 1e9 for name in ("link", "port"))
    stop, copy = found["a800_stop_seconds"], found["a100_copy_seconds_a_byte"] * 1e9
    rows = [
        (
            "H200, OOMB's kernel",
            f"attention {ours[0] / 1e12:.0f} TFLOP/s forward, {ours[1] / 1e12:.0f} backward",
            "Table 2, 4K at 256K: offload, and checkpoint with offload",
        ),
        (
            "A800, MEMO",
            f"attention {theirs[0] / memo.PEAK:.2f} and {theirs[1] / memo.PEAK:.2f} of the peak",
            "Table 5, 256K, alpha 1",
        ),
        ("", f"one rank's link, eight copying: {link:.1f} GB/s", "Table 5, 192K, alpha 1"),
        (
            "",
            f"host memory to swap to: {swap:.0f} GiB a node",
            "Table 5, between what ran and what did not",
        ),
        (
            "",
            f"device memory without a plan: {free:.2f} of it",
            "Table 4, first row, the longest that ran",
        ),
        (
            "",
            f"one port between nodes: {port:.1f} GB/s",
            "section 5.2, 120.4 s of communication",
        ),
        ("", f"a reorganisation of memory: {stop:.2f} s", "Table 3, Megatron-LM 7B at 128K"),
        (
            "A100, FPDT",
            f"{found['a100_whole_tensors']:.1f} h-wide tensors of all of a rank's tokens",
            "Table 3, FPDT's HBM",
        ),
        (
            "",
            f"tensor parallelism: {found['a100_tensor_whole']:.1f} of them, of all tokens",
            "Table 3, its second row's HBM",
        ),
        ("", f"a checkpoint to host and back: {copy:.2f} s a GB", "Table 4, 8B"),
        ("", "attention's rate: as on MEMO's A800", ""),
    ]
    return grid(["machine", "constant", "read off"], rows)


def _summary(cells: list[Cell]) -> str:
    rows = []
    for group, kind in dict.fromkeys((_group(cell), cell.kind) for cell in cells):
        own = [c for c in cells if (_group(c), c.kind) == (group, kind) and not c.used]
        agree = sum(cell.agrees for cell in own)
        off = sorted(abs(cell.ratio - 1) for cell in own)
        middle = f"{100 * off[len(off) // 2]:.1f}%" if off and kind in WITHIN else ""
        rows.append([group, str(kind), str(len(own)), str(agree), str(len(own) - agree), middle])
    return grid(["table", "number", "cells", "agree", "miss", "median off by"], rows)


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
    return grid(["run", "predicted", "the machine's"], rows)
