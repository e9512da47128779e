"""A run that trains adapters: resumed to the bit, given out as peft reads it, shared by ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from farspan import cli
from farspan.cli.with_torch import model_for
from farspan.hf.load import add_adapters, load_model
from farspan.program.layout import Parallel
from farspan.spec import Kernels, UnsupportedError
from farspan.train.config import (
    CheckpointConfig,
    DType,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    load_run,
)
from farspan.train.context import Components
from farspan.train.trainer import train
from tests.checkpoint.saved import saved_tensors
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.train.test_ranks import WIDE, fit_all
from tests.train.tiny import (
    Quiet,
    Stopped,
    Stopping,
    tiny_components,
    tiny_run,
    weights,
)

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=4)


def a_run(root: Path, name: str, **changes: Any) -> RunConfig:
    base = root / "base"
    if not base.exists():
        load_model(config=WIDE, dtype=torch.float64, seed=5).save_pretrained(base)
    run = tiny_run(
        root,
        folder=str(root / name),
        model=ModelConfig(path=str(base), dtype=DType.FLOAT64, lora=LORA),
        schedule=ScheduleConfig(strategy="grouped", chunk=24, groups=1),
        steps=4,
        optimizer=OptimizerConfig(lr=1e-2, warmup=1),
        evaluation=EvaluationConfig(every=0, sequences=1),
        checkpoints=CheckpointConfig(every=2, keep=9),
    )
    return replace(run, data=replace(run.data, tokenizer="bytes"), **changes)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_loads_what_was_trained(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run")
    result = train(run, reporter=Quiet())
    assert result.message == f"4 steps done; the adapters are in {run.folder}/model"
    ours = load_model(path=str(run.model.path), dtype=torch.float64)
    add_adapters(ours, rank=4, alpha=8.0)
    saved = saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000004", "model/")
    assert saved
    assert all(".lora_" in name for name in saved)  # the frozen weights are not in it
    assert not ours.load_state_dict(saved, strict=False).unexpected_keys
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    ids = torch.arange(20)[None]
    before = base(ids).logits
    theirs = PeftModel.from_pretrained(
        base, str(tmp_path / "run" / "model"), autocast_adapter_dtype=False
    )
    assert torch.equal(theirs(ids).logits, ours(ids).logits)
    assert not torch.equal(theirs(ids).logits, before)


def test_a_run_is_merged_into_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose rope is another one than the base's."""
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    run = a_run(tmp_path, "run")
    run = replace(run, model=replace(run.model, overrides=rope))
    train(run, reporter=(told := Quiet()))
    assert "need model.overrides rope_parameters" in told.notes[-1]
    source = json.loads((tmp_path / "run" / "model" / "farspan.json").read_text())
    assert source["overrides"] == rope
    ours = load_model(path=str(run.model.path), dtype=torch.float64, overrides=rope)
    add_adapters(ours, rank=4, alpha=8.0)
    saved = saved_tensors(tmp_path / "run" / "checkpoints" / "step-00000004", "model/")
    ours.load_state_dict(saved, strict=False)
    out = str(tmp_path / "out")
    monkeypatch.setattr("sys.argv", ["farspan", "merge", run.folder, "-o", out])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (0, None)
    said = capsys.readouterr().out
    assert said == f"adapters of 14 modules merged; the model is in {out}\n"
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    ids = torch.arange(20)[None]
    assert relative_error(model(ids).logits, ours(ids).logits) <= EXACT
    told = json.loads((tmp_path / "out" / "farspan.json").read_text())
    assert told["merged"]
    assert told["checkpoint"] == "step-00000004"


