"""Imports by name at the moment of use; no other module imports so.

torch and transformers take seconds to import, and a laptop that only plans does not need them. A
gate requires all other imports to be at the top of a module, and reads the names given here like
imports.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the block: collections at random moments would make traces
    of two runs differ, and they slow imports by a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load(module: str, name: str) -> Any:
    """Import `module` if necessary, and return its attribute `name`. Callers write both as
    literals, so that readers and the test of imports see them."""
    with without_garbage_collection():
        return getattr(import_module(module), name)


_GIVEN: dict[str, str] = {}


def give(part: str, module: str) -> None:
    """Register the module that provides a `part` of the package. Lower layers get it by `given`,
    not by import. Only farspan/__init__.py, which is above all layers, calls this."""
    _GIVEN[part] = module


def given(part: str, name: str) -> Any:
    """Return the attribute `name` of the module registered as `part`."""
    return load(_GIVEN[part], name)


def attributes(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its attributes when they are
    first read. `homes` maps a name to the module that defines it; `package.name` means that the
    attribute is this submodule itself. Raises AttributeError for other names."""

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
