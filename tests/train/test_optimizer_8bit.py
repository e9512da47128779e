"""Moments of one byte: by torchao where it is installed, and by a stand-in for it everywhere."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from farspan.planner.request import Optimizer as Planned
from farspan.planner.request import Question
from farspan.planner.states import states
from farspan.spec import RunSpec, UnsupportedError
from farspan.train import optimizer as optimizer_8bit
from farspan.train.config import DType, ModelConfig, OptimizerConfig, StatesPlace
from farspan.train.optimizer import TrainingOptimizer, decays
from farspan.train.staged_states import Rule
from tests.checkpoint.saved import saved_tensors
from tests.profiles import spec_of
from tests.train.eightbit import BLOCK, LEAST, AdamW8bit
from tests.train.planner import one_memory
from tests.train.test_interrupt import same_weights
from tests.train.test_optimizer import set_gradients
from tests.train.tiny import MODEL, Quiet, fit, load_tiny, signalled, tiny_run

CONFIG = OptimizerConfig(states=StatesPlace.EIGHT_BIT, weight_decay=0.3)
# Its embedding and a part of its matrices have moments of one byte.
WIDE = MODEL | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96}
LRS = [0.1, 0.05, 0.2]
TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(params=["stand-in", pytest.param("torchao", marks=TORCHAO)])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The optimizer's class; torchao's runs without its compiler, which takes seconds a shape."""
    if request.param == "stand-in":
        monkeypatch.setattr(optimizer_8bit, "load", lambda *_: AdamW8bit)
        yield AdamW8bit
        return
    with torch.compiler.set_stance("force_eager"):
        yield optimizer_8bit.load_adamw()


def absent(*_: str) -> Any:
    raise ImportError("No module named 'torchao'")


def update(model: nn.Module, lrs: list[float]) -> TrainingOptimizer:
    optimizer = TrainingOptimizer(model, CONFIG)
    for step, lr in enumerate(lrs):
        set_gradients(model, step)
        optimizer.step(lr, optimizer.gradient_norm())
    return optimizer


def wide(dtype: torch.dtype, seed: int = 1) -> nn.Module:
    return load_tiny(config=WIDE, dtype=dtype, seed=seed)


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded: there is nothing in the model's folder."""
    monkeypatch.setattr(optimizer_8bit, "load", absent)
    run = tiny_run(tmp_path, optimizer=CONFIG)
    with pytest.raises(
        UnsupportedError, match=r"^optimizer\.states: 8bit needs torchao.*'farspan\[8bit\]'"
    ):
        fit(replace(run, model=ModelConfig(path=str(tmp_path))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_is_the_library_s(library: Any, dtype: torch.dtype) -> None:
    """Clipped by the norm, decayed in groups, with the rate of the step."""
    model, other = wide(dtype), wide(dtype)
    torch.manual_seed(5)
    update(model, LRS)
    torch.manual_seed(5)
    groups = Rule(CONFIG, decays(other)).groups(dict(other.named_parameters()))
    direct = library(groups, 1.0, CONFIG.betas, CONFIG.eps, bf16_stochastic_round=True)
    for parameter in other.parameters():
        direct.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": direct._new_buffer(parameter, True),
            "exp_avg_sq": direct._new_buffer(parameter, False),
        }
    for step, lr in enumerate(LRS):
        set_gradients(other, step)
        gradients = [p.grad.float() for p in other.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for parameter in other.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype is dtype
            parameter.grad.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        for group in direct.param_groups:
            group["lr"].fill_(lr)
        direct.step()
    begun = wide(dtype)
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert not torch.equal(ours, begun.get_parameter(name)), name
        assert ours.grad is None


@pytest.mark.usefixtures("library")
def test_small_updates_count_without_masters() -> None:
    """Far below the spacing of bfloat16: rounded to nearest, no weight would ever move."""
    model = wide(torch.bfloat16)
    begun = [parameter.detach().clone() for parameter in model.parameters()]
    update(model, [1e-6] * 4)
    pairs = zip(model.parameters(), begun, strict=True)
    moved = sum(int((ours != theirs).sum()) for ours, theirs in pairs)
    assert 0 < moved < sum(p.numel() for p in model.parameters()) / 4


@pytest.mark.usefixtures("library")
def test_every_state_is_held_by_name() -> None:
    model = wide(torch.bfloat16)
    tensors = update(model, LRS).tensors()
    embedding = "model.embed_tokens.weight"
    parts = {n.removesuffix("/" + embedding) for n in tensors if n.endswith("/" + embedding)}
    assert parts == {"step"} | {
        f"{moment}.{part}"
        for moment in ("exp_avg", "exp_avg_sq")
        for part in ("codes", "scale", "qmap")
    }
    assert tensors[f"exp_avg.codes/{embedding}"].dtype is torch.uint8
    assert tensors[f"exp_avg.codes/{embedding}"].any()
    assert tensors["exp_avg/model.norm.weight"].dtype is torch.bfloat16
    assert float(tensors["step/model.norm.weight"]) == len(LRS)
    assert all(type(tensor) is Tensor for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        model=ModelConfig(config=WIDE, dtype=DType.BFLOAT16),
        optimizer=replace(CONFIG, lr=1e-2, warmup=2),
    )
    reference = replace(run, folder=str(tmp_path / "reference"))
    fit(reference)
    fit(run, signalled(7))
    torch.manual_seed(77)
    quiet = Quiet()
    fit(run, reporter=quiet)
    assert "resuming after step 3 of 5" in quiet.notes
    assert any("optimizer states: on the device, 8-bit moments: results" in n for n in quiet.notes)
    same_weights(tmp_path / "reference", tmp_path / "run")
    saved = saved_tensors(tmp_path / "run/checkpoints/step-00000005", "optimizer/")
    assert sum(name.startswith("exp_avg.codes/") for name in saved) > 0
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["states"] == "8bit"


@pytest.mark.usefixtures("library")
def test_neither_goes_on_as_the_other(tmp_path: Path) -> None:
    first, second = StatesPlace.EIGHT_BIT, StatesPlace.AUTO
    run = tiny_run(tmp_path)
    fit(replace(run, optimizer=replace(run.optimizer, states=first)))
    message = rf"holds another run: optimizer\.states was '{first}', is now '{second}'; set these"
    with pytest.raises(UnsupportedError, match=message):
        fit(replace(run, optimizer=replace(run.optimizer, states=second)))


def rule_bytes(shapes: dict[str, tuple[int, ...]], element: int) -> int:
    """Of two moments of each, by what torchao says of itself."""
    total = 0
    for shape in shapes.values():
        count = torch.Size(shape).numel()
        narrow = count >= LEAST and count % BLOCK == 0
        total += 2 * ((count + 4 * count // BLOCK + 4 * 256) if narrow else count * element)
    return total


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_bytes_follow_the_rule(dtype: torch.dtype) -> None:
    model = wide(dtype)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    held = TrainingOptimizer(model, CONFIG).held()
    assert held.device == rule_bytes(shapes, dtype.itemsize) + 4 * len(shapes)
    assert (held.host, held.untouched) == (0, held.device)


def test_planned_bytes_are_within_two_percent() -> None:
    """On a model of real size: smaller ones have more of their moments in full width."""
    spec = spec_of("Qwen2.5-0.5B")
    asked = Question(spec, RunSpec(1, 1024), one_memory(), optimizer=Planned.ADAMW8BIT)
    planned = states(asked, ((0, len(spec.layers)),)).optimizer
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        vocab_size=151936,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == spec.trainable
    taken = rule_bytes(shapes, 2) + 4 * len(shapes)
    assert abs(planned / taken - 1) < 0.02
