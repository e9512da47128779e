"""What is measured, in order of importance."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from farspan.profile.catalog import find_config
from farspan.spec import Sparse

AUTO = "auto"
SPARSE = "sparse"  # auto's choice with page-sparse attention, which approximates
STREAMED = "streamed"  # auto's choice with weights and gradients in main memory
QLORA = "qlora"  # auto's choice with LoRA beside frozen NF4 weights
LOGPROBS = "logprobs"  # auto's choice with a backward from log-probabilities of all tokens
RANK = 16  # of LoRA, on every linear module of the layers
KILO = 1024
# Sizes that replace those of any configuration.
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4 * KILO,
}
# Other models than the headline's, each for one question.
SHORT_MODELS = ("Qwen3-0.6B", "Qwen3-1.7B")
HOST_MODEL, PACKED_MODEL, LONG_MODEL = "Qwen3-14B", "Qwen3-8B", "Qwen2.5-0.5B"


class Place(StrEnum):
    """Of the baseline: where what a checkpointed layer keeps is."""

    NONE = "nothing computed again"  # no checkpointing
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
    short: tuple[int, ...]  # of SHORT_MODELS
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

    def of(self, model: str) -> "Work":
        """The same work with another model of the catalogue, at full depth; "" for this one."""
        if not model:
            return self
        config = find_config(model) | {"max_position_embeddings": KILO * KILO}
        if self.tiny:
            config |= TINY
        return replace(self, config=config, depths=(config["num_hidden_layers"],))


def full() -> Work:
    """Qwen2.5-7B, as the published records have it."""
    config = find_config("Qwen2.5-7B") | {"max_position_embeddings": KILO * KILO}
    return Work(
        config=config,
        dtype="bfloat16",
        lengths=(32 * KILO, 64 * KILO, 128 * KILO, 256 * KILO),
        longer=(512 * KILO, 1024 * KILO),
        short=(8 * KILO, 16 * KILO),
        strategies=("grouped", "memo", "fpdt", "oomb"),
        depths=(28, 20, 14, 10, 7, 4, 2),
        exact=(4096, 5000, 8192),
        split=128 * KILO,
        first=64 * KILO,
        sparse=Sparse(page=128, budget=8192, recent=4096),
    )


def tiny() -> Work:
    """The same script in seconds on a CPU."""
    return Work(
        config={"model_type": "qwen2", **TINY},
        dtype="float32",
        lengths=(128, 256),
        longer=(512,),
        short=(64, 128),
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
    model: str = ""  # of the catalogue; "": the headline's
    steps: int = 1  # timed at least; a second one follows where it takes little of the time left
    whole: bool = False  # at full depth or not at all
    alone: bool = False  # it fills most of a call of ten minutes

    @property
    def name(self) -> str:
        model = f"{self.model} " if self.model else ""
        if self.work == "step":
            return f"{model}{self.strategy} at {self.tokens}"
        if self.work == "huggingface":
            how = f"{self.place}{', compiled' * self.compiled}"
            return f"{model}huggingface at {self.tokens}, {how}"
        return f"{self.work} at {self.tokens}" if self.tokens else self.work


def quarter(work: Work) -> Iterator[Item]:
    """Measurements for a quarter of an hour on a card whose ceilings are known: those that no
    record has, the most telling first, at full depth."""
    base, short = Item("step", 1.0, strategy=AUTO, whole=True), work.lengths[-3:][0]
    yield replace(base, tokens=work.longer[0], alone=True)
    yield replace(base, tokens=short, steps=2)
    yield Item("huggingface", 1.0, short, place=Place.KEPT, steps=2, whole=True)
    yield Item("update", 1.0, work.middle)
    yield replace(base, tokens=work.middle, strategy=SPARSE)
    yield replace(base, tokens=work.lengths[0], strategy=STREAMED, model=HOST_MODEL)
    yield replace(base, tokens=short, strategy=QLORA, model=PACKED_MODEL)
    yield replace(base, tokens=short, strategy=LOGPROBS)
    for model in SHORT_MODELS:
        for tokens in work.short:
            yield replace(base, tokens=tokens, model=model)
            for place in (Place.NONE, Place.DEVICE):
                yield Item("huggingface", 1.0, tokens, place=place, model=model, whole=True)
    yield Item("longest", 1.0)
    yield replace(base, tokens=work.longer[-1], model=LONG_MODEL, alone=True)


def named(work: Work) -> dict[str, Item]:
    """Everything that can be measured, by name."""
    return {item.name: item for item in (*items(work), *quarter(work))}


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
