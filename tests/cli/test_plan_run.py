"""`farspan plan RUN.yaml`: what a run asks of a machine, before anything of it is there."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from farspan import cli
from farspan.data.config import LossConfig
from farspan.planner import plans
from farspan.planner.evaluate import evaluate
from farspan.planner.plans import placements
from farspan.profile.catalog import presets
from farspan.program.strategies import strategy
from farspan.spec import (
    LossKind,
    MachineSpec,
    Objective,
    Reference,
    RunSpec,
    Schedule,
    Sparse,
    Tier,
    UnsupportedError,
)
from farspan.train.config import StatesPlace, load_run
from farspan.train.plan_run import QuestionOfRun, question_of_run
from farspan.train.setup import resolve
from farspan.train.trainer import train
from tests.grids import exhaustive
from tests.train.planner import GIB, one_memory
from tests.train.tiny import MODEL, Quiet, replaced, tiny_run

SMALL = {**MODEL, "num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
LONG: dict[str, Any] = {**SMALL, "max_position_embeddings": 65536}
RUN: dict[str, Any] = {
    "model": {"config": SMALL, "dtype": "bfloat16"},
    "data": {"source": "text", "path": "nowhere"},
    "context": 2048,
    "steps": 7,
    "schedule": {"strategy": "grouped", "chunk": 512},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no strategy is named one is tried, not a search made for what the test does not see."""
    search = plans._best_there
    monkeypatch.setattr(
        plans,
        "_best_there",
        lambda asked, names, seconds: search(asked, names or ["fpdt"], seconds),
    )


def write(file: Path, **changes: Any) -> Path:
    file.write_text(yaml.safe_dump({**RUN, **changes}))
    return file


