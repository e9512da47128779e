"""What kernels of attention take for themselves while they run, and longer where their bits repeat.

A backward on CUDA sums dQ in fp32 beside its result, and dK, dV of every query head where heads
share keys: about 14 KB a query and as much a key with the 28 heads of 7B, half a GB for chunks and
blocks of 16K. Phantoms know outputs only. `farspan calibrate` measures it on a GPU; presets do not
have it, and their plans leave it out.

Flash attention 2 is deterministic by as many sums of dQ as keep every processor busy, and adds them
up in a fixed order: 5 of them with 28 heads on an H100, 1.2 GB at 16K queries. Plans have them for
every machine, for no other kernel has as many.
"""

from dataclasses import replace
from math import ceil

from farspan.plan.question import Question
from farspan.spec import AttentionKernel, Curve, LayerSpec, MachineSpec, Rates, Schedule

MOST_PROCESSORS = 192  # of a device whose machine file does not say: more than any has
ROWS, COLUMNS = 128, 32  # flash attention rounds queries and heads up to multiples of them
HALF = ("bfloat16", "float16")


def workspace_bytes(question: Question, schedule: Schedule) -> int:
    """Device bytes that the largest call takes beside its inputs and results; the schedule is the
    device's own. 0 where that was not measured, but for what same bits take."""
    return max(_bytes(question, schedule, spec) for spec in question.model.layers)


def _bytes(question: Question, schedule: Schedule, spec: LayerSpec) -> int:
    rates, batch = question.machine.rates.get(question.dtype), question.run.batch
    queries, keys = _rows(question, schedule)
    width = max(spec.head_dim, spec.value_dim)
    measured = 0.0 if rates is None else rates.attention_workspace
    found = ceil(measured * batch * (queries + keys) * spec.query_heads * width)
    if not spec.attends() or not _sums_apart(question):
        return found
    processors = question.machine.processors or MOST_PROCESSORS
    layout = question.layout
    heads = batch * ceil(spec.query_heads / (layout.ulysses * layout.tensor))  # of this device
    sums = ceil(processors / heads) - (measured > 0)  # one of them was measured
    of_one = _up(queries, ROWS) * batch * spec.query_heads * _up(width, COLUMNS) * 4
    return found + sums * of_one


def _sums_apart(question: Question) -> bool:
    """Is dQ summed by flash attention 2, and the same way each time?"""
    kernels = question.kernels
    flash = kernels.attention in (AttentionKernel.AUTO, AttentionKernel.FLASH)
    on_gpu = not question.machine.unified and question.dtype in HALF
    return kernels.deterministic and flash and on_gpu


def _rows(question: Question, schedule: Schedule) -> tuple[int, int]:
    """Of queries and of keys in a sequence's call, in every query head of this device."""
    layout = question.layout
    # What ranks share by heads counts as much in tokens of this one; shards see the queries of all.
    own = -(-question.run.tokens // layout.sequence())
    return min(own, schedule.chunk) * layout.shards, min(own, schedule.kv_block)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def with_kernels(machine: MachineSpec, *, deterministic: bool) -> MachineSpec:
    """The machine at the rates that attention has where its bits are the same every time."""
    if not deterministic or machine.unified:
        return machine
    rates = {dtype: _slower(rates) for dtype, rates in machine.rates.items()}
    return replace(machine, rates=rates)


def _slower(rates: Rates) -> Rates:
    by = rates.deterministic

    def curve(known: Curve) -> Curve:
        return Curve(tuple((size, rate / by) for size, rate in known.points))

    def or_none(known: Curve | None) -> Curve | None:
        return None if known is None else curve(known)

    return replace(
        rates,
        attention_forward=curve(rates.attention_forward),
        attention_backward=curve(rates.attention_backward),
        causal_forward=or_none(rates.causal_forward),
        causal_backward=or_none(rates.causal_backward),
        softmax_forward=rates.softmax_forward * by,
        softmax_backward=rates.softmax_backward * by,
        deterministic=1.0,
    )
