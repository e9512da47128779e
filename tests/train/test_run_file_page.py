"""docs/reference/run-file.md has every key of a run file, as the dataclasses say: its type, its
default, and the comment beside the field.

`python -m tests.train.test_run_file_page` writes the tables between the page's marks.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from benchmarks.tables import OPENING, filled
from farspan.spec import Schedule, Sparse
from farspan.train.config import RunConfig, ScheduleConfig, SparseConfig, load_run
from farspan.train.yaml_config import TOKENS, convert, describe_type, read_mapping, to_mapping

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/run-file.md"
COMMAND = "python -m tests.train.test_run_file_page"
# A section without comments or defaults of its own has those of the value that it becomes.
BEHIND = {ScheduleConfig: Schedule, SparseConfig: Sparse}
# Of types, in place of the words of errors.
NAMES = {
    "true or false": "boolean",
    "a whole number": "an integer",
    "text": "string",
    "keys and values": "mapping",
}
# What `load_run` gives in place of a default.
GIVEN = {"folder": "runs/<name of the file>"}


def sections(kind: Any = RunConfig, path: str = "", above: Any = object) -> Iterator[Any]:
    """Every dataclass that a run file has, its dotted path, and the fields of its own."""
    shared: list[Any] = [base for base in kind.__mro__[1:-1] if base in above.__mro__]
    taken = {f.name for base in shared for f in fields(base)}
    own = [f for f in fields(kind) if f.name not in taken]
    yield path, kind, own
    hints = typing.get_type_hints(kind)
    for f in own:
        for inner in filter(is_dataclass, parts(hints[f.name])):
            yield from sections(inner, join(path, f.name), kind)


def parts(hint: Any) -> list[Any]:
    """Types within a union, or of the elements of a list, other than null."""
    found = [inner for option in typing.get_args(hint) or () for inner in parts(option)]
    return found or [hint] * (hint not in (NoneType, Ellipsis))


def comments(kind: Any) -> dict[str, str]:
    """The comment of each field: on the lines above it, or behind it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(base))
        said = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                numbers = range(first, (node.end_lineno or first) + 1)
                found[node.target.id] = " ".join(said[n] for n in numbers if n in said)
    return found


def sentence(kind: Any, f: Field[Any]) -> str:
    """What a key says: its comment; before it, or without one, what its type's docstring says."""
    comment = comments(kind).get(f.name, "")
    if not comment and kind in BEHIND:
        comment = comments(BEHIND[kind]).get(f.name, "")
    if not comment or comment.startswith("null:"):
        types = [t for t in parts(typing.get_type_hints(kind)[f.name]) if isinstance(t, type)]
        own = [t.__doc__ or "" for t in types if is_dataclass(t) or issubclass(t, Enum)]
        before = [re.split(r"\.(?=\s|$)", doc)[0] for doc in own[:1]]
        comment = "; ".join([*before, *[comment] * bool(comment)])
    text = " ".join(comment.replace("|", "\\|").split()).rstrip(".")
    return re.sub(r"(?<!`)\b(null|None)\b(?!`)", "`null`", text[:1].upper() + text[1:])


def default(kind: Any, f: Field[Any]) -> Any:
    """The value of a key that is left out; MISSING where it may not be."""
    value = f.default if f.default_factory is MISSING else f.default_factory()
    if value is None and kind in BEHIND:
        of_spec = {own.name: own.default for own in fields(BEHIND[kind])}
        value = of_spec.get(f.name)
    return value


def written(value: Any) -> str:
    """As a run file has it."""
    value = to_mapping(value)
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def type_of(section: str, kind: Any, f: Field[Any], links: dict[str, str]) -> str:
    """What an error calls it, in a word; of a section, a link to its keys."""
    hint = typing.get_type_hints(kind)[f.name]
    text = describe_type(hint).removesuffix(" or null")
    for inner in dict.fromkeys(parts(hint)):
        words = describe_type(inner)
        if is_dataclass(inner):
            text = text.replace(words, f"[keys](#{links[join(section, f.name)]})")
        elif isinstance(inner, type) and issubclass(inner, Enum):
            values = words.removeprefix("one of ").split(", ")
            text = text.replace(words, ", ".join(f"`{value}`" for value in values))
    for words, name in NAMES.items():
        text = re.sub(f"(?<!`)\\b{words}\\b", name, text)
    text = re.sub(r"(.+) or a list, each \1", r"\1, or a list", text)
    text = re.sub(r"\b(an?|each) (?!list$)", "", text)
    text = re.sub(r"^list of (\d), (\w+)$", r"list of \1 \2s", text)
    text = re.sub(r"^list, (\w+)$", r"list of \1s", text).replace("list, ", "list of ")
    return text.replace("integer", "tokens") if f.name in TOKENS.get(section, ()) else text


def join(section: str, name: str) -> str:
    return f"{section}.{name}".lstrip(".")


def row(section: str, kind: Any, f: Field[Any], links: dict[str, str]) -> str:
    value = default(kind, f)
    if value is MISSING:
        shown = "required"
    elif f.default_factory is not MISSING and is_dataclass(value):
        shown = "`{}`"
    else:
        shown = f"`{GIVEN.get(join(section, f.name), written(value))}`"
    cells = f"`{f.name}`", type_of(section, kind, f, links), shown, sentence(kind, f)
    return f"| {' | '.join(cells)} |"


def mark(section: str) -> str:
    return f"keys {section}".strip()


def links(text: str) -> dict[str, str]:
    """By section, the anchor of the heading above its table. Raises ValueError without one."""
    found = {}
    for section, _, _ in sections():
        before, opening, _ = text.partition(OPENING.format(mark(section)))
        if not opening:
            raise ValueError(
                f"{PAGE.name} has no table of the keys of {section}: under a heading of theirs, "
                f"write {OPENING.format(mark(section))}, <!-- end -->, and call {COMMAND}"
            )
        title = re.findall(r"^#+ (.*)$", before, re.M)[-1]
        found[section] = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return found


def tables(text: str) -> dict[str, str]:
    """Every table by its name in the page."""
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    lead = links(text)
    return {
        mark(section): head + "\n".join(row(section, kind, f, lead) for f in own)
        for section, kind, own in sections()
    }


@pytest.mark.slow
def test_the_page_has_every_key() -> None:
    """`python -m tests.train.test_run_file_page` writes it."""
    text = PAGE.read_text("utf-8")
    assert filled(text, tables(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize(("section", "kind", "own"), [*sections()], ids=lambda x: str(x)[:20])
def test_a_key_has_a_sentence_and_its_default_is_read(section: str, kind: Any, own: Any) -> None:
    hints = typing.get_type_hints(kind)
    for f in own:
        assert sentence(kind, f), (section, f.name)
        value = default(kind, f)
        for option in filter(
            lambda t: isinstance(t, type) and issubclass(t, Enum), parts(hints[f.name])
        ):
            offered = describe_type(option).removeprefix("one of ").split(", ")
            shown = type_of(section, kind, f, dict.fromkeys([join(section, f.name)], ""))
            assert all(f"`{value}`" in shown for value in offered)
        if value is not MISSING and not is_dataclass(value):
            read = read_mapping(f"value: {written(value)}", "")["value"]
            assert convert(hints[f.name], read, f.name) == value


def test_folders_are_named_as_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "first.yaml"
    path.write_text("{model: {path: a}, data: {}}")
    assert load_run(path).folder == GIVEN["folder"].replace("<name of the file>", "first")


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    PAGE.write_text(filled(page, tables(page)), "utf-8")
