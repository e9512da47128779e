"""Compute values for each token by a head; their forward waits until a loss has a gradient."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.agreement import OF_BATCH, Agreement, agreement
from farspan.engine.calls import Calls, inputs_of
from farspan.engine.gradients import GradientAccumulator, call_accumulated
from farspan.engine.heads import HeadFunction, LogProbs, ValueHead
from farspan.engine.interpreter import Interpreter
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.parallelize import facts_of
from farspan.engine.preparation import PreparedModel
from farspan.engine.runner import PreparedProgram, Runner, accumulator
from farspan.hf.unsupported import refuse_backward_hooks, refuse_dropout_of_head
from farspan.program.dependencies import Order
from farspan.program.layout import AXES, SEQUENCE
from farspan.spec import UnsupportedError

LOG = logging.getLogger(__name__)

# The model, prepared, and the program of a call.
Ready = tuple[PreparedModel, PreparedProgram]


@dataclass(frozen=True, slots=True)
class AskedValues:
    """Checked arguments of a call of `step.values` or `step.logprobs`."""

    function: LogProbs | HeadFunction
    inputs: StepInputs
    own: list[nn.Parameter]  # parameters of the function
    trains: bool
    trains_model: bool


def ask(
    calls: Calls,
    same: Agreement,
    function: LogProbs | HeadFunction,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None,
    targets: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> AskedValues:
    """Check arguments of `step.values` or `step.logprobs` on all ranks. Raises UnsupportedError."""
    own: list[nn.Parameter] = []
    if isinstance(function, nn.Module):
        refuse_dropout_of_head(function)
        refuse_backward_hooks(function, over_ranks=True)
        own = list(function.parameters())
    trained = calls.models.now.trains()
    trains = torch.is_grad_enabled() and (trained or any(p.requires_grad for p in own))
    model = calls.accept(trains=trains and trained)
    calls.compare(same, draws=trains)
    if model.sharded is not None:
        same.add({"gradients": "wanted" if trains else "not wanted"})
        name = "head" if targets is not None else same.call
        same.add(facts_of(name, function, model.stages.model))
        same.add({"targets": "None" if targets is None else targets}, OF_BATCH)
    inputs = inputs_of(
        same, model, input_ids, labels, document_ids, None, attention_mask, several=targets is None
    )
    inputs = calls.routing(inputs, attention_mask)
    # The caller may write into its tensors before the backward reads them.
    inputs = replace(inputs, input_ids=input_ids.clone())
    if targets is not None:
        inputs = replace(inputs, targets=targets.clone())
    return AskedValues(function, inputs, own, trains, trains and trained)


def values(calls: Calls, same: Agreement, asked: AskedValues, head: HeadFunction | None) -> Tensor:
    """Compute values for all tokens, [batch, tokens, k]; `head` is the step's head function."""
    inputs = calls.drawing(asked.inputs) if asked.trains else asked.inputs

    def ready() -> Ready:
        shape, trains = inputs.input_ids.shape, asked.trains
        prepared = calls.prepared(same, *shape, evaluation=not trains, is_cut=trains)
        return calls.models.now, prepared

    def again() -> Ready:
        calls.accept(trains=asked.trains_model)
        return ready()

    def marks() -> object:
        return calls.models.now.marks(head, asked.own)

    forward = OpenForward(calls.runner, ready(), inputs, asked.function, marks, again)
    found, calls.router_losses = forward.values()
    return found


def value_head(
    model: PreparedModel, function: LogProbs | HeadFunction, targets: Tensor, piece: int
) -> ValueHead:
    """Return a head that calls the user's function on `piece` tokens at a time. Raises
    UnsupportedError if the function uses a decoder layer whose weights are sharded or streamed."""
    outer = model.outer
    found: tuple[nn.Parameter, ...] = ()
    if isinstance(function, nn.Module):
        found = tuple(p for p in function.parameters() if p.requires_grad)
    own = tuple(p for p in found if not any(p is other for other in outer))
    inside = {id(p) for p in model.stages.layers.parameters()}
    if any(id(p) in inside for p in own) and (model.weights or model.sharded):
        raise UnsupportedError(
            "head: uses a decoder layer, whose weights are not on the device while the head "
            "runs; use modules outside the layers, such as model.lm_head, or your own"
        )
    plain = None
    is_plain = isinstance(function, LogProbs) and function.temperature == 1
    if is_plain and targets.ndim == 2:
        plain = LossHead(model.stages, 1, piece, outer, model.fused)
    return ValueHead(model.stages, function, piece, outer, own, plain)


