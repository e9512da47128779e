"""Fields of records: each acts, says nothing about what is trained, or is refused by name."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data.config import DataConfig, RecordFormat, SourceKind
from farspan.data.corpus import open_corpus, open_source
from farspan.data.formats import (
    CUMULATIVE,
    HARMLESS_ENDINGS,
    HARMLESS_NAMES,
    LOSS_MASKS,
    READ,
    TURN_MARKS,
)
from farspan.data.token_cache import TokenStore, open_store, unwatched
from farspan.data.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer
from farspan.spec import UnsupportedError
from tests.data.characters import character_tokenizer
from tests.grids import crossed

ROOT = Path(__file__).resolve().parents[2]
END = 256
# A turn ends in `$`; the template reads what it names here, and nothing else.
TURNS = """
{%- if tools %}({{ tools | length }}){% endif %}
{%- if loud %}LOUD{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }}
{{- call.function.arguments | tojson }}>{% endfor %}{{ eos_token }}
{%- endfor %}{%- if add_generation_prompt %}[assistant]{% endif %}"""
PLAIN = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
SO, YES = {"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}
CHAT = [HI, HO, SO, YES]
MARKED_CHAT: list[Any] = [HI, {**HO, "weight": 0}, SO, YES]
Read = Callable[..., list[tuple[str, str]]]


def opened(folder: Path, tokenizer: Tokenizer, *records: object, **fields: Any) -> TokenStore:
    path = folder / "data.jsonl"
    text = "".join(json.dumps(record) + "\n" for record in records)
    if not path.exists() or path.read_text() != text:  # or its cache would be another's
        path.write_text(text)
    config = DataConfig(
        source=SourceKind.JSONL, path=str(path), cache=str(folder / "cache"), **fields
    )
    source = open_source(config, tokenizer)
    return open_store(
        source.train, source.form, tokenizer, folder / "cache", unwatched, config.ignore or ()
    )


def documents(store: TokenStore) -> list[tuple[list[int], list[bool]]]:
    """Ids of each document, and which are trained."""
    trained = np.ones(len(store.tokens), bool) if store.trained is None else store.trained
    middles = () if store.middles is None else store.middles  # of pairs
    edges = sorted({*store.starts.tolist(), *np.asarray(middles, int).tolist()})
    return [(store.tokens[a:b].tolist(), trained[a:b].tolist()) for a, b in pairwise(edges)]


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., list[tuple[list[int], list[bool]]]]:
    """Documents of these rows of token ids."""
    return lambda *rows, **fields: documents(opened(tmp_path, ByteTokenizer(), *rows, **fields))


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The text of each document and what of it is trained, `_` for what is not."""

    def make(*records: object, template: str = TURNS, **fields: Any) -> list[tuple[str, str]]:
        inner = character_tokenizer(template)
        found = []
        for ids, trained in documents(opened(tmp_path, HubTokenizer(inner), *records, **fields)):
            text = inner.convert_ids_to_tokens(ids)
            spoken = [c if on else "_" for c, on in zip(text, trained, strict=True)]
            found.append(("".join(text), "".join(spoken)))
        return found

    return make


def masked(text: str, *spoken: str) -> str:
    """The text with `_` in place of all but these parts, found one after the other."""
    kept, at = ["_"] * len(text), 0
    for part in spoken:
        at = text.index(part, at)
        kept[at : at + len(part)] = part
    return "".join(kept)


