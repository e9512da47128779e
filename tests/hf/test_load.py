"""Weights come from the folder, all of them, or the folder is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from farspan.engine.step import Step
from farspan.hf.load import (
    MAPS,
    Weights,
    add_adapters,
    load_config,
    load_model,
    refuse_unpinned,
    save_model,
)
from farspan.spec import Schedule, UnsupportedError
from tests.grids import part_of
from tests.zoo import FAMILIES, make_model

MISSING = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, Tensor]
Save = Callable[[Callable[[Tensors], object], bool], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a tiny model's folder after a change to its weights; the flag ties its head."""

    def write(change: Callable[[Tensors], object], tied: bool = False) -> Path:
        config = Qwen2Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})
        return tmp_path

    return write


def test_experts_run_in_float64(tmp_path: Path) -> None:
    """torch's grouped product, in which they run by default, has no float64."""
    made = load_model(config=QWEN3_MOE, dtype=torch.float64)
    made.save_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    for model in (made, load_model(path=str(tmp_path), dtype=torch.float64)):
        assert float(Step(model, Schedule(chunk=5)).evaluate(ids, ids)) > 0
    assert "experts_implementation" not in (tmp_path / "config.json").read_text("utf-8")


def test_what_is_saved_is_what_is_loaded(save: Save) -> None:
    folder = save(lambda _: None, False)
    saved = load_file(folder / "model.safetensors")
    model = load_model(path=str(folder), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    assert model.training


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which files are mapped")
@pytest.mark.parametrize("converted", [False, True])
def test_a_file_whose_weights_were_converted_leaves_memory(tmp_path: Path, converted: bool) -> None:
    """The final norm stays in its dtype, and one view of a file's map keeps all of its pages."""
    config = Qwen2Config(
        vocab_size=20_000,  # 1.2 MiB of a table and a head in bfloat16
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    if converted:
        weights = {n: w if n == "model.norm.weight" else w.bfloat16() for n, w in weights.items()}
        save_file(weights, file, metadata={"format": "pt"})
    model = load_model(path=str(tmp_path), dtype=torch.float32)
    mapped = [line for line in MAPS.read_text().splitlines() if str(file) in line]
    assert bool(mapped) is not converted
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].float()), name


@pytest.mark.parametrize("name", part_of(FAMILIES, *list(FAMILIES)[::6]))
def test_a_model_without_weights_is_the_model_but_for_them(name: str, tmp_path: Path) -> None:
    make_model(name, torch.float32).config.save_pretrained(tmp_path)
    model, blank = (
        load_model(path=str(tmp_path), dtype=torch.bfloat16, weights=weights)
        for weights in (Weights.RANDOM, Weights.NONE)
    )
    known = dict(model.named_parameters(remove_duplicate=False))
    found = dict(blank.named_parameters(remove_duplicate=False))
    assert {n: (p.shape, p.dtype) for n, p in found.items()} == {
        n: (p.shape, p.dtype) for n, p in known.items()
    }
    assert all(p.is_meta for p in found.values())
    assert len(set(found.values())) == len(set(known.values()))  # tied alike
    buffers = dict(blank.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for path, buffer in model.named_buffers():
        assert torch.equal(buffers[path], buffer), path
    assert blank.training


def test_missing_weights_are_refused_by_name(save: Save) -> None:
    folder = save(lambda weights: weights.pop(MISSING), False)
    message = rf"model\.path: .* holds no weights for {MISSING}, which would start from random"
    with pytest.raises(UnsupportedError, match=message):
        load_model(path=str(folder), dtype=torch.float32)


def test_weights_without_a_place_are_told(save: Save) -> None:
    folder = save(lambda weights: weights.update({"visual.weight": torch.zeros(2)}), False)
    message = r"weights that Qwen2ForCausalLM has no place for: visual\.weight; they are ignored"
    with pytest.warns(UserWarning, match=message):
        load_model(path=str(folder), dtype=torch.float32)


def test_weights_of_another_size_are_refused(save: Save) -> None:
    folder = save(lambda weights: weights.update({MISSING: torch.zeros(3, 3)}), False)
    with pytest.raises(
        UnsupportedError, match=r"model\.path: transformers could not load a causal LM"
    ):
        load_model(path=str(folder), dtype=torch.float32)


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}


def test_a_field_that_a_family_reads_without_declaring_it_is_one(tmp_path: Path) -> None:
    """Heads of Qwen3-MoE are wider than their share of the hidden size: 128 of 2048 / 32 = 64."""
    assert not hasattr(Qwen3MoeConfig(), "head_dim")
    wide = {**QWEN3_MOE, "head_dim": 32}
    model = load_model(config=wide, dtype=torch.float32)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (2 * 32, 16)
    load_model(config=QWEN3_MOE, dtype=torch.float32).config.save_pretrained(tmp_path)
    changed = load_config(path=str(tmp_path), config=None, overrides={"head_dim": 32})
    assert changed.head_dim == 32


