"""What planning says of each measurement, on the machine whose ceilings were measured first.

It decides which schedule `auto` is, how many layers fit into the time that is left, and stands
beside every number that was measured.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from benchmarks.children import Row
from benchmarks.gpu.work import LOGPROBS, QLORA, RANK, SPARSE, STREAMED, Item, Work
from farspan.ask import as_run, measuring
from farspan.planner.evaluate import evaluate, useful_flop
from farspan.planner.machines import machine, preset_of_gpu
from farspan.planner.plans import best_plan
from farspan.planner.prices import rates_of
from farspan.planner.request import Open, Optimizer, Plan, Question
from farspan.planner.states import states, update_seconds
from farspan.profile.model import Variant
from farspan.profile.store import profiles_of
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import LossKind, MachineSpec, Objective, RunSpec, Schedule, Tier
from farspan.train.config import StatesPlace
from farspan.train.memory import Placed
from farspan.train.planning import PLANNED, why_there

GIB = 2**30
# Of a device's bytes, what a plan may take, and what one may after that ran out. No plan has what
# cuDNN and flash attention take beside their results, cuBLAS's 32 MiB a thread and stream, nor what
# the allocator cannot join: an H200's 140 GiB leave 8 GiB for it, and then 21.
ROOM, LESS_ROOM = 0.94, 0.85
# Of main memory: locked pages cannot be swapped, and page tables (2 MiB a GiB), the driver's own
# lists of them and whatever else runs come on top.
HOST_ROOM, HOST_APART = 0.95, 2 * GIB

GROUPED = "grouped"  # its own defaults: a search for it would be auto's
OFFLOAD = "offload"  # the strategy that is the baseline's
SEARCH_SECONDS = 3.0

NOWHERE = "h200"  # the preset to plan with where there is no GPU: the script is only seen to run
CAPABILITIES = {
    "h100": 9.0,
    "h200": 9.0,
    "b200": 10.0,
    "b300": 10.3,
    "a100-40g": 8.0,
    "a100-80g": 8.0,
    "a800": 8.0,
    "l40s": 8.9,
    "rtx4090": 8.9,
    "rtx3090": 8.6,
    "a6000": 8.6,
}


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU that is there, as its driver has it."""

    name: str
    device_bytes: int
    capability: float  # 9.0


def preset_for(card: Card | None) -> tuple[MachineSpec, str]:
    """What to plan with where nothing was measured, and words for it: the GPU's own preset, or
    the nearest by capability, then by memory, with the bytes that are there."""
    if card is None:
        return machine(NOWHERE), f"preset {NOWHERE}: there is no GPU"
    found = preset_of_gpu(card.name)
    words = f"preset {found}"
    if found is None:

        def distance(name: str) -> tuple[float, float]:
            near = abs(log(machine(name).device_bytes / card.device_bytes))
            return abs(CAPABILITIES[name] - card.capability), near

        found = min(CAPABILITIES, key=distance)
        has = f"{card.device_bytes / GIB:.0f} GiB, capability {card.capability:.1f}"
        words = f"preset {found}, the nearest to {card.name} ({has}), which none is of"
    return replace(machine(found), device_bytes=card.device_bytes), words


@dataclass(frozen=True, slots=True)
class Update:
    """AdamW's update, planned."""

    placed: Placed
    held: dict[str, int]  # bytes of the states by tier
    seconds: float
    fits: bool  # beside the weights and the gradients

    def to_json(self) -> Row:
        placed = {"states": str(self.placed.states), "reason": self.placed.reason}
        return placed | {"held": self.held, "planned_seconds": self.seconds}


