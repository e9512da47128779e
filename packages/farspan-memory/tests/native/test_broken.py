"""These tests can fail: a build that gives one chunk to two tensors is caught by all of them."""

import random
from pathlib import Path

import pytest

from farspan_memory.native import Allocator, AllocatorOptions, Backend, Broken, Policy
from tests.native.programs import CAPACITY, CHUNK, Corrupted, Program, Step
from tests.pytorch.cpu_allocator import build_broken, once


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a build with -DDOUBLE_ASSIGN=ON."""
    return once(tmp_path_factory, build_broken)


def steps(seed: int) -> list[Step]:
    chance = random.Random(seed)
    made: list[Step] = []
    for _ in range(40):
        size = chance.randrange(CHUNK, 6 * CHUNK)
        made.append(("malloc", size, 0) if chance.random() < 0.6 else ("free", size, 0))
    return made


@pytest.mark.exhaustive  # the build takes 20 s
@pytest.mark.slow
@pytest.mark.parametrize("policy", [Policy.PAPER, Policy.SHUFFLE])
def test_a_double_assignment_is_caught(broken: Path, policy: Policy) -> None:
    options = AllocatorOptions(Backend.POSIX, capacity=CAPACITY, chunk=CHUNK, policy=policy)
    program = [step for seed in range(10) for step in steps(seed)]
    with Allocator(options, broken) as allocator, pytest.raises(Corrupted):
        Program(allocator).run(program, check=False)
    with Allocator(options, broken) as allocator, pytest.raises(Broken):
        Program(allocator).run(program)
    with Allocator(options) as allocator:
        Program(allocator).run(program)
