"""Who computes: attention kernels, what they cannot index, and compiled modules."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from farspan.attention.backends import BlockKernel, CudaCudnn, CudaFlash, Directed, Tiled
from farspan.engine.kernels import (
    AttentionKernels,
    Flash4,
    attention_kernels,
    chunk_lengths,
    deterministic_algorithms,
    measured_here,
)
from farspan.engine.memory import PeakMemory
from farspan.engine.step import Step
from farspan.planner.machines import read, user_file, write
from farspan.program import attention_blocks as blocks_module
from farspan.program.attention_blocks import Block, cut_wide, most_of, plan_blocks
from farspan.program.builder import build_program
from farspan.program.layout import chunk_ranges
from farspan.program.program import Program
from farspan.program.strategies import strategy
from farspan.spec import (
    AttentionKernel,
    Kernels,
    LayerSpec,
    ModelSpec,
    RunSpec,
    Schedule,
    UnsupportedError,
)
from tests.attention.vendor import BACKWARD_CUDNN, FORWARD_CUDNN, cuda_ops_on_cpu
from tests.engine.checks import Data, assert_close, draw, errors, run_oracle, run_step
from tests.grids import crossed, exhaustive, part_of
from tests.zoo import make_model, shared_model

HEADS, WIDTH = 32, 128
MODEL = ModelSpec("mha", 4096, 32000, (LayerSpec(HEADS, HEADS, WIDTH, WIDTH),), 2)
LONG = RunSpec(2, 2**22)
KEPT = Schedule(chunk=16, groups=2, attention_save_fraction=0.5)


def largest_index(run: RunSpec, schedule: Schedule, kv_heads: int = HEADS) -> int:
    """Of any element that an attention call reaches in its tensors: q, k, v and their gradients in
    their layouts [B, C, H, D] and [S, B, Hk, D], and dK, dV at query heads, as flash attention
    holds them."""
    chunks, most = chunk_ranges(run.tokens, schedule.chunk), most_of(MODEL.layers[0], run)
    program = build_program(MODEL, run, schedule)
    kernel = CudaCudnn(CudaFlash(), queries=chunk_lengths(program, most))
    largest = 0
    # The last chunks see most keys; of the others only the first is alike.
    for start, stop in (chunks[0], *chunks[-2:]):
        for block in plan_blocks(start, stop, schedule.kv_block, None):
            for piece in (p for narrow in cut_wide(block, most) for p in kernel.split(narrow)):
                queries = run.batch * piece.queries * HEADS * WIDTH
                keys = piece.keys * run.batch * kv_heads * WIDTH
                expanded = run.batch * piece.keys * HEADS * WIDTH
                largest = max(largest, queries - 1, keys - 1, expanded - 1)
    return largest


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(),
        Schedule(chunk=131072, kv_block=131072),
        Schedule(chunk=2**22, kv_block=2**22),
        Schedule(chunk=10**6, kv_block=300_000),
    ],
    ids=str,
)
def test_no_index_is_beyond_32_bits(schedule: Schedule) -> None:
    """At 4M tokens, two sequences, as many key heads as query heads, also where a chunk is all."""
    assert largest_index(LONG, schedule) < 2**31 - 1


def test_a_batch_that_no_cut_helps_is_refused() -> None:
    """By the plan and so by the engine, whatever the device."""
    for model in (MODEL, replace(MODEL, layers=(replace(MODEL.layers[0], window=10**6),))):
        with pytest.raises(
            UnsupportedError, match=r"batch: .* 5,000 sequences of 4,096 .* use at most \d+"
        ):
            build_program(model, RunSpec(5000, 2**10), Schedule())


def test_kernels_know_the_chunks_of_a_program() -> None:
    for tokens, lengths in ((100, (4, 16)), (96, (16,)), (7, (7,))):
        program = build_program(MODEL, RunSpec(1, tokens), Schedule(chunk=16))
        assert chunk_lengths(program, 10**6) == lengths
    program = build_program(MODEL, RunSpec(1, 100), Schedule(chunk=100))
    assert chunk_lengths(program, 30) == (10, 30)


@pytest.mark.parametrize(
    ("name", "of"),
    crossed(["qwen2", "gpt_oss", "minicpm3"], ["plain", "recompute", "swap", "fpdt"]),
)
def test_calls_that_are_cut_give_the_same_gradients(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is the whole sequence, in calls of a twentieth of it; logits likewise."""
    model, data = make_model(name), draw(60, batch=2)
    schedule = replace(strategy(of, 4, 60), kv_block=60, loss_chunk_size=60)
    layers = Step(model, schedule).model_spec.layers
    row = 2 * max(layer.query_heads * max(layer.head_dim, layer.value_dim) for layer in layers)
    monkeypatch.setattr(blocks_module, "INDEXED", 26 * row)
    monkeypatch.setattr(blocks_module, "LEAST_CALL", 4)
    seen: list[tuple[int, int]] = []
    kernels = AttentionKernels.of

    def watched(self: AttentionKernels, spec: LayerSpec, program: Program | None = None) -> Any:
        return Watched(kernels(self, spec, program), seen)

    monkeypatch.setattr(AttentionKernels, "of", watched)
    found = run_step(model, Step(model, schedule), data)
    assert len(set(seen)) > 1
    assert max(max(sizes) for sizes in seen) <= 25
    assert_close(found, run_oracle(model, data))


