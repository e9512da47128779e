"""Models that are alike are probed once."""

from collections.abc import Iterator

import pytest

from tests.described import remembered


@pytest.fixture(autouse=True)
def described_once() -> Iterator[None]:
    with remembered():
        yield
