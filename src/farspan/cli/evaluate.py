"""`farspan evaluate`: evaluate a model on long text. Reports the loss by position, the perplexity
of each document, and whether the model recalls a sentence far back."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from farspan.cli import typer_app
from farspan.cli.verify import checked_dtype
from farspan.data.config import DataConfig
from farspan.data.formats import UNTRAINED
from farspan.data.packing import BestFitLayout, PackedBatch, Packing
from farspan.data.sources import decode, find_files, read_bytes
from farspan.data.token_cache import TokenStore
from farspan.data.tokenizers import HubTokenizer, Tokenizer, load_tokenizer
from farspan.distributed.context import ParallelContext, broadcast_from_rank0
from farspan.distributed.run_context import DistributedContext, join_run, launch_env
from farspan.durable import check_place, refuse_links, write_output
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.formatting import read_tokens, write_number, write_tokens
from farspan.hf.load import Weights, add_adapters, load_config, load_model
from farspan.hf.merge import INDEX_FOLDER
from farspan.hf.quantized import is_quantized_folder
from farspan.profile.catalog import refuse_absent, split_revision
from farspan.program.layout import Auto, Given, Parallel, layout_of, packed_layout
from farspan.program.strategies import AUTO, GROUPED, STRATEGIES, strategy
from farspan.report.run import ABOUT, read_about
from farspan.report.tables import lines_table, show
from farspan.spec import Schedule, Tier, UnsupportedError
from farspan.train.config import ModelConfig, RunConfig, SparseConfig, load_run
from farspan.train.console import LineReporter
from farspan.train.context import inspect_model
from farspan.train.observer import Reporter
from farspan.train.origin import copy_adapters, with_base
from farspan.train.setup import choose_device
from farspan.train.sparse import selector_for
from farspan.train.yaml_config import convert, to_mapping

app = typer_app()

Tell = Callable[[str, int, int, Progress], None]  # label, index from 0, count, cells

SECONDS = Parallel().timeout  # that ranks wait for each other, without a run
FIRST = 64  # tokens of the first range of positions; each later range is as long as all before it
SHOWN = 20  # documents in the terminal; --json has all
NEEDLE, QUESTION = "\nThe secret word of {} is {}.\n", "\nThe secret word of {} is"
# Distinct first letters: the model is asked only for the first token.
ANSWERS = " apple", " bridge", " candle", " dragon", " engine", " forest", " garden", " harbor"
PLACES = "Paris", "Cairo", "Lima", "Oslo", "Delhi", "Quito", "Seoul", "Tunis"

Texts = Annotated[
    list[str],
    typer.Option("--text", help="A file, a folder or a glob of text files; each is a document."),
]
DTypeName = Annotated[
    str | None, typer.Option("--dtype", help="bfloat16, float32 or float64; default: the model's.")
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Folder, hub name or bytes; default: the run's, else the model's."
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help=f"{AUTO}, or one of {', '.join(STRATEGIES)}; default: the schedule of the run, else "
        f"{GROUPED}.",
    ),
]
Needles = Annotated[
    int, typer.Option(min=0, help="Depths at which to hide a sentence and ask for it; 0: none.")
]
Trusted = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the run's model.")
]
Picture = Annotated[
    Path | None, typer.Option("--picture", help="Draw the loss by position into this SVG file.")
]


@dataclass(frozen=True, slots=True)
class Range:
    """Mean loss of the tokens with at least `begin` and fewer than `end` tokens before them."""

    begin: int
    end: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Read:
    """Loss and perplexity of one evaluated document."""

    name: str
    tokens: int  # number of predicted tokens
    loss: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Needle:
    """Result of a needle-in-a-haystack test: a hidden sentence, and how likely its last word is."""

    depth: float  # fraction of the context before the sentence
    tokens: int  # between the sentence and the question
    answer: str
    logprob: float  # of the answer's first token
    wrong: dict[str, float]  # of the first tokens of other answers

    @property
    def found(self) -> bool:
        """Return whether the model prefers the right answer to all other choices."""
        return self.logprob > max(self.wrong.values())


@dataclass(frozen=True, slots=True)
class TextEvaluation:
    """Results of an evaluation on texts, with its settings."""

    model: str
    dtype: str
    schedule: Schedule
    context: int
    cut: int  # documents longer than the context, evaluated up to it
    ranges: tuple[Range, ...]
    documents: tuple[Read, ...]
    needles: tuple[Needle, ...]

    @property
    def tokens(self) -> int:
        return sum(read.tokens for read in self.documents)

    @property
    def loss(self) -> float:
        """Mean loss of all predicted tokens."""
        return sum(read.tokens * read.loss for read in self.documents) / self.tokens

    def to_json(self) -> dict[str, Any]:
        needles = [{**asdict(needle), "found": needle.found} for needle in self.needles]
        return {
            **{name: getattr(self, name) for name in ("model", "dtype", "context", "cut")},
            "schedule": to_mapping(self.schedule),
            "attention": "dense" if self.schedule.sparse is None else "sparse",
            "tokens": self.tokens,
            "loss": self.loss,
            "perplexity": math.exp(self.loss),
            "positions": [asdict(part) for part in self.ranges],
            "documents": [asdict(read) for read in self.documents],
            "needles": needles,
        }


@app.command("evaluate")
def evaluate_command(
    model: Annotated[
        str, typer.Argument(help="Run folder, folder of a model or of adapters, or hub name.")
    ],
    texts: Texts,
    context_text: Annotated[
        str | None,
        typer.Option("--context", help="Longest context: 8K, 1M; default: the run's, or 8K."),
    ] = None,
    needles: Needles = 5,
    dtype: DTypeName = None,
    tokenizer: TokenizerName = None,
    strategy_name: StrategyName = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = AUTO,
    picture: Picture = None,
    trusted: Trusted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Measure loss by position, perplexity by document, and recall of hidden sentences."""
    check_place(picture, "picture")
    subject = subject_of(model, dtype, tokenizer, trusted=trusted)
    context = subject.context if context_text is None else read_tokens(context_text, "context")
    if context < 2:
        raise UnsupportedError(f"context: expected at least 2 tokens, got {context}")
    asked = {"model": model, "context": context, "needles": needles, "strategy": strategy_name}
    asked |= {"device": device, "dtype": str(subject.dtype), "tokenizer": subject.tokenizer}
    seconds = subject.parallel.timeout if isinstance(subject.parallel, Parallel) else SECONDS
    with join_run(launch_env(), choose_device(device), asked, seconds) as world, torch.no_grad():
        named = world.run_on_rank0(partial(_read_texts, texts), "reading the texts")
        step = subject.step(world, strategy_name, context)
        words, tell = load_tokenizer(subject.tokenizer), _teller(world)
        found = evaluate_text(step, words, named, context, needles, tell, world)
    found = replace(found, model=model)
    if not world.is_rank0:
        return
    if picture is not None:
        write_output(picture, draw(found.ranges), "picture")
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        show_evaluation(found)
    if picture is not None:
        print(f"loss by position: {picture}", file=sys.stderr)


