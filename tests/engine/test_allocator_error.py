"""The function that throws torch.OutOfMemoryError is compiled once for a torch, or says why not.

That it throws what it should is seen where torch calls it: test_allocator_training.py.
"""

import stat
from pathlib import Path

import pytest

from farspan.engine.allocator_torch import out_of_memory_raiser


def compiler(folder: Path, script: str) -> tuple[str, ...]:
    """A program in the place of g++."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return (str(path),)


def test_it_is_compiled_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = out_of_memory_raiser(cache)
    if first.reason.startswith("no C++ compiler"):
        pytest.skip(first.reason)
    assert first.reason == ""
    assert first.address
    made = list(cache.iterdir())
    assert len(made) == 1  # nothing half made is left beside it
    assert out_of_memory_raiser(cache) == first
    assert list(cache.iterdir()) == made


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    found = out_of_memory_raiser(tmp_path, ("no-such-compiler",))
    assert found.address is None
    assert found.reason == "no C++ compiler (no-such-compiler) is on PATH"


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    failing = compiler(tmp_path, "echo 'error.cpp:1: error: no such thing' >&2; exit 1")
    found = out_of_memory_raiser(tmp_path / "cache", failing)
    assert found.address is None
    assert found.reason == f"{failing[0]}: error.cpp:1: error: no such thing"
    assert not any((tmp_path / "cache").iterdir())


def test_what_does_not_load_is_no_reason_to_fail(tmp_path: Path) -> None:
    # The last argument but those of the linker is the file to make.
    script = 'while [ "$1" != "-o" ]; do shift; done; echo nonsense > "$2"'
    found = out_of_memory_raiser(tmp_path / "cache", compiler(tmp_path, script))
    assert found.address is None
    assert "invalid ELF header" in found.reason or "too short" in found.reason


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    found = out_of_memory_raiser(occupied / "cache", ("sh",))
    assert found.address is None
    assert "Not a directory" in found.reason
