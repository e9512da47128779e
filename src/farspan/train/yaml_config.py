"""Conversion between YAML and frozen dataclasses, which refuses unknown keys and wrong types.

A field may be a bool, int, float, str, Enum, dataclass, mapping, tuple, or a union of these.
"""

import logging
import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from farspan.formatting import (
    MOST_TOKENS,
    as_meant,
    did_you_mean,
    read_pages,
    read_tokens,
    shortened,
)
from farspan.program.strategies import GROUPED, STRATEGIES, strategy
from farspan.spec import MEAN, SHORT_NAMES, LossKind, Schedule, Sparse, UnsupportedError

LOG = logging.getLogger(__name__)

T = TypeVar("T")


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"  # the key <<, which stands for the keys of another mapping
# Types of unquoted text, by first character. Numbers follow YAML 1.2: in 1.1, which the library
# reads, 1e6 is text, 010 is 8 and 1:30 is 90. No field is a date.
_NUMBERS = {
    "int": (re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789"),
    "float": (
        re.compile(
            r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
            r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
        ),
        "-+0123456789.",
    ),
}
_OTHERS = frozenset(_TAG + name for name in ("timestamp", "binary", "omap", "pairs", "set"))
_LARGEST = 2**63 - 1  # largest whole number: later code reads 64 bits
LONGEST_FILE = 2**18  # characters of a run file
# Values of a run file, with those of an alias counted at each use; a long text counts once per
# _LONG_TEXT characters. Each value takes about 20 us to read.
MOST_VALUES, _LONG_TEXT = 20_000, 64


class _Loader(yaml.SafeLoader):
    """Loader of plain YAML. It refuses duplicate keys, a mapping that contains itself, and more
    values than any run has: a few nested aliases can stand for billions."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # otherwise a self-reference would be built, endlessly
        self._values = 0
        self._behind: dict[int, int] = {}  # number of values in each node, by its id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        line, before = self.peek_event().start_mark.line + 1, self._values
        node = super().compose_node(parent, index)
        own = 1 + len(node.value) // _LONG_TEXT if isinstance(node, yaml.ScalarNode) else 1
        self._values += self._behind.get(id(node), 1) if alias else own
        if self._values > MOST_VALUES:
            raise UnsupportedError(
                f"line {line}: more than {MOST_VALUES:,} values, counting those of an anchor again "
                "at each alias (*name); give fewer"
            )
        if not alias:
            self._behind[id(node)] = self._values - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != _MERGE]
        seen = set()
        for key_node in own:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the library refuses it
            if key in seen:
                line = key_node.start_mark.line + 1
                raise UnsupportedError(
                    f"{key}: given twice, the second time on line {line}; keep one"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_constructors = {
    tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag not in _OTHERS
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag not in _OTHERS | {_TAG + n for n in _NUMBERS}]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which _Loader or PyYAML would read as another type, and writes lists
    of numbers on one line."""

    def list_in_short(self, data: list[Any]) -> yaml.Node:
        flow = all(isinstance(value, int | float) for value in data)
        return self.represent_sequence(f"{_TAG}seq", data, flow_style=flow or None)


_Dumper.add_representer(list, _Dumper.list_in_short)


for _name, (_form, _first) in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _form, list(_first))
    _Dumper.add_implicit_resolver(_TAG + _name, _form, list(_first))


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises UnsupportedError naming the file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or error
        raise UnsupportedError(f"{path}: cannot be read: {words}") from error
    return read_mapping(text, str(path))


def read_mapping(text: str, name: str) -> dict[str, Any]:
    """Return the mapping in a YAML document. Raises UnsupportedError naming `name` and the line."""
    if len(text) > LONGEST_FILE:
        raise UnsupportedError(
            f"{name}: more than {LONGEST_FILE:,} characters, which no run file needs; shorten it"
        )
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds no objects
    except yaml.YAMLError as error:
        raise UnsupportedError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from error
    except RecursionError as error:
        raise UnsupportedError(f"{name}: not valid YAML: nested too deep to be read") from error
    except (ValueError, KeyError) as error:  # wrong tag, or thousands of digits
        raise UnsupportedError(
            f"{name}: not valid YAML: a value is not of its type: {error}"
        ) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnsupportedError(f"{name}: expected keys and values, got {_got(value)}")
    return value