def call(file: Path, *options: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", str(file), "--machine", "h200", *options])


def planned(file: Path, *options: str) -> dict[str, Any]:
    outcome = call(file, *options, "--json")
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def asked(
    file: Path, machine: str | MachineSpec = "h200", gpus: int | None = None
) -> QuestionOfRun:
    options: dict[str, Any] = {"machine": machine}
    if gpus is not None:
        options["gpus"] = gpus
    return question_of_run(load_run(file), options, lambda _: None)


def test_a_loss_of_pairs_is_planned_as_the_run_has_it(file: Path) -> None:
    """Its step is cut, and a frozen reference has weights of its own; the command line may ask for
    another."""
    pairs = {"source": "jsonl", "path": "nowhere", "format": "preference"}
    loss = {"kind": "dpo", "reference": "frozen"}
    write(file, loss=loss, data=pairs, schedule={"strategy": "auto"})
    assert asked(file).question.loss == Objective(LossKind.DPO, Reference.FROZEN)
    parts = asked(file).plan().plan.device.parts
    assert parts["reference"] == parts["weights"]
    other = {"machine": "h200", "reference": "stored"}
    found = question_of_run(load_run(file), other, lambda _: None)
    assert found.question.loss == Objective(LossKind.DPO, Reference.STORED)
    write(file, loss={"kind": "distill", "teacher": "x", "top_k": 9})
    assert asked(file).question.loss.ids == 9
    assert asked(write(file)).question.loss == Objective()


def test_a_written_schedule_is_planned_as_it_is(file: Path) -> None:
    """Beside it stands what the planner would choose, and what an update of two batches takes."""
    found = planned(write(file, accumulate=2, batch=3))
    assert found["fits"]
    assert (found["strategy"], found["schedule"]["chunk"]) == ("grouped", 512)
    assert found["schedule"]["groups"] == strategy("grouped", 4, 2048).groups
    [other] = found["alternatives"]
    assert other["strategy"] == "auto"
    assert other["seconds_per_step"] <= found["seconds_per_step"]
    assert found["reason"].startswith("as written; auto takes 0.")
    of_run, update = found["run"], found["seconds"]["optimizer"]
    each = 2 * (found["seconds_per_step"] - update) + update
    assert of_run["seconds_per_update"] == pytest.approx(each, rel=1e-12)
    assert of_run["seconds"] == pytest.approx(7 * each, rel=1e-12)
    assert of_run["tokens_per_update"] == 2 * 3 * 2048
    shown = call(file)
    assert shown.exit_code == 0
    assert "the run: 7 updates of 2 batches, 12,288 tokens each" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    assert len(shown.output.splitlines()) <= 25


def test_the_planners_schedule_is_a_line_to_keep(file: Path) -> None:
    """In the run file it is the same plan."""
    automatic = planned(write(file, schedule={"strategy": "auto"}))
    lines = call(file).output.splitlines()
    place = lines.index("to keep this schedule, write in the run file:")
    kept = yaml.safe_load("\n".join(lines[place + 1 :]))  # however many lines it takes
    again = planned(write(file, **kept))
    assert again["strategy"] == "plain"  # that is what it is
    assert again["reason"] == "as written; auto finds nothing faster"
    same = ("schedule", "device_bytes", "host_bytes", "seconds_per_step", "run")
    for name in same[1:]:
        assert again[name] == automatic[name]
    plans = [plan["schedule"] for plan in (automatic, again)]
    sizes = [Schedule(groups=made.pop("groups")).group_sizes(4) for made in plans]
    assert again["schedule"] == automatic["schedule"]
    assert sizes[0] == sizes[1]


def test_what_does_not_fit_as_written(file: Path) -> None:
    """All on the device, of which there is little."""
    plain = {"strategy": "plain"}
    needed = planned(write(file, schedule=plain))["device_bytes"]
    without_states = needed["total"] - needed["parts"]["optimizer"]  # they may go to the host
    little = "--device-memory", f"{without_states // 1024 - 1}KiB"
    outcome = call(write(file, schedule=plain), *little)
    assert outcome.exit_code == 1
    words = " ".join(outcome.output.split())
    assert re.search(r"lacks [\d.]+ [KM]iB of device memory", words)
    assert "--strategy auto: " in words
    assert "the run:" not in words
    outcome = call(file, *little, "--strategy", "auto")
    assert outcome.exit_code == 0


@pytest.mark.usefixtures("few")
def test_options_go_before_what_the_file_says(file: Path) -> None:
    write(file, context="8K", batch=2)
    options = [
        "--context",
        "4K",
        "--batch",
        "3",
        "--dtype",
        "fp32",
        "--lora",
        "2",
        "--host-memory",
        "3GiB",
        "--gpus",
        "2",
    ]
    found = planned(file, *options, "--strategy", "oomb", "--optimizer", "host")
    names = "context", "batch", "dtype", "gpus", "strategy", "optimizer"
    assert [found[name] for name in names] == [4096, 3, "float32", 2, "oomb", "host"]
    assert found["host_bytes"]["limit"] == (3 * GIB - 3 * GIB // 10) // 2
    assert found["layout"]["ulysses"] == 2
    found = planned(file, "--loss", "dpo", "--reference", "frozen")
    assert (found["loss"], found["reference"]) == ("dpo", "frozen")
    words = call(file, "--strategy", "oomb", "--sparse", "page=64,budget=256,recent=256").output
    assert "schedule: oomb replaces grouped and drops its chunk: 512" in words
    assert "sparse attention" in words


@pytest.mark.usefixtures("few")
def test_memory_on_the_command_line_goes_before_the_files(file: Path) -> None:
    """As in `farspan train`: also where it is more."""
    found = planned(write(file, host_memory="3GiB"), "--host-memory", "64GiB")
    assert found["host_bytes"]["limit"] == 64 * GIB - 64 * GIB // 10


@pytest.mark.usefixtures("few")
def test_the_optimizer_on_the_command_line_goes_before_the_files(file: Path) -> None:
    """In what is refused as well."""
    ranks = {"ulysses": 2}
    eight_bit = write(file, parallel=ranks, optimizer={"states": "8bit"})
    assert planned(eight_bit, "--optimizer", "adamw")["optimizer"] == "adamw"
    assert planned(eight_bit, "--optimizer", "none")["optimizer"] == "none"
    outcome = call(write(file, parallel=ranks), "--optimizer", "8bit")
    assert "optimizer.states: 8bit rounds blocks" in str(outcome.exception)


def test_a_step_as_a_graph_has_all_gradients_from_the_beginning(file: Path) -> None:
    assert not asked(write(file)).question.accumulates
    write(file, kernels={"graphs": True})
    assert asked(file).question.accumulates


def test_all_of_the_run_is_in_the_question(file: Path) -> None:
    write(
        file,
        context="4K",
        batch=2,
        accumulate=3,
        sparse={"page": 64, "budget": 256, "recent": 256},
        host_memory="3GiB",
        optimizer={"states": "host"},
        model={"config": SMALL, "lora": {"rank": 4}, "overrides": {"num_hidden_layers": 2}},
    )
    question = asked(file).question
    assert len(question.model.layers) == 2
    assert question.run == RunSpec(2, 4096)
    assert question.accumulates
    assert question.sparse == Sparse(64, 256, 256)
    assert question.machine.host_bytes == 3 * GIB
    assert (question.optimizer, question.dtype) == ("host", "float32")
    assert 0 < question.model.trainable < question.model.parameters / 2


@pytest.mark.usefixtures("few")
def test_named_modules_alone_have_adapters(file: Path) -> None:
    """Of rank 4, A and B of a square projection, in each of four layers."""
    lora = {"rank": 4, "targets": ["q_proj"]}
    question = asked(write(file, model={"config": SMALL, "lora": lora})).question
    width: Any = SMALL["hidden_size"]
    assert question.model.trainable == 4 * 4 * 2 * width
    assert "% of the weights trained" in call(file).output


def test_dropout_is_refused_as_training_refuses_it(file: Path) -> None:
    model = {"config": {**SMALL, "attention_dropout": 0.25}}
    with pytest.raises(
        UnsupportedError, match=r"model: dropout 0\.25 at model\.layers\.0\.self_attn"
    ):
        asked(write(file, model=model))


def test_states_go_where_they_fit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "best_plan", lambda asked, *_: evaluate(asked, "auto", Schedule()))
    assert planned(write(file))["optimizer"] == "adamw"
    reserve = asked(file).question.machine.reserve
    needed = planned(file)["device_bytes"]
    short = needed["total"] - needed["parts"]["optimizer"] // 2
    assert short > reserve
    memory = ("--device-memory", f"{-(-short // 1024)}KiB")
    assert planned(file, *memory)["optimizer"] == "host"
    write(file, optimizer={"states": "device"})
    assert not planned(file, *memory)["fits"]
    unified = placements(asked(write(file), one_memory()).question)
    assert [question.optimizer for group in unified for question in group] == ["adamw"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("schedule", [{}, {"strategy": "auto"}], ids=["written", "auto"])
def test_weights_live_where_the_file_says(file: Path, schedule: dict[str, str]) -> None:
    write(file, schedule={**schedule, "weights": "host"})
    found = planned(file)
    assert (found["weights"], found["optimizer"]) == ("host", "host")
    assert not {"weights", "gradients", "optimizer"} & found["device_bytes"]["parts"].keys()
    assert {"weights", "gradients", "optimizer"} <= found["host_bytes"]["parts"].keys()
    assert planned(file, "--weights", "device")["weights"] == "device"
    assert planned(write(file, schedule=schedule), "--weights", "host") == found
    shards = planned(file, "--weights", "host", "--gpus", "2")
    for part in ("weights", "gradients", "optimizer"):
        own, whole = (one["host_bytes"]["parts"][part] for one in (shards, found))
        assert 0 <= 2 * own - whole <= 2


@pytest.mark.usefixtures("few")
def test_ranks_share_it_as_the_file_says(file: Path) -> None:
    write(file, parallel={"ulysses": 2, "data": 2})
    found = planned(file)
    assert (found["gpus"], found["layout"]["ulysses"], found["layout"]["data"]) == (4, 2, 2)
    assert found["run"]["tokens_per_update"] == 2 * 2048
    write(file, parallel={"ulysses": 2})
    assert asked(file, gpus=6).question.layout.data == 3
    with pytest.raises(UnsupportedError, match="parallel: ulysses 2 needs 2 rank"):
        asked(file, gpus=3)
    write(file, parallel="auto")
    assert asked(file).question.layout.devices() == 8
    assert asked(file, gpus=4).question.layout.devices() == 4
    # Processes of one CPU share its memory.
    question = asked(file, one_memory(), gpus=2).question
    assert question.near() == 2
    write(file, parallel={"ulysses": 2}, optimizer={"states": "8bit"})
    with pytest.raises(UnsupportedError, match=r"optimizer\.states: 8bit rounds blocks"):
        asked(file)


def test_the_longest_context_of_a_run(file: Path) -> None:
    small = ("--device-memory", "1300MiB", "--host-memory", "16MiB")
    found = planned(write(file, schedule={"strategy": "fpdt"}), "--max-context", *small)
    assert found["context"] == 2048
    assert found["max_context"] > 2048
    assert set(found["max_context_by_strategy"]) == {"fpdt"}


def test_a_path_is_one_that_the_run_can_load(file: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^model.path: no folder ./nowhere here"):
        asked(write(file, model={"path": "./nowhere"}))


def test_a_preset_is_its_name_on_the_hub(file: Path) -> None:
    run = load_run(write(file, model={"path": "qwen2.5-0.5b"}))
    found = question_of_run(run, {"machine": "h200"}, print)
    assert found.run.model.path == "Qwen/Qwen2.5-0.5B"
    assert resolve(run).model.path == resolve(run).data.tokenizer == "Qwen/Qwen2.5-0.5B"
    paper = next(preset for preset in presets() if preset.hub is None)
    with pytest.raises(
        UnsupportedError, match=r"^model\.path: the preset .* describes a model of a paper"
    ):
        resolve(load_run(write(file, model={"path": paper.name})))


WRITTEN = (
    (("--device-memory", "6GiB"), ("host", "host")),
    (("--device-memory", "24GiB"), ("adamw", "device")),
    (("--weights", "host"), ("host", "host")),
    (("--lora", "8", "--batch", "2", "--gpus", "2"), ("adamw", "device")),
)


@pytest.mark.parametrize(
    ("context", "options", "place"),
    # With weights in main memory a search takes 6 s.
    [("2K", *WRITTEN[3]), exhaustive("2K", *WRITTEN[1])]
    + [exhaustive("16K", *row) for row in WRITTEN],
)
def test_a_plan_writes_a_run_file_that_trains_as_planned(
    file: Path, context: str, options: tuple[str, ...], place: tuple[str, str]
) -> None:
    model = ("plan", "--model", "Qwen2.5-0.5B", "--context", context, "--machine", "h200")
    wanted = CliRunner().invoke(cli.app, [*model, *options, "--json", "--write", str(file)])
    found = json.loads(wanted.stdout)
    assert (found["optimizer"], found["weights"]) == place
    for words in ("DATA.jsonl", f"farspan data {file}", f"farspan train {file}"):
        assert words in re.sub(r" \\\n +", " ", wanted.stderr), words
    text = file.read_text()
    assert "strategy: null" not in text
    assert "strategy:\n" not in text
    gpus = 2 if "--gpus" in options else None
    again = asked(file, gpus=gpus).plan().plan.to_json()
    for name in ("optimizer", "weights", "layout", "batch", "context", "dtype", "lora"):
        assert again[name] == found[name], name
    sizes = [
        Schedule(groups=one["schedule"].pop("groups")).group_sizes(24) for one in (again, found)
    ]
    assert again["schedule"] == found["schedule"]
    assert sizes[0] == sizes[1]


def test_states_and_weights_in_main_memory_are_written(file: Path) -> None:
    model = ("plan", "--model", "Qwen2.5-0.5B", "--context", "2K", "--machine", "h200")
    options = ("--strategy", "fpdt", "--json", "--write", str(file))
    for own, place in (WRITTEN[0], WRITTEN[2]):
        found = json.loads(CliRunner().invoke(cli.app, [*model, *options, *own]).stdout)
        assert (found["optimizer"], found["weights"]) == place
        run = load_run(file)
        assert (run.optimizer.states, run.schedule.weights) == (StatesPlace.HOST, Tier.HOST)
        file.unlink()


def test_a_place_is_looked_at_before_anything_is_planned(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_already(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("farspan.cli.plan.best_plan", planned_already)
    monkeypatch.setattr("farspan.ask.Request.question", planned_already)
    file.write_text("mine")
    model = ["plan", "--model", "Qwen2.5-0.5B", "--context", "8K", "--machine", "h200"]
    init = ["init", "Qwen2.5-0.5B", "texts", "--machine", "h200", "-o"]
    nowhere, folder = str(file.parent / "nowhere" / "a file"), str(file.parent)
    for call_of, place, words in (
        ([*model, "--write"], str(file), f"write: {file} exists already; delete it, or"),
        (init, str(file), f"output: {file} exists already"),
        ([*model, "--write"], nowhere, f"write: {nowhere} cannot be written: no such folder"),
        ([*model, "--html"], nowhere, "make it with mkdir -p "),
        ([*model, "--timeline"], nowhere, "timeline: "),
        ([*model, "--snapshot"], nowhere, "snapshot: "),
        ([*model, "--html"], folder, f"html: {folder} is a folder; name a file in it"),
    ):
        outcome = CliRunner().invoke(cli.app, [*call_of, place])
        assert isinstance(outcome.exception, UnsupportedError), outcome.exception
        assert words in str(outcome.exception)
        assert outcome.stdout == ""
    assert file.read_text() == "mine"


def test_an_answer_with_all_that_is_asked_for_fits_a_screen(file: Path) -> None:
    """Longest contexts, the lines to paste next and a page."""
    model = ["plan", "--model", "Qwen2.5-0.5B", "--machine", "rtx4090", "--strategy", "fpdt"]
    loss = ["--loss", "distill", "--write", str(file), "--html", str(file.with_name("plan.html"))]
    outcome = CliRunner().invoke(cli.app, [*model, "--context", "8K", "--max-context", *loss])
    assert outcome.exit_code == 0, outcome.exception
    lines = outcome.stdout.splitlines()
    assert len(lines) <= 25
    assert max(len(line) for line in lines if str(file.parent) not in line) <= 80
    assert f"  farspan train {file}" in lines


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--loss", "orpo", "--optimizer", "8bit"), LossConfig(LossKind.ORPO)),
        (
            ("--loss", "dpo", "--lora", "8", "--reference", "adapters-off"),
            LossConfig(LossKind.DPO, reference=Reference.ADAPTERS_OFF),
        ),
        (("--loss", "kto"), LossConfig(LossKind.KTO)),
        (("--loss", "distill"), LossConfig(LossKind.DISTILL, teacher="TEACHER")),
    ],
)
def test_every_loss_that_a_run_file_has_is_written(
    file: Path, options: tuple[str, ...], expected: LossConfig
) -> None:
    model = ("plan", "--model", "Qwen2.5-0.5B", "--context", "8K", "--machine", "h200")
    options = (*options, "--strategy", "fpdt", "--write", str(file))
    outcome = CliRunner().invoke(cli.app, [*model, *options])
    assert outcome.exit_code == 0, outcome.exception
    run, question = load_run(file), asked(file).question
    assert run.objective == expected
    assert question.loss == expected.planned()
    form = expected.kind.row.format
    assert (f"format: {form or 'p'}" in file.read_text()) is bool(form)
    assert ("the teacher's folder" in outcome.stdout) is (expected.teacher is not None)
    assert "reference: stored" not in file.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loss", "grpo"), r"^write: loss\.kind: grpo: .*; compute this .* with farspan\.losses"),
        (("--optimizer", "none"), r"^write: .* not --optimizer none; leave it out, or in your"),
    ],
)
def test_what_no_run_file_says_is_refused(
    file: Path, options: tuple[str, ...], message: str
) -> None:
    model = ("plan", "--model", "Qwen2.5-0.5B", "--context", "8K", "--machine", "h200")
    outcome = CliRunner().invoke(cli.app, [*model, *options, "--write", str(file)])
    assert re.search(message, str(outcome.exception)), outcome.exception
    assert not file.exists()


def test_a_run_file_s_plan_is_written_with_all_that_it_said(file: Path) -> None:
    write(file, schedule="auto", steps=9, optimizer={"lr": 1e-4}, batch=2)
    new = file.with_name("new.yaml")
    outcome = call(file, "--write", str(new))
    assert "farspan train" in outcome.stdout
    assert "DATA" not in outcome.stdout
    before, after = load_run(file), load_run(new)
    assert after.folder == "runs/new"
    assert after.optimizer == replace(before.optimizer, states=StatesPlace.DEVICE)
    same = replace(after, folder=before.folder, optimizer=before.optimizer)
    assert replace(same, schedule=before.schedule) == before


def test_init_asks_nothing(file: Path) -> None:
    """A model, a data path given and the machine that is there."""
    texts = file.with_name("texts")
    texts.mkdir()
    (texts / "one.txt").write_text("hello")
    given = ["init", "Qwen2.5-0.5B", str(texts), "-o", str(file), "--machine", "h200"]
    outcome = CliRunner().invoke(cli.app, given)
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("fits: weights, gradients and states on the device, ")
    assert f"farspan train {file}" in outcome.stdout
    assert "DATA" not in outcome.stdout
    run = load_run(file)
    assert (run.data.source, run.data.path) == ("auto", str(texts))
    assert (run.model.path, run.context) == ("Qwen/Qwen2.5-0.5B", 8192)


def test_init_refuses_data_that_are_not_there(file: Path) -> None:
    missing = str(file.with_name("nosuch.jsonl"))
    given = ["init", "Qwen2.5-0.5B", missing, "-o", str(file), "--machine", "h200"]
    outcome = CliRunner().invoke(cli.app, given)
    assert str(outcome.exception).startswith(f"data.path: no file matches {missing!r}")
    assert not file.exists()


@pytest.mark.usefixtures("few")
def test_data_that_are_missing_are_noted_by_a_plan(file: Path) -> None:
    write(file, schedule="auto", data={"path": str(file.with_name("gone.jsonl"))})
    outcome = call(file)
    assert outcome.exit_code == 0
    assert "\nnote: data.path: no file matches" in outcome.stdout
    write(file, schedule="auto", data={"path": "DATA.jsonl"})
    assert "no file" not in call(file).stdout


def test_what_does_not_fit_is_not_written(file: Path) -> None:
    options = ("--model", "Qwen2.5-7B", "--context", "8K", "--machine", "h200")
    little = ("--device-memory", "4GiB", "--host-memory", "8GiB", "--strategy", "recompute")
    outcome = CliRunner().invoke(cli.app, ["plan", *options, *little, "--write", str(file)])
    assert outcome.exit_code == 1
    assert f"{file}: not written, because no plan fits" in outcome.stdout
    assert not file.exists()


@pytest.mark.parametrize(
    ("parallel", "groups", "message"),
    [
        (None, [1, 2], r"schedule\.groups: \[1, 2\] holds 3 layers, but the model has 4"),
        ({"pipeline": 2}, [1, 2, 1], r"schedule\.groups: a pipeline of 2 stages has one group"),
        ({"pipeline": 2}, [1, 3], r"schedule\.groups: a pipeline is planned in stages of 2 or one"),
        ({"pipeline": 5}, 1, r"parallel\.pipeline: 5 stages for 4 layers"),
    ],
)
def test_groups_that_the_run_cannot_have_or_no_plan_is_of(
    file: Path, parallel: dict[str, int] | None, groups: Any, message: str
) -> None:
    write(file, parallel=parallel, schedule={"strategy": None, "groups": groups})
    with pytest.raises(UnsupportedError, match=message):
        asked(file).plan()


def test_a_hub_name_needs_no_network(file: Path) -> None:
    """Of a model that farspan knows. It reads no weights, and changes what the file changes."""
    model = {"path": "Qwen/Qwen2.5-0.5B", "overrides": {"intermediate_size": 64}}
    question = asked(write(file, model=model)).question
    assert question.model.name == "Qwen/Qwen2.5-0.5B"
    assert question.model.parameters < 2e8
    with pytest.raises(
        UnsupportedError, match=r"model\.overrides\.layers: Qwen2Config has no such field"
    ):
        asked(write(file, model={"path": model["path"], "overrides": {"layers": 2}}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "GPT-2"], "has one; leave out --model, or this run file"),
        (["--gpus", "0"], "gpus: expected a whole number of devices >= 1, got 0"),
    ],
)
def test_what_makes_no_sense_beside_a_run_file(
    file: Path, options: list[str], message: str
) -> None:
    outcome = call(write(file), *options)
    assert isinstance(outcome.exception, UnsupportedError)
    assert message in str(outcome.exception)


