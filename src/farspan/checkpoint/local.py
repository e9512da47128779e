"""Checkpoints that are whole or absent, and are read without running anything in them.

    checkpoints/step-00000120/model.safetensors       parameters and persistent buffers
                              optimizer.safetensors   master weights and AdamW's moments
                              rng.safetensors         random number generators, as bytes
                              state.json              step, counters, and what run this is
                              manifest.json           size and SHA-256 of the files above

The folder is written under another name, synced and renamed, so the name never stands for less
than all of it. Only safetensors and JSON are read back. Ranks that hold parts of the weights write
another form, `checkpoint_ranks`; either kind of run reads both.

How far a run has come, and the tensors that say so.

What a run saves, goes on from and gives out: of a model that every rank has whole, by the first
of them; of one that is dealt over ranks, by all."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farspan.checkpoint import distributed as checkpoint_ranks
from farspan.checkpoint.distributed import (
    NamedTensors,
    copy_rows,
    entries_of,
    gather_model,
    refuse_other,
)
from farspan.checkpoint.format import Forms, expect_json, form_words, open_tensors
from farspan.distributed.failure import activity
from farspan.distributed.run_context import DistributedContext
from farspan.durable import (
    PARTIAL,
    digest,
    discard,
    publish,
    remove_leftovers,
    write_bytes,
    write_tensors,
)
from farspan.spec import Refused
from farspan.train.context import RunContext
from farspan.train.optimizer import ShardedParameters

_FORMAT = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_RNG = "rng.safetensors"
_STEP = "step-"
_ADVICE = "move this folder away to resume from an older checkpoint, or start in another run folder"

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Live:
    """The tensors that a checkpoint is made of, in the process that trains: saved as they are,
    restored by copying into them."""

    model: Tensors
    optimizer: Tensors

    def files(self) -> dict[str, Tensors]:
        return {MODEL: self.model, OPTIMIZER: self.optimizer}

    def forms(self) -> dict[str, Forms]:
        return {
            file: {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
            for file, tensors in self.files().items()
        }


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says besides the tensors that were copied."""

    path: Path
    state: dict[str, Any]
    rng: dict[str, Tensor]


def save_checkpoint(
    folder: Path, live: Live, rng: Tensors, state: Mapping[str, Any], *, step: int, keep: int
) -> Path:
    """Writes the checkpoint of `step` under `folder` and removes all but the latest `keep`.

    Raises WriteFailed naming the file; the checkpoints that were there are then untouched.
    """
    path = folder / folder_name(step)
    partial = folder / f"{PARTIAL}{path.name}"
    remove_leftovers(folder)
    partial.mkdir(parents=True)
    try:
        for file, tensors in {**live.files(), _RNG: rng}.items():
            write_tensors(partial / file, tensors)
        write_bytes(partial / _STATE, _json({"format": _FORMAT, "step": step, **state}))
        listed = {p.name: _entry(p) for p in sorted(partial.iterdir())}
        write_bytes(partial / _MANIFEST, _json({"format": _FORMAT, "files": listed}))
        publish(partial, path)
    except BaseException:
        remove_leftovers(folder)  # the space is wanted: the disk may be full
        raise
    prune(folder, step, keep)
    return path


def folder_name(step: int) -> str:
    """Of the checkpoint of a step, in its folder."""
    return f"{_STEP}{step:08d}"


def resume_checkpoint(
    folder: Path, live: Live, expected: Mapping[str, Any], warn: Callable[[str], None]
) -> Restored | None:
    """Copies the latest checkpoint that can be used into `live`; None when there is none at all.

    `expected` are entries of the state that must be equal, such as which run this is. A
    checkpoint that cannot be used is passed over with a warning where an older one can;
    otherwise Refused says why, naming the file.
    """
    return latest_usable(list_checkpoints(folder), lambda path: _read(path, live, expected), warn)


def latest_usable(
    paths: Sequence[Path], read: Callable[[Path], Restored], warn: Callable[[str], None]
) -> Restored | None:
    """What `read` makes of the latest of these that it does not refuse. Raises Refused."""
    problems: list[str] = []
    for path in reversed(paths):
        try:
            restored = read(path)
        except Refused as problem:
            problems.append(str(problem))
            continue
        for problem_text in problems:
            warn(f"{problem_text}; resuming from {path} instead")
        return restored
    if problems:
        raise Refused(f"{problems[0]}; {_ADVICE}")
    return None


