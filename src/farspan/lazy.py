"""The one place that imports by name, at the moment of use.

torch and transformers take seconds to import, and a laptop that only plans need not have them. A
gate holds every other module to imports at the top, and reads the names given here like imports.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load(module: str, name: str) -> Any:
    """The value called `name` in `module`, which is imported if it is not yet.

    Both are literals at the place of the call, so that the gate and a reader see them.
    """
    return getattr(import_module(module), name)


def attributes(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names (`homes`: name to module) are loaded
    when they are first read. Raises AttributeError for any other name."""

    def read(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = load(homes[name], name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return read, names
