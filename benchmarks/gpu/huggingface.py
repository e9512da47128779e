"""In a child: the best that a user of transformers has without farspan.

Gradient checkpointing of every layer. What it keeps is where Place says: layers' inputs on the
device, or on host by transformers itself; or these and attention's outputs, which are then not
computed again, on the device or on host beside the computation (kept.py).
scaled_dot_product_attention by cuDNN where it can, else flash. Norms, SwiGLU, rope and loss by
Liger where it is installed, or norms and SwiGLU by torch.compile; without Liger the loss is in
pieces that are computed again in the backward, so that no more than one piece's logits exist.
"""

import importlib.util
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.children import Clock, Row, add_row
from benchmarks.gpu.device import Peaks, draw, dtype_of, give_back, make_model, synchronize
from benchmarks.gpu.kept import Kept
from benchmarks.gpu.steps import ADVICE, WARM_LAYERS, time_steps
from benchmarks.gpu.work import Place
from farspan.host import TooLarge, available_host_bytes, refuse_beyond

PIECE = 1024  # tokens whose logits exist at a time
IGNORED = -100
GROWTH = 4.4  # of the seconds of a step on twice the tokens, at most
BISECTIONS = 3
MORE = 1  # beside what layers keep: the last norm's input
LIGER = "liger_kernel.transformers"


def run(settings: Mapping[str, Any]) -> None:
    """One step or two at one length."""
    began = time.perf_counter()
    baseline = Baseline(settings, settings["layers"])
    synchronize(settings["device"])
    add_row(settings, {"ready_seconds": time.perf_counter() - began, **baseline.words()})

    def warm_up(ids: Tensor) -> Row:
        return baseline.warm_up(ids) | (lock(settings) if baseline.on_host else {})

    time_steps(settings, baseline.model, baseline.step, warm_up)


def locked_bytes(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Pieces of pinned memory that a step of `tokens` on `layers` takes for what layers keep, and
    the bytes of each: PyTorch rounds them up to a power of two. Attention's output is taken to be
    as wide as a layer's input."""
    itemsize: int = dtype_of(settings).itemsize
    size = settings["tokens"] * settings["config"]["hidden_size"] * itemsize
    each = {Place.HOST: 2, Place.OFFLOAD: 1}.get(Place(settings["place"]), 0)
    pieces = each * settings["layers"] + MORE if each else 0
    return pieces, 1 << (size - 1).bit_length()


def lock(settings: Mapping[str, Any]) -> Row:
    """Has PyTorch lock what all layers keep, and keep it: a first step would do so while it is
    timed, at about 3 GB/s, and farspan's arenas are locked before. Raises TooLarge."""
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

    def __init__(self, settings: Mapping[str, Any], layers: int) -> None:
        self.place, self.on_cuda = Place(settings["place"]), settings["device"] == "cuda"
        self.on_host = self.place in (Place.HOST, Place.OFFLOAD)
        self.compiled = bool(settings.get("compiled"))
        if has_liger() and not self.compiled:
            fuse(settings["config"]["model_type"])
        self.model = make_model(settings, layers)
        self.model.set_attn_implementation("sdpa")
        self.kept: Kept | None = None
        if self.place in (Place.HOST, Place.KEPT):
            self.kept = Kept(settings["device"], on_host=self.on_host)
        self._own_offload = self._checkpoint()
        if self.compiled:
            for module in self._tokenwise():
                module.compile(backend="eager" if settings["tiny"] else "inductor")

    def _tokenwise(self) -> Iterator[nn.Module]:
        """Norms and MLPs: what lies inside a checkpoint, and is compiled once for all layers."""
        layers: Any = self.model.base_model.layers
        for layer in layers:
            yield from (found for name, found in layer.named_children() if "attn" not in name)

    def _checkpoint(self) -> bool:
        """Checkpoints every layer, unless nothing is to be computed again; whether their inputs are
        still to be taken to host."""
        if self.place is Place.NONE:
            return False
        # transformers is renaming this; both names take the same settings.
        enable: Any = getattr(self.model, "activation_checkpointing_enable", None)
        enable = enable or self.model.gradient_checkpointing_enable
        how: dict[str, Any] = {"use_reentrant": False}
        if self.kept is not None:
            how["context_fn"] = self.kept.contexts
        # Since 5.16. It locks memory wherever it runs, which needs a GPU.
        offers = self.on_cuda and "offload" in inspect.signature(enable).parameters
        offloads = self.place is Place.OFFLOAD
        enable(how, **({"offload": True} if offloads and offers else {}))
        return offloads and not offers

    def words(self) -> Row:
        """Who computes what."""
        by = "liger" if has_liger() else "transformers (liger-kernel is not installed)"
        return {
            "layers_by": "torch.compile" if self.compiled else by,
            "loss_by": loss_words(),
        }

    def step(self, ids: Tensor) -> float:
        """Loss and gradients of [1, tokens]."""
        with vendor_attention(self.on_cuda):
            with ExitStack() as stack:
                if self._own_offload:
                    stack.enter_context(save_on_cpu(pin_memory=self.on_cuda))
                if self.kept is not None:
                    stack.enter_context(self.kept.inputs())
                out = self.model.base_model(input_ids=ids, use_cache=False)
            targets = functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
            weight: Any = self.model.get_output_embeddings().weight
            loss = loss_of(out.last_hidden_state, weight, targets)
            loss.backward()
        if self.kept is not None:
            self.kept.clear()
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


def fuse(model_type: str) -> None:
    """Models of this type are made with Liger's norms, SwiGLU and rope from here on; the loss is
    called by itself."""
    apply = getattr(import_module(LIGER), f"apply_liger_kernel_to_{model_type}")
    apply(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=False)


def loss_words() -> str:
    return "liger" if has_liger() else f"pieces of {PIECE} tokens, computed again in the backward"


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


# -- the longest context -------------------------------------------------------------------------


def run_longest(settings: Mapping[str, Any]) -> None:
    """The longest context, found with one layer of the model and the memory that the others would
    take: their weights and gradients on the device as ballast, their inputs on host by arithmetic
    (as many bytes as they have: less than pinned memory takes, which is rounded up). A layer is
    computed again alone, so no layer's peak is higher than that of one."""
    clock = Clock.of(settings["seconds"])
    began = time.perf_counter()
    baseline = Baseline({**settings, "place": Place.OFFLOAD}, 1)
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
