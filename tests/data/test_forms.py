"""What is trained of prompts and of tokens, from the line to the labels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farspan.data import formats
from farspan.data.config import DataConfig, FormatRow, RecordFormat
from farspan.data.corpus import Corpus
from farspan.data.formats import UNTRAINED
from farspan.data.tokenizers import load_tokenizer
from farspan.spec import UnsupportedError
from tests.data.stores import open_records
from tests.data.test_tokenizers import save_words
from tests.made_up import add_member

Build = Callable[..., Corpus]
END = 256


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A corpus of these records."""
    return lambda *records, **fields: open_records(tmp_path, *records, **{"context": 64, **fields})


def row(corpus: Corpus) -> tuple[list[int], list[int]]:
    """Ids and labels of the first sequence."""
    batch = corpus.train.once(0)
    return batch.input_ids[0].tolist(), batch.labels[0].tolist()


def spoken(labels: list[int]) -> bytes:
    """The bytes that are trained, `_` for each that is not."""
    return bytes(ord("_") if n == UNTRAINED else n for n in labels if n != END)


def test_a_prompt_is_read_and_its_completion_trained(build: Build) -> None:
    record = {"question": "zwei plus zwei? ä ", "answer": "vier ü"}
    fields = {"format": "prompt", "prompt": "question", "completion": "answer"}
    corpus = build(record, **fields)
    ids, labels = row(corpus)
    assert bytes(ids[:-1]).decode() == "zwei plus zwei? ä vier ü"
    assert spoken(labels) == b"_" * 19 + "vier ü".encode()
    assert labels[-1] == END
    assert corpus.trained == pytest.approx(8 / 27)
    whole = build(record, loss="all", **fields)
    assert row(whole)[1] == ids
    assert whole.identity != corpus.identity


def test_a_token_on_the_border_is_trained(build: Build, tmp_path: Path) -> None:
    """`document` is one token, of which the prompt has the beginning."""
    tokenizer = load_tokenizer(str(save_words(tmp_path / "words", begins=True)))
    records = {"prompt": "one two docu", "completion": "ment one"}
    ids, labels = row(build(records, format="prompt", tokenizer=tokenizer))
    assert ids == [1, 3, 4, 5, 3, 2]
    assert labels == [UNTRAINED, UNTRAINED, UNTRAINED, 5, 3, 2]


def test_tokens_are_as_they_are(build: Build) -> None:
    ids, labels = [70000, 5, 6, 7], [-100, -100, 6, 7]
    assert row(build({"input_ids": ids, "labels": labels}, format="tokens")) == (ids, labels)
    corpus = build({"input_ids": ids}, format="tokens")
    assert row(corpus) == (ids, ids)
    assert corpus.largest == 70000


