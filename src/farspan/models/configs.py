"""The seam with Hugging Face configurations that are read at every forward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PretrainedConfig


@contextmanager
def config_field(model: nn.Module, name: str, value: str) -> Iterator[None]:
    """Set a field of every configuration that the model's modules hold, inside the block."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PretrainedConfig)}
    before = {key: getattr(config, name, None) for key, config in configs.items()}
    for config in configs.values():
        setattr(config, name, value)
    try:
        yield
    finally:
        for key, config in configs.items():
            setattr(config, name, before[key])
