"""A model trained in memory that is stitched from random chunks, or replayed from a plan, computes
the same bits as in torch's own: losses of every step, and the weights at the end.

Each run is a process, forked from one: torch's allocator of main memory is there once.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from farspan_memory.errors import UnsupportedError
from farspan_memory.native import LIBRARY, UNPLANNED, EventKind, NativeEvent, library
from farspan_memory.placement import Placement, PlacementRequest
from farspan_memory.replay import iteration, plan_iteration, trace_of
from tests.memory.check_placement import check_placement
from tests.pytorch.cpu_allocator import PROGRAM, build_broken, build_driver, build_shim, once, run

MIB = 2**20
CAPACITY = 96 * MIB
ALL = ["fixed", "varying", "checkpointing"]

try:
    library(LIBRARY)
except UnsupportedError as reason:
    pytestmark = pytest.mark.skip(reason=str(reason))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, build_shim)


@pytest.fixture(scope="module")
def recording(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The fixed scenario in mode record, and its events."""

    def recorded(folder: Path) -> Path:
        result = run(folder, shim=str(shim), mode="record", scenarios=ALL, capacity=CAPACITY)
        made = folder / "result.json"
        made.write_text(json.dumps(result))
        return made

    return json.loads(once(tmp_path_factory, recorded).read_text())


@pytest.fixture(scope="module")
def expected(recording: Any) -> dict[str, Any]:
    """A setting: the bits of torch's own allocator, which no program computes again."""
    return {"expected": recording["expected"]}


@pytest.mark.parametrize("mode", ["stitch", "replay"])
def test_installed_over_a_driver_everything_goes_its_way(
    shim: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, mode: str
) -> None:
    """farspan_memory.install itself, with the calls of the CUDA backend answered by a fake driver:
    the same bits, PyTorch's statistics, and its exception."""
    program = PROGRAM.with_name("install_program.py")
    driver = str(once(tmp_path_factory, build_driver))
    result = run(tmp_path, program, shim=str(shim), mode=mode, driver=driver)
    assert result["found"] == result["expected"]
    assert result["error"] == "torch.OutOfMemoryError"
    holding, after, end = (result[name] for name in ("holding", "after", "end"))
    held = 256 * MIB
    assert held <= holding["allocated"] <= holding["max_allocated"] <= holding["reserved"]
    # Of the device 500 GiB are free, of the capacity less.
    assert holding["free"] == 1024 * MIB - holding["reserved"] >= 0
    assert after["allocated"] == holding["allocated"] - held
    assert after["max_allocated"] == after["allocated"]
    assert after["ooms"] == 0
    assert result["caught"].startswith("CUDA out of memory. Tried to allocate 4.00 GiB")
    assert end["ooms"] == 1
    assert end["summary"] > 1000
    if mode == "replay":
        assert result["hits"] == 3 * result["planned"] > 1000


def same_bits(result: Any) -> None:
    for name, expected in result["expected"].items():
        assert result["found"][name] == expected, name
    assert result["broken"] == ""


def test_recorded_training_computes_the_same_bits(recording: Any) -> None:
    same_bits(recording)
    assert len(recording["expected"]) == len(ALL)


def test_a_recording_has_every_tensor(recording: Any) -> None:
    trace = trace_of(NativeEvent(EventKind(k), *rest) for k, *rest in recording["events"])
    counted = recording["statistics"][ALL[-1]]
    requests = trace.requests()
    assert len(requests) == counted["mallocs"]
    assert trace.live_peak() == counted["requested_peak"]


