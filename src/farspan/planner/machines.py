"""Machines by name or by file: the presets of farspan, and files that `farspan calibrate` writes.

A file is JSON: the fields of MachineSpec, `rates` by dtype with each curve a list of [size, rate].
Optional are `about` (a description), `sources` (field to "datasheet: ...", "measured: ..." or
"assumed: ..."), `measured_on` (hardware, versions, date) and `spread` (field to the ratio of the
slowest measurement to the fastest). Rates that contradict each other are refused: measuring a busy
machine produces such. A preset may be `like` another, which has the values that it leaves out; each
of its own numbers needs its own source. `gpu_names` (as drivers give them) and `aliases` are its
other names, and `note` is printed with each plan.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from farspan.durable import expect_json, write_output
from farspan.formatting import shortened, some
from farspan.spec import (
    BACKWARD_PRODUCTS,
    AttentionKernel,
    Curve,
    MachineSpec,
    Rates,
    UnsupportedError,
)

PRESETS = Path(__file__).parent / "machines.json"
DTYPES = ("bfloat16", "float16", "float32", "float64")
CURVES = ("matmul", "attention_forward", "attention_backward")
PAGES = ("chosen_forward", "chosen_backward", "votes")  # of sparse attention
OTHER_CURVES = ("weights", "fp8", "causal_forward", "causal_backward", *PAGES)  # optional
MAY_BE_ZERO = (
    *(
        "latency",
        "overhead",
        "reserve",
        "host_reserve",
        "softmax_forward",
        "softmax_backward",
        "logit",
    ),
    *("attention_workspace", "processors"),
)
KERNELS = [kernel.value for kernel in AttentionKernel if kernel is not AttentionKernel.AUTO]
BESIDE = ("about", "sources", "measured_on", "spread", "note")
OF_PRESETS = ("gpu_names", "aliases", "like")
FP8_PEAK = 2.0  # of datasheets' dense rates in FP8 over those in bfloat16
STEEPEST = 10.0  # most that a smaller call's rate may exceed a larger's; caches explain 4
TOGETHER = 2.0  # most of a rate with both directions busy over the rate alone; 1 but for noise
BUSY = 1.5  # limit of slowest over fastest measurement; measurements that agree differ by 1.1
BUSY_RATES = "rates were measured on a busy machine: measuring again may change the choice"
LARGEST = sys.float_info.max
NAMED = 3  # fields that a warning names
# Share of main memory that no plan takes: for the system, for every process of a run (Python,
# torch, CUDA's context: about 3 GiB), and for loading, which passes weights through it.
HOST_RESERVE = 0.1
MOST_IN_ONE = 8  # cards in one machine, for a name such as 4x4090
NODE = 8  # cards of a DGX or HGX
# Names of cards: `8xh100`, `8 H100s`, `h100:8`; `80gb`; words and numbers, in any order.
_COUNTED = re.compile(
    r"(\d{1,5})\s*[x×*]\s*([a-z].*|\d{4}.*)|"
    r"(.+?)(?:(?:\s|(?<=\d))[x×*]|\s*:)\s*(\d+)|"
    r"(\d{1,3})\s+(?!g(?:i?b)?\b)([a-z].*|\d{4}.*)"
)
_NODE = re.compile(r"[dh]gx[\s-]*([abh]\d{3}.*)")
_MEMORY = re.compile(r"(\d+)[\s-]*g(?:i?b)?\b")
_WORD = re.compile(r"sxm\d?|hbm\d?e?|rtx|super|ti|pro|pcie|nvl|blackwell|[a-z]+|\d+")
_NOISE = re.compile(
    r"nvidia|amd|geforce|g?rtx|gtx|tesla|quadro|instinct|gpu|card|graphics|"
    r"sxm\d?|hbm\d?e?|tensor|core|edition|generation|founders|fe"
)
# Cards and other words without rates here, with the advice for the first pattern that matches.
_WITHOUT = {
    re.compile(words): said
    for words, said in (
        (
            r"(cpu|all|gpus?|auto|any|none|local.*|this.*|mine|cuda.*|default|)",
            "for this machine, with or without a GPU, give --gpu here; for some of its GPUs, also "
            "--gpus COUNT",
        ),
        (
            r".*\bgb([23]00)\b.*",
            "a GB{0} is two B{0} with a Grace CPU; give --gpu b{0}, or 2xb{0} for both",
        ),
        (
            r".*\b(t4|[vpk]100|p40|[km][48]0|titan|[12]0[5-8]0|16[56]0|quadro rtx|rtx 8000).*",
            "{0}: Turing and all cards before it have no bfloat16; give one of Ampere or later, "
            "such as a10 or l4",
        ),
        (
            r".*\b([45]090) ?d\b.*",
            "a {0} D has fewer cores than the {0}; give --gpu rtx{0}, whose steps are a little "
            "shorter, or calibrate it",
        ),
    )
}
_SERIES = re.compile(r"(?:rtx)? ?([345]0)[5-9]0\b.*")
_ALIKE = 0.07  # relative difference of a datasheet's memory and a driver's


@dataclass(frozen=True, slots=True)
class MachineFile:
    """Description of a machine, with the source of each of its numbers."""

    spec: MachineSpec
    about: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)  # slowest over fastest, by field
    note: str = ""  # printed with every plan


def names() -> tuple[str, ...]:
    return tuple(_presets())


def machine(name_or_path: str | Path) -> MachineSpec:
    """Return the machine that a GPU's usual name means, or that a JSON file describes.

    `4x4090` means a machine with four GPUs. Raises UnsupportedError for an unknown name, naming
    close ones, and for a file that is not a machine, naming the field.
    """
    spec, count = read(name_or_path).spec, count_of(name_or_path)
    if count is None or spec.devices >= count or count > MOST_IN_ONE:
        return spec
    return replace(spec, devices=count)


def read(name_or_path: str | Path) -> MachineFile:
    """Return a machine by a GPU's usual name, or of a JSON file, with the source of each number."""
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name.lower() not in _presets() and (path.suffix == ".json" or os.path.isfile(path)):
        return _read_file(path)
    return _presets()[_preset_called(_counted(name)[1])]