@dataclass(slots=True)
class Planner:
    """Plans of full depth, made on a thread while something is measured, and of fewer layers."""

    work: Work
    found: MachineSpec  # all that can be had
    machine: MachineSpec = field(init=False)  # what plans may take
    _pool: ThreadPoolExecutor = field(init=False)
    _urgent: ThreadPoolExecutor = field(init=False)  # what is waited for at once: others are queued
    _plans: dict[tuple[str, int, float], "Future[Plan]"] = field(init=False, default_factory=dict)
    _placed: "Future[Placed] | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        host = host_room(self.found.host_bytes)
        self.machine = replace(self.found, devices=1, host_bytes=host)
        self._pool, self._urgent = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def prepare(self, items: Iterable[Item]) -> None:
        """Begins to plan what these items need, in their order."""
        for item in items:
            if item.work == "update":
                self._begin_placing()
            elif item.tokens and item.work != "longest":
                self._begin(name_of(item), item.tokens, ROOM)

    def plan(self, item: Item, room: float = ROOM) -> Plan:
        """At full depth, in so much of the device."""
        return self._begin(name_of(item), item.tokens, room).result()

    def cut(self, plan: Plan, layers: int) -> Plan:
        """The same on fewer layers."""
        schedule = cut_schedule(plan.schedule, self.work.layers, layers)
        question = self.question(plan.question.run.tokens, layers)
        asked = plan.question
        question = replace(question, machine=asked.machine, sparse=schedule.sparse)
        question = replace(question, wide_gradients=asked.wide_gradients, weights=asked.weights)
        return evaluate(question, plan.strategy, schedule)

    def share(self, tokens: int, layers: int) -> float:
        """Seconds of so many layers over those of all, about: their share of the work."""
        one, all_ = (useful_flop(self.question(tokens, n)) for n in (layers, self.work.layers))
        return one / all_

    def question(self, tokens: int, layers: int, room: float = ROOM) -> Question:
        device = int(room * self.machine.device_bytes)
        config = self.work.config | {"num_hidden_layers": layers}
        profiles = profiles_of(config, "works", measuring=measuring)
        question = Question(
            model=profiles.of(Variant(self.work.dtype)).spec,
            run=RunSpec(1, tokens),
            machine=replace(self.machine, device_bytes=device),
            optimizer=Optimizer.NONE,
            dtype=self.work.dtype,
            overlap=not self.machine.unified,
            wide_gradients=True,  # as in training
            profiles=profiles,
        )
        return as_run(question)

    def update(self, layers: int) -> Update:
        """Of so many layers, the states where training at the middle length has them."""
        placed = self._begin_placing().result()
        question = self._with_states(self.work.middle, layers, placed.states)
        parts, room = states(question, ((0, layers),)), int(LESS_ROOM * self.machine.device_bytes)
        on_device = parts.weights + parts.gradients + parts.optimizer
        return Update(
            placed,
            {"device": parts.optimizer, "host": parts.optimizer_on_host},
            update_seconds(question),
            on_device <= room and parts.optimizer_on_host <= self.machine.host_bytes,
        )

    def _with_states(self, tokens: int, layers: int, place: StatesPlace) -> Question:
        return replace(self.question(tokens, layers), optimizer=PLANNED[place])

    def _begin_placing(self) -> "Future[Placed]":
        if self._placed is None:
            self._placed = self._pool.submit(self._place)
        return self._placed

    def _place(self) -> Placed:
        """As `farspan train` places the states of a run by `auto`."""

        question = self.question(self.work.middle, self.work.layers)
        asked = replace(question, optimizer=Optimizer.ADAMW, open=Open(states=True))
        plan = best_plan(asked, seconds=SEARCH_SECONDS)
        places = {optimizer: states for states, optimizer in PLANNED.items()}
        return Placed(places[plan.question.optimizer], why_there(plan))

    def _begin(self, name: str, tokens: int, room: float) -> "Future[Plan]":
        key = name, tokens, room
        if key not in self._plans:
            pool = self._pool if room == ROOM else self._urgent
            self._plans[key] = pool.submit(self._make, *key)
        return self._plans[key]

    def _make(self, name: str, tokens: int, room: float) -> Plan:
        question = self.question(tokens, self.work.layers, room)
        question = replace(question, wide_gradients=name != OFFLOAD)
        if name in (GROUPED, OFFLOAD):
            return evaluate(question, name, strategy(name, self.work.layers, tokens))
        if name == SPARSE:
            question = replace(question, sparse=self.work.sparse)
        if name == STREAMED:
            question = replace(question, weights=Tier.HOST)
        if name == QLORA:
            question = as_run(replace(question, nf4=True, profile=None), RANK)
        if name == LOGPROBS:
            question = replace(question, loss=Objective(LossKind.GRPO))
        names = [name] if name in STRATEGIES else None
        return best_plan(question, names, seconds=SEARCH_SECONDS)


def host_room(available: int) -> int:
    """Bytes of main memory to plan with; half where there is next to none."""
    return max(available // 2, int(HOST_ROOM * available) - HOST_APART)


def name_of(item: Item) -> str:
    """The strategy whose plan is the item's."""
    return OFFLOAD if item.work == "huggingface" else item.strategy


def cut_schedule(schedule: Schedule, full: int, layers: int) -> Schedule:
    """The schedule for a model of the last `layers` of `full` layers."""
    return replace(schedule, groups=cut_sizes(schedule.group_sizes(full), layers))


def cut_sizes(sizes: Sequence[int], layers: int) -> tuple[int, ...]:
    """Groups of so many layers: as many of the last ones as they are, what is left in one before
    them. There are two at least where there were: a last group is passed once less than others."""
    kept: list[int] = []
    for size in reversed(sizes):
        kept.insert(0, min(size, layers - sum(kept)))
        if sum(kept) == layers:
            break
    if len(kept) == 1 and len(sizes) > 1 and layers > 1:
        return layers - layers // 2, layers // 2
    return tuple(kept)


def mfu(plan: Plan, seconds: float) -> float:
    """Of a step by this plan that took so long."""
    return useful_flop(plan.question, plan.schedule) / (rates_of(plan.question).peak * seconds)


def plan_json(plan: Plan) -> Row:
    """What is predicted. Device bytes are those of tensors: the context is left out."""
    device = {name: size for name, size in plan.device.parts.items() if name != "reserve"}
    found: dict[str, Any] = plan.to_json()
    return {
        "strategy": plan.strategy,
        "schedule": found["schedule"],
        "fits": plan.fits,
        "reason": plan.reason,
        "seconds": plan.seconds.total,
        "exposed_seconds": plan.seconds.exposed(overlap=plan.question.overlap),
        "overlap": plan.question.overlap,
        "device_bytes": sum(device.values()),
        "host_bytes": plan.host.total,
        "device_parts": device,
    }
