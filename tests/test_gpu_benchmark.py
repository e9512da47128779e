"""The benchmark on a GPU runs to its end without one; what fails, or has no time, stays alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from benchmarks.children import Outcome, Row
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import planned as planned_with
from benchmarks.gpu import session, show
from benchmarks.gpu.planned import (
    GROUPED,
    LESS_ROOM,
    ROOM,
    Card,
    Planner,
    host_room,
)
from benchmarks.gpu.rows import is_done
from benchmarks.gpu.session import Session
from benchmarks.gpu.split import LINES
from benchmarks.gpu.work import AUTO, SPARSE, STREAMED, Place, full, items, tiny
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import machine
from farspan.planner.request import Plan
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import Profiles
from farspan.program.strategies import strategy
from farspan.spec import UnsupportedError
from farspan.train.config import StatesPlace
from farspan.train.memory import Placed
from tests.grids import part_of
from tests.profiles import profile_of

GIB = 2**30
PLANS: dict[tuple[str, int, float], Plan] = {}  # of the one machine; they are the same in all tests
CARD = Card("NVIDIA H200", 150_109_106_995, 9.0)
MACHINE = {"machine": {"gpu": CARD.name, "versions": {"torch": "2"}}, "cuda": "13"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--out", str(tmp_path / "record.json")])
    with pytest.raises(SystemExit, match=r"reaches no CUDA device.*--tiny") as end:
        program.main()
    assert str(end.value).startswith("farspan: gpu: ")
    assert list(tmp_path.iterdir()) == []


# -- a session with children that are made up ----------------------------------------------------


class Left:
    """A clock that goes forward when it is told."""

    def __init__(self, left: float) -> None:
        self.left = left


class Simulated(Session):
    """Children take what they are planned to take on an H200, times a factor."""

    factor = 1.1
    broken: tuple[str, ...] = ()
    full: Mapping[str, int] = MappingProxyType({})  # bytes above which a plan runs out, by name

    def _child(self, item: Any, settings: Row, limit: float) -> Outcome:
        seconds, rows = self.outcome(item, settings)
        ended = "completed" if seconds <= limit else "timed out"
        seconds = min(seconds, limit)
        self.clock.left -= seconds  # type: ignore[misc]
        if item.name in self.broken:
            return Outcome("failed", "RuntimeError: broken", seconds, [MACHINE])
        if item.work in session.PLANNED and item.name in self.full:
            assert self.planner is not None
            plan = self.planner.plan(item, self._room(item))
            if plan.device.total > self.full[item.name]:
                words = "OutOfMemoryError: CUDA out of memory"
                return Outcome("failed", words, seconds, [MACHINE, {"out_of_memory": words}])
        return Outcome(ended, "", seconds, [MACHINE, *rows])

    def outcome(self, item: Any, settings: Row) -> tuple[float, list[Row]]:
        fixed = {"ceilings": 35.0, "exact": 25.0, "longest": 30.0, "update": 20.0}
        if item.work in fixed:
            return fixed[item.work], []
        assert self.planner is not None
        made = self.planner.plan(item)
        one = self.factor * self.planner.cut(made, settings["layers"]).seconds.total
        seconds = 6.0 + made.host.total * settings["layers"] / 28 / 3e9
        if item.work == "huggingface":
            seconds += one / 28
        if item.work == "split":
            return seconds + 2 * one, [{"lines": dict.fromkeys(LINES, 1.0)}]
        peaks = {"allocated": 1, "reserved": 1, "outside": 0, "host": 1}
        count = settings["steps"]
        rows = [{"step": n + 1, "seconds": one, "loss": 1.0, **peaks} for n in range(count)]
        return seconds + count * one, [{"ready_seconds": 5.0}, *rows]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """One H200 and 128 GiB, of which 118 are free."""
    placed = Placed(StatesPlace.HOST, "by the plan they do not fit beside the step on the device")
    monkeypatch.setattr(Planner, "_place", lambda _: placed)
    monkeypatch.setattr(session, "available_host_bytes", lambda: 118 * GIB)
    # A third of what a session takes finds the same plans, or as good ones.
    monkeypatch.setattr(planned_with, "SEARCH_SECONDS", 1.0)
    monkeypatch.setattr(planned_with, "profiles_of", first_layers)
    make = Planner._make

    def planned(planner: Planner, name: str, tokens: int, room: float) -> Plan:
        if (name, tokens, room) not in PLANS:
            best = name not in (SPARSE, STREAMED) and (name != AUTO or tokens <= full().lengths[-1])
            how = make if best else grouped
            PLANS[name, tokens, room] = how(planner, name, tokens, room)
        return PLANS[name, tokens, room]

    monkeypatch.setattr(Planner, "_make", planned)


def first_layers(config: dict[str, Any], _: str, **__: Any) -> Profiles:
    """Layers that are alike, which are measured once: a session plans with 16 numbers of them."""
    assert config == {**full().config, "num_hidden_layers": config["num_hidden_layers"]}
    return of_so_many(config["num_hidden_layers"])


@cache
def of_so_many(layers: int) -> Profiles:
    def made(variant: Variant) -> ModelProfile:
        return profile_of(full().config, layers, **asdict(variant))

    return Profiles({}, "works", made=made)


def grouped(planner: Planner, name: str, tokens: int, room: float) -> Plan:
    """Not the best, which is searched for up to 16 s; a session asks for the seconds of any."""
    layers, sparse = planner.work.layers, planner.work.sparse if name == SPARSE else None
    question = replace(planner.question(tokens, layers, room), sparse=sparse)
    return evaluate(question, GROUPED, strategy(GROUPED, layers, tokens).with_sparse(sparse))


def simulate(
    seconds: float, record: Row | None = None, only: tuple[str, ...] = (), **fields: Any
) -> Row:
    if record is None:
        record = {"runs": [], "measurements": []}
    saved: list[int] = []
    kind = type("Simulated", (Simulated,), fields)
    save = lambda found: saved.append(len(found["measurements"]))  # noqa: E731
    made = kind(full(), "cuda", Left(seconds), record, save, lambda _: None, card=CARD)
    made.only = only
    made.run()
    assert saved == sorted(saved)  # after each
    return record


def names_of(record: Row) -> list[str]:
    return [row["name"] for row in record["measurements"]]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("factor", part_of([0.9, 1.1, 1.5], 1.1))
def test_nine_minutes_hold_the_headlines_at_full_depth(factor: float) -> None:
    record = simulate(510, factor=factor)
    rows = {row["name"]: row for row in record["measurements"]}
    for tokens in full().lengths:
        row = rows[f"auto at {tokens}"]
        assert row["layers"] == 28, row["name"]
        assert row["planned"]["fits"]
    for tokens in full().lengths[:2]:
        assert rows[f"huggingface at {tokens}, {Place.DEVICE}"]["layers"] == 28
        assert f"huggingface at {tokens}, {Place.KEPT}" in rows
    assert f"huggingface at {full().middle}, {Place.HOST}" in rows
    assert all(row["child"]["ended"] == "completed" for row in rows.values())
    spent = sum(row["child"]["seconds"] for row in rows.values())
    assert spent <= 510
    left_out = {one["name"] for one in record["runs"][0]["skipped"]}
    assert left_out | rows.keys() == {item.name for item in items(full())}
    assert left_out
    for one in record["runs"][0]["skipped"]:
        assert one["why"]


@pytest.mark.usefixtures("h200")
def test_what_was_measured_on_few_layers_says_so() -> None:
    record = simulate(700)
    cut = [row for row in record["measurements"] if row.get("layers", 28) < 28]
    steps = [row for row in cut if row["work"] == "step"]
    assert {row["strategy"] for row in steps} >= {"grouped", "memo", "fpdt", "oomb"}
    for row in steps:
        scaled = row["scaled_to_full_depth"]
        assert scaled["seconds"] > row["seconds"] == row["runs"][-1]["seconds"]
        assert f"{row['layers']} layers" in scaled["how"]
    shown = show.text(record)
    for row in steps:
        assert f"{row['layers']} of 28" in shown
    compared = shown[shown.index("exact steps beside") :].split("\n\n")[0]
    assert "262144" in compared  # of all layers
    assert "524288" not in compared


@pytest.mark.usefixtures("h200")
def test_another_run_goes_on_and_then_deeper() -> None:
    first = simulate(300)
    layers = {row["name"]: row.get("layers") for row in first["measurements"]}
    known = list(layers)
    record = simulate(510, json.loads(json.dumps(first)))
    assert len(record["runs"]) == 2
    again = {row["name"]: row.get("layers") for row in record["measurements"]}
    assert set(known) < set(again)
    assert all(again[name] == n or (n and again[name] > n) for name, n in layers.items())
    last = simulate(10_000, json.loads(json.dumps(record)))
    assert {item.name for item in items(full())} == set(names_of(last))
    final = {row["name"]: row for row in last["measurements"]}
    assert final["grouped at 131072"]["layers"] == 28
    assert "scaled_to_full_depth" not in final["grouped at 131072"]


@pytest.mark.usefixtures("h200")
def test_a_child_that_fails_is_recorded_and_repeated_by_the_next_run() -> None:
    name = "auto at 65536"
    record = simulate(510, broken=(name,))
    (row,) = (row for row in record["measurements"] if row["name"] == name)
    assert row["child"]["ended"] == "failed"
    assert row["child"]["words"] == "RuntimeError: broken"
    assert row["seconds"] is None
    assert "auto at 262144" in names_of(record)
    assert "RuntimeError: broken" in show.text(record)
    (row,) = (r for r in simulate(510, record)["measurements"] if r["name"] == name)
    assert row["seconds"] > 0


@pytest.mark.usefixtures("h200")
def test_no_plan_fills_the_machine() -> None:
    record = simulate(510)
    steps = [row for row in record["measurements"] if row["work"] in session.PLANNED]
    assert steps
    for row in steps:
        reserve = machine("h200").reserve
        assert row["room"] == ROOM
        assert row["planned"]["device_bytes"] + reserve <= ROOM * machine("h200").device_bytes
        assert row["planned"]["host_bytes"] <= 0.95 * 118 * GIB - 2 * GIB
    assert host_room(118 * GIB) == pytest.approx(110.1 * GIB)
    assert host_room(2 * GIB) == GIB


@pytest.mark.usefixtures("h200")
def test_what_runs_out_is_planned_once_more_with_less() -> None:
    name = "auto at 65536"  # whose plan takes 93% of the device where it may
    record = simulate(510, full={name: int(0.85 * machine("h200").device_bytes)})
    (row,) = (row for row in record["measurements"] if row["name"] == name)
    assert (row["child"]["ended"], row["layers"], row["room"]) == ("completed", 28, LESS_ROOM)
    before = row["ran_out_before"]
    assert (before["room"], before["ended"]) == (ROOM, "failed")
    assert row["planned"]["device_bytes"] < 0.85 * machine("h200").device_bytes
    assert before["device_bytes"] > row["planned"]["device_bytes"]
    assert "the device ran out: planned again with less of it" in show.text(record)
    assert {f"auto at {tokens}" for tokens in full().lengths} <= set(names_of(record))


@pytest.mark.usefixtures("h200")
def test_what_runs_out_twice_is_final() -> None:
    name = "auto at 65536"
    first = json.loads(json.dumps(simulate(510, full={name: 0})))
    (row,) = (row for row in first["measurements"] if row["name"] == name)
    assert (row["out_of_memory"], row["room"], row["seconds"]) == (True, LESS_ROOM, None)
    assert is_done(row)
    # A run that ended between the two goes on with the second.
    row |= {"room": ROOM, "planned": row["planned"] | {"schedule": {}}}
    assert not is_done(row)
    record = simulate(60, first)
    (row,) = (row for row in record["measurements"] if row["name"] == name)
    assert (row["child"]["ended"], row["room"]) == ("completed", LESS_ROOM)
    assert row["ran_out_before"]["room"] == ROOM


@pytest.mark.parametrize("given", [40 * GIB, None])
def test_the_memory_that_is_given_stands_for_what_is_seen(
    given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "items", lambda _: [])
    monkeypatch.setattr(session, "available_host_bytes", lambda: 30 * GIB)
    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(60)
    made = Session(full(), "cpu", clock, record, lambda _: None, lambda _: None, host_memory=given)
    made.run()
    found = record["runs"][0]["main_memory"]
    assert found["given"] == given
    assert found["total"] >= found["available"] > 0
    assert f"total {found['total'] / GIB:.1f}" in show.text(record)
    made.plan_with([])
    assert made.planner is not None
    assert made.planner.machine.host_bytes == host_room(given or 30 * GIB)


@pytest.mark.usefixtures("h200")
def test_a_run_without_ceilings_plans_with_the_preset_of_the_gpu() -> None:
    record = simulate(200, broken=("ceilings",))
    assert record["planned_with"] == "preset h200"
    assert "auto at 131072" in names_of(record)


@pytest.mark.usefixtures("h200")
def test_what_is_much_slower_than_planned_is_measured_all_the_same() -> None:
    """And at full depth as long as there is time for it, which 64K lacks at 3 times the plan."""
    for factor, deep in ((3.0, [28, 20, 28]), (2.8, [28] * 3)):
        record = simulate(510, factor=factor)
        rows = {row["name"]: row for row in record["measurements"]}
        found = [rows[f"auto at {tokens}"] for tokens in full().lengths[:3]]
        assert [row["child"]["ended"] for row in found] == ["completed"] * 3
        assert [row["layers"] for row in found] == deep


@pytest.mark.usefixtures("h200")
def test_a_child_never_has_more_than_is_left() -> None:
    limits: list[tuple[float, float]] = []

    class Limited(Simulated):
        def _child(self, item: Any, settings: Row, limit: float) -> Outcome:
            limits.append((limit, self.clock.left))
            return super()._child(item, settings, limit)

    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(300)
    Limited(full(), "cuda", clock, record, lambda _: None, lambda _: None).run()
    assert len(limits) > 3
    assert all(limit <= left for limit, left in limits)
    assert limits[0][0] > 3 * session.CEILING_SECONDS


@pytest.mark.exhaustive
def test_where_there_is_no_time_all_is_skipped() -> None:
    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(-1.0)
    Session(tiny(), "cpu", clock, record, lambda _: None, lambda _: None).run()
    skipped = [one["name"] for one in record["runs"][0]["skipped"]]
    assert skipped == [item.name for item in items(tiny())]


def test_a_record_of_another_machine_is_not_gone_on_with() -> None:
    record = {"machine": {"gpu": "another", "versions": {}}, "runs": [], "measurements": []}
    with pytest.raises(UnsupportedError, match="the record is of gpu another"):
        simulate(100, record)


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"benchmark": "gpu", "tiny": True}))
    with pytest.raises(UnsupportedError, match="something else"):
        program.begun(full(), file, True)
    assert program.begun(full(), file, False)["measurements"] == []
