"""FPDT's Tables 1, 3 and 4: longest context, HBM and MFU on nodes of four A100.

FPDT is the schedule `fpdt` on a Ulysses layout with ZeRO-3. What the code does differently
(DeepSpeed's `fpdt_layer.py`; Megatron-DeepSpeed, of which file names below are) is added term by
term:

- h-wide tensors of all of a rank's tokens stay on the device. Reading the code one finds eight at
  one time: a block's input, the gradient of its output, O, the residual sum, the second norm's
  output, the MLP's chunks and the same put together, the block's output. How many there really are
  is read off Table 3's HBM (`whole_tensors`);
- beside x, one layer's q, K, V, O, normed input and fp32 dQ are on host;
- a checkpoint goes to host memory and back by plain copies that nothing overlaps, into pages that
  are not pinned (DeepSpeed's `checkpointing.py`, `copy_to_device` and `move_to_device`);
- MFU is the throughput that the framework prints, which counts a checkpoint's second forward as
  work; Appendix B 7 only halves the attention of it;
- the vocabulary is GPT-2's, as in the authors' script (`ds_pretrain_gpt_6.7B_fpdt_32k.sh`), for
  Llama's shapes too: see `LOGITS`.

Its baselines are tensor parallelism (without sequence parallelism: what is not split stays whole on
every rank) and Ulysses, with and without checkpoints, these on the device or on host. Ulysses
repeats K and V to all query heads before they are sent (`transformer.py`, `repeat_kv`).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.record import memo
from benchmarks.record.cells import GIB, KILO, Cell, Kind, on_grid, published, steps_between
from benchmarks.record.models import (
    BF16,
    ask,
    decoder,
    gather_seconds,
    head_seconds,
    layer_seconds,
    program_of,
    with_rates,
)
from farspan.planner.machines import machine
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import MachineSpec, ModelSpec, Tier
from tests.oracles.simulate import simulate

NODE = 4
HOST_BYTES = 10**12  # a node's (section 5.1)
HDR = 200e9 / 8  # bytes a second of a node's port
# Bytes a token, in units of h, of the layer at work on host beside K and V: q, O, normed input in
# bf16 and dQ in fp32.
OPEN_LAYER = 3 * BF16 + 4
STATES = 16  # bytes a parameter: bf16 weight and gradient, fp32 master weight and two moments
VOCABULARY = 50304  # GPT-2's 50257, padded to a multiple of 128
KERNEL_HEAD = 32  # FlashAttention-2 rounds a head's dimension up to a multiple of this
# Bytes of one logit at the fullest moment, in fp16 and fp32 copies. FPDT: in chunks, turned in
# place. Tensor parallelism: fp16, fp32, and less its maximum (tensor_parallel/cross_entropy.py).
# Ulysses: fp16, fp32, softmax and its logarithm (sequence_parallel/cross_entropy.py): of Llama-3's
# vocabulary, 128256, 512K tokens on eight devices would have 118 GB of them on each.
CHUNKED, TENSOR_LOGITS, ULYSSES_LOGITS = 2 + 4, 2 + 4 + 4, 2 + 4 + 4 + 4
HEAD_WIDE = 2  # h-wide at the head: the last layer's output and its norm
# The one second that is read off: a checkpoint's way out and back, from Table 4.
COPIED = ("8B", 256, 4, 47.6)


@cache
def model_of(size: str) -> ModelSpec:
    """GPT 2.7B, 13B and 30B, Llama-3 8B and 70B. The paper names sizes only; GPT's shapes are those
    of the authors' script, the others Llama-3's but for the vocabulary."""
    shapes: dict[str, tuple[int, tuple[int, int, int], int, bool]] = {
        "2.7B": (32, (32, 32, 80), 4 * 2560, False),
        "8B": (32, (32, 8, 128), 14336, True),
        "13B": (40, (40, 40, 128), 4 * 5120, False),
        "30B": (64, (64, 64, 96), 4 * 6144, False),
        "70B": (80, (64, 8, 128), 28672, True),
    }
    layers, heads, width, gated = shapes[size]
    hidden = heads[0] * heads[2]
    # Norms' outputs, the second's input, q; of the MLP its products' outputs and what the
    # activation, fused with the gate's product, makes of them.
    saved = BF16 * (3 * hidden + hidden + (3 if gated else 2) * width)
    return decoder(
        size, layers, heads, width, VOCABULARY, gated=gated, activation_bytes=saved, tied=not gated
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
    head = CHUNKED * model.vocab * tokens / gpus / pieces
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


OWN = Row(tensor=False, checkpoint=True, offload=True, ulysses=False, zero=3, fpdt=True)
WHOLE_READ_OFF = Row(tensor=True, checkpoint=True, offload=False, ulysses=False, zero=0, fpdt=False)


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
    if row.tensor:
        # Norms' inputs and outputs are whole on every rank.
        saved, kept = tokens * (4.0 * x + (inside - 3 * x) / gpus), float(tokens * x)
        head = TENSOR_LOGITS * float(model.vocab) * tokens / gpus + tensor_whole() * kept
    else:
        saved, kept = tokens * float(inside + x) / gpus, float(tokens * x) / gpus
        head = ULYSSES_LOGITS * float(model.vocab) * tokens / gpus + HEAD_WIDE * kept
    held = 0.0 if row.offload else layers * (kept if row.checkpoint else saved)
    last = saved if row.checkpoint else 0.0
    gradients = row_states(row, model, gpus, gradients=True)
    return max(row_states(row, model, gpus, gradients=False) + held + head, gradients + last)


@cache
def tensor_whole() -> float:
    """h-wide tensors of all tokens that a rank of tensor parallelism has in the head: what Table
    3's row with checkpoints on the device leaves beside states, checkpoints and logits."""
    table, model = published("fpdt")["tables"]["table3"], model_of("8B")
    values = next(row for row in table["rows"] if row_of(row) == WHOLE_READ_OFF)
    tokens, gpus = values["longest_k"] * KILO, table["gpus"]
    states = row_states(row_of(values), model, gpus, gradients=False)
    logits = TENSOR_LOGITS * float(model.vocab) * tokens / gpus
    one = float(BF16 * model.hidden * tokens)
    left: float = values["hbm"] * GIB - states - logits
    return left / one - len(model.layers)


