"""What is said to help: the first change of every kind, the cheapest first, and what it keeps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from farspan.ask import Request
from farspan.formatting import read_bytes
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import machine, with_main_memory
from farspan.planner.plans import best_plan
from farspan.planner.remedies import RANK, remedies_of
from farspan.planner.request import Margin, Optimizer, Question, margin_of
from farspan.planner.space import even
from farspan.profile.estimate import estimated
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import Profiles
from farspan.program.layout import Layout
from farspan.spec import RunSpec, Schedule, Sparse, Tier
from tests.profiles import spec_of
from tests.program.cases import model_of
from tests.report.cases import GIB

Helps = Callable[[Question], bool]
HERE = machine("h100")


def asked(optimizer: Optimizer = Optimizer.ADAMW, **changes: Any) -> Question:
    model = model_of(2)
    model = replace(model, hidden=64, parameters=10, trainable=10)
    made = Question(model, RunSpec(4, 2**14), HERE, Layout(), optimizer, profiles=TOYS)
    return replace(made, **changes)


class Toys(Profiles):
    """A model with adapters, by what is known of it."""

    def of(self, variant: Variant) -> ModelProfile:
        model = replace(model_of(2), hidden=64, parameters=10 + bool(variant.rank), trainable=10)
        return replace(estimated(model), variant=variant)


TOYS = Toys({}, "toys")


def options(question: Question, helps: Helps) -> list[str]:
    return [remedy.options for remedy in remedies_of(question, helps)]


def tried(question: Question) -> list[Question]:
    """Every change that is looked at where none helps."""
    seen = []

    def look(changed: Question) -> bool:
        seen.append(changed)
        return False

    assert remedies_of(question, look) == ()
    return seen


def has_adapters(question: Question) -> bool:
    return question.model.trainable < question.model.parameters


def test_of_every_kind_the_first_is_told_and_what_it_keeps() -> None:
    found = {remedy.options: remedy.same for remedy in remedies_of(asked(), lambda _: True)}
    assert found == {
        "--optimizer host": True,
        "--batch 2": True,
        "--lora 16": False,
        "--optimizer adamw8bit": False,
        "--host-memory 3726GiB": True,
        "--gpus 2": True,
        "--machine h100-nvl": True,
        "--context 8K": False,
    }
    assert next(iter(found)) == "--optimizer host"


def test_a_change_that_does_not_help_is_not_told() -> None:
    assert options(asked(), lambda q: q.layout.devices() == 8) == ["--gpus 8"]
    assert options(asked(), lambda q: q.run.tokens <= 2**12) == ["--context 4K"]
    assert remedies_of(asked(), lambda _: False) == ()


def test_a_smaller_batch_finds_the_gradients_of_the_others() -> None:
    """An update that is to be the same has more of them."""
    assert options(asked(), lambda q: q.accumulates) == ["--batch 2"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1MiB"), (100 * 2**20 + 1, "201MiB"), (8.73 * GIB, "18GiB"), (1024 * GIB, "2048GiB")],
)
def test_main_memory_that_helps_is_rounded_up(size: float, text: str) -> None:
    """What is said is what was looked at, as the option reads it: of all that a machine has, of
    which a part is in reserve."""
    here = with_main_memory(HERE, int(size))
    seen = []

    def helps(question: Question) -> bool:
        seen.append(question.machine)
        return question.machine.host_bytes > here.host_bytes

    found = remedies_of(
        asked(machine=replace(here, name="mine", devices=1, unified=True, processors=0)), helps
    )
    assert found[0].options == f"--host-memory {text}"
    [more, *_] = [m for m in seen if m.host_bytes > here.host_bytes]
    assert more.host_bytes == with_main_memory(HERE, read_bytes(text, "")).host_bytes


def test_sparse_attention_is_not_said_to_be_helped_by_devices() -> None:
    """It is planned for one."""

    def with_more(question: Question) -> bool:
        return question.layout.devices() > 1

    assert options(asked(), with_more) == ["--gpus 2"]
    assert options(asked(sparse=Sparse()), with_more) == []


@pytest.mark.parametrize("optimizer", [o for o in Optimizer if o is not Optimizer.ADAMW])
def test_an_optimizer_that_was_chosen_is_not_exchanged(optimizer: Optimizer) -> None:
    """But for a drive in place of main memory, with the same results."""
    seen = {question.optimizer for question in tried(asked(optimizer))}
    assert seen == {optimizer, *([Optimizer.DISK] if optimizer is Optimizer.HOST else [])}


def test_states_of_8_bits_are_of_one_rank() -> None:
    seen = {question.optimizer for question in tried(asked(layout=Layout(ulysses=2)))}
    assert seen == {Optimizer.ADAMW, Optimizer.HOST}


# -- adapters -------------------------------------------------------------------------------------


def test_adapters_that_are_tried_are_those_of_the_option() -> None:
    """And not tried again where there are some."""
    request = Request("Qwen2.5-0.5B", "4K", "h100")
    adapted = next(filter(has_adapters, tried(request.question())))
    assert adapted == replace(request, lora=RANK).question()
    assert {again.adapter_rank() for again in tried(adapted)} == {RANK}


def test_the_weights_beside_adapters_are_quantised() -> None:
    """What is tried is the question of the options, on several devices, too, and not twice."""
    request = Request("Qwen2.5-0.5B", "4K", "h100")
    adapted = replace(request, lora=RANK)
    packed = replace(adapted, quantize="nf4").question()
    assert options(request.question(), lambda q: q == packed) == ["--lora 16 --quantize nf4"]
    assert options(adapted.question(), lambda q: q == packed) == ["--quantize nf4"]
    two = replace(adapted, gpus=2)
    both = replace(two, quantize="nf4").question()
    assert options(two.question(), lambda q: q == both) == ["--quantize nf4"]
    assert options(packed, lambda q: q == both) == ["--gpus 2"]
    assert not any("--quantize" in text for text in options(packed, lambda _: True))


def test_of_a_model_that_is_only_described_they_are_not_guessed() -> None:
    model = replace(spec_of("Qwen2.5-0.5B"), hidden=64)
    question = asked(model=model, profiles=None)
    assert not any("--lora" in text for text in options(question, lambda _: True))


# -- machines -------------------------------------------------------------------------------------


def machines_of(question: Question) -> dict[str, Question]:
    """Every other machine that is looked at, alone."""
    others = (q for q in tried(question) if q.machine.name != question.machine.name)
    return {other.machine.name: other for other in others if other.layout == question.layout}


def test_another_card_is_larger_and_one_of_its_size() -> None:
    question = asked(machine=machine("rtx4090"), optimizer=Optimizer.HOST)
    found = machines_of(question)
    assert list(found) == [
        *("rtx5090", "a100-40g", "l40s", "h100-pcie", "h100-nvl", "h200", "b200", "b300")
    ]
    assert all(found[name].machine == machine(name) for name in found)
    question = replace(question, margin=margin_of(None, question.machine))
    assert machines_of(question)["h200"].margin == margin_of(None, machine("h200"))
    given = replace(question, margin=Margin(GIB))
    assert machines_of(given)["h200"].margin == Margin(GIB)


def test_what_was_given_of_a_machine_is_kept() -> None:
    """An option that stays on the command line is of the other machine, too."""
    here = with_main_memory(machine("rtx4090"), 32 * GIB)
    found = machines_of(asked(machine=here))
    assert {q.machine.host_bytes for q in found.values()} == {here.host_bytes}
    assert not machines_of(asked(machine=replace(here, device_bytes=16 * GIB)))


def test_several_machines_are_the_last_resort_and_said() -> None:
    here = machine("rtx4090")
    question = asked(machine=here, optimizer=Optimizer.HOST)

    def many(q: Question) -> bool:
        return q.layout.devices() >= 4 and q.machine == here

    [remedy] = remedies_of(question, many)
    assert (remedy.options, remedy.same) == ("--gpus 4", True)
    assert remedy.means == "4 machines of 1"

    def or_another(q: Question) -> bool:
        return many(q) or q.machine.name == "h200"

    assert options(question, or_another) == ["--machine h200"]
    [remedy] = remedies_of(asked(), lambda q: q.layout.devices() == 16 and q.machine == HERE)
    assert (remedy.options, remedy.means) == ("--gpus 16", "2 machines of 8")


@pytest.mark.parametrize(
    ("helps", "expected"),
    [
        (lambda q: has_adapters(q) and q.machine.name == "b200", "--lora 16 --machine b200"),
        (lambda q: q.optimizer == "host" and q.layout.devices() == 4, "--optimizer host --gpus 4"),
        (
            lambda q: q.layout.devices() == 4 and q.machine.name == "h200",
            "--machine h200 --gpus 4",
        ),
        (
            lambda q: q.optimizer == "host" and q.machine.name == "h200" and q.layout.devices() > 1,
            "--optimizer host --machine h200 --gpus 2",
        ),
    ],
    ids=["card", "states", "machine", "all"],
)
def test_two_changes_where_none_alone_helps(helps: Helps, expected: str) -> None:
    [remedy] = remedies_of(asked(), helps)
    assert remedy.options == expected
    assert remedy.same is ("--lora" not in expected)


# -- real models ----------------------------------------------------------------------------------


def test_a_whole_model_on_a_small_card_is_told_of_adapters_and_of_a_larger_one() -> None:
    request = Request("Qwen2.5-7B", "64K", "rtx4090", host_memory="64GiB")
    plan = best_plan(request.question(), ["fpdt"])
    assert not plan.fits
    disk, *others = (remedy.options for remedy in plan.remedies)
    assert others == ["--lora 16", "--host-memory 256GiB", "--machine b200"]
    assert plan.remedy == plan.to_json()["remedy"] == disk == "--optimizer disk"


def test_weights_go_to_main_memory_with_the_states() -> None:
    def there(q: Question) -> bool:
        return q.weights is Tier.HOST

    assert options(asked(), there) == ["--optimizer host --weights host"]
    assert options(asked(Optimizer.HOST), there) == ["--weights host"]
    assert not options(asked(Optimizer.ADAMW8BIT), there)
    assert options(asked(layout=Layout(shards=2)), there) == ["--optimizer host --weights host"]
    both = options(asked(), lambda q: there(q) and has_adapters(q))
    assert both == ["--lora 16 --optimizer host --weights host"]


def test_quantised_weights_come_from_main_memory_where_neither_is_enough() -> None:
    def both(q: Question) -> bool:
        return q.nf4 and q.weights is Tier.HOST

    whole = Request("Qwen2.5-0.5B", "4K", "h100", optimizer="adamw", weights="device")
    on_host = "--optimizer host --weights host"
    assert options(whole.question(), both) == [f"--lora 16 --quantize nf4 {on_host}"]
    adapted = replace(whole, lora=RANK)
    assert options(adapted.question(), both) == [f"--quantize nf4 {on_host}"]
    assert options(replace(adapted, quantize="nf4").question(), both) == [on_host]
    there = replace(adapted, optimizer="host", weights="host")
    assert options(there.question(), both) == ["--quantize nf4"]
    two = replace(adapted, gpus=2).question()
    assert options(two, both) == [f"--quantize nf4 {on_host}"]


# Full fine-tuning on one device, as docs/decisions/034 promises it.
ONE_DEVICE = {
    "Qwen2.5-7B": ("rtx4090", "128K", "192GiB", 2**13, 10, 0.875, Tier.HOST),
    "Qwen3-32B": ("h100", "256K", "768GiB", 2**14, 13, 0.375, Tier.HOST),
    "Llama-3-70B": ("h200", "128K", "1536GiB", 2**14, 16, 0.875, Tier.DEVICE),
}


@pytest.mark.parametrize("model", ONE_DEVICE)
def test_a_model_is_trained_on_one_device(model: str) -> None:
    """Its schedules were found by `farspan plan`; copies hide."""
    card, context, memory, chunk, groups, attention, inputs = ONE_DEVICE[model]
    request = Request(model, context, card, host_memory=memory, optimizer="host", weights="host")
    question, kept = request.question(), context == "128K"
    schedule = Schedule(
        chunk,
        even(len(question.model.layers), groups),
        inputs,
        kv_kept=kept,
        attention_save_fraction=attention,
        attention_open=not kept,
        weights=Tier.HOST,
    )
    plan = evaluate(question, "grouped", schedule)
    assert plan.fits
    assert plan.seconds.total <= 1.15 * plan.seconds.compute


def test_four_bits_of_70b_come_to_a_small_card() -> None:
    """As the same decision promises; the schedule was found by `farspan plan`. Weights that stay on
    the device do not fit it, and plain ones not the main memory."""
    given: dict[str, Any] = {"lora": 16, "optimizer": "host", "host_memory": "96GiB"}
    packed: dict[str, Any] = {**given, "quantize": "nf4"}
    schedule = Schedule(2**11, (5,) * 4 + (6,) * 10, attention_open=True, kv_block=2**16)
    plans = []
    for options_, weights in ((packed, "host"), (packed, "device"), (given, "host")):
        request = Request("Llama-3-70B", "128K", "rtx4090", weights=weights, **options_)
        asked_for = replace(schedule, weights=Tier(weights))
        plans.append(evaluate(request.question(), "grouped", asked_for))
    found, resident, plain = plans
    assert found.fits
    assert found.seconds.total <= 1.15 * found.seconds.compute
    assert resident.device.parts["weights"] > resident.device.limit
    assert plain.host.parts["weights"] > plain.host.limit


def test_a_model_is_trained_beside_little_main_memory_with_states_on_disk() -> None:
    """Weights (15 GB) and fp32 gradients (30) in main memory, 91 GB of states on a drive of 5 GB/s
    (assumed). Its schedule was found by `farspan plan`."""
    request = Request("Qwen2.5-7B", "128K", "rtx4090", host_memory="64GiB", weights="host")
    schedule = Schedule(2**13, even(28, 10), Tier.HOST, kv_kept=True, weights=Tier.HOST)
    host, disk = (
        evaluate(replace(request, optimizer=states).question(), "grouped", schedule)
        for states in ("host", "disk")
    )
    assert not host.fits
    assert disk.fits
    parts = disk.host.parts
    assert parts["weights"] == pytest.approx(15.2e9, rel=0.01)
    assert parts["gradients"] == pytest.approx(30.5e9, rel=0.01)
    assert parts["optimizer"] == 4 * 3 * 4 * 2**24  # the slots
    assert disk.seconds.optimizer + disk.seconds.beside == pytest.approx(36.55, rel=0.01)
    assert disk.seconds.optimizer == pytest.approx(9.5, rel=0.02)  # the rest hides
    assert disk.seconds.total == pytest.approx(215, rel=0.02)
    words = " ".join(str(disk).split())
    assert "each update reads and writes 91.4 GB of states, 36.6 s" in words
    assert "takes 0.015% of the 600 TB that a drive endures, which suffice for 6,565 steps" in words


def test_a_drive_is_proposed_where_main_memory_is_short() -> None:
    """And nowhere else: it wears. Of one device of its own memory alone."""

    def told(helps: Helps, optimizer: Optimizer = Optimizer.ADAMW) -> list[str]:
        return options(asked(optimizer, machine=machine("rtx4090")), helps)

    def is_disk(question: Question) -> bool:
        return question.optimizer is Optimizer.DISK

    assert told(is_disk)[0] == "--optimizer disk"
    beside = told(lambda q: is_disk(q) and q.weights is Tier.HOST)
    assert beside[0] == "--optimizer disk --weights host"
    anywhere = told(lambda q: q.optimizer in (Optimizer.HOST, Optimizer.DISK))
    assert anywhere[0] == "--optimizer host"
    assert not any("disk" in option for option in anywhere)
    assert told(is_disk, Optimizer.ADAMW8BIT) == []


# Left open, states and weights go to main memory, and these models fit.
PLACED: dict[str, Any] = {"optimizer": "adamw", "weights": "device"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("Qwen3-8B", {"machine": "h100", "host_memory": "256GiB", **PLACED}),
        ("Qwen3-8B", {"machine": "rtx4090", "lora": 16, "context": "1M"}),
        ("Llama-3.1-70B", {"machine": "h100", "gpus": 8, **PLACED}),
        ("Qwen2.5-32B", {"machine": "rtx4090", "lora": 16, "quantize": "nf4", "context": "4M"}),
    ],
)
def test_what_is_told_fits(model: str, changes: dict[str, Any]) -> None:
    request = Request(model, **({"context": "64K"} | changes))
    plan = best_plan(request.question())
    assert len(plan.remedies) > 1
    for remedy in plan.remedies:
        words = remedy.options.split()
        names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
        given = dict(zip(names, words[1::2], strict=True))
        kinds = {"gpus": int, "batch": int, "lora": int}
        named: dict[str, Any] = {n: kinds.get(n, str)(value) for n, value in given.items()}
        assert best_plan(replace(request, **named).question()).fits, remedy
