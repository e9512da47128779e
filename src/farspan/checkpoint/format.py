"""The files of a checkpoint, which any number of ranks writes and any other number reads.

    step-00000120/rank-00000.safetensors   boxes of tensors, named `tensor@offset,offset`
                  rank-00001.safetensors
                  checkpoint.json          the training state; each tensor's dtype, shape and
                                           boxes; each box's file, byte offset and XXH3

A box is a range of indices along each axis. Boxes are of at most 64 MiB if rows allow, so that a
rank of another layout reads little more than its part, and each is hashed in the same pass that
writes or reads it. The digests find damage; they are no protection against tampering, but nothing
read is ever executed. The folder is written under another name and renamed when every rank's files
are on the disk: if a rank dies before, an earlier checkpoint stays intact.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from math import prod
from pathlib import Path
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from farspan.distributed.fsdp import ShardPlacement, ShardRegion
from farspan.distributed.run_context import DistributedContext
from farspan.durable import (
    PARTIAL,
    NotDamaged,
    WriteFailed,
    clear,
    expect_json,
    parsing,
    publish,
    readable,
    write_bytes,
    write_failure,
)
from farspan.spec import UnsupportedError

T = TypeVar("T")

FORMAT = 2
LIST = "checkpoint.json"
BOX_BYTES = 2**26  # bytes up to which rows share a box
BLOCK = 2**20  # bytes hashed while they are in the processor's caches
THREADS = 8  # threads that read boxes: one core does not saturate a drive
MOST_ELEMENTS = 2**56  # elements of a tensor: at 8 bytes each its size still fits into 64 bits

# Torch's dtypes as safetensors names them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# A rank's live tensor, and its placement in the whole.
Entries = Mapping[str, tuple[Tensor, ShardPlacement]]


@dataclass(frozen=True, slots=True)
class SavedBox:
    """A box (range of indices per axis) of a tensor, where a file stores it, and its digest `xxh3`:
    None in the earlier formats, which hash whole files."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    xxh3: str | None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a checkpoint, as boxes (ranges of indices per axis) that cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The content of a checkpoint's JSON file: training state, and where each tensor is stored."""

    path: Path
    list: str  # name of the list's file
    state: dict[str, Any]
    tensors: dict[str, SavedTensor]


def together(world: DistributedContext, work: Callable[[], T]) -> T:
    """Run `work` and return its result. An UnsupportedError on one rank is raised on all ranks, so
    that no rank waits for it."""
    result, own_refusal = None, None
    try:
        result = work()
    except UnsupportedError as error:
        own_refusal = (isinstance(error, NotDamaged), str(error))
    for refusal in filter(None, world.all_gather(own_refusal)):
        raise (NotDamaged if refusal[0] else UnsupportedError)(refusal[1])
    assert result is not None
    return result


# -- writing ------------------------------------------------------------------------------------


