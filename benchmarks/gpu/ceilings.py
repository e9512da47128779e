"""In a child: how fast this machine is at what a step is made of, and nothing faster is claimed.

First what planning reckons with (as `farspan calibrate` measures it, in two looks), then matrix
products of the model's own shapes, attention in the blocks that schedules cut, by backend.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.children import add_row, words_of
from benchmarks.gpu.device import dtype_of, give_back
from farspan.ask import measuring
from farspan.engine.calibrate import Calibration
from farspan.engine.kernels import select_kernel
from farspan.engine.microbench import GLANCE, QUICK, AttentionProblem, Bench
from farspan.planner.machines import contradictions, to_json
from farspan.profile.model import Variant
from farspan.profile.store import profiles_of
from farspan.program.attention_blocks import Block
from farspan.spec import LayerSpec, dtype_name

LOOKS = 2
TOKENS = (4096, 16384)  # of a product: chunks
HEAD_TOKENS = 1024
# Queries and keys of a block, and whether it is the causal square on the diagonal.
BLOCKS = (
    (4096, 4096, True),
    (8192, 8192, True),
    (16384, 16384, True),
    (65536, 65536, True),
    (4096, 16384, False),
    (8192, 16384, False),
    (16384, 16384, False),
    (65536, 16384, False),
)
# As small as cuDNN's blocks are, so that on a GPU, or what stands in for one, each kernel runs.
TINY_TOKENS, TINY_BLOCKS = (64,), ((1024, 1024, True), (1024, 1024, False))
BACKENDS = ("cudnn", "flash")


def run(settings: Mapping[str, Any]) -> None:
    """A row for each ceiling."""
    device, tiny = torch.device(settings["device"]), settings["tiny"]
    effort = GLANCE if tiny else QUICK
    bench = Bench(device, effort)
    calibration = Calibration(bench, (dtype_of(settings),))
    for _ in range(LOOKS):
        calibration.look()
    file = calibration.file()
    wrong = next(contradictions(file.spec), None)
    add_row(settings, {"machine_file": to_json(file), "contradiction": wrong})
    give_back(settings["device"])
    bench = Bench(device, effort)
    profiles = profiles_of(settings["config"], "ceilings", measuring=measuring)
    layer = profiles.of(Variant(dtype_name(settings["dtype"]))).spec.layers[0]
    for row in products(bench, settings, layer):
        add_row(settings, {"product": row})
    for row in attentions(bench, settings, layer):
        add_row(settings, {"attention": row})
        give_back(settings["device"])


def products(
    bench: Bench, settings: Mapping[str, Any], layer: LayerSpec
) -> Iterator[dict[str, Any]]:
    """y = x W, dx = dy W' and dW = dy' x of each of a layer's products and of the head."""
    dtype = dtype_of(settings)
    config = settings["config"]
    head = (config["hidden_size"], config["vocab_size"])
    shapes = [
        (t, *p) for t in TINY_TOKENS * settings["tiny"] or TOKENS for p in set(layer.work.products)
    ]
    for tokens, inner, outer in [*shapes, (HEAD_TOKENS, *head)]:
        x = bench.random(tokens, inner, dtype=dtype)
        dy = bench.random(tokens, outer, dtype=dtype)
        weight = bench.random(outer, inner, dtype=dtype)
        flop = 2.0 * tokens * inner * outer
        calls = {
            "forward": partial(functional.linear, x, weight),
            "input": partial(torch.matmul, dy, weight),
            "weight": partial(torch.matmul, dy.t(), x),
        }
        shape = f"{tokens} x {inner} x {outer}"
        found = {way: bench.seconds(f"{way} {shape}", call) for way, call in calls.items()}
        is_head = (inner, outer) == head
        copies = 1 if is_head else layer.work.products.count((inner, outer))
        yield {
            "tokens": tokens,
            "inner": inner,
            "outer": outer,
            "head": is_head,
            "a_layer": copies,
            "flop": flop,
            "seconds": found,
        }


def attentions(
    bench: Bench, settings: Mapping[str, Any], layer: LayerSpec
) -> Iterator[dict[str, Any]]:
    """A row for each block and backend; one that a backend cannot do has words in place of rates.
    FLOP of pairs that a causal mask hides are not counted."""
    for queries, keys, causal in TINY_BLOCKS if settings["tiny"] else BLOCKS:
        for backend in BACKENDS:
            row: dict[str, Any] = {
                "queries": queries,
                "keys": keys,
                "causal": causal,
                "backend": backend,
            }
            try:
                made = attention(bench, settings, layer, row)
                for way in ("forward", "backward"):
                    call = made.call(backward=way == "backward")
                    seconds = bench.seconds(f"{queries} {keys} {causal} {backend} {way}", call)
                    flop = made.flop(backward=way == "backward") * made.heads
                    row[way] = {"seconds": seconds, "flop_a_second": flop / seconds}
                    del call
                row["kernel"] = type(made.kernel).__name__
            except Exception as error:
                row["words"] = words_of(error)
            yield row
    torch.backends.cuda.enable_cudnn_sdp(True)


def attention(
    bench: Bench, settings: Mapping[str, Any], layer: LayerSpec, row: Mapping[str, Any]
) -> AttentionProblem:
    """One call with the model's heads, laid out as the engine's are."""
    dtype = dtype_of(settings)
    torch.backends.cuda.enable_cudnn_sdp(row["backend"] == "cudnn")
    capability = (0, 0) if bench.on_cpu else torch.cuda.get_device_capability(bench.device)
    kernel = select_kernel(
        bench.device.type, dtype, layer.head_dim, layer.value_dim, None, capability
    )
    queries, keys = row["queries"], row["keys"]
    q, dout = (
        bench.random(1, queries, layer.query_heads, layer.head_dim, dtype=dtype).transpose(1, 2)
        for _ in range(2)
    )
    k, v = (
        bench.random(keys, 1, layer.kv_heads, layer.head_dim, dtype=dtype).permute(1, 2, 0, 3)
        for _ in range(2)
    )
    start = 0 if row["causal"] else keys
    block = Block(0, None, start, start + queries, 0, keys, row["causal"])
    return AttentionProblem(kernel, block, q, k, v, dout)
