"""What a person is told of a plan. What is said matters here, not how it is laid out."""

from dataclasses import replace

import pytest

from farspan.ask import Request
from farspan.planner.machines import machine
from farspan.planner.plans import best_plan
from farspan.planner.remedies import PARTS, breaks_first, reason_of
from farspan.planner.request import Budget, Margin, Optimizer, Remedy, loss_of
from farspan.profile.estimate import estimated
from farspan.program.layout import Layout
from farspan.program.residency import Kind
from farspan.program.strategies import STRATEGIES
from farspan.report.plan import answer_lines, contexts_view, plan_view
from farspan.report.tables import BAR, bar, layout_words, schedule_words
from farspan.spec import Schedule, StateTensor, Tier
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


def test_what_is_not_priced_is_said() -> None:
    plain = fitting()
    state = (StateTensor("recurrent.0", (4, 8, 8), 4),)
    model = plain.question.model
    layers = (replace(model.layers[0], state=state), *model.layers[1:])
    recurrent = replace(plain.question, model=replace(model, layers=layers))
    words = "only the projections of recurrent layers are priced, not the recurrence"
    assert words not in text_of(plan_view(plain))
    assert words in text_of(plan_view(replace(plain, question=recurrent)))


@pytest.mark.parametrize(("spared", "is_said"), [(0.1, True), (0.7, False)])
def test_four_bits_that_spare_little_are_said(spared: float, is_said: bool) -> None:
    plain = fitting()
    model = replace(plain.question.model, parameters=10**9)
    packed = int(spared * model.parameters * model.element_bytes / len(model.layers))
    layers = tuple(replace(of, work=replace(of.work, packed=packed)) for of in model.layers)
    asked = replace(plain.question, nf4=True, model=replace(model, layers=layers))
    text = " ".join(text_of(plan_view(replace(plain, question=asked))).split())
    assert ("only linear modules are quantised, not embeddings" in text) is is_said


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


def test_every_part_is_shown_the_largest_first() -> None:
    text = text_of(plan_view(fitting()))
    places = [text.index(part) for part in ("K, V 16.0 GiB", "weights 14.0 GiB")]
    places += [text.index(part) for part in ("O and LSE 70.0 GiB", "optimizer states 30.0 GiB")]
    assert places == sorted(places)


def test_a_part_nobody_named_is_shown_all_the_same() -> None:
    plan = fitting()
    plan = replace(plan, host=replace(plan.host, parts={"ballast": 3 * GIB}))
    assert "ballast 3.0 GiB" in text_of(plan_view(plan))


def test_seconds_name_what_bounds_them_and_mfu_its_convention() -> None:
    text = text_of(plan_view(fitting()))
    assert "step: 4.3 min, bound by computation" in text
    assert "host to device 50 s" in text
    assert "waiting, nothing is computed 50 s" in text
    assert "between devices" not in text  # no time, no line
    assert "4,096 tokens/s, MFU 43.2% (FLOP of" in text
    assert "recomputation counted as no work" in text


def test_no_waiting_has_no_line() -> None:
    plan = fitting()
    lanes = plan.seconds.compute + plan.seconds.optimizer + plan.seconds.host
    for noise in (0.0, 1e-13):
        busy = replace(plan, seconds=replace(plan.seconds, total=lanes + noise))
        assert "waiting" not in text_of(plan_view(busy))


def test_one_memory_has_one_margin() -> None:
    plan = fitting()
    machine = replace(plan.question.machine, unified=True, processors=0)
    plan = replace(plan, question=replace(plan.question, machine=machine))
    text = text_of(plan_view(plan))
    assert text.startswith("fits: all in main memory, ")
    assert "50.0 GiB to spare in the memory that device and host share" in text
    assert "spare on the" not in text


def test_few_tokens_a_second_are_not_rounded_to_none() -> None:
    plan = fitting()
    slow = replace(plan, seconds=replace(plan.seconds, total=2.0**24))
    assert "0.0625 tokens/s" in text_of(plan_view(slow))


