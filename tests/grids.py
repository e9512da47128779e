"""Grids of which a part runs by default; the rest is `exhaustive` (`make test-all`)."""

from collections.abc import Iterable
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import settings

WHOLE = 100  # examples of a test in the profile that leaves nothing out


def exhaustive(*values: Any) -> Any:
    """One row of a grid, which does not run by default."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def part_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The rows of a grid, of which those that are not among the `kept` are exhaustive."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*row) if value in kept else exhaustive(*row) for value, row in rows]


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """All combinations. By default as many as the longest axis has values, each of which is in one
    of them, and every value of the others in one at least."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    columns = [[axis[n % len(axis)] for n in range(longest)] for axis in values]
    for number, column in enumerate(columns[1:]):
        Random(number).shuffle(column)  # or axes of one length would go side by side
    return part_of(product(*values), *zip(*columns, strict=True))


def examples(count: int) -> int:
    """Of so many, as many as the hypothesis profile in use draws of `WHOLE`."""
    return max(1, round(count * settings().max_examples / WHOLE))
