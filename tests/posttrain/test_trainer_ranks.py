"""A Trainer on several ranks has the losses of one process, whatever they share, and goes on from
what it saved, in another layout too."""

import copy
import os
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import farspan
from farspan.posttrain.ranks import context_of
from farspan.program.layout import Layout
from farspan.spec import Schedule, UnsupportedError
from tests.grids import part_of
from tests.numerics import assert_exact
from tests.posttrain.arguments import quiet
from tests.ranks import RankError, run_ranks

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow
SCHEDULE = Schedule(chunk=8, groups=2)  # a layer each
Logs = dict[str, Tensor]


def trained(folder: str, layout: Layout | None, changes: dict[str, Any]) -> tuple[Logs, Any]:
    """Logs and the whole weights of a run of `farspan.Trainer`, or of what `kind` names."""
    from transformers import TrainingArguments

    from tests.posttrain.test_hugging_face import padded, rows
    from tests.posttrain.test_trl import logs
    from tests.train.tiny import MODEL, load_tiny

    start(folder)
    changes = dict(changes)
    resume = changes.pop("resume", None)
    values: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "remove_unused_columns": False,
    }
    trainer: Any = farspan.Trainer(
        model=load_tiny(config=MODEL | {"num_key_value_heads": 2}, dtype=torch.float64, seed=0),
        args=TrainingArguments(**quiet(folder, **values | changes)),
        data_collator=padded,
        train_dataset=rows(),
        eval_dataset=rows((7, 19, 12)),
        schedule=SCHEDULE,
        layout=layout,
    )
    trainer.train(resume_from_checkpoint=resume)
    return logs(trainer), trainer.args.process_index


