"""Files as people have them: each is read by what it is, or the answer says what to type."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from farspan.data import sources
from farspan.data.config import DataConfig
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.token_cache import unwatched
from farspan.data.tokenizers import ByteTokenizer, HubTokenizer
from farspan.spec import UnsupportedError
from tests.data.characters import character_tokenizer

TEMPLATE = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"a{n}"}]}
    for n in range(3)
]
TEXTS = [{"text": f"text {n}"} for n in range(4)]
ANSWERS = [{"prompt": "2+2=", "completion": "4"}, {"prompt": 'say "a, b"\n', "completion": "NA"}]
Rows = list[dict[str, Any]]


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def array(rows: Rows) -> bytes:
    return json.dumps(rows, indent=1, ensure_ascii=False).encode()


def packed(rows: Rows) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def arrow(opens: Callable[..., Any]) -> Callable[[Rows], bytes]:
    def write(rows: Rows) -> bytes:
        table, file = pa.Table.from_pylist(rows), io.BytesIO()
        with opens(file, table.schema) as writer:
            writer.write_table(table)
        return file.getvalue()

    return write


def cells(rows: Rows, separator: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


WRITERS: Mapping[str, Callable[[Rows], bytes]] = {
    "jsonl": lines,
    "json": array,
    "parquet": packed,
    "arrow": arrow(pa.ipc.new_stream),
    "csv": cells,
    "tsv": lambda rows: cells(rows, "\t"),
}
# Of names, what a folder holds.
Folder = Mapping[str, bytes]


def lay(folder: Path, files: Folder) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """The sequences of these files; `path` is one of them, or a folder, or a glob."""

    def make(path: str, files: Folder, **fields: Any) -> Corpus:
        lay(tmp_path, files)
        config = DataConfig(path=str(tmp_path / path), cache=str(tmp_path / "cache"), **fields)
        own = HubTokenizer(character_tokenizer(TEMPLATE)) if chats(files) else ByteTokenizer()
        return open_corpus(config, own, context=64, seed=0, watch=unwatched)

    return make


def chats(files: Folder) -> bool:
    return any(b"conversations" in content for content in files.values())


def spoken(corpus: Corpus) -> list[tuple[bytes, list[bool]]]:
    """Documents of bytes, and which of them are trained."""
    store = corpus.parts[0].stores[0]
    spans = list(zip(store.starts[:-1], store.starts[1:], strict=True))
    trained = store.trained if store.trained is not None else store.tokens >= 0
    return [(bytes(store.tokens[a : b - 1].tolist()), trained[a:b].tolist()) for a, b in spans]


@pytest.mark.parametrize("wrap", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", WRITERS)
def test_each_suffix_is_the_same_records(corpus: Any, suffix: str, wrap: str) -> None:
    """As JSON lines have them: which tokens, and which of them are trained."""
    packs: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstd,
    }
    name = f"a.{suffix}{wrap}"
    found = corpus(name, {name: packs[wrap](WRITERS[suffix](ANSWERS))})
    expected = corpus("b.jsonl", {"b.jsonl": lines(ANSWERS)}, source="jsonl")
    assert spoken(found) == spoken(expected)
    assert found.identity == expected.identity


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\n "])
@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_over_several_lines_is_a_record(
    corpus: Any, begin: bytes, indent: int | None
) -> None:
    row = {"text": "a {[\n", "meta": {"ids": [1, 2]}}
    name = "a.json.gz"
    data = begin + json.dumps(row, indent=indent).encode() + b"\n"
    found = corpus(name, {name: gzip.compress(data)}, ignore=("meta",))
    assert spoken(found) == [(b"a {[\n", [True] * 6)]


def test_both_forms_of_arrow_are_read(corpus: Any) -> None:
    found = corpus("a.arrow", {"a.arrow": arrow(pa.ipc.new_file)(TEXTS)})
    assert [text for text, _ in spoken(found)] == [b"text 0", b"text 1", b"text 2", b"text 3"]


@pytest.mark.parametrize("suffix", ["json", "parquet", "arrow"])
def test_records_that_nest_are_read_from_each(corpus: Any, suffix: str) -> None:
    """Messages, and ids that others have made."""
    name = f"a.{suffix}"
    found = corpus(name, {name: WRITERS[suffix](SHAREGPT)})
    assert found.parts[0].opened.config.format == "sharegpt"
    expected = corpus("b.jsonl", {"b.jsonl": lines(SHAREGPT)})
    assert found.identity == expected.identity
    name = f"ids.{suffix}"
    ids = corpus(name, {name: WRITERS[suffix]([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])})
    assert spoken(ids) == [(b"\5\6", [False, True, True])]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow", "csv"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": None}, "2: field 'completion' is null"),
        ({"prompt": "a", "completion": "b", "extra": "c"}, r"does not read 'extra' \(in 1 of 2 re"),
    ],
)
def test_refusals_are_those_of_lines(corpus: Any, suffix: str, row: Any, message: str) -> None:
    rows = [{key: ANSWERS[0].get(key) for key in row}, row]
    if suffix == "csv":  # it has no null: an empty cell is an empty text
        rows[1] = row = {**row, "completion": row["completion"] or ""}
        message = message if "extra" in row else "none"
    name = f"a.{suffix}"
    if message == "none":
        assert spoken(corpus(name, {name: WRITERS[suffix](rows)}))[1][0] == b"a"
        return
    with pytest.raises(UnsupportedError, match=message) as refused:
        corpus(name, {name: WRITERS[suffix](rows)})
    if "extra" not in row:
        assert f"a.{suffix}: {'line' if suffix == 'jsonl' else 'row'} 2" in str(refused.value)


def test_texts_stand_beside_records_of_any_form(corpus: Any) -> None:
    files = {"c/a.txt": b"plain $", "c/b.json": array(SHAREGPT[:1])}
    found = corpus("c", files)
    (part,) = found.parts
    assert part.opened.config.format == "sharegpt"
    store = part.stores[0]
    assert store.trained is not None
    begin, middle, _ = store.starts.tolist()
    assert store.trained[begin:middle].all()
    assert not store.trained[middle:].all()
    assert any(line.startswith("files: 1 .txt, 1 .json") for line in found.describe(64))
    pairs = {"d/a.txt": b"x", "d/b.jsonl": lines([{"prompt": "a", "chosen": "b", "rejected": "c"}])}
    with pytest.raises(UnsupportedError, match=r"a\.txt is plain text, without answers to compare"):
        corpus("d", pairs)


def test_a_folder_of_two_forms_names_both(corpus: Any) -> None:
    files = {"c/a.jsonl": lines(TEXTS), "c/b.json": array(ANSWERS)}
    with pytest.raises(
        UnsupportedError, match=r"a\.jsonl has format text, but .*b\.json prompt; .* data\.sources"
    ):
        corpus("c", files)


def test_a_folder_of_splits_is_not_trained_as_one(corpus: Any) -> None:
    files = {"c/train.jsonl": lines(TEXTS[:2]), "c/test.jsonl": lines(TEXTS[2:])}
    with pytest.raises(UnsupportedError, match=r"test\.jsonl .* data\.held_out_path"):
        corpus("c", files)
    assert len(spoken(corpus("c/train*", files))) == 2


def test_a_folder_s_other_files_are_skipped_and_counted(corpus: Any) -> None:
    files = {
        **{"c/a.jsonl": lines(TEXTS), "c/README.md": b"card", "c/LICENSE": b"x"},
        **{"c/code.py": b"x", "c/b.png": b"x", "c/d.png": b"x", "c/LICENSE.txt": b"x"},
    }
    found = corpus("c", files)
    assert len(spoken(found)) == len(TEXTS)
    counts = "2 .png, 1 LICENSE, 1 LICENSE.txt, 1 README.md, 1 .py"
    assert f"skipped, because these are not data files: {counts}" in found.describe(64)
    # Of a folder of texts they are texts.
    assert len(spoken(corpus("t", {"t/README.md": b"card", "t/a.txt": b"x"}))) == 2


@pytest.mark.parametrize("sign", ";\t|")
def test_the_separator_of_cells_is_found_and_said(corpus: Any, sign: str) -> None:
    text = f'prompt{sign}"text, of it"\na{sign}"b{sign},"\n'.replace("text, of it", "completion")
    found = corpus("a.csv", {"a.csv": text.encode()})
    assert f"CSV cells are separated by {sign!r}" in found.describe(64)
    assert "CSV cells are separated by ','" not in found.describe(64)


@pytest.mark.parametrize(
    ("path", "files", "fields", "message"),
    [
        ("a.parquet", {"a.parquet": packed(TEXTS)}, {"source": "jsonl"}, "leave data.source out"),
        ("a.jsonl", {"a.jsonl": lines(TEXTS)}, {"source": "text"}, "leave data.source out"),
        ("a.parquet", {"a.parquet": packed(TEXTS)}, {"split": "test"}, "split: .* have no splits"),
        ("a.txt", {"a.txt": b"x"}, {"format": "chat"}, "format: chat needs records"),
        (
            "c/*",
            {"c/a.txt": b"x", "c/b.png": b"x"},
            {},
            r"b\.png: no format reads the suffix '\.png'",
        ),
        ("c", {"c/a.py": b"x", "c/b.png": b"x"}, {}, r"a\.py \(and 1 more files\): no format re"),
        ("a.json", {"a.json": b'[{"text": "a"}, {"text"}]'}, {}, "row 2 is not valid JSON"),
        ("a.json", {"a.json": b'[{"text": "a"}, {"text": "b"}'}, {}, "array is not closed"),
        ("a.json", {"a.json": b'[{"text": "a"}] x'}, {}, "follows the end of the array"),
        (
            "a.json",
            {"a.json": b'{\n "text": "a"\n}\n' * 2},
            {},
            "write one object per line, or one array",
        ),
        ("a.json", {"a.json": b'{\n "data": []\n}'}, {}, "data"),
        ("a.csv", {"a.csv": cells(SHAREGPT)}, {}, "convers"),
        ("a.csv", {"a.csv": b"prompt,completion\na,b,c\n"}, {}, "row 1 has 3 cells for 2 columns"),
        ("a.csv", {"a.csv": b"text,text\na,b\n"}, {}, "column 'text' is given twice"),
        ("a.csv", {"a.csv": b"prompt;completion\na;b;c\n"}, {}, "holds the separator, ';'$"),
        ("a.csv", {"a.csv": b'a|text\nx|"a\n'}, {}, r"not valid CSV with '\|' between cells"),
        (
            "a.csv",
            {"a.csv": b"word " * 99 + b"\n"},
            {},
            r"^.{1,160}'[word ]{60}\.\.\.', does not name col",
        ),
        (
            "a.csv",
            {"a.csv": b"hello,world\nx,y\n"},
            {},
            r"no column 'text' \(the first line has: h",
        ),
        ("docs.parqet", {"docs.parquet": packed(TEXTS)}, {}, r"did you mean .*docs\.parquet\?"),
        ("a.jsnol", {"a.jsnol": lines(TEXTS)}, {}, r"rename it to .*a\.jsonl"),
        ("data", {}, {}, "or a dataset's name on the hub such as org/name"),
        (
            "a.csv",
            {"a.csv": cells(TEXTS)},
            {"held_out_path": "the same"},
            r"held_out_path: /.*a\.csv is also trained on; give",
        ),
        ("a.parquet", {"a.parquet": b"PAR1 no"}, {}, r"a\.parquet: cannot be read as \.parquet"),
        ("a.arrow", {"a.arrow": b"ARROW1 no"}, {}, r"a\.arrow: cannot be read as \.arrow"),
        ("a.txt.zst", {"a.txt.zst": zstd(b"x" * 99)[:-4]}, {}, r"a\.txt\.zst: cannot be read"),
        ("nowhere/a.csv", {}, {}, "there is no folder .*nowhere"),
    ],
)
def test_what_cannot_be_read_is_named(
    corpus: Any,
    tmp_path: Path,
    path: str,
    files: Folder,
    fields: dict[str, Any],
    message: str,
) -> None:
    if "held_out_path" in fields:
        fields = {"held_out_path": str(tmp_path / path)}
    with pytest.raises(UnsupportedError, match=message):
        corpus(path, files, **fields)


def test_row_numbers_that_pandas_writes_are_no_field(corpus: Any) -> None:
    found = corpus("a.csv", {"a.csv": b',text\r\n0,a\r\n\r\n1,"b\r\nc"\r\n'})
    assert [text for text, _ in spoken(found)] == [b"a", b"b\r\nc"]
    assert "fields that do not affect training: __index_level_0__" in found.describe(64)


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a]},{[\\\\"}',
        '{"text": "\\"[,\\u005d"}',
        '{"text": "' + "ä€🙂" * 99 + '", "id": [[1, 2], {"a": []}]}',
        '{"text": "' + "\\\\" * 301 + '"}',
    ],
)
def test_elements_of_an_array_are_those_of_json(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a block of the file ends."""
    path = tmp_path / "a.json"
    content = f' [\n{text} ,{{"text": "b"}},\t{text}\n]\n'
    path.write_text("\ufeff" + content)
    for size in (1, 2, 3, 7, 64, 1 << 20):
        monkeypatch.setattr(sources, "_BLOCK", size)
        found = [document.fields for document in sources.DataFiles((path,)).documents()]
        assert found == json.loads(content), size