def save_entries(
    path: Path, entries: Entries, state: Mapping[str, Any], world: DistributedContext
) -> None:
    """Write a checkpoint from the tensors of all ranks (`entries`) and rank 0's training state
    (JSON). `path` is on a file system that all ranks share; an earlier checkpoint of that name is
    replaced.

    Raises WriteFailed on every rank if the write fails on one, which is named; `path` is then
    unchanged. If a rank dies, torch raises an error on the others within the group's timeout.
    """
    unfinished = path.with_name(PARTIAL + path.name)
    try:
        world.run_on_rank0(partial(_make, unfinished))
        boxes, failure = [], None
        try:
            boxes = _write(unfinished / f"rank-{world.number:05d}.safetensors", entries, world)
        except OSError as error:
            failure = str(error)
        results = world.all_gather((boxes, failure))
        for rank, (_, why) in enumerate(results):
            if why is not None:
                raise WriteFailed(why if world.size == 1 else f"rank {rank}: {why}")
        forms = world.all_gather({n: (_word(t.dtype), p.shape) for n, (t, p) in entries.items()})
        written = [box for boxes, _ in results for box in boxes]
        world.run_on_rank0(lambda: _finish(unfinished, path, forms, written, state))
    except BaseException:
        if world.is_rank0:  # frees space: the disk may be full
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _make(folder: Path) -> None:
    try:
        clear(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise write_failure(folder, error.strerror or str(error)) from error


def _write(path: Path, entries: Entries, world: DistributedContext) -> list[dict[str, Any]]:
    """Write and sync this rank's file, and return a JSON entry for each box in it."""
    share = sorted(_share(entries, world), key=lambda one: -entries[one[0]][0].itemsize)
    sizes = [prod(box.sizes) * entries[name][0].itemsize for name, box in share]
    starts = list(accumulate(sizes, initial=0))
    header = {
        _key(name, box.there): {
            "dtype": NAMES[entries[name][0].dtype],
            "shape": box.sizes,
            "data_offsets": (start, start + size),
        }
        for (name, box), start, size in zip(share, starts, sizes, strict=False)
    }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    boxes = []
    try:
        # The digest of a box is computed while the system writes its bytes.
        with path.open("xb") as file, ThreadPoolExecutor(1, "farspan-hash") as pool:
            file.write(len(text).to_bytes(8, "little") + text)
            for (name, box), start in zip(share, starts, strict=False):
                data = _bytes(box.of(entries[name][0].detach()).contiguous().cpu())
                digest = pool.submit(xxh3_64_hexdigest, data)
                file.write(data)
                place = {"file": path.name, "start": 8 + len(text) + start}
                place["xxh3"] = digest.result()
                boxes.append({"name": name, "offset": box.there, "shape": box.sizes, **place})
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure(path, error.strerror or str(error)) from error
    return boxes


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _share(entries: Entries, world: DistributedContext) -> list[tuple[str, ShardRegion]]:
    """Return the boxes that this rank writes. Each box is written by one of the ranks that hold it,
    such that all ranks write about equally many bytes."""
    boxes = {
        _key(name, box.there): (name, box)
        for name, (tensor, place) in entries.items()
        for whole in place.boxes
        for box in _cut(whole, tensor.itemsize)
    }
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    nbytes = {
        key: prod(box.sizes) * entries[name][0].itemsize for key, (name, box) in boxes.items()
    }
    everyone = world.all_gather(nbytes)
    for rank, theirs in enumerate(everyone):
        sizes |= theirs
        for key in theirs:
            holders.setdefault(key, []).append(rank)
    load, mine = [0] * len(everyone), []
    for key in sorted(holders, key=lambda key: len(holders[key])):
        writer = min(holders[key], key=load.__getitem__)
        load[writer] += sizes[key]
        if writer == world.number:
            mine.append(boxes[key])
    return mine


def _cut(box: ShardRegion, itemsize: int) -> Iterator[ShardRegion]:
    """Yield parts of a box, cut along axis 0: each at most BOX_BYTES, or one index if larger."""
    if not box.sizes:
        yield box
        return
    rows = max(1, BOX_BYTES // (prod(box.sizes[1:]) * itemsize))
    for at in range(0, box.sizes[0], rows):
        yield ShardRegion(
            (box.here[0] + at, *box.here[1:]),
            (box.there[0] + at, *box.there[1:]),
            (min(rows, box.sizes[0] - at), *box.sizes[1:]),
        )


def _finish(
    unfinished: Path,
    path: Path,
    forms: list[dict[str, Any]],
    written: list[dict[str, Any]],
    state: Mapping[str, Any],
) -> None:
    """Complete a checkpoint: write its JSON file, and rename its folder to `path`. Raises
    WriteFailed."""
    named = {name: form for rank_forms in forms for name, form in rank_forms.items()}
    tensors: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "boxes": []}
        for name, (dtype, shape) in named.items()
        if 0 not in shape
    }
    for box in written:
        tensors[box["name"]]["boxes"].append({k: v for k, v in box.items() if k != "name"})
    for name, tensor in tensors.items():
        if sum(prod(box["shape"]) for box in tensor["boxes"]) != prod(tensor["shape"]):
            raise WriteFailed(f"cannot write {path}: the ranks' parts of {name} do not fill it")
    listed = {"format": FORMAT, "state": state, "tensors": tensors}
    text = json.dumps({**listed, "xxh3": _sum(listed)}, indent=1, allow_nan=False)
    write_bytes(unfinished / LIST, text.encode("utf-8"))
    publish(unfinished, path)


def _sum(listed: Mapping[str, Any]) -> str:
    """Return the XXH3 digest of a checkpoint's JSON file, whatever the file's formatting."""
    return xxh3_64_hexdigest(json.dumps(listed, sort_keys=True).encode("utf-8"))


