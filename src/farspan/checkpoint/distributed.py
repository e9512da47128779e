"""Checkpoints that all ranks write and any number of ranks reads, in any layout, by
torch.distributed.checkpoint; read without running anything in them.

    step-00000120/rank-00000.safetensors   boxes of tensors, named `tensor@offset,offset`
                  rank-00001.safetensors
                  state.json               what else is to be known
                  tensors.json             each tensor's dtype and shape; where its boxes are; size
                                           and SHA-256 of each file

The metadata of torch's own writers is a pickle, and its safetensors writer keeps neither two boxes
of a tensor in a file nor sums; so the storage is this one. The folder is written under another name
and gets its own when every rank's files are on the disk: a rank that dies before leaves what was
there.

The tensors of a run are named

    model/<parameter or buffer>      parameters, and buffers that belong to the weights
    optimizer/<key>/<parameter>      master weights, moments and counts of updates
    rng/<rank>/cpu, rng/<rank>/cuda  each rank's generators, as bytes
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_all
from torch.distributed.checkpoint.state_dict_saver import save as save_all
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from farspan.checkpoint.format import (
    FORMAT,
    STATE,
    TENSORS,
    BoxLoadPlanner,
    BoxSavePlanner,
    Entries,
    Forms,
    NotDamaged,
    expect_json,
    form_words,
    key_of,
    open_tensors,
    parsing,
    read_part,
    read_tensor_list,
    readable,
    type_of,
    write_tensors,
)
from farspan.distributed import messages
from farspan.distributed.fsdp import ShardPlacement, whole_placement
from farspan.distributed.run_context import DistributedContext
from farspan.durable import PARTIAL, WriteFailed, digest, publish, write_bytes
from farspan.engine.parallelize import ShardedModel
from farspan.program.layout import Rank
from farspan.spec import UnsupportedError

T = TypeVar("T")

Group = dist.ProcessGroup | None  # None: this process alone

LISTED = TENSORS  # a folder that has this file is such a checkpoint
RNG = "rng/"
RNG_BYTES = 2**20  # more than any generator of torch has: 5056
FROZEN = "frozen"  # of a checkpoint state: digest of the weights that it leaves out
INDEX_OF_KEYS = "index"  # and of the index by which sparse attention compared pages

Tensors = Mapping[str, Tensor]


def save_entries(
    path: Path, entries: Entries, state: Mapping[str, Any], group: Group = None
) -> None:
    """Writes a checkpoint of every rank's `entries` and the first rank's `state` (JSON). `path` is
    of a file system that all ranks of the group share; what has that name is replaced.

    Raises WriteFailed on every rank when it fails on one, which is named; `path` is then as it
    was. A rank that died is an error of torch's, on the others, within the group's timeout.
    """
    writer = _FolderWriter(path, state)
    try:
        with _alone(group):
            save_all(
                {},
                storage_writer=writer,
                planner=BoxSavePlanner(entries),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        writer.discard()
        raise WriteFailed(_causes(error)) from error


def load_entries(
    path: Path, entries: Entries, group: Group = None, unread: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Copies a checkpoint into every rank's `entries`; what it says besides. Saved names that start
    with one of `unread` need not be in anybody's entries.

    Raises UnsupportedError on every rank when the checkpoint is damaged, or of another model.
    Nothing is copied before every byte was looked at.
    """
    reader = together(group, lambda: _FolderReader(path, group))
    try:
        with _alone(group):
            load_all(
                {},
                storage_reader=reader,
                planner=BoxLoadPlanner(entries, unread),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        whole = all(isinstance(cause, NotDamaged) for cause in causes)
        raise (NotDamaged if whole else UnsupportedError)(f"{path}: {_causes(error)}") from error
    return read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint says besides its tensors. Raises UnsupportedError."""
    return expect_json(path / STATE)


def read_shapes(path: Path) -> Forms:
    """Dtype and shape of every tensor of a checkpoint. Raises UnsupportedError."""
    listed = expect_json(path / TENSORS)
    with parsing(path):
        return {name: type_of(entry) for name, entry in listed["tensors"].items()}


# -- writing: what torch.distributed.checkpoint asks of a storage ---------------------------------


@dataclass(frozen=True, slots=True)
class _WrittenBox:
    """A file of one rank, and what each of its boxes is called in it."""

    file: str
    key: str
    bytes: int
    sha256: str


class _FolderWriter(StorageWriter):
    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        self._path, self._state = path, state
        self._partial = path.with_name(PARTIAL + path.name)

    def reset(self, checkpoint_id: Any = None) -> None:
        """It is of one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if is_coordinator:  # plans go round before anybody writes
            self.discard()
            self._partial.mkdir(parents=True)

    def discard(self) -> None:
        """The space is wanted: the disk may be full. No rank writes any more."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        path = self._partial / f"rank-{plan.storage_data:05d}.safetensors"
        keys = {item.index: key_of(item.index) for item in plan.items}
        tensors = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[keys[item.index]] = data
        write_tensors(path, tensors)
        size, sha256 = path.stat().st_size, digest(path)
        return [
            WriteResult(index, tensors[key].nbytes, _WrittenBox(path.name, key, size, sha256))
            for index, key in keys.items()
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank, behind all writes of all ranks."""
        written = {result.index: result.storage_data for rank in results for result in rank}
        tensors = {
            name: {
                "dtype": str(saved.properties.dtype).removeprefix("torch."),
                "shape": list(saved.size),
                "boxes": [_entry(name, chunk, written) for chunk in saved.chunks],
            }
            for name, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        files = {w.file: {"bytes": w.bytes, "sha256": w.sha256} for w in written.values()}
        _write_json(self._partial / STATE, {"format": FORMAT, **self._state})
        files[STATE] = {
            "bytes": (self._partial / STATE).stat().st_size,
            "sha256": digest(self._partial / STATE),
        }
        listed = {"format": FORMAT, "files": files, "tensors": tensors}
        _write_json(self._partial / TENSORS, listed)
        publish(self._partial, self._path)


def _entry(
    name: str, chunk: ChunkStorageMetadata, written: Mapping[MetadataIndex, _WrittenBox]
) -> dict[str, Any]:
    where = written[MetadataIndex(name, chunk.offsets)]
    return {
        "offset": list(chunk.offsets),
        "shape": list(chunk.sizes),
        "file": where.file,
        "key": where.key,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_bytes(path, json.dumps(value, indent=1, allow_nan=False).encode("utf-8"))


# -- reading ------------------------------------------------------------------------------------


class _FolderReader(StorageReader):
    """Every byte is looked at by one rank, before any is copied, and before torch asks: of an
    error in its reading of metadata it prints a traceback of its own."""

    def __init__(self, path: Path, group: Group) -> None:
        """Raises UnsupportedError where the list is damaged, or a file that this rank looks at."""
        self._path = path
        listed = read_tensor_list(path)
        self._metadata = listed.metadata
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        for name in sorted(listed.files)[rank::ranks]:
            listed.verify(name)

    def reset(self, checkpoint_id: Any = None) -> None:
        """It is of one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, *_: Any, **__: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index][0], []).append(item)
        for name, items in by_file.items():
            with open_tensors(self._path / name) as file:
                for item in items:
                    _, key = self._places[item.storage_index]
                    starts = zip(item.storage_offsets, item.lengths, strict=True)
                    part = tuple(slice(start, start + length) for start, length in starts)
                    planner.resolve_tensor(item).copy_(read_part(file, key, part))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def together(group: Group, work: Callable[[], T]) -> T:
    """What `work` returns. Raises UnsupportedError on all ranks of the group where it does on
    one."""
    found, said = None, None
    try:
        found = work()
    except UnsupportedError as error:
        said = error
    everyone = [said] if group is None else messages.gather(said, group)
    for refusal in filter(None, everyone):
        raise refusal
    assert found is not None
    return found


@contextmanager
def _alone(group: Group) -> Iterator[None]:
    """One process was asked for: that there are no others is no news."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())


# -- the tensors of a run -------------------------------------------------------------------------


def is_of_ranks(path: Path) -> bool:
    """Whether a checkpoint is one of these, or was before its list was lost. Raises
    UnsupportedError where its folder cannot be read."""
    with readable(path):
        names = os.listdir(path)
    return LISTED in names or any(fnmatch(name, "rank-*.safetensors") for name in names)


def entries_of(
    model: Tensors, optimizer: Tensors, places: Mapping[str, ShardPlacement] | None = None
) -> Entries:
    """The live tensors of a rank, and the `places` of their parameters in the whole; without any
    they are whole."""
    places = places or {}

    def place(tensor: Tensor, name: str) -> Any:
        # Counts of updates are scalars, and the same on all ranks.
        return places[name] if tensor.ndim and name in places else whole_placement(tensor.shape)

    found = {f"model/{name}": (tensor, place(tensor, name)) for name, tensor in model.items()}
    for key, tensor in optimizer.items():
        name = key.split("/", 1)[1]
        found[f"optimizer/{key}"] = tensor, place(tensor, name)
    return found


def save_sharded(
    path: Path,
    entries: Entries,
    rng: Tensors,
    state: Mapping[str, Any],
    world: DistributedContext,
) -> None:
    """Writes a checkpoint from all ranks. Raises WriteFailed on all of them."""
    number, names = _number(world), _generators(world.device)
    own = {
        _own(number) + kind: (rng[name], whole_placement(rng[name].shape))
        for kind, name in names.items()
        if name in rng
    }
    save_entries(path, {**entries, **own}, state, group_of(world))


def load_sharded(
    path: Path, entries: Entries, expected: Mapping[str, Any], world: DistributedContext
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copies a checkpoint of ranks into `entries`; its state, and this rank's generators: the first
    rank's where there was no such rank. Raises UnsupportedError, on all ranks, before anything is
    copied."""

    def look() -> Forms:
        refuse_other(path / STATE, read_state(path), expected)
        shapes = read_shapes(path)
        if f"{_own(0)}cpu" not in shapes:
            raise UnsupportedError(f"{path / LISTED}: damaged: no random numbers of rank 0")
        for name, (dtype, shape) in shapes.items():
            if name.startswith(RNG) and (dtype != torch.uint8 or prod(shape) > RNG_BYTES):
                raise UnsupportedError(
                    f"{path / LISTED}: damaged: {name} is {form_words(dtype, shape)}"
                )
        return shapes

    forms = world.run_on_rank0(look)
    start = _own(_number(world))
    if f"{start}cpu" not in forms:
        start = _own(0)
    kinds = [kind for kind in _generators(world.device) if start + kind in forms]
    read = {kind: torch.empty(forms[start + kind][1], dtype=torch.uint8) for kind in kinds}
    generators = {start + kind: (t, whole_placement(t.shape)) for kind, t in read.items()}
    state = load_entries(path, {**entries, **generators}, group_of(world), unread=(RNG,))
    return state, {_generators(world.device)[kind]: t for kind, t in read.items()}


def copy_rows(path: Path, live: Entries, prefix: str) -> None:
    """Copies from one safetensors file of whole tensors, as one process writes it, what of them is
    this rank's; `live` names begin with `prefix`."""
    with open_tensors(path) as file, torch.no_grad():
        for name, (tensor, place) in live.items():
            if not name.startswith(prefix):
                continue
            for box in place.boxes:
                part = tuple(
                    slice(start, start + size)
                    for start, size in zip(box.there, box.sizes, strict=True)
                )
                key = name.removeprefix(prefix)
                box.of(tensor.detach()).copy_(read_part(file, key, part))


def refuse_other(path: Path, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a checkpoint's state lacks what is expected, and NotDamaged
    where it is of another run."""
    for key, value in expected.items():
        if key not in state:
            raise UnsupportedError(f"{path}: damaged: its {key} is missing")
        if state.get(key) != value:
            if key == "data":
                raise NotDamaged(
                    f"{path}: belongs to another run: the text under data.path, the tokenizer or "
                    "the chat template has changed; restore what it was trained with, or give "
                    "another folder for a new run"
                )
            if key == FROZEN:
                raise NotDamaged(
                    f"{path}: it was trained with other frozen weights than model.path has now; "
                    "restore them, or another folder for a new run"
                )
            if key == INDEX_OF_KEYS:
                raise NotDamaged(
                    f"{path}: it was trained with another index than sparse.index has now; give "
                    "that one, or another folder for a new run"
                )
            raise NotDamaged(
                f"{path}: belongs to another run: its {key} is {state.get(key)!r}, "
                f"that of this run is {value!r}"
            )


def _number(world: DistributedContext) -> int:
    return 0 if world.launch is None else world.launch.rank


def group_of(world: DistributedContext) -> dist.ProcessGroup | None:
    return None if world.launch is None else dist.group.WORLD


def _own(number: int) -> str:
    return f"{RNG}{number:05d}/"


def _generators(device: torch.device) -> dict[str, str]:
    """How a rank's generators are called in a checkpoint, and in its process."""
    own = {"cpu": "cpu"}
    return own if device.type == "cpu" else own | {"cuda": f"cuda:{device.index or 0}"}


# -- a sharded model, whole again -----------------------------------------------------------------


def gather_model(sharded_model: ShardedModel, model: Any) -> dict[str, Tensor] | None:
    """What `model.state_dict()` would be of the whole model, in main memory of rank 0; None on
    others. All ranks call it."""
    found: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        found[name] = whole.to("cpu", copy=True)

    gather_weights(sharded_model, keep)
    names = model.state_dict(keep_vars=True).keys()
    found |= {
        name: buffer.to("cpu", copy=True)
        for name, buffer in model.named_buffers()
        if name in names and not buffer.is_meta
    }
    if not first_of_stage(sharded_model):
        return None
    number = sharded_model.ranks.rank.number
    for stage in Rank(sharded_model.ranks.layout, 0).peers("pipeline")[1:]:
        if number == 0:
            found |= _receive(stage)
        elif number == stage:
            _send({n: t for n, t in found.items() if n not in _outer(sharded_model)}, 0)
    return _in_order(model, found) if number == 0 else None


def gather_weights(sharded_model: ShardedModel, keep: Callable[[str, Tensor], None]) -> None:
    """Every weight of this rank's pipeline stage whole, one unit on the device at a time; all ranks
    call it. `keep` is called on the stage's first rank alone."""
    speaks = first_of_stage(sharded_model)
    for name, own in sharded_model.sharded.wholes():
        whole = own if sharded_model.tensor is None else sharded_model.tensor.whole(name, own)
        if speaks:
            keep(name, whole)


def first_of_stage(sharded_model: ShardedModel) -> bool:
    """Whether this rank is the one that speaks for its pipeline stage."""
    return all(i == 0 for axis, i in sharded_model.ranks.rank.along.items() if axis != "pipeline")


def _in_order(model: Any, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under every name: tied weights have several, and are one tensor."""
    first = {id(p): name for name, p in model.named_parameters()}
    named = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    return {name: found[named.get(name, name)] for name in model.state_dict(keep_vars=True)}


def _outer(sharded_model: ShardedModel) -> set[str]:
    return set(sharded_model.sharded.whole(sharded_model.sharded.outer))


def _send(tensors: Mapping[str, Tensor], to: int) -> None:
    forms = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    dist.send_object_list([forms], dst=to)
    for tensor in tensors.values():
        if tensor.numel():
            # As bytes: every backend knows them, whatever the dtype.
            dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=to)


def _receive(source: int) -> dict[str, Tensor]:
    said: list[Any] = [None]
    dist.recv_object_list(said, src=source)
    found = {}
    for name, shape, dtype in said[0]:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), src=source)
        found[name] = tensor
    return found
