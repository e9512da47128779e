"""What is asked of the planner, and what it answers.

The margin is memory that a plan leaves to what is in no program: on a device fragments of the
allocator, libraries' workspaces that grow with a call, messages between devices (NCCL); in main
memory whatever grows beside what `MachineSpec.host_reserve` is for.
"""

import re
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

from farspan.formatting import read_memory
from farspan.lazy import load
from farspan.profile.estimate import estimated
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import Profiles
from farspan.program.layout import ALONE, Layout
from farspan.spec import (
    Kernels,
    LossKind,
    MachineSpec,
    ModelSpec,
    Objective,
    Quantization,
    Reference,
    RunSpec,
    Schedule,
    Sparse,
    Tier,
    UnsupportedError,
)


class Optimizer(StrEnum):
    """Where the states of the update live, and how wide they are."""

    ADAMW = "adamw"  # fp32 moments, and an fp32 master where weights are narrower, on the device
    ADAMW8BIT = "adamw8bit"  # moments of one byte an element, no master: not AdamW's results
    HOST = "host"  # fp32 moments and master in main memory
    DISK = "disk"  # the same on a drive, updated in main memory
    NONE = "none"  # only gradients


@dataclass(frozen=True, slots=True)
class Margin:
    """Bytes that a plan leaves free where any can."""

    device: int = 0  # of one device
    host: int = 0  # of a node's main memory


@dataclass(frozen=True, slots=True)
class Open:
    """What of a question's placement the planner may choose (`plans.placements`); the rest is as
    `Question.optimizer` and `Question.weights` say."""

    states: bool = False  # AdamW's
    weights: bool = False  # with their gradients
    drive: bool = False  # the user named a folder on one, so that states may go there
    # Whoever updates is no part of the question, as of a `Step`: states are where weights are, and
    # weights leave the device only where nothing fits with them there.
    apart: bool = False


PINNED = Open()


