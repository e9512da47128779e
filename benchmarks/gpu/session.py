"""One run of the benchmark: what is measured next, on how many layers, for how long."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.children import EXPANDABLE, LEAST_SECONDS, Clock, Nursery, Outcome, Row, run_child
from benchmarks.gpu import child
from benchmarks.gpu.floor import Floor, ceilings_of, floor, gap
from benchmarks.gpu.huggingface import locked_bytes
from benchmarks.gpu.planned import LESS_ROOM, ROOM, Card, Planner, mfu, plan_json, preset_for
from benchmarks.gpu.power import PowerLog
from benchmarks.gpu.rows import (
    as_row,
    has_fewer,
    is_cut,
    is_done,
    may_take_less,
    merged,
    short_of,
    variance,
    words_of,
)
from benchmarks.gpu.steps import WARM_LAYERS
from benchmarks.gpu.work import QLORA, SPARSE, Item, Work, items, named
from farspan.host import available_host_bytes, describe_host
from farspan.planner.machines import from_json
from farspan.planner.request import Plan
from farspan.spec import Schedule, UnsupportedError

CHILD = "benchmarks.gpu.child"
PLANNED = ("step", "split")  # what runs a plan's schedule, and can be planned with less room
# What a process says that cannot start CUDA because it was forked.
FORKED = ("forked subprocess", "initialization error")
START_SECONDS = 8.0  # of a child: CUDA and the weights; its imports are the nursery's
COMPILE_SECONDS = 30.0  # of a layer, forward and backward; a guess
IMPORT_SECONDS = 60.0  # at most, of a child that is not the nursery's
EXACT_SECONDS, CEILING_SECONDS, LONGEST_SECONDS = 40.0, 45.0, 25.0  # guesses
END_SECONDS = 5.0  # of the time, that nothing is planned to take
# What a child may take beyond its plan: a step three times as slow is a finding, and no more than
# a third of the time is lost with the longest of them that hangs.
SLACK, SLACK_SECONDS = 3.0, 30.0
SHORT = 1024  # tokens that load kernels
REPEAT = 0.1  # of the time left, for a second step
DEEPER = 0.7  # of the time left, for what a former run measured on few layers
PINNED = 3e9  # bytes a second, where it was not measured


@dataclass(frozen=True, slots=True)
class Arranged:
    """What a child is told, and what it is expected to take."""

    settings: Row
    seconds: float
    plan: Plan | None = None  # of what it runs
    full: Plan | None = None  # of all layers


@dataclass(slots=True)
class Session:
    """Measures until nothing is left, or no time."""

    work: Work
    device: str
    clock: Clock
    record: Row
    save: Callable[[Row], None]
    say: Callable[[str], None]
    traces: Path | None = None
    planner: Planner | None = None  # of the headline's model
    others: dict[str, Planner] = field(default_factory=dict)  # by model
    nursery: Nursery | None = None
    card: Card | None = None  # None where there is no GPU
    host_memory: int | None = None  # bytes, in place of what can be seen to be available
    start_seconds: float = START_SECONDS
    slower: dict[str, float] = field(default_factory=dict)  # measured over planned, by work
    shallow: dict[str, int] = field(default_factory=dict)  # layers of what was measured on few
    ran_out: dict[str, Row] = field(default_factory=dict)  # with the first plan, of the device
    only: tuple[str, ...] = ()  # names of what to measure, in this order; (): all
    power: PowerLog | None = None
    repeat: float = REPEAT
    kept: set[str] = field(default_factory=set)  # of earlier runs, which no failure replaces

    def run(self) -> None:
        """Everything that the record has not yet, and then deeper what it has of fewer layers.
        Raises UnsupportedError where the record is of another card."""
        if self.card is not None:
            refuse_another(self.record, {"gpu": self.card.name})
        imports = 0.0 if self.nursery is None else self.nursery.warm()
        rows = {row["name"]: row for row in self.record["measurements"]}
        made = {name: row for name, row in rows.items() if is_done(row)}
        self.kept = set(made)
        self.ran_out = {name: short_of(row) for name, row in rows.items() if may_take_less(row)}
        self.shallow = {name: row["layers"] for name, row in made.items() if is_cut(row)}
        todo = [i for i in self.asked() if i.name not in made or has_fewer(made[i.name], i)]
        again = (item for item in self.asked() if item.name in self.shallow)
        todo += [replace(item, share=DEEPER) for item in again]
        run = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "seconds": self.clock.left}
        run["main_memory"] = describe_host() | {"given": self.host_memory}
        run["import_seconds"] = round(imports, 2)
        run["skipped"] = skipped = []
        self.record["runs"].append(run)
        if todo and todo[0].work != "ceilings":
            self.plan_with(todo)
        while todo:
            item = todo.pop(0)
            arranged = self.arranged(item)
            if isinstance(arranged, str):
                skipped.append({"name": item.name, "why": arranged})
                self.say(f"{item.name}: skipped, {arranged}")
            else:
                self.record["begun"] = item.name  # a killed run leaves it there
                self.save(self.record)
                row = self.measured(item, arranged)
                del self.record["begun"]
                self._add(row)
                if may_take_less(row):
                    self.ran_out[item.name] = short_of(row)
                    todo.insert(0, item)
            if item.work == "ceilings":
                self.plan_with(todo)
            self.save(self.record)

    def asked(self) -> list[Item]:
        """Everything, or what is wanted alone, which may take the time. Raises UnsupportedError."""
        if not self.only:
            return list(items(self.work))
        every = named(self.work)
        for name in self.only:
            if name not in every:
                raise UnsupportedError(
                    f"only: nothing is called {name!r}; give names of {', '.join(every)}"
                )
        return [replace(every[name], share=1.0) for name in self.only]

    def _work_of(self, item: Item) -> Work:
        return self.work.of(item.model)

    def planner_of(self, item: Item) -> Planner:
        """The planner of the item's model."""
        assert self.planner is not None
        if not item.model:
            return self.planner
        if item.model not in self.others:
            machine = self.planner.found
            self.others[item.model] = Planner(self._work_of(item), machine)
        return self.others[item.model]

    def _add(self, row: Row) -> None:
        found = self.record["measurements"]
        if is_done(row) or row["name"] not in self.kept:
            found[:] = [other for other in found if other["name"] != row["name"]]
            found.append(row)

    def plan_with(self, todo: Iterable[Item]) -> None:
        """Plans are made with the ceilings from here on."""
        rows = self._ceilings()
        files = [row["machine_file"] for row in rows if "machine_file" in row]
        if files:
            spec, words = from_json(files[-1], "ceilings").spec, "this machine's ceilings"
        else:
            spec, words = preset_for(self.card)
        self.record["planned_with"] = words
        host = self.host_memory or available_host_bytes()
        self.planner = Planner(self.work, replace(spec, host_bytes=host))
        wanted = list(todo)
        for model in dict.fromkeys(item.model for item in wanted):
            same = [item for item in wanted if item.model == model]
            self.planner_of(same[0]).prepare(same)

    def _ceilings(self) -> list[Row]:
        made = (row for row in self.record["measurements"] if row["name"] == "ceilings")
        return [found for row in made for found in row["rows"]]

    # -- what comes next -------------------------------------------------------------------------

    def arranged(self, item: Item) -> Arranged | str:
        """What to tell the child, or why there is none."""
        match item.work:
            case "ceilings":
                return self._fixed({}, CEILING_SECONDS)
            case "exact":
                return self._fixed({"lengths": self.work.exact}, EXACT_SECONDS)
            case "longest":
                left = self.clock.left - END_SECONDS - 1.0
                seconds = max(LONGEST_SECONDS, min(item.share * self.clock.left, left))
                settings: Row = {"tokens": self.work.first, "of_layers": self.work.layers}
                if self.work.tiny:
                    settings["pretended_most"] = 3 * self.work.first
                return self._fixed(settings, seconds)
            case "update":
                return self._update(item)
            case _:
                return self._of_layers(item)

    def _fixed(self, settings: Row, seconds: float) -> Arranged | str:
        if self.work.tiny:
            seconds = 0.0
        if seconds + END_SECONDS > self.clock.left:
            return f"{self.clock.left:.0f} s are left and it takes about {seconds:.0f}"
        return Arranged(settings, seconds)

    def _update(self, item: Item) -> Arranged | str:
        """Of as many layers as the time and the machine hold: it grows with their parameters."""
        assert self.planner is not None
        why = "it does not fit"
        for layers in self.work.depths:
            update = self.planner.update(layers)
            if not update.fits:
                continue
            locked = 0.0 if self.work.tiny else update.held["host"] / self._pinned()
            fixed = 0.0 if self.work.tiny else self.start_seconds
            settings: Row = {"layers": layers, "of_layers": self.work.layers, **update.to_json()}
            settings["tokens"] = min(SHORT, item.tokens // 2)
            arranged = self._fixed(settings, fixed + locked + 2 * (1.0 + update.seconds))
            if not isinstance(arranged, str) and arranged.seconds <= item.share * self.clock.left:
                return arranged
            why = arranged if isinstance(arranged, str) else "it takes more than its share"
        return why

    def _of_layers(self, item: Item) -> Arranged | str:
        """As many layers as its share of the time allows; a second step where that allows one."""
        planner, work = self.planner_of(item), self._work_of(item)
        try:
            full = planner.plan(item, self._room(item))
        except UnsupportedError as error:
            return str(error)
        short, why = float("inf"), ""
        depths = self._depths(item)
        for layers in depths:
            if layers <= self.shallow.get(item.name, 0):
                return f"{self.clock.left:.0f} s are left, not enough for more than {layers} layers"
            fixed, one = self._expected(item, full, layers)
            short = fixed + item.steps * one
            allowed, most = item.share * self.clock.left, self.clock.left - END_SECONDS
            if short > min(allowed, most) and (layers > depths[-1] or short > most):
                continue
            plan = full if layers == work.layers else planner.cut(full, layers)
            if not plan.fits and item.work != "huggingface":
                why = plan.reason or "does not fit"
                continue
            if self._ran_out_before(item, plan):
                why = "the device ran out, and in less room the plan is the same"
                continue
            both = min(allowed, most, fixed + one + self.repeat * self.clock.left)
            steps = 2 if fixed + 2 * one <= both else item.steps
            settings = self._settings(item, plan, layers) | {"steps": steps}
            return Arranged(settings, fixed + steps * one, plan, full)
        needed = f"{depths[-1]} layers take about {short:.0f}"
        return why or f"{self.clock.left:.0f} s are left and {needed}"

    def _room(self, item: Item) -> float:
        return LESS_ROOM if item.name in self.ran_out else ROOM

    def _ran_out_before(self, item: Item, plan: Plan) -> bool:
        if item.name not in self.ran_out:
            return False
        before, now = self.ran_out[item.name]["schedule"], plan_json(plan)["schedule"]
        return json.dumps(before, sort_keys=True) == json.dumps(now, sort_keys=True)

    def _depths(self, item: Item) -> tuple[int, ...]:
        """A profile of few layers says as much as one of all, and can be read."""
        depths = self._work_of(item).depths
        if item.whole:
            return depths[:1]
        return depths[-2:-1] if item.work == "split" else depths

    def _expected(self, item: Item, full: Plan, layers: int) -> tuple[float, float]:
        """Seconds before the steps, and of one."""
        planner, work = self.planner_of(item), self._work_of(item)
        share = planner.share(item.tokens, layers)
        one = full.seconds.total * share * self.slower.get(kind_of(item), 1.1)
        fixed = 0.0 if self.work.tiny else self.start_seconds
        if item.work == "huggingface":
            asked: Row = {"tokens": item.tokens, "layers": layers, "place": item.place}
            pieces, size = locked_bytes(self._common(item) | asked)
            fixed += pieces * size / self._pinned() + COMPILE_SECONDS * item.compiled
        else:
            fixed += full.host.total * layers / work.layers / self._pinned()
        warm = 1.0 if item.work == "split" else planner.share(item.tokens, WARM_LAYERS) / share
        return fixed + warm * one, one

    def _pinned(self) -> float:
        """Bytes of host memory that a second makes ready for copies."""
        files = [row["machine_file"] for row in self._ceilings() if "machine_file" in row]
        found = files[-1]["measured_on"]["pinned_bytes_a_second"] if files else PINNED
        return float(found)

    def _settings(self, item: Item, plan: Plan, layers: int) -> Row:
        found: Row = {"tokens": item.tokens, "layers": layers}
        if item.work == "huggingface":
            return found | {"place": item.place, "compiled": item.compiled}
        if item.work == "split" and self.traces is not None:
            found["trace"] = str(self.traces / f"step-{item.tokens}-{layers}-layers.json")
        return found | {"strategy": item.strategy, "schedule": as_row(plan.schedule)}

    # -- measuring -------------------------------------------------------------------------------

    def measured(self, item: Item, arranged: Arranged) -> Row:
        """The row of one child."""
        limit = min(self.clock.left, SLACK * arranged.seconds + SLACK_SECONDS)
        if self.work.tiny:
            limit = self.clock.left
        began = time.time()
        made = self._child(item, arranged.settings, limit)
        ended = time.time()
        row: Row = {"name": item.name, "work": item.work, "child": made.to_json()}
        if item.model:
            row["model"] = item.model
        for found in made.rows:
            if "machine" in found:
                self._same_machine(found)
        rows = [found for found in made.rows if "machine" not in found]
        if arranged.plan is None:
            row["rows"] = rows
        else:
            row |= self._with_plans(item, arranged, rows)
            if row["runs"]:
                ended, first = row["runs"][-1].get("ended_at", ended), row["runs"][0]
                began = first.get("ended_at", ended) - first["seconds"]
        row["card"] = None if self.power is None else self.power.between(began, ended)
        row["out_of_memory"] = any("out_of_memory" in found for found in rows)
        self.say(f"{item.name}: {made.ended}, {words_of(row)}, {self.clock.left:.0f} s left")
        return row

    def _child(self, item: Item, settings: Row, limit: float) -> Outcome:
        configuration = EXPANDABLE if self.device == "cuda" else ""
        given = {**self._common(item), "work": item.work, **settings}
        if self.nursery is not None:
            made = self.nursery.run(child.run, given, limit)
            if not any(words in made.words for words in FORKED):
                return made
            self.say("CUDA is not to be had in a forked process: each one starts afresh")
            self.nursery = None
        limit = min(limit + IMPORT_SECONDS, max(self.clock.left, LEAST_SECONDS))
        return run_child(CHILD, given, limit, configuration)

    def _common(self, item: Item) -> Row:
        """What every child is told."""
        return {
            "config": self._work_of(item).config,
            "dtype": self.work.dtype,
            "device": self.device,
            "tiny": self.work.tiny,
            "host_memory": self.host_memory,
        }

    def _same_machine(self, found: Row) -> None:
        """A record is of one machine. Raises UnsupportedError for another one."""
        self.record.setdefault("machine", found["machine"] | {"cuda": found["cuda"]})
        refuse_another(self.record, found["machine"])

    def _with_plans(self, item: Item, arranged: Arranged, rows: list[Row]) -> Row:
        assert arranged.plan is not None
        settings = arranged.settings
        row = merged(rows)
        row |= {key: settings[key] for key in ("tokens", "layers")}
        of_layers = self._work_of(item).layers
        row |= {"of_layers": of_layers, "planned": plan_json(arranged.plan)}
        if item.work in PLANNED:
            row["room"] = self._room(item)
        if item.name in self.ran_out:
            row["ran_out_before"] = self.ran_out[item.name]
        if item.strategy:
            row["strategy"] = item.strategy
        else:
            row |= {"place": item.place, "compiled": item.compiled}
        if "ready_seconds" in row and self.device == "cuda":
            self.start_seconds = max(START_SECONDS / 2, row["ready_seconds"])
        seconds = row["runs"][-1]["seconds"] if row["runs"] else None
        row["seconds"] = seconds
        if seconds is not None:
            self._add_rates(item, arranged, row, seconds)
        if "lines" in row:
            row["gap"] = self._gap(arranged.plan, row["lines"])
        return row

    def _add_rates(self, item: Item, arranged: Arranged, row: Row, seconds: float) -> None:
        assert arranged.plan is not None
        assert arranged.full is not None
        plan, full, layers = arranged.plan, arranged.full, arranged.settings["layers"]
        self.slower[kind_of(item)] = max(1.0, seconds / plan.seconds.total)
        row["variance"] = variance(row["runs"])
        row["tokens_a_second"] = item.tokens / seconds
        row["mfu"] = mfu(plan, seconds)
        bound = self._floor(plan)
        row["floor_seconds"] = bound and bound.total
        if layers < row["of_layers"]:
            row["scaled_to_full_depth"] = {
                "seconds": seconds * full.seconds.total / plan.seconds.total,
                "how": f"measured on {layers} layers, times the planned seconds of all "
                f"{row['of_layers']} over those of {layers}",
            }
        if item.work == "step" and row["runs"][-1]["reserved"] is not None:
            peak = row["runs"][-1]["allocated"]
            row["device_bytes_over_planned"] = peak / row["planned"]["device_bytes"]
            row["reserved_over_planned"] = (
                row["runs"][-1]["reserved"] / row["planned"]["device_bytes"]
            )

    def _floor(self, plan: Plan, schedule: Schedule | None = None) -> Floor | None:
        """From the ceilings of the schedule's own calls; None where attention is sparse, whose
        calls are no ceiling's, and where weights are frozen, whose gradients are not computed."""
        if plan.schedule.sparse is not None or plan.question.nf4:
            return None
        tokens = plan.question.run.tokens
        ceilings = ceilings_of(self._ceilings(), plan.schedule, tokens)
        return floor(plan.question, ceilings, schedule) if ceilings is not None else None

    def _gap(self, plan: Plan, lines: Mapping[str, float]) -> list[dict[str, Any]] | None:
        bound = self._floor(plan, plan.schedule)
        return gap(lines, bound) if bound is not None else None


def refuse_another(record: Row, here: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a record is of another card, or of other versions."""
    known = record.get("machine", {})
    for name in ("gpu", "versions"):
        if name in here and known.get(name, here[name]) != here[name]:
            raise UnsupportedError(
                f"out: the record is of {name} {known[name]}, here is {here[name]}; write another "
                "file"
            )


def kind_of(item: Item) -> str:
    """Measurements that are off their plans by about as much."""
    kind = item.strategy if item.strategy in (SPARSE, QLORA) else item.work
    return f"{item.model} {kind}"
