"""How far a step's gradients may be off in lower precision, where plain autograd's are off too.

Rounding draws errors, and one draw against another passes or fails by chance. So both sides run
more than once, on inputs that are a rounding apart, the same ones on both, and what counts is the
run in which the step is least off beside plain autograd: a fault is there in every run. Draws have
a heavy tail where parts cancel, as in gradients of keys: then a few tokens have most of the error,
and one run of a trained model was off by 5 times what plain autograd was. A tail that long seldom
comes twice.

Judged are single parameters and kinds of them, which are all layers' parameters of one name, by
the median over layers: a fault of attention is in all of them, a long tail in a few. The error may
be larger than plain autograd's for two reasons:

- Rounding. Attention in blocks rounds once what plain autograd rounds once (each block's part),
  and once more when parts are joined. Two independent roundings have twice the variance of one, so
  the error may be sqrt(2) times as large, were every rounding of the model made twice.
- Chance. The logarithm of an error differs between runs of plain autograd by `s`, that of a ratio
  by s * sqrt(2). All of n runs are beyond z of that with a chance of p^n, where p is the normal
  distribution's; z is where it is `FALSE_ALARMS` over the number of things judged.

The geometric mean of all ratios has little chance in it, and a fault of attention is in all of
them: it may be sqrt(2) and no more.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist, fmean, median, variance
from typing import cast

import torch
from torch import Tensor, nn

from farspan.hf.stages import CausalLMStages

EXACT = 1e-12  # float64 throughout, where the model's own code would compute in float32 as well
RUNS = 2
TWO_ROUNDINGS = sqrt(2)  # against one
FALSE_ALARMS = 0.01  # of verifications, were every rounding made twice
FLOOR = 1e-7  # relative error below which two float32 results count as equal
LAYERS = 3  # of fewer, a median leaves out nobody's tail

Errors = dict[str, float]  # relative, by the name of a parameter


@dataclass(frozen=True, slots=True)
class GradientError:
    """Relative L2 error of a parameter's gradient against the float64 reference, or the median one
    of a kind of parameters (`layers.*.q_proj.weight`). In lower precision that of the run in which
    it is least beside plain autograd's, of a model that chooses experts over all runs."""

    name: str
    error: float
    limit: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Errors of a step's gradients with their limits."""

    errors: list[GradientError]
    loss: float  # limit
    rule: str
    ratio: float | None = None  # to plain autograd's errors, the geometric mean; below float64 only
    most: float = float("inf")  # limit of `ratio`

    def passed(self, loss: float) -> bool:
        """`loss`: relative error."""
        within = all(e.error <= e.limit for e in self.errors) and loss <= self.loss
        return within and (self.ratio is None or self.ratio <= self.most)


def beside_plain(
    plain: list[Errors], steps: list[Errors], losses: list[float], *, chooses: bool
) -> Judged:
    """Every parameter and every kind of them, by runs of plain autograd (whose losses are off by
    `losses`) and of the step.

    `chooses`: the model takes the largest of some scores, as a router of experts does. Where
    rounding tips a choice it is off by more than rounding, in plain autograd as in a step, and in
    other parameters; the limit is twice plain autograd's worst, of all parameters and runs.
    """
    loss, ratio = root_mean_square(losses), _mean_ratio(plain, steps)
    rule = f"over {len(plain)} runs that round apart, error against float64 <= "
    if chooses:
        worst = max(max(run.values()) for run in plain)
        rule += f"2x that of plain autograd's worst parameter + {FLOOR:g}, because the model "
        limit = 2 * worst + FLOOR
        found = {name: root_mean_square([run[name] for run in steps]) for name in plain[0]}
        errors = [GradientError(name, error, limit) for name, error in found.items()]
        return Judged(errors, 2 * max(loss, worst) + FLOOR, rule + "chooses experts", ratio)
    groups = {name: [name] for name in plain[0]}
    kinds = {kind: names for kind, names in _kinds(groups).items() if len(names) >= LAYERS}
    spreads = _spreads(plain, groups) | _spreads(plain, kinds)
    chance = (FALSE_ALARMS / len(spreads)) ** (1 / len(plain))
    most = NormalDist().inv_cdf(1 - chance) * sqrt(2)
    factors = {name: TWO_ROUNDINGS * exp(most * spread) for name, spread in spreads.items()}
    errors = [
        _least_off(plain, steps, name, names, factors[name])
        for name, names in (groups | kinds).items()
    ]
    rule += (
        f"{TWO_ROUNDINGS:.2f}x that of plain autograd over all parameters, and in one of the runs "
        f"{min(factors.values()):.2f}x to {max(factors.values()):.2f}x for each parameter and each "
        f"kind, as far as plain autograd's runs differ, + {FLOOR:g}"
    )
    typical = median(median(run.values()) for run in plain)
    return Judged(errors, 2 * max(loss, typical) + FLOOR, rule, ratio, TWO_ROUNDINGS)


def _least_off(
    plain: list[Errors], steps: list[Errors], name: str, names: list[str], factor: float
) -> GradientError:
    """In the run in which it is least beside plain autograd's; infinite only if every run is."""
    ratio, own = min(
        (median(_ratio(step[n], run[n]) for n in names), median(run[n] for n in names))
        for step, run in zip(steps, plain, strict=True)
    )
    return GradientError(name, ratio * (own + FLOOR) - FLOOR, factor * (own + FLOOR) - FLOOR)


def _mean_ratio(plain: list[Errors], steps: list[Errors]) -> float:
    """The geometric mean of the steps' errors beside plain autograd's, over all parameters and
    runs; infinite where one is."""
    ratios = [_ratio(step[n], run[n]) for step, run in zip(steps, plain, strict=True) for n in run]
    return float("inf") if float("inf") in ratios else exp(fmean(map(log, ratios)))


def _kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by what is left of them without the numbers of layers and experts."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\.\d+(?=\.|$)", ".*", name)].append(name)
    return kinds


def root_mean_square(errors: list[float]) -> float:
    return sqrt(fmean(error**2 for error in errors))


def _ratio(found: float, own: float) -> float:
    return (found + FLOOR) / (own + FLOOR)


def _spreads(plain: list[Errors], groups: dict[str, list[str]]) -> Errors:
    """By group, the standard deviation of the logarithm of its error from run to run: of a few runs
    of one parameter little is known, so it is that of its kind in all layers, and at least that of
    a typical kind."""
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
def nudged(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside it the model's embeddings differ by about one more rounding, and all that follows
    from them rounds apart. Seed 0 leaves them as they are.

    A rounding is off by up to half a step, evenly, a variance of 1/12 of a step squared: so is a
    table in which one number of twelve is a step up or down.
    """
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