class TestTokens:
    """Rows of ids that others have tokenised, masked and packed."""

    IDS = (5, 6, 7, 8)

    @pytest.mark.parametrize("name", LOSS_MASKS)
    @pytest.mark.parametrize("mask", [[0, 0, 1, 1], [False, False, True, True], [0.0, 0, 1.0, 1]])
    def test_a_mask_says_what_is_trained(self, tokens: Any, name: str, mask: list[Any]) -> None:
        row = {"input_ids": self.IDS, name: mask}
        assert tokens(row) == [([5, 6, 7, 8], [False, False, True, True])]

    def test_masks_and_labels_must_agree_as_trl_has_them(self, tokens: Any) -> None:
        """A token is trained where each of them trains it: SFTTrainer's `all(bits)`."""
        row = {
            "input_ids": self.IDS,
            "completion_mask": [0, 1, 1, 1],
            "assistant_masks": [1, 1, 0, 1],
        }
        bits = zip(row["completion_mask"], row["assistant_masks"], strict=True)
        assert tokens(row) == [([5, 6, 7, 8], [bool(all(pair)) for pair in bits])]
        assert tokens({**row, "labels": [5, -100, 7, 8]})[0][1] == [False, False, False, True]

    def test_padding_is_left_out_of_masks_and_borders(self, tokens: Any) -> None:
        row = {
            "input_ids": [0, 5, 6, 7, 8, 0],
            "attention_mask": [0, 1, 1, 1, 1, 0],
            "completion_mask": [1, 0, 1, 1, 1, 1],
            "position_ids": [1, 0, 1, 0, 1, 9],
            "token_type_ids": [0] * 6,
            "length": 4,
        }
        nothing = {"input_ids": [9, 9], "attention_mask": [0, 0]}
        assert tokens(nothing, row) == [([5, 6], [False, True]), ([7, 8], [True, True])]

    @pytest.mark.parametrize(
        "borders",
        [
            {"position_ids": [0, 1, 2, 0, 0, 1]},
            {"seq_lengths": [3, 1, 2]},
            *({name: [0, 3, 4, 6]} for name in CUMULATIVE),
            {"seq_idx": [0, 0, 0, 1, 2, 2]},
            {"seq_lengths": [3, 1, 2], "position_ids": [0, 1, 2, 0, 0, 1]},
        ],
        ids=lambda borders: "+".join(borders),
    )
    def test_a_packed_row_is_several_documents(self, tokens: Any, borders: dict[str, Any]) -> None:
        row = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, -100, 4, -100, 6], **borders}
        assert tokens(row) == [
            ([1, 2, 3], [True, True, False]),
            ([4], [True]),
            ([5, 6], [False, True]),
        ]

    def test_rows_that_trl_packs_are_the_documents_that_went_in(self, tmp_path: Path) -> None:
        datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
        rows = [list(range(10 * n, 10 * n + length)) for n, length in enumerate((5, 3, 2, 6), 1)]
        masks = [[0] + [1] * (len(row) - 1) for row in rows]
        given = datasets.Dataset.from_dict({"input_ids": rows, "completion_mask": masks})
        packed = trl.pack_dataset(given, seq_length=8, strategy="bfd")
        assert "seq_lengths" in packed.column_names
        packed.save_to_disk(str(tmp_path / "set"))
        config = DataConfig(
            source=SourceKind.DATASET, path=str(tmp_path / "set"), cache=str(tmp_path / "cache")
        )
        use = ByteTokenizer()
        corpus = open_corpus(config, use, context=8, seed=0, watch=unwatched)
        found = documents(corpus.parts[0].stores[0])
        assert sorted(found) == [
            (r, [bool(m) for m in k]) for r, k in zip(rows, masks, strict=True)
        ]
        # A sequence has positions that begin again and labels that do not cross, as its collator's.
        batch = corpus.train.once(0)
        marks = batch.document_ids[0]
        starts = np.flatnonzero(np.diff(marks, prepend=-1))
        assert {int(batch.input_ids[0, s]) for s in starts} <= {r[0] for r in rows}

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"completion_mask": [1, 1]}, "field 'completion_mask' has 2 entries for 4 input_ids"),
            ({"loss_mask": [0, 0.5, 1, 1]}, "field 'loss_mask': expected a list of 0 .* and 1"),
            ({"loss_mask": "0011"}, "field 'loss_mask': expected a list of 0"),
            ({"position_ids": [1, 2, 3, 4]}, "'position_ids': expected positions that begin at 0"),
            ({"position_ids": [0, 1, 3, 4]}, "'position_ids': expected positions that begin at 0"),
            ({"position_ids": [0, 1]}, "field 'position_ids' has 2 entries for 4 input_ids"),
            ({"seq_lengths": [2, 3]}, "'seq_lengths': expected documents of one token or more"),
            ({"cu_seqlens": [0, 2, 2, 4]}, "'cu_seqlens': expected documents .* end at token 4"),
            ({"seq_lengths": [2**62] * 4 + [4]}, "'seq_lengths': expected documents"),
            (
                {"seq_lengths": [2, 2], "position_ids": [0, 1, 2, 0]},
                "fields 'position_ids' and 'seq_lengths' disagree on where documents begin",
            ),
            (
                {"token_type_ids": [0, 0, 1, 1]},
                "field 'token_type_ids' has token types other than 0",
            ),
            ({"length": 3}, "field 'length' is 3 for 4 input_ids; cut input_ids to that"),
            ({"prompt_length": 2}, "does not read 'prompt_length'"),
            ({"scores": [0.1, 0.2, 0.3, 0.4]}, "does not read 'scores'"),
            ({"meta": {"loss_mask": [0, 0, 1, 1]}}, "does not read 'meta'"),
        ],
    )
    def test_what_does_not_fit_is_named(self, tokens: Any, fields: Any, message: str) -> None:
        with pytest.raises(UnsupportedError, match=message):
            tokens({"input_ids": self.IDS, **fields})


