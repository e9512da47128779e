"""From a DataConfig to sequences: the one call that training makes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from farspan.data.config import DataConfig
from farspan.data.packing import Packing, divide
from farspan.data.sources import open_sources
from farspan.data.store import TokenStore, Watch, open_store
from farspan.data.tokenizers import Tokenizer
from farspan.spec import Refused


@dataclass(frozen=True, slots=True)
class Corpus:
    """Packed sequences to train on and, where some are held out, to evaluate on."""

    train: Packing
    held_out: Packing | None
    largest: int  # of all ids: the model needs a vocabulary above it
    longest: int  # tokens of the longest document: positions go no further
    identity: str  # two corpora with one identity give the same sequences


def open_corpus(
    config: DataConfig, tokenizer: Tokenizer, *, context: int, seed: int, watch: Watch
) -> Corpus:
    """Reads, tokenizes (once) and divides the documents.

    `watch(documents, tokens)` is called while tokens are written; it may raise to abandon that.
    Raises Refused when data cannot be read or leaves nothing to train on.
    """
    source, other = open_sources(config)
    cache = Path(config.cache)
    store = open_store(source, tokenizer, cache, watch)
    chosen, held = divide(store.documents(), config.held_out, seed)
    if len(chosen) == 0:
        raise Refused(
            f"data.held_out: {config.held_out} of {store.documents()} document(s) leaves nothing "
            "to train on; give data.held_out_path, or set held_out to 0"
        )
    train = Packing(store, chosen, context, seed)
    held_out, stores = None, [store]
    if other is not None:
        aside = open_store(other, tokenizer, cache, watch)
        _check_disjoint(store, aside)
        held_out = Packing(aside, np.arange(aside.documents()), context, seed)
        stores.append(aside)
    elif len(held) > 0:
        held_out = Packing(store, held, context, seed)
    return Corpus(
        train,
        held_out,
        largest=max(s.largest for s in stores),
        longest=max(int(np.diff(s.starts).max()) for s in stores),
        identity=hashlib.sha256(" ".join(s.digest for s in stores).encode()).hexdigest(),
    )


def _check_disjoint(train: TokenStore, aside: TokenStore) -> None:
    if train.digest == aside.digest:
        raise Refused(
            "data.held_out_path: it holds the very documents that are trained on; give others, "
            "or use held_out to divide these"
        )
