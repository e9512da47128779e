"""What holds for every test: one thread, one seed, and no GPU test on a machine without one."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from farspan.hf.probe import Float64Mode

# `make test-all` draws four times as many examples, and `pytest --hypothesis-profile=explore` new
# ones on every run.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile(
    "unshrunk",
    parent=hypothesis.settings.get_profile("repeatable"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Several test processes share the machine, so each of them, and whatever it starts, computes
    on one thread."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # What is measured of this machine is kept for these tests alone.
    home = os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, home, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_collection_finish() -> None:
    """What imports and collection left stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def float64_throughout() -> Iterator[None]:
    """What families' own code computes in float32 whatever the model is in."""
    with Float64Mode():
        yield


def pytest_runtest_setup() -> None:
    """A test sees the same random numbers whichever tests ran before it."""
    torch.manual_seed(0)