@pytest.mark.exhaustive
def test_what_a_run_drops_depends_on_nothing_but_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed to the same bits, and the same by another schedule."""
    plain, dropping = a_run(tmp_path, "plain", steps=3), replace(LORA, dropout=0.25)

    def named(name: str, **changes: Any) -> RunConfig:
        model = replace(plain.model, lora=dropping)
        changes |= {"neftune_alpha": 5.0, "accumulate": 2, "steps": 3}
        return a_run(tmp_path, name, model=model, **changes)

    whole, run = named("whole"), named("run")
    other = named("other", schedule=ScheduleConfig(strategy="memo", chunk=20, mlp_chunk_size=12))
    fit_all([whole])
    told = staticmethod(tiny_components().expect_memory)  # a forecast takes more than a run
    monkeypatch.setattr(Components, "expect_memory", told)
    fit_all([other, plain])
    with pytest.raises(Stopped):
        train(run, reporter=Stopping(3))
    fit_all([run])
    expected, others, without = (weights(run) for run in (whole, other, plain))
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, expected[name])
        assert relative_error(others[name], tensor) <= EXACT
    assert relative_error(without[name], tensor) > 1e-3
    config = json.loads((Path(run.folder) / "model" / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0.25


def test_a_run_does_not_go_on_beside_other_weights(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run")
    with pytest.raises(Stopped):
        train(run, reporter=Stopping(4))
    model = load_model(path=str(run.model.path), dtype=torch.float64)
    with torch.no_grad():
        next(model.parameters())[3, 5] += 1e-9
    model.save_pretrained(str(run.model.path))
    with pytest.raises(
        UnsupportedError, match=r"trained with frozen weights other than those now in model"
    ):
        train(run, reporter=Quiet())


@pytest.mark.parametrize(
    "names",
    [
        ("fsdp", "ulysses"),
        pytest.param(
            ("fsdp", "data", "ulysses-fsdp", "shards", "ring", "pipeline"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_two_ranks_train_the_adapters_of_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    alone = a_run(tmp_path, "alone", steps=2)  # two batches an update
    layouts = {
        "data": (Parallel(data=2, fsdp=False), 1),
        "fsdp": (Parallel(data=2), 1),
        "ulysses": (Parallel(ulysses=2, fsdp=False), 2),
        "ulysses-fsdp": (Parallel(ulysses=2), 2),
        "shards": (Parallel(shards=2), 2),
        "ring": (Parallel(ring=2, fsdp=False), 2),
        "pipeline": (Parallel(pipeline=2), 2),
    }
    shared = [
        a_run(tmp_path, name, steps=2, parallel=parallel, accumulate=accumulate)
        for name, (parallel, accumulate) in layouts.items()
        if name in names
    ]
    fit_all([alone])
    run_ranks(2, fit_all, shared)
    expected = weights(alone)
    saved = saved_tensors(tmp_path / "fsdp" / "checkpoints" / "step-00000002", "model/")
    assert len(saved) == len(expected)
    assert all(".lora_" in name for name in saved)
    for run in shared:
        found = weights(run)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert relative_error(tensor, expected[name]) <= EXACT, (run.folder, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": Parallel(tensor=2)}, r"parallel\.tensor: not supported with model\.lora"),
        ({"kernels": Kernels(compile=True)}, r"kernels\.compile: not supported with model\.lora"),
    ],
)
def test_what_does_not_go_with_adapters(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        a_run(tmp_path, "run", **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout": 1.0}, "dropout: expected 0 to below 1, got 1.0"),
        ({"rank": 0}, "rank: expected a whole number of at least 1"),
        ({"alpha": 0.0}, "alpha: expected a number above 0"),
        ({"targets": ()}, "targets: expected linear, or names"),
    ],
)
def test_adapters_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LoraConfig(**given)


def test_a_target_that_is_not_there_is_told_before_text_is_read(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run")
    lora = replace(LORA, targets=("query",))
    run = replace(run, model=replace(run.model, lora=lora))
    run = replace(run, data=replace(run.data, path=str(tmp_path / "none")))
    with pytest.raises(
        UnsupportedError, match=r"targets: the layers have no linear module 'query'"
    ):
        train(run, reporter=Quiet())


def test_a_run_says_that_experts_stay_frozen(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    model = ModelConfig(config=WIDE | experts, lora=LORA)
    said = Stopping(1)
    with pytest.raises(Stopped):
        train(a_run(tmp_path, "run", model=model), reporter=said)
    assert "adapters: none on the experts, whose weights are stacked" in said.notes[0]


def test_verify_has_the_adapters_of_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    config = json.dumps(WIDE)  # which is YAML too
    path.write_text(f"model: {{config: {config}, lora: {{rank: 4}}}}\ndata: {{}}\n")
    model = model_for(load_run(path).model, False, "float64", 0)
    trained = [p for name, p in model.named_parameters() if ".lora_" in name]
    assert len(trained) == sum(p.requires_grad for p in model.parameters()) == 28
    assert all(p.any() for p in trained)  # or gradients of A would be zero
