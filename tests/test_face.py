"""The package's face: every name is there, whoever reads it, and nothing heavy comes with it."""

import ast
import logging
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import farspan
from farspan.spec import VERSION

ROOT = Path(__file__).resolve().parents[1]
# What takes longer to import than all of farspan's own planning.
HEAVY = ("torch", "transformers", "numpy", "datasets", "typer", "rich", "yaml")


def run(script: str) -> str:
    """The output of a script in a fresh interpreter."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"]
    command[-1] += script
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_every_name_is_there_and_listed() -> None:
    for name in farspan.__all__:
        assert getattr(farspan, name) is not None
    assert set(farspan.__all__) <= set(dir(farspan))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stepp'"):
        farspan.__getattr__("Stepp")


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse((ROOT / "src" / "farspan" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert ast.literal_eval(node.value) == farspan.__all__
    assert {*imported, "Refused"} == set(farspan.__all__)
    assert farspan.Refused is farspan.UnsupportedError
    for name, (module, original) in imported.items():
        if name == "train":  # a function to a type checker, a package that can be called here
            assert callable(farspan.train)
        else:
            found = getattr(farspan, name)  # which imports the module
            assert getattr(sys.modules[str(module)], original) is found


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert farspan.__version__ == VERSION == project["version"]


def test_importing_farspan_imports_nothing_heavy() -> None:
    script = f"import farspan\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(script) == "[]"


def test_what_needs_torch_comes_when_it_is_read() -> None:
    """As README.md has it: `import farspan`, then `farspan.Step(model)`. Names of the face, and of
    the packages that it has, need no other import; what lies deeper is imported by its reader."""
    parts = (name.split(".") for name in names_in_pages())
    names = sorted(".".join(n) for n in parts if n[1] in farspan.__all__ and len(n) <= 3)
    assert "farspan.Step" in names
    script = (
        "import farspan\nprint(farspan.train.__name__, 'torch' in sys.modules)\n"
        "print(farspan.Step.__module__, farspan.losses.dpo.__module__)\n"
    )
    expected = ["farspan.train False", "farspan.engine.step farspan.losses"]
    assert run(script + "\n".join(names)).splitlines() == expected


def names_in_pages() -> set[str]:
    """Dotted names of farspan's in README.md, CONTRIBUTING.md and docs/, names of files aside."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = re.findall(r"(?<![\w/.-])farspan(?:\.[A-Za-z_]\w*)+", text)
    return {name for name in found if not name.endswith((".json", ".md", ".py", ".yaml"))}


def test_names_in_pages_are_there() -> None:
    names = names_in_pages()
    assert {"farspan.Step", "farspan.hf.load"} <= names
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_a_slip_in_a_run_file_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """That takes 2 to 10 seconds, torch and transformers; what nobody can run needs neither."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: stdlib}\nsteps: 3\ncontxt: 8K\n")
    script = (
        "from farspan import cli\n"
        "for command in ('train', 'verify'):\n"
        f"    sys.argv = ['farspan', command, {str(path)!r}]\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as stop:\n"
        "        print(stop.code, [n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    trained, verified = run(f"sys.stderr = sys.stdout\n{script}").split("farspan: ")[1:]
    assert "contxt: no such key (did you mean context?)" in trained
    assert trained.splitlines()[1:] == ["2 []"]
    assert verified.rstrip() == trained.rstrip()


@pytest.mark.parametrize(
    "imports",
    [
        "import farspan",
        "import farspan.planner.request, farspan",
        "from farspan import plan\nimport farspan\nassert plan is farspan.plan",
    ],
)
def test_plan_is_a_package_and_a_function_in_every_order(imports: str) -> None:
    call = (
        "try:\n    farspan.plan('no such model', context=1, machine='h200')\n"
        "except farspan.UnsupportedError:\n    print('asked')\n"
        "import farspan.planner.request\nassert callable(farspan.plan)\n"
        "print(farspan.planner.request.__name__)"
    )
    assert run(f"{imports}\n{call}").split() == ["asked", "farspan.planner.request"]


def test_a_kernel_that_is_not_used_is_not_said_to_lack(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no")
    log.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]
