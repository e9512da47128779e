"""`verify` passes what is exact and fails what is not."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.attention import chunk as attention
from farspan.attention.backends import merge_
from farspan.engine.buffers import KVPrefix, ProgramBuffers
from farspan.engine.gradients import GradientAccumulator
from farspan.engine.loss import LossHead
from farspan.engine.verify import (
    FLOOR,
    TWO_ROUNDINGS,
    Errors,
    Judged,
    RoundedApart,
    Structure,
    Verification,
    VerificationRun,
    beside_plain,
    exactly,
    verify,
)
from farspan.hf import attention_interface
from farspan.hf.attention_interface import _chunked
from farspan.hf.indexer import IndexerCall
from farspan.program.attention_blocks import Block, plan_blocks
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.grids import crossed, exhaustive, part_of
from tests.numerics import EXACT
from tests.zoo import make_model, shared_model

pytestmark = pytest.mark.slow

SCHEDULE = Schedule(
    chunk=16, groups=2, attention_save_fraction=0.4, activation_save_fraction=0.3, kv_block=24
)
RUN = VerificationRun(batch=2, tokens=45, documents=3)


@pytest.mark.parametrize(
    "name", part_of(["qwen2", "gpt2", "gemma2", "gpt_oss", "deepseek_v3"], "gpt2", "gpt_oss")
)
def test_exact_in_float64(name: str) -> None:
    model = shared_model(name)
    found = verify(model, SCHEDULE, RUN)
    assert found.passed, found
    assert found.dtype == "float64"
    assert found.checked_parameters == len(list(model.parameters()))
    assert found.loss_error <= 1e-12
    assert found.max_relative_error <= 1e-12


def test_experts_as_they_come() -> None:
    """Torch's grouped product, which is the default, has no float64."""
    model = make_model("mixtral")
    model.config._experts_implementation = "grouped_mm"
    assert verify(model, SCHEDULE, RUN).passed
    assert model.config._experts_implementation == "grouped_mm"


def test_a_gradient_that_is_zero_in_exact_arithmetic() -> None:
    found = verify(shared_model("opt"), SCHEDULE, RUN)
    assert found.passed, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_good_as_plain_autograd_in_lower_precision(dtype: torch.dtype) -> None:
    found = verify(shared_model("qwen2", dtype), SCHEDULE, RUN)
    assert found.passed, found
    assert found.max_relative_error > 1e-12
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert "plain autograd" in found.rule


def test_a_router_that_rounding_tips_is_no_failure() -> None:
    """In bf16 chunks round apart from the whole, and a token may choose another expert."""
    model = shared_model("mixtral", torch.bfloat16)
    found = verify(model, Schedule(chunk=7, groups=(1, 3)), RUN)
    assert found.passed, found
    assert "chooses experts" in found.rule


def test_decays_of_which_plain_autograd_was_lucky() -> None:
    """Four numbers a layer: one run is off by 2.4 times what one of plain autograd is."""
    found = verify(make_model("bamba", torch.bfloat16), SCHEDULE, VerificationRun(tokens=61))
    assert found.passed, found
    assert "over 2 runs that round differently" in found.rule


@pytest.mark.parametrize("dtype", part_of([torch.float64, torch.bfloat16], torch.bfloat16))
def test_weights_in_main_memory(dtype: torch.dtype) -> None:
    schedule = replace(SCHEDULE, weights=Tier.HOST)
    assert verify(make_model("qwen2", dtype), schedule, RUN).passed


def test_leaves_the_model_alone() -> None:
    model = make_model("qwen2", torch.bfloat16)
    state = copy.deepcopy(model.state_dict())
    mark = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = mark
    own = model.config._attn_implementation
    verify(model, SCHEDULE, RUN)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.lm_head.weight.grad is mark
    others = [p for p in model.parameters() if p is not model.lm_head.weight]
    assert all(p.grad is None for p in others)
    assert model.config._attn_implementation == own


