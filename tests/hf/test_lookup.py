"""Embedding chunks for their backward: by the table alone where that is a layer's input."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.hf.stages import CausalLMStages
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.hf.test_families import KEPT
from tests.zoo import FAMILIES, make_model

IDS = torch.tensor([[3, 1, 4, 1, 5]])
POSITIONS = torch.arange(IDS.shape[1])[None]


def twice(stages: CausalLMStages) -> tuple[Tensor, Tensor]:
    """The first layer's input, with the layers' calls and then alone."""
    with stages.kept_shells():
        with torch.no_grad():
            hidden, _ = stages.embed(IDS, POSITIONS)
        return hidden, stages.embedded(IDS, POSITIONS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_embeds_to_the_same_bits(name: str) -> None:
    assert torch.equal(*twice(CausalLMStages(make_model(name))))


@pytest.mark.parametrize(("name", "calls"), [("llama", 1), ("opt", 2)])
def test_the_decoder_runs_where_it_changes_what_the_table_holds(
    name: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, seen = CausalLMStages(make_model(name)), []
    kind: Any = type(stages.decoder)
    own = kind.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        seen.append(keywords.get("use_cache"))
        return own(*arguments, **keywords)

    monkeypatch.setattr(kind, "forward", forward)
    twice(stages)
    assert seen.count(False) == calls


def in_place(_: Any, arguments: tuple[Any, ...]) -> None:
    arguments[0].mul_(2)


def test_what_a_decoder_writes_into_its_embeddings_is_seen() -> None:
    """The tensor is the table's, but no longer what it returned."""
    model = make_model("llama")
    model.model.rotary_emb.register_forward_pre_hook(in_place)
    hidden, again = twice(CausalLMStages(model))
    assert torch.equal(hidden, again)
    assert torch.equal(hidden, 2 * model.model.embed_tokens(IDS))


def test_a_hook_of_the_embedding_runs_once_a_time() -> None:
    """PEFT asks by one that the embeddings require gradients."""
    model = make_model("llama")
    seen: list[Any] = []
    model.get_input_embeddings().register_forward_hook(lambda *of: seen.append(of[1]))
    data = draw(29)
    assert_close(run_step(model, KEPT, data), run_oracle(model, data))
    seen.clear()
    twice(CausalLMStages(model))
    assert len(seen) == 2


def test_inference_tensors_are_embedded_by_the_decoder() -> None:
    """They count no versions."""
    with torch.inference_mode():
        assert torch.equal(*twice(CausalLMStages(make_model("llama"))))
