"""Check and shift a step's inputs, and compute the loss on some tokens at a time.

The logits of a whole chunk never exist (FPDT 5.4).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from farspan.attention.backends import accumulate_dtype
from farspan.engine.gradients import GradientAccumulator
from farspan.hf.dropout import Draws
from farspan.hf.routers import RouterLoss
from farspan.hf.stages import CausalLMStages
from farspan.kernels.launch import fused_for
from farspan.kernels.operations import cross_entropy
from farspan.program.attention_blocks import most_tokens
from farspan.spec import UnsupportedError

IGNORED = -100  # label of a token that is not trained, as in Hugging Face


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors that a step's cells read, each [batch, tokens] or None."""

    input_ids: Tensor
    # Labels shifted by one, IGNORED where a token has no next one; or a custom head's targets,
    # [batch, tokens, ...].
    targets: Tensor
    position_ids: Tensor  # restart in every document; one row if there are no documents
    documents: tuple[tuple[int, ...], ...] | None  # starts of a row's documents, ascending
    weights: Tensor | None = None  # of each token's loss
    draws: Draws | None = None  # draws of dropout; None: no dropout
    routers: RouterLoss | None = None  # None: the model adds no router loss

    @property
    def place(self) -> Draws | None:
        """Note of the tokens on which modules run next, for dropout and routers; or None."""
        return self.draws if self.routers is None else self.routers.place

    @property
    def trained(self) -> int:
        """Number of tokens that contribute to the loss."""
        return int((self.targets != IGNORED).sum())


def make_inputs(
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None,
    vocab: int,
    weights: Tensor | None = None,
    *,
    several: bool = False,
) -> StepInputs:
    """Check a step's input tensors, and derive targets, positions and documents. With `several`,
    labels are k ids per token, [batch, tokens, k]. Raises UnsupportedError naming the argument."""
    for name, value in (("input_ids", input_ids), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{name}: expected a tensor [batch, tokens], got {type(value).__name__}"
            )
    _check_tokens(input_ids, vocab)
    _check_labels(labels, input_ids, vocab, several=several)
    starts = None if document_ids is None else document_starts(document_ids, input_ids)
    tokens = input_ids.shape[1]
    places = torch.arange(tokens, device=input_ids.device)[None]
    positions = places if starts is None else places - starts
    documents = None
    if starts is not None:
        documents = tuple(tuple(row.unique().tolist()) for row in starts)
    targets = shift_labels(labels, document_ids)
    if weights is not None:
        weights = _check_weights(weights, input_ids)
    return StepInputs(input_ids, targets, positions, documents, weights)


