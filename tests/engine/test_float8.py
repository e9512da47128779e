"""Linear products in FP8: by name only, the same in all schedules, and called approximate."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.distributed.context import ParallelContext
from farspan.engine.float8 import float8_fault, float8_linears
from farspan.engine.memory import estimate_memory, least_transient
from farspan.engine.microbench import GLANCE, Bench, float8_products
from farspan.engine.parallelize import parallelize
from farspan.engine.step import Step
from farspan.engine.verify import VerificationRun, verify
from farspan.planner.machines import machine, read
from farspan.planner.plans import best_plan
from farspan.planner.request import Question
from farspan.planner.walk import cast_bytes, workspace_bytes
from farspan.program.layout import Layout, Parallel
from farspan.report.plan import subject
from farspan.spec import Kernels, Products, RunSpec, Schedule, Tier, UnsupportedError
from farspan.train.config import DType, LoraConfig, ModelConfig
from farspan.train.trainer import train
from tests import float8
from tests.engine.checks import Outcome, draw, run_oracle, run_step
from tests.grids import exhaustive
from tests.numerics import assert_exact
from tests.profiles import profile_of
from tests.ranks import run_ranks
from tests.train.tiny import MODEL, Quiet, tiny_run
from tests.zoo import make_model

BF16, CPU = torch.bfloat16, torch.device("cpu")
FP8 = Kernels(products=Products.FP8)
WHOLE = Schedule(chunk=60)
INSTALLED = find_spec("torchao") is not None


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    float8.stand_in(monkeypatch)
    yield
    for known in (float8_linears, float8_fault):
        known.cache_clear()


def distance(found: Outcome, expected: Outcome) -> float:
    pairs = [(g.double(), expected.gradients[n].double()) for n, g in found.gradients.items()]
    error = sum(float((a - b).norm()) ** 2 for a, b in pairs) ** 0.5
    return error / sum(float(b.norm()) ** 2 for _, b in pairs) ** 0.5


@pytest.mark.usefixtures("torchao")
def test_it_is_far_from_bfloat16_and_not_astray() -> None:
    model, data = make_model("qwen2", BF16), draw(60)
    exact = make_model("qwen2", torch.float64)
    exact.load_state_dict(model.state_dict())
    plain, own = run_oracle(exact, data), run_oracle(model, data)
    found = run_step(model, Step(model, WHOLE, kernels=FP8), data)
    assert 4 * distance(own, plain) < distance(found, plain) < 0.5


@pytest.mark.skipif(INSTALLED, reason="torchao's own products are no wider than float32")
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("chunk", [60, 20])
def test_a_step_is_that_of_the_converted_model(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, in a float64 that only rounds operands; the head stays as it is. Weights' gradients
    have scales over a chunk, so with several the gradients of inputs alone are compared."""
    monkeypatch.setattr("farspan.engine.preparation.refuse_float8", lambda *_, **__: None)
    model, data = make_model("qwen2"), draw(60)
    found = run_step(model, Step(model, Schedule(chunk=chunk), kernels=FP8), data)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            monkeypatch.setattr(module, "forward", _bound(module), raising=False)
    wanted = run_oracle(model, data)
    names = [n for n in wanted.gradients if chunk == 60 or "norm" in n or "embed" in n]
    assert_exact(found.loss, wanted.loss)
    for name in names:
        assert_exact(found.gradients[name], wanted.gradients[name])


def _bound(module: nn.Linear) -> Any:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = float8.Rowwise.apply(x, module.weight)
        return out if module.bias is None else out + module.bias

    return forward


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(
    "changes",
    [
        exhaustive({"groups": 2, "attention_save_fraction": 0.5}),
        {"activation_save_fraction": 1.0},
        {"kv": Tier.HOST, "layer_checkpoint": True},
        exhaustive({"weights": Tier.HOST, "groups": 2}),
    ],
    ids=str,
)
def test_schedules_give_the_same_bits(changes: dict[str, Any]) -> None:
    """Cells that run again have the same scales; also in a second step, and with documents."""
    model, data = make_model("qwen2", BF16), draw(60)
    base = Schedule(chunk=20)
    plain = run_step(model, Step(model, base, kernels=FP8), data)
    step = Step(model, replace(base, **changes), kernels=FP8)
    for _ in range(2):
        found = run_step(model, step, data)
        assert torch.equal(found.loss, plain.loss)
        assert all(torch.equal(g, plain.gradients[n]) for n, g in found.gradients.items())