def test_only_trained_parameters_are_checked() -> None:
    model = make_model("qwen2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    found = verify(model, SCHEDULE, RUN)
    assert found.passed
    assert found.checked_parameters == 9


def test_refuses_a_context_before_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents restart positions, so several may be together what one may not."""
    model = make_model("llama", max_position_embeddings=44)
    assert verify(model, SCHEDULE, RUN).passed
    monkeypatch.setattr(
        "farspan.engine.verify.reference_loss", lambda *_, **__: pytest.fail("late")
    )
    with pytest.raises(UnsupportedError, match="a document of 45 tokens"):
        verify(model, SCHEDULE, replace(RUN, documents=1))


Break = Callable[[pytest.MonkeyPatch], None]


def drop_a_block(patch: pytest.MonkeyPatch) -> None:
    """dK, dV of the first keys are lost."""
    own = KVPrefix.add_gradient

    def add(self: KVPrefix, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        if start > 0:
            own(self, start, stop, rows, dk, dv)

    patch.setattr(KVPrefix, "add_gradient", add)


def skip_clearing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProgramBuffers, "clear", lambda *_: None)


def lose_a_norm(patch: pytest.MonkeyPatch) -> None:
    own = GradientAccumulator._add

    def add(self: GradientAccumulator, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter.shape != (32,):
            own(self, parameter, gradient)

    patch.setattr(GradientAccumulator, "_add", add)


def normalise_by_the_chunk(patch: pytest.MonkeyPatch) -> None:
    own = LossHead._loss

    def loss(self: LossHead, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return (
            own(self, hidden, targets, weights) * self.count / max(int((targets != -100).sum()), 1)
        )

    patch.setattr(LossHead, "_loss", loss)


BREAKS = (
    drop_a_block,
    skip_clearing,
    lose_a_norm,
    normalise_by_the_chunk,
)


@pytest.mark.parametrize(("broken", "tier"), crossed(BREAKS, Tier))
def test_fails_what_is_broken(broken: Break, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    found = verify(shared_model("qwen2"), Schedule(chunk=16, groups=2, kv=tier), RUN)
    assert_failed(found)


def choose_by_nothing(patch: pytest.MonkeyPatch) -> None:
    own = IndexerCall.choose

    def choose(self: IndexerCall, keys: Tensor, *place: Any) -> Tensor:
        return own(self, torch.zeros_like(keys), *place)

    patch.setattr(IndexerCall, "choose", choose)


def slide(patch: pytest.MonkeyPatch) -> None:
    def size(module: nn.Module) -> dict[str, Any]:
        return {name: x for name, x in _chunked(module).items() if name != "chunked"}

    patch.setattr(attention_interface, "_chunked", size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, exhaustive(torch.float64)], ids=str)
@pytest.mark.parametrize(
    ("name", "broken"), [("deepseek_v32", choose_by_nothing), ("llama4_text", slide)]
)
def test_fails_what_the_reference_has_wrong_too(
    name: str, broken: Break, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was seen in float64 and float32 alone: the model's own attention shows it."""
    run, model = replace(RUN, documents=1), make_model(name, dtype)
    assert verify(model, SCHEDULE, run).passed
    broken(monkeypatch)
    found = verify(model, SCHEDULE, run)
    assert not found.passed
    assert (found.own_loss_error or 0.0) > 1e-3


def assert_failed(found: Verification) -> None:
    assert found.passed is False
    worst = found.worst[0]
    assert worst.error > worst.limit
    assert found.max_relative_error >= worst.error


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", part_of([range(2), range(2, 16), range(16, 28), range(28, 40)], range(2)), ids=str
)
def test_forty_seeds_without_a_false_alarm(seeds: range) -> None:
    """One draw of rounding held against twice another fails three of 39 seeds of `SCHEDULE`."""
    schedule = Schedule(chunk=8, groups=1, kv_block=12)
    model = make_model("qwen2", torch.bfloat16, num_hidden_layers=1)
    for seed in seeds:
        found = verify(model, schedule, VerificationRun(tokens=24, documents=2, seed=seed))
        assert found.passed, found
        assert found.float64_error is not None
        assert found.rounding_ratio is not None
        assert 0 < found.float64_error <= EXACT
        assert 0.8 < found.rounding_ratio < 1.25