def count_of(name: object) -> int | None:
    """Return the number of GPUs in a name such as `8xh100`; None if the name has no number."""
    is_name = isinstance(name, str) and not os.path.isfile(Path(name).expanduser())
    return _counted(str(name))[0] if is_name else None


def names_card(word: str) -> bool:
    """Return whether the word is a GPU's name, such as 4090."""
    return bool(_presets_called(*_words(word)))


def _counted(name: str) -> tuple[int | None, str]:
    text = name.strip().lower()
    if (node := _NODE.fullmatch(text)) is not None:
        return NODE, node[1]
    match = _COUNTED.fullmatch(text)
    if match is None:
        return None, _singular(name) if re.search(r"[a-z]\d+s$", text) else name
    before, card, other, behind, first, counted = match.groups()
    return int(before or behind or first), _singular(card or other or counted)


def _singular(name: str) -> str:
    """Return h100 for h100s, but l40s unchanged, since it is a GPU's own name."""
    several = name.strip().lower().endswith("s") and not names_card(name)
    return name.strip()[:-1] if several and names_card(name.strip()[:-1]) else name


def _words(name: str) -> tuple[tuple[str, ...], int | None]:
    """Return the sorted words that identify a GPU in its name, and its GB of memory or None."""
    text = name.lower()
    memory = _MEMORY.search(text)
    if memory is not None:
        text = f"{text[: memory.start()]} {text[memory.end() :]}"
    words = (word for word in _WORD.findall(text) if not _NOISE.fullmatch(word))
    return tuple(sorted(words)), None if memory is None else int(memory[1])


@cache
def _names() -> dict[str, dict[tuple[str, ...], int | None]]:
    """Return, by preset, each of its names as identifying words, with the GB of memory or None."""
    return {
        name: dict(map(_words, (name, *values["gpu_names"], *values.get("aliases", ()))))
        for name, values in _raw_presets().items()
    }


def _size(name: str) -> int:
    found = _MEMORY.search(_presets()[name].about.lower())
    return int(found[1]) if found else 0


def _presets_called(words: tuple[str, ...], memory: int | None) -> list[str]:
    """Return the presets that a GPU's name may mean, by its words and its GB of memory."""
    found = [name for name, known in _names().items() if words in known]
    if memory is None and not found:  # `a100 80`
        sizes = [int(word) for word in words if word.isdecimal()]
        others = ((size, tuple(word for word in words if word != str(size))) for size in sizes)
        return [n for size, rest in others for n in _presets_called(rest, size) if rest]
    if memory is not None:
        said = {name: _names()[name][words] for name in found}
        return [
            n for n in found if said[n] == memory or abs(_size(n) - memory) <= _ALIKE * _size(n)
        ]
    return [name for name in found if _words(name)[1] is None] or found