def _read_texts(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the text of each file that `--text` gives."""
    files = dict.fromkeys(path for text in texts for path in find_files(text, "--text"))
    return [(str(path), decode(read_bytes(path), path, line=1)) for path in files]


def _teller(world: DistributedContext) -> Tell:
    """Return a function that shows the progress, on rank 0 alone."""
    watcher = LineReporter(Console(stderr=True)) if world.is_rank0 else Reporter()

    def tell(what: str, index: int, count: int, done: Progress) -> None:
        share = (index + done.work_done / done.work) / count
        watcher.evaluating(share, done, f"{what} {index + 1}/{count}")

    return tell


# -- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate, and the settings of its run if it is from a run folder."""

    source: ModelConfig
    dtype: torch.dtype
    adapters: str | None
    tokenizer: str
    schedule: Schedule | None  # of the run
    attention: SparseConfig | None  # of the schedule, if sparse
    context: int
    parallel: Given = Auto.AUTO  # how ranks share a sequence

    def model(self, device: torch.device, weights: Weights = Weights.SAVED) -> Any:
        """Return the model with its adapters, in evaluation mode."""
        source = self.source
        model: Any = load_model(
            **source.origin(),
            dtype=self.dtype,
            device=device,
            weights=weights,
            nf4=source.quantize is not None,
        )
        if source.lora is not None:
            lora = source.lora
            add_adapters(model, rank=lora.rank, alpha=lora.scale(), targets=lora.targets)
        if self.adapters is not None and weights is Weights.SAVED:
            asked = RunConfig(model=source, data=DataConfig())
            copy_adapters(Path(self.adapters), model, asked)
        model.config.get_text_config().output_router_logits = False  # documents' own losses
        return model.eval()

    def step(self, world: DistributedContext, name: str | None, context: int) -> Step:
        """Return a `farspan.Step` of the model with strategy `name`; without a name, with the run's
        schedule or, if there is no run, with strategy `grouped`. Ranks share a sequence as in the
        run, or by heads and shards of keys."""
        model = self._loaded(world)
        layers = model.config.get_text_config().num_hidden_layers
        schedule = self.schedule
        if name is not None or schedule is None:
            schedule = strategy(GROUPED if name in (None, AUTO) else name, layers, context)
        if name != AUTO:
            model.requires_grad_(False)
        ranks = self._over_ranks(world, model, schedule)
        if name == AUTO:
            return Step(model, AUTO, ranks=ranks)
        selector = selector_for(self.attention, schedule, context)
        return Step(model, schedule, device=world.device, selector=selector, ranks=ranks)

    @property
    def _is_packed(self) -> bool:
        return self.source.quantize is not None or is_quantized_folder(self.source.path)

    def _loaded(self, world: DistributedContext) -> Any:
        """Return the model; ranks other than 0 load no weights, unless these are quantised."""
        if world.size == 1 or self._is_packed:
            return self.model(world.device)
        cpu, found = torch.device("cpu"), list[Any]()
        world.run_on_rank0(lambda: found.append(self.model(cpu)), "loading the model")
        return found[0] if found else self.model(cpu, Weights.NONE)

    def _over_ranks(
        self, world: DistributedContext, model: Any, schedule: Schedule
    ) -> ParallelContext | ShardedModel | None:
        """Lay out the ranks, and give each its weights. Returns None for a single process."""
        if world.size == 1:
            return None
        dtype = str(self.dtype).removeprefix("torch.")
        look = partial(inspect_model, model, dtype, world.device)
        describe = partial(world.run_on_rank0, lambda: look().model)
        layout = layout_of(self.parallel, world.size, describe)
        world.set_layout(packed_layout(self.parallel, layout) if self._is_packed else layout)
        ranks, layout = world.ranks, world.layout
        assert ranks is not None, "several processes have a layout"
        if layout.cuts_weights() or layout.tensor > 1 or layout.pipeline > 1:
            return parallelize(model, schedule, ranks)
        home = torch.device("cpu") if schedule.weights is Tier.HOST else world.device
        broadcast_from_rank0(ranks, model, home)
        return ranks


def subject_of(
    model: str, dtype: str | None, tokenizer: str | None, *, trusted: bool = False
) -> Subject:
    """Return the model in a folder or under a hub name, with the settings of its run, if any.

    Raises:
        UnsupportedError: It cannot be evaluated, or its run used code that comes with the model
            and `trusted` is False: another person's folder may not decide that.
    """
    path, revision = split_revision(model)
    folder, schedule, run = Path(path).expanduser(), None, None
    parallel: Given = Auto.AUTO
    source = ModelConfig(path=path, revision=revision)
    if (folder / "config.yaml").is_file():
        refuse_links(folder)
        run = load_run(folder / "config.yaml", trusted=trusted)
        if not (folder / "model").is_dir():
            raise UnsupportedError(
                f"{folder}: this run has no model yet; let the run end, or give another folder"
            )
        parallel = run.parallel or parallel
        source = replace(run.model, path=str(folder / "model"), config=None, lora=None)
        if run.model.lora is None:  # the exported config includes them
            source = replace(source, overrides={})
        about = read_about(folder)
        if "schedule" in about:
            schedule = convert(Schedule, about["schedule"], f"{folder / ABOUT}: schedule")
    else:
        refuse_absent("model", path)
    source, adapters = with_base(source)
    config = load_config(**source.origin())
    computed = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    computed = "bfloat16" if computed == "float16" else computed
    computed = computed if run is None else run.model.dtype.value
    computed = product_dtype(source, checked_dtype(dtype or computed))
    words = tokenizer or (run.data.tokenizer if run else None) or str(source.path)
    context = 8192 if run is None else run.context
    attention = None if run is None else run.sparse
    if attention is not None and attention.index is not None:  # the exported model has a copy
        attention = replace(attention, index=str(folder / "model" / INDEX_FOLDER))
    return Subject(
        source, getattr(torch, computed), adapters, words, schedule, attention, context, parallel
    )


def product_dtype(source: ModelConfig, dtype: str) -> str:
    """Return the dtype in which a model computes if `dtype` is requested: the same, but float32
    instead of float64 for a model with 4-bit weights, which cannot compute in float64."""
    packed = source.quantize is not None or is_quantized_folder(source.path)
    return "float32" if packed and dtype == "float64" else dtype


def evaluate_text(
    step: Step,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str]],
    context: int,
    needles: int,
    tell: Tell = lambda *_: None,
    world: DistributedContext | None = None,
) -> TextEvaluation:
    """Evaluate documents, given as (name, text), each up to `context` tokens. After each cell
    `tell` is called with a label, the index of the current sequence or needle (from 0), their
    number, and the model's progress. The replicas of `world` share the documents. Raises
    UnsupportedError if there is no token to predict."""
    rows = tokenizer.encode([text for _, text in texts])
    cut = sum(len(row) > context for row in rows)
    rows = [row[:context] for row in rows]
    named = [(name, row) for (name, _), row in zip(texts, rows, strict=True) if len(row) > 1]
    if not named:
        raise UnsupportedError("--text: no document has two tokens; give longer documents")
    world = world or DistributedContext(step.stages.device)
    losses = dict(_document_losses(step, named, context, tell, world))
    reads = [_read(name, losses[name]) for name, _ in named]
    return TextEvaluation(
        model="",
        dtype=str(step.stages.dtype).removeprefix("torch."),
        schedule=step.schedule,
        context=context,
        cut=cut,
        ranges=tuple(ranges_of(list(losses.values()))),
        documents=tuple(reads),
        needles=tuple(_needles(step, tokenizer, np.concatenate(rows), context, needles, tell)),
    )


