"""A checkpoint is whole or it is not used; the one before it survives whatever happens."""

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from farspan.checkpoint import format as checkpoint_format
from farspan.checkpoint.format import LIST
from farspan.checkpoint.saver import Restored, Saver, entries_of, folder_name
from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from farspan.train.run_folder import capture_rng, restore_rng
from tests.checkpoint.saved import ALONE, RANK_0, flip, flip_in, relist, restate, truncate

RUN = {"run": "abc"}


@dataclass(frozen=True, slots=True)
class Live:
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    def saver(self) -> Saver:
        return Saver(entries_of(self.model, self.optimizer), ALONE)


def live(value: float, shape: tuple[int, ...] = (2, 3)) -> Live:
    return Live(
        model={"w": torch.full(shape, value), "b": torch.full((4,), value, dtype=torch.bfloat16)},
        optimizer={"step/w": torch.tensor(value), "exp_avg/w": torch.full(shape, -value)},
    )


def state_of(step: int) -> dict[str, Any]:
    return {**RUN, "position": {"step": step, "tokens": 8 * step, "skipped": 0}}


def save(
    folder: Path, step: int, keep: int = 5, own: Live | None = None, saver: Saver | None = None
) -> Path:
    saver = saver or (own or live(float(step))).saver()
    saver.save(folder, capture_rng(), state_of(step), step)
    saver.prune(folder, step, keep, None)
    return folder / folder_name(step)


def restored(folder: Path, into: Live, warn: Callable[[str], None]) -> Restored | None:
    return into.saver().resume(folder, RUN, warn)


def resume(folder: Path, into: Live | None = None) -> tuple[int | None, Live, list[str]]:
    into = into or live(0.0)
    warnings: list[str] = []
    found = restored(folder, into, warnings.append)
    return (found.at.step if found else None), into, warnings


def equal(a: Live, b: Live) -> bool:
    pairs = [(a.model, b.model), (a.optimizer, b.optimizer)]
    return all(torch.equal(x[name], y[name]) for x, y in pairs for name in {*x, *y})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_a_safetensors_file_and_a_list(tmp_path: Path) -> None:
    """Which says of each tensor where its bytes are, and their sum."""
    path = save(tmp_path, 3)
    assert names(path) == [LIST, RANK_0]
    listed = json.loads((path / LIST).read_text())
    assert listed["state"] == state_of(3)
    tensors = load_file(path / RANK_0)
    assert set(tensors) == {
        *("model/w@0,0", "model/b@0", "optimizer/step/w@", "optimizer/exp_avg/w@0,0"),
        "rng/00000/cpu@0",
    }
    assert torch.equal(tensors["model/w@0,0"], torch.full((2, 3), 3.0))
    (box,) = listed["tensors"]["model/b"]["boxes"]
    data = (path / RANK_0).read_bytes()[box["start"] :][: 4 * 2]
    assert torch.equal(
        torch.frombuffer(bytearray(data), dtype=torch.bfloat16), tensors["model/b@0"]
    )
    assert box["xxh3"] == xxh3_64_hexdigest(data)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    save(tmp_path, 1)
    expected = torch.randn(3)
    torch.manual_seed(99)
    found = restored(tmp_path, live(0.0), pytest.fail)
    assert found is not None
    restore_rng(found.rng)
    assert torch.equal(torch.randn(3), expected)


def poison(path: Path) -> None:
    path.write_bytes(pickle.dumps({"w": 1}))


def nest(path: Path) -> None:
    path.write_text('{"a": ' + "[" * 100_000)


def forget(path: Path) -> None:
    relist(path.parent, lambda listed: listed["state"].pop("position"))


def forget_generators(path: Path) -> None:
    """There are none of the first rank."""

    def change(listed: dict[str, Any]) -> None:
        listed["tensors"]["rng/00001/cpu"] = listed["tensors"].pop("rng/00000/cpu")

    relist(path.parent, change)


