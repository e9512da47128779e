"""Layers that hand a state from chunk to chunk give the gradients of the whole sequence."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from farspan.ask import plan
from farspan.engine.interpreter import Interpreter
from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf import recurrent
from farspan.hf.edits import look
from farspan.hf.load import add_adapters
from farspan.hf.probe import Float64Mode
from farspan.hf.recurrent import RecurrentStates
from farspan.program.layout import Layout, refuse_shared_states
from farspan.program.program import Forward
from farspan.spec import Schedule, Sparse, Tier, UnsupportedError
from tests.engine.checks import Data, assert_close, draw, run_oracle, run_step
from tests.grids import exhaustive, part_of
from tests.hf.test_families import KEPT, STREAMED
from tests.hf.test_refused import refusal
from tests.numerics import EXACT, relative_error
from tests.zoo import COMMON, RECURRENT, make_model

pytestmark = pytest.mark.slow

# Blocks of keys are smaller than chunks, so a state comes from host in several.
BLOCKS = Schedule(
    chunk=11, groups=2, kv=Tier.HOST, kv_block=4, boundary_inputs=Tier.DEVICE, attention_open=True
)
SCHEDULES = {"kept": KEPT, "streamed": STREAMED, "blocks": BLOCKS}
HOME = replace(KEPT, kv_kept=True, activation_save_fraction=1.0, activations=Tier.DEVICE)


def assert_exact(name: str, schedule: Schedule, data: list[Data]) -> None:
    """Recurrences of most families, and OLMo-Hybrid's decays, are in float32 whatever the model is
    in."""
    model = make_model(name).double()
    with Float64Mode():
        step = Step(model, schedule, poison=True)
        for batch in data:
            model.zero_grad()
            assert_close(run_step(model, step, batch), run_oracle(model, batch))


PAIRS = [(name, list(SCHEDULES)[n % 3]) for n, name in enumerate(list(RECURRENT)[::8])]


@pytest.mark.parametrize(("name", "kind"), part_of(product(RECURRENT, SCHEDULES), *PAIRS))
def test_two_steps_are_exact(name: str, kind: str) -> None:
    """The last chunk of the first has one token; the second is cut into documents."""
    schedule = SCHEDULES[kind]
    tokens = 3 * schedule.chunk + 1
    data = [draw(tokens, batch=2), draw(25, batch=2, documents=3, seed=1)]
    assert_exact(name, schedule, data)


@pytest.mark.parametrize("name", part_of(["lfm2", "qwen3_5_text", "nemotron_h"], "nemotron_h"))
def test_kept_graphs_are_exact(name: str) -> None:
    """All of them, which wait on the device for their backward; those of cut chunks are built
    again."""
    assert_exact(name, HOME, [draw(53, batch=2), draw(53, batch=2, documents=6, seed=1)])


@pytest.mark.parametrize("name", part_of(RECURRENT, "falcon_h1", "jamba"))
def test_kept_graphs_of_whole_chunks_take_what_is_planned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is too large for its place, and built again."""
    rebuilt, keep = [], Interpreter._keep_input

    def noted(self: Interpreter, i: Forward, *rest: Any) -> None:
        rebuilt.append(i.layer)
        keep(self, i, *rest)

    monkeypatch.setattr(Interpreter, "_keep_input", noted)
    Step(make_model(name, torch.float32), HOME, poison=True)(*draw(52, batch=2))
    assert not rebuilt


def test_a_graph_that_is_larger_than_planned_is_built_again() -> None:
    """Of few tokens a scan saves more than what many let expect."""
    assert_exact(
        "nemotron_h", replace(HOME, groups=2), [draw(tokens, batch=3) for tokens in (1, 3)]
    )


CUTS = [(8,), (9,), (7, 8, 9, 16), (1, 2, 15, 17)]


@pytest.mark.parametrize("cuts", [CUTS[2], *map(exhaustive, [CUTS[0], CUTS[1], CUTS[3]])])
def test_documents_of_a_token(cuts: tuple[int, ...]) -> None:
    """At a chunk's first and last token, where a state is read or left."""
    data = draw(30)
    documents = torch.zeros(1, 30, dtype=torch.long)
    for cut in cuts:
        documents[:, cut:] += 1
    data = replace(data, document_ids=documents)
    assert_exact("qwen3_5_text", Schedule(chunk=8, groups=2), [data])


@pytest.mark.parametrize("name", part_of(RECURRENT, *list(RECURRENT)[1::5]))
def test_what_is_exact_is_the_model_of_hugging_face(name: str) -> None:
    model = make_model(name)
    data = draw(53, batch=2)
    ours = reference_loss(model, data.input_ids, data.labels)
    model.set_attn_implementation("eager")
    theirs = model(input_ids=data.input_ids, labels=data.labels).loss
    assert relative_error(ours, theirs) < 1e-6


def test_adapters_are_exact() -> None:
    model = make_model("qwen3_5_text")
    add_adapters(model, rank=2, alpha=4)
    data = draw(38, batch=2)
    with Float64Mode():
        step = Step(model, KEPT, poison=True)
        assert_close(run_step(model, step, data), run_oracle(model, data))