def test_stitched_training_computes_the_same_bits(
    shim: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    result = run(
        tmp_path, shim=str(shim), mode="stitch", scenarios=ALL, capacity=CAPACITY, **expected
    )
    same_bits(result)
    counted = result["statistics"][ALL[-1]]
    # What makes this a proof: most large tensors lay on chunks from all over the memory.
    large = counted["mallocs"] - counted["small_mallocs"]
    assert counted["s1_stitched"] + counted["stitches"] > large / 2
    assert large > 3000


def test_replayed_training_computes_the_same_bits(
    recording: Any, expected: dict[str, Any], shim: Path, tmp_path: Path
) -> None:
    """The plan is of one step of the fixed scenario; the others deviate from it in every step."""
    trace = trace_of(NativeEvent(EventKind(k), *rest) for k, *rest in recording["events"])
    plan = plan_iteration(iteration(trace, 2))
    rows = [list(row) for row in plan.rows]
    written = {"rows": rows, "arena": plan.arena, "lower_bound": plan.lower_bound}
    given = {"scenarios": ALL, "capacity": CAPACITY, "plan": written, **expected}
    result = run(tmp_path, shim=str(shim), mode="replay", **given)
    same_bits(result)
    fixed, varying, last = (result["statistics"][name] for name in ALL)
    # Steps 2 to 5 are the recorded one; the first also makes optimizer states, and has no plan.
    assert fixed["replay_hits"] >= 4 * plan.planned
    assert fixed["replay_misses"] == fixed["replay_overlaps"] == 0
    assert varying["replay_misses"] > fixed["replay_misses"]
    assert varying["replay_resyncs"] + varying["replay_give_ups"] > 0
    assert last["iterations"] == 3 * (5 + 1)


def test_a_replay_learns_its_plan_from_the_second_step(
    shim: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    given = {"scenarios": ["fixed", "varying"], "capacity": CAPACITY, **expected}
    result = run(tmp_path, shim=str(shim), mode="replay", **given)
    same_bits(result)
    counted = result["statistics"]["fixed"]
    assert result["planned"] > 100
    assert counted["replay_hits"] >= 3 * result["planned"]


def test_a_replay_that_forgets_learns_the_next_kind_of_step(
    shim: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    names = ["varying", "fixed"]
    given = {"scenarios": names, "capacity": CAPACITY, "forget": True, **expected}
    result = run(tmp_path, shim=str(shim), mode="replay", **given)
    same_bits(result)
    varying, fixed = (result["statistics"][name] for name in names)
    # Of five fixed steps the second is recorded, and three follow it without a miss.
    assert fixed["replay_hits"] - varying["replay_hits"] > 3 * 500
    assert fixed["replay_misses"] == varying["replay_misses"]
    assert result["planned"] is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_library_that_assigns_a_chunk_twice_fails(
    shim: Path,
    expected: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """The bits differ, and the allocator's own checker names the chunk."""
    broken = once(tmp_path_factory, build_broken)
    result = run(
        tmp_path,
        shim=str(shim),
        library=str(broken),
        mode="stitch",
        scenarios=["fixed"],
        capacity=CAPACITY,
        **expected,
    )
    assert result["found"]["fixed"] != result["expected"]["fixed"]
    assert "chunk" in result["broken"]


@pytest.mark.parametrize("companion", [True, False])
def test_out_of_memory_is_pytorchs(shim: Path, tmp_path: Path, companion: bool) -> None:
    """With torch's own exception where a compiler made it, else a RuntimeError that says so."""
    cache: dict[str, Any] = {"companion": str(tmp_path / "cache")} if companion else {}
    result = run(tmp_path, shim=str(shim), mode="stitch", capacity=4 * MIB, exhaust=True, **cache)
    own, words = result["caught"]
    assert own is companion
    assert words.startswith("CUDA out of memory. Tried to allocate 256.00 KiB")
    assert result["count"] == 16
    assert result["again"] == 15 * 65536  # of a single tensor


def test_a_plan_of_a_real_step_lies_within_its_lower_bound(recording: Any) -> None:
    trace = trace_of(NativeEvent(EventKind(k), *rest) for k, *rest in recording["events"])
    step = iteration(trace, 2)
    plan = plan_iteration(step)
    placed = [
        (PlacementRequest(-(-row.size // 512) * 512, r.born, r.dies), row.address)
        for row, r in zip(plan.rows, step.requests(), strict=True)
        if row.address != UNPLANNED
    ]
    requests, addresses = zip(*placed, strict=True)
    check_placement(requests, Placement(addresses, plan.arena, plan.lower_bound))
    assert plan.arena <= 1.05 * plan.lower_bound
