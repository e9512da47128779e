"""HTML page of one run folder, or of several side by side: measured and planned values. Files are
read as they are: a run may be under way, and folders of earlier versions lack some files; the page
says which values are missing."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from farspan.durable import (
    WRONG,
    WriteFailed,
    given_json,
    parse_object,
    refuse_links,
    refuse_odd,
    write_whole,
)
from farspan.formatting import without_home, write_bytes, write_tokens
from farspan.planner.remedies import part_words
from farspan.report.page import html_page
from farspan.report.tables import schedule_words
from farspan.spec import Schedule, Sparse, UnsupportedError

Values = dict[str, Any]

REPORT = "report.html"  # in the run folder
MOST_RUNS = 8  # most runs on a page
POINTS = 2000  # most points of a curve
# The main curves of metrics.jsonl in their order, and the keys that get no curve.
CURVES = ("loss", "heldout_loss", "tokens_per_second", "lr", "grad_norm")
NO_CURVE = {
    *("step", "tokens", "trained_tokens", "heldout_tokens", "seconds", "peak_process_bytes"),
    *("memory_predicted_bytes", "memory_measured_bytes"),
    *("memory_planned_bytes", "memory_resident_bytes"),
}
ABOUT, METRICS = "about.json", "metrics.jsonl"
OBJECTS = ("about", "plan", "comparison", "step", "history")  # names of JSON files
NOT_FINITE = ("nan", "inf", "-inf")  # JSON knows no such numbers: they are text
OLDER = "an older version of farspan, which does not record this, made the run"
REST = "everything else"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Contents of a run folder; empty mappings for missing files."""

    path: Path
    config: Values
    metrics: tuple[Values, ...]  # lines of metrics.jsonl, in order
    about: Values = field(default_factory=dict)
    plan: Values = field(default_factory=dict)
    comparison: Values = field(default_factory=dict)
    step: Values = field(default_factory=dict)
    history: Values = field(default_factory=dict)

    @property
    def steps(self) -> list[Values]:
        """Those lines of metrics.jsonl that report steps."""
        return [line for line in self.metrics if "lr" in line]

    @property
    def done(self) -> int:
        """Number of the last finished step."""
        return max((line["step"] for line in self.steps), default=0)

    @property
    def parts(self) -> list[Values]:
        """Records of the starts of the run's command (parts of the run), the latest last."""
        parts = self.history.get("parts")
        return [part for part in parts if isinstance(part, dict)] if parts else []


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a finished or unfinished run. Raises UnsupportedError if it is not a run
    folder, has no finished step, or has a damaged file."""
    path = folder.expanduser()
    if not path.is_dir():
        raise UnsupportedError(f"{folder}: no such folder; give one that farspan train has written")
    if not (path / "config.yaml").is_file():
        raise UnsupportedError(
            f"{folder} is not a run folder: it has no config.yaml; give the folder that a run file "
            "names"
        )
    refuse_links(path)
    metrics = tuple(read_metrics(path / METRICS))
    if not metrics:
        raise UnsupportedError(
            f"{folder} has no metrics: its run has finished no step yet; try again later"
        )
    objects = {name: _read(path / f"{name}.json") for name in OBJECTS}
    return RunRecord(path.resolve(), _config(path / "config.yaml"), metrics, **objects)


def _read(path: Path) -> Values:
    """Return the object in a JSON file; {} if the file does not exist."""
    try:
        return parse_object(path.read_bytes()) if os.path.lexists(path) else {}
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _config(path: Path) -> Values:
    try:
        data = path.read_bytes()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data)):
            raise _damaged(path, "it has aliases, which farspan does not write")
        value = yaml.safe_load(data)
        refuse_odd(value, finite=False)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _damaged(path, error) from error
    if not isinstance(value, dict):
        raise _damaged(path, "expected keys and values")
    return value


def read_about(folder: Path) -> Values:
    """Return the content of about.json; {} if there is no file. Raises UnsupportedError, naming the
    field, for a value of another type, and for a damaged file."""
    kinds = {"device": str, "strategy": str, "parameters": int, "trainable": int}
    return given_json(folder / ABOUT, **kinds, layout=dict, machine=dict, schedule=dict)


def read_metrics(path: Path) -> Iterator[Values]:
    """Yield the lines of metrics.jsonl, without a half-written last line. Raises UnsupportedError,
    naming the line and the field, for a value that farspan does not write."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise _damaged(path, error) from error
    for number, line in enumerate(lines, start=1):
        try:
            yield _line(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"}"):
                return
            raise _damaged(path, f"line {number}: {error}") from error