def test_a_plan_that_does_not_fit_says_what_breaks_and_what_helps() -> None:
    text = text_of(plan_view(overrun()))
    assert "does not fit: lacks 48.0 GiB of device memory" in text
    assert "weights and optimizer alone need 128 GiB" in text
    assert "cheapest change: --gpus 2" in text
    assert "why:" not in text


def test_what_breaks_first_is_said_in_words() -> None:
    parts = {"dkv": 90 * GIB, "kv": 2**29, "slots": 2**20, "x": 0}
    plan = replace(fitting(), device=Budget(parts, 80 * GIB))
    assert breaks_first(plan) == (
        "device memory runs out first: grouped needs 90.5 GiB, but has 80.0 GiB, 10.5 GiB too "
        "little; the largest parts are 90.0 GiB of dK, dV and 512.0 MiB of K, V"
    )
    alone = replace(plan, device=Budget({"weights": 90 * GIB, "x": 0}, 80 * GIB))
    assert breaks_first(alone).endswith("the largest parts are 90.0 GiB of weights")


@pytest.mark.parametrize(
    ("attention", "activations", "words"),
    [
        (0.0, 0.0, "attention recomputed;"),
        (0.5, 0.0, "O and LSE of the latest 50% of tokens kept;"),
        (1.0, 0.25, "no attention recomputed, other activations of 25% kept;"),
        (0.0, 1.0, "all activations of the latest 100% of tokens kept;"),
    ],
)
def test_why_says_what_is_kept(attention: float, activations: float, words: str) -> None:
    plan = fitting()
    kept = replace(
        plan.schedule, attention_save_fraction=attention, activation_save_fraction=activations
    )
    assert words in reason_of(replace(plan, schedule=kept), ())


