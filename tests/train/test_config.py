"""A run file says what it means, and the default run is a valid one."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from farspan.cli.train import default_run
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from farspan.train.config import (
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SparseConfig,
    load_run,
)
from farspan.train.yaml_config import build, to_mapping

RUN = """
model: {path: some/model, overrides: {attention_dropout: 0.0}, dtype: bfloat16}
data: {source: jsonl, path: corpus.jsonl, held_out: 0.01}
context: 131072
schedule: {strategy: fpdt, chunk: 32768, kv: host, groups: [2, 2]}
optimizer: {lr: 1e-5, clip: null}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_a_run_file_becomes_a_run(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, RUN))
    assert run.folder == "runs/mine"
    assert run.model.overrides == {"attention_dropout": 0.0}
    assert run.optimizer == OptimizerConfig(lr=1e-5, clip=None)
    assert run.schedule.apply(Schedule()) == Schedule(chunk=32768, kv=Tier.HOST, groups=(2, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: x}", r"mine\.yaml: data: missing; must be given"),
        ("steps: 3", r"mine\.yaml: model and data: missing; must be given"),
        ("# nothing yet\n", r"mine\.yaml: is empty; a run file names at least `model` and `da"),
        (RUN + "steps: 100000000", r"steps: expected at most 99,999,999, got 100,000,000"),
        (
            RUN.replace("fpdt", "gruped"),
            r"schedule\.strategy: 'gruped' .*mean grouped\?.*auto",
        ),
        (RUN + "steps: 0", r"mine\.yaml: steps: expected a whole number of at least 1, got 0"),
        (RUN.replace("some/model", "null"), r"model\.path: give either path .* got neither"),
        (RUN.replace("path: some/model", "config: {a: 1}"), r"model\.config: model_type is miss"),
        (RUN.replace("1e-5", "0"), r"optimizer\.lr: expected a number above 0, got 0\.0"),
        (RUN.replace("32768", "0"), r"schedule\.chunk: expected a whole number of tokens >= 1"),
        (RUN.replace("bfloat16", "float16"), r"model\.dtype: expected one of .*bfloat16\?"),
        (RUN.replace("0.01", "1.5"), r"data\.held_out: expected a fraction from 0 up to 1"),
        (
            RUN.replace("1e-5", "1e-5, decay_steps: 9"),
            r"optimizer\.decay_steps: only decay wsd uses it, got decay cosine; set decay",
        ),
        (
            RUN.replace("1e-5", "1e-5, decay: wsd, warmup: 20, decay_steps: 990"),
            r"optimizer\.decay_steps: 990 and a warmup of 20 exceed steps \(1000\)",
        ),
        (RUN + "sparse: {page: 0}", r"sparse\.page: expected a whole number of tokens >= 1, got 0"),
        (RUN + "sparse: {page: 96}", r"sparse\.budget: expected a multiple of page \(96 tokens\)"),
        (
            RUN + "sparse: {sparsity: 0}",
            r"sparse\.sparsity: expected a fraction above 0 and below 1",
        ),
        (RUN + "sparse: {sparsity: 1}", r"sparse\.sparsity: .*no chosen pages `budget: 0`"),
        (
            RUN + "sparse: {warn_below: 90}",
            r"sparse\.warn_below: expected a share of attention from",
        ),
        (
            RUN + "sparse: {page: 96, budget: 960}",
            r"schedule\.chunk: expected a multiple of page \(96 tokens\) with sparse attention, "
            r"got 32768; make it 32832, or choose a page that divides it \(sparse\.page\)",
        ),
        (
            RUN.replace("clip: null", "states: 8bit").replace("bfloat16", "float64"),
            r"optimizer\.states: 8bit updates in float32, .* set states to auto, device, host",
        ),
    ],
)
def test_a_wrong_run_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_run(write(tmp_path, text))


