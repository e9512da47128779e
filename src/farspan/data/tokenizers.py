"""Tokenizers: bytes, or any Hugging Face tokenizer."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from farspan.durable import read_json, refuse_pipes
from farspan.formatting import write_bytes, write_seconds
from farspan.profile.catalog import pinned, read_config, refuse_absent
from farspan.spec import UnsupportedError

TEXT = "text"  # field of a document that has only text


@dataclass(frozen=True, slots=True)
class Document:
    """A record's fields, and where the record was read. `line` counts from 1; 0: the whole file."""

    file: int  # index into the source's `names`
    line: int
    place: str  # place of the record, in words
    fields: Mapping[str, Any]


class Source(Protocol):
    """Documents in a fixed order, which are read one by one."""

    def names(self) -> tuple[str, ...]:
        """Return the names of the files, or of the data set, that contain the documents."""

    def listing(self) -> list[list[object]]:
        """Return JSON values for the cache's key: they change if the documents may have changed."""

    def documents(self) -> Iterator[Document]: ...

    def how_far(self) -> "HowFar": ...


@dataclass(frozen=True, slots=True)
class HowFar:
    """Progress of reading a source."""

    done: int
    total: int
    rows: bool = False  # count rows; otherwise bytes on disk
    seconds: float = 0.0  # since reading began

    def fraction(self) -> float:
        """Return the share of the source that has been read, from 0 to 1."""
        return min(1.0, self.done / max(1, self.total))

    def __str__(self) -> str:
        part = f"{self.done:,} of {self.total:,} rows"
        if not self.rows:
            part = f"{write_bytes(self.done)} of {write_bytes(self.total)}"
        left = self.seconds * (1 / self.fraction() - 1) if self.done else 0.0
        return f"{part}, {write_seconds(left)} left" if left else part


