"""Calibration gives a machine that can be planned for, on the hardware at hand."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farspan.engine import calibrate as module
from farspan.engine.bench import (
    HEAD_DIM,
    Attention,
    Bench,
    Effort,
    attention,
    attentions,
    products,
    softmax,
    weight_products,
)
from farspan.engine.calibrate import calibrate, here
from farspan.plan.price.machines import from_json, machine, read, to_json, user_file, write
from farspan.spec import LayerSpec, Refused

CPU = torch.device("cpu")
GLANCE = Effort(longest=1e-4, tries=1, passes=2, copied=2**20, queries=64)


@pytest.fixture
def glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", GLANCE)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def bench(clock: Callable[[], float] | None = None) -> Bench:
    return Bench(CPU, GLANCE) if clock is None else Bench(CPU, GLANCE, clock)


@pytest.mark.usefixtures("glance")
def test_a_calibrated_machine_is_a_machine_file(tmp_path: Path) -> None:
    said: list[str] = []
    dtypes = (torch.float32, torch.float64)
    file = calibrate(CPU, dtypes, said.append, quick=True)
    assert file.spec.unified
    assert file.spec.rates.keys() == {"float32", "float64"}
    assert file.spec.reserve == 0
    assert file.spec.fetch == file.spec.fetch_together
    # Every number is one that a file may hold, and comes back.
    assert from_json(to_json(file), "m") == file
    path = tmp_path / "m.json"
    write(file, path)
    assert read(path) == file
    assert said[0] == "1 of 2: float32: matrix products"
    assert said[-1] == "2 of 2: overhead of a cell"
    # What one process cannot measure is said to be assumed.
    assert file.sources.keys() == {"peer", "network", "latency"}
    assert file.measured_on["versions"]["torch"] == torch.__version__
    assert file.measured_on["pinned_bytes_a_second"] > 0


@pytest.mark.slow
def test_a_quick_calibration_looks_at_what_models_are_trained_in() -> None:
    file = calibrate(CPU, quick=True)
    assert file.about == "measured quickly"
    assert file.spec.rates.keys() == {"bfloat16", "float32"}
    for rates in file.spec.rates.values():
        assert rates.peak == max(rate for _, rate in rates.matmul.points)
        assert rates.logit > 0
        assert rates.weights is not None
        assert rates.causal_forward is not None
        assert rates.causal_backward is not None


def test_here_reads_the_file_of_the_user(home: Path) -> None:
    mine = replace(machine("h200"), name="mine", unified=True)
    write(replace(read("h200"), spec=mine), user_file())
    assert user_file().is_relative_to(home)
    assert here() == mine


@pytest.mark.usefixtures("home")
def test_here_refuses_the_file_of_another_kind_of_machine() -> None:
    write(read("h200"), user_file())
    if torch.cuda.is_available():
        pytest.skip("this machine is of that kind")
    with pytest.raises(Refused, match="describes h200, but here is no GPU"):
        here()


@pytest.mark.usefixtures("glance", "home")
def test_here_measures_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DTYPES", (torch.float32, torch.float32))
    assert here().rates.keys() == {"float32"}
    assert not user_file().exists()


def test_a_call_takes_the_median_of_all_passes() -> None:
    seconds = iter([1.0, 1.0, 5.0, 1.0, 1.0, 3.0, 1.0, 1.0, 4.0])
    now = [0.0]

    def call() -> None:
        now[0] += next(seconds)

    timed = bench(clock=lambda: now[0])
    # Each pass looks twice without counting.
    assert [timed.seconds("call", call) for _ in range(3)] == [5.0, 4.0, 4.0]


def test_short_calls_are_repeated() -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 1e-5

    timed = bench(clock=lambda: now[0])
    assert timed.seconds("call", call) == pytest.approx(1e-5)
    assert now[0] > 1e-3


def test_a_curve_ends_with_the_first_call_that_takes_too_long() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def points() -> Iterator[tuple[float, int, Callable[[], object]]]:
        for size in (1.0, 2.0, 4.0, 8.0):
            yield size, 2, partial(sleep, 4e-5 * size)

    quick = Bench(CPU, replace(GLANCE, longest=1.0), lambda: now[0])
    curve = quick.curve("c", points())
    # Two calls at once: 2e-5 seconds a unit of size each.
    assert [size for size, _ in curve.points] == [1.0, 2.0, 4.0, 8.0]
    assert [rate for _, rate in curve.points] == pytest.approx([5e4] * 4)
    slow = Bench(CPU, replace(GLANCE, longest=6e-5), lambda: now[0]).curve("c", points())
    assert [size for size, _ in slow.points] == [1.0, 2.0]


def test_products_count_what_they_multiply() -> None:
    size, count, call = next(products(bench(), torch.float32))
    assert (size, count) == (2.0 * 256 * 64 * 64, 2)
    call()
    size, count, weights = next(weight_products(bench(), torch.float32))
    assert (size, count) == (2.0 * 256 * 64 * 64, 1)
    gradient = weights()
    assert isinstance(gradient, Tensor)
    assert gradient.shape == (64, 64)


def _tensors(found: object) -> tuple[Tensor, ...]:
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_the_pairs_that_it_sees(causal: bool) -> None:
    made = attention(bench(), torch.float32, 32, 16, causal=causal)
    ones = torch.ones(32, 32)
    seen = int((ones.tril() if causal else ones).sum())
    assert made.pairs == seen
    out, lse = _tensors(made.call(backward=False)())
    assert out.shape == made.q.shape
    dq, dk, dv = _tensors(made.call(backward=True)())
    assert dq.shape == made.q.shape
    assert dk.shape == dv.shape == made.k.shape
    assert lse.isfinite().all()


def test_attention_calls_are_those_that_rates_are_asked_about() -> None:
    """The size on the curve is the one that planning looks up for the same call."""
    size, heads, _ = next(attentions(bench(), torch.float32, causal=False, backward=True))
    layer = LayerSpec(query_heads=heads, kv_heads=2, head_dim=HEAD_DIM, value_dim=HEAD_DIM)
    rates = machine("h200").rates["bfloat16"]
    expected = heads * size / rates.attention_backward.at(size)
    assert rates.attention(256 * 256, layer, backward=True) == expected


def test_the_softmax_is_what_narrow_heads_do_not_save(monkeypatch: pytest.MonkeyPatch) -> None:
    exponential = 5e-10
    now = [0.0]

    def made(self: Attention, *, backward: bool) -> Callable[[], object]:
        assert backward
        one = 3e-9 * self.q.shape[3] / HEAD_DIM + exponential
        seconds = self.pairs * self.heads * one
        return lambda: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(Attention, "call", made)
    found = softmax(bench(clock=lambda: now[0]), torch.float32, backward=True)
    assert found == pytest.approx(exponential)