def row_states(row: Row, model: ModelSpec, gpus: int, *, gradients: bool) -> float:
    """Weights, gradients if there are any, and optimizer states of a rank."""
    cut = {0: (1, 1, 1), 1: (1, 1, gpus), 2: (1, gpus, gpus), 3: (gpus,) * 3}[row.zero]
    sizes = (2.0, 2.0 * gradients, 12.0)
    parts = sum(size / share for size, share in zip(sizes, cut, strict=True))
    own = parts * model.parameters / (gpus if row.tensor else 1)
    return own + (gathered_bytes(model) if row.zero == 3 else 0.0)


# -- seconds ---------------------------------------------------------------------------------------


def counted_flop(model: ModelSpec, tokens: int, *, checkpoint: bool) -> float:
    """What the framework counts (`utils.py`, `throughput_calculator`): the forward once, or twice
    with checkpoints, the backward as two; no products of K and V where heads share them, since it
    divides whole numbers. Attention over half the square (Appendix B 7)."""
    layer, hidden = model.layers[0], model.hidden
    shared = layer.query_heads // layer.kv_heads
    linear = layer.work.parameters - 2 * hidden * layer.kv_heads * layer.head_dim
    linear += 2 // shared * hidden**2
    products = 2.0 * tokens * (len(model.layers) * linear + model.vocab * hidden)
    attention = 2.0 * len(model.layers) * hidden * float(tokens) ** 2
    return (4 if checkpoint else 3) * (products + attention)


def mfu(size: str, tokens: int, gpus: int, row: Row) -> float:
    """In percent, by the paper's convention."""
    took = seconds(size, tokens, gpus, row)
    if row.offload:
        took += copied_bytes(size, tokens, gpus) * copy_pace()
    return 100.0 * _counted_seconds(size, tokens, gpus, checkpoint=row.checkpoint) / took


def _counted_seconds(size: str, tokens: int, gpus: int, *, checkpoint: bool) -> float:
    peak = node_machine("a100-80g").rates["bfloat16"].peak
    return counted_flop(model_of(size), tokens, checkpoint=checkpoint) / (gpus * peak)


def copied_bytes(size: str, tokens: int, gpus: int) -> float:
    """Checkpoints of a rank. Tensor parallelism's are taken to be cut over the ranks before they go
    (`partition_activations`): whole, 137 GB at 512K, they would take 172 s of 389 more."""
    model = model_of(size)
    return len(model.layers) * BF16 * model.hidden * tokens / gpus


