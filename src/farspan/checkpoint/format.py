"""The files of a sharded checkpoint: its list of tensors, verified, and the planners that read and
write boxes of tensors.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from farspan.distributed.fsdp import ShardPlacement, ShardRegion
from farspan.durable import create, digest, sync, write_failure
from farspan.spec import UnsupportedError


class NotDamaged(UnsupportedError):
    """Why a checkpoint cannot be used here and now, although it may well be whole."""


def expect_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UnsupportedError when there is no such thing."""
    with readable(path):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # the latter by what is nested too deeply
        raise UnsupportedError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedError(f"{path}: expected a JSON object")
    return value


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises UnsupportedError, naming the file, where it, or what is under it, is missing, and
    NotDamaged where the system does not let it be read, or it is a pipe, say, which has no end."""
    try:
        mode = path.stat().st_mode if os.path.lexists(path) else stat.S_IFREG
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise NotDamaged(f"{path}: cannot be read: neither a file nor a folder")
        yield
    except FileNotFoundError as error:
        raise UnsupportedError(f"{error.filename or path}: missing") from error
    except OSError as error:
        raise NotDamaged(
            f"{error.filename or path}: cannot be read: {error.strerror or error}"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync one new safetensors file. Raises WriteFailed."""
    try:
        create(path).close()
        mode = stat.S_IMODE(path.stat().st_mode)  # of the umask, as any file made here
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(mode)  # safetensors 0.8 makes every file 0600
        sync(path)
    except (SafetensorError, OSError) as error:
        raise write_failure(path, str(error)) from error


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises UnsupportedError where it is none, or cannot be read."""
    try:
        with readable(path), safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UnsupportedError(f"{path}: not a safetensors file: {error}") from error


# A rank's tensor, live, and where it lies in the whole.
Entries = Mapping[str, tuple[Tensor, ShardPlacement]]


class BoxSavePlanner(DefaultSavePlanner):
    """Each box is written once, by one of the ranks that have it; together they fill every tensor
    and do not overlap."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._entries = entries
        self._boxes = boxes_of(entries)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(index) for index in self._boxes])

    def _item(self, index: MetadataIndex) -> WriteItem:
        tensor, place = self._entries[index.fqn]
        properties = TensorProperties(dtype=tensor.dtype)
        data = TensorWriteData(_chunk(self._boxes[index]), properties, torch.Size(place.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # Torch looks for overlaps, but not always at what is filled.
        written = {item.index: item.tensor_data for plan in all_plans for item in plan.items}
        volumes: dict[str, int] = {}
        for index, data in written.items():
            assert data is not None
            volumes.setdefault(index.fqn, data.size.numel())
            volumes[index.fqn] -= data.chunk.sizes.numel()
        for name, missing in volumes.items():
            if missing:
                raise ValueError(f"the ranks' parts of {name} do not cover it")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor, _ = self._entries[write_item.index.fqn]
        return self._boxes[write_item.index].of(tensor.detach())


class BoxLoadPlanner(LoadPlanner):
    """Reads, into live tensors, the parts of saved boxes that overlap theirs."""

    def __init__(self, entries: Entries, unread: tuple[str, ...]) -> None:
        """Saved names that start with one of `unread` need not be anybody's."""
        self._entries = entries
        self._unread = unread
        self._boxes = boxes_of(entries)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, (tensor, place) in self._entries.items():
            self._refuse(name, tensor, place)
        for index, box in self._boxes.items():
            saved = self._saved[index.fqn]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(index.fqn, saved, [_chunk(box)])
        return LoadPlan(items, planner_data=sorted(self._entries))

    def _refuse(self, name: str, tensor: Tensor, place: ShardPlacement) -> None:
        saved = self._saved.get(name)
        if 0 in place.shape:
            return  # nothing of it was saved
        if not isinstance(saved, TensorStorageMetadata):
            raise NotDamaged(f"of another model: only the model has {name}")
        there = saved.properties.dtype, tuple(saved.size)
        if there != (tensor.dtype, place.shape):
            raise NotDamaged(
                f"of another model: {name} is {form_words(*there)}, here "
                f"{form_words(tensor.dtype, place.shape)}"
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        wanted = {name for plan in global_plan for name in plan.planner_data}
        for name in sorted(self._saved.keys() - wanted):
            if not name.startswith(self._unread):
                raise NotDamaged(f"of another model: only the checkpoint has {name}")
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, *_: Any) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        tensor = self._boxes[index].of(self._entries[index.fqn][0].detach())
        zeros = (0,) * tensor.ndim
        return ShardRegion(tuple(read_item.dest_offsets), zeros, tuple(read_item.lengths)).of(
            tensor
        )

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read into place."""


def fill(boxes: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether boxes lie within a tensor, apart from each other, and fill it."""
    for index, box in enumerate(boxes):
        ends = [start + length for start, length in zip(box.offsets, box.sizes, strict=True)]
        inside = all(a >= 0 and b <= n for a, b, n in zip(box.offsets, ends, size, strict=True))
        if not inside or any(_overlap(box, other) for other in boxes[:index]):
            return False
    return sum(box.sizes.numel() for box in boxes) == size.numel()


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)


def boxes_of(entries: Entries) -> dict[MetadataIndex, ShardRegion]:
    return {
        MetadataIndex(name, box.there): box
        for name, (_, place) in entries.items()
        for box in place.boxes
    }


def _chunk(box: ShardRegion) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.there), torch.Size(box.sizes))