def _read(name: str, losses: np.ndarray) -> Read:
    loss = float(losses.mean())
    return Read(name, len(losses), loss, math.exp(loss))


def _document_losses(
    step: Step,
    named: Sequence[tuple[str, np.ndarray]],
    context: int,
    tell: Tell,
    world: DistributedContext,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each document's name, and the losses (float64) of all its tokens but the first. All
    replicas make as many calls: at the end some repeat the last sequence."""
    starts = np.cumsum([0, *(len(row) for _, row in named)])
    numbers = np.stack([np.arange(len(named)), np.zeros(len(named))], 1).astype(np.int64)
    store = TokenStore(
        np.concatenate([row for _, row in named]), starts, numbers,
        tuple(name for name, _ in named), 0, "",
    )  # fmt: skip
    packing = Packing(store, BestFitLayout(starts, numbers[:, 0], context, 0), context)
    count = packing.sequences_per_epoch()
    for begin in range(0, count, world.replicas):
        index = min(begin + world.replica, count - 1)
        step.progress = partial(tell, "sequence", index, count)
        yield from world.gather_replicas([*_batch_losses(step, packing.once(index))])


def _batch_losses(step: Step, batch: PackedBatch) -> Iterator[tuple[str, np.ndarray]]:
    device = step.stages.device
    ids, labels, marks = (
        torch.from_numpy(own).to(device)
        for own in (batch.input_ids, batch.labels, batch.document_ids)
    )
    found = -step.logprobs(ids, labels, marks)[0].double().cpu().numpy()
    for number, name in enumerate(batch.names[0]):
        yield name, found[batch.document_ids[0] == number][:-1]


def ranges_of(losses: Sequence[np.ndarray]) -> Iterator[Range]:
    """Yield the mean loss in each range of the number of tokens before the predicted token."""
    longest, begin, end = max(map(len, losses)), 1, FIRST  # the first token is not predicted
    while begin <= longest:
        part = np.concatenate([own[begin - 1 : end - 1] for own in losses])
        yield Range(begin, min(end, longest + 1), len(part), float(part.mean()))
        begin, end = end, 2 * end


# -- sentences in a long context ------------------------------------------------------------------


def _needles(
    step: Step, tokenizer: Tokenizer, hay: np.ndarray, context: int, count: int, tell: Tell
) -> Iterator[Needle]:
    """Yield the results of `count` needle-in-a-haystack tests at evenly spaced depths. Each hides a
    sentence in `context` tokens of the text, or in all of a shorter text."""
    for number in range(count):
        step.progress = partial(tell, "needle", number, count)
        town, answer = PLACES[number % len(PLACES)], ANSWERS[number % len(ANSWERS)]
        sentence = plain(tokenizer, NEEDLE.format(town, answer.strip()))
        rows = [plain(tokenizer, QUESTION.format(town) + word) for word in ANSWERS]
        tokens = zip(*(row.tolist() for row in rows), strict=False)
        same, choices = next((n, c) for n, c in enumerate(tokens) if len(set(c)) > 1)
        if len(set(choices)) < len(ANSWERS):
            raise UnsupportedError(
                "--needles: with this tokenizer, several answers begin with the same token and "
                "cannot be told apart; give --needles 0"
            )
        room = min(context - len(sentence) - same - 1, len(hay))
        if room < 1:
            raise UnsupportedError(
                f"--needles: a context of {context:,} tokens is too short for a sentence; give a "
                "longer one, or set --needles to 0"
            )
        depth = number / max(1, count - 1)
        at = round(depth * room)
        ids = np.concatenate([hay[:at], sentence, hay[at:room], rows[0][: same + 1]])
        logprobs = dict(zip(ANSWERS, _choice_logprobs(step, ids, choices), strict=True))
        right = logprobs.pop(answer)
        wrong = {word.strip(): value for word, value in logprobs.items()}
        yield Needle(depth, room - at, answer.strip(), right, wrong)


def _choice_logprobs(step: Step, ids: np.ndarray, choices: Sequence[int]) -> list[float]:
    """Return the log-probability of each token id in `choices` as the last token of `ids`."""
    inputs = torch.from_numpy(ids.astype(np.int64)).to(step.stages.device)[None]
    labels = torch.full((*inputs.shape, len(choices)), UNTRAINED, device=inputs.device)
    labels[0, -1] = torch.tensor(choices, device=inputs.device)
    logprobs: Tensor = step.logprobs(inputs, labels)
    return [float(value) for value in logprobs[0, -2]]


def plain(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the token ids of a text, int64, without special tokens."""
    if isinstance(tokenizer, HubTokenizer):
        ids = tokenizer.inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)
    return tokenizer.encode([text])[0][:-1]  # without the end token