def test_a_cache_is_of_one_form(build: Build) -> None:
    record = {"text": "ab", "prompt": "a", "completion": "b", "input_ids": [5, 6], "other": "x"}
    settings: list[tuple[dict[str, str], set[str]]] = [
        ({}, {"text"}),
        ({"field": "other"}, {"other"}),
        ({"format": "prompt"}, {"prompt", "completion"}),
        ({"format": "prompt", "completion": "text"}, {"prompt", "text"}),
        ({"format": "prompt", "loss": "all"}, {"prompt", "completion"}),
        ({"format": "tokens"}, {"input_ids"}),
    ]
    found = [
        row(build(record, ignore=tuple(record.keys() - read), **fields))
        for fields, read in settings
    ]
    assert found == [
        ([*b"ab", END], [*b"ab", END]),
        ([*b"x", END], [*b"x", END]),
        ([*b"ab", END], [UNTRAINED, *b"b", END]),
        ([*b"aab", END], [UNTRAINED, *b"ab", END]),
        ([*b"ab", END], [*b"ab", END]),
        ([5, 6], [5, 6]),
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"ids": [1]},
            r"line 1 has no field 'input_ids' \(it has: ids\); add it, or set data\.format",
        ),
        ({"input_ids": "1 2"}, "field 'input_ids': expected a list of whole numbers"),
        ({"input_ids": [1, 2.5]}, "field 'input_ids': expected a list of whole numbers"),
        ({"input_ids": [1, True]}, "field 'input_ids': expected a list of whole numbers"),
        ({"input_ids": [1, 2**70]}, "field 'input_ids': expected a list of whole numbers"),
        ({"input_ids": [1, -2]}, "field 'input_ids' has a negative id, -2"),
        ({"input_ids": [1, 2**32]}, r"field 'input_ids' has an id of 4294967296, .* below 2\*\*32"),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "field 'labels' has 1 entries for 2 input_ids; give one for each",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [1]},
            "field 'attention_mask' has 1 entries for 2 input_ids",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [1, 2]},
            "has values other than 0 .padding. and 1; give",
        ),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "has 0 between tokens of 1; padd"),
        ({"input_ids": [1, 2], "attention_mask": "11"}, "'attention_mask': expected a list of"),
        (
            {"input_ids": [1, 2], "labels": [2, -100]},
            "each label is the id at the same place, unshifted",
        ),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "none of its tokens is trained"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "no document has a trained token after its"),
    ],
)
def test_tokens_that_cannot_be_are_refused(
    build: Build, record: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(record, format="tokens")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "text", "format": "chat"}, "format: chat needs records; give a path"),
        ({"format": "prompt", "field": "x"}, "field: format prompt reads prompt and completion;"),
        (
            {"format": "tokens", "field": "x"},
            "field: format tokens reads input_ids and the fields that describe them;",
        ),
        ({"prompt": "question"}, "prompt: only format 'prompt' has prompts and completions"),
        (
            {"format": "prompt", "prompt": "completion"},
            "completion: 'completion' is prompt already",
        ),
        (
            {"format": "alpaca", "chat_template": "x"},
            "chat_template: only formats chat, sharegpt, prompt, preference and unp",
        ),
        ({"format": "alpaca", "field": "x"}, "field: format alpaca reads instruction, input and o"),
        ({"loss": "all"}, "loss: format text has no answers; leave loss out"),
    ],
)
def test_keys_that_say_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        DataConfig(**{"source": "jsonl", "path": "x"} | fields)


def test_a_field_that_is_missing_is_named_by_its_key(build: Build) -> None:
    with pytest.raises(
        UnsupportedError, match=r"no field 'completion' \(.*\); add it, or set data\.completion"
    ):
        build({"prompt": "x", "answer": "y"}, format="prompt")


def test_documents_are_not_cut_where_some_tokens_are_not_trained(build: Build) -> None:
    record = {"prompt": "ab", "completion": "cd"}
    with pytest.raises(
        UnsupportedError, match=r"data\.packing: cut may make sequences without a trained"
    ):
        build(record, format="prompt", packing="cut")
    assert build(record, format="prompt", packing="cut", loss="all").trained == 1.0


def test_held_out_documents_that_train_nothing_are_named(build: Build, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"input_ids": [1, 2], "labels": [1, -100]}))
    with pytest.raises(
        UnsupportedError, match=r"data\.held_out_path: no document has .* to evaluate on"
    ):
        build({"input_ids": [1, 2, 3]}, format="tokens", held_out_path=str(other))


ASKED = "Below is an instruction that describes a task"
ALPACA = (
    f"{ASKED}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSay hi.\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    f"{ASKED}, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n"
    "### Instruction:\nSay hi.\n\n### Input:\nto {all}\n\n### Response:"
)


