"""Log-probabilities as a tensor: whatever is computed from them has autograd's gradients."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from farspan.attention.backends import reference
from farspan.distributed.context import ParallelContext
from farspan.engine.loss import IGNORED, shift_labels
from farspan.engine.parallelize import parallelize, sharded_parameters
from farspan.engine.reference import Attention, gradients_of, reference_logits
from farspan.engine.step import Step
from farspan.engine.tiers import CopyEngine
from farspan.hf.probe import Float64Mode
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import Data, Outcome, assert_same_bits, draw, errors, gradients
from tests.engine.lanes import Recorder, Replay
from tests.engine.test_exact import schedules, shapes
from tests.engine.test_overlap import MANNERS
from tests.engine.test_overlap import SCHEDULES as IN_ORDER
from tests.engine.test_ranks import SCHEDULES as OF_RANKS
from tests.engine.test_ranks import rows_of, stage_of_others, whole_gradients, without
from tests.grids import examples, exhaustive
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.zoo import VOCAB, make_model, shared_model

CPU = torch.device("cpu")
LAYERS, TOKENS = 4, 45
HEADS: dict[str, Any] = {"num_key_value_heads": 4}  # as many as four ranks take


def loss_of(logprobs: Tensor) -> Tensor:
    """Not linear in sums over a row, as DPO's loss, nor in each token, as GRPO's."""
    ratio = (logprobs - 0.97 * logprobs.detach()).exp()
    clipped = torch.minimum(ratio * 1.3, ratio.clamp(0.95, 1.02))
    return -functional.logsigmoid(0.01 * logprobs.sum(1)).mean() - clipped.mean()


def expected(
    model: Any, data: Data, temperature: float = 1.0, attend: Attention = reference
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by plain autograd over the whole sequence."""
    logits = reference_logits(model, data.input_ids, data.document_ids, attend=attend)
    normal = (logits / temperature).log_softmax(-1)
    targets = shift_labels(data.labels, data.document_ids)
    rows = targets if targets.ndim == 3 else targets[..., None]
    found = normal.gather(2, rows.clamp(min=0)).view(targets.shape)
    return found.where(targets != IGNORED, 0), -(normal.exp() * normal).sum(-1)


def assert_same(model: nn.Module, step: Step, data: Data) -> None:
    model.zero_grad()
    wanted, _ = expected(model, data)
    wanted_gradients = gradients_of(model, loss_of(wanted))
    found = step.logprobs(*data)
    assert found.shape == data.input_ids.shape
    assert relative_error(found, wanted) < EXACT
    loss_of(found).backward()
    wrong = errors(gradients(model), wanted_gradients)
    assert max(wrong.values()) < EXACT, wrong
    model.zero_grad()  # tests share it


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(schedules, shapes)
def test_any_schedule_is_exact(schedule: Schedule, data: Data) -> None:
    model = shared_model("qwen2")
    assert_same(model, Step(model, schedule, poison=True), data)


def test_recurrent_layers_and_experts() -> None:
    model = make_model("qwen3_next")
    schedule = Schedule(chunk=16, groups=(1, 3), kv=Tier.HOST, activation_save_fraction=0.5)
    with Float64Mode():
        step = Step(model, schedule, poison=True)
        assert_same(model, step, draw(TOKENS, batch=2, documents=3))


class RecorderOfHalves(Recorder):
    """Of a forward and its backward, which begins later."""

    def begin(self) -> None:
        (CopyEngine if self.told else Recorder).begin(self)


class ReplayOfHalves(Replay):
    halves = 0

    def begin(self) -> None:
        self.halves += 1
        (Replay if self.halves % 2 else CopyEngine).begin(self)

    def end(self) -> None:
        (CopyEngine if self.halves % 2 else Replay).end(self)


@pytest.mark.parametrize("name", ["kv home", "weights"])
def test_the_same_bits_in_any_order_of_copies(name: str) -> None:
    model, data = make_model("qwen2", torch.float32), draw(42, batch=2, documents=4)
    schedule = IN_ORDER.get(name, replace(IN_ORDER["streamed, alpha"], weights=Tier.HOST))

    def both(step: Step) -> Outcome:
        model.zero_grad()
        found = step.logprobs(*data)
        loss_of(found).backward()
        return Outcome(found.detach(), gradients(model))

    expected = both(Step(model, schedule, poison=True))
    step = Step(model, schedule, poison=True)
    step.copies = recorder = RecorderOfHalves()
    both(step)
    for manner, seed in MANNERS:
        step.copies = ReplayOfHalves(recorder.told, manner, seed)
        assert_same_bits(both(step), expected)


