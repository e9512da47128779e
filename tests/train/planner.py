"""A planner of a few lines: the first of some schedules that fits, by the bytes of its program."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from farspan.engine.memory import least_transient
from farspan.planner.machines import machine
from farspan.planner.plans import placements
from farspan.planner.request import Budget, Plan, Question, Remedy, Seconds
from farspan.program.builder import build_program
from farspan.spec import MachineSpec, Schedule, Tier
from farspan.train.context import Components
from tests.train.tiny import replaced

GIB = 2**30
STATES = 16  # bytes a float32 parameter: weight, gradient, two moments


def one_memory(size: int = GIB) -> MachineSpec:
    """A CPU with so much memory, for a planner that does not ask for its rates."""
    return replace(
        machine("h200"), name="stand-in", unified=True, processors=0, host_bytes=size, reserve=1000
    )


def plan_for(question: Question, name: str, schedule: Schedule) -> Plan:
    """What a schedule takes; its time is its number of instructions in milliseconds."""
    program = build_program(question.model, question.run, schedule)
    device = program.arena_bytes[Tier.DEVICE] + least_transient(program)
    parts = {
        "weights": STATES * question.model.parameters,
        "arena": device,
        "reserve": question.machine.reserve,
    }
    host = {"arena": program.arena_bytes[Tier.HOST]}
    limits = question.machine.device_bytes, question.machine.host_bytes
    if question.machine.unified:
        whole = question.host_share()
        limits = whole - sum(host.values()), whole - sum(parts.values())
    seconds = len(program.instructions) / 1000
    return Plan(
        strategy=name,
        schedule=schedule,
        question=question,
        device=Budget(parts, limits[0]),
        host=Budget(host, limits[1]),
        seconds=Seconds(seconds, seconds, 0.0, 0.0, 0.0, 0.0, 0.0, "compute"),
        mfu=0.5,
        reason="the first that fits",
        remedies=(Remedy("--host-memory 128GiB", same=True),),
    )


def first_of(
    schedules: Sequence[Schedule], asked: list[Question] | None = None
) -> Callable[[Question], Plan]:
    """Plans with one of these, everything where it is; writes down what it was asked."""

    def best_plan(question: Question) -> Plan:
        if asked is not None:
            asked.append(question)
        here = placements(question)[0][0]
        plans = [plan_for(here, "grouped", schedule) for schedule in schedules]
        return next((plan for plan in plans if plan.fits), plans[-1])

    return best_plan


def planned_components(
    schedules: Sequence[Schedule], size: int = GIB, asked: list[Question] | None = None
) -> Components:
    """farspan's own parts with this planner and a machine of `size` bytes."""

    def here(
        device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
    ) -> MachineSpec:
        assert device.type == "cpu"
        assert dtype.is_floating_point
        progress("nothing")
        return one_memory(size)

    return replaced(machine=here, best_plan=first_of(schedules, asked), evaluate=plan_for)
