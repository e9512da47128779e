"""Which sequences a step reads, and an evaluation: on several replicas each its own of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farspan.data.forms import UNTRAINED
from farspan.data.packing import Batch
from farspan.train.config import RunConfig
from farspan.train.crew import Crew
from farspan.train.setup import Equipment


@dataclass(frozen=True, slots=True)
class Micro:
    """One batch on the device and how many of its tokens have a target."""

    batch: Batch
    indices: tuple[int, ...]
    input_ids: Tensor  # [batch, tokens] int64
    labels: Tensor  # the same, or UNTRAINED
    document_ids: Tensor  # [batch, tokens] int64
    trained: int

    def describe(self) -> list[dict[str, Any]]:
        """Its sequences and their documents, for diagnosis.json."""
        return [
            {"sequence": index, "documents": list(names)}
            for index, names in zip(self.indices, self.batch.names, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run. Batch n of D replicas is sequences [n * D * batch, (n + 1) * D * batch)
    of the run's order, dealt in order: the update reads what one replica reads with a batch of
    D * batch."""

    run: RunConfig
    use: Equipment
    crew: Crew

    def of_step(self, step: int) -> list[Micro]:
        """This replica's, of the update after `step` of them."""
        count = self.run.accumulate
        return [self._micro(step * count + place) for place in range(count)]

    def held_out(self) -> list[Micro]:
        """This replica's share of those to evaluate on, spread over all that are held out: one long
        document does not stand for the rest. Every replica has as many; what is missing has no
        trained token."""
        packing, replicas = self.use.corpus.held_out, self.crew.replicas
        assert packing is not None, "there is something to evaluate on"
        there = packing.sequences_per_epoch()
        count = min(self.run.evaluation.sequences, there)
        chosen = [place * there // count for place in range(count)]
        own = chosen[self.crew.replica :: replicas]
        found = [self._place(packing.once(i), (i,)) for i in own]
        for _ in range(-(-count // replicas) - len(own)):
            spare = self._place(packing.once(chosen[-1]), (chosen[-1],))
            labels = torch.full_like(spare.labels, UNTRAINED)
            found.append(replace(spare, labels=labels, trained=0))
        return found

    def trained(self, micros: list[Micro]) -> int:
        """Trained tokens of these and of the other replicas'."""
        return self.crew.total(sum(m.trained for m in micros))

    def read(self, micros: list[Micro]) -> int:
        """Tokens of documents in these and in the other replicas'."""
        return self.crew.total(sum(m.batch.tokens for m in micros))

    def _micro(self, number: int) -> Micro:
        """Batch `number` since the start of the run."""
        size = self.run.batch
        start = (number * self.crew.replicas + self.crew.replica) * size
        indices = tuple(range(start, start + size))
        return self._place(self.use.corpus.train.batch(indices), indices)

    def _place(self, batch: Batch, indices: tuple[int, ...]) -> Micro:
        input_ids = torch.from_numpy(batch.input_ids).to(self.use.device)
        labels = torch.from_numpy(batch.labels).to(self.use.device)
        document_ids = torch.from_numpy(batch.document_ids).to(self.use.device)
        trained = self.use.count_trained(labels, document_ids)
        return Micro(batch, indices, input_ids, labels, document_ids, trained)
