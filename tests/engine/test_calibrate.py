"""Calibration gives a machine that can be planned for, on the hardware at hand."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.ask import Request
from farspan.engine import calibrate as module
from farspan.engine.calibrate import (
    Calibration,
    FastestKernel,
    _name,
    calibrate,
    fastest_attention,
    here,
)
from farspan.engine.microbench import (
    GLANCE,
    HEAD_DIM,
    HEAVY,
    QUICK,
    AttentionProblem,
    Bench,
    attention,
    describe_machine,
    softmax,
    workspace,
)
from farspan.engine.tiers import Arena
from farspan.planner.machines import (
    BUSY_RATES,
    CURVES,
    OTHER_CURVES,
    PAGES,
    MachineFile,
    from_json,
    machine,
    read,
    to_json,
    user_file,
    write,
)
from farspan.planner.plans import best_plan
from farspan.report.plan import plan_view
from farspan.sparse import measure
from farspan.sparse.measure import page_curves
from farspan.spec import AttentionKernel, Sparse, UnsupportedError
from tests.report.cases import text_of

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
# FP8 needs a GPU and torchao.
PLAIN = tuple(name for name in (*CURVES, *OTHER_CURVES) if name not in (*PAGES, "fp8"))
TIMED = (*PLAIN, "softmax_forward", "softmax_backward", "logit")


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
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_calibrated_machine_is_a_machine_file(device: torch.device, tmp_path: Path) -> None:
    said: list[str] = []
    on_cpu = device.type == "cpu"
    dtypes = (torch.float32, torch.float64 if on_cpu else torch.bfloat16)
    names = {_name(dtype) for dtype in dtypes}
    file = calibrate(device, dtypes, said.append, quick=True)
    assert file.about == GLANCE.about
    assert file.spec.unified == on_cpu
    assert file.spec.rates.keys() == names
    if on_cpu:
        assert file.spec.reserve == 0
        assert not any(rates.attention_workspace for rates in file.spec.rates.values())
        assert file.spec.fetch == file.spec.fetch_together
    # Every number is one that a file may hold, and comes back.
    assert from_json(to_json(file), "m") == file
    path = tmp_path / "m.json"
    write(file, path)
    assert read(path) == file
    assert said[0] == "1 of 2: float32: matrix products"
    planned = [words for words in said if words.startswith("2 of 2, ")]
    assert re.fullmatch(r"2 of 2, [\d.]+ m?s left: overhead of a cell", planned[-1])
    # Every field that was timed says how far its looks lay apart.
    timed = {"memory", "fetch", "evict", "overhead"}
    timed |= set() if on_cpu else {"fetch_together", "evict_together"}
    timed |= {f"rates.{dtype}.{name}" for dtype in names for name in TIMED}
    if not on_cpu and "bfloat16" in names:
        timed |= {f"rates.bfloat16.{name}" for name in PAGES}
    assert file.spread.keys() == timed
    assert min(file.spread.values()) >= 1.0
    # What one process cannot measure is said to be assumed.
    assert file.sources.keys() == {"peer", "network", "latency", "disk"}
    assert file.measured_on["versions"]["torch"] == torch.__version__
    assert file.measured_on["pinned_bytes_a_second"] > 0


@pytest.mark.usefixtures("home")
def test_here_refuses_the_file_of_another_kind_of_machine() -> None:
    write(read("h200"), user_file())
    if torch.cuda.is_available():
        pytest.skip("this machine is of that kind")
    with pytest.raises(UnsupportedError, match="describes h200, but this machine has no GPU"):
        here()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The dtypes of each calibration, which finds those of the h200, on a CPU."""
    asked: list[list[str]] = []

    def measure(device: torch.device, dtypes: Any, *_: Any, quick: bool) -> MachineFile:
        assert quick
        assert device == CPU
        asked.append([_name(dtype) for dtype in dtypes])
        file, some = read("h200"), read("h200").spec.rates["bfloat16"]
        spec = replace(file.spec, unified=True, processors=0, rates=dict.fromkeys(asked[-1], some))
        return replace(file, spec=spec, measured_on=describe_machine(), spread={"fetch": 1.2})

    monkeypatch.setattr(module, "calibrate", measure)
    return asked


