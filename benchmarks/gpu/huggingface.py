"""In a child: the best that a user of transformers has without farspan.

Gradient checkpointing of every layer. What it keeps is what Place says: layers' inputs, or these
and attention's outputs, which are then not computed again; or all that autograd does.
scaled_dot_product_attention by cuDNN where it can, else flash. Norms, SwiGLU, rope and loss by
Liger where it is installed; without it the loss is in pieces that are computed again in the
backward, so that no more than one piece's logits exist.
"""

import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.children import Row, add_row
from benchmarks.gpu.device import make_model, synchronize
from benchmarks.gpu.steps import WARM_LAYERS, time_steps
from benchmarks.gpu.work import Place

PIECE = 1024  # tokens whose logits exist at a time
IGNORED = -100
LIGER = "liger_kernel.transformers"
ATTENTION = "aten::_scaled_dot_product"


def run(settings: Mapping[str, Any]) -> None:
    """One step or two at one length."""
    began = time.perf_counter()
    baseline = Baseline(settings, settings["layers"])
    synchronize(settings["device"])
    add_row(settings, {"ready_seconds": time.perf_counter() - began, **baseline.words()})
    time_steps(settings, baseline.model, baseline.step, baseline.warm_up)


class Baseline:
    """A model with `layers` of its layers, and a step of it."""

    def __init__(self, settings: Mapping[str, Any], layers: int) -> None:
        self.on_cuda = settings["device"] == "cuda"
        if has_liger():
            fuse(settings["config"]["model_type"])
        self.model = make_model(settings, layers)
        self.model.set_attn_implementation("sdpa")
        place = Place(settings["place"])
        if place is Place.NONE:
            return
        # transformers is renaming this; both names take the same settings.
        enable: Any = getattr(self.model, "activation_checkpointing_enable", None)
        enable = enable or self.model.gradient_checkpointing_enable
        kept: dict[str, Any] = {}
        if place is Place.KEPT:
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, keep_attention)
        enable({"use_reentrant": False, **kept})

    def words(self) -> Row:
        """Who computes what."""
        by = "liger" if has_liger() else "transformers (liger-kernel is not installed)"
        pieces = f"pieces of {PIECE} tokens, computed again in the backward"
        return {"layers_by": by, "loss_by": "liger" if has_liger() else pieces}

    def step(self, ids: Tensor) -> float:
        """Loss and gradients of [1, tokens]."""
        with vendor_attention(self.on_cuda):
            out = self.model.base_model(input_ids=ids, use_cache=False)
            targets = functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
            weight: Any = self.model.get_output_embeddings().weight
            loss = loss_of(out.last_hidden_state, weight, targets)
            loss.backward()
        return float(loss.detach())

    def warm_up(self, ids: Tensor) -> Row:
        """A step of [1, tokens] on the first layer alone: it builds what libraries build for a
        shape, at a fraction of the seconds that all layers take."""
        base: Any = self.model.base_model
        whole = base.layers
        base.layers = whole[:WARM_LAYERS]
        try:
            self.step(ids)
        finally:
            base.layers = whole
        return {"warm_layers": WARM_LAYERS}


@contextmanager
def vendor_attention(on_cuda: bool) -> Iterator[None]:
    """cuDNN first. A CPU has one backend of its own."""
    if not on_cuda:
        yield
        return
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        yield


def has_liger() -> bool:
    """Its kernels need a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


def fuse(model_type: str) -> None:
    """Models of this type are made with Liger's norms, SwiGLU and rope from here on; the loss is
    called by itself."""
    apply = getattr(import_module(LIGER), f"apply_liger_kernel_to_{model_type}")
    apply(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=False)


def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of hidden [1, T, hidden] against targets [1, T]."""
    rows, flat = hidden.flatten(0, 1), targets.flatten()
    if has_liger():
        made = import_module(LIGER).LigerFusedLinearCrossEntropyLoss
        found: Tensor = made(ignore_index=IGNORED)(weight, rows, flat)
        return found
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(flat), PIECE):
        piece = slice(start, start + PIECE)
        total = total + checkpoint(
            piece_loss, rows[piece], weight, flat[piece], use_reentrant=False
        )
    return total / (flat != IGNORED).sum()


def piece_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of a piece's losses, its logits in fp32."""
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def keep_attention(_: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    """Which operators a checkpoint keeps the results of: attention's, and no others'."""
    del args, named
    kept, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return kept if is_attention(op) else again


def is_attention(op: Any) -> bool:
    """Whether an operator is a forward of scaled_dot_product_attention."""
    name: str = op.name()
    return name.startswith(ATTENTION) and "backward" not in name
