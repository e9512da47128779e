"""In a child: steps of farspan, one schedule and length a child."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.children import add_row
from benchmarks.gpu.device import Peaks, draw, make_model, synchronize
from farspan import Schedule, Sparse, Step

OneStep = Callable[[Tensor], float]  # input_ids [1, tokens] to the loss; gradients are in .grad


def run(settings: Mapping[str, Any]) -> None:
    """The arenas, a short step that builds attention's plans, then one step or two."""
    began = time.perf_counter()
    model = make_model(settings, settings["layers"])
    step = Step(model, schedule_of(settings["schedule"]))
    synchronize(settings["device"])
    add_row(settings, {"ready_seconds": time.perf_counter() - began})
    began = time.perf_counter()
    program = step.program(1, settings["tokens"])
    for tier, arena in step.arenas.items():
        arena.reserve(program.arena_bytes[tier])
    synchronize(settings["device"])
    sizes = {tier.value: size for tier, size in step.arena_bytes().items()}
    add_row(settings, {"reserve_seconds": time.perf_counter() - began, "arenas": sizes})
    time_steps(settings, model, lambda ids: float(step(ids, ids)))


def schedule_of(row: Mapping[str, Any]) -> Schedule:
    """The schedule of a row that was JSON."""
    sparse = row.get("sparse")
    return Schedule(**{**row, "sparse": None if sparse is None else Sparse(**sparse)})


def time_steps(settings: Mapping[str, Any], model: nn.Module, one_step: OneStep) -> None:
    """A row for the warm-up and one for each step, from fresh gradients each."""
    device, ids = settings["device"], draw(settings, settings["tokens"])
    if settings["warm"]:
        began = time.perf_counter()
        one_step(ids[:, : settings["warm"]])
        synchronize(device)
        add_row(settings, {"warm_seconds": time.perf_counter() - began})
    for number in range(1, settings["steps"] + 1):
        model.zero_grad(set_to_none=True)
        synchronize(device)
        with Peaks(device) as peaks:
            began = time.perf_counter()
            loss = one_step(ids)
            synchronize(device)
            seconds = time.perf_counter() - began
        add_row(settings, {"step": number, "seconds": seconds, "loss": loss, **peaks.to_json()})
