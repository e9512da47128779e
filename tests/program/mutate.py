"""Programs with one thing wrong. Lifetimes are made to fit the instructions again, so that what is
caught is the mistake and not its traces."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from farspan.program.program import Allocate, Free, Instruction, Program
from tests.oracles.check import check_program
from tests.oracles.contents import ProgramError

Mutant = tuple[str, Program]
BUFFER_FIELDS = (
    *("buffer", "source", "target", "prefix", "write_kv", "attention", "activations"),
    *("accumulator", "own_dkv", "own_kv", "means", "choice"),
)


def caught(program: Program) -> bool:
    try:
        check_program(program)
    except ProgramError:
        return True
    return False


def with_instructions(program: Program, instructions: list[Instruction]) -> Program:
    """The program with other instructions, and lifetimes as these have them."""
    buffers = dict(program.buffers)
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Allocate):
            buffers[instruction.buffer] = replace(buffers[instruction.buffer], born=index)
        elif isinstance(instruction, Free):
            buffers[instruction.buffer] = replace(buffers[instruction.buffer], dies=index)
    return replace(program, instructions=tuple(instructions), buffers=buffers)


def deletions(program: Program, wanted: Callable[[Instruction], bool]) -> Iterator[Mutant]:
    for index, instruction in enumerate(program.instructions):
        if wanted(instruction):
            left = [*program.instructions[:index], *program.instructions[index + 1 :]]
            yield f"without {index} {instruction}", with_instructions(program, left)


def swapped(program: Program, first: int, second: int) -> Mutant:
    changed = list(program.instructions)
    changed[first], changed[second] = changed[second], changed[first]
    name = f"swapped {first} {changed[second]} and {second} {changed[first]}"
    return name, with_instructions(program, changed)


def neighbours(
    program: Program, wanted: Callable[[Instruction, Instruction], bool]
) -> Iterator[Mutant]:
    """Two instructions that follow one another, the other way round."""
    for index, (first, second) in enumerate(pairwise(program.instructions)):
        if wanted(first, second):
            yield swapped(program, index, index + 1)


def changed(program: Program, index: int, name: str, value: Any) -> Mutant:
    """One field of one instruction."""
    instruction = program.instructions[index]
    values: dict[str, Any] = {name: value}
    other: Any = replace(instruction, **values)
    instructions = list(program.instructions)
    instructions[index] = other
    return f"{index} {instruction} with {name} {value}", with_instructions(program, instructions)


def renamings(program: Program) -> Iterator[Mutant]:
    """One instruction reads or writes another buffer of the same kind and tier, alive just then."""
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Allocate | Free):
            continue
        for field in fields(instruction):
            name = getattr(instruction, field.name)
            if field.name not in BUFFER_FIELDS or name is None:
                continue
            for other in _alike(program, name, index):
                yield changed(program, index, field.name, other)


def _alike(program: Program, name: str, index: int) -> list[str]:
    wanted = program.buffers[name]
    return [
        other.name
        for other in program.buffers.values()
        if other.name != name
        and (other.kind, other.tier) == (wanted.kind, wanted.tier)
        and other.born < index < other.dies
    ]


def other_numbers(program: Program) -> Iterator[Mutant]:
    """One instruction with the next layer, chunk or group, or the one before."""
    for index, instruction in enumerate(program.instructions):
        for field in fields(instruction):
            if field.name in ("layer", "chunk", "group"):
                value = getattr(instruction, field.name)
                yield changed(program, index, field.name, value + 1)
                yield changed(program, index, field.name, value - 1)


def with_buffer(program: Program, name: str, **values: Any) -> Mutant:
    buffers = dict(program.buffers)
    buffers[name] = replace(buffers[name], **values)
    return f"{name} with {values}", replace(program, buffers=buffers)


def overlaps(program: Program) -> Iterator[Mutant]:
    """A buffer that begins where another that is alive with it begins, or ends in it."""
    buffers = [b for b in program.buffers.values() if b.address >= 0 and b.bytes > 0]
    for one in buffers:
        for other in buffers:
            together = max(one.born, other.born) < min(one.dies, other.dies)
            if one is not other and one.tier is other.tier and together:
                yield with_buffer(program, one.name, address=other.address)
                yield with_buffer(program, one.name, address=other.address + other.bytes - 64)
