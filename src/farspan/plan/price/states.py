"""Weights, gradients and optimizer states: their bytes on one device, and the update's seconds."""

from dataclasses import dataclass

from farspan.plan.price.collectives import fsdp_ranks
from farspan.plan.question import Optimizer, Question
from farspan.spec import ModelSpec

MOMENTS = 2  # of AdamW, an element


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
    on_device, on_host = _optimizer_bytes(model, optimizer)
    part = question.layout.tensor
    return States(
        weights=_share(model.parameters * model.element_bytes, ranks),
        gathered=_share((group + outer) * model.element_bytes, part) if is_cut else 0,
        gradients=_share(model.trainable * final, ranks),
        accumulators=_share((trained + outer_trained) * wide, part) if needs_sum else 0,
        optimizer=_share(on_device, ranks),
        optimizer_on_host=_share(on_host, ranks),
    )


def gradient_bytes(question: Question) -> int:
    """Width of an element of `.grad`. AdamW on the device has it as wide as its states, so that it
    is the sum over chunks itself."""
    model = question.model
    is_sum = question.optimizer is Optimizer.ADAMW
    return _sum_bytes(model) if is_sum else model.element_bytes


def update_seconds(question: Question) -> float:
    """One update: every byte of gradients and states is read, and written, once; with the states
    on host, gradients go there and weights come back."""
    model, machine = question.model, question.machine
    trained = model.trainable / (fsdp_ranks(question) * question.layout.tensor)
    if question.optimizer is Optimizer.NONE or not model.trainable:
        return 0.0
    on_device, on_host = (
        size / model.trainable for size in _optimizer_bytes(model, question.optimizer)
    )
    final = gradient_bytes(question)
    # The gradient is read for its norm and again for the update; states are read and written.
    moved = 2 * final + 2 * on_device + model.element_bytes
    seconds = trained * moved / machine.memory
    if on_host:
        ranks = min(machine.devices, question.layout.devices())
        shared = machine.host_memory / ranks
        seconds += trained * (final / min(machine.evict, shared) + 2 * on_host / shared)
        seconds += trained * model.element_bytes / min(machine.fetch, shared)
    return seconds


def _optimizer_bytes(model: ModelSpec, optimizer: Optimizer) -> tuple[int, int]:
    """On device and on host, of the whole model."""
    wide = _sum_bytes(model)
    master = wide if model.element_bytes < wide else 0
    match optimizer:
        case Optimizer.ADAMW:
            return model.trainable * (MOMENTS * wide + master), 0
        case Optimizer.ADAMW8BIT:
            return model.trainable * MOMENTS, 0
        case Optimizer.HOST:
            # Gradients arrive in a buffer of their own.
            return 0, model.trainable * (MOMENTS * wide + wide + model.element_bytes)
        case Optimizer.NONE:
            return 0, 0


def _sum_bytes(model: ModelSpec) -> int:
    return model.accumulate_bytes()


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)
