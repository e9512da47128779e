"""What schedules leave of each tier, by their bounds: whether any fits, and which has the most."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from farspan.plan.price.collectives import exchange_bytes
from farspan.plan.price.ranks import (
    RankKind,
    kinds_of,
    on_machines,
    own_schedule,
    part_of,
    whole_schedule,
)
from farspan.plan.price.states import states
from farspan.plan.price.workspace import workspace_bytes
from farspan.plan.question import Question
from farspan.plan.search.bound import TIERS, Family, Frames
from farspan.plan.search.cuts import Cuts
from farspan.plan.search.lanes import seconds
from farspan.plan.search.peaks import Peaks, peaks
from farspan.plan.search.roles import Kept
from farspan.plan.search.ruler import Array, Ruler
from farspan.plan.search.space import Cut, Space
from farspan.spec import Schedule


def families(
    question: Question, space: Space
) -> Iterator[tuple[Family, Schedule, tuple[Cut, ...]]]:
    """Every family of the space, with what its schedules have in common and their cuts."""
    cuts: dict[tuple[tuple[Cut, ...], RankKind], Cuts] = {}
    rulers: dict[object, Ruler] = {}
    kept: dict[int, Kept] = {}
    chunk = 0
    for schedule, sizes in space.families():
        if schedule.chunk != chunk:
            chunk, rulers, kept = schedule.chunk, {}, {}
        found, like = list[Frames](), None
        for kind in kinds_of(question, replace(schedule, groups=sizes[0])):
            key = schedule.kv, kind.rank
            if key not in rulers:
                rulers[key] = Ruler(question, schedule, kind, like)
            like = rulers[key]
            own = ((len(like.model.layers),),) if kind.is_stage else sizes
            of = cuts.get((own, kind)) or Cuts(like.question, own, kind)
            count = len(like.chunks)
            pairs = kept.get(count) or _kept(space, count)
            cuts[own, kind], kept[count] = of, pairs
            own_groups = replace(schedule, groups=sizes[0]) if kind.is_stage else schedule
            found.append(Frames(like, own_groups, of, pairs))
        yield tuple(found), schedule, sizes


def _kept(space: Space, chunks: int) -> Kept:
    """Every pair of fractions, in whole chunks."""
    attention = sorted({round(part * chunks) for part in space.attention})
    graphs = sorted({round(part * chunks) for part in space.activations})
    pairs = np.array([(a, b) for a in attention for b in graphs], dtype=np.int64)
    return Kept(pairs[:, 0], pairs[:, 1], chunks)


def taken(family: Family) -> tuple[Peaks, Array]:
    """The bytes of a family, with what messages take under way and kernels for themselves: of the
    fullest device and a rank's share of main memory; and of every kind of rank's device."""
    each = [peaks(frames) for frames in family]
    for found, frames in zip(each, family, strict=True):
        question = frames.ruler.question
        own = own_schedule(frames.schedule, question.layout)
        found.device += exchange_bytes(question, own.chunk)
        found.device += workspace_bytes(question, own)
    devices = np.stack([found.device for found in each])
    hosts = np.stack([found.host for found in each])
    return Peaks(fullest(family, devices), together(family, hosts)), devices


def fullest(family: Family, devices: Array) -> Array:
    """Of the kinds of rank, which come first; where both tiers are one memory, a rank's share."""
    if family[0].ruler.question.machine.unified:
        return together(family, devices)
    return np.asarray(devices.max(axis=0))


def together(family: Family, sizes: Array) -> Array:
    """A rank's share of what ranks of one machine take; kinds of rank come first."""
    if len(family) == 1:
        return np.asarray(sizes[0])
    question, kinds = family[0].ruler.question, [frames.cuts.kind for frames in family]
    counts = np.array(on_machines(question, kinds), dtype=np.float64) / question.near()
    return np.asarray(np.tensordot(counts, sizes, axes=1).max(axis=0))


def slowest(family: Family) -> Array:
    """[K, F, T]: seconds of a step at least, of the rank that takes the longest."""
    return np.asarray(np.max([seconds(frames) for frames in family], axis=0))


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
    device, host = list[int](), list[int]()
    kinds = kinds_of(question, whole_schedule(question, Schedule()))
    for kind in kinds:
        part = part_of(question, kind)
        held = states(part, tuple((i, i + 1) for i in range(len(part.model.layers))))
        size = held.weights + held.gathered + held.gradients + held.optimizer
        device.append(size + question.machine.reserve)
        host.append(held.optimizer_on_host)
    first, second = limits(question)
    if question.machine.unified:
        return min(map(sum, zip(device, host, strict=True))) > first
    return max(device) > first or min(host) > second


def roomiest(question: Question, space: Space, count: int) -> list[Schedule]:
    """The schedules whose fuller tier has the most left by its bounds: of each cut and switches
    the one that has."""
    found = []
    for family, schedule, sizes in families(question, space):
        bytes_, _ = taken(family)
        free = room(question, bytes_.device, bytes_.host)
        free = free.reshape(len(free), -1)
        for k, index in enumerate(free.argmax(axis=1)):
            x, attention, activations = TIERS[index % len(TIERS)]
            tiers = {"x": x, "attention": attention, "activations": activations}
            chosen = replace(schedule, groups=sizes[k], **tiers)
            found.append((float(free[k, index]), chosen))
    found.sort(key=lambda pair: -pair[0])
    return [schedule for _, schedule in found[:count]]