def _read(path: Path, live: Live, expected: Mapping[str, Any]) -> Restored:
    if checkpoint_ranks.is_of_ranks(path):
        entries = entries_of(live.model, live.optimizer)
        device = next((t.device for t in live.model.values()), torch.device("cpu"))
        state, rng = checkpoint_ranks.load_sharded(
            path, entries, expected, DistributedContext(device)
        )
        return Restored(path, state, rng)
    state = verify_checkpoint(path, live.forms(), expected)
    for name, tensors in live.files().items():
        _copy(path / name, tensors)
    return Restored(path, state, read_rng(path))


def manifest_path(path: Path) -> Path:
    """The file of a checkpoint that says what all others hold."""
    of_ranks = checkpoint_ranks.is_of_ranks(path)
    return path / (checkpoint_ranks.LISTED if of_ranks else _MANIFEST)


def capture_rng() -> dict[str, Tensor]:
    """The state of torch's generators, uint8: of the CPU and of every GPU in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.update({f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())})
    return states


def restore_rng(states: Tensors, own: torch.device | None = None) -> None:
    """Sets what `capture_rng` returned, for the devices that are here. `own` is the GPU of a rank:
    the states are those of rank 0, which computes on the first."""
    torch.set_rng_state(states["cpu"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    if own is not None and (own.index or 0) > 0 and "cuda:0" in states and count > 0:
        torch.cuda.set_rng_state(states["cuda:0"], own)


def list_checkpoints(folder: Path) -> list[Path]:
    """All under a folder, the oldest first."""
    return sorted(p for p in folder.glob(f"{_STEP}*") if p.is_dir())


def prune(folder: Path, step: int, keep: int) -> None:
    """Keeps the latest `keep`. A later step than the one just saved is of no use any more: it
    could not be read when this run resumed from before it."""
    saved = list_checkpoints(folder)
    later = [p for p in saved if p.name > folder_name(step)]
    for path in later + saved[: len(saved) - len(later)][:-keep]:
        discard(path)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode("utf-8")


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def verify_checkpoint(
    path: Path, forms: Mapping[str, Forms], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a checkpoint whose files hold tensors of these forms, after every byte and every
    name has been looked at. Raises Refused."""
    listed = expect_json(path / _MANIFEST).get("files")
    wanted = {*forms, _RNG, _STATE}
    if not isinstance(listed, dict) or not wanted <= listed.keys():
        raise Refused(f"{path / _MANIFEST}: does not list {', '.join(sorted(wanted))}")
    for name in sorted(wanted):
        _verify_file(path / name, listed[name])
    state = expect_json(path / _STATE)
    if state.get("format") != _FORMAT:
        raise Refused(f"{path / _STATE}: format {state.get('format')!r}, expected {_FORMAT}")
    refuse_other(path / _STATE, state, expected)
    for name, of_tensors in forms.items():
        _verify_tensors(path / name, of_tensors)
    return state


def _verify_file(path: Path, entry: Any) -> None:
    if not path.is_file():
        raise Refused(f"{path}: missing")
    if not isinstance(entry, dict):
        raise Refused(f"{path.parent / _MANIFEST}: no size and SHA-256 under {path.name}")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise Refused(f"{path}: {size} bytes, expected {entry.get('bytes')}: truncated or changed")
    if digest(path) != entry.get("sha256"):
        raise Refused(f"{path}: its SHA-256 is not the one in {_MANIFEST}: damaged or changed")


def _verify_tensors(path: Path, forms: Forms) -> None:
    with open_tensors(path) as file:
        names = set(file.keys())
        for name in sorted(names ^ forms.keys()):
            where = "the checkpoint" if name in names else "the model"
            raise Refused(f"{path}: of another model: only {where} has {name}")
        for name, form in forms.items():
            tensor = file.get_tensor(name)
            saved = tensor.dtype, tuple(tensor.shape)
            if saved != form:
                raise Refused(
                    f"{path}: of another model: {name} is {form_words(*saved)}, here "
                    f"{form_words(*form)}"
                )


def _copy(path: Path, live: Tensors) -> None:
    with open_tensors(path) as file, torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(file.get_tensor(name))


def read_rng(path: Path) -> dict[str, Tensor]:
    """The generators of one process's checkpoint."""
    with open_tensors(path / _RNG) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


@dataclass(frozen=True, slots=True)
class TrainState:
    """How far the run has come; with the seed it decides every batch that follows."""

    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # read in them
    skipped: int = 0


def train_state_of(restored: Restored) -> TrainState:
    """Where a checkpoint stands. Raises Refused when it does not say."""
    given: Any = restored.state.get("position")
    whole = isinstance(given, dict) and given.keys() == {"step", "tokens", "skipped"}
    if not whole or any(not isinstance(value, int) for value in given.values()):
        raise Refused(
            f"{restored.path / 'state.json'}: position: expected step, tokens and skipped, got "
            f"{given!r}; move this folder away"
        )
    return TrainState(**given)


