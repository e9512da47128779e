"""Kills a training process at chosen moments, starts it again, and tells what became of it.

A process of the fork server, which has imported everything, forks for every run, so that a run
costs a fraction of a second. A moment is a call that a run makes: the n-th sync, rename, removal,
tensor file or cell. The first, undisturbed run counts them; then the run is killed at one, by the
signal that cannot be caught, and started again. Every `stride`-th moment is tried, the first of
each kind, and of those that change a name or write tensors ten times as many. With `count` the
states are in a file on a drive, a request to it is a moment, too, and so many moments are tried
that are drawn at random. With `best` the best checkpoint is kept beside the latest one, and of the
moments only those that change a name are tried. With `stream` its data are read a window at a
time, and so many moments are tried that are drawn at random. The report has the moments' names,
and for every kill what the folder held in the end.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from farspan.checkpoint import format as checkpoint_format
from farspan.train.config import DType, ModelConfig, OptimizerConfig, RunConfig, StatesPlace
from farspan.train.optimizer import TrainingOptimizer
from farspan.train.staged_states import ScratchFile
from farspan.train.trainer import TrainingLoop
from tests.train.tiny import MODEL, TinyStep, fit, load_tiny, tiny_run

# By step, where the best checkpoint is kept: two are the best of their time, and others are not.
LOSSES = {0: 9.0, 1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5, 5: 3.2}
OUTCOME = ("model/model.safetensors", "model/config.json")


class Fuse:
    """Counts moments and kills the process at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.names: list[str] = []
        self._lock = threading.Lock()  # requests to a drive are made by several threads

    def moment(self, name: str) -> bool:
        """Whether this is the one."""
        with self._lock:
            self.names.append(name)
            return len(self.names) - 1 == self.at

    def blow(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, preceded by a moment."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.moment(name):
                self.blow()
            return function(*args, **kwargs)

        return wrapped

    def halfway(
        self, name: str, function: Callable[..., Any], place: int, half: Callable[[Path], None]
    ) -> Callable[..., Any]:
        """The function, working on its argument `place`; killed when `half` of it is done."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.moment(name):
                half(Path(args[place]))
                self.blow()
            return function(*args, **kwargs)

        return wrapped

    def cell(self, step: TinyStep, calls: int) -> None:
        kind = "cell" if step.progress is not None and torch.is_grad_enabled() else "evaluation"
        if self.moment(f"{kind} of call {calls}"):
            self.blow()

    def install(self) -> None:
        patches = (
            (os, "fsync", self.before("sync", os.fsync)),
            (os, "replace", self.before("rename", os.replace)),
            (shutil, "rmtree", self.halfway("remove", shutil.rmtree, 0, remove_half)),
            (
                checkpoint_format,
                "_write",
                self.halfway("tensors", checkpoint_format._write, 0, write_half),
            ),
            (ScratchFile, "_move", self.before("drive", ScratchFile._move)),
        )
        for module, name, function in patches:
            setattr(module, name, function)


def remove_half(path: Path) -> None:
    for inner in sorted(path.iterdir())[::2] if path.is_dir() else []:
        inner.unlink()


def write_half(path: Path) -> None:
    path.write_bytes(b"half of it")


def in_child(function: Callable[[], None]) -> int:
    """Runs it in a forked process; the signal that killed it, 0 for none, or minus its status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return -code


def scripted(loop: TrainingLoop, *_: object) -> dict[str, float]:
    return {"loss": LOSSES[loop.at.step]}


def attempt(run: RunConfig, at: int | None, names: Path | None = None) -> int:
    """One process that trains; `names` receives the moments that it passed."""

    def work() -> None:
        if run.checkpoints.best:
            TrainingLoop._heldout = scripted  # type: ignore[method-assign,assignment]
        fuse = Fuse(at)
        fuse.install()
        result = fit(run, fuse.cell)
        assert result.step == run.steps
        if names is not None:
            names.write_text(json.dumps(fuse.names))

    return in_child(work)


def outcome(folder: Path) -> dict[str, Any]:
    """Digests of what a run leaves, its metrics without the clock, and what should not be left."""
    last = folder / "checkpoints" / "step-00000005"
    files = [*(folder / name for name in OUTCOME), *sorted(last.iterdir())]
    digests = {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files
    }
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "heldout_loss")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        "digests": digests,
        "metrics": [{key: line.get(key) for key in keys} for line in lines],
        "checkpoints": sorted(p.name for p in (folder / "checkpoints").iterdir()),
        "leftovers": sorted(p.name for p in folder.rglob(".partial*")),
    }


def run_of(root: Path, states: StatesPlace, best: bool = False, stream: bool = False) -> RunConfig:
    run = tiny_run(root)
    if stream:  # of five windows
        return replace(run, data=replace(run.data, streaming=True, window="70B"))
    if best:
        checkpoints = replace(run.checkpoints, keep=1, best=True)
        return replace(run, checkpoints=checkpoints, evaluation=replace(run.evaluation, every=1))
    if states is StatesPlace.AUTO:
        return run
    model = ModelConfig(config=MODEL, dtype=DType.BFLOAT16)  # with masters
    return replace(run, model=model, optimizer=replace(run.optimizer, states=states))


def trial(root: Path, at: int, states: StatesPlace, best: bool, stream: bool) -> dict[str, Any]:
    """A run killed at a moment and started again."""
    where = root / f"kill-{at}"
    # Its own cache, so that tokens are written, and interrupted, too.
    run = run_of(root, states, best, stream)
    run = replace(
        run, folder=str(where / "run"), data=replace(run.data, cache=str(where / "cache"))
    )
    first, second = attempt(run, at), attempt(run, None)
    found = outcome(where / "run") if second == 0 else {}
    shutil.rmtree(where)
    return {"at": at, "first": first, "second": second, **found}


def report(root: Path, stride: int, count: int = 0, best: int = 0, stream: int = 0) -> None:
    """Write the report to report.json in `root`."""
    warnings.simplefilter("ignore")
    states = StatesPlace.DISK if count else StatesPlace.AUTO
    torch.set_num_threads(1)
    # What is imported at its first use is imported here, once. No backward: its threads and forks
    # do not go together.
    model: Any = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
    TrainingOptimizer(model, OptimizerConfig()).step(0.0, torch.zeros(()))
    model.save_pretrained(root / "warm")
    run = run_of(root, states, bool(best), bool(stream))
    status = attempt(run, None, root / "names.json")
    assert status == 0, status
    names = json.loads((root / "names.json").read_text())
    first_of_kind = {name.split()[0]: at for at, name in reversed([*enumerate(names)])}.values()
    changing = [at for at, name in enumerate(names) if name in ("rename", "remove", "tensors")]
    often = set(changing[:: max(1, stride // 10)])
    chosen = [
        at for at in range(len(names)) if at % stride == 0 or at in often or at in first_of_kind
    ]
    if count:
        chosen = random.Random(0).sample(range(len(names)), count)
    if best:
        chosen = [at for at in changing if names[at] != "tensors"][::stride]
    if stream:  # a thread's moments come sooner or later, so that there may be fewer of them
        chosen = random.Random(0).sample(range(int(0.9 * len(names))), stream)
    trials = [trial(root, at, states, bool(best), bool(stream)) for at in chosen]
    found = {"names": names, "whole": outcome(root / "run"), "trials": trials}
    (root / "report.json").write_text(json.dumps(found), "utf-8")
