"""Verify the gradients of a step, for a model and a schedule, against plain autograd.

In float64 both must agree to `EXACT` or, if a sum or a recurrence is so ill-conditioned that
rounding alone changes the reference more, as far as rounding does. The reference shows that: it
runs `MOVED_RUNS` more times, with every result of its arithmetic off by up to half a unit in the
last place more (Monte Carlo arithmetic). A step may differ from it `MOVES` times as much as the
furthest of these runs: a step rounds at other places, a few times as often at most. A model that
rounding changes beyond `ILL_CONDITIONED` fails: there a fault looks like rounding.

In lower precision plain autograd is off as well, and by chance. So both sides run several times, on
inputs that are a rounding apart, the same for both, and the run counts in which the step is least
off relative to plain autograd: a fault is in every run. Errors have a heavy tail where terms
cancel, as in gradients of keys: then a few tokens have most of the error, and one run of a trained
model was off by 5 times as much as plain autograd. That seldom happens twice.

The test judges single parameters, and the median over layers of parameters with one name: a fault
of attention is in all layers, a long tail in a few. A step's error may be larger for two reasons:

- Rounding. Attention in blocks rounds each block's part as plain autograd does the whole, and again
  when parts are joined. Two independent roundings have twice the variance of one, so the error may
  be sqrt(2) times as large, were every rounding of the model made twice.
- Chance. The logarithm of an error differs between runs of plain autograd by `s`, that of a ratio
  by s * sqrt(2). All n runs are beyond z times that with a chance of p^n, where p is the normal
  distribution's; z gives `FALSE_ALARMS` over the number of judged things.

Chance hardly affects the geometric mean of all ratios: it may be sqrt(2) and no more.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean, median, variance
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.attention.backends import reference
from farspan.attention.far import GivenSelector
from farspan.engine.far import function_of
from farspan.engine.gradients import own_gradients
from farspan.engine.loss import IGNORED, make_inputs
from farspan.engine.reference import (
    Approximation,
    Attention,
    Function,
    Outcome,
    gradients_of,
    reference_loss,
)
from farspan.engine.step import Step
from farspan.hf.attention_interface import eager_experts
from farspan.hf.probe import Float64Mode
from farspan.hf.quantized import is_quantized, unpacked
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import drawing_dropouts, refuse_context
from farspan.spec import Kernels, Products, Schedule, UnsupportedError

EXACT = 1e-12  # float64 throughout, also where the model's own code would compute in float32
MOVED_RUNS = 8  # of the reference, if a step is beyond EXACT
MOVES = 4.0
ILL_CONDITIONED = 1e-10
ROUNDING_RUNS = 2
TWO_ROUNDINGS = sqrt(2)  # compared with one
FALSE_ALARMS = 0.01  # share of verifications that fail by chance, were every rounding made twice
FLOOR = 1e-7  # relative error below which two float32 results count as equal
LAYERS = 3  # with fewer, a median does not leave out a tail

Errors = dict[str, float]  # relative, by a parameter's name


@dataclass(frozen=True, slots=True)
class GradientError:
    """Relative L2 error of a gradient against the float64 reference: of one parameter, or the
    median over the parameters of one name in all layers (`layers.*.q_proj.weight`). Of several runs
    (below float64) it is the error in the run with the least ratio to plain autograd's error or, if
    the model chooses experts, the root mean square over runs."""

    name: str
    error: float
    limit: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Errors of a step's gradients, with the limits for a pass."""

    errors: list[GradientError]
    loss: float  # limit
    rule: str
    ratio: float | None = None  # geometric mean against plain autograd's; below float64 only
    most: float = float("inf")  # limit of `ratio`

    def passed(self, loss: float) -> bool:
        """Return whether all gradients' errors and `loss`, the loss's error, are within limits."""
        within = all(e.error <= e.limit for e in self.errors) and loss <= self.loss
        return within and (self.ratio is None or self.ratio <= self.most)


