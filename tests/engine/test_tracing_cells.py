"""The trace of farspan's own step holds what plans say a step holds, to the byte."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from farspan.ask import Request, measuring
from farspan.engine.trace import NO_TEMPORARIES, meta_model
from farspan.engine.trace_steps import Recording, TraceRequest, own_strategy, trace_cells
from farspan.planner.evaluate import Sized, size
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Kernels, UnsupportedError
from farspan_memory.trace import Trace, from_events
from tests.grids import part_of

LAYERS, TOKENS, RANK = 3, 500, 4
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# As plans count: without what kernels take for themselves, every addition out of place.
AS_PLANNED = Recording(NO_TEMPORARIES, in_place=False)
NOT_OF_A_STEP = ("reserve", "exchange")  # the driver's, and other devices'


def sized(name: str, rank: int = 0, optimizer: str = "none") -> Sized:
    request = Request(
        LLAMA,
        TOKENS,
        "h200",
        lora=rank,
        optimizer=optimizer,
        kernels=Kernels(fused=False, accumulate=False),  # a trace is of the model's own modules
    )
    return size(request.question(), strategy(name, LAYERS, TOKENS))


@cache
def traced(
    name: str, rank: int = 0, optimizer: str = "none", recording: Recording = AS_PLANNED
) -> Trace:
    """Two steps: from the second on nothing is new."""
    program = sized(name, rank, optimizer).programs[0]
    model = meta_model(LLAMA, torch.bfloat16, rank)
    found = trace_cells(model, [program] * 2, optimizer=optimizer == "adamw", recording=recording)
    return from_events(found.events, found.name)


def buffers() -> int:
    """Bytes of rotary frequencies, which plans leave out."""
    model = meta_model(LLAMA, torch.bfloat16)
    storages = {b.untyped_storage()._cdata: b.untyped_storage() for b in model.buffers()}
    return sum(storage.nbytes() for storage in storages.values())


def predicted(found: Sized) -> int:
    parts = found.device.parts
    return sum(parts[part] for part in parts if part not in NOT_OF_A_STEP) + buffers()


# The others are traced with the states of an optimizer, which are in memory beside the same.
WITHOUT_STATES = part_of(STRATEGIES, "offload", "memo")


@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_the_peak_is_what_plans_say(name: str) -> None:
    assert traced(name).live_peak() == predicted(sized(name))


@pytest.mark.parametrize(
    "name", part_of(["plain", "recompute", "grouped", "oomb"], "recompute", "oomb")
)
def test_so_it_is_with_states_of_an_optimizer(name: str) -> None:
    """Autograd hands out weight gradients in the dtype of `.grad`, twice as wide as the model's."""
    found = sized(name, optimizer="adamw")
    assert traced(name, optimizer="adamw").live_peak() == predicted(found)


def test_what_belongs_to_no_step_is_left_out_on_request() -> None:
    whole = traced("recompute", optimizer="adamw")
    step = traced("recompute", optimizer="adamw", recording=replace(AS_PLANNED, lasting=False))
    model = meta_model(LLAMA, torch.bfloat16)
    held = sum(p.nbytes + 3 * 4 * p.numel() for p in model.parameters())  # moments and masters
    assert whole.live_peak() - step.live_peak() == held + buffers()


# -- by names ----------------------------------------------------------------------------------


def peak(request: TraceRequest) -> int:
    return from_events(request.trace().events, "").live_peak()


def test_a_request_is_of_plain_training_or_of_cells() -> None:
    plain, own = (
        TraceRequest(
            "Qwen2.5-0.5B",
            (256,),
            layers=2,
            strategy=name,
            recording=Recording(NO_TEMPORARIES),
            measuring=measuring,
        )
        for name in ("plain", "farspan:plain")
    )
    assert peak(plain) != peak(own)
    assert own.trace().name == "Qwen2.5-0.5B farspan:plain 256, 2 layers"
    adapted = replace(plain, rank=8, contexts=(256, 128))
    assert adapted.trace().name == "Qwen2.5-0.5B plain 256+128, 2 layers, lora 8"
    assert peak(adapted) < peak(plain)


def test_strategies_are_told_apart() -> None:
    assert [own_strategy(name) for name in ("plain", "recompute", "offload")] == [None] * 3
    assert own_strategy("farspan:plain") == "plain"
    assert own_strategy("grouped") == own_strategy("farspan:grouped") == "grouped"
    with pytest.raises(UnsupportedError, match="strategy: 'none' is not known"):
        own_strategy("none")
    with pytest.raises(UnsupportedError, match="context: give"):
        TraceRequest("Qwen2.5-0.5B", ()).trace()
