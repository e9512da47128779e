"""Are the gradients exact for this model and this schedule? Measured, not argued."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.attention.softmax import reference
from farspan.engine.batch import IGNORED, make_batch
from farspan.engine.oracle import Attention, gradients_of, oracle_loss
from farspan.engine.step import Step
from farspan.engine.verify_rounding import (
    EXACT,
    RUNS,
    Errors,
    GradientError,
    Judged,
    beside_plain,
    nudged,
    root_mean_square,
)
from farspan.hf.attention_interface import eager_experts
from farspan.hf.probe import Float64Mode
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import refuse_context
from farspan.sparse.engine import PageFunction
from farspan.sparse.select import Selector
from farspan.sparse.verify import Approximation, Function, Gradients, approximation
from farspan.spec import Refused, Schedule

# A gradient that is zero in exact arithmetic (a key bias without RoPE) is rounding noise in every
# computation. Below this share of the whole gradient an error is taken relative to the whole.
NOISE = 1e-14
# The reference reads windows and caps where the engine does, the model's own attention does not.
# A float32 model's own softmax is of float32, whose roundings add up to less than this.
OWN = 1e-4

Data = tuple[Tensor, Tensor, Tensor | None]  # input_ids, labels, document_ids
Outcome = tuple[Tensor, Gradients]  # the loss


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `verify`."""

    passed: bool
    loss_error: float  # relative
    max_relative_error: float  # over all parameters
    own_loss_error: float | None  # of the model's own attention against the reference's, if run
    worst: tuple[GradientError, ...]  # worst against its limit first; parameters and kinds
    checked_parameters: int
    dtype: str
    rule: str  # what the limit is
    float64_error: float | None = None  # largest of the same schedule; below float64 only
    # Errors beside plain autograd's, the geometric mean over all parameters; below float64 only.
    rounding_ratio: float | None = None
    sparse: Approximation | None = None  # of a sparse schedule; plays no part in `passed`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class VerificationRun:
    """The data a verification draws: random tokens, cut into random documents."""

    batch: int = 1
    tokens: int = 512
    documents: int = 1  # a row
    seed: int = 0

    def draw(self, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """input_ids, labels (some ignored) and document_ids, each [batch, tokens]."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.tokens)
        ids = torch.randint(0, vocab, shape, generator=generator)
        labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.1, -100)
        documents = None
        if self.documents > 1:
            rows = []
            for _ in range(self.batch):
                cuts = torch.randperm(self.tokens - 1, generator=generator) + 1
                begins = torch.zeros(self.tokens, dtype=torch.long)
                begins[cuts[: self.documents - 1]] = 1
                rows.append(begins.cumsum(0))
            documents = torch.stack(rows).to(device)
        return ids.to(device), labels.to(device), documents


def verify(
    model: nn.Module,
    schedule: Schedule,
    run: VerificationRun,
    *,
    worst: int = 10,
    selector: Selector | PageFunction | None = None,
) -> Verification:
    """Compare loss and every gradient of one step with plain full-sequence autograd.

    A float64 model must agree to 1e-12 in relative L2 norm for every parameter; what its own code
    computes in float32 is computed in float64 meanwhile, on both sides. In a lower precision two
    things are asked. A float64 copy must pass that test with the same schedule, which is where a
    wrong order, a lost block or a wrong weight shows, however small. And what the precision adds,
    with its own kernels, may be no more than rounding: against the float64 copy, errors of two
    steps whose inputs are a rounding apart, beside those of plain autograd on the same inputs, may
    be sqrt(2) times as large over all parameters; in one of them at least, for each parameter and
    for the median of each kind, sqrt(2) times what chance allows by how far plain autograd's runs
    differ (`verify_rounding`). The model is nudged meanwhile and is what it was afterwards. The
    model's `.grad` is kept.

    With `schedule.sparse` (and a `selector` as for `Step`) that is asked of sparse attention's own
    function, in float64 with pages chosen by each side for itself, in lower precision with the
    pages that float64 chooses. How far it is from dense attention is told in `sparse`.
    """
    boundary = CausalLMStages(model)
    data = run.draw(boundary.vocab, boundary.device)
    if not any(p.requires_grad for p in model.parameters()):
        raise Refused("model: no parameter is trained, so there is no gradient to verify")
    function = Function(schedule, selector, _dtype(model))
    with eager_experts(model), Float64Mode() if function.dtype is torch.float64 else nullcontext():
        # Both refuse now, not after the references, which take time and memory by the length
        # squared.
        Step(model, schedule, selector=selector)
        positions = make_batch(*data, boundary.vocab).position_ids
        refuse_context(boundary.model.config, int(positions.max()) + 1)
        return _verify(model, function, data, worst)


def _dtype(model: nn.Module) -> torch.dtype:
    """Of the parameters; of several dtypes, the first that is not float64."""
    every = [p.dtype for p in model.parameters()]
    return next((dtype for dtype in every if dtype is not torch.float64), torch.float64)


def _verify(model: nn.Module, function: Function, data: Data, worst: int) -> Verification:
    in_double = function.dtype is torch.float64
    twin = model if in_double else copy.deepcopy(model).double()
    structure = dense = None
    with eager_experts(twin), Float64Mode():
        exact = _plain(twin, data, function.exact())
        if function.schedule.sparse is not None:
            dense = _plain(twin, data, reference)
        if not in_double:
            structure = _structure(twin, function, data, exact)
    steps, plains = _Side(exact), _Side(exact)
    for seed in range(1 if in_double else RUNS):
        with nudged(model, seed):
            if not in_double:
                plains.add(_plain(model, data, function.again()))
            steps.add(_stepped(model, function, data))
    judged = _exactly(steps) if in_double else _rounded(model, data, plains, steps)
    errors = sorted(judged.errors, key=lambda e: e.error / e.limit, reverse=True)
    loss_error = root_mean_square(steps.losses)
    own_error = _own_loss_error(model, data, (exact if in_double else plains.first)[0])
    if dense is not None:
        own_error = _own_loss_error(model, data, dense[0])
    within = (
        judged.passed(loss_error)
        and (own_error or 0.0) <= (EXACT if in_double else OWN)
        and (structure or 0.0) <= EXACT
    )
    told = None
    if dense is not None:
        told = approximation(function, model, data[0].shape[1], steps.first, dense)
    return Verification(
        passed=bool(within),
        loss_error=loss_error,
        max_relative_error=max((e.error for e in errors), default=0.0),
        own_loss_error=own_error,
        worst=tuple(errors[:worst]),
        checked_parameters=len(steps.errors[0]),
        dtype=str(function.dtype).removeprefix("torch."),
        rule=judged.rule + function.rule(),
        float64_error=structure,
        rounding_ratio=judged.ratio,
        sparse=told,
    )


class _Side:
    """Errors of one side's runs, the steps' or plain autograd's, and the first run itself."""

    def __init__(self, exact: Outcome) -> None:
        self.exact = exact
        self.losses: list[float] = []
        self.errors: list[Errors] = []

    def add(self, outcome: Outcome) -> None:
        if not self.errors:
            self.first = outcome
        self.losses.append(_error(outcome[0], self.exact[0]))
        self.errors.append(_errors(outcome[1], self.exact[1]))


def _structure(twin: nn.Module, function: Function, data: Data, exact: Outcome) -> float:
    """The largest relative error of a step by the same schedule in float64."""
    loss, found = _stepped(twin, replace(function, dtype=torch.float64, choices=None), data)
    return max([_error(loss, exact[0]), *_errors(found, exact[1]).values()])


def _exactly(steps: _Side) -> Judged:
    """For a float64 model."""
    errors = [GradientError(name, error, EXACT) for name, error in steps.errors[0].items()]
    return Judged(errors, EXACT, f"relative L2 error <= {EXACT:g}, float64 throughout")


def _rounded(model: nn.Module, data: Data, plains: _Side, steps: _Side) -> Judged:
    chooses = _chooses(model, data)
    judged = beside_plain(plains.errors, steps.errors, plains.losses, chooses=chooses)
    rule = f"a step by this schedule in float64 to {EXACT:g}; in {_dtype(model)}, "
    return replace(judged, rule=rule + judged.rule)


def _plain(model: nn.Module, data: Data, attend: Attention) -> Outcome:
    """Loss and gradients by plain autograd."""
    loss = oracle_loss(model, *data, attend=attend)
    return loss.detach(), gradients_of(model, loss)


def _stepped(model: nn.Module, function: Function, data: Data) -> Outcome:
    """Loss and gradients by the step."""
    selector = function.selector(model, *data[0].shape)
    with _own_gradients(model):
        loss = Step(model, function.schedule, poison=True, selector=selector)(*data)
        return loss, {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }


@torch.no_grad()
def _own_loss_error(model: nn.Module, data: Data, reference: Tensor) -> float | None:
    """How far the loss by the model's own attention and masks is from the reference's. Not asked of
    packed documents, which not every attention keeps apart, nor below float32."""
    input_ids, labels, documents = data
    if documents is not None or next(model.parameters()).dtype.itemsize < 4:
        return None
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    total = functional.cross_entropy(
        logits.flatten(0, 1).to(reference.dtype), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    return _error(total, reference)


def _chooses(model: nn.Module, data: Data) -> bool:
    """Whether it takes the largest of some scores, as a router of experts does."""
    seen = _Choices()
    with torch.no_grad(), seen:
        oracle_loss(model, *data)
    return seen.any


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    whole = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    errors = {}
    for name, gradient in expected.items():
        noise = float(gradient.double().norm()) <= NOISE * whole
        errors[name] = _error(found[name], gradient, whole if noise else 0.0)
    return errors


def _error(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """L2 error relative to the expected norm, or to `least`; NaN counts as infinite."""
    found, expected = found.detach().double(), expected.detach().double()
    norm = max(float(expected.norm()), least)
    error = float((found - expected).norm())
    if error != error:
        return float("inf")
    return error / norm if norm > 0 else error


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    before = {p: p.grad for p in model.parameters()}
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


class _Choices(TorchDispatchMode):
    """Notices `topk`."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.any |= func.overloadpacket is torch.ops.aten.topk
        return func(*args, **(kwargs or {}))
