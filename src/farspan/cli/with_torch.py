"""The parts of `farspan train`, `farspan verify` and `farspan memory trace` that need torch."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from transformers import PreTrainedModel

from farspan.allocator import allocator_package
from farspan.ask import measuring
from farspan.cli import FAILED, USAGE, typer_app
from farspan.cli.evaluate import product_dtype, subject_of
from farspan.cli.plan import MODELS
from farspan.data.sources import decode, find_files, read_bytes
from farspan.data.tokenizers import Tokenizer, load_tokenizer
from farspan.distributed.failure import RankFailed, is_shared
from farspan.distributed.run_context import launch_env
from farspan.durable import WriteFailed
from farspan.engine.reference import Approximation
from farspan.engine.trace import Temporaries, Temporary
from farspan.engine.trace_steps import OWN, Checkpointing, Recording, TraceRequest
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.formatting import IN_FP8, read_tokens, sparse_words, write_sparse, write_tokens
from farspan.hf.load import Weights, add_adapters, load_model, resize_embeddings
from farspan.hf.merge import merge
from farspan.hf.quantized import refuse_whole
from farspan.lazy import load
from farspan.program.strategies import STRATEGIES
from farspan.report.run import write_report
from farspan.report.tables import lines_table, show
from farspan.sparse.budget import (
    ENOUGH,
    LAST,
    RANDOM,
    KeptMass,
    kept_masses,
    sparse_losses,
    whole_tokens,
)
from farspan.sparse.index import principal_index
from farspan.spec import Products, Schedule, Sparse, UnsupportedError
from farspan.train.config import HubConfig, ModelConfig, RunConfig, SparseConfig
from farspan.train.console import make_reporter
from farspan.train.hub import PushFailed, push, refuse_login
from farspan.train.origin import copy_adapters, with_base
from farspan.train.run_folder import as_json
from farspan.train.setup import embedded_rows, resolve
from farspan.train.sparse import index_of, selector_for
from farspan.train.step_runner import TrainingResult
from farspan.train.trainer import Diverged, train

FURTHEST = "gradients furthest from plain autograd's"


def train_and_tell(
    run: RunConfig, notes: Sequence[str], trace: Path | None = None, *, in_json: bool
) -> None:
    """Train, and print the result. Raises typer.Exit with the command's exit status, or
    UnsupportedError."""
    before = metrics_sum(Path(run.folder))
    try:
        reporter = make_reporter(Console(stderr=in_json))
        result = train(run, reporter=reporter, notes=notes, trace=trace)
    except (WriteFailed, Diverged, RankFailed) as error:
        if not is_shared(error):
            print(f"farspan: {error}", file=sys.stderr)
            report_after(Path(run.folder), before)
        raise typer.Exit(FAILED) from error
    except UnsupportedError as error:
        if is_shared(error):
            raise typer.Exit(USAGE) from error
        report_after(Path(run.folder), before)
        raise
    if result.leads:
        print(json.dumps(result_json(result)) if in_json else result.message)
        report_after(result.folder, before, stderr=in_json)
    raise typer.Exit(result.exit_code)


def metrics_sum(folder: Path) -> int | None:
    """Return a checksum of a run's metrics.jsonl, or None if there is none. It shows whether a
    command changed the file, without relying on clocks."""
    try:
        return crc32((folder.expanduser() / "metrics.jsonl").read_bytes())
    except OSError:
        return None


def report_after(folder: Path, before: int | None, *, stderr: bool = True) -> None:
    """Write the report of a run that has ended, on rank 0, and print the report's path.

    If the metrics equal `before`, the run took no step, and its report has nothing new. A report
    that cannot be written does not fail the run.
    """
    launch, folder = launch_env(), folder.expanduser()
    if launch is not None and launch.rank:
        return
    try:
        if metrics_sum(folder) == before:
            return
        print(f"report: {write_report(folder)}", file=sys.stderr if stderr else sys.stdout)
    except FileNotFoundError:
        return  # no step was taken
    except Exception as error:
        print(f"farspan: cannot write the report of this run: {error}", file=sys.stderr)


def merge_and_tell(source: Path, folder: Path, base: str | None) -> None:
    """Merge a run's adapters into its base model, and print the result. Raises typer.Exit if the
    disk is full, and UnsupportedError."""
    try:
        print(merge(source, folder, base).describe())
    except WriteFailed as error:
        print(f"farspan: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error


def push_and_tell(folder: Path, hub: HubConfig) -> None:
    """Upload a run's model, and print its address. Raises typer.Exit if the hub refuses it, and
    UnsupportedError."""
    try:
        refuse_login(hub)
        print(f"uploaded {folder / 'model'} to {push(folder, hub)}")
    except (PushFailed, WriteFailed) as error:
        print(f"farspan: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error


def result_json(result: TrainingResult) -> dict[str, Any]:
    heldout, comparison = result.heldout_loss, result.comparison
    return {
        **({"attention": "sparse"} if result.sparse else {}),
        **({} if result.products is None else {"products": result.products.value}),
        "folder": str(result.folder),
        "step": result.step,
        "steps": result.steps,
        "loss": result.loss,
        "heldout_loss": None if heldout is None else as_json(heldout),
        "skipped": result.skipped,
        **({} if result.stopped is None else {"stopped": result.stopped}),
        **({} if result.best is None else {"best": result.best}),
        **({} if result.uploaded is None else {"uploaded": result.uploaded}),
        "comparison": None if comparison is None else comparison.to_json(),
        "message": result.message,
    }


def model_for(
    source: ModelConfig,
    drawn: bool,
    dtype: str,
    seed: int,
    *,
    zero: bool = False,
    run: RunConfig | None = None,
) -> PreTrainedModel:
    """Return the model to verify, in evaluation mode, where dropout does nothing. For a folder of
    adapters it is the base model with new adapters. Adapter matrices are random unless `zero`,
    because zeros make half of the gradients zero. If `run` resizes the embeddings for added
    tokens, they are resized."""
    source, _ = with_base(source)
    dtype = product_dtype(source, dtype)
    model = load_model(
        **source.origin(),
        weights=Weights.RANDOM if drawn else Weights.SAVED,
        dtype=getattr(torch, dtype),
        seed=seed,
        nf4=source.quantize is not None,
    )
    if run is not None and run.model.resize_embeddings:
        resize_embeddings(model, embedded_rows(resolve(replace(run, parallel=None))), seed)
    lora = source.lora
    if lora is None:
        refuse_whole(model.config)
    else:
        add_adapters(
            model,
            rank=lora.rank,
            alpha=lora.scale(),
            targets=lora.targets,
            seed=seed,
            zero=zero,
        )
    # Some models keep a few parameters in float32 in any dtype.
    return (model.double() if dtype == "float64" else model).eval()


def verify_and_tell(
    model: PreTrainedModel,
    schedule: Schedule,
    attention: SparseConfig | None,
    *,
    batch: int,
    context: int,
    documents: int,
    seed: int,
    notes: Iterable[str],
    in_json: bool,
    products: Products | None = None,
) -> None:
    """Print the notes, verify gradients, and print the result. Raises typer.Exit with the command's
    exit status, and UnsupportedError."""
    run = VerificationRun(batch, context, documents, seed)
    for note in notes:
        print(note, file=sys.stderr if in_json else sys.stdout)
    selector = selector_for(attention, schedule, run.tokens)
    outcome = verify(model, schedule, run, worst=10, selector=selector, products=products)
    if in_json:
        print(json.dumps(outcome.to_json()))
    else:
        show_outcome(outcome)
    raise typer.Exit(0 if outcome.passed else FAILED)


def show_outcome(outcome: Verification) -> None:
    table = Table("parameter", "relative error", "limit", title=FURTHEST)
    for entry in outcome.worst:
        table.add_row(entry.name, f"{entry.error:.2e}", f"{entry.limit:.2e}")
    show(table)
    verdict = "[green]exact[/green]" if outcome.passed else "[red]NOT exact[/red]"
    own = "" if outcome.sparse is None else " as the sparse function, not as dense attention"
    show(
        f"{verdict}{own}: {outcome.checked_parameters} parameters in {outcome.dtype}, worst "
        f"relative error {outcome.max_relative_error:.2e}, loss {outcome.loss_error:.2e}"
    )
    if outcome.float64_error is not None:
        show(
            f"the same schedule in float64: error {outcome.float64_error:.2e}; over all "
            f"parameters, {outcome.rounding_ratio:.2f}x plain autograd's error"
        )
    show(f"limit: {outcome.rule}")
    if outcome.sparse is not None:
        show_approximation(outcome.sparse)
    if (told := outcome.products) is not None:
        show(
            f"APPROXIMATE: with {IN_FP8}\nrelative error against float64: all gradients "
            f"{told.gradient_error:.2e}, loss {told.loss_error:.2e}; of bfloat16 itself: "
            f"{told.own_gradient_error:.2e} and {told.own_loss_error:.2e}"
        )


def show_approximation(result: Approximation) -> None:
    """Print how far sparse gradients are from dense ones, by layer, as in OOMB's figure 7."""
    modules = list(dict.fromkeys(name for errors in result.dense_error.values() for name in errors))
    title = "relative error of gradients against dense attention"
    title = f"APPROXIMATE: {title}" if result.hides else f"nothing is hidden: {title}"
    table = Table("layer", *(Column(name, overflow="fold") for name in modules), title=title)
    for layer, errors in result.dense_error.items():
        table.add_row(layer, *(f"{errors[m]:.1e}" if m in errors else "" for m in modules))
    show(table)
    show(
        f"{sparse_words(result.pages, hides=result.hides)}; {result.selector}\nrelative error "
        f"against dense attention: all gradients {result.gradient_error:.2e}, "
        f"loss {result.loss_error:.2e}"
    )
    if not result.hides:
        show(
            "nothing is hidden at this length, so this is dense attention: give a longer --context "
            "or a smaller budget to see the error"
        )
    show("to find a budget that keeps enough of dense attention on your text: add --text FILE")