@pytest.mark.parametrize(
    ("given", "prompt"), [(None, ALPACA), ("", ALPACA), ("to {all}", ALPACA_WITH_INPUT)]
)
def test_alpaca_s_output_is_trained(build: Build, given: str | None, prompt: str) -> None:
    record: dict[str, Any] = {"instruction": "Say hi.", "output": "Hi!"}
    record |= {} if given is None else {"input": given}
    corpus = build(record, context=512)
    ids, labels = row(corpus)
    assert bytes(ids[:-1]).decode() == prompt + "Hi!"
    assert labels == [UNTRAINED] * len(prompt) + [*b"Hi!", END]
    assert "format: alpaca, known by the fields of its records" in corpus.describe(512)
    assert row(build(record, context=512, format="alpaca")) == (ids, labels)
    assert row(build(record, context=512, format="alpaca", loss="all")) == (ids, ids)
    with pytest.raises(
        UnsupportedError, match=r"format alpaca does not read 'history' \(in 1 of 1 records\)"
    ):
        build({**record, "history": [["a", "b"]]})


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"prompt": "a", "completion": "b"}, "prompt"),
        ({"input_ids": [1, 2, 3]}, "tokens"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"text": "a", "prompt": None, "completion": None}, "text"),
    ],
)
def test_forms_are_known_by_their_fields(build: Build, record: dict[str, Any], form: str) -> None:
    assert row(build(record, context=512)) == row(build(record, context=512, format=form))


@pytest.mark.parametrize(
    ("record", "ways"),
    [
        (
            {"text": "Below", "instruction": "a", "input": "", "output": "b", "id": 1},
            {"text": ("instruction", "input", "output"), "alpaca": ("text",)},
        ),
        (
            {"text": "ab", "prompt": "a", "completion": "b"},
            {"text": ("prompt", "completion"), "prompt": ("text",)},
        ),
        (
            {"prompt": "a", "completion": "b", "input_ids": [1, 2, 3]},
            {"prompt": ("input_ids",), "tokens": ("prompt", "completion")},
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "text": "d", "margin": 1},
            {"text": ("prompt", "chosen", "rejected", "margin"), "preference": ("text", "margin")},
        ),
    ],
)
def test_of_several_forms_the_error_says_what_to_ignore_for_each(
    build: Build, record: dict[str, Any], ways: dict[str, tuple[str, ...]]
) -> None:
    """And each of its ways trains that form."""
    with pytest.raises(UnsupportedError, match="line 1 has the fields of several formats") as told:
        build(record, context=512)
    for form, ignore in ways.items():
        assert f"data.ignore: [{', '.join(ignore)}] to read it as {form}" in str(told.value)
        alone = {name: value for name, value in record.items() if name not in ignore}
        found = build(record, context=512, ignore=ignore)
        assert row(found) == row(build(alone, context=512, format=form))


def test_fields_that_say_nothing_name_all_forms(build: Build) -> None:
    message = (
        r"line 1 has no field 'text' \(it has: body\), .*: text \(text\), chat \(messages\), "
        r"sharegpt \(conversations\), alpaca \(instruction and output\), prompt \(prompt and "
        r"completion\), tokens \(input_ids\), preference \(chosen and rejected\), unpaired "
        r"\(prompt and completion and label\); set data\.field"
    )
    with pytest.raises(UnsupportedError, match=message):
        build({"body": "a"})


def test_a_new_form_is_its_row(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fields like a prompt and its completion: known by them, and named in errors."""
    kind = add_member(monkeypatch, RecordFormat, "qa", FormatRow(("question", "answer"), "both"))
    fields = {"question": "a text", "answer": "its answer"}
    monkeypatch.setattr(formats, "READ", {**formats.READ, "qa": fields})
    found = row(build({"question": "ab", "answer": "cd"}))
    assert found == row(build({"question": "ab", "answer": "cd"}, format=kind))
    assert found == row(build({"prompt": "ab", "completion": "cd"}))
    with pytest.raises(UnsupportedError, match=r"field 'answer' .*add it, or set data\.format"):
        build({"question": "ab", "text": "cd"}, format="qa")
    with pytest.raises(UnsupportedError, match="format qa does not read 'history'"):
        build({"question": "ab", "answer": "cd", "history": "ef"})
    with pytest.raises(UnsupportedError, match="field: format qa reads both"):
        build({"question": "ab", "answer": "cd"}, format="qa", field="answer")
    with pytest.raises(UnsupportedError, match=r"qa \(question and answer\); set data\.field"):
        build({"body": "a"})
