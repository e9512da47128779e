"""Gate: imports run one way, in the open, and planning needs no torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "farspan"

# Top first. A layer imports what stands below it; those on one line do not import each other.
ORDER = (
    {"__init__"},
    {"__main__"},
    {"cli"},
    {"train", "posttrain"},
    {"sparse", "ask"},
    {"checkpoint"},
    {"engine"},
    {"data", "report"},
    {"distributed"},
    {"hf"},
    {"attention", "activations"},
    {"kernels", "losses"},
    {"planner"},
    {"profile"},
    {"program"},
    {"formatting"},
    {"host", "allocator"},
    {"durable"},
    {"spec", "lazy"},
)
HEIGHT = {layer: -row for row, layers in enumerate(ORDER) for layer in layers}
TORCH_FREE = (
    *("__init__", "allocator", "ask", "durable", "formatting", "host", "lazy", "planner"),
    *("profile", "program", "report", "spec"),
)
TORCH = ("torch", "transformers")
SEAM = "farspan.lazy"  # the only module that may import by name
# A user of the seam, and what stands above it and is loaded all the same: whoever prints a plan
# sees its tables. A step that is to choose its schedule asks who chooses a run's.
UPWARD = {
    ("farspan.planner.request", "farspan.report.plan"),
    ("farspan.engine.calls", "farspan.train.planning"),
}

# Parts that the package's face gives to layers below them (`lazy.give`), who ask for what they are.
GIVEN = {"farspan.sparse"}

# A package of its own, which knows nothing of farspan. Of farspan, its command line and its runs
# name it, when they are used, by way of one module.
ALLOCATOR = ROOT / "packages" / "farspan-memory" / "src" / "farspan_memory"
NAMES_ALLOCATOR = {"farspan.allocator", "farspan.cli.memory", "farspan.cli.with_torch"}
BY_WAY_OF, ITS_USERS = "farspan.allocator", ("cli", "train")

parsed = cache(ast.parse)  # every gate looks at every module

Sources = dict[str, str]  # module name, dotted, to its text
Import = tuple[str, int]  # module name, line


def read_sources() -> Sources:
    """Every module of the package; `farspan/report/__init__.py` is `farspan.report`."""
    return sources_of(PACKAGE)


def sources_of(package: Path) -> Sources:
    sources = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def layer(module: str) -> str:
    """`plan` for `farspan.program.layout`; the package itself is the layer `__init__`."""
    return module.partition(".")[2].split(".")[0] or "__init__"


def imports(text: str, known: Sources) -> Iterator[Import]:
    """Absolute imports. `from a import b` counts as `a.b` where that is a module."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in known else node.module), node.lineno


def own_imports(text: str, known: Sources) -> Iterator[Import]:
    for target, line in imports(text, known):
        if target.split(".")[0] == "farspan":
            yield target, line


def lazy_imports(text: str, known: Sources) -> Iterator[Import]:
    """Modules that a user of the seam names, in a call or in a table: they run one way too."""
    if SEAM not in {target for target, _ in imports(text, known)}:
        return
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            yield node.value, node.lineno


def wrong_direction(sources: Sources) -> list[str]:
    """Imports that do not go down, lazy ones too, and layers that the order does not name."""
    found = [f"{m}: layer '{layer(m)}' has no place" for m in sources if layer(m) not in HEIGHT]
    for module, text in sources.items():
        lazily = lazy_imports(text, sources)
        for target, line in (*own_imports(text, sources), *lazily):
            if (module, target) in UPWARD:
                continue
            here, there = layer(module), layer(target)
            if here in HEIGHT and here != there and HEIGHT.get(there, 0) >= HEIGHT[here]:
                found.append(f"{module}:{line}: '{here}' may not import '{there}'")
    return found


