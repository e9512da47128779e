"""The library is built by the installation; where there is no compiler these tests are skipped."""

import shutil

import pytest

from farspan.memory.native import LIBRARY


@pytest.fixture(autouse=True)
def built() -> None:
    """A compiler without the library is a failure of the build, not a reason to skip."""
    if not LIBRARY.exists() and not (shutil.which("cmake") and shutil.which("g++")):
        pytest.skip("the native allocator needs g++ and CMake")
