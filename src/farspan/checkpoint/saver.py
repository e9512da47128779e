"""A run's checkpoints in its folder: saved whole or not at all, resumed from the latest usable one,
and pruned; and the model of a checkpoint, exported as a folder that `from_pretrained` reads.

The tensors of a run are named

    model/<parameter or buffer>      parameters, and buffers that belong to the weights
    optimizer/<key>/<parameter>      master weights, moments and counts of updates
    rng/<rank>/cpu, rng/<rank>/cuda  each rank's generators, as bytes
"""

import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging

from farspan.checkpoint.earlier import MANIFEST, TENSORS, read_earlier
from farspan.checkpoint.format import (
    LIST,
    Entries,
    SavedCheckpoint,
    copy_saved,
    read_list,
    refuse_other_model,
    save_entries,
    together,
    type_words,
)
from farspan.data.tokenizers import Tokenizer, reads_back
from farspan.distributed import messages
from farspan.distributed.failure import activity
from farspan.distributed.fsdp import ShardPlacement, whole_placement
from farspan.distributed.run_context import DistributedContext
from farspan.durable import (
    PARTIAL,
    NotDamaged,
    digest,
    discard,
    move,
    publish,
    read_json,
    readable,
    remove_leftovers,
    write_bytes,
    writing,
)
from farspan.engine.parallelize import ShardedModel
from farspan.hf.load import save_model
from farspan.hf.merge import ADAPTER_CONFIG, FILES, INDEX_FOLDER, SOURCE
from farspan.program.layout import Rank
from farspan.spec import UnsupportedError

T = TypeVar("T")

Tensors = Mapping[str, Tensor]
Best = int | None  # step of the best checkpoint, if one is kept
RNG = "rng/"
RNG_BYTES = 2**20  # more than the largest state of a generator of torch, 5056
FROZEN = "frozen"  # in a checkpoint's state: digest of the frozen weights, which it leaves out
INDEX_OF_KEYS = "index"  # and of the index for page selection by sparse attention
_NAME = re.compile("step-[0-9]{8}")  # of a checkpoint; see folder_name
# Names after `PARTIAL` that a killed process leaves: checkpoints, and the file of `refuse_apart`.
CHECKPOINT_LEFTOVER = re.compile(rf"(old-)?{_NAME.pattern}|[0-9a-f]{{16}}")
_ASIDE = ".set-aside"  # suffix of a checkpoint that may be whole, when the run saves its step again
_ADVICE = "move this folder away to resume from an older checkpoint, or start in another run folder"


@dataclass(frozen=True, slots=True)
class TrainState:
    """Progress of a run; together with the seed it decides every batch that follows."""

    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # tokens read in these updates
    skipped: int = 0


def _train_state(path: Path, state: Mapping[str, Any]) -> TrainState:
    position: Any = state.get("position")
    whole = isinstance(position, dict) and position.keys() == {"step", "tokens", "skipped"}
    if not whole or any(type(value) is not int or value < 0 for value in position.values()):
        raise UnsupportedError(
            f"{path}: position: expected step, tokens and skipped, integers >= 0, got {position!r}"
        )
    return TrainState(**position)


@dataclass(frozen=True, slots=True)
class Restored:
    """Progress, state and random generators of a checkpoint. Raises UnsupportedError if a run
    cannot continue from them."""

    path: Path
    state: dict[str, Any]
    rng: dict[str, Tensor]
    kept: frozenset[str] = frozenset()  # later checkpoints that were skipped and may be whole
    at: TrainState = field(init=False)

    def __post_init__(self) -> None:
        at = _train_state(self.path, self.state)
        if folder_name(at.step) != self.path.name:
            raise NotDamaged(
                f"{self.path}: holds the checkpoint of step {at.step}: rename it to "
                f"{folder_name(at.step)}"
            )
        try:
            if "cpu" not in self.rng:
                raise ValueError("the CPU's is missing")
            for name, state in self.rng.items():
                device = torch.device(name)
                if device.type == "cpu" or (device.index or 0) < torch.cuda.device_count():
                    torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{self.path}: its random number generators cannot be restored: {error}"
            ) from error
        object.__setattr__(self, "at", at)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def latest_usable(
    paths: Sequence[Path], read: Callable[[Path], Restored], warn: Callable[[str], None]
) -> Restored | None:
    """Call `read` on the checkpoints, the latest first, and return its first result. Raises
    UnsupportedError if `read` refuses all; returns None without checkpoints."""
    problems: dict[str, UnsupportedError] = {}
    for path in reversed(paths):
        try:
            restored = read(path)
        except UnsupportedError as problem:
            problems[path.name] = problem
            continue
        kept = frozenset(name for name, why in problems.items() if isinstance(why, NotDamaged))
        for name, why in problems.items():
            fate = f"; it may be intact: this run renames it to {name}{_ASIDE} at its step"
            warn(f"{why}; resuming from {path} instead{fate if name in kept else ''}")
        return replace(restored, kept=kept)
    for why in problems.values():
        raise UnsupportedError(f"{why}; {_ADVICE}")
    return None


