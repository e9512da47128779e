"""What a schedule leaves of each tier at any length, without building a program of that length.

Arenas by the bounds of its frame, which are theirs but for padding; what cells hold for a moment
from the program of a few chunks, since it does not grow with the sequence once there is a whole
block of earlier keys (the engine's rehearsal rests on the same).
"""

from dataclasses import replace

import numpy as np

from farspan.plan.grid import kept_chunks
from farspan.plan.price.collectives import exchange_bytes
from farspan.plan.price.evaluate import walk
from farspan.plan.price.local import local_schedule
from farspan.plan.question import Question
from farspan.plan.search.bound import TIERS, Frame
from farspan.plan.search.roles import Kept
from farspan.plan.search.ruler import Ruler
from farspan.spec import RunSpec, Schedule


def left(question: Question, schedule: Schedule) -> tuple[int, int]:
    """Bytes to spare on the device and on its share of the host, negative where it is too much."""
    ruler = Ruler(question, schedule)
    count = len(ruler.chunks)
    kept = Kept(
        np.array([len(kept_chunks(schedule.attention_kept, ruler.chunks))]),
        np.array([len(kept_chunks(schedule.activations_kept, ruler.chunks))]),
        count,
    )
    frame = Frame(ruler, local_schedule(schedule, question.layout), kept)
    tiers = TIERS.index((schedule.x, schedule.attention, schedule.activations))
    device, host = (float(found.flat[tiers]) for found in frame.memory())
    held = ruler.states_of(frame.groups)
    gradients = held.gradients + max(0, held.accumulators + _transient(question, schedule))
    device += exchange_bytes(ruler.question, frame.schedule.chunk) + gradients - frame.momentary()
    machine = question.machine
    if machine.unified:
        spare = int(machine.host_bytes - device - host)
        return spare, spare
    share = machine.host_bytes // min(machine.devices, question.layout.devices())
    return int(machine.device_bytes - device), int(share - host)


def _transient(question: Question, schedule: Schedule) -> int:
    """Of a sequence that has a whole block of keys before its last chunk."""
    enough = 2 * max(schedule.chunk, schedule.kv_block)
    tokens = min(question.run.tokens, -(-enough // schedule.chunk) * schedule.chunk)
    short = replace(question, run=RunSpec(question.run.batch, tokens))
    # Of the few chunks some are kept and some are not, as of the many.
    some = replace(
        schedule,
        attention_kept=_some(schedule.attention_kept),
        activations_kept=_some(schedule.activations_kept),
    )
    return walk(short, some).transient


def _some(fraction: float) -> float:
    return fraction if fraction in (0.0, 1.0) else 0.5
