"""JSON that parses in principle and cannot be used names its file and line."""

from pathlib import Path

import pytest

from farspan.data.formats import TextForm
from farspan.data.sources import DataFiles
from farspan.spec import UnsupportedError


@pytest.mark.parametrize(
    "line",
    [r'{"text": "\ud800 x"}', '{"text": "x", "n": ' + "9" * 5000 + "}", "[" * 100_000],
    ids=["surrogate", "number", "nesting"],
)
def test_the_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UnsupportedError, match=r"data\.jsonl: line 2"):
        [TextForm("text").read(document) for document in DataFiles((path,)).documents()]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"text": "a", "text": "b"}', "text"),
        (
            '{"text": "a", "messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "content",
        ),
    ],
)
def test_a_field_that_is_given_twice_is_named(tmp_path: Path, line: str, name: str) -> None:
    """json reads the last one, and drops the first."""
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UnsupportedError, match=f"line 1 .* field '{name}' is given twice"):
        list(DataFiles((path,)).documents())
