"""What a step is said to hold by a model's profile is what it is measured to hold."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import farspan
from farspan.ask import measuring
from farspan.engine import profile as engine
from farspan.engine.profile import measure
from farspan.engine.step import Step
from farspan.profile import store
from farspan.profile.catalog import find_config, presets
from farspan.profile.model import Variant, highest
from farspan.profile.store import RANKS, Profiles, to_json
from farspan.spec import UnsupportedError
from tests.grids import crossed
from tests.planner.test_walk import CLOSE, EXACT, agree, in_chunks, make
from tests.zoo import FURTHER as ZOO
from tests.zoo import RECURRENT, make_model

# Windows of every other kind, and keys wider than values.
FURTHER: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 90, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
    },
}


@pytest.mark.parametrize(("name", "family"), crossed(["grouped", "recompute", "memo"], FURTHER))
def test_further_families_are_predicted(name: str, family: str) -> None:
    model = make(family, torch.bfloat16, **FURTHER[family])
    agree(Step(model, in_chunks(name, 230)), 1, 230, CLOSE)


# Experts beside states, fields of each layer that are not cut, and layers that return tuples.
WHOLE = [name for name in ("lfm2_moe", "laguna", "falcon_h1") if name in {**ZOO, **RECURRENT}]


@pytest.mark.parametrize("family", WHOLE)
def test_cells_of_further_families_are_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not estimated, which takes up to a third more."""
    config = make_model(family, torch.float32).config.to_dict()
    monkeypatch.setattr(engine, "estimated", None)
    assert measure(config, Variant("float32")).kinds


SMALL = {**find_config("Qwen2.5-0.5B"), "num_hidden_layers": 3}


def test_cells_are_lines_in_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two other lengths give the same."""
    fused = Variant("bfloat16", 0, True, True)
    (expected,) = to_json([measure(SMALL, fused)])
    monkeypatch.setattr(engine, "LENGTHS", (1280, 320))
    assert to_json([measure(SMALL, fused)]) == [expected]


def test_a_product_that_nobody_reads_is_made_again_in_the_backward() -> None:
    """Its backward makes act(gate) * up anew, which takes more than its forward spares."""
    profile = measure(find_config("Qwen2.5-7B"), Variant("bfloat16", 0, True, True))
    read, unread = (profile.kinds[0].cells[name] for name in ("graph", "graph unread"))
    product = 18944 * profile.spec.element_bytes  # a token's act(gate) * up
    assert read.graph[1] - unread.graph[1] == product
    chunk = 16384
    held = [highest(cell.backward_before, chunk) for cell in (read, unread)]
    assert held[1] >= held[0] + product * chunk


SHIPPED = [preset.name for preset in presets()]


# GPT-2 itself drops; with dropout no step is measured, and training it sets these to 0, too.
NO_DROPOUT = {"GPT-2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}


def anew(name: str, *variants: Variant) -> None:
    made, config = store.shipped(name), {**find_config(name), **NO_DROPOUT.get(name, {})}
    values = to_json([measure(config, variant) for variant in variants])
    for variant, value in zip(variants, values, strict=True):
        assert made[variant.key()] == json.loads(json.dumps(value)), (name, variant.key())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_preset_ships_its_profiles(name: str) -> None:
    assert len(store.shipped(name)) == 8
    assert {variant.key() for variant in store.SHIPPED} < set(store.shipped(name))


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "GPT-OSS-20B"])
def test_what_ships_is_what_the_engine_measures(name: str) -> None:
    """`farspan profile NAME --write` makes a preset's anew."""
    anew(name, Variant("bfloat16", 0, True, True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHIPPED)
def test_all_that_ships_is_what_the_engine_measures(name: str) -> None:
    for variant in store.SHIPPED:
        anew(name, variant)
        if variant.dtype == "bfloat16":
            anew(name, *(replace(variant, rank=rank) for rank in RANKS))


def test_a_model_that_does_not_ship_is_measured_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = partial(Profiles, SMALL, "mine", measuring=measuring)
    first = mine().of(Variant())
    monkeypatch.setattr(engine, "measure", None)
    again = mine().of(Variant())
    assert to_json([again]) == to_json([first])
    assert first.spec.name == "mine"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (path,) = (tmp_path / "farspan" / "profiles").iterdir()
    value = json.loads(path.read_text())
    layerless = {**value, "kinds": [], "kind_of": [3]}
    for broken in "{", "[]", json.dumps(layerless), json.dumps({**value, "kinds": [{"cells": 1}]}):
        path.write_text(broken)
        assert to_json([mine().of(Variant())]) == to_json([first])
        assert json.loads(path.read_text()) == value


def test_a_model_with_dropout_is_refused_as_it_is_for_training(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {**SMALL, "attention_dropout": 0.25}
    with pytest.raises(UnsupportedError, match=r"model: dropout 0\.25 at .*attention_dropout"):
        farspan.plan(config, context="16K", machine="h200")


def test_another_release_of_a_library_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.digest(SMALL, Variant())
    assert before == store.digest(dict(reversed(SMALL.items())), Variant())
    assert before != store.digest({**SMALL, "hidden_size": 64}, Variant())
    assert before != store.digest(SMALL, Variant(rank=4))
    with monkeypatch.context() as changed:  # as by an edit of the engine
        changed.setattr(store, "_measuring", lambda: "other")
        assert before != store.digest(SMALL, Variant())
    monkeypatch.setattr(store, "version", lambda name: f"a later {name}")
    assert before != store.digest(SMALL, Variant())


def test_reading_what_ships_imports_no_torch() -> None:
    program = (
        "import sys; from farspan.profile.model import Variant; "
        "from farspan.profile.store import Profiles; "
        "found = Profiles({}, 'x', 'Qwen2.5-7B').of(Variant('bfloat16', 12)); "
        "assert found.spec.trainable == 28 * 12 * 90112, found.spec.trainable; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_cannot_be_measured_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"profiles of mine .* give measuring"):
        Profiles(SMALL, "mine").of(Variant())


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_scans_of_many_tokens_are_nearly_a_line(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sizes that people train, what grows with its square is below 0.01% of an 8K chunk."""
    config = AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=1000).to_dict()
    tokens, graphs = 2**13, []
    for lengths in (engine.LENGTHS, (tokens, tokens + 256)):
        monkeypatch.setattr(engine, "LENGTHS", lengths)
        start, slope = measure(config, Variant("bfloat16")).kinds[0].cells["graph"].graph
        graphs.append(start + slope * tokens)
    assert graphs[0] == pytest.approx(graphs[1], rel=EXACT)
