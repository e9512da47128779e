"""Checkpoints that are whole or absent, and are read without running anything in them.

    checkpoints/step-00000120/model.safetensors       parameters and persistent buffers
                              optimizer.safetensors   master weights and AdamW's moments
                              rng.safetensors         random number generators, as bytes
                              state.json              step, counters, and what run this is
                              manifest.json           size and SHA-256 of the files above

The folder is written under another name, synced and renamed, so the name never stands for less
than all of it. Only safetensors and JSON are read back. Ranks that hold parts of the weights write
another form, `farspan.checkpoint.distributed`; either kind of run reads both. At the end of a run
the model is exported as a folder that `from_pretrained` reads.
"""

import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from farspan.checkpoint.distributed import (
    LISTED,
    Tensors,
    copy_rows,
    entries_of,
    gather_model,
    group_of,
    is_of_ranks,
    load_sharded,
    refuse_other,
    save_sharded,
    together,
)
from farspan.checkpoint.format import (
    FileSum,
    Forms,
    NotDamaged,
    expect_json,
    form_words,
    open_tensors,
    readable,
    refuse_nan,
    write_tensors,
)
from farspan.data.tokenizers import Tokenizer, reads_back
from farspan.distributed.failure import activity
from farspan.distributed.fsdp import ShardPlacement
from farspan.distributed.run_context import DistributedContext
from farspan.durable import (
    PARTIAL,
    digest,
    discard,
    move,
    publish,
    read_json,
    remove_leftovers,
    write_bytes,
    writing,
)
from farspan.engine.parallelize import ShardedModel
from farspan.hf.load import save_model
from farspan.hf.merge import ADAPTER_CONFIG, FILES, INDEX_FOLDER, SOURCE
from farspan.sparse.index import Index
from farspan.spec import UnsupportedError

R = TypeVar("R", "Restored", "Restored | None")
State = Mapping[str, Any]  # of a checkpoint, as JSON has it
Best = int | None  # the step of the best checkpoint, where it is kept
_FORMAT = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_RNG = "rng.safetensors"
_NAME = re.compile("step-[0-9]{8}")  # of a checkpoint; see folder_name
# What a killed process leaves behind `PARTIAL`: checkpoints, and the file of `refuse_apart`.
CHECKPOINT_LEFTOVER = re.compile(rf"(old-)?{_NAME.pattern}|[0-9a-f]{{16}}")
_ASIDE = ".set-aside"  # what may be whole has such a name where the run saves its step again
_ADVICE = "move this folder away to resume from an older checkpoint, or start in another run folder"


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
class TrainState:
    """How far the run has come; with the seed it decides every batch that follows."""

    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # read in them
    skipped: int = 0


