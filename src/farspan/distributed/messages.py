"""Values that ranks exchange, as JSON.

torch.distributed's object collectives send pickles, and a pickle runs whatever its sender wrote
into it. A message here is data: numbers, texts, containers, tensors, and instances of farspan's own
dataclasses, enumerations and errors, which are filled field by field without calling their code.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.distributed.failure import RankFailed, record_sync
from farspan.durable import WriteFailed, shown
from farspan.lazy import load
from farspan.spec import UnsupportedError

_OWN = re.compile(r"farspan(\.[a-z0-9_]+)*")
_ERRORS = (UnsupportedError, WriteFailed)
MOST_BYTES = 2**31  # of a message: plans of 70B models take 2 MB


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank of `group`, in the order of ranks. Raises TypeError if `value`
    is not plain data, and RankFailed, naming the rank, if a rank sent anything but a message."""
    if group is None:
        record_sync()
    mine = np.frombuffer(encode(value), dtype=np.uint8).copy()
    device = _device(group)
    ranks = dist.get_world_size(group)
    sizes = list(torch.zeros(ranks, 1, dtype=torch.int64, device=device))
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    longest = max(_checked(int(size), rank) for rank, size in enumerate(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(mine)] = torch.from_numpy(mine)
    everyone = list(torch.empty(ranks, longest, dtype=torch.uint8, device=device))
    dist.all_gather(everyone, padded, group=group)
    return [
        decode(one[: int(size)].cpu().numpy().tobytes(), rank)
        for rank, (one, size) in enumerate(zip(everyone, sizes, strict=True))
    ]


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank; other ranks' values are ignored. Raises TypeError if the
    value is not plain data, and RankFailed if rank 0 sent anything but a message."""
    record_sync()
    if dist.get_rank() == 0:
        _give(value, partial(dist.broadcast, src=0))
        return value
    return _take(0, partial(dist.broadcast, src=0))


def send(value: Any, to: int) -> None:
    """Send a value to rank `to`, which calls `receive`. Raises TypeError if not plain data."""
    _give(value, partial(dist.send, dst=to))


def receive(source: int) -> Any:
    """Wait for a value that rank `source` sends by `send`. Raises RankFailed for anything else."""
    return _take(source, partial(dist.recv, src=source))


def _give(value: Any, move: Callable[[Tensor], Any]) -> None:
    data, device = np.frombuffer(encode(value), dtype=np.uint8), _device(None)
    move(torch.tensor([len(data)], device=device))
    move(torch.from_numpy(data.copy()).to(device))


def _take(source: int, move: Callable[[Tensor], Any]) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device=_device(None))
    move(size)
    sent = torch.empty(_checked(int(size), source), dtype=torch.uint8, device=size.device)
    move(sent)
    return decode(sent.cpu().numpy().tobytes(), source)


def _checked(size: int, sender: int) -> int:
    """Return the announced size of a message. Raises RankFailed if no message has that size."""
    if not 0 <= size <= MOST_BYTES:
        raise RankFailed(
            f"rank {sender} announced a message of {size:,} bytes, but those of farspan have at "
            f"most {MOST_BYTES:,}; another program has joined the process group of this run"
        )
    return size


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which the backend of a process group can send tensors."""
    backends = dist.get_backend_config(group)
    on_cpu = "cpu:" in backends or backends in ("gloo", "mpi")
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def encode(value: Any) -> bytes:
    """Encode a value as a message, which is JSON. Raises TypeError if it is not plain data."""
    try:
        return json.dumps(_plain(value)).encode()
    except RecursionError as error:
        raise TypeError(
            "ranks exchange plain data, but this value contains itself or is nested too deeply"
        ) from error


def decode(data: bytes, sender: int) -> Any:
    """Decode a message to its value. Raises RankFailed, naming the sender, if it is malformed."""
    try:
        return _value(json.loads(data))
    except Exception as error:  # foreign bytes may raise anything
        shown = data[:40] + b"..." if len(data) > 40 else data
        raise RankFailed(
            f"rank {sender} sent {shown!r}, which is not a message of farspan "
            f"({type(error).__name__}: {error}); another program, or another version of farspan, "
            "has joined the process group of this run"
        ) from error


# -- a value as JSON: lists and plain values as they are, all else as {kind: content} ------------


@singledispatch
def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        content = {own.name: _plain(getattr(value, own.name)) for own in fields(value)}
        return {"data": [_name_of(type(value)), content]}
    raise _no_data(value)


def _no_data(value: Any) -> TypeError:
    return TypeError(f"ranks exchange plain data, got {type(value).__name__}: {value!r:.80}")


@_plain.register(bool | int | float | str | None)
def _(value: Any) -> Any:
    return _enum(value) if isinstance(value, Enum) else value


@_plain.register
def _(value: np.generic) -> Any:
    if value.dtype.kind not in "biufSU" or isinstance(value, np.longdouble):
        raise _no_data(value)  # `item` changes times, or drops field names
    return _plain(value.item())


@_plain.register(Enum)
def _enum(value: Enum) -> Any:
    if value.name not in type(value).__members__:  # several flags combined
        raise _no_data(value)
    return {"enum": [_name_of(type(value)), value.name]}


@_plain.register(list | set | frozenset)
def _(value: Any) -> Any:
    if type(value) not in (list, set, frozenset):
        raise _no_data(value)
    items = [_plain(item) for item in value]
    return items if type(value) is list else {type(value).__name__: items}


@_plain.register(tuple)
def _(value: tuple[Any, ...]) -> Any:
    items = [_plain(item) for item in value]
    if isinstance(value, torch.Size):
        return {"size": items}
    if hasattr(value, "_fields"):
        return {"data": [_name_of(type(value)), dict(zip(value._fields, items, strict=True))]}
    if type(value) is not tuple:
        raise _no_data(value)
    return {"tuple": items}


@_plain.register(Mapping)
def _(value: Mapping[Any, Any]) -> Any:
    return {"map": [[_plain(key), _plain(item)] for key, item in value.items()]}


@_plain.register
def _(value: Path) -> Any:
    return {"path": shown(value)}  # a file descriptor means nothing to other processes


@_plain.register
def _(value: bytes) -> Any:
    return {"bytes": base64.b64encode(value).decode()}


@_plain.register(torch.dtype)
def _(value: torch.dtype) -> Any:
    return {"dtype": str(value).removeprefix("torch.")}


@_plain.register(torch.device)
def _(value: torch.device) -> Any:
    return {"device": str(value)}


@_plain.register
def _(value: np.ndarray) -> Any:
    if type(value) not in (np.ndarray, np.memmap) or value.dtype.kind in "OV":
        raise _no_data(value)  # would lose a mask, or field names
    content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"array": [value.dtype.str, list(value.shape), content]}


