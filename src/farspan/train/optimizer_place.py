"""Where the optimizer's states go when the run leaves it open."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from farspan.memory.host import available_host_bytes
from farspan.plan.question import Fit
from farspan.spec import MachineSpec
from farspan.train.config import StatesPlace

STATES = "states"  # their place in about.json

WHERE = {
    StatesPlace.DEVICE: "on the device",
    StatesPlace.HOST: "in main memory, updated there",
    StatesPlace.EIGHT_BIT: "on the device, moments of 8 bits: other results than AdamW's",
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A place that is not `auto`, and why."""

    states: StatesPlace
    reason: str

    def describe(self) -> str:
        """For the opening lines."""
        return f"{WHERE[self.states]} ({self.reason})"


DEFAULT = Placed(StatesPlace.DEVICE, "both tiers lie in main memory")


def choose_place(fit: Callable[[StatesPlace], Fit], before: str | None) -> Placed:
    """The device if a step fits beside them and leaves the device's headroom, else the host if it
    fits better there. States that were on the host stay there, so that a run goes on to the same
    bits. Never 8 bits: that is not AdamW."""
    if before == StatesPlace.HOST:
        return Placed(StatesPlace.HOST, "as before")
    beside = fit(StatesPlace.DEVICE)
    if beside is Fit.ROOMY:
        return Placed(StatesPlace.DEVICE, "they fit beside the step")
    if fit(StatesPlace.HOST) > beside:
        tightly = " but tightly" if beside is Fit.TIGHT else ""
        why = f"by the plan they do not fit beside the step on the device{tightly}"
        return Placed(StatesPlace.HOST, why)
    if beside is Fit.TIGHT:
        return Placed(StatesPlace.DEVICE, "they fit beside the step, but tightly")
    return Placed(StatesPlace.DEVICE, "the plan finds room for the step nowhere")


def bare_machine(device: torch.device) -> MachineSpec:
    """A GPU and its main memory by their bytes alone, for whoever does not ask for time."""
    free, total = torch.cuda.mem_get_info(device)
    rate = float("inf")
    return MachineSpec(
        name=torch.cuda.get_device_name(device),
        devices=1,
        device_bytes=total,
        host_bytes=available_host_bytes(),
        rates={},
        memory=rate,
        fetch=rate,
        evict=rate,
        fetch_together=rate,
        evict_together=rate,
        host_memory=rate,
        peer=rate,
        network=rate,
        latency=0.0,
        overhead=0.0,
        reserve=total - free - torch.cuda.memory_reserved(device),
    )
