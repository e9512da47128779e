"""Plans as files: what is written is read, for the same program only."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from farspan_memory.errors import UnsupportedError
from farspan_memory.placement import place_greedily
from farspan_memory.replay import PlacementPlan, digest, make_plan, read_plan, rounded, write_plan
from farspan_memory.trace import FreeEvent, Malloc, Mark, Trace
from tests.memory.traces import traces

TRACE = Trace((Malloc(7, 100), Malloc(8, 600, 2), FreeEvent(7), Malloc(9, 5), FreeEvent(8)))


def plan_of(trace: Trace, alignment: int = 512) -> PlacementPlan:
    return make_plan(
        trace, place_greedily(rounded(trace.requests(), alignment)), alignment, False, "greedy"
    )


@given(traces())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan = plan_of(trace)
    write_plan(plan, path)
    assert read_plan(path, trace) == plan
    assert all(row.address % 512 == 0 for row in plan.tensors)
    assert plan.peak % 512 == 0


def test_names_and_marks_do_not_matter(tmp_path: Path) -> None:
    renamed = Trace(
        (
            Mark("a"),
            Malloc(1, 100),
            Malloc(2, 600, 2),
            FreeEvent(1),
            Malloc(1, 5),
            Mark("b"),
            FreeEvent(2),
        )
    )
    write_plan(plan_of(TRACE), tmp_path / "plan")
    assert digest(renamed) == digest(TRACE)
    assert read_plan(tmp_path / "plan", renamed) == plan_of(TRACE)


@pytest.mark.parametrize(
    "events",
    [
        (Malloc(7, 101), Malloc(8, 600, 2), FreeEvent(7), Malloc(9, 5), FreeEvent(8)),
        (Malloc(7, 100), Malloc(8, 600, 1), FreeEvent(7), Malloc(9, 5), FreeEvent(8)),
        (Malloc(7, 100), Malloc(8, 600, 2), FreeEvent(8), Malloc(9, 5), FreeEvent(7)),
        (Malloc(7, 100), Malloc(8, 600, 2), FreeEvent(7), Malloc(9, 5)),
        (Malloc(7, 100), Malloc(8, 600, 2), Malloc(9, 5), FreeEvent(7), FreeEvent(8)),
    ],
)
def test_another_program_is_refused(tmp_path: Path, events: tuple[Any, ...]) -> None:
    write_plan(plan_of(TRACE), tmp_path / "plan")
    with pytest.raises(
        UnsupportedError, match="plan: the plan belongs to another program: it has 3 tensors"
    ):
        read_plan(tmp_path / "plan", Trace(events))


SHIFTED = [[100, 0, 2048], [600, 2, 1024], [5, 0, 2048]]


def damage(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (damage(version=2), "the plan has version 2, expected 1"),
        (damage(format="other"), "not a plan: expected the format 'farspan memory plan'"),
        (damage(tensors=[[100, 0, 0], [600, 2, 0], [5, 0, 0]]), "damaged: 0 and 1 live together"),
        (damage(tensors=[[100, 0, 0]]), "damaged: 1 addresses for 3 requests"),
        (damage(tensors=[[100, 0, -512]]), "damaged.*expected a count, got -512"),
        (damage(peak=99999), "damaged: height 99999"),
        (damage(alignment=0), "damaged.*alignment 0"),
        (damage(tensors=[[1, 0, 0], [1, 2, 512], [1, 0, 0]]), "damaged: tensor 0 has 1 bytes"),
        (damage(tensors=[[100, 0, 1024], [600, 3, 0], [5, 0, 1024]]), "tensor 1 .* on stream 3"),
        (damage(tensors=[[100, 0, 1025], [600, 2, 0], [5, 0, 1024]], peak=1537), "not a multiple"),
        (damage(tensors=SHIFTED, peak=2560, optimal=True), "marked optimal, but no tensor lies"),
        (damage(lower_bound=1), "damaged: lower bound 1, but 1536 bytes are alive"),
        (damage(tensors=[[100, 0, 2**70]]), "damaged.*expected at most"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan"
    write_plan(plan_of(TRACE), path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
    with pytest.raises(UnsupportedError, match=message):
        read_plan(path, TRACE)


@pytest.mark.parametrize("text", ["", "{", "[]", "malloc 1 2", "[" * 10**5])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan").write_text(text)
    with pytest.raises(UnsupportedError, match="not a plan"):
        read_plan(tmp_path / "plan", TRACE)


def test_files_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be read"):
        read_plan(tmp_path / "absent", TRACE)
    with pytest.raises(UnsupportedError, match="cannot be written"):
        write_plan(plan_of(TRACE), tmp_path / "absent" / "plan")
