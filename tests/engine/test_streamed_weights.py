"""Weights and gradients in main memory: the bits of a step that has them on the device."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farspan.attention.backends import accumulate_dtype
from farspan.engine.loss import StepInputs
from farspan.engine.runner import Progress, Runner
from farspan.engine.step import Step
from farspan.engine.streamed_weights import _Streamed, _StreamedUnit, computing_device
from farspan.engine.tiers import CopyEngine
from farspan.engine.trace_steps import META, MetaKernels
from farspan.hf.load import add_adapters
from farspan.host import TooLarge
from farspan.program.builder import build_evaluation, build_program
from farspan.program.dependencies import waits
from farspan.program.layout import Layout, refuse_together
from farspan.program.program import aligned
from farspan.program.residency import Kind
from farspan.spec import Kernels, LayerWork, ModelSpec, RunSpec, Schedule, Tier, UnsupportedError
from tests.engine.checks import (
    Data,
    Outcome,
    assert_same_bits,
    draw,
    gradients,
    run_step,
)
from tests.engine.lanes import Manner, Replay
from tests.engine.test_overlap import SCHEDULES, recorded, two_steps
from tests.grids import exhaustive, part_of
from tests.oracles.check import check_program
from tests.oracles.check_order import check_order
from tests.oracles.simulate import simulate
from tests.program.cases import model_of
from tests.zoo import make_model

TOKENS = 42
DATA = draw(TOKENS, batch=2, documents=4)
GROUPED = Schedule(chunk=11, groups=2, kv_block=7)


def streamed(schedule: Schedule) -> Schedule:
    return replace(schedule, weights=Tier.HOST)


def pair(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    model: Any = make_model(name, dtype)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("name", part_of(SCHEDULES, "unequal", "alpha"))
def test_gradients_are_those_of_resident_weights(name: str) -> None:
    """Of two batches added up."""
    model, other = pair("qwen2", torch.float32)
    expected = two_steps(model, Step(model, SCHEDULES[name]), DATA)
    step = Step(other, streamed(SCHEDULES[name]), poison=True)
    assert_same_bits(two_steps(other, step, DATA), expected)
    ids, labels, documents = DATA
    whole = Step(model, SCHEDULES[name]).evaluate(ids, labels, documents)
    assert torch.equal(step.evaluate(ids, labels, documents), whole)


@pytest.mark.parametrize(
    "name", part_of(["gemma3_text", "qwen3_moe", "lfm2", "llama"], "qwen3_moe", "lfm2")
)
def test_families(name: str) -> None:
    """Tied embeddings, experts, recurrent states."""
    model, other = pair(name, torch.float64)
    expected = run_step(model, GROUPED, DATA)
    assert_same_bits(run_step(other, streamed(GROUPED), DATA), expected)


def frozen(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)


def adapted(model: Any) -> None:
    add_adapters(model, rank=2, alpha=4)


def wide(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32


def widened(name: str) -> Callable[[Any], None]:
    """Parameters of so many names in float32, as a router that is kept in it."""

    def change(model: nn.Module) -> None:
        for own, parameter in model.named_parameters():
            if name in own:
                parameter.data = parameter.data.float()

    return change


def adapted_widely(model: Any) -> None:
    adapted(model)
    widened("lora_")(model)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen2", adapted_widely),
        exhaustive("deepseek_v3", widened("mlp.gate.")),
        ("gemma3_text", widened("norm")),
    ],
)
def test_dtypes_may_differ(name: str, change: Callable[[Any], None]) -> None:
    """Of adapters, a router and norms in a bfloat16 model; nothing is rounded on its way."""
    model, other = pair(name, torch.bfloat16)
    for one in (model, other):
        torch.manual_seed(3)
        change(one)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    expected = two_steps(model, Step(model, GROUPED), DATA)
    step = Step(other, streamed(GROUPED), poison=True)
    assert_same_bits(two_steps(other, step, DATA), expected)
    assert step.weights is not None
    assert step.weights.nbytes - sum(p.nbytes for p in other.parameters()) < 5 * 256


def test_no_room_is_left_between_parameters_of_any_size() -> None:
    """Each begins where its numbers may, and those of whole lines at whole lines."""
    unit = _StreamedUnit()
    sizes = [(3, torch.bfloat16), (1, torch.float64), (256, torch.bfloat16), (5, torch.float32)]
    for count, dtype in [*sizes, (2048, torch.bfloat16), (7, torch.uint8)]:
        own = nn.Parameter(torch.zeros(count, dtype=dtype), dtype.is_floating_point)
        unit.parameters.append(_Streamed(own, own, [], own.requires_grad))
    unit.lay_out()
    end = 0
    for p in sorted(unit.parameters, key=lambda p: p.offsets):
        (offset,) = p.offsets
        assert offset == end
        assert offset % p.own.itemsize == 0
        assert p.own.nbytes % 256 or offset % 256 == 0
        end += p.own.nbytes
    assert 0 <= unit.size - end < 16
    trained = sorted((p for p in unit.parameters if p.trained), key=lambda p: p.sum_offset)
    assert [p.sum_offset for p in trained] == [0, *accumulate(p.sum_bytes() for p in trained)][:-1]
    assert all(p.sum_offset % accumulate_dtype(p.own.dtype).itemsize == 0 for p in trained)


@pytest.mark.parametrize("change", part_of([frozen, adapted, wide, None], frozen, wide))
def test_parts_are_trained_and_dtypes_are_low(change: Callable[[Any], None] | None) -> None:
    """In bfloat16 gradients are rounded once into `.grad`, or stay in float32."""
    model, other = pair("qwen2", torch.bfloat16)
    for one in (model, other):
        torch.manual_seed(3)
        if change is not None:
            change(one)
    expected = two_steps(model, Step(model, GROUPED), DATA)
    assert_same_bits(two_steps(other, Step(other, streamed(GROUPED)), DATA), expected)


def test_another_part_may_be_trained_from_a_step_on() -> None:
    model, other = pair("qwen2", torch.float32)
    steps = Step(model, GROUPED), Step(other, streamed(GROUPED))
    outcomes = []
    for one, step in zip((model, other), steps, strict=True):
        step(*DATA)
        frozen(one)
        outcomes.append(two_steps(one, step, DATA))
    assert_same_bits(*outcomes)


def moved_by_another_step(model: Any) -> None:
    Step(model, streamed(GROUPED)).evaluate(*DATA)


def loaded(model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def given_other_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [moved_by_another_step, loaded, given_other_data])
def test_weights_that_lie_elsewhere_are_read_there(change: Callable[[Any], None]) -> None:
    """A step reads what the model has now, not what it had when the step was made."""
    model, other = pair("qwen2", torch.float32)
    steps = Step(model, GROUPED), Step(other, streamed(GROUPED))
    outcomes = []
    for one, step in zip((model, other), steps, strict=True):
        step(*DATA)
        change(one)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        outcomes.append(two_steps(one, step, DATA))
    assert_same_bits(*outcomes)


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_given_back(fails: bool) -> None:
    """Of the device's slots and of gradients, also after a step that failed; `.grad` keeps its
    numbers."""
    _, other = pair("qwen2", torch.float32)
    step = Step(other, streamed(GROUPED))
    step(*DATA)
    kept = gradients(other)

    def fail(done: Progress) -> None:
        if done.cells_done == done.cells - 3:
            raise RuntimeError("stop")

    if fails:
        step.progress = fail
        with contextlib.suppress(RuntimeError):
            step(*DATA)
    slabs = [step.arenas[tier]._block for tier in Tier]
    held = [weakref.ref(slab.untyped_storage()) for slab in slabs]
    del slabs
    step.release()
    assert all(storage() is None for storage in held)
    if not fails:
        assert all(torch.equal(p.grad, kept[n]) for n, p in other.named_parameters())
        other.zero_grad()
        step(*DATA)
        assert all(torch.equal(p.grad, kept[n]) for n, p in other.named_parameters())


def test_a_step_that_cannot_begin_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised between the change of weights and the first instruction."""
    _, other = pair("qwen2", torch.float32)
    step, before = Step(other, streamed(GROUPED)), dict(other.named_parameters())

    def fail(*_: object) -> None:
        raise MemoryError("stop")

    monkeypatch.setattr(Runner, "interpreter", fail)
    with pytest.raises(MemoryError, match="stop"):
        step(*DATA)
    after = dict(other.named_parameters())
    assert all(after[name] is p for name, p in before.items())