# -- output ---------------------------------------------------------------------------------------


def show_evaluation(result: TextEvaluation) -> None:
    """Print an evaluation as tables and a summary."""
    table = lines_table("loss by position", "tokens before", "predicted", "loss", "perplexity")
    for part in result.ranges:
        span = f"{write_tokens(part.begin)} to {write_tokens(part.end)}"
        table.add_row(span, f"{part.tokens:,}", f"{part.loss:.4f}", f"{math.exp(part.loss):,.2f}")
    show(table)
    table = lines_table("documents", "", "predicted", "loss", "perplexity")
    for read in result.documents[:SHOWN]:
        table.add_row(read.name, f"{read.tokens:,}", f"{read.loss:.4f}", f"{read.perplexity:,.2f}")
    show(table)
    if len(result.documents) > SHOWN:
        show(f"and {len(result.documents) - SHOWN:,} more documents (--json has all)")
    if result.needles:
        show_needles(result.needles)
    if result.cut:
        are = f"{write_number(result.cut, 'document')} {'is' if result.cut == 1 else 'are'}"
        show(f"{are} longer than the context and evaluated only up to its length")
    how = "" if result.schedule.sparse is None else ", with sparse attention, an approximation"
    show(
        f"{result.tokens:,} tokens in {result.dtype}: loss {result.loss:.4f}, perplexity "
        f"{math.exp(result.loss):,.2f}{how}"
    )


