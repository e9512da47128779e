"""MEMO's Tables 3, 4, 5 and 7: GPT models on A800 nodes, and its baselines.

MEMO is the schedule `memo` with one chunk: x, O and LSE of every token on host, a fraction alpha of
the other activations too. What its description (sections 3.2, 4.1, 4.2) and Megatron-LM add:

- two rounding buffers of one layer's 16 h-wide tensors, whatever alpha is;
- a rank holds 1 / (TP CP) of every tensor; sequence parallelism gathers the input of a product and
  the gradient of one over TP, so two h-wide tensors of N / CP tokens stand beside the layer;
- weights and their gradients in 2 and 4 bytes, ZeRO-1 states of 12 bytes over DP and CP;
- the head's logits in fp32, over TP and CP: no more than 4 bytes each let 1M run on 8 devices;
- recomputation stops before the MLP's second product, whose output nothing needs.

What its baselines add:

- Megatron-LM without a memory plan stops to reorganise its memory, and its tensor parallelism
  spans nodes;
- Megatron-DeepSpeed is taken to run FlashAttention-1: `FLASH_1`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.record.cells import KILO, Cell, Kind, on_grid, published, steps_between
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
from farspan.planner.space import solve_alpha
from farspan.program.layout import Layout
from farspan.spec import MachineSpec, ModelSpec, Schedule, Tier
from tests.oracles.simulate import simulate

BATCH = 16  # sequences an iteration, from wall time, throughput and length of every row
SKELETAL = 16  # h-wide tensors a layer saves (section 3.2, Figure 4)
OTHERS = SKELETAL - 2  # all but x and O, swapped by the fraction alpha
BACKWARD_MLP = 8  # h-wide: gradients of the GELU's output and of its input
GATHERED = 2  # h-wide tensors of N / CP tokens under sequence parallelism
RECOMPUTED = 8 / 12  # of a layer's products: q, k, v, the output's, the MLP's first
PEAK = 312e12
# The Ulysses flag of Megatron-DeepSpeed at the paper's commit 7eb36a11b3, --use-flash-attn, is
# another name of --use-flash-attn-v1 (arguments.py, 905; examples_deepspeed/sequence_parallel,
# README.md); FlashAttention-2 has "around 2x" its speed (Dao 2023, abstract).
FLASH_1 = 0.5
NODE = 8
SAMPLE = 1 << 16  # tokens; bytes grow in proportion


@dataclass(frozen=True, slots=True)
class Split:
    """How devices share a sequence, and how many sequences there are."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def sequence(self) -> int:
        return self.tensor * self.context

    @property
    def devices(self) -> int:
        return self.sequence * self.data * self.pipeline


