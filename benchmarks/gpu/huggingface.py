"""In a child: the best that a Hugging Face user has without farspan.

Gradient checkpointing of every layer, its inputs on host where asked (`save_on_cpu`, pinned),
scaled_dot_product_attention by cuDNN where it can, else flash; the loss by Liger where it is
installed, else in pieces that are computed again in the backward, so that no more than one piece's
logits exist.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.children import Clock, Row, add_row
from benchmarks.gpu.device import Peaks, draw, dtype_of, give_back, make_model, synchronize
from benchmarks.gpu.steps import ADVICE, time_steps
from farspan.memory.host import TooLarge, available_host_bytes, refuse_beyond

PIECE = 1024  # tokens whose logits exist at a time
IGNORED = -100
GROWTH = 4.4  # of the seconds of a step on twice the tokens, at most
BISECTIONS = 3
WARM_LAYERS = 1
MORE = 2  # beside the inputs of layers: the last norm's rounded input, and one to spare


def run(settings: Mapping[str, Any]) -> None:
    """One step or two at one length."""
    began = time.perf_counter()
    baseline = Baseline(settings, settings["layers"], offload=settings["offload"])
    synchronize(settings["device"])
    add_row(settings, {"ready_seconds": time.perf_counter() - began, "loss_by": loss_words()})

    def warm_up(ids: Tensor) -> Row:
        return baseline.warm_up(ids) | (lock(settings) if settings["offload"] else {})

    time_steps(settings, baseline.model, baseline.step, warm_up)


def locked_bytes(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Pieces of pinned memory that a step of `tokens` on `layers` takes for inputs of layers, and
    the bytes of each: PyTorch rounds them up to a power of two."""
    itemsize: int = dtype_of(settings).itemsize
    size = settings["tokens"] * settings["config"]["hidden_size"] * itemsize
    return settings["layers"] + MORE, 1 << (size - 1).bit_length()


def lock(settings: Mapping[str, Any]) -> Row:
    """Has PyTorch lock what the inputs of all layers take, and keep it: a first step would do so
    while it is timed, at about 3 GB/s, and farspan's arenas are locked before. Raises TooLarge."""
    pieces, size = locked_bytes(settings)
    needed, on_cuda = pieces * size, settings["device"] == "cuda"
    refuse_beyond(needed, "the baseline's step", ADVICE, settings.get("host_memory"))
    synchronize(settings["device"])  # then what the warm-up locked is free, and taken first
    began = time.perf_counter()
    try:
        kept = [torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(pieces)]
    except RuntimeError as error:
        raise TooLarge(f"host memory: {needed:,} bytes could not be locked: {error}") from error
    del kept
    return {"locked_bytes": needed, "locked_seconds": time.perf_counter() - began}


class Baseline:
    """A model with `layers` of its layers, and a step of it."""

    def __init__(self, settings: Mapping[str, Any], layers: int, *, offload: bool) -> None:
        self.model = make_model(settings, layers)
        self.model.set_attn_implementation("sdpa")
        # transformers is renaming this; both names take the same settings.
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.offload = offload
        self.on_cuda = settings["device"] == "cuda"

    def step(self, ids: Tensor) -> float:
        """Loss and gradients of [1, tokens]."""
        with vendor_attention(self.on_cuda):
            with ExitStack() as stack:
                if self.offload:
                    stack.enter_context(save_on_cpu(pin_memory=self.on_cuda))
                out = self.model.base_model(input_ids=ids, use_cache=False)
            targets = functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
            weight: Any = self.model.get_output_embeddings().weight
            loss = loss_of(out.last_hidden_state, weight, targets)
            loss.backward()
        return float(loss.detach())

    def warm_up(self, ids: Tensor) -> Row:
        """A step of [1, tokens] on the first layer alone: it builds what libraries build for a
        shape, at a fraction of the seconds that all layers take."""
        with first_layers(self.model, WARM_LAYERS):
            self.step(ids)
        return {"warm_layers": WARM_LAYERS}


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """The model without its other layers."""
    whole = model.base_model.layers
    model.base_model.layers = whole[:count]
    try:
        yield
    finally:
        model.base_model.layers = whole


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


