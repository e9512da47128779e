"""Dense attention, sparse attention and random pages, trained alike by `farspan.Step`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farspan import Schedule, Step
from farspan.sparse.pages import RandomPages
from farspan.spec import Sparse

DENSE, SPARSE, RANDOM = "dense", "sparse", "random"
ARMS = (DENSE, SPARSE, RANDOM)
WARMUP = 10  # steps
CLIP = 1.0

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """What the arms have in common: chunks, and the pages that two of them are given."""

    chunk: int
    sparse: Sparse

    def step(self, arm: str, model: nn.Module, seed: int) -> Step:
        """A step of one arm; random pages are as many as the votes may choose."""
        assert arm in ARMS, arm
        schedule = Schedule(chunk=self.chunk, sparse=None if arm == DENSE else self.sparse)
        pages = self.sparse.budget // self.sparse.page
        return Step(model, schedule, selector=RandomPages(pages, seed) if arm == RANDOM else None)


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates: matrices of the layers go by Muon, all else by AdamW.

    With AdamW alone a model of this size did not find associative recall in 1,500 steps of 2,048
    tokens; with Muon it takes 300 to 400.
    """

    adamw: float
    muon: float


class Training:
    """A model's optimizers over a known number of steps: a short warm-up, constant for a third,
    then down to nothing."""

    def __init__(self, model: nn.Module, rates: Rates, steps: int) -> None:
        self.model, self.steps, self.done = model, steps, 0
        named = dict(model.named_parameters())
        matrices = [n for n, p in named.items() if p.ndim == 2 and ".layers." in n]
        others = [p for n, p in named.items() if n not in matrices]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(others, rates.adamw, (0.9, 0.98), weight_decay=0.0), rates.adamw),
            (
                torch.optim.Muon(
                    [named[n] for n in matrices],
                    rates.muon,
                    weight_decay=0.0,
                    adjust_lr_fn="match_rms_adamw",
                ),
                rates.muon,
            ),
        ]

    def share(self) -> float:
        """Of the learning rates, at this step."""
        return min(1.0, (self.done + 1) / WARMUP, 1.5 * (1 - self.done / self.steps))

    def __call__(self, step: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> float:
        """One step: the loss before it."""
        self.model.zero_grad(set_to_none=True)
        loss = float(step(*batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.share()
            optimizer.step()
        self.done += 1
        return loss
