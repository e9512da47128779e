"""`verify` of sparse steps: exact for what they compute, and how far that is from dense."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farspan
from farspan.engine.step import Step
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.sparse.engine import BufferPages, Means
from farspan.sparse.pages import Candidates, Fraction, RandomPages, TopK, take_most
from farspan.sparse.reference import SparseReference, distance, linear_modules
from farspan.spec import Schedule, Sparse
from tests.engine.checks import Data, run_oracle
from tests.grids import part_of
from tests.numerics import EXACT, relative_error
from tests.sparse.test_engine import run_sparse_oracle
from tests.zoo import VOCAB, make_model, shared_model

pytestmark = pytest.mark.slow

SPARSE = Sparse(page=4, budget=8, recent=4, sinks=4)
SCHEDULE = Schedule(chunk=16, groups=2, attention_save_fraction=0.4, kv_block=24, sparse=SPARSE)
RUN = VerificationRun(batch=2, tokens=61, documents=2)


@cache
def verified() -> Verification:
    return verify(shared_model("qwen2"), SCHEDULE, RUN)


def drawn(run: VerificationRun) -> Data:
    return Data(*run.draw(VOCAB, torch.device("cpu")))


FAMILIES = ["qwen2", "gpt2", "gemma2", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("name", part_of(FAMILIES, "gpt_oss", "deepseek_v3"))  # Qwen 2 is below
def test_exact_for_its_own_function_in_float64(name: str) -> None:
    found = farspan.verify(shared_model(name), SCHEDULE, RUN)
    assert found.passed, found
    assert found.sparse is not None
    assert found.sparse.hides
    assert found.sparse.gradient_error > 1e-6  # it is not dense attention
    assert "each run chooses its own pages" in found.rule
    assert found.max_relative_error <= EXACT
    assert found.loss_error <= EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "dtype"),
    part_of(
        product(["qwen2", "gpt_oss"], [torch.float32, torch.bfloat16]), ("gpt_oss", torch.bfloat16)
    ),
)
def test_in_lower_precision_for_the_pages_that_float64_chooses(
    name: str, dtype: torch.dtype
) -> None:
    found = verify(shared_model(name, dtype), SCHEDULE, RUN)
    assert found.passed, found
    assert found.max_relative_error > EXACT
    assert "a choice that rounding flips does not count as an error" in found.rule


def test_a_choice_that_rounding_tips_is_no_failure() -> None:
    """Float64 and bfloat16 choose apart, here of votes that are nearly even: a step that chooses
    for itself is further from the reference than any limit."""
    model = make_model("qwen2", torch.bfloat16)
    found = verify(model, SCHEDULE, RUN)
    assert found.passed, found
    data = drawn(RUN)
    step, exact = Step(model, SCHEDULE), make_model("qwen2").double()
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    model.zero_grad(set_to_none=True)
    step(*data)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = run_sparse_oracle(exact, SCHEDULE, data).gradients
    off = max(relative_error(own[name], expected[name]) for name in own)
    assert off > 2 * found.max_relative_error
    assert off > max(error.limit for error in found.worst)


@pytest.mark.parametrize(
    ("selector", "dtype"),
    part_of(
        product([RandomPages(2, seed=1), Fraction(0.95), None], [torch.float64, torch.float32]),
        (Fraction(0.95), torch.float64),
    ),
)
def test_selectors(dtype: torch.dtype, selector: RandomPages | Fraction | None) -> None:
    schedule = replace(SCHEDULE, chunk=8, groups=(1, 3), layer_checkpoint=True)
    found = verify(shared_model("qwen2", dtype), schedule, RUN, selector=selector)
    assert found.passed, found
    assert found.sparse is not None
    assert found.sparse.selector == repr(selector or TopK(2))


def test_what_is_told_is_the_distance_from_dense_attention() -> None:
    model, data = shared_model("qwen2"), drawn(RUN)
    found = verified().sparse
    assert found is not None
    sparse, dense = run_sparse_oracle(model, SCHEDULE, data), run_oracle(model, data)
    expected = relative_error(sparse.loss, dense.loss)
    # transformers' own attention, which the oracle runs, rounds its softmax to float32.
    rounding = torch.finfo(torch.float32).eps / 4
    assert found.loss_error == pytest.approx(expected, rel=1e-6, abs=rounding)
    assert list(found.dense_error) == ["0", "1", "2", "3"]
    for index, errors in found.dense_error.items():
        assert list(errors) == [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ]
        for module, error in errors.items():
            part = "self_attn" if module[0] in "qkvo" else "mlp"
            name = f"model.layers.{index}.{part}.{module}.weight"
            expected = relative_error(sparse.gradients[name], dense.gradients[name])
            assert error == pytest.approx(expected, rel=1e-6)
            assert error > 1e-6
    ours, theirs = (
        torch.cat([g.flatten() for g in outcome.gradients.values()]) for outcome in (sparse, dense)
    )
    assert found.gradient_error == pytest.approx(relative_error(ours, theirs), rel=1e-6)


class TestModules:
    """What the linear modules of a layer are called."""

    def test_experts_together(self) -> None:
        layer = nn.Module()
        layer.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        layer.gate = nn.Linear(2, 3)
        layer.gate.weight.requires_grad_(False)
        found = linear_modules(layer)
        assert {name: len(weights) for name, weights in found.items()} == {"experts": 3}

    def test_the_distance_is_of_one_vector(self) -> None:
        found = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0, 1.0])}
        expected = {"a": torch.tensor([0.0]), "b": torch.tensor([0.0, 1.0])}
        assert distance(found, expected, ["a", "b"]) == pytest.approx(5.0)
        assert distance(found, expected, ["a"]) == pytest.approx(3.0)
        nan = {"a": torch.tensor([float("nan")])}
        assert distance(nan, expected, ["a"]) == float("inf")


Break = Callable[[pytest.MonkeyPatch], None]


def lose_what_comes_back(patch: pytest.MonkeyPatch) -> None:
    """dK, dV of chosen pages."""
    patch.setattr(BufferPages, "add", lambda *_: None)


def choose_again(patch: pytest.MonkeyPatch) -> None:
    """The backward sees other pages than the forward."""
    own = BufferPages.begin

    def begin(self: BufferPages, choice: Tensor) -> None:
        backward = self.prefix.gradients_in is not None
        own(self, choice.roll(1, dims=2) if backward else choice)

    patch.setattr(BufferPages, "begin", begin)


def least_votes(patch: pytest.MonkeyPatch) -> None:
    def choose(self: TopK, votes: Tensor, candidates: Candidates) -> Tensor:
        counts = torch.tensor(min(self.pages, votes.shape[3]))
        return take_most(votes.max() - votes, candidates, counts, int(counts))

    patch.setattr(SparseReference, "choice", with_selector(choose))


def with_selector(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The oracle's own choice, by another selector than the step's."""
    own = SparseReference.choice

    def choice(self: SparseReference, *rest: Any) -> Tensor:
        other = replace(self, select=lambda votes, pages: choose(self.select, votes, pages))
        return own(other, *rest)

    return choice


