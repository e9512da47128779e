"""The run folder: its files, its lock, and the checks before a run resumes; the state of a run
between two steps; and the search for values that are not finite.

config.yaml      the run, with all defaults filled in
about.json       the model, the schedule, and the expected memory
plan.json        only with strategy auto: the planner's choice and its predictions
shortage.json    only after a rank ran out of memory within a shared step: its schedule; the next
                 start takes a lighter one
comparison.json  only with strategy auto: predictions and measurements
step.json        one step in detail: the order of its cells, memory by cause, seconds by work
history.json     each part of the run: command, machine, versions, start and end
report.html      all of the above as one page, written when `farspan train` ends
windows.json     only with data.streaming: digests of the windows that were read, by source
reference.safetensors  only with loss.reference stored: log-probabilities of each pair
metrics.jsonl    a line per step, per evaluation, and per out-of-memory error
tensorboard/     only with report_to tensorboard: event files
hub.json         only with hub: the uploaded model and its repository
wandb.json       only with report_to wandb: the id of its run; wandb/ has its files
trackio.json     only with report_to trackio: the id of its run
checkpoints/     checkpoints to resume from
model/           the trained model in Hugging Face's format
diagnosis.json   only after a loss or gradient that is not finite
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.checkpoint.saver import (
    CHECKPOINT_LEFTOVER,
    TrainState,
    list_checkpoints,
    named_checkpoints,
)
from farspan.distributed.run_context import launch_env
from farspan.durable import (
    HELD,
    PARTIAL,
    WriteFailed,
    publish,
    read_json,
    readable,
    refuse_links,
    remove_leftovers,
    shown,
    write_bytes,
    write_failure,
    write_whole,
)
from farspan.hf.merge import SOURCE
from farspan.program.layout import replicas
from farspan.report.run import REPORT, read_metrics
from farspan.spec import UnsupportedError
from farspan.train.config import Decay, RunConfig, StatesPlace
from farspan.train.record import HISTORY, STEP, now, part_json
from farspan.train.yaml_config import flatten, read_file, to_mapping, write_mapping

STORED = "reference.safetensors"
WINDOWS = "windows.json"
# Files that a run writes; those in the last line after its first step.
FILES = (
    *("config.yaml", "about.json", "plan.json", "wandb.json", "trackio.json", "hub.json"),
    *("metrics.jsonl", "shortage.json", "comparison.json", "diagnosis.json", STORED),
    WINDOWS,
    *(STEP, HISTORY, REPORT),
)
# Leftovers of a killed process behind `PARTIAL`. Other files with such a prefix stay.
LEFTOVER = re.compile(rf"(old-)?model|([0-9]+-)?({'|'.join(map(re.escape, FILES))})")
# Keys that may change when a run resumes: locations, frequencies of evaluation and saving,
# reactions to failures, and the way in which the same gradients are computed.
FREE = (
    "folder",
    "data.cache",
    "nonfinite",
    "report_to",
    "checkpoints.",
    "evaluation.",
    "hub",
    "device",
    "host_memory",
    "margin",
    "headroom",  # the older name of `margin`
    "allocator",
    "optimizer.disk",  # also optimizer.disk_seconds
    "optimizer.overlap",
    "schedule.",
    "kernels.",
    "sparse.warn_below",
    "sparse.index",  # its location and dims: checkpoints know its content
    "parallel",
)
DATA = "parallel.data"
# Keys among these that change roundings: a resumed run is then no longer bit-identical.
ROUNDING = ("device", "schedule.", "kernels.", "parallel")
TIMEOUT = "parallel.timeout"  # the exception: changes no rounding
# May change among device, host and disk, which hold the same tensors; None: an older folder.
STATES = "optimizer.states"
SAME_STATES = (None, *(place for place in StatesPlace if place is not StatesPlace.EIGHT_BIT))
# May change if the learning rate does not fall over all steps.
STEPS = "steps"
DECAY = "optimizer.decay"
# Keys that older folders lack: null equals a missing key.
LATER = (
    *("start", "sparse", "optimizer.decay_steps", "data.sources", "model.revision"),
    *("model.quantize", "loss", "neftune_alpha", "data.day", "data.ignore"),
    *("model.resize_embeddings", "data.streaming", "data.window"),
)


def identity(run: RunConfig) -> str:
    """Return the SHA-256 of all settings that decide the results of a run."""
    values = {k: v for k, v in flatten(to_mapping(run)).items() if not k.startswith(FREE)}
    # Two replicas with one sequence equal a batch of two.
    values["batch"] = run.batch * replicas(run.parallel)
    if values[STATES] in SAME_STATES:
        del values[STATES]
    if run.optimizer.decay is Decay.CONSTANT:
        del values[STEPS]
    values = {k: v for k, v in values.items() if v is not None or k not in LATER}
    if run.data.sources is not None:  # older folders had no windows
        values["data.sources"] = [
            {k: v for k, v in own.items() if v is not None or k not in ("streaming", "window")}
            for own in values["data.sources"]
        ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8")).hexdigest()


class RunFolder:
    """The folder that a run writes to, which the run locks from `__enter__` to `__exit__`.

    The folder stays open and `path` leads through its descriptor, so a run continues in a renamed
    folder, and another run may start under the old name. A second process in the same folder is
    refused.

    Attributes:
        name: The folder as the user named it; after `__exit__`, its current name.
        path: The folder to read and write in; `durable.shown` makes it readable.
    """

    def __init__(self, run: RunConfig) -> None:
        self.name = self.path = Path(run.folder).expanduser()
        self._run = run
        self._open = ExitStack()
        self._parts: list[dict[str, Any]] = []  # entries of history.json

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def shortage(self) -> Path:
        return self.path / "shortage.json"

    def __enter__(self) -> "RunFolder":
        _refuse_wrong_kind(self.name, "folder")
        try:
            self.name.mkdir(parents=True, exist_ok=True)
            self.hold()
            _refuse_wrong_kind(self.checkpoints, "folder")
            _refuse_wrong_kind(self.path / ".lock", "file")
            if self.checkpoints.is_symlink() or (self.path / ".lock").is_symlink():
                refuse_links(self.path)
            self.checkpoints.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            lock = self._open.enter_context(open(os.open(self.path / ".lock", flags, 0o666), "w"))
            # The kernel releases the lock however the process ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._open.close()
            raise UnsupportedError(
                f"folder: another process is training in {self.name}; wait for it or give "
                "another folder"
            ) from error
        except OSError as error:
            self._open.close()
            raise UnsupportedError(
                f"folder: cannot write in {self.name}: {error.strerror}; give another folder"
            ) from error
        except UnsupportedError as error:
            words = shown(error)
            self._open.close()
            raise UnsupportedError(words) from error
        return self

    def hold(self) -> None:
        """Keep the folder open, so that the run still writes to it after it is renamed."""
        held = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        self._open.callback(os.close, held)
        place = Path(f"/proc/self/fd/{held}")
        if place.is_dir():  # Linux
            HELD[str(place)] = str(self.name), os.path.realpath(self.name)
            self._open.callback(HELD.pop, str(place), None)
            self.path = place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if self._parts:
            ended = {"ended": now()} | ({} if kind is None else {"error": kind.__name__})
            parts = [*self._parts[:-1], self._parts[-1] | ended]
            with suppress(WriteFailed):  # the error to report is the original one
                self.write_json(HISTORY, {"parts": parts})
        if isinstance(error, Exception):
            error.args = tuple(shown(one) if isinstance(one, str) else one for one in error.args)
        self.name = self.path = self.called
        self._open.close()

    @property
    def called(self) -> Path:
        """Name of the folder for messages: the user's, or a new one if it was renamed."""
        return Path(shown(self.path))

    def prepare(self) -> list[str]:
        """Remove what a killed process left, and write config.yaml. Returns a line for each changed
        setting that alters the rounding of results.

        Raises:
            UnsupportedError: The folder holds another run that can be resumed (the message names
                the keys), or a file or folder is in the way of one that the run writes.
        """
        self._refuse_in_the_way()
        remove_leftovers(self.path, LEFTOVER)
        remove_leftovers(self.checkpoints, CHECKPOINT_LEFTOVER)
        config = self.path / "config.yaml"
        values = to_mapping(self._run)
        changed: list[str] = []
        if config.exists() and list_checkpoints(self.checkpoints):
            changed = _changes(_read(config), values)
        refused = [text for text in changed if not text.startswith(FREE)]
        if refused:
            why = any(text.startswith(f"{STEPS} ") for text in refused)
            falls = " (its learning rate falls over all its steps)" if why else ""
            raise UnsupportedError(
                f"{self.path} holds another run: {'; '.join(refused)}{falls}; set these back to "
                "resume it, or give another folder"
            )
        write_whole(config, write_mapping(values).encode("utf-8"))
        begun = list_checkpoints(self.checkpoints)
        known = (read_json(self.path / HISTORY, parts=list) or {}).get("parts") if begun else None
        launch = launch_env()
        part = part_json(1 if launch is None else launch.ranks)
        self._parts = [*(known or []), part]
        self.write_json(HISTORY, {"parts": self._parts})
        rounding = [text for text in changed if text.startswith(ROUNDING)]
        return [text for text in rounding if not text.startswith(TIMEOUT)]

    def _refuse_in_the_way(self) -> None:
        for path in named_checkpoints(self.checkpoints):
            _refuse_wrong_kind(path, "folder")
        for name in FILES:
            _refuse_wrong_kind(self.path / name, "file")
        _refuse_wrong_kind(self.model, "folder")
        refuse_links(self.path)
        with readable(self.model):
            inside = os.listdir(self.model) if os.path.lexists(self.model) else []
        if inside and SOURCE not in inside:
            raise UnsupportedError(
                f"folder: {self.model} is in the way: it has {min(inside)} but no {SOURCE} of an "
                "earlier run, and the trained model would replace it; move it away, then run the "
                "same command again"
            )
        if not os.access(self.checkpoints, os.W_OK | os.X_OK, effective_ids=True):
            raise UnsupportedError(
                f"folder: cannot write in {self.checkpoints}: Permission denied; fix its "
                "permissions, or give another folder"
            )

    def record(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl in a single write, so that a killed process keeps all
        earlier lines. Raises WriteFailed."""
        line = json.dumps(values, allow_nan=False).encode("utf-8") + b"\n"
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with open(os.open(self.metrics, flags, 0o666), "ab", buffering=0) as file:
                if file.write(line) < len(line):
                    raise OSError(None, "the disk accepted only part of the line")
        except OSError as error:
            raise write_failure(self.metrics, error.strerror or str(error)) from error

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop metrics of steps after `step` and a truncated last line, and return the rest."""
        if not self.metrics.exists():
            return []
        kept = [line for line in read_metrics(self.metrics) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_whole(self.metrics, text.encode("utf-8"))
        return kept

    def write_json(self, name: str, values: Mapping[str, Any]) -> Path:
        """Write a JSON file, whole or not at all. Raises WriteFailed."""
        path, many = self.path / name, name == STEP  # thousands of numbers, on one line
        text = json.dumps(values, indent=None if many else 1, allow_nan=False)
        write_whole(path, text.encode("utf-8"))
        return path

    def write_shortage(self, values: Mapping[str, Any]) -> None:
        """Write shortage.json: the plan that ran out of memory. Any rank may call this, since the
        rank that ran out cannot reach the others, which wait for it. Raises WriteFailed."""
        partial = self.path / f"{PARTIAL}{os.getpid()}-{self.shortage.name}"
        write_bytes(partial, json.dumps(values, indent=1).encode("utf-8"))
        publish(partial, self.shortage)

    def forget_shortage(self) -> None:
        """Remove shortage.json, once a later plan fits in memory."""
        self.shortage.unlink(missing_ok=True)


class OthersFolder(RunFolder):
    """The run folder as ranks other than 0 see it; these ranks write no records."""

    def __enter__(self) -> "OthersFolder":
        return self

    def hold(self) -> None:
        """Keep the folder open if it exists here, that is, on a drive shared with rank 0."""
        if self.name.is_dir():
            super().hold()

    def record(self, values: Mapping[str, Any]) -> None:
        """Do nothing: rank 0 writes metrics."""

    def write_json(self, name: str, values: Mapping[str, Any]) -> Path:  # noqa: ARG002
        return self.path / name

    def forget_shortage(self) -> None:
        """Do nothing: rank 0 removes shortage.json."""


def _refuse_wrong_kind(path: Path, kind: str) -> None:
    """Raise UnsupportedError if `path` exists but is not what `kind` says, "file" or "folder"."""
    right = os.path.isdir(path) if kind == "folder" else os.path.isfile(path)
    if os.path.lexists(path) and not right:
        raise UnsupportedError(
            f"folder: {path} is in the way: expected a {kind} or nothing; move it away, then run "
            "the same command again"
        )


def _read(config: Path) -> dict[str, Any]:
    try:
        return read_file(config)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}; it identifies the run that the checkpoints here belong to: restore it, or "
            "give another folder"
        ) from error


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that differs between two configurations, with both values."""
    old, new = flatten(before), flatten(now)
    if {old.get(DATA), new.get(DATA)} - {None, 1}:
        old, new = _with_batch_of_all(old), _with_batch_of_all(new)
    if old.get(STATES) in SAME_STATES and new.get(STATES) in SAME_STATES:
        old, new = _without(STATES, old), _without(STATES, new)
    if old.get(DECAY) == new.get(DECAY) == Decay.CONSTANT:
        old, new = _without(STEPS, old), _without(STEPS, new)
    return [
        f"{key} was {old.get(key)!r}, is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _with_batch_of_all(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the batch of all replicas together, which a resumed run keeps."""
    batch = leaves["batch"] * (leaves.get(DATA) or 1)
    return _without("batch", leaves) | {"batch of all replicas": batch}


