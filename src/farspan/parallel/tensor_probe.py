"""Prove that a layer may be cut over ranks, by running what each of them would in turn.

A layer's blocks, cut, are run on all tokens and their outputs added: with random weights in their
place that must be the layer. Where it is not, something between the cut modules does more than work
on heads and features of its own, and the model is refused. One process does this, with no peers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farspan.parallel.kinds import kind_of
from farspan.parallel.tensor import GatherFeatures, Standing, first, local_block, twin, with_first
from farspan.parallel.tensor_plan import INSTEAD, Block, LayerPlan, TensorPlan
from farspan.spec import Refused

# A layer's number, and itself or a shell of it -> what it gives for random hidden states
# [B, C, h], in the dtype of its parameters, with dense attention that keeps no state between calls.
Run = Callable[[int, nn.Module], Tensor]

# Half of float32's digits: products of other shapes and norms in float32 round apart by 1e-7.
LIMIT = torch.finfo(torch.float32).eps ** 0.5


@torch.no_grad()
def check_layers(plan: TensorPlan, layers: nn.ModuleList, run: Run) -> None:
    """Raises Refused where a layer, before it is cut, is not what its parts add up to."""
    known = set()
    for index, (layer, cuts) in enumerate(zip(layers, plan.layers, strict=True)):
        kind = kind_of(layer, index)
        if kind in known:
            continue
        known.add(kind)
        wide = copy.deepcopy(layer).to(torch.promote_types(_dtype(layer), torch.float32))
        _scatter(wide)
        where = f"{plan.prefix}.{index}"
        error = _distance(_run_cut(where, wide, cuts, plan.ranks, index, run), run(index, wide))
        if not error <= LIMIT:
            raise Refused(
                f"tensor: {where} ({type(layer).__name__}), cut over {plan.ranks} devices as its "
                f"own plan says, differs from itself by {error:.1e}; {INSTEAD}"
            )


def _run_cut(
    where: str, layer: nn.Module, cuts: LayerPlan, ranks: int, index: int, run: Run
) -> Tensor:
    shell = twin(layer)
    for block in cuts.blocks:
        shell._modules[block.name] = _Together(layer.get_submodule(block.name), block, cuts, ranks)
    try:
        return run(index, shell)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        said = str(error).partition("\n")[0]
        raise Refused(
            f"tensor: {where} ({type(layer).__name__}) does not run when it is cut over {ranks} "
            f"devices as its own plan says ({said}); {INSTEAD}"
        ) from error


@dataclass(slots=True)
class _Features:
    """What every rank was seen to give a module that reads the features of all."""

    ranks: int
    seen: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def of(self, index: int) -> GatherFeatures:
        def gather(name: str, x: Tensor, dim: int) -> Tensor:
            self.seen[name, index] = x
            every = [self.seen.get((name, rank), x) for rank in range(self.ranks)]
            return torch.cat(every, dim)

        return gather


class _Together(Standing):
    """All ranks' shares of a block, added."""

    def __init__(self, module: nn.Module, block: Block, cuts: LayerPlan, ranks: int) -> None:
        super().__init__(module)
        self._block = block
        self._features = _Features(ranks)
        self._parts = [
            local_block(
                _sliced(module, block.name, cuts, rank, ranks),
                *(block, ranks, rank, self._features.of(rank)),
            )
            for rank in range(ranks)
        ]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        # Each turn, what one more module in a row reads of the other ranks is what they give it.
        for _ in self._block.wide:
            for part in self._parts:
                part(*arguments, **keywords)
        outs = [part(*arguments, **keywords) for part in self._parts]
        total = first(outs[0])
        for out in outs[1:]:
            total = total + first(out)
        bias = self.inner.get_submodule(self._block.last)._parameters.get("bias")
        return with_first(outs[0], total if bias is None else total + bias)


def _sliced(module: nn.Module, name: str, cuts: LayerPlan, rank: int, ranks: int) -> nn.Module:
    """A shell of a block in which parameters are one rank's slices."""
    shell = twin(module)
    holders: dict[str, nn.Module] = {"": shell}
    shell.__dict__["_parameters"] = dict(module._parameters)
    for key, cut in cuts.cuts.items():
        if not key.startswith(f"{name}."):
            continue
        child, _, leaf = key.removeprefix(f"{name}.").rpartition(".")
        if child not in holders:
            holders[child] = twin(module.get_submodule(child))
            holders[child].__dict__["_parameters"] = dict(holders[child]._parameters)
            shell._modules[child] = holders[child]
        parameters = holders[child]._parameters
        whole = parameters[leaf]
        assert whole is not None
        parameters[leaf] = nn.Parameter(cut.slice(whole.detach(), rank, ranks), False)
    return shell


def _dtype(layer: nn.Module) -> torch.dtype:
    return next(p.dtype for p in layer.parameters() if p.is_floating_point())


def _scatter(layer: nn.Module) -> None:
    """Random weights: a fresh model's zeros and ones would hide what is added twice."""
    for number, p in enumerate(layer.parameters()):
        generator = torch.Generator(p.device).manual_seed(number)
        noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
        p.copy_(noise * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.2 * noise)


def _distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    error = float((found.double() - expected.double()).norm())
    return error / float(expected.double().norm())
