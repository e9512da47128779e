"""Ranks that fail at a chosen moment of a run.

`torchrun ... -m tests.train.faulty train RUN.yaml` is `farspan train RUN.yaml` whose rank 1 is
killed in its third step, at the first attempt.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from farspan.checkpoint import format as checkpoint_format
from farspan.cli import main
from farspan.train import trainer as loop
from farspan.train.config import RunConfig
from farspan.train.context import Components
from tests.train.crash import write_half
from tests.train.fused import Moment, components_with
from tests.train.tiny import Quiet

STEP = 3
ACCUMULATE = 2  # batches an update, of the run that torchrun is given


def happen(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "out of memory":
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")
    if fault == "raises":
        raise ValueError("no such thing")


def faulty_components(accumulate: int, fault: str) -> Components:
    """Something happens to rank 1 in the step."""

    def moment(now: Moment) -> None:
        if (now.rank, now.step, now.cell) == (1, STEP, 2):
            happen(fault)

    return components_with(accumulate, moment)


def fit(run: RunConfig, fault: str) -> str:
    """A rank of a run, and the step that it has come to."""
    if fault == "killed while saving" and os.environ["RANK"] == "0":
        vars(checkpoint_format)["_write"] = killed_halfway(2)  # of one file a checkpoint
    return str(
        loop.train(run, components=faulty_components(run.accumulate, fault), reporter=Quiet()).step
    )


def killed_halfway(call: int) -> Callable[..., Any]:
    """In place of `_write`: at the `call`-th, half a file is written by a process that dies."""
    write, calls = checkpoint_format._write, [0]

    def halfway(path: Path, *rest: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            write_half(path)
            happen("killed")
        return write(path, *rest)

    return halfway


def first_attempt_fails() -> None:
    fault = "killed" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "nothing"
    vars(loop)["Components"] = lambda: faulty_components(ACCUMULATE, fault)
    main()


if __name__ == "__main__":
    first_attempt_fails()