def of_trl(folder: str, layout: Layout | None, name: str, steps: int) -> Logs:
    """Logs of a run of TRL's trainer of this name, of so many batches an update."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from tests.data.characters import character_tokenizer
    from tests.posttrain.test_trl import TEMPLATE, WORDS, logs
    from tests.train.tiny import MODEL, load_tiny

    start(folder)
    kind, config = {"dpo": (DPOTrainer, DPOConfig), "sft": (SFTTrainer, SFTConfig)}[name[:3]]
    rows: list[dict[str, str]] = [{"text": words} for words in WORDS]
    model: Any = load_tiny(config=MODEL | {"num_key_value_heads": 2}, dtype=torch.float64, seed=0)
    given: dict[str, Any] = {}
    if kind is DPOTrainer:
        rows = [{"prompt": w[:3], "chosen": w[2:], "rejected": w[::-1]} for w in WORDS]
        given["ref_model"] = copy.deepcopy(model)
    if name == "dpo, adapters":  # which are off, and frozen by peft, in its reference
        given = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    values: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": steps,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "bf16": False,
        "adam_epsilon": 1e-5,
    }
    trainer: Any = type("Long", (farspan.LongContext, kind), {})(
        model=model,
        args=config(**quiet(folder, **values)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=character_tokenizer(TEMPLATE),
        schedule=SCHEDULE,
        layout=layout,
        **given,
    )
    trainer.train()
    return logs(trainer)


def start(folder: str) -> None:
    os.environ["CI"] = "1"  # TRL's word for: report nothing to anybody
    if "WORLD_SIZE" in os.environ:  # accelerate looks for these, though there is a process group
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    Path(folder).mkdir(parents=True, exist_ok=True)


def assert_same(found: Logs, expected: Logs, limit: float = 1e-6) -> None:
    """The Trainer keeps its losses in float32."""
    assert found.keys() == expected.keys()
    one = torch.ones(1, dtype=torch.float64)  # a ratio of a first update is 0, or nearly
    for name, values in expected.items():
        assert_exact(
            torch.cat((found[name].flatten(), one)), torch.cat((values.flatten(), one)), limit
        )


LAYOUTS = {
    "ulysses": Layout(ulysses=2, fsdp=False),
    "shards": Layout(shards=2, fsdp=False),
    "ring": Layout(ring=2, fsdp=False),
    "pipeline": Layout(pipeline=2, fsdp=False),
    "data": Layout(data=2, fsdp=False),
    "ulysses, fsdp": Layout(ulysses=2),
    "data, fsdp": Layout(data=2),
    "ulysses, data": Layout(ulysses=2, data=2, fsdp=False),
    "pipeline, data": Layout(pipeline=2, data=2, fsdp=False),
    "ulysses, data, fsdp": Layout(ulysses=2, data=2),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logs]:
    """Where one process trained, and its logs."""
    folder = tmp_path_factory.mktemp("one")
    return folder, trained(str(folder), None, {"gradient_accumulation_steps": 2})[0]


@pytest.mark.parametrize("name", part_of(list(LAYOUTS), "ulysses, fsdp"))
def test_ranks_are_one_process(tmp_path: Path, one: tuple[Path, Logs], name: str) -> None:
    """Losses, held-out losses and norms; and what was saved is whole."""
    layout, (folder, expected) = LAYOUTS[name], one
    shared = {"gradient_accumulation_steps": 2 // layout.data}
    for logs, _ in run_ranks(layout.devices(), trained, str(tmp_path), layout, shared):
        assert_same(logs, expected)
    for step in 2, 4:
        assert_same(saved(tmp_path, step), saved(folder, step), limit=1e-9)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning", "ignore:.*label_smoothing:FutureWarning"
)
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(
    ("kind", "name"),
    part_of(
        product(
            ("dpo", "dpo, adapters", "sft"),
            ("data", "ulysses, fsdp", "pipeline", "ulysses, data, fsdp"),
        ),
        ("dpo, adapters", "data"),
    ),
)
def test_trl_s_losses_over_ranks(tmp_path: Path, kind: str, name: str) -> None:
    layout = LAYOUTS[name]
    one = of_trl(str(tmp_path / "one"), None, kind, 2)
    for found in run_ranks(
        layout.devices(), of_trl, str(tmp_path / "ranks"), layout, kind, 2 // layout.data
    ):
        assert found.keys() == one.keys()
        # Others are means over a batch's tokens, by TRL over those of all its processes.
        named = [name for name in one if layout.data == 1 or "loss" in name or "norm" in name]
        assert_same({n: found[n] for n in named}, {n: one[n] for n in named}, limit=1e-5)


def saved(folder: Path, step: int) -> Logs:
    from safetensors.torch import load_file

    found = load_file(folder / f"checkpoint-{step}" / "model.safetensors")
    states = torch.load(folder / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)
    for number, state in states["state"].items():
        found |= {f"{number} {key}": value for key, value in state.items()}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", part_of(list(LAYOUTS), "ulysses, fsdp"))
def test_a_run_goes_on_in_another_layout(tmp_path: Path, one: tuple[Path, Logs], name: str) -> None:
    """From a checkpoint of one process; those of ranks are the same."""
    layout, (folder, expected) = LAYOUTS[name], one
    changes = {
        "gradient_accumulation_steps": 2 // layout.data,
        "resume": str(folder / "checkpoint-2"),
    }
    further, _ = run_ranks(layout.devices(), trained, str(tmp_path), layout, changes)[0]
    assert_same(without_mean(further), without_mean(expected))


def without_mean(logs: Logs) -> Logs:
    """But for the Trainer's mean of a whole run, which begins where that was resumed."""
    return {name: values for name, values in logs.items() if name != "train_loss"}


def test_a_layout_must_fit_the_processes(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"layout: expected a farspan.Layout, got 'ring'"):
        trained(str(tmp_path), "ring", {})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"layout: 2 devices, but 1 process\(es\)"):
        trained(str(tmp_path), Layout(ulysses=2), {})
    with pytest.raises(RankError, match=r"layout: 2 processes were started; choose how"):
        run_ranks(2, trained, str(tmp_path), None, {})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=2), "layout: tensor cuts weights into slices"),
        (Layout(tensor=2, fsdp=False), "layout: tensor cuts weights into slices"),
        (Layout(pipeline=2), "layout: with pipeline a Trainer's weights stay whole"),
    ],
)
def test_what_would_not_be_saved_whole_is_refused(layout: Layout, message: str) -> None:
    accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=message):
        context_of(accelerator, layout, farspan.Trainer)
