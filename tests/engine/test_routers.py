"""Losses of a mixture of experts' routers: those of transformers, in chunks, to 1e-12."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from farspan.distributed.context import ParallelContext
from farspan.engine.loss import trained_token_count
from farspan.engine.step import Step
from farspan.hf.probe import Float64Mode
from farspan.hf.routers import routers_of
from farspan.program.layout import Layout
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import (
    Data,
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    gradients,
    run_oracle,
    run_step,
)
from tests.grids import exhaustive, part_of
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.zoo import make_model

COEFFICIENT = 0.3  # a wrong gradient would show
# Routers that return tuples in every order, in attention too, beside recurrent layers.
FIRST = ["mixtral", "jetmoe", "granitemoehybrid"]
OTHERS = [
    *("qwen3_moe", "qwen2_moe", "granitemoe", "granitemoeshared", "granitemoe_swa", "olmoe"),
    *("ernie4_5_moe", "dbrx", "qwen3_next", "gpt_oss", "qwen3_5_moe_text", "flex_olmo"),
    *("minimax_m2", "laguna", "mellum"),
]
SCHEDULE = Schedule(chunk=7, groups=2)
DATA = draw(23, batch=2)


def routed_model(name: str = "mixtral", coefficient: float = COEFFICIENT, **fields: Any) -> Any:
    model: Any = make_model(name, output_router_logits=True, **fields)
    model.config.get_text_config().output_router_logits = True
    name = "aux_loss_coef" if name == "jetmoe" else "router_aux_loss_coef"
    setattr(model, name, coefficient)
    return model


def by_transformers(model: Any, data: Data, mask: Tensor | None = None) -> Outcome:
    """Its own forward, loss and backward."""
    model.zero_grad(set_to_none=True)
    model.set_experts_implementation("eager")
    out = model(input_ids=data.input_ids, labels=data.labels, attention_mask=mask)
    assert float(out.aux_loss.detach()) > 1
    out.loss.backward()
    return Outcome(out.loss.detach(), gradients(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIRST, *map(exhaustive, OTHERS)])
def test_families_as_transformers_trains_them(name: str) -> None:
    with Float64Mode():
        model = routed_model(name)
        expected = by_transformers(model, DATA)
        step = Step(model, SCHEDULE, poison=True)
        found = run_step(model, step, DATA)
        assert_close(found, expected)
        assert relative_error(step.evaluate(*DATA), expected.loss) <= EXACT
        assert_close(found, run_oracle(model, DATA))


HARD = {
    "kept": Schedule(chunk=6, groups=(1, 3), activation_save_fraction=0.6),
    "open": Schedule(chunk=6, groups=1, attention_open=True, attention_save_fraction=0.4),
    "tiles": Schedule(chunk=12, groups=2, mlp_chunk_size=5),
    "host": Schedule(chunk=6, groups=2, weights=Tier.HOST),
    "layers": Schedule(chunk=6, groups=2, layer_checkpoint=True),
    "alone": Schedule(chunk=6, groups=4, activation_save_fraction=1.0, kv_kept=True),
    "one chunk": Schedule(chunk=64, groups=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(HARD, *list(HARD)[::3]))
def test_places_of_a_cell_change_no_gradient(name: str) -> None:
    with Float64Mode():
        model = routed_model()
        expected = run_oracle(model, DATA)
        step = Step(model, HARD[name], poison=True)
        for _ in range(2):
            assert_close(run_step(model, step, DATA), expected)


@pytest.mark.parametrize("schedule", [SCHEDULE, HARD["tiles"]])
def test_padding_does_not_count(schedule: Schedule) -> None:
    mask = torch.ones_like(DATA.input_ids)
    mask[1, 15:] = 0
    data = Data(DATA.input_ids, DATA.labels.masked_fill(mask == 0, -100))
    with Float64Mode():
        model = routed_model()
        expected = by_transformers(model, data, mask)
        step = Step(model, schedule, poison=True)
        model.zero_grad(set_to_none=True)
        loss = step(*data, attention_mask=mask)
        assert_close(Outcome(loss, gradients(model)), expected)
        without = step.evaluate(*data)
    assert relative_error(without, expected.loss) > EXACT
    with pytest.raises(UnsupportedError, match=r"attention_mask: expected the shape of input_ids"):
        step(*data, attention_mask=mask[:1])


def test_padding_of_recurrent_layers() -> None:
    """Documents cut a chunk into pieces, and a token alone runs as two."""
    documents = torch.tensor([[0] * 7 + [1] * 8 + [2] * 8, [0] * 15 + [1] * 8])
    mask = (documents < torch.tensor([[2], [1]])).long()
    data = Data(DATA.input_ids, DATA.labels.masked_fill(mask == 0, -100), documents)
    with Float64Mode():
        model = routed_model("granitemoehybrid")
        outcomes = []
        for chunk in (64, 7):  # whole documents, and a cut one token before a document ends
            step = Step(model, Schedule(chunk=chunk, groups=1), poison=True)
            model.zero_grad(set_to_none=True)
            loss = step(*data, attention_mask=mask)
            outcomes.append(Outcome(loss, gradients(model)))
    assert_close(outcomes[1], outcomes[0])


def test_z_loss() -> None:
    with Float64Mode():
        model = routed_model()
        step = Step(model, SCHEDULE, poison=True, router_z=0.2)
        found = run_step(model, step, DATA)
        seen: list[Tensor] = []
        routers = routers_of(model)
        assert routers is not None
        for router in routers.logits:
            router.register_forward_hook(lambda _, __, out: seen.append(out[0]))
        model.zero_grad(set_to_none=True)
        model.set_experts_implementation("eager")
        out = model(input_ids=DATA.input_ids, labels=DATA.labels)
        loss = out.loss + 0.2 * torch.cat(seen).logsumexp(-1).square().mean()
        loss.backward()
    assert_close(found, Outcome(loss.detach(), gradients(model)))


def test_a_loss_of_log_probabilities() -> None:
    """The caller weighs it, and the backward may come after another call."""
    with Float64Mode():
        model = routed_model()
        expected = by_transformers(model, Data(DATA.input_ids, DATA.input_ids))
        step = Step(model, SCHEDULE, poison=True)
        for other_call in (False, True):
            model.zero_grad(set_to_none=True)
            loss = -step.logprobs(DATA.input_ids)[:, :-1].mean() + step.router_loss
            if other_call:
                step.evaluate(*DATA)
            (2 * loss).backward()
            doubled = {name: g / 2 for name, g in gradients(model).items()}
            assert_close(Outcome(loss.detach(), doubled), expected)
        with torch.no_grad():
            step.logprobs(DATA.input_ids)
        assert not step.router_loss.requires_grad


def test_a_loss_that_is_left_out_has_no_gradient() -> None:
    model = routed_model()
    step = Step(model, SCHEDULE, poison=True)
    found = []
    for asks in (True, False):
        model.config.output_router_logits = asks
        model.zero_grad(set_to_none=True)
        step.logprobs(DATA.input_ids).sum().backward()
        found.append(Outcome(torch.zeros(()), gradients(model)))
    assert_same_bits(*found)


def test_edits_between_steps() -> None:
    model = routed_model()
    step = Step(model, SCHEDULE)
    with_loss, balance = step(*DATA), float(step.aux_loss)
    model.router_aux_loss_coef = 0.0
    without = step(*DATA)
    assert float(with_loss - without) == pytest.approx(COEFFICIENT * balance, rel=1e-6)
    model.config.output_router_logits = False
    assert float(step(*DATA)) == pytest.approx(float(without), rel=1e-6)


def test_a_z_loss_without_routers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="router_z: the model adds no router loss"):
        Step(make_model("mixtral"), SCHEDULE, router_z=0.1)(*DATA)


def test_a_loss_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(gate_logits: Any, num_experts: int) -> None: ...

    module = "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func"
    monkeypatch.setattr(module, other)
    with pytest.raises(UnsupportedError, match="has a router loss of its own form"):
        Step(routed_model(), SCHEDULE)


def replica_of(ranks: ParallelContext) -> tuple[Outcome, Tensor]:
    """A step of this rank's row, and its loss alone."""
    row = slice(ranks.rank.along["data"], ranks.rank.along["data"] + 1)
    data = Data(DATA.input_ids[row], DATA.labels[row])
    with Float64Mode():
        model = routed_model()
        step = Step(model, SCHEDULE, ranks=ranks)
        found = run_step(model, step, data)
        return found, step.evaluate(*data)


