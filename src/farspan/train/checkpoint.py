"""Checkpoints that are whole or absent, and are read without running anything in them.

    checkpoints/step-00000120/model.safetensors       parameters and persistent buffers
                              optimizer.safetensors   master weights and AdamW's moments
                              rng.safetensors         random number generators, as bytes
                              state.json              step, counters, and what run this is
                              manifest.json           size and SHA-256 of the files above

The folder is written under another name, synced and renamed, so the name never stands for less
than all of it. Only safetensors and JSON are read back.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farspan.spec import Refused
from farspan.train.durable import (
    PARTIAL,
    digest,
    discard,
    publish,
    remove_leftovers,
    write_bytes,
    write_tensors,
)

_FORMAT = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
_RNG = "rng.safetensors"
_STEP = "step-"
_ADVICE = "move this folder away to resume from an older checkpoint, or start in another run folder"

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Live:
    """The tensors that a checkpoint is made of, in the process that trains: saved as they are,
    restored by copying into them."""

    model: Tensors
    optimizer: Tensors

    def files(self) -> dict[str, Tensors]:
        return {"model.safetensors": self.model, "optimizer.safetensors": self.optimizer}


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says besides the tensors that were copied."""

    path: Path
    state: dict[str, Any]
    rng: dict[str, Tensor]


def save(
    folder: Path, live: Live, rng: Tensors, state: Mapping[str, Any], *, step: int, keep: int
) -> Path:
    """Writes the checkpoint of `step` under `folder` and removes all but the latest `keep`.

    Raises WriteFailed naming the file; the checkpoints that were there are then untouched.
    """
    path = folder / folder_name(step)
    partial = folder / f"{PARTIAL}{path.name}"
    remove_leftovers(folder)
    partial.mkdir(parents=True)
    try:
        for file, tensors in {**live.files(), _RNG: rng}.items():
            write_tensors(partial / file, tensors)
        write_bytes(partial / _STATE, _json({"format": _FORMAT, "step": step, **state}))
        listed = {p.name: _entry(p) for p in sorted(partial.iterdir())}
        write_bytes(partial / _MANIFEST, _json({"format": _FORMAT, "files": listed}))
        publish(partial, path)
    except BaseException:
        remove_leftovers(folder)  # the space is wanted: the disk may be full
        raise
    _prune(folder, step, keep)
    return path


def folder_name(step: int) -> str:
    """Of the checkpoint of a step, in its folder."""
    return f"{_STEP}{step:08d}"


def resume(
    folder: Path, live: Live, expected: Mapping[str, Any], warn: Callable[[str], None]
) -> Restored | None:
    """Copies the latest checkpoint that can be used into `live`; None when there is none at all.

    `expected` are entries of the state that must be equal, such as which run this is. A
    checkpoint that cannot be used is passed over with a warning where an older one can;
    otherwise Refused says why, naming the file.
    """
    problems: list[str] = []
    for path in reversed(_checkpoints(folder)):
        try:
            state = _verify(path, live, expected)
        except Refused as problem:
            problems.append(str(problem))
            continue
        for problem_text in problems:
            warn(f"{problem_text}; resuming from {path} instead")
        for name, tensors in live.files().items():
            _copy(path / name, tensors)
        return Restored(path, state, _read_rng(path / _RNG))
    if problems:
        raise Refused(f"{problems[0]}; {_ADVICE}")
    return None


def capture_rng() -> dict[str, Tensor]:
    """The state of torch's generators, uint8: of the CPU and of every GPU in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.update({f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())})
    return states


def restore_rng(states: Tensors, own: torch.device | None = None) -> None:
    """Sets what `capture_rng` returned, for the devices that are here. `own` is the GPU of a rank:
    the states are those of rank 0, which computes on the first."""
    torch.set_rng_state(states["cpu"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    if own is not None and (own.index or 0) > 0 and "cuda:0" in states and count > 0:
        torch.cuda.set_rng_state(states["cuda:0"], own)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob(f"{_STEP}*") if p.is_dir())


def _prune(folder: Path, step: int, keep: int) -> None:
    """Keeps the latest `keep`. A later step than the one just saved is of no use any more: it
    could not be read when this run resumed from before it."""
    saved = _checkpoints(folder)
    later = [p for p in saved if p.name > folder_name(step)]
    for path in later + saved[: len(saved) - len(later)][:-keep]:
        discard(path)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode("utf-8")


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def _verify(path: Path, live: Live, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The state, after every byte and every name has been looked at. Raises Refused."""
    listed = _read_json(path / _MANIFEST).get("files")
    wanted = {*live.files(), _RNG, _STATE}
    if not isinstance(listed, dict) or not wanted <= listed.keys():
        raise Refused(f"{path / _MANIFEST}: does not list {', '.join(sorted(wanted))}")
    for name in sorted(wanted):
        _verify_file(path / name, listed[name])
    state = _read_json(path / _STATE)
    if state.get("format") != _FORMAT:
        raise Refused(f"{path / _STATE}: format {state.get('format')!r}, expected {_FORMAT}")
    for key, value in expected.items():
        if state.get(key) != value:
            raise Refused(
                f"{path / _STATE}: belongs to another run: its {key} is {state.get(key)!r}, "
                f"that of this run is {value!r}"
            )
    for name, tensors in live.files().items():
        _verify_tensors(path / name, tensors)
    return state


def _verify_file(path: Path, entry: Any) -> None:
    if not path.is_file():
        raise Refused(f"{path}: missing")
    if not isinstance(entry, dict):
        raise Refused(f"{path.parent / _MANIFEST}: no size and SHA-256 under {path.name}")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise Refused(f"{path}: {size} bytes, expected {entry.get('bytes')}: truncated or changed")
    if digest(path) != entry.get("sha256"):
        raise Refused(f"{path}: its SHA-256 is not the one in {_MANIFEST}: damaged or changed")


def _verify_tensors(path: Path, live: Tensors) -> None:
    with _open(path) as file:
        names = set(file.keys())
        for name in sorted(names ^ live.keys()):
            where = "the checkpoint" if name in names else "the model"
            raise Refused(f"{path}: of another model: only {where} has {name}")
        for name, tensor in live.items():
            saved = file.get_tensor(name)
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise Refused(
                    f"{path}: of another model: {name} is {_form(saved)}, here {_form(tensor)}"
                )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _copy(path: Path, live: Tensors) -> None:
    with _open(path) as file, torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(file.get_tensor(name))


def _read_rng(path: Path) -> dict[str, Tensor]:
    with _open(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Refused(f"{path}: not a safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(f"{path}: expected a JSON object")
    return value
