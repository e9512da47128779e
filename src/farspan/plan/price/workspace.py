"""What kernels of attention take for themselves while they run, where a machine's file says it.

A backward on CUDA sums dQ in fp32 beside its result, and dK, dV of every query head where heads
share keys: about 14 KB a query and as much a key with the 28 heads of 7B, half a GB for chunks and
blocks of 16K. Phantoms know outputs only. `farspan calibrate` measures it on a GPU; presets do not
have it, and their plans leave it out.
"""

from math import ceil

from farspan.plan.question import Question
from farspan.spec import LayerSpec, Schedule


def workspace_bytes(question: Question, schedule: Schedule) -> int:
    """Device bytes that the largest call takes beside its inputs and results; the schedule is the
    device's own. 0 where that was not measured."""
    rates = question.machine.rates.get(question.dtype)
    if rates is None or rates.attention_workspace == 0.0:
        return 0
    elements = max(_elements(question, schedule, spec) for spec in question.model.layers)
    return ceil(rates.attention_workspace * question.run.batch * elements)


def _elements(question: Question, schedule: Schedule, spec: LayerSpec) -> int:
    """Of a sequence's queries and keys in a call, in every query head of this device."""
    layout = question.layout
    # What ranks share by heads counts as much in tokens of this one; shards see the queries of all.
    own = -(-question.run.tokens // layout.sequence())
    rows = min(own, schedule.chunk) * layout.shards + min(own, schedule.kv_block)
    return rows * spec.query_heads * max(spec.head_dim, spec.value_dim)
