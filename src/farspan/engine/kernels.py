"""Select the attention kernel for each layer: the fastest exact one on this machine, or a named
one.

FlashAttention-3 and FlashAttention-4 are separate packages. PyTorch registers FlashAttention-3
under the aten names that `backends.CudaFlash` calls. The registration holds for the whole process,
so it is undone after a step. PyTorch can register FlashAttention-4 too, but without soft caps and,
in 2.11, without windows, and it unpacks two results although the package has returned four since
2026-06-24: `Flash4` calls the package directly.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from os import environ

import torch
from torch import Tensor
from torch.nn import attention
from torch.utils import deterministic as memory

from farspan.attention.backends import (
    BackwardQueries,
    BlockKernel,
    CpuFlash,
    CudaCudnn,
    CudaFlash,
    Directed,
    Gradients,
    Padded,
    Tiled,
)
from farspan.lazy import load
from farspan.planner.machines import read, user_file
from farspan.program.attention_blocks import Block, most_of
from farspan.program.program import Program
from farspan.spec import AttentionKernel, Kernels, LayerSpec, ModelSpec, UnsupportedError

WIDEST = 256  # elements of a head in flash attention
CUDNN_WIDEST = 128


def of_card(capability: tuple[int, int]) -> AttentionKernel:
    """Return the attention kernel of PyTorch that is fastest on GPUs of a compute capability. cuDNN
    trains 1.7 to 2.3 times as fast as flash attention 2 on an H100 (9.0) and takes 1.07 to 1.2
    times as long on Ampere (8.x), Ada (8.9) and consumer Blackwell (12.x): measured by
    transformers' issue 48163. On data-centre Blackwell (10.x) cuDNN is a guess until `farspan
    calibrate` has measured: flash attention 2 is not made for it."""
    return AttentionKernel.CUDNN if capability[0] in (9, 10) else AttentionKernel.FLASH


def select_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float | None,
    capability: tuple[int, int] = (9, 0),
    choice: AttentionKernel = AttentionKernel.AUTO,
    queries: tuple[int, ...] | None = None,
) -> BlockKernel:
    """Return the fastest exact kernel for heads of these sizes, or the chosen kernel. Vendor
    kernels need a CUDA `capability` of (8, 0) or more; heads of widths that they do not take are
    padded (`Padded`). cuDNN is left out under `torch.use_deterministic_algorithms`, as its backward
    is not deterministic, and if `torch.backends.cuda.enable_cudnn_sdp(False)` was called. `queries`
    are the token counts of chunks (`chunk_lengths`). Raises UnsupportedError for a dtype that is no
    floating type of 16 bits or more, and for a chosen kernel that cannot run here."""
    half = dtype in (torch.bfloat16, torch.float16)
    if not half and dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(
            f"dtype: expected float64, float32, bfloat16 or float16 for attention, got {dtype}; "
            "load the model in one of these"
        )
    widest = max(head_dim, value_dim)
    on_cuda = device_type == "cuda" and capability >= (8, 0)
    if not (on_cuda and half and widest <= WIDEST):
        _refuse_choice(
            choice,
            "a CUDA GPU of compute capability 8.0 or more, bfloat16 or "
            f"float16, and heads of up to {WIDEST} elements",
        )
        if softcap is not None or device_type != "cpu":
            return Tiled(softcap)
        return _at_width(CpuFlash(), widest, head_dim, value_dim)
    width = -(-widest // 8) * 8
    if choice is AttentionKernel.FA4:
        return _flash_4(softcap, capability, width, head_dim, value_dim)
    if softcap is not None:
        _refuse_choice(choice, "attention without a soft cap, which only fa4 supports")
        return Tiled(softcap)
    if choice is AttentionKernel.FA3 and capability[0] != 9:
        _refuse_choice(choice, "a GPU of compute capability 9 (Hopper)")
    wanted = of_card(capability) if choice is AttentionKernel.AUTO else choice
    kernel: BlockKernel = CudaFlash()
    if wanted is AttentionKernel.CUDNN:
        switched_off = not torch.backends.cuda.cudnn_sdp_enabled()
        if width > CUDNN_WIDEST or switched_off or torch.are_deterministic_algorithms_enabled():
            _refuse_choice(
                choice,
                f"heads of up to {CUDNN_WIDEST} elements, torch.backends.cuda.enable_cudnn_sdp, "
                "and neither kernels.deterministic nor torch.use_deterministic_algorithms",
            )
        else:
            kernel = CudaCudnn(kernel, queries=queries)
    return _at_width(kernel, width, head_dim, value_dim)


def _at_width(kernel: BlockKernel, width: int, head_dim: int, value_dim: int) -> BlockKernel:
    return kernel if head_dim == value_dim == width else Padded(kernel, width)


def _flash_4(
    softcap: float | None, capability: tuple[int, int], width: int, head_dim: int, value_dim: int
) -> BlockKernel:
    if capability[0] not in (9, 10):
        needs = "a GPU of compute capability 9 (Hopper) or 10 (data-centre Blackwell)"
        _refuse_choice(AttentionKernel.FA4, needs)
    if capability[0] == 10 and width > 128:  # heads of 8 to 128 elements, or of 256
        width = WIDEST
    return _at_width(Flash4(softcap), width, head_dim, value_dim)


def _refuse_choice(choice: AttentionKernel, needs: str) -> None:
    if choice is not AttentionKernel.AUTO:
        raise UnsupportedError(f"attention: {choice.value} needs {needs}; choose auto")


# -- FlashAttention-3 and -4 --------------------------------------------------------------------


NAME = "FA3"  # in PyTorch's registry
PACKAGES = {
    AttentionKernel.FA3: (
        "flash_attn_interface",
        "FlashAttention-3, built from its sources for a Hopper GPU",
    ),
    AttentionKernel.FA4: ("flash_attn.cute.interface", "pip install flash-attn-4"),
}
# Relative error of a probe: rounding to bfloat16 gives 0.004, a wrong mask or scale 0.1.
TRUE_WITHIN = 0.02


def refuse_missing(choice: AttentionKernel) -> None:
    """Raise UnsupportedError if the kernel needs a package that is not installed."""
    if choice not in PACKAGES:
        return
    known = getattr(attention, "list_flash_attention_impls", list)
    if choice is AttentionKernel.FA3 and NAME not in known():
        raise UnsupportedError("attention: fa3 needs PyTorch 2.11 or later; choose auto or flash")
    package, words = PACKAGES[choice]
    if not _is_there(package):
        raise UnsupportedError(
            f"attention: {choice.value} needs the package {package} ({words}), which is not "
            "installed; install it, or choose auto or flash"
        )


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """Run the body with FlashAttention-3 registered as aten's flash attention. Raises
    UnsupportedError if its package does not fit PyTorch."""
    before = attention.current_flash_attention_impl()
    if before == NAME:
        yield
        return
    try:
        attention.activate_flash_attention_impl(NAME)
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedError(
            f"attention: fa3 cannot be loaded: {error}; choose auto or flash"
        ) from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl(_raise_warn=False)
        if before is not None:
            attention.activate_flash_attention_impl(before)


@dataclass(frozen=True, slots=True)
class Flash4(BlockKernel):
    """FlashAttention-4 for Hopper and data-centre Blackwell. It takes bf16, fp16; D == Dv, a
    multiple of 8 up to 128, or 256 (any up to 256 on Hopper); tensors [B, S, H, D]; GQA, windows
    and soft caps. Causal masks and windows are aligned bottom right; a window's None means all keys
    on that side. It sums dQ in a fixed order under `torch.use_deterministic_algorithms`. The first
    call of each kernel compiles it, which takes seconds."""

    softcap: float | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        call = load("flash_attn.cute.interface", "_flash_attn_fwd")
        out_BSHD, lse, *_ = call(
            *(x.transpose(1, 2) for x in (q, k, v)),
            softmax_scale=scale,
            causal=block.causal,
            softcap=self.softcap or 0.0,
            window_size_left=self._left(block),
            return_lse=True,
        )
        return out_BSHD.transpose(1, 2), lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        call = load("flash_attn.cute.interface", "_flash_attn_bwd")
        dq, dk, dv, *_ = call(
            *(x.transpose(1, 2) for x in (queries.q, k, v, queries.out, queries.dout)),
            queries.lse.contiguous(),
            softmax_scale=scale,
            causal=block.causal,
            softcap=self.softcap or 0.0,
            window_size_left=self._left(block),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _left(self, block: Block) -> int | None:
        """Return how many keys to the left of the aligned diagonal are in a block's window."""
        left, _ = CudaFlash().window(block)
        return None if left < 0 else left


@cache
def flash_4_fault(softcap: float | None, width: int, device: torch.device) -> str | None:
    """Return how FlashAttention-4 fails on this device, or None if it works. Its forward and
    backward are compared with plain PyTorch on a causal square, a rectangle and a window, with
    heads of `width`: farspan calls private functions of the package, which a release may change."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int, tokens: int) -> Tensor:
        shape = 1, tokens, heads, width
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2)

    kernel, plain, scale = Flash4(softcap), Tiled(softcap), width**-0.5
    for block in (
        Block(0, None, 0, 200, 0, 200, True),
        Block(0, None, 0, 200, 0, 200, True, window=70),
        Block(0, None, 300, 500, 0, 300, False),
        Block(0, None, 300, 500, 71, 300, False, window=230),
    ):
        q, dout = random(4, block.queries), random(4, block.queries)
        k, v = random(2, block.keys), random(2, block.keys)
        wanted = plain.forward(q, k, v, block, scale)
        try:
            found = kernel.forward(q, k, v, block, scale)
            queries = BackwardQueries(dout, q, *wanted)
            pairs = zip(
                (*found, *kernel.backward(queries, k, v, block, scale)),
                (*wanted, *plain.backward(queries, k, v, block, scale)),
                strict=True,
            )
            errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
        except Exception as error:  # its compiler, or a changed signature
            return f"{type(error).__name__}: {error}"
        if not max(errors) <= TRUE_WITHIN:
            return f"the relative error of a call is {max(errors):.2g}"
    return None


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing, or it has no file
        return False


# -- the kernels of a program --------------------------------------------------------------------


CUBLAS, SAME = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # make cuBLAS deterministic


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """Choice of the attention kernel for each layer, on one device and in one dtype. With the
    choice `auto`, a layer gets `fastest`, measured on this machine, if that supports the layer, and
    `fastest_backward` (None: the same) for its backward. A layer with a soft cap gets
    FlashAttention-4, the only fast kernel with soft caps, if it is installed and works here.
    Otherwise `select_kernel` decides by the card."""

    device: torch.device
    dtype: torch.dtype
    choice: AttentionKernel = AttentionKernel.AUTO
    deterministic: bool = False
    fastest: AttentionKernel | None = None
    fastest_backward: AttentionKernel | None = None
    fused: bool = False  # farspan's own kernels, which the device has, merge partial results

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        """Return a layer's kernel. Raises UnsupportedError if the chosen kernel cannot run it."""
        if spec.indexer is not None:
            _refuse_choice(self.choice, "attention to all tokens, not to those of an indexer")
            return Tiled(spec.softcap)
        lengths = None
        if program is not None:
            lengths = chunk_lengths(program, most_of(spec, program.run))
        wanted = self.fastest, self.fastest_backward or self.fastest
        ahead, back = (self._select(spec, self._choice(spec, w), lengths) for w in wanted)
        return ahead if ahead == back else Directed(ahead, back)

    def refuse(self, model: ModelSpec) -> None:
        """Raise UnsupportedError if the chosen kernel cannot run one of the layers."""
        if self.deterministic:
            refuse_cublas(self.device)
        layers = [spec for spec in set(model.layers) if spec.attends()]
        with deterministic_algorithms(self.deterministic):
            for spec in layers:
                self.of(spec)
        refuse_missing(self.choice)
        for spec in layers:
            self._refuse_fault(spec, self.choice)

    def is_ready(self) -> bool:
        """Return whether the chosen kernels run without the torch settings that `ready` makes."""
        return not self.deterministic and not self._registers()

    def _registers(self) -> bool:
        """Return whether PyTorch's flash attention must be FlashAttention-3."""
        third = AttentionKernel.FA3
        if self.choice is AttentionKernel.AUTO:
            return third in (self.fastest, self.fastest_backward) and _is_installed(third)
        return self.choice is third

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Run the body with the torch settings that the chosen kernels need."""
        with ExitStack() as stack:
            stack.enter_context(deterministic_algorithms(self.deterministic))
            if self._registers():
                stack.enter_context(flash_attention_3())
            yield

    def _select(
        self, spec: LayerSpec, choice: AttentionKernel, lengths: tuple[int, ...] | None = None
    ) -> BlockKernel:
        on_cuda = self.device.type == "cuda"
        capability = torch.cuda.get_device_capability(self.device) if on_cuda else (0, 0)
        dims = spec.head_dim, spec.value_dim
        return select_kernel(
            self.device.type, self.dtype, *dims, spec.softcap, capability, choice, lengths
        )

    def _choice(self, spec: LayerSpec, measured: AttentionKernel | None) -> AttentionKernel:
        """Return a layer's kernel for one direction, in which `measured` was the fastest."""
        if self.choice is not AttentionKernel.AUTO:
            return self.choice
        wanted = measured if spec.softcap is None else AttentionKernel.FA4
        if wanted is None or self.device.type != "cuda" or not _is_installed(wanted):
            return AttentionKernel.AUTO
        try:
            self._select(spec, wanted)
            self._refuse_fault(spec, wanted)
        except UnsupportedError:
            return AttentionKernel.AUTO
        return wanted

    def _refuse_fault(self, spec: LayerSpec, choice: AttentionKernel) -> None:
        """Raise UnsupportedError if FlashAttention-4 is chosen and gives wrong results here."""
        if choice is not AttentionKernel.FA4:
            return
        heads = max(spec.head_dim, spec.value_dim)
        width = WIDEST if heads > 128 else -(-heads // 8) * 8
        if (fault := flash_4_fault(spec.softcap, width, self.device)) is not None:
            raise UnsupportedError(
                f"attention: fa4 does not work here: {fault}; choose auto or flash"
            )


def attention_kernels(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, *, fused: bool
) -> AttentionKernels:
    """Return the choice of attention kernels that a step's `Kernels` makes on this device."""
    fastest = measured_here(device, dtype)
    return AttentionKernels(
        device, dtype, kernels.attention, kernels.deterministic, *fastest, fused=fused
    )


def measured_here(
    device: torch.device, dtype: torch.dtype
) -> tuple[AttentionKernel | None, AttentionKernel | None]:
    """Return the kernels whose forward and backward `farspan calibrate` measured as fastest on this
    device; None if not measured. The second is None, too, if the forward's kernel serves both.
    Raises UnsupportedError for an invalid machine file."""
    if device.type != "cuda" or not user_file().is_file():
        return None, None
    machine = read(user_file()).spec
    rates = machine.rates.get(str(dtype).removeprefix("torch."))
    if rates is None or machine.name != torch.cuda.get_device_name(device):
        return None, None
    return rates.kernel, rates.backward_kernel


@cache
def _is_installed(kernel: AttentionKernel) -> bool:
    try:
        refuse_missing(kernel)
    except UnsupportedError:
        return False
    return True


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Run the body with torch's deterministic algorithms, if `wanted`: an operator without one then
    raises an error. New memory is not filled, which would cost a pass over it."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def refuse_cublas(device: torch.device) -> None:
    """Raise UnsupportedError if cuBLAS may give different bits from call to call on this GPU: the
    environment must fix its workspace before the process begins."""
    if device.type == "cuda" and environ.get(CUBLAS) not in SAME:
        raise UnsupportedError(
            f"deterministic: cuBLAS needs {CUBLAS}={SAME[0]} in the environment of the process; "
            "set it before farspan starts"
        )


def chunk_lengths(program: Program, most: int) -> tuple[int, ...]:
    """Return the lengths of a program's attention calls, in tokens: that of a whole chunk, and of a
    shorter last one. A chunk longer than `most` is cut into parts of `most` tokens and a rest."""
    ends = {stop - start for start, stop in (program.chunks[0], program.chunks[-1])}
    found = {length for length in ends if length <= most}
    for length in ends - found:
        found |= {most, length % most} - {0}
    return tuple(sorted(found))
