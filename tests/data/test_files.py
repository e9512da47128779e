"""Reading text: every document is found, and whatever cannot be read is named."""

import json
from pathlib import Path

import pytest

from farspan.data.config import DataConfig, SourceKind
from farspan.data.formats import TextForm, text_of
from farspan.data.sources import DataFiles, find_files, stdlib_files
from farspan.spec import UnsupportedError


def texts(source: DataFiles) -> list[str]:
    return [text_of(d, "text", "data.field") for d in source.documents()]


def test_a_folder_gives_every_visible_file_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden/d.txt", ".e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert texts(DataFiles(find_files(str(tmp_path), "data.path"))) == [
        "a.txt",
        "b.txt",
        "deep/c.txt",
    ]


def test_a_glob_and_a_file_give_what_they_say(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "deep/c.txt"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(DataFiles(find_files(f"{tmp_path}/**/*.txt", "data.path"), SourceKind.TEXT)) == [
        "a.txt",
        "deep/c.txt",
    ]
    assert texts(DataFiles(find_files(f"{tmp_path}/b.md", "data.path"), SourceKind.TEXT)) == [
        "b.md"
    ]


def test_a_path_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"data\.path: no file matches '.*\*\.txt'"):
        find_files(f"{tmp_path}/*.txt", "data.path")


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ä\r\n\n€".encode())
    assert texts(DataFiles((tmp_path / "a.txt",), SourceKind.TEXT)) == ["ä\r\n\n€"]


def test_invalid_utf8_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(
        UnsupportedError, match=r"bad\.txt: line 3 is not valid UTF-8 \(byte 0xff\)"
    ):
        texts(DataFiles((path,), SourceKind.TEXT))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"gone\.txt: cannot be read: No such file"):
        texts(DataFiles((tmp_path / "gone.txt",), SourceKind.TEXT))
    with pytest.raises(UnsupportedError, match=r"gone\.txt: cannot be read: No such file"):
        DataFiles((tmp_path / "gone.txt",), SourceKind.TEXT).listing()


def jsonl(path: Path, *lines: object) -> Path:
    rows = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path


def test_json_lines_give_a_document_each_with_its_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"body": "one"}, b"", {"body": "two\nlines", "n": 1})
    documents = list(DataFiles((path,)).documents())
    assert [(d.line, d.fields["body"]) for d in documents] == [(1, "one"), (3, "two\nlines")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2 is not valid JSON: Unterminated string"),
        (
            {"body": "x", "n": 1},
            r"line 2 has no field 'text' \(it has: body, n\); add it, or set data.field",
        ),
        ([1], "line 2 holds list, expected an object with fields"),
        ({"text": 5}, "line 2: field 'text' holds int, expected text"),
        (b'{"text": "\xff"}', "line 2 is not valid UTF-8"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "fine"}, line)
    with pytest.raises(UnsupportedError, match=rf"a\.jsonl: {message}"):
        texts(DataFiles((path,)))


@pytest.mark.parametrize(
    "line",
    [r'{"text": "\ud800 x"}', '{"text": "x", "n": ' + "9" * 5000 + "}", "[" * 100_000],
    ids=["surrogate", "number", "nesting"],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
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


def test_the_standard_library_is_there_without_tests_and_tables() -> None:
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any(name.startswith(("topics", "_sysconfigdata")) for name in names)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-4:]) for path in files)
    assert list(files) == sorted(files)
    assert sum(path.stat().st_size for path in files) > 5_000_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": SourceKind.TEXT}, "path: source 'text' needs one"),
        (
            {"source": SourceKind.STDLIB, "path": "x"},
            "path: source 'stdlib' reads Python's own sources and takes no path",
        ),
        ({"held_out": 1.0}, "held_out: expected a fraction from 0 up to 1, got 1.0"),
        ({"held_out_path": "x"}, "held_out_path: source 'stdlib' has no other path"),
        ({"name": "en"}, "name: only source 'dataset' has configurations"),
        (
            {"source": SourceKind.JSONL, "path": "a", "split": "test"},
            "split: only source 'dataset' has splits",
        ),
        (
            {"source": SourceKind.TEXT, "path": "a", "field": "body"},
            "field: source 'text' reads files without fields; give a path to records",
        ),
        ({"held_out_split": "test"}, "held_out_split: only source 'dataset' has splits"),
        (
            {"source": SourceKind.TEXT, "path": "a", "held_out_path": "b", "held_out": 0.1},
            "held_out: give this fraction or held_out_path/_split, not both",
        ),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        DataConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["parquet", "arrow", "csv", "json"])
def test_a_source_by_the_name_of_a_format_is_read_by_its_suffix(name: str) -> None:
    assert DataConfig(path=f"x.{name}", source=SourceKind(name)).source is SourceKind.AUTO
