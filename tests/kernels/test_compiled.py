"""The kernels compiled without a GPU, at the sizes of a 7B and an 8B model: nothing spills, loads
and stores are of 16 bytes, and loads run ahead where a loop has them.

`cuobjdump`, which comes with Triton, says what the machine code needs.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.hf.dropout import Numbers, drop_launch
from farspan.kernels import operations
from farspan.kernels.launch import Launch
from farspan.lazy import load
from tests.compiling import Compiler, compiling
from tests.grids import exhaustive

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    # Triton's own, on its first use in a process; what it is about is given with each launch.
    pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION"),
]

SHARED = 99 * 1024  # bytes a program may have on the least of the GPUs, sm_86 and sm_120
REGISTERS = 65536  # of a multiprocessor
FP32 = torch.float32


@dataclass(frozen=True)
class Model:
    """Hidden size, MLP, vocabulary, heads of queries and of keys."""

    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int = 128


QWEN = Model(3584, 18944, 152064, 28, 4)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def of_norms(model: Model, tokens: int) -> Iterator[tuple[str, Launch]]:
    for name, shape in (
        ("norm", (1, tokens, model.hidden)),
        ("norm of heads", (1, tokens, model.heads, model.head_dim)),
    ):
        for llama in (True, False):
            kind = operations.Norm(1e-6, offset=float(not llama), cast=llama)
            x, weight, rstd = empty(*shape), empty(shape[-1]), empty(*shape[:-1], dtype=FP32)
            yield f"{name} {llama}", operations.norm_launch(x, weight, x, rstd, kind)
            launch, _ = operations.norm_backward_launch(x, x, x, weight, rstd, kind)
            yield f"{name} backward {llama}", launch


def of_gates(model: Model, tokens: int) -> Iterator[tuple[str, Launch]]:
    x, fused = empty(1, tokens, model.inner), empty(1, tokens, 2 * model.inner)
    for act in operations.Act:
        given = {"gate": x, "up": x, "out": x}
        yield f"{act}", operations.gate_launch("gate_kernel", given, act)
        given = {"dout": x, "gate": x, "up": x, "dgate": x, "dup": x}
        yield f"{act} backward", operations.gate_launch("gate_backward_kernel", given, act)
        yield f"{act} again", operations.gate_launch("gate_again_kernel", {**given, "out": x}, act)
    halves = {"gate": fused[..., : model.inner], "up": fused[..., model.inner :], "out": x}
    yield "halves", operations.gate_launch("gate_kernel", halves, operations.Act.SILU)


def of_attention(model: Model, tokens: int) -> Iterator[tuple[str, Launch]]:
    q, k = (empty(1, tokens, h, model.head_dim) for h in (model.heads, model.kv_heads))
    total, sums, lse = q.float(), k.float(), empty(1, model.heads, tokens, dtype=FP32)
    table = empty(1, tokens, model.head_dim)
    for token_first in (True, False):
        heads_first = [
            x.transpose(1, 2) if token_first else x.view(1, -1, tokens, model.head_dim)
            for x in (q, k, total)
        ]
        q_heads, k_heads, out = heads_first
        both = q_heads, k_heads
        yield f"rotary {token_first}", operations.rotate_launch(*both, *both, table, table, False)
        yield f"merge {token_first}", operations.merge_launch(out, lse, ((q_heads, lse),), out)
        two = ((q_heads, lse),) * 2
        yield f"merge of two {token_first}", operations.merge_launch(out, lse, two, q_heads)
        yield f"sum of dq {token_first}", operations.add_launch(out, (q_heads,), out)
        yield f"sum of two {token_first}", operations.add_launch(q_heads, (q_heads,) * 2, out)
        part = k_heads.permute(2, 0, 1, 3)
        yield (
            f"sum of dk {token_first}",
            operations.add_launch(sums.transpose(0, 1), (part,), sums.transpose(0, 1)),
        )
    yield "merge of fp32", operations.merge_launch(out, lse, ((out, lse),), out)


def of_dropouts(model: Model, tokens: int) -> Iterator[tuple[str, Launch]]:
    for width in (model.hidden, model.inner):
        x = empty(1, tokens, width)
        yield f"drop {width}", drop_launch(x, x, -(2**30), 1.25, Numbers((5, 7), 0, 0))


def of_loss(model: Model, tokens: int) -> Iterator[tuple[str, Launch]]:
    logits, losses = empty(tokens, model.vocabulary), empty(tokens, dtype=FP32)
    targets = empty(tokens, dtype=torch.int64)
    for scale in (None, 1.0):
        yield f"loss {scale}", operations.loss_launch(logits, targets, losses, scale)
    yield "capped loss", operations.loss_launch(logits, targets, losses, 1.0, softcap=30.0)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    with compiling(load("farspan.kernels.triton_kernels", "gate_kernel"), tmp_path) as driver:
        yield driver


def compiled(launch: Launch) -> Any:
    return launch.kernel.warmup(grid=launch.programs, **launch.arguments, enable_fp_fusion=True)


def needs(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers a thread (REG), and bytes of its own memory (STACK, LOCAL): what is spilled."""
    nvidia = find_spec("triton.backends.nvidia")
    assert nvidia is not None
    assert nvidia.origin is not None
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(nvidia.origin).parent / "bin" / "cuobjdump"
    said = subprocess.run(
        [tool, "--dump-resource-usage", path], check=True, capture_output=True, text=True
    ).stdout
    return {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}


