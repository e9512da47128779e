"""Which modules run on farspan's kernels, and that a model of them learns the same."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial, wraps
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.engine.step import Step
from farspan.hf.fused_layers import in_shells, rules, spared_layers
from farspan.hf.stages import CausalLMStages
from farspan.kernels import reference
from farspan.kernels.operations import Norm
from farspan.spec import Kernels, Schedule
from tests.engine.checks import assert_close, assert_same_bits, draw, run_oracle, run_step
from tests.grids import exhaustive, part_of
from tests.kernels.cases import round_bfloat16
from tests.numerics import relative_error
from tests.profiles import spec_of
from tests.sparse.triton_cases import interpreter
from tests.zoo import make_model

# Few programs, of two chunks: interpreting one takes 5 ms.
DATA = draw(13, documents=2)
SCHEDULE = Schedule(
    chunk=8, groups=1, attention_save_fraction=0.5, activation_save_fraction=0.5, loss_chunk_size=5
)
SMALL = {"num_hidden_layers": 2, "intermediate_size": 48}
NORMED = 16  # rows that are normed of a token: in two layers of Qwen3, the most of the families


RULES = rules(remakes=False)


def known(module: nn.Module, name: str = "") -> set[str]:
    """Names of the modules that run on the kernels."""
    found: set[str] = set()
    for child_name, child in module.named_children():
        found |= known(child, f"{name}.{child_name}".strip("."))
    return found | ({name} if any(rule(module) is not None for rule in RULES) else set())


NORMS = {"input_layernorm", "post_attention_layernorm"}
KNOWN = {
    "qwen2": {"self_attn", "mlp", *NORMS},
    "qwen3": {"self_attn", "self_attn.q_norm", "self_attn.k_norm", "mlp", *NORMS},
    "phi3": {"self_attn", "mlp", *NORMS},
    "gemma2": {
        *{"self_attn", "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm", *NORMS}
    },
    "gpt_oss": NORMS,  # tables half a head wide, gates that are clamped
    "cohere": {"mlp"},  # norms about the mean; neighbours are rotated against each other
    "gpt2": set(),
}


@pytest.mark.parametrize("family", KNOWN)
def test_modules_are_known_by_what_they_do(family: str) -> None:
    layer = CausalLMStages(make_model(family, torch.bfloat16)).layers[-1]
    assert known(layer) == KNOWN[family]


class Scaled(nn.Module):
    """Looks like a norm."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.ones(8)), 1e-6, power

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True) ** self.power
        return self.weight * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)


def test_what_only_looks_like_one_runs_as_it_is() -> None:
    assert known(Scaled(1.0)) == {""}
    assert known(Scaled(1.001)) == set()
    own_way = Scaled(1.0)
    own_way.forward = lambda x: x  # type: ignore[method-assign]
    assert in_shells(own_way, RULES) is own_way


