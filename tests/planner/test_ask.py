"""From what a person says to a question for the planner."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import farspan
from farspan import ask
from farspan.ask import Request, as_run
from farspan.cli import app
from farspan.cli.plan import NAMES, plan_command
from farspan.planner.machines import machine
from farspan.planner.request import Optimizer
from farspan.planner.states import gradient_bytes, states
from farspan.planner.walk import Walk
from farspan.profile.catalog import find_config
from farspan.profile.model import Variant
from farspan.program.builder import build_program
from farspan.program.layout import Layout
from farspan.spec import Kernels, RunSpec, Schedule, UnsupportedError

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Configuration:
    """What a transformers configuration offers."""

    def to_dict(self) -> dict[str, Any]:
        return CONFIG


def test_defaults() -> None:
    question = Request("Qwen2.5-0.5B", "1M", "h200").question()
    assert question.run == RunSpec(1, 2**20)
    assert question.machine == machine("h200")
    assert question.layout == Layout()
    assert question.optimizer is Optimizer.ADAMW
    assert question.dtype == "bfloat16"
    assert question.model.trainable == question.model.parameters
    assert question.profile is not None
    assert Request("Qwen2.5-0.5B", "1M", "h200").strategies() is None


def test_every_form_of_a_configuration_is_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    forms = (str(tmp_path), tmp_path, tmp_path / "config.json", CONFIG, Configuration())
    layers = {Request(form, 64, "h200").question().model.layers for form in forms}
    assert len(layers) == 1


def test_one_memory_has_no_part_for_the_device() -> None:
    from_preset = machine("h200")
    unified = type(from_preset)(
        **{name: getattr(from_preset, name) for name in from_preset.__dataclass_fields__}
        | {"unified": True}
    )
    with pytest.raises(UnsupportedError, match="device_memory: h200 has one memory for both tiers"):
        Request(CONFIG, 64, unified, device_memory="1GiB").question()


def test_a_machine_by_file_and_by_value(tmp_path: Path) -> None:
    preset = machine("h200")
    assert Request(CONFIG, 64, preset).question().machine is preset
    path = tmp_path / "absent.json"
    with pytest.raises(UnsupportedError, match=r"machine: .*absent\.json: missing"):
        Request(CONFIG, 64, path).question()


def test_here_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    said: list[str] = []

    def measure(progress: Any) -> Any:
        progress("measuring")
        return machine("l40s")

    def load(module: str, name: str) -> Any:
        loaded.append((module, name))
        return measure

    monkeypatch.setattr(ask, "load", load)
    assert Request(CONFIG, 64).question().machine == machine("l40s")
    assert loaded == [("farspan.engine.calibrate", "here")]
    assert Request(CONFIG, 64, progress=said.append).question().machine == machine("l40s")
    assert said == ["measuring"]


def test_memory_in_place_of_the_machines() -> None:
    question = Request(CONFIG, 64, "h200", device_memory=10**9, host_memory="2GiB").question()
    assert (question.machine.device_bytes, question.machine.host_bytes) == (
        10**9,
        2**31 - 2**31 // 10,
    )
    assert question.machine.host_bytes + question.machine.host_reserve == 2**31


@pytest.mark.parametrize(
    ("gpus", "layout"),
    [
        (1, Layout()),
        (2, Layout(ulysses=2)),
        (3, Layout(shards=3)),
        (8, Layout(ulysses=2, shards=4)),
    ],
)
def test_heads_are_shared_as_far_as_they_go(gpus: int, layout: Layout) -> None:
    assert Request(CONFIG, 64, "h200", gpus=gpus).question().layout == layout


@pytest.mark.parametrize("lora", [0, 4, 16])
def test_cells_have_the_gradients_of_what_is_trained(lora: int) -> None:
    """A walk takes off its bytes what the states count: both must mean the same weights."""
    question = Request(CONFIG, 64, "h200", lora=lora).question()
    program = build_program(question.model, question.run, Schedule(chunk=16))
    assert question.profile is not None
    found = Walk(program, question.profile, gradient_bytes=gradient_bytes(question)).run()
    assert found.gradients == states(question, program.groups).gradients


def test_an_adapter_is_narrower_than_what_it_adapts() -> None:
    """The largest module of a layer is 32 by 48."""
    assert Request(CONFIG, 64, "h200", lora=32).question().model.trainable > 0
    assert Request(CONFIG, 64, "h200", lora=16).question().model.trainable > 0
    for rank in (33, 99999999):
        with pytest.raises(UnsupportedError) as refused:
            Request(CONFIG, 64, "h200", lora=rank).question()
        message = str(refused.value)
        assert message.startswith(f"lora: rank {rank} is above 32, the narrower side")
        assert message.endswith("give 32 or less")


def test_routed_experts_have_no_adapters() -> None:
    """Their bare parameters, here 512 wide, set no limit: the widest is attention's 32."""
    experts = {"moe_intermediate_size": 512, "num_experts": 4, "num_experts_per_tok": 2}
    config = CONFIG | experts | {"model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 8}
    Request(config, 64, "h200", lora=32).question()
    with pytest.raises(UnsupportedError, match="is above 32, "):
        Request(config, 64, "h200", lora=33).question()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": -1}, "lora: expected the rank of adapters, such as 16, or 0"),
        ({"config": 7}, "config: expected a preset's name"),
        ({"machine": 7}, "machine: expected a preset's name"),
        ({"gpus": 1.5}, "gpus: expected a whole number"),
        ({"batch": 0}, "batch: expected a whole number"),
        ({"context": 0}, "context: expected tokens"),
        ({"optimizer": "adam"}, "optimizer: expected one of auto, adamw, adamw8bit, host, disk"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"weights": "disk"}, "weights: expected auto, device or host, got 'disk'"),
        (
            {"weights": "host", "optimizer": "adamw"},
            "weights: host needs optimizer states off the device, got",
        ),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"config": CONFIG, "context": 64, "machine": "h200"} | options
    with pytest.raises(UnsupportedError) as refused:
        Request(**given).question()
    assert str(refused.value).startswith(message)


