"""What children ask of a device, a GPU or a CPU."""

import gc
import resource
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.children import Row
from farspan.engine.memory import PeakMemory

SEED = 0


def synchronize(device: str) -> None:
    """Waits until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def give_back(device: str) -> None:
    """What no tensor needs goes back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def make_model(settings: Mapping[str, Any], layers: int | None = None) -> PreTrainedModel:
    """The model with `layers` of its layers, or all, random weights drawn on the device itself."""
    config = dict(settings["config"])
    if layers is not None:
        config["num_hidden_layers"] = layers
    found = AutoConfig.for_model(**config)
    torch.manual_seed(SEED)
    with torch.device(settings["device"]):
        made = AutoModelForCausalLM.from_config(found, dtype=dtype_of(settings))
    return made.to(settings["device"]).train()


def dtype_of(settings: Mapping[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, settings["dtype"])
    return found


def draw(settings: Mapping[str, Any], tokens: int) -> Tensor:
    """Random token ids [1, tokens] on the device."""
    generator = torch.Generator().manual_seed(SEED + 1)
    ids = torch.randint(0, settings["config"]["vocab_size"], (1, tokens), generator=generator)
    return ids.to(settings["device"])


class Peaks:
    """Bytes at the fullest moment of a block.

    `allocated` is what PyTorch's allocator handed out (on a CPU, what tensors that are new in the
    block took), `reserved` what it took from the driver for it, `outside` what is on the device
    beside that (the context, libraries), `host` the most this process ever had resident.
    """

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._meter = None if self._on_cuda else PeakMemory(torch.device("cpu"))

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._meter is not None:
            self._meter.__exit__(kind, error, trace)

    def to_json(self) -> Row:
        row: Row = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if self._meter is not None:
            return row | {"allocated": self._meter.peak, "reserved": None, "outside": None}
        free, total = torch.cuda.mem_get_info()
        return row | {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "outside": total - free - torch.cuda.memory_reserved(),
        }