SOUND = Structure((torch.zeros(()), {}), Judged([], 0.0, ""), 0.0)


def merge_too_much(patch: pytest.MonkeyPatch) -> None:
    """A later block weighs 2% more than it should."""

    def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, **_: bool) -> None:
        weight = 1.02 * torch.sigmoid(part_lse - lse).unsqueeze(-1)
        joined = out.lerp(part.to(out.dtype), weight)
        merge_(out, lse, part, part_lse)
        out.copy_(joined)

    patch.setattr("farspan.attention.chunk.merge_", merge)


def lose_a_key(patch: pytest.MonkeyPatch) -> None:
    """The last of every block of earlier keys."""
    own = attention._visits

    def shorter(block: Block) -> Block:
        lost = not block.causal and block.window is None and block.k_stop - block.k_start > 1
        return replace(block, k_stop=block.k_stop - lost)

    def visits(call: Any) -> Iterator[Any]:
        return (replace(x, blocks=tuple(map(shorter, x.blocks))) for x in own(call))

    patch.setattr("farspan.attention.chunk._visits", visits)


def lose_of_earlier_keys(patch: pytest.MonkeyPatch) -> None:
    """A tenth of dK, dV of earlier keys."""
    own = KVPrefix.add_gradient

    def add(self: KVPrefix, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        own(self, start, stop, rows, 0.9 * dk, 0.9 * dv)

    patch.setattr(KVPrefix, "add_gradient", add)


def count_a_chunk_more(patch: pytest.MonkeyPatch) -> None:
    """By a quarter, in the gradient of one weight."""
    own = GradientAccumulator._add
    seen: list[nn.Parameter] = []

    def add(self: GradientAccumulator, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter.shape == (48, 32):
            seen.append(parameter)
            # The first of them, in the second of its chunks.
            if parameter is seen[0] and sum(p is parameter for p in seen) % 4 == 2:
                gradient = gradient * 1.25
        own(self, parameter, gradient)

    patch.setattr(GradientAccumulator, "_add", add)


def window_too_wide(patch: pytest.MonkeyPatch) -> None:
    """By a token."""

    def plan(start: int, stop: int, size: int, window: int, *rest: Any) -> tuple[Block, ...]:
        return plan_blocks(start, stop, size, window + 1, *rest)

    patch.setattr("farspan.program.attention_blocks.plan_blocks", plan)


FAULTS = (
    merge_too_much,
    lose_a_key,
    lose_of_earlier_keys,
    count_a_chunk_more,
    window_too_wide,
)


@pytest.mark.parametrize("seed", part_of([0, 1, 2], 0))
@pytest.mark.parametrize("fault", FAULTS)
def test_fails_what_only_low_precision_has_wrong(
    fault: Break, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel of bfloat16 may have: the same schedule in float64 is taken to be right."""
    monkeypatch.setattr("farspan.engine.verify._structure", lambda *_: SOUND)
    fault(monkeypatch)
    model = shared_model("mistral" if fault is window_too_wide else "qwen2", torch.bfloat16)
    found = verify(model, SCHEDULE, replace(RUN, seed=seed))
    assert not found.passed, found


@pytest.mark.parametrize("dtype", part_of([torch.float32, torch.bfloat16], torch.bfloat16))
def test_fails_what_no_rounding_could_hide(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part in a hundred million, which the same schedule in float64 shows."""
    own = KVPrefix.add_gradient

    def add(self: KVPrefix, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        own(self, start, stop, rows, (1 + 1e-8) * dk, dv)

    monkeypatch.setattr(KVPrefix, "add_gradient", add)
    found = verify(shared_model("qwen2", dtype), SCHEDULE, RUN)
    assert not found.passed
    assert found.float64_error is not None
    assert found.float64_error > EXACT
    assert all(error.error <= error.limit for error in found.worst)


def runs(*errors: float) -> list[Errors]:
    return [{f"layers.{i}.q": error for i in range(8)} for error in errors]


class TestBesidePlain:
    """What errors are held against."""

    def test_two_roundings_where_nothing_is_left_to_chance(self) -> None:
        found = beside_plain(runs(0.1, 0.1), runs(0.14, 0.14), [0.0] * 2, chooses=False)
        assert [error.name for error in found.errors] == [*runs(0)[0], "layers.*.q"]
        for error in found.errors:
            assert error.limit == pytest.approx(0.1 * 2**0.5)
            assert error.error == pytest.approx(0.14)
        assert found.ratio == pytest.approx(1.4)
        assert found.passed(0.0)
        assert not found.passed(0.21)
        assert not beside_plain(
            runs(0.1, 0.1), runs(0.142, 0.142), [0.0] * 2, chooses=False
        ).passed(0.0)

    def test_a_tail_in_one_run_is_passed_a_fault_in_both_is_not(self) -> None:
        steps = runs(0.1, 0.1)
        steps[0]["layers.0.q"] = 0.6
        assert beside_plain(runs(0.1, 0.1), steps, [0.0] * 2, chooses=False).passed(0.0)
        steps[1]["layers.0.q"] = 0.6
        found = beside_plain(runs(0.1, 0.1), steps, [0.0] * 2, chooses=False)
        assert not found.passed(0.0)
        over = [error.name for error in found.errors if error.error > error.limit]
        assert over == ["layers.0.q"]

    def test_not_a_number_in_one_run(self) -> None:
        steps = runs(0.1, 0.1)
        steps[0]["layers.0.q"] = float("inf")
        assert not beside_plain(runs(0.1, 0.1), steps, [0.0] * 2, chooses=False).passed(0.0)

    def test_a_kind_that_is_off_in_most_layers(self) -> None:
        """By less than what each layer alone may be, as its errors differ from run to run."""
        plain = [
            {f"layers.{i}.q": 0.1 * 2.0 ** ((i + run) % 3) for i in range(9)}
            | {f"layers.{i}.o": 0.1 for i in range(9)}
            for run in range(2)
        ]
        steps = [
            {n: e * (1.8 if n.endswith("q") else 0.9) for n, e in run.items()} for run in plain
        ]
        found = beside_plain(plain, steps, [0.0] * 2, chooses=False)
        assert found.ratio is not None
        assert found.ratio < TWO_ROUNDINGS
        over = [error.name for error in found.errors if error.error > error.limit]
        assert over == ["layers.*.q"]

    def test_of_the_worst_where_choices_tip(self) -> None:
        plain = runs(0.1, 0.1)
        plain[1]["layers.0.q"] = 0.5
        found = beside_plain(plain, runs(0.9, 0.9), [0.0] * 2, chooses=True)
        assert {error.limit for error in found.errors} == {1.0 + FLOOR}
        assert found.passed(0.0)
        assert not beside_plain(plain, runs(1.1, 1.1), [0.0] * 2, chooses=True).passed(0.0)
        not_a_number = runs(0.1, float("inf"))
        assert not beside_plain(plain, not_a_number, [0.0] * 2, chooses=True).passed(0.0)

    def test_errors_of_nothing(self) -> None:
        found = beside_plain(runs(0.0, 0.0), runs(0.0, 0.0), [0.0] * 2, chooses=False)
        assert found.ratio == 1.0
        assert found.passed(0.0)


def plant(monkeypatch: pytest.MonkeyPatch, fault: float, *parameters: nn.Parameter) -> None:
    """Their gradients are too large by so large a part from here on."""
    own, chosen = GradientAccumulator._add, set(map(id, parameters))

    def add(self: GradientAccumulator, parameter: nn.Parameter, gradient: Tensor) -> None:
        own(self, parameter, gradient * (1 + fault * (id(parameter) in chosen)))

    monkeypatch.setattr(GradientAccumulator, "_add", add)


class TestIllConditioned:
    """In float64, beyond `EXACT`: as far as rounding moves the reference."""

    def test_no_more_than_the_limit_where_nothing_is_beyond_it(self) -> None:
        found = exactly({"a": 0.9 * EXACT, "b": 0.0}, [])
        assert {error.limit for error in found.errors} == {EXACT}
        assert found.passed(0.0)
        assert not exactly({"a": 1.1 * EXACT}, []).passed(0.0)

    def test_as_far_as_the_reference_moves(self) -> None:
        moved = [{"a": 3e-12, "b": 1e-16}, {"a": 1e-12, "b": 2e-16}]
        assert exactly({"a": 1.19e-11, "b": 0.9 * EXACT}, moved).passed(0.0)
        assert not exactly({"a": 1.21e-11, "b": 0.0}, moved).passed(0.0)
        assert not exactly({"a": 0.0, "b": 1.1 * EXACT}, moved).passed(0.0)
        assert not exactly({"a": 0.0, "b": 0.0}, moved).passed(1.1 * EXACT)
        assert not exactly({"a": float("inf"), "b": 0.0}, moved).passed(0.0)

    def test_nothing_passes_where_the_reference_moves_too_far(self) -> None:
        judged = exactly({"a": 1.1e-10}, [{"a": 3e-9}] * 8)
        assert not judged.passed(0.0)
        assert "changed by 3.0e-09: this model is too ill-conditioned" in judged.rule
        assert exactly({"a": 0.9e-10}, [{"a": 3e-9}] * 8).passed(0.0)

    @pytest.mark.parametrize("seed", part_of([1, 2], 1))
    def test_a_recurrence_that_cancels(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights ten times as large as fresh ones: the exact step is off by 1.5e-12, and the
        reference moves by 5e-12. A fault of a part in a billion in one gradient is seen."""
        torch.manual_seed(seed)
        model = make_model("qwen3_next").double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        found = verify(model, Schedule(chunk=32), VerificationRun(tokens=89, seed=seed))
        assert found.passed, found
        assert found.max_relative_error > EXACT
        assert "change of the reference" in found.rule
        plant(monkeypatch, 1e-9, model.model.layers[2].linear_attn.in_proj_qkvz.weight)
        found = verify(model, Schedule(chunk=32), VerificationRun(tokens=89, seed=seed))
        assert not found.passed, found

    @pytest.mark.parametrize("fault", [0.0, 1e-3])
    def test_where_rounding_tips_the_choice_of_experts(
        self, fault: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Three rows of a router that are equal, as in a model made of a dense one."""
        model = make_model("qwen3_moe").double()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    p[1:3] = p[0]
        plant(monkeypatch, fault, *model.parameters())
        found = verify(model, Schedule(chunk=32), VerificationRun(tokens=89))
        assert found.passed is not bool(fault), found

    # Recurrences are above, by what moves and by the limit together.
    @pytest.mark.parametrize("family", part_of(["qwen2", "qwen3_next"], "qwen2"))
    @pytest.mark.parametrize("fault", [False, True])
    def test_by_what_moves_alone(
        self, family: str, fault: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where next to nothing counts as exact, an exact step still passes, and one whose weights'
        gradients are off by a part in a hundred billion does not."""
        monkeypatch.setattr("farspan.engine.verify.EXACT", 5e-15)
        model = make_model(family).double()
        plant(monkeypatch, 1e-11 * fault, *(p for p in model.parameters() if p.ndim == 2))
        found = verify(model, Schedule(chunk=32), VerificationRun(tokens=89))
        assert found.passed is not fault, found

    def test_rounding_leaves_zeros_and_copies_alone(self) -> None:
        x = torch.linspace(0, 1, 101, dtype=torch.float64)
        with RoundedApart(0):
            assert torch.equal(x.clone(), x)
            moved, product = x + x, x * 0
        assert not torch.equal(moved, x + x)
        assert float(((moved - 2 * x).abs() / (2 * x).clamp(min=1e-9)).max()) <= 2.3e-16
        assert torch.equal(product, torch.zeros_like(x))