def _train_state(path: Path, state: Mapping[str, Any]) -> TrainState:
    """Where a checkpoint stands. Raises UnsupportedError when it does not say."""
    given: Any = state.get("position")
    whole = isinstance(given, dict) and given.keys() == {"step", "tokens", "skipped"}
    if not whole or any(type(value) is not int or value < 0 for value in given.values()):
        raise UnsupportedError(
            f"{path}: position: expected step, tokens and skipped, numbers from 0, got {given!r}"
        )
    return TrainState(**given)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says besides the tensors that are copied. Raises UnsupportedError where a
    run cannot go on from there."""

    path: Path
    state: dict[str, Any]
    rng: dict[str, Tensor]
    kept: frozenset[str] = frozenset()  # later checkpoints that were passed over and may be whole
    at: TrainState = field(init=False)

    def __post_init__(self) -> None:
        at = _train_state(self.path / _STATE, self.state)
        if folder_name(at.step) != self.path.name:
            raise NotDamaged(
                f"{self.path}: holds the checkpoint of step {at.step}: rename it to "
                f"{folder_name(at.step)}"
            )
        try:
            if "cpu" not in self.rng:
                raise ValueError("none of the CPU")
            for name, state in self.rng.items():
                device = torch.device(name)
                if device.type == "cpu" or (device.index or 0) < torch.cuda.device_count():
                    torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{self.path}: no random numbers to go on from: {error}"
            ) from error
        object.__setattr__(self, "at", at)


def save_checkpoint(
    folder: Path,
    live: Live,
    rng: Tensors,
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int,
    best: int | None = None,
    kept: set[str] | None = None,
) -> Path:
    """Writes the checkpoint of `step` under `folder` and removes all but the latest `keep` and that
    of step `best`, and none of those named in `kept`.

    Raises WriteFailed naming the file; the checkpoints that were there are then untouched.
    """
    path, kept = folder / folder_name(step), set() if kept is None else kept
    partial = folder / f"{PARTIAL}{path.name}"
    _make_way(path, kept)
    with writing(partial):
        for file, tensors in {**live.files(), _RNG: rng}.items():
            write_tensors(partial / file, tensors)
        write_bytes(partial / _STATE, _json({"format": _FORMAT, "step": step, **state}))
        listed = {p.name: _entry(p) for p in sorted(partial.iterdir())}
        write_bytes(partial / _MANIFEST, _json({"format": _FORMAT, "files": listed}))
    try:
        publish(partial, path)
    except BaseException:
        remove_leftovers(folder, CHECKPOINT_LEFTOVER)  # the space is wanted: the disk may be full
        raise
    prune(folder, step, keep, best, kept)
    return path


def folder_name(step: int) -> str:
    """Of the checkpoint of a step, in its folder."""
    return f"step-{step:08d}"


def resume_checkpoint(
    folder: Path, live: Live, expected: Mapping[str, Any], warn: Callable[[str], None]
) -> Restored | None:
    """Copies the latest checkpoint that can be used into `live`; None when there is none at all.

    `expected` are entries of the state that must be equal, such as which run this is. A
    checkpoint that cannot be used is passed over with a warning where an older one can;
    otherwise UnsupportedError says why, naming the file.
    """
    return latest_usable(list_checkpoints(folder), lambda path: _read(path, live, expected), warn)


def latest_usable(
    paths: Sequence[Path], read: Callable[[Path], Restored], warn: Callable[[str], None]
) -> Restored | None:
    """What `read` makes of the latest of these that it does not refuse. Raises UnsupportedError."""
    problems: dict[str, UnsupportedError] = {}
    for path in reversed(paths):
        try:
            restored = read(path)
        except UnsupportedError as problem:
            problems[path.name] = problem
            continue
        kept = frozenset(name for name, why in problems.items() if isinstance(why, NotDamaged))
        for name, why in problems.items():
            fate = f"; it may be whole and is kept, as {name}{_ASIDE} once this run is there"
            warn(f"{why}; resuming from {path} instead{fate if name in kept else ''}")
        return replace(restored, kept=kept)
    for why in problems.values():
        raise UnsupportedError(f"{why}; {_ADVICE}")
    return None


def _read(path: Path, live: Live, expected: Mapping[str, Any]) -> Restored:
    if is_of_ranks(path):
        entries = entries_of(live.model, live.optimizer)
        device = next((t.device for t in live.model.values()), torch.device("cpu"))
        state, rng = load_sharded(path, entries, expected, DistributedContext(device))
        return Restored(path, state, rng)
    state = verify_checkpoint(path, live.forms(), expected)
    restored = Restored(path, state, read_rng(path))
    for name, tensors in live.files().items():
        _copy(path / name, tensors)
    return restored


def manifest_path(path: Path) -> Path:
    """The file of a checkpoint that says what all others hold."""
    return path / (LISTED if is_of_ranks(path) else _MANIFEST)


def list_checkpoints(folder: Path) -> list[Path]:
    """All under a folder, the oldest first; what has any other name is the user's. Raises
    UnsupportedError where the folder cannot be read."""
    return [path for path in named_checkpoints(folder) if not _is_in_the_way(path)]


def named_checkpoints(folder: Path) -> list[Path]:
    """Whatever has a checkpoint's name under a folder. Raises UnsupportedError."""
    with readable(folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            names = []
    return [folder / name for name in sorted(names) if _NAME.fullmatch(name)]


def _is_in_the_way(path: Path) -> bool:
    """Whether what has a checkpoint's name is known to be no folder. What cannot be looked at is
    refused by who reads it, and is not taken for nothing."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # a link to what is not there


def _make_way(path: Path, kept: set[str]) -> None:
    """Cleans up where a checkpoint is to be written. One of the same step that is among the `kept`
    gets another name, and is no longer among them. Raises WriteFailed."""
    remove_leftovers(path.parent, CHECKPOINT_LEFTOVER)
    if path.name in kept:
        names = (f"{path.name}{_ASIDE}{f'-{n}' if n > 1 else ''}" for n in count(1))
        free = (path.with_name(name) for name in names)
        move(path, next(place for place in free if not os.path.lexists(place)))
        kept.discard(path.name)


def prune(
    folder: Path, step: int, keep: int, best: int | None = None, kept: Collection[str] = ()
) -> None:
    """Keeps the latest `keep` and that of step `best`, beside those named in `kept`. A later step
    than the one just saved is of no use any more: this run resumed from before it because it was
    damaged. Raises WriteFailed."""
    saved = [path for path in list_checkpoints(folder) if path.name not in kept]
    later = [p for p in saved if p.name > folder_name(step)]
    for path in later + saved[: len(saved) - len(later)][:-keep]:
        if best is None or path.name != folder_name(best):
            discard(path)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode("utf-8")


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def verify_checkpoint(
    path: Path, forms: Mapping[str, Forms], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a checkpoint whose files hold tensors of these forms, after every byte and every
    name has been looked at. Raises UnsupportedError."""
    listed = expect_json(path / _MANIFEST).get("files")
    wanted = {*forms, _RNG, _STATE}
    if not isinstance(listed, dict) or not wanted <= listed.keys():
        raise UnsupportedError(f"{path / _MANIFEST}: does not list {', '.join(sorted(wanted))}")
    for name in sorted(wanted):
        _verify_file(path / name, listed[name])
    state = expect_json(path / _STATE)
    if state.get("format") != _FORMAT:
        raise NotDamaged(f"{path / _STATE}: format {state.get('format')!r}, expected {_FORMAT}")
    refuse_other(path / _STATE, state, expected)
    for name, of_tensors in forms.items():
        _verify_tensors(path / name, of_tensors)
    return state


def _verify_file(path: Path, entry: Any) -> None:
    if not isinstance(entry, dict) or not entry.keys() >= {"bytes", "sha256"}:
        raise UnsupportedError(f"{path.parent / _MANIFEST}: no size and SHA-256 under {path.name}")
    FileSum(entry["bytes"], entry["sha256"]).verify(path, _MANIFEST)


def _verify_tensors(path: Path, forms: Forms) -> None:
    with open_tensors(path) as file:
        names = set(file.keys())
        for name in sorted(names ^ forms.keys()):
            where = "the checkpoint" if name in names else "the model"
            raise NotDamaged(f"{path}: of another model: only {where} has {name}")
        for name, form in forms.items():
            tensor = file.get_tensor(name)
            saved = tensor.dtype, tuple(tensor.shape)
            if saved != form:
                raise NotDamaged(
                    f"{path}: of another model: {name} is {form_words(*saved)}, here "
                    f"{form_words(*form)}"
                )
            if path.name == MODEL:
                refuse_nan(path, name, tensor)


def _copy(path: Path, live: Tensors) -> None:
    with open_tensors(path) as file, torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(file.get_tensor(name))


def read_rng(path: Path) -> dict[str, Tensor]:
    """The generators of one process's checkpoint."""
    with open_tensors(path / _RNG) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def model_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters that are trained, each under its first name, and the buffers that belong to the
    weights. Frozen ones come from where the run has them."""
    kept = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return {
        **{name: p.detach() for name, p in model.named_parameters() if p.requires_grad},
        **buffers,
    }


class Saver(Protocol):
    """All ranks make the same calls in the same order."""

    def resume(
        self, folder: Path, expected: Mapping[str, Any], warn: Callable[[str], None]
    ) -> Restored | None:
        """Goes to the latest checkpoint under `folder` that can be used, and whose state has what
        is `expected`; None when there is none at all. Raises UnsupportedError."""

    def begin(self, path: Path, expected: Mapping[str, Any]) -> Restored:
        """Goes to this checkpoint, of another run. Raises UnsupportedError."""

    def save(
        self, folder: Path, rng: Tensors, state: State, *, step: int, keep: int, best: Best = None
    ) -> None:
        """Writes the checkpoint of `step`, whole or not at all, and removes all but the latest
        `keep` and that of step `best`. Raises WriteFailed."""

    def weights(self) -> Mapping[str, Tensor] | None:
        """The whole weights on rank 0, if the model itself does not have them; else None."""


class ReplicatedSaver:
    """Every rank has the model whole."""

    def __init__(self, model: nn.Module, optimizer: Tensors, world: DistributedContext) -> None:
        self._world = world
        self._live = Live(model_tensors(model), optimizer)
        self._kept: set[str] = set()

    def resume(
        self, folder: Path, expected: Mapping[str, Any], warn: Callable[[str], None]
    ) -> Restored | None:
        return self._restore(lambda: resume_checkpoint(folder, self._live, expected, warn))

    def begin(self, path: Path, expected: Mapping[str, Any]) -> Restored:
        return self._restore(lambda: _read(path, self._live, expected))

    def _restore(self, read: Callable[[], R]) -> R:
        restored = self._world.run_on_rank0(read, "reading a checkpoint")
        if restored is not None:
            self._kept = set(restored.kept)
            self._world.broadcast([*self._live.model.values(), *self._live.optimizer.values()])
        return restored

    def save(
        self, folder: Path, rng: Tensors, state: State, *, step: int, keep: int, best: Best = None
    ) -> None:
        own, kept = self._live, self._kept
        self._world.run_on_rank0(
            lambda: save_checkpoint(
                folder, own, rng, state, step=step, keep=keep, best=best, kept=kept
            ),
            "writing a checkpoint",
        )

    def weights(self) -> Mapping[str, Tensor] | None:
        return None


def refuse_apart(folder: Path, world: DistributedContext) -> None:
    """Raises UnsupportedError on all ranks where one does not see what rank 0 writes under
    `folder`."""

    def write() -> Path:
        path = folder / f"{PARTIAL}{secrets.token_hex(8)}"
        write_bytes(path, b"")
        return path

    path = world.run_on_rank0(write)
    blind = world.first_given(None if os.path.exists(path) else platform.node())
    world.run_on_rank0(path.unlink)
    if blind is not None:
        rank, node = blind
        raise UnsupportedError(
            f"folder: rank {rank} ({node}) does not see what rank 0 writes in {folder}: ranks that "
            "hold parts of the weights write one checkpoint together; give a folder on a disk that "
            "all nodes share, or set parallel.fsdp to false, without tensor and pipeline, where "
            "rank 0 writes alone"
        )


class ShardedSaver:
    """Each rank has its parts of the model: `weights`, which lie at `places` in the whole."""

    def __init__(
        self,
        model: nn.Module,
        sharded_model: ShardedModel,
        weights: Tensors,
        places: Mapping[str, ShardPlacement],
        optimizer: Tensors,
        world: DistributedContext,
    ) -> None:
        self._model, self._sharded_model, self._world = model, sharded_model, world
        kept = model.state_dict(keep_vars=True).keys()
        buffers = {n: b for n, b in model.named_buffers() if n in kept and not b.is_meta}
        own = {name: weight.detach() for name, weight in weights.items()}
        self._entries = entries_of({**own, **buffers}, optimizer, places)
        self._kept: set[str] = set()

    def resume(
        self, folder: Path, expected: Mapping[str, Any], warn: Callable[[str], None]
    ) -> Restored | None:
        refuse_apart(folder, self._world)
        paths = self._world.run_on_rank0(lambda: list_checkpoints(folder))
        forms = self._forms()
        found = latest_usable(paths, lambda path: self._read(path, forms, expected), warn)
        self._kept = set() if found is None else set(found.kept)
        return found

    def begin(self, path: Path, expected: Mapping[str, Any]) -> Restored:
        return self._read(path, self._forms(), expected)

    def save(
        self, folder: Path, rng: Tensors, state: State, *, step: int, keep: int, best: Best = None
    ) -> None:
        path = folder / folder_name(step)
        self._world.run_on_rank0(lambda: _make_way(path, self._kept))
        given = {**state, "step": step}
        with activity("writing a checkpoint"):
            save_sharded(path, self._entries, rng, given, self._world)
        self._world.run_on_rank0(lambda: prune(folder, step, keep, best, self._kept))

    def weights(self) -> Mapping[str, Tensor] | None:
        return gather_model(self._sharded_model, self._model)

    def _read(self, path: Path, forms: dict[str, Forms], expected: Mapping[str, Any]) -> Restored:
        group = group_of(self._world)
        if self._world.run_on_rank0(lambda: is_of_ranks(path)):
            state, rng = load_sharded(path, self._entries, expected, self._world)
            return together(group, lambda: Restored(path, state, rng))
        state = self._world.run_on_rank0(lambda: verify_checkpoint(path, forms, expected))

        def copy() -> Restored:
            restored = Restored(path, state, read_rng(path))
            copy_rows(path / MODEL, self._entries, "model/")
            copy_rows(path / OPTIMIZER, self._entries, "optimizer/")
            return restored

        return together(group, copy)

    def _forms(self) -> dict[str, Forms]:
        """Of whole tensors of all pipeline stages, by the files that one process makes of them."""
        own = {name: (t.dtype, place.shape) for name, (t, place) in self._entries.items()}
        found: dict[str, Forms] = {MODEL: {}, OPTIMIZER: {}}
        for name, form in (item for one in self._world.all_gather(own) for item in one.items()):
            kind, _, key = name.partition("/")
            found[f"{kind}.safetensors"][key] = form
        return found


# SOURCE has the SHA-256 of a checkpoint's manifest, which stands for all of its files, how the
# model was trained, and the SHA-256 of each exported file that decides its weights. A folder
# without it, or with another one, is not the result of this run: replaced.
CARD = "README.md"  # what the hub shows of a model


def source_of(checkpoint: Path, marks: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder says that was made of a checkpoint."""
    return {
        **marks,
        "checkpoint": checkpoint.name,
        "manifest_sha256": digest(manifest_path(checkpoint)),
    }


def is_exported(
    checkpoint: Path, folder: Path, marks: Mapping[str, Any], note: Callable[[str], None]
) -> bool:
    """Whether `folder` was made of this very checkpoint and is whole; one that has changed since is
    renamed, and `note` is told."""
    said = read_json(folder / SOURCE) or {}
    files = said.pop(FILES, {})  # earlier versions wrote none
    if said != source_of(checkpoint, marks):
        return False
    found = _digests(folder) if files else {}
    changed = sorted(name for name in files if found.get(name) != files[name])
    if changed:
        aside = folder.with_name(f"{folder.name}.changed")
        discard(aside)
        move(folder, aside)
        what = "has changed since it was exported" if changed[0] in found else "is gone"
        note(
            f"warning: {folder / changed[0]} {what}; its folder is now {aside.name}, and the model "
            "is exported again"
        )
    return not changed


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of an exported model's weights, their index and configuration; people may edit the
    tokenizer's files."""
    named = [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]
    named += [p for p in (folder / "config.json", folder / ADAPTER_CONFIG) if p.is_file()]
    return {path.name: digest(path) for path in sorted(named)}


def export(
    model: Any,
    tokenizer: Tokenizer,
    checkpoint: Path,
    folder: Path,
    note: Callable[[str], None],
    marks: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    card: str | None = None,
    index: Index | None = None,
) -> None:
    """Writes `folder`, which `from_pretrained` reads, of the model as it is at this checkpoint.
    `marks` are what a reader is to know of how it was trained; `weights` are the whole ones of a
    model that is sharded over ranks, `card` is its README, and `index` what it attended by. Raises
    WriteFailed."""
    source = source_of(checkpoint, marks)
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    with writing(partial), _without_bars():
        save_model(model, partial, weights)
        tokenizer.save(partial)
        source[FILES] = _digests(partial)
        write_bytes(partial / SOURCE, json.dumps(source).encode("utf-8"))
        if card is not None:
            write_bytes(partial / CARD, card.encode("utf-8"))
        if index is not None:
            index.save(partial / INDEX_FOLDER)
    publish(partial, folder)
    if "overrides" in marks:
        note(
            f"note: the adapters in {folder} are for a model with {', '.join(marks['overrides'])} "
            f"of model.overrides: load it with these ({SOURCE} has them), then the adapters"
        )
    if not reads_back(tokenizer, folder):
        note(
            f"warning: transformers loads the tokenizer in {folder} as another class for this "
            "model type; load it with PreTrainedTokenizerFast, or from where the run has it"
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers' own progress bars would tear ours apart."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
