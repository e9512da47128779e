"""Profiles as JSON: those of the presets ship, those of other models are cached by configuration.

Of adapters two ranks are kept. All that a profile counts is linear in the rank, so any other lies
between them or beyond.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from farspan.durable import PARTIAL, write_bytes, write_whole
from farspan.lazy import load
from farspan.profile.catalog import find_config, find_preset
from farspan.profile.estimate import adapted, packed
from farspan.profile.model import (
    CellLines,
    KindProfile,
    ModelProfile,
    OuterProfile,
    Peak,
    Variant,
)
from farspan.spec import LayerSpec, LayerWork, ModelSpec, StateTensor, UnsupportedError

PRESETS = Path(__file__).parent / "presets"
RANKS = 8, 16  # of adapters, that are measured
# What ships of a preset, adapters aside, which ship in bf16: on a GPU; on a CPU, and with slices of
# weights.
SHIPPED = tuple(
    Variant(dtype, 0, ours, ours) for dtype in ("bfloat16", "float32") for ours in (False, True)
)
_PEAKS = frozenset(f.name for of in (CellLines, OuterProfile) for f in fields(of) if f.type == Peak)

Measure = Callable[[Mapping[str, Any], Variant, str], ModelProfile]


@dataclass(frozen=True, eq=False)
class Profiles:
    """The profiles of one model, each found or measured when it is first asked for."""

    config: Mapping[str, Any]
    name: str
    preset: str | None = None  # the shipped one that this is
    # Measures a model that has more to it than its configuration says, such as its own adapters.
    made: Callable[[Variant], ModelProfile] | None = None
    _known: dict[Variant, ModelProfile] = field(default_factory=dict, init=False)

    def rank(self, lora: int) -> int | None:
        """Of adapters, where so much was asked for."""
        return lora if self.made is None else None

    def widest_rank(self) -> int:
        """Of the linear modules that get adapters, the most that the narrower side of one is."""
        rank = RANKS[0]
        layers = set(self.of(Variant(rank=rank)).spec.layers)
        return max((min(widths) for one in layers for widths in adapted(one, rank)), default=1)

    def of(self, variant: Variant) -> ModelProfile:
        """The model's in this way. Raises UnsupportedError where the model cannot be profiled."""
        if variant not in self._known:
            found = self._plain(variant)
            self._known[variant] = replace(found, spec=replace(found.spec, name=self.name))
        return self._known[variant]

    def _plain(self, variant: Variant) -> ModelProfile:
        if self.made is not None:
            return self.made(variant)
        if not variant.nf4:
            return self._found(variant)
        # Those of the layers that have adapters are all linear modules there are.
        plain, rank = self.of(replace(variant, nf4=False)), variant.rank or 0
        of = {kind: adapted(plain.spec.layers[i], rank) for i, kind in enumerate(plain.kind_of)}
        return packed(plain, of)

    def _found(self, variant: Variant) -> ModelProfile:
        return self._shipped(variant) or self._cached(variant)

    def _shipped(self, variant: Variant) -> ModelProfile | None:
        made = {} if self.preset is None else shipped(self.preset)
        if not variant.rank:
            found = made.get(variant.key())
            return None if found is None else from_json(found)
        low, high = (made.get(replace(variant, rank=rank).key()) for rank in RANKS)
        if low is None or high is None:
            return None
        return from_json(between(low, high, (variant.rank - RANKS[0]) / (RANKS[1] - RANKS[0])))

    def _cached(self, variant: Variant) -> ModelProfile:
        try:
            path = cache_folder() / f"{digest(self.config, variant)}.json"
            kept = _kept(path)
            if kept is not None:
                return kept
            measure: Measure = load("farspan.engine.profile", "measure")
        except ImportError as error:
            raise UnsupportedError(
                f"model: profiles of {self.name} in {variant.key()} do not ship, and making them "
                f"needs torch and transformers ({error}); pip install farspan, which has them, or "
                "name a preset"
            ) from error
        found = measure(self.config, variant, self.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            apart = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
            try:
                write_bytes(apart, json.dumps(to_json([found])[0]).encode("utf-8"))
                apart.replace(path)
            finally:
                apart.unlink(missing_ok=True)  # of a disk that is full
        except OSError:  # a cache is no promise
            pass
        return found


def profiles_of(config: Mapping[str, Any], name: str, preset: str | None = None) -> Profiles:
    """A model's, which are there once: questions about one model are equal."""
    return _profiles(json.dumps(config, default=str), name, preset)


def find_profiles(model: str) -> Profiles:
    """Of a model as `find_config` takes it. Raises UnsupportedError."""
    preset = find_preset(model)
    if preset is not None:
        return profiles_of(preset.config, preset.name, preset.name)
    return profiles_of(find_config(model), model)


@lru_cache(maxsize=256)
def _profiles(config: str, name: str, preset: str | None) -> Profiles:
    return Profiles(json.loads(config), name, preset)


@cache
def shipped(preset: str) -> dict[str, Any]:
    """A preset's profiles, by `Variant.key`; none where its file is missing."""
    path = PRESETS / f"{preset}.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def make(config: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
    """What ships of a model, by `Variant.key`."""
    found: dict[str, Any] = {}
    for variant in SHIPPED:
        found[variant.key()] = to_json([measure(config, variant, "")])[0]
        pair = [replace(variant, rank=rank) for rank in RANKS if variant.dtype == "bfloat16"]
        if not pair:
            continue
        made = to_json([measure(config, one, "") for one in pair])
        found |= {one.key(): value for one, value in zip(pair, made, strict=True)}
    return found


def write(preset: str, made: Mapping[str, Any]) -> Path:
    """Put what ships of a preset into the package: a line for each variant."""
    rows = (f"{json.dumps(key)}:{_text(value)}" for key, value in made.items())
    path = PRESETS / f"{preset}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, ("{\n" + ",\n".join(rows) + "\n}\n").encode("utf-8"))
    return path


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _kept(path: Path) -> ModelProfile | None:
    """What an earlier question has left; what is broken, in whatever way, is made anew."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except Exception:
        return None


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "farspan/profiles"


def digest(config: Mapping[str, Any], variant: Variant) -> str:
    """A name for what a profile depends on, releases of libraries included: they write the layers
    and decide what operators allocate."""
    releases = [_measuring(), *map(version, ("torch", "transformers"))]
    text = json.dumps([releases, variant.key(), config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _measuring() -> str:
    """The code that measures: between two releases of it there are others."""
    found = hashlib.sha256()
    for part in "attention", "engine", "hf", "kernels", "profile":
        for path in sorted((Path(__file__).parents[1] / part).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


# -- as plain values ----------------------------------------------------------------------------


def to_json(profiles: Sequence[ModelProfile]) -> list[dict[str, Any]]:
    """Plain values, moments that are never the fullest in any of the profiles left out: these are
    of one model at several ranks."""
    values = [_plain(profile) for profile in profiles]
    _prune(values)
    return values


def _plain(profile: ModelProfile) -> dict[str, Any]:
    value = asdict(profile)
    layers = [profile.kind_of.index(kind) for kind in range(len(profile.kinds))]
    value["spec"]["layers"] = [value["spec"]["layers"][layer] for layer in layers]
    for layer in value["spec"]["layers"]:  # packed weights follow from plain ones
        del layer["work"]["packed"]
    del value["variant"]["nf4"]
    found: dict[str, Any] = _whole(value)
    return found


def _whole(value: Any) -> Any:
    """Whole numbers as such, tuples as lists."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def _prune(values: Sequence[Any]) -> None:
    """Of values that are alike but for numbers."""
    first = values[0]
    if isinstance(first, list):
        for items in zip(*values, strict=True):
            _prune(items)
    elif isinstance(first, dict):
        for key in first:
            of = [value[key] for value in values]
            if key not in _PEAKS:
                _prune(of)
                continue
            kept = list(_highest(of)) if len({len(peak) for peak in of}) == 1 else range(len(of[0]))
            for value, peak in zip(values, of, strict=True):
                value[key] = [peak[place] for place in kept]


def _highest(peaks: Sequence[list[list[float]]]) -> Iterator[int]:
    """Places of moments that no other one is above in every number of every peak."""
    rows = [[number for line in lines for number in line] for lines in zip(*peaks, strict=True)]
    for place, row in enumerate(rows):
        others = (above for other, above in enumerate(rows) if above != row or other < place)
        if not any(all(a >= b for a, b in zip(above, row, strict=True)) for above in others):
            yield place


def between(low: Any, high: Any, part: float) -> Any:
    """A value as far between two that are alike but for numbers."""
    if isinstance(low, dict):
        return {key: between(low[key], high[key], part) for key in low}
    if isinstance(low, list):
        return [between(a, b, part) for a, b in zip(low, high, strict=True)]
    if low == high or isinstance(low, bool | str | None):
        return low
    found = low + (high - low) * part
    return round(found) if isinstance(low, int) and isinstance(high, int) else found


def from_json(value: Mapping[str, Any]) -> ModelProfile:
    """The profile of plain values. Raises KeyError or TypeError for what is none."""
    kind_of = tuple(value["kind_of"])
    layers = [_layer(layer) for layer in value["spec"]["layers"]]
    spec = {**value["spec"], "layers": tuple(layers[kind] for kind in kind_of)}
    kinds = tuple(
        KindProfile(
            tuple(kind["weights"]),
            kind["heads_first"],
            {name: CellLines(**_tuples(cell)) for name, cell in kind["cells"].items()},
        )
        for kind in value["kinds"]
    )
    return ModelProfile(
        ModelSpec(**spec),
        kinds,
        kind_of,
        OuterProfile(**_tuples(value["outer"])),
        Variant(**value["variant"]),
        value["longest"],
        value["learned_positions"],
    )


def _layer(value: Mapping[str, Any]) -> LayerSpec:
    work = LayerWork(**_tuples(value["work"]))
    state = tuple(StateTensor(**_tuples(tensor)) for tensor in value["state"])
    return LayerSpec(**{**value, "work": work, "state": state})


def _tuples(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