def _line(text: bytes) -> Values:
    found = parse_object(text)
    if type(found.get("step")) is not int or found["step"] < 0:
        raise ValueError(f"step: expected a whole number from 0, got {found.get('step')!r:.80}")
    for name in found.keys() & {*CURVES, *NO_CURVE}:
        value = found[name]
        if type(value) not in (int, float) and value not in NOT_FINITE:
            raise ValueError(f"{name}: expected a number, got {value!r:.80}")
    return found


def _damaged(path: Path, why: object) -> UnsupportedError:
    first = str(why).partition("\n")[0]
    without = ", or move it away to go on without it" if path.suffix == ".json" else ""
    return UnsupportedError(f"{path} is damaged: {first}; restore it{without}")


# -- as a page -------------------------------------------------------------------------------------


def write_report(folder: Path) -> Path:
    """Write the page about a run into its folder. Raises UnsupportedError if that fails."""
    path = folder / REPORT
    try:
        write_whole(path, run_page([read_run(folder)]).encode("utf-8", "replace"))
    except WriteFailed as error:
        raise UnsupportedError(f"{REPORT}: {error}") from error
    return path


def run_page(runs: Sequence[RunRecord]) -> str:
    """Return an HTML page about several runs. Raises UnsupportedError for more than `MOST_RUNS`."""
    if len(runs) > MOST_RUNS:
        raise UnsupportedError(
            f"a page shows {MOST_RUNS} runs side by side, got {len(runs)}; give fewer"
        )
    data = runs_json(runs)
    names = " and ".join(run["name"] for run in data["runs"])
    return html_page(f"{names} - farspan run{'s' * (len(runs) > 1)}", data, "run.js")


def runs_json(runs: Sequence[RunRecord]) -> Values:
    """Return a page's data about runs: bytes, seconds and steps as numbers, sentences as text."""
    names = _names([run.path for run in runs])
    return {
        "about": "Values called planned were computed before the run; the others were measured.",
        "runs": [run_json(run, name) for run, name in zip(runs, names, strict=True)],
        "settings": _differences(runs),
    }


def run_json(run: RunRecord, name: str) -> Values:
    """Return the page's data about one run. Raises UnsupportedError, naming the file, for a value
    whose type this version does not write."""
    try:
        return _shown(run, name)
    except WRONG as error:
        why = f"it has a value that this version cannot read ({error!r:.80})"
        raise _damaged(_damaged_file(run), why) from error


def _damaged_file(run: RunRecord) -> Path:
    """Return the file of a run folder that keeps its page from being made. Files are left out one
    at a time; the damaged one is the first whose absence lets the page be made."""
    files = {"config": "config.yaml"} | {name: f"{name}.json" for name in OBJECTS}
    for name, file in files.items():
        without: Any = {name: {}}
        with suppress(*WRONG):
            _shown(replace(run, **without), "")
            return run.path / file
    return run.path / METRICS


def _shown(run: RunRecord, name: str) -> Values:
    return {
        "name": name,
        "status": _status(run),
        "summary": _summary(run),
        "curves": _curves(run),
        "step": run.step,
        "parts": _part_names(run.step),
        "seconds": _seconds(run.step),
        "schedule": _schedule(run),
        "reason": _reason(run),
        "comparison": run.comparison,
        "machine": _machine(run),
        "versions": _versions(run),
        "commands": [_command(part) for part in run.parts],
        "config": without_home(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)),
        "notes": list(_notes(run)),
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the shortest end of its path that no other run has."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[place] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def _status(run: RunRecord) -> str:
    asked = run.config.get("steps")
    done = f"{run.done:,} steps done" if asked is None else f"{run.done:,} of {asked:,} steps done"
    if asked is not None and run.done >= asked:
        return done
    last = run.parts[-1] if run.parts else {}
    if error := last.get("error"):
        return f"{done}; the latest part ended with {error}"
    if last.get("ended"):
        return f"{done}; stopped, and can be resumed by the same command"
    return f"{done}; still running, or killed" if run.parts else done


def _summary(run: RunRecord) -> Values:
    """Return the main numbers of a run by name; None for those that are missing."""
    steps = run.steps
    plain = [line for line in steps if "memory_measured_bytes" not in line] or steps
    held = [line["heldout_loss"] for line in run.metrics if "heldout_loss" in line]
    memory = run.step.get("memory", {})
    return {
        "model": run.about.get("model"),
        "parameters": run.about.get("parameters"),
        "trainable": run.about.get("trainable"),
        "context": run.config.get("context"),
        "sequences": _sequences(run.config),
        "strategy": run.about.get("strategy"),
        "loss": _last([_number(line.get("loss")) for line in steps]),
        "heldout_loss": _last([_number(value) for value in held]),
        "tokens_per_second": _median(plain, "tokens_per_second"),
        "seconds": _median(plain, "seconds"),
        "planned_seconds": run.comparison.get("predicted_seconds")
        or run.step.get("planned", {}).get("total"),
        "tokens": _last([line.get("tokens") for line in steps]),
        "skipped": sum("nonfinite" in line for line in steps),
        "planned_bytes": memory.get("planned", {}).get("peak"),
        "measured_bytes": memory.get("measured", {}).get("peak"),
        "tier": memory.get("tier"),
        "process_bytes": max((line.get("peak_process_bytes", 0) for line in steps), default=0),
    }


def _sequences(config: Values) -> str:
    batch, accumulate = config.get("batch", 1), config.get("accumulate", 1)
    return f"{batch} x {accumulate}" if accumulate != 1 else f"{batch}"


def _median(lines: Sequence[Values], name: str) -> float | None:
    values = [value for line in lines if (value := _number(line.get(name))) is not None]
    return median(values) if values else None


def _last(values: Sequence[Any]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)