def swell(path: Path) -> None:
    """Generators for which there would be no memory."""

    def change(listed: dict[str, Any]) -> None:
        rng = listed["tensors"]["rng/00000/cpu"]
        rng["shape"] = rng["boxes"][0]["shape"] = [2**50]

    relist(path.parent, change)


def change_text(path: Path) -> None:
    path.write_text(path.read_text().replace('"tokens": 40', '"tokens": 41'))


def at(**changed: Any) -> Callable[[Path], None]:
    return restate(position={"step": 5, "tokens": 40, "skipped": 0} | changed)


CHANGED = "damaged or changed: its XXH3 checksum"
# What is found before anything is copied, and what only when a box is read.
EARLY: list[tuple[Any, str, str]] = [
    (truncate, RANK_0, rf"{RANK_0}: \d+ bytes, expected \d+: truncated"),
    (truncate, LIST, rf"{LIST}: cannot be read as JSON"),
    (poison, RANK_0, rf"{RANK_0}: \d+ bytes, expected"),
    (Path.unlink, RANK_0, rf"{RANK_0}: missing"),
    (Path.unlink, LIST, rf"{LIST}: missing"),
    (nest, LIST, rf"{LIST}: cannot be read as JSON: maximum recursion depth"),
    (change_text, LIST, rf"{LIST}: damaged or changed: its own XXH3 does not match"),
    (at(step=-1), LIST, "step-00000005: position: expected step, tokens and skipped"),
    (at(tokens="4"), LIST, "step-00000005: position: expected step, tokens and skipped"),
    (at(skipped=False), LIST, r"position: .*, got {'step': 5, .*False}"),
    (at(step=3), LIST, "holds the checkpoint of step 3: rename it to step-00000003"),
    (forget, LIST, r"position: .*, got None"),
    (forget_generators, LIST, r"damaged: the random number generators of rank 0"),
    (swell, LIST, r"bytes, expected 1125\d+: truncated"),
    (flip_in("rng/00000/cpu"), LIST, f"rng/00000/cpu@0: {CHANGED} differs from {LIST}"),
]
LATE: list[tuple[Any, str, str]] = [
    (flip_in("model/w"), LIST, rf"{RANK_0}: model/w@0,0: {CHANGED} differs from {LIST}"),
    (flip_in("model/b"), LIST, rf"{RANK_0}: model/b@0: {CHANGED} differs from {LIST}"),
    (flip_in("optimizer/step/w"), LIST, rf"{RANK_0}: optimizer/step/w@: {CHANGED}"),
    (flip_in("optimizer/exp_avg/w"), LIST, rf"{RANK_0}: optimizer/exp_avg/w@0,0: {CHANGED}"),
]


@pytest.mark.parametrize(("damage", "name", "message"), EARLY + LATE)
def test_of_a_damaged_checkpoint_the_file_is_named_and_an_older_one_used(
    tmp_path: Path, damage: Any, name: str, message: str
) -> None:
    """Without an older one it is refused."""
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
    shutil.rmtree(tmp_path / "step-00000004")
    into = live(0.0)
    with pytest.raises(UnsupportedError, match=rf"{message}.*; move this folder away"):
        resume(tmp_path, into)
    if (damage, name, message) in EARLY:
        assert equal(into, live(0.0))


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
    assert len(names(tmp_path / "step-00000004")) == 2