@pytest.mark.parametrize(
    ("stages", "words"), [(1, "all layers in one group in chunks"), (2, "2 stages, each a group, ")]
)
def test_why_says_what_groups_are(stages: int, words: str) -> None:
    plan, layout = fitting(), Layout(pipeline=stages)
    layers = len(plan.question.model.layers)
    schedule = replace(plan.schedule, groups=layers // stages)
    asked = replace(plan, schedule=schedule, question=replace(plan.question, layout=layout))
    assert reason_of(asked, ()).startswith(words)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_how_training_has_an_optimizer_is_noted(optimizer: Optimizer) -> None:
    """Where it is what is planned, and where it is what would help."""
    words = {"adamw8bit": "note: 8-bit moments give other results than AdamW's; enable them with"}
    asked = replace(fitting(), question=replace(question(), optimizer=optimizer))
    advised = replace(overrun(), remedies=(Remedy(f"--optimizer {optimizer}", same=True),))
    for plan in (asked, advised):
        text = " ".join(text_of(plan_view(plan)).split())
        assert {name for name, noted in words.items() if noted in text} == (
            {optimizer} & words.keys()
        )


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


def test_copies_in_line_are_noted_where_there_are_any() -> None:
    noted = "copies are priced without overlap with the computation"
    plan = fitting()
    assert noted in text_of(plan_view(plan))
    beside = replace(plan, question=replace(plan.question, overlap=True))
    assert noted not in text_of(plan_view(beside))
    none = replace(plan, seconds=replace(plan.seconds, fetch=0.0, evict=0.0))
    assert noted not in text_of(plan_view(none))


def test_how_much_better_there_could_be() -> None:
    assert "slower than the best" not in text_of(plan_view(fitting()))
    for gap, words in ((0.031, "3.1%"), (0.0311, "3.2%"), (2e-5, "0.1%"), (1e-12, "0.1%")):
        text = text_of(plan_view(replace(fitting(), gap=gap)))
        assert f"at most {words} slower than the best of all schedules" in text


def test_runners_up_stand_below_the_choice() -> None:
    text = text_of(plan_view(replace(fitting(), alternatives=(fitting("memo"), overrun()))), 80)
    table = text[text.index("runners-up") :]
    assert "grouped yes 4.3 min 38% 20% 16K 7 100% 25%" in table
    assert "memo yes" in table
    assert "grouped no 4.3 min 160%" in table


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
    ("share", "columns"), [(0.0, 0), (0.5, BAR // 2), (1.0, BAR), (7.0, BAR), (-1.0, 0)]
)
def test_a_bar_is_as_long_as_its_share(share: float, columns: int) -> None:
    assert bar(share) == "█" * columns


def test_a_small_share_is_an_eighth_of_a_column() -> None:
    assert bar(1 / (8 * BAR)) == "▏"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(chunk=2**20), "the whole sequence at once, layer by layer"),
        (Schedule(chunk=4096, groups=28), "256 chunks of 4K tokens, through all 28 layers"),
        (Schedule(groups=7), "64 chunks of 16K tokens, 4 groups of 7 layers"),
        (Schedule(groups=9), "4 groups of 1, 9 x 3 layers"),
        (Schedule(kv=Tier.HOST), "on the host, streamed 16,384 keys at a time; rebuilt"),
        (Schedule(kv_kept=True), "on the device; kept for the backward on the host"),
        (Schedule(kv_kept=True, kv_home=Tier.DEVICE), "kept for the backward on the device"),
        (Schedule(), "attention outputs recomputed"),
        (Schedule(attention_save_fraction=1.0), "attention outputs kept on the host"),
        (
            Schedule(activation_save_fraction=0.125, activations=Tier.DEVICE),
            "other activations of the latest 12.5% of tokens kept on the device, the rest",
        ),
        (
            Schedule(activation_save_fraction=0.5),
            "attention outputs kept with the other activations",
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


def test_a_layout_in_words() -> None:
    assert layout_words(Layout()) == "one device"
    assert layout_words(Layout(ulysses=4, data=2)) == (
        "ulysses 4 x data 2, weights sharded over the devices"
    )
    assert layout_words(Layout(tensor=8, fsdp=False)) == "tensor 8"
    several = replace(fitting(), question=question(layout=Layout(ulysses=4, shards=2)))
    assert "8 x h200 (ulysses 4 x shards 2, weights sharded" in text_of(plan_view(several))


def test_every_kind_of_buffer_has_a_name() -> None:
    assert {kind.value for kind in Kind} <= set(PARTS)


def test_a_pipeline_has_words() -> None:
    """A stage's layers are what its schedule is of."""
    request = Request("Qwen2.5-7B", "256K", "h200")
    asked = replace(request.question(), layout=Layout(pipeline=4))
    text = text_of(plan_view(best_plan(asked, ["oomb"])))
    assert "pipeline 4" in text
    assert "through all 7 layers" in text


# -- the answer of a screen ------------------------------------------------------------------------


def test_the_first_line_says_where_states_live_and_how_long_a_step_is() -> None:
    lines = answer_lines(fitting())
    assert lines[0] == "fits: weights, gradients and states on the device, 4.3 min a step"
    assert lines[1] == "Some-7B, 1M tokens, 1 x h200, bfloat16, optimizer adamw"


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


def test_where_room_is_short_what_matters_most_stays() -> None:
    plan = replace(fitting(), alternatives=(fitting("memo"),))
    assert len(answer_lines(plan)) > 10
    text = "\n".join(answer_lines(plan, 10))
    for words in (
        "fits: weights",
        "Some-7B, 1M",
        "device: 30",
        "main memory: 100",
        "step: 4.3 min",
    ):
        assert words in text, words
    assert "runners-up: memo" in "\n".join(answer_lines(plan, 19))


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


def test_an_answer_says_that_a_card_is_planned_only() -> None:
    asked = replace(question(), machine=machine("mi300x"))
    text = "\n".join(answer_lines(replace(fitting(), question=asked)))
    assert "planned only: farspan's kernels and tests are for NVIDIA GPUs" in text
    assert "planned only" not in "\n".join(answer_lines(fitting()))
