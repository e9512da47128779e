"""The bytes of weights of four bits are those that are planned."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.ask import Request, as_run
from farspan.engine.step import Step
from farspan.hf.load import add_adapters, load_model
from farspan.hf.quantized import held_bytes, parts_of
from farspan.planner.request import Optimizer, Question
from farspan.planner.states import states
from farspan.profile.model import highest
from farspan.program.program import group_bytes
from farspan.spec import Schedule, Tier, UnsupportedError
from farspan.train.context import inspect_model
from tests.grids import part_of
from tests.zoo import make_model

pytest.importorskip("bitsandbytes")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "intermediate_size": 44},  # of broken blocks
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {},  # whose experts are stacked, and stay as they are
    "gpt2": {},
}
RANK = 4


def made(root: Path, family: str, dtype: str) -> Any:
    torch.manual_seed(0)
    make_model(family, **FAMILIES[family]).save_pretrained(root)
    model = load_model(path=str(root), dtype=getattr(torch, dtype), nf4=True)
    add_adapters(model, rank=RANK, alpha=8.0)
    return model


def resident(model: Any) -> int:
    """Bytes of all memory that parameters have, and what they are unpacked with."""
    parts: Iterator[torch.Tensor] = (x for p in model.parameters() for x in parts_of(p))
    return sum({x.data_ptr(): x.nbytes for x in parts}.values())


def asked(model: Any, dtype: str, **changes: Any) -> Question:
    fields = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    given: dict[str, Any] = {"lora": RANK, "quantize": "nf4", "optimizer": Optimizer.NONE}
    return Request(fields, 64, "h200", dtype=dtype, **(given | changes)).question()


def planned(question: Question) -> int:
    return states(question, ((0, len(question.model.layers)),)).weights


@pytest.mark.parametrize(
    ("family", "dtype"),
    part_of(
        [(family, dtype) for dtype in ("float32", "bfloat16") for family in FAMILIES],
        ("mixtral", "float32"),
    ),
)
def test_resident_bytes_are_as_planned(tmp_path: Path, family: str, dtype: str) -> None:
    model = made(tmp_path, family, dtype)
    held, question = resident(model), asked(model, dtype)
    assert planned(question) == held
    assert planned(as_run(replace(question, nf4=False, profile=None), RANK)) > held


def test_streamed_bytes_are_as_planned(tmp_path: Path) -> None:
    """In main memory, and of each group on its way, but for ends of lines."""
    model = made(tmp_path, "llama", "bfloat16")
    question = asked(model, "bfloat16", weights="host", optimizer="host")
    groups = ((0, 1), (1, 3), (3, 4))
    there, held = states(question, groups), resident(model)
    assert (there.weights, there.weights_on_host) == (0, held)
    step = Step(model, Schedule(chunk=16, groups=(1, 2, 1), weights=Tier.HOST))
    assert step.weights is not None
    assert 0 <= step.weights.nbytes - held < 5 * (16 + 256)
    for layers in groups:
        own = model.base_model.layers[slice(*layers)].parameters()
        there_ = sum(map(held_bytes, own))
        assert group_bytes(question.model, layers, False) == there_
        assert 0 <= group_bytes(step.model_spec, layers, False) - there_ < 2 * 16


def test_a_run_plans_with_the_bytes_that_are_there(tmp_path: Path) -> None:
    model = made(tmp_path, "llama", "bfloat16")
    found = inspect_model(model, "bfloat16", torch.device("cpu"), RANK)
    assert found.profile is not None
    assert found.profile.variant.nf4
    question = replace(asked(model, "bfloat16"), model=found.model, profile=found.profile)
    assert planned(question) == resident(model)


def test_one_module_at_a_time_is_unpacked(tmp_path: Path) -> None:
    """The largest of a layer, with its scales in float32."""
    model = made(tmp_path, "llama", "bfloat16")
    question = asked(model, "bfloat16")
    plain = as_run(replace(question, nf4=False, profile=None), RANK)
    assert question.profile is not None
    assert plain.profile is not None
    sizes = [m.in_features * m.out_features for m in model.modules() if hasattr(m, "quant_state")]
    more = 2 * max(sizes) + 4 * -(-max(sizes) // 64)
    for name, lines in question.profile.kinds[0].cells.items():
        before = plain.profile.kinds[0].cells[name]
        for peak in ("before", "after", "backward_before", "backward_after"):
            of = tuple(getattr(one, peak) for one in (before, lines))
            tokens = (64,) * (len(of[0][0]) - 1) if of[0] else ()
            expected = highest(of[0], *tokens) + more * bool(of[0])
            assert highest(of[1], *tokens) == expected
        assert lines.at == before.at


def test_a_model_that_is_quantised_already_is_not_described_as_plain() -> None:
    spec = Request("Qwen2.5-0.5B", 64, "h200").question().model
    with pytest.raises(UnsupportedError, match=r"^quantize: a ModelSpec cannot be quantised"):
        Request(spec, 64, "h200", quantize="nf4").question()


def test_llama_70b_in_four_bits_takes_a_quarter() -> None:
    plain = Request("Llama-3-70B", "8K", "h200", lora=16).question()
    less = Request("Llama-3-70B", "8K", "h200", lora=16, quantize="nf4").question()
    linear = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    taken = planned(plain) - planned(less)
    exactly = linear * (2 - 0.5 - 1 / 64 - 4 / 64 / 256) - 80 * 7 * 1092
    assert taken == exactly
    assert planned(less) / 2**30 == pytest.approx(37.3, abs=0.5)