def given_parts(sources: Sources) -> list[str]:
    """Parts that another module than the face gives, or that are not in GIVEN."""
    found = []
    for module, text in sources.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "give":
                names = {a.value for a in node.args[1:] if isinstance(a, ast.Constant)}
                if module != "farspan" or not names or not names <= GIVEN:
                    found.append(f"{module}:{node.lineno}: gives {', '.join(map(str, names))}")
    return found


def private_exports(sources: Sources) -> list[str]:
    """Underscored names that the package's face imports."""
    names = (
        (alias.name, node.lineno)
        for node in ast.walk(ast.parse(sources.get("farspan", "")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    return [f"farspan:{line}: '{name}' is private" for name, line in names if name[0] == "_"]


def cycles(sources: Sources) -> list[str]:
    """One description for every module that, followed by its imports, comes back to itself."""
    graph = {
        module: {target for target, _ in own_imports(text, sources) if target in sources}
        for module, text in sources.items()
    }
    found = []
    for start in graph:
        reached: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            module = ahead.pop()
            if module not in reached:
                reached.add(module)
                ahead.extend(graph[module])
        if start in reached:
            round_trip = sorted(m for m in reached if start in graph[m])
            found.append(f"{start}: imports itself through {', '.join(round_trip)}")
    return found


def hidden_imports(sources: Sources) -> list[str]:
    """Relative, local, typing-only and computed imports; the seam alone may compute one."""
    found = []
    for module, text in sources.items():
        tree = parsed(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                found.append(f"{module}:{node.lineno}: relative import")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.extend(
                    f"{module}:{inner.lineno}: import inside '{node.name}'"
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Import | ast.ImportFrom)
                )
        found.extend(
            f"{module}:{line}: {name}"
            for name, line in names_in(tree)
            if name in ("TYPE_CHECKING", "__import__", "import_module")
            and not (module == SEAM and name == "import_module")
        )
    return found


def names_of_the_allocator(sources: Sources) -> list[str]:
    """Imports of farspan-memory, and who names it or asks for it that may not."""
    found = []
    for module, text in sources.items():
        for target, line in imports(text, sources):
            if target.split(".")[0] == ALLOCATOR.name:
                found.append(f"{module}:{line}: imports {target}; load it where it is used")
            if target.startswith(BY_WAY_OF) and layer(module) not in ITS_USERS:
                found.append(f"{module}:{line}: only {' and '.join(ITS_USERS)} may use it")
        if module not in NAMES_ALLOCATOR:
            found += [
                f"{module}:{node.lineno}: names {node.value}"
                for node in ast.walk(parsed(text))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.split(".")[0] == ALLOCATOR.name
            ]
    return found


def names_of_farspan(sources: Sources) -> list[str]:
    """Imports of farspan, by statement or by name, in a package that knows nothing of it."""
    found = [
        f"{module}:{line}: imports {target}"
        for module, text in sources.items()
        for target, line in own_imports(text, sources)
    ]
    return found + [
        f"{module}:{node.lineno}: names {node.value}"
        for module, text in sources.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"farspan(\.\w+)+", node.value)
    ]


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is read, looked up as an attribute or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias):
            yield node.name, node.lineno


def torch_imports(sources: Sources) -> list[str]:
    """Imports of torch or transformers where planning must work without them."""
    return [
        f"{module}:{line}: imports {target}"
        for module, text in sources.items()
        if layer(module) in TORCH_FREE
        for target, line in imports(text, sources)
        if target.split(".")[0] in TORCH
    ]


IMPORT_WITHOUT_TORCH = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {folder!r})
for module in {modules!r}:
    importlib.import_module(module)
