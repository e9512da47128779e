"""What MEMO's baselines wait for beside the planner's prices: tensor parallelism that spans nodes,
and an allocator that reorganises its memory."""

from dataclasses import replace

from benchmarks.record.cells import KILO
from benchmarks.record.models import BF16
from farspan.spec import MachineSpec, ModelSpec

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