def _without(key: str, leaves: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in leaves.items() if k != key}


@dataclass(frozen=True, slots=True)
class Finding:
    """The first weight and the first gradient, in the model's order, that are not finite."""

    kind: str  # the value that is not finite: 'loss' or 'gradient'
    weight: str | None  # not finite before the step: the cause is older than this batch
    gradient: str | None

    def describe(self) -> str:
        if self.weight is not None:
            return f"parameter {self.weight} was already not finite before this step"
        if self.gradient is not None:
            return f"the first parameter whose gradient is not finite is {self.gradient}"
        return "all parameters and gradients are finite, but their norm or the loss is not"


def find_nonfinite(loss: float, parameters: Mapping[str, Tensor]) -> Finding:
    """Find the first weight and gradient that are not finite, and whether the loss is finite."""
    finite_loss = abs(loss) < float("inf")  # false for NaN too
    return Finding(
        kind="gradient" if finite_loss else "loss",
        weight=_first_bad((name, p.detach()) for name, p in parameters.items()),
        gradient=_first_bad((name, p.grad) for name, p in parameters.items()),
    )


def as_json(value: float) -> float | str:
    """Return a number for JSON: NaN and infinity, which JSON lacks, become text."""
    return value if abs(value) < float("inf") else str(value)


def diagnosis_json(
    finding: Finding,
    *,
    step: int,
    loss: float,
    norm: float | None,
) -> dict[str, Any]:
    """Return the values of diagnosis.json, except batches; `norm` is None for a held-out loss."""
    return {
        "step": step,
        "not_finite": "held-out loss" if norm is None else finding.kind,
        "loss": as_json(loss),
        "grad_norm": None if norm is None else as_json(norm),
        "first_bad_parameter": finding.weight,
        "first_bad_gradient": finding.gradient,
    }


def _first_bad(tensors: Iterable[tuple[str, Tensor | None]]) -> str | None:
    return next((n for n, t in tensors if t is not None and not torch.isfinite(t).all()), None)


def capture_rng() -> dict[str, Tensor]:
    """Return the state of torch's generators, uint8: the CPU's and every used GPU's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.update({f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())})
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device | None = None) -> None:
    """Restore the generators' states that `capture_rng` returned, on the devices that exist. If a
    rank's `device` is not the first GPU, it also gets the state of cuda:0, rank 0's GPU."""
    torch.set_rng_state(states["cpu"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    if device is not None and (device.index or 0) > 0 and "cuda:0" in states and count > 0:
        torch.cuda.set_rng_state(states["cuda:0"], device)


@dataclass(slots=True)
class RunState:
    """State of a run between two steps, to which a retried step returns."""

    at: TrainState = field(default_factory=TrainState)
    rng: Mapping[str, Tensor] = field(default_factory=capture_rng)
