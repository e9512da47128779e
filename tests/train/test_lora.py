"""Adapters alone are trained, saved, gone on with and given out, exactly."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from farspan import Step
from farspan.models.lora import add_adapters
from farspan.plan.strategies import STRATEGIES, strategy
from farspan.spec import Refused
from farspan.train.config import DType, LoraConfig, ModelConfig, RunConfig, ScheduleConfig
from farspan.train.layout import Parallel
from farspan.train.loop import train
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.numerics import relative_error
from tests.ranks import run_ranks
from tests.train.test_ranks import WIDE, a_run, fit_all, metrics, same_run
from tests.train.tiny import Quiet, Stopped, Stopping
from tests.zoo import make_model

peft = pytest.importorskip("peft")

LORA = LoraConfig(rank=2)


def lora_run(root: Path, name: str, **changes: Any) -> RunConfig:
    model = ModelConfig(config=WIDE, dtype=DType.FLOAT64, lora=LORA)
    return a_run(root, name, **{"model": model} | changes)


@pytest.fixture(scope="module")
def adapted() -> Any:
    """B is not zero, or A would have no gradient."""
    model: Any = make_model("qwen2")
    add_adapters(model, rank=2, alpha=4.0, targets=None, seed=0, zeros=False)
    return model


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_of_adapters_are_those_of_plain_autograd(name: str, adapted: Any) -> None:
    step = Step(adapted, strategy(name, 4, 53), poison=True)
    for seed in (0, 1):
        data = draw(53, batch=2, documents=4 * seed, seed=seed)
        expected = run_oracle(adapted, data)
        assert any("lora_A" in name for name in expected.gradients)
        assert all("lora_" in name for name in expected.gradients)
        assert_close(run_step(adapted, step, data), expected)


def test_only_adapters_are_saved_and_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, parted = (lora_run(tmp_path, name) for name in ("whole", "parted"))
    fit_all([whole])
    with pytest.raises(Stopped):
        train(parted, reporter=Stopping(3))
    fit_all([parted])
    same_run_bits(whole, parted)
    saved = load_file(tmp_path / "whole/checkpoints/step-00000004/model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)
    about = json.loads((tmp_path / "whole" / "about.json").read_text())
    assert about["trainable"] == sum(t.numel() for t in saved.values()) < about["parameters"]


def same_run_bits(run: RunConfig, other: RunConfig) -> None:
    ours, theirs = (
        load_file(Path(r.folder) / "model/adapter_model.safetensors") for r in (run, other)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_what_is_given_out_is_what_peft_reads(tmp_path: Path) -> None:
    base = tmp_path / "base"
    fields = {key: value for key, value in WIDE.items() if key != "model_type"}
    config = AutoConfig.for_model(str(WIDE["model_type"]), **fields)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    made.save_pretrained(base)
    model = ModelConfig(path=str(base), dtype=DType.FLOAT64, lora=LORA)
    run = lora_run(tmp_path, "run", model=model)
    run = replace(run, data=replace(run.data, tokenizer="bytes"))
    result = train(run, reporter=Quiet())
    assert result.message == f"4 steps done; the adapters are in {run.folder}/model"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
        Path(run.folder) / "model", dtype=torch.float64
    )
    assert loaded.peft_config["default"].base_model_name_or_path == str(base)
    ids = torch.arange(40)[None]
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        found, untrained = loaded(ids).logits, plain(ids).logits
    assert relative_error(found, untrained) > 1e-4
    add_adapters(plain, rank=2, alpha=4.0, targets=None, seed=0)
    trained = load_file(Path(run.folder) / "checkpoints/step-00000004/model.safetensors")
    plain.load_state_dict(trained, strict=False)
    with torch.no_grad():
        assert torch.equal(found, plain(ids).logits)


@pytest.mark.parametrize(
    "layout",
    [Parallel(data=2), Parallel(ulysses=2), Parallel(ulysses=2, fsdp=False), Parallel(pipeline=2)],
    ids=["data", "ulysses, fsdp", "ulysses", "pipeline"],
)
def test_ranks_train_the_same_adapters(tmp_path: Path, layout: Parallel) -> None:
    replicas = layout.data or 1
    alone = lora_run(tmp_path, "alone", batch=1, accumulate=2)
    fit_all([alone])
    run = lora_run(tmp_path, "ranks", batch=1, accumulate=2 // replicas, parallel=layout)
    run_ranks(2, fit_all, [run])
    same_run(run, alone)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, "rank: expected a whole number of at least 1, got 0"),
        ({"alpha": 0.0}, "alpha: expected a number above 0, got 0.0"),
        ({"targets": ()}, "targets: names no module"),
    ],
)
def test_adapters_that_cannot_be_are_refused(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        LoraConfig(**lora)


def test_a_target_that_is_not_there_is_refused_before_text_is_read(tmp_path: Path) -> None:
    model = ModelConfig(config=WIDE, lora=LoraConfig(targets=("query",)))
    run = lora_run(tmp_path, "run", model=model)
    run = replace(run, data=replace(run.data, path=str(tmp_path / "none")))
    with pytest.raises(
        Refused, match=r"model\.lora\.targets: .*query.*there are down_proj, .*q_proj"
    ):
        train(run, reporter=Quiet())


def test_without_its_library_adapters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Refused, match=r'model\.lora: needs the package peft.*pip install "farspan'):
        train(lora_run(tmp_path, "run"), reporter=Quiet())


def test_the_planner_plans_for_adapters(tmp_path: Path) -> None:
    """Memory of a step is what was predicted, to the byte that a run tells of."""
    run = lora_run(tmp_path, "run", schedule=ScheduleConfig(strategy="auto"))
    quiet = Quiet()
    train(run, reporter=quiet)
    (first, *_) = (line for line in metrics(run) if "loss" in line)
    assert first["memory_predicted_bytes"] == pytest.approx(first["memory_measured_bytes"], rel=0.1)
