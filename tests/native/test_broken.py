"""These tests can fail: a build that gives one chunk to two tensors is caught by all of them."""

import random
import subprocess
from pathlib import Path

import pytest

from farspan.memory.native import Allocator, Backend, Broken, Options, Policy
from tests.native.programs import CAPACITY, CHUNK, Corrupted, Program, Step

NATIVE = Path(__file__).resolve().parents[2] / "native"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a build with -DDOUBLE_ASSIGN=ON."""
    build = tmp_path_factory.mktemp("broken")
    flags = ["-DDOUBLE_ASSIGN=ON", "-DCMAKE_BUILD_TYPE=Debug"]
    subprocess.run(["cmake", "-S", str(NATIVE), "-B", str(build), *flags], check=True)
    make = ["cmake", "--build", str(build), "--target", "farspan_memory"]
    subprocess.run(make, check=True)
    return build / "libfarspan_memory.so"


def steps(seed: int) -> list[Step]:
    chance = random.Random(seed)
    made: list[Step] = []
    for _ in range(40):
        size = chance.randrange(CHUNK, 6 * CHUNK)
        made.append(("malloc", size, 0) if chance.random() < 0.6 else ("free", size, 0))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Policy.PAPER, Policy.SHUFFLE])
def test_a_double_assignment_is_caught(broken: Path, policy: Policy) -> None:
    options = Options(Backend.POSIX, capacity=CAPACITY, chunk=CHUNK, policy=policy)
    program = [step for seed in range(10) for step in steps(seed)]
    with Allocator(options, broken) as allocator, pytest.raises(Corrupted):
        Program(allocator).run(program, check=False)
    with Allocator(options, broken) as allocator, pytest.raises(Broken):
        Program(allocator).run(program)
    with Allocator(options) as allocator:
        Program(allocator).run(program)
