"""Reader of the two checkpoint formats from before version 0.2; version 0.3 will drop it.

Saved by a single process; manifest.json lists size and SHA-256 of the other files:

    step-00000120/model.safetensors, optimizer.safetensors, rng.safetensors, state.json,
                  manifest.json

Saved by several ranks; tensors.json lists each tensor's boxes, and size and SHA-256 of the files:

    step-00000120/rank-00000.safetensors, rank-00001.safetensors, ..., state.json, tensors.json

The first rank hashes the files before anything is copied.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farspan.checkpoint.format import (
    DTYPES,
    SavedBox,
    SavedCheckpoint,
    SavedTensor,
    is_name,
    refuse_gaps,
    refuse_short,
    type_of,
)
from farspan.durable import NotDamaged, digest, expect_json, parsing, readable
from farspan.spec import UnsupportedError

MANIFEST, TENSORS, _STATE = "manifest.json", "tensors.json", "state.json"
_PREFIXES = {"model": "model/", "optimizer": "optimizer/", "rng": "rng/00000/"}


def read_earlier(path: Path, name: str, verify: bool) -> SavedCheckpoint:
    """Read the list of tensors of a checkpoint in one of the two earlier formats. Raises
    UnsupportedError if the checkpoint is damaged; without `verify`, its files are not hashed."""
    where = path / name
    listed = expect_json(where)
    if listed.get("format") != 1:
        raise NotDamaged(f"{where}: format {listed.get('format')!r}, expected 1")
    with parsing(where):
        files = {file: (of["bytes"], of["sha256"]) for file, of in listed["files"].items()}
        named = set(files) if name == MANIFEST else _files_of(listed["tensors"])
        if not {_STATE} | named <= files.keys() or not all(map(is_name, files)):
            raise ValueError("a file has no size or no SHA-256")
    for file, (size, sha256) in files.items():
        with readable(path / file):
            right = (path / file).stat().st_size == size
            if not right or (verify and digest(path / file) != sha256):
                raise UnsupportedError(
                    f"{path / file}: damaged: its size or SHA-256 differs from {name}"
                )
    with parsing(where):
        boxes = {file: _tensors_in(path / file) for file in files if file != _STATE}
        if name == MANIFEST:
            tensors = {
                _PREFIXES[file.removesuffix(".safetensors")] + key: tensor
                for file, found in boxes.items()
                for key, tensor in found.items()
            }
        else:
            tensors = {key: _tensor(key, of, boxes) for key, of in listed["tensors"].items()}
    found = SavedCheckpoint(path, name, expect_json(path / _STATE), tensors)
    refuse_short(found)
    return found


def _files_of(listed: Mapping[str, Any]) -> set[str]:
    return {box["file"] for entry in listed.values() for box in entry["boxes"]}


def _tensors_in(path: Path) -> dict[str, SavedTensor]:
    """Return the tensors in a safetensors file by name, each as one box that covers it."""
    with readable(path), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 2**27)))
    found = {}
    for key, entry in header.items():
        if key != "__metadata__":
            shape, start = tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
            box = SavedBox((0,) * len(shape), shape, path.name, start, None)
            boxes = () if 0 in shape else (box,)
            if type(start) is not int or start < 8 + size:
                raise ValueError(
                    f"expected byte offsets in {path.name}, got {entry['data_offsets']!r}"
                )
            refuse_gaps(shape, boxes)
            found[key] = SavedTensor(DTYPES[entry["dtype"]], shape, boxes)
    return found


def _tensor(
    name: str, entry: Mapping[str, Any], files: Mapping[str, Mapping[str, SavedTensor]]
) -> SavedTensor:
    dtype, shape = type_of(entry)
    boxes = []
    for box in entry["boxes"]:
        there, offset = files[box["file"]][box["key"]], tuple(box["offset"])
        at = f"{name}@{','.join(map(str, offset))}"
        if box["key"] != at or (there.dtype, there.shape) != (dtype, tuple(box["shape"])):
            raise ValueError(f"{box['key']!r} differs from its file in dtype, shape or offset")
        boxes += [SavedBox(offset, own.shape, own.file, own.start, None) for own in there.boxes]
    refuse_gaps(shape, tuple(boxes))
    return SavedTensor(dtype, shape, tuple(boxes))
