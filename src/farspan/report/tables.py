"""Tables and bars in one style; words for schedules, layouts and machines."""

from collections.abc import Iterable
from dataclasses import fields
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from farspan.formatting import sparse_words, write_bytes, write_count, write_seconds, write_tokens
from farspan.planner.machines import MachineFile
from farspan.planner.request import Question
from farspan.program.layout import AXES, Auto, Layout, sequence_layout
from farspan.spec import Curve, MachineSpec, Schedule, Tier

NAME, VALUE, BAR = 36, 10, 24  # columns of a name, a value and a full bar
WIDE = 10_000  # columns of output that is not a terminal: no line is wrapped


def show(view: RenderableType, *, stderr: bool = False) -> None:
    """Print a view formatted for a terminal; to a pipe or a file, as `plain_lines`."""
    console = Console(stderr=stderr)
    if console.is_terminal:
        console.print(view)
    else:
        print(*plain_lines(view), sep="\n", file=console.file, flush=True)


def plain_lines(view: RenderableType, width: int = WIDE) -> list[str]:
    """Render a view as lines without wrapping and padding, so that grep finds whole entries."""
    console = Console(file=StringIO(), color_system=None, width=width)
    with console.capture() as shown:
        console.print(view)
    return [line.rstrip() for line in shown.get().splitlines()]


def lines_table(title: str, *columns: str) -> Table:
    """Return a table without lines, the first column left-aligned, the others right-aligned."""
    heading = Text(title, "bold", no_wrap=True, overflow="ignore")  # however narrow the columns
    table = Table(title=heading, title_justify="left", box=None, padding=(0, 1))
    table.pad_edge = False  # a machine's rates take all of 80 columns
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def bars_table(title: str, rows: Iterable[tuple[str, str, float]]) -> Table:
    """Return a table with columns for names, values and bars, which line up in all such tables."""
    table = lines_table(title, "", "", "")
    table.show_header = False
    table.columns[0].min_width = NAME
    table.columns[1].min_width = VALUE
    table.columns[2].justify = "left"
    for name, value, share in rows:
        table.add_row(f"  {name}", value, bar(share))
    return table


