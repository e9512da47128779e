"""A model is edited between two steps: a step is then what a new one is, or refuses as it does.

Where neither refuses, both are what plain autograd gives of the edited model.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from time import process_time
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan.engine.loss import shift_labels
from farspan.engine.preparation import PreparedModel, prepare
from farspan.engine.runner import Runner
from farspan.engine.step import Step
from farspan.hf.edits import first_edit, look
from farspan.hf.load import add_adapters
from farspan.hf.probe import Float64Mode
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
from tests.grids import crossed, examples, part_of
from tests.zoo import make_model

pytestmark = pytest.mark.slow

SCHEDULE = Schedule(chunk=6, groups=2, activation_save_fraction=0.5, loss_chunk_size=5)
DATA = draw(12, batch=2, documents=2)
Edit = Callable[[Any], object]


def noise(module: Any, seed: int = 3) -> Any:
    """A copy with other weights."""
    twin = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return twin


class Scaled(nn.Module):
    """A module whose output is scaled by an attribute."""

    def __init__(self, inner: nn.Module, scale: float = 2.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inner(*given, **named) * self.scale


class Mixing(Scaled):
    """One that adds to each token the sum of those before it."""

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inner(*given, **named) + 0.1 * given[0].cumsum(1)


def mixed(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out + 0.1 * out.cumsum(1)


def doubled(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return 2 * out


def layers(model: Any) -> Any:
    return model.model.layers


def put(owner: Callable[[Any], Any], **values: Any) -> Edit:
    """Sets attributes; a function makes them from what is there."""

    def edit(model: Any) -> None:
        for name, value in values.items():
            there = owner(model)
            new = value(getattr(there, name)) if callable(value) else value
            setattr(there, name, new)

    return edit


def at(index: int, path: str = "") -> Callable[[Any], Any]:
    return lambda model: layers(model)[index].get_submodule(path)


def each(path: str, **values: Any) -> Edit:
    def edit(model: Any) -> None:
        for index in range(len(layers(model))):
            put(at(index, path), **values)(model)

    return edit


def swap(model: Any) -> None:
    of = layers(model)
    of[0], of[3] = of[3], of[0]


def replace_layer(model: Any) -> None:
    layers(model)[1] = noise(layers(model)[1])


def remove_layer(model: Any) -> None:
    del layers(model)[3]


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() * 1.1)


def set_forward(path: str, around: Callable[[Any], Any]) -> Edit:
    def edit(model: Any) -> None:
        module = layers(model)[1].get_submodule(path)
        own = module.forward
        module.forward = lambda *given, **named: around(own(*given, **named))

    return edit


def other_class(model: Any) -> None:
    class Doubled(type(layers(model)[1].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return 2 * super().forward(x)

    layers(model)[1].mlp.__class__ = Doubled


def parametrized(model: Any) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    parametrize.register_parametrization(layers(model)[0].mlp.up_proj, "weight", Twice())


def new_parameter(model: Any) -> None:
    linear = layers(model)[2].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


def other_data(model: Any) -> None:
    for p in (layers(model)[2].mlp.up_proj.weight, model.model.norm.weight):
        p.data = p.data * 1.5


def frozen(model: Any) -> None:
    layers(model)[1].requires_grad_(False)


def adapted(model: Any) -> None:
    add_adapters(model, rank=2, alpha=4.0, zero=False)


def in_place(module: Callable[[Any], Any], name: str) -> Edit:
    def edit(model: Any) -> None:
        getattr(module(model), name).mul_(0.5)

    return edit


def hook(module: Callable[[Any], Any], function: Any, kind: str = "forward") -> Edit:
    return lambda model: getattr(module(model), f"register_{kind}_hook")(function)


def decoder(model: Any) -> Any:
    return model.model


def root(model: Any) -> Any:
    return model


def config(model: Any) -> Any:
    return model.config


WHOLE = {  # edits of every family below
    "layers swapped": swap,
    "a layer replaced": replace_layer,
    "a layer removed": remove_layer,
    "mlp scaled": put(at(1), mlp=Scaled),
    "mlp that mixes": put(at(1), mlp=Mixing),
    "head replaced": put(root, lm_head=noise),
    "untied": untie,
    "a hook that mixes": hook(at(1, "self_attn.o_proj"), mixed),
    "a hook that doubles": hook(at(1, "mlp"), doubled),
    "a pre-hook": hook(at(1, "mlp"), lambda _, given: (3 * given[0],), "forward_pre"),
    "a backward hook": hook(at(1, "mlp"), lambda _, g, __: (2 * g[0],), "full_backward"),
    "a forward that mixes": set_forward("mlp", lambda out: out + 0.1 * out.cumsum(1)),
    "a forward of a linear module": set_forward("self_attn.v_proj", lambda out: 2 * out),
    "another class": other_class,
    "parametrized": parametrized,
    "a new parameter": new_parameter,
    "other data": other_data,
    "frozen": frozen,
    "adapters": adapted,
    "scale of modules": each("self_attn", scaling=lambda scale: 3 * scale),
    "no causality": put(at(1, "self_attn"), is_causal=False),
    "activation": put(at(1, "mlp"), act_fn=lambda _: nn.Tanh()),
    "frequencies in place": in_place(lambda m: m.model.rotary_emb, "inv_freq"),
    "rotary scale": put(lambda m: m.model.rotary_emb, attention_scaling=1.5),
    "position limit": put(config, max_position_embeddings=8),
    "config bidirectional": put(config, is_causal=False),
    "dropout": put(at(1, "self_attn"), attention_dropout=0.5),
    "evaluated": lambda model: model.eval(),
}
GEMMA = {  # of gemma2
    "soft cap of a module": put(at(1, "self_attn"), attn_logit_softcapping=0.7),
    "no soft cap": each("self_attn", attn_logit_softcapping=None),
    "soft cap of config": put(config, attn_logit_softcapping=0.7),
    "final soft cap": put(config, final_logit_softcapping=1.0),
    "window of a module": put(at(0, "self_attn"), sliding_window=3),
    "window of config": put(config, sliding_window=3),
    "a window of 0": put(at(0, "self_attn"), sliding_window=0),
    "kind of attention": put(at(0, "self_attn"), sliding_window=None, is_sliding=False),
    "kinds in config": put(config, layer_types=lambda kinds: kinds[::-1]),
}
OTHERS: dict[str, dict[str, Edit]] = {
    "gemma2": GEMMA,
    "granite": {
        "residual": put(at(1), residual_multiplier=0.2),
        "embedding": put(decoder, embedding_multiplier=1.5),
        "logits": put(config, logits_scaling=2.0),
    },
    "qwen3_moe": {
        "experts a token": put(at(1, "mlp.gate"), top_k=1),
        "router": put(at(1, "mlp"), gate=noise),
        "router's loss": put(config, output_router_logits=True),
    },
    "gpt_oss": {
        "sinks": lambda model: setattr(
            layers(model)[0].self_attn, "sinks", nn.Parameter(torch.ones(4, dtype=torch.float64))
        ),
        "window": put(at(0, "self_attn"), sliding_window=4),
    },
    "smollm3": {"rotation": put(at(1, "self_attn"), use_rope=lambda on: not on)},
    "mistral": {
        "rope in place": lambda model: model.config.rope_parameters.update(rope_theta=17.0),
        "rope type": lambda model: model.config.rope_parameters.update(rope_type="dynamic"),
        "groups": put(at(1, "self_attn"), num_key_value_groups=1),
    },
}
EDITS = {("llama", name): edit for name, edit in WHOLE.items()} | {
    (family, name): edit for family, own in OTHERS.items() for name, edit in own.items()
}


def outcome(model: PreTrainedModel, step: Callable[[], Step]) -> Outcome | str:
    """What a step gives, or the words in which it refuses."""
    try:
        return run_step(model, step(), DATA)
    except UnsupportedError as error:
        return str(error)


def check(model: PreTrainedModel, step: Step, schedule: Schedule) -> Outcome | str:
    """The step is a new step, in its words, and plain autograd of the model as it is now."""
    found = outcome(model, lambda: step)
    fresh = outcome(model, lambda: Step(model, schedule, poison=True))
    if isinstance(found, str) or isinstance(fresh, str):
        assert found == fresh
        return found
    assert_same_bits(found, fresh)
    assert_close(found, run_oracle(model, DATA))
    return found


# What is seen as another edit is that stays by default.
ALIKE = {
    *("a hook that mixes", "a forward that mixes", "no soft cap", "window of a module", "groups"),
    *("router", "final soft cap", "kind of attention", "window", "rope type", "embedding"),
    *("a pre-hook", "mlp scaled", "logits", "soft cap of config", "activation", "a new parameter"),
    *("config bidirectional", "window of config", "untied", "a layer removed", "other data"),
    *("a forward of a linear module", "head replaced", "parametrized", "rotary scale"),
}
# Each on one tier, and those that something else sees on the other as well.
ON_A_TIER = [
    (*edit, list(Tier)[number % 2]) for number, edit in enumerate(EDITS) if edit[1] not in ALIKE
]
ON_BOTH = [
    ("llama", name, tier) for name in ("a layer replaced", "layers swapped") for tier in Tier
]


@pytest.mark.parametrize(
    ("family", "name", "weights"),
    part_of(
        [(*edit, tier) for edit in EDITS for tier in Tier],
        *(*ON_A_TIER, *ON_BOTH, ("gemma2", "soft cap of a module", Tier.DEVICE)),
    ),
)
def test_an_edit_is_taken_up(family: str, name: str, weights: Tier) -> None:
    model, schedule = make_model(family), replace(SCHEDULE, weights=weights)
    with Float64Mode():
        step = Step(model, schedule, poison=True)
        step(*DATA)
        EDITS[family, name](model)
        check(model, step, schedule)


@hypothesis.settings(max_examples=examples(12))
@hypothesis.given(
    st.lists(st.sampled_from(sorted(WHOLE)), min_size=1, max_size=3),
    st.sampled_from(["llama", "qwen3", "olmo2", "mistral", "smollm3"]),
    st.sampled_from(list(Tier)),
)
def test_edits_one_after_the_other(names: list[str], family: str, weights: Tier) -> None:
    """Each before another step, which may refuse until a later edit."""
    model, schedule = make_model(family), replace(SCHEDULE, weights=weights)
    with Float64Mode():
        step = Step(model, schedule, poison=True)
        for name in names:
            try:
                WHOLE[name](model)
            except (AttributeError, TypeError):  # an earlier edit took away what it edits
                continue
            check(model, step, schedule)


@pytest.mark.parametrize(
    ("of", "wrapped"),
    crossed(
        [("mlp", "forward"), ("input_layernorm", "_norm"), ("self_attn", "forward")], [False, True]
    ),
)
def test_a_method_set_on_a_class_is_taken_up(
    monkeypatch: pytest.MonkeyPatch, of: tuple[str, str], wrapped: bool
) -> None:
    """Also by a decorator that says what it wraps, and where a forward calls it."""
    (path, method), model = of, make_model("gemma2")
    kind = type(at(1, path)(model))
    own = getattr(kind, method)

    def mixing(*given: Any, **named: Any) -> Any:
        out = own(*given, **named)
        if isinstance(out, tuple):
            return out[0] + 0.1 * out[0].cumsum(1), *out[1:]
        return out + 0.1 * out.cumsum(1)

    with Float64Mode():
        step = Step(model, SCHEDULE, poison=True)
        step(*DATA)
        monkeypatch.setattr(kind, method, wraps(own)(mixing) if wrapped else mixing)
        assert isinstance(check(model, step, SCHEDULE), str)
        monkeypatch.undo()
        assert_close(run_step(model, step, DATA), run_oracle(model, DATA))


@pytest.mark.parametrize(  # and under a name of transformers' own
    ("name", "interface"),
    crossed(["halved", "sdpa"], [ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS]),
)
def test_an_attention_of_one_s_own_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, interface: Any
) -> None:
    """A step attends by its own kernels: another function, or mask, would not be called."""
    model = make_model("llama")
    step = Step(model, SCHEDULE)
    expected = step(*DATA)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, sdpa_attention_forward)
    monkeypatch.setitem(interface._global_mapping, name, doubled)
    model.set_attn_implementation(name)
    calls: list[Any] = [step, step.evaluate, lambda *_: Step(model, SCHEDULE)]
    for call in calls:
        with pytest.raises(UnsupportedError, match=f"^attention: .* '{name}', .*doubled"):
            call(*DATA)
    model.set_attn_implementation("eager")
    assert torch.equal(step(*DATA), expected)


def test_a_look_has_one_text_on_every_device() -> None:
    model: Any = make_model("llama")
    texts = set()
    for number in range(2):
        model.hf_device_map = {"": number}
        layers(model)[0].place = torch.device("cuda", number)
        layers(model)[0].functions = {noise, swap}
        texts.add(str(look(model)))
    assert len(texts) == 1
    assert " at 0x" not in texts.pop()


CALLS: dict[str, Callable[[Step], object]] = {
    "evaluate": lambda step: step.evaluate(*DATA),
    "logprobs": lambda step: step.logprobs(*DATA).detach(),
    "top_logprobs": lambda step: step.top_logprobs(DATA.input_ids, k=2)[1],
    "values": lambda step: step.values(DATA.input_ids).detach(),
}


@pytest.mark.parametrize(("name", "weights"), crossed(CALLS, Tier))
def test_every_call_looks(name: str, weights: Tier) -> None:
    model, schedule = make_model("llama"), replace(SCHEDULE, weights=weights)

    def head(hidden: Tensor, _: Tensor) -> Tensor:
        return hidden[:, :2]

    step, call = Step(model, schedule, head=head), CALLS[name]
    before = call(step)
    replace_layer(model)
    found: Any = call(step)
    assert not torch.equal(found, before)  # type: ignore[arg-type]
    assert torch.equal(found, call(Step(model, schedule, head=head)))  # type: ignore[arg-type]
    layers(model)[1].mlp = Mixing(layers(model)[1].mlp)
    with pytest.raises(UnsupportedError, match="mixes tokens"):
        call(step)


STRUCTURAL = ("mlp scaled", "head replaced", "a hook that doubles", "rotary scale", "other data")


@pytest.mark.parametrize(("name", "weights"), crossed(STRUCTURAL, Tier))
def test_an_edit_before_the_backward_of_values_is_an_error(name: str, weights: Tier) -> None:
    model = make_model("llama")
    step = Step(model, replace(SCHEDULE, weights=weights))
    found = step.logprobs(*DATA)
    WHOLE[name](model)
    with pytest.raises(RuntimeError, match="the model has changed since the forward"):
        found.sum().backward()


@pytest.mark.parametrize("weights", Tier)
def test_an_edit_that_is_taken_back_after_a_refusal_runs_again(weights: Tier) -> None:
    """Also the backward of values whose forward came before."""
    model, schedule = make_model("llama"), replace(SCHEDULE, weights=weights)
    step, mlp = Step(model, schedule, poison=True), layers(model)[1].mlp
    expected = run_oracle(model, DATA)
    found = step.logprobs(*DATA)
    for _ in range(2):
        layers(model)[1].mlp = Mixing(mlp)
        with pytest.raises(UnsupportedError, match="mixes tokens"):
            step(*DATA)
        layers(model)[1].mlp = mlp
    count = int((shift_labels(DATA.labels, DATA.document_ids) != -100).sum())
    (-found.sum() / count).backward()
    assert_close(Outcome(-found.detach().sum() / count, gradients(model)), expected)
    assert_close(run_step(model, step, DATA), expected)


def test_a_call_after_a_refusal_has_memory_of_the_model_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refused call prepared the model, which another call may run."""
    model = make_model("llama")
    step = Step(model, SCHEDULE)
    step.logprobs(*DATA)
    followed, follow = [], Runner.follow

    def told(self: Runner, prepared: PreparedModel) -> None:
        followed.append(prepared)
        follow(self, prepared)

    monkeypatch.setattr(Runner, "follow", told)
    model.requires_grad_(False).float()
    with pytest.raises(UnsupportedError, match="no parameter requires a gradient"):
        step(*DATA)
    assert followed == [step.prepared_model]
    assert step.memory.open_forward is None
    step.evaluate(*DATA)


