"""Copies beside the computation: the same bits, whatever happens when, and each hazard is real."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.engine.buffers import KVPrefix
from farspan.engine.step import Step
from farspan.program import buffer_names as names
from farspan.program.dependencies import EVERY, Hazard, Lane, waits
from farspan.program.program import Backward, Forward
from farspan.program.strategies import STRATEGIES, strategy
from farspan.sparse.engine import SparseCell, watched_cell
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from tests.engine.checks import Data, Outcome, assert_same_bits, draw, gradients
from tests.engine.lanes import Deadlock, Manner, Recorder, Replay
from tests.grids import exhaustive, part_of
from tests.oracles.check_order import check_order
from tests.oracles.contents import ProgramError
from tests.zoo import LAYERS, shared_model

pytestmark = pytest.mark.slow

TOKENS = 42  # of four chunks the last is not full
DATA = draw(TOKENS, batch=2, documents=4)
BASE = Schedule(chunk=11, groups=2, kv_block=7)
SCHEDULES = {
    **{name: replace(strategy(name, LAYERS, TOKENS), kv_block=7) for name in STRATEGIES},
    "unequal": replace(BASE, groups=(1, 2, 1), attention_save_fraction=1.0),
    "streamed": replace(BASE, kv=Tier.HOST),
    "streamed, kept": replace(BASE, kv=Tier.HOST, kv_kept=True, groups=1),
    "streamed, alpha": replace(
        BASE, kv=Tier.HOST, activation_save_fraction=0.6, attention_save_fraction=0.3
    ),
    "kv home": replace(BASE, kv_kept=True),
    "open": replace(BASE, attention_open=True, groups=(3, 1)),
    "alpha": replace(BASE, activation_save_fraction=1.0, attention_save_fraction=0.5, groups=1),
    "evenly": replace(
        BASE, groups=1, activation_save_fraction=1.0, activation_save_layers=0.5, kv_kept=True
    ),
    "x on device, kv home": replace(BASE, groups=1, boundary_inputs=Tier.DEVICE, kv_kept=True),
    "kv home of three": replace(
        BASE, groups=(3, 1), boundary_inputs=Tier.DEVICE, kv_kept=True, activation_save_fraction=0.3
    ),
    "layer by layer": replace(BASE, layer_checkpoint=True, attention_save_fraction=1.0, groups=4),
}
SPARSE = Sparse(page=4, budget=8, recent=6, sinks=4)
LONGER = draw(53, batch=2, documents=4)  # in chunks of 12: three of them choose pages
SPARSE_SCHEDULES = {
    name: replace(SCHEDULES[name], chunk=12, sparse=SPARSE)
    for name in ("streamed", "streamed, kept", "streamed, alpha", "kv home", "layer by layer")
}
MANNERS = [(manner, 0) for manner in Manner]


def two_steps(model: PreTrainedModel, step: Step, data: Data) -> Outcome:
    """Losses and summed gradients of two steps on the same data."""
    model.zero_grad(set_to_none=True)
    losses = torch.stack([step(*data), step(*data)])
    return Outcome(losses, gradients(model))


def recorded(step: Step, data: Data, dropped: Hazard | None = None) -> Recorder:
    """What the lanes are told in a step; without a hazard's waits between streamed blocks."""
    step.copies = recorder = Recorder(dropped)
    step(*data)
    return recorder


def assert_any_order(model: PreTrainedModel, schedule: Schedule, data: Data) -> None:
    """Two steps give the same bits in every manner of copying."""
    expected = two_steps(model, Step(model, schedule, poison=True), data)
    step = Step(model, schedule, poison=True)
    told = recorded(step, data).told
    for manner, seed in MANNERS:
        step.copies = Replay(told, manner, seed)
        assert_same_bits(two_steps(model, step, data), expected)


OFTEN = ("grouped", "streamed, alpha", "kv home of three")


@pytest.mark.parametrize("name", part_of(SCHEDULES, *OFTEN))
def test_the_same_bits_in_any_order(name: str) -> None:
    assert_any_order(shared_model("qwen2", torch.float32), SCHEDULES[name], DATA)


@pytest.mark.parametrize(
    ("family", "name"),
    part_of(
        product(
            ["lfm2", "falcon_h1"], ["streamed", "streamed, kept", "streamed, alpha", "kv home"]
        ),
        ("lfm2", "streamed, alpha"),
    ),
)
def test_states_come_and_go_in_any_order(family: str, name: str) -> None:
    """A state from host comes in two blocks, and its gradient goes back in two; in a layer that
    also attends, after those of the keys."""
    assert_any_order(shared_model(family, torch.float32), SCHEDULES[name], DATA)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of three units, or one page of queries: slots are taken more than once by a cell."""
    monkeypatch.setattr("farspan.program.far_sizes.SLAB_BYTES", 3 * 4 * 2 * 8 * 4)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("name", part_of(SPARSE_SCHEDULES, "streamed, kept"))
def test_chosen_pages_come_and_go_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell is watched, which reads all keys before it: the same in every step, so that all are
    told the same."""
    monkeypatch.setattr("farspan.sparse.engine.watched_cell", lambda i, _: watched_cell(i, 0))
    assert_any_order(shared_model("qwen2", torch.float32), SPARSE_SCHEDULES[name], LONGER)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize(
    "hazard",
    part_of(
        [Hazard.NOT_ARRIVED, Hazard.STILL_READ, Hazard.NOT_WRITTEN, Hazard.STILL_LEAVING],
        Hazard.NOT_WRITTEN,
    ),
)
def test_without_waits_of_chosen_pages(hazard: Hazard) -> None:
    """Where all earlier keys are candidates: blocks of near ones would keep some order for them."""
    model, far = shared_model("qwen2", torch.float32), Sparse(4, 8, recent=0, sinks=0)
    schedule = replace(SPARSE_SCHEDULES["streamed"], groups=1, sparse=far)
    expected = two_steps(model, Step(model, schedule, poison=True), LONGER)
    step = Step(model, schedule, poison=True)
    step.watches = False
    assert not goes_wrong(step, LONGER, expected)
    assert goes_wrong(step, LONGER, expected, hazard)