def stale_means(patch: pytest.MonkeyPatch) -> None:
    """Votes for pages that are somewhere else."""
    own = Means.read
    patch.setattr(Means, "read", lambda self, pages: own(self, pages).roll(1, dims=2))


FEW = VerificationRun(tokens=45, documents=2)


BREAKS = lose_what_comes_back, choose_again, least_votes, stale_means


@pytest.mark.parametrize("broken", part_of(BREAKS, *BREAKS[:2]))
def test_fails_what_is_broken(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    found = verify(shared_model("qwen2"), SCHEDULE, FEW)
    assert not found.passed
    assert found.worst[0].error > found.worst[0].limit


@pytest.mark.parametrize(
    ("broken", "dtype"),
    part_of(
        product([lose_what_comes_back, choose_again], [torch.float32, torch.bfloat16]),
        (choose_again, torch.bfloat16),
    ),
)
def test_fails_what_is_broken_in_lower_precision(
    broken: Break, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert not verify(shared_model("qwen2", dtype), SCHEDULE, FEW).passed


def test_nothing_is_hidden_where_every_layer_has_a_window() -> None:
    """Windows are exact as they are."""
    found = verify(shared_model("mistral"), SCHEDULE, RUN)
    assert found.passed
    assert found.sparse is not None
    assert not found.sparse.hides
    assert found.sparse.gradient_error <= EXACT


def test_a_share_of_pages_hides_whatever_the_budget() -> None:
    wide = replace(SCHEDULE, sparse=replace(SPARSE, budget=64))
    found = verify(shared_model("qwen2"), wide, VerificationRun(tokens=61), selector=Fraction(0.5))
    assert found.sparse is not None
    assert found.sparse.hides
    assert found.sparse.gradient_error > EXACT
