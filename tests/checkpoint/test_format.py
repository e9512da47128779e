"""Checkpoints of all ranks, read on another number of them and in another layout."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from farspan.checkpoint.format import (
    LIST,
    Entries,
    copy_saved,
    read_list,
    refuse_other_model,
    save_entries,
    together,
)
from farspan.distributed.fsdp import (
    ShardPlacement,
    Stage,
    local,
    placement_along,
    whole_placement,
)
from farspan.distributed.run_context import DistributedContext, launch_env
from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from tests.checkpoint.saved import ALONE, RANK_0, flip, relist, saved_tensors, truncate
from tests.distributed.cut import Model, sharded
from tests.ranks import RankError, run_ranks

STATE = {"step": 7, "loss": 1.25}
RANK_1 = "rank-00001.safetensors"


def world() -> DistributedContext:
    """All ranks of the process group, or this process alone."""
    return DistributedContext(torch.device("cpu"), launch_env())


def load_entries(path: Path, entries: Entries, unread: tuple[str, ...] = ()) -> dict[str, Any]:
    saved = together(world(), lambda: read_list(path))
    refuse_other_model(saved, entries, unread, world())
    copy_saved(saved, entries, world())
    return saved.state


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
    save_entries(path, entries_of(Model(), stage), STATE, world())


def loaded(path: Path, stage: Stage) -> list[str]:
    """Loads into this layout, and into one process's, from what this layout would have saved."""
    entries = entries_of(Model(), stage)
    found = blank(entries)
    assert load_entries(path, found) == STATE
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
    found = saved_tensors(path)
    assert sorted(found) == names
    assert all(torch.equal(found[name], should[name]) for name in names)


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
    save_entries(path, parts(tensor, rows), {}, world())


def load_parts(path: Path, tensor: int, rows: int) -> None:
    should = parts(tensor, rows)
    found = blank(should)
    load_entries(path, found)
    assert all(torch.equal(found[name][0], should[name][0]) for name in should)


def test_boxes_of_fused_projections_and_columns_come_together(tmp_path: Path) -> None:
    run_ranks(4, save_parts, tmp_path / "a", 2, 2)
    run_ranks(3, load_parts, tmp_path / "a", 1, 3)
    run_ranks(3, load_parts, tmp_path / "a", 3, 1)
    found = {name: torch.zeros(12, 5, dtype=torch.float64) for name in ("fused", "columns", "same")}
    load_entries(tmp_path / "a", {name: (t, whole_placement(t.shape)) for name, t in found.items()})
    assert all(torch.equal(t, numbers((12, 5))) for t in found.values())


# -- faults -------------------------------------------------------------------------------------


def die_writing(path: Path) -> None:
    entries = entries_of(Model(), Stage.ZERO_3)
    if dist.get_rank() == 1:
        vars(os)["fsync"] = lambda *_: os._exit(3)
    save_entries(path, entries, {"step": 8}, world())


def fail_writing(path: Path) -> str:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    entries = entries_of(Model(), Stage.ZERO_3)
    if dist.get_rank() == 1:
        vars(os)["fsync"] = full
    with pytest.raises(WriteFailed) as failed:
        save_entries(path, entries, {"step": 8}, world())
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
        assert f"{RANK_1}: No space left on device; free" in text
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    run_ranks(2, saved, path, Stage.ZERO_3)  # and it can be written again
    run_ranks(2, loaded, path, Stage.ZERO_3)


def a_checkpoint(path: Path) -> dict[str, tuple[Tensor, ShardPlacement]]:
    entries = {
        name: (numbers(shape), whole_placement(shape))
        for name, shape in (("a", (3, 2)), ("b", (4,)))
    }
    save_entries(path, entries, STATE, ALONE)
    return entries


def refused(path: Path, entries: Entries, unread: tuple[str, ...] = ()) -> str:
    """Why; nothing is copied."""
    entries = blank(entries)
    with pytest.raises(UnsupportedError) as error:
        load_entries(path, entries, unread)
    assert all(bool((tensor == 77).all()) for tensor, _ in entries.values())
    return str(error.value)


def overlapping(listed: dict[str, Any]) -> None:
    """Rows 0, 1 and 1 again in place of three: as many elements as there must be."""
    own = listed["tensors"]["a"]
    box = own["boxes"][0]
    own["boxes"] = [box | {"shape": [2, 2]}, box | {"offset": [1, 0], "shape": [1, 2]}]


def same_bytes(listed: dict[str, Any]) -> None:
    """The end of one tensor is another, too."""
    (first,), (last,) = (listed["tensors"][name]["boxes"] for name in "ab")
    assert first["start"] < last["start"]
    first["start"] = last["start"] - 8


