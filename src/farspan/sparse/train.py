"""Sparse attention in a run: its schedule and selector, the mark on its outputs, the warning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction as Ratio
from math import ceil
from pathlib import Path
from typing import Any

from farspan.formatting import SEES_ALL, sparse_words
from farspan.sparse.engine import Seen
from farspan.sparse.index import Index
from farspan.sparse.pages import Fraction
from farspan.spec import Schedule, UnsupportedError
from farspan.train.config import RunConfig, SparseConfig
from farspan.train.run_folder import as_json

SPARSELY = "with sparse attention, an approximation"
HIDING_NOTHING = f"with sparse attention, {SEES_ALL}"
NOT_DENSE = "loss and gradients are those of sparse attention, not of dense attention"
REMIND = 100  # steps between two warnings: attention changes slowly, and layers take turns


def marks(run: RunConfig) -> dict[str, str]:
    """What every output of a run with sparse attention holds; nothing for a dense one."""
    return {} if run.sparse is None else {"attention": "sparse"}


def hides(run: RunConfig) -> bool:
    """May a query miss a token that dense attention shows it? False is certain, whatever chunk a
    run that is short of memory comes to: one of a page has the most to choose from."""
    if run.sparse is None:
        return False
    pages = run.sparse.spec()
    if run.sparse.sparsity is not None:
        pages = replace(pages, budget=0)
    return pages.hides(run.context, pages.page)


def opening_words(run: RunConfig) -> str:
    """What a run with sparse attention says of it when it begins. The run has some."""
    assert run.sparse is not None
    words = sparse_words(run.sparse.spec(), hides=hides(run)) + sparsity_words(run)
    return f"{words}; {NOT_DENSE}" if hides(run) else words


def sparsity_words(run: RunConfig) -> str:
    """How many of the pages are chosen, where the run says so."""
    if run.sparse is None or run.sparse.sparsity is None:
        return ""
    return f", chosen at a sparsity of {run.sparse.sparsity:g}"


def what_changes(run: RunConfig, change: str) -> str:
    """What follows from a change between two parts of a run that is allowed."""
    if run.sparse is not None and change.startswith("schedule."):
        return "sparse attention sees other tokens if the chunk changes, and gradients differ then"
    return "the gradients are the same up to rounding, the bits are not"


def other_chunk(before: int | None, now: Schedule) -> str:
    """What another chunk means where a query sees all of its own; empty where it is the same."""
    if now.sparse is None or before in (None, now.chunk):
        return ""
    return (
        f"chunk {now.chunk:,} instead of {before:,}: sparse attention sees other tokens, so "
        "gradients differ"
    )


def fraction_of(given: SparseConfig | None, schedule: Schedule, context: int) -> Fraction | None:
    """What chooses pages in place of the votes' best. Raises UnsupportedError where the share that
    is asked for is more than the budget: cut to that, it would be another share. Asked of the
    smallest chunk there is, since a run that is short of memory may come to it."""
    sparse = schedule.sparse
    if sparse is None or given is None or given.sparsity is None:
        return None
    pages = len(sparse.candidates((context - 1) // sparse.page * sparse.page))
    kept, most = ceil((1 - Ratio(str(given.sparsity))) * pages), sparse.budget // sparse.page
    if kept > most:
        raise UnsupportedError(
            f"sparse.sparsity: {given.sparsity} leaves {kept:,} of {pages:,} pages, more than the "
            f"budget of {most:,}; raise sparse.budget to {kept * sparse.page}, or "
            f"sparse.sparsity to {_sparsity_for(most, pages)}"
        )
    return Fraction(given.sparsity)


def selector_for(given: SparseConfig | None, schedule: Schedule, context: int) -> Any:
    """The selector of a run's step; None: the votes' best. Raises UnsupportedError, also where the
    adapter of an index cannot be read."""
    share = fraction_of(given, schedule, context)
    if schedule.sparse is None or given is None or given.index is None:
        return share
    return replace(Index.load(Path(given.index).expanduser()), select=share)


def _sparsity_for(most: int, pages: int) -> float:
    """The least in four digits that leaves at most so many pages."""
    return ceil(10_000 * (1 - Ratio(most, pages))) / 10_000


def mass_json(seen: Sequence[Seen]) -> dict[str, Any]:
    """The attention mass that a step's watched cells saw, for metrics.jsonl: over all of them, the
    least of a query, and the layer of that one. Empty where no cell hid anything."""
    if not seen:
        return {}
    least = min(seen, key=lambda cell: cell.mass.minimum)
    return {
        "attention_mass": as_json(sum(cell.mass.mean for cell in seen) / len(seen)),
        "attention_mass_min": as_json(least.mass.minimum),
        "attention_mass_layer": least.layer,
    }


@dataclass(slots=True)
class MassWatch:
    """Warns when too little of attention is seen: at once, then every `REMIND` steps at most."""

    below: float
    warned: int | None = None  # the step

    def warning(self, step: int, seen: Sequence[Seen]) -> str | None:
        """What a person is to be told after this step, if anything."""
        if not seen:
            return None
        worst = min(seen, key=lambda cell: cell.mass.mean)
        recent = self.warned is not None and step - self.warned < REMIND
        if recent or not worst.mass.mean < self.below:
            return None
        self.warned = step
        return (
            f"warning: step {step}: sparse attention sees {worst.mass.mean:.1%} of the attention "
            f"mass in layer {worst.layer} ({worst.mass.minimum:.1%} for one query), less than "
            f"sparse.warn_below of {self.below:.0%}: gradients may be far from those of dense "
            "attention; raise sparse.budget or sparse.recent, or make sparse.page smaller"
        )