@pytest.mark.usefixtures("torchao")
def test_every_product_of_a_layer_is_in_fp8_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, seen = make_model("qwen2", BF16), draw(60), list[tuple[int, ...]]()
    forward = type(float8_linears("cpu")).forward

    def heard(self: Any, module: nn.Linear, x: Tensor) -> Tensor:
        seen.append(tuple(module.weight.shape))
        return forward(self, module, x)

    monkeypatch.setattr(type(float8_linears("cpu")), "forward", heard)
    step = Step(model, WHOLE, kernels=FP8)
    with torch.no_grad():
        seen.clear()
        step.evaluate(data.input_ids, data.labels)
    linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    assert sorted(seen) == sorted(tuple(m.weight.shape) for m in linears)
    run_step(model, Step(model, WHOLE), data)
    assert len(seen) == len(linears)  # not unless it is named


def as_alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        float8.stand_in(patch)
        patch.setattr("farspan.engine.preparation.refuse_float8", lambda *_, **__: None)
        schedule, data = Schedule(chunk=16, groups=2), draw(60)
        models = [make_model("qwen2") for _ in range(3)]
        alone = run_step(models[0], Step(models[0], schedule, kernels=FP8), data)
        exactly = run_step(models[0], Step(models[0], schedule), data)
        assert abs(float(alone.loss - exactly.loss)) > 1e-6
        ranks = ParallelContext(Layout(ulysses=2), CPU)
        found = run_step(models[1], Step(models[1], schedule, ranks=ranks, kernels=FP8), data)
        assert_exact(found.loss, alone.loss)
        for name in (n for n in alone.gradients if "norm" in n or "embed" in n):
            assert_exact(found.gradients[name], alone.gradients[name])
        dealt = Step(
            models[2], schedule, ranks=parallelize(models[2], schedule, ranks), kernels=FP8
        )
        assert_exact(dealt(data.input_ids, data.labels).detach(), alone.loss)


@pytest.mark.exhaustive
@pytest.mark.skipif(INSTALLED, reason="torchao's own products are no wider than float32")
def test_two_ranks_compute_what_one_does() -> None:
    """With whole weights and with shards. Weights' gradients have scales over a rank's tokens, so
    those of inputs are compared."""
    run_ranks(2, as_alone)


def frozen(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    return model


def own_forward(model: Any) -> Any:
    module = model.model.layers[2].self_attn.q_proj
    module.forward = MethodType(nn.Linear.forward, module)
    return model


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: make_model("qwen2", torch.float32), "fp8 needs a model in bfloat16"),
        (lambda: frozen(make_model("qwen2", BF16)), r"layer 1\.mlp\.up_proj is frozen"),
        (lambda: own_forward(make_model("qwen2", BF16)), r"layer 2\.self_attn\.q_proj has a forw"),
        (lambda: make_model("mixtral", BF16), r"layer 0\.mlp.* is a Mixtral"),
        (lambda: make_model("gpt2", BF16), r"layer 0\.attn\.c_attn is a Conv1D"),
        (
            lambda: make_model("qwen2", BF16, intermediate_size=40),
            r"layer 0\.mlp\.gate_proj has widths \(40, 32\), which are no multiples of 16",
        ),
    ],
)
def test_a_model_that_cannot_is_refused(model: Any, words: str) -> None:
    made = model()
    Step(made, WHOLE)
    with pytest.raises(UnsupportedError, match=rf"^products: .*{words}.*leave products out"):
        Step(made, WHOLE, kernels=FP8)


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (float8_linears, float8_fault):
        known.cache_clear()
    monkeypatch.setitem(sys.modules, float8.PACKAGE, None)
    with pytest.raises(
        UnsupportedError, match=r"^products: fp8 needs torchao.*pip install \"farspan"
    ):
        Step(make_model("qwen2", BF16), WHOLE, kernels=FP8)


@pytest.mark.skipif(INSTALLED, reason="only the stand-in can be wrong at will")
@pytest.mark.usefixtures("torchao")
def test_wrong_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8.Rowwise, "off", 0.5)
    with pytest.raises(UnsupportedError, match=r"does not work on cpu: the relative error"):
        Step(make_model("qwen2", BF16), WHOLE, kernels=FP8)


