"""Loss on real text, with dense attention, with sparse, and with random pages.

Text is the Python standard library's own sources, one after the other, as bytes (haystack.py); its
last tenth is held out.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.sparse.arms import Attention, Batch, Rates, Training
from benchmarks.sparse.haystack import text
from farspan.spec import Sparse

LATEST = 10  # steps whose mean loss is reported


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that decides what is learnt, seeds aside."""

    attention: Attention
    tokens: int
    steps: int
    held_out: int  # sequences
    rates: Rates


READING = Reading(
    # 16 pages of 16 tokens: 6.25% of the longest prefix.
    Attention(512, Sparse(16, 256, 128, sinks=16)),
    tokens=4096,
    steps=60,
    held_out=6,
    rates=Rates(5e-3, 5e-3),
)


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Three layers without windows, two queries a K,V head."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).train()


def read(reading: Reading, arm: str, seed: int) -> dict[str, Any]:
    """Losses of training and of text that is held out, of one arm."""
    model = make_model(seed)
    step = reading.attention.step(arm, model, seed)
    training = Training(model, reading.rates, reading.steps)
    generator = Generator().manual_seed(seed)
    kept = len(text()) * 9 // 10
    train, held = text()[:kept].long(), text()[kept:].long()
    began = time.process_time()
    losses = [training(step, _draw(train, reading, generator)) for _ in range(reading.steps)]
    seconds = time.process_time() - began
    examined = Generator().manual_seed(0)
    found = [
        float(_evaluate(step.evaluate, held, reading, examined)) for _ in range(reading.held_out)
    ]
    row = {
        "arm": arm,
        "seed": seed,
        "loss": losses,
        "last_loss": sum(losses[-LATEST:]) / LATEST,
        "held_out_loss": sum(found) / len(found),
        "seconds": round(seconds, 1),
    }
    print(f"text {arm:7} held out {row['held_out_loss']:.4f} {seconds:.0f} s", flush=True)
    return row


def describe(reading: Reading) -> dict[str, Any]:
    """The reading, for a record."""
    return asdict(reading) | {"model": make_model(0).config.to_diff_dict()}


def _draw(source: Tensor, reading: Reading, generator: Generator) -> Batch:
    start = int(torch.randint(len(source) - reading.tokens, (), generator=generator))
    ids = source[None, start : start + reading.tokens]
    return ids, ids


def _evaluate(
    evaluate: Callable[[Tensor, Tensor], Tensor],
    source: Tensor,
    reading: Reading,
    generator: Generator,
) -> Tensor:
    return evaluate(*_draw(source, reading, generator))
