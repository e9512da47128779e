"""Sparse attention learns far retrieval, beside dense attention and random pages.

    python -m benchmarks.sparse.retrieval --out benchmarks/results/sparse_learning.json

On a CPU, one thread; under an hour. Pairs of bytes are hidden in text and asked for much later:

    text | .. key value .. key value .. | text | .. key [value] .. key [value] ..
    0    8                            1/2    5/8                                 1

Text is the Python standard library's own sources, on every machine that runs this; its bytes are
below 128, keys are 128 to 191, values 192 to 255. A sequence gives each of its keys a value at
random, says each pair once in the first half and asks for it once in the last three eighths. Only
the values of questions are trained and counted: nothing but the pair, at least an eighth of the
sequence back, tells them.

Every arm begins with the same weights: those that a short warm-up leaves, at a length where sparse
attention is dense attention. From there each trains and is examined with its own attention, on the
same sequences, while the length grows.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from farspan import Schedule, Step
from farspan.engine.loss import IGNORED
from farspan.engine.microbench import describe_machine
from farspan.sparse.pages import RandomPages
from farspan.spec import Sparse

DENSE, SPARSE, RANDOM = "dense", "sparse", "random"
ARMS = (DENSE, SPARSE, RANDOM)
WARMUP = 10  # steps
CLIP = 1.0

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """What the arms have in common: chunks, and the pages that two of them are given."""

    chunk: int
    sparse: Sparse

    def step(self, arm: str, model: nn.Module, seed: int) -> Step:
        """A step of one arm; random pages are as many as the votes may choose."""
        assert arm in ARMS, arm
        schedule = Schedule(chunk=self.chunk, sparse=None if arm == DENSE else self.sparse)
        pages = self.sparse.budget // self.sparse.page
        return Step(model, schedule, selector=RandomPages(pages, seed) if arm == RANDOM else None)


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates: matrices of the layers go by Muon, all else by AdamW.

    With AdamW alone a model of this size did not find associative recall in 1,500 steps of 2,048
    tokens; with Muon it takes 300 to 400.
    """

    adamw: float
    muon: float


