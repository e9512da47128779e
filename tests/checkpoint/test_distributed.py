"""Checkpoints of all ranks, read on another number of them and in another layout."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farspan import durable
from farspan.checkpoint.distributed import load_entries, read_shapes, read_state, save_entries
from farspan.checkpoint.format import Entries
from farspan.distributed.fsdp import (
    ShardPlacement,
    ShardRegion,
    Stage,
    local,
    placement_along,
    whole_placement,
)
from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from tests.distributed.cut import Model, sharded
from tests.ranks import RankError, run_ranks

STATE = {"step": 7, "loss": 1.25}


def entries_of(model: Model, stage: Stage) -> Entries:
    """Of a model that is cut, and of AdamW on its parameters."""
    cut = sharded(model, stage)
    places = cut.places()
    found: dict[str, tuple[Tensor, ShardPlacement]] = {}
    adam = torch.optim.AdamW([p for p in cut.parameters().values() if p.requires_grad], 1e-2)
    for name, parameter in cut.parameters().items():
        found[f"model/{name}"] = local(parameter), places[name]
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter.detach()) * parameter.detach()
    adam.step()
    for name, parameter in cut.parameters().items():
        for key, value in adam.state.get(parameter, {}).items():
            place = places[name] if value.ndim else whole_placement(())
            found[f"{key}/{name}"] = local(value), place
    return found


def whole() -> dict[str, Tensor]:
    """The same in one process."""
    model, found = Model(), {}
    named = dict(model.named_parameters())
    adam = torch.optim.AdamW([p for p in named.values() if p.requires_grad], 1e-2)
    for p in named.values():
        p.grad = p.detach().clone() if p.requires_grad else None
    adam.step()
    for name, p in named.items():
        found[f"model/{name}"] = p.detach()
        found |= {f"{key}/{name}": value for key, value in adam.state.get(p, {}).items()}
    return found


def blank(entries: Entries) -> Entries:
    return {name: (torch.full_like(t, 77), place) for name, (t, place) in entries.items()}


def saved(path: Path, stage: Stage) -> None:
    save_entries(path, entries_of(Model(), stage), STATE, dist.group.WORLD)


def loaded(path: Path, stage: Stage) -> list[str]:
    """Loads into this layout, and into one process's, from what this layout would have saved."""
    entries = entries_of(Model(), stage)
    found = blank(entries)
    assert load_entries(path, found, dist.group.WORLD) == {"format": 1, **STATE}
    for name, (tensor, _) in entries.items():
        assert torch.equal(found[name][0], tensor), name
    return sorted(found)


def test_what_two_ranks_saved_four_read_and_save_for_one(tmp_path: Path) -> None:
    two, four = tmp_path / "two", tmp_path / "four"
    run_ranks(2, saved, two, Stage.ZERO_3)
    names = run_ranks(4, read_and_save, two, four)[0]
    for path in (two, four):
        in_one_process(path, names)
    run_ranks(2, loaded, four, Stage.ZERO_0)


def read_and_save(two: Path, four: Path) -> list[str]:
    names = loaded(two, Stage.ZERO_3)
    saved(four, Stage.ZERO_2)
    return names


