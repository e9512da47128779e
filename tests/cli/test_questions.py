"""What people type: each is answered, or refused by a sentence that has the right command in it."""

from pathlib import Path
from shlex import split
from typing import Any

import pytest
from typer.testing import CliRunner

import farspan
from farspan import cli
from farspan.spec import UnsupportedError
from tests.grids import exhaustive, part_of

SMALL = "--model Qwen2.5-0.5B"
FITS = ("fits: ", 0)


def refused(words: str) -> tuple[str, int]:
    return words, 2


# What follows `farspan plan`, what the answer has, and the exit code.
QUESTIONS: list[tuple[str, tuple[str, int]]] = [
    # Cards by their usual names.
    (f"{SMALL} --context 8K --machine 4090", FITS),
    (f"{SMALL} --context 8K --gpu 'RTX 4090'", FITS),
    (f"{SMALL} --context 8K --gpu 8xh100", ("8 x h100", 0)),
    (f"{SMALL} --context 8K --gpu '2x 3090'", ("2 x rtx3090", 0)),
    (f"{SMALL} --context 8K --gpu mi300x", ("planned only: farspan's kernels", 0)),
    (f"{SMALL} --context 8K --gpu 'DGX Spark'", ("1 x gb10", 0)),
    (f"{SMALL} --context 8K --gpu a100", refused("did you mean a100-40g or a100-80g?")),
    (f"{SMALL} --context 8K --gpu '4090 48gb'", refused("--machine rtx4090 --device-memory 48GB")),
    (f"{SMALL} --context 8K --gpu 8", refused("give --gpus 8, and the card with --machine")),
    (f"{SMALL} --context 8K --gpus 4090", refused("--gpu 4090")),
    (f"{SMALL} --context 8K --gpu 4090 --gpus 4090", refused("--gpu 4090")),
    (f"{SMALL} --context 8K --gpu 4090 --nf4", refused("give --quantize")),
    (f"{SMALL} --context 8K --gpu 4090 --qlora --write q.yaml", ("q.yaml: written", 0)),
    (f"{SMALL} --context 64K --gpu h200 --write long.yaml", ("stretches its RoPE to 64K", 0)),
    (f"{SMALL} --context 8K --gpu 8xh100 --gpus 4", refused("give one of the two")),
    (f"{SMALL} --context 8K --gpu GB200", refused("give --gpu b200")),
    (f"{SMALL} --context 8K --gpu cpu", refused("give --gpu here")),
    (f"{SMALL} --context 8K --gpu ''", refused("give --gpu here")),
    # Models.
    ("--model ./nosuch --context 8K --gpu 4090", refused("there is no folder ./nosuch")),
    ("--model nosuch --context 8K --gpu 4090", refused("more (farspan plan --help)")),
    ("nosuch.yaml", refused("nosuch.yaml: cannot be read: No such file")),
    (
        "Qwen3-8B 128K h100",
        refused("give farspan plan --model Qwen3-8B --context 128K --gpu h100"),
    ),
    ("run.yaml 128K", refused("give farspan plan run.yaml --context 128K")),
    ("--model 'Qwen2.5 0.5B' --context 8K --gpu 4090", FITS),
    ("--model Qwen/Qwen2.5-0.5B-Instruct --context 8K --gpu 4090", refused("did you mean Qwen2.5")),
    ("--model https://huggingface.co/Qwen/Qwen2.5-0.5B --context 8K --gpu 4090", FITS),
    ("--model qwem2.5-0.5b --context 8K --gpu 4090", refused("did you mean Qwen2.5-0.5B")),
    ("--context 8K --gpu 4090", refused("give --model NAME, or the run file")),
    (f"{SMALL} --context '8 K' --gpu 4090", ("8K tokens", 0)),
    (f"{SMALL} --context 8,192 --gpu 4090", ("8K tokens", 0)),
    (f"{SMALL} --context '8192 tokens' --gpu 4090", ("8K tokens", 0)),
    (f"{SMALL} --context 8K --gpu 4090 --device-memory '48 gib'", ("of 48.0 GiB", 0)),
    (f"{SMALL} --context 8K --gpu 4090 --device-memory 24", refused("write 24GiB")),
    (f"{SMALL} --context 8kk --gpu 4090", refused("128K or 1M")),
    (f"{SMALL} --gpu 4090", refused("give --context TOKENS, or --max-context")),
    # Words of other tools.
    (f"{SMALL} --context 8K --gpu 4090 --qlora", ("lora 16, nf4", 0)),
    (f"{SMALL} --context 8K --gpu 4090 --lora --quantize 4bit", ("lora 16, nf4", 0)),
    (
        f"{SMALL} --context 8K --gpu 4090 --lora --quantize int8",
        refused("give lora 16 and quan"),
    ),
    (f"{SMALL} --context 8K --gpu 4090 --dtype int8", refused("give quantize nf4 with lora")),
    (f"{SMALL} --seq-len 8K --gpu 4090", refused("give --context")),
    (f"{SMALL} --context 8K --gpu 4090 --load-in-4bit", refused("give --quantize")),
    (f"{SMALL} --context 8K --gpu 4090 --optimizer adamw_8bit", ("optimizer adamw8bit", 0)),
    (f"{SMALL} --context 8K --gpu 4090 --optimizer adamw8bits", refused("did you mean adamw8bit")),
    (f"{SMALL} --context 8K --gpu 4090 --loss DPO", FITS),
    (f"{SMALL} --context 8K --gpu 4090 --weights cpu", ("weights on host", 0)),
    (f"{SMALL} --context 128kb --gpu 4090", refused("which are bytes; give 128K")),
    (f"{SMALL} --fp8 --gpu 4090", refused("give --dtype bf16 or fp32")),
    (f"{SMALL} --deepspeed --gpu 4090", refused("give --optimizer host")),
    (f"{SMALL} --batch_size 2 --gpu 4090", refused("give --batch")),
    (f"{SMALL} --max-contxt --gpu 4090", refused("give --max-context")),
    (f"{SMALL} --zzz", refused("--zzz: no such option of farspan plan; farspan plan --help lists")),
]


