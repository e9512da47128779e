"""In a child: are gradients on this device as good as plain PyTorch's in the same dtype?

A small model in bf16, every strategy, several lengths, the second of two steps. The reference is
full-sequence autograd in fp64 with dense attention; plain PyTorch is the same in bf16. farspan adds
gradients up as in training.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from math import hypot
from typing import Any

from torch import Tensor, nn

from benchmarks.children import add_row, words_of
from benchmarks.gpu.device import draw, give_back, make_model
from benchmarks.gpu.steps import widened
from farspan import Step, strategy
from farspan.engine.reference import gradients_of, reference_loss
from farspan.program.strategies import STRATEGIES

LAYERS = 4
# Heads of 512 / 4 = 128, as the model's: what cuDNN and flash attention are fastest with.
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY = SHAPE | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
}
LIMIT = 2.0  # times plain PyTorch's error
BLOCK = 1024  # keys of a block, so that a short sequence has several
CHUNKS = 4


def run(settings: Mapping[str, Any]) -> None:
    """A row for each strategy and length."""
    shape = TINY if settings["tiny"] else SHAPE
    small = {**settings, "config": settings["config"] | shape, "dtype": "bfloat16"}
    small["config"].pop("layer_types", None)
    model = make_model(small)
    twin, trained = copy.deepcopy(model).double(), widened(copy.deepcopy(model))
    for tokens in settings["lengths"]:
        ids = draw(small, tokens)
        exact = gradients_of(twin, reference_loss(twin, ids, ids))
        plain = gradients_of(model, reference_loss(model, ids, ids))
        own = errors(plain, exact)
        for name in STRATEGIES:
            row: dict[str, Any] = {"strategy": name, "tokens": tokens}
            try:
                found = second_step(trained, name, ids)
                row |= compared(errors(found, exact), own)
            except Exception as error:
                row |= {"within": False, "words": words_of(error)}
            add_row(settings, row)
            give_back(settings["device"])


def second_step(model: nn.Module, name: str, ids: Tensor) -> dict[str, Tensor]:
    """Gradients of the second of two equal steps, memory filled with NaN before each."""
    tokens = ids.shape[1]
    made = strategy(name, LAYERS, tokens)
    chunk = min(made.chunk, -(-tokens // CHUNKS)) if made.chunk < tokens else made.chunk
    block = BLOCK if tokens >= CHUNKS * BLOCK else -(-tokens // CHUNKS)
    step = Step(model, replace(made, chunk=chunk, kv_block=block), poison=True)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(ids, ids)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each gradient, and of all together under ""."""
    distances, sizes = {}, {}
    for name, gradient in exact.items():
        wide = found[name].double()
        distances[name] = float((wide - gradient).norm())
        sizes[name] = float(gradient.norm())
    whole = hypot(*distances.values()) / hypot(*sizes.values())
    return {n: distances[n] / max(sizes[n], 1e-300) for n in exact} | {"": whole}


def compared(found: Mapping[str, float], own: Mapping[str, float]) -> dict[str, Any]:
    """Errors beside plain PyTorch's. A short vector may be lucky there, so a parameter is held to
    what is typical of the model at least. An error that is NaN is within nothing."""
    typical = sorted(own.values())[len(own) // 2]
    ratios = {n: found[n] / max(own[n], typical) for n in found if n}
    worst = max(ratios, key=lambda n: ratios[n] if ratios[n] == ratios[n] else float("inf"))
    return {
        "error": found[""],
        "plain_error": own[""],
        "ratio": found[""] / own[""],
        "worst_parameter": worst,
        "worst_ratio": ratios[worst],
        "within": bool(found[""] <= LIMIT * own[""] and ratios[worst] <= LIMIT),
    }
