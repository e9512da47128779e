"""A checkpoint is whole or it is not used; the one before it survives whatever happens."""

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farspan import durable
from farspan.checkpoint import distributed as checkpoint_ranks
from farspan.checkpoint import local as checkpoint
from farspan.checkpoint.distributed import entries_of
from farspan.checkpoint.local import (
    Live,
)
from farspan.distributed.run_context import DistributedContext
from farspan.durable import WriteFailed, digest
from farspan.spec import UnsupportedError
from farspan.train.run_folder import capture_rng, restore_rng

RUN = {"run": "abc"}
WORLD = DistributedContext(torch.device("cpu"))


def live(value: float, shape: tuple[int, ...] = (2, 3)) -> Live:
    return Live(
        model={"w": torch.full(shape, value), "b": torch.full((4,), value, dtype=torch.bfloat16)},
        optimizer={"step/w": torch.tensor(value), "exp_avg/w": torch.full(shape, -value)},
    )


def state_of(step: int) -> dict[str, Any]:
    return {**RUN, "position": {"step": step, "tokens": 8 * step, "skipped": 0}}


def save(folder: Path, step: int, keep: int = 5) -> Path:
    own, state = live(float(step)), state_of(step)
    return checkpoint.save_checkpoint(folder, own, capture_rng(), state, step=step, keep=keep)


def resume(folder: Path, into: Live | None = None) -> tuple[int | None, Live, list[str]]:
    into = into or live(0.0)
    warnings: list[str] = []
    restored = checkpoint.resume_checkpoint(folder, into, RUN, warnings.append)
    return (restored.state["step"] if restored else None), into, warnings


def equal(a: Live, b: Live) -> bool:
    pairs = [(a.model, b.model), (a.optimizer, b.optimizer)]
    return all(torch.equal(x[name], y[name]) for x, y in pairs for name in {*x, *y})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    step, into, warnings = resume(tmp_path)
    assert step is None
    assert equal(into, live(0.0))
    assert warnings == []


def test_the_latest_comes_back_bit_by_bit(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 10)
    step, into, warnings = resume(tmp_path)
    assert step == 10
    assert equal(into, live(10.0))
    assert warnings == []


def test_only_the_latest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_files_are_safetensors_and_json_with_a_manifest(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == names(path)
    for name, entry in manifest["files"].items():
        assert entry == {"bytes": (path / name).stat().st_size, "sha256": digest(path / name)}
    assert set(load_file(path / "model.safetensors")) == {"w", "b"}
    assert load_file(path / "rng.safetensors")["cpu"].dtype == torch.uint8


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    save(tmp_path, 1)
    expected = torch.randn(3)
    torch.manual_seed(99)
    restored = checkpoint.resume_checkpoint(tmp_path, live(0.0), RUN, pytest.fail)
    assert restored is not None
    restore_rng(restored.rng)
    assert torch.equal(torch.randn(3), expected)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def poison(path: Path) -> None:
    path.write_bytes(pickle.dumps({"w": 1}))


def enlist(path: Path) -> None:
    """A manifest of somebody else's."""
    path.write_text(json.dumps({"files": dict.fromkeys(json.loads(path.read_text())["files"], 5)}))


def nest(path: Path) -> None:
    path.write_text('{"a": ' + "[" * 100_000)


def sum_again(path: Path) -> None:
    """The manifest says what the file is now."""
    listed = path.parent / "manifest.json"
    manifest = json.loads(listed.read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    listed.write_text(json.dumps(manifest))


def place(**changed: Any) -> Callable[[Path], None]:
    """Another position in the state."""

    def change(path: Path) -> None:
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"position": state["position"] | changed}))
        sum_again(path)

    return change


def no_position(path: Path) -> None:
    path.write_text(json.dumps({"format": 1, "step": 5, **RUN}))
    sum_again(path)


def random_numbers(**tensors: Tensor) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        rewrite(path.parent, path.name, tensors)

    return change


