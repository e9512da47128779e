"""Where the optimizer's states go when the run leaves it open."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from farspan.memory.host import available_host_bytes
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


def choose_place(fits: Callable[[StatesPlace], bool], before: str | None) -> Placed:
    """The device if a step fits beside them, else the host. States that were on the host stay
    there, so that a run goes on to the same bits. Never 8 bits: that is not AdamW."""
    if before == StatesPlace.HOST:
        return Placed(StatesPlace.HOST, "as before")
    if fits(StatesPlace.DEVICE):
        return Placed(StatesPlace.DEVICE, "they fit beside the step")
    if fits(StatesPlace.HOST):
        return Placed(StatesPlace.HOST, "by the plan they do not fit beside the step on the device")
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
