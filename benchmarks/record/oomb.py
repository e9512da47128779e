"""OOMB's Table 2: Qwen2.5-7B on one H200, dense attention.

The system is the schedule `oomb`: one group of all layers, chunks of 4K to 12K. Its bytes of K, V,
dK and dV come from the simulated program, its seconds from the prices of the program's cells. What
its code (github.com/wenhaoli-xmu/OOMB, commit ba07f27) does differently is added term by term:

- pages of a chunk go when its backward is done, so only tokens up to its end count;
- with offload two layers are resident, wherever they are in the model (`cpu_offload=2`);
- the head is not cut: log-probabilities, their gradient and the logits' are in bfloat16, whole;
- the first pass runs the head, and the last chunk, which the planner leaves out;
- no optimizer is built and gradients are not cleared between lengths: at the first length, 8K,
  there are none before the first backward.
"""

from dataclasses import dataclass
from functools import cache

from benchmarks.record.cells import KILO, Cell, Kind, published
from benchmarks.record.models import (
    BF16,
    ask,
    decoder,
    first_cells,
    one_layer,
    program_of,
    with_rates,
)
from farspan.planner.machines import machine
from farspan.planner.prices import Prices
from farspan.program.program import Head, Program
from farspan.spec import MachineSpec, Schedule, Tier
from tests.oracles.simulate import simulate

MIB = 1 << 20
TABLE = "OOMB 2"
RESIDENT = 2  # layers on the device with offload
LAYERS, HIDDEN, WIDTH, VOCAB = 28, 3584, 18944, 152064
KV = 2 * 4 * 128  # elements of K and V, a token and layer

# What autograd saves in a layer as their code writes it, bytes a token, O and LSE with it: both
# norms (input in fp32, normed and scaled in bf16), q, O and LSE, cos and sin, and the MLP's gate,
# its activation, up and their product.
NORM = 4 * HIDDEN + 2 * BF16 * HIDDEN
SAVED = 2 * NORM + 2 * BF16 * HIDDEN + 4 * LAYERS + 2 * BF16 * 128 + 4 * BF16 * WIDTH
MLP_GRADIENTS = 3 * BF16 * WIDTH  # of product, gate and up, while the MLP goes back
LOGITS = 3 * BF16 * VOCAB  # log-probabilities, their gradient, the logits' gradient

# Rates are solved from two cells, so that the first pass counts once in one and twice in the other.
CALIBRATION = (("4K, offload", 256), ("4K, checkpoint, offload", 256))


@dataclass(frozen=True, slots=True)
class System:
    """A row of the table."""

    chunk: int  # tokens; 0: the whole sequence at once, the baseline
    checkpoint: bool
    offload: bool

    @property
    def name(self) -> str:
        if not self.chunk:
            return "baseline, checkpoint"
        parts = [f"{self.chunk // KILO}K"]
        parts += ["checkpoint"] * self.checkpoint + ["offload"] * self.offload
        return ", ".join(parts)

    def chunks(self, tokens: int) -> list[tuple[int, int]]:
        size = self.chunk or tokens
        return [(start, min(tokens, start + size)) for start in range(0, tokens, size)]


MODEL = decoder(
    "Qwen2.5-7B",
    LAYERS,
    (28, 4, 128),
    WIDTH,
    VOCAB,
    gated=True,
    activation_bytes=SAVED - BF16 * HIDDEN - 4 * LAYERS,
)
WEIGHTS = BF16 * MODEL.parameters


@cache
def kv_bytes(tokens: int) -> int:
    """K, V, dK, dV of all layers: what the program of a chunk-major step holds."""
    schedule = Schedule(chunk=tokens, groups=LAYERS, kv=Tier.DEVICE, kv_block=tokens)
    return simulate(program_of(ask(MODEL, tokens, machine("h200")), schedule)).peak[Tier.DEVICE]


def peak_bytes(system: System, tokens: int, *, first: bool) -> int:
    """Device bytes at the fullest moment. `first`: no gradients are there before the step."""
    chunks = system.chunks(tokens)
    most = 0
    for start, stop in reversed(chunks):
        size = stop - start
        kv = kv_bytes(stop) if system.chunk else 0
        kv = kv * RESIDENT // LAYERS if system.offload else kv
        kept = size * LAYERS * (BF16 * HIDDEN if system.checkpoint else SAVED)
        fresh = first and stop == chunks[-1][1]
        at_head = WEIGHTS + (0 if fresh else WEIGHTS) + kept + size * (LOGITS + NORM) + kv
        missing = BF16 * (MODEL.layers[0].work.parameters + VOCAB * HIDDEN) if fresh else 0
        at_first_layer = 2 * WEIGHTS - missing + size * (SAVED + MLP_GRADIENTS) + kv
        most = max(most, at_head, at_first_layer)
    return most