def show_needles(needles: Iterable[Needle]) -> None:
    known = tuple(needles)
    title = f"hidden sentences: {sum(n.found for n in known)} of {len(known)} found"
    table = lines_table(title, "depth", "tokens back", "answer", "log-prob", "best wrong", "")
    for needle in known:
        word = max(needle.wrong, key=needle.wrong.__getitem__)
        table.add_row(
            f"{needle.depth:.0%}",
            f"{needle.tokens:,}",
            needle.answer,
            f"{needle.logprob:.3f}",
            f"{needle.wrong[word]:.3f} {word}",
            "found" if needle.found else "",
        )
    show(table)


WIDTH, HEIGHT, EDGE = 640, 320, 48  # pixels of the picture, and of the margin around its plot


def draw(ranges: Sequence[Range]) -> str:
    """Return a chart of the loss by position as SVG, with a point for each range. The horizontal
    axis is in powers of two."""
    low, high = min(r.loss for r in ranges), max(r.loss for r in ranges)
    wide = max(1, len(ranges) - 1)
    points, labels = [], []
    for place, part in enumerate(ranges):
        x = EDGE + (WIDTH - 2 * EDGE) * place / wide
        y = EDGE + (HEIGHT - 2 * EDGE) * (high - part.loss) / (high - low or 1.0)
        points.append(f"{x:.1f},{y:.1f}")
        words = f"{write_tokens(part.begin)} to {write_tokens(part.end)}: {part.loss:.4f}"
        labels.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(words)}</title></circle>'
            f'<text x="{x:.1f}" y="{HEIGHT - EDGE / 2:.0f}" text-anchor="middle">'
            f"{write_tokens(part.end)}</text>"
        )
    for value, y in ((high, EDGE), (low, HEIGHT - EDGE)):
        labels.append(f'<text x="4" y="{y + 4}">{value:.3f}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<text x="{EDGE}" y="20">mean loss by number of preceding tokens</text>\n'
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#1f77b4"/>\n'
        f"{''.join(labels)}\n</svg>\n"
    )
