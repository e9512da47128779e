"""Check the arguments of a step's call, and prepare its model, program, inputs and divisor."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from farspan.distributed.agreement import OF_BATCH, Agreement, agreement
from farspan.engine.loss import StepInputs, make_inputs
from farspan.engine.parallelize import facts_of
from farspan.engine.preparation import Preparations, PreparedModel
from farspan.engine.runner import PreparedProgram, Runner
from farspan.hf.dropout import Draws
from farspan.hf.routers import RouterLoss
from farspan.hf.unsupported import refuse_context, refuse_padding_inside
from farspan.lazy import load
from farspan.planner.request import Plan
from farspan.program.strategies import AUTO
from farspan.spec import LossKind, Objective, RunSpec, Schedule, UnsupportedError

_INPUTS = ("input_ids", "labels", "document_ids", "weights", "attention_mask")
_VALUES = Objective(LossKind.GRPO)  # plans for a backward after values
Planner = Callable[..., Plan]  # `train.planning.StepPlanner`
# The model, its program, the inputs, and the divisor of the sum of losses.
Ready = tuple[PreparedModel, PreparedProgram, StepInputs, int]


@dataclass
class Calls:
    """State that the calls of one step object share, and functions that prepare a call."""

    models: Preparations
    runner: Runner
    planner: Planner | None  # that chooses the schedule; None: it was given
    seed: int
    neftune_alpha: float | None
    router_z: float  # coefficient of the routers' z-loss
    routers: RouterLoss | None = None  # sums of the latest call
    # Load-balancing and z-loss of the latest call for values, [2]; None if it was a step.
    router_losses: Tensor | None = None
    drawn: int = 0  # number of the next call that may drop or add noise
    plans: list[Plan] = field(default_factory=list)  # of the planner, for the batches so far

    @property
    def plan(self) -> Plan | None:
        """Plan whose schedule the step uses now, or None if the user gave the schedule."""
        return next((p for p in self.plans if p.schedule is self.models.schedule), None)

    @property
    def aux_loss(self) -> Tensor:
        """Load-balancing loss of the latest call, without its coefficient."""
        return self._losses()[0]

    @property
    def router_loss(self) -> Tensor:
        """Sum of the latest call's router losses, each times its coefficient."""
        routers = self.models.now.routers
        balance = 0.0 if routers is None else routers.balance
        losses = self._losses()
        return balance * losses[0] + self.router_z * losses[1]

    def _losses(self) -> Tensor:
        if self.router_losses is not None:
            return self.router_losses
        return torch.zeros(2) if self.routers is None else self.routers.losses()

    def agreement(self, call: str) -> AbstractContextManager[Agreement]:
        """Return a context that raises an error on all ranks if their calls differ."""
        sharded = self.models.sharded
        return agreement(None if sharded is None else sharded.ranks, call)

    def ready(
        self, call: str, given: tuple[Any, ...], trained_tokens: int | None, *, trains: bool
    ) -> Ready:
        """Check a call's arguments; prepare the model, program, inputs and the loss's divisor.
        Raises UnsupportedError."""
        with self.agreement(call) as same:
            if trains:
                refuse_without_gradients()
            model = self.accept(trains=trains)
            self.compare(same, trained_tokens, draws=trains)
            inputs = inputs_of(same, model, *given[:5])
        inputs = self.routing(inputs, *given[4:])
        count = _count(same, model, inputs, trained_tokens)
        prepared = self.prepared(same, *inputs.input_ids.shape, evaluation=not trains)
        return self.models.now, prepared, self.drawing(inputs) if trains else inputs, count

    def accept(self, *, trains: bool) -> PreparedModel:
        """Return the prepared model, prepared again if it has changed. Raises UnsupportedError."""
        was = self.models.now
        try:
            return self.models.accept(trains=trains)
        finally:  # a call that is refused may have prepared the model for the next one
            if self.models.now is not was:
                self.runner.memory.open_forward = None
                self.runner.follow(self.models.now)

    def compare(self, same: Agreement, trained_tokens: int | None = None, *, draws: bool) -> None:
        """Have ranks compare all that decides how this call runs, except its input tensors. Raises
        UnsupportedError if `trained_tokens` is below 1."""
        if trained_tokens is not None and trained_tokens < 1:
            raise UnsupportedError(f"trained_tokens: expected at least 1, got {trained_tokens}")
        model = self.models.now
        if model.sharded is None:
            return
        same.add({"trained_tokens": repr(trained_tokens), "schedule": repr(model.schedule)})
        same.add({"kernels": repr(self.models.wanted)})
        far = self.runner.far
        same.add(facts_of("selector", None if far is None else far.select))
        same.add({"label_smoothing": repr(self.runner.smoothing)})
        if draws:
            same.add({n: repr(getattr(self, n)) for n in ("neftune_alpha", "router_z")})
            if model.drops or self.neftune_alpha:
                same.add({"seed": repr(self.seed), "drawn": repr(self.drawn)})
        model.compare(same)

    def prepared(
        self,
        same: Agreement | None,
        batch: int,
        tokens: int,
        *,
        evaluation: bool = False,
        is_cut: bool = False,
    ) -> PreparedProgram:
        """Return the program for a batch of this shape; with "auto" the planner first chooses a
        schedule. RoPE that varies with length is set for the longest sequence of all replicas."""
        if self.planner is not None:
            run = RunSpec(batch, tokens)
            self._choose(self.planner, run, _VALUES if is_cut else Objective())
        model = self.models.now
        if same is not None:
            model.stages.settle(max(longest for longest, _ in same.table))
        return self.runner.program(model, batch, tokens, evaluation=evaluation, is_cut=is_cut)

    def release(self) -> None:
        self.runner.release(self.models.now)

    def _choose(self, planner: Planner, run: RunSpec, loss: Objective) -> None:
        """Use a schedule planned for a batch at least as large as this one, or plan a new one."""
        now, sharded = self.models.now, self.models.sharded
        if sharded is not None and sharded.ranks.layout.data > 1:  # replicas' batches may differ
            rows = sharded.ranks.figures([run.batch, run.tokens])
            run = RunSpec(max(batch for batch, _ in rows), max(tokens for _, tokens in rows))

        def covers(plan: Plan) -> bool:
            of, model = plan.question.run, plan.question.model
            wide = of.batch >= run.batch and of.tokens >= run.tokens
            same = model.element_bytes == now.spec.element_bytes
            same = same and plan.question.loss.is_cut >= loss.is_cut
            return wide and same and model.trainable >= now.spec.trainable

        # A plan for values also covers one pass, so programs are built once.
        covering = filter(covers, self.plans)
        found = max(covering, key=lambda plan: plan.question.loss.is_cut, default=None)
        if found is None:
            self.release()  # plan with the memory that is then free
            with torch.inference_mode(False), torch.enable_grad():  # planning runs backwards
                model, device = now.stages.model, now.stages.device
                moves = sharded is None or self.models.whole_on is not None
                wanted = self.models.wanted
                found = planner(model, device, run, wanted, loss, sharded=sharded, moves=moves)
            self.plans.append(found)
        if found.schedule is not self.models.schedule:
            self.models.follow(found.schedule)

    def drawing(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs with the random numbers of dropout and NEFTune noise, if the call uses
        any. They are equal on all ranks of a sequence."""
        model, (batch, tokens), row = self.models.now, inputs.input_ids.shape, 0
        if model.sharded is not None:
            row = batch * model.sharded.ranks.rank.along["data"]
        number, self.drawn = self.drawn, self.drawn + 1
        alpha = self.neftune_alpha
        if not (alpha or model.drops):
            return inputs
        draws = Draws(self.seed, number, row, tokens, model.fused, alpha or None)
        if inputs.routers is not None:
            inputs.routers.place = draws
        return replace(inputs, draws=draws)

    def routing(
        self, inputs: StepInputs, attention_mask: Tensor | None, share: float = 1.0
    ) -> StepInputs:
        """Return a step's inputs, with an object that computes router losses if the model has them.
        The step's loss then includes `share` times these router losses."""
        model = self.models.now
        self.routers = self.router_losses = None
        if model.routers is None:
            if self.router_z:
                raise UnsupportedError(
                    "router_z: the model adds no router loss; leave router_z out, or set "
                    "output_router_logits=True if transformers has a router loss for its family"
                )
            if attention_mask is not None and not bool(attention_mask.all()):
                raise UnsupportedError(
                    "attention_mask: only router losses read it, and the model adds none; give "
                    "padding document_ids of its own and labels of -100"
                )
            return inputs
        if not 0 <= share < inf:
            raise UnsupportedError(f"router_share: expected a number of at least 0, got {share}")
        mask = None if attention_mask is None else attention_mask.to(model.stages.device) != 0
        losses = RouterLoss(model.routers, model.stages.device, self.router_z, mask)
        losses.scale = share * losses.scale
        self.routers = losses
        return replace(inputs, routers=losses)


def written(schedule: Schedule | str, selector: object) -> tuple[Schedule | None, Planner | None]:
    """Return (schedule, None) if the user gave a schedule, or (None, planner) for "auto". Raises
    UnsupportedError for anything else, or if `selector` does not fit the schedule."""
    if isinstance(schedule, Schedule):
        if selector is not None and schedule.sparse is None:
            raise UnsupportedError(
                "selector: dense attention selects no pages; set schedule.sparse"
            )
        return schedule, None
    if schedule != AUTO:
        raise UnsupportedError(
            f"schedule: expected a farspan.Schedule or 'auto', got {schedule!r}; for a named one, "
            "call farspan.strategy(name, layers, tokens)"
        )
    if selector is not None:
        raise UnsupportedError(
            "selector: schedule='auto' plans for dense attention; give a schedule, such as that of "
            "farspan.plan, or use `farspan train`"
        )
    return None, load("farspan.train.planning", "StepPlanner")()


def refuse_without_gradients() -> None:
    """Raise UnsupportedError if gradients are off."""
    if not torch.is_grad_enabled():
        inside = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise UnsupportedError(
            f"{inside}: gradients are off, and a step adds gradients to .grad; call step.evaluate "
            f"for the loss alone, or call the step outside of torch.{inside}()"
        )


def inputs_of(
    same: Agreement,
    model: PreparedModel,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None,
    weights: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    several: bool = False,
) -> StepInputs:
    """Check input tensors, have ranks compare them, and return a step's inputs. Raises
    UnsupportedError for values that do not fit the model."""
    if torch.is_autocast_enabled(model.stages.device.type):
        raise UnsupportedError(
            "autocast: the program is planned for one dtype; call the step outside autocast, "
            "and load the model in the dtype to compute in"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise UnsupportedError(
            f"attention_mask: expected the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(attention_mask.shape)}"
        )
    vocab = model.spec.vocab
    inputs = make_inputs(input_ids, labels, document_ids, vocab, weights, several=several)
    if model.sharded is not None:
        tensors = input_ids, labels, document_ids, weights, attention_mask
        given = zip(_INPUTS, tensors, strict=True)
        same.add({n: repr(x) if x is None else x for n, x in given}, OF_BATCH)
    longest = int(inputs.position_ids.max()) + 1
    if model.limit is not None and longest > model.limit:
        refuse_context(model.stages.model, longest)
    if model.stages.first_position:
        refuse_padding_inside(model.stages.model, inputs.input_ids, inputs.position_ids)
    same.figures = [longest, inputs.trained]
    return inputs


def _count(
    same: Agreement, model: PreparedModel, inputs: StepInputs, trained_tokens: int | None
) -> int:
    """Return the divisor of the summed loss: at least 1, as a batch may have no trained tokens."""
    if trained_tokens is not None:
        return trained_tokens
    if inputs.weights is not None:
        return 1
    replicas = [0]
    if model.sharded is not None:
        replicas = list(model.sharded.ranks.rank.peers("data"))
    return max(1, sum(same.table[number][1] for number in replicas))
