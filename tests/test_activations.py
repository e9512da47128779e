"""What a graph saved goes into bytes and comes back the same, bit by bit and stride by stride."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farspan.activations import SavedActivations, is_recording, remade, rerun
from farspan.distributed.context import ParallelContext
from farspan.engine.step import Step
from farspan.profile.catalog import find_config
from farspan.profile.model import Variant
from farspan.profile.store import Profiles
from farspan.program.layout import Layout
from farspan.spec import Kernels, Schedule, Tier
from tests.engine.checks import Outcome, assert_same_bits, draw, run_step
from tests.ranks import run_ranks
from tests.zoo import make_model

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, 2).clone(memory_format=torch.preserve_format),
    "permuted": lambda x: x.permute(1, 2, 0),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "strided": lambda x: x[:, ::2],
    "narrow": lambda x: x[1:, :, 1:],
    "scalar": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}
NOTHING = torch.empty(0, dtype=torch.uint8)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def store_for(cell: SavedActivations, extra: int = 0) -> Tensor:
    return torch.full((cell.size() + extra,), 0xAB, dtype=torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(layout: str, dtype: torch.dtype) -> None:
    source = LAYOUTS[layout]((10 * torch.randn(3, 4, 6)).to(dtype))
    expected = source.clone()
    cell = SavedActivations([], {})
    handle = cell.pack(source)
    assert not isinstance(handle, Tensor)
    store = store_for(cell)
    cell.seal(store)
    moved = store.clone()
    store.zero_()
    source.zero_() if layout != "expanded" else None
    cell.restore(moved, {})
    found = cell.unpack(handle)
    assert torch.equal(found, expected)
    assert found.dtype is dtype
    assert found.stride() == source.stride()
    assert found.untyped_storage().data_ptr() == moved.data_ptr() or found.numel() == 0


def test_named_tensors_become_references() -> None:
    """A view of the layer's input is stored nowhere: it is taken from where the input then is."""
    base = torch.randn(2, 6, 4)
    views = [base, base.transpose(1, 2), base[1, 2:], base.view(12, 4)]
    expected = [view.clone() for view in views]
    cell = SavedActivations([], {"x": base, "out": torch.randn(3)})
    handles = [cell.pack(view) for view in views]
    assert cell.size() == 0
    assert cell.references == {"x"}
    cell.seal(NOTHING)
    slab = torch.full((10 + base.numel(),), torch.nan)
    elsewhere = slab[10:].view(2, 6, 4)
    elsewhere.copy_(base)
    base.fill_(torch.nan)
    cell.restore(NOTHING, {"x": elsewhere})
    for handle, view, same in zip(handles, views, expected, strict=True):
        found = cell.unpack(handle)
        assert torch.equal(found, same)
        assert found.stride() == view.stride()


def test_a_cast_of_a_named_tensor_is_no_reference() -> None:
    base = torch.randn(6)
    cell = SavedActivations([], {"x": base})
    cell.pack(base.double())
    cell.pack(base.view(torch.int32))
    assert cell.references == set()
    assert cell.count() == 2


@pytest.mark.parametrize("room", [0, 64, 128])
def test_more_than_planned_stays_on_the_device(room: int) -> None:
    """Beside the plan, and copied: the memory it lay in is written over."""
    sources = [torch.randn(16), torch.randn(40)[24:], torch.randn(4, 4).T]
    expected = [source.clone() for source in sources]
    cell = SavedActivations([], {})
    views = [cell.pack(source) for source in sources]
    store = torch.full((room,), 0xAB, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="more than planned.*activation_save_fraction: 0"):
        cell.seal(store)
    for source in sources:
        source.zero_()
    cell.restore(store.clone(), {})
    for view, tensor in zip(views, expected, strict=True):
        found = cell.unpack(view)
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()


def test_a_sealed_cell_holds_no_tensor() -> None:
    """Otherwise keeping it would keep what was evicted."""
    source = torch.randn(1000)
    alive = weakref.ref(source)
    cell = SavedActivations([], {"x": source[:10]})
    packed = cell.pack(source)
    cell.seal(store_for(cell))
    del source
    assert alive() is None
    assert not isinstance(packed, Tensor)


# -- tensors that the backward computes again ----------------------------------------------------


