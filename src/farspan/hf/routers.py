"""Add the losses of a mixture of experts' routers to a model that runs in chunks.

A load-balancing loss over all layers and tokens is E * sum(f_e * p_e) for E experts: f_e is the
number of choices of expert e per token, p_e the mean of its probability (Switch Transformer,
equations 4 to 6). f has no gradient, so it only has to be complete before the first backward; each
cell's backward then adds the gradient of its own probabilities. The z-loss is the mean of
logsumexp(logits)**2 (ST-MoE, equation 5).

Routers are found as transformers finds them to record their logits. A hook on each of them counts
choices and adds an autograd function to the router's output.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from farspan.attention.backends import accumulate_dtype
from farspan.hf.dropout import Draws
from farspan.hf.swap import Part, put, put_in
from farspan.spec import UnsupportedError

LOSS = "load_balancing_loss_func"  # in the module of each family that has this loss
# Attribute of a model that decides, before `output_router_logits` of its configuration, whether
# steps add its router loss: in runs and TRL's trainers, whose configurations stay as they are, and
# while a step runs the stages of the model's own forward.
ADDED = "_farspan_adds_router_loss"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_EXPERTS, _TOP_K = ("num_experts", "num_local_experts"), ("num_experts_per_tok",)
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True, slots=True)
class Routers:
    """Routers whose load-balancing loss a model adds to its own, and that loss's coefficient."""

    logits: dict[nn.Module, int]  # each router, and the place of its logits in its output
    experts: int
    top_k: int  # experts per token
    balance: float  # coefficient of the load-balancing loss


def routers_of(model: PreTrainedModel) -> Routers | None:
    """Return the routers whose loss the model adds to its own, or None if it adds none. Raises
    UnsupportedError for a loss of another form."""
    config = model.config.get_text_config()
    added = vars(model).get(ADDED)
    if not (getattr(config, "output_router_logits", False) if added is None else added):
        return None
    forward = inspect.unwrap(type(model).forward)
    if LOSS not in forward.__code__.co_names:
        return None  # its router logits are an output alone
    function = inspect.unwrap(vars(sys.modules[type(model).__module__])[LOSS])
    sizes = [_attribute(model, config, names) for names in (_EXPERTS, _TOP_K, _COEFFICIENTS)]
    if list(inspect.signature(function).parameters) != _ARGUMENTS or None in sizes:
        raise UnsupportedError(
            f"output_router_logits: {type(model).__name__} has a router loss of its own form; "
            "expected transformers' load-balancing loss; set output_router_logits to false"
        )
    experts, top_k, balance = sizes
    return Routers(_recorded(model), int(experts), int(top_k), float(balance))


def add_router_loss(model: PreTrainedModel, coefficient: float | None) -> None:
    """Have steps of the model add its load-balancing loss by this coefficient, whatever its
    configuration says; None: have them add none. Raises UnsupportedError if transformers has no
    such loss for the model."""
    put([(vars(model), ADDED, coefficient is not None)])
    if coefficient is None:
        return
    if routers_of(model) is None:
        raise UnsupportedError(
            f"loss.router: {type(model).__name__} has no load-balancing loss in transformers; "
            "leave router and router_z out"
        )
    name = next((n for n in _COEFFICIENTS if hasattr(model, n)), _COEFFICIENTS[0])
    put([(model, name, coefficient)])


def _attribute(model: nn.Module, config: Any, names: Iterable[str]) -> Any:
    """Return the first attribute with one of these names, of the model or its configuration."""
    found = (getattr(holder, name, None) for holder in (model, config) for name in names)
    return next((value for value in found if value is not None), None)


