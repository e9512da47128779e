"""What a person is told of a plan. What is said matters here, not how it is laid out."""

from dataclasses import replace

import pytest

from farspan.planner.machines import names, read
from farspan.planner.remedies import PARTS
from farspan.planner.request import Budget, Margin, Optimizer, Remedy, loss_of
from farspan.profile.estimate import estimated
from farspan.program.layout import Layout
from farspan.program.residency import Kind
from farspan.program.strategies import STRATEGIES
from farspan.report.plan import answer_lines, contexts_view, plan_view
from farspan.report.tables import LINKS, machine_view, schedule_words
from farspan.spec import MachineSpec, Schedule, Tier
from tests.report.cases import GIB, fitting, overrun, question, text_of


def test_a_plan_that_fits_says_by_how_much_and_why() -> None:
    text = text_of(plan_view(fitting()))
    assert "Some-7B, 1M tokens, 1 x h200" in text
    assert text.startswith("fits: weights, gradients and states on the device, ")
    assert "50.0 GiB to spare on the device, 412.0 GiB to spare on the host" in text
    assert "device: 30.0 GiB of 80.0 GiB" in text
    assert "host: 100.0 GiB of 512.0 GiB" in text
    assert "why: fastest of those that fit" in text
    assert "NOT" not in text


PLACES = {
    (Optimizer.HOST, Tier.DEVICE): "states in main memory",
    (Optimizer.HOST, Tier.HOST): "weights, gradients and states in main memory",
    (Optimizer.DISK, Tier.HOST): "weights and gradients in main memory, states on a drive",
    (Optimizer.NONE, Tier.DEVICE): "no optimizer",
}


@pytest.mark.parametrize("place", PLACES)
def test_the_first_line_says_where_everything_is(place: tuple[Optimizer, Tier]) -> None:
    plain = fitting()
    asked = replace(plain.question, optimizer=place[0], weights=place[1])
    text = text_of(plan_view(replace(plain, question=asked)))
    assert text.startswith(f"fits: {PLACES[place]}, 4.3 min a step Some-7B")


def test_seconds_name_what_bounds_them_and_mfu_its_convention() -> None:
    text = text_of(plan_view(fitting()))
    assert "step: 4.3 min, bound by computation" in text
    assert "host to device 50 s" in text
    assert "waiting, nothing is computed 50 s" in text
    assert "between devices" not in text  # no time, no line
    assert "4,096 tokens/s, MFU 43.2% (FLOP of" in text
    assert "recomputation counted as no work" in text


def test_a_plan_that_does_not_fit_says_what_breaks_and_what_helps() -> None:
    text = text_of(plan_view(overrun()))
    assert "does not fit: lacks 48.0 GiB of device memory" in text
    assert "weights and optimizer alone need 128 GiB" in text
    assert "cheapest change: --gpus 2" in text
    assert "why:" not in text


def test_how_several_devices_are_started_is_noted() -> None:
    advised = " ".join(text_of(plan_view(overrun())).split())
    assert (
        "note: with --gpus, farspan plan prints the command that starts farspan train on these GPUs"
        in advised
    )
    assert "started" not in text_of(plan_view(fitting()))
    layout = Layout(ulysses=2, data=2, fsdp=False)
    several = "on each of 2 machines torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint"
    for near, processes in (
        (8, "torchrun --nproc-per-node 4"),
        (2, f"{several} HOST:29500 --nproc-per-node 2"),
    ):
        asked = question(layout=layout)
        asked = replace(asked, machine=replace(asked.machine, devices=near))
        text = " ".join(text_of(plan_view(replace(fitting(), question=asked))).split())
        assert (
            f"note: to start this run: {processes} -m farspan train RUN.yaml, with parallel: "
            "{ulysses: 2, data: 2, fsdp: false} in the file"
        ) in text