def differentiated(
    forward: Callable[[Tensor, Tensor], Tensor], *, recorded: bool, spoiled: bool = False
) -> tuple[int, Tensor, Tensor, Tensor]:
    """The bytes that are stored of a forward, its result and its gradients; `spoiled`: what was
    stored is overwritten before the backward."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(6, 6, generator=generator).requires_grad_() for _ in range(2))
    cell = SavedActivations([weight], {})
    if not recorded:
        out = forward(x, weight)
        dx, dweight = torch.autograd.grad(out.sum(), (x, weight))
        return 0, out.detach(), dx, dweight
    with cell.hooks():
        assert is_recording()
        out = forward(x, weight)
    assert not is_recording()
    size, store = cell.size(), store_for(cell)
    cell.seal(store)
    cell.restore(torch.zeros_like(store) if spoiled else store.clone(), {})
    dx, dweight = torch.autograd.grad(out.sum(), (x, weight))
    return size, out.detach(), dx, dweight


LINE = 192  # bytes of 36 elements in fp32, aligned


def test_an_output_that_is_made_again_is_not_stored() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return remade(torch.exp(x.detach()), torch.exp, x) @ weight @ (x @ weight)

    plain, found = (differentiated(forward, recorded=r) for r in (False, True))
    assert all(map(torch.equal, found[1:], plain[1:]))
    stored = found[0]
    assert stored == 3 * LINE  # x, and the two products; the first is of what is made of x
    spoiled = differentiated(forward, recorded=True, spoiled=True)
    assert not torch.equal(spoiled[3], plain[3])


def test_code_that_runs_again_stores_its_inputs() -> None:
    """The same graph, so the same gradients, bit by bit: what reaches x is added in one order."""

    def norm(x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True).rsqrt() * x * x.sigmoid()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return rerun(norm, x) @ weight + x.tanh()

    plain, found = (differentiated(forward, recorded=r) for r in (False, True))
    assert all(map(torch.equal, found[1:], plain[1:]))
    assert found[0] == 2 * LINE  # x, and what tanh saves


@pytest.mark.parametrize("change", ["output", "view", "same"])
def test_what_is_not_as_it_was_made_is_stored_itself(change: str) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        made = torch.exp(x.detach())
        if change == "view":  # of a tensor that has more
            made = torch.stack([made, made])[1]
        if change == "same":
            made = x.detach()
        out = remade(made, torch.exp, x)
        if change == "output":
            out.mul_(2)
        return out @ weight + x

    plain, found = (differentiated(forward, recorded=r) for r in (False, True))
    assert all(map(torch.equal, found[1:], plain[1:]))


SCHEDULE = Schedule(
    chunk=8,
    groups=2,
    attention_save_fraction=1.0,
    activation_save_fraction=0.6,
    activations=Tier.HOST,
)


def both_ways(family: str, dtype: torch.dtype, layout: Layout | None = None) -> list[int]:
    """Two steps whose kept cells compute again what they can, and two that store it: the same bits.
    Returns the bytes that a token and layer stores, either way."""
    found: dict[bool, tuple[int, Outcome]] = {}
    data = draw(34, batch=2, documents=2)
    for remake in (True, False):
        model = make_model(family, dtype)
        ranks = None if layout is None else ParallelContext(layout, torch.device("cpu"))
        step = Step(model, SCHEDULE, kernels=Kernels(remake=remake), ranks=ranks, poison=True)
        runs = [run_step(model, step, data) for _ in range(2)]
        assert_same_bits(*runs)
        found[remake] = step.model_spec.layers[-1].activation_bytes, runs[1]
    assert_same_bits(found[True][1], found[False][1])
    return [found[True][0], found[False][0]]


@pytest.mark.parametrize(
    ("family", "dtype", "share"),
    [
        ("qwen2", torch.float64, 0.5),
        ("phi3", torch.bfloat16, 0.4),
        ("gemma2", torch.float32, 0.5),
        ("gpt2", torch.float32, 0.95),  # one norm of those that it has; its MLP has no gate
        ("qwen3_next", torch.float32, 0.95),
    ],
)
def test_a_step_that_keeps_less_has_the_same_bits(
    family: str, dtype: torch.dtype, share: float
) -> None:
    less, whole = both_ways(family, dtype)
    assert less <= share * whole


@pytest.mark.exhaustive
def test_ranks_that_keep_less_have_the_same_bits() -> None:
    for less, whole in run_ranks(2, both_ways, "qwen2", torch.float64, Layout(ulysses=2)):
        assert 2 * less < whole


def test_qwen_keeps_a_hundred_kilobytes_of_a_token_and_layer() -> None:
    """143 of products and of what they are made from; 98 of what only products give."""
    profiles = Profiles(find_config("Qwen2.5-7B"), "Qwen2.5-7B", "Qwen2.5-7B")
    spec = profiles.of(Variant("bfloat16", 0, True, True)).spec
    layer, hidden = spec.layers[0], spec.hidden * spec.element_bytes
    assert layer.activation_bytes + hidden <= 100_000
    inner = 18944 * spec.element_bytes
    q, twice = layer.query_heads * layer.head_dim * spec.element_bytes, 2 * inner
    numbers = layer.activation_bytes - (hidden + q + twice)  # x of the second norm, q, gate, up
    assert 0 < numbers < 1024  # cos, sin, and what norms divide by