def beside_plain(
    plain: list[Errors], steps: list[Errors], losses: list[float], *, chooses: bool
) -> Judged:
    """Compare gradient errors of a step with those of plain autograd, run by run, and set limits.

    Args:
        losses: Relative errors of plain autograd's losses.
        chooses: The model takes the largest of some scores, as a router of experts does. If
            rounding tips a choice, plain autograd and a step are both off by more than rounding,
            and in different parameters; the limit is twice plain autograd's worst, of all
            parameters and runs.
    """
    loss = root_mean_square(losses)
    pairs = zip(steps, plain, strict=True)
    ratios = [_ratio(step[name], run[name]) for step, run in pairs for name in run]
    ratio = inf if inf in ratios else exp(fmean(map(log, ratios)))  # geometric mean of all
    rule = f"over {len(plain)} runs that round differently, error against float64 <= "
    if chooses:
        worst = max(max(run.values()) for run in plain)
        rule += f"2x the error of plain autograd's worst parameter + {FLOOR:g}, because the model "
        limit = 2 * worst + FLOOR
        found = {name: root_mean_square([run[name] for run in steps]) for name in plain[0]}
        errors = [GradientError(name, error, limit) for name, error in found.items()]
        return Judged(errors, 2 * max(loss, worst) + FLOOR, rule + "chooses experts", ratio)
    groups = {name: [name] for name in plain[0]}
    kinds = {kind: names for kind, names in _kinds(groups).items() if len(names) >= LAYERS}
    factors = _factors(_spreads(plain, groups) | _spreads(plain, kinds), len(plain))
    errors = [
        _least_off(plain, steps, name, names, factors[name])
        for name, names in (groups | kinds).items()
    ]
    rule += (
        f"{TWO_ROUNDINGS:.2f}x plain autograd's error over all parameters, and in at least one run "
        f"{min(factors.values()):.2f}x to {max(factors.values()):.2f}x for each parameter and each "
        f"kind (the more plain autograd's runs differ, the more) + {FLOOR:g}"
    )
    typical = median(median(run.values()) for run in plain)
    return Judged(errors, 2 * max(loss, typical) + FLOOR, rule, ratio, TWO_ROUNDINGS)


def _factors(spreads: Errors, runs: int) -> Errors:
    """Return each gradient's error limit, by name, as a multiple of plain autograd's error."""
    chance = (FALSE_ALARMS / len(spreads)) ** (1 / runs)
    most = NormalDist().inv_cdf(1 - chance) * sqrt(2)
    return {name: TWO_ROUNDINGS * exp(most * spread) for name, spread in spreads.items()}


def exactly(errors: Errors, moved: list[Errors]) -> Judged:
    """Compare a float64 step's errors with their limits. `moved` has the changes of the reference
    itself in runs that round differently; it is empty if all errors are within `EXACT`."""
    rule = f"relative L2 error <= {EXACT:g}, float64 throughout"
    limits = dict.fromkeys(errors, EXACT)
    if moved:
        furthest = {name: max(run[name] for run in moved) for name in errors}
        limits = {n: max(EXACT, min(MOVES * m, ILL_CONDITIONED)) for n, m in furthest.items()}
        rule += (
            f", or {MOVES:g}x the largest change of the reference in {len(moved)} runs that round "
            f"every result once more, but at most {ILL_CONDITIONED:g}"
        )
        if (most := max(furthest.values())) > ILL_CONDITIONED:
            rule += f" (changed by {most:.1e}: this model is too ill-conditioned for the test)"
    return Judged([GradientError(n, e, limits[n]) for n, e in errors.items()], EXACT, rule)


def _least_off(
    plain: list[Errors], steps: list[Errors], name: str, names: list[str], factor: float
) -> GradientError:
    """Return a parameter's error in the run with the least ratio to plain autograd's error."""
    ratio, own = min(
        (median(_ratio(step[n], run[n]) for n in names), median(run[n] for n in names))
        for step, run in zip(steps, plain, strict=True)
    )
    return GradientError(name, ratio * (own + FLOOR) - FLOOR, factor * (own + FLOOR) - FLOOR)


def _kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names that differ only in the numbers of layers and experts."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\.\d+(?=\.|$)", ".*", name)].append(name)
    return kinds


def root_mean_square(errors: list[float]) -> float:
    return sqrt(fmean(error**2 for error in errors))


def _ratio(step: float, plain: float) -> float:
    return (step + FLOOR) / (plain + FLOOR)


def _spreads(plain: list[Errors], groups: dict[str, list[str]]) -> Errors:
    """Return, by name, the standard deviation over runs of the logarithm of plain autograd's error.
    Runs are few: variances are averaged over layers, and raised to the median over names at
    least."""
    variances = {
        name: variance(median(log(run[n] + FLOOR) for n in names) for run in plain)
        for name, names in groups.items()
    }
    kinds = _kinds(groups)
    means = {kind: fmean(variances[name] for name in names) for kind, names in kinds.items()}
    typical = median(means.values()) if means else 0.0
    return {
        name: sqrt(max(typical, means[kind])) for kind, names in kinds.items() for name in names
    }