@dataclass(frozen=True)
class Watched:
    """A kernel, and the lengths of the calls that it gets."""

    inner: BlockKernel
    seen: list[tuple[int, int]]

    @property
    def softcap(self) -> float | None:
        return self.inner.softcap

    def split(self, block: Block) -> tuple[Block, ...]:
        return self.inner.split(block)

    def forward(self, *given: Any) -> Any:
        self.seen.append((given[0].shape[2], given[1].shape[2]))
        return self.inner.forward(*given)

    def backward(self, *given: Any) -> Any:
        self.seen.append((given[0].q.shape[2], given[1].shape[2]))
        return self.inner.backward(*given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "of"), crossed(["qwen2", "stablelm", "gpt_oss"], ["grouped", "memo", "fpdt"])
)
def test_cudnn_sees_one_layout_of_outputs(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of outputs that a cell holds and of those that a buffer kept, also in families whose rotary
    embedding ends in a concatenation, so that heads come before tokens in q. A plan of another
    layout would read garbage; the ops of `vendor` refuse it."""
    monkeypatch.setattr("farspan.engine.kernels.AttentionKernels", VendorOnCpu)
    model, data = make_model(name, max_position_embeddings=512), draw(512)
    schedule = replace(strategy(of, 4, 512), chunk=128, kv_block=128)
    with cuda_ops_on_cpu() as calls:
        found = run_step(model, schedule, data)
    assert calls[BACKWARD_CUDNN] > 0
    assert_close(found, run_oracle(model, data))


@pytest.mark.gpu
@pytest.mark.parametrize("of", part_of(["grouped", "memo", "fpdt", "oomb"], "memo", "fpdt"))
def test_a_step_with_the_heads_of_a_model(of: str) -> None:
    """28/4 heads of 128 in bfloat16, as Qwen2.5-7B has them: the second of two equal steps is no
    less accurate than autograd without chunks. cuDNN takes the squares of whole chunks, flash
    attention the rest."""
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
    sizes = heads | {"num_hidden_layers": 2, "max_position_embeddings": 512}
    model, exact_model = (make_model("qwen2", x, **sizes) for x in (torch.bfloat16, torch.float64))
    exact_model.load_state_dict(model.state_dict())
    data = draw(450)
    exact, plain = run_oracle(exact_model, data), run_oracle(model, data)
    model.to("cuda")  # type: ignore[arg-type]
    step = Step(model, replace(strategy(of, 2, 450), chunk=128, kv_block=128), poison=True)
    kernel = step.kernels.of(step.program(1, 450).model.layers[0], step.program(1, 450))
    assert kernel == CudaCudnn(CudaFlash(), queries=(66, 128))
    on_gpu = Data(data.input_ids.cuda(), data.labels.cuda())
    for _ in range(2):
        found = run_step(model, step, on_gpu)
    theirs = errors(plain.gradients, exact.gradients)
    ours = errors({n: g.cpu() for n, g in found.gradients.items()}, exact.gradients)
    # A short vector may be lucky there, so it is held to what is typical of the model at least.
    typical = sorted(theirs.values())[len(theirs) // 2]
    wrong = {n: e for n, e in ours.items() if not e <= 2 * max(theirs[n], typical)}
    assert not wrong, wrong


class VendorOnCpu(AttentionKernels):
    """What a GPU has, asked for with tensors of a CPU."""

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        lengths = None
        if program is not None:
            lengths = chunk_lengths(program, most_of(spec, program.run))
        return CudaCudnn(CudaFlash(), grid=128, queries=lengths)


def test_kernels_are_checked() -> None:
    with pytest.raises(
        UnsupportedError, match="attention: expected one of auto, cudnn, flash, fa3, fa4"
    ):
        Kernels("triton")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="compile: expected true or false"):
        Kernels(compile="yes")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="deterministic: expected true or false"):
        Kernels(deterministic=1)  # type: ignore[arg-type]


# -- the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", part_of(["qwen2", "mixtral", "gpt_oss"], "mixtral"))
def test_deterministic_steps_are_steps(name: str) -> None:
    """The switch of torch is on while a step runs, and as it was after it and where it failed."""
    model, data = shared_model(name), draw(40)
    seen: list[bool] = []

    def look(_: object) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if len(seen) > 5:
            raise KeyError

    kernels = Kernels(deterministic=True)
    found = run_step(model, Step(model, KEPT, kernels=kernels), data)
    plain = run_step(model, Step(model, KEPT), data)
    assert torch.equal(found.loss, plain.loss)
    assert all(torch.equal(g, plain.gradients[n]) for n, g in found.gradients.items())
    with pytest.raises(KeyError):
        run_step(model, Step(model, KEPT, kernels=kernels, progress=look), data)
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_deterministic_leaves_cudnn_out(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward adds in any order; and cuBLAS is asked to repeat itself."""
    del hopper
    ask = torch.device("cuda"), torch.bfloat16
    layer = LayerSpec(4, 2, 64, 64)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    kernels = AttentionKernels(*ask, deterministic=True)
    kernels.refuse(MODEL)
    with kernels.ready():
        assert kernels.of(layer) == CudaFlash()
    assert isinstance(kernels.of(layer), CudaCudnn)
    named = AttentionKernels(*ask, AttentionKernel.CUDNN, deterministic=True)
    with pytest.raises(
        UnsupportedError, match=r"cudnn needs .* neither kernels\.deterministic nor"
    ):
        named.refuse(MODEL)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with pytest.raises(
        UnsupportedError, match=r"deterministic: cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096"
    ):
        kernels.refuse(MODEL)


# -- what a machine was measured to be fastest with --------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")


@pytest.mark.usefixtures("hopper")
def test_auto_takes_what_was_measured_on_this_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ask = torch.device("cuda"), torch.bfloat16
    layer = LayerSpec(4, 2, 64, 64)
    assert measured_here(*ask) == (None, None)
    file = read("h200")
    rates = {
        "bfloat16": replace(file.spec.rates["bfloat16"], kernel=AttentionKernel.FLASH),
        "float32": file.spec.rates["float32"],
    }
    for name, kernel in (("NVIDIA H200", AttentionKernel.FLASH), ("NVIDIA H100", None)):
        write(replace(file, spec=replace(file.spec, name=name, rates=rates)), user_file())
        assert measured_here(*ask) == (kernel, None)
    assert measured_here(ask[0], torch.float32) == (None, None)
    assert measured_here(torch.device("cpu"), torch.bfloat16) == (None, None)
    flash = AttentionKernels(*ask, fastest=AttentionKernel.FLASH)
    assert flash.of(layer) == CudaFlash()
    # What is named comes first; what the layer or this machine cannot have is left to the rule.
    assert isinstance(replace(flash, choice=AttentionKernel.CUDNN).of(layer), CudaCudnn)
    cudnn = AttentionKernels(*ask, fastest=AttentionKernel.CUDNN)
    assert cudnn.of(LayerSpec(4, 2, 256, 256)) == CudaFlash()
    for missing in (AttentionKernel.FA3, AttentionKernel.FA4):
        kernels = AttentionKernels(*ask, fastest=missing)
        assert isinstance(kernels.of(layer), CudaCudnn)
        with kernels.ready():
            assert isinstance(kernels.of(layer), CudaCudnn)
        with pytest.raises(UnsupportedError, match=f"{missing.value} needs the package"):
            replace(kernels, choice=missing).refuse(MODEL)
    assert kernels.of(replace(layer, softcap=30.0)) == Tiled(30.0)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("turned", [False, True])
def test_each_direction_has_the_kernel_that_was_measured_for_it(
    turned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine file whose rates choose two kernels: a step runs each, and is exact."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ask = torch.device("cuda"), torch.bfloat16
    names = [AttentionKernel.CUDNN, AttentionKernel.FLASH][:: -1 if turned else 1]
    file = read("h200")
    rates = replace(file.spec.rates["bfloat16"], kernel=names[0], backward_kernel=names[1])
    spec = replace(file.spec, name="NVIDIA H200", rates={"bfloat16": rates})
    write(replace(file, spec=spec), user_file())
    kernels = attention_kernels(Kernels(), *ask, fused=False)
    chosen = kernels.of(LayerSpec(4, 2, 64, 64))
    assert isinstance(chosen, Directed)
    ways = [type(way) for way in (chosen.ahead, chosen.back)]
    assert ways == [CudaCudnn, CudaFlash][:: -1 if turned else 1]
    # A layer too wide for cuDNN, a named kernel and a deterministic run have one for both.
    assert kernels.of(LayerSpec(4, 2, 256, 256)) == CudaFlash()
    assert replace(kernels, choice=AttentionKernel.FLASH).of(MODEL.layers[0]) == CudaFlash()
    with deterministic_algorithms(True):
        assert kernels.of(MODEL.layers[0]) == CudaFlash()

    class Measured(VendorOnCpu):
        def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
            both = [super().of(spec, program), CudaFlash()]
            return Directed(*both[:: -1 if turned else 1])

    monkeypatch.setattr("farspan.engine.kernels.AttentionKernels", Measured)
    model, data = make_model("qwen2", max_position_embeddings=512), draw(512)
    schedule = replace(strategy("memo", 4, 512), chunk=128, kv_block=128)
    with cuda_ops_on_cpu() as calls:
        found = run_step(model, schedule, data)
    cudnn = FORWARD_CUDNN, BACKWARD_CUDNN
    assert [calls.get(name, 0) > 0 for name in cudnn] == [not turned, turned]
    assert_close(found, run_oracle(model, data))


@pytest.mark.usefixtures("hopper")
def test_flash_attention_3_is_registered_for_one_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farspan.engine.kernels.refuse_missing", lambda _: None)
    monkeypatch.setattr("farspan.engine.kernels._is_installed", lambda _: True)
    ask = torch.device("cuda"), torch.bfloat16
    cudnn, third = AttentionKernel.CUDNN, AttentionKernel.FA3
    kernels = AttentionKernels(*ask, fastest=cudnn, fastest_backward=third)
    assert not kernels.is_ready()
    assert replace(kernels, fastest_backward=None).is_ready()
    chosen = kernels.of(LayerSpec(4, 2, 128, 128))
    assert chosen == Directed(CudaCudnn(CudaFlash()), CudaFlash())


@pytest.mark.parametrize("fault", [None, "TypeError: no such argument"])
@pytest.mark.usefixtures("hopper")
def test_soft_caps_are_flash_attention_4_s_where_it_is_right(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.engine.kernels.refuse_missing", lambda _: None)
    monkeypatch.setattr("farspan.engine.kernels.flash_4_fault", lambda *_: fault)
    monkeypatch.setattr("farspan.engine.kernels._is_installed", lambda _: True)
    kernels = AttentionKernels(torch.device("cuda"), torch.bfloat16)
    capped = LayerSpec(4, 2, 64, 64, softcap=30.0)
    assert kernels.of(capped) == (Flash4(30.0) if fault is None else Tiled(30.0))
    assert isinstance(kernels.of(replace(capped, softcap=None)), CudaCudnn)
    assert replace(kernels, dtype=torch.float32).of(capped) == Tiled(30.0)
    named = replace(kernels, choice=AttentionKernel.FA4)
    if fault is None:
        named.refuse(MODEL)
    else:
        with pytest.raises(
            UnsupportedError, match=r"fa4 does not work here: TypeError.*choose auto"
        ):
            named.refuse(MODEL)


# -- compiled modules --------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "aot_eager"),  # graphs are traced, differentiated and called, but not made into C++
        exhaustive({}, "inductor"),
        exhaustive({"mlp_chunk_size": 5}, "inductor"),
        exhaustive({"activation_save_fraction": 1.0}, "inductor"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
def test_compiled_modules_are_no_less_accurate(
    changes: dict[str, Any], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, against float64: no parameter's gradient is off by more than twice what plain
    PyTorch's own is, or by one rounding of the whole; and the model is saved as ever."""
    sizes = {"num_hidden_layers": 1}
    exact_model = make_model("qwen2", torch.float64, **sizes)
    model = make_model("qwen2", torch.float32, **sizes)
    model.load_state_dict(exact_model.state_dict())
    names = list(model.state_dict())
    data = draw(37, batch=2)
    exact, plain = run_oracle(exact_model, data), run_oracle(model, data)
    compiles = partialmethod(nn.Module.compile, backend=backend)
    monkeypatch.setattr(nn.Module, "compile", compiles)
    step = Step(model, Schedule(chunk=16, **changes), kernels=Kernels(compile=True))
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    assert len(compiled) == 3
    with PeakMemory(torch.device("cpu")):
        run_step(model, step, data)
    found = run_step(model, step, data)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    theirs, ours = (errors(x.gradients, exact.gradients) for x in (plain, found))
    rounding = torch.finfo(torch.float32).eps
    wrong = {n: e for n, e in ours.items() if not e <= 2 * theirs[n] + rounding}
    assert not wrong, wrong
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


# -- chosen once ---------------------------------------------------------------------------------


def test_kernels_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew where torch is set otherwise."""
    asked, of = [], AttentionKernels.of

    def heard(self: AttentionKernels, spec: LayerSpec, program: Program | None = None) -> Any:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return of(self, spec, program)

    model, data = shared_model("qwen2"), draw(20)
    step = Step(model, Schedule(chunk=16))
    monkeypatch.setattr(AttentionKernels, "of", heard)
    for _ in range(2):
        run_step(model, step, data)
    with deterministic_algorithms(True):
        run_step(model, step, data)
    assert asked == [False, True]