def _key(name: str, offset: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return a tensor's dtype and shape as text, such as `float32[8, 16]`."""
    return f"{_word(dtype)}{list(shape)}"


# -- reading ------------------------------------------------------------------------------------


def read_list(path: Path) -> SavedCheckpoint:
    """Read a checkpoint's JSON file from its folder, and check that the files it names exist and
    have the right sizes. Raises UnsupportedError if the checkpoint is damaged."""
    where = path / LIST
    listed = expect_json(where)
    if listed.get("format") != FORMAT:
        raise NotDamaged(f"{where}: format {listed.get('format')!r}, expected {FORMAT}")
    if listed.pop("xxh3", None) != _sum(listed):
        raise UnsupportedError(f"{where}: damaged or changed: its own XXH3 does not match")
    with parsing(where):
        tensors = {name: _tensor(entry) for name, entry in listed["tensors"].items()}
        checkpoint = SavedCheckpoint(path, LIST, dict(listed["state"]), tensors)
    refuse_short(checkpoint)
    return checkpoint


def _tensor(entry: Mapping[str, Any]) -> SavedTensor:
    dtype, shape = type_of(entry)
    boxes = tuple(
        SavedBox(tuple(b["offset"]), tuple(b["shape"]), b["file"], b["start"], b["xxh3"])
        for b in entry["boxes"]
    )
    for box in boxes:
        known = is_name(box.file) and type(box.start) is int and isinstance(box.xxh3, str)
        if not known or not 0 <= box.start < MOST_ELEMENTS:
            raise ValueError(
                f"expected a file of the checkpoint, a byte offset and an XXH3, got {box}"
            )
    refuse_gaps(shape, boxes)
    return SavedTensor(dtype, shape, boxes)


def is_name(file: object) -> bool:
    """Return whether a value is a plain file name, which cannot lead outside the folder."""
    return isinstance(file, str) and re.fullmatch(r"[A-Za-z0-9_-]+(\.[a-z]+)?", file) is not None


def type_of(entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a tensor's JSON entry. Raises KeyError, TypeError, ValueError."""
    dtype = getattr(torch, entry["dtype"], None)
    if dtype not in NAMES:
        raise ValueError(f"not a dtype of a tensor: {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in shape) or prod(shape) >= MOST_ELEMENTS:
        raise ValueError(f"not a shape of a tensor: {entry['shape']!r}")
    return dtype, shape


def refuse_gaps(shape: tuple[int, ...], boxes: tuple[SavedBox, ...]) -> None:
    """Raise ValueError unless boxes lie within a tensor and cover each element exactly once."""
    for box in boxes:
        if any(type(number) is not int for number in (*box.offset, *box.shape)):
            raise ValueError(f"expected offset and shape of a box, got {box.offset}, {box.shape}")
        ends = zip(box.offset, box.shape, shape, strict=True)
        if any(start < 0 or size < 1 or start + size > whole for start, size, whole in ends):
            raise ValueError(f"box at {box.offset}, shape {box.shape}, exceeds {list(shape)}")
    if sum(prod(box.shape) for box in boxes) != prod(shape):
        raise ValueError(f"boxes do not cover the whole shape {list(shape)}")
    rows = sorted(boxes, key=lambda box: box.offset)
    for place, one in enumerate(rows):
        for other in islice(rows, place + 1, None):
            if shape and other.offset[0] >= one.offset[0] + one.shape[0]:
                break  # later boxes begin no sooner
            sides = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                raise ValueError(f"box at {other.offset}, shape {other.shape}, overlaps another")


def refuse_short(saved: SavedCheckpoint) -> None:
    """Raise UnsupportedError if a file of a checkpoint is missing or does not have the size that
    its boxes need, or if two boxes overlap in it."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for tensor in saved.tensors.values():
        for box in tensor.boxes:
            end = box.start + prod(box.shape) * tensor.dtype.itemsize
            spans.setdefault(box.file, []).append((box.start, end))
    for name, taken in spans.items():
        taken.sort()
        if any(end > start for (_, end), (start, _) in pairwise(taken)):
            raise UnsupportedError(f"{saved.path / saved.list}: boxes of {name} overlap in a file")
        end = taken[-1][1]
        with readable(saved.path / name):
            size = (saved.path / name).stat().st_size
        if size != end:
            raise UnsupportedError(
                f"{saved.path / name}: {size} bytes, expected {end}: truncated or changed"
            )


def refuse_other_model(
    saved: SavedCheckpoint,
    entries: Entries,
    unread: tuple[str, ...],
    world: DistributedContext,
    any_dtype: bool = False,
) -> None:
    """Raise NotDamaged on all ranks if a checkpoint is another model's: its tensors are not exactly
    those in the ranks' `entries`. Ignores saved tensors named with a prefix in `unread`."""
    where = f"{saved.path / saved.list}: belongs to another model"

    def look() -> bool:
        for name, (tensor, place) in entries.items():
            if 0 in place.shape:
                continue  # nothing was saved
            there = saved.tensors.get(name)
            if there is None:
                raise NotDamaged(f"{where}: {name} is in this model, but not in the checkpoint")
            if there.shape != place.shape or (there.dtype != tensor.dtype and not any_dtype):
                raise NotDamaged(
                    f"{where}: {name} is {type_words(there.dtype, there.shape)}, but "
                    f"{type_words(tensor.dtype, place.shape)} in this model"
                )
        return True

    together(world, look)
    wanted = {name for names in world.all_gather(list(entries)) for name in names}
    for name in sorted(saved.tensors.keys() - wanted):
        if not name.startswith(unread) and 0 not in saved.tensors[name].shape:
            raise NotDamaged(f"{where}: {name} is in the checkpoint, but not in this model")


def copy_saved(saved: SavedCheckpoint, entries: Entries, world: DistributedContext) -> None:
    """Copy a checkpoint into every rank's tensors `entries`, converted to their dtypes. Each box
    that a rank needs is read once, and hashed as it is read.

    Raises UnsupportedError on every rank if a box is damaged, or a weight is not a number:
    `entries` then hold parts of the checkpoint, and must be overwritten or discarded.
    """

    def copy() -> bool:
        wanted = [
            _WantedBox(saved, box, name, tensor.detach(), parts)
            for name, (tensor, place) in entries.items()
            for box in (saved.tensors[name].boxes if 0 not in place.shape else ())
            if (parts := list(_overlaps(box, place)))
        ]
        wanted.sort(key=lambda one: (one.box.file, one.box.start))
        # A forked process recreates torch's pool of threads at the first parallel operation,
        # without a lock: if several threads begin at once, 1 of 60 resumes fails there.
        torch.set_num_threads(torch.get_num_threads())
        with ExitStack() as opened, ThreadPoolExecutor(THREADS, "farspan-read") as pool:
            files: dict[str, Any] = {}
            for name in dict.fromkeys(one.box.file for one in wanted):
                with readable(saved.path / name):
                    files[name] = opened.enter_context((saved.path / name).open("rb", buffering=0))
            rooms = local()
            for _ in pool.map(lambda one: one.copy(files[one.box.file], rooms), wanted):
                pass  # the first error ends the others
        return True

    together(world, copy)


def _overlaps(box: SavedBox, place: ShardPlacement) -> Iterator[ShardRegion]:
    """Yield the regions of a saved box that this rank holds: `here` is a region's offset in the
    rank's tensor, and `there` its offset in the box."""
    for own in place.boxes:
        low = [max(a, b) for a, b in zip(own.there, box.offset, strict=True)]
        ends = zip(own.there, own.sizes, box.offset, box.shape, strict=True)
        sizes = [min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, low, strict=True)]
        if min(sizes, default=1) > 0:
            here = zip(own.here, low, own.there, strict=True)
            yield ShardRegion(
                tuple(start + at - there for start, at, there in here),
                tuple(at - start for at, start in zip(low, box.offset, strict=True)),
                tuple(sizes),
            )


@dataclass(frozen=True, slots=True)
class _WantedBox:
    """A saved box to read, and the parts of this rank's tensor to fill from it."""

    saved: SavedCheckpoint
    box: SavedBox
    name: str
    live: Tensor
    parts: list[ShardRegion]

    def copy(self, file: Any, rooms: local) -> None:
        """Read the box and copy its parts into this rank's tensor. Raises UnsupportedError if the
        box is damaged or a weight in it is NaN."""
        dtype, first = self.saved.tensors[self.name].dtype, self.parts[0].of(self.live)
        straight = self.parts[0].sizes == self.box.shape and first.is_contiguous()
        straight = straight and (first.dtype, first.device.type) == (dtype, "cpu")
        whole = first if straight else self._memory(rooms).view(dtype).view(self.box.shape)
        path = self.saved.path / self.box.file
        where = f"{path}: {_key(self.name, self.box.offset)}"
        with readable(path):
            same = self._read(file, _bytes(whole))
        if not same:
            raise UnsupportedError(
                f"{where}: damaged or changed: its XXH3 checksum differs from {self.saved.list}"
            )
        if self.name.startswith("model/") and _has_nan(whole):
            raise UnsupportedError(f"{where}: contains NaN, from which training cannot continue")
        for part in () if straight else self.parts:
            inside = ShardRegion(part.there, part.here, part.sizes).of(whole)
            part.of(self.live).copy_(inside)

    def _memory(self, rooms: local) -> Tensor:
        size = prod(self.box.shape) * self.saved.tensors[self.name].dtype.itemsize
        if getattr(rooms, "bytes", torch.empty(0)).numel() < size:
            rooms.bytes = torch.empty(size, dtype=torch.uint8)
        room: Tensor = rooms.bytes[:size]
        return room

    def _read(self, file: Any, memory: memoryview) -> bool:
        """Read the box's bytes into memory, and return whether their digest matches."""
        digest, at = xxh3_64(), 0
        while at < len(memory):
            read = os.preadv(file.fileno(), [memory[at : at + BLOCK]], self.box.start + at)
            if not read:
                return False
            digest.update(memory[at : at + read])
            at += read
        return self.box.xxh3 in (None, digest.hexdigest())


def _has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN, by its maximum: one pass without a temporary."""
    if not tensor.is_floating_point():
        return False
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # torch does not compare 8-bit floats
    return bool(wide.max().isnan())