class TestTurns:
    """Marks, and what stands beside messages."""

    TEXT = "[user]hi$[assistant]ho$[user]so?$[assistant]yes$"

    @pytest.mark.parametrize(
        ("mark", "off", "sharegpt"), crossed(TURN_MARKS, [0, False, 0.0], [False, True])
    )
    def test_a_turn_that_is_marked_off_is_read(
        self, read: Read, mark: str, off: object, sharegpt: bool
    ) -> None:
        chat: list[dict[str, Any]] = [{**HI, mark: off}, {**HO, mark: off}, SO, {**YES, mark: 1}]
        record: dict[str, Any] = {"messages": chat}
        if sharegpt:
            others = [{k: v for k, v in m.items() if k == mark} for m in chat]
            words = [{"from": m["role"], "value": m["content"]} for m in chat]
            record = {"conversations": [a | b for a, b in zip(words, others, strict=True)]}
        assert read(record) == [(self.TEXT, masked(self.TEXT, "yes$"))]

    def test_marks_act_where_the_template_says_what_is_trained(self, read: Read) -> None:
        """As transformers' own mask is for a template that reads the mark."""
        marked = PLAIN.replace(
            "{{ m.content }}{{ eos_token }}",
            "{% if m.role == 'assistant' and m.weight != 0 %}{% generation %}{{ m.content }}"
            "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}",
        )
        inner = character_tokenizer(marked)
        found: Any = inner.apply_chat_template(
            MARKED_CHAT, return_dict=True, return_assistant_tokens_mask=True
        )
        letters = inner.convert_ids_to_tokens(found["input_ids"])
        spoken = zip(letters, found["assistant_masks"], strict=True)
        expected = "".join(c if on else "_" for c, on in spoken)
        plain = marked.replace(" and m.weight != 0", "")
        assert read({"messages": MARKED_CHAT}, template=plain) == [("".join(letters), expected)]

    @pytest.mark.parametrize(
        ("chat", "fields", "message"),
        [
            ([HI, {**HO, "weight": 0.5}], {}, "message 2: 'weight' is 0.5, expected 0 or 1"),
            ([HI, {**HO, "train": "no"}], {}, "message 2: 'train' is 'no', expected 0 or 1"),
            ([{**HI, "train": True}, HO], {}, "message 1: 'train' asks to train a turn of"),
            (
                MARKED_CHAT,
                {"loss": "all", "format": "chat"},
                "message 2: 'weight' excludes a turn from training, but data.loss",
            ),
            ([HI, {**HO, "train_detail": [{"begin_offset": 0}]}], {}, "'messages.train_detail'"),
            ([HI, {**HO, "mask": True}], {}, r"reads 'messages\.mask' \(in 1 of 1 records"),
            (
                [HI, {**HO, "thinking": "hm"}],
                {},
                "neither format chat nor the chat template reads 'mess",
            ),
            ([{**HI, "name": "Ada"}, HO], {"template": PLAIN}, r"'messages\.name'"),
            ([HI, {**HO, "tool_calls": [{"id": 1}]}], {"template": PLAIN}, "messages.tool_calls"),
        ],
    )
    def test_a_key_of_a_turn_that_is_not_read_is_named(
        self, read: Read, chat: Any, fields: Any, message: str
    ) -> None:
        with pytest.raises(UnsupportedError, match=message):
            read({"messages": chat}, **fields)

    def test_all_is_trained_of_marks_that_say_so(self, read: Read) -> None:
        chat = [{**m, "weight": 1} for m in CHAT]
        assert read({"messages": chat}, loss="all", format="chat") == [(self.TEXT, self.TEXT)]

    def test_what_a_template_names_it_reads(self, read: Read) -> None:
        call = {"id": "c1", "function": {"name": "f", "arguments": {}}}
        chat = [HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
        (found,) = read({"messages": chat, "tools": [{"type": "function"}]})
        assert found[1] == masked(found[0], "<f{}>$")
        with pytest.raises(UnsupportedError, match="does not read 'tools'"):
            read({"messages": CHAT, "tools": [{"type": "function"}]}, template=PLAIN)

    def test_a_system_column_is_the_first_message(self, read: Read) -> None:
        text = "[system]brief$" + self.TEXT
        system = {"role": "system", "content": "brief"}
        for messages in (CHAT, [system, *CHAT]):
            assert read({"messages": messages, "system": "brief"}) == [
                (text, masked(text, "ho$", "yes$"))
            ]
        with pytest.raises(UnsupportedError, match=r"field 'system' and the first message .* diff"):
            read({"messages": [system, *CHAT], "system": "long"})

    def test_a_template_gets_the_record_s_variables(self, read: Read) -> None:
        (loud,) = read({"messages": CHAT, "chat_template_kwargs": {"loud": True}})
        assert loud == ("LOUD" + self.TEXT, "____" + masked(self.TEXT, "ho$", "yes$"))
        for name in ("enable_thinking", "tools"):
            with pytest.raises(UnsupportedError, match=f"template takes no variable '{name}'"):
                read({"messages": CHAT, "chat_template_kwargs": {name: True}})

    def test_variables_may_be_text_and_empty_ones_are_missing(self, read: Read) -> None:
        """Tables have JSON in a text, and each variable of any row in all of them."""
        given = {"loud": True, "tone": "", "xml_tools": [], "python_tools": None}
        expected = read({"messages": CHAT, "chat_template_kwargs": {"loud": True}})
        assert read({"messages": CHAT, "chat_template_kwargs": given}) == expected
        assert read({"messages": CHAT, "chat_template_kwargs": json.dumps(given)}) == expected
        record = {"messages": CHAT, "chat_template_kwargs": {"loud": True, "tone": "dry"}}
        with pytest.raises(UnsupportedError, match=r"'tone'.*ignore: \[chat_template_kwargs\]"):
            read(record)
        assert read(record, ignore=("chat_template_kwargs",)) == read({"messages": CHAT})

    def test_a_prompt_that_repeats_the_first_message_is_fine(self, read: Read) -> None:
        expected = [(self.TEXT, masked(self.TEXT, "ho$", "yes$"))]
        assert read({"messages": CHAT, "prompt": "hi", "prompt_id": "x"}) == expected
        with pytest.raises(UnsupportedError, match="'prompt' differs from the beginning of"):
            read({"messages": CHAT, "prompt": "other"})

    @pytest.mark.parametrize(
        ("part", "field"),
        [
            ({"type": "image_url", "image_url": {"url": "x"}}, "messages.content.image_url"),
            ({"type": "input_audio", "input_audio": {}}, "messages.content.input_audio"),
            ({"image": "x.png"}, "messages.content.image"),
        ],
    )
    def test_images_and_sound_are_refused(self, read: Read, part: Any, field: str) -> None:
        chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}, HO]
        template = PLAIN.replace("m.content }}", "m.content[0].text or m.image_url }}")
        with pytest.raises(UnsupportedError, match=rf"{re.escape(field)}'.*trains on text alone"):
            read({"messages": chat}, template=template)


