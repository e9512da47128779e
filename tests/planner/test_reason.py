"""What is said to help: what gives the results that were asked for first, of that the cheapest."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from farspan.formatting import read_bytes
from farspan.planner.explain import reason_of, remedy_of
from farspan.planner.machines import machine
from farspan.planner.request import Optimizer, Question
from farspan.program.layout import Layout
from farspan.spec import RunSpec, Sparse
from tests.program.cases import model_of
from tests.report.cases import GIB, fitting, overrun

Helps = Callable[[Question], bool]


def asked(optimizer: Optimizer = Optimizer.ADAMW) -> Question:
    return Question(model_of(2), RunSpec(4, 64), machine("h200"), Layout(), optimizer)


def remedy(question: Question, helps: Helps) -> str:
    plan = replace(overrun(), question=question)
    return remedy_of(plan, lambda changed, _=None: helps(changed), lambda: 32, is_named=False)


def eight_bit(question: Question) -> bool:
    return question.optimizer is Optimizer.ADAMW8BIT


@pytest.mark.parametrize(
    ("helps", "expected"),
    [
        (lambda q: q.optimizer is Optimizer.HOST, "--optimizer host"),
        (lambda q: q.machine.host_bytes > machine("h200").host_bytes, "--host-memory "),
        (lambda q: q.run.batch == 2, "--batch 2"),
        (lambda q: q.layout.devices() == 8, "--gpus 8"),
    ],
    ids=["host", "memory", "batch", "devices"],
)
def test_an_exact_change_comes_before_moments_of_8_bits(helps: Helps, expected: str) -> None:
    assert remedy(asked(), lambda q: helps(q) or eight_bit(q)).startswith(expected)


def test_a_smaller_batch_finds_the_gradients_of_the_others() -> None:
    """An update that is to be the same has more of them."""
    assert remedy(asked(), lambda q: q.accumulates) == "--batch 2"
    assert remedy(asked(), lambda q: q.run.batch < 4 and not q.accumulates) == "--context 32"


def test_moments_of_8_bits_come_before_a_shorter_context() -> None:
    assert remedy(asked(), eight_bit) == "--optimizer adamw8bit"
    assert remedy(asked(), lambda _: False) == "--context 32"


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1MiB"), (100 * 2**20 + 1, "201MiB"), (8.73 * GIB, "18GiB"), (1024 * GIB, "2048GiB")],
)
def test_main_memory_that_helps_is_rounded_up(size: float, text: str) -> None:
    """What is said is what was looked at, as the option reads it."""
    here = replace(machine("h200"), host_bytes=int(size))
    seen = []

    def helps(question: Question) -> bool:
        seen.append(question.machine.host_bytes)
        return question.machine.host_bytes > here.host_bytes

    assert remedy(replace(asked(), machine=here), helps) == f"--host-memory {text}"
    assert seen[-1] == read_bytes(text, "host_memory") >= 2 * here.host_bytes


def test_sparse_attention_is_not_said_to_be_helped_by_devices() -> None:
    """It is planned for one."""

    def with_more(question: Question) -> bool:
        return question.layout.devices() > 1

    assert remedy(asked(), with_more) == "--gpus 2"
    assert remedy(replace(asked(), sparse=Sparse()), with_more) == "--context 32"


@pytest.mark.parametrize("optimizer", [o for o in Optimizer if o is not Optimizer.ADAMW])
def test_an_optimizer_that_was_chosen_is_not_exchanged(optimizer: Optimizer) -> None:
    seen = set()

    def look(question: Question) -> bool:
        seen.add(question.optimizer)
        return False

    remedy(asked(optimizer), look)
    assert seen == {optimizer}


@pytest.mark.parametrize(
    ("host", "device", "seconds", "words"),
    [
        (
            120,
            30,
            255.0,
            "the fastest takes 20.0 GiB more of main memory for at most 0.4% less time",
        ),
        (100, 31, 255.9999, "1.0 GiB more of device memory for at most 0.1% less time"),
        (120, 30, 256.0, ""),
    ],
)
def test_what_the_fastest_would_take_is_said(
    host: int, device: int, seconds: float, words: str
) -> None:
    plan, fastest = fitting(), fitting()
    fastest = replace(
        fastest,
        host=replace(plan.host, parts={"attention": host * GIB}),
        device=replace(plan.device, parts={"weights": device * GIB}),
        seconds=replace(plan.seconds, total=seconds),
    )
    reason = reason_of(plan, [fastest, overrun()])
    assert words in reason if words else "the fastest takes" not in reason
