"""Far retrieval (haystack.py), learnt with dense attention, with sparse, and with random pages.

Every arm begins with the same weights: those that a short warm-up leaves, at a length where sparse
attention is dense attention. From there each trains and is examined with its own attention, on the
same sequences, while the length grows.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.sparse.arms import ARMS, DENSE, RANDOM, SPARSE, Attention, Rates, Training
from benchmarks.sparse.haystack import CLASSES, Haystack, Sequence, accuracy
from farspan import Schedule, Step
from farspan.spec import Sparse

LEARNT = 0.05  # loss that ends the warm-up, the mean of
LATEST = 20  # steps
WARM_RATES, RATES = Rates(6e-3, 6e-3), Rates(3e-3, 3e-3)
EXAMINATION = 2**32  # seeds of examined sequences begin here: none is trained on


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps of one length."""

    tokens: int
    pairs: int
    steps: int


@dataclass(frozen=True, slots=True)
class Lesson:
    """Everything that decides what is learnt, seeds aside."""

    attention: Attention
    stages: tuple[Stage, ...]  # after the warm-up; the last one's length is examined
    classes: int = CLASSES
    warm_tokens: int = 64
    warm_batch: int = 32
    warm_pairs: int = 12  # at most; 2 at least
    warm_steps: int = 800  # at most
    warm_rates: Rates = WARM_RATES
    rates: Rates = RATES
    step_tokens: int = 4096  # of all sequences of a step, after the warm-up
    examined: int = 16  # sequences

    def __post_init__(self) -> None:
        # One chunk sees all of itself: there the arms are the same function.
        assert self.warm_tokens <= self.attention.chunk, self

    @property
    def last(self) -> Haystack:
        return Haystack(self.stages[-1].tokens, self.stages[-1].pairs, self.classes)


LESSON = Lesson(
    # 8 pages of 32 tokens of 80 to 128: 10% of the prefix at the first question, 6.25% at the last.
    Attention(256, Sparse(32, 256, 16, sinks=0)),
    (Stage(256, 32, 20), Stage(1024, 64, 30), Stage(2048, 64, 30), Stage(4096, 64, 100)),
)
# The same share of the prefix in pages twice as long.
LONGER_PAGES = Attention(256, Sparse(64, 256, 16, sinks=0))


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Two layers: the first sees a token and the one before it, the second, which the arms differ
    in, all; so a value can carry the key before it, and a question can find it."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,  # 64 ** -0.5 is 0.125
        use_sliding_window=True,
        sliding_window=2,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).train()


def warm_up(lesson: Lesson, seed: int) -> tuple[Qwen2ForCausalLM, list[float]]:
    """A model that recalls within one chunk, where sparse attention is dense, and its losses."""
    model = make_model(seed)
    step = Step(model, Schedule(chunk=lesson.attention.chunk))
    training = Training(model, lesson.warm_rates, lesson.warm_steps)
    generator = Generator().manual_seed(seed)
    losses: list[float] = []
    while training.done < lesson.warm_steps and not learnt(losses):
        pairs = int(torch.randint(2, lesson.warm_pairs + 1, (), generator=generator))
        hay = Haystack(lesson.warm_tokens, pairs, lesson.classes)
        losses.append(training(step, hay.batch(lesson.warm_batch, generator)))
    return model, losses


def learnt(losses: list[float]) -> bool:
    """Whether a warm-up is over."""
    return len(losses) >= LATEST and sum(losses[-LATEST:]) / LATEST < LEARNT


def examination(lesson: Lesson) -> Iterator[Sequence]:
    """Sequences of the last stage's length; the same for every arm and seed."""
    for index in range(lesson.examined):
        yield lesson.last.draw(Generator().manual_seed(EXAMINATION + index))


def learn(lesson: Lesson, arm: str, warm: Qwen2ForCausalLM, seed: int) -> dict[str, Any]:
    """Accuracy before and after the stages, and the losses between, of one arm."""
    model = Qwen2ForCausalLM(warm.config).train()
    model.load_state_dict(warm.state_dict())
    step = lesson.attention.step(arm, model, seed)
    before = accuracy(model, step, examination(lesson))
    training = Training(model, lesson.rates, sum(stage.steps for stage in lesson.stages))
    generator = Generator().manual_seed(seed + 1)
    losses = []
    began = time.process_time()
    for stage in lesson.stages:
        hay = Haystack(stage.tokens, stage.pairs, lesson.classes)
        for _ in range(stage.steps):
            batch = hay.batch(max(1, lesson.step_tokens // stage.tokens), generator)
            losses.append(training(step, batch))
    seconds = time.process_time() - began
    after = accuracy(model, step, examination(lesson))
    print(f"seed {seed} {arm:7} accuracy {before:.3f} -> {after:.3f} {seconds:.0f} s", flush=True)
    return {
        "arm": arm,
        "seed": seed,
        "accuracy_before": before,
        "accuracy": after,
        "loss": losses,
        "seconds": round(seconds, 1),
    }


def budget_shares(lesson: Lesson) -> dict[str, Any]:
    """What share of the prefix the budget is, and how far back the pairs are, of what is asked."""
    sparse, chunk = lesson.attention.sparse, lesson.attention.chunk
    shares, back = [], []
    for sequence in examination(lesson):
        for asked, said in zip(sequence.asked.tolist(), sequence.said.tolist(), strict=True):
            # Far: a page that is chosen or not seen at all.
            assert (said + 1) // sparse.page in sparse.candidates(asked // chunk * chunk)
            shares.append(sparse.budget / asked)
            back.append((asked - said) // sparse.page)
    return {
        "budget_of_prefix": {"least": min(shares), "most": max(shares)},
        "pages_back": {"least": min(back), "mean": sum(back) / len(back), "most": max(back)},
        "questions": len(back),
    }


def describe(lesson: Lesson) -> dict[str, Any]:
    """The lesson, for a record."""
    return asdict(lesson) | {"model": make_model(0).config.to_diff_dict()} | budget_shares(lesson)


def gap(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean accuracy of each arm over its seeds, and what sparse lacks of dense."""
    found = {}
    for arm in ARMS:
        seeds = [row["accuracy"] for row in rows if row["arm"] == arm]
        found[arm] = sum(seeds) / len(seeds)
    return found | {"gap": found[DENSE] - found[SPARSE], "control": found[DENSE] - found[RANDOM]}
