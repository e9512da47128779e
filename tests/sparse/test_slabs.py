"""Slabs hold each unit of a choice once, are as long as may be, and change no result."""

from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.sparse.pages import (
    Candidates,
    Checked,
    Fraction,
    Slab,
    TopK,
    Units,
    count_of,
    units_of,
)
from farspan.spec import Sparse
from tests.attention.cases import Case, make_inputs
from tests.grids import crossed
from tests.numerics import EXACT, assert_exact
from tests.sparse.cases import MIXED, Sequence, SparseCase
from tests.sparse.memory_pages import MemoryPages


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_choice(shape: tuple[int, int, int, int], pages: int, none: float) -> Tensor:
    """A choice of pages, that of a page of queries mostly also its neighbour's."""
    batch, heads, count, chosen = shape
    order = torch.rand(batch, heads, count, pages).cumsum(2).argsort(-1)[..., :chosen]
    ascending = order.sort(-1).values
    return ascending.masked_fill(torch.rand(shape) < none, -1).int()


SHAPES = [((1, 1, 9, 4), 12), ((2, 3, 7, 5), 9), ((1, 2, 16, 3), 40), ((2, 1, 1, 6), 8)]


@pytest.mark.parametrize("none", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("shape", "pages"), SHAPES, ids=str)
def test_slabs_hold_each_entry_of_a_choice_and_each_unit_once(
    shape: tuple[int, int, int, int], pages: int, none: float
) -> None:
    """Against a set of what was chosen, and a walk over all entries."""
    choice = random_choice(shape, pages, none)
    entries = {place: int(choice[place]) for place in product(*map(range, shape))}
    chosen = sorted({(*place[:2], page) for place, page in entries.items() if page >= 0})
    assert count_of(choice).tolist() == [len(chosen)]
    for most_units in (1, 5, 8, 13, 30, 100, 10_000):
        held: list[tuple[int, ...]] = []
        found = dict.fromkeys(entries, -1)
        for slab in units_of(choice).slabs(most_units):
            of_slab = [slab.rows.tolist(), slab.heads.tolist(), slab.pages.tolist()]
            held += zip(*of_slab, strict=True)
            assert len(slab) == most_units or len(held) == len(chosen)
            for place in entries:
                unit = int(slab.index[place])
                if unit >= 0:
                    assert found[place] == -1
                    found[place] = of_slab[2][unit]
                    assert (of_slab[0][unit], of_slab[1][unit]) == place[:2]
        assert held == chosen
        assert found == entries


WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "lift_fresh"}


class Waits(TorchDispatchMode):
    """Counts operations for which the CPU waits for a device: what it must know to go on, and
    tensors of numbers that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        # A mask as an index asks where it is true.
        masks = args[1] if func is torch.ops.aten.index.Tensor else ()
        self.count += any(x is not None and x.dtype == torch.bool for x in masks)
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def test_the_cpu_waits_once_for_a_choice() -> None:
    """For the number of its units, which is copied."""
    choice = random_choice((2, 2, 8, 4), 20, 0.1)
    with Waits() as waits:
        count = count_of(choice)
    assert waits.count == 0
    known = int(count)
    for most_units in (10_000, 6):
        with Waits() as waits:
            slabs = list(units_of(choice, known).slabs(most_units))
        assert waits.count == 0
        assert (len(slabs) == 1) == (most_units == 10_000)
    votes = torch.rand(1, 2, 5, 9)
    for select in (TopK(4), Fraction(0.5)):
        with Waits() as waits:
            select(votes, Candidates(range(3, 12)))
        assert waits.count == 0


@dataclass(slots=True)
class Counted(MemoryPages):
    """Counts units that are gathered, and added, at one time."""

    gathered: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)

    def gather(self, units: Units) -> tuple[Tensor, Tensor]:
        self.gathered.append(len(units))
        return MemoryPages.gather(self, units)

    def add(self, slab: Slab, dk: Tensor, dv: Tensor) -> None:
        self.added.append(len(slab.units))
        MemoryPages.add(self, slab, dk, dv)


def some_of(votes: Tensor, pages: range) -> Tensor:
    """As many pages as the chunk has, but for some."""
    choice = torch.tensor([*pages]).expand(*votes.shape[:3], -1).clone()
    choice[:, :, ::2, ::3] = -1
    choice[:, :, 1::4] = -1
    return choice


PLAIN = Case(tokens=93, chunk=32, kv_block=24)
TWO = replace(PLAIN, batch=2, documents=MIXED, sinks=True)
CASES = [
    SparseCase(PLAIN),
    SparseCase(replace(PLAIN, heads=6, kv_heads=1, batch=3)),
    SparseCase(replace(PLAIN, chunk=100)),
    SparseCase(TWO),
    SparseCase(replace(TWO, value_dim=12, softcap=1.5)),
    SparseCase(PLAIN, select=Checked(some_of)),
    SparseCase(TWO, Sparse(page=4, budget=92, recent=0, sinks=0), Checked(some_of)),
]


@pytest.mark.parametrize(("number", "most_units"), crossed(range(len(CASES)), [1, 3, 7, 20]))
def test_slabs_give_what_one_gather_gives(number: int, most_units: int) -> None:
    """In float64 to the tolerance of the reference; far below that in number of gathers."""
    case = CASES[number]
    inputs, whole = make_inputs(case.dense), Sequence(case)
    wanted = whole.step(inputs)
    sequence = Sequence(replace(case, most_units=most_units))
    plain = sequence.pages
    sequence.pages = pages = Counted(plain.k, plain.v, plain.page, most_units, plain.mean_tokens)
    found = sequence.step(inputs)
    assert torch.equal(sequence.choice(), whole.choice())
    for name in wanted:
        assert_exact(found[name], wanted[name], EXACT)
    # Each unit that a chunk chose once, in its forward and in its backward, in full slabs.
    counts = [len(units_of(choice)) for choice in sequence.choices.values()]
    slabs = [
        [min(most_units, count - start) for start in range(0, count, most_units)]
        for count in counts
    ]
    assert pages.gathered == [*chain(*slabs), *chain(*reversed(slabs))]
    assert pages.added == [*chain(*reversed(slabs))]
    again = Sequence(replace(case, most_units=most_units)).step(inputs)
    assert all(torch.equal(again[name], found[name]) for name in found)
