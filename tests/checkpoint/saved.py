"""What a checkpoint holds, and checkpoints that are damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.checkpoint.format import LIST, SavedCheckpoint, _sum, copy_saved
from farspan.checkpoint.saver import open_checkpoint
from farspan.distributed.fsdp import whole_placement
from farspan.distributed.run_context import DistributedContext

ALONE = DistributedContext(torch.device("cpu"))
RANK_0 = "rank-00000.safetensors"


def opened(path: Path) -> SavedCheckpoint:
    return open_checkpoint(path, {}, ALONE)


def saved_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Those whose names begin so, whole, by the rest of their names."""
    saved = opened(path)
    found = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in saved.tensors.items()
        if name.startswith(prefix)
    }
    copy_saved(saved, {n: (t, whole_placement(t.shape)) for n, t in found.items()}, ALONE)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def flip_in(name: str) -> Callable[[Path], None]:
    """A bit of this tensor."""

    def change(path: Path) -> None:
        box = opened(path.parent).tensors[name].boxes[0]
        data = bytearray((path.parent / box.file).read_bytes())
        data[box.start] ^= 1
        (path.parent / box.file).write_bytes(bytes(data))

    return change


def relist(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a list; its own sum is that of what it says now."""
    listed = json.loads((path / LIST).read_text())
    del listed["xxh3"]
    change(listed)
    (path / LIST).write_text(json.dumps({**listed, "xxh3": _sum(listed)}))


def restate(**changed: Any) -> Callable[[Path], None]:
    """Says something else of where training stands."""

    def change(path: Path) -> None:
        relist(path.parent, lambda listed: listed["state"].update(changed))

    return change