def test_sparse_attention_leaves_recurrences_exact() -> None:
    """A budget no smaller than the prefix is dense attention; recurrent layers choose nothing."""
    model, data = make_model("lfm2"), draw(53)
    sparse = Sparse(page=4, budget=64, recent=0, sinks=0)
    step = Step(model, Schedule(chunk=8, groups=2, sparse=sparse))
    assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.parametrize(
    "name",
    part_of(["lfm2", "qwen3_5_text", "mamba", "mamba2", "nemotron_h"], "qwen3_5_text", "mamba2"),
)
def test_bfloat16_is_as_close_as_plain(name: str) -> None:
    """Twice the error of plain bfloat16 autograd on the same model, both against float64."""
    model, data = make_model(name), draw(53)
    exact = run_oracle(model, data).gradients
    model.bfloat16()
    plain = run_oracle(model, data).gradients
    found = run_step(model, Step(model, KEPT), data).gradients

    def error(gradients: dict[str, Tensor]) -> float:
        whole = [gradients[key].double() - exact[key] for key in exact]
        return sum(float(x.norm()) ** 2 for x in whole) ** 0.5

    assert error(found) <= 2 * error(plain)


@pytest.mark.parametrize(
    "name",
    [
        exhaustive("mamba"),
        *("jamba", "minimax", "recurrent_gemma"),  # whose code begins with zeros
        *("falcon_h1", "zamba2"),  # attend in the same layer, before or after the state
        exhaustive("zamba"),
    ],
)
def test_states_go_on_from_a_chunk_and_not_from_a_document(name: str) -> None:
    documents = draw(27, batch=2, documents=6, seed=3)
    assert_exact(name, Schedule(chunk=8, groups=2), [draw(25, batch=2), documents])


def test_states_that_a_model_keeps_of_a_call_are_no_edit() -> None:
    """RecurrentGemma's layers store them. A step that took them for an edit would prepare the model
    again or, on several ranks, refuse it."""
    model, data = make_model("recurrent_gemma"), draw(9)
    step, before = Step(model, Schedule(chunk=4)), look(model)
    recurrences = [m for m in model.modules() if hasattr(m, "recurrent_states")]
    step.stages.kinds()  # asks which arguments are caches
    assert [m.recurrent_states for m in recurrences] == [None, None]
    step.evaluate(*data)
    assert look(model) == before
    with torch.no_grad():
        model(data.input_ids, use_cache=True)
    assert None not in [m.recurrent_states for m in recurrences]
    assert look(model) == before


def test_the_part_of_a_scan_that_stems_from_its_state() -> None:
    given = [torch.rand(2, 3, 5), -torch.rand(3, 4), torch.randn(2, 3, 4), torch.randn(2, 4, 5)]
    given = [x.double().requires_grad_() for x in given]
    passed, rate, state, outwards = given
    decay = torch.exp(rate[:, None] * passed[..., None])
    plain = torch.einsum("bdtn,bdn,bnt->bdt", decay, state, outwards)
    found = recurrent._Remembered.apply(*given)
    assert relative_error(found, plain) <= EXACT
    towards = torch.randn_like(plain)
    pairs = (torch.autograd.grad(x, given, towards) for x in (found, plain))
    assert all(relative_error(x, y) <= EXACT for x, y in zip(*pairs, strict=True))


class TestRefused:
    """What could not be exact, in words."""

    def test_chunks_of_a_token(self) -> None:
        step = Step(make_model("lfm2"), Schedule(chunk=1))
        with pytest.raises(
            UnsupportedError, match="chunk: expected at least 2 tokens with recurrent"
        ):
            step(*draw(8))
        step(*draw(1))

    def test_ranks_of_shared_weights(self) -> None:
        spec = Step(make_model("zamba2"), Schedule()).model_spec
        with pytest.raises(UnsupportedError, match="share weights with one another"):
            refuse_shared_states(spec, Layout(pipeline=2))

    def test_shared_weights_in_main_memory_are_refused_alike_by_plan_and_step(self) -> None:
        model, sentence = make_model("zamba2"), "^weights: layers that share weights cannot"
        with pytest.raises(UnsupportedError, match=sentence) as told:
            Step(model, Schedule(weights=Tier.HOST))
        with pytest.raises(UnsupportedError, match=f"^{re.escape(str(told.value))}$"):
            plan(model.config, context=64, machine="h100", weights="host")

    def test_sparse_attention_beside_a_state(self) -> None:
        sparse = Sparse(page=4, budget=64, recent=0, sinks=0)
        step = Step(make_model("falcon_h1"), Schedule(chunk=8, sparse=sparse))
        with pytest.raises(UnsupportedError, match=r"sparse: layers of .* pass on a state"):
            step(*draw(20))

    def test_tiles(self) -> None:
        message = refusal(make_model("qwen3_5_text"), Schedule(chunk=16, mlp_chunk_size=4))
        assert "mlp_chunk_size: layer 0.linear_attn" in message

    @pytest.mark.parametrize("kind", ["jamba", "mamba"])
    def test_a_scan_that_begins_anew(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One of another name, as another transformers may have. Fresh weights are so small that
        neither outputs nor gradients would tell."""
        monkeypatch.setattr(recurrent, "SCAN", "another_scan")
        config = AutoConfig.for_model(kind, **COMMON)
        message = refusal(AutoModelForCausalLM.from_config(config))
        assert "does not continue from the state recurrent.0 that it hands on" in message

    def test_a_state_that_is_changed_on_its_way(self) -> None:
        model = make_model("mamba2")
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            layer.mixer.register_forward_pre_hook(_halve, with_kwargs=True)
        assert "mixes tokens outside the states it hands on" in refusal(model)

    def test_a_state_that_is_kept_from_the_cache(self) -> None:
        model = make_model("llama")
        model.model.layers[2] = _Summing()
        assert "layer 2 of LlamaForCausalLM mixes tokens" in refusal(model)


def _halve(_: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    for cache in keywords.values():
        if isinstance(cache, RecurrentStates):
            cache.before = {name: x / 2 for name, x in cache.before.items()}
    return given, keywords


class _Summing(nn.Module):
    """Adds up what it has seen."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden + 0.1 * hidden.cumsum(1)
