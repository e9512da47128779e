"""What cannot be exact is refused, with a message that says what to change."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from farspan.engine.step import Step
from farspan.spec import Schedule, UnsupportedError
from tests.engine.checks import draw
from tests.versions import OWN_ATTENTION
from tests.zoo import COMMON, VOCAB, make_model, shared_model

SCHEDULE = Schedule(chunk=16)
WITHOUT_HEAD_DIM = {key: value for key, value in COMMON.items() if key != "head_dim"}
CODE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
OTHERWISE = "caches K and V, but computes attention in code of its own"
NEO = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}


def build(kind: str, auto: Any = AutoModelForCausalLM, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**WITHOUT_HEAD_DIM, "num_hidden_layers": 2, **fields})
    return auto.from_config(config).eval()


def refusal(model: nn.Module, schedule: Schedule = SCHEDULE) -> str:
    """The message with which a step for the model is refused."""
    with pytest.raises(UnsupportedError) as caught:
        Step(model, schedule)
    return str(caught.value)


class TestModels:
    def test_that_attend_by_themselves(self) -> None:
        model: Any = build("llama")
        for layer in model.model.layers:
            layer.self_attn = _Own()
        message = refusal(model)
        assert "computes attention, or a recurrence, in code of its own" in message

    @pytest.mark.parametrize(
        ("kind", "fields", "words"),
        [
            ("xglm", XGLM, OTHERWISE),
            ("bloom", {}, OTHERWISE),
            *((kind, CODE, OTHERWISE) for kind in ("gptj", "codegen") if OWN_ATTENTION),
            ("gpt_neo", NEO, OTHERWISE),
        ],
    )
    def test_that_attend_or_keep_a_state_in_their_own_way(
        self, kind: str, fields: dict[str, Any], words: str
    ) -> None:
        assert re.search(words, refusal(build(kind, **fields)))

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            ("t5", T5),
            ("bart", BART),
        ],
    )
    def test_with_an_encoder(self, kind: str, fields: dict[str, Any]) -> None:
        message = refusal(build(kind, AutoModelForSeq2SeqLM, **fields))
        assert "encoder-decoder; expected a decoder-only causal LM" in message

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [("gemma3_text", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})],
    )
    def test_that_look_ahead(self, kind: str, fields: dict[str, Any]) -> None:
        assert "attends to later tokens (bidirectional)" in refusal(build(kind, **fields))

    def test_with_cross_attention(self) -> None:
        message = refusal(make_model("gpt2", add_cross_attention=True))
        assert "set add_cross_attention to false" in message

    @pytest.mark.parametrize("share", [1e-9, -1e-9])
    def test_that_hardly_mix_tokens(self, share: float) -> None:
        """In bfloat16, forwards and backwards: fresh weights may forget all but that."""
        model, steps = make_model("llama", torch.bfloat16), 1 if share > 0 else -1
        model.model.layers[1].self_attn.k_proj.register_forward_hook(
            lambda _, __, out: out + share * out.roll(steps, dims=1)
        )
        assert "layer 1 of LlamaForCausalLM mixes tokens" in refusal(model)

    def test_that_mix_tokens_where_no_gradient_goes(self) -> None:
        model = make_model("llama")
        model.model.layers[1].mlp.register_forward_hook(
            lambda _, __, out: out + 0.1 * out.detach().cumsum(1)
        )
        message = refusal(model)
        assert "run in chunks differs by " in message
        assert "mixes tokens outside the attention interface" in message

    def test_that_add_a_bias_to_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A keyword of the attention call that is not known cannot be honoured."""
        model, bias = make_model("llama"), torch.ones(1)
        for layer in model.model.layers:
            biased = partial(layer.self_attn.forward, score_bias=bias)
            monkeypatch.setattr(layer.self_attn, "forward", biased)
        message = refusal(model)
        assert "'score_bias'" in message
        assert "which farspan does not support" in message

    def test_that_are_no_language_models(self) -> None:
        message = refusal(nn.Linear(2, 2))
        assert "expected a transformers PreTrainedModel, got Linear" in message
        assert "AutoModelForCausalLM" in message

    def test_without_a_head(self) -> None:
        assert "the decoder of LlamaModel" in refusal(build("llama", AutoModel))


class TestDropout:
    @pytest.mark.parametrize(
        ("kind", "fields", "where"),
        [
            ("gpt2", {"attn_pdrop": 0.1}, "attn_dropout"),
            ("gpt2", {"embd_pdrop": 0.1}, "transformer.drop "),
            ("llama", {"attention_dropout": 0.1}, "model.layers.0.self_attn.attention_dropout"),
            ("gpt_neox", {"hidden_dropout": 0.1}, "dropout"),
        ],
    )
    def test_in_training_mode(self, kind: str, fields: dict[str, Any], where: str) -> None:
        message = refusal(make_model(kind, **fields))
        assert "dropout 0.1 at " in message
        assert where in message
        assert "set the model's dropout options to 0" in message
        assert "model.eval()" in message

    def test_is_noticed_when_the_mode_changes(self) -> None:
        """A step made in evaluation mode does not train in another one."""
        model = make_model("gpt2", embd_pdrop=0.1).eval()
        step, data = Step(model, SCHEDULE), draw(20)
        step(*data)
        model.train()
        for run in (step, step.evaluate):
            with pytest.raises(UnsupportedError, match=r"dropout 0.1 at .*model\.eval"):
                run(*data)


