"""GPU memory without fragmentation: traces, static plans, and a native allocator for PyTorch.

Names that need torch are imported on first use; `__init__.pyi` tells type checkers their types.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Trace": "trace",
    "UnsupportedError": "errors",
    "begin_iteration": "allocator",
    "followed": "allocator",
    "forget": "allocator",
    "from_events": "trace",
    "install": "allocator",
    "installed": "allocator",
    "plan_iteration": "replay",
    "read_trace": "trace",
    "record_script": "allocator",
    "recorded": "allocator",
    "statistics": "allocator",
    "uninstall": "allocator",
    "write_trace": "trace",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
