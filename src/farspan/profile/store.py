"""Store of profiles as JSON: presets ship with theirs, other models are cached by configuration.

Profiles with adapters are stored for two ranks. Every count in a profile is linear in the rank, so
profiles of other ranks are interpolated or extrapolated.
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
from farspan.spec import Indexer, LayerSpec, LayerWork, ModelSpec, StateTensor, UnsupportedError

PRESETS = Path(__file__).parent / "presets"
RANKS = 8, 16  # ranks of adapters to measure
# Variants that ship for presets: on a GPU; on a CPU, and with slices of weights. Adapters ship in
# bf16 only.
SHIPPED = tuple(
    Variant(dtype, 0, ours, ours) for dtype in ("bfloat16", "float32") for ours in (False, True)
)
_PEAKS = frozenset(f.name for c in (CellLines, OuterProfile) for f in fields(c) if f.type == Peak)

Measure = Callable[[Mapping[str, Any], Variant, str], ModelProfile]


@dataclass(frozen=True, eq=False)
class Profiles:
    """Profiles of one model in all variants, each loaded or measured on first use."""

    config: Mapping[str, Any]
    name: str
    preset: str | None = None  # name of the preset, if the model is one
    # Measures a model that its configuration does not fully describe, such as one with adapters.
    made: Callable[[Variant], ModelProfile] | None = None
    # Loads what measures a model whose profiles do not ship: it needs torch.
    measuring: Callable[[], Measure] | None = None
    _known: dict[Variant, ModelProfile] = field(default_factory=dict, init=False)

    def rank(self, lora: int) -> int | None:
        """Return `Variant.rank` for LoRA of rank `lora`; None if the model has adapters already."""
        return lora if self.made is None else None

    def widest_rank(self) -> int:
        """Return the largest useful rank of adapters: the narrower side of a linear module."""
        rank = RANKS[0]
        layers = set(self.of(Variant(rank=rank)).spec.layers)
        return max((min(widths) for one in layers for widths in adapted(one, rank)), default=1)

    def of(self, variant: Variant) -> ModelProfile:
        """Return the model's profile for these training options: precision, adapters, kernels.
        Raises UnsupportedError if it cannot be measured."""
        if variant not in self._known:
            profile = self._plain(variant)
            self._known[variant] = replace(profile, spec=replace(profile.spec, name=self.name))
        return self._known[variant]

    def _plain(self, variant: Variant) -> ModelProfile:
        if self.made is not None:
            return self.made(variant)
        if not variant.nf4:
            return self._found(variant)
        # All linear modules of the layers have adapters, so they are the packed ones.
        plain, rank = self.of(replace(variant, nf4=False)), variant.rank or 0
        of = {kind: adapted(plain.spec.layers[i], rank) for i, kind in enumerate(plain.kind_of)}
        return packed(plain, of)

    def _found(self, variant: Variant) -> ModelProfile:
        return self._shipped(variant) or self._cached(variant)

    def _shipped(self, variant: Variant) -> ModelProfile | None:
        made = {} if self.preset is None else shipped(self.preset)
        if not variant.rank:
            stored = made.get(variant.key())
            return None if stored is None else from_json(stored)
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
            if self.measuring is None:
                raise UnsupportedError(
                    f"model: profiles of {self.name} in {variant.key()} do not ship, and nothing "
                    "was given to make them; give measuring, such as farspan.ask.measuring"
                )
            measure = self.measuring()
        except ImportError as error:
            raise UnsupportedError(
                f"model: farspan ships no profile of {self.name} in {variant.key()}, and making "
                f"one needs torch and transformers ({error}); pip install farspan, which has them, "
                "or name a preset"
            ) from error
        profile = measure(self.config, variant, self.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            apart = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
            try:
                write_bytes(apart, json.dumps(to_json([profile])[0]).encode("utf-8"))
                apart.replace(path)
            finally:
                apart.unlink(missing_ok=True)  # left if the disk is full
        except OSError:  # the cache is optional
            pass
        return profile


def profiles_of(
    config: Mapping[str, Any],
    name: str,
    preset: str | None = None,
    measuring: Callable[[], Measure] | None = None,
) -> Profiles:
    """Return the one `Profiles` object of a model, so that questions about the model are equal."""
    return _profiles(json.dumps(config, default=str), name, preset, measuring)


def find_profiles(model: str, measuring: Callable[[], Measure] | None = None) -> Profiles:
    """Return the profiles of a model that `find_config` finds. Raises UnsupportedError."""
    preset = find_preset(model)
    if preset is not None:
        return profiles_of(preset.config, preset.name, preset.name, measuring)
    return profiles_of(find_config(model), model, measuring=measuring)


@lru_cache(maxsize=256)
def _profiles(
    config: str, name: str, preset: str | None, measuring: Callable[[], Measure] | None
) -> Profiles:
    return Profiles(json.loads(config), name, preset, measuring=measuring)


@cache
def shipped(preset: str) -> dict[str, Any]:
    """Return the profiles that ship with a preset, by `Variant.key`; empty without a file."""
    path = PRESETS / f"{preset}.json"
    if not path.is_file():
        return {}
    profiles: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return profiles


def make(config: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
    """Measure a model in the variants whose profiles ship, and return them by `Variant.key`."""
    profiles: dict[str, Any] = {}
    for variant in SHIPPED:
        profiles[variant.key()] = to_json([measure(config, variant, "")])[0]
        pair = [replace(variant, rank=rank) for rank in RANKS if variant.dtype == "bfloat16"]
        if not pair:
            continue
        made = to_json([measure(config, one, "") for one in pair])
        profiles |= {one.key(): value for one, value in zip(pair, made, strict=True)}
    return profiles


def write(preset: str, made: Mapping[str, Any]) -> Path:
    """Write a preset's profiles to its file in the package, one variant per line."""
    rows = (f"{json.dumps(key)}:{_text(value)}" for key, value in made.items())
    path = PRESETS / f"{preset}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, ("{\n" + ",\n".join(rows) + "\n}\n").encode("utf-8"))
    return path


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _kept(path: Path) -> ModelProfile | None:
    """Return a cached profile; None if it is missing or damaged."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except Exception:
        return None


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "farspan/profiles"


def digest(config: Mapping[str, Any], variant: Variant) -> str:
    """Return a hash of everything that a profile depends on, including releases of libraries, which
    define the layers and the memory of operators."""
    releases = [_measuring(), *map(version, ("torch", "transformers"))]
    text = json.dumps([releases, variant.key(), config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _measuring() -> str:
    """Return a hash of the measuring code, which also changes between releases."""
    digest = hashlib.sha256()
    for part in "attention", "engine", "hf", "kernels", "profile":
        for path in sorted((Path(__file__).parents[1] / part).glob("*.py")):
            digest.update(path.read_bytes())
    digest.update((Path(__file__).parents[1] / "activations.py").read_bytes())
    return digest.hexdigest()


# -- as plain values ----------------------------------------------------------------------------


_NEWER = ("chunked", "indexer")  # fields of a layer that older profiles do not have
_NEWER_OF_MODELS = "routers", "carried", "embeds", "shares"


def to_json(profiles: Sequence[ModelProfile]) -> list[dict[str, Any]]:
    """Convert profiles of a model at several ranks of adapters to plain values. Lines (linear
    functions) that never give the peak are left out."""
    values = [_plain(profile) for profile in profiles]
    _prune(values)
    return values


def _plain(profile: ModelProfile) -> dict[str, Any]:
    value = asdict(profile)
    layers = [profile.kind_of.index(kind) for kind in range(len(profile.kinds))]
    value["spec"]["layers"] = [value["spec"]["layers"][layer] for layer in layers]
    for layer in value["spec"]["layers"]:  # packed weights follow from plain ones
        del layer["work"]["packed"]
        for name in _NEWER:
            if not layer[name]:
                del layer[name]
    del value["variant"]["nf4"]
    if profile.variant.remakes:
        del value["variant"]["remakes"]
    for name in _NEWER_OF_MODELS:
        if not value["spec"][name]:
            del value["spec"][name]
    found: dict[str, Any] = _whole(value)
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def _prune(values: Sequence[Any]) -> None:
    """Remove, in place, lines (linear functions) that give the peak in none of these profiles."""
    first = values[0]
    if isinstance(first, list):
        for items in zip(*values, strict=True):
            _prune(items)
    elif isinstance(first, dict):
        for key in first:
            column = [value[key] for value in values]
            if key not in _PEAKS:
                _prune(column)
                continue
            alike = len({len(peak) for peak in column}) == 1
            kept = list(_highest(column)) if alike else range(len(column[0]))
            for value, peak in zip(values, column, strict=True):
                value[key] = [peak[place] for place in kept]


def _highest(peaks: Sequence[list[list[float]]]) -> Iterator[int]:
    """Yield indices of lines (linear functions) that no other line exceeds in all profiles."""
    rows = [[number for line in lines for number in line] for lines in zip(*peaks, strict=True)]
    for place, row in enumerate(rows):
        others = (above for other, above in enumerate(rows) if above != row or other < place)
        if not any(all(a >= b for a, b in zip(above, row, strict=True)) for above in others):
            yield place


def between(low: Any, high: Any, part: float) -> Any:
    """Interpolate between two values of equal structure; `part` is 0 at `low` and 1 at `high`."""
    if isinstance(low, dict):
        return {key: between(low[key], high[key], part) for key in low}
    if isinstance(low, list):
        return [between(a, b, part) for a, b in zip(low, high, strict=True)]
    if low == high or isinstance(low, bool | str | None):
        return low
    value = low + (high - low) * part
    return round(value) if isinstance(low, int) and isinstance(high, int) else value


def from_json(value: Mapping[str, Any]) -> ModelProfile:
    """Build a profile from plain values. Raises KeyError or TypeError for other values."""
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
    indexer = value.get("indexer")
    of = {"work": work, "state": state, "indexer": indexer and Indexer(**indexer)}
    return LayerSpec(**{**value, **of})


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