def model_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters that are trained, each under its first name, and the buffers that belong to the
    weights. Frozen ones come from where the run has them."""
    kept = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return {
        **{name: p.detach() for name, p in model.named_parameters() if p.requires_grad},
        **buffers,
    }


Note = Callable[[str], None]


class Saver(Protocol):
    """All ranks make the same calls in the same order."""

    def resume(self, folder: Path, expected: Mapping[str, Any], warn: Note) -> Restored | None:
        """Goes to the latest checkpoint under `folder` that can be used, and whose state has what
        is `expected`; None when there is none at all. Raises Refused."""

    def save(
        self, folder: Path, rng: NamedTensors, state: Mapping[str, Any], *, step: int, keep: int
    ) -> None:
        """Writes the checkpoint of `step`, whole or not at all, and removes all but the latest
        `keep`. Raises WriteFailed."""

    def weights(self) -> Mapping[str, Tensor] | None:
        """The whole weights, where the model has them not; only on rank 0."""


class ReplicatedSaver:
    """Every rank has the model whole."""

    def __init__(self, use: RunContext) -> None:
        self._crew = use.crew
        self._live = Live(model_tensors(use.model), use.optimizer.tensors())

    def resume(self, folder: Path, expected: Mapping[str, Any], warn: Note) -> Restored | None:
        restored = self._crew.by_first(
            lambda: resume_checkpoint(folder, self._live, expected, warn), "reading a checkpoint"
        )
        if restored is not None:
            self._crew.spread([*self._live.model.values(), *self._live.optimizer.values()])
        return restored

    def save(
        self, folder: Path, rng: NamedTensors, state: Mapping[str, Any], *, step: int, keep: int
    ) -> None:
        self._crew.by_first(
            lambda: save_checkpoint(folder, self._live, rng, state, step=step, keep=keep),
            "writing a checkpoint",
        )

    def weights(self) -> Mapping[str, Tensor] | None:
        return None


class ShardedSaver:
    """Each rank has its pieces."""

    def __init__(self, use: RunContext, pieces: ShardedParameters) -> None:
        self._use, self._crew, self._pieces = use, use.crew, pieces
        kept = use.model.state_dict(keep_vars=True).keys()
        buffers = {n: b for n, b in use.model.named_buffers() if n in kept and not b.is_meta}
        weights = {name: piece.detach() for name, piece in pieces.trained.items()}
        self._entries = entries_of({**weights, **buffers}, use.optimizer.tensors(), pieces)

    def resume(self, folder: Path, expected: Mapping[str, Any], warn: Note) -> Restored | None:
        paths = self._crew.by_first(lambda: list_checkpoints(folder))
        forms = self._forms()
        return latest_usable(paths, lambda path: self._read(path, forms, expected), warn)

    def save(
        self, folder: Path, rng: NamedTensors, state: Mapping[str, Any], *, step: int, keep: int
    ) -> None:
        path = folder / folder_name(step)
        self._crew.by_first(lambda: remove_leftovers(folder))
        given = {**state, "step": step}
        with activity("writing a checkpoint"):
            checkpoint_ranks.save_sharded(path, self._entries, rng, given, self._crew)
        self._crew.by_first(lambda: prune(folder, step, keep))

    def weights(self) -> Mapping[str, Tensor] | None:
        return gather_model(self._pieces.dealt, self._use.model)

    def _read(self, path: Path, forms: dict[str, Forms], expected: Mapping[str, Any]) -> Restored:
        if self._crew.by_first(lambda: checkpoint_ranks.is_of_ranks(path)):
            return Restored(
                path, *checkpoint_ranks.load_sharded(path, self._entries, expected, self._crew)
            )
        state = self._crew.by_first(lambda: verify_checkpoint(path, forms, expected))
        copy_rows(path / MODEL, self._entries, "model/")
        copy_rows(path / OPTIMIZER, self._entries, "optimizer/")
        return Restored(path, state, read_rng(path))

    def _forms(self) -> dict[str, Forms]:
        """Of whole tensors of all pipeline stages, by the files that one process makes of them."""
        own = {name: (t.dtype, place.shape) for name, (t, place) in self._entries.items()}
        found: dict[str, Forms] = {MODEL: {}, OPTIMIZER: {}}
        for name, form in (item for one in self._crew.everyone(own) for item in one.items()):
            kind, _, key = name.partition("/")
            found[f"{kind}.safetensors"][key] = form
        return found


def saver_of(use: RunContext) -> Saver:
    return ReplicatedSaver(use) if use.pieces is None else ShardedSaver(use, use.pieces)
