"""What a run is told when the planner finds no schedule: the planner speaks of flags of `farspan
plan`, a run of its file and its ranks."""

from farspan.plan.question import Budget, Plan
from farspan.plan.units import write_bytes
from farspan.plan.words import part_words
from farspan.train.layout import COMMAND

USUAL = "shorten the context, use a smaller batch or start more ranks, on more machines"


def none_fits(plan: Plan) -> str:
    """The room there is, what the plan that misses by the least would take of it, and what to
    change."""
    return f"schedule: none fits {_room(plan)}: {_miss(plan)}; {advice(plan)}"


def advice(plan: Plan) -> str:
    """The planner's remedy as a change of the run file."""
    question, (flag, _, value) = plan.question, plan.remedy.partition(" ")
    match flag:
        case "":
            return "shorten the context"
        case "--optimizer" if value == "host":
            # Where both tiers are main memory, states take as much of it either way.
            return USUAL if question.machine.unified else "set optimizer.states: host"
        case "--optimizer":
            alone = question.layout.devices() == 1  # dealt over ranks they are refused
            return f"set optimizer.states: 8bit, which is not AdamW, or {USUAL}" if alone else USUAL
        case "--host-memory":
            return f"use a machine with {value} of main memory (and so much host_memory, if set)"
        case "--batch":
            return f"set batch: {value}, and accumulate as much higher"
        case "--gpus":
            machines = -(-int(value) // question.machine.devices)
            start = COMMAND.format(value) if machines == 1 else f"on {machines} machines"
            return f"start {value} ranks, with parallel: auto: {start}"
        case "--context":
            return f"set context: {value}"
        case "without":
            return "set sparse: null"
        case _:
            return plan.remedy


def _room(plan: Plan) -> str:
    machine, near = plan.question.machine, plan.question.near()
    together = f" for the {near} ranks of a machine" if near > 1 else ""
    if machine.unified:
        return f"{write_bytes(machine.host_bytes)} of main memory{together}"
    each = "each" if near > 1 else "the"
    host = f"{write_bytes(machine.host_bytes)} on the host{together}"
    return f"{write_bytes(machine.device_bytes)} on {each} device and {host}"


def _miss(plan: Plan) -> str:
    """What one rank needs and has, of what it lacks most."""
    question = plan.question
    if question.machine.unified:  # one memory, whose limits are less by what the other tier takes
        tiers = (plan.device.parts, plan.host.parts)
        parts = {n: sum(t.get(n, 0) for t in tiers) for n in {**tiers[0], **tiers[1]}}
        budget, where = Budget(parts, question.host_share()), "main memory"
    elif plan.device.left < plan.host.left:
        budget, where = plan.device, "device memory"
    else:
        budget, where = plan.host, "main memory"
    who = "a rank" if question.layout.devices() > 1 else "it"
    most = sorted(filter(budget.parts.get, budget.parts), key=lambda name: -budget.parts[name])
    fills = " and ".join(
        f"{write_bytes(budget.parts[name])} of {part_words(name)}" for name in most[:2]
    )
    return (
        f"{plan.strategy} misses by the least: {who} needs {write_bytes(budget.total)} of {where} "
        f"and has {write_bytes(max(0, budget.limit))}; most of it is {fills}"
    )