class TestPrompts:
    """Prompts and completions, chosen and rejected answers, as messages."""

    def test_completions_are_trained_as_in_trl(self, read: Read) -> None:
        trl = pytest.importorskip("trl")
        record = {"prompt": [HI, HO, SO], "completion": [YES]}
        inner = character_tokenizer(TURNS)
        parts = trl.apply_chat_template(record, inner)
        text = parts["prompt"] + parts["completion"]
        expected = "_" * len(parts["prompt"]) + parts["completion"]
        assert read(record) == [(text, expected)]
        assert read(record, loss="all", format="prompt") == [(text, text)]

    def test_of_several_turns_the_assistant_s_are_trained(self, read: Read) -> None:
        record = {"prompt": [HI], "completion": [{**HO, "weight": 0}, SO, YES], "system": "be"}
        text = "[system]be$" + TestTurns.TEXT
        assert read(record) == [(text, masked(text, "yes$"))]

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"prompt": "hi", "completion": [HO]}, "one of prompt and completion is a text and"),
            ({"prompt": [HI], "completion": [SO]}, "field 'completion' has no message of the"),
            ({"prompt": [HI], "completion": []}, "field 'completion' has no message of the"),
            ({"prompt": [HI, {**HO, "train": 1}], "completion": [YES]}, "train a turn of the prom"),
            ({"prompt": "hi", "completion": "ho", "system": "x"}, "does not read 'system'"),
            ({"prompt": "hi", "completion": "ho", "labels": [0]}, "does not read 'labels'"),
        ],
    )
    def test_what_is_no_prompt_is_named(self, read: Read, record: Any, message: str) -> None:
        with pytest.raises(UnsupportedError, match=message):
            read(record)

    def test_a_template_writes_no_texts(self, read: Read, tmp_path: Path) -> None:
        (tmp_path / "own.jinja").write_text(PLAIN)
        fields = {"format": "prompt", "chat_template": str(tmp_path / "own.jinja")}
        with pytest.raises(
            UnsupportedError, match=r"data\.chat_template: .* are texts, which need"
        ):
            read({"prompt": "hi", "completion": "ho"}, **fields)
        (found,) = read({"prompt": [HI], "completion": [HO]}, **fields)
        assert found == ("[user]hi$[assistant]ho$", "____________________ho$"[-23:])

    @pytest.mark.parametrize(
        "record",
        [
            {"prompt": [HI], "chosen": [HO], "rejected": [YES]},
            {"prompt": "hi", "chosen": [HO], "rejected": [YES]},
            {"prompt": "hi", "chosen": [HI, HO], "rejected": [HI, YES]},
            {"chosen": [HI, HO], "rejected": [HI, YES]},
        ],
        ids=["messages", "text", "text that repeats", "implicit"],
    )
    def test_pairs_have_their_prompt(self, read: Read, record: dict[str, Any]) -> None:
        texts = ["[user]hi$[assistant]ho$", "[user]hi$[assistant]yes$"]
        expected = list(zip(texts, map(masked, texts, ("ho$", "yes$")), strict=True))
        assert read(record) == expected

    def test_a_prompt_in_neither_answer_is_named(self, read: Read) -> None:
        record = {"prompt": "what?", "chosen": [HI, HO], "rejected": [HI, YES]}
        with pytest.raises(UnsupportedError, match="field 'prompt' differs from the messages"):
            read(record)


