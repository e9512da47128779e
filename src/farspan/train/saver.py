"""What a run saves, goes on from and gives out: of a model that every rank has whole, by the first
of them; of one that is dealt over ranks, by all."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from farspan.distributed.failure import activity
from farspan.durable import remove_leftovers
from farspan.parallel.states_list import Forms
from farspan.train import checkpoint, checkpoint_ranks
from farspan.train.checkpoint import MODEL, OPTIMIZER, Live, Restored
from farspan.train.checkpoint_ranks import Tensors, copy_rows, entries_of
from farspan.train.dealt import whole_weights
from farspan.train.dealt_weights import Pieces
from farspan.train.position import model_tensors
from farspan.train.setup import Equipment

Note = Callable[[str], None]


class Saver(Protocol):
    """All ranks make the same calls in the same order."""

    def resume(self, folder: Path, expected: Mapping[str, Any], warn: Note) -> Restored | None:
        """Goes to the latest checkpoint under `folder` that can be used, and whose state has what
        is `expected`; None when there is none at all. Raises Refused."""

    def save(
        self, folder: Path, rng: Tensors, state: Mapping[str, Any], *, step: int, keep: int
    ) -> None:
        """Writes the checkpoint of `step`, whole or not at all, and removes all but the latest
        `keep`. Raises WriteFailed."""

    def weights(self) -> Mapping[str, Tensor] | None:
        """The whole weights, where the model has them not; only on rank 0."""


class WholeSaver:
    """Every rank has the model whole."""

    def __init__(self, use: Equipment) -> None:
        self._crew = use.crew
        self._live = Live(model_tensors(use.model), use.optimizer.tensors())

    def resume(self, folder: Path, expected: Mapping[str, Any], warn: Note) -> Restored | None:
        restored = self._crew.by_first(
            lambda: checkpoint.resume(folder, self._live, expected, warn), "reading a checkpoint"
        )
        if restored is not None:
            self._crew.spread([*self._live.model.values(), *self._live.optimizer.values()])
        return restored

    def save(
        self, folder: Path, rng: Tensors, state: Mapping[str, Any], *, step: int, keep: int
    ) -> None:
        self._crew.by_first(
            lambda: checkpoint.save(folder, self._live, rng, state, step=step, keep=keep),
            "writing a checkpoint",
        )

    def weights(self) -> Mapping[str, Tensor] | None:
        return None


class DealtSaver:
    """Each rank has its pieces."""

    def __init__(self, use: Equipment, pieces: Pieces) -> None:
        self._use, self._crew, self._pieces = use, use.crew, pieces
        kept = use.model.state_dict(keep_vars=True).keys()
        buffers = {n: b for n, b in use.model.named_buffers() if n in kept and not b.is_meta}
        weights = {name: piece.detach() for name, piece in pieces.trained.items()}
        self._entries = entries_of({**weights, **buffers}, use.optimizer.tensors(), pieces)

    def resume(self, folder: Path, expected: Mapping[str, Any], warn: Note) -> Restored | None:
        paths = self._crew.by_first(lambda: checkpoint.checkpoints(folder))
        forms = self._forms()
        return checkpoint.latest(paths, lambda path: self._read(path, forms, expected), warn)

    def save(
        self, folder: Path, rng: Tensors, state: Mapping[str, Any], *, step: int, keep: int
    ) -> None:
        path = folder / checkpoint.folder_name(step)
        self._crew.by_first(lambda: remove_leftovers(folder))
        given = {**state, "step": step}
        with activity("writing a checkpoint"):
            checkpoint_ranks.write(path, self._entries, rng, given, self._crew)
        self._crew.by_first(lambda: checkpoint.prune(folder, step, keep))

    def weights(self) -> Mapping[str, Tensor] | None:
        return whole_weights(self._pieces.dealt, self._use.model)

    def _read(self, path: Path, forms: dict[str, Forms], expected: Mapping[str, Any]) -> Restored:
        if self._crew.by_first(lambda: checkpoint_ranks.is_of_ranks(path)):
            return Restored(path, *checkpoint_ranks.read(path, self._entries, expected, self._crew))
        state = self._crew.by_first(lambda: checkpoint.verify(path, forms, expected))
        copy_rows(path / MODEL, self._entries, "model/")
        copy_rows(path / OPTIMIZER, self._entries, "optimizer/")
        return Restored(path, state, checkpoint.read_rng(path))

    def _forms(self) -> dict[str, Forms]:
        """Of whole tensors of all pipeline stages, by the files that one process makes of them."""
        own = {name: (t.dtype, place.shape) for name, (t, place) in self._entries.items()}
        found: dict[str, Forms] = {MODEL: {}, OPTIMIZER: {}}
        for name, form in (item for one in self._crew.everyone(own) for item in one.items()):
            kind, _, key = name.partition("/")
            found[f"{kind}.safetensors"][key] = form
        return found


def saver_of(use: Equipment) -> Saver:
    return WholeSaver(use) if use.pieces is None else DealtSaver(use, use.pieces)