def test_a_context_beyond_the_positions_is_noted() -> None:
    plan = fitting()
    short = replace(estimated(plan.question.model), longest=32768)
    noted = replace(plan, question=replace(plan.question, profile=short))
    assert "beyond the model's 32K positions" in text_of(plan_view(noted))
    learned = replace(short, learned_positions=True)
    noted = replace(plan, question=replace(plan.question, profile=learned))
    text = text_of(plan_view(noted))
    assert "cannot be stretched, so farspan train refuses this run" in text
    assert "RoPE" not in text
    far = replace(short, longest=2**20)
    quiet = replace(plan, question=replace(plan.question, profile=far))
    assert "beyond" not in text_of(plan_view(quiet))


def test_longest_contexts_come_longest_first() -> None:
    plans = {"grouped": fitting(), "oomb": fitting("oomb", 2**22)}
    text = text_of(contexts_view(plans, question(), ("grouped", "plain", "oomb")), 80)
    assert "longest context of Some-7B, 1 x h200" in text
    assert "oomb 4M 4.3 min 16,384 43.2%" in text
    assert text.index("oomb 4M") < text.index("grouped 1M") < text.index("plain none")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(chunk=2**20), "the whole sequence at once, layer by layer"),
        (Schedule(groups=7), "64 chunks of 16K tokens, 4 groups of 7 layers"),
        (Schedule(kv=Tier.HOST), "on the host, streamed 16,384 keys at a time; rebuilt"),
        (Schedule(kv_kept=True), "on the device; kept for the backward on the host"),
        (Schedule(attention_save_fraction=1.0), "attention outputs kept on the host"),
        (
            Schedule(activation_save_fraction=0.125, activations=Tier.DEVICE),
            "other activations of the latest 12.5% of tokens kept on the device, the rest",
        ),
        (
            Schedule(activation_save_fraction=0.5, attention_save_fraction=0.25),
            "attention outputs of the latest 25.0% of tokens kept on the host, the rest recomputed "
            "where other activations are not kept",
        ),
        (Schedule(layer_checkpoint=True), "one layer's activations at a time"),
        (Schedule(attention_open=True), "kept while it is rebuilt"),
        (Schedule(boundary_inputs=Tier.DEVICE), "inputs of each group on the device"),
    ],
)
def test_a_schedule_in_words(schedule: Schedule, words: str) -> None:
    assert words in "\n".join(schedule_words(schedule, 28, -(-(2**20) // schedule.chunk)))


def test_every_kind_of_buffer_has_a_name() -> None:
    assert {kind.value for kind in Kind} <= set(PARTS)


# -- the answer of a screen ------------------------------------------------------------------------


def test_an_answer_has_every_tier_the_step_the_schedule_and_its_runners_up() -> None:
    others = (fitting("memo"), fitting("oomb"), overrun(), fitting("fpdt"), fitting("swap"))
    lines = answer_lines(replace(fitting(), alternatives=others))
    text = " ".join(" ".join(lines).split())
    assert "device: 30.0 GiB of 80.0 GiB K, V 16.0 GiB ████▊ weights 14.0 GiB" in text
    assert "main memory: 100.0 GiB of 512.0 GiB attention outputs, O and LSE 70.0 GiB" in text
    assert "step: 4.3 min, 4,096 tokens/s, MFU 43.2%, bound by computation" in text
    assert "schedule: grouped, 64 chunks of 16K tokens, 7 groups of 4 layers; K, V of" in text
    assert "runners-up: memo 4.3 min, oomb 4.3 min, fpdt 4.3 min, 1 more does not fit" in text
    assert "(" not in "".join(lines[3:])  # no footnotes


@pytest.mark.parametrize("room", [25, 19, 14, 10])
@pytest.mark.parametrize("parts", [1, 40])
def test_an_answer_fits_a_screen(parts: int, room: int) -> None:
    """However many causes, notes and runners-up there are."""
    many = Budget({f"part {n}": (n + 1) * GIB for n in range(parts)}, 2000 * GIB)
    asked = replace(
        question(layout=Layout(ulysses=8)),
        optimizer=Optimizer.DISK,
        weights=Tier.HOST,
        margin=Margin(1999 * GIB, 1999 * GIB),
        loss=loss_of("dpo", "frozen", adapters=False),
    )
    names = (*STRATEGIES, *STRATEGIES)
    others = tuple(fitting(name) for name in names)
    crowded = replace(fitting(), device=many, host=many, question=asked, alternatives=others)
    short = replace(
        overrun(),
        device=replace(many, limit=GIB // 2),
        host=replace(many, limit=GIB // 2),
        remedies=tuple(Remedy(f"--gpus {n}", same=True, means="of the 8 " * 9) for n in range(9)),
    )
    for plan in (crowded, replace(crowded, device=replace(many, limit=GIB)), short):
        lines = answer_lines(plan, room)
        assert len(lines) <= max(room, 14 if not plan.fits else 0)
        assert max(map(len, lines)) <= 80
        assert lines[-1] == "for all details: --all; for an HTML page: --html FILE"
    assert "tight: " in "\n".join(answer_lines(replace(fitting(), question=asked)))


def test_every_tier_that_is_short_is_said() -> None:
    """In the first line, and what fills each."""
    host = Budget({"optimizer": 91 * GIB}, 57 * GIB)
    both = replace(overrun(), host=host)
    text = "\n".join(answer_lines(both))
    assert text.startswith(
        "does not fit: lacks 48.0 GiB of device memory and 34.0 GiB of main memory\n"
    )
    assert "main memory: 91.0 GiB of 57.0 GiB\n  optimizer states " in text
    alone = "\n".join(answer_lines(replace(both, device=fitting().device)))
    assert alone.startswith("does not fit: lacks 34.0 GiB of main memory\n")
    assert "device" not in alone.replace("--device", "")
    one = replace(both.question, machine=replace(both.question.machine, unified=True))
    assert answer_lines(replace(both, question=one))[0] == "does not fit: lacks 48.0 GiB of memory"


def test_an_answer_of_what_is_short_shows_no_schedule() -> None:
    remedies = (
        Remedy("--optimizer host", same=True, seconds=90.0),
        Remedy("--lora 16", same=False, means="adapters are trained", seconds=45.0),
        Remedy("--gpus 2", same=True, means="of the 8 in a machine"),
        Remedy("--context 64K", same=False),
    )
    text = "\n".join(answer_lines(replace(overrun(), remedies=remedies)))
    assert text.startswith("does not fit: lacks 48.0 GiB of device memory\n")
    assert "device: 128.0 GiB of 80.0 GiB\n  weights  " in text
    assert "  --optimizer host: 90 s a step, the same results\n" in text
    assert "  --lora 16: 45 s a step, other results, adapters are trained\n" in text
    assert "  --gpus 2: the same results, of the 8 in a machine\n" in text
    assert "--context" not in text
    assert not any(word in text for word in ("schedule", "chunks", "runners-up", "MFU", "main"))
    alone = "\n".join(answer_lines(replace(overrun(), remedies=())))
    assert "changes: no change that farspan tried makes this run fit" in alone


@pytest.mark.parametrize("name", names())
def test_every_preset_can_be_shown(name: str) -> None:
    file = read(name)
    text = text_of(machine_view(file), width=120)
    of = "" if file.spec.unified else f"{file.spec.devices} x"
    assert f"{name}: {of}" in text
    for dtype in file.spec.rates:
        assert f"{dtype} matmul" in text
        assert f"{dtype} attention backward" in text
    for words in LINKS.values():
        assert words in text
    for words in file.sources.values():
        assert words.split(":")[0] in text


def test_every_bandwidth_is_shown() -> None:
    rated = {
        name for name in MachineSpec.__annotations__ if MachineSpec.__annotations__[name] is float
    }
    assert rated - {"latency", "overhead"} == set(LINKS)