def test_a_strategy_by_name() -> None:
    assert Request(CONFIG, 64, strategy="oomb").strategies() == ["oomb"]
    with pytest.raises(
        UnsupportedError, match="strategy: 'magic' is not known; expected one of auto, "
    ):
        Request(CONFIG, 64, strategy="magic").strategies()


def test_the_function_and_the_command_take_every_field_of_a_request() -> None:
    names = set(Request.__dataclass_fields__)
    assert set(signature(farspan.plan).parameters) == names
    options = {NAMES.get(name, name) for name in names - {"kernels", "progress"}}
    assert options <= set(signature(plan_command).parameters)


def test_an_option_nobody_knows() -> None:
    message = r"^contxt: farspan\.plan has no such option \(did you mean context\?\); expected some"
    with pytest.raises(UnsupportedError, match=message):
        farspan.plan(CONFIG, machine="h200", contxt=64)  # type: ignore[call-arg]
    with pytest.raises(
        UnsupportedError, match=r"^layers: farspan\.plan has no such option; expected"
    ):
        farspan.plan(CONFIG, context=64, layers=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["optimizer", "kernels"])
def test_none_is_no_value_of_an_option_that_has_a_default(name: str) -> None:
    options: dict[str, Any] = {name: None}
    with pytest.raises(UnsupportedError, match=rf"^{name}: got None; leave {name} out"):
        farspan.plan(CONFIG, context=64, machine="h200", **options)


def test_a_plan_prints_as_the_command_does() -> None:
    found = farspan.plan("Qwen2.5-7B", context="8K", machine="h200", strategy="oomb")
    arguments = ["plan", "--model", "Qwen2.5-7B", "--context", "8K", "--machine", "h200"]
    outcome = CliRunner().invoke(app, [*arguments, "--strategy", "oomb"])
    assert str(found).split() == outcome.output.split()
    assert repr(found) == (
        f"<Plan: Qwen2.5-7B, 8,192 tokens, 1 x h200: oomb fits, {found.seconds.total:.3g} s a step>"
    )


@pytest.mark.parametrize(("name", "as_in_a_run_file"), [("adamw", "device"), ("adamw8bit", "8bit")])
def test_optimizers_have_the_names_of_a_run_file_too(name: str, as_in_a_run_file: str) -> None:
    found = {
        Request("Qwen2.5-7B", "8K", "h200", optimizer=given).question().optimizer
        for given in (name, as_in_a_run_file)
    }
    assert found == {name}


def test_presets_of_any_family_are_planned_by_their_profiles() -> None:
    """On a GPU as farspan's own kernels run them, on slices of weights as they are."""
    name = "DeepSeek-V3"
    question = Request(name, "64K", "h200", gpus=8, lora=12).question()
    assert question.profile is not None
    assert question.profile.variant == Variant("bfloat16", 12, True, True)
    assert question.model is question.profile.spec
    assert question.adapter_rank() == 12
    cut = as_run(replace(question, layout=Layout(tensor=2)))
    assert cut.profile is not None
    assert cut.profile.variant == Variant("bfloat16", 12)
    assert 0 < cut.model.trainable == question.model.trainable < question.model.parameters
    ours, plain = (one.model.layers[0].work for one in (question, cut))
    assert plain.forward_traffic > ours.forward_traffic
    with pytest.raises(UnsupportedError, match=r"^lora: "):
        Request(name, "64K", "h200", lora=-1).question()


def test_a_plan_without_tensors_made_again_keeps_more() -> None:
    """`kernels.remake: false` is planned by a profile of its own, which does not ship."""
    small = {**find_config("Qwen2.5-0.5B"), "num_hidden_layers": 2}
    ask = partial(Request, small, "8K", "h200")
    less, whole = (ask(kernels=Kernels(remake=remake)).question() for remake in (True, False))
    of = [one.model.layers[0] for one in (less, whole)]
    made_again = 2 * (2 * whole.model.hidden + 4864)  # norms' outputs, and act(gate) * up
    assert of[1].activation_bytes - of[0].activation_bytes == made_again
    assert of[0].work.remade_traffic - of[1].work.remade_traffic > made_again


def test_planning_by_what_ships_needs_no_torch() -> None:
    program = (
        "import sys, farspan; farspan.plan('Gemma-3-4B', context='8K', machine='h200', "
        "strategy='recompute', lora=4); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