@pytest.mark.parametrize(("asked", "answer"), QUESTIONS)
def test_a_question_has_an_answer(
    asked: str, answer: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("farspan.profile.catalog._unreachable", lambda: "no network")
    words, code = answer
    faster = ["--strategy", "oomb"] if "--context" in asked else []
    done: Any = CliRunner().invoke(cli.app, ["plan", *split(asked), *faster])
    if code == 2:
        assert isinstance(done.exception, UnsupportedError), done.output
        said = str(done.exception)
        assert "\n" not in said
        assert len(f"farspan: {said}") <= 3 * 80
    else:
        assert done.exit_code == code, done.exception
        said = done.output
        assert len(said.splitlines()) <= 25
    assert words in " ".join(said.split())


def test_an_option_for_an_argument_is_told_the_whole_command() -> None:
    with pytest.raises(UnsupportedError, match=r"give farspan init MODEL DATA$"):
        cli.app(["init", "--model", "X"], standalone_mode=False)


@pytest.mark.parametrize("machine", part_of(["rtx4090", "gb10"], "gb10"))
def test_what_is_short_can_be_bought(machine: str) -> None:
    """More main memory where it is no part of the device, and never more than servers have."""
    there: dict[str, Any] = {} if machine == "gb10" else {"optimizer": "host", "weights": "host"}
    plan = farspan.plan("Qwen3-32B", context="4K", machine=machine, strategy="fpdt", **there)
    assert not plan.fits
    first = str(plan).splitlines()[0]
    assert ("device memory" in first) is False
    assert "-" not in "".join(line for line in str(plan).splitlines() if line.startswith("memory"))
    offered = [r.options for r in plan.remedies if "--host-memory" in r.options]
    assert bool(offered) == (machine == "rtx4090")


# Questions with nothing named: what is chosen, and what is short, is the planner's.
OPEN = (
    exhaustive("Qwen2.5-0.5B", "16K", {"machine": "rtx4090"}),
    exhaustive("Qwen2.5-0.5B", "64K", {"machine": "rtx4090"}),
    exhaustive("Qwen3-8B", "64K", {"machine": "h200"}),
    ("Qwen3-8B", "32K", {"machine": "rtx4090", "lora": 16}),
    exhaustive("Qwen3-8B", "64K", {"machine": "rtx4090", "host_memory": "256GiB"}),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "context", "options"), OPEN)
def test_no_runner_up_is_faster(model: str, context: str, options: dict[str, Any]) -> None:
    plan = farspan.plan(model, context=context, **options)
    assert plan.fits
    fitting = [other for other in plan.alternatives if other.fit is plan.fit]
    assert fitting
    for other in fitting:
        assert plan.seconds.total <= 1.005 * other.seconds.total, other.strategy
