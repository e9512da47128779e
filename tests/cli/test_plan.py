"""`farspan plan` from end to end: what it prints, how it ends, and that it needs no torch."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import farspan
from farspan import cli
from farspan.planner.machines import BUSY_RATES, machine
from farspan.planner.request import Plan, Question
from farspan.program.strategies import STRATEGIES
from farspan.spec import RunSpec, Sparse, UnsupportedError
from tests.report.cases import fitting, overrun

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("plan", "--model", "Qwen2.5-0.5B", "--machine", "h200")
JSON_KEYS = {
    *("fits", "strategy", "schedule", "device_bytes", "host_bytes", "seconds_per_step"),
    *("tokens_per_second", "mfu", "alternatives"),
}
SCHEDULE_KEYS = {
    *("chunk", "groups", "attention_save_fraction", "kv_kept", "activation_save_fraction", "tiers"),
}
# Both blocked, as on a laptop that has neither.
WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {source!r})
sys.argv = ["farspan", *{arguments!r}]
from farspan.cli import main
main()
"""


def call(*arguments: str) -> Any:
    """The outcome of `farspan ARGUMENTS`."""
    return CliRunner().invoke(cli.app, arguments)


def call_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in an interpreter that has neither torch nor transformers."""
    script = WITHOUT_TORCH.format(source=str(ROOT / "src"), arguments=arguments)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Question, Sequence[str] | None]]:
    """What the planner is asked; its answers are made by hand."""
    questions: list[tuple[Question, Sequence[str] | None]] = []

    def answer(question: Question, strategies: Sequence[str] | None = None) -> Plan:
        questions.append((question, strategies))
        return fitting() if question.run.tokens <= 2**20 else overrun()

    def answers(
        question: Question, strategies: Sequence[str] | None = None, *, max_step: float
    ) -> dict[str, Plan]:
        questions.append((question, strategies))
        assert max_step in (90.0, math.inf)
        return {"oomb": fitting("oomb", 2**22), "memo": fitting("memo", 2**21)}

    monkeypatch.setattr("farspan.cli.plan.best_plan", answer)
    monkeypatch.setattr("farspan.cli.plan.longest_contexts", answers)
    return questions


def test_every_option_reaches_the_question(
    asked: list[tuple[Question, Sequence[str] | None]],
) -> None:
    outcome = call(
        *("plan", "--model", "Qwen2.5-0.5B", "--machine", "a100-80g", "--context", "128K"),
        *("--gpus", "4", "--batch", "3", "--optimizer", "host", "--lora", "8"),
        *("--strategy", "oomb", "--dtype", "bf16"),
        *("--device-memory", "40GB", "--host-memory", "128GiB"),
    )
    assert outcome.exit_code == 0, outcome.output
    [(question, strategies)] = asked
    assert strategies == ["oomb"]
    assert question.run == RunSpec(3, 131072)
    assert question.machine.device_bytes == 40 * 10**9
    assert question.machine.host_bytes == 2**37 - 2**37 // 10  # less the reserve
    assert question.layout.devices() == 4
    assert question.optimizer == "host"
    assert question.dtype == "bfloat16"
    assert 0 < question.model.trainable < question.model.parameters / 50


@pytest.mark.parametrize(
    ("text", "sparse"),
    [
        ("on", Sparse()),
        ("page=64,budget=2K,recent=1K", Sparse(64, 2048, 1024)),
        ("off", None),
    ],
)
def test_sparse_attention_is_asked_for(
    asked: list[tuple[Question, Sequence[str] | None]], text: str, sparse: Sparse | None
) -> None:
    outcome = call(*SMALL, "--context", "1M", "--sparse", text)
    assert outcome.exit_code == 0, outcome.output
    assert asked[0][0].sparse == sparse


def test_a_loss_is_asked_for(asked: list[tuple[Question, Sequence[str] | None]]) -> None:
    for given in (["--loss", "kto"], ["--loss", "dpo", "--reference", "frozen"]):
        outcome = call(*SMALL, "--context", "64K", *given)
        assert outcome.exit_code == 0, outcome.output
    found = [(question.loss.kind, question.loss.reference) for question, _ in asked]
    assert found == [("kto", "stored"), ("dpo", "frozen")]


def test_a_plan_says_what_its_loss_costs() -> None:
    asked = [*SMALL, "--context", "16K", "--strategy", "memo", "--lora", "8"]
    loss = "--loss", "dpo", "--reference", "adapters-off"
    outcome = call(*asked, *loss, "--json")
    found = json.loads(outcome.output)
    assert (found["loss"], found["reference"]) == ("dpo", "adapters-off")
    one, cut, whole = found["seconds_of_loss"].values()
    assert one < cut < whole
    words = " ".join(call(*asked, *loss).output.split())
    assert f"loss dpo: a step takes {whole / one - 1:.1%} longer than one pass" in words
    assert "the forward of its reference, the same weights with adapters off" in words
    plain = [call(*asked, *more, "--json").output for more in ([], ["--loss", "sft"])]
    assert plain[0] == plain[1]
    assert "loss" not in json.loads(plain[0])


def test_a_sparse_plan_says_that_it_approximates() -> None:
    arguments = (*SMALL, "--context", "64K", "--strategy", "oomb", "--sparse", "budget=1K")
    words = " ".join(call(*arguments, "--all").output.split())
    assert "sparse attention (approximate)" in words
    assert "sparse attention, approximate: of earlier tokens it sees 1K in chosen pages" in words
    assert "run farspan verify --sparse to measure" in words
    found = json.loads(call(*arguments, "--json").stdout)
    assert found["schedule"]["sparse"] == asdict(Sparse(budget=1024))
    assert found["hides"]
    dense = json.loads(call(*SMALL, "--context", "64K", "--strategy", "oomb", "--json").stdout)
    assert dense["schedule"]["sparse"] is None
    assert not dense["hides"]


def test_a_sparse_plan_that_hides_nothing_says_so() -> None:
    """4K tokens in chunks of 4K, and 8K of chosen pages."""
    arguments = (*SMALL, "--context", "8K", "--strategy", "oomb", "--sparse", "on")
    words = " ".join(call(*arguments, "--all").output.split())
    assert "sparse attention (nothing is hidden)" in words
    assert (
        "sparse attention, which hides no token at this context and equals dense attention: of"
        in words
    )
    assert "without --sparse, a step is just as exact and faster" in words
    assert "approximat" not in words
    found = json.loads(call(*arguments, "--json").output)
    assert (found["attention"], found["hides"]) == ("sparse", False)


def test_exit_code_says_whether_it_fits(asked: object) -> None:
    del asked
    assert call(*SMALL, "--context", "1M").exit_code == 0
    outcome = call(*SMALL, "--context", "2M")
    assert outcome.exit_code == 1
    assert "does not fit: lacks 48.0 GiB of device memory" in outcome.output
    assert "--gpus 2: the same results" in outcome.output
    assert "schedule" not in outcome.output  # of what nobody would run


def test_json_has_what_a_program_needs(asked: object) -> None:
    del asked
    outcome = call(*SMALL, "--context", "1M", "--json")
    plan = json.loads(outcome.stdout)
    assert plan.keys() >= JSON_KEYS
    assert plan["schedule"].keys() >= SCHEDULE_KEYS
    assert "max_context" not in plan
    budget = plan["device_bytes"]
    assert budget["total"] == sum(budget["parts"].values()) <= budget["limit"]


def test_json_says_what_a_step_takes_of_a_drive() -> None:
    small = (*SMALL, "--context", "16K", "--strategy", "recompute", "--json")
    drive = json.loads(call(*small, "--weights", "host", "--optimizer", "disk").stdout)["drive"]
    assert drive["seconds"] == pytest.approx(2 * drive["bytes_a_step"] / drive["bytes_a_second"])
    assert drive["endures_steps"] == pytest.approx(drive["endures_bytes"] / drive["bytes_a_step"])
    assert "drive" not in json.loads(call(*small).stdout)


def test_longest_contexts_of_all_strategies(
    asked: list[tuple[Question, Sequence[str] | None]],
) -> None:
    outcome = call(*SMALL, "--max-context")
    assert outcome.exit_code == 0
    assert len(asked) == 1
    assert "plain" in outcome.output
    found = json.loads(call(*SMALL, "--max-context", "--json").stdout)
    assert found["max_context"] == found["context"] == 2**22
    assert found.keys() >= JSON_KEYS
    each = found["max_context_by_strategy"]
    assert {name: plan["max_context"] for name, plan in each.items()} == {
        **dict.fromkeys(STRATEGIES, 0),
        "oomb": 2**22,
        "memo": 2**21,
    }


def test_of_equal_contexts_the_fastest_is_shown(
    monkeypatch: pytest.MonkeyPatch, asked: object
) -> None:
    del asked
    slow = fitting("oomb", 2**22)
    slow = replace(slow, seconds=replace(slow.seconds, total=1e6))
    plans = {"oomb": slow, "memo": fitting("memo", 2**22)}
    monkeypatch.setattr("farspan.cli.plan.longest_contexts", lambda *_, **__: plans)
    assert json.loads(call(*SMALL, "--max-context", "--json").stdout)["strategy"] == "memo"


def test_the_longest_context_of_short_steps(asked: object) -> None:
    del asked
    found = json.loads(call(*SMALL, "--max-context", "--max-step", "1.5m", "--json").stdout)
    assert found["max_step"] == 90.0
    assert "max_step" not in json.loads(call(*SMALL, "--max-context", "--json").stdout)
    words = call(*SMALL, "--max-context", "--max-step", "90").output.split()
    assert "steps of at most 90 s" in " ".join(words)


@pytest.mark.parametrize("too", [(), ("--context", "8K")])
def test_no_context_fits_says_why_and_what_helps(too: tuple[str, ...], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    little = ("--strategy", "recompute", "--device-memory", "1900MiB", "--html", str(page))
    outcome = call(*SMALL, "--max-context", *too, *little)
    assert outcome.exit_code == 1
    lines = outcome.output.splitlines()
    assert "no context fits, not even 1K tokens" in lines
    assert re.search(r"^does not fit: lacks [\d.]+ [GM]iB of device memory$", outcome.output, re.M)
    assert any(line.startswith(("cheapest changes", "changes: no change")) for line in lines)
    assert too or any(line.startswith("  --") for line in lines)
    assert len(lines) <= 25
    assert page.is_file()


def test_no_step_is_as_short_as_it_may_be(monkeypatch: pytest.MonkeyPatch, asked: object) -> None:
    del asked
    monkeypatch.setattr("farspan.cli.plan.longest_contexts", lambda *_, **__: {})
    outcome = call(*SMALL, "--max-context", "--max-step", "90s")
    assert outcome.exit_code == 1
    first, answer, *_ = outcome.output.splitlines()
    assert first == "no context has a step of at most 90 s, not even 1M tokens"
    assert answer.startswith("fits: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1Q"], "context: expected tokens such as 131072, 128K or 1M"),
        ([], "context: give --context TOKENS, or --max-context"),
        (
            ["--context", "1M", "--max-step", "1m"],
            "max_step: needs --max-context; add it",
        ),
        (["--max-context", "--max-step", "0"], "max_step: expected a time above 0 such as 90s"),
        (["--context", "1M", "--gpus", "0"], "gpus: expected a whole number of devices >= 1"),
        (["--context", "1M", "--batch", "0"], "batch: expected a whole number"),
        (["--context", "1M", "--host-memory", "128Q"], "host_memory: expected bytes"),
        (["--context", "1M", "--optimizer", "sgd"], "optimizer: expected one of auto, adamw"),
        (["--context", "1M", "--lora", "-1"], "lora: expected the rank of adapters, such as 16"),
        (["--context", "1M", "--quantize", "nf4"], "quantize: quantised weights are not trained"),
        (
            ["--context", "1M", "--lora", "8", "--quantize", "int2"],
            "quantize: expected nf4 (four bits), got 'int2', which farspan does not support",
        ),
        (
            ["--context", "1M", "--lora", "8", "--quantize", "nf4", "--dtype", "fp64"],
            "quantize: quantised weights cannot compute in float64",
        ),
        (["--context", "1M", "--strategy", "magic"], "strategy: 'magic' is not known"),
        (["--context", "1M", "--loss", "ppo"], "loss: expected one of sft, dpo"),
        (["--context", "1M", "--reference", "frozen"], "reference: loss sft expects none"),
        (["--context", "1M", "--sparse", "maybe"], "sparse: expected on, off or fields such as"),
        (["--context", "1M", "--sparse", "budget=100"], "sparse.budget: expected a multiple"),
        (["--context", "1M", "--gpus", "2", "--sparse", "on"], "sparse: planned for one device"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_its_option(
    arguments: list[str], message: str
) -> None:
    outcome = call(*SMALL, *arguments)
    assert isinstance(outcome.exception, UnsupportedError)
    assert str(outcome.exception).startswith(message)


def test_help_and_planning_need_no_torch() -> None:
    outcome = call_without_torch("train", "--help")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    outcome = call_without_torch(*SMALL, "--context", "128K", "--strategy", "oomb", "--json")
    assert outcome.stderr == ""
    assert json.loads(outcome.stdout).keys() >= JSON_KEYS
    assert outcome.returncode == 0


def test_the_timeline_of_the_step_that_is_planned_is_written(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    asked = (*SMALL, "--strategy", "fpdt", "--context", "64K")
    done = call(*asked, "--json", "--timeline", str(file))
    assert done.exit_code == 0, done.output
    plan, trace = json.loads(done.output), json.loads(file.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in events)
    assert abs(end - plan["seconds_per_step"] * 1e6) <= 1e-3
    assert {event["cat"] for event in events} == {"compute", "fetch", "evict"}


def test_python_returns_the_same() -> None:
    outcome = call(*SMALL, "--context", "64K", "--strategy", "fpdt", "--json")
    plan = farspan.plan("Qwen2.5-0.5B", context="64K", machine="h200", strategy="fpdt")
    assert json.loads(outcome.stdout) == plan.to_json()
    assert outcome.exit_code == (not plan.fits)


def test_this_machine_cannot_be_measured_without_torch() -> None:
    outcome = call_without_torch("plan", "--model", "GPT-2", "--context", "1K")
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("farspan: machine: measuring this machine needs torch")
    assert "name a preset or a machine file" in outcome.stderr


@pytest.mark.parametrize("is_busy", [True, False])
def test_rates_of_a_busy_machine_are_said(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each call measures such a machine again."""

    def measure(progress: Any) -> Any:
        progress("measuring quickly, which is said at length " * 4)
        if is_busy:
            progress(BUSY_RATES)
        return machine("h200")

    monkeypatch.setattr("farspan.ask.load", lambda *_: measure)
    page = tmp_path / "plan.html"
    options = ("--context", "8K", "--strategy", "oomb", "--html", str(page))
    outcome = call("plan", "--model", "Qwen2.5-0.5B", *options)
    assert (f"\n{BUSY_RATES}\n" in outcome.stdout) is is_busy
    assert (BUSY_RATES in page.read_text()) is is_busy
    assert len(BUSY_RATES) <= 80
    assert max(map(len, outcome.stderr.splitlines())) <= 80
