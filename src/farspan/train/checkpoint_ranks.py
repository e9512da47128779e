"""Checkpoints that all ranks of a run write, each its own part, and that any number of ranks reads:
`farspan.parallel.states` with the tensors of a run.

    model/<parameter or buffer>      parameters, and buffers that belong to the weights
    optimizer/<key>/<parameter>      master weights, moments and counts of updates
    rng/<rank>/cpu, rng/<rank>/cuda  each rank's generators, as bytes
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from farspan.distributed.fsdp import whole_placement
from farspan.parallel import states
from farspan.parallel.states_list import STATE, TENSORS, Forms
from farspan.parallel.states_plan import Entries
from farspan.spec import Refused
from farspan.train.crew import Crew
from farspan.train.dealt_weights import Pieces

LISTED = TENSORS  # a folder that has this file is such a checkpoint
RNG = "rng/"
FROZEN = "frozen"  # of a checkpoint state: digest of the weights that it leaves out

Tensors = Mapping[str, Tensor]


def is_of_ranks(path: Path) -> bool:
    """Whether a checkpoint is one of these, or was before its list was lost."""
    return (path / LISTED).is_file() or any(path.glob("rank-*.safetensors"))


def entries_of(model: Tensors, optimizer: Tensors, pieces: Pieces | None = None) -> Entries:
    """The live tensors of a rank and where they lie; whole without pieces."""
    places = {} if pieces is None else pieces.places

    def place(tensor: Tensor, name: str) -> Any:
        # Counts of updates are scalars, and the same on all ranks.
        return places[name] if tensor.ndim and name in places else whole_placement(tensor.shape)

    found = {f"model/{name}": (tensor, place(tensor, name)) for name, tensor in model.items()}
    for key, tensor in optimizer.items():
        name = key.split("/", 1)[1]
        found[f"optimizer/{key}"] = tensor, place(tensor, name)
    return found


def write(path: Path, entries: Entries, rng: Tensors, state: Mapping[str, Any], crew: Crew) -> None:
    """Writes a checkpoint from all ranks. Raises WriteFailed on all of them."""
    number, names = _number(crew), _generators(crew.device)
    own = {
        _own(number) + kind: (rng[name], whole_placement(rng[name].shape))
        for kind, name in names.items()
        if name in rng
    }
    states.save(path, {**entries, **own}, state, _group(crew))


def read(
    path: Path, entries: Entries, expected: Mapping[str, Any], crew: Crew
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copies a checkpoint of ranks into `entries`; its state, and this rank's generators: the first
    rank's where there was no such rank. Raises Refused, on all ranks, before anything is copied."""

    def look() -> Forms:
        if not (path / LISTED).is_file():
            raise Refused(f"{path / LISTED}: missing")
        refuse_other(path / STATE, states.read_state(path), expected)
        shapes = states.read_shapes(path)
        if f"{_own(0)}cpu" not in shapes:
            raise Refused(f"{path / LISTED}: damaged: no random numbers of rank 0")
        return shapes

    forms = crew.by_first(look)
    start = _own(_number(crew))
    if f"{start}cpu" not in forms:
        start = _own(0)
    kinds = [kind for kind in _generators(crew.device) if start + kind in forms]
    read = {kind: torch.empty(forms[start + kind][1], dtype=torch.uint8) for kind in kinds}
    generators = {start + kind: (t, whole_placement(t.shape)) for kind, t in read.items()}
    state = states.load(path, {**entries, **generators}, _group(crew), unread=(RNG,))
    return state, {_generators(crew.device)[kind]: t for kind, t in read.items()}


def copy_rows(path: Path, live: Entries, prefix: str) -> None:
    """Copies from one safetensors file of whole tensors, as one process writes it, what of them is
    this rank's; `live` names begin with `prefix`."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, (tensor, place) in live.items():
            if not name.startswith(prefix):
                continue
            for box in place.boxes:
                part = tuple(
                    slice(start, start + size)
                    for start, size in zip(box.there, box.sizes, strict=True)
                )
                key = name.removeprefix(prefix)
                # A slice of no dimensions cannot be asked for.
                read = file.get_slice(key)[part] if part else file.get_tensor(key)
                box.of(tensor.detach()).copy_(read)


def refuse_other(path: Path, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises Refused where a checkpoint's state is of another run."""
    for key, value in expected.items():
        if key not in state:
            raise Refused(f"{path}: damaged: it says nothing of its {key}")
        if state.get(key) != value:
            if key == "data":
                raise Refused(
                    f"{path}: belongs to another run: the text under data.path has changed, or "
                    "its tokenizer has; give those that it was trained with, or another folder "
                    "for a new run"
                )
            if key == FROZEN:
                raise Refused(
                    f"{path}: it was trained beside other frozen weights than model.path has "
                    "now; give those, or another folder for a new run"
                )
            raise Refused(
                f"{path}: belongs to another run: its {key} is {state.get(key)!r}, "
                f"that of this run is {value!r}"
            )


def _number(crew: Crew) -> int:
    return 0 if crew.place is None else crew.place.rank


def _group(crew: Crew) -> dist.ProcessGroup | None:
    return None if crew.place is None else dist.group.WORLD


def _own(number: int) -> str:
    return f"{RNG}{number:05d}/"


def _generators(device: torch.device) -> dict[str, str]:
    """How a rank's generators are called in a checkpoint, and in its process."""
    own = {"cpu": "cpu"}
    return own if device.type == "cpu" else own | {"cuda": f"cuda:{device.index or 0}"}