def open_checkpoint(
    path: Path, expected: Mapping[str, Any], world: DistributedContext
) -> SavedCheckpoint:
    """Read a checkpoint in any format, without its tensors' data, and check that its state has the
    `expected` values. Raises UnsupportedError on all ranks."""

    def read() -> SavedCheckpoint:
        name = manifest_path(path).name
        saved = read_list(path) if name == LIST else read_earlier(path, name, world.is_rank0)
        refuse_other(path / saved.list, saved.state, expected)
        return saved

    return together(world, read)


def manifest_path(path: Path) -> Path:
    """Return the path of the file that lists a checkpoint's tensors; each format names it
    differently. Raises UnsupportedError if the checkpoint's folder cannot be read."""
    with readable(path):
        names = os.listdir(path)
    return path / next((name for name in (LIST, TENSORS, MANIFEST) if name in names), LIST)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return a folder's checkpoints, the oldest first; folders with other names belong to the user.
    Raises UnsupportedError if the folder cannot be read."""
    return [path for path in named_checkpoints(folder) if not _is_in_the_way(path)]


def named_checkpoints(folder: Path) -> list[Path]:
    """Return all paths in a folder that have a checkpoint's name. Raises UnsupportedError."""
    with readable(folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            names = []
    return [folder / name for name in sorted(names) if _NAME.fullmatch(name)]


def _is_in_the_way(path: Path) -> bool:
    """Return whether a path with a checkpoint's name is something other than a folder. Returns
    False if the path cannot be examined: an attempt to read it then raises the error."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # a link without a target


def _make_way(path: Path, spared: set[str]) -> None:
    """Make way for a new checkpoint at `path`. If `spared` has its name, an older one there may be
    intact: rename that, and drop the name from `spared`. Raises WriteFailed."""
    remove_leftovers(path.parent, CHECKPOINT_LEFTOVER)
    if path.name in spared:
        _set_aside(path)
        spared.discard(path.name)


def _set_aside(path: Path) -> Path:
    """Rename a path to an unused name, and return that name. Raises WriteFailed."""
    names = (f"{path.name}{_ASIDE}{f'-{n}' if n > 1 else ''}" for n in count(1))
    free = (path.with_name(name) for name in names)
    place = next(place for place in free if not os.path.lexists(place))
    move(path, place)
    return place


def refuse_other(path: Path, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise if a run cannot resume from a checkpoint's state: NotDamaged if the state is another
    run's, UnsupportedError if a key of `expected` is missing."""
    for key, value in expected.items():
        if key not in state:
            raise UnsupportedError(f"{path}: damaged: its {key} is missing")
        if state.get(key) != value:
            if key == "data":
                raise NotDamaged(
                    f"{path}: belongs to another run: the text under data.path, the tokenizer or "
                    "the chat template has changed; restore the ones used in training, or give "
                    "another folder for a new run"
                )
            if key == FROZEN:
                raise NotDamaged(
                    f"{path}: was trained with frozen weights other than those now in model.path; "
                    "restore the original ones, or give another folder for a new run"
                )
            if key == INDEX_OF_KEYS:
                raise NotDamaged(
                    f"{path}: was trained with an index other than the one now in sparse.index; "
                    "give the original index, or another folder for a new run"
                )
            raise NotDamaged(
                f"{path}: belongs to another run: its {key} is {state.get(key)!r}, and this run "
                f"has {value!r}"
            )


def model_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors that a checkpoint saves: trained parameters (a tied one under its first
    name) and persistent buffers. Frozen parameters come from the model's source."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {**parameters, **buffers_of(model)}


def buffers_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Return this rank's persistent buffers (those in `state_dict()`), by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return {n: b for n, b in model.named_buffers() if n in kept and not b.is_meta}


def entries_of(
    model: Tensors, optimizer: Tensors, places: Mapping[str, ShardPlacement] | None = None
) -> Entries:
    """Return the tensors that this rank saves, each with its placement in the unsharded tensor.
    `places` are the placements of parameters; None: parameters are unsharded."""
    places = places or {}

    def place(tensor: Tensor, name: str) -> Any:
        # Counts of updates are scalars, and the same on all ranks.
        return places[name] if tensor.ndim and name in places else whole_placement(tensor.shape)

    entries = {f"model/{name}": (tensor, place(tensor, name)) for name, tensor in model.items()}
    for key, tensor in optimizer.items():
        name = key.split("/", 1)[1]
        entries[f"optimizer/{key}"] = tensor, place(tensor, name)
    return entries


class Saver:
    """Writer and reader of a run's checkpoints; `entries` are this rank's tensors. All ranks make
    the same calls in the same order.

    If ranks hold parts of the weights, `gather` returns the whole weights on rank 0, and None on
    other ranks. Without it every rank has all tensors whole, and rank 0 reads and writes for all.
    """

    def __init__(
        self,
        entries: Entries,
        world: DistributedContext,
        gather: Callable[[], Tensors | None] | None = None,
    ) -> None:
        self._entries, self._world, self._gather = entries, world, gather
        self._among = DistributedContext(world.device) if gather is None else world
        self._kept: set[str] = set()

    def resume(
        self, folder: Path, expected: Mapping[str, Any], warn: Callable[[str], None]
    ) -> Restored | None:
        """Restore the latest usable checkpoint under `folder` whose state has the `expected`
        values, such as the identity of the run; return None if there are no checkpoints.

        An unusable checkpoint is skipped with a warning if an older one is usable. Otherwise
        UnsupportedError gives the reason, and the live tensors may have any values.
        """
        if self._among is self._world:
            refuse_apart(folder, self._world)
        read = partial(self._read, expected=expected)

        def latest() -> Restored | None:
            paths = self._among.run_on_rank0(partial(list_checkpoints, folder))
            return latest_usable(paths, read, warn)

        return self._restored(self._together(latest, "reading a checkpoint"))

    def begin(self, path: Path, expected: Mapping[str, Any]) -> Restored:
        """Restore the checkpoint at `path`, of this or another run. Raises UnsupportedError."""
        read = partial(self._read, path, expected)
        restored = self._restored(self._together(read, "reading a checkpoint"))
        assert restored is not None
        return restored

    def save(self, folder: Path, rng: Tensors, state: Mapping[str, Any], step: int) -> None:
        """Write the checkpoint of `step`, whole or not at all. Call `prune` next. Raises
        WriteFailed."""
        path, own = folder / folder_name(step), {}
        for name in set(_generators(self._among).values()) & rng.keys():
            key = _own(self._among.number) + name.partition(":")[0]
            own[key] = rng[name], whole_placement(rng[name].shape)

        def write() -> None:
            self._among.run_on_rank0(lambda: _make_way(path, self._kept))
            save_entries(path, {**self._entries, **own}, state, self._among)

        self._together(write, "writing a checkpoint")

    def prune(self, folder: Path, step: int, keep: int, best: Best, saved: bool = True) -> None:
        """Delete checkpoints up to `step`, except the latest `keep`. If `saved` (this run has just
        written `step`), delete later ones too: it could not resume from them. Always keep that of
        step `best`, and any that `resume` skipped and that may be intact. Raises WriteFailed."""

        def remove() -> None:
            known = [p for p in list_checkpoints(folder) if p.name not in self._kept]
            later = [p for p in known if p.name > folder_name(step)]
            for path in (later if saved else []) + known[: len(known) - len(later)][:-keep]:
                if best is None or path.name != folder_name(best):
                    discard(path)

        self._world.run_on_rank0(remove)

    def weights(self) -> Tensors | None:
        """Return the whole weights on rank 0 if ranks hold only parts of them; otherwise None."""
        return None if self._gather is None else self._gather()

    def _together(self, work: Callable[[], T], what: str) -> T:
        """Run `work` on all ranks if each saves its own tensors, else on rank 0 for all."""
        if self._among is not self._world:
            return self._world.run_on_rank0(work, what)
        with activity(what):
            return work()

    def _restored(self, restored: Restored | None) -> Restored | None:
        self._kept = set() if restored is None else set(restored.kept)
        if restored is not None and self._among is not self._world:
            self._world.broadcast(tensor for tensor, _ in self._entries.values())
        return restored

    def _read(self, path: Path, expected: Mapping[str, Any]) -> Restored:
        """Copy a checkpoint into this rank's tensors and random generators. If fewer ranks wrote
        it, further ranks copy rank 0's generators. Raises UnsupportedError on all ranks."""
        world = self._among
        saved = open_checkpoint(path, expected, world)
        refuse_other_model(saved, self._entries, (RNG,), world)
        rng = together(world, lambda: _blank_generators(saved, world))
        copy_saved(saved, {key: (t, whole_placement(t.shape)) for key, t in rng.items()}, world)
        names = _generators(world)
        own = {names[key.rpartition("/")[2]]: tensor for key, tensor in rng.items()}
        restored = together(world, lambda: Restored(path, saved.state, own))
        with torch.no_grad():
            copy_saved(saved, self._entries, world)
        return restored


def _blank_generators(saved: SavedCheckpoint, world: DistributedContext) -> dict[str, Tensor]:
    start = _own(world.number) if f"{_own(world.number)}cpu" in saved.tensors else _own(0)
    found, where = {}, saved.path / saved.list
    for kind in _generators(world):
        there = saved.tensors.get(start + kind)
        if there is None and kind == "cpu":
            raise UnsupportedError(
                f"{where}: damaged: the random number generators of rank 0 are missing"
            )
        if there is not None:
            if there.dtype != torch.uint8 or prod(there.shape) > RNG_BYTES:
                form = type_words(there.dtype, there.shape)
                raise UnsupportedError(f"{where}: damaged: {start}{kind} is {form}")
            found[start + kind] = torch.empty(there.shape, dtype=torch.uint8)
    return found


def _own(number: int) -> str:
    return f"{RNG}{number:05d}/"


def _generators(world: DistributedContext) -> dict[str, str]:
    """Return the random generators to copy: name in a checkpoint to name in this process. `cuda` is
    the rank's own GPU, which one process saved as `cuda:N` before version 0.2."""
    if world.device.type == "cpu":
        return {"cpu": "cpu"}
    gpu = f"cuda:{world.device.index or 0}"
    return {"cpu": "cpu", gpu: gpu, "cuda": gpu}


def refuse_apart(folder: Path, world: DistributedContext) -> None:
    """Raise UnsupportedError on all ranks if one cannot see rank 0's files under `folder`."""

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
            f"folder: rank {rank} ({node}) does not see the files that rank 0 writes in {folder}: "
            "ranks that hold parts of the weights write one checkpoint together; give a folder on "
            "a disk that all nodes share, or set parallel.fsdp to false, without tensor and "
            "pipeline, so that rank 0 writes alone"
        )


