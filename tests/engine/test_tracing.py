"""The trace of plain training, made without memory, is what torch's allocator is really asked for.

Compared with torch's profiler on a CPU, event for event, in order and by size. What differs is
named: KERNELS take scratch memory that no tensor shows, and checkpointing keeps the state of the
CPU's random numbers, which is on host on any machine.
"""

import gc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from farspan.ask import Request, measuring
from farspan.engine.trace import (
    CUBLAS_WORKSPACE,
    NO_TEMPORARIES,
    Temporaries,
    Temporary,
    add_adapters,
    meta_model,
    refuse_value_dependence,
    result_of,
    shortened,
)
from farspan.engine.trace_steps import (
    Checkpointing,
    Recording,
    TraceRequest,
    adamw,
    own_strategy,
    run_training,
    trace_cells,
    trace_training,
)
from farspan.planner.evaluate import Sized, size
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Kernels, UnsupportedError
from farspan_memory.trace import FreeEvent, Malloc, Trace, from_events
from tests.grids import exhaustive, part_of

# torch 2.11 says it of every profile.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")

SMALLEST = 64  # bytes; Python's numbers are tensors of 4 or 8 on a CPU, and arguments on a GPU
KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "a tile of scores for each thread",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "the same, and row sums",
    "aten::native_layer_norm_backward": "sums of each thread",
}
RANDOM_STATE = torch.get_rng_state().nbytes


def cpu_attention(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
) -> Tensor:
    """`flash_attention` on a CPU, where it really runs."""
    del keywords
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale
    )
    out: Tensor = found[0]
    return out.transpose(1, 2)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
QWEN = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "vocab_size": 512,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
NEOX = {**LLAMA, "model_type": "gpt_neox", "use_parallel_residual": False}
BARE = Recording(NO_TEMPORARIES)


