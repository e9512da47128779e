"""Device memory that a plan leaves to what is in no program: fragments of the allocator, libraries'
workspaces that grow with a call, messages between devices (NCCL)."""

import re
from dataclasses import replace

from farspan.plan.question import Plan, Question
from farspan.plan.units import read_memory
from farspan.spec import MachineSpec, Refused

SHARE = 0.06  # of a device's bytes; what the machine's `reserve` explains is a part of it
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def read_headroom(given: str | int | None) -> float | int:
    """Bytes, or as a float a share of the device, from text such as 3GiB, 5% or 0; None: `SHARE`.
    Raises Refused."""
    if given is None:
        return SHARE
    match = _PERCENT.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is not None and float(match[1]) < 100:
        return float(match[1]) / 100
    if match is None and str(given).strip() == "0":
        return 0
    try:
        return read_memory(given, "headroom")
    except Refused as error:
        raise Refused(
            f"headroom: expected bytes such as 3GiB, a share of the device below 100% such as 5%, "
            f"or 0, got {given!r}"
        ) from error


def headroom_bytes(given: str | int | None, machine: MachineSpec) -> int:
    """Bytes that a plan leaves of a device of this machine. A share counts what `reserve` takes.
    Raises Refused, also for a machine whose tiers are one memory: there None is 0."""
    size = read_headroom(given)
    if machine.unified:
        if given is not None:
            raise Refused(
                f"headroom: {machine.name} has one memory for both tiers, of which no part is left "
                "free; leave it out, and limit host_memory"
            )
        return 0
    if isinstance(size, int):
        return size
    return max(0, int(size * machine.device_bytes) - machine.reserve)


def with_room(question: Question) -> Question:
    """The question on devices that lack their headroom: what fits there leaves it."""
    if question.headroom == 0:
        return question
    machine = question.machine
    smaller = replace(machine, device_bytes=max(0, machine.device_bytes - question.headroom))
    return replace(question, machine=smaller, headroom=0)


def of_whole(question: Question, plan: Plan) -> Plan:
    """A plan that was made `with_room`, as one of the question itself."""
    limit = plan.device.limit + question.machine.device_bytes - plan.question.machine.device_bytes
    return replace(plan, question=question, device=replace(plan.device, limit=limit))
