"""What holds for every test: repeatable examples, one seed, and no test of the native library where
it could not be built."""

import shutil

import hypothesis
import pytest
import torch

from farspan_memory.native import LIBRARY

# As those of farspan's own tests, of which a run has both.
for name, most in (("repeatable", 25), ("thorough", 100)):
    hypothesis.settings.register_profile(name, deadline=None, derandomize=True, max_examples=most)
hypothesis.settings.register_profile(
    "unshrunk",
    parent=hypothesis.settings.get_profile("repeatable"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def built() -> None:
    """A compiler without the library is a failure of the build, not a reason to skip."""
    if not LIBRARY.exists() and not (shutil.which("cmake") and shutil.which("g++")):
        pytest.skip("the native allocator needs g++ and CMake")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test sees the same random numbers whichever tests ran before it."""
    torch.manual_seed(0)