def _preset_called(name: str) -> str:
    """Return the preset that a GPU's name means. Raises UnsupportedError if none or several do."""
    if name.lower() in _presets():
        return name.lower()
    words, memory = _words(name)
    found = _presets_called(words, memory)
    if len(found) == 1:
        return found[0]
    raise UnsupportedError(
        f"machine: {shortened(name, 60)!r} is neither a preset nor a machine file; "
        f"{_hint(name.strip(), words, memory, found)} (farspan calibrate writes a file for "
        "this machine)"
    )


def _hint(name: str, words: tuple[str, ...], memory: int | None, matches: list[str]) -> str:
    other = _presets_called(words, None) if memory is not None and words else []
    if other:
        has = " or ".join(f"{_size(preset)} GB" for preset in other)
        return f"{other[0]} has {has}; give --machine {other[0]} --device-memory {memory}GB"
    for without, said in _WITHOUT.items():
        if (match := without.fullmatch(name.lower())) is not None:
            return said.format(match[1].upper())
    within = [name for name, known in _names().items() if any(_is_within(w, words) for w in known)]
    if not within and (series := _SERIES.fullmatch(name.lower())) is not None:
        like = min(preset for preset in names() if preset.startswith(f"rtx{series[1]}"))
        return f"for a card like {like} give --gpu {like} --device-memory SIZE, such as 12GB"
    if name.isdecimal():
        return f"for a number of devices give --gpus {name}, and the card with --machine"
    numbers = {word for word in words if word.isdecimal() and len(word) > 1}
    sized = [n for n in names() if memory is not None and not words and _size(n) == memory]
    close = matches or within or [n for n in names() if n.startswith(name.lower())] or sized
    close = close or [n for n, known in _names().items() if numbers & set().union(*known)][:3]
    plain = "".join(_WORD.findall(name.lower()))
    close = close or difflib.get_close_matches(plain, names(), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close[:3])}?" if close else f"some are {some(names())}"


def _is_within(known: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Return whether all words of a GPU's name, with a number among them, occur in `words`."""
    return set(known) <= set(words) and any(map(str.isdecimal, known))


def with_main_memory(spec: MachineSpec, size: int) -> MachineSpec:
    """Return the machine with `size` bytes of main memory, less the reserve (`HOST_RESERVE`)."""
    reserve = int(HOST_RESERVE * size)
    return replace(spec, host_bytes=size - reserve, host_reserve=reserve)


def user_file() -> Path:
    """Return the path of the file that `farspan calibrate` writes for this machine."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "farspan" / "machine.json"


def preset_of_gpu(gpu: str) -> str | None:
    """Return the preset of the GPU that the driver reports under this name, or None."""
    for name, values in _raw_presets().items():
        if gpu in values["gpu_names"]:
            return name
    return None


def write(file: MachineFile, path: Path) -> None:
    """Write a machine file that `read` reads back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, json.dumps(to_json(file), indent=1) + "\n", "output")


def to_json(file: MachineFile) -> dict[str, Any]:
    spec = file.spec
    values = {f.name: getattr(spec, f.name) for f in fields(MachineSpec)}
    values["rates"] = {dtype: _rates_to_json(rates) for dtype, rates in spec.rates.items()}
    beside = {name: getattr(file, name) for name in BESIDE}
    return values | {name: value for name, value in beside.items() if value}


def from_json(values: object, where: str) -> MachineFile:
    """Convert parsed JSON to a machine. Raises UnsupportedError naming `where` and the field."""
    if not isinstance(values, Mapping):
        raise UnsupportedError(f"{where}: expected the fields of a machine, got {_got(values)}")
    known = [f.name for f in fields(MachineSpec)]
    for name in values:
        if name not in (*known, *BESIDE):
            raise UnsupportedError(_unknown(where, str(name), known))
    given: dict[str, Any] = {}
    for f in fields(MachineSpec):
        if f.name in values:
            given[f.name] = _field(f.name, f.type, values[f.name], where)
        elif f.default is MISSING:
            raise UnsupportedError(f"{where}: {f.name} is missing; {_needed(f.name)}")
    spec = MachineSpec(**given)
    if (found := next(contradictions(spec), None)) is not None:
        raise UnsupportedError(
            f"{where}: {found}; correct it, or run farspan calibrate when the machine is idle"
        )
    spread = _mapping("spread", values.get("spread", {}), where)
    return MachineFile(
        spec,
        _text("about", values.get("about", ""), where),
        dict(_mapping("sources", values.get("sources", {}), where)),
        dict(_mapping("measured_on", values.get("measured_on", {}), where)),
        {name: _number(f"spread.{name}", ratio, where) for name, ratio in spread.items()},
        _text("note", values.get("note", ""), where),
    )


