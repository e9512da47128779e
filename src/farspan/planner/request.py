"""Questions (requests to the planner) and the plans that answer them.

The margin is memory that a plan leaves free for allocations outside any program: on a device
fragments of the allocator, libraries' workspaces that grow with a call, and messages between
devices (NCCL); in main memory everything that grows beyond `MachineSpec.host_reserve`.
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
    """Tier and precision of the optimizer's states."""

    ADAMW = "adamw"  # fp32 moments, and an fp32 master where weights are narrower, on the device
    ADAMW8BIT = "adamw8bit"  # one-byte moments, no master copy: results differ from AdamW
    HOST = "host"  # fp32 moments and master in main memory
    DISK = "disk"  # the same on a drive, updated in main memory
    NONE = "none"  # gradients only


@dataclass(frozen=True, slots=True)
class Margin:
    """Bytes that a plan leaves free if any plan can."""

    device: int = 0  # of one device
    host: int = 0  # of a node's main memory


@dataclass(frozen=True, slots=True)
class Open:
    """Tiers that the planner may choose for states and weights (`plans.placements`). All others
    stay as `Question.optimizer` and `Question.weights` say."""

    states: bool = False  # of AdamW
    weights: bool = False  # with their gradients
    drive: bool = False  # the user named a folder on a drive, so states may go there
    # The update is not part of the question, as for a `Step`: states are where weights are, and
    # weights leave the device only if nothing fits with them on it.
    apart: bool = False


PINNED = Open()


@dataclass(frozen=True, slots=True)
class Question:
    """One training step to plan: a model, a run and a machine, with the choices of the user."""

    model: ModelSpec
    run: RunSpec  # of one sequence group: `tokens` is the whole context, not a device's share
    machine: MachineSpec
    layout: Layout = ALONE
    optimizer: Optimizer = Optimizer.ADAMW
    dtype: str = "bfloat16"
    overlap: bool = False  # copies overlap with computation, as on a GPU
    sparse: Sparse | None = None  # approximate attention; None: exact
    accumulates: bool = False  # gradients of earlier batches exist when the step begins
    kernels: Kernels = field(default_factory=Kernels)
    margin: Margin = Margin()  # bytes that a plan leaves free if any plan can (`margin_of`)
    weights: Tier = Tier.DEVICE  # HOST: with their gradients (engine.streamed_weights)
    open: Open = PINNED  # parts of the placement that the planner chooses
    batches: int = 1  # per update
    wide_gradients: bool = False  # `.grad` in fp32 even without an optimizer, as in training
    update_beside: bool = True  # update weights on the host during the next step
    nf4: bool = False  # frozen weights of linear modules take four bits
    loss: Objective = field(default_factory=Objective)
    profiles: Profiles | None = None  # of the model; None: only its description is known
    profile: ModelProfile | None = None  # of `profiles`, as the machine runs it

    def adapter_rank(self) -> int | None:
        """Return the rank of LoRA on every linear module, 0 without LoRA, or None if unknown."""
        return None if self.profile is None else self.profile.variant.rank

    def variant(self, rank: int | None) -> Variant:
        """Return the model's profile variant on this machine, with adapters of this rank. A GPU in
        16 or 32 bits runs farspan's own kernels unless the question or its layout excludes them."""
        whole = not self.machine.on_cpu and self.layout.tensor == 1
        fused = whole and self.kernels.fused and self.dtype != "float64"
        adds = whole and self.kernels.accumulate and self.kernels.products is None
        remakes = self.kernels.remake
        return Variant(self.dtype, rank, fused, adds, nf4=self.nf4, remakes=remakes)

    def profiled(self, *, tiled: bool) -> ModelProfile:
        """Return the model's profile, or an estimate for a model known only by its shapes."""
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
        known = self.profile is not None and self.profile.variant.fused
        return known and self.loss.ids == 1

    @property
    def adds(self) -> bool:
        """Return whether matrix products add weight gradients to their sums directly."""
        return self.profile is not None and self.profile.variant.adds

    def longest(self) -> int | None:
        """Longest context that the model's positions allow; None if unknown or unbounded."""
        return None if self.profile is None else self.profile.longest

    def learned_positions(self) -> bool:
        """Return whether position embeddings are learned, which bounds the context."""
        return self.profile is not None and self.profile.learned_positions

    def near(self) -> int:
        """Return how many of the layout's devices are in one node."""
        return min(self.machine.devices, self.layout.devices())

    def host_share(self) -> int:
        """Return the bytes of a node's main memory that one device may fill. On unified memory the
        bytes of the device tier count against them."""
        return self.machine.host_bytes // self.near()