def test_several_ids_a_token_and_entropies_at_a_temperature() -> None:
    model, data = make_model("qwen2"), draw(TOKENS, batch=2, documents=3)
    several = torch.randint(0, VOCAB, (2, TOKENS, 3), generator=torch.Generator().manual_seed(1))
    several[0, 5:9, 1] = IGNORED
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    wanted, entropy = expected(model, replace(data, labels=several), temperature=0.7)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
    loss = (weights * wanted).sum() + (entropy * entropy).mean()
    wanted_gradients = gradients_of(model, loss)
    found, entropies = step.logprobs(
        data.input_ids, several, data.document_ids, temperature=0.7, entropy=True
    )
    assert relative_error(found, wanted) < EXACT
    assert relative_error(entropies, entropy) < EXACT
    ((weights * found).sum() + (entropies * entropies).mean()).backward()
    assert max(errors(gradients(model), wanted_gradients).values()) < EXACT


def test_a_weighted_sum_in_one_pass() -> None:
    model, data = make_model("qwen2"), draw(TOKENS, batch=2, documents=3)
    weights = torch.rand(data.labels.shape, generator=torch.Generator().manual_seed(2)) - 0.5
    loss = -(expected(model, data)[0] * weights).sum()
    wanted = gradients_of(model, loss)
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    found = step(*data, weights=weights)
    assert relative_error(found, loss) < EXACT
    assert max(errors(gradients(model), wanted).values()) < EXACT
    assert relative_error(step.evaluate(*data, weights=weights), loss) < EXACT


class Reward(nn.Module):
    """Two values of a token, by weights of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(width, 2, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.layer(hidden).tanh() * (targets[:, None] % 3)


def test_a_head_of_one_s_own() -> None:
    model, data = make_model("qwen2"), draw(TOKENS, batch=2, documents=3)
    reward = Reward(model.config.hidden_size)
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True, head=reward)
    wanted, both = rewards(model, reward, data), nn.ModuleList([model, reward])
    wanted_gradients = gradients_of(both, wanted.pow(2).sum())
    for _ in range(2):
        found = step.values(data.input_ids, None, data.document_ids)
        assert relative_error(found, wanted) < EXACT
        found.pow(2).sum().backward()
    for gradient in wanted_gradients.values():
        gradient *= 2  # both backwards add
    assert max(errors(gradients(both), wanted_gradients).values()) < EXACT


@pytest.mark.parametrize("streams", [False, True])
def test_a_model_that_classifies(streams: bool) -> None:
    """A reward model: its head for whole sequences is read at the last token."""
    config = make_model("qwen2").config
    config.num_labels, config.pad_token_id = 2, 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).double().train()
    data = draw(TOKENS, batch=2)
    ids = data.input_ids.clamp(min=1)
    wanted = model(input_ids=ids).logits
    wanted_gradients = gradients_of(model, wanted.pow(2).sum())
    schedule = strategy("fpdt", LAYERS, TOKENS)
    if streams:
        schedule = replace(schedule, weights=Tier.HOST)
    step = Step(model, schedule, poison=True, head=lambda hidden, _: model.score(hidden))
    found = step.values(ids)[:, -1]
    assert relative_error(found, wanted) < EXACT
    found.pow(2).sum().backward()
    assert max(errors(gradients(model), wanted_gradients).values()) < EXACT
    with pytest.raises(
        UnsupportedError, match=r"has a head for whole sequences, which gives no logits"
    ):
        step.logprobs(ids)


def test_memory_that_another_call_took(caplog: pytest.LogCaptureFixture) -> None:
    """The forward runs again, and says so; both backwards are right, in any order."""
    model, one, other = make_model("qwen2"), draw(TOKENS, documents=3), draw(61, seed=1)
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    loss = loss_of(expected(model, one)[0]) + loss_of(expected(model, other)[0])
    wanted = gradients_of(model, loss)
    first, second = step.logprobs(*one), step.logprobs(*other)
    with caplog.at_level("INFO", "farspan.engine.values"):
        (loss_of(first) + loss_of(second)).backward()
    assert "the forward runs again" in caplog.text
    assert max(errors(gradients(model), wanted).values()) < EXACT


@pytest.mark.parametrize("between", [False, True])
def test_steps_that_take_turns_in_one_memory(
    between: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A reference before the forward takes nothing of it; between the halves its memory."""
    model, data = make_model("qwen2"), draw(TOKENS)
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    other, narrow = make_model("llama"), strategy("oomb", LAYERS, TOKENS)
    reference = Step(other, narrow, poison=True, memory=step.memory)
    wanted = gradients_of(model, loss_of(expected(model, data)[0]))
    found = step.logprobs(*data) if between else None
    with torch.no_grad():
        known = reference.logprobs(*data)
    found = step.logprobs(*data) if found is None else found
    with caplog.at_level("INFO", "farspan.engine.values"):
        loss_of(found).backward()
    assert relative_error(known, expected(other, data)[0]) < EXACT
    assert ("the forward runs again" in caplog.text) is between
    assert max(errors(gradients(model), wanted).values()) < EXACT