@pytest.mark.parametrize(
    ("model", "tolerance", "weights"),
    [
        ({"config": MODEL}, 0.02, "device"),
        ({"config": MODEL}, 0.02, "host"),
        ({"config": MODEL, "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}, 0, "host"),
        ({"config": {**MODEL, "model_type": "olmo2"}}, 0, "device"),
    ],
)
def test_it_is_what_the_run_itself_plans(
    tmp_path: Path, model: dict[str, Any], tolerance: float, weights: str
) -> None:
    """`farspan train` looks at the model; this has only the configuration, and where that does not
    tell all, layers without their weights."""
    run = tiny_run(tmp_path)
    file = tmp_path / "run.yaml"
    auto = {"strategy": "auto", "weights": weights}
    values = {
        "model": {**model, "dtype": run.model.dtype.value},
        "data": {"source": "text", "path": run.data.path, "tokenizer": "bytes", "held_out": 0},
        **{"folder": str(tmp_path / "folder"), "context": run.context, "accumulate": 2},
        **{"steps": 1, "schedule": auto, "device": "cpu"},
    }
    file.write_text(yaml.safe_dump(values))
    train(load_run(file), components=replaced(machine=lambda *_: one_memory()), reporter=Quiet())
    written = json.loads((tmp_path / "folder" / "plan.json").read_text())
    found = json.loads(json.dumps(asked(file, one_memory()).plan().to_json()))
    assert found["schedule"] == written["schedule"]
    for tier in ("device_bytes", "host_bytes"):
        assert found[tier]["total"] == pytest.approx(written[tier]["total"], rel=tolerance)
    assert found["optimizer"] == written["optimizer"]


@pytest.mark.usefixtures("few")
def test_kernels_of_the_run_are_planned(file: Path) -> None:
    """Same bits take flash attention's sums of dQ, and its time in place of cuDNN's."""
    context = {"context": 16384, "model": {"config": LONG, "dtype": "bfloat16"}}
    plain, same = (
        planned(write(file, **context, **kernels))
        for kernels in ({}, {"kernels": {"deterministic": True}})
    )
    heads, width = LONG["num_attention_heads"], LONG["hidden_size"]
    sums = -(-132 // heads)  # of an H200
    taken = [found["device_bytes"]["parts"]["cells"] for found in (plain, same)]
    assert taken[1] - taken[0] == sums * 512 * -(-width // 32 // heads) * 32 * heads * 4
    assert same["seconds"]["compute"] > plain["seconds"]["compute"]
