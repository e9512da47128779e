"""The function that throws torch.OutOfMemoryError is compiled once for a torch, or says why not.

That it throws what it should is seen where torch calls it: test_allocator_training.py.
"""

import os
import stat
from pathlib import Path

import pytest

from farspan_memory.pytorch import out_of_memory_raiser


def compiler(folder: Path, script: str) -> tuple[str, ...]:
    """A program in the place of g++."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return (str(path),)


# The last argument but those of the linker is the file to make.
COPYING = 'while [ "$1" != "-o" ]; do shift; done; echo nonsense > "$2"'


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


def test_a_library_of_another_user_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run as this one: neither is it looked at, nor is it replaced."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    told = compiler(tmp_path, "exit 1")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    found = out_of_memory_raiser(cache, told)
    assert found.address is None
    assert f"{cache} belongs to" in found.reason
    monkeypatch.undo()
    if os.geteuid() == 0:
        out_of_memory_raiser(cache, compiler(tmp_path, COPYING))
        (library,) = cache.iterdir()
        os.chown(library, 12345, 12345)
        found = out_of_memory_raiser(cache, told)
        assert f"{library} belongs to user 12345" in found.reason


def test_a_library_that_others_could_write_is_built_anew(tmp_path: Path) -> None:
    cache, told = tmp_path / "cache", compiler(tmp_path, COPYING)
    out_of_memory_raiser(cache, told)
    (library,) = cache.iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    before = library.stat().st_ino
    out_of_memory_raiser(cache, told)
    assert library.stat().st_ino == before
    library.chmod(0o770)
    out_of_memory_raiser(cache, told)
    (library,) = cache.iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    whole = library.read_bytes()
    library.write_bytes(whole + b"damaged")
    out_of_memory_raiser(cache, told)
    assert [path.read_bytes() for path in cache.iterdir()] == [whole]
    cache.chmod(0o777)
    assert "other users may write in" in out_of_memory_raiser(cache, told).reason


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
    found = out_of_memory_raiser(tmp_path / "cache", compiler(tmp_path, COPYING))
    assert found.address is None
    assert "invalid ELF header" in found.reason or "too short" in found.reason


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    found = out_of_memory_raiser(occupied / "cache", ("sh",))
    assert found.address is None
    assert "Not a directory" in found.reason