def _attention_and_rest(system: System, tokens: int) -> tuple[float, float, float]:
    """FLOP of attention forward and backward, and the seconds of everything else."""
    never = 1e30  # FLOP a second: attention costs nothing
    rest = seconds(system, tokens, with_rates(machine("h200"), never, never))
    pairs = tokens * (tokens + 1) / 2
    once = LAYERS * 4.0 * HIDDEN * pairs
    return once * (3 if system.checkpoint else 2), once * 2.5, rest


def seconds(system: System, tokens: int, on: MachineSpec) -> float:
    """One iteration, cell by cell as their code runs them, on one lane: attention takes so long
    that the link's traffic hides behind it."""
    size = system.chunk or tokens
    question = ask(one_layer(MODEL), tokens, on)
    schedule = Schedule(chunk=size, kv_block=tokens, loss_chunk_size=size)
    program = program_of(question, schedule)
    prices = Prices(question, program)
    return sum(_chunk_seconds(system, program, prices, c) for c in range(len(program.chunks)))


def _chunk_seconds(system: System, program: Program, prices: Prices, chunk: int) -> float:
    forward, backward = first_cells(program, chunk)
    costs = prices.of(forward), prices.of(backward)
    once, back = (max(cost.compute, cost.host) for cost in costs)
    head = prices.of(Head(chunk, gradient=False)).compute
    graded = prices.of(Head(chunk, gradient=True)).compute
    passes = (2 if system.chunk else 1) + system.checkpoint
    return LAYERS * (passes * once + back) + head * bool(system.chunk) + graded


@cache
def calibrated() -> MachineSpec:
    """The H200 with the rates of their attention kernel."""
    (a, b, rest_one, one), (c, d, rest_two, two) = (
        (*_attention_and_rest(system_of(row), 256 * KILO), row["seconds"][5])
        for name, _ in CALIBRATION
        for row in rows()
        if system_of(row).name == name
    )
    left, right = one - rest_one, two - rest_two
    determinant = a * d - b * c
    return with_rates(
        machine("h200"),
        forward=determinant / (left * d - b * right),
        backward=determinant / (a * right - left * c),
    )


def rows() -> list[dict]:
    """Dense rows and the baseline."""
    table = published("oomb")["tables"]["table2"]
    return [row for row in table["rows"] if row["system"] != "sparse"]


def system_of(row: dict) -> System:
    return System((row["chunk_k"] or 0) * KILO, row["checkpoint"], row["offload"])


def cells() -> list[Cell]:
    """Every dense cell of Table 2, and the growth of its memory."""
    lengths = published("oomb")["tables"]["table2"]["context_k"]
    found = []
    for row in rows():
        system = system_of(row)
        for place, length in enumerate(lengths):
            found += _cells(system, row, place, length)
        if system.chunk:
            found.append(_growth(system, row, lengths))
    return found


def _cells(system: System, row: dict, place: int, length: int) -> list[Cell]:
    tokens, column = length * KILO, f"{length}K"
    need = peak_bytes(system, tokens, first=place == 0)
    capacity = calibrated().device_bytes - calibrated().reserve
    printed = row["megabytes"][place]
    runs = printed != "OOM"
    found = [
        Cell(
            TABLE, system.name, column, Kind.FEASIBLE, "runs", float(runs), float(need <= capacity)
        )
    ]
    if runs:
        found.append(Cell(TABLE, system.name, column, Kind.MEMORY, "MiB", printed, need / MIB))
        took = row["seconds"][place]
        used = (system.name, length) in CALIBRATION
        predicted = seconds(system, tokens, calibrated())
        found.append(
            Cell(TABLE, system.name, column, Kind.LATENCY, "s", took, predicted, used=used)
        )
    return found


def _growth(system: System, row: dict, lengths: list[int]) -> Cell:
    first, last = lengths.index(64), lengths.index(256)
    step = (lengths[last] - lengths[first]) * KILO
    printed = (row["megabytes"][last] - row["megabytes"][first]) * MIB / step
    low, high = (peak_bytes(system, lengths[place] * KILO, first=False) for place in (first, last))
    return Cell(
        TABLE, system.name, "64K to 256K", Kind.GROWTH, "B a token", printed, (high - low) / step
    )