@pytest.mark.parametrize("weights", Tier)
def test_a_schedule_that_cannot_be_prepared_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, weights: Tier
) -> None:
    """A planned schedule is prepared at the first call, which may be interrupted or refused."""
    model, other = make_model("llama"), Schedule(chunk=8, groups=1, weights=weights)
    step, expected = Step(model, SCHEDULE, poison=True), run_oracle(model, DATA)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("farspan.engine.preparation.describe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step._calls.models.follow(other)
    assert step.schedule == SCHEDULE
    assert_close(run_step(model, step, DATA), expected)
    step._calls.models.follow(other)
    assert step.schedule == other
    assert_close(run_step(model, step, DATA), expected)


def test_adapters_that_are_switched_are_prepared_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a reference: on, off, on."""
    model: Any = make_model("llama")
    adapted(model)
    step, times = Step(model, SCHEDULE), [0]

    def counted(*given: Any, **named: Any) -> PreparedModel:
        times[0] += 1
        return prepare(*given, **named)

    monkeypatch.setattr("farspan.engine.preparation.prepare", counted)
    outcomes = []
    for _ in range(3):
        for off in (True, False):
            for module in model.modules():
                if hasattr(module, "_disable_adapters"):
                    module._disable_adapters = off
            outcomes.append(float(step.evaluate(*DATA)))
    assert times == [1]
    assert len(set(outcomes)) == 2
    layers(model)[0] = noise(layers(model)[0])
    assert float(step.evaluate(*DATA)) not in outcomes
    assert len(step._calls.models._kept) == 1, "replaced layers are let go"


def test_a_table_that_every_forward_refills_is_no_edit() -> None:
    """Of longrope: else two steps of a model, which probe it, would prepare each other anew."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model: Any = make_model("llama", rope_parameters=rope)
    steps = [Step(model, SCHEDULE) for _ in range(2)]
    values = steps[0].logprobs(DATA.input_ids)
    with torch.no_grad():
        model(DATA.input_ids[:, :5])
    steps[1].evaluate(*DATA)
    values.sum().backward()
    assert prepared_again(*steps) == [False, False]
    model.model.rotary_emb.original_inv_freq.mul_(0.5)
    assert prepared_again(*steps) == [True, True]


def prepared_again(*steps: Step) -> list[bool]:
    before = [step.prepared_model for step in steps]
    for step in steps:
        step.evaluate(*DATA)
    return [step.prepared_model is not was for step, was in zip(steps, before, strict=True)]


def test_looks_are_equal_in_a_copy_but_for_identity() -> None:
    """The text of a look is the same in another process; the look is of this model alone."""
    model = make_model("gemma2")
    twin = make_model("gemma2")
    assert str(look(model)) == str(look(twin))
    assert look(model) != look(twin)
    assert look(model) == look(model)
    before = look(model)
    twin.config.sliding_window = 3
    assert str(look(twin)) != str(before)
    layers(model)[1].self_attn.scaling = 7.0
    assert first_edit(before, look(model)) == "scaling of model.layers.1.self_attn"


def test_updates_of_weights_are_no_edits() -> None:
    model = make_model("llama")
    step = Step(model, SCHEDULE)
    step(*DATA)
    before = look(model)
    torch.optim.AdamW(model.parameters()).step()
    model.zero_grad()
    assert look(model) == before


def test_a_look_costs_less_than_a_hundredth_of_a_step() -> None:
    """Of SmolLM2-135M's shape at 2,048 tokens: 5 ms of 26 s on two cores. Here a step of 64 tokens
    of four of its layers is compared, which is harder."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    step = Step(model, Schedule(chunk=64))
    ids = torch.randint(0, 4096, (1, 64))

    def seconds(call: Callable[[], object]) -> float:
        start = process_time()
        call()
        return process_time() - start

    step(ids, ids)
    whole = min(seconds(lambda: step(ids, ids)) for _ in range(2))
    assert (
        min(seconds(lambda: look(model) == step.prepared_model.look) for _ in range(9))
        < 0.05 * whole
    )