def rewrite(path: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """As another model would have saved it: the manifest fits."""
    save_file(tensors, path / name)
    sum_again(path / name)


DAMAGE = [
    (enlist, "manifest.json", r"manifest\.json: no size and SHA-256 under model\.safetensors"),
    (truncate, "model.safetensors", r"model\.safetensors: \d+ bytes, expected \d+: truncated"),
    (truncate, "state.json", r"state\.json: \d+ bytes, expected \d+: truncated"),
    (truncate, "manifest.json", r"manifest\.json: cannot be read as JSON"),
    (flip, "optimizer.safetensors", r"optimizer\.safetensors: its SHA-256 is not the one"),
    (flip, "rng.safetensors", r"rng\.safetensors: its SHA-256 is not the one"),
    (poison, "model.safetensors", r"model\.safetensors: \d+ bytes, expected"),
    (Path.unlink, "optimizer.safetensors", r"optimizer\.safetensors: missing"),
    (Path.unlink, "manifest.json", r"manifest\.json: missing"),
    (nest, "manifest.json", r"manifest\.json: cannot be read as JSON: maximum recursion depth"),
    (nest, "tensors.json", r"tensors\.json: cannot be read as JSON: maximum recursion depth"),
    (place(step=-1), "state.json", r"state\.json: position: expected step, tokens and skipped"),
    (place(tokens="4"), "state.json", r"state\.json: position: expected step, tokens and skipped"),
    (place(skipped=False), "state.json", r"state\.json: position: .*, got {'step': 5, .*False}"),
    (place(step=3), "state.json", "holds the checkpoint of step 3: rename it to step-00000003"),
    (no_position, "state.json", r"state\.json: position: .*, got None"),
    (random_numbers(), "rng.safetensors", "no random numbers to go on from: none of the CPU"),
    (random_numbers(cpu=torch.zeros(9)), "rng.safetensors", "no random numbers to go on from"),
    (
        random_numbers(cpu=torch.zeros(9, dtype=torch.uint8)),
        *("rng.safetensors", "no random numbers to go on from"),
    ),
]


@pytest.mark.parametrize(("damage", "name", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_file(
    tmp_path: Path, damage: Any, name: str, message: str
) -> None:
    damage(save(tmp_path, 5) / name)
    into = live(0.0)
    with pytest.raises(UnsupportedError, match=rf"{message}.*; move this folder away"):
        resume(tmp_path, into)
    assert equal(into, live(0.0))


@pytest.mark.parametrize(("damage", "name", "message"), DAMAGE)
def test_an_older_one_is_used_with_a_warning(
    tmp_path: Path, damage: Any, name: str, message: str
) -> None:
    save(tmp_path, 4)
    damage(save(tmp_path, 5) / name)
    step, into, warnings = resume(tmp_path)
    assert step == 4
    assert equal(into, live(4.0))
    (warning,) = warnings
    assert "resuming from" in warning
    assert "step-00000004 instead" in warning
    assert re.search(message, warning)
    assert "step-00000005" in warning


def test_only_step_and_eight_digits_are_checkpoints(tmp_path: Path) -> None:
    """Whatever else lies there is the user's, and stays."""
    save(tmp_path, 2)
    mine = ["step-00000002-good", "step-00000004.bak", "step-4", "step-000000005", "step-0000000x"]
    for name in mine:
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    assert resume(tmp_path)[0] == 2
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=1)
    assert names(tmp_path) == sorted(["step-00000004", *mine])


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    """As of one that was moved to another disk."""
    folder = tmp_path / "run"
    save(folder, 4).rename(tmp_path / "step-00000004")
    (folder / "step-00000004").symlink_to(tmp_path / "step-00000004")
    assert resume(folder)[0] == 4
    save(folder, 4)
    (folder / ".partial-step-00000003").symlink_to(tmp_path)
    save(folder, 5, keep=1)
    assert names(folder) == ["step-00000005"]
    assert len(names(tmp_path / "step-00000004")) == 5


def test_a_damaged_checkpoint_is_replaced_when_the_run_gets_there_again(tmp_path: Path) -> None:
    save(tmp_path, 4)
    truncate(save(tmp_path, 5) / "model.safetensors")
    save(tmp_path, 5)
    assert resume(tmp_path)[0] == 5
    flip(save(tmp_path, 7) / "model.safetensors")
    save(tmp_path, 6)
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000006"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(2, 3)}, "of another model: only the model has b"),
        (
            {"w": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)},
            "of another model: only the checkpoint has c",
        ),
        (
            {"w": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)},
            r"of another model: w is float32\[3, 2\], here float32\[2, 3\]",
        ),
        (
            {"w": torch.zeros(2, 3), "b": torch.zeros(4)},
            r"of another model: b is float32\[4\], here bfloat16\[4\]",
        ),
    ],
)
def test_a_foreign_checkpoint_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    rewrite(save(tmp_path, 5), "model.safetensors", tensors)
    with pytest.raises(UnsupportedError, match=rf"model\.safetensors: {message}"):
        resume(tmp_path)


