"""Weights, gradients and optimizer states: their bytes on one device, and the update's seconds."""

from dataclasses import dataclass

from farspan.plan.price.collectives import fsdp_ranks
from farspan.plan.question import Optimizer, Question
from farspan.spec import ModelSpec

MOMENTS = 2  # of AdamW, an element
BLOCK = 256  # elements that share a scale of four bytes, where a moment has one byte an element
# Between the device and states on the host, gradients and weights pass through slots of so many
# elements: the next piece arrives and the last one leaves while one is updated.
STAGED = 2**24
SLOTS = 2


@dataclass(frozen=True, slots=True)
class States:
    """Bytes by part. `gathered` is what FSDP brings together for the layers of the open group and
    for what lies outside the layers; `accumulators` are the fp32 sums of weight gradients there
    (nowhere, where `.grad` itself is wide enough to be the sum)."""

    weights: int
    gathered: int
    gradients: int
    accumulators: int
    optimizer: int
    optimizer_on_host: int


def states(question: Question, group_layers: tuple[tuple[int, int], ...]) -> States:
    """Of one device. `group_layers` are the layer ranges of the schedule's groups."""
    model, optimizer = question.model, question.optimizer
    ranks = fsdp_ranks(question) * question.layout.tensor
    wide = _sum_bytes(model)
    final = gradient_bytes(question)
    outer, outer_trained = model.outer(), model.outer_trainable()
    layers = [model.layers[slice(*group)] for group in group_layers]
    group = max(sum(layer.work.parameters for layer in of) for of in layers)
    trained = max(sum(layer.work.trainable for layer in of) for of in layers)
    is_cut = ranks > question.layout.tensor
    needs_sum = is_cut or final < wide
    on_device, on_host = _optimizer_bytes(model, optimizer, ranks)
    part = question.layout.tensor
    return States(
        weights=_share(model.parameters * model.element_bytes, ranks),
        gathered=_share((group + outer) * model.element_bytes, part) if is_cut else 0,
        gradients=_share(model.trainable * final, ranks),
        accumulators=_share((trained + outer_trained) * wide, part) if needs_sum else 0,
        optimizer=on_device,
        optimizer_on_host=on_host,
    )


def gradient_bytes(question: Question) -> int:
    """Width of an element of `.grad`. With AdamW, wherever its states are, it is as wide as they,
    so that it is the sum over chunks itself."""
    model = question.model
    is_sum = question.optimizer in (Optimizer.ADAMW, Optimizer.HOST)
    return _sum_bytes(model) if is_sum else model.element_bytes


def update_seconds(question: Question) -> float:
    """One update: every byte of gradients and states is read, and written, once. With the states
    on host, gradients go there and weights come back beside the update."""
    model, machine = question.model, question.machine
    ranks = fsdp_ranks(question) * question.layout.tensor
    if question.optimizer is Optimizer.NONE or not model.trainable:
        return 0.0
    trained = model.trainable / ranks
    final, element = gradient_bytes(question), model.element_bytes
    if question.optimizer is Optimizer.HOST:
        # On the device the gradient is read for its norm, and scaled.
        return trained * (3 * final / machine.memory + _away(question, final, element))
    on_device, _ = _optimizer_bytes(model, question.optimizer, 1)
    # The gradient is read for its norm and again for the update; states are read and written.
    moved = 2 * final + 2 * on_device / model.trainable + element
    return trained * moved / machine.memory


def _away(question: Question, final: int, element: int) -> float:
    """Seconds an element that is updated on the host."""
    machine, wide = question.machine, _sum_bytes(question.model)
    shared = machine.host_memory / question.near()
    # Without a master, the weight itself goes there and back.
    master, there = (wide, final) if element < wide else (0, final + element)
    touched = 2 * (MOMENTS * wide + master) + 2 * there + 2 * element
    lanes = (
        there / min(machine.evict, shared),
        touched / shared,
        element / min(machine.fetch, shared),
    )
    # Where both tiers are one memory, the processor that updates copies, too.
    return sum(lanes) if machine.unified else max(lanes)


def staged_elements(trainable: int) -> int:
    """Of one slot through which gradients and weights pass."""
    return min(STAGED, trainable)


def _optimizer_bytes(model: ModelSpec, optimizer: Optimizer, ranks: int) -> tuple[int, int]:
    """On one device and on host. Left out: four bytes a parameter tensor, which count its updates.

    With moments of one byte an element, weights are rounded stochastically and have no master;
    tensors of fewer than 4,096 elements or of broken blocks keep wide moments, and are few.
    """
    wide, trainable = _sum_bytes(model), model.trainable
    master = wide if model.element_bytes < wide else 0
    match optimizer:
        case Optimizer.ADAMW:
            return _share(trainable * (MOMENTS * wide + master), ranks), 0
        case Optimizer.ADAMW8BIT:
            return _share(trainable * MOMENTS + trainable * MOMENTS * 4 // BLOCK, ranks), 0
        case Optimizer.HOST:
            slots = SLOTS * staged_elements(_share(trainable, ranks)) * (wide + model.element_bytes)
            return 0, _share(trainable * (MOMENTS * wide + master), ranks) + slots
        case Optimizer.NONE:
            return 0, 0


def _sum_bytes(model: ModelSpec) -> int:
    return model.accumulate_bytes()


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)