@_plain.register
def _(value: Tensor) -> Any:
    plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
    if type(value) not in (Tensor, nn.Parameter) or not plain:
        raise _no_data(value)
    own = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = own.reshape(-1).view(torch.uint8).numpy().tobytes()
    content = base64.b64encode(flat).decode()
    return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), content]}


@_plain.register
def _(value: Exception) -> Any:
    if not isinstance(value, _ERRORS):
        raise value
    return {"error": [_name_of(type(value)), [shown(one) for one in value.args]]}


def _name_of(kind: type) -> str:
    """Return a class's name in messages, `module:Name`. Raises TypeError for foreign classes."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise TypeError(f"ranks can exchange only farspan's own classes, got {name}")
    return name


# -- and back ------------------------------------------------------------------------------------


def _value(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [_value(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    return _KINDS[kind](content)


def _class(name: str) -> Any:
    """Return the class that a message names. Raises TypeError unless it holds farspan's data."""
    module, _, path = name.partition(":")
    if not _OWN.fullmatch(module):
        raise TypeError(f"{name} is not a class of farspan")
    first, *inner = path.split(".")
    cls: Any = load(module, first)
    for part in inner:
        cls = vars(cls)[part]
    data = is_dataclass(cls) or (isinstance(cls, type) and issubclass(cls, (Enum, tuple)))
    if not isinstance(cls, type) or not (data or issubclass(cls, _ERRORS)):
        raise TypeError(f"{name} is not a dataclass, enumeration, named tuple or error")
    return cls


def _instance(content: Any) -> Any:
    """Build a dataclass or named tuple from its fields, without calling the class's code."""
    name, given = content
    kind = _class(name)
    names = kind._fields if issubclass(kind, tuple) else [own.name for own in fields(kind)]
    if set(given) != set(names):
        raise TypeError(f"the fields of {name} differ from {sorted(given)}")
    values = [_value(given[own]) for own in names]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for own, value in zip(names, values, strict=True):
        object.__setattr__(made, own, value)
    return made


def _error(content: Any) -> Exception:
    name, given = content
    kind = _class(name)
    if not issubclass(kind, _ERRORS):
        raise TypeError(f"{name} is not an error")
    made: Exception = kind.__new__(kind, *map(_value, given))
    made.args = tuple(map(_value, given))
    return made


def _member(content: Any) -> Enum:
    name, member = content
    kind = _class(name)
    if not issubclass(kind, Enum):
        raise TypeError(f"{name} is not an enumeration")
    return kind[member]


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _array(content: Any) -> np.ndarray:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()


def _tensor(content: Any) -> Tensor:
    dtype, shape, data = content
    content = bytearray(base64.b64decode(data))
    if not content:  # refused by frombuffer
        return torch.empty(0, dtype=_dtype(dtype)).reshape(shape)
    return torch.frombuffer(content, dtype=_dtype(dtype)).reshape(shape)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(_value(content)),
    "size": lambda content: torch.Size(_value(content)),
    "map": lambda content: {_value(key): _value(item) for key, item in content},
    "set": lambda content: set(_value(content)),
    "frozenset": lambda content: frozenset(_value(content)),
    "path": Path,
    "bytes": base64.b64decode,
    "dtype": _dtype,
    "device": torch.device,
    "array": _array,
    "tensor": _tensor,
    "data": _instance,
    "enum": _member,
    "error": _error,
}