def in_one_process(path: Path, names: list[str]) -> None:
    should = whole()
    assert sorted(should) == names
    shapes = read_shapes(path)
    assert shapes == {name: (t.dtype, tuple(t.shape)) for name, t in should.items()}
    found = {name: torch.full(shape, 77, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    load_entries(path, {name: (t, whole_placement(t.shape)) for name, t in found.items()})
    assert all(torch.equal(found[name], should[name]) for name in names)
    assert read_state(path)["step"] == STATE["step"]


# -- places -------------------------------------------------------------------------------------


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def parts(tensor: int, rows: int) -> dict[str, tuple[Tensor, ShardPlacement]]:
    """A fused projection, one cut by columns and an odd one: over `tensor` ranks, then by rows."""
    rank = dist.get_rank()
    t, r = rank % tensor, rank // tensor
    found = {}
    for name, dim, ranges in (
        ("fused", 0, [(6 * t // tensor, 6 * (t + 1) // tensor)]),
        ("columns", 1, [(5 * t // tensor, 5 * (t + 1) // tensor)]),
        ("same", 0, [(0, 12)]),
    ):
        if name == "fused":  # the gate's rows and then the up projection's
            ranges = [*ranges, (6 + ranges[0][0], 6 + ranges[0][1])]
        shape = (12, 5)
        place = placement_along(shape, dim, ranges)
        mine = torch.cat([numbers(shape).narrow(dim, a, b - a) for a, b in ranges], dim)
        each = -(-mine.shape[0] // rows)
        first, last = min(r * each, mine.shape[0]), min((r + 1) * each, mine.shape[0])
        found[name] = mine[first:last].clone(), place.rows(first, last)
    return found


def save_parts(path: Path, tensor: int, rows: int) -> None:
    save_entries(path, parts(tensor, rows), {}, dist.group.WORLD)


def load_parts(path: Path, tensor: int, rows: int) -> None:
    should = parts(tensor, rows)
    found = blank(should)
    load_entries(path, found, dist.group.WORLD)
    assert all(torch.equal(found[name][0], should[name][0]) for name in should)


def test_boxes_of_fused_projections_and_columns_come_together(tmp_path: Path) -> None:
    run_ranks(4, save_parts, tmp_path / "a", 2, 2)
    run_ranks(3, load_parts, tmp_path / "a", 1, 3)
    run_ranks(3, load_parts, tmp_path / "a", 3, 1)
    found = {name: torch.zeros(12, 5, dtype=torch.float64) for name in ("fused", "columns", "same")}
    load_entries(tmp_path / "a", {name: (t, whole_placement(t.shape)) for name, t in found.items()})
    assert all(torch.equal(t, numbers((12, 5))) for t in found.values())


def test_rows_of_a_part_keep_their_place() -> None:
    place = placement_along((12, 5), 0, [(3, 6), (9, 12)])
    assert place.rows(2, 5).boxes == (
        ShardRegion((0, 0), (5, 0), (1, 5)),
        ShardRegion((1, 0), (9, 0), (2, 5)),
    )
    assert place.rows(6, 6).boxes == ()
    assert whole_placement((0, 3)).boxes == placement_along((4, 3), 1, [(2, 2)]).boxes == ()
    assert whole_placement(()).boxes == (ShardRegion((), (), ()),)


# -- faults -------------------------------------------------------------------------------------


def die_writing(path: Path) -> None:
    entries = entries_of(Model(), Stage.ZERO_3)
    if dist.get_rank() == 1:
        vars(durable)["save_file"] = lambda *_: os._exit(3)
    save_entries(path, entries, {"step": 8}, dist.group.WORLD)


def fail_writing(path: Path) -> str:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    entries = entries_of(Model(), Stage.ZERO_3)
    if dist.get_rank() == 1:
        vars(durable)["save_file"] = full
    with pytest.raises(WriteFailed) as failed:
        save_entries(path, entries, {"step": 8}, dist.group.WORLD)
    return str(failed.value)


def test_a_rank_that_dies_or_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "step"
    run_ranks(2, saved, path, Stage.ZERO_3)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(RankError):
        run_ranks(2, die_writing, path)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    for text in run_ranks(2, fail_writing, path):
        assert text.startswith("rank 1: cannot write ")
        assert "rank-00001.safetensors: [Errno 28] No space left on device; free" in text
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    run_ranks(2, saved, path, Stage.ZERO_3)  # and it can be written again
    run_ranks(2, loaded, path, Stage.ZERO_3)


def a_checkpoint(path: Path) -> dict[str, tuple[Tensor, ShardPlacement]]:
    entries = {
        name: (numbers(shape), whole_placement(shape))
        for name, shape in (("a", (3, 2)), ("b", (4,)))
    }
    save_entries(path, entries, STATE)
    return entries


def refused(path: Path, entries: Entries, unread: tuple[str, ...] = ()) -> str:
    entries = blank(entries)
    with pytest.raises(UnsupportedError) as error:
        load_entries(path, entries, None, unread)
    assert all(bool((tensor == 77).all()) for tensor, _ in entries.values())
    return str(error.value)


def test_a_damaged_checkpoint_is_refused_and_nothing_is_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before torch reads, which would log a traceback."""
    path = tmp_path / "step"
    entries = a_checkpoint(path)
    file = path / "rank-00000.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "SHA-256" in refused(path, entries)
    file.write_bytes(good[:-1])
    assert "truncated" in refused(path, entries)
    file.unlink()
    assert "missing" in refused(path, entries)
    file.write_bytes(good)
    state = (path / "state.json").read_bytes()
    (path / "state.json").write_bytes(state.replace(b"7", b"8"))
    assert "SHA-256" in refused(path, entries)
    (path / "state.json").write_bytes(state)
    listed = json.loads((path / "tensors.json").read_text())
    for change in ({"format": 2}, {"tensors": {"a": {"dtype": "save", "shape": [], "boxes": []}}}):
        (path / "tensors.json").write_text(json.dumps(listed | change))
        assert "tensors.json" in refused(path, entries)
    (path / "tensors.json").write_text(json.dumps(listed))
    load_entries(path, entries)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO] == []


def test_a_changed_list_of_boxes_is_refused(tmp_path: Path) -> None:
    """No sum is over the list itself: boxes are where their keys say, apart, and fill the whole."""
    path = tmp_path / "step"
    entries = a_checkpoint(path)
    listed = json.loads((path / "tensors.json").read_text())

    def moved(box: dict[str, Any]) -> dict[str, Any]:
        return box | {"offset": [n + 1 for n in box["offset"]]}

    def shorter(box: dict[str, Any]) -> dict[str, Any]:
        return box | {"shape": [n - 1 for n in box["shape"]]}

    boxes = listed["tensors"]["b"]["boxes"]
    for change, words in (
        ([], "the boxes of b do not cover it"),
        ([shorter(boxes[0])], "the boxes of b do not cover it"),
        ([boxes[0]] * 2, "the boxes of b do not cover it"),
        ([moved(boxes[0])], "is not where it says"),
        ({}, "the boxes of b do not cover it"),
        (None, "tensors.json: damaged or changed"),
    ):
        tensor = listed["tensors"]["b"] | {"boxes": change}
        tensors = {"tensors": listed["tensors"] | {"b": tensor}}
        (path / "tensors.json").write_text(json.dumps(listed | tensors))
        assert words in refused(path, entries), change
    longer, rest = ({**boxes[0], "shape": [2]}, {"file": boxes[0]["file"], "shape": [2]})
    rest |= {"offset": [2], "key": "b@2"}
    tensor = listed["tensors"]["b"] | {"boxes": [longer, rest]}
    tensors = {"tensors": listed["tensors"] | {"b": tensor}}
    (path / "tensors.json").write_text(json.dumps(listed | tensors))
    assert "only tensors.json has b@2" in refused(path, entries)
    for shape in ([2**70], [-1], ["4"], [4.0], [True]):
        tensor = listed["tensors"]["b"] | {"shape": shape}
        tensors = {"tensors": listed["tensors"] | {"b": tensor}}
        (path / "tensors.json").write_text(json.dumps(listed | tensors))
        assert "no shape of a tensor" in refused(path, entries)
    for tensors in ({"tensors": []}, {"files": []}):
        (path / "tensors.json").write_text(json.dumps(listed | tensors))
        assert "tensors.json: damaged or changed" in refused(path, entries)


def test_a_list_that_leaves_files_out_is_refused(tmp_path: Path) -> None:
    """What is not listed would not be looked at."""
    path = tmp_path / "step"
    entries = a_checkpoint(path)
    listed = json.loads((path / "tensors.json").read_text())
    file = "rank-00000.safetensors"
    for files, words in (
        ({}, f"no size and sum of {file}"),
        ({file: listed["files"][file]}, "no size and sum of state.json"),
        ({"state.json": listed["files"]["state.json"]}, f"no size and sum of {file}"),
        ({**listed["files"], file: {"sha256": ""}}, "tensors.json: damaged or changed"),
        ({**listed["files"], file: 3}, "tensors.json: damaged or changed"),
        ({**listed["files"], "../x": listed["files"][file]}, "'../x' is no file of a checkpoint"),
    ):
        (path / "tensors.json").write_text(json.dumps(listed | {"files": files}))
        assert words in refused(path, entries), files
    (path / "tensors.json").unlink()
    assert refused(path, entries) == f"{path / 'tensors.json'}: missing"


def cut_in_halves(path: Path) -> Entries:
    """Rank 0 has rows 0 and 1 of four, rank 1 the others."""
    first = 2 * dist.get_rank()
    rows = numbers((4, 2))[first : first + 2].clone()
    entries = {"a": (rows, placement_along((4, 2), 0, [(first, first + 2)]))}
    save_entries(path, entries, STATE, dist.group.WORLD)
    return entries


def copied_nothing(path: Path) -> tuple[str, str]:
    """What is refused of a list whose boxes were changed in keeping with each other, and of a file
    that is cut off; the ranks' parts are as they were."""
    entries = blank(cut_in_halves(path))
    before = (path / "tensors.json").read_text()
    said = []
    for damage in (move_a_row, cut_off):
        dist.barrier()
        if dist.get_rank() == 0:
            damage(path)
        dist.barrier()
        with pytest.raises(UnsupportedError) as error:
            load_entries(path, entries, dist.group.WORLD)
        assert bool((entries["a"][0] == 77).all())
        said.append(str(error.value))
        dist.barrier()
        (path / "tensors.json").write_text(before)
    return said[0], said[1]


def move_a_row(path: Path) -> None:
    listed = json.loads((path / "tensors.json").read_text())
    low, high = listed["tensors"]["a"]["boxes"]
    low["shape"], high["shape"] = [3, 2], [1, 2]
    high["offset"], high["key"] = [3, 0], "a@3,0"
    (path / "tensors.json").write_text(json.dumps(listed))


def cut_off(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_damage_is_found_before_a_copy(tmp_path: Path) -> None:
    """And all ranks say the same."""
    ours, theirs = run_ranks(2, copied_nothing, tmp_path / "step")
    assert ours == theirs
    assert "tensors.json: damaged or changed" in ours[0]
    assert "rank-00001.safetensors: " in ours[1]
    assert ours[1].endswith("truncated or changed")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    entries = a_checkpoint(tmp_path / "step")
    a, b = entries["a"], entries["b"]
    assert "only the checkpoint has b" in refused(tmp_path / "step", {"a": a})
    assert load_entries(tmp_path / "step", {"a": a}, unread=("b",))["step"] == STATE["step"]
    assert "only the model has c" in refused(tmp_path / "step", {"a": a, "b": b, "c": b})
    wide = {"a": a, "b": (b[0].float(), b[1])}
    assert "b is float64[4], here float32[4]" in refused(tmp_path / "step", wide)
    long = {"a": a, "b": (numbers((5,)), whole_placement((5,)))}
    assert "b is float64[4], here float64[5]" in refused(tmp_path / "step", long)


def test_boxes_that_do_not_fill_a_tensor_are_not_saved(tmp_path: Path) -> None:
    rows = {"a": (numbers((3, 2)), placement_along((4, 2), 0, [(0, 3)]))}
    with pytest.raises(WriteFailed, match="parts of a do not cover it"):
        save_entries(tmp_path / "step", rows, STATE)
    assert not any(tmp_path.iterdir())


def test_a_tensor_without_elements_needs_no_box(tmp_path: Path) -> None:
    none = {
        "a": (numbers((2,)), whole_placement((2,))),
        "b": (numbers((0, 3)), whole_placement((0, 3))),
    }
    save_entries(tmp_path / "step", none, STATE)
    found = blank(none)
    load_entries(tmp_path / "step", found)
    assert all(torch.equal(found[name][0], none[name][0]) for name in none)
