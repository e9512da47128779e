"""What children ask of a device, a GPU or a CPU."""

import gc
import resource
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.children import Row

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


def reset_peaks(device: str) -> None:
    """Begins to look for the fullest moment."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peaks(device: str) -> Row:
    """Bytes at the fullest moment since `reset_peaks`.

    `allocated` is what PyTorch's allocator handed out, `reserved` what it took from the driver for
    it, `outside` what is on the device beside that (the context, libraries), `host` the most this
    process ever had resident. A CPU has the last one alone.
    """
    row: Row = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device != "cuda":
        return row | {"allocated": None, "reserved": None, "outside": None}
    free, total = torch.cuda.mem_get_info()
    return row | {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
    }