@cache
def copy_pace() -> float:
    """Seconds that each byte of a checkpoint takes to host and back."""
    size, length, gpus, value = COPIED
    tokens = length * KILO
    took = 100.0 * _counted_seconds(size, tokens, gpus, checkpoint=True) / value
    return (took - seconds(size, tokens, gpus, OWN)) / copied_bytes(size, tokens, gpus)


@cache
def seconds(size: str, tokens: int, gpus: int, row: Row) -> float:
    """One iteration of one sequence but for checkpoints on their way. Other copies hide behind
    attention (section 4.2), what ZeRO-3 gathers behind the layers."""
    model, on = model_of(size), _padded(node_machine("a100-80g"), model_of(size))
    if row.tensor:
        layout = Layout(tensor=gpus, fsdp=False)
    else:
        layout = Layout(ulysses=gpus, fsdp=row.zero == 3)
        model = model if row.fpdt else _repeated(model)
    question = ask(model, tokens, on, layout)
    forward, _, backward = layer_seconds(question)
    once = len(model.layers) * (forward * (2 if row.checkpoint else 1) + backward)
    return max(once + head_seconds(question), gather_seconds(question)) + _reduce(
        row, model, on, gpus
    )


def _padded(on: MachineSpec, model: ModelSpec) -> MachineSpec:
    """The machine whose attention computes heads of the kernel's dimension: 96 for 80."""
    head = model.layers[0].head_dim
    share = head / (-(-head // KERNEL_HEAD) * KERNEL_HEAD)
    rates = on.rates["bfloat16"]
    curves = rates.attention_forward, rates.attention_backward
    return with_rates(on, *(share * curve.points[0][1] for curve in curves))


def _repeated(model: ModelSpec) -> ModelSpec:
    """The model that sends K and V of every query head."""
    layer = replace(model.layers[0], kv_heads=model.layers[0].query_heads)
    return replace(model, layers=(layer,) * len(model.layers))


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


# -- cells -----------------------------------------------------------------------------------------


def cells() -> list[Cell]:
    """Table 1's longest contexts, Table 3's HBM and MFU, Table 4's MFU with full attention."""
    return [*_table1(), *_table3(), *_table4()]


def _table1() -> list[Cell]:
    table, grid, found = published("fpdt")["tables"]["table1"], lengths(), []
    for size, row in table["rows"].items():
        for (name, gpus), value in zip(table["columns"], row, strict=True):
            theirs = value_of(value)
            ours = on_grid(grid, [fits(size, k * KILO, gpus, name) for k in grid])
            steps = steps_between(grid, theirs, ours)
            column = f"{gpus} x {name.removeprefix('a100-').upper()}"
            found.append(
                Cell("FPDT 1", size, column, Kind.LONGEST, "K tokens", theirs, ours, steps)
            )
    return found


def _table3() -> list[Cell]:
    table, found = published("fpdt")["tables"]["table3"], []
    for values in table["rows"]:
        row, length = row_of(values), values["longest_k"]
        tokens, gpus, column = length * KILO, table["gpus"], f"{length}K"
        need = row_bytes(row, tokens, gpus) / GIB
        used = row in (WHOLE_READ_OFF, OWN)
        found.append(
            Cell("FPDT 3", row.name, column, Kind.MEMORY, "GiB", values["hbm"], need, used=used)
        )
        ours = mfu("8B", tokens, gpus, row)
        found.append(Cell("FPDT 3", row.name, column, Kind.MFU, "%", values["mfu"], ours))
        grid = [16 << k for k in range(12)]
        longest = on_grid(grid, [_fits(row, k * KILO, gpus) for k in grid])
        steps = steps_between(grid, length, longest)
        found.append(
            Cell("FPDT 3", row.name, "longest", Kind.LONGEST, "K tokens", length, longest, steps)
        )
    return found


def _fits(row: Row, tokens: int, gpus: int) -> bool:
    if row.fpdt:
        return fits("8B", tokens, gpus, "a100-80g")
    on = node_machine("a100-80g")
    return row_bytes(row, tokens, gpus) <= on.device_bytes - on.reserve


def _table4() -> list[Cell]:
    table = published("fpdt")["tables"]["table4"]
    return [
        Cell(
            "FPDT 4",
            size,
            "256K",
            Kind.MFU,
            "%",
            values["mfu"],
            mfu(size, 256 * KILO, values["gpus"], OWN),
            used=(size, 256, values["gpus"], values["mfu"]) == COPIED,
        )
        for size, values in table["rows"].items()
    ]
