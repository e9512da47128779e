"""A run that begins with what another one trained."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan.program.layout import Auto
from farspan.spec import UnsupportedError
from farspan.train.config import (
    DType,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StartConfig,
)
from farspan.train.trainer import train
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.train.test_lora import a_run
from tests.train.test_ranks import WIDE, fit_all
from tests.train.tiny import MODEL as TINY
from tests.train.tiny import (
    Quiet,
    Stopped,
    Stopping,
    assert_same_weights,
    fit,
    metrics,
    tiny_run,
    weights,
)


def first(root: Path, **changes: Any) -> RunConfig:
    """A run of five steps that is done, with all its checkpoints."""
    run = tiny_run(root, folder=str(root / "first"), **changes)
    run = replace(run, checkpoints=replace(run.checkpoints, keep=9))
    fit(run)
    return run


def second(run: RunConfig, path: str = "", states: bool = False, **changes: Any) -> RunConfig:
    """Another run, which begins with it."""
    folder = Path(run.folder).with_name("second")
    start = StartConfig(path or run.folder, states)
    return replace(run, folder=str(folder), start=start, **changes)


def losses(run: RunConfig) -> list[Any]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def held_out(run: RunConfig) -> list[Any]:
    return [line["heldout_loss"] for line in metrics(run) if "heldout_loss" in line]


def test_a_run_begins_with_anothers_weights_and_its_own_settings(tmp_path: Path) -> None:
    run = first(tmp_path)
    told = Quiet()
    other = second(run, batch=2, accumulate=1, steps=3, optimizer=OptimizerConfig(lr=1e-4))
    result = fit(other, reporter=told)
    assert (result.step, len(losses(other))) == (3, 3)
    assert held_out(other)[0] == held_out(run)[-1]  # before a step of its own
    assert losses(other)[0] != losses(run)[0]
    begun = f"start: begins with the weights of {run.folder}/checkpoints/step-00000005"
    assert begun in told.notes
    longer = second(run, context=64, steps=3)
    fit(replace(longer, folder=str(tmp_path / "longer")))


def test_with_states_and_the_same_settings_it_is_the_run_itself(tmp_path: Path) -> None:
    run = first(tmp_path)
    told = Quiet()
    other = second(run, f"{run.folder}/checkpoints/step-00000002", states=True)
    fit(other, reporter=told)
    assert losses(other) == losses(run)[2:]
    assert_same_weights(other, run)
    assert any("after step 2 of 5" in note for note in told.notes)


def test_with_states_the_settings_may_be_others(tmp_path: Path) -> None:
    run = first(tmp_path)
    optimizer = replace(run.optimizer, lr=1e-4)
    fit(other := second(run, states=True, steps=7, optimizer=optimizer))
    assert [line["step"] for line in metrics(other) if "loss" in line] == [6, 7]
    with pytest.raises(
        UnsupportedError, match=r"step-00000005 has already done 5, more than the 3 of"
    ):
        fit(replace(second(run, states=True, steps=3), folder=str(tmp_path / "fewer")))


def test_it_resumes_without_being_told_again(tmp_path: Path) -> None:
    run = first(tmp_path)
    other = second(run)
    whole = replace(other, folder=str(tmp_path / "whole"))
    fit(whole)
    for after in (1, 3):  # before there is a checkpoint of its own, and then
        with pytest.raises(Stopped):
            fit(other if after == 1 else replace(other, start=None), reporter=Stopping(after))
    fit(replace(other, start=None))
    assert losses(other) == losses(whole)
    assert_same_weights(other, whole)
    shutil.rmtree(run.folder)  # it needs the other no more
    assert fit(replace(other, start=None)).step == 5


def test_a_folder_of_another_origin_is_refused(tmp_path: Path) -> None:
    run = first(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"first holds another run: start.path was None, is now"
    ):
        fit(replace(run, start=StartConfig(str(tmp_path / "elsewhere"))))
    other = second(run)
    fit(other)
    with pytest.raises(UnsupportedError, match=r"second holds another run: start.path was"):
        fit(replace(other, start=StartConfig(f"{run.folder}/checkpoints/step-00000002")))
    with pytest.raises(UnsupportedError, match=r"start.states was False, is now True"):
        fit(replace(other, start=StartConfig(run.folder, states=True)))


def test_another_shape_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    run = first(tmp_path)
    wide = ModelConfig(config={**TINY, "intermediate_size": 40})
    with pytest.raises(UnsupportedError) as refused:
        fit(second(run, states=True, model=wide))
    assert "mlp" in str(refused.value)
    assert "belongs to another model" in str(refused.value)
    assert "[32, 16], but float32[40, 16] in this model" in str(refused.value)
    assert "name another run or checkpoint" in str(refused.value)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run = first(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"start.path: .*/nowhere has no checkpoint: expected the"
    ):
        fit(second(run, str(tmp_path / "nowhere")))
    with pytest.raises(
        UnsupportedError, match=r"start.path: .*model is a whole model: give it as model.pa"
    ):
        fit(second(run, f"{run.folder}/model"))


STILL = OptimizerConfig(lr=1e-30)  # adapters stay as they are


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = first(tmp_path)
    (Path(run.folder) / "checkpoints/step-00000005/rank-00000.safetensors").write_bytes(b"")
    told = Quiet()
    fit(second(run), reporter=told)
    assert any("begins with the weights of" in n and "step-00000004" in n for n in told.notes)


@pytest.mark.slow
def test_adapters_are_trained_further(tmp_path: Path) -> None:
    run = a_run(tmp_path, "first")
    train(run, reporter=Quiet())
    trained = weights(run)
    origins = {
        "run": run.folder,
        "checkpoint": f"{run.folder}/checkpoints/step-00000004",
        "folder": f"{run.folder}/model",
    }
    for name, path in origins.items():
        other = replace(run, folder=str(tmp_path / name), start=StartConfig(path))
        train(replace(other, steps=1, optimizer=STILL), reporter=Quiet())
        found = weights(other)
        assert all(torch.equal(tensor, found[key]) for key, tensor in trained.items()), name
    # As model.path: the base is named in it, and so are rank, alpha and targets.
    model = replace(run.model, path=f"{run.folder}/model", lora=None)
    other = replace(run, folder=str(tmp_path / "path"), model=model, steps=1, optimizer=STILL)
    train(other, reporter=Quiet())
    assert all(torch.equal(tensor, weights(other)[key]) for key, tensor in trained.items())
    config = json.loads((tmp_path / "path" / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert train(other, reporter=Quiet()).step == 1  # the same again resumes


@pytest.mark.slow
def test_adapters_of_another_kind_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, "first", steps=1, optimizer=OptimizerConfig(lr=1e-2))
    train(run, reporter=Quiet())
    saved = tmp_path / "first" / "model"
    other = replace(run, folder=str(tmp_path / "other"), start=StartConfig(run.folder))

    def refused(**changes: Any) -> str:
        with pytest.raises(UnsupportedError) as error:
            train(replace(other, **changes), reporter=Quiet())
        return str(error.value)

    def lora(**changes: Any) -> ModelConfig:
        return replace(run.model, lora=replace(LoraConfig(rank=4), **changes))

    folder = StartConfig(str(saved))
    whole = replace(run.model, lora=None)
    assert "alpha 8, but model.lora has 4 and 4; set model.lora to rank: 4" in refused(
        model=lora(alpha=4.0)
    )
    assert "alpha 8, but model.lora has 4 and 4" in refused(model=lora(alpha=4.0), start=folder)
    few = lora(targets=("q_proj",))
    assert "the adapters differ: only" in refused(model=few, start=folder)
    assert "is in the checkpoint, but not in this model" in refused(model=few)
    assert "holds adapters: give model.lora" in refused(model=whole)
    assert "holds adapters; give model.lora" in refused(model=whole, start=folder)
    plain = a_run(tmp_path, "plain", model=whole, steps=1, optimizer=run.optimizer)
    train(plain, reporter=Quiet())
    assert "to train adapters, give its folder as model.path" in refused(
        start=StartConfig(plain.folder)
    )
    wider = lora(rank=8, alpha=16.0)
    told = refused(model=wider, start=folder)
    differ = "have rank 4 and alpha 8, but model.lora has 8 and 16"
    assert f"{differ}; set model.lora to rank: 4" in told
    assert differ in refused(model=wider)
    states = replace(folder, states=True)
    assert "holds only adapters; leave start.states out (--with-states)" in refused(start=states)
    path = replace(run.model, path=str(saved), lora=None)
    assert "also holds adapters to start from" in refused(model=path)
    config = saved / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"use_dora": True}))
    assert "use_dora: True: a run trains only plain LoRA" in refused(start=folder)
    config.write_text(json.dumps(values | {"lora_dropout": 1.5}))
    assert "dropout: expected 0 to below 1, got 1.5" in refused(model=path, start=None)
    config.write_text(json.dumps(values | {"base_model_name_or_path": None}))
    assert "does not name their base model" in refused(model=path, start=None)


def test_another_base_is_told(tmp_path: Path) -> None:
    run = a_run(tmp_path, "first", steps=1, optimizer=OptimizerConfig(lr=1e-2))
    train(run, reporter=Quiet())
    base = tmp_path / "base" / "model.safetensors"
    save_file({n: 2 * t for n, t in load_file(base).items()}, base, metadata={"format": "pt"})
    told = Quiet()
    other = replace(run, folder=str(tmp_path / "other"), start=StartConfig(run.folder))
    train(other, reporter=told)
    assert any("the frozen weights differ from those" in note for note in told.notes)
    going_on = replace(other, folder=str(tmp_path / "on"), start=StartConfig(run.folder, True))
    with pytest.raises(
        UnsupportedError, match="was trained with frozen weights other than those now in"
    ):
        train(going_on, reporter=Quiet())


@pytest.mark.exhaustive
@pytest.mark.parametrize("states", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_ranks_begin_as_one_process_does(tmp_path: Path, states: bool) -> None:
    config = ModelConfig(config=WIDE, dtype=DType.FLOAT64)
    run = a_run(tmp_path, "first", model=config)
    train(run, reporter=Quiet())
    start = StartConfig(f"{run.folder}/checkpoints/step-00000002", states)
    shared = replace(run, folder=str(tmp_path / "ranks"), start=start, parallel=Auto.AUTO)
    run_ranks(2, fit_all, [shared])
    again = replace(shared, folder=str(tmp_path / "one"), parallel=None)
    train(again, reporter=Quiet())
    assert len(losses(shared)) == (2 if states else 4)
    for found, expected in zip(losses(shared), losses(again), strict=True):
        assert relative_error(torch.tensor(found), torch.tensor(expected)) <= EXACT
    if states:
        assert losses(again) == losses(run)[2:]
