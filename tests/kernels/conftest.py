"""One process that interprets Triton, for all tests of the kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernels.cases import round_bfloat16
from tests.sparse.triton_cases import interpreter


@pytest.fixture(scope="package")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function there, with tensors; what it writes in place, it must return."""
    with interpreter() as pool:
        pool.submit(round_bfloat16).result()
        yield lambda function, *given: pool.submit(function, *given).result()