class Training:
    """A model's optimizers over a known number of steps: a short warm-up, constant for a third,
    then down to nothing."""

    def __init__(self, model: nn.Module, rates: Rates, steps: int) -> None:
        self.model, self.steps, self.done = model, steps, 0
        named = dict(model.named_parameters())
        matrices = [n for n, p in named.items() if p.ndim == 2 and ".layers." in n]
        others = [p for n, p in named.items() if n not in matrices]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(others, rates.adamw, (0.9, 0.98), weight_decay=0.0), rates.adamw),
            (
                torch.optim.Muon(
                    [named[n] for n in matrices],
                    rates.muon,
                    weight_decay=0.0,
                    adjust_lr_fn="match_rms_adamw",
                ),
                rates.muon,
            ),
        ]

    def share(self) -> float:
        """Of the learning rates, at this step."""
        return min(1.0, (self.done + 1) / WARMUP, 1.5 * (1 - self.done / self.steps))

    def __call__(self, step: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> float:
        """One step: the loss before it."""
        self.model.zero_grad(set_to_none=True)
        loss = float(step(*batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.share()
            optimizer.step()
        self.done += 1
        return loss


# -- the task --------------------------------------------------------------------------------------

FIRST_KEY, FIRST_VALUE, CLASSES = 128, 192, 64
FIRST_PAIR = 8  # tokens before the first pair: a sink page shows them to all
ROUNDING = 1e-4  # of a mean of fp32 losses that is summed in another order


@dataclass(frozen=True, slots=True)
class Haystack:
    """Sequences of one length. `classes` is how many keys and how many values are in use."""

    tokens: int
    pairs: int  # in a sequence
    classes: int = CLASSES

    def __post_init__(self) -> None:
        assert self.pairs <= self.classes <= CLASSES, self
        assert self.pairs <= min(len(self.pair_slots), len(self.question_slots)), self

    @property
    def pair_slots(self) -> range:
        """Tokens where a pair may begin."""
        return range(FIRST_PAIR, self.tokens // 2, 2)

    @property
    def question_slots(self) -> range:
        """Tokens where a question may begin."""
        return range(self.tokens * 5 // 8 // 2 * 2, self.tokens - 1, 2)

    def draw(self, generator: Generator) -> "Drawn":
        """One sequence."""
        filler = text()
        start = int(torch.randint(len(filler) - self.tokens, (), generator=generator))
        ids = filler[start : start + self.tokens].long()
        keys = FIRST_KEY + torch.randperm(self.classes, generator=generator)[: self.pairs]
        values = FIRST_VALUE + torch.randint(self.classes, (self.pairs,), generator=generator)
        said = _some(self.pair_slots, self.pairs, generator)
        asked = _some(self.question_slots, self.pairs, generator)
        for places in (said, asked):
            ids[places], ids[places + 1] = keys, values
        labels = torch.full_like(ids, IGNORED)
        labels[asked + 1] = values
        return Drawn(ids, labels, said, asked)

    def batch(self, sequences: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """input_ids and labels, [sequences, tokens] each."""
        drawn = [self.draw(generator) for _ in range(sequences)]
        return torch.stack([s.ids for s in drawn]), torch.stack([s.labels for s in drawn])


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sequence [tokens], and where its pairs and questions begin [pairs]."""

    ids: Tensor
    labels: Tensor
    said: Tensor
    asked: Tensor


@dataclass(slots=True)
class Caught:
    """While it is entered: the logits that the model's head gives, in the order of tokens."""

    model: nn.Module
    pieces: list[Tensor] = field(default_factory=list)

    def __enter__(self) -> "Caught":
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        self._hook = head.register_forward_hook(lambda _, __, out: self.pieces.append(out.detach()))
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    _hook: torch.utils.hooks.RemovableHandle = field(init=False)


def accuracy(model: nn.Module, step: Step, sequences: Iterator[Drawn]) -> float:
    """Share of questions whose value is the most likely byte, by the attention of `step`."""
    right = asked = 0
    for sequence in sequences:
        ids, labels = sequence.ids[None], sequence.labels[None]
        with Caught(model) as caught:
            loss = float(step.evaluate(ids, labels))
        # Before them came the probes of a step that prepares for a model with the hook.
        logits = torch.cat(caught.pieces, 1)[0, -ids.shape[1] : -1].float()
        # What was caught is what the step computed its loss from.
        again = float(cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED))
        assert abs(again - loss) <= ROUNDING * max(1.0, loss), (again, loss)
        given = logits[sequence.asked].argmax(1)
        right += int((given == sequence.ids[sequence.asked + 1]).sum())
        asked += len(sequence.asked)
    return right / asked


@cache
def text() -> Tensor:
    """Sources of the standard library, without the bytes of keys and values; uint8 [bytes]."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    written = b"".join(path.read_bytes() for path in sources)
    return torch.tensor([byte for byte in written if byte < FIRST_KEY], dtype=torch.uint8)


def _some(slots: range, count: int, generator: Generator) -> Tensor:
    drawn = torch.randperm(len(slots), generator=generator)[:count]
    return slots.start + slots.step * drawn


# -- the lesson ------------------------------------------------------------------------------------

SEEDS = (0, 1)
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


def examination(lesson: Lesson) -> Iterator[Drawn]:
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
        "loss": rounded(losses),
        "seconds": round(seconds, 1),
    }


def rounded(losses: list[float]) -> list[float]:
    """Losses as a record keeps them."""
    return [round(loss, 5) for loss in losses]


def describe(lesson: Lesson) -> dict[str, Any]:
    """The lesson, for a record."""
    return asdict(lesson) | {"model": make_model(0).config.to_diff_dict()}


def gap(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean accuracy of each arm over its seeds, and what sparse lacks of dense."""
    found = {}
    for arm in ARMS:
        seeds = [row["accuracy"] for row in rows if row["arm"] == arm]
        found[arm] = sum(seeds) / len(seeds)
    return found | {"gap": found[DENSE] - found[SPARSE], "control": found[DENSE] - found[RANDOM]}


def record(seeds: Sequence[int]) -> dict[str, Any]:
    """Every arm on every seed, by pages of both lengths; dense attention, which has none, once."""
    longer = replace(LESSON, attention=LONGER_PAGES)
    warmed, arms, longs = [], [], []
    for seed in seeds:
        model, losses = warm_up(LESSON, seed)
        warmed.append({"seed": seed, "steps": len(losses), "loss": rounded(losses)})
        arms += [learn(LESSON, arm, model, seed) for arm in ARMS]
        longs += [learn(longer, arm, model, seed) for arm in ARMS if arm != DENSE]
    return {
        "benchmark": "sparse_learning",
        "machine": describe_machine(),
        "dtype": "float32",
        "clock": "seconds that one thread computed",
        "retrieval": {
            "lesson": describe(LESSON),
            "accuracy": gap(arms),
            "warm_up": warmed,
            "arms": arms,
        },
        "longer_pages": {"lesson": describe(longer), "arms": longs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="write the record to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = record(SEEDS)
    given.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print({name: round(value, 3) for name, value in found["retrieval"]["accuracy"].items()})


if __name__ == "__main__":
    main()
