"""Access to the optional package farspan-memory, which no other module of farspan imports.

farspan-memory does not depend on farspan. Its allocator serves a run (`allocator: stitch |
replay`), and its command line is `farspan memory`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farspan.lazy import load
from farspan.spec import UnsupportedError


@contextmanager
def allocator_package(wanted: str = "memory") -> Iterator[Any]:
    """Yield the package `farspan_memory`, and inside the block convert its errors to farspan's.
    Raises UnsupportedError, which names the feature `wanted`, if the package is not installed."""
    try:
        refused: type[Exception] = load("farspan_memory", "UnsupportedError")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{wanted}: farspan-memory is not installed; pip install 'farspan[allocator]'"
        ) from error
    try:
        yield sys.modules["farspan_memory"]
    except refused as error:
        raise UnsupportedError(str(error)) from error