def form_words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Such as `float32[8, 16]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


FORMAT = 1
MOST_ELEMENTS = 2**56  # of a tensor: with 8 bytes each its size is a number of 64 bits
TENSORS = "tensors.json"
STATE = "state.json"

Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def read_tensor_list(path: Path) -> "TensorList":
    """Of the checkpoint in a folder. Raises UnsupportedError where it is not there, or damaged."""
    listed = expect_json(path / TENSORS)
    if listed.get("format") != FORMAT:
        raise NotDamaged(f"{path / TENSORS}: format {listed.get('format')!r}, expected {FORMAT}")
    with parsing(path):
        files = {name: FileSum.of(name, entry) for name, entry in listed["files"].items()}
        metadata = _metadata(listed["tensors"])
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        if not fill(saved.chunks, saved.size):
            raise UnsupportedError(
                f"{path / TENSORS}: damaged: the boxes of {name} do not cover it"
            )
    boxes = _boxes_by_file(metadata)
    for name in sorted({STATE, *boxes} - files.keys()):
        raise UnsupportedError(f"{path / TENSORS}: damaged or changed: no size and sum of {name}")
    return TensorList(path, metadata, files, boxes)


@dataclass(frozen=True, slots=True)
class TensorList:
    """What a list says. `boxes` are of each file, by key."""

    path: Path
    metadata: Metadata
    files: dict[str, "FileSum"]
    boxes: dict[str, Forms]

    def verify(self, name: str) -> None:
        """Looks at every byte of a file. Raises UnsupportedError."""
        self.files[name].verify(self.path / name, TENSORS)
        if name in self.boxes:
            _verify_boxes(self.path / name, self.boxes[name])


def _metadata(listed: Mapping[str, Any]) -> Metadata:
    """What a list of tensors says, and where each box is. Its key in its file says where it lies,
    too: a list that was changed is refused."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, tuple[str, str]] = {}
    for name, entry in listed.items():
        dtype, shape = type_of(entry)
        chunks = []
        for box in entry["boxes"]:
            offset, size = torch.Size(box["offset"]), torch.Size(box["shape"])
            index = MetadataIndex(name, offset)
            if box["key"] != key_of(index) or not len(offset) == len(size) == len(shape):
                raise ValueError(f"{box['key']!r} is not where it says")
            if min(size, default=0) < 0 or not isinstance(box["file"], str):
                raise ValueError(f"{box['key']!r} is no box of a file")
            chunks.append(ChunkStorageMetadata(offset, size))
            places[index] = box["file"], box["key"]
        properties = TensorProperties(dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return Metadata(tensors, storage_data=places)


@dataclass(frozen=True, slots=True)
class FileSum:
    """Of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> "FileSum":
        """As it is listed. Raises ValueError, KeyError, TypeError."""
        found = cls(entry["bytes"], entry["sha256"])
        if Path(name).name != name or not isinstance(found.bytes, int):
            raise ValueError(f"{name!r} is no file of a checkpoint with its size")
        return found

    def verify(self, path: Path, listed: str) -> None:
        """Looks at every byte of a file, whose sum is in the file `listed`. Raises
        UnsupportedError."""
        with readable(path):
            size = path.stat().st_size
            if size != self.bytes:
                raise UnsupportedError(
                    f"{path}: {size} bytes, expected {self.bytes}: truncated or changed"
                )
            found = digest(path)
        if found != self.sha256:
            raise UnsupportedError(
                f"{path}: its SHA-256 is not the one in {listed}: damaged or changed"
            )


def _boxes_by_file(metadata: Metadata) -> dict[str, Forms]:
    """What each file is to hold, by key."""
    found: dict[str, Forms] = {}
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        for chunk in saved.chunks:
            file, key = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            found.setdefault(file, {})[key] = saved.properties.dtype, tuple(chunk.sizes)
    return found


def _verify_boxes(path: Path, boxes: Forms) -> None:
    """A file holds the boxes that are listed, and they have the sizes that are listed: the list has
    no sum of its own."""
    with open_tensors(path) as file:
        keys = set(file.keys())
        for key in sorted(keys ^ boxes.keys()):
            where = path.name if key in keys else TENSORS
            raise UnsupportedError(
                f"{path.parent / TENSORS}: damaged or changed: only {where} has {key}"
            )
        for key, (dtype, shape) in boxes.items():
            part = file.get_slice(key)
            there = tuple(part.get_shape())
            # Without dimensions a tensor has no part that is empty.
            kind = (part[:0] if there else file.get_tensor(key)).dtype
            if (kind, there) != (dtype, shape):
                raise UnsupportedError(
                    f"{path.parent / TENSORS}: damaged or changed: {key} is {kind} {list(there)} "
                    f"in {path.name}, and {dtype} {list(shape)} by the list"
                )
            if key.startswith("model/"):
                refuse_nan(path, key, file.get_tensor(key))


def refuse_nan(path: Path, name: str, weight: Tensor) -> None:
    """Raises UnsupportedError where a run could not go on from this weight."""
    if weight.isnan().any():
        raise UnsupportedError(f"{path}: of no use: {name} has values that are not a number")


def read_part(file: Any, key: str, part: tuple[slice, ...]) -> Tensor:
    """A box of a tensor in an open safetensors file."""
    # A slice of no dimensions cannot be asked for.
    read: Tensor = file.get_slice(key)[part] if part else file.get_tensor(key)
    return read


def key_of(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def type_of(entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch: {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in shape) or prod(shape) >= MOST_ELEMENTS:
        raise ValueError(f"no shape of a tensor: {entry['shape']!r}")
    return dtype, shape


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{path / TENSORS}: damaged or changed: {error}") from error
