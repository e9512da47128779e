"""Models and adapters that others train: exact, or refused for the true reason."""

from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from farspan.engine.step import Step
from farspan.hf.unsupported import context_limit
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.zoo import COMMON, make_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning",
    "ignore:Sparse invariant checks:UserWarning",
)
SCHEDULE = Schedule(
    chunk=13,
    groups=(1, 3),
    kv=Tier.HOST,
    kv_block=12,
    attention_save_fraction=0.4,
    activation_save_fraction=0.5,
)
TARGETS = ["q_proj", "up_proj"]


def adapted(config: Any) -> Any:
    model = get_peft_model(make_model("llama"), config).train()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:  # some are zero to begin with, and give the others no gradient
            parameter.data.normal_(0, 0.1)
    return model


@pytest.mark.usefixtures("float64_throughout")
class TestAdapters:
    @pytest.mark.parametrize("method", [peft.LoHaConfig, peft.LoKrConfig])
    def test_a_draw_that_is_compared_with_nothing(self, method: Any) -> None:
        """PEFT 0.21 draws a number for each module against a module dropout of 0."""
        model, data = adapted(method(r=2, target_modules=TARGETS)), draw(61)
        assert_close(run_step(model, SCHEDULE, data), run_oracle(model, data))

    @pytest.mark.parametrize("method", [peft.LoHaConfig, peft.LoKrConfig])
    @pytest.mark.parametrize("drops", ["module_dropout", "rank_dropout"])
    def test_a_draw_that_decides(self, method: Any, drops: str) -> None:
        """At first an adapter adds zero: outputs do not show whether it is there."""
        config = method(r=2, target_modules=TARGETS, **{drops: 0.5})
        with pytest.raises(UnsupportedError, match="draws random numbers"):
            Step(get_peft_model(make_model("llama"), config).train(), SCHEDULE)

    def test_of_sparse_tensors(self) -> None:
        model = adapted(peft.ShiraConfig(r=2, target_modules=TARGETS))
        data = draw(61)
        assert_close(run_step(model, SCHEDULE, data), run_oracle(model, data))

    @pytest.mark.skipif(not hasattr(peft, "FrodConfig"), reason="this peft has no FRoD")
    def test_of_sparse_products(self) -> None:
        model = adapted(peft.FrodConfig(target_modules=["q_proj", "k_proj"]))
        data = draw(61)
        assert_close(run_step(model, SCHEDULE, data), run_oracle(model, data))


BART = {
    **{"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
}
DECODER = "is the decoder of an encoder-decoder model (model.decoder.layers.0.encoder_attn"
ELSEWHERE = "computes attention, or a recurrence, in code of its own"
TWICE = "called the attention interface 4 times for 2 layers, 2 of which attend"
READS = "attends to later tokens (is_decoder is false in its configuration)"
REASONS: list[tuple[str, dict[str, Any], str]] = [
    ("falcon", {}, ELSEWHERE),
    ("rwkv", {"attention_hidden_size": 32}, ELSEWHERE),
    ("ctrl", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48}, "changes its input embeddings"),
    ("bart", BART, DECODER),
    ("bert", {}, READS),
    ("dory", {}, TWICE),
    ("zaya", {}, "passes a layer more than the hidden state of the layer before"),
]


def build(kind: str, fields: dict[str, Any]) -> PreTrainedModel:
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    config = AutoConfig.for_model(kind, **{**common, "num_hidden_layers": 2, **fields})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


class TestReasons:
    @pytest.mark.parametrize(("kind", "fields", "words"), REASONS)
    def test_are_the_true_ones(self, kind: str, fields: dict[str, Any], words: str) -> None:
        if kind not in CONFIG_MAPPING:  # of an older transformers
            return
        with pytest.raises(UnsupportedError) as caught:
            Step(build(kind, fields), Schedule(chunk=16))
        assert words in str(caught.value)
        assert "Error:" not in str(caught.value)

    @pytest.mark.usefixtures("float64_throughout")
    def test_positions_behind_padding(self) -> None:
        """RoBERTa's begin after its padding token's id, and leave padding out."""
        model, data = make_model("roberta"), draw(37, batch=2, documents=3)
        assert_close(run_step(model, Schedule(chunk=7), data), run_oracle(model, data))
        padding = model.config.pad_token_id
        assert context_limit(model) == model.config.max_position_embeddings - padding - 1
        data.input_ids[:, -2:] = padding
        run_step(model, Schedule(chunk=7), data)
        data.input_ids[0, 5] = padding
        with pytest.raises(UnsupportedError, match="a document goes on after padding"):
            run_step(model, Schedule(chunk=7), data)

    def test_a_head_of_another_dtype(self) -> None:
        """Plain transformers fails, too."""
        model: Any = make_model("llama", torch.bfloat16)
        model.lm_head.float()
        with pytest.raises(RuntimeError, match="same dtype"):
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        with pytest.raises(UnsupportedError) as caught:
            Step(model, Schedule(chunk=16))
        message = str(caught.value)
        assert "the forward of LlamaForCausalLM also fails without farspan" in message
        assert "lm_head.weight is torch.float32: cast all to one dtype" in message