def with_settings(mapping: Mapping[str, Any], settings: Sequence[str], kind: Any) -> dict[str, Any]:
    """Return a file's `mapping`, changed by `settings`, as plain values for the dataclass `kind`.

    A setting is KEY=VALUE: a dotted path, with numbers for list items, and a YAML value. Raises
    UnsupportedError naming the setting.
    """
    values = in_plain_values(mapping)
    if settings:
        values = to_mapping(values)  # a copy: YAML may have one object under two keys
    for setting in settings:
        key, equals, text = setting.partition("=")
        section, _, name = key.strip().rpartition(".")
        path = _join(section, RENAMED.get(section, {}).get(name, name))
        if not equals or not name:
            raise UnsupportedError(f"{setting}: expected KEY=VALUE, such as optimizer.lr=1e-5")
        read = read_mapping(f"value: {text}", path)
        if read.keys() != {"value"}:
            raise UnsupportedError(f"{setting}: expected one value, got {text!r}; quote it")
        _refuse_unknown_section(path, kind)
        _put(values, path, read["value"])
        values = in_plain_values(values)
    return values


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, adding missing mappings. Raises UnsupportedError."""
    *above, last = path.split(".")
    node: Any = values
    for depth, key in enumerate(above):
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[_index(node, key, path)]
        if not isinstance(node, dict | list):
            whole = ".".join(above[: depth + 1])
            raise UnsupportedError(f"{path}: {whole} is {node!r}, which has no keys; set {whole}")
    node[_index(node, last, path)] = value


def _index(node: Any, key: str, path: str) -> str | int:
    if isinstance(node, dict):
        return key
    if not key.isdecimal() or int(key) >= len(node):
        raise UnsupportedError(f"{path}: expected a number from 0 to {len(node) - 1}, got {key!r}")
    return int(key)


def _refuse_unknown_section(path: str, kind: Any) -> None:
    """Raise UnsupportedError if the first part of a path is no field of `kind`. If the path's last
    part is a key of some sections, the message names those sections."""
    hints = typing.get_type_hints(kind)
    first, last = path.partition(".")[0], path.rpartition(".")[2]
    if first in hints:
        return
    within = [
        f"{name}.{last}"
        for name, hint in hints.items()
        for option in _options(hint)
        if is_dataclass(option) and last in typing.get_type_hints(option)
    ]
    near = did_you_mean(first, hints)
    if within and not near:
        near = f" (did you mean {' or '.join(within)}?)"
    raise UnsupportedError(f"{path}: no such key{near}; the keys here are {', '.join(hints)}")


def write_mapping(values: Mapping[str, Any]) -> str:
    """Return values as YAML, from which `read_mapping` reads the same values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def build(kind: type[T], values: Mapping[Any, Any], path: str = "") -> T:
    """Return an instance of the dataclass `kind`. Raises UnsupportedError naming the field."""
    hints = typing.get_type_hints(kind)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UnsupportedError(_unknown(str(key), known, path))
    absent = [_join(path, name) for name in _required(kind) if name not in values]
    if absent:
        raise UnsupportedError(f"{' and '.join(absent)}: missing; must be given")
    built = {key: convert(hints[key], value, _join(path, key)) for key, value in values.items()}
    try:
        return kind(**built)
    except UnsupportedError as error:
        raise UnsupportedError(_join(path, str(error))) from error


def convert(hint: Any, value: Any, path: str) -> Any:
    """Convert a value of a YAML file to the type `hint`. Raises UnsupportedError naming `path`."""
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise UnsupportedError(f"{path}: expected {describe_type(hint)}, got {_got(value)}")
        return build(hint, value, path)
    for option in _options(hint):
        matched, result = _converted(option, value, path)
        if matched:
            return result
    raise UnsupportedError(
        f"{path}: expected {describe_type(hint)}, got {_got(value)}{_near(hint, value)}"
    )


def describe_type(hint: Any) -> str:
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
    }
    return " or ".join(words.get(option) or _describe_option(option) for option in _options(hint))


