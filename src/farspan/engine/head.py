"""Head and loss, piece by piece: the logits of a whole chunk never exist (FPDT 5.4)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.merge import accumulate_dtype
from farspan.engine.batch import IGNORED
from farspan.engine.gradients import Gradients
from farspan.models.boundary import Boundary


@dataclass(frozen=True, slots=True)
class Head:
    """Sum of the cross-entropy over trained tokens, divided by a count known before the step: so
    the scale is right for every piece, chunk, micro-batch and rank."""

    boundary: Boundary
    count: int  # trained tokens the mean is taken over, at least 1
    piece: int  # tokens whose logits exist at one time
    parameters: tuple[nn.Parameter, ...]  # trained outside the layers

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
            with torch.enable_grad():
                loss = self._loss(piece, targets[:, span])
            dpiece, *dweights = torch.autograd.grad(loss, [piece, *parameters], allow_unused=True)
            gradient[:, span] = dpiece
            gradients.add(parameters, dweights)
            total += loss.detach()
        return total, gradient

    def _pieces(self, hidden: Tensor) -> list[slice]:
        tokens = hidden.shape[1]
        return [slice(s, min(s + self.piece, tokens)) for s in range(0, tokens, self.piece)]

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.boundary.logits(hidden)
        wide = logits.to(accumulate_dtype(logits.dtype))
        total = functional.cross_entropy(
            wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / self.count