class Asked(Recorder):
    """Sees to it that what is fetched follows the choice that says what, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = self.followed = 0  # events: before the latest choice, and waited for
        self.reads = self.gathers = 0

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.chosen = self.events
        self.reads += 1
        return super().read(tensor)

    def wait(self, lane: Lane, event: Any, hazard: Hazard | None = None) -> None:
        if lane is Lane.FETCH and event is not None:
            self.followed = max(self.followed, event)
        super().wait(lane, event, hazard)

    def note(self, target: Tensor, source: Tensor) -> None:
        assert not self.reads or self.followed > self.chosen
        super().note(target, source)

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        self.gathers += 1
        super().gather(target, source, rows)


@pytest.mark.usefixtures("small_slabs")
def test_pages_are_fetched_when_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slabs when a cell begins that knows its choice; else behind that, which the CPU waits
    for once. No near keys: their waits would hold for the choice as well."""
    far = Sparse(4, 8, recent=0, sinks=0)
    schedule = replace(SPARSE_SCHEDULES["streamed"], groups=1, sparse=far)
    step = Step(shared_model("qwen2", torch.float32), schedule)
    step.watches, step.copies = False, Asked()
    copies, begin, ahead = step.copies, SparseCell.begin, Counter[int]()

    def counted(self: SparseCell, keys: KVPrefix) -> None:
        before = copies.gathers
        begin(self, keys)
        ahead[copies.gathers - before] += 1

    monkeypatch.setattr(SparseCell, "begin", counted)
    step(*LONGER)
    of = step.program(*LONGER.input_ids.shape).instructions
    attending = [i for i in of if isinstance(i, Forward | Backward) and i.choice is not None]
    choosing = [i for i in attending if isinstance(i, Forward) and i.chooses]
    assert copies.reads == len(choosing) > 0
    k_and_v = 2
    assert ahead[k_and_v * len(names.PAGES)] == len(attending) - len(choosing) > 0
    assert set(ahead) == {0, k_and_v * len(names.PAGES)}


def test_a_slab_never_leaves_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned too small, or with more units than were said."""
    monkeypatch.setattr("farspan.program.builder.slot_bytes", lambda *_, **__: 1024)
    step = Step(shared_model("qwen2", torch.float32), SPARSE_SCHEDULES["streamed"])
    with pytest.raises(AssertionError, match=r"pages\.slot\.\d: \d+ units"):
        step(*LONGER)


# -- each hazard happens where its waits are left out ----------------------------------------------


def goes_wrong(step: Step, data: Data, expected: Outcome, dropped: Hazard | None = None) -> bool:
    """Does the step give other bits in some manner?"""
    told = recorded(step, data, dropped).told
    for manner, seed in reversed(MANNERS):
        step.copies = Replay(told, manner, seed, dropped)
        try:
            assert_same_bits(two_steps(step.stages.model, step, data), expected)
        except (AssertionError, Deadlock):  # other numbers may choose other pages, and so wait
            return True
    return False


@pytest.mark.parametrize(
    ("hazard", "name"),
    [
        (Hazard.NOT_ARRIVED, "grouped"),
        exhaustive(Hazard.STILL_READ, "grouped"),
        exhaustive(Hazard.NOT_WRITTEN, "offload"),
        exhaustive(Hazard.STILL_LEAVING, "memo"),
        (Hazard.NOT_HOME, "offload"),
        (Hazard.REUSED, "x on device, kv home"),
        (Hazard.CLEARED, "kv home of three"),
    ],
)
def test_without_waits_of_instructions(hazard: Hazard, name: str) -> None:
    model = shared_model("qwen2", torch.float32)
    expected = two_steps(model, Step(model, SCHEDULES[name]), DATA)
    step = Step(model, SCHEDULES[name], poison=True)
    program = step.program(*DATA.input_ids.shape)
    check_order(program, waits(program))
    without = waits(program, EVERY - {hazard})
    with pytest.raises(ProgramError, match="races"):
        check_order(program, without)
    step.prepared(*DATA.input_ids.shape).orders = without
    assert goes_wrong(step, DATA, expected)


@pytest.mark.parametrize(
    "hazard",
    part_of(
        [Hazard.NOT_ARRIVED, Hazard.STILL_READ, Hazard.NOT_WRITTEN, Hazard.STILL_LEAVING],
        *(Hazard.NOT_ARRIVED, Hazard.STILL_READ),
    ),
)
def test_without_waits_of_streamed_blocks(hazard: Hazard) -> None:
    """Of a long document: a slot is taken more than once by a cell."""
    model, data = shared_model("qwen2", torch.float32), draw(53, batch=2)
    expected = two_steps(model, Step(model, SCHEDULES["fpdt"]), data)
    step = Step(model, SCHEDULES["fpdt"], poison=True)
    assert goes_wrong(step, data, expected, hazard)


# -- the switch ------------------------------------------------------------------------------------


def test_copies_are_in_line_without_a_gpu() -> None:
    model = shared_model("qwen2")
    assert not Step(model, BASE).copies.overlap
    with pytest.raises(UnsupportedError, match="overlap"):
        Step(model, BASE, overlap=True)
