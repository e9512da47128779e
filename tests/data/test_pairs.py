"""Pairs of answers: what is trained of them, and how they are packed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farspan.data.config import DataConfig
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.formats import UNTRAINED
from farspan.data.packing import PackedBatch, mismatched
from farspan.data.tokenizers import ByteTokenizer, load_tokenizer
from farspan.spec import UnsupportedError
from farspan.train.yaml_config import build
from tests.data.characters import character_tokenizer
from tests.data.stores import open_records
from tests.data.test_chat import MARKED, NO_END, TURNS

PAIRS = [
    {"prompt": f"q{n}: ", "chosen": "yes" * (1 + n % 3), "rejected": "no" * (1 + n % 4)}
    for n in range(9)
]


def corpus(root: Path, records: list[Any], **own: Any) -> Corpus:
    return open_records(root, *records, **{"context": 64, "format": "preference", **own})


def texts(batch: PackedBatch, row: int = 0) -> list[tuple[str, str]]:
    """Of each document that is no padding its text, and what of it is trained."""
    found = []
    for number in range(len(batch.names[row])):
        own = batch.document_ids[row] == number
        ids, labels = batch.input_ids[row, own], batch.labels[row, own]
        decode = ByteTokenizer().decode
        found.append((decode(ids), decode(ids[labels != UNTRAINED])))
    return found


def test_a_pair_is_two_documents_of_one_sequence(tmp_path: Path) -> None:
    found = corpus(tmp_path, PAIRS)
    seen: list[int] = []
    for index in range(found.train.kept.sequences):
        batch = found.train.batch([index])
        (pairs,), (names,), documents = batch.pairs, batch.names, texts(batch)
        assert len(documents) == 2 * len(pairs) == len(names)
        for place, number in enumerate(pairs):
            for side, text, name in zip(
                ("chosen", "rejected"), documents[2 * place :], names[2 * place :], strict=False
            ):
                answer = f"{PAIRS[number][side]}<end>"
                assert text == (PAIRS[number]["prompt"] + answer, answer)
                assert name == f"{tmp_path / 'data.jsonl'}:{number + 1} {side}"
        seen += pairs
    assert sorted(seen) == list(range(9))
    assert found.train.kept.sequences < 9  # several pairs a sequence
    assert found.longest == 14  # positions begin anew in the second answer
    assert found.paired


def test_held_out_pairs_are_whole(tmp_path: Path) -> None:
    found = corpus(tmp_path, PAIRS, held_out=0.3)
    assert found.held_out is not None
    packings = found.train, found.held_out
    trained, aside = (
        {p for i in range(own.kept.sequences) for p in own.once(i).pairs[0]} for own in packings
    )
    assert len(aside) == 3
    assert trained | aside == set(range(9))
    assert not trained & aside


def test_pairs_of_several_sources_have_numbers_of_their_own(tmp_path: Path) -> None:
    for name in "ab":
        lines = [json.dumps({**p, "prompt": f"{name}{n}"}) for n, p in enumerate(PAIRS)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = tuple(
        {"source": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "format": "preference"}
        for name in "ab"
    )
    config = build(DataConfig, {"sources": list(sources), "cache": str(tmp_path / "cache")})
    found = open_corpus(config, ByteTokenizer(), context=64, seed=0, watch=lambda *_: None)
    for index in range(found.train.kept.sequences):
        batch = found.train.batch([index])
        for number, (text, _) in zip(batch.pairs[0], texts(batch)[::2], strict=True):
            assert text.startswith(f"{'ab'[number // 9]}{number % 9}")


def characters(ids: np.ndarray) -> str:
    return "".join(character_tokenizer().convert_ids_to_tokens(ids.tolist()))


CHOSEN = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]
REJECTED = [CHOSEN[0], {"role": "assistant", "content": "no!"}]
BEFORE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize("template", [TURNS, MARKED, NO_END])
@pytest.mark.parametrize("apart", [True, False])
def test_messages_are_written_by_the_template(tmp_path: Path, template: str, apart: bool) -> None:
    """The prompt in a field of its own, or in both answers; earlier turns are not trained."""
    character_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    record = {"chosen": BEFORE + CHOSEN, "rejected": BEFORE + REJECTED, "prompt": "so?"}
    if apart:
        record = {"prompt": BEFORE + CHOSEN[:1], "chosen": CHOSEN[1:], "rejected": REJECTED[1:]}
    batch = corpus(tmp_path, [record], tokenizer=tokenizer, context=200).train.once(0)
    end = "\n" if template is NO_END else "$"
    for number, answer in enumerate(("yes", "no!")):
        own = batch.document_ids[0] == number
        ids, labels = batch.input_ids[0, own], batch.labels[0, own]
        text = characters(ids)
        assert text.replace("$", "").startswith("[user]hi\n[assistant]ho\n[user]so?\n[assistant]")
        assert characters(ids[labels != UNTRAINED]) == answer + end


@pytest.mark.parametrize(
    ("record", "own", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, {}, "has no field 'rejected' .*; add it, or"),
        ({"chosen": "b", "rejected": "c"}, {}, "are texts, but there is no field 'prompt'"),
        (
            {"question": "a", "chosen": "b", "rejected": "c"},
            {},
            r"there is no field 'prompt' \(only: question, chosen, rejected\); give the text",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": CHOSEN},
            {},
            "one of chosen and rejected is a text",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, {}, "both answers are the same"),
        ({"prompt": "a", "chosen": CHOSEN, "rejected": REJECTED}, {}, "has no chat template"),
        ({"prompt": "", "chosen": "", "rejected": "c"}, {}, "an answer has no token to train"),
        (PAIRS[0], {"packing": "cut"}, "data.packing: cut would divide pairs"),
        (PAIRS[0], {"loss": "all"}, "trains only answers"),
        (PAIRS[0], {"context": 14}, "data.jsonl:1, has 15 tokens; raise context"),
    ],
)
def test_what_is_no_pair_is_refused(
    tmp_path: Path, record: dict[str, Any], own: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        corpus(tmp_path, [record], **own)


def test_an_answer_without_a_message_of_the_model_is_refused(tmp_path: Path) -> None:
    character_tokenizer(TURNS).save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    record = {"chosen": CHOSEN, "rejected": CHOSEN[:1]}
    with pytest.raises(UnsupportedError, match="'rejected' has no message of the assistant"):
        corpus(tmp_path, [record], tokenizer=tokenizer)


ANSWERS = [
    {"prompt": f"q{n}: ", "completion": "yes" * (1 + n % 4), "label": n % 2 == 0} for n in range(9)
]


def test_labelled_answers_keep_their_labels(tmp_path: Path) -> None:
    """Without a format the label tells them from completions, whose prompts nothing rates."""
    found = open_records(tmp_path, *ANSWERS, context=64)
    assert found.parts[0].opened.config.format == "unpaired"
    assert "answers: 9, 5 of them desirable" in found.describe(64)
    seen = []
    for index in range(found.train.kept.sequences):
        batch = found.train.batch([index])
        for answer, (text, trained) in zip(batch.answers[0], texts(batch), strict=True):
            own = ANSWERS[answer.number]
            assert trained == f"{own['completion']}<end>"
            assert text == f"{own['prompt']}{trained}"
            assert batch.labels[0, answer.begin - 1] == UNTRAINED != batch.labels[0, answer.begin]
            assert answer.desirable is own["label"]
            seen.append(answer.number)
    assert sorted(seen) == list(range(9))
    assert found.longest == 4 + 13  # any answer may follow any prompt


def test_mismatched_answers_follow_other_prompts(tmp_path: Path) -> None:
    """The first is cut where its sequence would become longer."""
    found = open_records(tmp_path, *ANSWERS, context=64).train
    batch, before = found.batch([0, 1]), [found.batch([1]), found.batch([0])]
    moved = mismatched(batch, before)
    assert moved.input_ids.shape == batch.input_ids.shape == (2, 64)
    lengths = [0, 0]
    for row, one in enumerate(before):
        answers = [texts(one)[-1][1], *(trained for _, trained in texts(batch, row)[:-1])]
        found_now = texts(moved, row)
        assert len(found_now) == len(answers) == len(moved.answers[row])
        for place, (text, trained) in enumerate(found_now):
            prompt = str(ANSWERS[batch.answers[row][place].number]["prompt"])
            assert text == f"{prompt}{trained}"
            assert answers[place].startswith(trained)
            lengths[row] += len(prompt) + len(trained.replace("<end>", "$"))
            assert place == 0 or trained == answers[place]
        assert moved.lengths[row] == lengths[row]
        assert (moved.labels[row, lengths[row] :] == UNTRAINED).all()
        rest = 64 - len("".join(t.replace("<end>", "$") for t, _ in found_now[1:]))
        whole = len(found_now[0][0].replace("<end>", "$")) == rest or found_now[0][1] == answers[0]
        assert whole, "it is whole, or fills its sequence"


@pytest.mark.parametrize("label", ["true", 2, None])
def test_labels_are_true_or_false(tmp_path: Path, label: Any) -> None:
    with pytest.raises(UnsupportedError, match="field 'label' is"):
        open_records(tmp_path, {**ANSWERS[0], "label": label}, format="unpaired")
