"""A run that trains adapters beside weights of four bits: by a run file, resumed, given out."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from farspan import cli
from farspan.hf.load import load_model
from farspan.hf.quantized import held_bytes
from farspan.planner.evaluate import evaluate
from farspan.planner.plans import best_plan
from farspan.program.layout import Auto, Given, Parallel
from farspan.spec import Quantization, Tier, UnsupportedError
from farspan.train.config import (
    DType,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    load_run,
)
from farspan.train.setup import resolve
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping
from tests.numerics import relative_error
from tests.ranks import RankError, run_ranks
from tests.train.planner import planned_components
from tests.train.test_lora import LORA, a_run
from tests.train.test_ranks import fit_all
from tests.train.test_streamed_weights import assert_same, context, outcome
from tests.train.tiny import (
    Quiet,
    Stopped,
    Stopping,
    assert_same_weights,
    replaced,
    weights,
)

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def qlora(root: Path, name: str, **changes: Any) -> RunConfig:
    run = a_run(root, name, **changes)
    model = replace(run.model, dtype=DType.FLOAT32, quantize=Quantization.NF4)
    return replace(run, model=model)


def run_file(path: Path, run: RunConfig) -> Path:
    path.write_text(yaml.safe_dump(to_mapping(run)))
    return path


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["farspan", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.mark.slow
def test_a_run_file_resumes_to_the_same_bits_and_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = qlora(tmp_path, "whole")
    run = load_run(run_file(tmp_path / "run.yaml", replace(whole, folder=str(tmp_path / "run"))))
    assert run.model.quantize is Quantization.NF4
    fit_all([whole])
    with pytest.raises(Stopped):
        train(run, reporter=Stopping(4))
    fit_all([run])
    assert_same_weights(run, whole)
    expected = weights(whole)
    about = json.loads((Path(run.folder) / "about.json").read_text())
    plain = load_model(path=str(run.model.path), dtype=torch.float32)
    trained = sum(t.numel() for t in expected.values())
    assert about["trainable"] == trained
    assert about["parameters"] == trained + sum(p.numel() for p in plain.parameters())
    merged_into_the_plain_base(run, tmp_path / "out", monkeypatch)
    assert "adapters of 14 modules merged" in capsys.readouterr().out


def merged_into_the_plain_base(run: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, as peft adds the adapters to it."""
    base: Any = AutoModelForCausalLM.from_pretrained(str(run.model.path), dtype=torch.bfloat16)
    base.save_pretrained(str(out.parent / "bf16"))
    assert (
        command(
            monkeypatch, "merge", run.folder, "-o", str(out), "--base", str(out.parent / "bf16")
        )
        == 0
    )
    found: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    wide = base.float()
    plain = {n: p.clone() for n, p in wide.named_parameters()}
    exact: Any = PeftModel.from_pretrained(wide, str(Path(run.folder) / "model"))
    summed = dict(exact.merge_and_unload().named_parameters())
    moved = 0
    for name, weight in found.named_parameters():
        assert relative_error(weight, summed[name]) <= 2**-8
        moved += not torch.equal(weight.float(), plain[name])
    assert moved == 14


@pytest.mark.exhaustive
def test_adapters_go_on_in_another_run(tmp_path: Path) -> None:
    """Whose model.path is the adapters' folder: their base is quantised as before."""
    first = qlora(tmp_path, "first", steps=2)
    fit_all([first])
    model = ModelConfig(
        path=f"{first.folder}/model", dtype=DType.FLOAT32, quantize=Quantization.NF4
    )
    then = resolve(replace(first, folder=str(tmp_path / "then"), model=model))
    assert then.model.path == first.model.path
    assert then.model.lora is not None
    fit_all([replace(then, steps=1, optimizer=replace(then.optimizer, warmup=0))])


@pytest.mark.slow
def test_a_quantised_folder_is_trained_as_it_is(tmp_path: Path) -> None:
    run = qlora(tmp_path, "run")
    folder = str(tmp_path / "packed")
    load_model(path=str(run.model.path), dtype=torch.float32, nf4=True).save_pretrained(folder)
    fit_all([run])
    again = replace(run, folder=str(tmp_path / "again"), model=replace(run.model, path=folder))
    unsaid = replace(
        again, folder=str(tmp_path / "unsaid"), model=replace(again.model, quantize=None)
    )
    fit_all([again, unsaid])
    for other in again, unsaid:
        assert_same_weights(run, other)
    bare = replace(no_lora(unsaid), folder=str(tmp_path / "bare"))
    with pytest.raises(UnsupportedError, match=r"model\.lora: missing.*a plain checkpoint"):
        train(bare, reporter=Quiet())


