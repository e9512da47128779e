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
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_all
from torch.distributed.checkpoint.state_dict_saver import save as save_all
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from farspan.durable import (
    PARTIAL,
    WriteFailed,
    digest,
    publish,
    write_bytes,
    write_tensors,
)
from farspan.parallel.states_files import expect_json, open_tensors
from farspan.parallel.states_list import (
    FORMAT,
    STATE,
    TENSORS,
    Forms,
    key_of,
    parsing,
    read_list,
    type_of,
)
from farspan.parallel.states_plan import Entries, Loading, Saving
from farspan.spec import Refused

T = TypeVar("T")

Group = dist.ProcessGroup | None  # None: this process alone


def save(path: Path, entries: Entries, state: Mapping[str, Any], group: Group = None) -> None:
    """Writes a checkpoint of every rank's `entries` and the first rank's `state` (JSON). `path` is
    of a file system that all ranks of the group share; what has that name is replaced.

    Raises WriteFailed on every rank when it fails on one, which is named; `path` is then as it
    was. A rank that died is an error of torch's, on the others, within the group's timeout.
    """
    writer = _Writer(path, state)
    try:
        with _alone(group):
            save_all(
                {},
                storage_writer=writer,
                planner=Saving(entries),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        writer.discard()
        raise WriteFailed(_causes(error)) from error


def load(
    path: Path, entries: Entries, group: Group = None, unread: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Copies a checkpoint into every rank's `entries`; what it says besides. Saved names that start
    with one of `unread` need not be in anybody's entries.

    Raises Refused on every rank when the checkpoint is damaged, or of another model. Nothing is
    copied before every byte was looked at.
    """
    reader = _together(group, lambda: _Reader(path, group))
    try:
        with _alone(group):
            load_all(
                {},
                storage_reader=reader,
                planner=Loading(entries, unread),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise Refused(f"{path}: {_causes(error)}") from error
    return read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint says besides its tensors. Raises Refused."""
    return expect_json(path / STATE)


def read_shapes(path: Path) -> Forms:
    """Dtype and shape of every tensor of a checkpoint. Raises Refused."""
    listed = expect_json(path / TENSORS)
    with parsing(path):
        return {name: type_of(entry) for name, entry in listed["tensors"].items()}


# -- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Written:
    """A file of one rank, and what each of its boxes is called in it."""

    file: str
    key: str
    bytes: int
    sha256: str


class _Writer(StorageWriter):
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
            WriteResult(index, tensors[key].nbytes, _Written(path.name, key, size, sha256))
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
    name: str, chunk: ChunkStorageMetadata, written: Mapping[MetadataIndex, _Written]
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


class _Reader(StorageReader):
    """Every byte is looked at by one rank, before any is copied, and before torch asks: of an
    error in its reading of metadata it prints a traceback of its own."""

    def __init__(self, path: Path, group: Group) -> None:
        """Raises Refused where the list is damaged, or a file that this rank looks at."""
        self._path = path
        listed = read_list(path)
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
                    # A slice of no dimensions cannot be asked for.
                    read = file.get_slice(key)[part] if part else file.get_tensor(key)
                    planner.resolve_tensor(item).copy_(read)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _together(group: Group, work: Callable[[], T]) -> T:
    """What `work` returns. Raises Refused on all ranks of the group where it does on one."""
    found, said = None, None
    try:
        found = work()
    except Refused as error:
        said = str(error)
    everyone: list[str | None] = [said]
    if group is not None:
        everyone *= group.size()
        dist.all_gather_object(everyone, said, group)
    for words in filter(None, everyone):
        raise Refused(words)
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
