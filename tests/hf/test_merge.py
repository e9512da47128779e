"""Adapters merged into a model's folder: the function of peft's adapters on the base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from farspan.hf import merge as module
from farspan.hf.merge import merge
from farspan.spec import UnsupportedError
from tests.numerics import EXACT, relative_error
from tests.zoo import make_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning", "ignore:.*tie:UserWarning"
)
IDS = torch.arange(20)[None]


def adapted(root: Path, family: str = "qwen2", shard: str = "5GB", **given: Any) -> Path:
    """A folder of adapters that are not zero, for a model in `root / base`, both in float64."""
    dtype = given.pop("dtype", torch.float64)
    tied: dict[str, Any] = {"tie_word_embeddings": True} if given.pop("tied", False) else {}
    make_model(family, **tied).to(dtype).save_pretrained(root / "base", max_shard_size=shard)
    base: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=dtype)
    fields: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "down_proj"],
    } | given
    model = get_peft_model(base, LoraConfig(**fields, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(root / "adapters"), save_embedding_layers=False)
    return root / "adapters"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def expected(adapters: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(adapters.parent / "base", dtype=torch.float64)
    return logits(PeftModel.from_pretrained(base, adapters, autocast_adapter_dtype=False))


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_lora_is_added_where_the_weights_lie(
    tmp_path: Path, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_model", None)  # no model is loaded
    adapters = adapted(tmp_path, shard=shard)
    (adapters / "tokenizer.json").write_text("the run's")
    (tmp_path / "base" / "tokenizer.json").write_text("the base's")
    for folder in adapters, tmp_path / "base":  # by which sparse attention compared pages
        (folder / "index").mkdir()
        (folder / "index" / folder.name).touch()
    found = merge(adapters, tmp_path / "out")
    assert found.streamed
    assert found.describe().startswith(f"adapters of {found.modules} modules merged; the model")
    assert [path.name for path in (tmp_path / "out" / "index").iterdir()] == ["adapters"]
    files = {path.name for path in (tmp_path / "base").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"farspan.json"}
    assert (len(files) > 5) == (shard == "20KB")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "the run's"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert merged.dtype == torch.float64
    assert relative_error(logits(merged), expected(adapters)) <= EXACT
    changed = changed_in(tmp_path / "base", tmp_path / "out")
    assert len(changed) == found.modules
    assert all("q_proj" in name or "down_proj" in name for name in changed)


def changed_in(base: Path, out: Path) -> list[str]:
    return [
        name
        for path in base.glob("*.safetensors")
        for name, weight in load_file(path).items()
        if not torch.equal(weight, load_file(out / path.name)[name])
    ]


def test_a_sum_is_rounded_once(tmp_path: Path) -> None:
    adapters = adapted(tmp_path, dtype=torch.bfloat16)
    merge(adapters, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    name = "model.layers.0.self_attn.q_proj"
    held = load_file(adapters / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.{name}.lora_{kind}.weight"].float() for kind in "AB")
    wanted = torch.addmm(before[f"{name}.weight"].float(), b, a, alpha=3.0).bfloat16()
    assert torch.equal(after[f"{name}.weight"], wanted)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("qwen2", {"use_dora": True}),
        ("qwen2", {"use_rslora": True}),
        ("qwen2", {"modules_to_save": ["norm"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
)
def test_other_kinds_are_merged_by_peft(tmp_path: Path, family: str, given: dict[str, Any]) -> None:
    adapters = adapted(tmp_path, family, **given)
    assert not merge(adapters, tmp_path / "out").streamed
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert merged.dtype == torch.float64
    assert relative_error(logits(merged), expected(adapters)) <= EXACT


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    adapters = adapted(tmp_path)
    out, base = tmp_path / "out", tmp_path / "base"
    with pytest.raises(UnsupportedError, match=r"output: .*base exists already"):
        merge(adapters, base)
    with pytest.raises(UnsupportedError, match="holds a whole model"):
        merge(base, out)
    with pytest.raises(UnsupportedError, match="holds no adapters; give a run's folder"):
        merge(tmp_path, out)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UnsupportedError, match="has not exported its adapters yet"):
        merge(tmp_path, out)
    with pytest.raises(UnsupportedError, match="base: no folder no/where/at all here"):
        merge(adapters, out, "no/where/at all")
    narrow = tmp_path / "narrow"
    make_model("qwen2", hidden_size=16).save_pretrained(narrow)
    with pytest.raises(UnsupportedError, match="another model; give that model as --base"):
        merge(adapters, out, str(narrow))
    config = json.loads((adapters / "adapter_config.json").read_text())
    (adapters / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": ""})
    )
    with pytest.raises(UnsupportedError, match="does not name a base model"):
        merge(adapters, out)
    (adapters / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(UnsupportedError, match="cannot be read as safetensors"):
        merge(adapters, out, str(base))
    assert not list(tmp_path.glob("*out*"))
