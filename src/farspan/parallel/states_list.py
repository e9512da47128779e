"""What the list of a checkpoint of ranks says, and whether its files hold it.

No sum is over the list itself, so that it is held against the files: boxes fill each tensor, lie
where their keys say, and have in their files the dtype and shape that is listed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from farspan.durable import digest
from farspan.parallel.states_files import expect_json, open_tensors
from farspan.parallel.states_plan import fill
from farspan.spec import Refused

FORMAT = 1
MOST_ELEMENTS = 2**56  # of a tensor: with 8 bytes each its size is a number of 64 bits
TENSORS = "tensors.json"
STATE = "state.json"

Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def read_list(path: Path) -> "Listed":
    """Of the checkpoint in a folder. Raises Refused where it is not there, or damaged."""
    if not (path / TENSORS).is_file():
        raise Refused(f"{path / TENSORS}: missing")
    listed = expect_json(path / TENSORS)
    if listed.get("format") != FORMAT:
        raise Refused(f"{path / TENSORS}: format {listed.get('format')!r}, expected {FORMAT}")
    with parsing(path):
        files = {name: _Sum.of(name, entry) for name, entry in listed["files"].items()}
        metadata = _metadata(listed["tensors"])
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        if not fill(saved.chunks, saved.size):
            raise Refused(
                f"{path / TENSORS}: damaged: the boxes of {name} do not make the whole of it"
            )
    boxes = _boxes_by_file(metadata)
    for name in sorted({STATE, *boxes} - files.keys()):
        raise Refused(f"{path / TENSORS}: damaged or changed: no size and sum of {name}")
    return Listed(path, metadata, files, boxes)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a list says. `boxes` are of each file, by key."""

    path: Path
    metadata: Metadata
    files: dict[str, "_Sum"]
    boxes: dict[str, Forms]

    def verify(self, name: str) -> None:
        """Looks at every byte of a file. Raises Refused."""
        _verify(self.path / name, self.files[name])
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
class _Sum:
    """Of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> "_Sum":
        """As it is listed. Raises ValueError, KeyError, TypeError."""
        found = cls(entry["bytes"], entry["sha256"])
        if Path(name).name != name or not isinstance(found.bytes, int):
            raise ValueError(f"{name!r} is no file of a checkpoint with its size")
        return found


def _verify(path: Path, entry: _Sum) -> None:
    if not path.is_file():
        raise Refused(f"{path}: missing")
    size = path.stat().st_size
    if size != entry.bytes:
        raise Refused(f"{path}: {size} bytes, expected {entry.bytes}: truncated or changed")
    if digest(path) != entry.sha256:
        raise Refused(f"{path}: its SHA-256 is not the one in {TENSORS}: damaged or changed")


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
            raise Refused(f"{path.parent / TENSORS}: damaged or changed: only {where} has {key}")
        for key, (dtype, shape) in boxes.items():
            part = file.get_slice(key)
            there = tuple(part.get_shape())
            # Without dimensions a tensor has no part that is empty.
            kind = (part[:0] if there else file.get_tensor(key)).dtype
            if (kind, there) != (dtype, shape):
                raise Refused(
                    f"{path.parent / TENSORS}: damaged or changed: {key} is {kind} {list(there)} "
                    f"in {path.name}, and {dtype} {list(shape)} by the list"
                )


def key_of(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def type_of(entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch: {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in shape) or prod(shape) >= MOST_ELEMENTS:
        raise ValueError(f"no shape of a tensor: {entry['shape']!r}")
    return dtype, shape


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path / TENSORS}: damaged or changed: {error}") from error
