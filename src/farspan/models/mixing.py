"""Does a layer mix tokens by attention and by the states it hands on, and by nothing else?

Asked of every kind of layer on a handful of tokens, twice. With attention answered by numbers that
nothing depends on, no gradient may go from a token to another: not a small one either, so that a
scan whose fresh weights forget all but 1e-7 of a token shows. And run in chunks the layer is what
it is whole: one that attends in its outputs, in float32 or wider, where mixing shows far above
rounding; one that recurs also in its gradients, which tell whether it goes on from what it is
given.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from farspan.models.boundary import Boundary, LayerCall, run_layer
from farspan.models.dense import Dense
from farspan.models.experts import eager_experts
from farspan.models.recurrent import States, run_piece, takes_two
from farspan.models.route import answering
from farspan.spec import LayerSpec, Refused

TOKENS, CUT = 8, 5  # of the probe; the cut is off centre so that chunks differ
PIECES = (0, 3, 7, 8)  # of a recurrent layer
# Relative error of such pieces. Their own fp32 arithmetic, in another order, stays below 1e-5.
LOST = 1e-3
# Relative errors that chunks of a layer may show in float32 and wider: products of another shape
# round apart by 1e-7, and a float64 model may have routers and norms in float32.
MIXING = {torch.float32: 1e-4, torch.float64: 1e-6}


def refuse_mixing(boundary: Boundary, hidden: Tensor, seen: list[LayerSpec]) -> None:
    """Raises Refused where tokens of a layer see each other in another way than `seen`; every kind
    of layer, on these hidden states [1, TOKENS, hidden]."""
    dtype = boundary.dtype if boundary.dtype in MIXING else torch.float32
    for index, layer in _of_each_kind(boundary, seen):
        if not seen[index].state:
            _refuse_gradients_between_tokens(boundary, index, hidden.to(boundary.dtype))
        wide = layer if dtype is boundary.dtype else copy.deepcopy(layer).to(dtype)
        differs = _refuse_other_gradients if seen[index].state else _refuse_other_outputs
        differs(boundary, index, wide, hidden.to(dtype))


def refuse_forgetting(boundary: Boundary, seen: list[LayerSpec]) -> None:
    """Raises Refused where a layer does not go on from the states it hands on; takes no numbers."""
    shape = 1, TOKENS, boundary.width
    hidden = torch.zeros(shape, dtype=boundary.dtype, device=boundary.device)
    for index, layer in _of_each_kind(boundary, seen):
        if seen[index].state:
            _with_gradient(boundary, index, layer, hidden, list(pairwise(PIECES)))


def _of_each_kind(boundary: Boundary, seen: list[LayerSpec]) -> Iterator[tuple[int, nn.Module]]:
    known = set()
    for index, kind in enumerate(zip(boundary.kinds(), seen, strict=True)):
        if kind not in known:
            known.add(kind)
            yield index, boundary.layers[index]


@dataclass(slots=True)
class _Constant:
    """Answers an attention call with numbers of its own, and keeps what it was given."""

    given: list[Tensor] = field(default_factory=list)  # [B, heads, T, head dim] each

    def __call__(
        self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: float, **___: Any
    ) -> Tensor:
        self.given += q, k, v
        batch, heads, tokens, _width = q.shape
        shape = batch, tokens, heads, v.shape[-1]
        numbers = torch.sin(torch.arange(1, 1 + prod(shape), device=q.device))
        return numbers.view(shape).to(q.dtype)


@torch.enable_grad()
def _refuse_gradients_between_tokens(boundary: Boundary, index: int, hidden: Tensor) -> None:
    layer, leaf, answer = boundary.layers[index], hidden.detach().requires_grad_(), _Constant()
    positions = torch.arange(TOKENS, device=hidden.device)[None]
    call = boundary.calls(1, positions)[index]
    with eager_experts(layer), answering(answer):
        out = run_layer(layer, leaf, call)
    made = [out, *(x.transpose(1, 2) for x in answer.given)]  # tokens second
    for here, there in (slice(CUT), slice(CUT, None)), (slice(CUT, None), slice(CUT)):
        total = torch.stack([x[:, here].double().square().sum() for x in made]).sum()
        (found,) = torch.autograd.grad(total, leaf, retain_graph=True)
        if bool(found[:, there].any()):
            raise Refused(
                f"model: in layer {index} of {type(boundary.model).__name__} tokens see each other "
                "by something beside the attention interface (a convolution or a scan of its own, "
                "a statistic over tokens), which chunks would cut"
            )


def _refuse_other_outputs(boundary: Boundary, index: int, layer: nn.Module, hidden: Tensor) -> None:
    """Raises Refused where the layer cut in two is another one."""
    cuts, outs = ((0, TOKENS), (0, CUT), (CUT, TOKENS)), []
    remembers = Dense(layer=0)
    with eager_experts(layer):
        for dense, (start, stop) in zip((Dense(layer=0), remembers, remembers), cuts, strict=True):
            positions = torch.arange(start, stop, device=hidden.device)[None]
            call = cast_call(boundary.calls(1, positions)[index], hidden.dtype)
            with answering(dense):
                outs.append(run_layer(layer, hidden[:, start:stop], call))
    error = distance(torch.cat(outs[1:], dim=1), outs[0])
    if not error <= MIXING[hidden.dtype]:
        raise Refused(_differs(boundary, index, error, "the attention interface"))


def _differs(boundary: Boundary, index: int, error: float, where: str) -> str:
    return (
        f"model: layer {index} of {type(boundary.model).__name__} run in chunks differs from "
        f"itself by {error:.1e}; something in it mixes tokens outside of {where}"
    )


def _refuse_other_gradients(
    boundary: Boundary, index: int, layer: nn.Module, hidden: Tensor
) -> None:
    """Raises Refused where a recurrent layer is another one in pieces, the last of them one token,
    or does not go on from what it is given: Jamba's scans do not, which shows by 3e-7 in outputs of
    a model whose weights are fresh, and by more in gradients."""
    shapes = [(0, TOKENS)], list(pairwise(PIECES))
    whole, pieces = (_with_gradient(boundary, index, layer, hidden, cuts) for cuts in shapes)
    error = max(distance(x, y) for x, y in zip(pieces, whole, strict=True))
    if not error <= LOST:
        raise Refused(_differs(boundary, index, error, "the states it hands on"))


@torch.enable_grad()
def _with_gradient(
    boundary: Boundary,
    index: int,
    layer: nn.Module,
    hidden: Tensor,
    cuts: list[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """The output of a recurrent layer on these pieces, and the gradient of its input."""
    leaf, outs, states = hidden.detach().requires_grad_(), [], States()
    given: dict[str, Tensor] = {}
    with eager_experts(layer):
        for start, stop in cuts:
            # Tensors of their own: the piece that left a state may read it for its output too.
            states = States({name: x.view_as(x) for name, x in states.after.items()})
            given |= {f"{name} at {start}": state for name, state in states.before.items()}
            more = takes_two(stop - start, states.before)
            positions = torch.arange(start, stop + more)
            call = boundary.calls(1, positions[None].to(hidden.device))[index]
            piece = leaf[:, start:stop]
            outs.append(run_piece(layer, piece, cast_call(call, hidden.dtype), states))
    out = torch.cat(outs, dim=1)
    towards = torch.sin(torch.arange(out.numel(), device=out.device)).view(out.shape)
    gradient, *others = torch.autograd.grad(
        out, [leaf, *given.values()], towards.to(out.dtype), allow_unused=True
    )
    for name, found in zip(given, others, strict=True):
        if found is None:
            raise Refused(
                f"model: layer {index} of {type(boundary.model).__name__} does not go on from the "
                f"state {name.partition(' ')[0]} that it hands on"
            )
    return out.detach(), gradient


def cast_call(call: LayerCall, dtype: torch.dtype) -> LayerCall:
    """The call with its floating-point tensors in another dtype."""

    def widen(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return LayerCall(tree_map(widen, call.arguments), tree_map(widen, call.keywords))


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