def shift_labels(labels: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return each token's target: the label of the next token in its document."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        last = document_ids[:, 1:] != document_ids[:, :-1]
        targets[:, :-1][last] = IGNORED
    return targets


def trained_token_count(labels: Tensor, document_ids: Tensor | None = None) -> int:
    """Count the tokens that contribute to a step's loss: those followed, in their document, by a
    token whose label is not -100.

    Args:
        labels: Labels of the tokens themselves, [batch, tokens].
        document_ids: The document of each token, [batch, tokens]; None: a row is one document.
    """
    return int((shift_labels(labels, document_ids) != IGNORED).sum())


def document_starts(document_ids: Tensor, input_ids: Tensor) -> Tensor:
    """Return the index of the first token of each token's document, [batch, tokens]."""
    if document_ids.shape != input_ids.shape:
        raise UnsupportedError(
            f"document_ids: expected the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(document_ids.shape)}"
        )
    if document_ids.is_floating_point() or document_ids.is_complex():
        raise UnsupportedError(f"document_ids: expected whole numbers, got {document_ids.dtype}")
    document_ids = document_ids.long()  # a narrow unsigned difference would wrap
    step = document_ids[:, 1:] - document_ids[:, :-1]
    if bool((step < 0).any()):
        row, token = (step < 0).nonzero()[0].tolist()
        raise UnsupportedError(
            f"document_ids: must not decrease along a row, but row {row} goes down at token "
            f"{token + 1}; number the documents in the order they are packed"
        )
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.zeros_like(document_ids, dtype=torch.long)
    begins[:, 1:] = torch.where(step != 0, places[1:], 0)
    return begins.cummax(dim=1).values


def _check_tokens(input_ids: Tensor, vocab: int) -> None:
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise UnsupportedError(
            f"input_ids: expected [batch, tokens] with at least one token, got shape "
            f"{tuple(input_ids.shape)}"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(
            f"input_ids: expected int64 or int32 token ids, got {input_ids.dtype}"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab:
        raise UnsupportedError(
            f"input_ids: token ids must be in [0, {vocab}) for this model's vocabulary, found "
            f"{low if low < 0 else high}; check that the tokenizer belongs to the model"
        )


def _check_labels(labels: Tensor, input_ids: Tensor, vocab: int, *, several: bool) -> None:
    if labels.shape[:2] != input_ids.shape or labels.ndim > 2 + several:
        raise UnsupportedError(
            f"labels: expected the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(labels.shape)}; do not shift labels, because the step shifts them"
        )
    if labels.dtype != torch.int64:
        raise UnsupportedError(f"labels: expected int64, got {labels.dtype}")
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab))
    if bool(wrong.any()):
        raise UnsupportedError(
            f"labels: must be -100 (ignored) or in [0, {vocab}), found {int(labels[wrong][0])}"
        )


def _check_weights(weights: Tensor, input_ids: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or weights.shape != input_ids.shape:
        found = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise UnsupportedError(
            f"weights: expected a tensor of the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{found}"
        )
    if not weights.is_floating_point():
        raise UnsupportedError(f"weights: expected floating-point numbers, got {weights.dtype}")
    if not bool(weights.isfinite().all()):
        raise UnsupportedError(
            "weights: some are not finite; give 0 to a token that is not to be trained"
        )
    return weights.detach()


@dataclass(frozen=True, slots=True)
class LossHead:
    """Cross-entropy head: the sum of losses over trained tokens, divided by a count that is known
    before the step. So losses of pieces, chunks, micro-batches and ranks add up to the mean."""

    stages: CausalLMStages
    count: int  # trained tokens the mean is taken over, at least 1
    piece: int  # tokens whose logits exist at one time
    parameters: tuple[nn.Parameter, ...]  # trained outside the layers
    fused: bool = False  # one kernel computes the loss and overwrites the logits by their gradient
    smoothing: float = 0.0  # share of each label that all ids get alike

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return a chunk's part of the mean loss, for hidden [B, C, h], targets, weights [B, C]."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad():
            for span in pieces_of(hidden, self.piece, self.stages.vocab):
                total += self._loss(hidden[:, span], targets[:, span], _part(weights, span))
        return total

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, [B, C]; 0 for tokens without a target."""
        with torch.no_grad():
            spans = pieces_of(hidden, self.piece, self.stages.vocab)
            found = [self._losses(hidden[:, at], targets[:, at]) for at in spans]
            return torch.cat(found, 1)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.stages.logits(hidden)
        rows, wanted = logits.flatten(0, 1), targets.flatten()
        if self._takes(logits):
            return cross_entropy(rows, wanted, ignored=IGNORED).view(targets.shape)
        wide = rows.to(accumulate_dtype(rows.dtype))
        found = functional.cross_entropy(wide, wanted, ignore_index=IGNORED, reduction="none")
        return found.view(targets.shape)

    def loss_and_gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        gradients: GradientAccumulator,
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's loss and `hidden`'s gradient; weight gradients go to `gradients`."""
        parameters = self.parameters
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for span in pieces_of(hidden, self.piece, self.stages.vocab):
            piece = hidden[:, span].detach().requires_grad_()
            loss, (dpiece, *dweights) = self._differentiate(
                piece, targets[:, span], _part(weights, span)
            )
            assert dpiece is not None
            gradient[:, span] = dpiece
            gradients.add(parameters, dweights)
            total += loss
        return total, gradient

    def _differentiate(
        self, piece: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the loss of some tokens, and gradients of their hidden states and of weights."""
        wanted = [piece, *self.parameters]
        if not self.fused:
            with torch.enable_grad():
                loss = self._loss(piece, targets, weights)
            return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True)
        saved: set[int] = set()
        with torch.enable_grad(), _noting(saved):
            logits = self.stages.logits(piece)
            if not self._takes(logits):
                loss = self._cross_entropy(logits, targets, weights)
                return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True)
        rows = logits.detach().flatten(0, 1)
        if rows.untyped_storage()._cdata in saved:  # a soft cap saves its output
            rows = rows.clone()
        smoother = self._smoother(rows, targets.flatten())
        losses = cross_entropy(rows, targets.flatten(), 1 / self.count, ignored=IGNORED)
        if smoother is not None:
            losses += smoother
            self._smooth(rows, targets.flatten())
        if weights is not None:
            losses *= weights.flatten()
            rows *= weights.flatten()[:, None]
        found = torch.autograd.grad(logits, wanted, rows.view_as(logits), allow_unused=True)
        return losses.sum(dtype=torch.float64) / self.count, found

    def _takes(self, logits: Tensor) -> bool:
        return self.fused and fused_for(logits.device, logits.dtype)

    def _smoother(self, rows: Tensor, targets: Tensor) -> Tensor | None:
        """Return what label smoothing adds to each token's loss, [n]: `smoothing * (logit of the
        label - mean of the logits)`. None if labels are not smoothed."""
        if not self.smoothing:
            return None
        wide, known = accumulate_dtype(rows.dtype), targets != IGNORED
        of_label = rows.gather(1, targets.where(known, 0)[:, None])[:, 0].to(wide)
        return (self.smoothing * (of_label - rows.mean(1, dtype=wide))).where(known, 0)

    def _smooth(self, rows: Tensor, targets: Tensor) -> None:
        """Add label smoothing's gradient, divided by `count`, to the logits' gradient in place."""
        known = (targets != IGNORED)[:, None].to(rows.dtype) * (self.smoothing / self.count)
        rows.sub_(known / rows.shape[1])
        rows.scatter_add_(1, targets.clamp(min=0)[:, None], known)

    def _loss(self, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = self.stages.logits(hidden)
        if not logits.requires_grad and self._takes(logits):
            rows, wanted = logits.flatten(0, 1), targets.flatten()
            smoother = self._smoother(rows, wanted)
            losses = cross_entropy(rows, wanted, ignored=IGNORED)
            losses = losses if smoother is None else losses + smoother
            losses = losses if weights is None else losses * weights.flatten()
            return losses.sum(dtype=torch.float64) / self.count
        return self._cross_entropy(logits, targets, weights)

    def _cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        wide = logits.to(accumulate_dtype(logits.dtype)).flatten(0, 1)
        how = "sum" if weights is None else "none"
        losses = functional.cross_entropy(
            wide,
            targets.flatten(),
            ignore_index=IGNORED,
            reduction=how,
            label_smoothing=self.smoothing,
        )
        if weights is not None:
            losses = (losses * weights.flatten()).sum()
        return losses / self.count


def pieces_of(hidden: Tensor, most: int, vocab: int) -> list[slice]:
    """Return slices of at most `most` tokens that together cover hidden states [B, C, h]."""
    batch, tokens, _ = hidden.shape
    # A kernel of the loss may index logits with 32 bits.
    piece = min(most, max(1, most_tokens(batch * vocab)))
    return [slice(s, min(s + piece, tokens)) for s in range(0, tokens, piece)]


def _part(weights: Tensor | None, span: slice) -> Tensor | None:
    return None if weights is None else weights[:, span]


@contextmanager
def _noting(storages: set[int]) -> Iterator[None]:
    """Collect the storages that autograd saves in the body: they must not be overwritten."""

    def note(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield
