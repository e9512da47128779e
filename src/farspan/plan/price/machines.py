"""Machines by name or by file: presets that ship, files that `farspan calibrate` writes.

A file is JSON: the fields of MachineSpec, `rates` by dtype with each curve a list of [size, rate],
and beside them `about` (what it is), `sources` (field to "datasheet: ...", "measured: ..." or
"assumed: ...") and `measured_on` (hardware, versions, date). None of these three is needed.
"""

import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from farspan.spec import Curve, MachineSpec, Rates, Refused

PRESETS = Path(__file__).parent / "machines.json"
DTYPES = ("bfloat16", "float16", "float32", "float64")
CURVES = ("matmul", "attention_forward", "attention_backward")
OTHER_CURVES = ("weights", "causal_forward", "causal_backward")  # may be left out
MAY_BE_ZERO = ("latency", "overhead", "reserve", "softmax_forward", "softmax_backward", "logit")
BESIDE = ("about", "sources", "measured_on")


@dataclass(frozen=True, slots=True)
class MachineFile:
    """A machine, and how each of its numbers is known."""

    spec: MachineSpec
    about: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)


def names() -> tuple[str, ...]:
    """The presets."""
    return tuple(_presets())


def machine(name_or_path: str | Path) -> MachineSpec:
    """The machine of a preset's name, whatever its case, or of a JSON file.

    Raises Refused for an unknown name, naming close ones, and for a file that is not a machine,
    naming the field.
    """
    return read(name_or_path).spec


def read(name_or_path: str | Path) -> MachineFile:
    """The same with what is known about its numbers."""
    name = str(name_or_path)
    if name.lower() in _presets():
        return _presets()[name.lower()]
    path = Path(name_or_path).expanduser()
    if path.suffix == ".json" or path.is_file():
        return _read_file(path)
    close = [known for known in names() if known.startswith(name.lower())]
    close = close or difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names())}"
    raise Refused(
        f"machine: {name!r} is neither a preset nor a machine file; {hint} (farspan calibrate "
        "writes a file for the machine at hand)"
    )


def user_file() -> Path:
    """Where the machine at hand is written to and looked for."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "farspan" / "machine.json"


def preset_of_gpu(gpu: str) -> str | None:
    """The preset of a GPU, by the name that its driver gives it."""
    for name, values in _raw_presets().items():
        if gpu in values["gpu_names"]:
            return name
    return None


def write(file: MachineFile, path: Path) -> None:
    """Write a machine file that `read` reads back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(file), indent=1) + "\n", encoding="utf-8")


def to_json(file: MachineFile) -> dict[str, Any]:
    """Plain values, for JSON."""
    spec = file.spec
    values = {f.name: getattr(spec, f.name) for f in fields(MachineSpec)}
    values["rates"] = {dtype: _rates_to_json(rates) for dtype, rates in spec.rates.items()}
    beside = {name: getattr(file, name) for name in BESIDE}
    return values | {name: value for name, value in beside.items() if value}


def from_json(values: object, where: str) -> MachineFile:
    """The machine of parsed JSON. Raises Refused naming `where` and the field."""
    if not isinstance(values, Mapping):
        raise Refused(f"{where}: expected the fields of a machine, got {_got(values)}")
    known = [f.name for f in fields(MachineSpec)]
    for name in values:
        if name not in (*known, *BESIDE):
            raise Refused(_unknown(where, str(name), known))
    given: dict[str, Any] = {}
    for f in fields(MachineSpec):
        if f.name in values:
            given[f.name] = _field(f.name, f.type, values[f.name], where)
        elif f.default is MISSING:
            raise Refused(f"{where}: {f.name} is missing; {_needed(f.name)}")
    return MachineFile(
        MachineSpec(**given),
        _text("about", values.get("about", ""), where),
        dict(_mapping("sources", values.get("sources", {}), where)),
        dict(_mapping("measured_on", values.get("measured_on", {}), where)),
    )


