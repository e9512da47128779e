"""Words for a person: of the parts of a budget, and for a word that is not known."""

import difflib
from collections.abc import Iterable

from farspan.plan.residency import RESIDENCY

# A part that is not named here is called by its own name.
PARTS = {
    "weights": "weights",
    "gathered": "weights of the open group, gathered",
    "gradients": "gradients",
    "accumulators": "sums of weight gradients",
    "optimizer": "optimizer states",
    **{kind.value: row.words for kind, row in RESIDENCY.items()},
    "slots": "slots of streamed K, V",
    "placement": "gaps between addresses",
    "cells": "transients of a cell",
    "exchange": "messages to and from other devices",
    "inputs": "tokens and labels",
    "reserve": "reserve",
    "pages": "rounding to pages",
}


def part_words(part: str) -> str:
    """The words for a part of a budget."""
    return PARTS.get(part, part)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest, as a question in brackets; empty where none is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