@pytest.mark.exhaustive
def test_from_main_memory_they_are_the_resident_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches that add up, clipping, evaluations and checkpoints; stopped, gone on with from
    main memory and from the device, and merged."""
    optimizer = OptimizerConfig(lr=1e-2, warmup=2, clip=0.05)
    often = EvaluationConfig(every=3, sequences=1)
    resident = qlora(tmp_path, "resident", steps=6, optimizer=optimizer, evaluation=often)
    resident = replace(resident, model=replace(resident.model, dtype=DType.BFLOAT16))
    on_host = replace(resident.schedule, weights=Tier.HOST)
    other = replace(resident, schedule=on_host, folder=str(tmp_path / "streamed"))
    stopped = replace(other, folder=str(tmp_path / "stopped"))
    quiet = Quiet()
    train(resident, reporter=Quiet())
    train(other, reporter=quiet)
    assert "weights and their gradients on host" in "\n".join(quiet.notes)
    for step, schedule in ((3, on_host), (5, resident.schedule)):
        with pytest.raises(Stopped):
            train(replace(stopped, schedule=schedule), reporter=Stopping(step))
    train(stopped, reporter=Quiet())
    expected = outcome(Path(resident.folder))
    assert any(line["heldout_loss"] for line in expected[0])
    assert max(line["grad_norm"] or 0 for line in expected[0]) > 0.05
    for run in other, stopped:
        assert_same(outcome(Path(run.folder)), expected)
    merged_into_the_plain_base(other, tmp_path / "out", monkeypatch)


@pytest.mark.slow
def test_auto_plans_for_them_in_main_memory(tmp_path: Path) -> None:
    """Planned, forecast and measured; in the main memory of a GPU's run there are the packed
    bytes."""
    auto = ScheduleConfig(strategy="auto", weights=Tier.HOST)
    run = qlora(tmp_path, "run", schedule=auto, steps=3)
    parts = replaced(
        planned_components(()), best_plan=partial(best_plan, seconds=0.1), evaluate=evaluate
    )
    found = train(run, components=parts, reporter=Quiet()).comparison
    assert found is not None
    assert abs(found.predicted_bytes / found.measured_bytes - 1) < 0.02
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["fields"]["weights"], plan["quantize"]) == ("host", "nf4")
    ctx = context(replace(run, folder=str(tmp_path / "apart")))
    assert ctx.weights is not None
    held = sum(map(held_bytes, ctx.model.parameters()))
    assert 0 <= ctx.weights.nbytes - held <= (256 + 16) * 5


@pytest.mark.slow
def test_a_run_file_is_planned_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the folder alone says that it is quantised, and on two devices, each with all."""
    run = qlora(tmp_path, "run")
    folder = str(tmp_path / "packed")
    load_model(path=str(run.model.path), dtype=torch.float32, nf4=True).save_pretrained(folder)
    there = replace(run, model=replace(run.model, path=folder, quantize=None))
    weights = []
    for name, one in (("plain", run), ("packed", there)):
        path = str(run_file(tmp_path / f"{name}.yaml", one))
        assert command(monkeypatch, "plan", path, "--machine", "h200", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["quantize"] == "nf4"
        weights.append(found["device_bytes"]["parts"]["weights"])
    assert weights[0] == weights[1]
    whole = Parallel(data=2, fsdp=False)
    path = str(run_file(tmp_path / "shared.yaml", replace(run, parallel=whole)))
    assert command(monkeypatch, "plan", path, "--machine", "2xh200", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device_bytes"]["parts"]["weights"] == weights[0]
    path = str(run_file(tmp_path / "cut.yaml", replace(run, parallel=Parallel(data=2))))
    monkeypatch.setattr("sys.argv", ["farspan", "plan", path, "--machine", "2xh200"])
    with pytest.raises(SystemExit):
        cli.main()
    error = capsys.readouterr().err
    assert "parallel.fsdp: quantised weights stay whole on every rank" in error


@pytest.mark.slow
def test_two_ranks_train_what_one_does(tmp_path: Path) -> None:
    """By default each holds all weights; replicas and stages need fsdp: false."""
    alone = qlora(tmp_path, "alone", steps=2, batch=2)
    fit_all([alone])
    layouts: dict[str, Given] = {
        "auto": Auto.AUTO,
        "replicas": Parallel(data=2, fsdp=False),
        "stages": Parallel(pipeline=2, fsdp=False),
    }
    runs = [
        replace(alone, parallel=layout, folder=str(tmp_path / name), batch=1 + (name != "replicas"))
        for name, layout in layouts.items()
    ]
    run_ranks(2, fit_all, runs)
    for run in runs:
        for name, tensor in weights(run).items():
            assert relative_error(tensor, weights(alone)[name]) <= 1e-4, (run.folder, name)
    cut = replace(alone, parallel=Parallel(data=2), folder=str(tmp_path / "cut"))
    with pytest.raises(RankError, match=r"parallel\.fsdp: quantised weights stay whole"):
        run_ranks(2, fit_all, [cut])


def no_lora(run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, lora=None))


def test_quantised_weights_are_for_adapters(tmp_path: Path) -> None:
    run = no_lora(qlora(tmp_path, "run"))
    with pytest.raises(UnsupportedError, match=r"model\.lora: missing, .*or leave model\.quantize"):
        train(run, reporter=Quiet())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"model_type": "llama"}}, "nf4 needs weights to read"),
        ({"path": "some/model", "dtype": DType.FLOAT64}, "nf4 cannot compute in float64"),
    ],
)
def test_what_cannot_be_quantised(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ModelConfig(quantize=Quantization.NF4, lora=LORA, **given)