# -- farspan verify --text: which budget of pages keeps enough -----------------------------------


def trained_model(
    model: str | None, run: RunConfig | None, dtype: str, seed: int
) -> tuple[PreTrainedModel, str]:
    """Return a model in evaluation mode, and its tokenizer's name: the model of a run file at the
    start of training, or that of a folder or hub name, with adapters. Raises UnsupportedError."""
    if run is None:
        subject = subject_of(str(model), dtype, None)
        return subject.model(torch.device("cpu")), subject.tokenizer
    if run.start is not None:
        raise UnsupportedError(
            f"start: --text does not read the weights of {run.start.path}; give that folder "
            "instead of the run file"
        )
    asked = resolve(run)
    found = model_for(asked.model, False, dtype, seed, zero=True, run=run)
    if asked.start is not None:  # the model's path is a folder of adapters
        copy_adapters(Path(asked.start.path), found, asked)
    return found, str(asked.data.tokenizer)


def compare_and_tell(
    model: PreTrainedModel,
    tokenizer: str,
    texts: Sequence[str],
    schedule: Schedule,
    attention: SparseConfig,
    *,
    batch: int,
    context: int,
    seed: int,
    notes: Iterable[str],
    in_json: bool,
) -> None:
    """Compare selectors and budgets of sparse attention on texts. Print the notes, each one's
    attention mass (the sum of dense attention's softmax weights over visible tokens), and advice.
    Raises UnsupportedError, for example if the texts are too short."""
    for note in notes:
        print(note, file=sys.stderr if in_json else sys.stdout)
    index = index_of(attention)
    ids = tokens_of(texts, load_tokenizer(tokenizer), batch, context)
    tell = partial(print, file=sys.stderr, flush=True)
    whole_tokens(context, schedule)  # before the long work
    tell(f"reading {ids.numel():,} tokens with dense attention")
    masses = kept_masses(model, ids, schedule, seed, index)
    if not in_json:
        show_masses(masses)
    budget = masses.judged()
    where = f"at budget={write_tokens(budget)}"
    losses = sparse_losses(
        model, ids, schedule, budget, seed, index, lambda name: tell(f"loss {where}: {name}")
    )
    if in_json:
        print(json.dumps(masses.to_json() | {"loss_budget": budget, "losses": losses}))
        return
    for line in kept_words(masses, budget, losses):
        show(line)


