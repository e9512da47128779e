"""farspan-memory, a package of its own that may be installed: the one place that names it.

It knows nothing of farspan. Its allocator serves a run (`allocator: stitch | replay`), and its
command line is `farspan memory`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farspan.lazy import load
from farspan.spec import UnsupportedError


@contextmanager
def allocator_package(wanted: str = "memory") -> Iterator[Any]:
    """Give `farspan_memory`; what it refuses inside the block is refused by farspan. Raises
    UnsupportedError, which begins with what is `wanted` of it, where it is not installed."""
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
