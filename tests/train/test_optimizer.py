"""The optimizer beside torch's own, and the learning rate beside its formula."""

import copy
import math

import pytest
import torch
from torch import nn

from farspan.train.config import Decay, OptimizerConfig
from farspan.train.optimizer import TrainingOptimizer, decays, learning_rate
from tests.grids import crossed
from tests.train.tiny import MODEL, load_tiny


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        dtype = parameter.grad_dtype or parameter.dtype
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)


def reference_update(model: nn.Module, config: OptimizerConfig, lrs: list[float]) -> None:
    """The textbook: clip by the global norm, decay the decayed, AdamW, in the model's dtype."""
    decay = decays(model)
    named = dict(model.named_parameters())
    adam = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": config.weight_decay if decay[n] else 0.0}
            for n, p in named.items()
        ],
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    for step, lr in enumerate(lrs):
        set_gradients(model, step)
        if config.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), config.clip)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()


def update(model: nn.Module, config: OptimizerConfig, lrs: list[float]) -> TrainingOptimizer:
    optimizer = TrainingOptimizer(model, config)
    for step, lr in enumerate(lrs):
        set_gradients(model, step)
        optimizer.step(lr, optimizer.gradient_norm())
    return optimizer


@pytest.mark.parametrize(
    ("clip", "dtype"), crossed([None, 0.5, 1e9], [torch.float32, torch.float64])
)
def test_updates_are_those_of_torch(dtype: torch.dtype, clip: float | None) -> None:
    config = OptimizerConfig(clip=clip, weight_decay=0.3)
    model = load_tiny(config=MODEL, dtype=dtype, seed=1)
    expected = copy.deepcopy(model)
    update(model, config, [0.1, 0.05])
    reference_update(expected, config, [0.1, 0.05])
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.grad is None


def test_low_precision_weights_follow_fp32_masters() -> None:
    config = OptimizerConfig(weight_decay=0.3)
    model = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=1)
    expected = load_tiny(config=MODEL, dtype=torch.float32, seed=2)
    expected.load_state_dict({name: p.float() for name, p in model.state_dict().items()})
    # Each update is far below the spacing of bfloat16, so only masters add them up.
    lrs = [1e-5] * 30
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = update(model, config, lrs)
    reference_update(expected, config, lrs)
    moved = 0
    for name, theirs in expected.named_parameters():
        ours = model.get_parameter(name)
        assert torch.equal(optimizer.tensors()[f"master/{name}"], theirs), name
        assert torch.equal(ours, theirs.to(torch.bfloat16)), name
        moved += int((ours != before[name]).sum())
    assert moved > 0


def test_low_precision_gradients_add_up_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    TrainingOptimizer(model, OptimizerConfig())
    for value in (1.0, *[2.0**-9] * 4):
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.item() == 1.0 + 4 * 2.0**-9


def test_matrices_decay_and_nothing_else_does() -> None:
    tied = decays(load_tiny(config=MODEL, dtype=torch.float32, seed=0))
    assert {n.split("layers.0.")[1] for n, d in tied.items() if d and "layers.0" in n} == {
        f"{part}.weight"
        for part in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    }
    assert not tied["model.embed_tokens.weight"]
    untied = decays(
        load_tiny(config=MODEL | {"tie_word_embeddings": False}, dtype=torch.float32, seed=0)
    )
    assert untied["lm_head.weight"]
    assert not untied["model.embed_tokens.weight"]


def test_a_matrix_of_biases_does_not_decay() -> None:
    model = nn.Module()
    model.up_bias = nn.Parameter(torch.zeros(3, 4))
    model.up = nn.Parameter(torch.zeros(3, 4, 4))
    assert decays(model) == {"up_bias": False, "up": True}


@pytest.mark.parametrize("decay", list(Decay))
def test_the_rate_rises_in_a_line_and_then_decays(decay: Decay) -> None:
    config = OptimizerConfig(lr=0.2, warmup=4, final=0.25, decay=decay)
    rates = [learning_rate(config, 12)(step) for step in range(12)]
    assert rates[:4] == [0.05, 0.1, pytest.approx(0.15), 0.2]
    for step in range(4, 12):
        done = (step - 3) / 8
        share = {  # of the way from the final rate up to the highest
            Decay.COSINE: 0.5 * (1 + math.cos(math.pi * done)),
            Decay.LINEAR: 1 - done,
            Decay.CONSTANT: 1,
            Decay.WSD: 1 if step < 11 else 0,  # a tenth of 12 steps, rounded
        }[decay]
        assert rates[step] == pytest.approx(0.2 * (0.25 + 0.75 * share))


def test_the_rate_is_stable_and_falls_over_the_last_steps() -> None:
    config = OptimizerConfig(lr=0.2, warmup=2, final=0.25, decay=Decay.WSD, decay_steps=3)
    rates = [learning_rate(config, 8)(step) for step in range(8)]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2, 0.15, 0.1, 0.05])
    whole = OptimizerConfig(lr=0.2, warmup=2, final=0.25, decay=Decay.WSD, decay_steps=6)
    linear = OptimizerConfig(lr=0.2, warmup=2, final=0.25, decay=Decay.LINEAR)
    for step in range(8):
        assert learning_rate(whole, 8)(step) == learning_rate(linear, 8)(step)