def decorated(forward: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        count.append(1)
        return forward(*arguments, **keywords)

    return wrapper


@pytest.mark.usefixtures("by_formulas", "float64_throughout")
def test_decorators_of_attention_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[int] = []
    model = make_model("qwen2")
    kind: Any = type(CausalLMStages(model).layers[0].self_attn)
    for _ in range(2):
        monkeypatch.setattr(kind, "forward", decorated(kind.forward, count))
    rotations: list[int] = []

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotations.append(1)
        return reference.rotated(q, cos, sin), reference.rotated(k, cos, sin)

    monkeypatch.setattr("farspan.hf.fused_layers.rotated", rotated)
    data = draw(19)
    step, expected = Step(model, SCHEDULE), run_oracle(model, data)
    count.clear()
    rotations.clear()
    assert_close(run_step(model, step, data), expected)
    assert count
    assert 2 * len(rotations) == len(count)
    monkeypatch.setattr(kind, "forward", wraps(kind.forward)(lambda *_, **__: None))
    assert "self_attn" not in known(CausalLMStages(model).layers[0])  # it calls another


# -- the same by formulas ------------------------------------------------------------------------


@pytest.fixture
def by_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules run in their shells on a CPU in any dtype."""
    for place in ("hf.fused_layers", "engine.preparation"):
        monkeypatch.setattr(f"farspan.{place}.fused_for", lambda *_: True)

    def normed(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        return reference.rms_norm(x, weight, norm.eps, norm.offset, norm.cast)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rotated(q, cos, sin), reference.rotated(k, cos, sin)

    def again(dout: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            halves = [x.detach().requires_grad_() for x in (gate, up)]
            out = reference.gated(halves[0], halves[1], act)
        return out.detach(), *torch.autograd.grad(out, halves, dout)

    monkeypatch.setattr("farspan.engine.gradients.swiglu_again", again)
    functions: dict[str, Callable[..., Any]] = {
        "normed": normed,
        "rms_norm": lambda *given: (normed(*given),),
        "gated": reference.gated,
        "swiglu": reference.gated,
        "rotated": rotated,
    }
    for name, function in functions.items():
        monkeypatch.setattr(f"farspan.hf.fused_layers.{name}", function)


@pytest.mark.usefixtures("by_formulas", "float64_throughout")
@pytest.mark.parametrize(
    ("family", "adds"),
    part_of(
        product(KNOWN, [False, True]),
        *(("qwen3", True), ("phi3", False), ("gemma2", True), ("cohere", False)),
    ),
)
def test_a_step_in_shells_is_exact(
    family: str, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.engine.preparation.adds_products", lambda *_: adds)
    model, data = make_model(family), draw(45, batch=2, documents=3)
    schedule = replace(SCHEDULE, chunk=16, activation_save_fraction=0.2)
    step, expected = Step(model, schedule, poison=True), run_oracle(model, data)
    for _ in range(2):
        assert_close(run_step(model, step, data), expected)


@pytest.mark.usefixtures("by_formulas")
def test_the_last_product_is_left_out_where_nobody_reads_it() -> None:
    """Of a layer that runs forward twice, the second time; not of the last layer, nor where a norm
    comes after."""
    assert spared_layers(CausalLMStages(make_model("qwen2"))) == {0, 1, 2, 3}
    assert spared_layers(CausalLMStages(make_model("gemma2"))) == set()
    assert spared_layers(CausalLMStages(make_model("gpt2"))) == set()
    model = make_model("qwen2")
    width, inner = model.config.hidden_size, model.config.intermediate_size
    counts = []
    for fused in (True, False):
        step = Step(
            model, Schedule(chunk=17, attention_save_fraction=1.0), kernels=Kernels(fused=fused)
        )
        with Products(17, inner, width) as products:
            step(*draw(51))
        counts.append(products.count)
    layers, chunks = 4, 3
    assert counts[1] - counts[0] == (layers - 1) * chunks


# -- modules that do more than they seem to ------------------------------------------------------


class Wrapped(nn.Module):
    """A linear module in another one, which gives more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.inner(x)
        return out


class Clamped(nn.Module):
    """A gated MLP whose halves are clamped, as some families clamp at 7 or 10."""

    def __init__(self, mlp: Any, limit: float, *, detached: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn
        self.limit, self.detached = limit, detached

    def forward(self, x: Tensor) -> Any:
        up = self.up_proj(x.detach() if self.detached else x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def bend(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out * 0.5 + torch.tanh(out)


def hooked(name: str, layer: nn.Module) -> None:
    layer.get_submodule(name).register_forward_hook(bend)


Change = Callable[[Any], Any]  # of a decoder layer
CHANGES: dict[str, Change] = {
    **{
        f"hook of {name}": partial(hooked, name)
        for name in ("mlp", "mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj", "input_layernorm")
    },
    "hook of a weight": lambda layer: layer.mlp.up_proj.weight.register_hook(lambda g: 3 * g),
    "its own forward": lambda layer: setattr(
        layer.mlp.gate_proj, "forward", lambda x: torch.tanh(x) @ layer.mlp.gate_proj.weight.T
    ),
    "another module": lambda layer: setattr(layer.mlp, "down_proj", Wrapped(layer.mlp.down_proj)),
    "a number": lambda layer: setattr(layer.self_attn, "scaling", 0.9),
    "eps of a norm": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "a clamp": lambda layer: setattr(layer, "mlp", Clamped(layer.mlp, 1e-3)),
    "what is detached": lambda layer: setattr(layer, "mlp", Clamped(layer.mlp, 1e9, detached=True)),
    "a weight that is computed": lambda layer: weight_norm(layer.mlp.up_proj),
}


# Of hooks on modules two; every other kind of change, by turns before and later.
TURNS = [
    (what, bool(number % 2))
    for number, what in enumerate(CHANGES)
    if not what.startswith("hook of mlp") and what != "eps of a norm"
]


@pytest.mark.slow
@pytest.mark.usefixtures("by_formulas", "float64_throughout")
@pytest.mark.parametrize(("what", "later"), part_of(product(CHANGES, [False, True]), *TURNS))
def test_what_does_more_does_so_in_shells(
    what: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before shells are made, and after a step."""
    monkeypatch.setattr("farspan.engine.preparation.adds_products", lambda *_: True)
    model, data = make_model("qwen2", num_hidden_layers=2), draw(25)
    schedule = Schedule(chunk=8, groups=1, attention_save_fraction=0.5)
    step = Step(model, schedule) if later else None
    if step is not None:
        step(*data)
    for layer in CausalLMStages(model).layers:
        CHANGES[what](layer)
    expected = run_oracle(model, data)
    found = run_step(model, step or schedule, data)
    assert_close(found, expected)


class Products(TorchDispatchMode):
    """Counts products of [rows, inner] by [inner, outer]."""

    def __init__(self, rows: int, inner: int, outer: int) -> None:
        super().__init__()
        self.count, self.shapes = 0, (torch.Size((rows, inner)), torch.Size((inner, outer)))

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.count += tuple(x.shape for x in args) == self.shapes
        return func(*args, **(kwargs or {}))


# -- on the kernels, interpreted ---------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ProcessPoolExecutor]:
    with interpreter() as process:
        process.submit(round_bfloat16).result()
        yield process


PLACES = (
    "hf.fused_layers",
    "engine.preparation",
    "engine.loss",
    "attention.backends",
    "attention.chunk",
)


def _fused(*_: Any) -> bool:
    return True


def _errors(family: str, dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, list[float]]:
    """Relative errors of the loss and of all gradients together against plain autograd in float64:
    of the kernels, in two steps, and of PyTorch's operators."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.use_deterministic_algorithms(False)
    try:
        return _measured(family, dtype, changes)
    finally:
        torch.use_deterministic_algorithms(True)  # as the others of this process have it


def _saved_bytes(step: Step) -> int:
    return sum(layer.activation_bytes for layer in step.model_spec.layers)


def _measured(family: str, dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, list[float]]:
    exact = make_model(family, torch.float64, **changes)
    model: Any = make_model(family, torch.float64, **changes)
    model = model.to(dtype)
    expected = run_oracle(exact, DATA)
    found = {}
    for fused in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if fused:
                for place in PLACES:
                    patch.setattr(f"farspan.{place}.fused_for", _fused)
            step = Step(model, SCHEDULE, kernels=Kernels(fused=fused), poison=True)
            assert step.prepared_model.fused == fused
            runs = [run_step(model, step, DATA) for _ in range(2)]
            whole = Step(model, SCHEDULE, kernels=Kernels(fused=fused, remake=False))
            assert _saved_bytes(whole) > _saved_bytes(step)
            assert_same_bits(run_step(model, whole, DATA), runs[1])
            evaluated = float(relative_error(step.evaluate(*DATA), expected.loss))
        wide = torch.cat([g.flatten() for g in expected.gradients.values()])
        named = [torch.cat([r.gradients[n].flatten() for n in expected.gradients]) for r in runs]
        assert torch.equal(*named)
        name = "fused" if fused else "plain"
        found[name] = [float(relative_error(named[1], wide)), evaluated]
        found[f"{name} loss"] = [float(relative_error(runs[1].loss, expected.loss))]
        layers = [layer.activation_bytes for layer in step.model_spec.layers]
        kept = str(dtype).removeprefix("torch.")
        planned = spec_of(exact.config.to_dict(), dtype=kept, fused=fused).layers
        assert layers == [layer.activation_bytes for layer in planned]
        found[f"{name} bytes"] = [float(sum(layers))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        exhaustive("qwen3", torch.float32, {"tie_word_embeddings": True}),
        ("gemma2", torch.bfloat16, {"layer_types": ["sliding_attention", "full_attention"]}),
        exhaustive("phi3", torch.bfloat16, {}),  # halves of one product
    ],
)
def test_a_step_on_the_kernels(
    interpreted: ProcessPoolExecutor, family: str, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    """No further from float64 than twice what PyTorch's operators are; Gemma 2 has norms in fp32,
    and soft caps on logits, which save what they give. What is saved is what is planned."""
    found = interpreted.submit(_errors, family, dtype, {**SMALL, **changes}).result()
    # One number, such as a loss, is rounded by chance: half a spacing is what any may be off by.
    floor = torch.finfo(dtype).eps / 2
    assert found["fused"][0] <= 2 * found["plain"][0] + floor
    assert found["fused loss"][0] <= 2 * found["plain loss"][0] + floor
    assert found["fused"][1] <= 2 * found["plain"][1] + floor
    # Of each row that is normed, the kernels also keep a number in fp32.
    assert 0 <= found["fused bytes"][0] - found["plain bytes"][0] <= 4 * NORMED
    assert found["fused"][0] > 0
