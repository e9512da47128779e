"""RoPE that takes one of two tables by the longest position: every chunk's is of the same one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.engine.step import Step
from farspan.hf.stages import CausalLMStages
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import Data, assert_close, draw, run_oracle, run_step
from tests.grids import part_of
from tests.numerics import relative_error
from tests.zoo import make_model

pytestmark = pytest.mark.usefixtures("float64_throughout")

ORIGINAL = 32
SCHEDULE = Schedule(chunk=13, groups=(1, 3), kv=Tier.HOST, kv_block=12, attention_save_fraction=0.4)


def long_rope(family: str) -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": ORIGINAL,
    }
    fields: Any = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    return make_model(family, rope_parameters=rope, max_position_embeddings=128, **fields)


def in_documents(*rows: tuple[int, ...]) -> Data:
    """A batch whose rows are packed from documents of so many tokens."""
    marks = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    data = draw(sum(rows[0]), batch=len(rows), seed=len(rows))
    return replace(data, document_ids=torch.stack(marks))


SEQUENCES = {
    "one long document": draw(61),
    "as long as the short table reaches": draw(ORIGINAL),
    "one more": draw(ORIGINAL + 1),
    "short documents": in_documents((30, 31)),
    "one of two rows has a long one": in_documents((30, 31), (10, 51)),
}


@pytest.mark.parametrize("family", part_of(["llama", "phi3"], "phi3"))
def test_each_sequence_has_the_table_of_its_longest_document(family: str) -> None:
    """One step after the other: a table of one must not stay for the next."""
    model = long_rope(family)
    step = Step(model, SCHEDULE, poison=True)
    for what, data in SEQUENCES.items():
        expected = run_oracle(model, data)
        assert_close(run_step(model, step, data), expected)
        assert relative_error(step.evaluate(*data), expected.loss) < 1e-12, what


def test_a_step_keeps_no_table_for_the_next() -> None:
    stages, positions = CausalLMStages(long_rope("phi3")), torch.arange(4)[None]
    tables = []
    for longest in (ORIGINAL, 61):
        stages.settle(longest)
        with stages.kept_shells():
            calls = [stages.calls(1, positions)[0] for _ in range(2)]
        pair = [call.keywords["position_embeddings"][0] for call in calls]
        assert torch.equal(*pair)
        tables.append(pair[0])
    assert not torch.equal(*tables)


def test_steps_write_no_table_into_the_model() -> None:
    """It would be taken for an edit, and each step would prepare the model again."""
    step = Step(long_rope("phi3"), SCHEDULE)
    step(*draw(61))
    prepared = step.prepared_model
    step(*draw(ORIGINAL))
    assert step.prepared_model is prepared


class OfItsOwn(nn.Module):
    """Scales the table by the longest position, as PhiMoE's does."""

    rope_type = "longrope"

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(x, position_ids)
        return cos * position_ids.max(), sin * position_ids.max()


def test_a_table_that_is_chosen_in_another_way_is_refused() -> None:
    model = long_rope("llama")
    model.model.rotary_emb = OfItsOwn(model.model.rotary_emb)
    with pytest.raises(UnsupportedError, match="OfItsOwn chooses the table"):
        CausalLMStages(model).settle(100)


def test_one_that_is_not_beside_the_layers_is_refused() -> None:
    model = long_rope("llama")
    model.model.rotary_emb.rope_type = "default"
    with pytest.raises(UnsupportedError, match="LlamaModel chooses the table"):
        Step(model, SCHEDULE)
