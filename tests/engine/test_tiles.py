"""Layers whose token-wise modules run on tiles: the same gradients, in less memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farspan.hf.tiled_mlp as mechanism
from farspan.engine.step import Step
from farspan.hf.stages import CausalLMStages
from farspan.hf.tiled_mlp import tokenwise
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import (
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    gradients,
    run_oracle,
    run_step,
)
from tests.grids import crossed, part_of
from tests.oracles.simulate import feed_forward_passes
from tests.profiles import spec_of
from tests.zoo import FAMILIES, LAYERS, make_model, shared_model

TILED = Schedule(chunk=16, groups=2, mlp_chunk_size=5)
APART = "opt"  # its feed-forward is no module of its own


FAMILIES_OF_TILES = [name for name in FAMILIES if name != APART]


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(FAMILIES_OF_TILES, *FAMILIES_OF_TILES[::8]))
@pytest.mark.usefixtures("float64_throughout")
def test_every_family_is_exact(name: str) -> None:
    """Twice: the second step finds the first one's memory, poisoned."""
    model = shared_model(name)
    step = Step(model, TILED, poison=True)
    for tokens, seed in ((37, 0), (29, 1)):
        data = draw(tokens, batch=2, documents=3 * seed, seed=seed)
        assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.parametrize(
    ("name", "tile"),
    part_of(
        [(name, tile) for name in STRATEGIES for tile in (1, 7, 16)],
        *[(name, (1, 7, 16)[n % 3]) for n, name in enumerate(STRATEGIES) if n % 2],
    ),
)
def test_every_strategy_is_exact(name: str, tile: int) -> None:
    model, data = shared_model("qwen2"), draw(53, batch=2, documents=3)
    schedule = replace(strategy(name, LAYERS, 53), mlp_chunk_size=tile)
    step = Step(model, schedule, poison=True)
    expected = run_oracle(model, data)
    assert_close(run_step(model, step, data), expected)
    assert float((step.evaluate(*data) - expected.loss).abs()) <= 1e-12 * float(expected.loss)


SAME = {
    "grouped": replace(TILED, groups=2),
    "one group": replace(TILED, groups=4),
    "K, V on the host": replace(TILED, groups=4, kv=Tier.HOST),
    "attention kept": replace(TILED, groups=1, attention_save_fraction=1.0),
    "checkpoints of layers": replace(TILED, groups=4, layer_checkpoint=True),
}


@pytest.mark.parametrize("name", part_of(SAME, "K, V on the host", "checkpoints of layers"))
def test_place_and_order_do_not_change_a_bit(name: str) -> None:
    """With an embedding of its own: a tied one's gradient is added to in another order."""
    model, data = make_model("gemma2", tie_word_embeddings=False), draw(53, batch=2)
    assert_same_bits(run_step(model, SAME[name], data), run_step(model, TILED, data))


