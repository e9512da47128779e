"""What cannot be read is named, passed over and kept: it may be whole."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from farspan.checkpoint import format as checkpoint_format
from farspan.checkpoint.format import LIST
from farspan.checkpoint.saver import Saver, entries_of, model_tensors
from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from tests.checkpoint.saved import ALONE, RANK_0, relist, restate, truncate
from tests.checkpoint.test_saver import RUN, equal, live, names, resume, save


@contextmanager
def as_another_account() -> Iterator[None]:
    """Modes bind everyone but root."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other accounts reach, which pytest's are not."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("name", "inside"),
    [(RANK_0, True), (LIST, True), (".", False)],
)
def test_a_checkpoint_that_may_not_be_read_is_passed_over(
    public: Path, name: str, inside: bool
) -> None:
    older, latest = save(public, 4), save(public, 5)
    (latest / name).chmod(0)
    try:
        with as_another_account():
            step, into, (warning,) = resume(public)
    finally:
        (latest / name).chmod(0o755)
    assert step == 4
    assert equal(into, live(4.0))
    where = latest / name if inside else latest
    assert warning == (
        f"{where}: cannot be read: Permission denied; resuming from {older} instead; it may be "
        "intact: this run renames it to step-00000005.set-aside at its step"
    )


def replicated() -> Saver:
    tensors = model_tensors(torch.nn.Linear(3, 2))
    return Saver(entries_of(tensors, {"step/w": torch.tensor(1.0)}), ALONE)


def sharded() -> Saver:
    tensors = model_tensors(torch.nn.Linear(3, 2))
    return Saver(entries_of(tensors, {"step/w": torch.tensor(1.0)}), ALONE, lambda: None)


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> Iterator[None]:
    """The disk does not give their bytes back, for a while."""
    own = checkpoint_format._WantedBox._read

    def fail(reading: checkpoint_format._WantedBox, file: Any, memory: memoryview) -> bool:
        if Path(file.name) in paths:
            raise OSError(errno.EIO, "Input/output error")
        return own(reading, file, memory)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_format._WantedBox, "_read", fail)
        yield


@pytest.mark.parametrize("make", [replicated, sharded])
def test_what_could_not_be_read_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Saver]
) -> None:
    """Neither as later than a save, nor as too old, nor when its step is saved again."""

    def step(saver: Saver, number: int) -> None:
        save(tmp_path, number, keep=1, saver=saver)

    for number in (4, 5, 7):
        save(tmp_path, number, keep=9, saver=make())
    (tmp_path / "step-00000005" / "mine").write_text("x")
    saver, warnings = make(), list[str]()
    lost = [tmp_path / f"step-0000000{n}" / RANK_0 for n in (5, 7)]
    with unreadable(monkeypatch, *lost):
        restored = saver.resume(tmp_path, RUN, warnings.append)
    assert restored is not None
    assert restored.at.step == 4
    assert [text.split("; ")[-1] for text in warnings] == [
        f"it may be intact: this run renames it to step-0000000{n}.set-aside at its step"
        for n in (7, 5)
    ]
    step(saver, 4)
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000007"]
    (tmp_path / "step-00000005.set-aside").mkdir()  # from an earlier time
    step(saver, 5)
    aside = ["step-00000005.set-aside", "step-00000005.set-aside-2"]
    assert names(tmp_path) == ["step-00000005", *aside, "step-00000007"]
    assert (tmp_path / aside[1] / "mine").exists()
    step(saver, 6)
    step(saver, 8)
    assert names(tmp_path) == [*aside, "step-00000007", "step-00000008"]
    again = make().resume(tmp_path, RUN, pytest.fail)
    assert again is not None
    assert again.at.step == 8


def test_of_what_this_run_passed_over_only_the_damaged_is_replaced(tmp_path: Path) -> None:
    """A checkpoint of another run, or under another name than its own, may be whole."""
    save_linear(tmp_path, 3).rename(tmp_path / "renamed")
    for number in (4, 5, 6, 8):
        save_linear(tmp_path, number)
    truncate(tmp_path / "step-00000005" / RANK_0)
    restate(run="other")(tmp_path / "step-00000006" / LIST)
    (tmp_path / "renamed").rename(tmp_path / "step-00000007")
    relist(tmp_path / "step-00000008", lambda listed: listed.update(format=3))
    saver, warnings = replicated(), list[str]()
    saver.resume(tmp_path, RUN, warnings.append)
    assert ["renames it" in text for text in warnings] == [True, True, True, False]
    save(tmp_path, 4, keep=1, saver=saver)
    assert names(tmp_path) == [f"step-0000000{n}" for n in (4, 6, 7, 8)]


def save_linear(folder: Path, step: int) -> Path:
    """Of the model of `replicated`."""
    return save(folder, step, keep=9, saver=replicated())


def test_an_old_one_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)
    own = os.replace

    def fail(source: Path, target: Path) -> None:
        if source.name == "step-00000004":
            raise OSError(errno.EPERM, "Operation not permitted")
        own(source, target)

    monkeypatch.setattr(os, "replace", fail)
    message = r"cannot remove .*step-00000004: Operation not permitted; fix its permissions"
    with pytest.raises(WriteFailed, match=message):
        save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("folder", [".", "step-00000005"])
def test_what_may_not_be_searched_is_not_taken_for_nothing(public: Path, folder: str) -> None:
    """Its names can be listed."""
    older, latest = save(public / "checkpoints", 4), save(public / "checkpoints", 5)
    (public / "checkpoints" / folder).chmod(0o444)
    with as_another_account():
        if folder == ".":
            with pytest.raises(
                UnsupportedError, match=f"{latest}: cannot be read: Permission denied"
            ):
                resume(public / "checkpoints")
        else:
            step, _, (warning,) = resume(public / "checkpoints")
            assert step == 4
            assert "Permission denied; resuming from" in warning
    (public / "checkpoints" / folder).chmod(0o755)
    assert older.exists()


@pytest.mark.parametrize("name", [LIST, RANK_0])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    save(tmp_path, 4)
    path = save(tmp_path, 5) / name
    path.unlink()
    os.mkfifo(path)
    step, _, (warning,) = resume(tmp_path)
    assert step == 4
    assert warning.startswith(f"{path}: cannot be read: neither a file nor a folder; resuming from")


def test_checkpoints_that_may_not_be_listed_are_not_taken_for_none(public: Path) -> None:
    """The run would begin anew."""
    save(public / "checkpoints", 4)
    (public / "checkpoints").chmod(0)
    with (
        as_another_account(),
        pytest.raises(UnsupportedError, match="checkpoints: cannot be read: Permission denied"),
    ):
        resume(public / "checkpoints")