class TestPositions:
    def test_that_depend_on_sequences_before(self) -> None:
        rope = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
        message = refusal(make_model("llama", rope_parameters=rope))
        assert "rope_type: 'dynamic' depends on the longest position seen so far" in message
        assert "yarn" in message

    def test_count_from_the_document_s_beginning(self) -> None:
        """A hundred tokens in documents of at most 32 are within a context of 32."""
        model = make_model("llama", max_position_embeddings=32)
        step, data = Step(model, SCHEDULE), draw(100)
        marks = torch.arange(100)[None] // 32
        step(data.input_ids, data.labels, marks)
        with pytest.raises(UnsupportedError, match="document of 33 tokens"):
            step(data.input_ids, data.labels, torch.arange(100)[None] // 33)

    def test_reach_further_with_a_scaled_rope(self) -> None:
        rope = {
            "rope_theta": 1e4,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
        model = make_model("llama", rope_parameters=rope, max_position_embeddings=32)
        step = Step(model, SCHEDULE)
        step(*draw(64))
        with pytest.raises(UnsupportedError, match="document of 65 tokens"):
            step(*draw(65))

    def test_learned_ones_end(self) -> None:
        step = Step(make_model("gpt2", n_positions=64, max_position_embeddings=64), SCHEDULE)
        step(*draw(64))
        with pytest.raises(
            UnsupportedError, match=r"of 65 tokens .* no RoPE .* at most 64"
        ) as caught:
            step(*draw(65))
        assert "rope_parameters" not in str(caught.value)


IDS = draw(20, batch=2).input_ids
MARKS = torch.zeros_like(IDS)


def replaced(tensor: Tensor, value: int) -> Tensor:
    changed = tensor.clone()
    changed[1, 7] = value
    return changed


class TestData:
    @pytest.mark.parametrize(
        ("ids", "labels", "marks", "message"),
        [
            (IDS, IDS[:, 1:], None, "labels: expected the shape of input_ids (2, 20), got (2, 19)"),
            (IDS, IDS.int(), None, "labels: expected int64, got torch.int32"),
            (IDS, replaced(IDS, VOCAB), None, "labels: must be -100 (ignored) or in [0, 64), fou"),
            (IDS[:, :0], IDS[:, :0], None, "input_ids: expected [batch, tokens] with at least one"),
            (IDS.float(), IDS, None, "input_ids: expected int64 or int32 token ids, got torch.fl"),
            (replaced(IDS, -2), IDS, None, "vocabulary, found -2; check that the tokenizer"),
            (IDS, IDS, MARKS[:, 1:], "document_ids: expected the shape of input_ids (2, 20)"),
            (IDS, IDS, MARKS.float(), "document_ids: expected whole numbers, got torch.float32"),
            (
                IDS,
                IDS,
                replaced(MARKS, 3),
                "document_ids: must not decrease along a row, but row 1",
            ),
        ],
    )
    def test_that_does_not_fit(
        self, ids: Tensor, labels: Tensor, marks: Tensor | None, message: str
    ) -> None:
        step = Step(shared_model("llama"), SCHEDULE)
        for run in (step, step.evaluate):
            with pytest.raises(UnsupportedError) as caught:
                run(ids, labels, marks)
            assert message in str(caught.value)


class TestSchedules:
    def test_of_another_number_of_layers(self) -> None:
        message = refusal(shared_model("llama"), Schedule(groups=(1, 2)))
        assert "groups: [1, 2] holds 3 layers, but the model has 4" in message
        assert "give sizes that add up to 4" in message

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"chunk": 0}, "chunk: expected a whole number of tokens >= 1, got 0"),
            ({"kv_block": -1}, "kv_block: expected a whole number"),
            (
                {"attention_save_fraction": 1.5},
                "attention_save_fraction: expected a fraction between 0 and 1",
            ),
            ({"kv": "gpu"}, "kv: expected 'device' or 'host', got 'gpu'"),
            ({"groups": 0}, "groups: expected the number of layers per group"),
            ({"groups": (2, 0)}, "groups: expected the number of layers per group"),
        ],
    )
    def test_that_are_none(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsupportedError) as caught:
            Schedule(**fields)
        assert message in str(caught.value)


class TestModelsOfTheirOwnKind:
    """Whatever a model's code does with a stranger's attention, the user reads one sentence."""

    def test_windows_that_only_a_mask_knows(self) -> None:
        message = refusal(build("phimoe", num_local_experts=4, sliding_window=8))
        assert "limits attention to [8] tokens only by its mask" in message

    def test_dropped_layers(self) -> None:
        message = refusal(make_model("opt", layerdrop=1e-6))
        assert "layerdrop" in message

    def test_gradient_checkpointing_between_two_steps(self) -> None:
        model, data = make_model("llama"), draw(20)
        step = Step(model, Schedule(chunk=16))
        step(*data)
        model.model.layers[0].gradient_checkpointing = True
        for run in (step, step.evaluate):
            with pytest.raises(UnsupportedError, match="gradient_checkpointing_disable"):
                run(*data)
        model.model.layers[0].gradient_checkpointing = False
        step(*data)

    def test_a_classifier(self) -> None:
        """GPT-2's pools in a way of its own; that of most families gives values of a head."""
        message = refusal(build("gpt2", AutoModelForSequenceClassification))
        assert "returns no logits for each token; expected a causal LM" in message


class _Own(nn.Module):
    """Attends without asking anyone, and takes no cache."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        scores = hidden_states @ hidden_states.mT
        later = torch.ones_like(scores).triu(1).bool()
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ hidden_states, None