def test_a_pickle_under_the_name_of_tensors_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    rewrite(path, "model.safetensors", {"w": torch.zeros(1)})
    poison(path / "model.safetensors")
    sum_again(path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"model\.safetensors: not a safetensors file"):
        resume(tmp_path)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(
        UnsupportedError, match=r"state\.json: belongs to another run: its run is 'abc'"
    ):
        checkpoint.resume_checkpoint(tmp_path, live(0.0), {"run": "other"}, pytest.fail)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """The disk is full when the file `name` is written."""
    write_tensors, write_bytes = checkpoint.write_tensors, durable.write_bytes

    def fail(path: Path) -> None:
        if path.name == name:
            path.write_bytes(b"half")
            raise durable.write_failure(path, "No space left on device")

    def tensors(path: Path, values: Any) -> None:
        fail(path)
        write_tensors(path, values)

    def data(path: Path, values: bytes) -> None:
        fail(path)
        write_bytes(path, values)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", tensors)
        patch.setattr(checkpoint, "write_bytes", data)
        yield


FILES = [f"{n}.safetensors" for n in ("model", "optimizer", "rng")] + [
    "state.json",
    "manifest.json",
]


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(tmp_path, 4, keep=1)
    with (
        failing(monkeypatch, name),
        pytest.raises(WriteFailed, match=rf"cannot write .*{name}: No space left on device; free"),
    ):
        save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000004"]
    assert resume(tmp_path)[0] == 4
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000005"]


def test_a_rename_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 4)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(WriteFailed, match=r"cannot write .*step-00000005: Input/output error"):
            save(tmp_path, 5)
    assert names(tmp_path) == ["step-00000004"]


def test_leftovers_of_a_killed_process_go_away(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / ".partial-step-00000005").mkdir()
    (tmp_path / ".partial-old-step-00000003").mkdir()
    (tmp_path / ".partial-old-step-00000003" / "x").write_text("x")
    (tmp_path / ".partial-mine").write_text("x")
    durable.remove_leftovers(tmp_path, checkpoint.CHECKPOINT_LEFTOVER)
    assert names(tmp_path) == [".partial-mine", "step-00000004"]


@pytest.mark.parametrize("ranks", [False, True])
def test_weights_that_are_no_numbers_are_passed_over(tmp_path: Path, ranks: bool) -> None:
    save(tmp_path, 4)
    own = live(5.0)
    own.model["w"][1, 2] = float("nan")
    if ranks:
        path, entries = tmp_path / "step-00000005", entries_of(own.model, own.optimizer)
        state = {**state_of(5), "step": 5}
        checkpoint_ranks.save_sharded(path, entries, capture_rng(), state, WORLD)
    else:
        checkpoint.save_checkpoint(tmp_path, own, capture_rng(), state_of(5), step=5, keep=5)
    step, into, (warning,) = resume(tmp_path)
    assert step == 4
    assert equal(into, live(4.0))
    assert re.search(r"safetensors: of no use: .*w.* has values that are not a number; re", warning)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("list", "tensors.json: missing"),
        ("generators", "damaged: no random numbers of rank 0"),
        ("size", r"damaged: rng/00000/cpu is uint8[1125899906842624]"),
    ],
)
def test_a_checkpoint_of_ranks_that_lost_something_is_passed_over(
    tmp_path: Path, lost: str, words: str
) -> None:
    """Its list, or all generators: an older checkpoint is gone on from."""
    older, world, own = save(tmp_path, 3), WORLD, live(4.0)
    path = tmp_path / checkpoint.folder_name(4)
    rng = {} if lost == "generators" else capture_rng()
    state = {**RUN, "position": {"step": 4, "tokens": 32, "skipped": 0}, "step": 4}
    checkpoint_ranks.save_sharded(path, entries_of(own.model, own.optimizer), rng, state, world)
    listed = path / checkpoint_ranks.LISTED
    if lost == "list":
        listed.unlink()
    if lost == "size":  # for which there would be no memory
        size = rng["cpu"].numel()
        listed.write_text(listed.read_text().replace(str(size), str(2**50)))
    step, into, (warning,) = resume(tmp_path)
    assert step == 3
    assert equal(into, live(3.0))
    assert warning.startswith(str(listed))
    assert f"{words}; resuming from {older} instead" in warning
