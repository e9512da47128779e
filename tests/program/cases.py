"""Models, runs and schedules for tests of planning: drawn at random, or picked for a purpose."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from farspan.program.program import Program
from farspan.spec import (
    SELECTORS,
    LayerSpec,
    ModelSpec,
    RunSpec,
    Schedule,
    Sparse,
    StateTensor,
    Tier,
)

FRACTIONS = st.sampled_from([0.0, 0.3, 0.5, 1.0]) | st.floats(0.0, 1.0)
SHARES = st.sampled_from([1.0, 0.5, 1 / 3, 0.7]) | st.floats(0.0, 1.0)
TIERS = st.sampled_from(Tier)


@st.composite
def states(draw: st.DrawFn) -> tuple[StateTensor, ...]:
    """A convolution's and a recurrence's, one of them, or none: a bare feed-forward."""
    conv = StateTensor("conv.0", (draw(st.integers(1, 40)), 3), draw(st.sampled_from([2, 4, 8])))
    recurrent = StateTensor("recurrent.0", (3, draw(st.integers(1, 90))), 4)
    return draw(st.sampled_from([(), (conv,), (recurrent,), (conv, recurrent)]))


@st.composite
def unattending(draw: st.DrawFn) -> LayerSpec:
    return LayerSpec(
        *(0, 0, 0, 0),
        window=1,
        activation_bytes=draw(st.integers(0, 90)),
        activation_constant=draw(st.sampled_from([0, 7, 128])),
        saves_input=draw(st.booleans()),
        state=draw(states()),
    )


@st.composite
def attending(draw: st.DrawFn) -> LayerSpec:
    """Shapes whose rows are no multiple of a cache line, so that padding is seen."""
    heads = draw(st.sampled_from([1, 2, 3]))
    return LayerSpec(
        query_heads=heads * draw(st.integers(1, 3)),
        kv_heads=heads,
        head_dim=draw(st.sampled_from([4, 10, 16])),
        value_dim=draw(st.sampled_from([4, 12])),
        window=draw(st.none() | st.integers(1, 80)),
        activation_bytes=draw(st.integers(0, 90)),
        activation_constant=draw(st.sampled_from([0, 7, 128])),
        saves_input=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    kinds = attending() if draw(st.booleans()) else attending() | unattending()
    layers = draw(st.lists(kinds, min_size=1, max_size=6))
    return ModelSpec(
        name="random",
        hidden=draw(st.sampled_from([8, 20, 32])),
        vocab=50,
        layers=tuple(layers),
        element_bytes=draw(st.sampled_from([2, 4, 8])),
    )


@st.composite
def groups(draw: st.DrawFn, layers: int) -> int | tuple[int, ...]:
    if draw(st.booleans()):
        return draw(st.integers(1, layers + 1))
    borders = draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else set()
    cuts = [0, *sorted(borders), layers]
    return tuple(stop - start for start, stop in pairwise(cuts))


@st.composite
def sparsities(draw: st.DrawFn) -> Sparse | None:
    """Dense in half of all cases; otherwise some chunks have pages to choose from, some none."""
    if draw(st.booleans()):
        return None
    page = draw(st.integers(1, 5))
    return Sparse(
        page=page,
        budget=page * draw(st.integers(0, 6)),
        recent=draw(st.sampled_from([0, 3, 40])),
        sinks=draw(st.integers(0, 9)),
        query_page=draw(st.integers(1, 16)),
        selector=draw(st.sampled_from(SELECTORS)),
    )


@st.composite
def schedules(draw: st.DrawFn, layers: int, tokens: int) -> Schedule:
    """At most a dozen chunks; the last is ragged more often than not."""
    sparse = draw(sparsities())
    chunk = draw(st.integers(-(-tokens // 12), tokens + 9))
    return Schedule(
        chunk=chunk if sparse is None else -(-chunk // sparse.page) * sparse.page,
        sparse=sparse,
        groups=draw(groups(layers)),
        boundary_inputs=draw(TIERS),
        kv=draw(TIERS),
        kv_kept=draw(st.booleans()),
        kv_home=draw(TIERS),
        attention_save_fraction=draw(FRACTIONS),
        attention_open=draw(st.booleans()),
        attention=draw(TIERS),
        activation_save_fraction=draw(FRACTIONS),
        activation_save_layers=draw(SHARES),
        activations=draw(TIERS),
        layer_checkpoint=draw(st.booleans()),
        kv_block=draw(st.sampled_from([7, 16, 1000])),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[ModelSpec, RunSpec, Schedule]:
    """Everything that `build_program` asks for."""
    model = draw(models())
    run = RunSpec(draw(st.integers(1, 2)), draw(st.integers(1, 200)))
    schedule = draw(schedules(len(model.layers), run.tokens))
    if model.is_recurrent() and schedule.chunk == 1:
        schedule = replace(schedule, chunk=2)
    return model, run, schedule


def dense(step: tuple[ModelSpec, RunSpec, Schedule]) -> tuple[ModelSpec, RunSpec, Schedule]:
    """The same with exact attention: what searches and bounds are about."""
    model, run, schedule = step
    return model, run, replace(schedule, sparse=None)


def model_of(layers: int, element_bytes: int = 4, window: int | None = None) -> ModelSpec:
    """Equal layers whose rows are multiples of a cache line: nothing is padded."""
    layer = LayerSpec(
        query_heads=16,
        kv_heads=4,
        head_dim=16,
        value_dim=16,
        window=window,
        activation_bytes=640,
    )
    return ModelSpec("equal", 64, 50, (layer,) * layers, element_bytes)


def slot_bytes(program: Program) -> int:
    """Bytes of the slots: they live on the device, from the first instruction to the last."""
    return sum(buffer.bytes for buffer in program.buffers.values() if buffer.layer < 0)
