"""What schedules leave of each tier, by their bounds: whether any fits, and which has the most."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from farspan.plan.price.collectives import exchange_bytes
from farspan.plan.price.local import local_model, local_schedule
from farspan.plan.price.states import states
from farspan.plan.price.workspace import workspace_bytes
from farspan.plan.question import Question
from farspan.plan.search.bound import TIERS, Frames
from farspan.plan.search.cuts import Cuts
from farspan.plan.search.peaks import Peaks, peaks
from farspan.plan.search.roles import Kept
from farspan.plan.search.ruler import Array, Ruler
from farspan.plan.search.space import Space
from farspan.spec import Schedule


def families(question: Question, space: Space) -> Iterator[tuple[Frames, Schedule]]:
    """Frames of every family of the space, with what its schedules have in common in tokens of the
    sequence."""
    part = replace(question, model=local_model(question))
    cuts: dict[tuple[tuple[int, ...], ...], Cuts] = {}
    rulers: dict[object, Ruler] = {}
    kept: dict[int, Kept] = {}
    chunk = 0
    for schedule, sizes in space.families():
        if schedule.chunk != chunk:
            chunk, rulers, kept = schedule.chunk, {}, {}
        if schedule.kv not in rulers:
            rulers[schedule.kv] = Ruler(question, schedule)
        ruler = rulers[schedule.kv]
        count = len(ruler.chunks)
        frames = Frames(
            ruler,
            local_schedule(schedule, question.layout),
            cuts.setdefault(sizes, Cuts(part, sizes)),
            kept.setdefault(count, _kept(space, count)),
        )
        yield frames, schedule


def _kept(space: Space, chunks: int) -> Kept:
    """Every pair of fractions, in whole chunks."""
    attention = sorted({round(part * chunks) for part in space.attention})
    graphs = sorted({round(part * chunks) for part in space.activations})
    pairs = np.array([(a, b) for a in attention for b in graphs], dtype=np.int64)
    return Kept(pairs[:, 0], pairs[:, 1], chunks)


def taken(frames: Frames) -> Peaks:
    """The frames' bytes, with what messages take under way and kernels for themselves."""
    found, question = peaks(frames), frames.ruler.question
    found.device += exchange_bytes(question, frames.schedule.chunk)
    found.device += workspace_bytes(question, frames.schedule)
    return found


def limits(question: Question) -> tuple[int, int]:
    """Bytes that a device, and its share of main memory, can hold."""
    machine = question.machine
    if machine.unified:
        return machine.host_bytes, machine.host_bytes
    share = machine.host_bytes // min(machine.devices, question.layout.devices())
    return machine.device_bytes, share


def room(question: Question, device: Array, host: Array) -> Array:
    """What is left of the fuller tier, as a share of it."""
    first, second = limits(question)
    if question.machine.unified:
        return np.asarray(1 - (device + host) / first)
    return np.asarray(np.minimum(1 - device / max(1, first), 1 - host / max(1, second)))


def states_do_not_fit(question: Question) -> bool:
    """Are weights, gradients and optimizer states alone too much, whatever the schedule?"""
    part = replace(question, model=local_model(question))
    held = states(part, tuple((i, i + 1) for i in range(len(part.model.layers))))
    device = held.weights + held.gathered + held.gradients + held.optimizer
    device += question.machine.reserve
    first, second = limits(question)
    if question.machine.unified:
        return device + held.optimizer_on_host > first
    return device > first or held.optimizer_on_host > second


def roomiest(question: Question, space: Space, count: int) -> list[Schedule]:
    """The schedules whose fuller tier has the most left by its bounds: of each cut and switches
    the one that has."""
    found = []
    for frames, schedule in families(question, space):
        bytes_ = taken(frames)
        free = room(question, bytes_.device, bytes_.host)
        free = free.reshape(len(free), -1)
        for k, index in enumerate(free.argmax(axis=1)):
            x, attention, activations = TIERS[index % len(TIERS)]
            tiers = {"x": x, "attention": attention, "activations": activations}
            chosen = replace(schedule, groups=frames.cuts.sizes[k], **tiers)
            found.append((float(free[k, index]), chosen))
    found.sort(key=lambda pair: -pair[0])
    return [schedule for _, schedule in found[:count]]
