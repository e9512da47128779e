"""In a child: AdamW's update, the states where `farspan train` has them, from a short step's
gradients. It belongs to no step's seconds."""

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.children import add_row
from benchmarks.gpu.device import draw, make_model, synchronize
from farspan import Schedule, Step
from farspan.train.config import OptimizerConfig, StatesPlace
from farspan.train.optimizer import TrainingOptimizer

UPDATES = 2
RATE = 1e-5
TOLD = ("states", "reason", "layers", "of_layers", "planned_seconds")


def run(settings: Mapping[str, Any]) -> None:
    """The seconds of two updates, the norm of the gradient and its limit included."""
    device, began = settings["device"], time.perf_counter()
    model = make_model(settings, settings["layers"])
    optimizer = TrainingOptimizer(model, OptimizerConfig(states=StatesPlace(settings["states"])))
    step = Step(model, Schedule())
    ids = draw(settings, settings["tokens"])
    synchronize(device)
    add_row(settings, {"ready_seconds": time.perf_counter() - began})
    seconds = []
    for _ in range(UPDATES):
        step(ids, ids)
        synchronize(device)
        began = time.perf_counter()
        optimizer.step(RATE, optimizer.gradient_norm())
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    held = optimizer.held()
    add_row(
        settings,
        {
            **{name: settings[name] for name in TOLD},
            "parameters": sum(p.numel() for p in optimizer.parameters.values()),
            "held": {"device": held.device, "host": held.host},
            "seconds": seconds,
        },
    )
