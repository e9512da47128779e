"""What holds for every test: one thread, one seed, and no GPU test on a machine without one."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from random import Random

import hypothesis
import pytest
import torch

from farspan.hf.probe import Float64Mode
from tests import described, durations
from tests.durations import cpu_seconds, slowness

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

# Twice what the longest takes, and not by the clock: other processes may have the cores as well.
MOST_SECONDS = 40.0
BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, help="run files, and the tests of each, in this order")
    durations.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Several test processes share the machine, so each of them, and whatever it starts, computes
    on one thread."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    vars(os)["fsync"] = lambda _: None  # files of tests need not outlive a loss of power
    if described.SHARED not in os.environ:  # in the process that starts the others
        folder = Path(tempfile.mkdtemp())
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
        # What is measured of this machine is kept for this run alone.
        for name, key in (("config", "XDG_CONFIG_HOME"), ("described", described.SHARED)):
            (folder / name).mkdir()
            os.environ[key] = str(folder / name)
    durations.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle is not None:
        shuffle(items, Random(config.option.shuffle))
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)  # so that -m 'not slow' leaves it out
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def shuffle(items: list[pytest.Item], random: Random) -> None:
    """Files in another order, and tests within each: what a file's tests share is made once."""
    order: dict[Path, float] = {}
    for item in items:
        order.setdefault(item.path, random.random())
    items.sort(key=lambda item: (order[item.path], random.random()))


def pytest_collection_finish() -> None:
    """What imports and collection left stays: no collection of garbage looks at it again. Others
    are rarer than Python has them, which takes 7% of the tests' time."""
    gc.set_threshold(50_000, 20, 100)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Nor at what a file left: modules imported late, and caches. At the end of a whole run they
    are millions of objects, 2 s for each collection that a Trainer or a lack of memory asks for."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    if (cases := sys.modules.get("tests.sparse.triton_cases")) is not None:
        cases.stop_interpreting()


@pytest.fixture(autouse=True)
def a_hub_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have no network: the hub's part is played by what each of them puts in its place."""
    monkeypatch.setattr("farspan.profile.catalog._unreachable", lambda: None)


@pytest.fixture(autouse=True)
def described_once() -> Iterator[None]:
    with described.remembered():
        yield


@pytest.fixture
def float64_throughout() -> Iterator[None]:
    """What families' own code computes in float32 whatever the model is in."""
    with Float64Mode():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """A test sees the same random numbers whichever tests ran before it."""
    item.stash[BEGUN] = cpu_seconds()
    torch.manual_seed(0)
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    refuse_long(item, cpu_seconds() - item.stash[BEGUN])


def refuse_long(item: pytest.Item, seconds: float, slower: Callable[[], float] = slowness) -> None:
    """Fails a test that took so many seconds of CPU, its fixtures included, and runs by default."""
    if any(map(item.get_closest_marker, ("exhaustive", "gpu"))):
        return
    if seconds > MOST_SECONDS and seconds > MOST_SECONDS * slower():
        pytest.fail(
            f"{item.nodeid} took {seconds:.0f} s of CPU, and a test that runs by default at most "
            f"{MOST_SECONDS:.0f}; make it smaller, or mark it exhaustive and leave a part that "
            "fails on the same fault"
        )
