"""The one place that imports by name, at the moment of use.

torch and transformers take seconds to import, and a laptop that only plans need not have them. A
gate holds every other module to imports at the top, and reads the names given here like imports.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Reference counts alone decide about lifetimes inside the block: when the collector of cycles
    runs is chance, and would make two traces differ. Of imports it takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load(module: str, name: str) -> Any:
    """The value called `name` in `module`, which is imported if it is not yet.

    Both are literals at the place of the call, so that the gate and a reader see them.
    """
    with without_garbage_collection():
        return getattr(import_module(module), name)


def attributes(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names (`homes`: name to module) are loaded
    when they are first read; one whose home is `package.name` is that module. Raises AttributeError
    for any other name."""

    def read(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(home) if home == f"{package}.{name}" else load(home, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return read, names
