"""A class of tensors is a row of a table: builder, checker, simulation, plan and engine take it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from farspan.planner import pass_counts
from farspan.planner.bounds import seconds, tiers_of
from farspan.planner.prices import Prices
from farspan.planner.timeline import run_time
from farspan.program import builder as build
from farspan.program import residency
from farspan.program.ledger import Ledger
from farspan.program.passes import GroupPasses
from farspan.program.program import Evict, Load, Program, Store
from farspan.program.residency import CutInto, Kind, Residency, RowTensor, Until
from farspan.spec import RunSpec, Schedule, Tier
from tests.planner.test_bound import CLOSE, make_grid
from tests.program.cases import model_of

ECHO = cast(Kind, "echo")
SLOTS = ("echo.slot.0", "echo.slot.1")
TOKENS = 37


def echo(layer: int) -> str:
    return f"echo.{layer}"


ROW = Residency(
    words="what a group read",
    rows=CutInto.TOKENS,
    written="the group's first forward",
    read="the group's other passes",
    until=Until.BACKWARD,
    homes=(echo,),
    tier="attention",
    slots=(SLOTS,),
    contents=("x",),
    tensors=lambda model, _, batch: [RowTensor("x", (batch, model.hidden))],
)


def open_slots(ledger: Ledger) -> None:
    if ROW.tier_of(ledger.schedule) is Tier.HOST:
        for name in SLOTS:
            if name not in ledger.buffers:
                ledger.allocate_slot(name, ECHO, ledger.share.tokens.most)


class EchoPasses(GroupPasses):
    """Every group keeps a copy of what it reads, and reads that from its second pass on."""

    def open_first(self) -> None:
        ledger = self.ledger
        open_slots(ledger)
        ledger.allocate(echo(self.layers[0]), ECHO, self.layers[0])
        super().open_first()

    def enter(self, chunk: int) -> None:
        super().enter(chunk)
        ledger, layer = self.ledger, self.layers[0]
        home = echo(layer)
        on_host = ROW.tier_of(ledger.schedule) is Tier.HOST
        place = ledger.turn(ledger.few(SLOTS)) if on_host else home
        if chunk in ledger.written[home]:
            self._fetch(home, place, chunk)
        else:
            ledger.emit(Store(layer, chunk, place))
            self._evict(place, home, chunk)
            ledger.written[home].add(chunk)
        ledger.emit(Load(layer, chunk, place))


@pytest.fixture
def with_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(residency.RESIDENCY, ECHO, ROW)
    monkeypatch.setattr(build, "GroupPasses", EchoPasses)


def schedule(tier: Tier) -> Schedule:
    return Schedule(
        chunk=10, groups=2, boundary_inputs=Tier.DEVICE, attention=tier, attention_save_fraction=0.5
    )


def program(tier: Tier) -> Program:
    return build.build_program(model_of(4), RunSpec(1, TOKENS), schedule(tier))


@pytest.mark.usefixtures("with_echo")
def test_only_a_load_of_x_enters_a_group() -> None:
    """A load of another class counts as no entry, whatever its layer."""

    def entries(of: Program) -> int:
        return sum(act == pass_counts.ENTERS for _, act, _ in pass_counts._places(of))

    made, plain = program(Tier.DEVICE), _without(Tier.DEVICE)
    loads = [sum(isinstance(i, Load) for i in of.instructions) for of in (made, plain)]
    assert loads[0] > loads[1]
    assert entries(made) == entries(plain) == loads[1]


def _without(tier: Tier) -> Program:
    """The same program without the class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "GroupPasses", GroupPasses)
        return program(tier)


class EveryLayer(GroupPasses):
    """Every forward of a layer writes a copy of what it read."""

    def open_first(self) -> None:
        open_slots(self.ledger)
        for layer in self.layers:
            self.ledger.allocate(echo(layer), ECHO, layer)
        super().open_first()

    def forward(self, layer: int, chunk: int, **how: Any) -> None:
        super().forward(layer, chunk, **how)
        on_host = ROW.tier_of(self.ledger.schedule) is Tier.HOST
        self._evict(SLOTS[0] if on_host else echo(layer), echo(layer), chunk)


@pytest.fixture
def without_caches() -> Iterator[None]:
    for cached in pass_counts._acts, pass_counts._counted:
        cached.cache_clear()
    yield
    for cached in pass_counts._acts, pass_counts._counted:
        cached.cache_clear()


@pytest.mark.usefixtures("with_echo", "without_caches")
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("kv_kept", [False, True])
def test_the_search_counts_its_copies(
    tier: Tier, kv_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of the seconds is that of the program, without a rule for the class."""
    monkeypatch.setattr(build, "GroupPasses", EveryLayer)
    asked, planned, grid = make_grid(
        (model_of(6), RunSpec(1, TOKENS), replace(schedule(tier), kv_kept=kv_kept)), overlap=False
    )
    made = build.build_program(asked.model, asked.run, planned)
    evicted = sum(isinstance(i, Evict) and i.target.startswith("echo") for i in made.instructions)
    assert (evicted > 0) == (tier is Tier.HOST)
    total = run_time(Prices(asked, made, together=False), overlap=False).total
    assert abs(seconds(grid)[0, 0, tiers_of(planned)] - total) <= CLOSE * total