@dataclass(frozen=True, slots=True)
class Budget:
    """Peak bytes of one tier by cause, and the capacity of a device or its share of main memory."""

    parts: dict[str, int]  # weights, gradients, optimizer, x, kv, dkv, attention, activations, ...
    limit: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def left(self) -> int:
        """Bytes to spare; negative if the plan does not fit."""
        return self.limit - self.total


class Fit(IntEnum):
    """Grade of how well a plan fits; a higher value fits better."""

    NOT = 0
    TIGHT = 1  # without the question's margin
    ROOMY = 2


DISTILLED = 64  # default ids per token whose log-probabilities a teacher gives


def loss_of(
    kind: str, reference: str | None, *, adapters: bool, ids: int | None = None
) -> Objective:
    """Return the loss with these options. If it needs a reference model, `reference` is the source
    of that model's log-probabilities (default: stored ones); `adapters`: only adapters are trained;
    `ids`: tokens that distillation compares. Raises UnsupportedError naming the field."""
    if kind not in tuple(LossKind):
        raise UnsupportedError(f"loss: expected one of {', '.join(LossKind)}, got {kind!r}")
    loss = LossKind(kind)
    can = tuple(r for r in loss.row.references if adapters or r is not Reference.ADAPTERS_OFF)
    found = can[0] if reference is None else reference
    if found not in can:
        advice = "; leave it out" if len(can) == 1 else f"; set it to {can[0]}"
        if len(can) > 1 and found == Reference.ADAPTERS_OFF:
            advice = "; adapters-off needs adapters: give lora, their rank, such as 16"
        raise UnsupportedError(
            f"reference: loss {loss} expects {' or '.join(can)}, got {found!r}{advice}"
        )
    many = loss is LossKind.DISTILL
    if ids is not None and not (many and ids > 0):
        raise UnsupportedError(
            f"ids: expected a whole number above 0, only with loss {LossKind.DISTILL}, got {ids!r}"
        )
    return Objective(loss, Reference(found), ids or (DISTILLED if many else 1))


def fit_of(question: Question, device: Budget, host: Budget) -> Fit:
    """Return how well the bytes of a plan fit the machine of the question."""
    if min(device.left, host.left) < 0:
        return Fit.NOT
    margin = question.margin
    lacks = device.left < margin.device or host.left < margin.host // question.near()
    return Fit.TIGHT if lacks else Fit.ROOMY