def index_and_tell(
    model: PreTrainedModel,
    tokenizer: str,
    texts: Sequence[str],
    folder: Path,
    dim: int,
    tokens: int,
    context: int,
) -> None:
    """Make an index of pages, write it to a folder and print how to use it. Raises typer.Exit if
    the disk is full, and UnsupportedError."""
    ids = tokens_of(texts, load_tokenizer(tokenizer), 1, tokens, fixed=True)
    index = principal_index(model, ids, dim, context)
    try:
        index.save(folder)
    except WriteFailed as error:
        print(f"farspan: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    own = "" if dim == Sparse().index_dim else f", index_dim: {dim}"
    print(
        f"{folder}: an index of {index.dim} dims for sequences of up to {context:,} tokens\n"
        f"to train with it, in a run file: sparse: {{selector: index, index: {folder}{own}}}"
    )


def tokens_of(
    texts: Sequence[str], tokenizer: Tokenizer, rows: int, context: int, *, fixed: bool = False
) -> Tensor:
    """Return the first tokens of the joined texts, [rows, context]. Raises UnsupportedError if
    there are too few, and suggests a shorter context unless it is `fixed`."""
    found: list[np.ndarray] = []
    files = list(dict.fromkeys(path for text in texts for path in find_files(text, "--text")))
    for path in files:
        found += tokenizer.encode([decode(read_bytes(path), path, line=1)])
        if sum(map(len, found)) >= rows * context:
            break
    ids = np.concatenate(found)
    if len(ids) < rows * context:
        shorter = "" if fixed else f", or a --context of at most {len(ids) // rows}"
        raise UnsupportedError(
            f"--text: has {len(ids):,} tokens, fewer than the required {rows * context:,}; "
            f"give more text{shorter}"
        )
    return torch.from_numpy(ids[: rows * context].astype(np.int64)).view(rows, context)


def show_masses(masses: KeptMass) -> None:
    """Print a table of the attention mass (the sum of dense attention's softmax weights over the
    visible tokens) of each selector and budget."""
    columns = [name for chooser in masses.names for name in (chooser, "worst (layer)")]
    title = (
        f"attention mass seen by {masses.queries:,} queries of the last chunk, "
        f"{write_tokens(masses.own)} of {masses.tokens:,} tokens"
    )
    table = lines_table(title, "budget", "pages", *columns)
    for place, budget in enumerate(masses.budgets):
        cells = []
        for name in masses.names:
            least, layer = masses.worst(name, place)
            cells += [f"{masses.mean(name, place):.3f}", f"{least:.3f} ({layer})"]
        table.add_row(write_tokens(budget), f"{budget // masses.sparse.page:,}", *cells)
    show(table)


def kept_words(masses: KeptMass, budget: int, losses: dict[str, float]) -> list[str]:
    """Return conclusions from the table of `show_masses`, a sentence per line, and the options that
    they recommend. `losses` has the model's loss at `budget` for each selector."""
    lines = [_in_the_whole_model(masses), _in_every_layer(masses)]
    if masses.others:
        lines.append(
            f"{masses.others} other layers have a window or no attention: sparse attention does "
            "not change them"
        )
    dense = masses.dense_loss
    by_name = ", ".join(
        f"{_chooser(n)} {loss:.4f} ({loss - dense:+.4f})" for n, loss in losses.items()
    )
    lines.append(
        f"loss of the last {masses.tokens // LAST:,} tokens: dense {dense:.4f}; at "
        f"budget={write_tokens(budget)} in all layers and for all tokens: {by_name}"
    )
    return [*lines, *_what_to_type(masses)]


def _in_the_whole_model(masses: KeptMass) -> str:
    name, everything = masses.best(), masses.budgets[-1]
    budget, where = masses.enough(name), "in the whole model (the mean over its layers)"
    if budget == 0:
        return (
            f"without any page, sparse attention sees {masses.mean(name, 0):.3f} of dense "
            f"attention {where}: sinks, recent tokens and the chunk's own are enough for {ENOUGH}"
        )
    others = ", ".join(
        f"{_chooser(other)} {_need(masses, masses.enough(other), '')}"
        for other in masses.names
        if other != name
    )
    if budget == everything:
        return (
            f"no selector keeps {ENOUGH} of dense attention {where} with fewer than all "
            f"{masses.pages:,} pages: attention is spread over the whole text"
        )
    return (
        f"{name} keeps {ENOUGH} of dense attention {where} with {_need(masses, budget)}, "
        f"{budget // masses.sparse.page:,} of {masses.pages:,} pages; others need: {others}"
    )


def _in_every_layer(masses: KeptMass) -> str:
    name = masses.best()
    budget, layer = masses.enough_everywhere(name)
    if budget == 0:
        return f"this holds in every layer; layer {layer} sees the least attention"
    return f"layer {layer} needs the most pages: {_need(masses, budget)} with {name}"


def _what_to_type(masses: KeptMass) -> list[str]:
    advised, sparse = masses.advised(), masses.sparse
    if advised is None:
        page, recent = max(1, sparse.page // 2), 2 * sparse.recent or sparse.page
        more = replace(sparse, page=page, recent=recent, budget=page * (Sparse().budget // page))
        fields = write_sparse(more, named=("page", "recent"))
        return [
            f"try again with smaller pages and more recent tokens (--sparse {fields}), or train "
            "with dense attention (--sparse off)"
        ]
    lines = [f"to train with this: --sparse {write_sparse(advised)}"]
    every = masses.enough_everywhere(masses.best())[0]
    if advised.budget < every < masses.budgets[-1]:
        lines.append(
            f"to do so in every layer: --sparse {write_sparse(replace(advised, budget=every))}"
        )
    lines.append(
        f"this holds for {write_tokens(masses.tokens)} tokens; longer sequences have more pages to "
        "choose from, so use the --context that you train with"
    )
    return lines


def _need(masses: KeptMass, budget: int, before: str = "budget=") -> str:
    return "all pages" if budget == masses.budgets[-1] else f"{before}{write_tokens(budget)}"


def _chooser(name: str) -> str:
    return "random pages" if name == RANDOM else name


# -- farspan memory trace: a step's allocations, without a GPU --------------------------------

trace_app = typer_app()

NOTHING = "none"

Model = Annotated[
    str | None,
    typer.Option(
        help=f"Folder, config.json, hub name (its configuration only), or a preset: {MODELS}."
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        help=f"For plain Hugging Face training: {', '.join(Checkpointing)}. For farspan's cells: "
        f"{', '.join(STRATEGIES)}; write {OWN} before a name that both have."
    ),
]


@trace_app.command("trace")
def trace_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    model: Model = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a sequence: 64K, 1M.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens of each step, in order: 64K,48K.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    layers: Annotated[int | None, typer.Option(help="Trace only the first N layers.")] = None,
    strategy: Strategy = Checkpointing.PLAIN,
    lora: Annotated[
        int, typer.Option(min=0, max=2**16, help="Rank of adapters; 0 trains all weights.")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp32 or fp64.")] = "bf16",
    weights: Annotated[bool, typer.Option(help="Include weights and optimizer states.")] = True,
    temporaries: Annotated[
        str,
        typer.Option(
            help=f"Internal memory of CUDA kernels to include: any of {','.join(Temporary)}, or "
            f"{NOTHING}."
        ),
    ] = ",".join(Temporary),
    record: Annotated[
        Path | None,
        typer.Option(help="A Python program to run on this GPU and record."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the recorded program, after --.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write the allocations and releases of a training step; needs no GPU."""
    began = time.monotonic()
    refuse_two_subjects(model, record, arguments)
    request = None
    if model is not None:
        request = TraceRequest(
            model=model,
            contexts=read_contexts(context, contexts, steps),
            layers=layers,
            strategy=strategy,
            rank=lora,
            batch=batch,
            dtype=dtype,
            recording=Recording(read_temporaries(temporaries), lasting=weights),
            measuring=measuring,
        )
    with allocator_package() as package:
        if request is None:
            found = package.record_script(record, arguments or ())
        else:
            made = request.trace()
            found = package.from_events(made.events, made.name)
        load("farspan_memory.cli", "write_and_tell")(found, output, began, as_json)


def refuse_two_subjects(
    model: str | None, record: Path | None, arguments: list[str] | None
) -> None:
    """Raise UnsupportedError unless the user gives either a model or a program. Only a program may
    have arguments."""
    if record is not None and model is not None:
        raise UnsupportedError("record: records a program, not a model; leave out --model")
    if record is None and model is None:
        raise UnsupportedError("model: give --model MODEL, or --record PROGRAM")
    if record is None and arguments:
        raise UnsupportedError(
            f"arguments: {arguments[0]!r} is for a program; add --record PROGRAM, or leave it out"
        )


def read_contexts(context: str | None, contexts: str | None, steps: int | None) -> tuple[int, ...]:
    """Return the number of tokens of each step; lengths repeat if there are more steps."""
    if (context is None) == (contexts is None):
        raise UnsupportedError(
            "context: give either --context, or --contexts with the length of each step"
        )
    texts = [context or ""] if contexts is None else contexts.split(",")
    lengths = [read_tokens(text.strip(), "context") for text in texts]
    return tuple(lengths[step % len(lengths)] for step in range(steps or len(lengths)))


def read_temporaries(text: str) -> Temporaries:
    """Parse the names of kinds of temporary tensors. Raises UnsupportedError for unknown names."""
    names = [] if text == NOTHING else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in tuple(Temporary):
            known = ", ".join((*Temporary, NOTHING))
            raise UnsupportedError(f"temporaries: {name!r} is not known; expected any of {known}")
    return Temporaries(frozenset(map(Temporary, names)))