def bar(share: float) -> str:
    """Return a bar of block characters for a share from 0 to 1, in steps of 1/8 character."""
    full, rest = divmod(round(8 * BAR * min(1.0, max(0.0, share))), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()


def schedule_words(schedule: Schedule, layers: int, chunks: int) -> list[str]:
    """Describe each choice of a schedule in a line, for a model of this many layers and chunks."""
    lines = [
        _walk(schedule, layers, chunks),
        f"inputs of each group on the {schedule.boundary_inputs}",
        _prefix(schedule),
        _attention(schedule),
        _kept("other activations", schedule.activation_save_fraction, schedule.activations)
        + _of_layers(schedule),
    ]
    if schedule.sparse is not None:
        hides = schedule.sparse.hides(chunks * schedule.chunk, schedule.chunk)
        lines.append(sparse_words(schedule.sparse, hides=hides))
    if schedule.weights is Tier.HOST:
        lines.append(
            "weights and their gradients on the host; the device holds those of the groups at "
            "work, of the embedding and of the head"
        )
    if schedule.attention_open:
        lines.append("attention outputs of the open group kept while it is rebuilt")
    if schedule.layer_checkpoint:
        lines.append("backward holds one layer's activations at a time")
    default = Schedule()
    if schedule.loss_chunk_size != default.loss_chunk_size:
        lines.append(f"logits of {schedule.loss_chunk_size:,} tokens at a time")
    if schedule.kv is Tier.DEVICE and schedule.kv_block != default.kv_block:
        lines.append(f"attention calls on up to {schedule.kv_block:,} earlier keys")
    return lines


def layout_words(layout: Layout) -> str:
    """Return the kinds of parallelism in use as words, such as `ulysses 8 x data 2, FSDP`."""
    names = ("ulysses", "shards", "ring", "tensor", "pipeline", "data")
    used = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    if not used:
        return "one device"
    return " x ".join(used) + (", weights sharded over the devices" if layout.fsdp else "")


RUN_FILE = "RUN.yaml"  # placeholder of the user's run file


def launch_words(question: Question) -> str:
    """Describe the command that starts `farspan train` on all devices of a layout."""
    layout, near = question.layout, question.near()
    nodes = -(-layout.devices() // near)
    where, processes = "torchrun", f"--nproc-per-node {near}"
    if nodes > 1:
        where = f"on each of {nodes} machines torchrun"
        processes = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 {processes}"
    used = [f"{axis}: {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    used += ["fsdp: false"] * (not layout.fsdp)
    parallel = f"{{{', '.join(used)}}}"
    if layout == sequence_layout(question.model, layout.devices()):
        parallel = Auto.AUTO  # chooses the same layout
    return f"{where} {processes} -m farspan train {RUN_FILE}, with parallel: {parallel} in the file"


def _walk(schedule: Schedule, layers: int, chunks: int) -> str:
    sizes = schedule.group_sizes(layers)
    if chunks == 1:
        cut = "the whole sequence at once"
    else:
        cut = f"{chunks:,} chunks of {write_tokens(schedule.chunk)} tokens"
    if len(sizes) == 1:
        return f"{cut}, through all {layers} layers"
    if set(sizes) == {1}:
        return f"{cut}, layer by layer"
    if len(set(sizes)) == 1:
        return f"{cut}, {len(sizes)} groups of {sizes[0]} layers"
    return f"{cut}, {len(sizes)} groups of {_run_lengths(sizes)} layers"


def _run_lengths(sizes: tuple[int, ...]) -> str:
    """Return group sizes as text: `3, 4 x 7` is a group of 3 layers and seven groups of 4."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return ", ".join(f"{size} x {count}" if count > 1 else f"{size}" for size, count in runs)


def _prefix(schedule: Schedule) -> str:
    if schedule.kv is Tier.HOST:
        place = f"K, V of the open group on the host, streamed {schedule.kv_block:,} keys at a time"
    else:
        place = "K, V of the open group on the device"
    if not schedule.kv_kept:
        return f"{place}; rebuilt for the backward"
    home = Tier.HOST if schedule.kv is Tier.HOST else schedule.kv_home
    return f"{place}; kept for the backward on the {home}"


def _attention(schedule: Schedule) -> str:
    kept = _kept("attention outputs", schedule.attention_save_fraction, schedule.attention)
    if schedule.activation_save_fraction <= schedule.attention_save_fraction:
        return kept
    if schedule.attention_save_fraction == 0:
        return "attention outputs kept with the other activations"
    return f"{kept} where other activations are not kept"


def _kept(what: str, fraction: float, tier: Tier) -> str:
    if fraction == 0:
        return f"{what} recomputed"
    if fraction == 1:
        return f"{what} kept on the {tier}"
    return f"{what} of the latest {fraction:.1%} of tokens kept on the {tier}, the rest recomputed"


def _of_layers(schedule: Schedule) -> str:
    """Return the words for the groups of layers that keep activations, unless all do."""
    share = schedule.activation_save_layers
    is_some = 0 < share < 1 and schedule.activation_save_fraction > 0
    return f", in {share:.1%} of the groups of layers, evenly" if is_some else ""


LINKS = {
    "memory": "elementwise work, read and written",
    "fetch": "host to device",
    "evict": "device to host",
    "fetch_together": "host to device, both directions at once",
    "evict_together": "device to host, both directions at once",
    "host_memory": "host memory, all devices together",
    "disk": "a drive, read and written together",
    "peer": "to a device of the node",
    "network": "to another node",
}


def machine_view(file: MachineFile) -> RenderableType:
    """Return tables of a machine's memory, rates and bandwidths, and the source of each number."""
    spec = file.spec
    parts: list[RenderableType] = [memory_text(spec), rates_table(spec), Text(), links_table(spec)]
    parts.append(Text(f"\nissuing a cell {write_seconds(spec.overhead)}"))
    if file.spread:
        worst = max(file.spread, key=lambda name: file.spread[name])
        spread = f"measurements of one call differ by up to {file.spread[worst]:.2f}x ({worst})"
        parts.append(Text(spread))
    if file.sources:
        parts.append(Text("\nsources", "bold"))
        parts += [Text(f"  {name}: {words}") for name, words in file.sources.items()]
    return Group(*parts)


def memory_text(spec: MachineSpec) -> Text:
    """Describe a machine's devices, and the sizes of device and main memory."""
    if spec.unified:
        return Text(f"{spec.name}: {write_bytes(spec.host_bytes)} of memory for both tiers\n")
    reserve = f", {write_bytes(spec.host_reserve)} in reserve" if spec.host_reserve else ""
    pageable = "" if spec.pinned else ", which cannot be locked: copies do not overlap"
    return Text(
        f"{spec.name}: {spec.devices} x {write_bytes(spec.device_bytes)}, of which "
        f"{write_bytes(spec.reserve)} in reserve; host {write_bytes(spec.host_bytes)}"
        f"{reserve}{pageable}\n"
    )


def rates_table(spec: MachineSpec) -> Table:
    """Return a table of each operation's measured rate in its smallest and largest call."""
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
    """Return a table of bandwidths in B/s, with decimal prefixes: a GB is 10**9 bytes."""
    table = lines_table("bandwidths", "", "")
    table.show_header = False
    for field, name in LINKS.items():
        table.add_row(name, write_count(getattr(spec, field), "B/s"))
    return table


def _point(size: float, rate: float) -> tuple[str, str]:
    return write_count(size, "FLOP"), write_count(rate, "FLOP/s")
