"""Low-rank adapters (LoRA) by the library peft, which is loaded when a run asks for them."""

from typing import Any

import torch

from farspan.lazy import load
from farspan.spec import Refused

ALL = "all-linear"  # every linear module but the head, in peft's words
MISSING = (
    "model.lora: needs the package peft, which cannot be imported here ({error}); "
    'pip install "farspan[lora]", or leave lora out'
)


def add_adapters(
    model: Any,
    *,
    rank: int,
    alpha: float,
    targets: tuple[str, ...] | None,
    seed: int,
    zeros: bool = True,
) -> None:
    """Freezes the weights of a PreTrainedModel and gives its linear modules adapters to train.

    A module's output gains `alpha / rank` · B(A(x)), A [rank, in] drawn from `seed` and B
    [out, rank] zeros (or drawn, for a test), in the model's dtype. `targets` are ends of modules'
    names, such as `q_proj`; None: all linear modules of the layers. Raises Refused.
    """
    try:
        config = load("peft", "LoraConfig")
    except ImportError as error:
        raise Refused(MISSING.format(error=error)) from error
    given = config(
        r=rank,
        lora_alpha=alpha,
        target_modules=ALL if targets is None else list(targets),
        task_type="CAUSAL_LM",
        init_lora_weights=zeros,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(given)
        except ValueError as error:
            names = sorted({n.rsplit(".", 1)[-1] for n in _linear(model)})
            raise Refused(
                f"model.lora.targets: {' '.join(str(error).split())}; there are {', '.join(names)}"
            ) from error


def has_adapters(model: Any) -> bool:
    """Whether only adapters of this model are trained and saved."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _linear(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
