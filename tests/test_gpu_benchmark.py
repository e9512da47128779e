"""Sessions of the benchmark on a GPU, with children that are made up: what fails, or has no time,
stays alone."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from benchmarks.children import CONFIGURATION, Nursery, Outcome, Row, read_rows
from benchmarks.gpu import child, session
from benchmarks.gpu import planned as planned_with
from benchmarks.gpu.device import make_model
from benchmarks.gpu.planned import (
    GROUPED,
    LESS_ROOM,
    ROOM,
    Card,
    Ceilings,
    Planner,
    floor,
    preset_for,
)
from benchmarks.gpu.session import Session, is_exact, is_headline
from benchmarks.gpu.steps import reserve
from benchmarks.gpu.work import AUTO, SPARSE, STREAMED, Item, Place, Work, full, named, tiny
from farspan import Step
from farspan.host import TooLarge
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import from_json, machine
from farspan.planner.request import Plan
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import Profiles
from farspan.program.strategies import strategy
from farspan.spec import Schedule, Tier, UnsupportedError
from farspan.train.config import StatesPlace
from farspan.train.memory import Placed
from tests import gpu_benchmark_works as works
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
def test_what_runs_out_is_planned_once_more_with_less() -> None:
    name = "auto at 131072"  # whose plan takes 88% of the device where it may
    record = simulate(510, full={name: int(0.85 * machine("h200").device_bytes)})
    (row,) = (row for row in record["measurements"] if row["name"] == name)
    assert (row["child"]["ended"], row["room"]) == ("completed", LESS_ROOM)
    before = row["ran_out_before"]
    assert (before["room"], before["ended"]) == (ROOM, "failed")
    assert before["device_bytes"] > row["planned"]["device_bytes"]
    assert row["planned"]["device_bytes"] < 0.85 * machine("h200").device_bytes
    assert set(SOME) == set(names_of(record))


def test_without_ceilings_the_preset_of_the_gpu_plans() -> None:
    spec, words = preset_for(CARD)
    assert (spec.device_bytes, words) == (CARD.device_bytes, "preset h200")
    assert spec.rates == machine("h200").rates
    with pytest.raises(UnsupportedError, match="no preset is of NVIDIA L2; measure its ceilings"):
        preset_for(Card("NVIDIA L2", 24_000_000_000))


@pytest.mark.usefixtures("h200")
def test_the_pair_has_two_steps_and_a_failure_replaces_none() -> None:
    """Though a second one takes more than a tenth of the time left."""
    record = simulate(120, PAIR)
    assert names_of(record) == list(PAIR)
    assert [len(row["runs"]) for row in record["measurements"]] == [2, 2]
    assert record["planned_with"] == "preset h200"
    before = json.loads(json.dumps(record))
    broken = simulate(120, PAIR, record, broken=PAIR)
    assert json.loads(json.dumps(broken["measurements"])) == before["measurements"]


@pytest.mark.usefixtures("h200")
def test_what_has_no_time_is_skipped_and_the_next_measured() -> None:
    long = f"auto at {256 * 1024}"
    record = simulate(100, (long, f"auto at {32 * 1024}"))
    (row,) = record["measurements"]
    assert row["name"] == f"auto at {32 * 1024}"
    (skipped,) = record["runs"][0]["skipped"]
    assert skipped["name"] == long
    assert "100 s are left and it takes about" in skipped["why"]


# -- children --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery("tests.gpu_benchmark_works")


@pytest.mark.exhaustive
def test_forked_children_fail_and_stop_alone(nursery: Nursery) -> None:
    failed = nursery.run(works.fails, {}, 60)
    assert failed.ended == "failed"
    assert "ValueError: on purpose" in failed.words
    assert failed.rows == [{"before": 1}]
    stopped = nursery.run(works.sleeps, {}, 3.0)
    assert (stopped.ended, stopped.rows) == ("timed out", [{"before": 1}])
    killed = nursery.run(works.dies, {}, 60)
    assert (killed.ended, killed.rows) == ("failed", [{"before": 1}])
    good = nursery.run(works.succeeds, {"value": 3}, 60)
    assert (good.ended, good.rows) == ("completed", [{"value": 3}])


def test_children_have_the_environment_of_their_parent() -> None:
    """Where libraries are found, the driver's among them."""
    server = forkserver.ForkServer()  # the one of the process has its environment already
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, name, getattr(server, name))
        patch.setenv("FARSPAN_TOLD", "to the parent")
        made = Nursery("tests.gpu_benchmark_works", "expandable_segments:True")
        told = made.run(works.tells, {"names": ["FARSPAN_TOLD", "PATH", CONFIGURATION]}, 60)
        vars(forkserver.ForkServer)["_stop"](server)  # or it would outlive its children
    expected = {"FARSPAN_TOLD": "to the parent", "PATH": os.environ["PATH"]}
    assert told.rows == [expected | {CONFIGURATION: "expandable_segments:True"}]