def test_a_damaged_checkpoint_is_replaced_when_the_run_gets_there_again(tmp_path: Path) -> None:
    save(tmp_path, 4)
    truncate(save(tmp_path, 5) / RANK_0)
    save(tmp_path, 5)
    assert resume(tmp_path)[0] == 5
    flip(save(tmp_path, 7) / RANK_0)
    save(tmp_path, 6)
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000006"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(
        UnsupportedError, match=rf"{LIST}: belongs to another run: its run is 'abc'"
    ):
        live(0.0).saver().resume(tmp_path, {"run": "other"}, pytest.fail)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """The disk is full when the file `name` is synced."""
    sync = os.fsync

    def full(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield


@pytest.mark.parametrize("name", [RANK_0, LIST])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_are_no_numbers_are_passed_over(tmp_path: Path, dtype: torch.dtype) -> None:
    def of(value: float) -> Live:
        model = {"w": torch.full((2, 3), value, dtype=dtype)}
        return Live(model, {"exp_avg/w": torch.tensor(float("nan"))})

    save(tmp_path, 4, own=of(4.0))
    own = of(5.0)
    own.model["w"][1, 2] = float("nan")
    save(tmp_path, 5, own=own)
    step, into, (warning,) = resume(tmp_path, of(0.0))
    assert step == 4
    assert torch.equal(into.model["w"], of(4.0).model["w"])
    assert re.search(r"model/w@0,0: contains NaN, from which training .*; re", warning)


# -- large tensors ------------------------------------------------------------------------------


def test_a_tensor_is_cut_into_boxes_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And damage to the last of them, which is found when the others are copied, leaves nothing of
    the newer checkpoint."""
    monkeypatch.setattr(checkpoint_format, "BOX_BYTES", 64)
    monkeypatch.setattr(checkpoint_format, "BLOCK", 24)

    def of(step: float) -> Live:
        return Live({"w": torch.arange(77.0).view(7, 11) + step}, {"step/w": torch.tensor(step)})

    path = save(tmp_path, 4, own=of(4.0))
    boxes = json.loads((path / LIST).read_text())["tensors"]["model/w"]["boxes"]
    assert [box["offset"] for box in boxes] == [[row, 0] for row in range(7)]
    flat = Live({"w": torch.arange(100.0)}, {})
    boxes = checkpoint_format._share(entries_of(flat.model, {}), ALONE)
    assert [box.sizes for _, box in boxes] == [(16,)] * 6 + [(4,)]
    latest = save(tmp_path, 5, own=of(5.0))
    step, into, _ = resume(tmp_path, of(0.0))
    assert step == 5
    assert equal(into, of(5.0))
    last = json.loads((latest / LIST).read_text())["tensors"]["model/w"]["boxes"][-1]
    data = bytearray((latest / RANK_0).read_bytes())
    data[last["start"] + 43] ^= 128
    (latest / RANK_0).write_bytes(bytes(data))
    step, into, (warning,) = resume(tmp_path, of(0.0))
    assert step == 4
    assert equal(into, of(4.0))
    assert f"model/w@6,0: {CHANGED}" in warning


def test_what_is_not_contiguous_or_of_another_dtype_is_saved_as_it_is(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]
    kinds += [torch.float8_e4m3fn, torch.int32, torch.int16]
    turned = {f"{i}": torch.arange(12).view(3, 4).to(kind).t() for i, kind in enumerate(kinds)}
    own = Live(turned, {})
    assert not own.model["0"].is_contiguous()
    save(tmp_path, 5, own=own)
    for like in (torch.zeros(4, 3), torch.zeros(3, 4).t()):
        into = Live({name: like.to(t.dtype) for name, t in own.model.items()}, {})
        resume(tmp_path, into)
        for name, tensor in own.model.items():
            assert torch.equal(into.model[name].double(), tensor.double()), name


# -- how many stay ------------------------------------------------------------------------------


def test_what_a_killed_process_did_not_remove_is_removed_later(tmp_path: Path) -> None:
    """It is started again, and prunes before it goes on; a later one, which was damaged, stays
    until its place is taken."""
    for step in (2, 3, 4, 5):
        save(tmp_path, step, keep=9)
    truncate(tmp_path / "step-00000005" / RANK_0)
    saver = live(0.0).saver()
    found = saver.resume(tmp_path, RUN, lambda _: None)
    assert found is not None
    saver.prune(tmp_path, found.at.step, 1, 2, saved=False)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    saver.prune(tmp_path, 4, 1, None)
    assert names(tmp_path) == ["step-00000004"]