def real_sizes(
    config: dict[str, Any], contexts: tuple[int, ...], kept: Checkpointing, rank: int
) -> list[int]:
    """+bytes of each malloc and -bytes of each free of a real run, without the exceptions."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **fields)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).train()
    if rank:
        add_adapters(model, rank)
    optimizer = adamw(model)
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run_training(model, optimizer, contexts, kept, lambda _: None, 1, cpu_attention)
    finally:
        gc.enable()
    events: list[tuple[Any, int | None]] = []
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    ahead: list[tuple[Any, int | None]] = [(event, None) for event in tree]
    while ahead:
        event, kernel = ahead.pop()
        if event.tag == _EventType.Allocation:
            events.append((event, kernel))
        inside = event.id if event.name in KERNELS else kernel
        ahead.extend((child, inside) for child in event.children)
    events.sort(key=lambda found: found[0].start_time_ns)
    sizes = without_scratch(events)
    return [size for size in sizes if abs(size) >= SMALLEST and abs(size) != RANDOM_STATE]


def without_scratch(events: list[tuple[Any, int | None]]) -> list[int]:
    """Sizes, without what was born and died within one call of a kernel that is named."""
    born: dict[int, int] = {}  # address to index
    scratch = set()
    for index, (event, kernel) in enumerate(events):
        address = event.extra_fields.ptr
        if event.extra_fields.alloc_size > 0:
            born[address] = index
        elif address in born:
            start = born.pop(address)
            if kernel is not None and kernel == events[start][1]:
                scratch |= {start, index}
    return [
        event.extra_fields.alloc_size
        for index, (event, _) in enumerate(events)
        if index not in scratch
    ]


def traced_sizes(trace: Trace) -> list[int]:
    """The same of a trace, from its first step on."""
    sizes: dict[int, int] = {}
    found = []
    for event in trace.events:
        if isinstance(event, Malloc):
            sizes[event.tensor] = event.size
            found.append(event.size)
        elif isinstance(event, FreeEvent):
            found.append(-sizes[event.tensor])
        elif event.name == "step 0":
            found = []
    return [size for size in found if abs(size) >= SMALLEST]


@pytest.mark.parametrize(
    ("config", "kept", "rank", "contexts"),
    [
        (LLAMA, Checkpointing.PLAIN, 4, (128, 96)),
        exhaustive(LLAMA, Checkpointing.RECOMPUTE, 0, (128, 96)),
        (QWEN, Checkpointing.RECOMPUTE, 4, (128,)),
        (GPT2, Checkpointing.RECOMPUTE, 0, (128, 96)),
        exhaustive(NEOX, Checkpointing.PLAIN, 0, (128,)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else str(value),
)
def test_the_trace_is_what_torch_asks_for(
    config: dict[str, Any], kept: Checkpointing, rank: int, contexts: tuple[int, ...]
) -> None:
    model = meta_model(config, torch.float32, rank)
    made = trace_training(model, contexts, kept, attention=cpu_attention, recording=BARE)
    found = from_events(made.events, made.name)
    expected = real_sizes(config, contexts, kept, rank)
    assert len(expected) > 200
    assert traced_sizes(found) == expected


@cache
def llama(
    contexts: tuple[int, ...] = (4096,), kept: Checkpointing = Checkpointing.PLAIN, **options: Any
) -> Trace:
    recording = Recording(**{"temporaries": NO_TEMPORARIES, **options})
    model = meta_model(LLAMA, torch.bfloat16)
    found = trace_training(model, contexts, kept, recording=recording)
    return from_events(found.events, found.name)


def test_what_is_left_is_weights_and_moments() -> None:
    """No cycle of references keeps a tensor; states are born with the first step."""
    for kept in Checkpointing:
        trace = llama((64, 64, 64), kept)
        alive = {event.tensor for event in trace.events if isinstance(event, Malloc)}
        alive -= {event.tensor for event in trace.events if isinstance(event, FreeEvent)}
        model = meta_model(LLAMA, torch.bfloat16)
        parameters = list(model.parameters())
        buffers = {b.untyped_storage()._cdata for b in model.buffers()}
        assert len(alive) == 3 * len(parameters) + len(buffers)
        without = llama((64, 64, 64), kept, lasting=False)
        ends = without.requests()
        assert all(r.dies < len(without.events) for r in ends)
        weights = sum(p.nbytes for p in parameters)
        assert 3 * weights <= trace.live_peak() - without.live_peak() + 2 * weights


# -- what no tensor shows ----------------------------------------------------------------------


def extra(*kinds: Temporary, tokens: int = 4096) -> list[int]:
    """Sizes that these kinds add to the trace, in order."""
    bare, more = (
        [e.size for e in llama((tokens,), temporaries=t).events if isinstance(e, Malloc)]
        for t in (NO_TEMPORARIES, Temporaries(frozenset(kinds)))
    )
    added = []
    for taken in more:
        if bare and taken == bare[0]:
            del bare[0]
        else:
            added.append(taken)
    assert not bare
    return added


def test_each_temporary_is_what_its_kernel_takes() -> None:
    tokens, heads, head_dim, layers = 4096, 4, 16, 2
    assert extra(Temporary.CUBLAS) == [CUBLAS_WORKSPACE] * 2  # of the forward's and backward's
    rows, wide, each = heads * tokens * 4, heads * tokens * 32 * 4, heads * tokens * head_dim * 2
    assert extra(Temporary.FLASH) == [rows, wide, each, each] * layers
    assert extra(Temporary.EMBEDDING) == [tokens * 8] * 2
    assert extra(Temporary.EMBEDDING, tokens=3072) == []


# -- the recorder ------------------------------------------------------------------------------


META = {"device": "meta"}
ROWS = torch.empty(3, 4, **META)  # type: ignore[call-overload]
COLUMNS = torch.empty(4, 3, dtype=torch.bfloat16, **META).t()  # type: ignore[call-overload]
ROWS_OF_HALVES = torch.empty(3, 4, dtype=torch.bfloat16, **META)  # type: ignore[call-overload]
WHOLE = torch.empty(3, 4, dtype=torch.long, **META)  # type: ignore[call-overload]
aten = torch.ops.aten


def test_results_that_are_known_are_those_of_torch() -> None:
    """The second time, too, and of what only looks alike."""
    for func, args, options in (
        (aten.mul.Tensor, (ROWS, COLUMNS), {}),
        (aten.mul.Tensor, (COLUMNS, COLUMNS), {}),
        (aten.mul.Tensor, (ROWS_OF_HALVES, ROWS_OF_HALVES), {}),
        (aten.add.Tensor, (WHOLE, 1), {}),
        (aten.add.Tensor, (WHOLE, 1.0), {}),
        (aten.add.Tensor, (WHOLE, torch.tensor([1.0], dtype=torch.float64)[0]), {}),
        (aten.cat.default, ([ROWS, ROWS], 0), {}),
        (aten.cat.default, ([ROWS, ROWS], 1), {}),
        (aten.cat.default, ([ROWS, ROWS, ROWS], 1), {}),
        (aten._unsafe_view.default, (ROWS, [4, 3]), {}),
        (aten.sum.dim_IntList, (ROWS, [0], True), {}),
        (aten.sum.dim_IntList, (ROWS, [0], True), {"dtype": torch.float64}),
        (aten.empty.memory_format, ([2, 3],), META),
        (aten.empty.memory_format, ([2, 3],), {"device": "cpu"}),
    ):
        expected = func(*args, **options)
        for _ in range(2):
            found = result_of(func, args, options)
            for name in ("shape", "dtype", "device"):
                assert getattr(found, name) == getattr(expected, name), (func, args, name)
            assert found.stride() == expected.stride()
            storages = [x.untyped_storage()._cdata for x in (found, expected)]
            assert (storages[0] == storages[1]) == (func is aten._unsafe_view.default)


def test_a_result_is_of_the_default_dtype_of_its_time() -> None:
    """Quotients of whole numbers have it."""
    before = torch.get_default_dtype()
    try:
        for default in (torch.float64, torch.float32):
            torch.set_default_dtype(default)
            assert result_of(aten.div.Tensor, (WHOLE, WHOLE), {}).dtype is default
    finally:
        torch.set_default_dtype(before)


# -- what is refused ---------------------------------------------------------------------------


def test_sinks_are_refused() -> None:
    config = {
        **LLAMA,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    with pytest.raises(UnsupportedError, match="sinks"):
        trace_training(meta_model(config, torch.bfloat16), (64,))


def test_a_step_that_looks_at_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="depends on values"), refuse_value_dependence():
        torch.empty(1, device="meta").item()
    with pytest.raises(UnsupportedError, match=r"^as it is$"), refuse_value_dependence():
        raise UnsupportedError("as it is")


def test_layers_are_the_first_of_the_model() -> None:
    config = {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}
    assert shortened(config, None) is config
    assert shortened(config, 1) == {
        **LLAMA,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
    }
    assert shortened(GPT2, 1)["n_layer"] == 1
    for layers in (0, 3):
        with pytest.raises(UnsupportedError, match="expected 1 to 2"):
            shortened(config, layers)


def test_what_transformers_cannot_make_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="transformers cannot build this configuration"):
        meta_model({"model_type": "no_such_model"}, torch.bfloat16)


# -- farspan's own step ----------------------------------------------------------------------------

LAYERS, TOKENS, RANK = 3, 500, 4
DEEPER = {**LLAMA, "num_hidden_layers": LAYERS}
# As plans count: without what kernels take for themselves, every addition out of place.
AS_PLANNED = Recording(NO_TEMPORARIES, in_place=False)
NOT_OF_A_STEP = ("reserve", "exchange")  # the driver's, and other devices'


def sized(name: str, rank: int = 0, optimizer: str = "none") -> Sized:
    request = Request(
        DEEPER,
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
    model = meta_model(DEEPER, torch.bfloat16, rank)
    found = trace_cells(model, [program] * 2, optimizer=optimizer == "adamw", recording=recording)
    return from_events(found.events, found.name)


def buffers() -> int:
    """Bytes of rotary frequencies, which plans leave out."""
    model = meta_model(DEEPER, torch.bfloat16)
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
    model = meta_model(DEEPER, torch.bfloat16)
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