def on_replicas(layout: Layout) -> list[str]:
    found, evaluated = replica_of(ParallelContext(layout, torch.device("cpu")))
    with Float64Mode():
        model, count = routed_model(), trained_token_count(DATA.labels)
        parts = []
        for row in (slice(0, 1), slice(1, 2)):
            data = Data(DATA.input_ids[row], DATA.labels[row])
            step = Step(model, SCHEDULE)
            model.zero_grad(set_to_none=True)
            loss = step(*data, trained_tokens=count)
            parts.append(Outcome(loss, gradients(model)))
    first, second = parts
    both = {name: g + second.gradients[name] for name, g in first.gradients.items()}
    expected = Outcome(first.loss + second.loss, both)
    try:
        assert_close(found, expected)
        assert_close(Outcome(evaluated, {}), Outcome(expected.loss, {}))
    except AssertionError as error:
        return [str(error)]
    return []


@pytest.mark.slow
def test_replicas_add_losses_of_their_own() -> None:
    """As a Trainer's processes do, which count tokens for all and average over devices."""
    assert run_ranks(2, on_replicas, Layout(data=2)) == [[], []]


def test_functions_of_logits_that_would_be_rounded_or_misled_are_refused() -> None:
    step = Step(make_model("llama", torch.float32), SCHEDULE)
    with pytest.raises(
        UnsupportedError, match=r"torch\.float64 would be rounded to torch\.float32"
    ):
        step.from_logits(lambda logits, _: logits[..., 0].double(), DATA.input_ids, DATA.labels)
    with pytest.raises(UnsupportedError, match="labels: expected the shape of input_ids"):
        step.from_logits(lambda logits, _: logits[..., 0], DATA.input_ids, DATA.labels[:1])