def test_other_words_and_compilers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="products: expected null or fp8, got 'int8'"):
        Kernels(products="int8")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="products: fp8 does not run with compile"):
        replace(FP8, compile=True)


def question(name: str, **changes: Any) -> Question:
    profile = profile_of("Qwen2.5-0.5B", 4, fused=True, adds=True)
    asked = Question(profile.spec, RunSpec(1, 32768), machine(name), profile=profile)
    return replace(asked, **changes)


def test_plans_price_it_and_say_so() -> None:
    plain, approximate = best_plan(question("h100")), best_plan(question("h100", kernels=FP8))
    assert approximate.seconds.compute < plain.seconds.compute
    assert "products in fp8 (approximate)" in subject(approximate)
    assert approximate.to_json()["products"] == "fp8"
    assert "products" not in plain.to_json()
    assert read("h100").sources["rates.bfloat16.fp8"].startswith("datasheet: ")
    for changes, words in (
        ({}, "a100-80g has no rates for fp8"),
        ({"dtype": "float32"}, "fp8 needs a model in bfloat16"),
    ):
        with pytest.raises(UnsupportedError, match=f"products: .*{words}"):
            best_plan(question("a100-80g", kernels=FP8, **changes))


@pytest.mark.usefixtures("torchao")
def test_casts_are_counted() -> None:
    """Two float32 copies of the widest operand: here of an MLP's inner activations, in a plan of
    the weights if these are larger."""
    model = make_model("qwen2", BF16)
    of = [Step(model, Schedule(chunk=40), kernels=kernels) for kernels in (FP8, Kernels())]
    ours, plain = (estimate_memory(step, 2, 60, cells=least_transient) for step in of)
    assert ours.transient - plain.transient == 8 * 2 * 40 * 48
    widths = {(896, 4864), (4864, 896)}
    assert cast_bytes(widths, 4096) == 8 * 4096 * 4864
    assert cast_bytes(widths, 16) == 8 * 896 * 4864
    asked, schedule = question("h100", kernels=FP8), Schedule(chunk=4096)
    casts = workspace_bytes(asked, schedule) - workspace_bytes(question("h100"), schedule)
    assert casts == cast_bytes(widths, 4096)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("torchao")
def test_its_rates_are_measured_on_what_a_step_runs() -> None:
    bench = Bench(CPU, GLANCE)
    sizes = [(size, count) for size, count, call in float8_products(bench, BF16) if size < 1e7]
    assert sizes[0] == (2.0 * 4 * 64**3, 3)
    size, count, call = next(float8_products(bench, BF16))
    assert bench.curve("fp8", iter([(size, count, call)])).points[0][0] == size


@pytest.mark.usefixtures("torchao")
def test_verify_says_its_error_beside_bfloat16_s() -> None:
    model = make_model("qwen2", torch.float64)
    run = VerificationRun(tokens=40)
    found = verify(model, Schedule(chunk=16), run, products=Products.FP8)
    assert found.passed
    told = found.products
    assert told is not None
    assert 0.02 < told.own_gradient_error * 4 < told.gradient_error < 1.0
    assert verify(model, Schedule(chunk=16), run).products is None


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_every_output_of_a_run_says_so(tmp_path: Path) -> None:
    sizes = ModelConfig(config={**MODEL, "num_key_value_heads": 2}, dtype=DType.BFLOAT16)
    run, quiet = replace(tiny_run(tmp_path), model=sizes, kernels=FP8), Quiet()
    result = train(run, reporter=quiet)
    folder = Path(run.folder)
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["products"] == "fp8" for line in written)
    for name in ("about.json", "model/farspan.json"):
        assert json.loads((folder / name).read_text())["products"] == "fp8"
    assert "with products in fp8, an approximation" in result.message
    assert "in fp8, approximate" in "\n".join(quiet.notes)
    assert "**approximate**: linear products" in (folder / "model/README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ModelConfig(config=MODEL)}, r"model\.dtype float32; set it to bfloat16"),
        (
            {"model": ModelConfig(config=MODEL, dtype=DType.BFLOAT16, lora=LoraConfig())},
            r"model\.lora: its weights are frozen",
        ),
        ({"parallel": Parallel(tensor=2)}, r"parallel\.tensor; use ulysses instead"),
    ],
)
def test_a_run_that_cannot_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"kernels\.products: fp8 .*{words}"):
        replace(tiny_run(tmp_path), kernels=FP8, **changes)
