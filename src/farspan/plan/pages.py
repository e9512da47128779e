"""Page-sparse attention in words: as a person writes it, and as it is told."""

import re
from dataclasses import fields

from farspan.plan.units import read_tokens, write_tokens
from farspan.spec import Refused, Sparse

ON, OFF = "on", "off"
FIELDS = tuple(field.name for field in fields(Sparse))
EXAMPLE = "page=64,budget=2K,recent=1K,sink_pages=1"
SEES_ALL = "which hides nothing at this context and equals dense"


def read_sparse(text: str) -> Sparse | None:
    """`on` (the defaults), `off` (None), or some fields such as `page=64,budget=2K`, the others
    being the defaults. Raises Refused naming the field."""
    word = text.strip().lower()
    if word in (ON, OFF):
        return Sparse() if word == ON else None
    given: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in FIELDS:
            raise Refused(
                f"sparse: expected {ON}, {OFF} or fields such as {EXAMPLE}, got {part.strip()!r}"
            )
        if name in given:
            raise Refused(f"sparse.{name}: given twice; keep one")
        given[name] = read_pages(value, f"sparse.{name}")
    try:
        return Sparse(**given)
    except Refused as error:
        raise Refused(f"sparse.{error}") from error


def sparse_words(sparse: Sparse, *, hides: bool = True) -> str:
    """What a query sees, on one line; `hides`: unless it is certain that it sees everything."""
    what = "approximate" if hides else SEES_ALL
    sinks = f"{sparse.sink_pages} first page{'s' if sparse.sink_pages != 1 else ''}"
    return (
        f"sparse attention, {what}: of earlier tokens {write_tokens(sparse.budget)} in chosen "
        f"pages of {write_tokens(sparse.page)}, {write_tokens(sparse.recent)} recent, {sinks}"
    )


def read_pages(value: str, name: str) -> int:
    """Tokens as `read_tokens` knows them, and 0, which is none of some."""
    return 0 if re.fullmatch(r"0+", value) else read_tokens(value, name)