def to_mapping(value: Any) -> Any:
    """Return plain values for YAML or JSON: dataclasses become mappings, and enums their values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_mapping(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_mapping(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_mapping(inner) for inner in value]
    return value


def as_yaml(schedule: Schedule, layers: int, tokens: int) -> str:
    """Return a schedule as one line of a run file, in the form of `schedule_mapping`."""
    mapping = {"schedule": schedule_mapping(schedule, layers, tokens)}
    text = yaml.safe_dump(mapping, default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip().removeprefix("{").removesuffix("}")


def schedule_mapping(schedule: Schedule, layers: int, tokens: int) -> str | dict[str, Any]:
    """Return the shortest form of a schedule for a run file with this number of layers and tokens.

    It is the name of a strategy that gives an equal schedule, else the fields that differ from
    `grouped`, the default of run files. Groups are written as their size if that is enough. Sparse
    attention is omitted: it has its own key.
    """
    size = max(schedule.group_sizes(layers))
    if replace(schedule, groups=size).group_sizes(layers) == schedule.group_sizes(layers):
        schedule = replace(schedule, groups=size)
    bases = {name: strategy(name, layers, tokens) for name in STRATEGIES}
    same = (name for name, base in bases.items() if not _differing(schedule, base))
    return next(same, None) or _differing(schedule, bases[GROUPED])


def _differing(schedule: Schedule, base: Schedule) -> dict[str, Any]:
    own, other = to_mapping(schedule), to_mapping(base)
    found = {name: v for name, v in own.items() if v != other[name] and name != "sparse"}
    return {name: in_k(v) if name in TOKENS["schedule"] else v for name, v in found.items()}


def in_k(tokens: Any) -> Any:
    """Return a number of tokens as run files write it, such as 128K; other values unchanged."""
    for name, unit in (("M", 2**20), ("K", 2**10)):
        if isinstance(tokens, int) and tokens and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return tokens


def changed(value: Any) -> Any:
    """Return the fields of a dataclass, and of dataclasses in it, that differ from their defaults,
    as plain values."""
    if not is_dataclass(value) or isinstance(value, type):
        return to_mapping(value)
    differing = {}
    for field in fields(value):
        current = getattr(value, field.name)
        made = field.default_factory
        if current != (field.default if made is MISSING else made()):
            differing[field.name] = changed(current)
    return differing


def flatten(mapping: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted path; an empty mapping counts as a value."""
    leaves: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, _join(path, key)))
        else:
            leaves[_join(path, key)] = value
    return leaves


def _required(kind: Any) -> list[str]:
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _converted(option: Any, value: Any, path: str) -> tuple[bool, Any]:
    """Return whether `value` can be of the type `option`, and the value converted to that type."""
    origin = typing.get_origin(option) or option
    if is_dataclass(option) and isinstance(option, type):
        is_mapping = isinstance(value, Mapping)
        return is_mapping, build(option, value, path) if is_mapping else None
    if origin is tuple:
        return _match_tuple(typing.get_args(option), value, path)
    if origin is dict:
        return isinstance(value, Mapping), to_mapping(value)
    if isinstance(option, type) and issubclass(option, Enum):
        other = option._missing_(value)  # names in other tools
        words = (value, as_meant(value) if isinstance(value, str) else value)
        members = [member for member in option if member.value in words or member is other]
        return bool(members), members[0] if members else None
    if option is float:
        return _match_float(value)
    if isinstance(value, bool) and option is not bool:
        return False, None
    if option is int and isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise UnsupportedError(f"{path}: expected a whole number of at most 2**63 - 1, got {value}")
    if option is str and isinstance(value, str) and (not value.strip() or "\0" in value):
        raise UnsupportedError(f"{path}: expected text, got {value!r}, which names nothing")
    return isinstance(value, option), value


def _match_float(value: Any) -> tuple[bool, Any]:
    if isinstance(value, str) and value[:1] in "+-.0123456789":
        # YAML 1.1 reads 1e-3, which has no decimal point, as text.
        try:
            return True, float(value)
        except ValueError:
            return False, None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False, None
    return True, float(value)


def _match_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, None
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        return False, None
    pairs = enumerate(zip(kinds, value, strict=True))
    return True, tuple(convert(kind, inner, f"{path}[{i}]") for i, (kind, inner) in pairs)


def _describe_option(option: Any) -> str:
    arguments = typing.get_args(option)
    if (typing.get_origin(option) or option) is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each {describe_type(arguments[0])}"
        return f"a list of {len(arguments)}, each {describe_type(arguments[0])}"
    if isinstance(option, type) and issubclass(option, Enum):
        return "one of " + ", ".join(_run_file_values(option))
    if is_dataclass(option):
        names = [field.name for field in fields(option)]
        return f"keys and values ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
    return "keys and values"


def _run_file_values(option: type[Enum]) -> list[str]:
    return [str(m.value) for m in option if not (isinstance(m, LossKind) and m.row.of_loops)]


def _near(hint: Any, value: Any) -> str:
    names = [
        name
        for option in _options(hint)
        if isinstance(option, type) and issubclass(option, Enum)
        for name in _run_file_values(option)
    ]
    return did_you_mean(str(value), names)


