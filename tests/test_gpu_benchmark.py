"""Sessions of the benchmark on a GPU, with children that are made up: what fails, or has no time,
stays alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.children import Outcome, Row
from benchmarks.gpu import planned as planned_with
from benchmarks.gpu import session
from benchmarks.gpu.planned import (
    GROUPED,
    LESS_ROOM,
    ROOM,
    Card,
    Planner,
    host_room,
    preset_for,
)
from benchmarks.gpu.session import Session, is_done, is_exact, is_headline
from benchmarks.gpu.work import AUTO, SPARSE, STREAMED, Item, Place, full, named, tiny
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import machine
from farspan.planner.request import Plan
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import Profiles
from farspan.program.strategies import strategy
from farspan.spec import UnsupportedError
from farspan.train.config import StatesPlace
from farspan.train.memory import Placed
from tests.profiles import profile_of

GIB = 2**30
PLANS: dict[tuple[str, int, float], Plan] = {}  # of the one machine; they are the same in all tests
CARD = Card("NVIDIA H200", 150_109_106_995)
MACHINE = {"machine": {"gpu": CARD.name, "versions": {"torch": "2"}}, "cuda": "13"}
KEPT = f"huggingface at {64 * 1024}, {Place.KEPT}"
PAIR = (f"auto at {64 * 1024}", KEPT)
# As a person may ask for: ceilings, then steps of all kinds.
SOME = (
    "ceilings",
    f"auto at {128 * 1024}",
    f"auto at {32 * 1024}",
    *PAIR,
    f"update at {128 * 1024}",
    "exact",
)


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
        if item.work == "step" and item.name in self.full:
            assert self.planner is not None
            plan = self.planner.plan(item, self._room(item))
            if plan.device.total > self.full[item.name]:
                words = "OutOfMemoryError: CUDA out of memory"
                return Outcome("failed", words, seconds, [MACHINE, {"out_of_memory": words}])
        return Outcome(ended, "", seconds, [MACHINE, *rows])

    def outcome(self, item: Any, settings: Row) -> tuple[float, list[Row]]:
        fixed = {"ceilings": 35.0, "exact": 25.0, "update": 20.0}
        if item.work in fixed:
            return fixed[item.work], []
        assert self.planner is not None
        made = self.planner.plan(item)
        one = self.factor * made.seconds.total
        seconds = 6.0 + one / 28 + made.host.total / 3e9
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
    seconds: float, only: tuple[str, ...] = SOME, record: Row | None = None, **fields: Any
) -> Row:
    if record is None:
        record = {"runs": [], "measurements": []}
    saved: list[int] = []
    kind = type("Simulated", (Simulated,), fields)
    save = lambda found: saved.append(len(found["measurements"]))  # noqa: E731
    made = kind(full(), "cuda", Left(seconds), record, save, lambda _: None, card=CARD)
    made.run([named(full())[name] for name in only])
    assert saved == sorted(saved)  # after each
    return record


def names_of(record: Row) -> list[str]:
    return [row["name"] for row in record["measurements"]]


@pytest.mark.usefixtures("h200")
def test_rows_stand_beside_their_plans() -> None:
    record = simulate(510)
    rows = {row["name"]: row for row in record["measurements"]}
    assert list(rows) == list(SOME)
    assert all(row["child"]["ended"] == "completed" for row in rows.values())
    assert sum(row["child"]["seconds"] for row in rows.values()) <= 510
    for row in rows.values():
        if row["work"] not in ("step", "huggingface"):
            continue
        assert row["layers"] == 28
        assert row["seconds"] > row["planned"]["seconds"] > row["floor_seconds"]
        assert row["tokens_a_second"] == row["tokens"] / row["seconds"]
        assert 0 < row["mfu"] < 1
        assert is_headline(row) == (row["work"] == "step")
    assert not is_exact(rows[PAIR[0]] | {"strategy": SPARSE})
    assert not is_headline(rows[PAIR[0]] | {"model": "Qwen3-0.6B"})


@pytest.mark.usefixtures("h200")
def test_a_child_that_fails_is_recorded_and_repeated_by_the_next_run() -> None:
    name = PAIR[0]
    record = simulate(510, broken=(name,))
    (row,) = (row for row in record["measurements"] if row["name"] == name)
    assert row["child"]["ended"] == "failed"
    assert row["child"]["words"] == "RuntimeError: broken"
    assert row["seconds"] is None
    assert KEPT in names_of(record)
    again = simulate(510, (name,), record)
    (row,) = (r for r in again["measurements"] if r["name"] == name)
    assert row["seconds"] > 0


@pytest.mark.usefixtures("h200")
def test_no_plan_fills_the_machine() -> None:
    record = simulate(510)
    steps = [row for row in record["measurements"] if row["work"] == "step"]
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
    name = PAIR[0]  # whose plan takes 93% of the device where it may
    record = simulate(510, full={name: int(0.85 * machine("h200").device_bytes)})
    (row,) = (row for row in record["measurements"] if row["name"] == name)
    assert (row["child"]["ended"], row["room"]) == ("completed", LESS_ROOM)
    before = row["ran_out_before"]
    assert (before["room"], before["ended"]) == (ROOM, "failed")
    assert before["device_bytes"] > row["planned"]["device_bytes"]
    assert row["planned"]["device_bytes"] < 0.85 * machine("h200").device_bytes
    assert set(SOME) == set(names_of(record))


@pytest.mark.usefixtures("h200")
def test_what_runs_out_twice_is_final() -> None:
    name = PAIR[0]
    first = json.loads(json.dumps(simulate(510, (name,), full={name: 0})))
    (row,) = first["measurements"]
    assert (row["out_of_memory"], row["room"], row["seconds"]) == (True, LESS_ROOM, None)
    assert is_done(row)
    # A run that ended between the two goes on with the second.
    row |= {"room": ROOM, "planned": row["planned"] | {"schedule": {}}}
    assert not is_done(row)
    (row,) = simulate(60, (name,), first)["measurements"]
    assert (row["child"]["ended"], row["room"]) == ("completed", LESS_ROOM)
    assert row["ran_out_before"]["room"] == ROOM


@pytest.mark.parametrize("given", [40 * GIB, None])
def test_the_memory_that_is_given_stands_for_what_is_seen(
    given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "available_host_bytes", lambda: 30 * GIB)
    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(60)
    made = Session(full(), "cpu", clock, record, lambda _: None, lambda _: None, host_memory=given)
    made.run([])
    found = record["runs"][0]["main_memory"]
    assert found["given"] == given
    assert found["total"] >= found["available"] > 0
    made.plan_with([])
    assert made.planner is not None
    assert made.planner.machine.host_bytes == host_room(given or 30 * GIB)


def test_without_ceilings_the_preset_of_the_gpu_plans() -> None:
    spec, words = preset_for(CARD)
    assert (spec.device_bytes, words) == (CARD.device_bytes, "preset h200")
    assert spec.rates == machine("h200").rates
    with pytest.raises(UnsupportedError, match="no preset is of NVIDIA L2; measure its ceilings"):
        preset_for(Card("NVIDIA L2", 24_000_000_000))


@pytest.mark.usefixtures("h200")
def test_a_child_never_has_more_than_is_left() -> None:
    limits: list[tuple[float, float]] = []

    class Limited(Simulated):
        def _child(self, item: Any, settings: Row, limit: float) -> Outcome:
            limits.append((limit, self.clock.left))
            return super()._child(item, settings, limit)

    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(300)
    made = Limited(full(), "cuda", clock, record, lambda _: None, lambda _: None)
    made.run([named(full())[name] for name in SOME])
    assert len(limits) > 3
    assert all(limit <= left for limit, left in limits)
    assert limits[0][0] > 3 * session.CEILING_SECONDS


def test_where_there_is_no_time_all_is_skipped() -> None:
    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(-1.0)
    made = Session(tiny(), "cpu", clock, record, lambda _: None, lambda _: None)
    made.run([Item("ceilings"), Item("exact")])
    skipped = record["runs"][0]["skipped"]
    assert [one["name"] for one in skipped] == ["ceilings", "exact"]
    assert all("s are left and it takes about" in one["why"] for one in skipped)


def test_a_record_of_another_machine_is_not_gone_on_with() -> None:
    record = {"machine": {"gpu": "another", "versions": {}}, "runs": [], "measurements": []}
    with pytest.raises(UnsupportedError, match="it is of gpu another, here is NVIDIA H200"):
        simulate(100, PAIR, record)
    assert not record["runs"]


@pytest.mark.usefixtures("h200")
def test_the_pair_has_two_steps_and_a_failure_replaces_none() -> None:
    """Though a second one takes more than a tenth of the time left."""
    record = simulate(100, PAIR)
    assert names_of(record) == list(PAIR)
    assert [len(row["runs"]) for row in record["measurements"]] == [2, 2]
    assert record["planned_with"] == "preset h200"
    before = json.loads(json.dumps(record))
    broken = simulate(100, PAIR, record, broken=PAIR)
    assert json.loads(json.dumps(broken["measurements"])) == before["measurements"]


class Stopped(BaseException):
    """The process is gone."""


@pytest.mark.usefixtures("h200")
def test_a_run_that_is_killed_leaves_the_name_of_what_it_began() -> None:
    def killed(*_: object) -> Any:
        raise Stopped

    record: Row = {"runs": [], "measurements": []}
    with pytest.raises(Stopped):
        simulate(100, PAIR, record, _child=killed)
    assert record["begun"] == PAIR[0]


@pytest.mark.usefixtures("h200")
def test_what_has_no_time_is_skipped_and_the_next_measured() -> None:
    long = f"auto at {256 * 1024}"
    record = simulate(100, (long, f"auto at {32 * 1024}"))
    (row,) = record["measurements"]
    assert row["name"] == f"auto at {32 * 1024}"
    (skipped,) = record["runs"][0]["skipped"]
    assert skipped["name"] == long
    assert "100 s are left and it takes about" in skipped["why"]
