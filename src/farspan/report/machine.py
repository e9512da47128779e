"""A measured machine as tables for a terminal."""

from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farspan.plan.price.machines import MachineFile
from farspan.plan.units import write_bytes, write_count, write_seconds
from farspan.report.tables import lines_table
from farspan.spec import Curve, MachineSpec

LINKS = {
    "memory": "elementwise work, read and written",
    "fetch": "host to device",
    "evict": "device to host",
    "fetch_together": "host to device, both at once",
    "evict_together": "device to host, both at once",
    "host_memory": "host memory, all devices together",
    "peer": "to a device of the node",
    "network": "to another node",
}


def machine_view(file: MachineFile) -> RenderableType:
    """Memory, rates, bandwidths, and which of them were not measured."""
    spec = file.spec
    parts: list[RenderableType] = [memory_text(spec), rates_table(spec), Text(), links_table(spec)]
    parts.append(Text(f"\nissuing a cell {write_seconds(spec.overhead)}"))
    if file.spread:
        worst = max(file.spread, key=lambda name: file.spread[name])
        looks = f"looks at one call differ by up to {file.spread[worst]:.2f}x ({worst})"
        parts.append(Text(looks))
    if file.sources:
        parts.append(Text("\nhow each is known", "bold"))
        parts += [Text(f"  {name}: {words}") for name, words in file.sources.items()]
    return Group(*parts)


def memory_text(spec: MachineSpec) -> Text:
    """Devices and the memory of both tiers."""
    if spec.unified:
        return Text(f"{spec.name}: {write_bytes(spec.host_bytes)} of memory for both tiers\n")
    pageable = "" if spec.pinned else ", none of it lockable: copies run in line"
    return Text(
        f"{spec.name}: {spec.devices} x {write_bytes(spec.device_bytes)}, of which "
        f"{write_bytes(spec.reserve)} in reserve; host {write_bytes(spec.host_bytes)}{pageable}\n"
    )


def rates_table(spec: MachineSpec) -> Table:
    """Each curve by its smallest and its largest call."""
    title = "rates of the smallest and the largest call"
    table = lines_table(title, "", "smallest", "rate", "largest", "rate")
    for dtype, rates in spec.rates.items():
        for field in fields(rates):
            curve = getattr(rates, field.name)
            if isinstance(curve, Curve):
                name = f"{dtype} {field.name.replace('_', ' ')}"
                ends = (curve.points[0], curve.points[-1])
                cells = [text for end in ends for text in _point(*end)]
                table.add_row(name, *cells)
        table.add_row(f"{dtype} peak", "", "", "", write_count(rates.peak, "FLOP/s"))
    return table


def links_table(spec: MachineSpec) -> Table:
    """Bandwidths; a GB is 10**9 bytes."""
    table = lines_table("bandwidths", "", "")
    table.show_header = False
    for field, name in LINKS.items():
        table.add_row(name, write_count(getattr(spec, field), "B/s"))
    return table


def _point(size: float, rate: float) -> tuple[str, str]:
    return write_count(size, "FLOP"), write_count(rate, "FLOP/s")