def _recorded(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the modules whose router logits transformers would record, each with the index of the
    logits in the module's output."""
    found: dict[nn.Module, int] = {}
    for path, module in model.named_modules():
        recorders = getattr(type(module), "_can_record_outputs", None) or {}
        given = recorders.get("router_logits", ()) if isinstance(module, PreTrainedModel) else ()
        for one in given if isinstance(given, list | tuple) else [given]:
            recorder = one if isinstance(one, OutputRecorder) else OutputRecorder(one, 1)
            name = f".{(recorder.layer_name or '').strip('.')}."
            for inner, child in module.named_modules(prefix=path):
                if isinstance(child, recorder.target_class) and (
                    recorder.layer_name is None or name in f".{inner}."
                ):
                    found[child] = recorder.index
    return found


@contextmanager
def recorded(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the logits [rows, E] of the routers whose loss the model adds, inside the context."""
    routers, seen = routers_of(model), list[Tensor]()

    def record(place: int, _: nn.Module, __: Any, output: Any) -> None:
        logits = output[place] if isinstance(output, tuple) else output
        seen.append(logits.flatten(0, -2))

    found = {} if routers is None else routers.logits
    with put_in(
        (r._forward_hooks, "recorded", partial(record, place)) for r, place in found.items()
    ):
        yield seen


def balance_loss(routers: Routers, seen: list[Tensor]) -> Tensor:
    """Compute the load-balancing loss, times its coefficient, from all logits in `seen` at once, to
    check `RouterLoss`."""
    logits = torch.cat(seen)
    normal = logits.to(accumulate_dtype(logits.dtype)).softmax(-1)
    chosen = nn.functional.one_hot(logits.topk(routers.top_k, -1).indices, routers.experts)
    share = chosen.sum(1).to(normal.dtype).mean(0)
    return routers.balance * routers.experts * (share * normal.mean(0)).sum()


class RouterLoss:
    """Router losses of one step: sums over layers and tokens, and the gradients that they give.

    Args:
        routers: The model's routers.
        device: The device that computes.
        z: Coefficient of the z-loss.
        mask: False where a token is padding, [batch, tokens]; None: no token is.
        place: Dropout's range of the tokens that run now.
    """

    def __init__(
        self,
        routers: Routers,
        device: torch.device,
        z: float = 0.0,
        mask: Tensor | None = None,
        place: Draws | None = None,
    ) -> None:
        self.routers, self._has_z, self._mask = routers, z != 0, mask
        self.place = place or Draws(0, 0, 0, 0)
        # Choices of each expert [E], sums of their probabilities [E], sum of squared logsumexps,
        # number of rows.
        self._sums = torch.zeros(2 * routers.experts + 2, dtype=torch.float64, device=device)
        self._is_complete = False
        self.is_padding = False  # the tokens that run now only keep this rank in step with others
        # Gradient of the caller's loss by `losses()`.
        self.scale = torch.tensor([routers.balance, z], dtype=torch.float64, device=device)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        experts = self.routers.experts
        return self._sums.split((experts, experts, 1, 1))

    def rows(self, logits: Tensor) -> Tensor | None:
        """Return weights [rows, 1] for `logits` [rows, E]: 0.0 for rows of padding, 1.0 for others;
        None without padding."""
        dtype = accumulate_dtype(logits.dtype)
        if self.is_padding:
            return logits.new_zeros(len(logits), 1, dtype=dtype)
        at = self.place.place
        if self._mask is None and not at.extra:
            return None
        batch, rest = divmod(len(logits), at.tokens)
        if rest:
            raise UnsupportedError(
                f"attention_mask: a router sees {len(logits)} rows for sequences of {at.tokens} "
                "tokens, so its loss cannot leave out padding; expected one row per token"
            )
        rows = logits.new_zeros(batch, at.tokens, dtype=dtype)
        here, real = slice(at.row, at.row + batch), at.tokens - at.extra
        mask = True if self._mask is None else self._mask[here, at.first : at.first + real]
        rows[:, :real] = mask
        return rows.view(-1, 1)

    def count(self, counts: Tensor) -> None:
        """Add a router's `counts_of` to the sums; not after `complete`, when cells run again."""
        if not self._is_complete:
            self._sums += counts

    def complete(self, add_up: Callable[[Tensor], Any] | None) -> None:
        """End the counting, so that the backward may begin. `add_up` sums the counts over the ranks
        that share the sequence, in place; all these ranks call it."""
        if add_up is not None and not self._is_complete:
            add_up(self._sums)
        self._is_complete = True

    def losses(self) -> Tensor:
        """Return the load-balancing loss and the z-loss, [2] in float64."""
        choices, probabilities, squares, number = self._parts
        number = number.clamp(min=1)
        balance = self.routers.experts * (choices / number * (probabilities / number)).sum()
        return torch.cat((balance[None], squares / number))

    def gradient(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        """Return what router losses add to the loss's gradient by a router's logits [rows, E]."""
        assert self._is_complete, "a backward began before all choices were counted"
        choices, _, _, number = self._parts
        wide = logits.to(accumulate_dtype(logits.dtype))
        number = number.clamp(min=1)
        each = self.scale[0] * self.routers.experts * choices / number.square()
        each = each.to(wide.dtype)
        normal = wide.softmax(-1)
        found = normal * (each - (normal * each).sum(-1, keepdim=True))
        if self._has_z:
            factor = (self.scale[1] * 2 / number).to(wide.dtype)
            found = found + factor * wide.logsumexp(-1, keepdim=True) * normal
        found = found if rows is None else found * rows
        return found.to(logits.dtype)


@torch.no_grad()
def counts_of(routers: Routers, logits: Tensor, rows: Tensor | None) -> Tensor:
    """Return sums over the rows of a router's logits [rows, E], in float64: each expert's choices,
    each expert's probability, squared logsumexps, and the number of rows. `rows` [rows, 1] are the
    rows' weights, 0.0 for padding."""
    weights = torch.ones_like(logits[:, 0], dtype=torch.float64) if rows is None else rows[:, 0]
    wide = logits.to(accumulate_dtype(logits.dtype))
    # As in transformers: ties are decided in the dtype of the logits.
    chosen = logits.softmax(-1).topk(routers.top_k, -1).indices.flatten()
    choices = torch.zeros(routers.experts, dtype=torch.float64, device=logits.device)
    choices.index_add_(0, chosen, weights.double().repeat_interleave(routers.top_k))
    normal = wide.softmax(-1).mul_(weights.to(wide.dtype)[:, None])
    squares = wide.logsumexp(-1).double().square() @ weights.double()
    last = torch.stack((squares, weights.sum(dtype=torch.float64)))
    return torch.cat((choices, normal.sum(0, dtype=torch.float64), last))


# The running step's losses, by router.
_RUNNING: dict[nn.Module, RouterLoss] = {}


def counted(losses: RouterLoss | None) -> AbstractContextManager[None]:
    """Inside the context, have the model's routers add their logits to `losses`."""
    routers = () if losses is None else losses.routers.logits
    return put_in((_RUNNING, router, losses) for router in routers)


def hooks(model: PreTrainedModel) -> Iterator[Part]:
    """Yield the attributes that put a hook on every router whose loss the model adds."""
    routers = routers_of(model)
    if routers is None:
        return
    for router, place in routers.logits.items():
        yield router._forward_hooks, "farspan", partial(_hook, routers, router, place)


def _hook(
    routers: Routers, router: nn.Module, place: int, _: nn.Module, __: Any, output: Any
) -> Any:
    """Add a router's logits to the step's sums. Return its output with a backward that adds the
    router losses' gradient, or None (no change) if no gradient is needed."""
    losses = _RUNNING.get(router)
    outputs = list(output) if isinstance(output, tuple) else [output]
    logits = outputs[place if isinstance(output, tuple) else 0]
    logits = logits.flatten(0, -2)
    rows = None if losses is None else losses.rows(logits)
    counts = counts_of(routers, logits, rows)  # also where memory is measured without a step
    if losses is not None:
        losses.count(counts)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return None
    number = next((n for n, x in enumerate(outputs) if _is_read(x) and n != place), None)
    if number is None:
        number = place if isinstance(output, tuple) else 0
    outputs[number] = _Attached.apply(outputs[number], logits, rows, losses)
    return tuple(outputs) if isinstance(output, tuple) else outputs[0]


def _is_read(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Attached(torch.autograd.Function):
    """Identity of a router's output, whose backward also adds the gradient of the router losses."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, logits: Tensor, rows: Tensor | None, losses: RouterLoss | None
    ) -> Tensor:
        ctx.rows, ctx.losses = rows, losses
        ctx.save_for_backward(logits)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        losses = ctx.losses
        return dout, None if losses is None else losses.gradient(logits, ctx.rows), None, None
