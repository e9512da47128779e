"""Stores of which every token says where it is from, and sequences of records."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.token_cache import TokenStore, unwatched
from farspan.data.tokenizers import ByteTokenizer, Tokenizer


def open_records(
    folder: Path,
    *records: object,
    tokenizer: Tokenizer | None = None,
    context: int = 200,
    **fields: Any,
) -> Corpus:
    """The sequences of records, of bytes without a tokenizer; the folder has their file."""
    path = folder / "data.jsonl"
    text = "".join(json.dumps(record) + "\n" for record in records)
    if not path.exists() or path.read_text() != text:  # or its cache would be another's
        path.write_text(text)
    config = DataConfig(
        source=SourceKind.JSONL, path=str(path), cache=str(folder / "cache"), **fields
    )
    use = tokenizer or ByteTokenizer()
    return open_corpus(config, use, context=context, seed=0, watch=unwatched)


def make_store(lengths: list[int], trained: list[bool] | None = None) -> TokenStore:
    """Token values are unique: document d holds 1000 * d + position."""
    tokens = np.concatenate([1000 * d + np.arange(n) for d, n in enumerate(lengths)])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    origins = np.stack([np.zeros(len(lengths)), 1 + np.arange(len(lengths))], axis=1)
    mask = None if trained is None else np.array(trained)
    return TokenStore(
        tokens.astype(np.uint32), starts, origins.astype(np.int64), ("f",), 9**9, "digest", mask
    )


def check_documents(ids: np.ndarray, marks: np.ndarray, names: tuple[str, ...]) -> None:
    """Within a piece ids count up within one document; pieces are numbered from 0."""
    assert marks[0] == 0
    assert marks[-1] == len(names) - 1
    for previous, here, mark_before, mark in zip(ids, ids[1:], marks, marks[1:], strict=False):
        if mark == mark_before:
            assert here == previous + 1
        else:
            assert mark == mark_before + 1
    for number, name in enumerate(names):
        assert name == f"f:{ids[marks == number][0] // 1000 + 1}"