# Relative to a step: both sides of a difference are sums of up to a million times, each of which
# has an error of up to 1e6 * 2**-53 = 1.1e-10 of its value.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one step, in total and busy on each queue of the machine."""

    total: float
    compute: float  # cells, head, embedding
    fetch: float
    evict: float
    collective: float
    optimizer: float  # the part of the update that delays the step
    host: float  # issuing cells, in parallel with their computation where lanes overlap
    bound: str  # the bottleneck: compute, link, network or host
    beside: float = 0.0  # the part of the update that overlaps with the next step

    def exposed(self, *, overlap: bool) -> float:
        """Return the seconds in which the device computes nothing, since it waits for copies,
        messages or, with `overlap`, kernel launches. 0 if the wait is no more than rounding."""
        found = self.total - self.compute - self.optimizer - (0.0 if overlap else self.host)
        return found if found > ROUNDING * self.total else 0.0


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a plan fit."""

    options: str  # of `farspan plan`
    same: bool  # results stay the same up to rounding
    means: str = ""  # side effects of the change
    seconds: float = 0.0  # of a step with the change; 0: not planned


@dataclass(frozen=True, slots=True)
class Plan:
    """One schedule on one machine, with its memory and time."""

    strategy: str
    schedule: Schedule
    question: Question
    device: Budget
    host: Budget
    seconds: Seconds
    mfu: float  # causal attention once, weights three times, over peak; no recomputation
    reason: str = ""  # why it was chosen, or the tier that is too small when it does not fit
    # Changes that make it fit, the cheapest first; empty when it fits, or when no change helps.
    remedies: tuple[Remedy, ...] = ()
    # At most this fraction slower than the fastest of the space searched.
    gap: float = 0.0
    # The best plan of a placement that moves less, which this plan replaced.
    unmoved: "Plan | None" = None
    alternatives: tuple["Plan", ...] = field(default=())

    def __str__(self) -> str:
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
        """Return whether the plan fits but leaves less than the margin."""
        return self.fit is Fit.TIGHT

    @property
    def remedy(self) -> str:
        """Cheapest change that makes the plan fit, as options of `farspan plan`, or ""."""
        return self.remedies[0].options if self.remedies else ""

    @property
    def hides(self) -> bool:
        """Return whether sparse attention may hide from a query tokens that dense attention shows.
        Layers with a sliding window stay dense, so they hide none."""
        sparse = self.schedule.sparse
        return sparse is not None and sparse.hides(self.question.run.tokens, self.schedule.chunk)

    def rank(self) -> tuple[int, float, float]:
        """Return a sort key: first plans that fit and leave the margin, the fastest first; then
        plans that fit without it; then plans that do not fit, by the bytes missing on the device,
        then in main memory, which is easier to extend. On unified memory the sum of both counts."""
        if self.fits:
            return -self.fit, self.seconds.total, 0.0
        device, host = -min(0, self.device.left), -min(0, self.host.left)
        together = self.question.machine.unified
        return -self.fit, device + host * together, host * (not together)

    def update_seconds(self) -> float:
        """Seconds of a training step: the batches between two updates, and the update."""
        seconds = self.seconds
        return (seconds.total - seconds.optimizer) * self.question.batches + seconds.optimizer

    @property
    def tokens_per_second(self) -> float:
        run, layout = self.question.run, self.question.layout
        return run.batch * run.tokens * layout.data / self.seconds.total

    def _loss_json(self) -> dict[str, str]:
        loss = self.question.loss
        return {"loss": loss.kind, "reference": loss.reference} if loss.is_cut else {}

    def to_json(self) -> dict[str, Any]:
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
            "schedule": _schedule_json(schedule),
            "device_bytes": _budget(self.device),
            "host_bytes": _budget(self.host),
            "seconds_per_step": self.seconds.total,
            "seconds": asdict(self.seconds),
            "bound": self.seconds.bound,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "attention": "exact" if self.schedule.sparse is None else "sparse",
            "hides": self.hides,
            **({"products": question.kernels.products} if question.kernels.products else {}),
            # No bound is derived for sparse attention (search.sparse).
            "gap": self.gap if self.schedule.sparse is None else None,
            "reason": self.reason,
            "remedy": self.remedy,
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "alternatives": [plan.to_json() for plan in self.alternatives],
        }


# Fields that say where weights are, which the plan says itself, or that no plan chooses.
_NOT_TOLD = ("weights", "mlp_chunk_size", "alltoall_splits")


def _schedule_json(schedule: Schedule) -> dict[str, Any]:
    found = {name: value for name, value in asdict(schedule).items() if name not in _NOT_TOLD}
    tiers = {name: found.pop(name).value for name in [*found] if isinstance(found[name], Tier)}
    return {**found, "tiers": tiers}


def _budget(budget: Budget) -> dict[str, Any]:
    return {"total": budget.total, "limit": budget.limit, "parts": dict(budget.parts)}


SHARE = 0.06  # of a device's bytes, including the machine's `reserve`
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def read_margin(given: str | int) -> float | int:
    """Convert a margin such as 3GiB, 5% or 0 to bytes or a float share. Raises UnsupportedError."""
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
    """Return the bytes that a plan should leave free on a device and in a node's main memory.
    `given` is bytes, or a fraction that includes the machine's reserve. None means the fraction
    `SHARE` of a device, and nothing in main memory, whose reserve is enough. On unified memory only
    the host has a margin. Raises UnsupportedError."""
    size = SHARE if given is None else read_margin(given)
    host = 0 if given is None else _share_bytes(size, machine.host_bytes, machine.host_reserve)
    if machine.unified:
        return Margin(0, host)
    # `device_bytes` includes the reserve, `host_bytes` does not.
    return Margin(_share_bytes(size, machine.device_bytes - machine.reserve, machine.reserve), host)


def _share_bytes(size: float | int, free: int, reserve: int) -> int:
    return size if isinstance(size, int) else max(0, int(size * (free + reserve)) - reserve)


def with_room(question: Question) -> Question:
    """Return the question with a machine smaller by the margin; a plan that fits leaves it free."""
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
    """Convert a plan for the question of `with_room` to a plan of the original question."""
    more = question.host_share() - plan.question.host_share()
    on_device = question.machine.device_bytes - plan.question.machine.device_bytes
    on_device = more if question.machine.unified else on_device
    device = replace(plan.device, limit=plan.device.limit + on_device)
    host = replace(plan.host, limit=plan.host.limit + more)
    return replace(plan, question=question, device=device, host=host)
