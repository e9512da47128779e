"""Every causal architecture of transformers, tiny: exact, or refused with its reason.

`python -m tests.hf.test_every_architecture` writes the table of docs/reference/models.md.
"""

import re
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from farspan.engine.step import Step
from farspan.hf.probe import Float64Mode
from farspan.spec import Schedule, UnsupportedError
from tests.hf.test_text import KINDS
from tests.numerics import relative_error
from tests.zoo import (
    COMMON,
    FAMILIES,
    FURTHER,
    GEMMA4,
    GEMMA4_E2B,
    GPT2,
    RECURRENT,
    SHARED_KV,
    make_model,
    scatter_weights,
)

PAGE = Path("docs/reference/models.md")
RELEASE = f"transformers {transformers.__version__}"
MARKS = "<!-- architectures -->", "<!-- end of architectures -->"
KNOWN = {**FAMILIES, **FURTHER, **RECURRENT}
# Relative to all gradients: of a thousandth of these the last digits of float64 are left.
LIMIT = 1e-9

# Sizes of every architecture that has a field of this name.
SMALL: dict[str, Any] = {
    **COMMON,
    **GPT2,
    **dict.fromkeys(("d_model", "embed_dim", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("attention_hidden_size", "seq_length"), 32),
    **dict.fromkeys(("ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_layers", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "index_n_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(
        ("hidden_dropout", "dropout", "activation_dropout", "hidden_dropout_prob"), 0.0
    ),
    **dict.fromkeys(("attention_probs_dropout_prob", "layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "embed_dropout"), 0.0),
    **dict.fromkeys(("classifier_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "mamba_d_head", "index_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "index_topk"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("block_size", "hidden_size_per_layer_input", "mamba_d_state"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "mamba_dt_rank", "time_step_rank", "rotary_dim"), 4),
    **dict.fromkeys(("linear_num_value_heads", "adapter_rank", "laurel_rank"), 4),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "altup_num_inputs"), 2),
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 64,
    "emb_dim": 32,
    "max_seq_len": 256,
    "n_words": COMMON["vocab_size"],
    "v_head_dim": 6,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
}

# Fields of an architecture that its defaults do not make a small causal model of.
DECODER = {"is_decoder": True}
QWEN4 = {
    "head_dim": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Their configurations hide sizes that layers differ in.
E2B = {**COMMON, **GEMMA4_E2B, "model_type": "gemma4_text"}
UNIFIED = {**COMMON, **GEMMA4, **SHARED_KV, "model_type": "gemma4_unified_text"}
FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text"), DECODER),
    **dict.fromkeys(("electra", "ernie", "megatron-bert", "rembert", "roberta"), DECODER),
    **dict.fromkeys(("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"), DECODER),
    **dict.fromkeys(("xlm-roberta-xl", "reformer"), DECODER),
    "xmod": {**DECODER, "default_language": "en_XX"},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "gemma4": {**KINDS["gemma4"], "text_config": E2B},
    "gemma4_unified": {
        **{"text_config": UNIFIED, "image_token_id": 60},
        **{"video_token_id": 59, "audio_token_id": 58},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mpt": {"attn_config": {"alibi": True}},
    "reformer": {
        **DECODER,
        "axial_pos_embds": False,  # which need 4,096 tokens
        "hidden_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
}
# They need packages or weights that are not here, or parts of other models.
UNTRIED = {
    "gemma3n": "its vision tower needs timm; its text model is gemma3n_text",
    "dots3_note": "its parts must be larger; its text model is dots3_note_text",
    "musicgen": "is the decoder of an encoder-decoder model",
    "musicgen_melody": "is the decoder of an encoder-decoder model",
    "prophetnet": "is the decoder of an encoder-decoder model",
    "gemma4_assistant": "drafts tokens from the keys and values of another model",
    "gemma4_unified_assistant": "drafts tokens from the keys and values of another model",
}


def architectures() -> list[str]:
    return sorted(n for n, kind in CONFIG_MAPPING.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING)


def small_fields(config: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    made = config()
    # MPT's dropout is the integer 0.
    found = {n: x or type(getattr(made, n))(x) for n, x in SMALL.items() if _is_set(made, n)}
    if hasattr(made, "num_key_value_heads"):
        found["num_key_value_heads"] = SMALL["num_key_value_heads"]
    for name, kind in (getattr(config, "sub_configs", None) or {}).items():
        inner = type(getattr(made, name)) if kind is AutoConfig else kind
        with suppress(Exception):  # of a part that the architecture does without
            found[name] = {**small_fields(inner, {}), "model_type": inner.model_type}
    inner = found.keys() & (getattr(config, "sub_configs", None) or {}).keys()
    return found | {n: {**found[n], **x} if x and n in inner else x for n, x in fields.items()}


def _is_set(config: Any, name: str) -> bool:
    """Whether a configuration has a value for this field, and takes another one."""
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        return getattr(config, name, None) is not None
    except NotImplementedError:  # of XLNet, for lengths
        return False


def small_model(name: str) -> PreTrainedModel:
    if name in KNOWN:
        return make_model(name)
    config = CONFIG_MAPPING[name](**small_fields(CONFIG_MAPPING[name], FIELDS.get(name, {})))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    scatter_weights(model)
    return model.train()


@cache
def verdict(name: str) -> str:
    """`exact`, the reason why a step refuses the model, or how it differs from transformers."""
    if name in UNTRIED:
        return UNTRIED[name]
    warnings.simplefilter("ignore")
    with Float64Mode():
        model, ids = small_model(name), torch.randint(3, 60, (2, 23))
        try:
            loss = Step(model, Schedule(chunk=7))(ids, ids)
        except UnsupportedError as error:
            return reason(str(error))
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False).logits
        plain = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        plain.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = sum(float(g.norm()) ** 2 for g in grads.values()) ** 0.5
    errors = {
        n: float((g - found.get(n, 0 * g)).norm()) / max(float(g.norm()), 1e-3 * whole)
        for n, g in grads.items()
    }
    worst = max(errors, key=lambda n: errors[n])
    if errors[worst] <= LIMIT and relative_error(loss, plain) <= LIMIT:
        return "exact"
    return f"DIFFERENT: {worst} by {errors[worst]:.1e}"


def reason(error: str) -> str:
    """The error, without the class's name and what to do."""
    text = re.sub(
        r"^model: (\w+(ForCausalLM|LMHeadModel|Decoder|ForConditionalGeneration) )?", "", error
    )
    return re.split(r"; (?:expected|set|use|only|every)", text)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", architectures())
def test_an_architecture_is_exact_or_refused_as_the_page_says(name: str) -> None:
    found = verdict(name)
    assert not found.startswith("DIFFERENT"), found
    assert not re.search(r"\b\w+Error\b|object|NoneType", found), found
    page = PAGE.read_text()
    if RELEASE in page:
        refused = dict(re.findall(r"^\| `(.+?)` \| (.+?) \|$", page, re.M))
        assert refused.get(name, "exact") == found


def table() -> str:
    found = {name: verdict(name) for name in architectures()}
    exact = [name for name, text in found.items() if text == "exact"]
    rows = [f"| `{name}` | {text} |" for name, text in found.items() if text != "exact"]
    intro = (
        f"Of the {len(found)} causal architectures of {RELEASE}, {len(exact)} are exact, each as a "
        f"tiny model that `make test-all` trains: {', '.join(exact)}. The others are refused:"
    )
    return "\n".join([intro, "", "| architecture | why it is refused |", "|---|---|", *rows])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{after}")
