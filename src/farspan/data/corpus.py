"""From a DataConfig to sequences: the one call that training makes."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from farspan.data.config import DataConfig, PackingKind
from farspan.data.formats import UNTRAINED
from farspan.data.packing import (
    BestFitLayout,
    ConcatLayout,
    PackedBatch,
    Packing,
    SequenceLayout,
    split_held_out,
)
from farspan.data.sources import open_form, open_sources
from farspan.data.token_cache import TokenStore, Watch, open_store
from farspan.data.tokenizers import Tokenizer
from farspan.spec import Refused

TRAINED = "data.path"
_MUCH = 0.1  # of a sequence, as padding: worth a word
_PACKED = "2"  # rises whenever the same documents give other sequences


@dataclass(frozen=True, slots=True)
class Corpus:
    """Packed sequences to train on and, where some are held out, to evaluate on."""

    train: Packing
    held_out: Packing | None
    largest: int  # of all ids: the model needs a vocabulary above it
    longest: int  # tokens of the longest document: positions go no further
    identity: str  # two corpora with one identity give the same sequences
    trained: float  # share of all tokens in the data

    def describe(self, context: int) -> list[str]:
        """The lines about it that open a run."""
        kept, held_out = self.train.kept, self.held_out
        sequences = self.train.sequences_per_epoch()
        mostly = f", {self.trained:.1%} of them trained" if self.trained < 1.0 else ""
        lines = [
            f"data: {kept.tokens:,} tokens{mostly}, {sequences:,} sequences of {context:,} an "
            f"epoch; {f'{held_out.kept.tokens:,} tokens' if held_out else 'none'} held out",
            f"packing: {kept.divided:,} of {kept.documents:,} documents divided, "
            f"{kept.padding / (sequences * context):.1%} padding"
            + (f"; {kept.left_out:,} tokens in pieces that train none" if kept.left_out else ""),
        ]
        if kept.tokens < context:
            lines.append(
                "warning: all documents together are shorter than one sequence; give more data or "
                "a shorter context"
            )
        elif kept.padding > _MUCH * sequences * context:
            lines.append(
                "note: few documents fit together; another context, or packing: cut (which divides "
                "them), wastes less"
            )
        return lines


def open_corpus(
    config: DataConfig, tokenizer: Tokenizer, *, context: int, seed: int, watch: Watch
) -> Corpus:
    """Reads, tokenizes (once) and divides the documents.

    `watch(documents, tokens)` is called while tokens are written; it may raise to abandon that.
    Raises Refused when data cannot be read or leaves nothing to train on.
    """
    form = open_form(config, tokenizer)
    source, other = open_sources(config, form)
    cache = Path(config.cache)
    store = open_store(source, form, tokenizer, cache, watch)
    chosen, held = split_held_out(store.documents(), config.held_out, seed)
    if len(chosen) == 0:
        raise Refused(
            f"data.held_out: {config.held_out} of {store.documents()} document(s) leaves nothing "
            "to train on; give data.held_out_path, or set held_out to 0"
        )
    pack = partial(_pack, kind=config.packing, context=context, seed=seed)
    train = pack(store, chosen, TRAINED)
    held_out, stores = None, [store]
    if other is not None:
        aside = open_store(other, form, tokenizer, cache, watch)
        _check_disjoint(store, aside)
        held_out = pack(aside, np.arange(aside.documents()), "data.held_out_path")
        stores.append(aside)
    elif len(held) > 0:
        held_out = pack(store, held, "data.held_out")
    return Corpus(
        train,
        held_out,
        largest=max(s.largest for s in stores),
        longest=max(int(np.diff(s.starts).max()) for s in stores),
        identity=hashlib.sha256(
            " ".join([_PACKED, *(s.digest for s in stores)]).encode()
        ).hexdigest(),
        trained=1.0 if store.trained is None else float(store.trained.mean()),
    )


def _pack(
    store: TokenStore,
    documents: np.ndarray,
    source: str,
    *,
    kind: PackingKind,
    context: int,
    seed: int,
) -> Packing:
    """`source` is the key of the run file that these documents are of."""
    if kind is PackingKind.CUT:
        if store.trained is not None and not store.trained.all():
            raise Refused(
                "data.packing: cut may make sequences without a trained token; set it to "
                "whole, or data.loss to all"
            )
        layout: SequenceLayout = ConcatLayout(np.diff(store.starts), documents, context, seed)
    else:
        layout = BestFitLayout(store.starts, documents, context, seed, store.trained)
        if layout.kept.tokens == 0:
            raise Refused(
                f"{source}: no document has a trained token after its first, so there is nothing "
                f"to {'train' if source == TRAINED else 'evaluate'} on; give longer ones"
            )
    return Packing(store, layout, context)


def _check_disjoint(train: TokenStore, aside: TokenStore) -> None:
    if train.digest == aside.digest:
        raise Refused(
            "data.held_out_path: these are the documents that are trained on; give others, "
            "or use held_out to divide these"
        )


_SHOWN = 160  # characters of a part, its beginning and its end
_PARTS = 40  # of a document


def show_sequence(batch: PackedBatch, tokenizer: Tokenizer) -> Iterator[str]:
    """A line for each document of the first sequence, and one for each run of its tokens that are
    trained or only read. The first token of a document is read, whatever its label."""
    marks = batch.document_ids[0]
    for number, name in enumerate(batch.names[0]):
        own = np.flatnonzero(marks == number)
        ids, trained = batch.input_ids[0, own], batch.labels[0, own] != UNTRAINED
        trained[0] = False
        yield f"{name}: {len(own):,} tokens, {int(trained.sum()):,} trained"
        begins = np.flatnonzero(np.diff(trained, prepend=not trained[0]))
        for begin, end in zip(begins[:_PARTS], [*begins[1:], len(own)], strict=False):
            what = "trained" if trained[begin] else "read"
            yield f"  {what:7} {_short(tokenizer.decode(ids[begin:end]))}"
        if len(begins) > _PARTS:
            yield f"  and {len(begins) - _PARTS:,} more parts"
    rest = len(marks) - batch.tokens
    if rest:
        yield f"padding: {rest:,} tokens"


def _short(text: str) -> str:
    """On one line."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