def test_what_a_child_started_ends_with_it(nursery: Nursery, tmp_path: Path) -> None:
    made = nursery.run(works.starts_another, {"folder": str(tmp_path)}, 60)
    assert made.ended == "completed"
    other = Path(f"/proc/{made.rows[0]['pid']}/stat")
    until = time.monotonic() + 20  # it is killed at once, and goes when it is scheduled
    while other.exists() and ") Z" not in other.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


class Unforkable:
    """A nursery whose children cannot start CUDA."""

    def run(self, *_: Any) -> Outcome:
        words = "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with"
        return Outcome("failed", words, 0.1, [])


def test_where_a_fork_has_no_cuda_children_start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fresh(_module: str, settings: Row, *_: Any) -> Outcome:
        asked.append(settings["work"])
        return Outcome("completed", "", 1.0, [MACHINE])

    monkeypatch.setattr(session, "run_child", fresh)
    record: Row = {"runs": [], "measurements": []}
    nursery: Any = Unforkable()
    clock: Any = Left(60)
    made = Session(tiny(), "cpu", clock, record, lambda _: None, lambda _: None, nursery=nursery)
    row = made.measured(Item("ceilings"), session.Arranged({}, 1.0))
    assert (row["child"]["ended"], asked, made.nursery) == ("completed", ["ceilings"], None)


# -- what a record is worked out from --------------------------------------------------------------


def planner() -> Planner:
    return Planner(full(), replace(machine("h200"), host_bytes=118 * GIB))


# By hand: GEMM 790, cuDNN 690 and 575 TFLOP/s.
@pytest.mark.parametrize(("tokens", "seconds"), [(65536, 8.5), (131072, 27.0), (262144, 94.0)])
def test_floors_are_those_worked_out_by_hand(tokens: int, seconds: float) -> None:
    question = planner().question(tokens, 28)
    assert floor(question, Ceilings(790e12, 690e12, 575e12)) == pytest.approx(seconds, rel=0.01)


# Heads as wide as the model's, seven to a K, V head as there, and little of everything else.
NARROW = {
    **{"model_type": "qwen2", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256},
    **{"num_hidden_layers": 1, "num_attention_heads": 7, "num_key_value_heads": 1},
    "head_dim": 128,
}


@pytest.mark.gpu
def test_ceilings_are_measured_to_their_end(tmp_path: Path) -> None:
    """At a glance: every call that a step is planned from runs."""
    settings = {"device": "cuda", "dtype": "bfloat16", "tiny": True, "config": NARROW}
    child.ceilings(settings | {"rows": str(tmp_path / "rows")})
    (row,) = read_rows(tmp_path / "rows")
    spec = from_json(row["machine_file"], "ceilings").spec
    assert spec.rates["bfloat16"].attention_backward.points
    assert spec.overhead > 0


def tiny_settings() -> Row:
    work: Work = tiny()
    return {"config": work.config, "dtype": "float64", "device": "cpu", "tiny": True}


def test_what_a_machine_cannot_lock_is_refused() -> None:
    settings = tiny_settings() | {"tokens": 50, "layers": 4, "host_memory": 1000}
    step = Step(make_model(settings), Schedule(chunk=16, boundary_inputs=Tier.HOST))
    with pytest.raises(TooLarge, match=r"a step of 50 tokens needs.*--host-memory"):
        reserve(settings, step)
    row = reserve(settings | {"host_memory": 10 * GIB}, step)
    assert row["arenas"] == {tier.value: size for tier, size in step.arena_bytes().items()}
    assert row["arenas"]["host"] > 1000


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (TooLarge("host memory: a step needs"), "out_of_main_memory"),
    ],
)
def test_what_ran_out_is_told_apart(
    error: Exception, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: Row) -> None:
        raise error

    monkeypatch.setitem(child.WORKS, "step", fails)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(SystemExit, match="out of memory"):
        child.run({"device": "cpu", "work": "step", "rows": str(tmp_path / "rows")})
    assert name in read_rows(tmp_path / "rows")[-1]
    monkeypatch.setitem(child.WORKS, "step", lambda _: [].pop())
    with pytest.raises(IndexError):
        child.run({"device": "cpu", "work": "step", "rows": str(tmp_path / "rows")})
