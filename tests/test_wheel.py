"""What is built works where the sources are not: the wheel, which is Python alone, that of the
allocator for every glibc that it names, the small wheel that only plans, and the sdist, of which
all are made here."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farspan import cli
from farspan.spec import VERSION
from farspan_memory.native import LIBRARY
from tests.pytorch.cpu_allocator import once

ROOT = Path(__file__).resolve().parents[1]
SMALL = Path("packaging") / "farspan-plan"
ALLOCATOR = Path("packages") / "farspan-memory"
MADE = shutil.ignore_patterns(".*", "*.so", "*.egg-info", "__pycache__", "build", "dist", "runs")
NOT_IN_SDIST = "."  # what only git and its hosts read
# Where it is imported from, and that the allocator is loaded there.
WHERE = "from farspan_memory.native import LIBRARY, library; library(); print(LIBRARY.parents[1])"
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
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

ASKED = ("--model", "Qwen2.5-0.5B", "--context", "8K", "--machine", "h100")
# Nothing but what the wheel asks for, and what that needs.
ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Blocked())
"""

Command = Callable[..., str]


def output(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "MAKEFLAGS")}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(what: str, source: Path, dist: Path, **environment: str) -> Path:
    """The file that a hook of the build backend makes of a folder, in a folder of its own."""
    output(sys.executable, "-c", BUILD, what, dist, cwd=source, **environment)
    (made,) = dist.iterdir()
    return made


def put(wheel: Path, site: Path) -> None:
    """Pip itself says whether the name is one for this machine."""
    target = ("--quiet", "--no-deps", "--no-index", "--target", site)
    output(sys.executable, "-m", "pip", "install", *target, wheel, cwd=site.parent)


def built_sdist(root: Path) -> Path:
    shutil.copytree(ROOT, root / "tree", ignore=MADE)
    return build("build_sdist", root / "tree", root / "dist")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, built_sdist)


def unpacked(sdist: Path, root: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(root, filter="data")
    return root / f"farspan-{VERSION}"


def command_of(site: Path, name: str, *without: str) -> Command:
    """A command of the wheels in `site`, in whose interpreter packages are not installed."""
    (site / "sitecustomize.py").write_text(ALONE.format(blocked=without))

    def run(*arguments: str | Path) -> str:
        script = site / "bin" / name
        return output(sys.executable, script, *arguments, cwd=site.parent, PYTHONPATH=str(site))

    return run


def allocator_wheel(root: Path, sdist: Path, cmake: str | None) -> Path:
    """The allocator's wheel, built of the sdist; `cmake` stands in for the real one."""
    if not LIBRARY.exists():
        pytest.skip("the native allocator was not built here")
    tools = root / "tools"
    tools.mkdir()
    if cmake is not None:
        (tools / "cmake").write_text(cmake)
        (tools / "cmake").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    wheel = build("build_wheel", unpacked(sdist, root) / ALLOCATOR, root / "allocator", PATH=path)
    shutil.rmtree(root / f"farspan-{VERSION}")
    assert re.fullmatch(r"farspan_memory-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    return wheel


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    """The wheel of farspan."""
    root = tmp_path_factory.mktemp("pure")
    return build("build_wheel", unpacked(sdist, root), root / "dist")


@pytest.mark.slow
def test_the_wheel_is_python_alone_and_needs_no_allocator(tmp_path: Path, pure: Path) -> None:
    """And it has every file of the sources, or it would not train."""
    assert pure.name == f"farspan-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(pure) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {p.relative_to(source) for p in (source / "farspan").rglob("*") if p.is_file()}
    made = {".so", ".pyc"}
    assert names == {str(file) for file in files if file.suffix not in made}
    put(pure, tmp_path / "site")
    farspan = command_of(tmp_path / "site", "farspan", "farspan_memory")
    assert farspan("--version").startswith("farspan 0.")
    assert "fits" in farspan("plan", *ASKED, "--strategy", "grouped")
    for arguments in ((), ("place", "step.trace")):
        with pytest.raises(AssertionError) as refused:
            farspan("memory", *arguments)
        lines = str(refused.value).splitlines()
        assert lines[0] == (
            "farspan: memory: farspan-memory is not installed; pip install 'farspan[allocator]'"
        )


@pytest.mark.exhaustive
def test_the_wheel_trains_without_the_allocator(tmp_path: Path, pure: Path) -> None:
    put(pure, tmp_path / "site")
    farspan = command_of(tmp_path / "site", "farspan", "farspan_memory")
    (tmp_path / "text.txt").write_text("Whoever builds a wheel should drive it once.\n" * 40)
    (tmp_path / "run.yaml").write_text(RUN)
    assert "2 steps done" in farspan("train", "run.yaml")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_allocator_is_a_wheel_of_its_own(tmp_path: Path, sdist: Path) -> None:
    """It works where neither farspan nor torch is."""
    wheel = allocator_wheel(tmp_path, sdist, CMAKE.replace("@BUILT@", str(LIBRARY)))
    site = tmp_path / "site"
    put(wheel, site)
    memory = command_of(site, "farspan-memory", "farspan", "torch")
    (tmp_path / "step.trace").write_text("malloc 0 4096\nmalloc 1 512\nfree 0\nfree 1\n")
    assert "optimal, proved" in memory("place", "step.trace")
    assert "real code" in memory("compare", "step.trace")
    assert site == Path(
        output(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(site)).strip()
    )


@pytest.mark.exhaustive
def test_without_cmake_the_allocator_lacks_its_library(tmp_path: Path, sdist: Path) -> None:
    """What needs no more than a trace works there, and `make train` goes on."""
    source = unpacked(sdist, tmp_path) / ALLOCATOR
    wheel = build("build_wheel", source, tmp_path / "allocator", PATH=str(tmp_path))
    shutil.rmtree(source)
    put(wheel, tmp_path / "site")
    with pytest.raises(AssertionError, match=r"is missing; install g\+\+ and CMake"):
        output(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))


@pytest.mark.exhaustive
def test_wheels_beside_each_other_have_the_allocator(
    tmp_path: Path, pure: Path, sdist: Path
) -> None:
    site = tmp_path / "site"
    put(pure, site)
    put(allocator_wheel(tmp_path, sdist, None), site)
    farspan = command_of(site, "farspan")
    farspan("memory", "trace", "--model", "Qwen2.5-0.5B", "--context", "2K", "-o", "step.trace")
    assert "real code" in farspan("memory", "compare", "step.trace")


@pytest.mark.slow
def test_the_sdist_is_what_git_has(sdist: Path) -> None:
    """Whoever has it alone can build, run the examples, read, and test."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    tracked = output("git", "ls-files", cwd=ROOT).splitlines()
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in tracked if name not in there and (ROOT / name).exists()]
    assert [name for name in missing if not name.startswith(NOT_IN_SDIST)] == []
    assert not [name for name in there if name.endswith((".pyc", ".so"))]


# -- farspan-plan -------------------------------------------------------------------------------

DATA = ".css", ".html", ".js", ".json", ".yaml"
MOST_BYTES = 600_000  # 385,000 when it was made, most of it the profiles
HEAVY = "accelerate", "datasets", "huggingface_hub", "peft", "safetensors", "torch", "transformers"
EACH = """
import importlib, pathlib, sys
tree = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(tree))
names = [".".join(path.relative_to(tree).with_suffix("").parts) for path in tree.rglob("*.py")]
for name in names:
    importlib.import_module(name.removesuffix(".__init__"))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    def small_wheel(root: Path) -> Path:
        return build("build_wheel", unpacked(sdist, root) / SMALL, root / "dist")

    return once(tmp_path_factory, small_wheel)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """The small wheel's, beside which an interpreter finds no library that it does not ask for."""

    def small_site(root: Path) -> Path:
        put(small, root / "site")
        (root / "site" / "sitecustomize.py").write_text(ALONE.format(blocked=HEAVY))
        return root / "site"

    return once(tmp_path_factory, small_site)


