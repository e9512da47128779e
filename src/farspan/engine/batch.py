"""One step's data: checked, shifted once, and cut by documents."""

from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.spec import Refused

IGNORED = -100  # label of a token that is not trained, as everywhere in Hugging Face


@dataclass(frozen=True, slots=True)
class Batch:
    """What the cells read. Every tensor is [batch, tokens]."""

    input_ids: Tensor
    targets: Tensor  # the label each token predicts: labels moved by one, IGNORED at the ends
    position_ids: Tensor  # restart in every document; one row when there are no documents
    documents: tuple[tuple[int, ...], ...] | None  # a row: where its documents begin, ascending

    @property
    def trained(self) -> int:
        """Tokens that contribute to the loss."""
        return int((self.targets != IGNORED).sum())


def make_batch(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None, vocab: int) -> Batch:
    """Check the inputs and derive what the cells need. Raises Refused naming the argument."""
    for name, value in (("input_ids", input_ids), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise Refused(f"{name}: expected a tensor [batch, tokens], got {type(value).__name__}")
    _check_tokens(input_ids, vocab)
    _check_labels(labels, input_ids, vocab)
    starts = None if document_ids is None else document_starts(document_ids, input_ids)
    tokens = input_ids.shape[1]
    places = torch.arange(tokens, device=input_ids.device)[None]
    positions = places if starts is None else places - starts
    documents = None
    if starts is not None:
        documents = tuple(tuple(row.unique().tolist()) for row in starts)
    return Batch(input_ids, shifted(labels, document_ids), positions, documents)


def shifted(labels: Tensor, document_ids: Tensor | None) -> Tensor:
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
    return int((shifted(labels, document_ids) != IGNORED).sum())


def document_starts(document_ids: Tensor, input_ids: Tensor) -> Tensor:
    """Where in its row each token's document begins, [batch, tokens]."""
    if document_ids.shape != input_ids.shape:
        raise Refused(
            f"document_ids: expected the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(document_ids.shape)}"
        )
    if document_ids.is_floating_point() or document_ids.is_complex():
        raise Refused(f"document_ids: expected whole numbers, got {document_ids.dtype}")
    document_ids = document_ids.long()  # a narrow unsigned difference would wrap
    step = document_ids[:, 1:] - document_ids[:, :-1]
    if bool((step < 0).any()):
        row, token = (step < 0).nonzero()[0].tolist()
        raise Refused(
            f"document_ids: must not decrease along a row, but row {row} goes down at token "
            f"{token + 1}; number the documents in the order they are packed"
        )
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.zeros_like(document_ids, dtype=torch.long)
    begins[:, 1:] = torch.where(step != 0, places[1:], 0)
    return begins.cummax(dim=1).values


def _check_tokens(input_ids: Tensor, vocab: int) -> None:
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise Refused(
            f"input_ids: expected [batch, tokens] with at least one token, got shape "
            f"{tuple(input_ids.shape)}"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise Refused(f"input_ids: expected int64 or int32 token ids, got {input_ids.dtype}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab:
        raise Refused(
            f"input_ids: token ids must be in [0, {vocab}) for this model's vocabulary, found "
            f"{low if low < 0 else high}; check that the tokenizer belongs to the model"
        )


def _check_labels(labels: Tensor, input_ids: Tensor, vocab: int) -> None:
    if labels.shape != input_ids.shape:
        raise Refused(
            f"labels: expected the shape of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(labels.shape)}; labels are not shifted, the step shifts them"
        )
    if labels.dtype != torch.int64:
        raise Refused(f"labels: expected int64, got {labels.dtype}")
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab))
    if bool(wrong.any()):
        raise Refused(
            f"labels: must be -100 (ignored) or in [0, {vocab}), found {int(labels[wrong][0])}"
        )
