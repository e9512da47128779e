"""A sequence as it is trained, in words: which documents, and which of their tokens."""

from collections.abc import Iterator

import numpy as np

from farspan.data.forms import UNTRAINED
from farspan.data.packing import Batch
from farspan.data.tokenizers import Tokenizer

_SHOWN = 160  # characters of a part, its beginning and its end
_PARTS = 40  # of a document


def show_sequence(batch: Batch, tokenizer: Tokenizer) -> Iterator[str]:
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
