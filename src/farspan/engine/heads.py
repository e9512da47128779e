"""Heads that compute values for every token, some tokens at a time, instead of the loss."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from farspan.attention.backends import accumulate_dtype
from farspan.engine.gradients import GradientAccumulator
from farspan.engine.loss import IGNORED, LossHead, pieces_of
from farspan.hf.stages import CausalLMStages
from farspan.spec import UnsupportedError

# Maps hidden states [n, hidden] and targets [n, ...] of tokens to values [n, k].
HeadFunction = Callable[[Tensor, Tensor], Tensor]

# Statistics of a token's distribution, from its scaled logits [n, V], their log-probabilities and
# the first target id [n]; named as in TRL. Only the entropy has a gradient.
STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda _, normal, __: -(normal.exp() * normal).sum(-1),
    "log_sum_sq_probs": lambda _, normal, __: (2 * normal.detach()).logsumexp(-1),
    "mean_logits": lambda wide, _, __: wide.detach().mean(-1),
    "is_top1": lambda wide, _, target: wide.detach().argmax(-1) == target,
}


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Head that returns log-probabilities of target ids, then statistics such as the entropy."""

    temperature: float = 1.0  # divides the logits
    statistics: tuple[str, ...] = ()  # names in STATISTICS, returned after the log-probabilities

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities [n, k] of targets [n, k] from logits [n, V], joined with each
        statistic, [n, 1]. Ignored targets have 0."""
        wide = logits.to(accumulate_dtype(logits.dtype))
        if self.temperature != 1.0:
            wide = wide / self.temperature
        normal = wide.log_softmax(-1)
        asked = targets != IGNORED
        found = normal.gather(1, targets.where(asked, 0)).where(asked, 0)
        further = (STATISTICS[name](wide, normal, targets[:, 0]) for name in self.statistics)
        return torch.cat((found, *(values[:, None].to(found.dtype) for values in further)), 1)


@dataclass(frozen=True, slots=True)
class TopIds(LogProbs):
    """Head that returns the k most likely of the ids below `vocab`, and their log-probabilities."""

    k: int = 1
    vocab: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= (self.k if self.vocab is None else self.vocab):
            raise UnsupportedError(f"k: expected 1 to {self.vocab or 'vocab_size'}, got {self.k}")

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002 - unused
        """Return k ids, then their log-probabilities, the most likely first: [n, 2 k]."""
        normal = logits.to(accumulate_dtype(logits.dtype)).log_softmax(-1)
        found, ids = normal[:, : self.vocab].topk(self.k, -1)
        return torch.cat((ids.to(found.dtype), found), 1)


# Maps logits [1, n, V] and labels [1, n] to one or several tensors [1, n, ...].
LogitsFunction = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]
_EXACT = 2**24  # whole numbers up to it are exact in float32


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Return whether a tensor equals the expected one, in floating point up to rounding."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    limit = torch.finfo(found.dtype).eps ** 0.5 * (1 + expected.abs())
    near = (found - expected).abs() <= limit
    return bool((near | (found.isnan() & expected.isnan()) | (found == expected)).all())


@dataclass(frozen=True, slots=True)
class FromLogits(LogProbs):
    """Head that returns what the user's function computes of each token's logits."""

    function: LogitsFunction = lambda logits, _: logits
    outputs: list[Tensor] = field(default_factory=list)  # of the first piece: shapes and dtypes

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the user function's values of tokens, [n, k], for logits [n, V], labels [n, 1]."""
        rows = self._run(logits, targets)
        if not self.outputs:
            self.outputs.extend(rows)
            # In reverse, after a stranger: whatever looks at other tokens sees others.
            again = self._run(
                torch.cat((-logits[:1], logits.flip(0))), torch.cat((targets[:1], targets.flip(0)))
            )
            if not all(_alike(a, b[1:].flip(0)) for a, b in zip(rows, again, strict=True)):
                raise UnsupportedError(
                    "preprocess_logits_for_metrics: a token's result depends on other tokens, but "
                    "the function gets some tokens at a time; return a result per token"
                )
        return torch.cat(
            [out.reshape(len(out), -1).to(accumulate_dtype(logits.dtype)) for out in rows], 1
        )

    def _run(self, logits: Tensor, targets: Tensor) -> list[Tensor]:
        found = self.function(logits[None], targets.T)
        rows = found if isinstance(found, tuple) else (found,)
        for out in rows:
            if not isinstance(out, Tensor) or out.shape[:2] != (1, len(logits)):
                what = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise UnsupportedError(
                    f"preprocess_logits_for_metrics: expected tensors [batch, tokens, ...], as "
                    f"[1, {len(logits)}, ...] for {len(logits)} tokens, got {what}"
                )
            wide = accumulate_dtype(logits.dtype)
            if out.is_floating_point() and out.dtype.itemsize > wide.itemsize:
                raise UnsupportedError(
                    f"preprocess_logits_for_metrics: {out.dtype} would be rounded to {wide}; "
                    f"return {wide} or whole numbers"
                )
            if not out.is_floating_point() and bool((out.long().abs() > _EXACT).any()):
                raise UnsupportedError(
                    f"preprocess_logits_for_metrics: whole numbers above {_EXACT:,} would be "
                    "rounded; return smaller ones"
                )
        return [out[0] for out in rows]

    def unpacked(self, values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Split values [B, T, k] into the function's outputs [B, T, ...], in their own dtypes."""
        found, column = [], 0
        for like in self.outputs:
            width = like[0].numel()
            part = values[..., column : column + width].to(like.dtype)
            found.append(part.reshape(*values.shape[:2], *like.shape[1:]))
            column += width
        return found[0] if len(found) == 1 else tuple(found)


@dataclass(frozen=True, slots=True)
class ValueHead:
    """Head that computes values for each token by `function`; the caller makes a loss of them."""

    stages: CausalLMStages
    function: LogProbs | HeadFunction
    piece: int  # tokens whose logits exist at one time
    parameters: tuple[nn.Parameter, ...]  # trained outside the layers
    own: tuple[nn.Parameter, ...]  # parameters of `function`
    # Computes the first value as a step's loss, if it is the label's log-probability.
    plain: LossHead | None

    def values(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return k values per token, [B, C, k], from hidden [B, C, h] and targets [B, C, ...]."""
        if self.plain is not None and self.function == LogProbs():
            return -self.plain.losses(hidden, targets)[..., None]
        with torch.no_grad():
            spans = pieces_of(hidden, self.piece, self.stages.vocab)
            return torch.cat([self._of(hidden[:, at], targets[:, at]) for at in spans], 1)

    def gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        dvalues: Tensor,
        gradients: GradientAccumulator,
        head_gradients: GradientAccumulator,
    ) -> Tensor:
        """Return the gradient of `hidden` from `dvalues`, the gradient of all values [B, C, k], or
        of the first value alone [B, C, 1]. Add weight gradients of the model to `gradients`, and of
        the head's own parameters to `head_gradients`."""
        if self.plain is not None and dvalues.shape[2] == 1:
            return self.plain.loss_and_gradient(hidden, targets, -dvalues[..., 0], gradients)[1]
        gradient = torch.zeros_like(hidden)
        for span in pieces_of(hidden, self.piece, self.stages.vocab):
            piece = hidden[:, span].detach().requires_grad_()
            with torch.enable_grad():
                values = self._of(piece, targets[:, span])[..., : dvalues.shape[2]]
            if not values.requires_grad:
                continue
            wanted = piece, *self.parameters, *self.own
            dpiece, *dweights = torch.autograd.grad(
                values, wanted, dvalues[:, span], allow_unused=True
            )
            if dpiece is not None:
                gradient[:, span] = dpiece
            count = len(self.parameters)
            gradients.add(self.parameters, dweights[:count])
            head_gradients.add(self.own, dweights[count:])
        return gradient

    def _of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        batch, tokens = targets.shape[:2]
        if isinstance(self.function, LogProbs):
            rows = self.stages.logits(hidden).flatten(0, 1)
            values = self.function(rows, targets.reshape(batch * tokens, -1))
        else:
            rows = self.stages.final(hidden).flatten(0, 1)
            with self.stages.computing():
                values = self.function(rows, targets.flatten(0, 1))
            if not isinstance(values, Tensor) or values.shape[:-1] != rows.shape[:1]:
                what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UnsupportedError(
                    f"head: expected values [{len(rows)}, k] of {len(rows)} tokens, got {what}; "
                    "return a tensor with a row for each hidden state"
                )
        return values.to(accumulate_dtype(self.stages.dtype)).view(batch, tokens, -1)