def test_settings_go_before_what_the_file_says(tmp_path: Path) -> None:
    settings = [
        "optimizer.lr=1e-6",  # a number with an exponent and no point, as in a file
        "context=64K",
        "schedule.kv_block=2K",
        "schedule.x=host",  # an older name
        "model.overrides.rope_parameters={rope_type: yarn, factor: 2.0}",
        "evaluation.every=7",  # of a section that the file has not
        "sparse=on",
        "sparse.budget=4K",
        "optimizer.clip=0.5",
        "optimizer.clip=null",  # the later one counts
    ]
    run = load_run(write(tmp_path, RUN), settings)
    plain = load_run(write(tmp_path, RUN))
    assert run == replace(
        plain,
        context=65536,
        model=replace(
            plain.model,
            overrides={
                "attention_dropout": 0.0,
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            },
        ),
        schedule=replace(plain.schedule, kv_block=2048, boundary_inputs=Tier.HOST),
        evaluation=replace(plain.evaluation, every=7),
        sparse=SparseConfig(budget=4096),
        optimizer=replace(plain.optimizer, lr=1e-6),
    )
    assert default_run(["steps=90"]) == replace(default_run(), steps=90)
    sources = (
        "data: {sources: [{source: jsonl, path: a}, {source: jsonl, path: b}]}\nmodel: {path: m}"
    )
    found = load_run(write(tmp_path, sources), ["data.sources.1.weight=3"]).data.sources
    assert found is not None
    assert [source.weight for source in found] == [1.0, 3.0]
    # What is missing in the file can be set.
    assert load_run(write(tmp_path, "data: {source: stdlib}"), ["model.path=m"]).model.path == "m"


