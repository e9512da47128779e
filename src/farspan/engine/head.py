"""Head and loss, piece by piece: the logits of a whole chunk never exist (FPDT 5.4)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from farspan.attention.softmax import accumulate_dtype
from farspan.engine.batch import IGNORED
from farspan.engine.gradients import Gradients
from farspan.hf.stages import CausalLMStages
from farspan.kernels.launch import fused_for
from farspan.kernels.operations import cross_entropy, cross_entropy_
from farspan.plan.blocks import most_tokens


@dataclass(frozen=True, slots=True)
class Head:
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
        self, hidden: Tensor, targets: Tensor, gradients: Gradients
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
