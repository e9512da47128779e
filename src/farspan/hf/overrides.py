"""Apply `model.overrides` as transformers reads the same fields in config.json, and check that each
acts.

transformers converts some fields as it reads a file: layer kinds from a window, RoPE's parameters
from `rope_theta` and `rope_scaling`. So the file's fields are changed and read again, rather than
the resulting configuration.
"""

import copy
import dis
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from farspan.hf.unsupported import (
    LONG_ROPE,
    SLICEABLE_ROPE,
    context_limit,
    describe_positions,
    in_yaml,
    rope_types,
    ropes,
)
from farspan.spec import UnsupportedError

ROPE = "rope_parameters"
SPELLINGS = (ROPE, "rope_scaling")
# Entries of a RoPE that mean the same under every type; the others belong to one scaling.
LASTING = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
SCALINGS = RopeParameters.__annotations__.keys() - LASTING - {"rope_type", "mrope_section"}

# Fields that may change no number of a step, but matter where the saved model is used: guides to
# yarn also set max_position_embeddings, to a length that the frequencies already reach.
FOR_USE = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}
# Fields that modules may hold although a step never uses them, and advice for each.
UNUSED = {
    "_attn_implementation": "farspan computes attention itself; leave it out",
    "attn_implementation": "farspan computes attention itself; leave it out",
    "experts_implementation": "farspan chooses how experts run; leave it out",
    "gradient_checkpointing": "the schedule decides what is recomputed; leave it out",
    "quantization_config": "the run file has model.quantize for this; set that",
    "output_router_logits": "the run file has loss.router for this; set that",
    **dict.fromkeys(
        ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "moe_loss_weight"),
        "the run file has loss.router for this; set that",
    ),
    "router_z_loss_coef": "the run file has loss.router_z for this; set that",
    "z_loss_coefficient": "a step adds no z-loss of its logits; leave it out",
}
DRAWS = {"initializer_range", "initializer_factor", "init_std"}
# Fields that a forward may read for outputs that a training step does not request.
UNASKED = {
    *(ROPE, "rope_scaling", "max_position_embeddings", "use_cache", "return_dict", "dtype"),
    *("_attn_implementation", "_experts_implementation", "output_attentions", "torch_dtype"),
    *("output_hidden_states", "problem_type", "num_labels", "use_return_dict"),
}
# Methods that no forward calls. Results of RoPE's are in buffers.
BESIDE_FORWARD = {
    *("__init__", "extra_repr", "reset_parameters", "_init_weights"),
    *("compute_default_rope_parameters", "prepare_inputs_for_generation"),
}
# Modules with classes shared by all families.
NOT_OF_FAMILIES = (
    *("torch.nn.modules.module", "transformers.modeling_utils", "transformers.generation"),
    *("transformers.utils", "transformers.integrations"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """Value of an override, with the configuration fields that it sets."""

    name: str  # as the user wrote it, such as model.overrides.rope_scaling.factor
    paths: tuple[tuple[str, ...], ...]  # such as rope_parameters, full_attention, factor
    value: Any


# -- places of a field --------------------------------------------------------------------------


def resolve(
    config: PretrainedConfig,
    overrides: Mapping[str, Any],
    where: str = "model.overrides",
    path: tuple[str, ...] = (),
) -> list[Change]:
    """Return the changes of configuration fields that overrides make.

    Args:
        config: The configuration without the overrides.
        overrides: Fields by name. Fields of a text model's configuration need no prefix; part of a
            nested configuration or of a RoPE leaves the rest unchanged.
        where: The name of `overrides` in errors.
        path: The names of the configurations around `config`.

    Raises:
        UnsupportedError: Neither the configuration nor its model reads a name, or the family does
            not read RoPE's parameters in that place.
    """
    changes: list[Change] = []
    for name, value in overrides.items():
        inner = _text_part(config)
        if inner and not _knows(config, name) and _knows(config.get_text_config(), name):
            below = getattr(config, inner)
            changes += resolve(below, {name: value}, where, (*path, inner))
            continue
        before = _value(config, name)
        if isinstance(before, PretrainedConfig) and isinstance(value, Mapping):
            changes += resolve(before, value, f"{where}.{name}", (*path, name))
        elif name in SPELLINGS and _has(config, name):
            changes += _rope_changes(config, name, value, f"{where}.{name}", path)
        elif landed := _landing(config, name):
            paths = tuple(_rope_path(path, kind, entry) for kind, entry in landed)
            changes.append(Change(f"{where}.{name}", paths, value))
        else:
            refuse_unknown(config, [name], where)
            changes.append(Change(f"{where}.{name}", ((*path, _canonical(config, name)),), value))
    return changes


def refuse_unknown(config: PretrainedConfig, fields: Sequence[str], where: str) -> None:
    """Raise UnsupportedError for a field that no model with this configuration reads."""
    for name in fields:
        if name == "model_type":  # a class attribute: setting it on an object would change nothing
            raise UnsupportedError(
                f"{where}.model_type: the type of a {config.model_type} model cannot be changed; "
                "leave it out"
            )
        if name in UNUSED and not _has(config, name):
            raise UnsupportedError(f"{where}.{name}: {UNUSED[name]}")
        if not _has(config, name) and not _is_read(config, name):
            raise UnsupportedError(
                f"{where}.{name}: {type(config).__name__} has no such field; check its name"
            )


def _text_part(config: PretrainedConfig) -> str | None:
    """Return the field of the text model's configuration; None if `config` is that itself."""
    text = config.get_text_config()
    for name in () if text is config else config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and part.get_text_config() is text:
            return str(name)
    return None


def _knows(config: PretrainedConfig, name: str) -> bool:
    return _has(config, name) or _is_read(config, name) or bool(_landing(config, name))


def _has(config: PretrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # see _value
        return True


def _is_read(config: PretrainedConfig, name: str) -> bool:
    """Return whether a model family reads a field that its configuration does not declare. Its
    causal model may read it by getattr (Qwen3-MoE: head_dim), or its configuration class may take
    it from the file (Gemma3's makes layer_types from sliding_window_pattern)."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    quoted = rf"""["']{re.escape(name)}["']"""
    asks = rf"getattr\(\s*(self\.)?config,\s*{quoted}"
    return bool(
        re.search(asks, _source(inspect.getmodule(model)))
        or re.search(rf"kwargs\.(pop|get)\(\s*{quoted}", _source(type(config)))
    )


def _source(member: Any) -> str:
    try:
        return inspect.getsource(member)
    except (OSError, TypeError):  # source not installed, or no module
        return ""


def _value(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # Gemma4's layers differ in it; its file has the most common value
        return config.to_dict().get(name)


def _canonical(config: PretrainedConfig, name: str) -> str:
    """Return a field's name in the family's own configuration, such as n_embd for hidden_size."""
    return "dtype" if name == "torch_dtype" else config.attribute_map.get(name, name)


# -- RoPE ---------------------------------------------------------------------------------------


def _rope_changes(
    config: PretrainedConfig, name: str, value: Any, where: str, path: tuple[str, ...]
) -> list[Change]:
    found = ropes(config)
    if value is None:  # no scaling
        value = {kind: {"rope_type": _default_type(config)} for kind in found if kind}
        value = value or {"rope_type": _default_type(config)}
        name = ROPE
    if not isinstance(value, Mapping) or not found:
        has = "a dictionary of RoPE's parameters" if found else "nothing: the model has no RoPE"
        raise UnsupportedError(f"{where}: expected {has}; got {value!r}")
    by_kind = {k: part for k, part in value.items() if isinstance(part, Mapping) or k in found}
    flat = {entry: part for entry, part in value.items() if entry not in by_kind}
    family, kinds = type(config).__name__, sorted(kind for kind in found if kind)
    if by_kind.keys() - found.keys():
        has = f"one for each of {', '.join(kinds)}" if kinds else "one RoPE for all its layers"
        asked = ", ".join(sorted(by_kind.keys() - found.keys()))
        raise UnsupportedError(f"{where}.{asked}: {family} has {has}; name no other kinds of layer")
    landed = [kind for kind, _ in _landing(config, name, nested=False)] if flat else []
    if flat and not landed:
        full = next((kind for kind in kinds if kind == "full_attention"), kinds[0])
        raise UnsupportedError(
            f"{where}: {family} has a RoPE for each kind of layer ({', '.join(kinds)}) and ignores "
            f"RoPE parameters without a kind; give {ROPE}: {in_yaml({full: flat})}"
        )
    if by_kind and not _landing(config, name, nested=True):
        raise UnsupportedError(
            f"{where}: {family} does not read kinds of layer there; give {ROPE}: {in_yaml(by_kind)}"
        )
    if "type" in flat and "rope_type" not in flat:
        today = {"rope_type" if entry == "type" else entry: v for entry, v in flat.items()}
        ways = [_read(config, name, copy.deepcopy(rope)) for rope in (flat, today)]
        older, newer = ([rope["rope_type"] for rope in read.values()] for read in ways)
        if older != newer:
            raise UnsupportedError(
                f"{where}.type: {family} does not read the type by this older name; give "
                f"{name}: {in_yaml(today)}"
            )
    parts = [(where, landed, flat)]
    parts += [(f"{where}.{kind}", [kind], part or {}) for kind, part in by_kind.items()]
    return [
        Change(f"{at}.{entry}", tuple(_rope_path(path, kind, own) for kind in kinds_), given)
        for at, kinds_, entries in parts
        for entry, own, given in _entries(entries, at)
    ]


def _entries(rope: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each RoPE parameter that a user gives: its name as written, its name in transformers
    now, and its value."""
    kinds = {str(rope[name]) for name in ("type", "rope_type") if name in rope}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{where}.type: {rope['type']!r} differs from rope_type: {rope['rope_type']!r}, which "
            "transformers takes; leave one out"
        )
    for entry, value in rope.items():
        if entry == "type" and "rope_type" in rope:
            continue
        yield entry, "rope_type" if entry == "type" else entry, value


def _default_type(config: PretrainedConfig) -> str:
    return getattr(config, "default_rope_type", "default")  # always that before transformers 5.24


def _rope_path(path: tuple[str, ...], kind: str, entry: str) -> tuple[str, ...]:
    return (*path, ROPE, *((kind,) if kind else ()), entry)


def _landing(config: PretrainedConfig, name: str, nested: bool = False) -> list[tuple[str, str]]:
    """Return the RoPE parameters, as (kind of layer, name), that a field of config.json sets.
    Families name such fields differently (rotary_pct, rope_local_base_freq, global_rope_theta) and
    read common fields in their own way. So a configuration is made twice, with another value of the
    field each time: the field sets the parameters that equal its value both times."""
    before = ropes(config)
    asked = name in SPELLINGS or not _has(config, name) or name.startswith(("rope_", "rotary_"))
    if not before or not asked:
        return []
    found = []
    for mark in (0.25, 0.5):
        rope = {"rope_type": _default_type(config), "rope_theta": mark}
        given = {kind: dict(rope) for kind in before} if nested else rope
        read = _read(config, name, given if name in SPELLINGS else mark)
        found.append({(k, e) for k, rope in read.items() for e, v in rope.items() if v == mark})
    return sorted(found[0] & found[1])


def _read(config: PretrainedConfig, name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Return the RoPE parameters, by kind of layer, that transformers makes of a config.json in
    which only the field `name` describes RoPE; empty if the family's code raises."""
    rest = {n: v for n, v in config.to_dict().items() if n not in (*SPELLINGS, name)}
    try:
        with _quietly():
            return ropes(type(config).from_dict({**copy.deepcopy(rest), name: value}))
    except Exception:  # any error of the family's own code
        return {}


# -- the configuration --------------------------------------------------------------------------


def changed(
    config: PretrainedConfig, fields: Mapping[str, Any], changes: Sequence[Change]
) -> PretrainedConfig:
    """Return the configuration that transformers reads after these changes. `fields` is the content
    of the config.json behind `config`. Raises UnsupportedError if transformers cannot read it."""
    if not changes:
        return config
    made = {**copy.deepcopy(dict(fields)), "model_type": config.model_type}
    scaled: dict[tuple[str, ...], dict[str, Any]] = {}
    for change in changes:
        for path in change.paths:
            if ROPE in path[:-1]:
                scaled.setdefault(path[:-1], {})[path[-1]] = change.value
            else:
                _set(config, made, path, change.value)
    for path, entries in scaled.items():
        _set_rope(config, made, path, entries)
    try:
        with _quietly():
            found = type(config).from_dict(made)
    except Exception as error:  # each family checks its own fields
        # The reason alone, without the lines about validators and the quotes of a KeyError.
        last = str(error.args[0] if error.args else error).splitlines()[-1].strip()
        words = re.sub(r"^\w+Error: ", "", last)
        named = [c.name for c in changes if f"'{c.paths[0][-1]}'" in words]
        names = ", ".join(named or dict.fromkeys(c.name for c in changes))
        raise UnsupportedError(
            f"{names}: {type(config).__name__} does not accept this value: {words}"
        ) from error
    known = {"default", *ROPE_INIT_FUNCTIONS}
    for change in changes:
        unknown = change.paths[0][-1] == "rope_type" and change.value not in known
        if unknown and change.value in rope_types(found):
            raise UnsupportedError(
                f"{change.name}: transformers has no RoPE of type {change.value!r}; give one of "
                f"{', '.join(SLICEABLE_ROPE)}"
            )
    found.name_or_path = config.name_or_path
    return found


def _part(
    config: PretrainedConfig, fields: dict[str, Any], path: Sequence[str]
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Return the configuration nested at `path`, and its dict in `fields`, added if missing."""
    for name in path:
        config = getattr(config, name)
        if not isinstance(fields.get(name), dict):
            fields[name] = config.to_dict()
        fields = fields[name]
    return config, fields


def _set(
    config: PretrainedConfig, fields: dict[str, Any], path: tuple[str, ...], value: Any
) -> None:
    name = path[-1]
    config, fields = _part(config, fields, path[:-1])
    before = fields.get(name, _value(config, name))
    layers = getattr(config, "num_hidden_layers", None)
    # An older name in the file would be read last and win.
    for other in [key for key in fields if _canonical(config, key) == name]:
        del fields[other]
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        value = {**before, **value}
    fields[name] = copy.deepcopy(value)
    if name == _canonical(config, "num_hidden_layers") and isinstance(value, int) and layers:
        for key, each in fields.items():  # such as layer_types: keep the first layers
            if isinstance(each, list) and len(each) == layers > value > 0:
                fields[key] = each[:value]


def _set_rope(
    config: PretrainedConfig, fields: dict[str, Any], path: tuple[str, ...], entries: dict[str, Any]
) -> None:
    depth = path.index(ROPE)
    config, fields = _part(config, fields, path[:depth])
    # Remove older spellings: transformers prefers rope_scaling to rope_parameters.
    if fields.pop("rope_scaling", None) or not isinstance(fields.get(ROPE), dict):
        fields[ROPE] = copy.deepcopy(config.rope_parameters)
    known = {k: v for k, v in ropes(config)["".join(path[depth + 1 :])].items() if k != "type"}
    if entries.get("rope_type", known["rope_type"]) != known["rope_type"]:
        known = {name: value for name, value in known.items() if name not in SCALINGS}
    rope = {**copy.deepcopy(known), **copy.deepcopy(entries)}
    if len(path) == depth + 1:
        fields[ROPE] = rope
    else:
        fields[ROPE] = {**config.rope_parameters, **fields[ROPE], path[-1]: rope}


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers' warnings inside the context, while configurations are compared."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


# -- effects of changes -------------------------------------------------------------------------


def refuse_idle(
    make: Callable[[PretrainedConfig], PreTrainedModel],
    build: Callable[[Sequence[Change]], PretrainedConfig],
    changes: Sequence[Change],
    drawn: bool,
) -> None:
    """Raise UnsupportedError for an override without effect, found by comparing the model with all
    overrides to a model without this one.

    Args:
        make: Makes a model of a configuration, without weights.
        build: Makes the configuration with some changes.
        changes: The changes of all overrides.
        drawn: Whether weights are random rather than read.

    Raises:
        UnsupportedError: A change makes no difference, and the value was not already set.
    """
    whole: dict[str, Any] = {}
    for change in changes:
        field = change.paths[0][-1]
        if field in FOR_USE or field == "dtype" or (field in DRAWS and drawn):
            continue
        try:
            without = build([other for other in changes if other is not change])
        except UnsupportedError:  # the other changes need it
            without = None
        if without and _holds(without, change):
            continue
        if field in UNUSED:
            raise UnsupportedError(f"{change.name}: {UNUSED[field]}")
        whole = whole or computing(make(build(changes)))
        try:
            other = make(without) if without else None
        except UnsupportedError:
            other = None
        if without is None or other is None:
            model = make(build(changes))  # it may have overwritten fields
            if field != "rope_type" and not _holds(model.config, change):  # su is longrope's name
                raise UnsupportedError(_idle(change, model.config, model))
        elif computing(other) == whole and not _is_default(make, build, changes, change, whole):
            raise UnsupportedError(_idle(change, without, other))


def _holds(config: PretrainedConfig, change: Change) -> bool:
    return all(_alike(_at(config, path), change.value) for path in change.paths)


def _is_default(
    make: Callable[[PretrainedConfig], PreTrainedModel],
    build: Callable[[Sequence[Change]], PretrainedConfig],
    changes: Sequence[Change],
    change: Change,
    whole: dict[str, Any],
) -> bool:
    """Return whether an override has no effect only because its value is the model's default, such
    as 32 for yarn's beta_fast, while another value, tried here, has an effect."""
    if not isinstance(change.value, bool | int | float):
        return False
    value = change.value
    # Narrow heads show only much smaller borders of yarn.
    tried = [not value] if isinstance(value, bool) else [2 * value + 1, value / 4, value / 32]
    for another in tried:
        others = [replace(c, value=another) if c is change else c for c in changes]
        try:
            if computing(make(build(others))) != whole:
                return True
        except UnsupportedError:
            continue
    return False


def _at(config: Any, path: Sequence[str]) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, dict) else _value(config, name)
    return config


def _alike(actual: Any, expected: Any) -> bool:
    if isinstance(actual, torch.dtype):
        return str(actual).removeprefix("torch.") == str(expected).removeprefix("torch.")
    return bool(actual == expected or (isinstance(actual, tuple) and list(actual) == expected))


def _idle(change: Change, without: PretrainedConfig, model: PreTrainedModel) -> str:
    path, family = change.paths[0], type(model).__name__
    has = f"already has {path[-1]}: {in_yaml(_at(without, path))} and computes the same"
    if ROPE in path[:-1]:
        outside = _at(without, (*path[: path.index(ROPE)], path[-1]))
        positions = "; ".join(describe_positions(without))
        has = f"computes the same without it ({positions})"
        advice = "leave it out, or give a rope_type that reads it"
        if outside is not None and path[-1] not in LASTING - {"original_max_position_embeddings"}:
            advice = f"{type(without).__name__} reads the field {path[-1]} itself; override that"
    elif path[-1] in DRAWS:
        advice = "weights are read from model.path, so none are drawn; leave it out"
    elif "window" in path[-1]:
        advice = _window_advice(without.get_text_config())
    else:
        advice = "leave it out, or override the field that turns it on"
    return f"{change.name}: {in_yaml(change.value)} changes nothing: {family} {has}; {advice}"


def _window_advice(config: PretrainedConfig) -> str:
    kinds = getattr(config, "layer_types", None) or []
    turns_on = []
    if getattr(config, "use_sliding_window", None) is False:
        turns_on.append("use_sliding_window: true")
    if kinds and "sliding_attention" not in kinds:
        turns_on.append(f"layer_types: {len(kinds)} names, sliding_attention for windowed layers")
    return f"override also {' and '.join(turns_on)}" if turns_on else "leave it out"


def computing(model: PreTrainedModel) -> dict[str, Any]:
    """Return, for comparisons, everything except weights that decides what a model computes and how
    many positions it reaches: the classes of its modules, the shapes of parameters and which are
    tied, buffers, and the attributes and configuration fields that a forward reads."""
    first: dict[int, str] = {}
    # The frequencies of other types, such as dynamic, depend on earlier inputs.
    growing = [kind for kind in rope_types(model.config) if kind not in SLICEABLE_ROPE]
    found: dict[str, Any] = {"": (context_limit(model.config), growing)}
    for path, module in model.named_modules(remove_duplicate=False):
        read, fields = _read_by(module.__class__)
        config = getattr(module, "config", None)
        shapes = {
            name: (tuple(p.shape), p.dtype, first.setdefault(id(p), f"{path}.{name}"))
            for name, p in module._parameters.items()
            if p is not None
        }
        found[f"{path}."] = (
            type(module).__qualname__,
            shapes,
            {name: _bytes(b) for name, b in module._buffers.items() if b is not None},
            {name: _plain(v) for name, v in vars(module).items() if name in read},
            {name: _field(config, name) for name in sorted(fields - UNASKED)},
            _long_tables(module),
        )
    return found


def _bytes(buffer: Tensor) -> Any:
    numbers = () if buffer.is_meta else buffer.detach().cpu().contiguous().flatten()
    return tuple(buffer.shape), buffer.dtype, bytes(torch.as_tensor(numbers).view(torch.uint8))


def _plain(value: Any) -> str | None:
    """Return a plain value as text, a function as its name, any other value as None."""
    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return repr([_plain(item) for item in value])
    if isinstance(value, dict):
        return repr({name: _plain(item) for name, item in value.items()})
    return getattr(value, "__qualname__", None)


def _field(config: Any, name: str) -> str | None:
    try:
        return _plain(getattr(config, name, None))
    except RuntimeError:  # the configuration's layers differ in it
        return None


def _long_tables(module: nn.Module) -> list[bytes]:
    """Return longrope's frequencies and scale for long sequences, as bytes. The module's tensors
    hold them only once a sequence is long."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    config: Any = getattr(module, "config", None)
    found = []
    for kind, name in kinds.items():
        if name != LONG_ROPE:
            continue
        keywords = {} if kind is None else {"layer_type": kind}
        limits = (rope.get("original_max_position_embeddings") for rope in ropes(config).values())
        beyond = max(limit or 0 for limit in limits) + 1
        table, scale = ROPE_INIT_FUNCTIONS[name](config, "cpu", seq_len=beyond, **keywords)
        found.append(_bytes(torch.cat([table, torch.tensor([scale])]))[-1])
    return found


@cache
def _read_by(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes and configuration fields that a class reads in its forward."""
    attributes: set[str] = set()
    fields: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith(NOT_OF_FAMILIES):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if name in BESIDE_FORWARD or not inspect.isfunction(function):
                continue
            for code in _codes(function.__code__):
                loads = [
                    i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD")
                ]
                attributes |= set(code.co_names)
                # config.field, and getattr(config, "field")
                fields |= {b for a, b in pairwise(loads) if a == "config" and isinstance(b, str)}
    return frozenset(attributes), frozenset(fields)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
