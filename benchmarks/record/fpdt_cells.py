"""The cells of FPDT's tables."""

from benchmarks.record import fpdt
from benchmarks.record.cells import GIB, KILO, Cell, Kind, on_grid, published, steps_between
from benchmarks.record.fpdt import Row


def cells() -> list[Cell]:
    """Table 1's longest contexts, Table 3's HBM and MFU, Table 4's MFU with full attention."""
    return [*_table1(), *_table3(), *_table4()]


def _table1() -> list[Cell]:
    table, grid, found = published("fpdt")["tables"]["table1"], fpdt.lengths(), []
    for size, row in table["rows"].items():
        for (name, gpus), value in zip(table["columns"], row, strict=True):
            theirs = fpdt.value_of(value)
            ours = on_grid(grid, [fpdt.fits(size, k * KILO, gpus, name) for k in grid])
            steps = steps_between(grid, theirs, ours)
            column = f"{gpus} x {name.removeprefix('a100-').upper()}"
            found.append(
                Cell("FPDT 1", size, column, Kind.LONGEST, "K tokens", theirs, ours, steps)
            )
    return found


def _table3() -> list[Cell]:
    table, found = published("fpdt")["tables"]["table3"], []
    for values in table["rows"]:
        row, length = fpdt.row_of(values), values["longest_k"]
        tokens, gpus, column = length * KILO, table["gpus"], f"{length}K"
        need = fpdt.row_bytes(row, tokens, gpus) / GIB
        used = row in (fpdt.WHOLE_READ_OFF, fpdt.OWN)
        found.append(
            Cell("FPDT 3", row.name, column, Kind.MEMORY, "GiB", values["hbm"], need, used=used)
        )
        ours = fpdt.mfu("8B", tokens, gpus, row)
        found.append(Cell("FPDT 3", row.name, column, Kind.MFU, "%", values["mfu"], ours))
        grid = [16 << k for k in range(12)]
        longest = on_grid(grid, [_fits(row, k * KILO, gpus) for k in grid])
        steps = steps_between(grid, length, longest)
        found.append(
            Cell("FPDT 3", row.name, "longest", Kind.LONGEST, "K tokens", length, longest, steps)
        )
    return found


def _fits(row: Row, tokens: int, gpus: int) -> bool:
    if row.fpdt:
        return fpdt.fits("8B", tokens, gpus, "a100-80g")
    on = fpdt.node_machine("a100-80g")
    return fpdt.row_bytes(row, tokens, gpus) <= on.device_bytes - on.reserve


def _table4() -> list[Cell]:
    table = published("fpdt")["tables"]["table4"]
    return [
        Cell(
            "FPDT 4",
            size,
            "256K",
            Kind.MFU,
            "%",
            values["mfu"],
            fpdt.mfu(size, 256 * KILO, values["gpus"], fpdt.OWN),
            used=(size, 256, values["gpus"], values["mfu"]) == fpdt.COPIED,
        )
        for size, values in table["rows"].items()
    ]