def _number(value: object) -> float | None:
    """Return a value as a finite number, or None. Run folders store infinity and NaN as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _curves(run: RunRecord) -> dict[str, Values]:
    """Return the steps and values of each metric by name, at most `POINTS` of them, evenly spaced
    and with the last."""
    curves: dict[str, Values] = {}
    for line in run.metrics:
        for name, value in line.items():
            number = _number(value)
            if name not in NO_CURVE and number is not None:
                curve = curves.setdefault(name, {"x": [], "y": []})
                curve["x"].append(line["step"])
                curve["y"].append(number)
    for curve in curves.values():
        many = len(curve["x"])
        places = range(many)
        if many > POINTS:
            indices = {round(place * (many - 1) / (POINTS - 1)) for place in range(POINTS)}
            places = sorted(indices)  # type: ignore[assignment]
        curve |= {axis: [curve[axis][place] for place in places] for axis in ("x", "y")}
        curve["of"] = many
    order = {name: place for place, name in enumerate(CURVES)}
    return dict(sorted(curves.items(), key=lambda item: (order.get(item[0], 99), item[0])))


def _part_names(step: Values) -> dict[str, str]:
    memory = step.get("memory", {})
    sides = [memory.get(side, {}).get("parts", {}) for side in ("planned", "measured")]
    return {part: part_words(part) for side in (*sides, memory.get("host", {})) for part in side}


def _seconds(step: Values) -> Values:
    """Return (name, seconds) of the planned and the measured parts of a step's time, the largest
    first. The last measured one is the rest of the step."""
    table: Values = {"measured": [], "planned": [], **step.get("seconds", {})}
    measured = dict(table.get("parts", {}))
    if measured:
        rest = table["total"] - sum(measured.values())
        table["measured"] = [*_rows(measured), [REST, max(0.0, rest)]]
    planned = step.get("planned", {})
    table["planned"] = _rows(planned.get("parts", {}))
    table["planned_total"] = planned.get("total")
    table["attention"] = planned.get("attention")
    return table


def _rows(parts: Mapping[str, float]) -> list[list[Any]]:
    return [[name, size] for name, size in sorted(parts.items(), key=lambda part: -part[1])]


def _schedule(run: RunRecord) -> list[str]:
    """Describe the schedule in words, or list its fields if the number of layers is unknown."""
    recorded = run.about.get("schedule") or {}
    names = {field.name for field in fields(Schedule)}
    known = {name: value for name, value in recorded.items() if name in names}
    layers = run.step.get("grid", {}).get("layers")
    if layers is None:
        layers = ((run.config.get("model") or {}).get("config") or {}).get("num_hidden_layers")
    try:
        if isinstance(known.get("groups"), list):
            known["groups"] = tuple(known["groups"])
        if isinstance(known.get("sparse"), dict):
            known["sparse"] = Sparse(**known["sparse"])
        schedule = Schedule(**known)
        if layers and known:
            chunks = -(-int(run.config["context"]) // schedule.chunk)
            return schedule_words(schedule, int(layers), chunks)
    except (UnsupportedError, KeyError, TypeError, ValueError):
        pass
    return [f"{name}: {value}" for name, value in recorded.items() if value not in (None, False)]


def _reason(run: RunRecord) -> str:
    if run.plan:
        return str(run.plan.get("reason") or "")
    return "" if run.about.get("strategy") is None else "Named in the run file, not planned."


def _machine(run: RunRecord) -> list[list[str]]:
    facts = dict(run.about.get("machine") or {})
    part = run.parts[-1] if run.parts else {}
    facts |= {name: value for name, value in (part.get("machine") or {}).items() if value}
    gpus = facts.get("gpus") or (1 if facts.get("gpu") else 0)
    device = f"{gpus} x {facts.get('gpu')}" if gpus else str(run.about.get("device") or "")
    if size := facts.get("device_bytes"):
        device += f", {write_bytes(size)} each"
    cores = f"{facts['cores']} cores, " if facts.get("cores") else ""
    threads = f"{cores}torch uses {facts['threads']}" if facts.get("threads") else ""
    rows = {
        "device": device,
        "processor": facts.get("processor"),
        "threads": threads,
        "main memory": write_bytes(facts["host_bytes"]) if facts.get("host_bytes") else None,
        "system": facts.get("system"),
        "ranks": str(part["ranks"]) if part.get("ranks", 1) != 1 else None,
    }
    return [[name, str(text)] for name, text in rows.items() if text]


def _versions(run: RunRecord) -> list[list[str]]:
    versions = dict((run.about.get("machine") or {}).get("versions") or {})
    if python := (run.about.get("machine") or {}).get("python"):
        versions["python"] = python
    for part in run.parts[-1:]:
        versions |= part.get("versions") or {}
    first = ("farspan", "python", "torch", "cuda", "transformers")
    order = sorted(versions, key=lambda name: (first.index(name) if name in first else 9, name))
    return [[name, str(versions[name])] for name in order]


def _command(part: Values) -> Values:
    """Return the command, start, end and duration (seconds) of one part of a run."""
    started, ended = part.get("started"), part.get("ended")
    took = None
    try:
        if started and ended:
            took = (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
    except (TypeError, ValueError):
        took = None
    return {
        "command": str(part.get("command") or ""),
        "started": _when(started),
        "ended": _when(ended) or "not yet",
        "took": took,
    }


def _when(text: object) -> str:
    try:
        return f"{datetime.fromisoformat(str(text)):%Y-%m-%d %H:%M:%S} UTC" if text else ""
    except ValueError:
        return str(text)


def _notes(run: RunRecord) -> Iterator[str]:
    """Yield sentences about unusual events of a run, and about why records are missing."""
    for line in run.metrics:
        if "out_of_memory" in line:
            yield (
                f"Memory ran out in step {line['step']} ({line['out_of_memory']}): "
                f"{line.get('message', '')}"
            )
    skipped = [line["step"] for line in run.steps if "nonfinite" in line]
    if skipped:
        steps = ", ".join(map(str, skipped[:8])) + (", ..." if len(skipped) > 8 else "")
        yield f"{len(skipped)} steps skipped: their loss or gradient was not finite: {steps}."
    if "memory" not in run.step:
        why = "no whole step has recorded them" if run.parts else OLDER
        yield f"Memory and time within a step are not recorded: {why}."
    if not run.parts:
        yield f"Command, versions and times of the run are not recorded: {OLDER}."
    elif not run.step.get("planned"):
        yield (
            "Seconds by kind of work are not planned: the schedule is named in the run file. With "
            "strategy auto the planner predicts them."
        )


def _differences(runs: Sequence[RunRecord]) -> list[list[Any]]:
    """Return (key, one text per run) for each key in which the runs' configurations differ."""
    leaves = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for leaf in leaves for key in leaf)
    rows = [[key, *(_text(leaf.get(key)) for leaf in leaves)] for key in keys if key != "folder"]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024:
        return write_tokens(value)
    return "none" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