def _unknown(key: str, known: list[str], path: str) -> str:
    where = _join(path, key)
    return f"{where}: no such key{did_you_mean(key, known)}; the keys here are {', '.join(known)}"


def _got(value: Any) -> str:
    kind = "text" if isinstance(value, str) else type(value).__name__
    return f"{kind} {shortened(repr(value))}" if value is not None else "null"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# Older names of keys, by section; the file itself is the section "".
RENAMED = {
    "": {"headroom": "margin"},
    "schedule": {
        "x": "boundary_inputs",
        "attention_kept": "attention_save_fraction",
        "activations_kept": "activation_save_fraction",
        "head_tokens": "loss_chunk_size",
        "mlp_tokens": "mlp_chunk_size",
        "exchange_pieces": "alltoall_splits",
    },
}
# Keys that are numbers of tokens, by section; the file itself is the section "".
TOKENS = {
    "": ("context",),
    "schedule": ("chunk", "kv_block", "loss_chunk_size", "mlp_chunk_size"),
    "sparse": ("page", "budget", "recent", "sinks", "query_page"),
}


def in_plain_values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file's values with current names, and with numbers for shorthands such as 128K,
    as `farspan.train.config` reads them. Raises UnsupportedError naming the field."""
    values = _renamed(raw, "")
    if isinstance(values.get("schedule"), str):  # a strategy, like --strategy
        values["schedule"] = {"strategy": values["schedule"]}
    elif isinstance(values.get("schedule"), Mapping):
        values["schedule"] = _renamed(values["schedule"], "schedule")
    if isinstance(values.get("sparse"), bool):  # YAML reads on and off as booleans
        values["sparse"] = {} if values["sparse"] else None
    if values.get("report_to") == "none":  # transformers' value for no tracker
        values["report_to"] = None
    for section, names in TOKENS.items():
        if not section:
            values |= _to_tokens(values, names, "")
        elif isinstance(values.get(section), Mapping):
            values[section] = _to_tokens(values[section], names, f"{section}.")
    if isinstance(values.get("sparse"), Mapping) and SINK_PAGES in values["sparse"]:
        values["sparse"] = _sinks_in_tokens(values["sparse"])
    model = values.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("dtype"), str):
        values["model"] = {**model, "dtype": SHORT_NAMES.get(model["dtype"], model["dtype"])}
    return values


def _renamed(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the values by the current names of their keys, with a warning for older names."""
    values = dict(raw)
    for old, new in RENAMED[section].items():
        if old not in values:
            continue
        name = _join(section, old)
        if new in values:
            raise UnsupportedError(
                f"{name}: the older name of {new}, which is given as well; keep {new}"
            )
        values[new] = values.pop(old)
        LOG.warning("%s: its name is now %s", name, new)
    return values


SINK_PAGES = "sink_pages"


def _sinks_in_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an older run file's sinks (tokens that all queries see) from pages to tokens."""
    page, sinks = values.get("page", Sparse().page), values[SINK_PAGES]
    if not isinstance(page, int) or not isinstance(sinks, int):
        raise UnsupportedError(
            f"sparse.{SINK_PAGES}: sinks are now given in tokens; write sparse.sinks"
        )
    new = {"sinks": sinks * page, "query_page": page, "selector": MEAN}
    said = ", ".join(f"{name}: {value}" for name, value in new.items())
    if twice := sorted(new.keys() & values.keys()):
        raise UnsupportedError(
            f"sparse.{SINK_PAGES}: cannot be given with {twice[0]}, because sinks are now given in "
            f"tokens; write sparse.sinks: {sinks * page} instead"
        )
    LOG.warning("sparse.%s: sinks are now given in tokens; this equals %s", SINK_PAGES, said)
    return {name: value for name, value in values.items() if name != SINK_PAGES} | new


def _to_tokens(values: Mapping[str, Any], names: tuple[str, ...], where: str) -> dict[str, Any]:
    """Convert texts such as 128K under the keys `names` to numbers of tokens. Other values stay:
    the type check reports them later."""
    read = read_pages if where == "sparse." else read_tokens
    texts = {n: values[n] for n in names if isinstance(values.get(n), str)}
    texts |= {n: str(values[n]) for n in names if _is_too_many(values.get(n))}
    return {**values, **{name: read(text, where + name) for name, text in texts.items()}}


def _is_too_many(value: Any) -> bool:
    return isinstance(value, int) and value > MOST_TOKENS
