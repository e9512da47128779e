"""Weight gradients are summed over chunks in fp32, whatever the parameters are in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.engine.gradients import AccumulatingLinears, GradientAccumulator
from farspan.engine.step import Step
from farspan.hf.fused_layers import in_shells
from farspan.spec import Kernels, Schedule, Tier
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.grids import crossed
from tests.numerics import assert_exact, relative_error
from tests.zoo import make_model

CHUNKS = 1024
# One rounding to bf16 changes a number by at most 2**-9 of it, and so a vector in its L2 norm.
ONE_ROUNDING = 2**-9


def chunk_gradients(dtype: torch.dtype) -> list[Tensor]:
    """They share a direction, as gradients do."""
    common = torch.randn(64)
    return [(common + 3 * torch.randn(64)).to(dtype) for _ in range(CHUNKS)]


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).double().sum(0)


def accumulate(parameter: nn.Parameter, parts: list[Tensor]) -> Tensor:
    gradients = GradientAccumulator()
    for part in parts:
        gradients.add([parameter], [part])
    gradients.close([parameter])
    assert parameter.grad is not None
    return parameter.grad


def test_bf16_is_rounded_once() -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    parts = chunk_gradients(torch.bfloat16)
    found = accumulate(parameter, parts)
    assert found.dtype is torch.bfloat16
    assert relative_error(found, total(parts)) <= ONE_ROUNDING
    naive = torch.zeros_like(found)
    for part in parts:
        naive += part
    assert relative_error(naive, total(parts)) > 10 * ONE_ROUNDING


def test_what_was_there_is_added_before_rounding() -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    parts = chunk_gradients(torch.bfloat16)
    accumulate(parameter, parts[:500])
    assert parameter.grad is not None
    left = parameter.grad.clone()
    found = accumulate(parameter, parts[500:])
    assert relative_error(found, total([left, *parts[500:]])) <= ONE_ROUNDING


@pytest.mark.parametrize(
    ("own", "wide"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wide_gradients_add_in_place(own: torch.dtype, wide: torch.dtype) -> None:
    """fp32 sums of 1,024 numbers: 1,023 roundings of 2**-24 at most."""
    parameter = nn.Parameter(torch.zeros(64, dtype=own))
    parameter.grad_dtype = wide
    parts = chunk_gradients(own)
    grad = accumulate(parameter, parts)
    assert grad.dtype is wide
    assert relative_error(grad, total(parts)) <= CHUNKS * torch.finfo(wide).eps / 2
    assert accumulate(parameter, parts) is grad
    assert relative_error(grad, 2 * total(parts)) <= CHUNKS * torch.finfo(wide).eps


def test_a_gradient_is_nobody_s_else() -> None:
    """Autograd may hand out one tensor twice, or an expanded one."""
    one, other = (nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
    shared = torch.ones(1, 1).expand(4, 3)
    gradients = GradientAccumulator()
    gradients.add([one, other], [shared, shared])
    gradients.add([one], [shared])
    gradients.close([one, other])
    assert one.grad is not None
    assert other.grad is not None
    assert torch.equal(one.grad, torch.full((4, 3), 2.0))
    assert torch.equal(other.grad, torch.ones(4, 3))
    assert one.grad.is_contiguous()


def test_no_gradient_stays_none() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    gradients = GradientAccumulator()
    gradients.add([parameter], [None])
    gradients.close([parameter])
    assert parameter.grad is None


# -- products that add to the sums -----------------------------------------------------------------

SCHEDULES = {
    "groups": Schedule(chunk=16, groups=2, kv=Tier.HOST, kv_block=12, attention_save_fraction=0.5),
    "kept": Schedule(chunk=13, groups=1, activation_save_fraction=0.6),
    "tiles": Schedule(chunk=16, groups=4, mlp_chunk_size=5),
}


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products add on a CPU, too."""
    monkeypatch.setattr("farspan.engine.preparation.adds_products", lambda *_: True)


@pytest.mark.slow
@pytest.mark.usefixtures("everywhere", "float64_throughout")
@pytest.mark.parametrize(
    ("family", "kind"), crossed(["qwen2", "phi3", "gemma2", "mixtral"], SCHEDULES)
)
def test_a_step_is_exact(family: str, kind: str) -> None:
    """Two steps: sums begin anew in the second, and go on where `.grad` stays."""
    model = make_model(family)
    model.get_input_embeddings().weight.requires_grad_(family != "phi3")
    data = draw(53, batch=2, documents=4)
    step, expected = Step(model, SCHEDULES[kind], poison=True), run_oracle(model, data)
    for _ in range(2):
        assert_close(run_step(model, step, data), expected)
    step(*data)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert_exact(parameter.grad, 2 * expected.gradients[name])


class Outputs(TorchDispatchMode):
    """The shapes of all that operations give."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(out.shape)
        return out


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("adds", [True, False])
def test_no_gradient_of_a_matrix_is_made(adds: bool) -> None:
    model = make_model("qwen2")
    step = Step(model, Schedule(chunk=17), kernels=Kernels(accumulate=adds))
    matrices = {p.shape for p in model.model.layers.parameters() if p.ndim == 2}
    # Square ones might be products of tokens.
    matrices = {shape for shape in matrices if shape[0] != shape[1]}
    with Outputs() as outputs:
        step(*draw(51))
    assert matrices.isdisjoint(outputs.shapes) == adds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_linear_module_in_its_shell(dtype: torch.dtype) -> None:
    """Twice in one graph, once behind a transposed input."""
    torch.manual_seed(0)
    module, adding = (
        nn.Linear(5, 5, dtype=dtype),
        AccumulatingLinears(gradients=GradientAccumulator()),
    )
    shell = in_shells(module, [adding.forward_of])
    x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
    expected = torch.autograd.grad(module(module(x.t())).square().sum(), [x, *module.parameters()])
    out = shell(shell(x.t())).square().sum()
    dx, dweight, dbias = torch.autograd.grad(out, [x, *module.parameters()], allow_unused=True)
    assert dweight is None
    assert adding.gradients is not None
    adding.gradients.close(module.parameters())
    limit = 8 * torch.finfo(dtype).eps
    for found, wanted in zip((dx, module.weight.grad, dbias), expected, strict=True):
        assert found is not None
        assert float((found - wanted).norm() / wanted.norm()) < limit
    assert torch.equal(shell(x.t()), module(x.t()))


def test_frozen_weights_and_others_are_left_alone() -> None:
    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    adding = AccumulatingLinears(gradients=GradientAccumulator())
    frozen = nn.Linear(3, 3).requires_grad_(False)
    shell = in_shells(frozen, [adding.forward_of])
    out = shell(torch.ones(1, 3, requires_grad=True))
    assert "AddmmBackward" in type(out.grad_fn).__name__
    assert in_shells(Other(3, 3), [adding.forward_of]).__class__ is Other
    assert "forward" not in in_shells(Other(3, 3), [adding.forward_of]).__dict__
