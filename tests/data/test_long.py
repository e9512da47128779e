"""Texts that are never whole in memory become the same tokens."""

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from farspan.data import sources, token_cache, tokenizers
from farspan.data.config import DataConfig
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.token_cache import unwatched
from farspan.data.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer
from farspan.spec import UnsupportedError
from tests.grids import part_of

WORDS = [
    "over",
    "  lazy",
    "dogs,",
    "12345",
    "naïve",
    "🦊🦊",
    "\n\n",
    "\t",
    "don't",
    "x_1!=y",
    "漢字 ",
]
TEXT = " ".join(WORDS[int(n)] for n in np.random.default_rng(0).integers(len(WORDS), size=4000))


def merged(
    pre: pre_tokenizers.PreTokenizer | None, normal: normalizers.Normalizer | None
) -> Backend:
    backend = Backend(models.BPE())
    if pre is not None:
        backend.pre_tokenizer = pre
    if normal is not None:
        backend.normalizer = normal
    alphabet = pre_tokenizers.ByteLevel.alphabet() if pre is not None else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([TEXT], trainer)
    return backend


def hub(backend: Backend) -> HubTokenizer:
    ids = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return HubTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    )


def of_bytes() -> HubTokenizer:
    """As GPT-2 and those after it have it: words, each with the space before it."""
    backend = merged(pre_tokenizers.ByteLevel(add_prefix_space=False), None)
    backend.decoder = decoders.ByteLevel()
    return hub(backend)


def of_sentences() -> HubTokenizer:
    """As Llama 2 has it: a sign before each text, and merges across words."""
    normal = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    return hub(merged(None, normal))


@pytest.mark.parametrize(
    ("make", "several"),
    [(ByteTokenizer, True), (of_bytes, True), (of_sentences, False)],
    ids=["bytes", "words", "sentences"],
)
@pytest.mark.parametrize("size", [64, 1000, 7777])
def test_parts_have_the_ids_of_the_whole(
    make: Callable[[], Tokenizer], several: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_NEAR", 40)
    tokenizer = make()
    for text in (TEXT, "<s>" + TEXT, TEXT + "</s>", "a" * 9999, " " * 9999 + "b", TEXT * 2):
        parts = (text[i : i + size] for i in range(0, len(text), size))
        found = list(tokenizer.encode_parts(parts))
        assert np.array_equal(np.concatenate(found), tokenizer.encode([text])[0])
        assert len(found) > 1 or not several or text.strip(" a") != text


def corpus(path: Path, cache: str, tokenizer: Tokenizer) -> Corpus:
    config = DataConfig(path=str(path), cache=str(path.parent / cache))
    return open_corpus(config, tokenizer, context=64, seed=0, watch=unwatched)


@pytest.mark.parametrize("make", [ByteTokenizer, of_bytes], ids=["bytes", "words"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_file_is_the_same_in_parts(
    make: Callable[[], Tokenizer], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store, with what is counted of documents and their ends; and a mark of the encoding."""
    path, text = tmp_path / f"a.{suffix}", TEXT + "</s> x"
    content = text if suffix == "txt" else f'{{"text": "{TEXT.replace(chr(10), chr(32))}"}}'
    path.write_text("\ufeff" + content.replace("\t", " "))
    whole = corpus(path, "whole", make()).parts[0].stores[0]
    monkeypatch.setattr(tokenizers, "_NEAR", 40)
    for module in (sources, token_cache):
        monkeypatch.setattr(module, "PART", 997)  # bytes: it cuts characters
    parts = corpus(path, "parts", make()).parts[0].stores[0]
    assert (parts.digest, parts.turns, parts.names) == (whole.digest, whole.turns, whole.names)
    assert np.array_equal(parts.tokens, whole.tokens)


@pytest.mark.parametrize(
    ("end", "message"),
    [(b"\n\xff", "line 32 is not valid UTF-8"), (b"\xe2\x82", "line 31 is not valid UTF-8")],
)
def test_a_byte_that_is_none_of_utf8_is_named_by_its_line(
    tmp_path: Path, end: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART", 97)
    path = tmp_path / "a.txt"
    path.write_bytes("ä line\n".encode() * 30 + end)
    with pytest.raises(UnsupportedError, match=message):
        corpus(path, "cache", ByteTokenizer())


def test_a_long_blank_text_is_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART", 97)
    (tmp_path / "a.txt").write_text(" \n" * 999)
    (tmp_path / "b.txt").write_text(" \n" * 999 + "b")
    store = corpus(tmp_path / "*.txt", "cache", ByteTokenizer()).parts[0].stores[0]
    assert [store.name(d) for d in range(store.documents())] == [str(tmp_path / "b.txt")]


def peak(work: Callable[[], object]) -> int:
    """The most bytes that a child of this process holds while it works, above those before."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Path("/proc/self/clear_refs").write_text("5", "ascii")
            before = resident("VmRSS:")
            work()
            os.write(here, str(resident("VmHWM:") - before).encode())
        finally:
            os._exit(0)
    os.close(here)
    with os.fdopen(there) as words:
        found = words.read()
    os.waitpid(child, 0)
    return int(found)


def resident(name: str) -> int:
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition(name)[2].split()[0]) << 10


FOXES = "The fox jumps over 3 dogs.\n", "The 🦊 jumps over 3 dogs.\n"


@pytest.mark.parametrize("line", part_of(FOXES, FOXES[1]))
def test_a_text_takes_less_memory_than_four_times_its_bytes(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.txt"
    data = line.encode() * 1000
    with path.open("wb") as file:
        for _ in range((32 << 20) // len(data)):
            file.write(data)
    assert peak(partial(corpus, path, "cache", ByteTokenizer())) < 2 * path.stat().st_size


def test_progress_says_which_share_is_read(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x" * 600_000)
    seen: list[tuple[int, float]] = []
    config = DataConfig(path=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"))
    open_corpus(
        config, ByteTokenizer(), context=64, seed=0,
        watch=lambda documents, _, read: seen.append((documents, read.fraction())),
    )  # fmt: skip
    assert seen[-1] == (3, 1.0)
    assert all(one <= other for one, other in pairwise(share for _, share in seen))
    assert 0.0 < seen[0][1] < 1.0
