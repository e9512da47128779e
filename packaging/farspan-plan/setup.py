"""Puts into the wheel what `farspan plan` imports of the tree, unmodified, and says what it needs.

Nothing is listed by hand: imports of the package stand at the top of its files, or are calls of
`farspan.lazy.load` with the names of module and value, so that a reader of the text finds all.
"""

import ast
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from sys import stdlib_module_names

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
START = "farspan.cli.plan"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DISTRIBUTION = {"yaml": "pyyaml"}  # of modules that are called otherwise
NO_DATA = ".pyi", ".typed"  # nobody types a command


@dataclass(frozen=True)
class Part:
    """Modules of the tree, and what they import that is neither of it nor of Python."""

    modules: frozenset[str]
    needs: frozenset[str]

    def __or__(self, other: "Part") -> "Part":
        return Part(self.modules | other.modules, self.needs | other.needs)


def sources() -> dict[str, Path]:
    """The files of the package's modules, by dotted name."""
    found = {}
    for path in sorted((SOURCE / "farspan").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Each name that may be a module; of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded(tree: ast.Module) -> Iterator[str]:
    """Modules that the text names in calls of `load`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="load"), args=[ast.Constant(value=str(name)), _]):
                yield name


class Tree:
    """The import graph of the package."""

    def __init__(self) -> None:
        self.files = sources()
        self.texts = {name: ast.parse(path.read_bytes()) for name, path in self.files.items()}

    def part(self, start: str) -> Part:
        """All that importing a module imports, packages above it included."""
        modules: set[str] = set()
        needs: set[str] = set()
        ahead = [start]
        while ahead:
            name = ahead.pop()
            top, _, inner = name.partition(".")
            if top != "farspan":
                needs |= {top} - stdlib_module_names
            elif name in self.files and name not in modules:
                modules.add(name)
                ahead += imported(self.texts[name])
            if inner:
                ahead.append(name.rpartition(".")[0])
        return Part(frozenset(modules), frozenset(needs))

    def whole(self, start: str) -> Part:
        """With what is loaded when it is used, as far as that needs nothing more."""
        found = self.part(start)
        while True:
            names = {name for module in found.modules for name in loaded(self.texts[module])}
            more = [self.part(name) for name in names & self.files.keys() - found.modules]
            light = [part for part in more if part.needs <= found.needs]
            if not light:
                return found
            for part in light:
                found |= part

    def data(self, part: Part) -> Iterator[Path]:
        """Files beside the part's modules that ship with the package."""
        package = SOURCE / "farspan"
        kept = {self.files[name].parent for name in part.modules}
        others = {path.parent for path in self.files.values()} - kept
        for pattern in PROJECT["tool"]["setuptools"]["package-data"]["farspan"]:
            for path in package.glob(pattern):
                nearest = next(above for above in path.parents if above in kept | others)
                if nearest in kept and path.suffix not in NO_DATA and path.name not in NO_DATA:
                    yield path


def requirements(needs: frozenset[str]) -> list[str]:
    """The whole package's own, of those modules."""
    bounds = {re.split(r"[^\w-]", line)[0]: line for line in PROJECT["project"]["dependencies"]}
    asked = {DISTRIBUTION.get(name, name) for name in needs}
    if not asked <= bounds.keys():
        raise SystemExit(
            f"{', '.join(asked - bounds.keys())}: {START} needs it, and pyproject.toml does not "
            "name it; load it where it is used, or add it to the dependencies"
        )
    return sorted(bounds[name] for name in asked)


TREE = Tree()
PART = TREE.whole(START)


class BuildTree(build_py):
    """The command's own package, with the part of the tree and the licence in it."""

    def run(self) -> None:
        """As ever; then the copies."""
        super().run()
        package = Path(self.build_lib) / "farspan_plan"
        shutil.rmtree(package / "tree", ignore_errors=True)
        for path in (*(TREE.files[name] for name in PART.modules), *TREE.data(PART)):
            copy = package / "tree" / path.relative_to(SOURCE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        shutil.copyfile(ROOT / "LICENSE", package / "LICENSE")


if __name__ == "__main__":
    setup(
        version=PROJECT["project"]["version"],
        install_requires=requirements(PART.needs),
        cmdclass={"build_py": BuildTree},
    )
