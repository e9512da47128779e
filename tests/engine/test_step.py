"""The public call behaves like `loss.backward()` of the same model."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from farspan.engine.loss import trained_token_count
from farspan.engine.reference import reference_loss
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.spec import Schedule, Tier
from tests.engine.checks import (
    Data,
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    errors,
    gradients,
    run_oracle,
    run_step,
)
from tests.numerics import EXACT, assert_exact, relative_error
from tests.zoo import make_model, shared_model

SCHEDULE = Schedule(chunk=16, groups=2, attention_save_fraction=0.5, activation_save_fraction=0.3)
DATA = draw(53, batch=2, documents=4)


@pytest.fixture
def model() -> PreTrainedModel:
    """A model that a test may change."""
    return make_model("qwen2")


class Casts(TorchDispatchMode):
    """Counts casts to fp32 of what is shaped as a weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count = 0
        self.shapes = {p.shape for p in model.parameters() if p.ndim == 2}

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.float32:
            self.count += out.shape in self.shapes
        return out


def test_what_is_edited_between_steps_is_seen(model: PreTrainedModel) -> None:
    """A step keeps views, shells and lists of parameters; the next one must not."""
    step, layer = Step(model, SCHEDULE), model.model.layers[1]
    gate = layer.mlp.gate_proj.weight
    edits: list[Callable[[], object]] = [
        lambda: None,
        lambda: gate.requires_grad_(False),
        lambda: gate.requires_grad_(True),
        lambda: setattr(model.model.norm, "variance_epsilon", 0.1),
        lambda: setattr(model, "lm_head", nn.Linear(32, 64, bias=False)),
        lambda: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    ]
    for edit in edits:
        edit()
        model.double()
        assert_close(run_step(model, step, DATA), run_oracle(model, DATA))


@pytest.mark.parametrize("weights", Tier)
def test_another_dtype_is_taken_up(model: PreTrainedModel, weights: Tier) -> None:
    """Of the model between two steps, as a step made then has it."""
    nn.Module.to(other := copy.deepcopy(model), torch.bfloat16)
    schedule = replace(SCHEDULE, weights=weights)
    step = Step(model, schedule)
    run_step(model, step, DATA)
    model.zero_grad()
    nn.Module.to(model, torch.bfloat16)
    assert_same_bits(run_step(model, step, DATA), run_step(other, Step(other, schedule), DATA))


class TestLoss:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_wide(self, dtype: torch.dtype) -> None:
        """A mean over a million tokens needs more digits than a bf16 parameter."""
        model = shared_model("qwen2", dtype)
        step = Step(model, SCHEDULE)
        assert step(*DATA).dtype is step.evaluate(*DATA).dtype is torch.float32

    @pytest.mark.parametrize("tokens", [1, 20])
    def test_without_trained_tokens_is_zero(self, tokens: int) -> None:
        data = draw(tokens, batch=2)
        ignored = Data(data.input_ids, torch.full_like(data.labels, -100))
        found = run_step(shared_model("qwen2"), SCHEDULE, ignored)
        assert found.loss == 0
        assert not any(bool(g.any()) for g in found.gradients.values())

    def test_is_divided_by_the_count_given(self) -> None:
        """Micro-batches that share an optimizer step share its count."""
        model = shared_model("qwen2")
        expected = run_oracle(model, DATA)
        step, parts = (
            Step(model, SCHEDULE),
            [Data(*(x[row : row + 1] for x in DATA)) for row in (0, 1)],
        )
        count = trained_token_count(DATA.labels, DATA.document_ids)
        model.zero_grad(set_to_none=True)
        losses = [step(*part, trained_tokens=count) for part in parts]
        assert_close(Outcome(losses[0] + losses[1], gradients(model)), expected)
        wholes = [step.evaluate(*part, trained_tokens=count) for part in parts]
        assert_exact(wholes[0] + wholes[1], expected.loss)


