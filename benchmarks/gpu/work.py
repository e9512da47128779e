"""What is measured, in order of importance."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from farspan.profile.catalog import find_config
from farspan.spec import Sparse

AUTO = "auto"
SPARSE = "sparse"  # auto's choice with page-sparse attention, which approximates
STREAMED = "streamed"  # auto's choice with weights and gradients in main memory
KILO = 1024


class Place(StrEnum):
    """Of the baseline: where what a checkpointed layer keeps is."""

    DEVICE = "inputs on the device"  # checkpointing as it comes
    KEPT = "inputs and attention outputs on the device"
    HOST = "inputs and attention outputs on host"  # copies beside the computation
    OFFLOAD = "inputs on host"  # transformers' own `offload=True`, copies in line


@dataclass(frozen=True, slots=True)
class Work:
    """A model of random weights and the lengths it is trained on."""

    config: dict[str, Any]
    dtype: str
    lengths: tuple[int, ...]  # tokens, ascending; the last one is the headline
    longer: tuple[int, ...]  # with as many layers as the time allows
    strategies: tuple[str, ...]  # beside auto
    depths: tuple[int, ...]  # layers that a model may be cut to, deepest first
    exact: tuple[int, ...]  # lengths of the small model whose gradients are checked
    split: int  # tokens of the step that is taken apart
    first: int  # tokens that the search for the baseline's longest context begins with
    sparse: Sparse
    tiny: bool = False

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def middle(self) -> int:
        """The length that tells most for its seconds: half of the headline's."""
        return self.lengths[-2]


def full() -> Work:
    """Qwen2.5-7B, as the published records have it."""
    config = find_config("Qwen2.5-7B") | {"max_position_embeddings": KILO * KILO}
    return Work(
        config=config,
        dtype="bfloat16",
        lengths=(32 * KILO, 64 * KILO, 128 * KILO, 256 * KILO),
        longer=(512 * KILO, 1024 * KILO),
        strategies=("grouped", "memo", "fpdt", "oomb"),
        depths=(28, 20, 14, 10, 7, 4, 2),
        exact=(4096, 5000, 8192),
        split=128 * KILO,
        first=64 * KILO,
        sparse=Sparse(page=128, budget=8192, recent=4096),
    )


def tiny() -> Work:
    """The same script in seconds on a CPU."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4 * KILO,
    }
    return Work(
        config=config,
        dtype="float32",
        lengths=(128, 256),
        longer=(512,),
        strategies=("oomb",),
        depths=(4, 2),
        exact=(70,),
        split=128,
        first=64,
        sparse=Sparse(page=8, budget=32, recent=16, sinks=8),
        tiny=True,
    )


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement, made by one child."""

    work: str  # ceilings, step, huggingface, longest, split, update or exact
    share: float  # of the time that is left, what it is planned to take at most
    tokens: int = 0
    strategy: str = ""
    place: Place = Place.DEVICE  # of the baseline
    compiled: bool = False  # of the baseline: norms and SwiGLU by torch.compile

    @property
    def name(self) -> str:
        if self.work == "step":
            return f"{self.strategy} at {self.tokens}"
        if self.work == "huggingface":
            return f"huggingface at {self.tokens}, {self.place}{', compiled' * self.compiled}"
        return f"{self.work} at {self.tokens}" if self.tokens else self.work


def items(work: Work) -> Iterator[Item]:
    """Everything, the most important first: what comes last is skipped where time is short."""
    small, middle, headline = work.lengths[:-2], work.middle, work.lengths[-1]
    short = small or (middle,)  # where all that a step keeps fits on the device
    yield Item("ceilings", 0.2)
    yield Item("step", 0.2, middle, AUTO)
    for tokens in reversed(short):
        yield Item("huggingface", 0.2, tokens)
        if small:
            yield Item("step", 0.2, tokens, AUTO)
    yield Item("step", 0.8, headline, AUTO)
    for tokens in reversed(short):
        yield Item("huggingface", 0.2, tokens, place=Place.KEPT)
    yield Item("huggingface", 0.5, middle, place=Place.HOST)
    yield Item("exact", 0.4)
    yield Item("update", 0.3, middle)
    yield Item("split", 0.4, work.split, AUTO)
    for tokens in reversed(short):
        if small:
            yield Item("huggingface", 0.3, tokens, place=Place.HOST)
        yield Item("huggingface", 0.3, tokens, compiled=True)
    for name in work.strategies:
        yield Item("step", 0.15, middle, name)
    for tokens in (*small[:1], middle):
        yield Item("step", 0.3, tokens, STREAMED)
    for tokens in (middle, headline, *small[-1:]):
        yield Item("step", 0.3, tokens, SPARSE)
    yield Item("longest", 0.4)
    for tokens in (middle, headline, *reversed(small)):
        yield Item("huggingface", 0.3, tokens, place=Place.OFFLOAD)
    for tokens in (headline, *reversed(small)):
        for name in work.strategies:
            yield Item("step", 0.15, tokens, name)
    for tokens in work.longer:
        yield Item("step", 0.4, tokens, AUTO)
    yield Item("huggingface", 0.3, headline, place=Place.HOST)
    for place in (Place.DEVICE, Place.KEPT) if small else ():
        yield Item("huggingface", 0.3, middle, place=place)