def _field(name: str, kind: object, value: object, where: str) -> object:
    if name == "rates":
        given = _mapping(name, value, where)
        if not given:
            raise Refused(f"{where}: rates: expected at least one of {', '.join(DTYPES)}, got none")
        return {dtype: _rates(dtype, rates, where) for dtype, rates in given.items()}
    if kind is str:
        return _text(name, value, where)
    if kind is bool:
        if not isinstance(value, bool):
            raise Refused(f"{where}: {name}: expected true or false, got {_got(value)}")
        return value
    number = _number(name, value, where, zero=name in MAY_BE_ZERO)
    if kind is int:
        if number != int(number):
            raise Refused(f"{where}: {name}: expected a whole number, got {value!r}")
        return int(number)
    return number


def _rates(dtype: str, values: object, where: str) -> Rates:
    if dtype not in DTYPES:
        raise Refused(_unknown(f"{where}: rates", dtype, list(DTYPES)))
    path = f"rates.{dtype}"
    given = _mapping(path, values, where)
    known = [f.name for f in fields(Rates)]
    for name in given:
        if name not in known:
            raise Refused(_unknown(f"{where}: {path}", name, known))
    for f in fields(Rates):
        if f.default is MISSING and f.name not in given:
            raise Refused(f"{where}: {path}.{f.name} is missing; {_needed(f.name)}")
    return Rates(**{name: _rate(f"{path}.{name}", given[name], where) for name in given})


def _rate(path: str, value: object, where: str) -> Any:
    name = path.rsplit(".", 1)[1]
    if name in CURVES or name in OTHER_CURVES:
        return _curve(path, value, where)
    return _number(path, value, where, zero=name in MAY_BE_ZERO)


def _curve(path: str, value: object, where: str) -> Curve:
    expected = f"{where}: {path}: expected a list of [size, rate] with ascending sizes"
    if not isinstance(value, list) or not value:
        raise Refused(f"{expected}, got {_got(value)}")
    points: list[tuple[float, float]] = []
    for place, point in enumerate(value):
        if not isinstance(point, list) or len(point) != 2:
            raise Refused(f"{expected}, got {_got(point)} at place {place + 1}")
        size, rate = (_number(f"{path}[{place + 1}]", number, where) for number in point)
        if points and size <= points[-1][0]:
            raise Refused(f"{expected}, got {size:g} after {points[-1][0]:g}")
        points.append((size, rate))
    return Curve(tuple(points))


def _number(path: str, value: object, where: str, *, zero: bool = False) -> float:
    sign = "zero or more" if zero else "more than zero"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, int | float) or not is_number or not math.isfinite(value):
        raise Refused(f"{where}: {path}: expected a number, {sign}, got {_got(value)}")
    if value < 0 or (value == 0 and not zero):
        raise Refused(f"{where}: {path}: expected {sign}, got {value!r}")
    return value


def _text(path: str, value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{where}: {path}: expected text, got {_got(value)}")
    return value


def _mapping(path: str, value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(f"{where}: {path}: expected keys and values, got {_got(value)}")
    return value


def _rates_to_json(rates: Rates) -> dict[str, Any]:
    """Fields that have their default are left out."""
    values: dict[str, Any] = {}
    for f in fields(Rates):
        value = getattr(rates, f.name)
        if isinstance(value, Curve):
            values[f.name] = [list(point) for point in value.points]
        elif f.default is MISSING or value != f.default:
            values[f.name] = value
    return values


def _unknown(where: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"{where}: {name}: no such field; {hint}"


def _needed(name: str) -> str:
    return f"give {name}, or write the file anew with farspan calibrate"


def _got(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"


def _read_file(path: Path) -> MachineFile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"machine: cannot read {path}: {error}") from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused(f"machine: {path} is not JSON: {error}") from error
    return from_json(values, f"machine file {path}")


@cache
def _raw_presets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PRESETS.read_text(encoding="utf-8"))
    return found


@cache
def _presets() -> dict[str, MachineFile]:
    presets = {}
    for name, values in _raw_presets().items():
        given = {key: value for key, value in values.items() if key != "gpu_names"}
        presets[name] = from_json({"name": name, **given}, f"preset {name}")
    return presets