@contextmanager
def perturbed_embeddings(model: nn.Module, seed: int) -> Iterator[None]:
    """Run the body with embeddings changed by about one rounding, so that all results round
    differently. Seed 0 changes nothing. One in twelve numbers moves by one rounding step: its
    variance, 1/12 of a step squared, is that of rounding to nearest."""
    if seed == 0:
        yield
        return
    table = cast(Tensor, CausalLMStages(model).model.get_input_embeddings().weight)
    before = table.detach().clone()
    drawn = torch.rand(table.shape, generator=torch.Generator().manual_seed(seed))
    steps = (drawn < 1 / 24).float() - (drawn > 23 / 24).float()
    with torch.no_grad():
        table.mul_(1 + torch.finfo(table.dtype).eps * steps.to(table.device))
    try:
        yield
    finally:
        with torch.no_grad():
            table.copy_(before)


# Operations whose results are rounded. Copies, masks, maxima and any other that is left out make
# the reference move less, and so the limit smaller.
ROUNDED = {
    "add", "addmm", "baddbmm", "bmm", "convolution", "convolution_backward", "cumsum", "div", "exp",
    "mm", "mul", "rsqrt", "rsub", "sigmoid", "silu", "silu_backward", "softplus", "sub", "sum",
}  # fmt: skip