def ask(
    site: Path, *arguments: str | Path, beside: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What the command says; with another folder of packages `beside` its own, and before it."""
    path = os.pathsep.join(map(str, (site,) if beside is None else (beside, site)))
    return subprocess.run(
        [sys.executable, site / "bin" / "farspan-plan", *arguments],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.exhaustive
def test_the_small_wheel_answers_as_the_tree_does(site: Path, tmp_path: Path) -> None:
    (tmp_path / "farspan.py").write_text("raise SystemExit('another farspan is used')")
    page = tmp_path / "plan.html"
    found = ask(site, *ASKED, "--json", "--html", page, beside=tmp_path)
    tree = CliRunner().invoke(cli.app, ["plan", *ASKED, "--json"])
    assert found.returncode == tree.exit_code == 0, found.stderr
    assert json.loads(found.stdout) == json.loads(tree.stdout)
    assert len(json.loads(found.stdout)["alternatives"]) > 3
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_the_small_wheel_is_small_and_asks_for_what_it_imports(small: Path) -> None:
    assert small.name == f"farspan_plan-{VERSION}-py3-none-any.whl"
    assert small.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(small) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"farspan_plan-{VERSION}.dist-info/METADATA").decode()
    asked = HeaderParser().parsestr(metadata).get_all("Requires-Dist", ())
    names_asked = sorted(re.split(r"[^\w-]", line)[0] for line in asked)
    assert names_asked == ["numpy", "psutil", "pyyaml", "rich", "typer"]
    assert all(name.startswith("farspan_plan") for name in names)
    tree, source = "farspan_plan/tree/", ROOT / "src"
    packages = {Path(name.removeprefix(tree)).parent for name in names if name.endswith(".py")}
    for path in (path for path in source.rglob("*") if path.suffix in DATA):
        own = next(above for above in path.parents if (above / "__init__.py").exists())
        there = f"{tree}{path.relative_to(source)}" in names
        assert there == (own.relative_to(source) in packages), path


@pytest.mark.slow
def test_each_module_of_the_small_wheel_imports_alone(site: Path) -> None:
    """None that is there only for what another would have to import."""
    tree = site / "farspan_plan" / "tree"
    output(sys.executable, "-c", EACH, tree, cwd=site, PYTHONPATH=str(site))


@pytest.mark.slow
def test_the_small_wheel_says_what_needs_the_whole(site: Path, tmp_path: Path) -> None:
    assert ask(site, "--version").stdout == f"farspan-plan {VERSION}\n"
    (tmp_path / "run.yaml").write_text(RUN)
    on_h100 = ("--context", "8K", "--machine", "h100")
    for arguments, field in (
        (("--model", "GPT-2", "--context", "1K"), "machine"),
        (("--model", "someone/something", *on_h100), "model"),
        ((tmp_path / "run.yaml", "--machine", "h100"), str(tmp_path / "run.yaml")),
    ):
        found = ask(site, *arguments)
        assert found.returncode == cli.USAGE
        assert found.stderr.startswith(f"farspan: {field}: ")
        assert "; pip install farspan, which" in found.stderr
        assert len(found.stderr.splitlines()) == 1