def loss_words() -> str:
    return "liger" if has_liger() else f"pieces of {PIECE} tokens, computed again in the backward"


def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of hidden [1, T, hidden] against targets [1, T]."""
    rows, flat = hidden.flatten(0, 1), targets.flatten()
    if has_liger():
        made = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
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


# -- the longest context -------------------------------------------------------------------------


def run_longest(settings: Mapping[str, Any]) -> None:
    """The longest context, found with one layer of the model and the memory that the others would
    take: their weights and gradients on the device as ballast, their inputs on host by arithmetic
    (as many bytes as they have: less than pinned memory takes, which is rounded up). A layer is
    computed again alone, so no layer's peak is higher than that of one."""
    clock = Clock.of(settings["seconds"])
    began = time.perf_counter()
    baseline = Baseline(settings, 1, offload=True)
    layers: Any = baseline.model.base_model.layers
    layer: int = sum(p.nbytes for p in layers.parameters())
    others = settings["of_layers"] - 1
    ballast = torch.empty(2 * others * layer, dtype=torch.uint8, device=settings["device"])
    synchronize(settings["device"])
    add_row(
        settings,
        {"ready_seconds": time.perf_counter() - began, "ballast": ballast.nbytes, "layers": 1},
    )
    host = settings.get("host_memory") or available_host_bytes()
    spent = 0.0

    def attempt(tokens: int) -> str:
        nonlocal spent
        if GROWTH * spent > clock.left:
            return TIME
        began = time.perf_counter()
        ended = _attempt(settings, baseline, tokens, host)
        spent = time.perf_counter() - began
        return ended

    found, failed, why = longest(attempt, settings["tokens"], BISECTIONS)
    add_row(settings, {"longest": found, "fails_at": failed, "why": why})


FITS, TIME = "fits", "out of time"


def longest(
    attempt: Callable[[int], str], start: int, bisections: int
) -> tuple[int, int | None, str]:
    """The longest that fits (0: not even `start`), the shortest known not to (None: the search
    ended before one was met), and what it ended with. Doubles, then halves the distance."""
    low, high, tokens, why = 0, None, start, FITS
    while high is None:
        why = attempt(tokens)
        if why == TIME:
            return low, None, why
        low, high = (tokens, None) if why == FITS else (low, tokens)
        tokens *= 2
    for _ in range(bisections if low else 0):
        middle = (low + high) // 2
        ended = attempt(middle)
        if ended == TIME:
            break
        low, high, why = (middle, high, why) if ended == FITS else (low, middle, ended)
    return low, high, why


def _attempt(settings: Mapping[str, Any], baseline: Baseline, tokens: int, host: int) -> str:
    """One step at a length. Leaves a row, and no tensors."""
    inputs = settings["of_layers"] * tokens * settings["config"]["hidden_size"]
    inputs *= dtype_of(settings).itemsize
    row: dict[str, Any] = {"tokens": tokens, "offloaded_at_full_depth": inputs}
    if inputs > host:
        ended = "host memory"
    else:
        ended = FITS if _one_step(settings, baseline, tokens, row) else "device memory"
    baseline.model.zero_grad(set_to_none=True)
    give_back(settings["device"])
    add_row(settings, row | {"ended": ended})
    return ended


def _one_step(
    settings: Mapping[str, Any], baseline: Baseline, tokens: int, row: dict[str, Any]
) -> bool:
    try:
        with Peaks(settings["device"]) as peaks:
            began = time.perf_counter()
            if tokens > settings.get("pretended_most", tokens):
                raise torch.OutOfMemoryError("a CPU that pretends to be full")
            baseline.step(draw(settings, tokens))
            synchronize(settings["device"])
            row["seconds"] = time.perf_counter() - began
        row.update(peaks.to_json())
    except RuntimeError as error:
        # Not only torch's own kind: the driver and the libraries have words for it too.
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        row["words"] = str(error)[:300]
        return False
    return True
