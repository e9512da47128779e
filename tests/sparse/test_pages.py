"""Units are distinct and map back to the choice; a storage on host moves each once."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from farspan.sparse.pages import Slab, Units, units_of
from tests.attention.cases import make_inputs
from tests.sparse.cases import Sequence, SparseCase, cases
from tests.sparse.memory_pages import MemoryPages


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("none", [0.0, 0.5, 1.0])
def test_units_are_distinct_and_cover_the_choice(none: float) -> None:
    choice = torch.rand(2, 3, 4, 9).argsort(-1)[..., :5]
    choice = choice.masked_fill(torch.rand(choice.shape) < none, -1).int()
    units = units_of(choice)
    triples = list(
        zip(units.rows.tolist(), units.heads.tolist(), units.pages.tolist(), strict=True)
    )
    assert triples == sorted(set(triples))
    assert len(units) == len(triples)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in choice.shape)).tolist():
        page, unit = int(choice[tuple(place)]), int(units.index[tuple(place)])
        assert (page < 0) == (unit < 0)
        assert page < 0 or triples[unit] == (place[0], place[1], page)
    assert set(units.index.flatten().tolist()) - {-1} == set(range(len(units)))


def test_nothing_chosen_is_no_unit() -> None:
    assert len(units_of(torch.empty(1, 2, 3, 0, dtype=torch.int32))) == 0
    assert len(units_of(torch.full((1, 2, 3, 4), -1, dtype=torch.int32))) == 0


@dataclass(slots=True)
class HostPages(MemoryPages):
    """Far pages go through one staging buffer, which is NaN before and after."""

    staging: Tensor = field(init=False)
    moved: list[int] = field(default_factory=list)

    def gather(self, units: Units) -> tuple[Tensor, Tensor]:
        self.moved.append(len(units))
        copies = []
        for name, home in (("k", self.k), ("v", self.v)):
            staging = torch.full((64, self.page, home.shape[3]), torch.nan, dtype=home.dtype)
            triples = zip(units.rows, units.heads, units.pages, strict=True)
            for slot, (row, head, page) in enumerate(triples):
                start = int(page) * self.page
                staging[slot] = home[start : start + self.page, row, head]
            assert len(units) < 64, name
            copies.append(staging[: len(units)])
        return copies[0], copies[1]

    def add(self, slab: Slab, dk: Tensor, dv: Tensor) -> None:
        units = slab.units
        self.moved.append(len(units))
        for home, part in ((self.dk, dk), (self.dv, dv)):
            for slot in range(len(units)):
                start = int(units.pages[slot]) * self.page
                place = slice(start, start + self.page), units.rows[slot], units.heads[slot]
                home[place] += part[slot]


@pytest.mark.parametrize("case", [cases()[0], cases()[16]], ids=str)
def test_a_storage_of_another_kind_gives_the_same_bits(case: SparseCase) -> None:
    inputs = make_inputs(case.dense)
    wanted = Sequence(case).step(inputs)
    sequence = Sequence(case)
    plain = sequence.pages
    sequence.pages = pages = HostPages(plain.k, plain.v, plain.page, mean_tokens=plain.mean_tokens)
    found = sequence.step(inputs)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    counts = (len(units_of(choice)) for choice in sequence.choices.values())
    once = [count for count in counts if count]
    assert pages.moved == once + [count for count in reversed(once) for _ in range(2)]


def test_sums_of_gradients_begin_at_zero_and_again_at_each_step() -> None:
    k, v = torch.full((8, 1, 2, 4), torch.nan), torch.full((8, 1, 2, 3), torch.nan)
    pages = MemoryPages(k.bfloat16(), v.bfloat16(), 4)
    units = units_of(torch.tensor([1, -1]).view(1, 2, 1, 1).int())
    for _ in range(2):
        assert pages.dk.eq(0).all()
        assert pages.dv.eq(0).all()
        assert pages.dk.dtype == torch.float32
        slab = Slab(units, *pages.gather(units))
        pages.add(slab, torch.ones(1, 4, 4), torch.ones(1, 4, 3))
        assert pages.dk[4:, :, 0].eq(1).all()
        assert pages.dk.sum() == 16
        assert pages.dv.sum() == 12
        pages.clear()