# SOURCE has the SHA-256 of a checkpoint's manifest, which stands for all its files, the settings of
# its training, and the SHA-256 of each exported file that decides its weights. A folder without
# SOURCE, or with another one, is not the result of this run and is replaced.
CARD = "README.md"  # the model page on the hub


def source_of(checkpoint: Path, marks: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an exported folder records about its origin: run, step and model."""
    return {
        **marks,
        "checkpoint": checkpoint.name,
        "manifest_sha256": digest(manifest_path(checkpoint)),
    }


def is_exported(
    checkpoint: Path, folder: Path, marks: Mapping[str, Any], note: Callable[[str], None]
) -> bool:
    """Return whether `folder` already holds the complete export of this checkpoint. If one of its
    files has changed since, rename the folder, tell `note`, and return False."""
    recorded = read_json(folder / SOURCE, files=dict) or {}
    files = recorded.pop(FILES, {})  # earlier versions wrote none
    if recorded != source_of(checkpoint, marks):
        return False
    digests = _digests(folder) if files else {}
    changed = sorted(name for name in files if digests.get(name) != files[name])
    if changed:
        aside = _set_aside(folder)
        what = "has changed since it was exported" if changed[0] in digests else "is gone"
        note(
            f"warning: {folder / changed[0]} {what}; farspan renamed its folder to {aside.name} "
            "and exports the model again"
        )
    return not changed


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of an exported folder's weights, their index and configuration, by file.
    The tokenizer's files are left out: users may edit them."""
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
    save_index: Callable[[Path], None] | None = None,
) -> None:
    """Export the model's present weights to `folder`, which `from_pretrained` reads.

    `marks` record how it was trained; `weights` are the unsharded ones if the model is sharded,
    `card` is its README, and `save_index` writes its index of keys. Raises WriteFailed.
    """
    source = source_of(checkpoint, marks)
    unfinished = folder.with_name(f"{PARTIAL}{folder.name}")
    with writing(unfinished, SafetensorError), _without_bars():
        save_model(model, unfinished, weights)
        tokenizer.save(unfinished)
        source[FILES] = _digests(unfinished)
        write_bytes(unfinished / SOURCE, json.dumps(source).encode("utf-8"))
        if card is not None:
            write_bytes(unfinished / CARD, card.encode("utf-8"))
        if save_index is not None:
            save_index(unfinished / INDEX_FOLDER)
    _spare_what_is_theirs(folder, unfinished, note)
    publish(unfinished, folder)
    if "overrides" in marks:
        note(
            f"note: the adapters in {folder} need model.overrides {', '.join(marks['overrides'])}: "
            f"load the base model with these (see {SOURCE}), then the adapters"
        )
    if not reads_back(tokenizer, folder):
        note(
            f"warning: transformers loads the tokenizer in {folder} as another class for this "
            "model type; load it with PreTrainedTokenizerFast, or from the original model"
        )


