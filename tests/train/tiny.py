"""A run that takes a fraction of a second: a tiny model, a few documents, a plain autograd step."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from farspan.attention.far import Seen
from farspan.data.config import DataConfig, SourceKind
from farspan.data.formats import UNTRAINED
from farspan.engine.runner import Progress
from farspan.spec import Schedule
from farspan.train.config import (
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from farspan.train.context import Components
from farspan.train.memory import Expected
from farspan.train.observer import Reporter
from farspan.train.step_runner import TrainingResult
from farspan.train.trainer import train

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
STEPS = 5

Hook = Callable[["TinyStep", int], None]  # called after each cell with the calls made before


def cells_done(done: int, cells: int) -> Progress:
    """Of cells that take equally long."""
    return Progress(done, cells, float(done), float(cells))


class TinyStep:
    """Plain autograd, a document at a time; a document is a cell."""

    def __init__(self, model: nn.Module, hook: Hook | None = None) -> None:
        self.model = model
        self.hook = hook
        self.calls = 0
        self.progress: Callable[[Progress], None] | None = None
        self.seen: Seen | None = None
        self.host_room: int | None = None
        self.watch: Any = None
        self.copies: Any = None
        self.drawn = 0

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor:
        total = torch.zeros(())
        with torch.enable_grad():
            for loss in self._losses(input_ids, labels, document_ids, trained_tokens):
                if loss.requires_grad:
                    loss.backward()
                total += loss.detach()
        self.calls += 1
        return total

    def release(self) -> None:
        """Nothing is kept."""

    @torch.no_grad()
    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor:
        losses = self._losses(input_ids, labels, document_ids, trained_tokens)
        return torch.stack(list(losses)).sum()

    def _losses(
        self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None, trained: int | None
    ) -> Iterator[Tensor]:
        count = trained or count_trained(labels, document_ids)
        pieces = list(documents(input_ids, document_ids))
        for place, (row, span) in enumerate(pieces):
            ids = input_ids[row, span]
            logits = self.model(input_ids=ids[None]).logits[0, :-1].float()
            targets = labels[row, span][1:]
            yield nn.functional.cross_entropy(logits, targets, reduction="sum") / count
            if self.hook is not None:
                self.hook(self, self.calls)
            if self.progress is not None:
                self.progress(cells_done(place + 1, len(pieces)))


def documents(input_ids: Tensor, document_ids: Tensor | None) -> Iterator[tuple[int, slice]]:
    for row in range(len(input_ids)):
        marks = torch.zeros_like(input_ids[row]) if document_ids is None else document_ids[row]
        lengths = torch.unique_consecutive(marks, return_counts=True)[1].tolist()
        start = 0
        for length in lengths:
            yield row, slice(start, start + length)
            start += length


def count_trained(labels: Tensor, document_ids: Tensor | None) -> int:
    targets = (labels[row, span][1:] for row, span in documents(labels, document_ids))
    return sum(int((own != UNTRAINED).sum()) for own in targets)


def load_tiny(*, config: dict[str, Any], dtype: torch.dtype, seed: int, **_: object) -> nn.Module:
    torch.manual_seed(seed)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **fields)
    return AutoModelForCausalLM.from_config(made, dtype=dtype)


def replaced(base: Components | None = None, **own: Any) -> Components:
    """farspan's own components, or those of `base`, with others in their place."""
    made = Components()
    given = {name: value for name, value in vars(base or made).items() if name[0] != "_"}
    vars(made).update(given | own)
    return made


def tiny_components(hook: Hook | None = None) -> Components:
    return replaced(
        load_model=load_tiny,
        make_step=lambda model, _: TinyStep(model, hook),
        strategy=lambda *_: Schedule(),
        count_trained=count_trained,
        expect_memory=lambda *_, **__: Expected(123_456, 100_000, 23_456, {"weights": 35_904}),
    )


def write_documents(folder: Path, count: int = 12) -> Path:
    """Text files of 20 to 75 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        text = f"document {number}: " + "abcde fgh "[: 3 + number % 7] * (1 + number % 6)
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


def tiny_run(root: Path, **changes: Any) -> RunConfig:
    """A run of five steps in `root / 'run'`; saves every second step."""
    data = DataConfig(
        source=SourceKind.TEXT,
        path=str(write_documents(root / "text")),
        held_out=0.2,
        cache=str(root / "cache"),
    )
    run = RunConfig(
        model=ModelConfig(config=MODEL),
        data=data,
        folder=str(root / "run"),
        steps=STEPS,
        context=48,
        accumulate=2,
        optimizer=OptimizerConfig(lr=1e-2, warmup=2),
        evaluation=EvaluationConfig(every=2, on_start=True, sequences=2),
        checkpoints=CheckpointConfig(every=2, keep=2),
    )
    return replace(run, **changes)


class Quiet(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done: list[float] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
        assert 0 < progress.cells_done <= progress.cells
        assert not part or part.startswith("batch ")
        self.done.append(step - 1 + done)


def fit(
    run: RunConfig, hook: Hook | None = None, reporter: Reporter | None = None
) -> TrainingResult:
    return train(run, components=tiny_components(hook), reporter=reporter or Quiet())


def signalled(calls: int, signum: signal.Signals = signal.SIGTERM) -> Hook:
    """A signal comes in the batch after so many."""

    def hook(step: TinyStep, done: int) -> None:
        if done == calls and step.progress is not None:
            os.kill(os.getpid(), signum)

    return hook


class Stopped(Exception):
    """Raised by `Stopping`."""


class Stopping(Quiet):
    """Ends a run where a step begins."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def begin(self, step: int) -> None:
        if step == self.step:
            raise Stopped


def metrics(run: RunConfig) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl."""
    lines = (Path(run.folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(run: RunConfig) -> dict[str, Tensor]:
    """Of the model that it exported, or of its adapters."""
    (path,) = (Path(run.folder) / "model").glob("*model.safetensors")
    return load_file(path)


def assert_same_weights(run: RunConfig, other: RunConfig) -> None:
    """Bit by bit."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def memory_of(folder: Path) -> tuple[int, int]:
    """Bytes that a run's first step was predicted and measured to take."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (first,) = (line for line in map(json.loads, lines) if "memory_measured_bytes" in line)
    return first["memory_predicted_bytes"], first["memory_measured_bytes"]
