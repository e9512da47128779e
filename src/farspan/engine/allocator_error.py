"""torch.OutOfMemoryError out of native code.

A pluggable allocator that returns no memory hands PyTorch a null pointer, so it has to throw. The
exception that becomes torch.OutOfMemoryError is a type of the user's own c10, which the native
library cannot know: these few lines are compiled once against it, where a compiler is at hand.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

CACHE = Path("~/.cache/farspan/native")
COMPILERS = ("g++", "clang++", "c++")
SECONDS = 120.0  # compiling takes 2 s on an idle machine

SYMBOL = "farspan_raise_out_of_memory"
SOURCE = f"""\
#include <c10/util/Exception.h>

extern "C" __attribute__((visibility("default"))) void {SYMBOL}(const char* text) {{
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}}
"""


@dataclass(frozen=True, slots=True)
class Raiser:
    """The function that throws, or why there is none and a RuntimeError is thrown instead."""

    address: int | None  # of void (*)(const char*)
    reason: str = ""


def out_of_memory_raiser(cache: Path = CACHE, compilers: tuple[str, ...] = COMPILERS) -> Raiser:
    """Compiled against this process's torch, or found in `cache` from an earlier time."""
    root = Path(torch.__file__).parent
    if not (root / "include/c10/util/Exception.h").is_file():
        return Raiser(None, f"{root} has no headers")
    compiler = next((path for path in map(shutil.which, compilers) if path), None)
    if compiler is None:
        return Raiser(None, f"no C++ compiler ({', '.join(compilers)}) is on PATH")
    try:
        library = _built(compiler, root, cache.expanduser())
        function = getattr(ctypes.CDLL(str(library)), SYMBOL)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return Raiser(None, f"{compiler}: {_last_words(error)}")
    return Raiser(ctypes.cast(function, ctypes.c_void_p).value)


def _built(compiler: str, root: Path, cache: Path) -> Path:
    """The library for this torch; another torch has another c10."""
    identity = "\n".join((SOURCE, torch.__version__, str(root), compiler))
    library = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if library.is_file():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        source, made = Path(folder) / "error.cpp", Path(folder) / "error.so"
        source.write_text(SOURCE, "utf-8")
        subprocess.run(
            [compiler, *flags(root), str(source), "-o", str(made), *links(root)],
            check=True,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        os.replace(made, library)  # whole or not at all: several processes may start at once
    return library


def flags(root: Path) -> list[str]:
    """How code that includes torch's headers is compiled into a library."""
    abi = int(torch.compiled_with_cxx11_abi())
    visible = ["-shared", "-fPIC", "-fvisibility=hidden", "-O1"]
    return ["-std=c++20", *visible, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}"]


def links(root: Path) -> list[str]:
    """torch's own c10, found where this torch has it."""
    return [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]


def _last_words(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    lines = [line for line in str(output or error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "failed")
