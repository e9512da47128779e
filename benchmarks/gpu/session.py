"""Measures items in children, one after the other, and keeps the record of them."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from benchmarks.children import EXPANDABLE, LEAST_SECONDS, Clock, Nursery, Outcome, Row, run_child
from benchmarks.gpu import child
from benchmarks.gpu.planned import (
    LESS_ROOM,
    ROOM,
    Card,
    Planner,
    ceilings_of,
    floor,
    mfu,
    plan_json,
    preset_for,
)
from benchmarks.gpu.power import PowerLog
from benchmarks.gpu.steps import WARM_LAYERS
from benchmarks.gpu.work import LOGPROBS, QLORA, SPARSE, Item, Work
from farspan.host import available_host_bytes, describe_host
from farspan.planner.machines import from_json
from farspan.planner.request import Plan
from farspan.report.plan import MFU_CONVENTION
from farspan.spec import Schedule, UnsupportedError

CHILD = "benchmarks.gpu.child"
# What a process says that cannot start CUDA because it was forked.
FORKED = ("forked subprocess", "initialization error")
START_SECONDS = 8.0  # of a child: CUDA and the weights; its imports are the nursery's
IMPORT_SECONDS = 60.0  # at most, of a child that is not the nursery's
EXACT_SECONDS, CEILING_SECONDS = 40.0, 45.0  # guesses
END_SECONDS = 5.0  # of the time, that nothing is planned to take
# What a child may take beyond its plan: a step three times as slow is a finding, and no more than
# a third of the time is lost with the longest of them that hangs.
SLACK, SLACK_SECONDS = 3.0, 30.0
SHORT = 1024  # tokens that load kernels
REPEAT = 0.1
PINNED = 3e9  # bytes a second, where it was not measured
CONVENTIONS = {
    "seconds": "forward and backward of one step with all gradients, no update; the last of "
    "`runs`, after one of the same length on `warm_layers` layers",
    "variance": "the slowest of `runs` over the fastest",
    "gradients": "of farspan in fp32, as `farspan train` has them; of the baseline in bf16",
    "update": "AdamW where `farspan train` would have its states, after a short step; in no step",
    "room": "of the device's bytes, what was planned with; `ran_out_before`: with more it ran out",
    "main_memory": "as the kernel shows it; `given` with --host-memory stands in its place",
    "mfu": MFU_CONVENTION,
    "bytes": "allocated, reserved: PyTorch's allocator at the fullest moment of the step; outside: "
    "the context and libraries; host: most resident memory of the process",
    "allocator": "expandable_segments for every contender",
    "huggingface": "gradient checkpointing, SDPA with cuDNN before flash; `place`: what layers "
    "keep; `layers_by`, `loss_by`: who computes norms, SwiGLU and rope, and the loss",
    "floor_seconds": "products and attention of one forward and one backward at the best rates "
    "of the ceilings",
}


@dataclass(frozen=True, slots=True)
class Arranged:
    """What a child is told, and the seconds that it is expected to take."""

    settings: Row
    seconds: float
    plan: Plan | None = None


@dataclass(slots=True)
class Session:
    """Measures one item after the other while there is time."""

    work: Work
    device: str
    clock: Clock
    record: Row
    save: Callable[[Row], None]
    say: Callable[[str], None]
    planner: Planner | None = None  # of the headline's model
    others: dict[str, Planner] = field(default_factory=dict)  # by model
    nursery: Nursery | None = None
    card: Card | None = None  # None where there is no GPU
    host_memory: int | None = None  # bytes, in place of what can be seen to be available
    start_seconds: float = START_SECONDS
    slower: dict[str, float] = field(default_factory=dict)  # measured over planned, by kind
    power: PowerLog | None = None
    repeat: float = REPEAT  # of the time left, for a second step

    def run(self, todo: Iterable[Item]) -> None:
        """Measures the items in their order. Raises UnsupportedError where the record is of another
        card."""
        if self.card is not None:
            refuse_another(self.record, {"gpu": self.card.name})
        left = list(todo)
        run = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "seconds": self.clock.left}
        run["main_memory"] = describe_host() | {"given": self.host_memory}
        run["import_seconds"] = 0.0 if self.nursery is None else round(self.nursery.warm(), 2)
        run["skipped"] = skipped = []
        self.record["runs"].append(run)
        if left and left[0].work != "ceilings":
            self.plan_with(left)
        while left:
            item = left.pop(0)
            arranged = self.arranged(item)
            if isinstance(arranged, str):
                skipped.append({"name": item.name, "why": arranged})
                self.say(f"{item.name}: skipped, {arranged}")
            elif may_take_less(self._measure(item, arranged)):
                left.insert(0, item)
            if item.work == "ceilings":
                self.plan_with(left)
            self.save(self.record)

    def _measure(self, item: Item, arranged: Arranged) -> Row:
        self.record["begun"] = item.name  # a killed run leaves it there
        self.save(self.record)
        row = self.measured(item, arranged)
        del self.record["begun"]
        rows = self.record["measurements"]
        before = next((old for old in rows if old["name"] == item.name), None)
        if before is None or is_done(row) or not is_done(before):
            rows[:] = [*(old for old in rows if old is not before), row]
        return row

    def planner_of(self, item: Item) -> Planner:
        """The planner of the item's model."""
        assert self.planner is not None
        if not item.model:
            return self.planner
        if item.model not in self.others:
            self.others[item.model] = Planner(self.work.of(item.model), self.planner.found)
        return self.others[item.model]

    def plan_with(self, todo: Iterable[Item]) -> None:
        """Plans are made with the ceilings from here on."""
        file = self._machine_file()
        if file is not None:
            spec, words = from_json(file, "ceilings").spec, "this machine's ceilings"
        else:
            spec, words = preset_for(self.card)
        self.record["planned_with"] = words
        host = self.host_memory or available_host_bytes()
        self.planner, self.others = Planner(self.work, replace(spec, host_bytes=host)), {}
        wanted = list(todo)
        for model in dict.fromkeys(item.model for item in wanted):
            same = [item for item in wanted if item.model == model]
            self.planner_of(same[0]).prepare(same)

    def _machine_file(self) -> Row | None:
        made = (row for row in self.record["measurements"] if row["name"] == "ceilings")
        files = [
            one["machine_file"] for row in made for one in row["rows"] if "machine_file" in one
        ]
        return files[-1] if files else None

    # -- what comes next -------------------------------------------------------------------------

    def arranged(self, item: Item) -> Arranged | str:
        """What to tell the child, or why there is none."""
        match item.work:
            case "ceilings":
                return self._in_time(Arranged({}, CEILING_SECONDS))
            case "exact":
                return self._in_time(Arranged({"lengths": self.work.exact}, EXACT_SECONDS))
            case "update":
                return self._update(item)
        try:
            plan = self.planner_of(item).plan(item, self._room(item))
        except UnsupportedError as error:
            return str(error)
        if not plan.fits and item.work != "huggingface":
            return plan.reason or "it does not fit"
        before = self._ran_out(item)
        if before is not None and _schedule_words(before) == _schedule_words(plan_json(plan)):
            return "the device ran out, and in less room the plan is the same"
        fixed, one = self._expected(item, plan)
        both, left = fixed + 2 * one, self.clock.left
        again = one <= self.repeat * left and both <= left - END_SECONDS
        steps = 2 if again else item.steps
        settings = self._settings(item, plan) | {"steps": steps}
        return self._in_time(Arranged(settings, fixed + steps * one, plan))

    def _in_time(self, arranged: Arranged) -> Arranged | str:
        seconds = 0.0 if self.work.tiny else arranged.seconds
        if seconds + END_SECONDS > self.clock.left:
            return f"{self.clock.left:.0f} s are left and it takes about {seconds:.0f}"
        return replace(arranged, seconds=seconds)

    def _update(self, item: Item) -> Arranged | str:
        assert self.planner is not None
        update = self.planner.update()
        if not update.fits:
            return "it does not fit"
        locked = update.held["host"] / self._pinned()
        settings: Row = {"layers": self.work.layers, **update.to_json()}
        settings["tokens"] = min(SHORT, item.tokens // 2)
        seconds = self.start_seconds + locked + 2 * (1.0 + update.seconds)
        return self._in_time(Arranged(settings, seconds))

    def _row_of(self, item: Item) -> Row | None:
        rows = self.record["measurements"]
        return next((row for row in rows if row["name"] == item.name), None)

    def _ran_out(self, item: Item) -> Row | None:
        """What was planned when the device ran out with the first plan."""
        row = self._row_of(item)
        return row["planned"] if row is not None and may_take_less(row) else None

    def _room(self, item: Item) -> float:
        return ROOM if self._ran_out(item) is None else LESS_ROOM

    def _expected(self, item: Item, plan: Plan) -> tuple[float, float]:
        """Seconds before the steps, and of one."""
        one = plan.seconds.total * self.slower.get(kind_of(item), 1.1)
        fixed = self.start_seconds + one * WARM_LAYERS / self.work.of(item.model).layers
        if item.work == "step":
            fixed += plan.host.total / self._pinned()
        return fixed, one

    def _pinned(self) -> float:
        """Bytes of host memory that a second makes ready for copies."""
        file = self._machine_file()
        return PINNED if file is None else float(file["measured_on"]["pinned_bytes_a_second"])

    def _settings(self, item: Item, plan: Plan) -> Row:
        found: Row = {"tokens": item.tokens, "layers": self.work.of(item.model).layers}
        if item.work == "huggingface":
            return found | {"place": item.place}
        return found | {"strategy": item.strategy, "schedule": as_row(plan.schedule)}

    # -- measuring -------------------------------------------------------------------------------

    def measured(self, item: Item, arranged: Arranged) -> Row:
        """The row of one child."""
        limit = min(self.clock.left, SLACK * arranged.seconds + SLACK_SECONDS)
        began = time.time()
        made = self._child(item, arranged.settings, self.clock.left if self.work.tiny else limit)
        ended = time.time()
        row: Row = {"name": item.name, "work": item.work, "child": made.to_json()}
        if item.model:
            row["model"] = item.model
        for found in made.rows:
            if "machine" in found:  # a record is of one
                self.record.setdefault("machine", found["machine"] | {"cuda": found["cuda"]})
                refuse_another(self.record, found["machine"])
        rows = [found for found in made.rows if "machine" not in found]
        if arranged.plan is None:
            row["rows"] = rows
        else:
            row |= self._with_plan(item, arranged.settings, arranged.plan, rows)
            if row["runs"]:
                ended, first = row["runs"][-1].get("ended_at", ended), row["runs"][0]
                began = first.get("ended_at", ended) - first["seconds"]
        row["out_of_memory"] = any("out_of_memory" in found for found in rows)
        row["card"] = None if self.power is None else self.power.between(began, ended)
        self.say(f"{item.name}: {made.ended}, {words_of(row)}, {self.clock.left:.0f} s left")
        return row

    def _child(self, item: Item, settings: Row, limit: float) -> Outcome:
        given = {
            "config": self.work.of(item.model).config,
            "dtype": self.work.dtype,
            "device": self.device,
            "tiny": self.work.tiny,
            "host_memory": self.host_memory,
            "work": item.work,
            **settings,
        }
        if self.nursery is not None:
            made = self.nursery.run(child.run, given, limit)
            if not any(words in made.words for words in FORKED):
                return made
            self.say("CUDA is not to be had in a forked process: each one starts afresh")
            self.nursery = None
        limit = min(limit + IMPORT_SECONDS, max(self.clock.left, LEAST_SECONDS))
        return run_child(CHILD, given, limit, EXPANDABLE if self.device == "cuda" else "")

    def _with_plan(self, item: Item, settings: Row, plan: Plan, rows: list[Row]) -> Row:
        row: Row = {"runs": [found for found in rows if "step" in found]}
        for found in rows:
            row |= {} if "step" in found else found
        row |= {"tokens": item.tokens, "layers": settings["layers"], "planned": plan_json(plan)}
        if item.work == "step":
            row |= {"room": self._room(item), "strategy": item.strategy}
        else:
            row["place"] = item.place
        before = self._row_of(item)
        if before is not None and may_take_less(before):
            kept = {key: before["planned"][key] for key in ("schedule", "device_bytes")}
            row["ran_out_before"] = {"room": before["room"], **kept, **before["child"]}
        if "ready_seconds" in row and self.device == "cuda":
            self.start_seconds = max(START_SECONDS / 2, row["ready_seconds"])
        row["seconds"] = row["runs"][-1]["seconds"] if row["runs"] else None
        if row["seconds"] is not None:
            self._add_rates(item, plan, row)
        return row

    def _add_rates(self, item: Item, plan: Plan, row: Row) -> None:
        seconds, last = row["seconds"], row["runs"][-1]
        self.slower[kind_of(item)] = max(1.0, seconds / plan.seconds.total)
        row["variance"] = variance(row["runs"])
        row["tokens_a_second"] = item.tokens / seconds
        row["mfu"] = mfu(plan, seconds)
        # Sparse attention's calls are no ceiling's, and gradients of frozen weights not computed.
        approximates = plan.schedule.sparse is not None or plan.question.nf4
        least = None if approximates else floor(plan.question, ceilings_of(plan.question))
        row["floor_seconds"] = least
        if item.work == "step" and last["reserved"] is not None:
            planned = row["planned"]["device_bytes"]
            row["device_bytes_over_planned"] = last["allocated"] / planned
            row["reserved_over_planned"] = last["reserved"] / planned


# -- rows ----------------------------------------------------------------------------------------


def as_row(schedule: Schedule) -> Row:
    """Fields of a schedule, as JSON has them."""
    found = {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
    found["sparse"] = None if schedule.sparse is None else asdict(schedule.sparse)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _schedule_words(planned: Row) -> str:
    return json.dumps(planned["schedule"], sort_keys=True)


def is_done(row: Mapping[str, Any]) -> bool:
    """Whether measuring it again would tell nothing new."""
    is_final = row["out_of_memory"] and not may_take_less(row)
    return bool(row["child"]["ended"] == "completed" or is_final)


def may_take_less(row: Mapping[str, Any]) -> bool:
    """Whether the device ran out with the first plan of a schedule: there is a second."""
    return bool(row["out_of_memory"] and row.get("room", LESS_ROOM) > LESS_ROOM)


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether it is a step of farspan's by the mean loss of all weights, which approximates
    nothing."""
    others = row.get("strategy") in (QLORA, LOGPROBS, SPARSE)
    return row["work"] == "step" and not others


def is_headline(row: Mapping[str, Any]) -> bool:
    """Whether that is of the record's own model, too."""
    return not row.get("model") and is_exact(row)


def variance(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """The slowest of a measurement's steps over its fastest; None of one step."""
    seconds = [run["seconds"] for run in runs]
    return max(seconds) / min(seconds) if len(seconds) > 1 else None


def words_of(row: Mapping[str, Any]) -> str:
    """What a row says in a line."""
    if row.get("seconds") is not None:
        planned = row["planned"]["seconds"]
        return f"{row['seconds']:.2f} s a step, planned {planned:.2f}, MFU {row['mfu']:.1%}"
    last = row["child"]["words"].splitlines()[-1:]
    return last[0] if last else f"{row['child']['seconds']:.0f} s"


def refuse_another(record: Row, here: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a record is of another card, or of other versions."""
    known = record.get("machine", {})
    for name in ("gpu", "versions"):
        if name in here and known.get(name, here[name]) != here[name]:
            raise UnsupportedError(
                f"record: it is of {name} {known[name]}, here is {here[name]}; give a record of "
                "this machine, or another folder and no --record: then ceilings are measured first"
            )


def kind_of(item: Item) -> str:
    """Measurements that are off their plans by about as much."""
    kind = item.strategy if item.strategy in (SPARSE, QLORA) else item.work
    return f"{item.model} {kind}"