def test_what_is_measured_in_passing_is_kept(
    home: Path, measured: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    first = here(said.append, CPU, [torch.float32])
    (path,) = (home / "farspan").iterdir()
    assert path != user_file()
    assert len(said) == 1
    assert (
        f"measuring float32 quickly; farspan keeps them in {path} if the machine is idle "
        in said[0]
    )
    assert caplog.messages == []
    again = here(said.append, CPU, [torch.float32])
    assert replace(again, host_bytes=1, device_bytes=1) == replace(
        first, host_bytes=1, device_bytes=1
    )
    assert again.host_bytes == again.device_bytes != first.host_bytes  # as it is now
    both = here(said.append, CPU, [torch.float32, torch.bfloat16])
    assert both.rates.keys() == {"float32", "bfloat16"}
    assert measured == [["float32"], ["bfloat16"]]
    path.write_text("{}")
    here(said.append, CPU, [torch.float32])
    assert len(measured) == 3


def test_what_a_busy_machine_gave_is_used_once(
    home: Path,
    measured: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calm = module.calibrate

    def busy(*arguments: Any, quick: bool) -> MachineFile:
        return replace(calm(*arguments, quick=quick), spread={"fetch": 37.2})

    monkeypatch.setattr(module, "calibrate", busy)
    said: list[str] = []
    found = here(said.append, CPU, [torch.float32])
    assert found.rates.keys() == {"float32"}
    assert said[-1] == BUSY_RATES  # for whoever answers with them
    assert caplog.messages == [
        "the machine was busy: fetch varied by 37.2x; run farspan calibrate when it is idle; "
        "these measurements are used once and not kept"
    ]
    assert not list(home.rglob("*.json"))
    here(lambda _: None, CPU, [torch.float32])
    assert len(measured) == 2  # measured again


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("change", ["processor", "threads", "versions"])
def test_another_machine_or_torch_is_measured_again(
    change: str, measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured in passing, and what `farspan calibrate` wrote."""
    here(device=CPU)
    now = describe_machine()
    if not torch.cuda.is_available():
        write(replace(read("h200"), measured_on=now), user_file())
        with pytest.raises(UnsupportedError, match="describes h200"):
            here(device=CPU)
    changed = {"torch": "1.0"} if change == "versions" else "other"
    monkeypatch.setattr(module, "versions", lambda: now | {change: changed})
    here(device=CPU)
    here(device=CPU)
    assert len(measured) == 2


def test_a_home_that_cannot_be_written_ends_nothing(
    home: Path, measured: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    (home / "farspan").write_text("in the way")
    here(device=CPU)
    here(device=CPU)
    assert len(measured) == 2
    assert "the measurements are not kept" in caplog.text


def scripted(*seconds: float) -> tuple[Bench, Callable[[], None]]:
    """A bench, and a call that takes these seconds one after the other."""
    left, now = iter(seconds), [0.0]

    def call() -> None:
        now[0] += next(left)

    return bench(clock=lambda: now[0]), call


def test_a_call_is_looked_at_until_its_best_two_agree() -> None:
    timed, call = scripted(*(1.0, 1.0, 54.0), *(1.0, 1.0, 3.0), *(1.0, 1.0, 3.2))
    for settled in (False, False, True):
        timed.seconds("call", call)
        assert timed.settled() is settled
    assert timed.seconds("call", call) == 3.0  # nothing is left to run
    assert timed.spread() == {"call": 18.0}


def test_a_field_settles_when_every_size_has() -> None:
    timed = bench()
    for size, looks in ((1.0, (2.0, 2.0)), (8.0, (2.0, 6.0))):
        for seconds in looks:
            timed.note("curve", seconds, size)
    timed.note("memory", 1.0)
    timed.note("memory", 1.0)
    assert timed.settled("memory")
    assert not timed.settled("curve")
    assert not timed.settled()
    assert timed.spread() == {"curve": 3.0, "memory": 1.0}
    timed.note("curve", 2.1, 8.0)
    assert timed.settled()


def test_a_gpu_is_timed_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call takes once the clock has gone down, which it does after 0.25 s of work; a short
    call is timed as it is."""
    now, begun = [0.0], [0.0]
    monkeypatch.setattr(Bench, "on_cpu", False)
    monkeypatch.setattr(Bench, "wait", lambda _: None)

    def call(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds if now[0] - begun[0] < 0.25 else 1.25 * seconds

        begun[0] = now[0]
        return run

    timed = Bench(CPU, replace(QUICK, loaded=0.6), lambda: now[0])
    assert timed.seconds("product", call(1e-3)) == pytest.approx(1.25e-3)
    assert timed.seconds("small", call(HEAVY / 2)) == pytest.approx(HEAVY / 2)
    glance = Bench(CPU, GLANCE, lambda: now[0])
    assert glance.seconds("product", call(1e-3)) == pytest.approx(1e-3)


class Unsteady:
    """Looks that give one preset after the other; what is said of them is a preset's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *files: MachineFile) -> None:
        self.files, self.looks = files, 0
        monkeypatch.setattr(module, "QUICK", replace(GLANCE, most=5))
        monkeypatch.setattr(Calibration, "look", self.look)
        monkeypatch.setattr(Calibration, "file", lambda _: files[min(self.looks, len(files)) - 1])
        monkeypatch.setattr(Bench, "settled", lambda _: True)

    def look(self, _: object) -> None:
        self.looks += 1


def contradictory() -> MachineFile:
    """Its products are above the peak."""
    file = read("h200")
    rates = replace(file.spec.rates["bfloat16"], peak=1.0)
    return replace(file, spec=replace(file.spec, rates={"bfloat16": rates}))


def test_a_contradiction_that_stays_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Unsteady(monkeypatch, contradictory())
    with pytest.raises(
        UnsupportedError, match=r"each other \(rates\.bfloat16\.matmul.* when it is idle"
    ):
        calibrate(CPU, quick=True)
    assert looked.looks == 5


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


def test_the_softmax_is_what_narrow_heads_do_not_save(monkeypatch: pytest.MonkeyPatch) -> None:
    exponential = 5e-10
    now = [0.0]

    def made(self: AttentionProblem, *, backward: bool) -> Callable[[], object]:
        assert backward
        one = 3e-9 * self.q.shape[3] / HEAD_DIM + exponential
        seconds = self.pairs * self.heads * one
        return lambda: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(AttentionProblem, "call", made)
    found = softmax(bench(clock=lambda: now[0]), "softmax", torch.float32, backward=True)
    assert found == pytest.approx(exponential)


@pytest.mark.parametrize(("squares", "expected"), [(3, 3.0), (0, 2.0)])
def test_a_workspace_is_what_a_backward_takes_beside_its_results(
    monkeypatch: pytest.MonkeyPatch, squares: int, expected: float
) -> None:
    """In bytes a row, head and element, the most of both kinds of call; what is kept between calls
    is none."""
    kept: list[Tensor] = []

    def made(self: AttentionProblem, *, backward: bool) -> Callable[[], object]:
        assert backward
        taken = squares if self.block.causal else 2

        def call() -> tuple[Tensor, ...]:
            if not kept:
                kept.append(torch.empty(2**28, dtype=torch.uint8))
            results = tuple(torch.empty_like(x) for x in (self.q, self.k, self.v))
            rows = self.block.queries + self.block.keys
            torch.empty(taken * rows * self.heads * HEAD_DIM, dtype=torch.uint8)
            return results

        return call

    monkeypatch.setattr(AttentionProblem, "call", made)
    assert workspace(bench(), torch.float32) == expected


@pytest.mark.parametrize("locks", [True, False])
def test_a_machine_that_locks_no_main_memory_is_planned_as_one(
    monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """What copies reach there is measured through the same arenas; plans run them in line."""
    monkeypatch.setattr(Arena, "is_pageable", not locks)
    calibration = Calibration(bench(), (torch.float32,))
    calibration.look()
    file = calibration.file()
    assert file.spec.pinned is locks
    assert ("pageable" in file.sources.get("fetch", "")) is not locks
    gpu = replace(machine("h100"), pinned=file.spec.pinned)
    assert from_json(to_json(MachineFile(gpu)), "machine").spec == gpu
    question = Request("Qwen2.5-0.5B", "4K", gpu).question()
    assert question.overlap is locks
    words = "the engine issues them where main memory cannot be locked"
    said = text_of(plan_view(best_plan(question, ["offload"])))
    assert (words in said) is not locks


def test_chosen_pages_are_timed_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves are tried on a GPU, by the tests above."""
    asked, votes = [], []

    def attended(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        asked.append((call.table.choice.shape, call.table.page, q.shape, k.shape == v.shape))
        return q, q

    def voted(q: torch.Tensor, means: torch.Tensor, *call: Any, largest: bool) -> None:
        pages, far, query_page = call
        votes.append((q.shape, means.shape, pages, far.page, query_page, largest))

    bench = Bench(CPU, GLANCE)
    assert page_curves(bench, "rates.bfloat16", torch.bfloat16) == {}
    monkeypatch.setattr(measure, "supports", lambda *_: True)
    monkeypatch.setattr(measure, "attend_pages", attended)
    monkeypatch.setattr(measure, "attend_pages_backward", lambda *_: None)
    monkeypatch.setattr(measure, "fused_votes", voted)
    assert page_curves(bench, "rates.float32", torch.float32) == {}
    found = page_curves(bench, "rates.bfloat16", torch.bfloat16)
    assert found.keys() == set(PAGES)
    queries, tokens = 2 * GLANCE.held, 8 * GLANCE.held
    chosen = min(tokens, Sparse().budget) // Sparse().page
    rows = (1, 8, queries // 16, chosen)
    assert asked[0] == (rows, Sparse().page, (1, 32, queries, HEAD_DIM), True)
    pages, means = range(tokens // 128), (1, 8, tokens // 2, HEAD_DIM)  # those of 2 tokens
    assert votes[0] == ((1, 32, queries, HEAD_DIM), means, pages, 128, 16, True)
    forward, backward, vote = (found[name].points[0][0] for name in PAGES)
    assert forward == 4.0 * queries * chosen * Sparse().page * HEAD_DIM
    assert backward == 2.5 * forward
    assert vote == 2.0 * queries * (tokens // 2) * HEAD_DIM


# -- the fastest attention kernel ------------------------------------------------------------------

CUDNN, FLASH, FA3, FA4 = (AttentionKernel(name) for name in ("cudnn", "flash", "fa3", "fa4"))

CUDNN, FLASH, FA3, FA4 = (AttentionKernel(name) for name in ("cudnn", "flash", "fa3", "fa4"))


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ({"cudnn": (1, 2), "flash": (2, 4), "fa4": (3, 6)}, (CUDNN, 2.4, None)),
        ({"cudnn": (3, 6), "flash": (2, 4), "fa4": (2.5, 5)}, (FLASH, 1.2, None)),
        ({"cudnn": (3, 6), "flash": (2, 4), "fa4": (1, 2)}, (FA4, 1.2, None)),
        ({"cudnn": (1, 6), "flash": (2, 4)}, (CUDNN, 1.2 * 6 / 5, FLASH)),
        ({"cudnn": (3, 3), "flash": (4, 5), "fa3": (2, 4)}, (FA3, 1.2 * 6 / 5, CUDNN)),
        # PyTorch has one of FlashAttention-2 and -3 at a time.
        ({"flash": (1, 5), "fa3": (2, 4.5)}, (FLASH, 1.2, None)),
        ({"fa4": (1, 2)}, (FA4, 1.2, None)),
        ({}, (None, 1.0, None)),
    ],
)
def test_kernels_that_are_here_are_compared(
    monkeypatch: pytest.MonkeyPatch,
    speeds: dict[str, tuple[float, float]],
    found: tuple[AttentionKernel | None, float, AttentionKernel | None],
) -> None:
    """In each direction. Those whose bits are the same take 1.2 times as long here, and cuDNN has
    none; what is not here, or fails while it runs, has lost."""

    class Kernels:
        def __init__(self, _: object, __: object, kernel: AttentionKernel) -> None:
            self.name = kernel.value

        def refuse(self, _: object) -> None:
            if self.name == "fa3" and FA3 not in speeds:
                raise UnsupportedError("not here")

        def ready(self) -> AbstractContextManager[None]:
            return nullcontext()

    def seconds(bench: Bench, _: object) -> tuple[float, float]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if bench.kernel not in speeds:
            raise RuntimeError("no kernel image")
        if deterministic and bench.kernel is AttentionKernel.CUDNN:
            raise UnsupportedError("cudnn")
        forward, backward = speeds[bench.kernel]
        slower = 1.2 if deterministic else 1.0
        return forward * slower, backward * slower

    monkeypatch.setattr(module, "AttentionKernels", Kernels)
    monkeypatch.setattr(module, "_kernel_seconds", seconds)
    monkeypatch.setattr(Bench, "on_cpu", False)
    looked = Bench(CPU, QUICK)
    fastest = fastest_attention(looked, torch.bfloat16, lambda _: None)
    assert (fastest.kernel, fastest.backward) == (found[0], found[2])
    assert fastest.deterministic == pytest.approx(found[1])
    assert fastest.seconds == speeds
    assert looked.kernel is AttentionKernel.AUTO
    assert fastest_attention(looked, torch.float32, lambda _: None) == FastestKernel()
