"""The checker passes every program that is built, and no program with a mistake in it."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from farspan.program.builder import build_evaluation, build_program
from farspan.program.placement import Placement, PlacementRequest
from farspan.program.program import (
    AttentionMode,
    Backward,
    Clear,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Gather,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Receive,
    Reduce,
    Release,
    Send,
    Store,
    StoreGradient,
)
from farspan.program.residency import Kind
from farspan.spec import Cut, ModelSpec, RunSpec, Schedule, Sparse, Tier
from tests.memory.check_placement import check_placement
from tests.oracles.check import check_program
from tests.program import cases, mutate

DEVICE, HOST = Tier.DEVICE, Tier.HOST

# Five layers, four chunks, the last ragged; between them every instruction, mode and tier.
RICH = {
    "streamed": Schedule(
        chunk=10,
        groups=(3, 2),
        kv=HOST,
        attention_open=True,
        attention_save_fraction=0.4,
        activation_save_fraction=0.3,
        kv_block=16,
    ),
    "device": Schedule(
        chunk=10,
        groups=(1, 2, 2),
        boundary_inputs=DEVICE,
        attention=DEVICE,
        activations=DEVICE,
        attention_save_fraction=0.6,
        activation_save_fraction=0.2,
    ),
    "home": Schedule(
        chunk=10,
        groups=(3, 2),
        kv_kept=True,
        attention_save_fraction=0.7,
        activation_save_fraction=0.5,
    ),
    "sparse, held": Schedule(
        chunk=10,
        groups=(2, 3),
        kv=HOST,
        layer_checkpoint=True,
        attention_open=True,
        sparse=Sparse(page=2, budget=4, recent=11, sinks=0),
    ),
}


@cache
def rich(name: str) -> Program:
    return build_program(cases.model_of(5), RunSpec(1, 36), RICH[name])


@pytest.fixture(params=RICH)
def program(request: pytest.FixtureRequest) -> Program:
    return rich(request.param)


def arena_requests(program: Program, tier: Tier) -> tuple[list[PlacementRequest], Placement]:
    """The buffers of an arena and where they are, with the most bytes alive counted anew."""
    held = [b for b in program.buffers.values() if b.tier is tier]
    times = {b.born for b in held}
    bound = max((sum(b.bytes for b in held if b.born <= t < b.dies) for t in times), default=0)
    return (
        [PlacementRequest(b.bytes, b.born, b.dies) for b in held],
        Placement(tuple(b.address for b in held), program.arena_bytes[tier], bound),
    )


@given(cases.steps())
def test_every_program_passes(step: tuple[ModelSpec, RunSpec, Schedule]) -> None:
    program = build_program(*step)
    check_program(program, program.arena_bytes)
    for tier in Tier:
        requests, placement = arena_requests(program, tier)
        check_placement(requests, placement)
        tight = placement.height == placement.lower_bound
        event(f"{tier} arena {'at' if tight else 'above'} the lower bound")


@given(cases.steps())
def test_every_evaluation_passes(step: tuple[ModelSpec, RunSpec, Schedule]) -> None:
    program = build_evaluation(*step)
    check_program(program)
    model, run, _ = step
    cells = [i for i in program.instructions if isinstance(i, Forward)]
    assert len(cells) == len(model.layers) * len(program.chunks)
    assert not any(buffer.kind is Kind.DKV for buffer in program.buffers.values()), run


@given(cases.steps(), st.sampled_from([Cut.AFTER_LAYERS, Cut.AFTER_HEAD]))
def test_every_cut_program_passes(step: tuple[ModelSpec, RunSpec, Schedule], cut: Cut) -> None:
    """Its forward runs every cell once, and the head if the cut is behind that."""
    program = build_program(*step, cut=cut)
    check_program(program, program.arena_bytes)
    first = program.instructions[: program.cut]
    cells = [(i.layer, i.chunk) for i in first if isinstance(i, Forward)]
    assert len(cells) == len(set(cells)) == len(step[0].layers) * len(program.chunks)
    assert not any(isinstance(i, Backward) for i in first)
    heads = sum(isinstance(i, Head) for i in first)
    assert heads == (len(program.chunks) if cut is Cut.AFTER_HEAD else 0)
    again = _computing(program) - _computing(build_program(*step))
    # The last chunk's cells in the last group, and its top layer's.
    assert again <= len(step[0].layers) + len(program.chunks) - 1


def _computing(program: Program) -> int:
    """Forward cells that compute attention."""
    modes = [i.mode for i in program.instructions if isinstance(i, Forward)]
    return modes.count(AttentionMode.COMPUTE)


def escaped(mutants: Iterator[mutate.Mutant]) -> list[str]:
    """Mutants that the checker passes; there must have been some to look at."""
    names = [(name, mutate.caught(mutant)) for name, mutant in mutants]
    assert names
    return [name for name, was_caught in names if not was_caught]


def test_rich_programs_hold_every_instruction_and_mode() -> None:
    instructions = [i for name in RICH for i in rich(name).instructions]
    of_ranks = {Gather, Release, Reduce, Receive, Send}  # test_share, test_streamed_ranks
    assert {type(i) for i in instructions} == set(Instruction.__args__) - of_ranks
    assert {i.mode for i in instructions if isinstance(i, Forward)} == set(AttentionMode)


def may_be_spare(program: Program) -> Callable[[Instruction], bool]:
    """A fetch is spare when its slot still holds the chunk, a slot's clearing when it is still
    zero, and K, V of the last chunk are written for nobody when its graph was not kept."""
    last = len(program.chunks) - 1

    def spare(i: Instruction) -> bool:
        if isinstance(i, Evict):
            return program.buffers[i.source].kind is Kind.KV and i.chunk == last
        if isinstance(i, Clear):
            return program.buffers[i.buffer].layer < 0
        return isinstance(i, Fetch)

    return spare


def test_an_instruction_less_is_caught(program: Program) -> None:
    spare = may_be_spare(program)
    assert escaped(mutate.deletions(program, lambda i: not spare(i))) == []
    copies = lambda i: spare(i) and not isinstance(i, Clear)  # noqa: E731
    spared = [mutate.caught(mutant) for _, mutant in mutate.deletions(program, copies)]
    assert spared.count(False) <= 0.2 * len(spared)


def test_another_layer_chunk_or_group_is_caught(program: Program) -> None:
    assert escaped(islice(mutate.other_numbers(program), 0, None, 7)) == []


def test_another_buffer_is_caught(program: Program) -> None:
    """All that reads or writes another buffer, but where slots hold the same: what was fetched
    twice, or zeros."""
    mutants = list(islice(mutate.renamings(program), 0, None, 11))
    passed = escaped(iter(mutants))
    assert len(passed) <= 0.05 * len(mutants)
    others = [name for name in passed if name.split()[1][:4] not in ("Fetc", "Load")]
    assert [name for name in others if program.buffers[name.split()[-1]].layer >= 0] == []


def dependent(first: Instruction, second: Instruction) -> bool:
    """The second uses what the first makes."""
    if getattr(first, "chunk", 0) != getattr(second, "chunk", 1):
        return False
    match first, second:
        case (Store(buffer=made) | StoreGradient(buffer=made), Evict(source=used)):
            return made == used
        case (Load() | Embed(), Forward()) | (LoadGradient() | Head(), Backward()):
            return True
        case Forward(), Evict():
            return second.source in (first.write_kv, first.attention, first.activations)
        case (Forward(), Store() | Head()) | (Backward(), StoreGradient() | EmbedBackward()):
            return True
        case (Forward(), Forward()) | (Backward(), Backward()) | (Forward(), Backward()):
            return True
        case _:
            return False


def test_two_dependent_instructions_swapped_are_caught(program: Program) -> None:
    mutants = list(mutate.neighbours(program, dependent))
    assert len(mutants) > 50
    assert escaped(iter(mutants)) == []


def test_an_overlap_is_caught(program: Program) -> None:
    assert escaped(islice(mutate.overlaps(program), 0, None, 11)) == []


def test_a_buffer_outside_its_arena_is_caught(program: Program) -> None:
    mutants = (
        mutate.with_buffer(program, b.name, address=program.arena_bytes[b.tier] - b.bytes + 64)
        for b in program.buffers.values()
        if b.address >= 0
    )
    assert escaped(mutants) == []


def test_a_forward_flag_turned_is_caught(program: Program) -> None:
    mutants = (
        mutate.changed(program, index, name, not getattr(i, name))
        for index, i in enumerate(program.instructions)
        if isinstance(i, Forward)
        for name in ("graph", "kept", "hold", "chooses")
        # A hold that nobody asks for keeps a register longer, and changes nothing.
        if name != "hold" or i.hold or i.graph
    )
    assert escaped(mutants) == []