def test_a_field_that_differs_by_layer_is_one() -> None:
    """Gemma4's configuration refuses to tell it of all layers; a file's is that of most."""
    gemma = {"model_type": "gemma4_text", "head_dim": 16}
    made = load_config(path=None, config=gemma, overrides={})
    assert made.per_layer_config[0].head_dim == 16
    made = load_config(path=None, config=gemma, overrides={"head_dim": 8})
    assert made.per_layer_config[0].head_dim == 8


def test_fields_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^model\.config: .*mamba_n_heads must divide"):
        load_config(path=None, config={"model_type": "bamba", "hidden_size": 40}, overrides={})
    with pytest.raises(UnsupportedError, match=r"^model\.config: .*'self'"):
        load_config(path=None, config={**QWEN3_MOE, "self": 32}, overrides={})


@pytest.mark.parametrize("name", ["heads_dim", "head", "head_dims", "hidden_sizes"])
def test_a_field_that_nobody_reads_is_refused(name: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^model\.config\.{name}: Qwen3MoeConfig has no such field"
    ):
        load_model(config={**QWEN3_MOE, name: 32}, dtype=torch.float32)


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers_is_refused(layers: int) -> None:
    given = {"num_hidden_layers": layers}
    words = f"^model: num_hidden_layers is {layers}, expected a whole number above 0"
    with pytest.raises(UnsupportedError, match=words):
        load_config(path=None, config=QWEN3_MOE, overrides=given)
    with pytest.raises(UnsupportedError, match=words):
        load_config(path=None, config={**QWEN3_MOE, **given}, overrides={})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layer_types": ["full_attention"]}, r"^model\.overrides\.layer_types: .*must be equal"),
        ({"hidden_act": "soft"}, r"'soft'; check model\.overrides\.hidden_act: soft$"),
        ({"hidden_size": "wide"}, r"^model\.overrides\.hidden_size: .*expected int, got str"),
        (
            {"rope_parameters": {"rope_type": "yarm", "factor": 2.0}},
            r"rope_parameters\.rope_type: .*no RoPE of type 'yarm'",
        ),
    ],
)
def test_an_override_that_no_model_can_have_is_named(
    overrides: dict[str, object], message: str
) -> None:
    config = {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    with pytest.raises(UnsupportedError, match=message):
        load_model(config=config, overrides=overrides, dtype=torch.float32, weights=Weights.NONE)


def test_a_folder_of_adapters_is_refused(save: Save, tmp_path: Path) -> None:
    """Beside a model transformers would lay them on it; alone they are none."""
    folder = save(lambda _: None, False)
    model = load_model(path=str(folder), dtype=torch.float32)
    add_adapters(model, rank=4, alpha=8.0)
    save_model(model, folder)
    save_model(model, tmp_path / "alone")
    for place in (folder, tmp_path / "alone"):
        with pytest.raises(
            UnsupportedError, match=r"model\.path: .* holds adapters, .* the folder of a model"
        ):
            load_model(path=str(place), dtype=torch.float32)


def test_a_revision_goes_to_all_that_is_read_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of code that another repository has for it, too."""
    make_model("qwen2").save_pretrained(tmp_path)
    asked: list[dict[str, Any]] = []

    def noted(own: Any) -> Any:
        def load(path: str, **given: Any) -> Any:
            assert path == "owner/name"
            asked.append({name: given[name] for name in ("revision", "code_revision")})
            return own(tmp_path, **given)

        return load

    def located(path: str, name: str, **given: Any) -> str:
        assert (path, given) == ("owner/name", {"revision": "0a1b"})
        return str(tmp_path / name)

    monkeypatch.setattr("farspan.hf.load.cached_file", located)
    for auto in (AutoConfig, AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", noted(auto.from_pretrained))
    load_model(path="owner/name", dtype=torch.float32, revision="0a1b")
    assert asked == [{"revision": "0a1b", "code_revision": "0a1b"}] * 2


def test_code_that_nothing_pins_is_refused(tmp_path: Path) -> None:
    """Of a folder only its own stays as it is."""
    words = r"model\.revision: missing: .* the commit \(40 hex.*\) whose code you have read"
    with pytest.raises(UnsupportedError, match=words):
        load_model(path="owner/name", dtype=torch.float32, trust_remote_code=True)
    for moves in ("main", "v1", "0a1b"):
        with pytest.raises(
            UnsupportedError, match=rf"model\.revision: '{moves}' is a branch or a tag: .*"
        ):
            refuse_unpinned("owner/name", True, moves)
    refuse_unpinned("owner/name", True, "0a1b" * 10)
    make_model("qwen2").save_pretrained(tmp_path)
    load_model(path=str(tmp_path), dtype=torch.float32, trust_remote_code=True)
    named = json.dumps({"auto_map": {"AutoTokenizer": ["owner/name--tokens.Mine", None]}})
    (tmp_path / "tokenizer_config.json").write_text(named)
    with pytest.raises(UnsupportedError, match=words):
        load_model(path=str(tmp_path), dtype=torch.float32, trust_remote_code=True)
    load_model(path=str(tmp_path), dtype=torch.float32)
