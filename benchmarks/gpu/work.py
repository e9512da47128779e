"""What is measured: models, lengths, and the order in which measurements tell most."""

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
    """What a layer of the baseline keeps until its backward."""

    NONE = "nothing computed again"  # no checkpointing
    DEVICE = "inputs on the device"  # checkpointing as it comes
    KEPT = "inputs and attention outputs on the device"


@dataclass(frozen=True, slots=True)
class Work:
    """A model of random weights and the lengths it is trained on."""

    config: dict[str, Any]
    dtype: str
    lengths: tuple[int, ...]  # tokens, ascending; the last one is the headline
    longer: tuple[int, ...]
    short: tuple[int, ...]  # of SHORT_MODELS
    strategies: tuple[str, ...]  # beside auto
    exact: tuple[int, ...]  # lengths of the small model whose gradients are checked
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
        """The same work with another model of the catalogue; "" for this one."""
        if not model:
            return self
        config = find_config(model) | {"max_position_embeddings": KILO * KILO}
        return replace(self, config=config | (TINY if self.tiny else {}))


def full() -> Work:
    """Qwen2.5-7B, as the published records have it."""
    return Work(
        config=find_config("Qwen2.5-7B") | {"max_position_embeddings": KILO * KILO},
        dtype="bfloat16",
        lengths=(32 * KILO, 64 * KILO, 128 * KILO, 256 * KILO),
        longer=(512 * KILO, 1024 * KILO),
        short=(8 * KILO, 16 * KILO),
        strategies=("grouped", "memo", "fpdt", "oomb"),
        exact=(4096, 5000, 8192),
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
        exact=(70,),
        sparse=Sparse(page=8, budget=32, recent=16, sinks=8),
        tiny=True,
    )


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement, made by one child at full depth."""

    work: str  # ceilings, step, huggingface, update or exact
    tokens: int = 0
    strategy: str = ""
    place: Place = Place.DEVICE  # of the baseline
    model: str = ""  # of the catalogue; "": the headline's
    steps: int = 1  # timed at least; a second one follows where it takes little of the time left

    @property
    def name(self) -> str:
        model = f"{self.model} " if self.model else ""
        if self.work == "step":
            return f"{model}{self.strategy} at {self.tokens}"
        if self.work == "huggingface":
            return f"{model}huggingface at {self.tokens}, {self.place}"
        return f"{self.work} at {self.tokens}" if self.tokens else self.work


def quarter(work: Work) -> Iterator[Item]:
    """Measurements for a quarter of an hour on a card whose ceilings are known: those that no
    record has, the most telling first."""
    base, short = Item("step", strategy=AUTO), work.lengths[-3:][0]
    yield replace(base, tokens=work.longer[0])
    yield replace(base, tokens=short, steps=2)
    yield Item("huggingface", short, place=Place.KEPT, steps=2)
    yield Item("update", work.middle)
    yield replace(base, tokens=work.middle, strategy=SPARSE)
    yield replace(base, tokens=work.lengths[0], strategy=STREAMED, model=HOST_MODEL)
    yield replace(base, tokens=short, strategy=QLORA, model=PACKED_MODEL)
    yield replace(base, tokens=short, strategy=LOGPROBS)
    for model in SHORT_MODELS:
        for tokens in work.short:
            yield replace(base, tokens=tokens, model=model)
            for place in (Place.NONE, Place.DEVICE):
                yield Item("huggingface", tokens, place=place, model=model)
    yield replace(base, tokens=work.longer[-1], model=LONG_MODEL)


def named(work: Work) -> dict[str, Item]:
    """Everything that can be measured, by name."""
    found = [Item("ceilings"), Item("exact"), *quarter(work)]
    for tokens in (*work.lengths, *work.longer):
        for strategy in (AUTO, *work.strategies, STREAMED, SPARSE):
            found.append(Item("step", tokens, strategy))
        found += [Item("huggingface", tokens, place=place) for place in Place]
    # What the quarter has stays as it is there.
    return {item.name: item for item in reversed(found)}