def nested(depth: int) -> Any:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def test_a_list_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Whoever wrote it: its own sum is right."""
    path = tmp_path / "step"
    entries = a_checkpoint(path)
    before = (path / LIST).read_text()
    file = "expected a file of the checkpoint, a byte offset and an XXH3"
    gaps, outside = "boxes do not cover the whole shape", "exceeds"

    def of_b(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        return lambda listed: change(listed["tensors"]["b"])

    def of_box(**changed: Any) -> Callable[[dict[str, Any]], Any]:
        return of_b(lambda b: b["boxes"][0].update(changed))

    for change, words in (
        (lambda listed: listed.update(format=3), "format 3, expected 2"),
        (lambda listed: listed.update(tensors=[]), "damaged or changed"),
        (lambda listed: listed.pop("state"), "damaged or changed"),
        (of_b(lambda b: b.update(boxes=[])), gaps),
        (of_b(lambda b: b.update(boxes=b["boxes"] * 2)), gaps),
        (of_b(lambda b: b.update(boxes=None)), "damaged or changed"),
        (overlapping, "overlaps another"),
        (of_b(lambda b: b.update(dtype="save")), "not a dtype of a tensor"),
        (of_b(lambda b: b.update(shape=[2**70])), "not a shape of a tensor"),
        (of_b(lambda b: b.update(shape=[-1])), "not a shape of a tensor"),
        (of_b(lambda b: b.update(shape=[4.0])), "not a shape of a tensor"),
        (of_b(lambda b: b.update(shape=[True])), "not a shape of a tensor"),
        (of_box(shape=[3]), gaps),
        (of_box(shape=[5]), outside),
        (of_box(offset=[1]), outside),
        (of_box(offset=[]), "damaged or changed"),
        (of_box(file="../step/rank-00000.safetensors"), file),
        (of_box(file="nowhere"), "truncated or changed"),
        (of_box(file=5), file),
        (of_box(start=-8), file),
        (of_box(start="8"), file),
        (of_box(start=8.0), file),
        (of_box(start=True), file),
        (of_box(start=None), file),
        (of_box(file="a\0b"), file),
        (of_box(file=".."), file),
        (of_box(xxh3=None), file),
        (of_box(xxh3=5), file),
        (of_box(shape=[4.0]), "expected offset and shape of a box"),
        (of_box(offset=[0.0]), "expected offset and shape of a box"),
        (of_box(offset=[False]), "expected offset and shape of a box"),
        (same_bytes, "overlap in a file"),
        (lambda listed: listed.update(tensors={"b": nested(900)}), "nested"),
        (of_box(start=10**6), "truncated or changed"),
    ):
        relist(path, change)
        assert words in refused(path, entries), words
        (path / LIST).write_text(before)
    load_entries(path, entries)


def cut_in_halves(path: Path) -> Entries:
    """Rank 0 has rows 0 and 1 of four, rank 1 the others."""
    first = 2 * dist.get_rank()
    rows = numbers((4, 2))[first : first + 2].clone()
    entries = {"a": (rows, placement_along((4, 2), 0, [(first, first + 2)]))}
    save_entries(path, entries, STATE, world())
    return entries


def said_of(path: Path) -> tuple[str, str]:
    """What all ranks say of a file that is cut off, before anything is copied, and of one whose
    bits have changed."""
    entries, said = blank(cut_in_halves(path)), []
    good = (path / RANK_1).read_bytes()
    for damage in (truncate, flip):
        dist.barrier()
        if dist.get_rank() == 0:
            (path / RANK_1).write_bytes(good)
            damage(path / RANK_1)
        dist.barrier()
        with pytest.raises(UnsupportedError) as error:
            load_entries(path, entries)
        if damage is truncate:
            assert bool((entries["a"][0] == 77).all())
        said.append(str(error.value))
    return said[0], said[1]


def test_damage_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    ours, theirs = run_ranks(2, said_of, tmp_path / "step")
    assert ours == theirs
    assert f"{RANK_1}: " in ours[0]
    assert ours[0].endswith("truncated or changed")
    assert f"{RANK_1}: a@2,0: damaged or changed: its XXH3 checksum differs from {LIST}" in ours[1]


def what_each_has(path: Path) -> None:
    """Two tensors that both ranks have, and a large one of each."""
    rank = dist.get_rank()
    entries = {f"shared {i}": (numbers((5,)), whole_placement((5,))) for i in range(2)}
    entries[f"own {rank}"] = numbers((9,)), whole_placement((9,))
    save_entries(path, entries, STATE, world())


def test_what_all_ranks_have_is_written_once_by_turns(tmp_path: Path) -> None:
    run_ranks(2, what_each_has, tmp_path / "step")
    files = [set(load_file(tmp_path / "step" / name)) for name in (RANK_0, RANK_1)]
    assert files == [{"shared 0@0", "own 0@0"}, {"shared 1@0", "own 1@0"}]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    entries = a_checkpoint(tmp_path / "step")
    a, b = entries["a"], entries["b"]
    assert "b is in the checkpoint, but not in this model" in refused(tmp_path / "step", {"a": a})
    assert load_entries(tmp_path / "step", {"a": a}, unread=("b",)) == STATE
    assert "c is in this model, but not in the checkpoint" in refused(
        tmp_path / "step", {"a": a, "b": b, "c": b}
    )
    wide = {"a": a, "b": (b[0].float(), b[1])}
    assert "b is float64[4], but float32[4] in this model" in refused(tmp_path / "step", wide)
    long = {"a": a, "b": (numbers((5,)), whole_placement((5,)))}
    assert "b is float64[4], but float64[5] in this model" in refused(tmp_path / "step", long)


def test_boxes_that_do_not_fill_a_tensor_are_not_saved(tmp_path: Path) -> None:
    rows = {"a": (numbers((3, 2)), placement_along((4, 2), 0, [(0, 3)]))}
    with pytest.raises(WriteFailed, match="parts of a do not fill it"):
        save_entries(tmp_path / "step", rows, STATE, ALONE)
    assert not any(tmp_path.iterdir())


def test_a_tensor_without_elements_needs_no_box(tmp_path: Path) -> None:
    none = {
        "a": (numbers((2,)), whole_placement((2,))),
        "b": (numbers((0, 3)), whole_placement((0, 3))),
    }
    save_entries(tmp_path / "step", none, STATE, ALONE)
    found = blank(none)
    load_entries(tmp_path / "step", found)
    assert all(torch.equal(found[name][0], none[name][0]) for name in none)