def test_a_setting_changes_one_place_of_what_yaml_shares(tmp_path: Path) -> None:
    text = (
        "data: {source: stdlib}\nmodel: {config: {model_type: qwen2, a: &one {factor: 1}, b: *one}}"
    )
    config = load_run(write(tmp_path, text), ["model.config.b.factor=2"]).model.config
    assert config == {"model_type": "qwen2", "a": {"factor": 1}, "b": {"factor": 2}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr=1", "mine.yaml --set lr=1: lr: no such key (did you mean optimizer.lr?); the keys"),
        ("optimiser.lr=1", "optimiser.lr: no such key (did you mean optimizer?)"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number, got text 'fast'"),
        ("optimizer.lr", "optimizer.lr: expected KEY=VALUE, such as optimizer.lr=1e-5"),
        ("steps=[1", "steps: not valid YAML"),
        ("folder=a\nsteps: 3", "expected one value"),
        ("context.chunk=1", "context.chunk: context is 131072, which has no keys; set context"),
        ("schedule.groups.2=1", "schedule.groups.2: expected a number from 0 to 1, got '2'"),
        ("schedule.groups.x=1", "expected a number from 0 to 1, got 'x'"),
        ("model.config={model_type: qwen2}", "model.path: give either path"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        load_run(write(tmp_path, RUN), [setting])
    assert message in str(refused.value)
    assert f"--set {setting}" in str(refused.value)


def test_a_schedule_may_be_a_word(tmp_path: Path) -> None:
    text = "model: {path: some/model}\ndata: {source: stdlib}\nschedule: "
    assert load_run(write(tmp_path, text + "auto")).schedule == ScheduleConfig(strategy="auto")
    assert load_run(write(tmp_path, text + "oomb")).schedule == ScheduleConfig(strategy="oomb")
    fast = load_run(write(tmp_path, RUN), ["schedule=auto"])
    assert fast.schedule == ScheduleConfig(strategy="auto")
    with pytest.raises(UnsupportedError, match=r"schedule\.strategy: 'fast' is not known"):
        load_run(write(tmp_path, text + "fast"))


def test_a_run_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"model: \xff")
    with pytest.raises(
        UnsupportedError, match=r"mine\.yaml: cannot be read: .*can't decode byte 0xff"
    ):
        load_run(tmp_path / "mine.yaml")


def test_warmup_ends_before_the_run_does() -> None:
    run = default_run()
    with pytest.raises(
        UnsupportedError, match=r"optimizer\.warmup: expected fewer than steps \(8\)"
    ):
        RunConfig(run.model, run.data, steps=8, optimizer=run.optimizer)


def test_every_field_of_a_schedule_can_be_given() -> None:
    names = {field.name for field in fields(ScheduleConfig)} - {"strategy", "weight_gradients"}
    # Sparse attention changes results, as no field of a schedule's does: it is the run's own.
    assert names == {field.name for field in fields(Schedule)} - {"sparse"}
    assert ScheduleConfig().apply(Schedule(chunk=7)) == Schedule(chunk=7)


@pytest.mark.parametrize(
    ("fields_text", "place"),
    [
        ("weights: host, weight_gradients: host", Tier.HOST),
        ("weights: device, weight_gradients: device", Tier.DEVICE),
        ("weight_gradients: device", None),
        ("strategy: auto, weights: host, weight_gradients: host", Tier.HOST),
    ],
)
def test_gradients_go_with_the_weights(
    tmp_path: Path, fields_text: str, place: Tier | None
) -> None:
    run = load_run(write(tmp_path, RUN), [f"schedule={{{fields_text}}}"])
    assert run.schedule.weights is place
    assert run.schedule.apply(Schedule()).weights is (place or Tier.DEVICE)
    assert build(RunConfig, to_mapping(run)) == run


@pytest.mark.parametrize(
    ("fields_text", "expected"),
    [
        ("weights: host, weight_gradients: device", "host"),
        ("weights: device, weight_gradients: host", "device"),
        ("weight_gradients: host", "device"),
    ],
)
def test_gradients_elsewhere_than_the_weights_are_refused(
    tmp_path: Path, fields_text: str, expected: str
) -> None:
    wanted = (
        rf"schedule\.weight_gradients: expected {expected}, as weights, got \w+: .*; set "
        r"both to host, or both to device$"
    )
    with pytest.raises(UnsupportedError, match=wanted):
        load_run(write(tmp_path, RUN), [f"schedule={{{fields_text}}}"])


@pytest.mark.parametrize("sparse", [None, SparseConfig(page=64, sparsity=0.5)])
def test_a_resolved_run_reads_back_as_itself(sparse: SparseConfig | None) -> None:
    run = replace(default_run(), sparse=sparse)
    text = yaml.safe_dump(to_mapping(run), sort_keys=False)
    assert build(RunConfig, yaml.safe_load(text)) == run


def test_a_run_file_takes_the_words_of_the_command_line(tmp_path: Path) -> None:
    text = RUN.replace("131072", "128K").replace("32768", "32K").replace("bfloat16", "bf16")
    assert load_run(write(tmp_path, text)) == load_run(write(tmp_path, RUN))
    pages = "sparse: {page: 64, budget: 2K, recent: 1.5K}"
    assert load_run(write(tmp_path, RUN + pages)).pages() == Sparse(64, 2048, 1536)
    was = "sparse: {page: 64, budget: 2K, recent: 1.5K, sink_pages: 2}"
    now = Sparse(64, 2048, 1536, 128, 64, "mean")
    assert load_run(write(tmp_path, RUN + was)).pages() == now
    with pytest.raises(
        UnsupportedError, match=r"sink_pages: cannot be given with sinks, .*; write sparse.sin"
    ):
        load_run(write(tmp_path, RUN + was.replace("2K", "2K, sinks: 64")))
    assert load_run(write(tmp_path, RUN + "sparse: on")).sparse == SparseConfig()
    assert load_run(write(tmp_path, RUN + "sparse: off")).sparse is None
    with pytest.raises(
        UnsupportedError, match=r"mine\.yaml: schedule\.chunk: expected tokens such as"
    ):
        load_run(write(tmp_path, RUN.replace("32768", "8 apples")))
    with pytest.raises(UnsupportedError, match=r"mine\.yaml: host_memory: 24 has no unit"):
        load_run(write(tmp_path, RUN + "host_memory: 24"))