def test_weights_that_moved_are_found_by_an_evaluation_in_inference_mode() -> None:
    """And the next step trains them."""
    model, other = pair("qwen2", torch.float32)
    outcomes = []
    for one, step in zip((model, other), (GROUPED, streamed(GROUPED)), strict=True):
        made = Step(one, step)
        given_other_data(one)
        with torch.inference_mode():
            made.evaluate(*DATA)
        torch.optim.SGD(one.parameters(), lr=1.0).step()
        outcomes.append(two_steps(one, made, DATA))
    assert_same_bits(*outcomes)


def test_hooks_of_weights_are_heard() -> None:
    model, other = pair("qwen2", torch.float32)
    for one in (model, other):
        one.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 0.5 * gradient)
        one.model.norm.weight.register_hook(lambda gradient: -gradient)
    expected = run_step(model, GROUPED, DATA)
    assert_same_bits(run_step(other, streamed(GROUPED), DATA), expected)


def test_too_little_main_memory_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of gradients with the first step that has some; of weights where they do not lie already."""
    model, other = pair("qwen2", torch.float32)
    step = Step(model, streamed(GROUPED))
    sizes = step.program(2, TOKENS).arena_bytes.values()
    assert step.weights is not None
    room = sum(sizes) + step.weights.gradient_bytes() - 1
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: room)
    step.evaluate(*DATA)
    step.release()
    with pytest.raises(TooLarge, match=r"^host memory: a step of 42 tokens needs"):
        step(*DATA)
    monkeypatch.setattr("farspan.host.available_host_bytes", lambda: 1000)
    with pytest.raises(
        TooLarge, match=r"^host memory: moving the model's weights to main memory needs"
    ):
        Step(other, streamed(GROUPED), device="meta")


# -- devices ------------------------------------------------------------------------------------


class BetweenTiers(CopyEngine):
    """To and from a device without memory."""

    def fetch(self, target: Tensor, source: Tensor) -> None:
        assert (target.device.type, source.device.type) == ("meta", "cpu")
        self.fetched += source.nbytes

    def evict(self, target: Tensor, source: Tensor) -> None:
        assert (target.device.type, source.device.type) == ("cpu", "meta")
        self.evicted += source.nbytes


# What makes tensors and views of the slab, copies buffers to the device, and rounds gradients.
ON_HOST = {"empty", "set_", "view", "detach", "_to_copy"}


class ComputesOn(TorchDispatchMode):
    """Every other operator has the device's tensors alone. Counts buffers that are copied to it:
    rotary embeddings would do so in every chunk, for which the CPU would wait."""

    copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        met = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in met if x.numel() > 1}
        if func.overloadpacket.__name__ in ON_HOST:
            self.copied += len(devices) > 1
        else:
            assert devices <= {"meta"}, func
        return out


@pytest.mark.parametrize("name", part_of(["qwen2", "gemma3_text", "lfm2"], "lfm2"))
def test_a_device_apart_computes_everything_and_main_memory_keeps_the_model(name: str) -> None:
    """On the meta device, by the code that runs on a GPU: all operators of a step, rotary tables
    and other buffers among their tensors; copies alone go between the two."""
    model: Any = make_model(name, torch.bfloat16)
    step = Step(model, streamed(GROUPED), device="meta")
    step.copies, kernels = BetweenTiers(META), MetaKernels(META, torch.bfloat16)
    step.prepared_model = replace(step.prepared_model, kernels=kernels)
    ids = torch.zeros(2, TOKENS, dtype=torch.long, device=META)
    prepared = step.prepared(2, TOKENS)
    with ComputesOn() as computed:
        inputs = StepInputs(ids, ids, torch.zeros_like(ids[:1]), None)
        step.runner.run(step.prepared_model, prepared, inputs, TOKENS)
    buffers = [b for _, b in model.named_buffers(remove_duplicate=False) if b.numel() > 1]
    assert computed.copied == len(buffers) > 0
    moved = simulate(prepared.program)
    assert step.copies.fetched == sum(moved.fetched.values())
    assert step.copies.evicted == sum(moved.evicted.values())
    gradients_ = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients_) == len(list(model.parameters()))
    kept = (*model.parameters(), *model.buffers(), *gradients_)
    assert {tensor.device.type for tensor in kept} == {"cpu"}
    assert step.arenas[Tier.DEVICE]._block.is_meta


def test_a_device_is_given_for_weights_in_main_memory_alone() -> None:
    model, _ = pair("qwen2", torch.float32)
    with pytest.raises(UnsupportedError, match=r"^device: the model is on cpu, not on meta; move"):
        Step(model, GROUPED, device="meta")
    step = Step(model, streamed(GROUPED), device="meta")
    assert step.stages.device == META
    assert Step(model, streamed(GROUPED), weights=step.weights).stages.device == META
    assert Step(model, GROUPED, device="cpu").stages.device == torch.device("cpu")


# -- programs -----------------------------------------------------------------------------------


def counted(layers: int) -> ModelSpec:
    """A model whose weights are counted: 100 elements a layer, 60 of them trained."""
    spec = model_of(layers)
    works = [replace(layer, work=LayerWork(100, 60)) for layer in spec.layers]
    elements = layers * 100 + 40, layers * 60 + 40
    return replace(spec, layers=tuple(works), parameters=elements[0], trainable=elements[1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_are_whole_and_nothing_races(name: str) -> None:
    for build in (build_program, build_evaluation):
        program = build(counted(4), RunSpec(1, TOKENS), streamed(SCHEDULES[name]))
        check_program(program)
        check_order(program, waits(program))


@pytest.mark.parametrize("name", part_of(SCHEDULES, "streamed, alpha", "open"))
def test_the_same_bits_in_any_order_of_lanes(name: str) -> None:
    """Of a step whose gradients are the first, and of one that adds to others."""
    model, other = pair("qwen2", torch.float32)
    expected = two_steps(model, Step(model, SCHEDULES[name]), DATA)
    step = Step(other, streamed(SCHEDULES[name]), poison=True)
    told = [recorded(step, DATA).told for _ in range(2)]
    for manner in Manner:
        other.zero_grad(set_to_none=True)
        for one in told:
            step.copies = Replay(one, manner, 0)
            step(*DATA)
        assert_same_bits(Outcome(expected.loss, gradients(other)), expected)


def test_the_device_holds_two_groups() -> None:
    """And what lies outside the layers; gradients in float32, as long as the backward runs."""
    model, run = counted(8), RunSpec(1, TOKENS)
    schedule = replace(GROUPED, groups=(2, 1, 3, 2))
    plain, made = (build_program(model, run, s) for s in (schedule, streamed(schedule)))
    assert made.arena_bytes[Tier.HOST] == plain.arena_bytes[Tier.HOST]
    held = {b.name: b.bytes for b in made.buffers.values() if b.name.startswith("weight")}
    assert held == {
        "weights.slot.0": aligned(3 * 100 * model.element_bytes),
        "weights.slot.1": aligned(2 * 100 * model.element_bytes),
        "weights.outer": aligned(40 * model.element_bytes),
        "weight_gradients.slot.0": aligned(3 * 60 * 4),
        "weight_gradients.slot.1": aligned(2 * 60 * 4),
        "weight_gradients.outer": aligned(40 * 4),
    }
    moved = simulate(made)
    forward, again = 8 * 100 + 40, (2 + 1) * 100  # groups 2 and 3 are still there
    assert moved.fetched[Kind.WEIGHTS] == (forward + again) * model.element_bytes
    assert moved.evicted[Kind.WEIGHT_GRADIENTS] == model.trainable * 4


# -- refused -------------------------------------------------------------------------------------


def test_what_is_not_done_is_refused() -> None:
    refuse_together(streamed(GROUPED), Layout(data=2, ulysses=2, pipeline=2, fsdp=False))
    with pytest.raises(UnsupportedError, match=r"^weights: host .* tensor cuts them; set fsdp: tr"):
        refuse_together(streamed(GROUPED), Layout(tensor=2, fsdp=False))
    with pytest.raises(UnsupportedError, match=r"^weights: expected .* got .disk"):
        Schedule(weights="disk")  # type: ignore[arg-type]
    model, _ = pair("qwen2", torch.bfloat16)
    ranks: Any = SimpleNamespace(sharded=SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(UnsupportedError, match=r"^device: the ranks compute on cpu, not on meta;"):
        computing_device(torch.device("cpu"), META, True, ranks)

    class Packed(nn.Parameter):
        """Numbers and what says how to read them."""

    model.lm_head.weight = Packed(model.lm_head.weight.detach())
    with pytest.raises(UnsupportedError, match=r"^weights: lm_head\.weight is a Packed, not a pl"):
        Step(model, streamed(GROUPED))


def shared_by_layers(model: Any) -> None:
    first, second = model.model.layers[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def two_in_one_memory(model: Any) -> None:
    """An update of one is one of the other, as long as neither is moved."""
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)


@pytest.mark.parametrize("change", [shared_by_layers, two_in_one_memory])
def test_weights_that_are_not_each_of_one_place_are_refused(change: Callable[[Any], None]) -> None:
    model, _ = pair("qwen2", torch.float32)
    change(model)
    with pytest.raises(UnsupportedError, match=r"^weights: .*set weights: device$"):
        Step(model, streamed(GROUPED))


def test_weights_that_others_have_packed_are_refused() -> None:
    """Some of their numbers are buffers, of which a step has all on the device."""
    model: Any = make_model("qwen2", torch.float32)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedError, match=r"^weights: .* by gptq, .*; use device$"):
        Step(model, streamed(GROUPED))


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_computes_over_main_memory(
    dtype: torch.dtype, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a step whose weights are on the GPU, the gradients of two batches added up."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model: Any = make_model("qwen2", dtype, head_dim=64)
    other, data = copy.deepcopy(model), Data(*(x.cuda() for x in DATA))
    given: Any = {"kernels": Kernels(deterministic=True), "poison": True}
    expected = two_steps(model.cuda(), Step(model, GROUPED, **given), data)
    step = Step(other, streamed(GROUPED), device="cuda", overlap=overlap, **given)
    found = two_steps(other, step, data)
    assert {t.device.type for p in other.parameters() for t in (p, p.grad)} == {"cpu"}
    assert torch.equal(found.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient.cpu()), name
