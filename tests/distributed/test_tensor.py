"""A decoder layer cut over ranks is the layer: what it gives, every gradient, every byte."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.distributed.collectives import Communicator
from farspan.distributed.tensor import TensorParallel
from farspan.distributed.tensor_plan import plan_tensor
from farspan.hf.probe import Float64Mode
from farspan.hf.stages import CausalLMStages
from tests.distributed.tensor_cases import call_of, make_stages, run
from tests.distributed.traffic import layer_sent
from tests.grids import part_of
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks

BATCH, LAYER = 2, 1

Errors = dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What a layer gives for random tokens, and the gradients of those and of its parameters."""

    out: Tensor
    dx: Tensor
    gradients: dict[str, Tensor]


def data(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x, dout = torch.randn(2, BATCH, tokens, width, generator=generator, dtype=torch.float64)
    return x, dout


def outcome(
    stages: CausalLMStages, layer: nn.Module, x: Tensor, dout: Tensor, tokens: int
) -> Outcome:
    x = x.clone().requires_grad_()
    out = run(stages, layer, x, call_of(stages, LAYER, BATCH, tokens))
    stages.model.zero_grad()
    out.backward(dout)
    named = stages.model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    assert x.grad is not None
    return Outcome(out.detach(), x.grad, gradients)


halved_tokens: list[int] = []


class Halves(nn.Module):
    """Runs a block on one half of the tokens after the other, as tiles do."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        halved_tokens.append(x.shape[1])
        half = x.shape[1] // 2
        return torch.cat([self.block(x[:, :half]), self.block(x[:, half:])], 1)


def halved(name: str, block: nn.Module) -> nn.Module:
    return Halves(block) if name == "mlp" else block


def compare(
    tensor: TensorParallel, stages: CausalLMStages, whole: Outcome, counts: list[int], inside: Any
) -> Errors:
    """Errors of one call of the cut layer, on this rank's tokens of all."""
    peers = tensor.peers
    tokens = sum(counts)
    start, stop = list(pairwise(accumulate(counts, initial=0)))[peers.index]
    x, dout = (each[:, start:stop] for each in data(tokens, stages.width))
    shell = tensor.shell(LAYER, stages.layers[LAYER], counts, inside)
    before = peers.sent
    found = outcome(stages, shell, x, dout, tokens)
    sent = peers.sent - before
    if min(counts):
        plan = tensor.plan.layers[LAYER]
        size = {"batch": BATCH, "width": stages.width, "itemsize": 8}
        assert sent == 2 * layer_sent(plan, counts, peers.index, **size)
    errors = {
        "out": relative_error(found.out, whole.out[:, start:stop]),
        "dx": relative_error(found.dx, whole.dx[:, start:stop]),
    }
    assert found.gradients.keys() == whole.gradients.keys()
    for name, gradient in found.gradients.items():
        if tensor.is_cut(name):
            assert torch.equal(tensor.cut(name, tensor.whole(name, gradient)), gradient)
            total = tensor.whole(name, gradient)
        else:
            total = peers.sum(gradient)
        errors[name] = relative_error(total, whole.gradients[name])
    return errors


def make_tensor(stages: CausalLMStages) -> TensorParallel:
    ranks = dist.get_world_size()
    plan = plan_tensor(stages.model, stages.layers, ranks)
    return TensorParallel(plan, Communicator(dist.new_group(list(range(ranks)))))


def check_family(
    family: str, shares: list[list[int]], inside: Any = None, **changes: Any
) -> list[Errors]:
    stages = make_stages(family, **changes)
    layer = stages.layers[LAYER]
    before = {name: p.detach().clone() for name, p in stages.model.named_parameters()}
    wholes = [
        outcome(stages, layer, *data(tokens, stages.width), tokens) for tokens in map(sum, shares)
    ]
    tensor = make_tensor(stages)
    modules = list(stages.model.modules())
    tensor.cut_layers(stages.layers)
    for name, p in stages.model.named_parameters():
        assert p.requires_grad
        share = tensor.plan.ranks if tensor.is_cut(name) else 1
        assert p.numel() * share == before[name].numel()
        assert torch.equal(tensor.whole(name, p), before[name])
    found = [
        compare(tensor, stages, whole, counts, inside)
        for whole, counts in zip(wholes, shares, strict=True)
    ]
    assert all(a is b for a, b in zip(modules, stages.model.modules(), strict=True))
    return found


def check_families(families: list[str], shares: list[list[int]]) -> dict[str, list[Errors]]:
    torch.set_num_threads(1)
    with Float64Mode():
        return {family: check_family(family, shares) for family in families}


def check_special(shares: list[list[int]]) -> dict[str, list[Errors]]:
    llama = check_family("llama", shares, halved, attention_bias=True, mlp_bias=True)
    assert halved_tokens == [sum(counts) for counts in shares]
    with Float64Mode():
        cohere = check_family("cohere", shares, use_qk_norm=True)
    phi = check_family("phi", shares, qk_layernorm=True, head_dim=4)
    return {"llama": llama, "cohere": cohere, "phi": phi}


def check_half(counts: list[int]) -> list[tuple[str, float, float]]:
    """Of bfloat16 cut and uncut, the errors against float64 of the same numbers."""
    half, wide = make_stages("llama", torch.bfloat16), make_stages("llama")
    tokens, layer = sum(counts), half.layers[LAYER]
    for p, q in zip(wide.model.parameters(), half.model.parameters(), strict=True):
        p.data.copy_(q.data)
    x, dout = (each.bfloat16() for each in data(tokens, half.width))
    exact = outcome(wide, wide.layers[LAYER], x.double(), dout.double(), tokens)
    plain = outcome(half, layer, x, dout, tokens)
    tensor = make_tensor(half)
    tensor.cut_layers(half.layers)
    start, stop = list(pairwise(accumulate(counts, initial=0)))[tensor.peers.index]
    shell = tensor.shell(LAYER, layer, counts)
    found = outcome(half, shell, x[:, start:stop], dout[:, start:stop], tokens)

    def pair(name: str, a: Tensor, b: Tensor, expected: Tensor) -> tuple[str, float, float]:
        return name, relative_error(a, expected), relative_error(b, expected)

    own = slice(start, stop)
    pairs = [
        pair("out", found.out, plain.out[:, own], exact.out[:, own]),
        pair("dx", found.dx, plain.dx[:, own], exact.dx[:, own]),
    ]
    for name, gradient in found.gradients.items():
        whole = tensor.whole(name, gradient)
        # The engine sums in the accumulate dtype.
        total = whole if tensor.is_cut(name) else tensor.peers.sum(gradient.float())
        pairs.append(pair(name, total, plain.gradients[name], exact.gradients[name]))
    return pairs


def assert_exact(results: list[dict[str, list[Errors]]]) -> None:
    for rank, families in enumerate(results):
        for family, calls in families.items():
            for call, errors in enumerate(calls):
                wrong = {n: e for n, e in errors.items() if not e <= EXACT}
                assert not wrong, (family, rank, call, wrong)


ONE_HALF = ["qwen2", "gemma2", "gemma3_text", "gpt_neox", "phi", "olmo3"]
OTHER_HALF = ["granite", "starcoder2", "cohere", "cohere2", "glm4"]
FOUR = ["llama", "qwen3", "phi3", "olmo2"]


@pytest.mark.parametrize("families", part_of([ONE_HALF, OTHER_HALF], ONE_HALF), ids=" ".join)
def test_two_ranks(families: list[str]) -> None:
    """Uneven shares, and one that is empty."""
    assert_exact(run_ranks(2, check_families, families, [[4, 5], [3, 0]]))


@pytest.mark.exhaustive
def test_four_ranks() -> None:
    assert_exact(run_ranks(4, check_families, FOUR, [[3, 2, 3, 3], [0, 1, 0, 2]]))


def test_biases_norms_and_tiles() -> None:
    assert_exact(run_ranks(2, check_special, [[4, 4], [0, 3]]))


def test_half_precision() -> None:
    """Sums of rounded parts cost no more than twice what plain PyTorch does."""
    for pairs in run_ranks(4, check_half, [8, 8, 8, 8]):
        wrong = [pair for pair in pairs if not pair[1] <= 2 * pair[2]]
        assert not wrong, wrong