"""


def import_without_torch(package: Path, modules: list[str]) -> str:
    """What goes wrong when the modules are imported in an interpreter that has no torch."""
    script = IMPORT_WITHOUT_TORCH.format(blocked=TORCH, folder=str(package.parent), modules=modules)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return result.stderr


@pytest.mark.parametrize(
    "gate",
    [
        *(wrong_direction, private_exports, cycles, hidden_imports, torch_imports),
        *(names_of_the_allocator, given_parts),
    ],
)
def test_the_package_passes(gate: Callable[[Sources], list[str]]) -> None:
    sources = read_sources()
    assert "farspan.spec" in sources
    offences = gate(sources)
    assert not offences, "\n".join(offences)


def test_the_allocator_knows_nothing_of_farspan() -> None:
    sources = sources_of(ALLOCATOR)
    assert "farspan_memory.native" in sources
    tests = ALLOCATOR.parents[1] / "tests"
    sources |= {str(p.relative_to(tests)): p.read_text("utf-8") for p in tests.rglob("*.py")}
    # Its benchmarks measure traces of models, which farspan makes.
    sources = {name: text for name, text in sources.items() if "test_gpu_" not in name}
    offences = names_of_farspan(sources)
    assert not offences, "\n".join(offences)
    assert len(names_of_farspan({"farspan_memory.trace": "from farspan.spec import Tier"})) == 1
    assert len(names_of_farspan({"farspan_memory.trace": "load('farspan.spec', 'Tier')"})) == 1


@pytest.mark.parametrize(
    ("gate", "module", "text"),
    [
        (wrong_direction, "farspan.spec", "from farspan.host import GIB"),
        (wrong_direction, "farspan.cli", "import farspan"),
        (wrong_direction, "farspan.utils", ""),
        (
            wrong_direction,
            "farspan.program",
            "from farspan.lazy import load\nload('farspan.cli', 'x')",
        ),
        (private_exports, "farspan", "from farspan.spec import _secret, Tier"),
        (cycles, "farspan.spec", "from farspan.spec import name"),
        (hidden_imports, "farspan.program", "from . import grid"),
        (hidden_imports, "farspan.program", "def f():\n    import json"),
        (hidden_imports, "farspan.program", "from typing import TYPE_CHECKING"),
        (hidden_imports, "farspan.cli", "import importlib\nx = importlib.import_module('x')"),
        (torch_imports, "farspan.planner", "from torch.nn import Module"),
        (names_of_the_allocator, "farspan.train", "load('farspan_memory', 'install')"),
        (
            names_of_the_allocator,
            "farspan.engine",
            "from farspan.allocator import allocator_package",
        ),
        (given_parts, "farspan", "give('far attention', 'farspan.train')"),
    ],
)
def test_a_gate_fails(gate: Callable[[Sources], list[str]], module: str, text: str) -> None:
    sources = {
        "farspan.cli": "",
        "farspan.spec": "",
        "farspan.engine": "import torch",
        module: text,
    }
    assert len(gate(sources)) == 1


def test_torch_free_layers_import_without_torch() -> None:
    modules = [module for module in read_sources() if layer(module) in TORCH_FREE]
    assert "farspan" in modules
    assert import_without_torch(PACKAGE, modules) == ""


def test_blocking_torch_catches_an_indirect_import(tmp_path: Path) -> None:
    package = tmp_path / "farspan"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "spec.py").write_text("from farspan.helper import zero\n")
    (package / "helper.py").write_text("import torch.nn\nzero = 0\n")
    assert "torch is blocked" in import_without_torch(package, ["farspan.spec"])


def test_the_exception_upward_is_used() -> None:
    """One that nobody needs any more would let the next one pass unseen."""
    sources = read_sources()
    for module, target in UPWARD:
        assert target in {name for name, _ in lazy_imports(sources[module], sources)}


def test_the_design_page_lists_packages_from_the_lowest() -> None:
    """Each imports those above it in the table, where every layer of the package stands."""
    text = (ROOT / "docs/explanation/design.md").read_text("utf-8")
    table = text[text.index("## The tree") : text.index("A package imports those above it")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in rows]
    listed = [name for row in named for name in row if name in HEIGHT]
    assert set(listed) == HEIGHT.keys() - {"__init__", "__main__"}
    assert [HEIGHT[name] for name in listed] == sorted(HEIGHT[name] for name in listed)
