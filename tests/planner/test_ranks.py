"""A plan of several devices is of the programs that their ranks run."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.planner.evaluate import (
    arena_parts,
    evaluate,
    kinds_of,
    on_machines,
    own_schedule,
    programs,
    refuse_layout,
    size,
)
from farspan.planner.machines import machine
from farspan.planner.request import Optimizer, Question
from farspan.planner.states import states
from farspan.program.builder import build_program
from farspan.program.layout import SEQUENCE, Layout, Rank, chunk_ranges, refuse_together, share_of
from farspan.program.program import Program
from farspan.spec import (
    LayerSpec,
    ModelSpec,
    RunSpec,
    Schedule,
    Sparse,
    StateTensor,
    Tier,
    UnsupportedError,
)
from tests.planner.machines import slow_machine
from tests.planner.test_bound import with_work
from tests.profiles import spec_of

LAYOUTS = [
    Layout(ulysses=2),
    Layout(ulysses=4, data=2),
    Layout(shards=3),
    Layout(ulysses=2, shards=2, fsdp=False),
    Layout(ring=3),
    Layout(ulysses=2, ring=2),
    Layout(tensor=2),
    Layout(tensor=2, ulysses=2, shards=2),
    Layout(pipeline=2),
    Layout(pipeline=3, data=2, fsdp=False),
    Layout(pipeline=4),
    Layout(pipeline=2, shards=3),
    Layout(tensor=2, pipeline=3),
    Layout(ulysses=2, shards=2, data=2, pipeline=2),
]
TOKENS = 199  # and chunks of 26 and 28: nothing divides them, and the last chunk is ragged

SCHEDULES = [
    Schedule(
        chunk=28 if sparse else 26,
        groups=1,
        boundary_inputs=x,
        kv=kv,
        kv_kept=kept > 0,
        attention_save_fraction=kept,
        attention_open=kept < 1,
        attention=x,
        activation_save_fraction=graphs,
        activations=kv,
        layer_checkpoint=kept == 0,
        kv_block=7,
        sparse=sparse,
    )
    for (x, kv), (kept, graphs), sparse in product(
        product(Tier, Tier),
        [(0.0, 0.0), (0.4, 0.6), (1.0, 0.3)],
        [None, Sparse(page=4, budget=8, recent=10, sinks=4)],
    )
]


def layer(**fields: object) -> LayerSpec:
    given = {"window": None, "activation_bytes": 58, "saves_input": True, **fields}
    return LayerSpec(4, 4, 10, 12, **given)  # type: ignore[arg-type]


STATE = StateTensor("recurrent.0", (3, 31), 4)
ATTENDING = (layer(), layer(window=30), layer(activation_bytes=34), layer(), layer(window=30))
RECURRENT = LayerSpec(0, 0, 0, 0, 1, activation_bytes=70, state=(STATE,))


def asked(layout: Layout, *, devices: int = 1, recurrent: bool = False) -> Question:
    layers = (*ATTENDING[:2], RECURRENT, *ATTENDING[3:]) if recurrent else ATTENDING
    model = with_work(ModelSpec("odd", 20, 50, layers, 2))
    return Question(model, RunSpec(2, TOKENS), slow_machine(devices=devices), layout)


def programs_of(question: Question, schedule: Schedule) -> list[Program]:
    """What the ranks run, each by its number."""
    layout = question.layout
    ranks = (Rank(layout, number) for number in range(layout.devices()))
    return [build_program(question.model, question.run, schedule, rank) for rank in ranks]


def runs(question: Question, schedule: Schedule) -> bool:
    try:
        refuse_together(schedule, question.layout)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize(
    ("layout", "recurrent"),
    [
        *((layout, False) for layout in LAYOUTS),
        *((layout, True) for layout in LAYOUTS if layout.sequence() == 1),  # others are refused
    ],
    ids=str,
)
def test_the_planned_arenas_are_those_of_the_fullest_ranks(layout: Layout, recurrent: bool) -> None:
    """To the byte, and nothing is looked at that no rank runs."""
    assert_fullest(asked(layout, recurrent=recurrent), SCHEDULES)


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=str)
def test_so_are_they_where_weights_are_in_main_memory(layout: Layout, fsdp: bool) -> None:
    """Whole weights come through slots, as many of a pipeline's stage as it has layers; programs of
    shards are those of shards on the device."""
    question = asked(replace(layout, fsdp=fsdp))
    schedules = [replace(schedule, weights=Tier.HOST) for schedule in SCHEDULES[::5]]
    assert_fullest(question, schedules)
    for schedule in schedules if fsdp else ():
        if runs(question, schedule):
            program, *_ = programs_of(question, schedule)
            there, *_ = programs_of(question, replace(schedule, weights=Tier.DEVICE))
            assert program.instructions == there.instructions


def assert_fullest(question: Question, schedules: list[Schedule]) -> None:
    for schedule in (schedule for schedule in schedules if runs(question, schedule)):
        planned = [program for _, program in programs(question, schedule)]
        ranks = programs_of(question, schedule)
        for tier in Tier:
            wanted = max(program.arena_bytes[tier] for program in ranks)
            assert max(one.arena_bytes[tier] for one in planned) == wanted, (schedule, tier)
        assert all(program in ranks for program in planned)
        # The same instructions are looked at once.
        assert len({program.instructions for program in planned}) == len(planned)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS[-7:], ids=str)
def test_a_machine_holds_what_its_ranks_take_together(layout: Layout, devices: int) -> None:
    """A share is one rank's part of what the fullest machine takes. Ranks of a sequence count as
    the one with the most rows."""
    question = asked(layout, devices=devices)
    near, last = question.near(), layout.sequence() - 1
    for schedule in [schedule for schedule in SCHEDULES if runs(question, schedule)][::5]:
        own = [program.arena_bytes[Tier.HOST] for program in programs_of(question, schedule)]
        most = [own[n // (last + 1) * (last + 1) + last] for n in range(len(own))]
        together = max(sum(most[n : n + near]) for n in range(0, len(most), near))
        parts = size(question, schedule).host.parts
        planned = near * (sum(parts.values()) - parts.get("pages", 0) - parts.get("optimizer", 0))
        # Each part of a share is rounded up.
        assert 0 <= planned - together <= near * len(parts), schedule


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plan_takes_the_fullest_device_and_the_slowest_rank(layout: Layout) -> None:
    question = asked(layout)
    for schedule in [schedule for schedule in SCHEDULES if runs(question, schedule)][1::7]:
        plan, sized = evaluate(question, "grouped", schedule), size(question, schedule)
        assert (plan.device, plan.host) == (sized.device, sized.host)
        arenas = [arena_parts(program, Tier.DEVICE) for program in sized.programs]
        planned = {part: plan.device.parts.get(part, 0) for part in arenas[0]}
        assert planned in arenas


# -- kinds of rank -------------------------------------------------------------------------------

LLAMA = spec_of("Llama-3-8B")


def ask(layout: Layout, model: ModelSpec = LLAMA) -> Question:
    return Question(model, RunSpec(1, 2**20), machine("h100"), layout, Optimizer.ADAMW)


@given(st.integers(1, 400), st.integers(1, 90), st.sampled_from(LAYOUTS))
def test_the_last_rank_of_a_sequence_has_the_most_rows(
    tokens: int, chunk: int, layout: Layout
) -> None:
    """Of tokens and of keys, in every chunk."""
    (kind, *_) = kinds_of(ask(layout), Schedule(groups=1))
    ranks = [Rank(layout, n) for n in kind.rank.peers(*SEQUENCE)]
    shares = [share_of(chunk_ranges(tokens, chunk), rank) for rank in ranks]
    most = share_of(chunk_ranges(tokens, chunk), kind.rank)
    for spans, own in (
        ([share.tokens.rows for share in shares], most.tokens.rows),
        ([share.keys.rows for share in shares], most.keys.rows),
    ):
        sizes = [[stop - start for start, stop in rows] for rows in spans]
        longest = [max(of) for of in zip(*sizes, strict=True)]
        assert [stop - start for start, stop in own] == longest
    assert [stop - start for start, stop in most.cells] == [
        stop - start for start, stop in most.tokens.rows
    ]


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [
        (32, 1, [(0,)]),
        (32, 2, [(0,), (1,)]),
        (32, 4, [(0,), (1, 2), (3,)]),
        (28, 8, [(0,), (1, 3, 5), (2, 4, 6), (7,)]),
    ],
)
def test_stages_that_run_alike_are_one_kind(
    layers: int, stages: int, wanted: list[tuple[int, ...]]
) -> None:
    layout = Layout(pipeline=stages, data=2)
    model = replace(LLAMA, layers=LLAMA.layers[:1] * layers)
    kinds = kinds_of(ask(layout, model), Schedule(groups=1))
    assert [kind.stages for kind in kinds] == wanted
    for kind in kinds:
        assert kind.rank.along["pipeline"] == kind.stages[0]
        assert (kind.is_first, kind.is_last) == (0 in kind.stages, stages - 1 in kind.stages)
    near = replace(ask(layout, model), machine=replace(machine("h100"), devices=4))
    counts = on_machines(near, kinds)
    assert {sum(of) for of in counts} == {min(4, 2 * stages)}


def test_keys_are_asked_for_in_blocks_of_a_rank() -> None:
    """Ranks that share heads hold all keys, those that share keys all heads."""
    schedule = Schedule(chunk=1000, kv_block=99)
    for layout, chunk, block in (
        (Layout(ulysses=8, shards=2), 63, 13),
        (Layout(ring=3), 334, 99),
        (Layout(shards=4), 250, 99),
        (Layout(tensor=2, ulysses=2, data=2), 250, 25),
    ):
        own = own_schedule(schedule, layout)
        assert (own.chunk, own.kv_block) == (chunk, block)


@pytest.mark.parametrize(
    ("layout", "is_possible"),
    [
        (Layout(ulysses=8), True),
        (Layout(ulysses=4, tensor=2), True),
        (Layout(ulysses=8, tensor=2), False),
        (Layout(ulysses=3), False),
        (Layout(ring=64), True),
        (Layout(ulysses=8, shards=128), True),
    ],
)
def test_heads_are_whole(layout: Layout, is_possible: bool) -> None:
    if is_possible:
        refuse_layout(ask(layout))
        return
    with pytest.raises(UnsupportedError, match="8 K, V heads cannot be shared"):
        refuse_layout(ask(layout))


def test_states_of_all_devices_are_those_of_the_model() -> None:
    """18 bytes a parameter: bf16 weight, fp32 gradient, master and two moments. Devices that cut
    layers by heads and features have all of what lies outside."""
    each, groups = 2 + 4 + 12, ((0, 16), (16, 32))
    whole = LLAMA.parameters * each
    for layout in (Layout(ulysses=8), Layout(ulysses=8, data=16), Layout(tensor=8, ring=4)):
        held = states(ask(layout), groups)
        own = held.weights + held.gradients + held.optimizer
        again = LLAMA.outer() * each * (layout.tensor - 1)
        assert 0 <= own * layout.devices() - whole - again <= each * layout.devices()
    alone = states(ask(Layout(ulysses=8, fsdp=False)), groups)
    assert alone.weights + alone.gradients + alone.optimizer == whole
    assert alone.gathered == 0


def test_open_group_is_gathered_whole_and_cut_by_tensor() -> None:
    layer, outer = LLAMA.layers[0].work.parameters, LLAMA.outer()
    question = ask(Layout(tensor=8, ring=4))
    held = states(question, ((0, 30), (30, 32)))
    own = -(-30 * layer // 8) + outer
    assert (held.gathered, held.accumulators) == (2 * own, 4 * own)
    frozen = replace(
        LLAMA, layers=LLAMA.layers[:2], parameters=outer + 2 * layer, trainable=outer + 2 * layer
    )
    assert states(ask(Layout(ulysses=8), frozen), ((0, 2),)).gathered == 2 * (outer + 2 * layer)


@pytest.mark.parametrize("fsdp", [True, False])
def test_states_in_main_memory_are_those_of_the_device(fsdp: bool) -> None:
    """Shards, or a whole copy for each rank; what is gathered and added up stays on the device."""
    question, groups = ask(Layout(ulysses=8, fsdp=fsdp)), ((0, 16), (16, 32))
    there = states(replace(question, optimizer=Optimizer.HOST, weights=Tier.HOST), groups)
    here = states(question, groups)
    assert (there.weights_on_host, there.gradients_on_host) == (here.weights, here.gradients)
    assert there.optimizer_on_host == here.optimizer
    assert there.weights == there.gradients == there.optimizer == 0
    wanted = (here.gathered, here.accumulators) if fsdp else (0, 0)
    assert (there.gathered, there.accumulators) == wanted
