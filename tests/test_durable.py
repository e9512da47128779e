"""What is published is on the disk before it has its name."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from farspan.durable import PARTIAL, discard, publish, write_bytes, writing


def test_a_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its files, and it; and then the folder that has its name."""
    partial = tmp_path / "partial"
    (partial / "deep").mkdir(parents=True)
    for path in (partial / "one", partial / "deep" / "two"):
        path.write_text("text")
    done: list[Any] = []
    sync, rename = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        done.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_rename)
    inside = {path.stat().st_ino for path in (partial, *partial.rglob("*"))}
    publish(partial, tmp_path / "whole")
    place = done.index("renamed")
    assert inside <= set(done[:place])
    assert tmp_path.stat().st_ino in done[place:]
    assert (tmp_path / "whole" / "deep" / "two").read_text() == "text"


def test_tensors_have_the_modes_of_other_files(tmp_path: Path) -> None:
    """Whatever their writer gives them: safetensors 0.8 keeps others out."""
    write_bytes(tmp_path / "bytes", b"text")
    with writing(tmp_path / "made"):
        save_file({"a": torch.zeros(2)}, tmp_path / "made" / "tensors")
    assert (tmp_path / "made" / "tensors").stat().st_mode == (tmp_path / "bytes").stat().st_mode


@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_what_lies_in_the_way_of_a_removal_goes(tmp_path: Path, kind: str) -> None:
    """And nothing behind a link does."""
    theirs, doomed = tmp_path / "theirs", tmp_path / "step"
    for folder in (theirs, doomed):
        folder.mkdir()
        (folder / "file").write_text("text")
    before = {p.name: p.read_text() for p in theirs.iterdir()}
    for name in (f"{PARTIAL}old-step", "made"):
        place = tmp_path / name
        if kind == "link":
            place.symlink_to(theirs)
        elif kind == "file":
            place.write_text("text")
        else:
            place.mkdir()
            (place / "inside").write_text("text")
    discard(doomed)
    with writing(tmp_path / "made"):
        (tmp_path / "made" / "file").write_text("text")
    assert {p.name: p.read_text() for p in theirs.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["made", "theirs"]
    assert os.listdir(tmp_path / "made") == ["file"]
