"""Adapters of every kind on tied models, damaged adapters, links and shards in subfolders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from farspan.hf.merge import merge
from farspan.spec import UnsupportedError
from tests.hf.test_merge import adapted, expected, logits
from tests.numerics import EXACT, relative_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning", "ignore:.*[Tt]ie:UserWarning"
)


@pytest.mark.parametrize(
    ("given", "ties"),
    [
        ({"trainable_token_indices": [1, 5]}, True),
        ({"trainable_token_indices": {"lm_head": [1, 5], "embed_tokens": [2]}}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["embed_tokens"]}, False),
    ],
)
def test_adapters_of_a_tied_weight_keep_their_function(
    tmp_path: Path, given: dict[str, Any], ties: bool
) -> None:
    """Head and embedding stay one weight where the adapters change both alike, and become two where
    not: peft's own merge gives neither where LoRA is on one or both."""
    adapters = adapted(tmp_path, tied=True, **given)
    wanted = expected(adapters)
    merge(adapters, tmp_path / "out")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert relative_error(logits(merged), wanted) <= EXACT
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == ties


def edit(adapters: Path, **fields: Any) -> None:
    file = adapters / "adapter_config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, r"adapter_config.json: r: expected a whole number above 0, got 0"),
        ({"r": "four"}, "adapter_config.json: r: expected .* got 'four'"),
        ({"lora_alpha": "much"}, "adapter_config.json: lora_alpha: expected a number, got 'much'"),
        ({"lora_alpha": ...}, "adapter_config.json: lora_alpha: expected a number, got None"),
        ({"lora_alpha": float("nan")}, "adapter_config.json: lora_alpha: expected a finite number"),
        ({"peft_type": 3}, "adapter_config.json: peft_type: expected a name such as LORA, got 3"),
        ({"peft_type": "LARO"}, "peft cannot merge them"),
        (
            {"r": 8},
            r"lora_A.weight of shape \[4, 48\] does not fit rank 8; set r and lora_alpha in",
        ),
        (
            {"use_dora": True},
            "lora_magnitude_vector is missing, which adapter_config.json",
        ),
        ({"layers_to_transform": [0], "use_rslora": True}, "layers.1.* has no place in the model"),
    ],
)
def test_a_damaged_configuration_is_named(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    adapters = adapted(tmp_path)
    edit(adapters, **fields)
    with pytest.raises(UnsupportedError, match=message):
        merge(adapters, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    adapters = adapted(tmp_path)
    file = adapters / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name][0, 0] = value
    save_file(tensors, file)
    with pytest.raises(UnsupportedError, match=f"{name} has values that are not finite"):
        merge(adapters, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.int(), r"lora_A.weight is torch.int32; expected float64, float32"),
        (lambda a: a.to(torch.float8_e4m3fn), r"lora_A.weight is torch.float8_e4m3fn; expected"),
        (lambda a: a[..., None], r"its adapters A \[4, \d+, 1\] and B .* another model"),
        (
            lambda a: a.double() * 1e300,
            r"with its adapters has values that are not finite; check the base",
        ),
        (None, r"adapter_model.safetensors: holds no tensors"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, change: Any, message: str) -> None:
    adapters = adapted(tmp_path)
    file = adapters / "adapter_model.safetensors"
    tensors = load_file(file) if change else {}
    kept = {n: change(x).contiguous() if "lora_A" in n else x for n, x in tensors.items()}
    save_file(kept, file)
    edit(adapters, lora_alpha=1e20)
    with pytest.raises(UnsupportedError, match=message):
        merge(adapters, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    adapters = adapted(tmp_path)
    (adapters / "farspan.json").write_text("[]")
    with pytest.raises(UnsupportedError, match=r"farspan.json: expected a JSON object"):
        merge(adapters, tmp_path / "out")
    (adapters / "farspan.json").unlink()
    (adapters / "adapter_model.safetensors").unlink()
    (adapters / "adapter_model.safetensors").mkdir()
    with pytest.raises(UnsupportedError, match=r"adapter_model.safetensors: cannot be read as"):
        merge(adapters, tmp_path / "out")


def sharded(root: Path) -> Path:
    """Adapters of a base whose shards have one name in two folders."""
    adapters, base = adapted(root), root / "base"
    index = base / "model.safetensors.index.json"
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a/part.safetensors": names[::2], "b/part.safetensors": names[1::2]}
    for file, own in shards.items():
        (base / file).parent.mkdir()
        save_file({n: weights[n] for n in own}, base / file, {"format": "pt"})
    where = {name: file for file, own in shards.items() for name in own}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return adapters


def test_shards_in_subfolders_load_afterwards(tmp_path: Path) -> None:
    adapters = sharded(tmp_path)
    assert merge(adapters, tmp_path / "out").streamed
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert relative_error(logits(merged), expected(adapters)) <= EXACT


@pytest.mark.parametrize("where", [["part.safetensors"], {"a": 3}, {"a": "../base/x"}, "x"])
def test_a_damaged_index_of_shards_is_named(tmp_path: Path, where: Any) -> None:
    adapters = sharded(tmp_path)
    index = tmp_path / "base" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(UnsupportedError, match=r"index.json: weight_map: expected a file in this"):
        merge(adapters, tmp_path / "out")


def test_links_are_not_followed(tmp_path: Path) -> None:
    """But those within the hub's cache are its own."""
    adapters = adapted(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("a")
    (adapters / "notes.txt").symlink_to(secret)
    with pytest.raises(UnsupportedError, match=r"notes.txt is a link to"):
        merge(adapters, tmp_path / "out")
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(adapters)
    with pytest.raises(UnsupportedError, match=r"run/model is a link to"):
        merge(run, tmp_path / "out")
    (adapters / "notes.txt").rename(tmp_path / "base" / "notes.txt")
    with pytest.raises(UnsupportedError, match=r"base/notes.txt is a link to"):
        merge(adapters, tmp_path / "out")  # of a base that the adapters name
    (tmp_path / "base" / "notes.txt").unlink()
    snapshot = tmp_path / "models--x" / "snapshots" / "1234"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(adapters.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    merge(snapshot, tmp_path / "out")
    assert torch.isfinite(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))).all()