@cache
def model_of(size: str) -> ModelSpec:
    """A model of Table 2. The head is the embedding: only so 49.45% follows from 3578.86 tokens."""
    shape = published("memo")["models"][size]
    heads, hidden = shape["heads"], shape["hidden"]
    return decoder(
        f"GPT {size}",
        shape["layers"],
        (heads, heads, hidden // heads),
        shape["width"],
        shape["vocab"],
        gated=False,
        activation_bytes=(OTHERS - 2) * BF16 * hidden,  # K and V are buffers of their own
        tied=True,
    )


# -- bytes -----------------------------------------------------------------------------------------


def wide(model: ModelSpec, tokens: int, share: int) -> float:
    """Bytes of an h-wide tensor of 1 / share of the tokens."""
    return BF16 * model.hidden * tokens / share


def state_bytes(model: ModelSpec, split: Split) -> float:
    """Weights, fp32 gradients, and ZeRO-1's share of master weights and moments."""
    own = model.parameters / (split.tensor * split.pipeline)
    return own * (2 + 4 + 12 / (split.data * split.context))


def memo_bytes(model: ModelSpec, tokens: int, split: Split) -> float:
    """MEMO's device bytes at the fullest moment, in the last layers or in the head."""
    one = wide(model, tokens, split.sequence)
    layer = BACKWARD_MLP * one + GATHERED * wide(model, tokens, split.context)
    head = 4.0 * model.vocab * tokens / split.sequence
    return state_bytes(model, split) + 2 * SKELETAL * one + max(layer, head)


def recompute_bytes(model: ModelSpec, tokens: int, split: Split) -> float:
    """Megatron-LM with every layer recomputed: inputs of all layers, one layer's activations. Its
    loss holds the logits in bf16, in fp32, and shifted by their maximum in fp32."""
    one = wide(model, tokens, split.sequence)
    inputs = len(model.layers) / split.pipeline * one
    layer = (SKELETAL + BACKWARD_MLP) * one + GATHERED * wide(model, tokens, split.context)
    head = (2 + 4 + 4) * model.vocab * tokens / split.sequence
    return state_bytes(model, split) + inputs + max(layer, head)


def ulysses_bytes(model: ModelSpec, tokens: int, split: Split) -> float:
    """DeepSpeed-Ulysses with ZeRO-3 and every layer recomputed; nothing is gathered by tokens, the
    weights of two layers are. The head is not sharded: logits in bf16, in fp32 and their gradient.
    """
    one = wide(model, tokens, split.sequence)
    states = 16.0 * model.parameters / split.devices
    gathered = 2 * BF16 * (model.layers[0].work.parameters + model.vocab * model.hidden)
    layer = (SKELETAL + BACKWARD_MLP) * one
    head = (2 + 4 + 4) * model.vocab * tokens / split.sequence
    return states + gathered + len(model.layers) * one + max(layer, head)


@cache
def swapped_model(size: str) -> ModelSpec:
    """The model whose K and V are swapped with the other activations rather than made again."""
    model = model_of(size)
    layer = replace(model.layers[0], activation_bytes=OTHERS * BF16 * model.hidden)
    return replace(model, layers=(layer,) * len(model.layers))


def schedule_of(tokens: int, alpha: float) -> Schedule:
    """The schedule `memo`, its fractions in eighths."""
    return Schedule(
        chunk=tokens // 8,
        groups=1,
        boundary_inputs=Tier.HOST,
        attention=Tier.HOST,
        attention_save_fraction=1.0,
        activations=Tier.HOST,
        activation_save_fraction=alpha,
        alltoall_splits=1,
    )


@cache
def host_row(size: str, alpha: float) -> float:
    """Host bytes a token: of the program of `SAMPLE` tokens, simulated."""
    question = ask(swapped_model(size), SAMPLE, machine("a800"))
    program = program_of(question, schedule_of(SAMPLE, alpha))
    return simulate(program).peak[Tier.HOST] / SAMPLE


def node_bytes(size: str, tokens: int, split: Split, alpha: float) -> int:
    """Host bytes of the fullest node, whose ranks have 1 / (TP CP) of a sequence each."""
    return int(host_row(size, alpha) * tokens / split.sequence * min(NODE, split.devices))


@cache
def host_bracket() -> dict[tuple[int, float], int]:
    """Table 5's most demanding cell that ran and its least demanding one that did not, by length
    and alpha, with the bytes of the node."""
    table = published("memo")["tables"]["table5"]
    ran, failed = {(0, 0.0): 0}, {(0, 1.0): 1 << 62}
    for length, row in table["rows"].items():
        for alpha, value in zip(table["alpha"], row, strict=True):
            side = failed if value == "oohm" else ran
            side[int(length), alpha] = node_bytes("7B", int(length) * KILO, ABLATION, alpha)
    most, least = max(ran, key=ran.__getitem__), min(failed, key=failed.__getitem__)
    if ran[most] >= failed[least]:
        raise ValueError("no limit of host memory separates the cells of MEMO's Table 5")
    return {most: ran[most], least: failed[least]}


def host_limit() -> float:
    """Bytes of a node that swapping may take."""
    return sum(host_bracket().values()) / 2


# -- waits ----------------------------------------------------------------------------------------

# Reorganisations of memory, a sequence and 32 layers, by length in K tokens (section 5.2). A line
# through them gives other lengths; none are named below the first, where Table 4's unplanned run
# is as fast as the planned one. Every layer's allocations cause as many.
STOPS, STOPPING_LAYERS = ((128, 6), (256, 16)), 32

# Section 5.2's communication of tensor parallelism in an iteration of the 65B model at 256K:
# seconds, and the layout, TP 16 in pipelines of four.
SPANNING_SECONDS, SPANNING_TENSOR, SPANNING_PIPELINE, SPANNING_TOKENS = 120.4, 16, 4, 256 * KILO
PASSES = 12  # gathers and scatters of a layer's tokens: four forward, again, and backward


def ringed(on: MachineSpec, tensor: int) -> MachineSpec:
    """The machine to a group of tensor parallelism that spans nodes. NCCL's rings bring every byte
    into a node once, over all of its ports, not once for each of its ranks: one node as large as
    the group, whose link is the slower of NVLink and of all of a real node's ports together."""
    if tensor <= on.devices:
        return on
    return replace(on, devices=tensor, peer=min(on.peer, on.network * on.devices))


def port_rate(model: ModelSpec, batch: int, devices: int) -> float:
    """Bytes a second of one of a node's ports, from the seconds of section 5.2."""
    gathered = BF16 * model.hidden * SPANNING_TOKENS * (SPANNING_TENSOR - 1) / SPANNING_TENSOR
    layers = len(model.layers) / SPANNING_PIPELINE
    return PASSES * gathered * layers * batch / SPANNING_SECONDS / devices


def stops(model: ModelSpec, tokens: int) -> float:
    """How often a sequence is stopped for a reorganisation of memory."""
    (first, few), (second, many) = STOPS
    length = tokens / KILO
    if length < first:
        return 0.0
    line = few + (many - few) * (length - first) / (second - first)
    return line * len(model.layers) / STOPPING_LAYERS


# -- seconds ---------------------------------------------------------------------------------------

ABLATION = Split(tensor=4, context=2)  # of Tables 4 and 5 (section 5.3)
# Attention's rate from the one cell where nothing is recomputed and nothing waits; the link's from
# the one where the wait is longest.
CALIBRATION = {"attention": (256, 1.0, 53.62), "link": (192, 1.0, 49.69)}


STOP_READ_OFF = ("7B", 128, 24.13)  # of Table 3


@dataclass(frozen=True, slots=True)
class Way:
    """What a system does between a forward and its backward."""

    alpha: float = 0.0
    swaps: bool = True  # x, O and alpha of the rest go to host; else all is recomputed from x
    ulysses: bool = False
    planned: bool = True  # memory is; else the allocator reorganises it now and then


def layout_of(split: Split, way: Way) -> Layout:
    if way.ulysses:
        return Layout(ulysses=split.context, data=split.data, fsdp=True)
    return Layout(
        tensor=split.tensor,
        ring=split.context,
        data=split.data,
        pipeline=split.pipeline,
        fsdp=False,
    )


def swap_seconds(model: ModelSpec, tokens: int, split: Split, alpha: float, link: float) -> float:
    """A layer's x, O and its share of the rest over the link of one rank."""
    return (2 + OTHERS * alpha) * wide(model, tokens, split.sequence) / link


def iteration(
    size: str, tokens: int, split: Split, way: Way, on: MachineSpec, link: float
) -> float:
    """Seconds of 16 sequences. With rounding buffers layer i + 2 waits for the copy of layer i, so
    in a long row of layers each takes the longer of its computation and its copy."""
    model = model_of(size)
    question = ask(model, tokens, ringed(on, split.tensor), layout_of(split, way))
    forward, given, backward = layer_seconds(question)
    again = (1.0 - way.alpha) * RECOMPUTED * given if way.swaps else forward
    copy = swap_seconds(model, tokens, split, way.alpha, link) if way.swaps else 0.0
    layer = max(forward, copy) + max(backward + again, copy)
    layers = len(model.layers) / split.pipeline
    head = head_seconds(question)
    steps = BATCH / split.data
    bubble = (steps + split.pipeline - 1) / steps
    gathers = gather_seconds(question) if way.ulysses else 0.0
    return (layers * layer + head + gathers) * steps * bubble


@cache
def stop_seconds() -> float:
    """What one takes, from the one cell that is read off."""
    size, length, value = STOP_READ_OFF
    model, tokens = model_of(size), length * KILO
    took = iteration(size, tokens, ABLATION, Way(swaps=False), *calibrated())
    lost = took * (_percent(size, tokens, ABLATION, took) / value - 1)
    return lost / (BATCH * stops(model, tokens))


def useful_flop(model: ModelSpec, tokens: int) -> float:
    """The paper's formula (section 5.1), a sample."""
    linear = 6.0 * tokens * model.parameters
    return linear + 6.0 * len(model.layers) * model.hidden * float(tokens) ** 2


def mfu(size: str, tokens: int, split: Split, way: Way) -> float:
    """In percent, by the paper's convention."""
    on, link = calibrated()
    if way.ulysses:
        rates = on.rates["bfloat16"]
        curves = rates.attention_forward, rates.attention_backward
        on = with_rates(on, *(FLASH_1 * curve.points[0][1] for curve in curves))
    took = iteration(size, tokens, split, way, on, link)
    if not way.planned:
        took += BATCH / split.data * stops(model_of(size), tokens) * stop_seconds()
    return _percent(size, tokens, split, took)


def _percent(size: str, tokens: int, split: Split, took: float) -> float:
    return 100.0 * BATCH * useful_flop(model_of(size), tokens) / (took * split.devices * PEAK)


@cache
def calibrated() -> tuple[MachineSpec, float]:
    """The A800 with attention's rate and its ports', and one rank's link while eight copy."""
    on = machine("a800")
    on = replace(on, network=port_rate(model_of("65B"), BATCH, on.devices))
    rates = on.rates["bfloat16"]
    forward, backward = (
        curve.points[0][1] for curve in (rates.attention_forward, rates.attention_backward)
    )

    def scaled(factor: float) -> MachineSpec:
        return with_rates(on, forward * factor, backward * factor)

    def reached(factor: float, link: float, kind: str) -> float:
        length, alpha, _ = CALIBRATION[kind]
        took = iteration("7B", length * KILO, ABLATION, Way(alpha), scaled(factor), link)
        return _percent("7B", length * KILO, ABLATION, took)

    factor = _solve(lambda f: reached(f, 1e15, "attention"), CALIBRATION["attention"][2], 0.3, 1.6)
    link = _solve(lambda b: reached(factor, b, "link"), CALIBRATION["link"][2], 1e9, 60e9)
    return scaled(factor), link


def _solve(rising: Any, target: float, low: float, high: float) -> float:
    """Where a rising function meets the target."""
    for _ in range(40):
        middle = (low + high) / 2
        if rising(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


# -- what fits ------------------------------------------------------------------------------------


def splits(size: str, devices: int, *, most: int = NODE, ulysses: bool = False) -> Iterator[Split]:
    """Every layout of powers of two that divide the heads, TP of at most `most` devices."""
    heads = model_of(size).layers[0].query_heads
    powers = [1 << k for k in range(devices.bit_length()) if devices % (1 << k) == 0]
    for tensor in [1] if ulysses else [p for p in powers if p <= most and heads % p == 0]:
        for context in powers:
            if devices % (tensor * context) or (ulysses and heads % context):
                continue
            yield Split(tensor, context, devices // (tensor * context))


def usable_bytes() -> float:
    """Device bytes of one A800 but for the reserve."""
    on = machine("a800")
    return on.device_bytes - on.reserve


@cache
def unplanned_share() -> float:
    """How much of a device Megatron-LM and DeepSpeed can use without a memory plan: what they use
    at the longest length that Table 4's first row ran."""
    table = published("memo")["tables"]["table4"]
    ran = [
        length
        for length, value in zip(table["context_k"], table["rows"]["recompute"], strict=True)
        if value != "oom"
    ]
    return recompute_bytes(model_of("7B"), max(ran) * KILO, ABLATION) / usable_bytes()


def longest(size: str, devices: int, system: str, grid: list[int]) -> int:
    """The longest of a grid of lengths in K tokens that runs in any layout, alpha 0 for MEMO."""
    model = model_of(size)
    need = {"memo": memo_bytes, "megatron": recompute_bytes, "deepspeed": ulysses_bytes}[system]
    room = usable_bytes() * (1.0 if system == "memo" else unplanned_share())
    layouts = list(
        splits(
            size,
            devices,
            most=NODE if system == "memo" else devices,
            ulysses=system == "deepspeed",
        )
    )

    def runs(length: int) -> bool:
        tokens = length * KILO
        on_host = (
            node_bytes(size, tokens, split, 0.0) <= host_limit() or system != "memo"
            for split in layouts
        )
        on_device = (need(model, tokens, split) <= room for split in layouts)
        return any(a and b for a, b in zip(on_host, on_device, strict=True))

    return on_grid(grid, [runs(length) for length in grid])


# -- cells -----------------------------------------------------------------------------------------

NAMES = {"deepspeed": "DeepSpeed-Ulysses", "megatron": "Megatron-LM", "memo": "MEMO"}
APPENDIX = {
    "deepspeed": "appendix_table5",
    "megatron": "appendix_table6",
    "memo": "appendix_table7",
}
DEVICES = {"7B": 8, "13B": 16, "30B": 32, "65B": 64}


def cells() -> list[Cell]:
    """Everything that is predicted."""
    return [*_table3(), *_table4(), *_table5(), *_table7(), *_figure11()]


def layouts(system: str, size: str) -> dict[int, tuple[Split, float]]:
    """The published layout of each length, and MEMO's alpha."""
    table = published("memo")["tables"][APPENDIX[system]]
    row = table["rows"][size]
    found = {}
    for place, length in enumerate(table["context_k"]):
        values = {k: v[place] if place < len(v) else None for k, v in row.items()}
        if values["dp"] is None:
            continue
        split = Split(
            values.get("tp") or 1,
            values.get("cp") or values.get("sp") or 1,
            values["dp"],
            values.get("pp") or 1,
        )
        found[length] = split, float(values.get("alpha") or 0.0)
    return found


def _way(system: str, alpha: float) -> Way:
    if system == "memo":
        return Way(alpha)
    if system == "deepspeed":
        return Way(swaps=False, ulysses=True)
    return Way(swaps=False, planned=False)


def table3(system: str, size: str) -> dict[int, dict[str, Any]]:
    """Cells of one column of Table 3 by length."""
    found = published("memo")["tables"]["table3"]["cells"]
    return {c["context_k"]: c for c in found if (c["system"], c["model"]) == (system, size)}


def _table3() -> Iterator[Cell]:
    for system in NAMES:
        for size, devices in DEVICES.items():
            row = f"{NAMES[system]} {size}"
            printed = table3(system, size)
            for length, (split, alpha) in layouts(system, size).items():
                if "mfu" not in printed[length]:
                    continue
                value, column = printed[length]["mfu"], f"{length}K"
                ours = mfu(size, length * KILO, split, _way(system, alpha))
                used = system == "megatron" and (size, length, value) == STOP_READ_OFF
                yield Cell("MEMO 3", row, column, Kind.MFU, "%", value, ours, used=used)
            grid = sorted(length for length in printed if length >= 128)
            ran = max(length for length in printed if "mfu" in printed[length])
            ours = longest(size, devices, system, grid)
            yield _longest("MEMO 3", row, f"{devices} GPUs", grid, (ran, ours))


def _longest(table: str, row: str, column: str, grid: list[int], found: tuple[int, int]) -> Cell:
    theirs, ours = found
    steps = steps_between(grid, theirs, ours)
    return Cell(table, row, column, Kind.LONGEST, "K tokens", theirs, ours, steps)


def _table4() -> Iterator[Cell]:
    table = published("memo")["tables"]["table4"]
    grid = table["context_k"]
    alphas = {length: alpha for length, (_, alpha) in layouts("memo", "7B").items()}
    ways = {
        "recompute_planned": lambda _: Way(swaps=False),
        "swap_planned": lambda _: Way(1.0),
        "memo": lambda length: Way(alphas[length]),
    }
    names = {"recompute_planned": "recompute, planned", "swap_planned": "swap, planned"}
    for key, way in ways.items():
        row = names.get(key, "MEMO")
        for length, value in zip(grid, table["rows"][key], strict=True):
            yield from _ablation("MEMO 4", row, f"{length}K", length, (way(length), value))
    row = "recompute, unplanned"
    for length, value in zip(grid, table["rows"]["recompute"], strict=True):
        if value != "oom":
            way_here = Way(swaps=False, planned=False)
            ours = mfu("7B", length * KILO, ABLATION, way_here)
            yield Cell("MEMO 4", row, f"{length}K", Kind.MFU, "%", value, ours)


def _ablation(
    table: str, row: str, column: str, length: int, found: tuple[Way, float | str]
) -> Iterator[Cell]:
    """Whether one cell of the ablations runs, and its MFU if it did."""
    way, value = found
    ran = not isinstance(value, str)
    ours = _runs("7B", length * KILO, ABLATION, way)
    used = table == "MEMO 5" and (length, way.alpha) in host_bracket()
    yield Cell(table, row, column, Kind.FEASIBLE, "runs", float(ran), float(ours), used=used)
    if not isinstance(value, str):
        used = (length, way.alpha, value) in CALIBRATION.values() and table == "MEMO 5"
        ours_mfu = mfu("7B", length * KILO, ABLATION, way)
        yield Cell(table, row, column, Kind.MFU, "%", value, ours_mfu, used=used)


def _runs(size: str, tokens: int, split: Split, way: Way) -> bool:
    model = model_of(size)
    if not way.swaps:
        return recompute_bytes(model, tokens, split) <= usable_bytes()
    on_host = node_bytes(size, tokens, split, way.alpha) <= host_limit()
    return on_host and memo_bytes(model, tokens, split) <= usable_bytes()


def _table5() -> Iterator[Cell]:
    table = published("memo")["tables"]["table5"]
    for length, values in table["rows"].items():
        for alpha, value in zip(table["alpha"], values, strict=True):
            found = Way(alpha), value
            yield from _ablation("MEMO 5", f"{length}K", f"{alpha:g}", int(length), found)
        ran = [0.0 if isinstance(value, str) else value for value in values]
        theirs, grid = table["alpha"][ran.index(max(ran))], table["alpha"]
        ours = floored(allowed_alpha("7B", int(length), ABLATION), grid)
        steps = grid.index(ours) - grid.index(theirs)
        row, column = "best alpha", f"{length}K"
        yield Cell("MEMO 5", row, column, Kind.BEST, "fraction", theirs, ours, steps)


def _table7() -> Iterator[Cell]:
    """Whether what the appendix says was run can run, and what ran out of host memory cannot."""
    for size in DEVICES:
        found = layouts("memo", size)
        for length, cell in table3("memo", size).items():
            if length in found:
                split, alpha = found[length]
                ours = _runs(size, length * KILO, split, Way(alpha))
                row, column = f"MEMO {size}", f"{length}K"
                yield Cell("MEMO 7", row, column, Kind.FEASIBLE, "runs", 1.0, float(ours))
            elif cell.get("failed") == "oohm":
                split, alpha = found[max(found)]
                ours = _runs(size, length * KILO, split, Way(0.0))
                row, column = f"MEMO {size}", f"{length}K"
                yield Cell("MEMO 7", row, column, Kind.FEASIBLE, "runs", 0.0, float(ours))


def _figure11() -> Iterator[Cell]:
    figure = published("memo")["tables"]["figure11"]
    grid = [1024 << k for k in range(5)]
    for devices, length in zip(figure["gpus"], figure["memo_k"], strict=True):
        ours = longest("7B", devices, "memo", grid)
        yield _longest("MEMO 11a", "MEMO 7B", f"{devices} GPUs", grid, (length, ours))


def allowed_alpha(size: str, length: int, split: Split) -> float:
    """The largest alpha that the planner's own program for it allows (`farspan.planner.space`),
    on a node with the link and the host memory that were read off."""
    tokens = length * KILO
    on, link = calibrated()
    on = replace(
        on,
        fetch_together=link,
        evict_together=link,
        host_memory=2 * link * on.devices,
        host_bytes=int(host_limit()),
    )
    question = ask(swapped_model(size), tokens, on, layout_of(split, Way()))
    return solve_alpha(question, schedule_of(tokens, 0.0)).value


def floored(value: float, grid: list[float]) -> float:
    """The largest of a grid up to a value."""
    return max(point for point in grid if point <= value)