def test_a_second_backward_adds() -> None:
    model, data = make_model("qwen2"), draw(TOKENS)
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    found = step.logprobs(*data)
    found.sum().backward(retain_graph=True)
    once = gradients(model)
    found.sum().backward()
    assert max(errors(gradients(model), {n: 2 * g for n, g in once.items()}).values()) < EXACT


BETWEEN = Schedule(chunk=16, groups=2, weights=Tier.HOST, kv=Tier.HOST)


def test_a_reference_of_the_same_step_between_the_halves() -> None:
    """Nothing is trained while it computes, and the forward then runs again as it was."""
    model, data = make_model("qwen2"), draw(TOKENS, batch=2, documents=3)
    trained = [p for name, p in model.named_parameters() if "q_proj" in name]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    wanted = gradients_of(model, loss_of(expected(model, data)[0]))
    step = Step(model, BETWEEN, poison=True)
    found = step.logprobs(*data)
    for parameter in trained:
        parameter.requires_grad_(False)
    assert not step.logprobs(*data).requires_grad
    for parameter in trained:
        parameter.requires_grad_(True)
    loss_of(found).backward()
    assert max(errors(gradients(model), wanted).values()) < EXACT


@pytest.mark.parametrize("between", ["nothing", "a call", "a release of memory"])
def test_inputs_that_are_overwritten(between: str) -> None:
    model, data = make_model("qwen2"), draw(TOKENS, documents=3)
    wanted = gradients_of(model, loss_of(expected(model, data)[0]))
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    given = Data(*(x.clone() for x in data))
    found = step.logprobs(*given)
    for tensor in given:
        tensor.zero_()
    if between == "a call":
        step.evaluate(*draw(61))
    elif between == "a release of memory":
        step.release()
    loss_of(found).backward()
    assert max(errors(gradients(model), wanted).values()) < EXACT


def test_a_frozen_model_under_a_head_that_is_trained() -> None:
    model, data = make_model("qwen2"), draw(TOKENS, batch=2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    reward = Reward(model.config.hidden_size)
    wanted = gradients_of(reward, rewards(model, reward, data).pow(2).sum())
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True, head=reward)
    step.values(data.input_ids).pow(2).sum().backward()
    assert max(errors(gradients(reward), wanted).values()) < EXACT


def change_weight(model: Any, _: Any) -> None:
    model.lm_head.weight.mul_(1.1)


def change_head(_: Any, reward: Any) -> None:
    reward.layer.bias.mul_(1.1)


def change_module(model: Any, _: Any) -> None:
    model.model.norm.variance_epsilon = 0.05


@pytest.mark.parametrize("change", [change_weight, change_head, change_module])
def test_a_model_that_changed_in_between(change: Any) -> None:
    model = make_model("qwen2")
    reward = Reward(model.config.hidden_size)
    found = Step(model, BETWEEN, head=reward).values(draw(TOKENS).input_ids)
    with torch.no_grad():
        change(model, reward)
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        found.sum().backward()