class TestGradients:
    def test_are_added_to_what_others_left(self, model: PreTrainedModel) -> None:
        expected = run_oracle(model, DATA)
        model.zero_grad(set_to_none=True)
        reference_loss(model, *DATA).backward()
        before = {name: p.grad for name, p in model.named_parameters()}
        Step(model, SCHEDULE)(*DATA)
        assert all(p.grad is before[name] for name, p in model.named_parameters())
        twice = {name: 2 * g for name, g in expected.gradients.items()}
        assert max(errors(gradients(model), twice).values()) <= EXACT

    @pytest.mark.parametrize("dtype", [torch.float32, None])
    def test_may_be_wider_than_parameters(self, dtype: torch.dtype | None) -> None:
        """`grad_dtype` of torch: fp32 gradients of bf16 parameters, added up without rounding."""
        model = make_model("qwen2", torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = dtype
        step = Step(model, SCHEDULE)
        once = run_step(model, step, DATA).gradients
        assert {g.dtype for g in once.values()} == {torch.float32}
        step(*DATA)
        assert all(torch.equal(g, 2 * once[name]) for name, g in gradients(model).items())
        assert any(not torch.equal(g, g.bfloat16().float()) for g in once.values())

    def test_are_never_cast_before_they_are_added(self) -> None:
        """No gradient of a weight exists in fp32 beside the sums."""
        model = make_model("qwen2", torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        step = Step(model, SCHEDULE)
        with Casts(model) as casts:
            step(*DATA)
        assert casts.count == 0
        assert {p.grad_dtype for p in model.parameters()} == {torch.float32}
        with Casts(model) as casts:
            reference_loss(model, *DATA).backward()
        assert casts.count > 0

    def test_of_frozen_parameters_stay_none(self, model: PreTrainedModel) -> None:
        """Everything but the norms of two layers, as an adapter would."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" in name and (".1." in name or ".3." in name))
        expected = run_oracle(model, DATA)
        assert len(expected.gradients) == 4
        for schedule in (SCHEDULE, Schedule(chunk=16, groups=(1, 3), activation_save_fraction=1.0)):
            assert_close(run_step(model, schedule, DATA), expected)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)

    def test_of_cells_that_save_more_than_was_planned(self) -> None:
        """As a router's choice may have it, where experts run one by one."""
        model = make_model("qwen2")
        times = [0]
        wasteful = [Wasteful(layer.mlp, times) for layer in model.model.layers]
        for layer, mlp in zip(model.model.layers, wasteful, strict=True):
            layer.mlp = mlp
        expected = run_oracle(model, DATA)
        for kept in Tier:
            schedule = Schedule(chunk=16, groups=2, activation_save_fraction=0.5, activations=kept)
            step = Step(model, schedule, poison=True)
            run_step(model, step, DATA)
            times[0] = 3
            with pytest.warns(UserWarning, match="saved more than planned"):
                assert_close(run_step(model, step, DATA), expected)
            times[0] = 0

    @pytest.mark.parametrize("part", ["embed_tokens", "lm_head", "model.norm", "layers.0.mlp"])
    def test_of_one_part_alone(self, part: str) -> None:
        model = make_model("qwen2", tie_word_embeddings=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part in name)
        assert_close(run_step(model, SCHEDULE, DATA), run_oracle(model, DATA))


class Wasteful(nn.Module):
    """A module before which as many tensors are saved as it is told, for nothing: by what no step
    looks at."""

    def __init__(self, inner: nn.Module, times: list[int]) -> None:
        super().__init__()
        self.inner, self.times = inner, lambda: times[0]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times()):
            x = x * torch.ones_like(x)
        found: Tensor = self.inner(x)
        return found


class TestEvaluate:
    @pytest.mark.parametrize("groups", [1, 2, 4])
    def test_gives_the_loss_and_leaves_gradients_alone(self, groups: int) -> None:
        model = shared_model("qwen2")
        step = Step(model, Schedule(chunk=16, groups=groups, kv_kept=True), poison=True)
        before = run_step(model, step, DATA)
        kept = {name: p.grad for name, p in model.named_parameters()}
        assert_exact(step.evaluate(*DATA), before.loss)
        assert_same_bits(Outcome(before.loss, gradients(model)), before)
        assert all(p.grad is kept[name] for name, p in model.named_parameters())
        model.zero_grad(set_to_none=True)
        step.evaluate(*DATA)
        assert all(p.grad is None for p in model.parameters())


class TestProgress:
    @pytest.mark.parametrize("evaluation", [False, True])
    def test_only_rises_and_ends_complete(self, evaluation: bool) -> None:
        seen: list[Progress] = []
        step = Step(shared_model("qwen2"), SCHEDULE, progress=seen.append)
        (step.evaluate if evaluation else step)(*DATA)
        assert [p.cells_done for p in seen] == list(range(1, seen[0].cells + 1))
        assert len({(p.cells, p.work) for p in seen}) == 1
        works = [0.0, *(p.work_done for p in seen)]
        assert all(a <= b for a, b in pairwise(works))
        assert relative_error(torch.tensor(works[-1]), torch.tensor(seen[0].work)) <= 1e-9

    def test_may_abandon_the_step(self, model: PreTrainedModel) -> None:
        """At every one of its cells; the next step is none the worse for it."""
        expected = run_step(model, SCHEDULE, DATA)
        own = model.config._attn_implementation
        cells = Alarm()
        step = Step(model, SCHEDULE, progress=cells, poison=True)
        step(*DATA)
        for cell in range(1, cells.seen + 1, 7):
            cells.seen, cells.limit = 0, cell
            with pytest.raises(KeyboardInterrupt):
                step(*DATA)
            assert model.config._attn_implementation == own
        cells.limit = 0
        assert_same_bits(run_step(model, step, DATA), expected)


class Alarm:
    """Raises at the cell numbered `limit`."""

    def __init__(self) -> None:
        self.seen = self.limit = 0

    def __call__(self, _: Progress) -> None:
        self.seen += 1
        if self.seen == self.limit:
            raise KeyboardInterrupt


class TestTheModelStaysItself:
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_for_a_forward_and_for_generation(
        self, model: PreTrainedModel, implementation: str
    ) -> None:
        model.set_attn_implementation(implementation)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        names = [name for name, _ in model.named_modules()]
        uses = (self.logits(model), self.generated(model))
        step = Step(model, SCHEDULE)
        for run in (step, step.evaluate):
            run(*DATA)
            assert model.config._attn_implementation == implementation
            assert torch.equal(self.logits(model), uses[0])
            assert torch.equal(self.generated(model), uses[1])
        assert model.training
        assert [name for name, _ in model.named_modules()] == names
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())

    @torch.no_grad()
    def logits(self, model: PreTrainedModel) -> Tensor:
        return model(input_ids=DATA.input_ids).logits

    def generated(self, model: PreTrainedModel) -> Tensor:
        ids = DATA.input_ids[:, :9]
        mask = torch.ones_like(ids)
        generate: Any = model.generate
        return generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5)

    def test_after_an_exception(self, model: PreTrainedModel) -> None:
        own = model.config._attn_implementation
        step, before = Step(model, SCHEDULE), self.logits(model)
        hook = model.model.layers[2].mlp.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            step(*DATA)
        hook.remove()
        assert model.config._attn_implementation == own
        assert torch.equal(self.logits(model), before)
        assert_close(run_step(model, step, DATA), run_oracle(model, DATA))


def fail(_: nn.Module, given: tuple[Tensor], __: object) -> None:
    """In a step's chunk alone: a step runs other numbers of tokens as it prepares itself."""
    if given[0].shape[1] == SCHEDULE.chunk:
        raise ArithmeticError


SCHEDULES = {
    "kept": SCHEDULE,
    "kept on device": Schedule(
        chunk=16, groups=2, activation_save_fraction=1.0, activations=Tier.DEVICE, kv_kept=True
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_nothing_outlives_a_step(schedule: Schedule) -> None:
    """Without a run of the garbage collector: cycles through graphs would hold a whole step."""
    model = shared_model("qwen2")
    step = Step(model, schedule)
    run_step(model, step, DATA)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        for _ in range(2):
            run_step(model, step, DATA)
        assert live_tensors() == before
    finally:
        gc.enable()


def live_tensors() -> int:
    """Tensors, and nodes of graphs by way of the tensors they hold."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
