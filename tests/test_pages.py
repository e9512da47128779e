"""Pages have the tables of their records, records their commands, and scripts a page or a test."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import fit
from benchmarks.pages import PAGES
from benchmarks.tables import OPENING, RESULTS, ROOT, filled, load
from tests.test_docs import PAGES as DOCUMENTS

# Their tables take minutes, and are held where what they are made of is.
ELSEWHERE = {"performance": "tests/test_performance_page.py", "record": "tests/test_record.py"}
BENCHMARKS = ROOT / "benchmarks"
COMMAND = r"`python (?:-m )?((?:benchmarks|tests)[./][\w./]+)(?: [^`]*)?`"
HISTORY = r"`benchmarks/[\w/]+\.py` of commit [0-9a-f]{8}"


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ELSEWHERE])
def test_a_page_has_the_tables_of_its_records(name: str) -> None:
    page, tables = PAGES[name]
    text, made = page.read_text(encoding="utf-8"), tables()
    assert made
    assert filled(text, made) == text
    with pytest.raises(ValueError, match="no place for"):
        filled("# A page\n", made)


def test_pages_that_take_minutes_are_held() -> None:
    for name, test in ELSEWHERE.items():
        assert (ROOT / test).exists(), name


def test_a_table_follows_its_record() -> None:
    page, _ = PAGES["longest"]
    text, moved = page.read_text(encoding="utf-8"), json.loads(json.dumps(load("fit")))
    moved["longest"][-1]["strategies"]["grouped"] = {"tokens": 3 * 2**30, "seconds": 1.0}
    assert filled(text, fit.tables(moved)) != text
    assert "<!-- table a -->\n\n| b |\n\n<!-- end -->" in filled(
        f"{OPENING.format('a')}\n<!-- end -->\n", {"a": "| b |"}
    )


def makers() -> dict[str, str]:
    """What makes each record, as the page of the benchmarks says."""
    found: dict[str, str] = {}
    for line in (BENCHMARKS / "README.md").read_text("utf-8").splitlines():
        if line.startswith("| `"):
            names, made_by = line.strip("| ").split(" | ")
            found |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), made_by)
    return found


def test_each_record_has_the_command_that_makes_it() -> None:
    said = makers()
    assert sorted(said) == sorted(path.name for path in RESULTS.iterdir())
    for name, made_by in said.items():
        commands = re.findall(COMMAND, made_by)
        assert commands or re.search(HISTORY, made_by), name
        for command in commands:
            assert command.endswith(".py") or module_of(command).exists(), name
            assert not command.endswith(".py") or (ROOT / command).exists(), name


def module_of(name: str) -> Path:
    """The file that `python -m NAME` runs."""
    path = ROOT / name.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def scripts() -> Iterator[str]:
    """Names of modules that are commands."""
    for path in sorted(BENCHMARKS.rglob("*.py")):
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
            place = path.relative_to(ROOT).with_suffix("")
            yield ".".join(place.parts).removesuffix(".__main__")


def imported(path: Path) -> Iterator[str]:
    """Names of modules that a file may import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


def test_each_script_is_named_by_a_page_or_a_test() -> None:
    documents = [*DOCUMENTS, BENCHMARKS / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents)
    tested = {name for path in (ROOT / "tests").rglob("*.py") for name in imported(path)}
    for name in scripts():
        is_shown = re.search(rf"-m {re.escape(name)}\b(?!\.\w)", text) is not None
        assert is_shown or f"{name.replace('.', '/')}.py" in text or name in tested, name