def change_shards() -> None:
    """As an optimizer does."""
    model = make_model("qwen2")
    team = parallelize(model, Schedule(chunk=16), ParallelContext(Layout(ulysses=2), CPU))
    found = Step(model, Schedule(chunk=16), ranks=team).logprobs(*draw(TOKENS))
    with torch.no_grad():
        next(iter(sharded_parameters(team).trained.values())).mul_(1.1)
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        found.sum().backward()


def test_a_model_of_ranks_that_changed_in_between() -> None:
    run_ranks(2, change_shards)


def test_what_is_refused() -> None:
    model, data = make_model("qwen2"), draw(TOKENS)
    step = Step(model, strategy("fpdt", LAYERS, TOKENS))
    with pytest.raises(UnsupportedError, match="temperature: expected a number above 0"):
        step.logprobs(*data, temperature=0.0)
    with pytest.raises(UnsupportedError, match="temperature: expected a number above 0"):
        step.logprobs(*data, temperature=torch.ones(2))  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match="labels: expected the shape of input_ids"):
        step(data.input_ids, data.input_ids[..., None].expand(-1, -1, 2))
    with pytest.raises(UnsupportedError, match="head: this Step has none"):
        step.values(data.input_ids)
    with pytest.raises(UnsupportedError, match="weights: expected a tensor of the shape"):
        step(*data, weights=torch.ones(3))
    with pytest.raises(UnsupportedError, match="weights: some are not finite"):
        step(*data, weights=torch.full(data.labels.shape, torch.nan))
    wrong = Step(model, strategy("fpdt", LAYERS, TOKENS), head=lambda hidden, _: hidden.sum())
    with pytest.raises(UnsupportedError, match=r"head: expected values \[\d+, k\]"):
        wrong.values(data.input_ids)
    width = model.config.hidden_size
    drawing = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, 1, dtype=torch.float64))
    inner = Inner(model.model.layers[1].mlp)
    for head, schedule, match in (
        (drawing, strategy("fpdt", LAYERS, TOKENS), "head: its dropout at 0 cannot be repeated"),
        (inner, BETWEEN, "head: uses a decoder layer"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            Step(model, schedule, head=head).values(data.input_ids)


class Inner(nn.Module):
    """A head that takes a module out of a layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        found: Tensor = self.module(hidden)
        return found


def test_tokens_of_another_dtype_and_a_result_that_is_written() -> None:
    model, data = make_model("qwen2"), draw(TOKENS)
    wanted = gradients_of(
        model, expected(model, replace(data, labels=data.input_ids))[0][:, 9:].sum()
    )
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    found = step.logprobs(data.input_ids.int())
    found[:, :9] = 0.0
    found.sum().backward()
    assert max(errors(gradients(model), wanted).values()) < EXACT


def rewards(model: Any, reward: nn.Module, data: Data) -> Tensor:
    """What `reward` gives of plain autograd's hidden states, [batch, tokens, 2]."""
    hidden: list[Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda *found: hidden.append(found[2]))
    reference_logits(model, data.input_ids, data.document_ids)
    handle.remove()
    values: Tensor = reward(hidden[-1].flatten(0, 1), data.input_ids.flatten())
    return values.view(*data.input_ids.shape, 2)


def unlike(layout: Layout, schedule: Schedule, *, dealt: bool) -> list[str]:
    """On each rank, in two rounds of a loss and a head of one's own: what is not autograd's."""
    ranks, wrong = ParallelContext(layout, CPU), []
    model, alone = (make_model("qwen2", **HEADS) for _ in range(2))
    reward, other = Reward(alone.config.hidden_size), Reward(alone.config.hidden_size)
    team = parallelize(model, schedule, ranks) if dealt else ranks
    step = Step(model, schedule, ranks=team, poison=True, head=reward)
    assert step.sharded_model is not None
    # The last chunk has one token at first, of which only one rank of a sequence has a part.
    for update, tokens in enumerate((2 * schedule.chunk + 1, 20)):
        data = draw(tokens, batch=4, documents=3, seed=update)
        total, count = torch.zeros((), dtype=torch.float64), layout.data
        for at in range(count):
            part = Data(*(x[at::count] for x in data))
            logprobs = expected(alone, part)[0]
            total = total + loss_of(logprobs) + rewards(alone, other, part).pow(2).mean()
            if at == ranks.rank.along["data"]:
                wanted = logprobs.detach()
        whole = gradients_of(nn.ModuleDict({"model": alone, "reward": other}), total)
        of_model, of_reward = (
            {name.removeprefix(by): g for name, g in whole.items() if name.startswith(by)}
            for by in ("model.", "reward.")
        )
        others = stage_of_others(step, Outcome(total.detach(), of_model))
        model.zero_grad()
        reward.zero_grad()
        own = rows_of(ranks, data)
        found = step.logprobs(*own)
        loss_of(found).backward()
        step.values(own.input_ids, None, own.document_ids).pow(2).mean().backward()
        ours = whole_gradients(model, step.sharded_model, others)
        wrong += [f"{update} values"] * (relative_error(found, wanted) > EXACT)
        far = errors(ours, without(of_model, others)) | errors(gradients(reward), of_reward)
        wrong += [f"{update} {name}: {error}" for name, error in far.items() if error > EXACT]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name", "dealt"),
    [
        (Layout(ulysses=2), "kept", False),
        (Layout(pipeline=2), "kept", True),
        exhaustive(Layout(data=2), "groups", True),
        exhaustive(Layout(ulysses=2), "host", True),
        exhaustive(Layout(shards=2), "kept", True),
        exhaustive(Layout(ring=2), "groups", True),
        exhaustive(Layout(tensor=2), "groups", True),
        exhaustive(Layout(pipeline=2, ulysses=2), "kept", True),
        exhaustive(Layout(ulysses=2, data=2, fsdp=False), "weights", False),
    ],
    ids=str,
)
def test_ranks(layout: Layout, name: str, *, dealt: bool) -> None:
    schedule = OF_RANKS.get(name, replace(OF_RANKS["kept"], weights=Tier.HOST))
    wrong = run_ranks(layout.devices(), partial(unlike, dealt=dealt), layout, schedule)
    assert not any(wrong), "\n".join(line for rank in wrong for line in rank)


def test_the_fused_loss_weighs_tokens_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels that are what PyTorch gives, with the gradient in the place of the logits."""

    def kernel(
        logits: Tensor, targets: Tensor, scale: float | None = None, *, ignored: int
    ) -> Tensor:
        how: Any = {"target": targets, "ignore_index": ignored, "reduction": "none"}
        if scale is None:
            return functional.cross_entropy(logits, **how)
        given = logits.clone().requires_grad_()
        with torch.enable_grad():
            losses = functional.cross_entropy(given, **how)
            (found,) = torch.autograd.grad(losses.sum() * scale, given)
        logits.copy_(found)
        return losses.detach()

    model, data = make_model("qwen2"), draw(TOKENS, batch=2, documents=3)
    wanted = gradients_of(model, loss_of(expected(model, data)[0]))
    step = Step(model, strategy("fpdt", LAYERS, TOKENS), poison=True)
    monkeypatch.setattr("farspan.engine.loss.fused_for", lambda *_: True)
    monkeypatch.setattr("farspan.engine.loss.cross_entropy", kernel)
    step.prepared_model = replace(step.prepared_model, fused=True)
    loss_of(step.logprobs(*data)).backward()
    assert max(errors(gradients(model), wanted).values()) < EXACT
    weights = torch.rand(data.labels.shape, generator=torch.Generator().manual_seed(2)) - 0.5
    total = -(expected(model, data)[0] * weights).sum()
    wanted = gradients_of(model, total)
    model.zero_grad()
    assert relative_error(step(*data, weights=weights), total) < EXACT
    assert max(errors(gradients(model), wanted).values()) < EXACT
    assert relative_error(step.evaluate(*data, weights=weights), total) < EXACT
    plain, fused = (Step(model, step.schedule, label_smoothing=0.2) for _ in range(2))
    fused.prepared_model = replace(fused.prepared_model, fused=True)
    for weighed in (None, weights):
        outcomes = []
        for one in (plain, fused):
            model.zero_grad()
            loss = one(*data, weights=weighed)
            outcomes.append((loss, gradients(model), one.evaluate(*data, weights=weighed)))
        (loss, wanted, evaluated), (other, found, again) = outcomes
        assert relative_error(other, loss) < EXACT
        assert relative_error(again, evaluated) < EXACT
        assert max(errors(found, wanted).values()) < EXACT
