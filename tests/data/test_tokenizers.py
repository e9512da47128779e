"""Ids of bytes and of Hugging Face tokenizers, and where a document ends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from farspan.data.tokenizers import HubTokenizer, Written, load_tokenizer, reads_back
from farspan.spec import UnsupportedError

# The last one begins every document of the runs that are tested.
WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, "document": 5}


def save_words(folder: Path, *, begins: bool = False, ends: bool = True) -> Path:
    backend = Backend(WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    if begins:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    end = {"eos_token": "</s>"} if ends else {}
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **end).save_pretrained(
        folder
    )
    return folder


def test_bytes_are_themselves_and_a_document_ends() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "aä€\n\x00"
    (ids,) = tokenizer.encode([text])
    assert bytes(ids[:-1].tolist()).decode() == text
    assert ids[-1] == 256 == tokenizer.size() - 1


@pytest.mark.parametrize(
    ("begins", "ends", "expected"),
    [
        (False, True, [3, 0, 4, 2]),
        (True, True, [1, 3, 0, 4, 2]),
        (False, False, [3, 0, 4]),
    ],
)
def test_a_hub_tokenizer_closes_documents(
    tmp_path: Path, begins: bool, ends: bool, expected: list[int]
) -> None:
    tokenizer = load_tokenizer(str(save_words(tmp_path, begins=begins, ends=ends)))
    rows = tokenizer.encode(["one strange two", "two</s>"])
    assert rows[0].tolist() == expected
    assert rows[1].tolist().count(2) == ends  # not closed twice
    assert all(row.dtype == np.int64 for row in rows)
    assert tokenizer.size() == len(WORDS)


def test_identity_tells_tokenizers_apart(tmp_path: Path) -> None:
    folders = [
        save_words(tmp_path / "a"),
        save_words(tmp_path / "b", begins=True),
        save_words(tmp_path / "c", ends=False),
    ]
    names = [load_tokenizer(str(folder)).identity() for folder in folders]
    assert len({"bytes", *names}) == 4
    assert load_tokenizer(str(folders[0])).identity() == names[0]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"data\.tokenizer: cannot load .*give 'bytes', a folder"
    ):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"^data\.tokenizer: no folder \./nope here"):
        load_tokenizer("./nope")


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = AutoTokenizer.from_pretrained(save_words(tmp_path))
    asked: list[dict[str, Any]] = []

    def load(_: str, **given: Any) -> PreTrainedTokenizerBase:
        asked.append(given)
        return inner

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    load_tokenizer(str(tmp_path))
    load_tokenizer("owner/name", True, "0a1b")
    assert asked == [
        {"trust_remote_code": False},
        {"trust_remote_code": True, "revision": "0a1b", "code_revision": "0a1b"},
    ]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_models_folder_without_tokenizer_is_refused(tmp_path: Path, family: str) -> None:
    """Of some types transformers makes a tokenizer without words, whose text is nothing, or one
    unknown token."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"data\.tokenizer: .*give 'bytes'.* or a name on the hub"
    ):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("told", [True, False])
def test_ends_and_what_is_not_known_are_no_text(tmp_path: Path, told: bool) -> None:
    """Also where only the files inside know which token is the unknown one."""
    backend = Backend(WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    unknown = {"unk_token": "<unk>"} if told else {}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **unknown)
    made.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.signs() == {0, 2}
    (row,) = tokenizer.encode(["neither of these"])
    assert tokenizer.signs().issuperset(row.tolist())
    (row,) = tokenizer.encode(["neither one"])
    assert not tokenizer.signs().issuperset(row.tolist())


def test_a_folder_that_transformers_misreads_does_not_read_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_words(tmp_path / "a")))
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path / "b")
    assert reads_back(tokenizer, tmp_path / "a")
    assert not reads_back(tokenizer, tmp_path / "b")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bytes_are_saved_as_a_tokenizer(tmp_path: Path, family: str) -> None:
    """That transformers finds in a model's folder, whatever class it insists on."""
    own = load_tokenizer("bytes")
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    assert not reads_back(own, tmp_path)
    own.save(tmp_path)
    assert reads_back(own, tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(1, 384))) + " \n 漢字 <end> 🙂"
    ids = own.encode([text])[0].tolist()
    assert [*found(text)["input_ids"], found.eos_token_id] == ids
    assert found.decode(ids[:-1], clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("trim", [True, False])
def test_white_space_is_of_the_side_that_it_is_on(trim: bool) -> None:
    """Byte-level tokenizers may leave it out of a token's offsets: of a lone space nothing is left.
    A character of several tokens has one offset for all."""
    backend = Backend(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.post_processor = ByteLevelProcessor(trim_offsets=trim)
    trainer = BpeTrainer(initial_alphabet=ByteLevel.alphabet(), special_tokens=["<e>"])
    backend.train_from_iterator(["how are you fine "] * 9, trainer)
    tokenizer = HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>"))
    parts = ("<e>how  ", "  fine 🙂 \n ", "<e> are ", " 🙂", "<e>\n")
    ends = np.cumsum([len(part) for part in parts]).tolist()
    document = Written("".join(parts), ((ends[0], ends[1]), (ends[2], ends[3])), bare=True)
    (found,) = tokenizer.mark([document])
    begins = np.flatnonzero(np.diff(found.trained, prepend=False, append=False)).reshape(-1, 2)
    said = [tokenizer.decode(found.ids[begin:end]) for begin, end in begins]
    assert said == [parts[1], parts[3]]
