"""The time left, and what is printed where there is no terminal."""

import io

import pytest
from rich.console import Console

from farspan.data.tokenizers import HowFar
from farspan.train.console import BarReporter, LineReporter, Pace, make_reporter
from farspan.train.observer import Interrupt, Observer
from tests.train.tiny import cells_done

VALUES = {"step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1234.5}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pace_predicts_from_the_part_done_and_then_from_whole_steps() -> None:
    clock = Clock()
    pace = Pace(steps=10, tokens_per_step=400, clock=clock)
    pace.begin()
    assert pace.remaining(0, 0.0) is None
    assert pace.tokens_per_second(0.0) is None
    clock.now += 2.0
    assert pace.remaining(0, 0.25) == pytest.approx(8.0 * 9.75)
    assert pace.tokens_per_second(0.25) == pytest.approx(50.0)
    clock.now += 8.0
    pace.end()
    assert pace.remaining(1, 0.0) == pytest.approx(90.0)
    pace.begin()
    clock.now += 1.0
    assert pace.remaining(1, 0.5) == pytest.approx(85.0)
    assert pace.tokens_per_second(0.5) == pytest.approx(200.0)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80), out


def test_lines_where_there_is_no_terminal() -> None:
    clock, (made, out) = Clock(), console(False)
    with LineReporter(made, patience=10.0, clock=clock) as reporter:
        reporter.preparing(5, 100)
        reporter.start(steps=4, tokens_per_step=1000, step=0)
        reporter.begin(1)
        for cell in range(1, 9):
            clock.now += 5.0
            reporter.cells(1, cell / 8, cells_done(cell, 8))
        reporter.end(VALUES)
        reporter.evaluated({"step": 1, "heldout_loss": 2.75})
        reporter.end({"step": 2, "nonfinite": "loss"})
    assert out.getvalue().splitlines() == [
        "step 1/4  cell 2/8  25 tokens/s  eta 2:30",
        "step 1/4  cell 4/8  25 tokens/s  eta 2:20",
        "step 1/4  cell 6/8  25 tokens/s  eta 2:10",
        "step 1/4  cell 8/8  25 tokens/s  eta 2:00",
        "step 1/4  loss 2.5000  lr 1.00e-03  |grad| 0.500  1,234 tokens/s  eta 2:00",
        "step 1  held-out loss 2.7500",
        "step 2/4  skipped: loss is not finite  eta 1:20",
    ]


SPARSE = {"attention": "sparse", "attention_mass": 0.9234}


def test_sparse_attention_stands_beside_every_loss() -> None:
    clock, (made, out) = Clock(), console(False)
    with LineReporter(made, patience=1.0, clock=clock) as reporter:
        reporter.start(4, 1000, 0, " (sparse)")
        reporter.begin(1)
        clock.now += 2.0
        reporter.cells(1, 0.5, cells_done(1, 2))
        reporter.end(VALUES | SPARSE)
        reporter.evaluated({"step": 1, "heldout_loss": 2.75, "attention": "sparse"})
    assert out.getvalue().splitlines() == [
        "step 1/4 (sparse)  cell 1/2  250 tokens/s  eta 0:14",
        "step 1/4  loss 2.5000 (sparse attention, mass 0.923)  lr 1.00e-03  |grad| 0.500  "
        "1,234 tokens/s  eta 0:06",
        "step 1  held-out loss 2.7500 (sparse attention)",
    ]


def test_a_slow_tokenizer_is_heard_of() -> None:
    clock, (made, out) = Clock(), console(False)
    reporter = LineReporter(made, patience=10.0, clock=clock)
    for documents in range(4):
        clock.now += 6.0
        reporter.preparing(
            documents, 1000 * documents, HowFar(documents, 4, rows=True, seconds=6.0)
        )
    assert out.getvalue().splitlines() == [
        "tokenizing: 1 of 4 rows, 18 s left: 1 document, 1,000 tokens",
        "tokenizing: 3 of 4 rows, 2 s left: 3 documents, 3,000 tokens",
    ]


def test_a_line_says_which_of_how_many_and_the_time_left() -> None:
    clock, (made, out) = Clock(), console(False)
    observer = Observer(LineReporter(made, patience=10.0, clock=clock), Interrupt())
    observer.reporter.start(steps=4, tokens_per_step=1000, step=0)
    observer.reporter.begin(1)
    for batch in range(2):
        for cell in (1, 2):
            clock.now += 6.0
            observer.training(1, batch, 2, cells_done(cell, 2))
    for sequence in range(3):
        for cell in (1, 2):
            clock.now += 6.0
            observer.evaluating(sequence, 3, cells_done(cell, 2))
    assert out.getvalue().splitlines() == [
        "step 1/4  batch 1/2  cell 2/2  42 tokens/s  eta 1:24",
        "step 1/4  batch 2/2  cell 2/2  42 tokens/s  eta 1:12",
        "evaluating: 33%  sequence 1/3  cell 2/2  eta 0:24",
        "evaluating: 67%  sequence 2/3  cell 2/2  eta 0:12",
        "evaluating: 100%  sequence 3/3  cell 2/2  eta 0:00",
    ]


def test_bars_on_a_terminal() -> None:
    made, out = console(True)
    with make_reporter(made) as reporter:
        assert isinstance(reporter, BarReporter)
        reporter.preparing(5, 100)
        reporter.measuring("matrix products")
        reporter.start(steps=4, tokens_per_step=1000, step=0)
        reporter.begin(1)
        reporter.cells(1, 0.5, cells_done(4, 8))
        reporter.evaluating(0.5, cells_done(2, 4))
        reporter.end(VALUES)
        reporter.evaluated({"step": 1, "heldout_loss": 2.75})
        reporter.note("[a] note")
        reporter.begin(2)
        reporter.cells(2, 0.5, cells_done(4, 8))
    assert "…" not in out.getvalue()
    for words in ("cell 4/8", "loss 2.5000", "held-out loss 2.7500", "[a] note", "eta"):
        assert words in out.getvalue()