def assert_good(name: str, launch: Launch, folder: Path) -> None:
    kernel = compiled(launch)
    ptx, found = kernel.asm["ptx"], needs(kernel.asm["cubin"], folder)
    assert found.keys() == {"REG", "STACK", "LOCAL"}
    assert found["STACK"] == found["LOCAL"] == 0, (name, found)
    assert found["REG"] * 32 * launch.arguments["num_warps"] <= REGISTERS, (name, found)
    assert kernel.metadata.shared <= SHARED, name
    # 16 bytes a load and a store, or 32 on Blackwell; some single numbers of a row beside them.
    wide = r"global(?:\.\w+)*\.(?:v4\.b32|v2\.b64|v8\.b32|v4\.b64)"
    ahead = re.findall(r"cp\.async\.cg\.shared\.global", ptx)
    assert re.search(rf"ld\.{wide}", ptx) or ahead, name
    assert re.search(rf"st\.{wide}", ptx) or name == "loss None", name
    # No two bytes are stored alone, and loaded alone only the target's logit and a head's weight.
    assert not re.search(r"st\.global(\.\w+)*\.b(8|16)\b", ptx), name
    assert len(re.findall(r"ld\.global(?:\.\w+)*\.b(?:8|16)\b", ptx)) <= 1, name
    if "loss" in name or ("norm" in name and "backward" in name):
        assert ahead, name
        assert "async_wait" in kernel.asm["ttgir"], name
    assert not re.search(r"\b(atom|red)\.", ptx), name


# Everything on Hopper; elsewhere what does not go by the activation. Of the kernels that run ahead
# and of one that does not, the widths of loads that Blackwell has.
BLACKWELL = r"norm True|norm backward True|silu|rotary True|loss 1\.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [(9, 0), exhaustive((8, 0)), exhaustive((10, 0)), exhaustive((12, 0))], ids=str
)
def test_kernels_compile(capability: tuple[int, int], driver: Any, tmp_path: Path) -> None:
    driver.set_active(Compiler(capability))
    launches = [kind(QWEN, 16) for kind in (of_norms, of_gates, of_attention, of_loss, of_dropouts)]
    for name, launch in (pair for of_kind in launches for pair in of_kind):
        if capability == (12, 0) and not re.fullmatch(BLACKWELL, name):
            continue
        if capability == (9, 0) or not re.search(r"gelu|False|fp32|capped", name):
            assert_good(name, launch, tmp_path)


@pytest.mark.slow
def test_another_length_compiles_nothing_new(driver: Any) -> None:
    """Chunks are of many lengths. One token aside, whose strides of 1 are another matter."""
    driver.set_active(Compiler((9, 0)))
    counts = []
    kernels: dict[int, Any] = {}
    for tokens in (16, 17, 35):
        for kind in (of_norms, of_gates, of_attention, of_loss):
            for name, launch in kind(QWEN, tokens):
                if not re.search(r"gelu|False|fp32|capped", name):
                    kernels[id(launch.kernel)] = launch.kernel
                    compiled(launch)
        counts.append(sum(len(kernel.device_caches[90][0]) for kernel in kernels.values()))
    assert counts[0] == counts[1] == counts[2]


def test_offsets_within_a_line_are_of_64_bits(driver: Any) -> None:
    """A contiguous tensor of more than 2**31 elements is one line to the gate's kernel."""
    driver.set_active(Compiler((9, 0)))
    for name, launch in of_gates(QWEN, 16):
        if name.startswith("silu"):
            offsets = re.findall(r"tt\.addptr .*, tensor<\d+x(i\d+)>", compiled(launch).asm["ttir"])
            assert set(offsets) == {"i64"}, name