@dataclass(frozen=True, slots=True)
class Question:
    """One step of a model on a machine."""

    model: ModelSpec
    run: RunSpec  # of one sequence group: `tokens` is the whole context, not a device's share
    machine: MachineSpec
    layout: Layout = ALONE
    optimizer: Optimizer = Optimizer.ADAMW
    dtype: str = "bfloat16"
    overlap: bool = False  # copies run beside the computation, as on a GPU
    sparse: Sparse | None = None  # attention that approximates; None: exact
    accumulates: bool = False  # gradients of earlier batches are there when the step begins
    kernels: Kernels = field(default_factory=Kernels)
    margin: Margin = Margin()  # bytes that a plan leaves where any can (`margin_of`)
    weights: Tier = Tier.DEVICE  # HOST: with their gradients (engine.streamed_weights)
    open: Open = PINNED  # for the planner to choose
    batches: int = 1  # of an update
    wide_gradients: bool = False  # `.grad` in fp32 without an optimizer, too: as training has it
    update_beside: bool = True  # of weights on host, the next step, where copies are
    nf4: bool = False  # frozen weights of linear modules have four bits
    loss: Objective = field(default_factory=Objective)
    profiles: Profiles | None = None  # of the model; None: nothing but its description is known
    profile: ModelProfile | None = None  # of these, as the machine runs it

    def adapter_rank(self) -> int | None:
        """Of LoRA on every linear module; 0: none; None: not known, or the model has others."""
        return None if self.profile is None else self.profile.variant.rank

    def variant(self, rank: int | None) -> Variant:
        """How the machine runs the model, with adapters of this rank: on a GPU by farspan's own
        kernels, of 16 or 32 bits, unless the question says otherwise. Slices of weights run as the
        model has them."""
        whole = not self.machine.on_cpu and self.layout.tensor == 1
        fused = whole and self.kernels.fused and self.dtype != "float64"
        adds = whole and self.kernels.accumulate
        return Variant(self.dtype, rank, fused, adds, nf4=self.nf4)

    def profiled(self, *, tiled: bool) -> ModelProfile:
        """The model's profile; of a model that is only described, what can be said of it."""
        if self.profile is None:
            return estimated(self.model)
        if self.profiles is None:
            return self.profile
        found = self.profile
        if tiled:
            found = self.profiles.of(replace(found.variant, tiled=True))
        if found.variant.fused and self.loss.ids > 1:  # autograd differentiates the head
            plain = self.profiles.of(replace(found.variant, fused=False))
            found = replace(found, outer=plain.outer)
        return found

    @property
    def fused(self) -> bool:
        """Does the loss run on farspan's own kernel? Of a model that nobody knows, no."""
        known = self.profile is not None and self.profile.variant.fused
        return known and self.loss.ids == 1

    @property
    def adds(self) -> bool:
        """Do products add weight gradients to their sums?"""
        return self.profile is not None and self.profile.variant.adds

    def longest(self) -> int | None:
        """Tokens that the model's positions reach, where that is known and bounded."""
        return None if self.profile is None else self.profile.longest

    def learned_positions(self) -> bool:
        """Are positions embedded, so that there are no more?"""
        return self.profile is not None and self.profile.learned_positions

    def near(self) -> int:
        """Devices of the layout that share a node."""
        return min(self.machine.devices, self.layout.devices())

    def host_share(self) -> int:
        """Bytes of a node's main memory that one device may fill. Where both tiers lie there
        (`unified`), what the device tier holds is still to be taken off."""
        return self.machine.host_bytes // self.near()


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one tier at its fullest moment, part by part. `limit` is what one device, or the
    share of main memory that belongs to it, can hold."""

    parts: dict[str, int]  # weights, gradients, optimizer, x, kv, dkv, attention, activations, ...
    limit: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def left(self) -> int:
        """Bytes to spare; negative when it does not fit."""
        return self.limit - self.total


class Fit(IntEnum):
    """How well a plan fits, the best last."""

    NOT = 0
    TIGHT = 1  # without the margin that the question asks for
    ROOMY = 2


DISTILLED = 64  # ids of a token whose log-probabilities a teacher gives, unless somebody says


def loss_of(
    kind: str, reference: str | None, *, adapters: bool, ids: int | None = None
) -> Objective:
    """A loss by its names; `adapters`: they are what is trained. Without a `reference`, one that
    needs it has it stored. `ids` are of distillation. Raises UnsupportedError naming the field."""
    if kind not in tuple(LossKind):
        raise UnsupportedError(f"loss: expected one of {', '.join(LossKind)}, got {kind!r}")
    of = LossKind(kind)
    can = _references(of, adapters=adapters)
    found = can[0] if reference is None else reference
    if found not in can:
        advice = f"; set it to {can[0]}"
        if len(can) == 1:
            advice = "; leave it out"
        elif found == Reference.ADAPTERS_OFF:
            advice = "; adapters-off needs adapters: give lora, their rank, such as 16"
        raise UnsupportedError(
            f"reference: of loss {of} expected {' or '.join(can)}, got {found!r}{advice}"
        )
    many = of is LossKind.DISTILL
    if ids is not None and not (many and ids > 0):
        raise UnsupportedError(
            f"ids: expected a whole number above 0, of loss {LossKind.DISTILL} alone, got {ids!r}"
        )
    return Objective(of, Reference(found), ids or (DISTILLED if many else 1))


def _references(kind: LossKind, *, adapters: bool) -> tuple[Reference, ...]:
    """What a loss may have, by default the first."""
    off = (Reference.ADAPTERS_OFF,) * adapters
    if kind in (LossKind.SFT, LossKind.ORPO):
        return (Reference.NONE,)
    found = Reference.STORED, Reference.FROZEN, *off
    return (Reference.NONE, *found) if kind is LossKind.GRPO else found


def fit_of(question: Question, device: Budget, host: Budget) -> Fit:
    """Of a plan's bytes on a question's machine."""
    if min(device.left, host.left) < 0:
        return Fit.NOT
    margin = question.margin
    lacks = device.left < margin.device or host.left < margin.host // question.near()
    return Fit.TIGHT if lacks else Fit.ROOMY


# Of a step: both sides of a difference are sums of up to a million times, each of which is off by
# up to 1e6 * 2**-53 = 1.1e-10 of itself.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Seconds:
    """One step's time, and what each lane of the machine is busy with in it."""

    total: float
    compute: float  # cells, head, embedding
    fetch: float
    evict: float
    collective: float
    optimizer: float  # the update, but for what of it runs beside the next step
    host: float  # issuing cells: beside their computing where lanes overlap
    bound: str  # compute, link, network or host: what the step would be faster without
    beside: float = 0.0  # of the update, beside the next step

    def exposed(self, *, overlap: bool) -> float:
        """Time in which nothing is computed because something else is awaited; where lanes overlap
        (`Question.overlap`) also the process that issues. 0 where it is no more than rounding."""
        found = self.total - self.compute - self.optimizer - (0.0 if overlap else self.host)
        return found if found > ROUNDING * self.total else 0.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a plan fit."""

    options: str  # of `farspan plan`
    same: bool  # a run computes what was asked for, up to rounding
    means: str = ""  # what else it is
    seconds: float = 0.0  # a step then takes; 0: not planned


@dataclass(frozen=True, slots=True)
class Plan:
    """One schedule on one machine: what it takes."""

    strategy: str
    schedule: Schedule
    question: Question
    device: Budget
    host: Budget
    seconds: Seconds
    mfu: float  # causal attention once and weights three times over peak; recompute is no work
    reason: str = ""  # why it was chosen, or what breaks first when it does not fit
    # Changes that make it fit, the cheapest first; none when it fits, or none that was tried does.
    remedies: tuple[Remedy, ...] = ()
    # At most this fraction slower than the fastest of the space searched.
    gap: float = 0.0
    # The best plan of a placement that moves less, which this one was preferred to.
    unmoved: "Plan | None" = None
    alternatives: tuple["Plan", ...] = field(default=())

    def __str__(self) -> str:
        """What `farspan plan` prints."""
        text: str = load("farspan.report.plan", "plan_text")(self)
        return text

    def __repr__(self) -> str:
        question, verdict = self.question, "fits" if self.fits else "does not fit"
        return (
            f"<Plan: {question.model.name}, {question.run.tokens:,} tokens, "
            f"{question.layout.devices()} x {question.machine.name}: {self.strategy} {verdict}, "
            f"{self.seconds.total:.3g} s a step>"
        )

    @property
    def fit(self) -> Fit:
        return fit_of(self.question, self.device, self.host)

    @property
    def fits(self) -> bool:
        return self.fit > Fit.NOT

    @property
    def tight(self) -> bool:
        """Does it fit, and take of the margin?"""
        return self.fit is Fit.TIGHT

    @property
    def remedy(self) -> str:
        """The cheapest change that makes it fit, as options of `farspan plan`; empty for none."""
        return self.remedies[0].options if self.remedies else ""

    @property
    def hides(self) -> bool:
        """Is any token hidden from a query that dense attention would show it? Not in a layer with
        a window, which is computed as it is."""
        sparse = self.schedule.sparse
        return sparse is not None and sparse.hides(self.question.run.tokens, self.schedule.chunk)

    def rank(self) -> tuple[int, float]:
        """Sorts plans: those that fit and leave the margin, the fastest first, then those that are
        tight, then the others by what they miss."""
        over = -min(0, self.device.left) - min(0, self.host.left)
        return -self.fit, self.seconds.total if self.fits else over

    def update_seconds(self) -> float:
        """Of a training step: the batches of an update, and the update."""
        seconds = self.seconds
        return (seconds.total - seconds.optimizer) * self.question.batches + seconds.optimizer

    @property
    def tokens_per_second(self) -> float:
        run, layout = self.question.run, self.question.layout
        return run.batch * run.tokens * layout.data / self.seconds.total

    def _loss_json(self) -> dict[str, str]:
        """Of a loss that has its own way through a step."""
        loss = self.question.loss
        return {"loss": loss.kind, "reference": loss.reference} if loss.is_cut else {}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        schedule, question = self.schedule, self.question
        return {
            "model": question.model.name,
            "machine": question.machine.name,
            "dtype": question.dtype,
            "optimizer": question.optimizer.value,
            "weights": question.weights.value,
            "lora": question.adapter_rank(),
            "quantize": Quantization.NF4.value if question.nf4 else None,
            "gpus": question.layout.devices(),
            "layout": asdict(question.layout),
            **self._loss_json(),
            "batch": question.run.batch,
            "context": question.run.tokens,
            "fits": self.fits,
            "tight": self.tight,
            "margin": asdict(question.margin),
            "strategy": self.strategy,
            "schedule": {
                "chunk": schedule.chunk,
                "groups": schedule.groups,
                "attention_save_fraction": schedule.attention_save_fraction,
                "attention_open": schedule.attention_open,
                "kv_kept": schedule.kv_kept,
                "activation_save_fraction": schedule.activation_save_fraction,
                "layer_checkpoint": schedule.layer_checkpoint,
                "kv_block": schedule.kv_block,
                "loss_chunk_size": schedule.loss_chunk_size,
                "sparse": None if schedule.sparse is None else asdict(schedule.sparse),
                "tiers": {
                    "boundary_inputs": schedule.boundary_inputs.value,
                    "kv": schedule.kv.value,
                    "kv_home": schedule.kv_home.value,
                    "attention": schedule.attention.value,
                    "activations": schedule.activations.value,
                },
            },
            "device_bytes": _budget(self.device),
            "host_bytes": _budget(self.host),
            "seconds_per_step": self.seconds.total,
            "seconds": asdict(self.seconds),
            "bound": self.seconds.bound,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "attention": "exact" if self.schedule.sparse is None else "sparse",
            "hides": self.hides,
            # No bound is derived for sparse attention (search.sparse).
            "gap": self.gap if self.schedule.sparse is None else None,
            "reason": self.reason,
            "remedy": self.remedy,
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "alternatives": [plan.to_json() for plan in self.alternatives],
        }


def _budget(budget: Budget) -> dict[str, Any]:
    return {"total": budget.total, "limit": budget.limit, "parts": dict(budget.parts)}


SHARE = 0.06  # of a device's bytes; what the machine's `reserve` explains is a part of it
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def read_margin(given: str | int) -> float | int:
    """Bytes, or as a float a share of each memory, from text such as 3GiB, 5% or 0. Raises
    UnsupportedError."""
    match = _PERCENT.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is not None and float(match[1]) < 100:
        return float(match[1]) / 100
    if match is None and str(given).strip() == "0":
        return 0
    try:
        return read_memory(given, "margin")
    except UnsupportedError as error:
        raise UnsupportedError(
            f"margin: expected bytes such as 3GiB, a share of each memory below 100% such as 5%, "
            f"or 0, got {given!r}"
        ) from error


def margin_of(given: str | int | None, machine: MachineSpec) -> Margin:
    """What a plan leaves of a device and of a node's main memory, each: bytes, or a share, which
    counts what the machine has in reserve. None: `SHARE` of a device; of main memory its reserve is
    enough. Where both tiers are one memory, which has none by default, it is the host's. Raises
    UnsupportedError."""
    size = SHARE if given is None else read_margin(given)
    host = 0 if given is None else _beside(size, machine.host_bytes, machine.host_reserve)
    if machine.unified:
        return Margin(0, host)
    # `device_bytes` has the reserve in it, `host_bytes` has not.
    return Margin(_beside(size, machine.device_bytes - machine.reserve, machine.reserve), host)


def _beside(size: float | int, free: int, reserve: int) -> int:
    return size if isinstance(size, int) else max(0, int(size * (free + reserve)) - reserve)


def with_room(question: Question) -> Question:
    """The question on a machine that lacks its margin: what fits there leaves it."""
    margin, machine = question.margin, question.machine
    if margin == Margin():
        return question
    smaller = replace(
        machine,
        device_bytes=max(0, machine.device_bytes - margin.device),
        host_bytes=max(0, machine.host_bytes - margin.host),
    )
    return replace(question, machine=smaller, margin=Margin())


def of_whole(question: Question, plan: Plan) -> Plan:
    """A plan that was made `with_room`, as one of the question itself."""
    more = question.host_share() - plan.question.host_share()
    on_device = question.machine.device_bytes - plan.question.machine.device_bytes
    on_device = more if question.machine.unified else on_device
    device = replace(plan.device, limit=plan.device.limit + on_device)
    host = replace(plan.host, limit=plan.host.limit + more)
    return replace(plan, question=question, device=device, host=host)
