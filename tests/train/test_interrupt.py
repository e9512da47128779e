"""Ctrl-C, SIGTERM and SIGHUP end a run between two cells, and the same command goes on."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from farspan.train.config import ModelConfig
from farspan.train.observer import Interrupt, Interrupted
from tests.checkpoint.saved import saved_tensors
from tests.grids import crossed
from tests.train.tiny import MODEL, STEPS, Quiet, TinyStep, fit, signalled, tiny_run


@pytest.fixture(autouse=True)
def hung_up() -> Iterator[None]:
    """SIGHUP ends a process, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "calls"), crossed([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [0, 1, 5, 8])
)
def test_a_step_is_abandoned_and_the_last_one_saved(
    tmp_path: Path, signum: signal.Signals, calls: int
) -> None:
    """`calls` micro-batches, two a step, are done when the signal comes."""
    reference = tiny_run(tmp_path, folder=str(tmp_path / "reference"))
    fit(reference)
    run = tiny_run(tmp_path)
    before = signal.getsignal(signum)
    result = fit(run, signalled(calls, signum))
    assert signal.getsignal(signum) is before
    assert result.exit_code == 128 + signum
    assert result.step == calls // 2
    assert result.message == (
        f"{signum.name}: stopped after step {calls // 2} of {STEPS}; run the same command again "
        "to resume from there"
    )
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints[-1] == f"step-{calls // 2:08d}"
    quiet = Quiet()
    assert fit(run, reporter=quiet).step == STEPS
    assert f"resuming after step {calls // 2} of {STEPS}" in quiet.notes
    same_weights(tmp_path / "reference", tmp_path / "run")
    same_metrics(tmp_path / "reference", tmp_path / "run")


def test_random_numbers_of_an_abandoned_step_are_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(TinyStep):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().__call__(*args, **kwargs)
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.01 * torch.randn(parameter.shape)
            return loss

    monkeypatch.setattr("tests.train.tiny.TinyStep", Noisy)
    fit(tiny_run(tmp_path, folder=str(tmp_path / "reference")))
    run = tiny_run(tmp_path)
    assert fit(run, signalled(7)).step == 3
    torch.manual_seed(77)
    fit(run)
    same_weights(tmp_path / "reference", tmp_path / "run")


def same_weights(first: Path, second: Path) -> None:
    for read in (weights_of, states_of):
        ours, theirs = read(first), read(second)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def states_of(folder: Path) -> dict[str, torch.Tensor]:
    return saved_tensors(folder / "checkpoints" / "step-00000005", "optimizer/")


def same_metrics(first: Path, second: Path) -> None:
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (first, second)
    ]
    for ours, theirs in zip(*lines, strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "tokens", "heldout_loss"):
            assert ours.get(key) == theirs.get(key)


def test_an_interrupted_evaluation_is_made_up_for(tmp_path: Path) -> None:
    fit(tiny_run(tmp_path, folder=str(tmp_path / "reference")))
    armed = [False]

    def interrupt(_: TinyStep, done: int) -> None:
        if done == 8 and not torch.is_grad_enabled() and not armed[0]:
            armed[0] = True
            os.kill(os.getpid(), signal.SIGINT)

    run = tiny_run(tmp_path)
    assert fit(run, interrupt).step == 4
    assert armed == [True]
    fit(run)
    same_metrics(tmp_path / "reference", tmp_path / "run")


def test_a_signal_while_text_is_tokenized_ends_the_run(tmp_path: Path) -> None:
    class Impatient(Quiet):
        def preparing(self, documents: int, tokens: int, read: object = "") -> None:  # noqa: ARG002
            os.kill(os.getpid(), signal.SIGTERM)

    run = tiny_run(tmp_path)
    for number in range(3):  # more than one batch of a megabyte
        (tmp_path / "text" / f"long{number}.txt").write_text("word " * 300_000)
    result = fit(run, reporter=Impatient())
    assert (result.step, result.signum) == (0, signal.SIGTERM)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    run = replace(run, model=ModelConfig(config=MODEL | {"vocab_size": 265}))
    assert fit(run).step == STEPS


def test_a_second_signal_does_what_it_always_did() -> None:
    # A shell starts what runs behind it with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted):
                interrupt.check()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_terminal_may_hang_up_again_and_again() -> None:
    """It does so itself, and its shell again, also behind a Ctrl-C."""
    for first in (signal.SIGHUP, signal.SIGTERM):
        with Interrupt() as interrupt:
            for signum in (first, signal.SIGHUP, signal.SIGHUP):
                signal.raise_signal(signum)
            with pytest.raises(Interrupted):
                interrupt.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_under_nohup_a_terminal_may_close(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def interrupt(_: TinyStep, calls: int) -> None:
        if calls == 3:
            os.kill(os.getpid(), signal.SIGHUP)

    assert fit(tiny_run(tmp_path), interrupt).step == STEPS