def refused_by_stages() -> str:
    ranks = ParallelContext(Layout(pipeline=2), torch.device("cpu"))
    step = Step(make_model("llama"), Schedule(chunk=7), ranks=ranks)
    try:
        step.from_logits(lambda logits, _: logits.argmax(-1), DATA.input_ids, DATA.labels)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_logits_of_stages_are_refused() -> None:
    """Those before the last have no logits, and would wait for it."""
    words = "from_logits: in a pipeline only the last stage has logits; use a layout without"
    assert [said.startswith(words) for said in run_ranks(2, refused_by_stages)] == [True, True]


def test_arguments_that_would_be_lost_are_named() -> None:
    step = Step(make_model("llama"), SCHEDULE)
    mask = torch.ones_like(DATA.input_ids)
    step.evaluate(*DATA, attention_mask=mask)
    mask[0, -1] = 0
    with pytest.raises(UnsupportedError, match="attention_mask: only router losses read it"):
        step.evaluate(*DATA, attention_mask=mask)
    for value in (-1.0, float("nan"), "much"):
        with pytest.raises(UnsupportedError, match=r"^router_z: expected a number of at least 0"):
            Step(make_model("llama"), SCHEDULE, router_z=value)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="router_share: expected a number"):
        Step(routed_model(), SCHEDULE)(*DATA, router_share=-1.0)


def test_a_composite_model_is_asked_by_its_text_configuration() -> None:
    """As transformers reads it."""
    model = make_model("mixtral")
    text = type(model.config)(**model.config.to_dict() | {"output_router_logits": False})
    model.config.output_router_logits = True
    with patch.object(type(model.config), "get_text_config", lambda *_, **__: text):
        assert routers_of(model) is None
