"""The wheel works where the sources are not, for any Python 3 and every glibc that it names."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farspan.memory.native import LIBRARY

ROOT = Path(__file__).resolve().parents[1]
FILES = "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"
FOLDERS = "src", "native"
MADE = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
# Where it is imported from, and that the allocator is loaded there.
WHERE = "from farspan.memory.native import LIBRARY, library; library(); print(LIBRARY.parents[2])"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
# Compiling takes half a minute: this has setup.py find what was compiled before.
CMAKE = """#!/bin/sh
for argument; do case $argument in -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=*)
    mkdir -p "${argument#*=}" && cp @BUILT@ "${argument#*=}";; esac; done
"""
RUN = """\
model: {config: {model_type: qwen2, vocab_size: 264, hidden_size: 16, intermediate_size: 32,
  num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1}}
data: {source: text, path: text.txt, tokenizer: bytes}
context: 64
steps: 2
folder: run
schedule: {strategy: grouped, chunk: 16}
"""

Command = Callable[..., str]


def output(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "MAKEFLAGS")}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(root: Path, cmake: str | None) -> Command:
    """The command of a wheel that was built of a copy and lies alone in `root`/site; `cmake` stands
    in for the real one."""
    if not LIBRARY.exists():
        pytest.skip("the native allocator was not built here")
    tree, dist, site, tools = (root / name for name in ("tree", "dist", "site", "tools"))
    for folder in (tree, tools):
        folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=MADE)
    if cmake is not None:
        (tools / "cmake").write_text(cmake)
        (tools / "cmake").chmod(0o755)
    output(sys.executable, "-c", BUILD, dist, cwd=tree, PATH=f"{tools}:{os.environ['PATH']}")
    shutil.rmtree(tree)
    (wheel,) = dist.iterdir()
    assert re.fullmatch(r"farspan-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    # Pip itself says whether the name is one for this machine.
    target = ("--quiet", "--no-deps", "--no-index", "--target", site)
    output(sys.executable, "-m", "pip", "install", *target, wheel, cwd=root)

    def run(*arguments: str | Path) -> str:
        script = site / "bin" / "farspan"
        return output(sys.executable, script, *arguments, cwd=root, PYTHONPATH=str(site))

    assert site == Path(output(sys.executable, "-c", WHERE, cwd=root, PYTHONPATH=str(site)).strip())
    return run


@pytest.mark.slow
def test_a_wheel_works_without_the_sources(tmp_path: Path) -> None:
    farspan = install(tmp_path, CMAKE.replace("@BUILT@", str(LIBRARY)))
    assert farspan("--version").startswith("farspan 0.")
    asked = ("--model", "Qwen2.5-0.5B", "--context", "8K", "--machine", "h100")
    assert "fits" in farspan("plan", *asked, "--strategy", "grouped")


@pytest.mark.exhaustive
def test_a_wheel_trains_and_has_the_allocator(tmp_path: Path) -> None:
    farspan = install(tmp_path, None)
    farspan("memory", "trace", "--model", "Qwen2.5-0.5B", "--context", "2K", "-o", "step.trace")
    assert "real code" in farspan("memory", "compare", "step.trace")
    (tmp_path / "text.txt").write_text("Whoever builds a wheel should drive it once.\n" * 40)
    (tmp_path / "run.yaml").write_text(RUN)
    assert "2 steps done" in farspan("train", "run.yaml")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