def contradictions(spec: MachineSpec) -> Iterator[str]:
    """Yield a message for each impossible number, naming the field and the expected value."""
    for dtype, rates in spec.rates.items():
        path = f"rates.{dtype}"
        for name in (*CURVES, *OTHER_CURVES):
            curve = getattr(rates, name)
            if curve is not None:
                most = rates.peak * (FP8_PEAK if name == "fp8" else 1.0)
                yield from _curve_contradictions(path, name, curve, most)
        yield from _softmax_contradictions(path, rates)
        if {rates.kernel, rates.backward_kernel} == {AttentionKernel.FA3, AttentionKernel.FLASH}:
            yield (
                f"{path}.backward_kernel: expected another than {rates.backward_kernel} with "
                f"kernel {rates.kernel}, as PyTorch has one of both at a time"
            )
    for name in ("fetch", "evict"):
        alone, together = getattr(spec, name), getattr(spec, f"{name}_together")
        if together > TOGETHER * alone:
            yield (
                f"{name}_together: expected no more than {name}, {alone:.3g} bytes a second, since "
                f"the other direction is busy too, got {together:.3g}"
            )


def _curve_contradictions(path: str, name: str, curve: Curve, peak: float) -> Iterator[str]:
    for place, (size, rate) in enumerate(curve.points):
        if rate > peak:
            yield (
                f"{path}.{name}: expected no rate above {path}.peak, {peak:.4g} FLOP a second, got "
                f"{rate:.4g} at a call of {size:.3g} FLOP"
            )
        before = curve.points[max(0, place - 1)]
        if before[1] > STEEPEST * rate:
            yield (
                f"{path}.{name}: expected a larger call to be about as fast or faster, got "
                f"{rate:.3g} FLOP a second at {size:.3g} FLOP, but {before[1]:.3g} FLOP a second "
                f"at {before[0]:.3g} FLOP"
            )


def _softmax_contradictions(path: str, rates: Rates) -> Iterator[str]:
    forward = rates.softmax_forward, pair_seconds(rates.attention_forward, rates.head_dim)
    curve = rates.attention_backward
    backward = rates.softmax_backward, pair_seconds(curve, rates.head_dim, backward=True)
    for way, (found, call) in (("forward", forward), ("backward", backward)):
        if found > call:
            yield (
                f"{path}.softmax_{way}: expected less than the time of the whole call by "
                f"attention_{way}, {call:.3g} seconds per query, key and head, got {found:.3g}"
            )


def pair_seconds(curve: Curve, head_dim: int, *, backward: bool = False) -> float:
    """Seconds per query, key and head in the machine's fastest attention call, with softmax."""
    flop = 4.0 * head_dim * (BACKWARD_PRODUCTS if backward else 1.0)
    return flop / max(rate for _, rate in curve.points)


def busy_words(spread: Mapping[str, float], cure: str = "run again") -> str | None:
    """Return a warning if other programs ran on the machine while it was measured, else None."""
    varied = sorted((name for name in spread if spread[name] > BUSY), key=lambda n: -spread[n])
    if not varied:
        return None
    named = ", ".join(f"{name} varied by {spread[name]:.1f}x" for name in varied[:NAMED])
    others = f" and {len(varied) - NAMED} more" if len(varied) > NAMED else ""
    return f"the machine was busy: {named}{others}; {cure} when it is idle"


def _field(name: str, kind: object, value: object, where: str) -> object:
    if name == "rates":
        given = _mapping(name, value, where)
        if not given:
            raise UnsupportedError(
                f"{where}: rates: expected at least one of {', '.join(DTYPES)}, got none"
            )
        return {dtype: _rates(dtype, rates, where) for dtype, rates in given.items()}
    if kind is str:
        return _text(name, value, where)
    if kind is bool:
        if not isinstance(value, bool):
            raise UnsupportedError(f"{where}: {name}: expected true or false, got {_got(value)}")
        return value
    number = _number(name, value, where, zero=name in MAY_BE_ZERO)
    if kind is int:
        if number != int(number):
            raise UnsupportedError(f"{where}: {name}: expected a whole number, got {value!r}")
        return int(number)
    return number


def _rates(dtype: str, values: object, where: str) -> Rates:
    if dtype not in DTYPES:
        raise UnsupportedError(_unknown(f"{where}: rates", dtype, list(DTYPES)))
    path = f"rates.{dtype}"
    given = _mapping(path, values, where)
    known = [f.name for f in fields(Rates)]
    for name in given:
        if name not in known:
            raise UnsupportedError(_unknown(f"{where}: {path}", name, known))
    for f in fields(Rates):
        if f.default is MISSING and f.name not in given:
            raise UnsupportedError(f"{where}: {path}.{f.name} is missing; {_needed(f.name)}")
    return Rates(**{name: _rate(f"{path}.{name}", given[name], where) for name in given})


