"""Are the gradients exact for this model and this schedule? Measured, not argued."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.attention.reference import reference
from farspan.attention.sparse.select import Selector
from farspan.engine.batch import IGNORED, make_batch
from farspan.engine.oracle import Attention, gradients_of, oracle_loss
from farspan.engine.sparse import PageFunction
from farspan.engine.step import Step
from farspan.engine.verify_sparse import Approximation, Function, Gradients, approximation
from farspan.models.boundary import Boundary
from farspan.models.describe import describe
from farspan.models.experts import eager_experts
from farspan.models.refuse import refuse_context
from farspan.models.wide import InFloat64
from farspan.spec import Refused, Schedule

EXACT = 1e-12  # float64 throughout, where the model's own code would compute in float32 as well
FLOOR = 1e-7  # relative error below which two float32 results count as equal
# A gradient that is zero in exact arithmetic (a key bias without RoPE) is rounding noise in every
# computation. Below this share of the whole gradient an error is taken relative to the whole.
NOISE = 1e-14
NUDGES = 2  # further runs of plain autograd, where one may be lucky
# The reference reads windows and caps where the engine does, the model's own attention does not.
# A float32 model's own softmax is of float32, whose roundings add up to less than this.
OWN = 1e-4

Data = tuple[Tensor, Tensor, Tensor | None]  # input_ids, labels, document_ids


@dataclass(frozen=True, slots=True)
class ParameterError:
    """Relative L2 error of one parameter's gradient against the float64 reference."""

    name: str
    error: float
    limit: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `verify`."""

    passed: bool
    loss_error: float  # relative
    max_relative_error: float  # over all parameters
    own_loss_error: float | None  # of the model's own attention against the reference's, if run
    worst: tuple[ParameterError, ...]  # worst against its limit first
    checked_parameters: int
    dtype: str
    rule: str  # what the limit is
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
    computes in float32 is computed in float64 meanwhile, on both sides. In a lower precision the
    error against a float64 copy may be at most twice that of plain autograd in the same
    precision. The model's `.grad` is kept.

    With `schedule.sparse` (and a `selector` as for `Step`) that is asked of sparse attention's own
    function, in float64 with pages chosen by each side for itself, in lower precision with the
    pages that float64 chooses. How far it is from dense attention is told in `sparse`.
    """
    boundary = Boundary(model)
    data = run.draw(boundary.vocab, boundary.device)
    if not any(p.requires_grad for p in model.parameters()):
        raise Refused("model: no parameter is trained, so there is no gradient to verify")
    function = Function(schedule, selector, _dtype(model))
    with eager_experts(model), InFloat64() if function.dtype is torch.float64 else nullcontext():
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


@dataclass(frozen=True, slots=True)
class _Limits:
    parameters: dict[str, float]
    loss: float
    rule: str


def _verify(model: nn.Module, function: Function, data: Data, worst: int) -> Verification:
    in_double = function.dtype is torch.float64
    twin = model if in_double else copy.deepcopy(model).double()
    with eager_experts(twin), InFloat64():
        exact = _plain(twin, data, function.exact())
        is_sparse = function.schedule.sparse is not None
        dense = _plain(twin, data, reference) if is_sparse else None
    if in_double:
        plain, limits = exact, _exact_limits(model)
    else:
        plain = _plain(model, data, function.again())
        limits = _rounded_limits(model, function, data, plain, exact)
    loss, found = _stepped(model, function, data)
    errors = [
        ParameterError(name, error, limits.parameters[name])
        for name, error in _errors(found, exact[1]).items()
    ]
    errors.sort(key=lambda e: e.error / e.limit, reverse=True)
    loss_error = _error(loss, exact[0])
    own_error = _own_loss_error(model, data, plain[0] if dense is None else dense[0])
    own_limit = EXACT if in_double else OWN
    within = all(e.error <= e.limit for e in errors) and (own_error or 0.0) <= own_limit
    told = None
    if dense is not None:
        told = approximation(function, model, data[0].shape[1], (loss, found), dense)
    return Verification(
        passed=bool(within and loss_error <= limits.loss),
        loss_error=loss_error,
        max_relative_error=max((e.error for e in errors), default=0.0),
        own_loss_error=own_error,
        worst=tuple(errors[:worst]),
        checked_parameters=len(errors),
        dtype=str(function.dtype).removeprefix("torch."),
        rule=limits.rule + function.rule(),
        sparse=told,
    )


def _plain(model: nn.Module, data: Data, attend: Attention) -> tuple[Tensor, Gradients]:
    """Loss and gradients by plain autograd."""
    loss = oracle_loss(model, *data, attend=attend)
    return loss.detach(), gradients_of(model, loss)


def _stepped(model: nn.Module, function: Function, data: Data) -> tuple[Tensor, Gradients]:
    """Loss and gradients by the step."""
    selector = function.selector(model, *data[0].shape)
    with _own_gradients(model):
        loss = Step(model, function.schedule, poison=True, selector=selector)(*data)
        return loss, {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }


def _rounded_limits(
    model: nn.Module,
    function: Function,
    data: Data,
    plain: tuple[Tensor, Gradients],
    exact: tuple[Tensor, Gradients],
) -> _Limits:
    """For a model of less than float64, whose plain autograd is off as well."""
    chooses, runs = _chooses(model, data), [plain]
    if chooses or describe(Boundary(model)).is_recurrent():
        # Which choices of experts rounding tips is chance, and so is how decays of a few numbers
        # round: one run of plain autograd is off by a third of what another is.
        runs += [_plain(_nudged(model, n), data, function.again()) for n in range(NUDGES)]
    every = [_errors(gradients, exact[1]) for _, gradients in runs]
    own = {name: max(errors[name] for errors in every) for name in plain[1]}
    # Twice what plain autograd is off by; a short vector may be lucky there, so at least
    # twice what is typical of the model.
    typical = sorted(own.values())[len(own) // 2]
    rule = f"error against float64 <= 2x that of plain autograd in {_dtype(model)} + {FLOOR:g}"
    if len(runs) > 1:
        rule += f", in {len(runs)} runs that round apart"
    if chooses:
        # It differs by more than rounding where a choice tips, in plain autograd as here, and in
        # other parameters.
        typical = max(own.values())
        rule += ", of its worst parameter, because the model chooses experts"
    limits = {name: 2 * max(error, typical) + FLOOR for name, error in own.items()}
    return _Limits(limits, 2 * max(_error(plain[0], exact[0]), typical) + FLOOR, rule)


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


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose embeddings differ by about a rounding, and all that follows from them too."""
    twin = copy.deepcopy(model)
    table = cast(Tensor, Boundary(twin).model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(table.shape, generator=generator).to(table.device)
    with torch.no_grad():
        table.mul_(1 + noise * torch.finfo(table.dtype).eps)
    return twin


def _exact_limits(model: nn.Module) -> _Limits:
    """For a float64 model."""
    limits = {name: EXACT for name, p in model.named_parameters() if p.requires_grad}
    return _Limits(limits, EXACT, f"relative L2 error <= {EXACT:g}, float64 throughout")


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