class TestUnreadFields:
    """Fields that a form does not read."""

    @pytest.mark.parametrize(
        "record",
        [
            {"text": "a"},
            {"messages": CHAT},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"instruction": "a", "output": "b"},
            {"prompt": "a", "completion": "b"},
            {"prompt": [HI], "completion": [HO]},
            {"input_ids": [1, 2]},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ],
        ids=lambda record: "+".join(record),
    )
    def test_are_counted_named_and_ignored(self, read: Read, record: dict[str, Any]) -> None:
        records = [record, {**record, "extra": 1, "id": 3}, {**record, "extra": 2, "other": "x"}]
        with pytest.raises(UnsupportedError) as error:
            read(*records)
        words = str(error.value)
        assert "'extra' (in 2 of 3 records), 'other' (in 1 of 3 records)" in words
        assert "set data.ignore: [extra, other]" in words
        ignored = {"ignore": ("extra", "other")}
        assert read(*records, **ignored) == read(record, record, record)
        with pytest.raises(UnsupportedError, match=r"data\.ignore: format .* needs field"):
            read(*records, ignore=(next(reversed(record)),))

    def test_the_error_lists_what_is_ignored_already(self, read: Read) -> None:
        """What it says to type is the whole list."""
        record = {"text": "a", "extra": 1, "other": 2}
        with pytest.raises(UnsupportedError, match=r"data\.ignore: \[extra, other\]"):
            read(record, ignore=("extra",))

    def test_keys_of_messages_may_be_ignored(self, read: Read) -> None:
        chat = [{**HI, "name": "Ada"}, HO]
        assert read({"messages": chat}, template=PLAIN, ignore=("messages.name",)) == read(
            {"messages": [HI, HO]}, template=PLAIN
        )

    def test_what_nothing_has_is_no_field(self, read: Read) -> None:
        empty: dict[str, Any] = {"extra": None, "other": "", "images": [], "more": {}}
        assert read({"text": "a", **empty}) == read({"text": "a"})

    def test_a_name_that_ignores_nothing_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a text", "extra": 1}\n')
        config = DataConfig(
            source=SourceKind.JSONL,
            path=str(path),
            ignore=("extra", "exrta"),
            cache=str(tmp_path / "cache"),
        )
        with pytest.raises(UnsupportedError, match=r"data\.ignore: no record has a field 'exrta'"):
            open_corpus(config, ByteTokenizer(), context=8, seed=0, watch=unwatched)
        with pytest.raises(
            UnsupportedError, match="ignore: source 'text' reads files without fields"
        ):
            DataConfig(source=SourceKind.TEXT, path="x", ignore=("extra",))

    def test_a_cache_is_of_what_was_ignored(self, tokens: Any) -> None:
        """Also where the field says what is trained."""
        row = {"input_ids": [1, 2], "labels": [-100, 2]}
        assert tokens(row) == [([1, 2], [False, True])]
        assert tokens(row, ignore=("labels",)) == [([1, 2], [True, True])]