@dataclass(slots=True)
class OpenForward:
    """A forward that has returned values for each token, and waits for their backward."""

    runner: Runner
    ready: Ready
    inputs: StepInputs
    function: LogProbs | HeadFunction
    marks: Callable[[], object]  # compares unequal after the model has changed
    again: Callable[[], Ready]  # prepares model and program for a second forward
    was: object = None  # marks at the forward
    interpreter: Interpreter = field(init=False)
    gradients: GradientAccumulator = field(init=False)

    def values(self) -> tuple[Tensor, Tensor]:
        """Run the forward; return the values, [B, T, k], and the routers' losses, equal on all
        ranks of a sequence. Both have a graph if the program has a backward."""
        program = self.ready[1].program
        with self._begun():
            self.interpreter.run(self._orders(), program.cut or None)
            self.interpreter.complete_routers()
            values, routers = self._of_all_ranks(), self.inputs.routers
        losses = values.new_zeros(2) if routers is None else routers.losses().to(values.dtype)
        if not program.cut:
            return values, losses
        self.was, self.runner.memory.open_forward = self.marks(), self
        anchor = values.new_zeros(0, requires_grad=True)
        found: tuple[Tensor, Tensor] = _Values.apply(anchor, values, losses, self)
        return found

    def backward(self, given: Tensor, routers: Tensor) -> None:
        """Run the program's backward from the loss's gradient with respect to the values, [B, T,
        k], and add to `.grad`; first run the forward again if another call has taken its memory."""
        if self.inputs.routers is not None:
            self.inputs.routers.scale = routers.double()
        sharded = self.ready[0].sharded
        with agreement(None if sharded is None else sharded.ranks, "backward of values") as same:
            if self.marks() != self.was:
                raise RuntimeError(
                    "step: the model has changed since the forward of these values (its weights, "
                    "modules, trained parameters, or train and eval mode); call backward before "
                    "changing it, or compute the values again"
                )
            stands = self.runner.memory.open_forward is self
            same.add({"calls since the forward": "none" if stands else "some"})
            if not stands:
                LOG.info("step: another call came before this backward, so the forward runs again")
                self.ready = self.again()
        model, prepared = self.ready
        of = model, prepared.program, self.gradients, self.inputs
        with self.runner.issuing(*of, resumes=True) if stands else self._begun():
            head = self.interpreter.head
            assert isinstance(head, ValueHead)
            if head.plain is not None and given.shape[2] > 1 and not bool(given[..., 1:].any()):
                given = given[..., :1]  # statistics have no gradient
            self.interpreter.registers.given = given
            self.interpreter.run(self._orders())
            self._close_own()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        model, prepared = self.ready
        self.gradients, program = accumulator(model), prepared.program
        with self.runner.issuing(model, program, self.gradients, self.inputs):
            piece = program.schedule.loss_chunk_size
            head = value_head(model, self.function, self.inputs.targets, piece)
            self.interpreter = self.runner.interpreter(
                model, prepared, self.inputs, head, self.gradients
            )
            yield

    def _orders(self) -> tuple[Order, ...] | None:
        return self.ready[1].orders if self.runner.copies.overlap else None

    def _of_all_ranks(self) -> Tensor:
        values, sharded = self.interpreter.registers.values, self.ready[0].sharded
        if sharded is None:
            assert values is not None, "the head ran"
            return values
        width = 0 if values is None else values.shape[2]  # another stage has the head
        width = max(number for (number,) in sharded.ranks.figures([width]))
        if values is None:
            shape, stages = self.inputs.input_ids.shape, self.ready[0].stages
            dtype = accumulate_dtype(stages.dtype)
            values = torch.zeros(*shape, width, dtype=dtype, device=stages.device)
        sharded.ranks.among(*SEQUENCE, "pipeline").sum(values)
        return values

    def _close_own(self) -> None:
        """Add gradients of the head's own parameters to `.grad`, summed over ranks."""
        head, sums = self.interpreter.head, self.interpreter.registers.own
        assert isinstance(head, ValueHead)
        for parameter in head.own:
            total, sharded = sums.take(parameter), self.ready[0].sharded
            if sharded is not None:
                if total is None:
                    total = torch.zeros_like(parameter, dtype=accumulate_dtype(parameter.dtype))
                sharded.ranks.among(*AXES).sum(total)
            if total is not None:
                sums.place(parameter, total, fresh=False)
        sums.close(head.own)
        call_accumulated(p for p in head.own if p in sums.received)


class _Values(torch.autograd.Function):
    """Autograd function of the values [B, T, k]: its backward runs the program's backward."""

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, values: Tensor, losses: Tensor, of: OpenForward
    ) -> tuple[Tensor, Tensor]:
        ctx.of = of
        return values.clone(), losses.clone()  # the caller may write in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, routers: Tensor) -> tuple[Tensor | None, ...]:
        ctx.of.backward(given, routers)
        return given.new_zeros(0), None, None, None
