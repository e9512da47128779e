"""Builds what routes torch's CPU memory through the native library, and runs a program on it."""

import atexit
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan_memory.native import LIBRARY
from farspan_memory.pytorch import COMPILERS, flags, links

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
PROGRAM = Path(__file__).with_name("allocator_program.py")
BUILD_SECONDS, RUN_SECONDS = 1800.0, 1800.0


def once(factory: pytest.TempPathFactory, make: Callable[[Path], Path]) -> Path:
    """What is made in a folder, by the first of all test processes of this run that asks."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / make.__name__
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = folder.with_suffix(".made")
        if not told.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            told.write_text(str(make(folder)))
        return Path(told.read_text())


def compiler() -> str:
    """Skips the test where there is none."""
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if found is None:
        pytest.skip(f"none of {', '.join(COMPILERS)} is on PATH")
    return found


def build_shim(folder: Path) -> Path:
    """native/torch/cpu_allocator.cpp against this torch."""
    root, made = Path(torch.__file__).parent, folder / "libcpu_allocator.so"
    source = NATIVE / "torch/cpu_allocator.cpp"
    command = [compiler(), *flags(root), str(source), "-o", str(made), *links(root)]
    subprocess.run(command, check=True, timeout=BUILD_SECONDS)
    return made


def build_broken(folder: Path) -> Path:
    """The native library with a fault that it is built to have: one chunk assigned twice."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    # Without symbols for a debugger it is built in half the time.
    flags = ["-DDOUBLE_ASSIGN=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    configure = ["cmake", "-S", str(NATIVE), "-B", str(folder), *flags]
    build = ["cmake", "--build", str(folder), "--target", "farspan_memory"]
    for command in (configure, build):
        subprocess.run(command, check=True, timeout=BUILD_SECONDS)
    return folder / "libfarspan_memory.so"


def build_driver(folder: Path) -> Path:
    """A libcuda.so.1 over memory of the machine, with the one device that it is asked to count."""
    made, source = folder / "libcuda.so.1", NATIVE / "tests/fake_cuda.cpp"
    counting = folder / "count.cpp"
    counting.write_text(
        'extern "C" __attribute__((visibility("default"))) int cuDeviceGetCount(int* count) {'
        " *count = 1; return 0; }"
    )
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{NATIVE / 'include'}"]
    command = [compiler(), *options, str(source), str(counting), "-o", str(made)]
    subprocess.run(command, check=True, timeout=BUILD_SECONDS)
    return made


def run(folder: Path, program: Path = PROGRAM, **settings: Any) -> Any:
    """What the program prints; its last words when it fails."""
    path = folder / "settings.json"
    path.write_text(json.dumps({"library": str(LIBRARY), "capacity": 0, **settings}))
    asked = forking()
    assert asked.stdin is not None
    assert asked.stdout is not None
    asked.stdin.write(f"tests.pytorch.{program.stem} {path}\n")
    asked.stdin.flush()
    ready, _, _ = select.select([asked.stdout], [], [], RUN_SECONDS)
    code = asked.stdout.readline().strip() if ready else "out of time"
    if code != "0":
        forking.cache_clear()
        stop(asked)
        told = folder / "stderr"
        raise ProgramFailed(f"{code}: {told.read_text()[-4000:] if told.exists() else ''}")
    return json.loads((folder / "stdout").read_text())


@cache
def forking() -> subprocess.Popen[str]:
    """What forks a process for each program; it ends with this one."""
    command = [sys.executable, "-m", "tests.pytorch.forked"]
    # A group of its own, so that what it forked can be ended with it.
    made = subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(stop, made)
    return made


def stop(forking: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(forking.pid, signal.SIGKILL)
    forking.communicate()


class ProgramFailed(Exception):
    """The program did not come to its end."""