@dataclass(frozen=True, slots=True)
class Written:
    """A document as text. `trained` are the spans of characters to train; None: all."""

    text: str
    trained: tuple[tuple[int, int], ...] | None = None
    bare: bool = False  # used as it is: the tokenizer adds no special tokens and no end
    holds_sign: bool = False  # a message's content has a sign that ends turns
    desirable: bool | None = None  # label of a single answer; None: it has none

    def size(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as token ids, [tokens] int64, and flags of trained tokens, [tokens] bool."""

    ids: np.ndarray
    trained: np.ndarray

    def size(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class LongText:
    """A text too long to hold in memory, which is read in parts and trained whole."""

    parts: Callable[[], Iterator[str]]  # read anew each time

    bare: ClassVar[bool] = False
    holds_sign: ClassVar[bool] = False

    def size(self) -> int:
        return PART


PART = 1 << 20  # approximate characters of a long text that become tokens at once
# A pair of answers is two documents; a packed row of tokens has one or more.
Content = LongText | Written | tuple[Written, Written] | tuple[Encoded, ...] | None


class Form(Protocol):
    """Interface of a form: the reader of records of one format. Defaults suit formats without
    messages and with fixed field names."""

    any_ids: ClassVar[bool] = False  # ids may be beyond the tokenizer's vocabulary

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields that every record must have."""

    @property
    def chats(self) -> tuple[str, ...]:
        """Fields that may hold lists of messages."""
        return ()

    @property
    def masked(self) -> bool:
        """True if some tokens may not be trained."""

    def key(self, column: str) -> str:  # noqa: ARG002
        """Return the run file's key that sets the name of this field, for errors."""
        return "data.format"

    def listing(self) -> list[object]:
        """Return JSON values for the cache's key: they change if records may be read otherwise."""

    def reads(self, document: Document) -> Collection[str]:
        """Return the fields that the form uses of this record, if the record has them."""

    def reads_key(self, key: str) -> bool:  # noqa: ARG002
        """Return whether the form uses this key of messages."""
        return False

    def read(self, document: Document) -> Content:
        """Return a record as text or ids to train on: None if it is blank, two documents for a pair
        of answers. Raises UnsupportedError with the record's place and the field."""


_WORD_ENDS = re.compile(r"(?<=\S)(?=\s)")
_NEAR = 1 << 12  # characters on each side of a cut, for comparing ids
_TRIED = 8  # places to try for a cut
BYTES = "bytes"
END_OF_DOCUMENT = 256  # the id after the 256 bytes
_END = "<end>"  # its text when tokens are shown


class Tokenizer(Protocol):
    """Interface of tokenizers, which put an end token after each document if they have one."""

    def size(self) -> int:
        """Return a number above all token ids that the tokenizer gives."""

    def identity(self) -> str:
        """Return a text for the cache's key: it differs if the same text may get other ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each document's text, int64."""

    def encode_parts(self, parts: Iterator[str]) -> Iterator[np.ndarray]:
        """Yield the ids, int64, that `encode` would give for the parts joined to one text."""

    def mark(self, documents: Sequence[Written]) -> list[Encoded]:
        """Return each document's ids, with a flag for each id that contains a trained character. A
        token that only ends a document is trained."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids. Special tokens have a text such as `<end>`."""

    def signs(self) -> frozenset[int]:
        """Return the ids of special tokens: for beginnings, ends and unknown text."""

    def ends(self) -> frozenset[int]:
        """Return the ids after which generation stops."""

    def save(self, folder: Path) -> None:
        """Write the files from which the tokenizer can be loaded, if there are any."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: 256 ids, and one more that ends a document."""

    def size(self) -> int:
        return END_OF_DOCUMENT + 1

    def identity(self) -> str:
        return BYTES

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def encode_parts(self, parts: Iterator[str]) -> Iterator[np.ndarray]:
        yield from (self._encode(part)[:-1] for part in parts)
        yield self._encode("")

    def mark(self, documents: Sequence[Written]) -> list[Encoded]:
        return [self._mark(document) for document in documents]

    def decode(self, ids: np.ndarray) -> str:
        pieces = np.split(ids, np.flatnonzero(ids == END_OF_DOCUMENT))
        texts = (bytes(p[p < END_OF_DOCUMENT].tolist()).decode(errors="replace") for p in pieces)
        return _END.join(texts)

    def signs(self) -> frozenset[int]:
        return frozenset({END_OF_DOCUMENT})

    def ends(self) -> frozenset[int]:
        return self.signs()

    def _mark(self, document: Written) -> Encoded:
        ids = self._encode(document.text)
        trained = np.ones(len(ids), dtype=bool)
        if document.trained is not None:
            trained[:-1] = False
            begins = np.flatnonzero((ids & 0xC0) != 0x80)  # of characters, and of the end
            for start, stop in document.trained:
                trained[begins[start] : begins[stop]] = True
        return Encoded(ids, trained)

    def _encode(self, text: str) -> np.ndarray:
        data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        ids = np.full(len(data) + 1, END_OF_DOCUMENT, dtype=np.int64)
        ids[:-1] = data
        return ids

    def save(self, folder: Path) -> None:
        # The signs that byte-level tokenizers use for bytes: printable bytes are their own signs,
        # the others follow after them.
        signs = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
        others = [byte for byte in range(END_OF_DOCUMENT) if byte not in signs]
        signs |= {byte: chr(END_OF_DOCUMENT + place) for place, byte in enumerate(others)}
        ids = {sign: byte for byte, sign in signs.items()}
        backend = Backend(models.BPE(vocab=ids, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=_END, split_special_tokens=True
        )
        made.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class HubTokenizer:
    """A Hugging Face tokenizer, with its special tokens, and its end of sequence after each
    document. `others`: further ids that stop generation, from the `generation_config`."""

    inner: PreTrainedTokenizerBase
    others: frozenset[int] = frozenset()

    def size(self) -> int:
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def identity(self) -> str:
        # Rust tokenizers serialise everything they do; the others give at least their vocabulary.
        backend = getattr(self.inner, "backend_tokenizer", None)
        words = backend.to_str() if backend else json.dumps(sorted(self.inner.get_vocab().items()))
        digest = hashlib.sha256(words.encode("utf-8")).hexdigest()
        return f"{type(self.inner).__name__}:{self.inner.eos_token_id}:{digest}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        rows = self.inner(list(texts), verbose=False, return_attention_mask=False)["input_ids"]
        return [self._close(row[self._doubled(row) :]) for row in rows]

    def encode_parts(self, parts: Iterator[str]) -> Iterator[np.ndarray]:
        whole, bare = self.inner("a", verbose=False)["input_ids"], self._bare("a")
        place = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
        first, last, rest = whole[:place], whole[place + len(bare) :], ""
        for part in parts:
            rest += part
            cut = self._cut(rest)
            if cut:
                row = first + self._bare(rest[:cut])
                yield np.asarray(row[self._doubled(row) if first else 0 :], dtype=np.int64)
                first, rest = [], rest[cut:]
        row = first + self._bare(rest) + last
        yield self._close(row[self._doubled(row) if first else 0 :])

    def _bare(self, text: str) -> list[int]:
        ids: list[int] = self.inner(
            text, verbose=False, add_special_tokens=False, return_attention_mask=False
        )["input_ids"]
        return ids

    def _cut(self, text: str) -> int:
        """Return where, near its end, a text can be cut without changing ids; 0 if nowhere.

        Most tokenizers have separate ids for words and lines. Those that put a sign before each
        text, or merge across words, give a part other ids, which the comparison detects.
        """
        places = [m.start() for m in _WORD_ENDS.finditer(text, len(text) - 2 * _NEAR)]
        for place in reversed([p for p in places if p < len(text) - _NEAR][-_TRIED:]):
            left, right = text[max(0, place - _NEAR) : place], text[place : place + _NEAR]
            if self._bare(left) + self._bare(right) == self._bare(left + right):
                return place
        return 0

    def mark(self, documents: Sequence[Written]) -> list[Encoded]:
        bare, offsets = documents[0].bare, documents[0].trained is not None
        encoded = self.inner(
            [document.text for document in documents],
            verbose=False,
            add_special_tokens=not bare,
            return_attention_mask=False,
            return_offsets_mapping=offsets,
        )
        rows = encoded["input_ids"]
        spans = encoded["offset_mapping"] if offsets else [[]] * len(rows)
        return [self._mark(*given) for given in zip(documents, rows, spans, strict=True)]

    def decode(self, ids: np.ndarray) -> str:
        text = self.inner.decode(
            ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def signs(self) -> frozenset[int]:
        signs = {n for n, token in self.inner.added_tokens_decoder.items() if token.special}
        signs |= set(self.inner.all_special_ids)
        # A tokenizer may have an unknown token without declaring it.
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is not None and getattr(backend.model, "unk_token", None) is not None:
            signs.add(backend.token_to_id(backend.model.unk_token))
        return frozenset(signs - {None})

    def ends(self) -> frozenset[int]:
        return self.others | ({self.inner.eos_token_id} - {None})

    def stops(self) -> tuple[str, ...]:
        """Return the texts of the tokens after which generation stops."""
        texts = {self.decode(np.asarray([number])) for number in self.ends()}
        return tuple(sorted(text for text in texts if text.strip()))

    def marks(self) -> tuple[str, ...]:
        """Return special tokens that may stand between turns and do not stop generation."""
        inner = self.inner
        added = {t.content for t in inner.added_tokens_decoder.values() if t.special}
        others = {inner.bos_token, inner.unk_token, inner.pad_token, inner.mask_token}
        others |= {inner.cls_token, inner.sep_token, *self.stops()}
        return tuple(sorted({*added, *inner.all_special_tokens} - others))

    def _doubled(self, row: list[int]) -> int:
        """Return 1 if a text begins with the token that the tokenizer adds before it, else 0."""
        begin = self.inner.bos_token_id
        return int(begin is not None and row[:2] == [begin, begin] and self._begins() == begin)

    def _begins(self) -> int | None:
        """Return the id of the token that the tokenizer puts before each text; None if none."""
        alone: list[int] = self.inner("", verbose=False)["input_ids"]
        return alone[0] if alone else None

    def _close(self, row: list[int]) -> np.ndarray:
        end = self.inner.eos_token_id
        open_ended = end is not None and (not row or row[-1] != end)
        return np.asarray([*row, end] if open_ended else row, dtype=np.int64)

    def _mark(self, document: Written, row: list[int], offsets: list[tuple[int, int]]) -> Encoded:
        doubled = 0 if document.bare else self._doubled(row)
        row, offsets = row[doubled:], offsets[doubled:]
        ids = np.asarray(row, dtype=np.int64) if document.bare else self._close(row)
        if document.trained is None:
            return Encoded(ids, np.ones(len(ids), dtype=bool))
        trained = np.zeros(len(ids), dtype=bool)
        begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        # Byte-level tokenizers with trim_offsets leave white space out of a token's offsets, even
        # if it is the whole token. So a token begins at the end of the one before.
        before = np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))
        begins = np.minimum(begins, before)
        for start, stop in document.trained:
            trained[: len(row)] |= (ends > start) & (begins < stop)
        if not document.bare:
            trained[-1:] |= ids[-1:] == self.inner.eos_token_id
        return Encoded(ids, trained)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(folder)


def stop_ids(model: str, revision: str | None = None) -> frozenset[int]:
    """Return the ids that stop generation, from a model's `generation_config.json` or, without that
    file, `config.json`.

    Args:
        model: A folder, or a name on the hub.
        revision: A commit or branch of a name on the hub.
    """
    place = Path(model).expanduser()
    folder = str(place) if place.exists() else model
    for name in ("generation_config.json", "config.json"):
        try:
            path = cached_file(folder, name, revision=revision)
        except OSError:
            continue  # not there, or no network
        config = (read_json(Path(path), finite=False) if path else None) or {}
        for part in (config, config.get("text_config")):
            ends = part.get("eos_token_id") if isinstance(part, dict) else None
            if ends is not None:
                ids = ends if isinstance(ends, list) else [ends]
                return frozenset(number for number in ids if type(number) is int)
    return frozenset()


# Letters, digits, white space, signs and scripts, which tokenizers treat differently.
_PROBE = "The 2nd  word,\n\tthen: naïve café №7 (x_1 != y) 漢字 🙂"


def reads_back(tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether transformers can load `tokenizer` from the model's folder in which it was
    saved: the loaded tokenizer must give a sample text the same ids."""
    # For some model types transformers ignores the tokenizer class that the files name.
    try:
        loaded = load_tokenizer(str(folder))
    except UnsupportedError:
        return False
    ours, theirs = (t.encode([_PROBE])[0] for t in (tokenizer, loaded))
    return np.array_equal(ours, theirs)


LARGEST_FILE = 2**27  # most bytes of a tokenizer; one of 262,144 words has a quarter
_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja")


def _refuse_huge_files(folder: Path) -> None:
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.suffix in _FILES and file.is_file() and file.stat().st_size > LARGEST_FILE:
            raise UnsupportedError(
                f"data.tokenizer: {file} has {file.stat().st_size:,} bytes, expected at most "
                f"{LARGEST_FILE:,}; give another tokenizer"
            )
    # transformers also reads the model's configuration, for the class of its tokenizer.
    if (folder / "config.json").is_file():
        read_config(folder / "config.json", "data.tokenizer")


def load_tokenizer(
    name: str, trust_remote_code: bool = False, revision: str | None = None
) -> Tokenizer:
    """Load a tokenizer: `bytes`, a local folder, or a hub name at `revision` (a commit or branch).
    `trust_remote_code` runs Python code that comes with it. Raises UnsupportedError with the
    library's message, or if the vocabulary is empty except for special tokens."""
    if name == BYTES:
        return ByteTokenizer()
    place = Path(name).expanduser()
    refuse_absent("data.tokenizer", name)
    refuse_pipes(*place.glob("*"))
    _refuse_huge_files(place)
    try:
        inner = AutoTokenizer.from_pretrained(
            str(place) if place.exists() else name,
            trust_remote_code=trust_remote_code,
            **pinned(revision),
        )
    except Exception as error:  # OSError, ValueError, ImportError: each names the missing part
        raise UnsupportedError(
            f"data.tokenizer: cannot load {name!r}: {' '.join(str(error).split())}; "
            "give 'bytes', a folder with tokenizer files or a name on the hub"
        ) from error
    tokenizer = HubTokenizer(inner)
    # For a model's folder without tokenizer files, transformers 5 makes a tokenizer with only
    # special tokens (one for types qwen2, qwen3 and gpt2, five for gemma2), and raises no error.
    if tokenizer.signs().issuperset(inner.get_vocab().values()):
        raise UnsupportedError(
            f"data.tokenizer: {name!r} has no tokenizer files, or files with an empty vocabulary; "
            "give 'bytes' for a model that was trained on bytes, otherwise a folder with tokenizer "
            "files or a name on the hub"
        )
    return tokenizer
