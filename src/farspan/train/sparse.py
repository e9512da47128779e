"""Sparse attention in a run: its page selector, the JSON keys that mark outputs as approximate (by
it or by FP8 products), and the warning about attention mass on hidden tokens."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction as Ratio
from math import ceil
from pathlib import Path
from typing import Any

from farspan.attention.far import Seen
from farspan.formatting import SEES_ALL, sparse_words
from farspan.hf.describe import attention_of
from farspan.sparse.index import Index as Index
from farspan.sparse.pages import Fraction
from farspan.spec import Schedule, UnsupportedError
from farspan.train.config import RunConfig, SparseConfig
from farspan.train.run_folder import as_json

SPARSELY = "with sparse attention, an approximation"
HIDING_NOTHING = f"with sparse attention, {SEES_ALL}"
NOT_DENSE = "loss and gradients are those of sparse attention, not of dense attention"
REMIND = 100  # steps between two warnings: attention changes slowly, and layers take turns


def marks(run: RunConfig) -> dict[str, str]:
    """Return JSON keys that mark a run's outputs as approximate, if they are: made with sparse
    attention, or with products in FP8."""
    found = {} if run.sparse is None else {"attention": "sparse"}
    products = run.kernels.products
    return found if products is None else {**found, "products": products.value}


def hides(run: RunConfig) -> bool:
    """Return whether sparse attention may hide from a query a token that dense attention shows it.
    Assumes chunks of one page: a retry may use them, and shorter chunks may hide more."""
    if run.sparse is None:
        return False
    pages = run.sparse.spec()
    if run.sparse.sparsity is not None:
        pages = replace(pages, budget=0)
    return pages.hides(run.context, pages.page)


def opening_words(run: RunConfig) -> str:
    """Return the message that a run with sparse attention shows first."""
    assert run.sparse is not None
    words = sparse_words(run.sparse.spec(), hides=hides(run)) + sparsity_words(run)
    return f"{words}; {NOT_DENSE}" if hides(run) else words


def sparsity_words(run: RunConfig) -> str:
    """Return words for the sparsity that the run file sets, or "" if it sets none."""
    if run.sparse is None or run.sparse.sparsity is None:
        return ""
    return f", chosen at a sparsity of {run.sparse.sparsity:g}"


def what_changes(run: RunConfig, change: str) -> str:
    """Return text for a message: how a changed setting affects the results of a resumed run."""
    if change.startswith("kernels.products"):
        return "products round otherwise, so gradients differ by more than the dtype's rounding"
    if run.sparse is not None and change.startswith("schedule."):
        return "sparse attention sees other tokens if the chunk changes, and gradients differ then"
    return "the gradients are the same up to rounding, but not bit for bit"


def other_chunk(before: int | None, now: Schedule) -> str:
    """Return a clause that says how a changed chunk alters sparse attention; "" if not at all."""
    if now.sparse is None or before in (None, now.chunk):
        return ""
    return (
        f"chunk {now.chunk:,} instead of {before:,}: sparse attention sees other tokens, so "
        "gradients differ"
    )


def fraction_of(config: SparseConfig | None, schedule: Schedule, context: int) -> Fraction | None:
    """Return the selector that keeps a fixed share of pages, or None if the run file sets no
    sparsity. Raises UnsupportedError if this share of the pages exceeds the budget in chunks of one
    page, to which a run short of memory may turn."""
    sparse = schedule.sparse
    if sparse is None or config is None or config.sparsity is None:
        return None
    pages = len(sparse.candidates((context - 1) // sparse.page * sparse.page))
    kept, most = ceil((1 - Ratio(str(config.sparsity))) * pages), sparse.budget // sparse.page
    if kept > most:
        raise UnsupportedError(
            f"sparse.sparsity: {config.sparsity} leaves {kept:,} of {pages:,} pages, more than the "
            f"budget of {most:,}; raise sparse.budget to {kept * sparse.page}, or "
            f"sparse.sparsity to {_sparsity_for(most, pages)}"
        )
    return Fraction(config.sparsity)


def index_of(config: SparseConfig | None, blank: Any = None) -> Index | None:
    """Return the index by which a run chooses pages, or None if the run file names none. Raises
    UnsupportedError, naming the field, if the index cannot be read or does not fit the model
    `blank` (its weights are not needed; None: any model)."""
    if config is None or config.index is None:
        return None
    layers = None if blank is None else attention_of(deepcopy(blank))
    try:
        index = Index.load(Path(config.index).expanduser())
        if layers is not None:
            index.refuse_misfit(layers, config.index_dim)
    except UnsupportedError as error:
        raise UnsupportedError(f"sparse.{error}") from error
    return index


def selector_for(
    config: SparseConfig | None, schedule: Schedule, context: int, index: Index | None = None
) -> Any:
    """Return the run's page selector, or None for the default, which takes the pages that score
    highest for the queries. Raises UnsupportedError."""
    share = fraction_of(config, schedule, context)
    if schedule.sparse is None:
        return share
    index = index or index_of(config)
    return share if index is None else replace(index, select=share)


def _sparsity_for(most: int, pages: int) -> float:
    """Return the least sparsity, to four decimals, that keeps at most `most` of `pages` pages."""
    return ceil(10_000 * (1 - Ratio(most, pages))) / 10_000


def mass_json(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return values for metrics.jsonl about attention mass, the share of dense attention on tokens
    that are not hidden: its mean over the step's sampled cells, its minimum over their queries, and
    the layer of that minimum. Empty if no cell hid a page."""
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
    """Warning that queries see too little attention mass, given once in `REMIND` steps at most."""

    below: float
    warned: int | None = None  # step of the last warning

    def warning(self, step: int, seen: Sequence[Seen]) -> str | None:
        """Return the warning to show the user after this step, or None."""
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