class RoundedApart(TorchDispatchMode):
    """Dispatch mode that multiplies each float64 result by 1 + eps u, with a random |u| <= 0.5 from
    a seed, to show how much rounding errors change the model's gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in ROUNDED:
            return out
        if isinstance(out, Tensor) and out.dtype is torch.float64:
            drawn = torch.rand(out.shape, generator=self._generator, dtype=out.dtype) - 0.5
            out.mul_(1 + torch.finfo(out.dtype).eps * drawn.to(out.device))
        return out


# A gradient that is zero in exact arithmetic (a key bias without RoPE) is rounding noise in every
# computation. Below this share of the whole gradient an error is taken relative to the whole.
NOISE = 1e-14

Data = tuple[Tensor, Tensor, Tensor | None]  # input_ids, labels, document_ids


@dataclass(frozen=True, slots=True)
class ProductsError:
    """Relative errors of a step with approximate linear products, and of the same step without
    them, both in bfloat16, against plain autograd in float64 from the same weights."""

    products: Products
    gradient_error: float  # over all parameters together
    loss_error: float
    own_gradient_error: float  # of bfloat16 itself
    own_loss_error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of `verify`."""

    passed: bool
    loss_error: float  # relative
    max_relative_error: float  # over all parameters
    own_loss_error: float | None  # of the model's own attention against the reference, if run
    worst: tuple[GradientError, ...]  # worst against its limit first; parameters and kinds
    checked_parameters: int
    dtype: str
    rule: str  # description of the limit
    float64_error: float | None = None  # largest, by the same schedule; below float64 only
    # Geometric mean of ratios to plain autograd's errors, over all parameters; below float64 only.
    rounding_ratio: float | None = None
    sparse: Approximation | None = None  # of a sparse schedule; does not affect `passed`
    products: ProductsError | None = None  # of approximate products; does not affect `passed`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class VerificationRun:
    """Sizes and seed of the random tokens of a verification, cut into random documents."""

    batch: int = 1
    tokens: int = 512
    documents: int = 1  # per row
    seed: int = 0

    def draw(self, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw random input_ids, labels (some ignored) and document_ids, each [batch, tokens]."""
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
    selector: GivenSelector | None = None,
    products: Products | None = None,
) -> Verification:
    """Compare the loss and every gradient of one step with plain full-sequence autograd.

    A float64 model must agree to 1e-12 in relative L2 norm for every parameter, or as far as
    rounding changes the reference itself (`exactly`); operations that its code computes in float32
    run in float64 meanwhile, on both sides. A lower precision has two tests. First, a float64 copy
    (with the values of quantised weights) must pass that test with the same schedule: it shows a
    wrong order, a lost block or a wrong weight, however small. Then the model itself, with its own
    kernels, may add no more than rounding. Its errors against the float64 copy, in two steps whose
    inputs are a rounding apart, may be sqrt(2) times those of plain autograd over all parameters;
    for each parameter, and the median over layers, sqrt(2) times what chance allows in at least one
    run (`beside_plain`). The model is changed by a rounding meanwhile and restored afterwards. The
    model's `.grad` is kept.

    With `schedule.sparse` the tests are those of sparse attention's own function, in float64 with
    pages chosen by each side for itself, in lower precision with the pages that float64 chooses.

    Args:
        model: A causal LM, in its own precision.
        schedule: The schedule of the step to verify.
        run: Sizes and seed of the random tokens.
        worst: Number of parameters and medians in the result, the worst first.
        selector: Function that chooses pages, as for `Step`.
        products: Approximate linear products, whose error in bfloat16 is measured, too.

    Returns:
        The verification; `sparse` has the distance of sparse attention from dense, `products` the
        errors of approximate products and of bfloat16 itself.

    Raises:
        UnsupportedError: The model trains no parameter, has an active dropout, or fits no step.
    """
    stages = CausalLMStages(model)
    data = run.draw(stages.vocab, stages.device)
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedError("model: no parameter is trained, so there is no gradient to verify")
    for name, _ in drawing_dropouts(stages.model):
        raise UnsupportedError(
            f"model: {name} would drop other elements in the reference; call model.eval()"
        )
    function = function_of(schedule, selector, _dtype(model))
    with eager_experts(model), Float64Mode() if function.dtype is torch.float64 else nullcontext():
        # Both refuse now, before the references, which take time and memory by the length squared.
        Step(model, schedule, selector=selector)
        model.to(data[0].device)  # the schedule may have moved its weights
        positions = make_inputs(*data, stages.vocab).position_ids
        refuse_context(stages.model, int(positions.max()) + 1)
        found = _verify(model, function, data, worst)
    if products is None:
        return found
    return replace(found, products=_products_error(model, schedule, data, products))


def _products_error(
    model: nn.Module, schedule: Schedule, data: Data, products: Products
) -> ProductsError:
    schedule = replace(schedule, sparse=None)  # else its error would be in both
    low = unpacked(model, torch.bfloat16)
    twin = unpacked(low, torch.float64)
    with eager_experts(twin), Float64Mode():
        exact = _plain(twin, data, reference)
    del twin
    function, errors = function_of(schedule, None, torch.bfloat16), list[float]()
    for kernels in (Kernels(products=products), Kernels()):
        loss, gradients = _stepped(low, function, data, kernels)
        ours, theirs = (
            torch.cat([each[name].double().flatten() for name in exact[1]])
            for each in (gradients, exact[1])
        )
        errors += _error(ours, theirs), _error(loss, exact[0])
    return ProductsError(products, *errors)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which the model computes, that of its unpacked parameters. If these have
    several, it is the first other than float64."""
    every = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return next((dtype for dtype in every if dtype is not torch.float64), torch.float64)


def _verify(model: nn.Module, function: Function, data: Data, worst: int) -> Verification:
    in_double = function.dtype is torch.float64
    twin: nn.Module = model if in_double else unpacked(model, torch.float64)
    dense = None
    with eager_experts(twin), Float64Mode():
        exact = _plain(twin, data, function.exact())
        if function.schedule.sparse is not None:
            dense = _plain(twin, data, reference)
        own_error = _own_loss_error(twin, data, (dense or exact)[0])
        structure = _structure(twin, function, data, exact)
    steps, plains = _Side(exact), _Side(exact)
    if in_double:
        steps.add(structure.outcome)
        judged = structure.judged
    else:
        for seed in range(ROUNDING_RUNS):
            with perturbed_embeddings(model, seed):
                plains.add(_plain(model, data, function.again()))
                steps.add(_stepped(model, function, data))
        judged = _rounded(model, data, plains, steps)
    errors = sorted(judged.errors, key=lambda e: e.error / e.limit, reverse=True)
    loss_error = root_mean_square(steps.losses)
    within = (
        judged.passed(loss_error)
        and (own_error or 0.0) <= EXACT
        and structure.judged.passed(structure.loss_error)
    )
    told = None
    if dense is not None:
        told = function.approximation(model, data[0].shape[1], steps.first, dense)
    return Verification(
        passed=bool(within),
        loss_error=loss_error,
        max_relative_error=max((e.error for e in errors), default=0.0),
        own_loss_error=own_error,
        worst=tuple(errors[:worst]),
        checked_parameters=len(steps.errors[0]),
        dtype=str(function.dtype).removeprefix("torch."),
        rule=judged.rule + function.rule(),
        float64_error=None if in_double else structure.error,
        rounding_ratio=judged.ratio,
        sparse=told,
    )


class _Side:
    """Errors in all runs of a step or of plain autograd, and the results of the first run."""

    def __init__(self, exact: Outcome) -> None:
        self.exact = exact
        self.losses: list[float] = []
        self.errors: list[Errors] = []

    def add(self, outcome: Outcome) -> None:
        if not self.errors:
            self.first = outcome
        self.losses.append(_error(outcome[0], self.exact[0]))
        self.errors.append(_errors(outcome[1], self.exact[1]))


@dataclass(frozen=True, slots=True)
class Structure:
    """Result of a float64 step by the same schedule: it shows errors that rounding would hide."""

    outcome: Outcome
    judged: Judged
    loss_error: float

    @property
    def error(self) -> float:
        """Largest relative error of any parameter's gradient."""
        return max([self.loss_error, *(e.error for e in self.judged.errors)])


def _structure(twin: nn.Module, function: Function, data: Data, exact: Outcome) -> Structure:
    function = function.in_double()
    outcome = _stepped(twin, function, data)
    errors, moved = _errors(outcome[1], exact[1]), []
    if max(errors.values(), default=0.0) > EXACT:
        for seed in range(MOVED_RUNS):
            with RoundedApart(seed):
                moved.append(_errors(_plain(twin, data, function.exact())[1], exact[1]))
    return Structure(outcome, exactly(errors, moved), _error(outcome[0], exact[0]))


def _rounded(model: nn.Module, data: Data, plains: _Side, steps: _Side) -> Judged:
    chooses = _chooses(model, data)
    judged = beside_plain(plains.errors, steps.errors, plains.losses, chooses=chooses)
    packed = " with unpacked weights" if is_quantized(model) else ""
    rule = f"a step with this schedule in float64{packed}: error <= {EXACT:g}; in {_dtype(model)}, "
    return replace(judged, rule=rule + judged.rule)


def _plain(model: nn.Module, data: Data, attend: Attention) -> Outcome:
    loss = reference_loss(model, *data, attend=attend)
    return loss.detach(), gradients_of(model, loss)


def _stepped(
    model: nn.Module, function: Function, data: Data, kernels: Kernels | None = None
) -> Outcome:
    selector = function.selector(model, *data[0].shape)
    with own_gradients(model):
        loss = Step(model, function.schedule, poison=True, selector=selector, kernels=kernels)(
            *data
        )
        model.to(data[0].device)
        return loss, {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }


@torch.no_grad()
def _own_loss_error(model: nn.Module, data: Data, reference: Tensor) -> float | None:
    """Return the relative difference between the reference's loss and the loss by the model's own
    attention, which does not take windows and chosen tokens from the same place as the engine. None
    for packed documents, which some models do not keep apart, and attention without float64."""
    input_ids, labels, documents = data
    kind = getattr(model.config, "_attn_implementation", None)
    if documents is not None or kind not in ("eager", "sdpa"):
        return None
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    total = functional.cross_entropy(
        logits.flatten(0, 1).to(reference.dtype), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    return _error(total, reference)


def _chooses(model: nn.Module, data: Data) -> bool:
    """Return whether the model picks the largest of some scores, as a router of experts does."""
    seen = _Choices()
    with torch.no_grad(), seen:
        reference_loss(model, *data)
    return seen.any


def _errors(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    whole = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    errors = {}
    for name, gradient in expected.items():
        noise = float(gradient.double().norm()) <= NOISE * whole
        errors[name] = _error(gradients[name], gradient, whole if noise else 0.0)
    return errors


def _error(result: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the L2 error divided by the norm of `expected` (or by `least`, if that is larger);
    infinite for NaN."""
    result, expected = result.detach().double(), expected.detach().double()
    norm = max(float(expected.norm()), least)
    error = float((result - expected).norm())
    if error != error:
        return float("inf")
    return error / norm if norm > 0 else error


class _Choices(TorchDispatchMode):
    """Dispatch mode that notes whether the model calls `topk`."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.any |= func.overloadpacket is torch.ops.aten.topk
        return func(*args, **(kwargs or {}))
