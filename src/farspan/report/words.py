"""A schedule and a layout in words."""

from farspan.plan.layout import AXES, Layout
from farspan.plan.pages import sparse_words
from farspan.plan.question import Question
from farspan.plan.units import write_tokens
from farspan.spec import Schedule, Tier


def schedule_words(schedule: Schedule, layers: int, chunks: int) -> list[str]:
    """One line for each of its choices, for so many layers and chunks."""
    lines = [
        _walk(schedule, layers, chunks),
        f"inputs of each group on the {schedule.x}",
        _prefix(schedule),
        _attention(schedule),
        _kept("other activations", schedule.activations_kept, schedule.activations),
    ]
    if schedule.sparse is not None:
        hides = schedule.sparse.hides(chunks * schedule.chunk, schedule.chunk)
        lines.append(sparse_words(schedule.sparse, hides=hides))
    if schedule.attention_open:
        lines.append("attention outputs of the open group kept while it is rebuilt")
    if schedule.layer_checkpoint:
        lines.append("backward holds one layer's activations at a time")
    default = Schedule()
    if schedule.head_tokens != default.head_tokens:
        lines.append(f"logits of {schedule.head_tokens:,} tokens at a time")
    if schedule.kv is Tier.DEVICE and schedule.kv_block != default.kv_block:
        lines.append(f"attention calls on up to {schedule.kv_block:,} earlier keys")
    return lines


def layout_words(layout: Layout) -> str:
    """The kinds of parallelism in use, such as `ulysses 8 x data 2, FSDP`."""
    names = ("ulysses", "shards", "ring", "tensor", "pipeline", "data")
    used = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    if not used:
        return "one device"
    return " x ".join(used) + (", weights cut over the devices" if layout.fsdp else "")


def launch_words(question: Question) -> str:
    """How `farspan train` is started on the devices of a layout."""
    layout, near = question.layout, question.near()
    nodes = -(-layout.devices() // near)
    where, processes = "torchrun", f"--nproc-per-node {near}"
    if nodes > 1:
        where = f"on each of {nodes} machines torchrun"
        processes = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 {processes}"
    used = [f"{axis}: {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    used += ["fsdp: false"] * (not layout.fsdp)
    return (
        f"{where} {processes} -m farspan train RUN.yaml, with parallel: {{{', '.join(used)}}} in "
        "the file"
    )


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
    return f"{cut}, {len(sizes)} groups of {_runs(sizes)} layers"


def _runs(sizes: tuple[int, ...]) -> str:
    """`3, 4 x 7` for one of 3 and seven of 4."""
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
    kept = _kept("attention outputs", schedule.attention_kept, schedule.attention)
    if schedule.activations_kept <= schedule.attention_kept:
        return kept
    if schedule.attention_kept == 0:
        return "attention outputs kept with the other activations"
    return f"{kept} where other activations are not kept"


def _kept(what: str, fraction: float, tier: Tier) -> str:
    if fraction == 0:
        return f"{what} recomputed"
    if fraction == 1:
        return f"{what} kept on the {tier}"
    return f"{what} of the latest {fraction:.1%} of tokens kept on the {tier}, the rest recomputed"
