"""The two ends of a step: its tokens and labels, checked and shifted once, and the head's loss.

Head and loss run piece by piece: the logits of a whole chunk never exist (FPDT 5.4).
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
from farspan.hf.stages import CausalLMStages
from farspan.kernels.launch import fused_for
from farspan.kernels.operations import cross_entropy, cross_entropy_
from farspan.program.attention_blocks import most_tokens
from farspan.spec import UnsupportedError

IGNORED = -100  # label of a token that is not trained, as everywhere in Hugging Face


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the cells read. Every tensor is [batch, tokens]."""

    input_ids: Tensor
    targets: Tensor  # the label each token predicts: labels moved by one, IGNORED at the ends
    position_ids: Tensor  # restart in every document; one row when there are no documents
    documents: tuple[tuple[int, ...], ...] | None  # a row: where its documents begin, ascending

    @property
    def trained(self) -> int:
        """Tokens that contribute to the loss."""
        return int((self.targets != IGNORED).sum())


def make_inputs(
    input_ids: Tensor, labels: Tensor, document_ids: Tensor | None, vocab: int
) -> StepInputs:
    """Check the inputs and derive what the cells need. Raises UnsupportedError naming the
    argument."""
    for name, value in (("input_ids", input_ids), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{name}: expected a tensor [batch, tokens], got {type(value).__name__}"
            )
    _check_tokens(input_ids, vocab)
    _check_labels(labels, input_ids, vocab)
    starts = None if document_ids is None else document_starts(document_ids, input_ids)
    tokens = input_ids.shape[1]
    places = torch.arange(tokens, device=input_ids.device)[None]
    positions = places if starts is None else places - starts
    documents = None
    if starts is not None:
        documents = tuple(tuple(row.unique().tolist()) for row in starts)
    return StepInputs(input_ids, shift_labels(labels, document_ids), positions, documents)


def shift_labels(labels: Tensor, document_ids: Tensor | None) -> Tensor:
    """The label each token predicts: the next token's, within its document."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        last = document_ids[:, 1:] != document_ids[:, :-1]
        targets[:, :-1].masked_fill_(last, IGNORED)
    return targets


def trained_token_count(labels: Tensor, document_ids: Tensor | None = None) -> int:
    """Tokens of these labels [batch, tokens] that a step trains: every token with a next token in
    its document whose label is not -100."""
    return int((shift_labels(labels, document_ids) != IGNORED).sum())


def document_starts(document_ids: Tensor, input_ids: Tensor) -> Tensor:
    """Where in its row each token's document begins, [batch, tokens]."""
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


def _check_labels(labels: Tensor, input_ids: Tensor, vocab: int) -> None:
    if labels.shape != input_ids.shape:
        raise UnsupportedError(
            f"labels: expected the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(labels.shape)}; labels are not shifted, the step shifts them"
        )
    if labels.dtype != torch.int64:
        raise UnsupportedError(f"labels: expected int64, got {labels.dtype}")
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab))
    if bool(wrong.any()):
        raise UnsupportedError(
            f"labels: must be -100 (ignored) or in [0, {vocab}), found {int(labels[wrong][0])}"
        )


@dataclass(frozen=True, slots=True)
class LossHead:
    """Sum of the cross-entropy over trained tokens, divided by a count known before the step: so
    the scale is right for every piece, chunk, micro-batch and rank."""

    boundary: CausalLMStages
    count: int  # trained tokens the mean is taken over, at least 1
    piece: int  # tokens whose logits exist at one time
    parameters: tuple[nn.Parameter, ...]  # trained outside the layers
    fused: bool = False  # the loss is one kernel, whose gradient takes the place of the logits

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The chunk's share of the mean loss; hidden [B, C, h], targets [B, C]."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad():
            for span in self._pieces(hidden):
                total += self._loss(hidden[:, span], targets[:, span])
        return total

    def loss_and_gradient(
        self, hidden: Tensor, targets: Tensor, gradients: GradientAccumulator
    ) -> tuple[Tensor, Tensor]:
        """The same with the gradient of hidden; dW of norm and head go to `gradients`."""
        parameters = self.parameters
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for span in self._pieces(hidden):
            piece = hidden[:, span].detach().requires_grad_()
            loss, (dpiece, *dweights) = self._differentiate(piece, targets[:, span])
            assert dpiece is not None
            gradient[:, span] = dpiece
            gradients.add(parameters, dweights)
            total += loss
        return total, gradient

    def _differentiate(
        self, piece: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """A piece's share of the loss, and the gradients of the piece and of the parameters."""
        wanted = [piece, *self.parameters]
        if not self.fused:
            with torch.enable_grad():
                loss = self._loss(piece, targets)
            return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True)
        saved: set[int] = set()
        with torch.enable_grad(), _noting(saved):
            logits = self.boundary.logits(piece)
            if not self._takes(logits):
                loss = self._cross_entropy(logits, targets)
                return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True)
        rows = logits.detach().flatten(0, 1)
        if rows.untyped_storage()._cdata in saved:  # as a soft cap saves what it gives
            rows = rows.clone()
        losses = cross_entropy_(rows, targets.flatten(), 1 / self.count, ignored=IGNORED)
        found = torch.autograd.grad(logits, wanted, rows.view_as(logits), allow_unused=True)
        return losses.sum(dtype=torch.float64) / self.count, found

    def _takes(self, logits: Tensor) -> bool:
        return self.fused and fused_for(logits.device, logits.dtype)

    def _pieces(self, hidden: Tensor) -> list[slice]:
        batch, tokens, _ = hidden.shape
        # A kernel of the loss may count logits with 32 bits.
        piece = min(self.piece, max(1, most_tokens(batch * self.boundary.vocab)))
        return [slice(s, min(s + piece, tokens)) for s in range(0, tokens, piece)]

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.boundary.logits(hidden)
        if not logits.requires_grad and self._takes(logits):
            losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignored=IGNORED)
            return losses.sum(dtype=torch.float64) / self.count
        return self._cross_entropy(logits, targets)

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(accumulate_dtype(logits.dtype))
        total = functional.cross_entropy(
            wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / self.count


@contextmanager
def _noting(storages: set[int]) -> Iterator[None]:
    """Inside it autograd tells what it saves: what lies in these storages may not be written."""

    def note(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield
