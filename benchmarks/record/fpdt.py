"""FPDT's Tables 1, 3 and 4: longest context, HBM and MFU on nodes of four A100.

FPDT is the schedule `fpdt` on a Ulysses layout with ZeRO-3. What the code (DeepSpeed's
`fpdt_layer.py`) does differently is added term by term:

- h-wide tensors of all of a rank's tokens stay on the device. Reading the code one finds eight at
  one time: a block's input, the gradient of its output, O, the residual sum, the second norm's
  output, the MLP's chunks and the same put together, the block's output. How many there really are
  is read off Table 3's HBM (`whole_tensors`);
- beside x, one layer's q, K, V, O, normed input and fp32 dQ are on host;
- MFU is the throughput that the framework prints, which counts a checkpoint's second forward as
  work; Appendix B 7 only halves the attention of it.

Its baselines are tensor parallelism (without sequence parallelism: what is not split stays whole on
every rank) and Ulysses, with and without checkpoints, these on the device or on host.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.record import memo
from benchmarks.record.cells import GIB, KILO, published
from benchmarks.record.models import (
    BF16,
    ask,
    decoder,
    gather_seconds,
    head_seconds,
    layer_seconds,
    program_of,
)
from farspan.plan.price.machines import machine
from farspan.plan.question import Layout
from farspan.plan.simulate import simulate
from farspan.plan.strategies import strategy
from farspan.spec import MachineSpec, ModelSpec, Tier

NODE = 4
HOST_BYTES = 10**12  # a node's (section 5.1)
HDR = 200e9 / 8  # bytes a second of a node's port
# Bytes a token, in units of h, of the layer at work on host beside K and V: q, O, normed input in
# bf16 and dQ in fp32.
OPEN_LAYER = 3 * BF16 + 4
STATES = 16  # bytes a parameter: bf16 weight and gradient, fp32 master weight and two moments
LOGITS = 2 + 4  # bytes of one logit in the head's backward: bf16, and fp32 turned in place


@cache
def model_of(size: str) -> ModelSpec:
    """GPT 2.7B, 13B and 30B, Llama-3 8B and 70B. The paper names sizes only; shapes are those of
    the GPT-3 family (2.7B, 13B), of MEMO's 30B, and of Llama-3."""
    shapes: dict[str, tuple[int, tuple[int, int, int], int, int, bool]] = {
        "2.7B": (32, (32, 32, 80), 4 * 2560, 50257, False),
        "8B": (32, (32, 8, 128), 14336, 128256, True),
        "13B": (40, (40, 40, 128), 4 * 5120, 50257, False),
        "30B": (48, (56, 56, 128), 4 * 7168, 50257, False),
        "70B": (80, (64, 8, 128), 28672, 128256, True),
    }
    layers, heads, width, vocab, gated = shapes[size]
    hidden = heads[0] * heads[2]
    # Norms' outputs, the second's input, q; of the MLP its products' outputs and what the
    # activation, fused with the gate's product, makes of them.
    saved = BF16 * (3 * hidden + hidden + (3 if gated else 2) * width)
    return decoder(
        size, layers, heads, width, vocab, gated=gated, activation_bytes=saved, tied=not gated
    )


@cache
def node_machine(name: str) -> MachineSpec:
    """The paper's node. Attention's rates are those found on MEMO's A800, the same silicon."""
    rates = memo.calibrated()[0].rates
    network = 0.9 * HDR / NODE
    return replace(machine(name), devices=NODE, host_bytes=HOST_BYTES, network=network, rates=rates)


# -- bytes -----------------------------------------------------------------------------------------


def gathered_bytes(model: ModelSpec) -> float:
    """ZeRO-3: two layers' weights, the embedding or head, and the gradient of one of the three."""
    layer = model.layers[0].work.parameters
    return BF16 * (2.0 * layer + 2 * model.vocab * model.hidden)


@cache
def whole_tensors() -> float:
    """h-wide tensors of all of a rank's tokens: what Table 3's HBM leaves beside the states."""
    table = published("fpdt")["tables"]["table3"]
    row = next(row for row in table["rows"] if row["fpdt"])
    tokens, model = row["longest_k"] * KILO / table["gpus"], model_of("8B")
    states = STATES * model.parameters / table["gpus"] + gathered_bytes(model)
    left: float = row["hbm"] * GIB - states
    return left / (BF16 * model.hidden * tokens)


def fpdt_bytes(model: ModelSpec, tokens: int, gpus: int) -> float:
    """Device bytes of a rank: FPDT with ZeRO-3 and checkpoints on host."""
    whole = whole_tensors() * BF16 * model.hidden * tokens / gpus
    pieces = 2 * model.vocab / model.hidden
    head = LOGITS * model.vocab * tokens / gpus / pieces
    return STATES * model.parameters / gpus + gathered_bytes(model) + max(whole, head)


@cache
def host_row(size: str) -> float:
    """Host bytes a token: of the program of `memo.SAMPLE` tokens, simulated, and of the layer at
    work."""
    model, tokens = model_of(size), memo.SAMPLE
    schedule = strategy("fpdt", len(model.layers), tokens)
    program = program_of(ask(model, tokens, machine("a100-80g")), schedule)
    return simulate(program).peak[Tier.HOST] / tokens + OPEN_LAYER * model.hidden


def fpdt_node_bytes(size: str, tokens: int, gpus: int) -> float:
    """Host bytes of a node."""
    return host_row(size) * tokens * min(NODE, gpus) / gpus


def fits(size: str, tokens: int, gpus: int, name: str) -> bool:
    """Whether FPDT runs, on device and on host."""
    on = node_machine(name)
    device = fpdt_bytes(model_of(size), tokens, gpus) <= on.device_bytes - on.reserve
    return device and fpdt_node_bytes(size, tokens, gpus) <= HOST_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """A row of Table 3."""

    tensor: bool
    checkpoint: bool
    offload: bool
    ulysses: bool
    zero: int
    fpdt: bool

    @property
    def name(self) -> str:
        parts = ["FPDT"] if self.fpdt else ["tensor parallel" if self.tensor else "Ulysses"]
        parts += [f"ZeRO-{self.zero}"] * bool(self.zero)
        if self.offload:
            return ", ".join([*parts, "checkpoints on host"])
        return ", ".join([*parts, *["checkpoints"] * self.checkpoint])


def row_of(row: dict[str, Any]) -> Row:
    return Row(*(row[f] for f in ("tensor", "checkpoint", "offload", "ulysses", "zero", "fpdt")))


def row_bytes(row: Row, tokens: int, gpus: int) -> float:
    """Device bytes of a rank of Llama-3-8B at the fullest moment: in the head, before there are
    gradients, or in the first layer's backward, when all of them are there."""
    model = model_of("8B")
    if row.fpdt:
        return fpdt_bytes(model, tokens, gpus)
    layer, layers = model.layers[0], len(model.layers)
    x = BF16 * model.hidden
    inside = layer.activation_bytes + BF16 * (layer.kv_elements() + model.hidden)
    head = LOGITS * float(model.vocab) * tokens / gpus
    if row.tensor:
        # Norms' inputs and outputs are whole on every rank, the last one's too.
        saved, kept = tokens * (4.0 * x + (inside - 3 * x) / gpus), float(tokens * x)
        head += 2 * kept
    else:
        saved, kept = tokens * float(inside + x) / gpus, float(tokens * x) / gpus
    held = 0.0 if row.offload else layers * (kept if row.checkpoint else saved)
    last = saved if row.checkpoint else 0.0
    gradients = row_states(row, model, gpus, gradients=True)
    return max(row_states(row, model, gpus, gradients=False) + held + head, gradients + last)


def row_states(row: Row, model: ModelSpec, gpus: int, *, gradients: bool) -> float:
    """Weights, gradients if there are any, and optimizer states of a rank."""
    cut = {0: (1, 1, 1), 1: (1, 1, gpus), 2: (1, gpus, gpus), 3: (gpus,) * 3}[row.zero]
    sizes = (2.0, 2.0 * gradients, 12.0)
    parts = sum(size / share for size, share in zip(sizes, cut, strict=True))
    own = parts * model.parameters / (gpus if row.tensor else 1)
    return own + (gathered_bytes(model) if row.zero == 3 else 0.0)


# -- seconds ---------------------------------------------------------------------------------------


def counted_flop(model: ModelSpec, tokens: int, *, checkpoint: bool) -> float:
    """What the framework counts: the forward once, or twice with checkpoints, the backward as two.
    Attention over half the square."""
    linear = 2.0 * tokens * (model.parameters - model.vocab * model.hidden * (not _tied(model)))
    attention = 2.0 * len(model.layers) * model.hidden * float(tokens) ** 2
    return (4 if checkpoint else 3) * (linear + attention)


def _tied(model: ModelSpec) -> bool:
    layers = sum(layer.work.parameters for layer in model.layers)
    return model.parameters - layers == model.vocab * model.hidden


def mfu(size: str, tokens: int, gpus: int, row: Row) -> float:
    """In percent, by the paper's convention."""
    took = seconds(size, tokens, gpus, row)
    peak = node_machine("a100-80g").rates["bfloat16"].peak
    flop = counted_flop(model_of(size), tokens, checkpoint=row.checkpoint)
    return 100.0 * flop / (took * gpus * peak)


@cache
def seconds(size: str, tokens: int, gpus: int, row: Row) -> float:
    """One iteration of one sequence. Copies hide behind attention (section 4.2), what ZeRO-3
    gathers behind the layers."""
    model, on = model_of(size), node_machine("a100-80g")
    if row.tensor:
        layout = Layout(tensor=gpus, fsdp=False)
    else:
        layout = Layout(ulysses=gpus, fsdp=row.zero == 3)
    question = ask(model, tokens, on, layout)
    forward, _, backward = layer_seconds(question)
    once = len(model.layers) * (forward * (2 if row.checkpoint else 1) + backward)
    return max(once + head_seconds(question), gather_seconds(question)) + _reduce(
        row, model, on, gpus
    )


def _reduce(row: Row, model: ModelSpec, on: MachineSpec, gpus: int) -> float:
    """ZeRO-1 and 2: gradients are reduced and weights gathered once, over the nodes' ports."""
    if row.zero not in (1, 2) or gpus <= NODE:
        return 0.0
    return 2 * BF16 * model.parameters * (gpus - NODE) / gpus / (on.network * NODE)


def lengths() -> list[int]:
    """The grid of Table 1, in K tokens."""
    found = {128}
    for row in published("fpdt")["tables"]["table1"]["rows"].values():
        found |= {value_of(value) for value in row if value is not None}
    return sorted(found)


def value_of(value: int | str | None) -> int:
    """K tokens; 0 where the model does not fit; the tested length where it was not exceeded."""
    return 0 if value is None else int(str(value).rstrip("+"))
