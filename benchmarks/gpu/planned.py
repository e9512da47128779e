"""What planning says of each measurement, on the machine whose ceilings were measured first.

It decides which schedule `auto` is and which measurement the time is left for, and stands beside
every number that was measured.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
from farspan.program.attention_blocks import seen_pairs
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import (
    BACKWARD_PRODUCTS,
    LossKind,
    MachineSpec,
    Objective,
    RunSpec,
    Tier,
    UnsupportedError,
)
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


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU that is there, as its driver has it."""

    name: str
    device_bytes: int


def preset_for(card: Card | None) -> tuple[MachineSpec, str]:
    """The preset to plan with where nothing was measured, with the bytes that are there, and words
    for it. Raises UnsupportedError for a card without one."""
    if card is None:
        return machine("h200"), "preset h200: there is no GPU"
    found = preset_of_gpu(card.name)
    if found is None:
        raise UnsupportedError(
            f"only: no preset is of {card.name}; measure its ceilings first: --only ceilings"
        )
    return replace(machine(found), device_bytes=card.device_bytes), f"preset {found}"


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
    """Plans of full depth, made on a thread while something is measured."""

    work: Work
    found: MachineSpec  # all that can be had
    machine: MachineSpec = field(init=False)  # what plans may take
    _pool: ThreadPoolExecutor = field(init=False)
    _plans: dict[tuple[str, int, float], "Future[Plan]"] = field(init=False, default_factory=dict)
    _placed: "Future[Placed] | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        host = host_room(self.found.host_bytes)
        self.machine = replace(self.found, devices=1, host_bytes=host)
        self._pool = ThreadPoolExecutor(1)

    def prepare(self, items: Iterable[Item]) -> None:
        """Begins to plan what these items need, in their order."""
        for item in items:
            if item.work == "update":
                self._begin_placing()
            elif item.tokens:
                self._begin(name_of(item), item.tokens, ROOM)

    def plan(self, item: Item, room: float = ROOM) -> Plan:
        """The item's plan, in so much of the device."""
        return self._begin(name_of(item), item.tokens, room).result()

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

    def update(self) -> Update:
        """The update, the states where training at the middle length has them."""
        placed, layers = self._begin_placing().result(), self.work.layers
        asked = self.question(self.work.middle, layers)
        question = replace(asked, optimizer=PLANNED[placed.states])
        parts, room = states(question, ((0, layers),)), int(LESS_ROOM * self.machine.device_bytes)
        on_device = parts.weights + parts.gradients + parts.optimizer
        return Update(
            placed,
            {"device": parts.optimizer, "host": parts.optimizer_on_host},
            update_seconds(question),
            on_device <= room and parts.optimizer_on_host <= self.machine.host_bytes,
        )

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
            self._plans[key] = self._pool.submit(self._make, *key)
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


# -- the floor -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceilings:
    """FLOP a second."""

    linear: float
    forward: float  # attention; pairs that are masked are no work
    backward: float


def ceilings_of(question: Question) -> Ceilings:
    """The best rates that were measured on the question's machine, in its dtype."""
    rates = question.machine.rates[question.dtype]
    curves = (rates.matmul, rates.attention_forward, rates.attention_backward)
    return Ceilings(*(max(rate for _, rate in curve.points) for curve in curves))


def floor(question: Question, ceilings: Ceilings) -> float:
    """Seconds that a step takes at least: the products and the attention of one forward and one
    backward, nothing computed twice, at the ceilings' rates. Everything else (norms, loss, copies,
    the update, the host) has no floor but zero."""
    model, run = question.model, question.run
    layers = sum(i * o for layer in model.layers for i, o in layer.work.products)
    linear = 2.0 * run.batch * run.tokens * (layers + model.hidden * model.vocab)
    attention = sum(
        2.0
        * run.batch
        * seen_pairs(run.tokens, layer.window)
        * layer.query_heads
        * (layer.head_dim + layer.value_dim)
        for layer in model.layers
    )
    backward = BACKWARD_PRODUCTS * attention / ceilings.backward
    return 3.0 * linear / ceilings.linear + attention / ceilings.forward + backward