PASSES = {
    "grouped": Schedule(chunk=16, groups=1),
    "open": Schedule(chunk=16, groups=2),
    "checkpoints": Schedule(chunk=16, groups=4, layer_checkpoint=True),
    "kept": Schedule(chunk=16, groups=2, activation_save_fraction=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile"), crossed(PASSES, [5, None]))
def test_feed_forwards_run_as_often_as_planned(name: str, tile: int | None) -> None:
    model = make_model("qwen2")
    step = Step(model, replace(PASSES[name], mlp_chunk_size=tile))
    rows: list[int] = []
    for layer in CausalLMStages(model).layers:
        mlp = layer.get_submodule("mlp")
        mlp.register_forward_hook(lambda *call: rows.append(call[1][0].shape[1]))
    run_step(model, step, draw(53))  # it looks at the hooks and prepares anew, which calls them
    rows.clear()
    run_step(model, step, draw(53))
    assert sum(rows) == feed_forward_passes(step.program(1, 53)) * LAYERS * 53


class Broken(Exception):
    pass


@pytest.mark.parametrize("after", part_of([1, 12, 30], 12))
def test_the_model_is_itself_whatever_happens(after: int) -> None:
    """A step that ends early leaves modules as they were, and the next is exact."""
    model, data = make_model("qwen2"), draw(53)
    before = {name: (module, dict(vars(module))) for name, module in model.named_modules()}
    cells = 0

    def stop(_: Any) -> None:
        nonlocal cells
        cells += 1
        if cells == after:
            raise Broken

    step = Step(model, TILED, progress=stop)
    with pytest.raises(Broken):
        step(*data)
    for name, module in model.named_modules():
        assert before[name] == (module, vars(module))
    assert_close(run_step(model, step, data), run_oracle(model, data))


def test_tiles_add_up_in_fp32() -> None:
    """In bf16 the weight gradients of 64 tiles lose no more than those of one tile lose, once."""
    model = make_model("qwen2", torch.float64)
    exact = run_oracle(model, draw(128)).gradients
    narrow = make_model("qwen2", torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    for parameter in narrow.parameters():
        parameter.grad_dtype = torch.float32
    errors = {}
    for tile in (None, 2):
        found = run_step(narrow, Schedule(chunk=128, mlp_chunk_size=tile), draw(128)).gradients
        errors[tile] = max(
            float((found[name].double() - exact[name]).norm() / exact[name].norm())
            for name in exact
            if "mlp" in name
        )
    assert errors[2] <= 1.2 * errors[None]


# -- what is refused ---------------------------------------------------------------------------


class Counting(nn.Module):
    """An MLP with a state."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mlp(x)


class Twice(nn.Module):
    """Another output at every other call."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.calls = mlp, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mlp(x) * (1 + self.calls % 2)


class Mixing(nn.Module):
    """Each token's output knows the one before it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + 0.1 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Counting, "a state that changes"), (Twice, "a state that changes"), (Mixing, "mixes tokens")],
)
def test_what_is_not_token_by_token_is_refused(kind: type[nn.Module], why: str) -> None:
    model = make_model("qwen2")
    layer = CausalLMStages(model).layers[2]
    layer.mlp = kind(layer.mlp)
    with pytest.raises(
        UnsupportedError, match=rf"mlp_chunk_size: layer 2\.mlp of Qwen2ForCausalLM .*{why}"
    ):
        tokenwise(CausalLMStages(model))


def test_a_feed_forward_in_pieces_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"mlp_chunk_size: layer 0.*leave mlp_chunk_size out"
    ):
        Step(shared_model(APART), TILED)


def test_a_layer_that_does_not_call_its_children_is_refused() -> None:
    """Its own forward was replaced by one that knows the layer, not its shell."""
    model = make_model("qwen2")
    layer = CausalLMStages(model).layers[1]
    vars(layer)["forward"] = layer.forward
    with pytest.raises(UnsupportedError, match=r"mlp_chunk_size: layer 1 of Qwen2.* no module"):
        tokenwise(CausalLMStages(model))


@pytest.mark.parametrize("name", ["qwen2", "gpt_neox", "gemma2"])
def test_plans_know_whose_value_is_needed(name: str) -> None:
    model = shared_model(name)
    layers = spec_of(model.config.to_dict()).layers
    for layer, children in zip(layers, tokenwise(CausalLMStages(model)), strict=True):
        (mlp,) = (child for child in children if child.name == "mlp")
        assert layer.work.skippable is not mlp.needed


def test_a_gradient_that_needs_the_value_is_noticed() -> None:
    """Were the probe to take the MLP of a sandwich for one that no gradient needs, steps would
    give NaN, not wrong numbers."""
    model, data = make_model("gemma2"), draw(37)
    step = Step(model, TILED)
    tiles = tuple(
        tuple(replace(child, needed=False) for child in layer)
        for layer in step.prepared_model.tiles
    )
    step.prepared_model = replace(step.prepared_model, tiles=tiles)
    found: Outcome = run_step(model, step, data)
    assert any(bool(g.isnan().any()) for g in gradients(model).values())
    assert bool(found.loss.isfinite())
    assert mechanism.blank(torch.zeros(2, 3)).isnan().all()
