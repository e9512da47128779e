"""Runs with losses of a mixture of experts' routers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.data.config import LossConfig
from farspan.hf.load import load_model
from farspan.spec import UnsupportedError
from farspan.train.config import DType, ModelConfig, RunConfig
from farspan.train.plan_run import question_of_run
from farspan.train.trainer import train
from tests.grids import exhaustive
from tests.train.test_losses import a_run
from tests.train.test_ranks import WIDE
from tests.train.tiny import Quiet, metrics, tiny_run

EXPERTS = WIDE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "tie_word_embeddings": False}


def with_experts(root: Path, run: RunConfig, **loss: Any) -> RunConfig:
    if not (base := root / "experts").exists():
        load_model(config=EXPERTS, dtype=torch.float32, seed=5).save_pretrained(base)
    model = ModelConfig(path=str(base), dtype=DType.FLOAT32)
    name = "-".join(f"{key}{value}" for key, value in loss.items())
    return replace(run, model=model, folder=str(root / f"run-{name}"), loss=LossConfig(**loss))


def lines_of(run: RunConfig) -> list[dict[str, Any]]:
    train(run, reporter=Quiet())
    return [line for line in metrics(run) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", exhaustive("dpo")])
def test_a_run_adds_its_routers_losses(tmp_path: Path, kind: str) -> None:
    """The mean over micro-batches, without padding; held-out losses are as without it."""
    run = replace((a_run if kind == "dpo" else tiny_run)(tmp_path), accumulate=2, steps=3)
    run = replace(run, data=replace(run.data, tokenizer="bytes"))
    plain, balanced, both = (
        lines_of(with_experts(tmp_path, run, kind=kind, **loss))
        for loss in ({}, {"router": 0.25}, {"router": 0.25, "router_z": 0.5})
    )
    assert "aux_loss" not in plain[0]
    added = balanced[0]["loss"] - plain[0]["loss"]
    assert added == pytest.approx(0.25 * balanced[0]["aux_loss"], rel=1e-4)
    assert 1.9 <= balanced[0]["aux_loss"] < 4
    assert both[0]["loss"] - balanced[0]["loss"] > 0.1
    assert balanced[1]["loss"] != pytest.approx(plain[1]["loss"] + added, rel=1e-6)


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    run = replace(a_run(tmp_path), loss=LossConfig("dpo", router=0.1))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"loss\.router: LlamaForCausalLM has no load-bal"):
        train(run, reporter=Quiet())


@pytest.mark.slow
def test_a_plan_of_the_run_knows(tmp_path: Path) -> None:
    run = with_experts(tmp_path, a_run(tmp_path), kind="dpo", router=0.1)
    assert question_of_run(run, {}, lambda _: None).question.model.routers


@pytest.mark.slow
def test_a_model_s_own_wish_is_no_key_of_a_run(tmp_path: Path) -> None:
    """A run adds what its file says: not what an exported configuration or an override does."""
    run = with_experts(tmp_path, replace(tiny_run(tmp_path), steps=3), kind="sft")
    run = replace(run, data=replace(run.data, tokenizer="bytes"))
    first = lines_of(run)[0]["loss"]
    base = load_model(path=str(tmp_path / "experts"), dtype=torch.float32)
    base.config.output_router_logits = True
    base.save_pretrained(tmp_path / "asking")
    other = replace(run.model, path=str(tmp_path / "asking"))
    again = replace(run, model=other, folder=str(tmp_path / "again"))
    assert lines_of(again)[0]["loss"] == first
    asked = replace(run.model, overrides={"output_router_logits": True})
    with pytest.raises(UnsupportedError, match=r"output_router_logits: .* loss\.router"):
        train(replace(run, model=asked, folder=str(tmp_path / "third")), reporter=Quiet())


def test_the_exported_configuration_is_the_base_model_s(tmp_path: Path) -> None:
    run = with_experts(tmp_path, replace(tiny_run(tmp_path), steps=3), kind="sft", router=0.2)
    train(replace(run, data=replace(run.data, tokenizer="bytes")), reporter=Quiet())
    written = json.loads((Path(run.folder) / "model/config.json").read_text("utf-8"))
    base = json.loads((tmp_path / "experts/config.json").read_text("utf-8"))
    for name in ("output_router_logits", "router_aux_loss_coef"):
        assert written.get(name) == base.get(name), name
