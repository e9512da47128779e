"""Which kernels a program's attention runs on, and what they could not index."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from os import environ

import torch
from torch.utils import deterministic as memory

from farspan.attention.backends import BlockKernel
from farspan.attention.choose import (
    WIDEST,
    flash_4_fault,
    flash_attention_3,
    refuse_missing,
    select_kernel,
)
from farspan.planner.machines import read, user_file
from farspan.program.attention_blocks import most_of
from farspan.program.program import Program
from farspan.sparse.attend import FarKernel
from farspan.sparse.gathered import select_far
from farspan.sparse.kernel_calls import TritonFar, supports
from farspan.spec import AttentionKernel, Kernels, LayerSpec, ModelSpec, UnsupportedError

CUBLAS, SAME = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # what cuBLAS needs for same bits


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels of one device, dtype and choice.

    Where the choice is open, a layer has `fastest`, which this machine was measured to have, if it
    can; FlashAttention-4 for soft caps, which nothing else has at its speed, if it is installed
    and right here; else what `select_kernel` knows by the card.
    """

    device: torch.device
    dtype: torch.dtype
    choice: AttentionKernel = AttentionKernel.AUTO
    deterministic: bool = False
    fastest: AttentionKernel | None = None
    fused: bool = False  # parts are joined by farspan's own kernels, which the device has

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        """A layer's kernel. Raises UnsupportedError where the choice cannot be met."""
        lengths = None
        if program is not None:
            lengths = chunk_lengths(program, most_of(spec, program.run))
        return self._select(spec, self._choice(spec), lengths)

    def far(self, spec: LayerSpec) -> FarKernel:
        """What computes a layer's attention to chosen pages."""
        heads = spec.head_dim, spec.value_dim, spec.softcap
        if supports(self.device, self.dtype, *heads):
            return TritonFar()
        return select_far(self.device.type, *heads)

    def refuse(self, model: ModelSpec) -> None:
        """Raises UnsupportedError where a layer cannot have the kernel that is chosen."""
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
        """Whether the kernels are what was chosen without `ready`."""
        return not self.deterministic and self._wanted() is not AttentionKernel.FA3

    def _wanted(self) -> AttentionKernel:
        third = AttentionKernel.FA3
        if self.choice is AttentionKernel.AUTO and self.fastest is third and _is_installed(third):
            return third
        return self.choice

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside it the kernels are what was chosen."""
        with ExitStack() as stack:
            stack.enter_context(deterministic_algorithms(self.deterministic))
            if self._wanted() is AttentionKernel.FA3:
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

    def _choice(self, spec: LayerSpec) -> AttentionKernel:
        if self.choice is not AttentionKernel.AUTO:
            return self.choice
        wanted = self.fastest if spec.softcap is None else AttentionKernel.FA4
        if wanted is None or self.device.type != "cuda" or not _is_installed(wanted):
            return AttentionKernel.AUTO
        try:
            self._select(spec, wanted)
            self._refuse_fault(spec, wanted)
        except UnsupportedError:
            return AttentionKernel.AUTO
        return wanted

    def _refuse_fault(self, spec: LayerSpec, choice: AttentionKernel) -> None:
        """Raises UnsupportedError where FlashAttention-4 is chosen and is not right on this
        device."""
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
    """The kernels that a Step was asked to use, on this machine."""
    fastest = measured_here(device, dtype)
    return AttentionKernels(device, dtype, kernels.attention, kernels.deterministic, fastest, fused)


def measured_here(device: torch.device, dtype: torch.dtype) -> AttentionKernel | None:
    """The kernel that `farspan calibrate` found fastest on this device; None where it has not run,
    or on another one. Raises UnsupportedError for a machine file that is none."""
    if device.type != "cuda" or not user_file().is_file():
        return None
    machine = read(user_file()).spec
    rates = machine.rates.get(str(dtype).removeprefix("torch."))
    if rates is None or machine.name != torch.cuda.get_device_name(device):
        return None
    return rates.kernel


@cache
def _is_installed(kernel: AttentionKernel) -> bool:
    try:
        refuse_missing(kernel)
    except UnsupportedError:
        return False
    return True


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Inside it, if wanted, PyTorch computes the same bits from the same inputs; an operator that
    cannot raises. New memory is not filled, which costs a pass over it."""
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
    """Raises UnsupportedError where products on a GPU may differ from call to call: cuBLAS reads
    how much memory it may have for itself when the process begins."""
    if device.type == "cuda" and environ.get(CUBLAS) not in SAME:
        raise UnsupportedError(
            f"deterministic: cuBLAS needs {CUBLAS}={SAME[0]} in the environment of the process; "
            "set it before farspan starts"
        )


def chunk_lengths(program: Program, most: int) -> tuple[int, ...]:
    """Of whole chunks and of a last one that is ragged, and of what they are cut into."""
    ends = {stop - start for start, stop in (program.chunks[0], program.chunks[-1])}
    found = {length for length in ends if length <= most}
    for length in ends - found:
        found |= {most, length % most} - {0}
    return tuple(sorted(found))