def _spare_what_is_theirs(folder: Path, new: Path, note: Callable[[str], None]) -> None:
    """Rename an exported folder if it contains a user's own files, so that they are not deleted."""
    if os.path.lexists(folder) and not folder.is_dir():
        theirs = [folder.name]
    else:
        names = set(os.listdir(folder)) if folder.is_dir() else set()
        recorded = (read_json(folder / SOURCE, files=dict) or {}).get(FILES, {})
        ours = {*os.listdir(new), *recorded, CARD, INDEX_FOLDER} if SOURCE in names else set()
        theirs = sorted(names - ours)
    if theirs:
        aside = _set_aside(folder)
        note(
            f"warning: {folder} held {theirs[0]}, which farspan did not write: the folder has been "
            f"renamed to {aside.name}"
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers inside the block; they would break farspan's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# -- a sharded model, whole again -----------------------------------------------------------------


def gather_model(sharded_model: ShardedModel, model: Any) -> dict[str, Tensor] | None:
    """Return the whole `state_dict()` in main memory on rank 0, else None. All ranks call it."""
    weights: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        weights[name] = whole.to("cpu", copy=True)

    gather_weights(sharded_model, keep)
    weights |= {name: buffer.to("cpu", copy=True) for name, buffer in buffers_of(model).items()}
    if not first_of_stage(sharded_model):
        return None
    number = sharded_model.ranks.rank.number
    for stage in Rank(sharded_model.ranks.layout, 0).peers("pipeline")[1:]:
        if number == 0:
            weights |= _receive(stage)
        elif number == stage:
            _send({n: t for n, t in weights.items() if n not in _outer(sharded_model)}, 0)
    return _in_order(model, weights) if number == 0 else None


def gather_weights(sharded_model: ShardedModel, keep: Callable[[str, Tensor], None]) -> None:
    """Gather the whole weights of this rank's pipeline stage, one FSDP unit on the device at a
    time; all ranks call it. Only the stage's first rank calls `keep`, with each name and weight."""
    speaks = first_of_stage(sharded_model)
    for name, part in sharded_model.sharded.wholes():
        whole = part if sharded_model.tensor is None else sharded_model.tensor.whole(name, part)
        if speaks:
            keep(name, whole)


def first_of_stage(sharded_model: ShardedModel) -> bool:
    """Return whether this rank is the first in its pipeline stage."""
    return all(i == 0 for axis, i in sharded_model.ranks.rank.along.items() if axis != "pipeline")


def _in_order(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under all their names, in the model's order: a tied weight has several."""
    first = {id(p): name for name, p in model.named_parameters()}
    named = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    names = model.state_dict(keep_vars=True)
    # A quantised weight's scales are the base model's, of which an export of adapters has nothing.
    return {n: weights[named.get(n, n)] for n in names if ".weight." not in n}


def _outer(sharded_model: ShardedModel) -> set[str]:
    return set(sharded_model.sharded.whole(sharded_model.sharded.outer))


def _send(tensors: Mapping[str, Tensor], to: int) -> None:
    forms = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    messages.send(forms, to)
    for tensor in tensors.values():
        if tensor.numel():
            # Every backend can send bytes, whatever the dtype.
            dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=to)


def _receive(source: int) -> dict[str, Tensor]:
    tensors = {}
    for name, shape, dtype in messages.receive(source):
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), src=source)
        tensors[name] = tensor
    return tensors