class TestDatasets:
    """Columns of Hugging Face datasets."""

    def corpus(self, folder: Path, rows: Any, **fields: Any) -> list[tuple[list[int], list[bool]]]:
        rows.save_to_disk(str(folder / "set"))
        config = DataConfig(
            source=SourceKind.DATASET,
            path=str(folder / "set"),
            cache=str(folder / "cache"),
            **fields,
        )
        corpus = open_corpus(config, ByteTokenizer(), context=8, seed=0, watch=unwatched)
        return documents(corpus.parts[0].stores[0])

    def test_columns_are_fields(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        columns = {"text": ["a", "b"], "extra": ["x", None], "empty": [None, None], "id": [1, 2]}
        rows = datasets.Dataset.from_dict(columns)
        with pytest.raises(UnsupportedError, match=r"does not read 'extra' \(in 1 of 2 records\)"):
            self.corpus(tmp_path, rows)
        expected = [([97, END], [True] * 2), ([98, END], [True] * 2)]
        assert self.corpus(tmp_path, rows, ignore=("extra",)) == expected

    def test_images_are_refused_before_one_is_decoded(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features({"text": datasets.Value("string"), "pic": datasets.Image()})
        broken = {"text": ["a"], "pic": [{"bytes": b"none", "path": None}]}
        several = datasets.Features({**features, "pic": datasets.List(datasets.Image())})
        rows = datasets.Dataset.from_dict({"text": ["a"], "pic": [[]]}, features=several)
        with pytest.raises(UnsupportedError, match=r"column 'pic' of dataset .* holds Image"):
            self.corpus(tmp_path / "several", rows)
        rows = datasets.Dataset.from_dict(broken, features=features)
        with pytest.raises(UnsupportedError, match=r"column 'pic' of dataset .* holds Image"):
            self.corpus(tmp_path, rows)
        assert self.corpus(tmp_path, rows, ignore=("pic",)) == [([97, END], [True] * 2)]


def test_of_many_broken_lines_the_first_is_named_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text"\n{"text": "b"}\n[1]\n{\n')
    config = DataConfig(source=SourceKind.JSONL, path=str(path), cache=str(tmp_path / "cache"))
    with pytest.raises(UnsupportedError, match=r"line 2 is not valid JSON: .*; 2 more records"):
        open_corpus(config, ByteTokenizer(), context=8, seed=0, watch=unwatched)


def test_fields_that_say_nothing_change_nothing(read: Read) -> None:
    harmless = {
        "id": 7,
        "source": "web",
        "quality_score": 0.5,
        "created_at": "2024-01-01",
        "metadata": {"a": 1},
        "docId": "x2",
        "num_tokens": 9,
        "max_stars_repo_head_hexsha": "c0ffee",
        "publication_date": 1900,
        "ext": "py",
    }
    assert read({"messages": CHAT, **harmless}) == read({"messages": CHAT})


def test_the_page_has_the_table() -> None:
    """docs/reference/records.md is what the code says; python -m tests.field.test_records."""
    assert (ROOT / "docs/reference/records.md").read_text("utf-8").endswith(table())


def table() -> str:
    lines = []
    for kind in RecordFormat:
        lines += [f"## `{kind}`", "", "| field | meaning |", "| --- | --- |"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in READ[kind].items()]
        lines.append("")
    marks, names = (
        ", ".join(f"`{n}`" for n in own) for own in (TURN_MARKS, sorted(HARMLESS_NAMES))
    )
    endings = ", ".join(f"`_{word}`" for word in HARMLESS_ENDINGS)
    lines += ["## Marks of turns", "", marks, "", "## Fields without meaning for training", ""]
    lines += [names + "; names that end in " + endings]
    return "\n".join(lines) + "\n"


NAMES = st.sampled_from(["id", "score", "meta", "extra", "weights", "labels_2", "mask", "x_url"])
VALUES = st.one_of(st.none(), st.integers(0, 3), st.text("ab", max_size=2), st.just([1, 0]))
EXTRA = st.dictionaries(NAMES, VALUES, max_size=2)
# Of these names nothing is trained otherwise, unless it is a list of numbers.
NOTHING = {"id", "score", "meta", "x_url"}


def strange(extra: dict[str, Any]) -> set[str]:
    """Fields that a reader of the record would have to know."""
    given = {name: value for name, value in extra.items() if value not in (None, "")}
    return {n for n, value in given.items() if n not in NOTHING or isinstance(value, list)}


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of ids with masks, borders, padding and other fields."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = sum(lengths)
    row: dict[str, Any] = {
        "input_ids": draw(st.lists(st.integers(0, 300), min_size=count, max_size=count))
    }
    bits = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    for name in draw(st.sets(st.sampled_from(["completion_mask", "loss_mask", "labels"]))):
        on = draw(bits)
        if name == "labels":
            on = [i if b else -100 for i, b in zip(row["input_ids"], on, strict=True)]
        row[name] = on
    ends = np.cumsum(lengths)
    borders = {
        "seq_lengths": lengths,
        "position_ids": [place for length in lengths for place in range(length)],
        "cu_seqlens": [0, *ends.tolist()],
    }
    for name in draw(st.sets(st.sampled_from(sorted(borders)))):
        row[name] = borders[name]
    return {**row, **draw(EXTRA)}


def as_documents(row: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """What a row says, token by token."""
    found: list[tuple[list[int], list[bool]]] = []
    lengths = row.get("seq_lengths")
    for at, token in enumerate(row["input_ids"]):
        begins = at == 0 or row.get("position_ids", [1] * (at + 1))[at] == 0
        begins |= at in row.get("cu_seqlens", [])
        begins |= lengths is not None and at in [sum(lengths[:n]) for n in range(len(lengths))]
        if begins:
            found.append(([], []))
        on = row.get("labels", row["input_ids"])[at] != -100
        on &= all(row[name][at] for name in ("completion_mask", "loss_mask") if name in row)
        found[-1][0].append(token)
        found[-1][1].append(on)
    return found


@given(row=rows())
def test_a_random_row_is_read_whole_or_a_field_is_named(row: dict[str, Any]) -> None:
    expected, refusal, found = as_documents(row), None, None
    with TemporaryDirectory() as folder:
        try:
            found = documents(opened(Path(folder), ByteTokenizer(), row))
        except UnsupportedError as error:
            refusal = str(error)
    unknown = strange({name: row[name] for name in row if name not in READ["tokens"]})
    if unknown:
        assert refusal is not None
        assert all(f"'{name}'" in refusal for name in unknown)
    elif not any(any(on) for _, on in expected):
        assert refusal is not None
        assert "none of its tokens is trained" in refusal
    else:
        assert found == expected


if __name__ == "__main__":
    page = ROOT / "docs/reference/records.md"
    head = page.read_text("utf-8").partition("## `text`")[0]
    page.write_text(head + table(), "utf-8")
