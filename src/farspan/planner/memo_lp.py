"""MEMO's linear program: which fraction alpha of the tokens keeps its activations (MEMO 4.1).

The paper maximises alpha under two constraints: a layer's swap hides behind the next layer's
forward, and what is swapped fits main memory. Left out there and added here:

- the backward: what comes back must hide behind a layer's backward and what is recomputed in it;
- both directions of the link have rates of their own, measured while both are in use;
- main memory belongs to all devices of a node, and optimizer states may lie in it;
- the rounding buffers take device memory, for every alpha above 0;
- the first layer's input is not swapped, and the last layer's backward follows at once.

With one unknown the program needs no solver: each constraint is an upper bound of alpha. Where
copies run in line with the computation nothing hides; then a token is worth swapping if its two
copies are shorter than its recomputation, whichever token it is."""

from dataclasses import dataclass, replace

import numpy as np

from farspan.planner.cell_prices import CellPrices
from farspan.planner.evaluate import own_schedule
from farspan.planner.request import Question
from farspan.planner.states import states
from farspan.program.builder import chunks_of
from farspan.spec import Schedule


@dataclass(frozen=True, slots=True)
class Alpha:
    """The largest fraction that every constraint allows."""

    limits: dict[str, float]  # by constraint, each between 0 and 1

    @property
    def value(self) -> float:
        return min(self.limits.values())

    @property
    def binding(self) -> str:
        """The constraint that holds alpha down; empty when nothing does."""
        name = min(self.limits, key=lambda key: self.limits[key])
        return name if self.limits[name] < 1.0 else ""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's bytes and seconds over the device's whole share of the sequence."""

    always: float  # bytes swapped whatever alpha is: x, O and LSE
    others: float  # bytes swapped with alpha = 1 on top
    forward: float
    again: float  # the forward without attention, which rebuilds what was not kept
    backward: float


def solve_alpha(question: Question, schedule: Schedule) -> Alpha:
    """Alpha for a layer-major schedule that keeps x, O and LSE on host."""
    cell_prices = CellPrices(question, schedule)
    layer = _widest(cell_prices)
    prices = cell_prices.prices
    fetch, evict = prices.fetch_rate(), prices.evict_rate()
    limits = {
        "host memory": _host(cell_prices, layer),
        "rounding buffers": _buffers(cell_prices, own_schedule(schedule, question.layout)),
    }
    if question.overlap:
        limits["forward"] = _part(layer.forward * evict - layer.always, layer.others)
        # (always + a others) / fetch <= backward + (1 - a) again
        room = (layer.backward + layer.again) * fetch - layer.always
        limits["backward"] = _part(room, layer.others + layer.again * fetch)
    else:
        copies = layer.others / fetch + layer.others / evict
        limits["copies in line"] = 1.0 if copies < layer.again else 0.0
    return Alpha(limits)


def with_alpha(question: Question, schedule: Schedule) -> Schedule:
    """The schedule with alpha solved, rounded down to whole chunks."""
    layout, alpha = question.layout, solve_alpha(question, schedule).value
    chunks = chunks_of(question.model, question.run.tokens, schedule, layout)
    tokens = chunks[-1][1]
    kept = (tokens - start for start, _ in chunks)
    whole = next((size for size in kept if size <= alpha * tokens), 0)
    return replace(schedule, activation_save_fraction=whole / tokens)


def _part(room: float, size: float) -> float:
    return 1.0 if size <= 0 else min(1.0, max(0.0, room / size))


def _widest(cell_prices: CellPrices) -> _Layer:
    """The layer that swaps most; in a model of equal layers any of them."""
    keys, count = cell_prices.share.keys.total, cell_prices.cells(np.array(len(cell_prices.chunks)))
    beside, found = cell_prices.question.overlap, []
    for spec in cell_prices.classes:
        cell = cell_prices.cell_bytes(spec, with_attention=False) * count
        found.append(
            _Layer(
                always=float(
                    cell_prices.x_row() * cell_prices.tokens
                    + cell_prices.attention_row(spec) * keys
                ),
                others=float(cell),
                forward=cell_prices.lanes.forward[spec].seconds(overlap=beside),
                again=cell_prices.lanes.given[spec].seconds(overlap=beside),
                backward=cell_prices.lanes.backward[spec].seconds(overlap=beside),
            )
        )
    return max(found, key=lambda layer: layer.others)


def _host(cell_prices: CellPrices, layer: _Layer) -> float:
    question = cell_prices.question
    held = states(question, tuple((i, i + 1) for i in range(len(cell_prices.model.layers))))
    machine = question.machine
    share = machine.host_bytes // min(machine.devices, question.layout.devices())
    swapped = len(cell_prices.model.layers) - 1
    room = share - held.on_host - swapped * layer.always
    if machine.unified:
        # What else a device would hold lies in the same memory.
        room -= held.on_device + held.gradients + held.accumulators
        kv = max(
            cell_prices.kv_row(spec) + cell_prices.dkv_row(spec) for spec in cell_prices.classes
        )
        room -= kv * cell_prices.share.keys.total + 2 * layer.others / len(cell_prices.chunks)
    return _part(room, swapped * layer.others)


def _buffers(cell_prices: CellPrices, schedule: Schedule) -> float:
    """1 if two cells' rounding buffers and what else a step holds fit the device, else 0."""
    question = cell_prices.question
    if question.machine.unified:
        return 1.0
    held = states(question, tuple((i, i + 1) for i in range(len(cell_prices.model.layers))))
    cell = max(cell_prices.cell_bytes(spec, with_attention=False) for spec in cell_prices.classes)
    kv = max(cell_prices.kv_row(spec) + cell_prices.dkv_row(spec) for spec in cell_prices.classes)
    taken = held.on_device + held.gradients + held.accumulators
    taken += question.machine.reserve + kv * cell_prices.share.keys.total
    taken += 4 * cell_prices.x_row() * schedule.chunk
    return 1.0 if taken + 2 * cell <= question.machine.device_bytes else 0.0
