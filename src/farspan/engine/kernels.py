"""Which kernels a program's attention runs on, and what they could not index."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from farspan.attention.backends import BlockKernel, select_kernel
from farspan.attention.flash3 import flash_attention_3, refuse_missing
from farspan.attention.sparse.far import FarKernel
from farspan.attention.sparse.gathered import select_far
from farspan.attention.sparse.triton_far import TritonFar
from farspan.attention.sparse.triton_pages import supports
from farspan.plan.program import Program
from farspan.spec import AttentionKernel, LayerSpec, ModelSpec, Refused, RunSpec, Schedule

INDEXED = 2**31  # CUDA attention kernels count a call's elements with 32 bits


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels of one device, dtype and choice."""

    device: torch.device
    dtype: torch.dtype
    choice: AttentionKernel = AttentionKernel.AUTO

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        """A layer's kernel. Raises Refused where the choice cannot be met."""
        on_cuda = self.device.type == "cuda"
        capability = torch.cuda.get_device_capability(self.device) if on_cuda else (0, 0)
        return select_kernel(
            self.device.type,
            self.dtype,
            spec.head_dim,
            spec.value_dim,
            spec.softcap,
            capability,
            self.choice,
            None if program is None else chunk_lengths(program),
        )

    def far(self, spec: LayerSpec) -> FarKernel:
        """What computes a layer's attention to chosen pages."""
        heads = spec.head_dim, spec.value_dim, spec.softcap
        if supports(self.device, self.dtype, *heads):
            return TritonFar()
        return select_far(self.device.type, *heads)

    def refuse(self, model: ModelSpec) -> None:
        """Raises Refused where a layer cannot have the kernel that is chosen."""
        for spec in set(model.layers):
            if spec.attends():
                self.of(spec)
        if self.choice is AttentionKernel.FA3:
            refuse_missing()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside it the kernels are what was chosen."""
        with flash_attention_3() if self.choice is AttentionKernel.FA3 else nullcontext():
            yield


def chunk_lengths(program: Program) -> tuple[int, ...]:
    """Of whole chunks and of a last one that is ragged."""
    ends = program.chunks[0], program.chunks[-1]
    return tuple(sorted({stop - start for start, stop in ends}))


def refuse_wide_calls(model: ModelSpec, run: RunSpec, schedule: Schedule) -> None:
    """Raises Refused where a call would have more elements than 32 bits count.

    Of queries, or of keys, whose gradients flash attention holds for every query head.
    """
    for field in ("chunk", "kv_block"):
        tokens = min(getattr(schedule, field), run.tokens)
        row = run.batch * widest(model)
        if tokens * row >= INDEXED:
            raise Refused(
                f"{field}: {tokens:,} tokens of {row:,} elements each, all sequences together, are "
                f"beyond what CUDA attention kernels index; use at most {(INDEXED - 1) // row:,}"
            )


def widest(model: ModelSpec) -> int:
    """The most elements that a token's queries or outputs have."""
    return max(spec.query_heads * max(spec.head_dim, spec.value_dim) for spec in model.layers)