def _rate(path: str, value: object, where: str) -> Any:
    name = path.rsplit(".", 1)[1]
    if name in CURVES or name in OTHER_CURVES:
        return _curve(path, value, where)
    if name in ("kernel", "backward_kernel"):
        if value not in KERNELS:
            raise UnsupportedError(
                f"{where}: {path}: expected one of {', '.join(KERNELS)}, got {_got(value)}"
            )
        return AttentionKernel(value)
    return _number(path, value, where, zero=name in MAY_BE_ZERO)


def _curve(path: str, value: object, where: str) -> Curve:
    expected = f"{where}: {path}: expected a list of [size, rate] with ascending sizes"
    if not isinstance(value, list) or not value:
        raise UnsupportedError(f"{expected}, got {_got(value)}")
    points: list[tuple[float, float]] = []
    for place, point in enumerate(value):
        if not isinstance(point, list) or len(point) != 2:
            raise UnsupportedError(f"{expected}, got {_got(point)} as entry {place + 1}")
        size, rate = (_number(f"{path}[{place + 1}]", number, where) for number in point)
        if points and size <= points[-1][0]:
            raise UnsupportedError(f"{expected}, got {size:g} after {points[-1][0]:g}")
        points.append((size, rate))
    return Curve(tuple(points))


def _number(path: str, value: object, where: str, *, zero: bool = False) -> float:
    sign = "zero or more" if zero else "more than zero"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, int | float) or not is_number or not abs(value) <= LARGEST:
        raise UnsupportedError(f"{where}: {path}: expected a number, {sign}, got {_got(value)}")
    if value < 0 or (value == 0 and not zero):
        raise UnsupportedError(f"{where}: {path}: expected {sign}, got {value!r}")
    return value


def _text(path: str, value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UnsupportedError(f"{where}: {path}: expected text, got {_got(value)}")
    return value


def _mapping(path: str, value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UnsupportedError(f"{where}: {path}: expected keys and values, got {_got(value)}")
    return value


def _rates_to_json(rates: Rates) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in fields(Rates):
        value = getattr(rates, f.name)
        if isinstance(value, Curve):
            values[f.name] = [list(point) for point in value.points]
        elif f.default is MISSING or value != f.default:
            values[f.name] = value.value if isinstance(value, AttentionKernel) else value
    return values


def _unknown(where: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(known)}"
    return f"{where}: {name}: no such field; {hint}"


def _needed(name: str) -> str:
    return f"give {name}, or write a new file with farspan calibrate"


def _got(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"


def _read_file(path: Path) -> MachineFile:
    try:
        values = expect_json(path)
    except UnsupportedError as error:
        raise UnsupportedError(f"machine: {error}") from error
    return from_json(values, f"machine file {path}")


@cache
def _raw_presets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PRESETS.read_text(encoding="utf-8"))
    return found


@cache
def _presets() -> dict[str, MachineFile]:
    return {name: _preset(name, values) for name, values in _raw_presets().items()}


def _preset(name: str, values: Mapping[str, Any]) -> MachineFile:
    """Return a preset; fields that it leaves out come from the preset named in `like`."""
    base = _raw_presets()[values["like"]] if "like" in values else {}
    sources = {**base.get("sources", {}), **values["sources"]}
    found = {**base, **values, "name": name, "sources": sources}
    given = {key: value for key, value in found.items() if key not in OF_PRESETS}
    return from_json(given, f"preset {name}")


def with_kernels(machine: MachineSpec, *, deterministic: bool) -> MachineSpec:
    """Return the machine, with the slower rates of deterministic attention if `deterministic`."""
    if not deterministic or machine.on_cpu:
        return machine
    rates = {dtype: _slower(rates) for dtype, rates in machine.rates.items()}
    return replace(machine, rates=rates)


def _slower(rates: Rates) -> Rates:
    by, curves = rates.deterministic, dict[str, Any]()
    for name in ("attention_forward", "attention_backward", "causal_forward", "causal_backward"):
        if (known := getattr(rates, name)) is not None:
            curves[name] = Curve(tuple((size, rate / by) for size, rate in known.points))
    return replace(
        rates,
        **curves,
        softmax_forward=rates.softmax_forward * by,
        softmax_backward=rates.softmax_backward * by,
        deterministic=1.0,
    )
