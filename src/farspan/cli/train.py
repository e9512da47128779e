"""`farspan train`, `farspan data`, and commands for finished runs such as `farspan report`. They
read run files without torch, so that mistakes are reported at once."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self, TextIO

import typer

from farspan.cli import Settings, typer_app
from farspan.data.config import DataConfig, SourceKind
from farspan.durable import check_place, write_output
from farspan.formatting import EXAMPLE, OFF, ON, fold, read_sparse, write_number
from farspan.lazy import load
from farspan.planner.machines import BUSY_RATES
from farspan.planner.request import SHARE
from farspan.program.strategies import AUTO, STRATEGIES
from farspan.report.run import REPORT, read_run, run_page, runs_json
from farspan.spec import Sparse, UnsupportedError
from farspan.train.config import (
    CheckpointConfig,
    EvaluationConfig,
    HubConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SparseConfig,
    StartConfig,
    built,
    load_run,
)
from farspan.train.yaml_config import to_mapping

app = typer_app()

Start = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Start with the weights of another run, one of its checkpoints, or a folder of "
        "adapters; lr, batch, context and steps still come from the run file.",
    ),
]
WithStates = Annotated[
    bool,
    typer.Option("--with-states", help="Also continue that run's AdamW states and step count."),
]

Margin = Annotated[
    str | None,
    typer.Option(
        help=f"GPU and main memory that --strategy {AUTO} leaves free, if any schedule can: 3GiB, "
        f"5%, 0; default: {SHARE:.0%} of a GPU, minus the part that the machine's reserve covers."
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        help="Write the measured second step here as a trace that ui.perfetto.dev draws; with "
        "several ranks, one file each."
    ),
]


@app.command("train")
def train_command(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run file (YAML). Without one, a small model learns Python."),
    ] = None,
    strategy_name: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help=f"{AUTO}, the fastest that fits this machine, or one of {', '.join(STRATEGIES)}; "
            "replaces the run file's whole schedule.",
        ),
    ] = None,
    sparse: Annotated[
        str | None,
        typer.Option(
            help=f"Page-sparse attention, an approximation: {ON}, {OFF} or fields such as "
            f"{EXAMPLE}; replaces the run file's."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Main memory that a node's ranks may take, such as 64GiB; replaces the run "
            "file's. Default: all that is available."
        ),
    ] = None,
    margin: Margin = None,
    settings: Settings = None,
    start: Start = None,
    with_states: WithStates = False,
    folder: Annotated[Path | None, typer.Option(help="Run folder; an old run resumes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    trace: TraceFile = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model; the same command again resumes from the latest checkpoint."""
    given = settings or ()
    chosen = default_run(given) if run is None else load_run(run, given)
    chosen, notes = override(chosen, strategy_name, folder, steps)
    if with_states and start is None:
        raise UnsupportedError("--with-states: needs a run to continue; name it with --from")
    if start is not None:
        chosen = replace(chosen, start=StartConfig(str(Path(start)), with_states))
    if host_memory is not None:
        chosen = replace(chosen, host_memory=host_memory)
    if margin is not None:
        chosen = replace(chosen, margin=margin)
    if sparse is not None:
        chosen, note = with_sparse(chosen, read_sparse(sparse))
        notes += [] if note is None else [note]
    check_place(trace, "trace")
    load("farspan.cli.with_torch", "train_and_tell")(chosen, notes, trace, in_json=json_wanted)


def override(
    run: RunConfig, strategy_name: str | None, folder: Path | None, steps: int | None
) -> tuple[RunConfig, list[str]]:
    """Return the run with values from the command line, and notes for the user."""
    note = None
    if strategy_name is not None:
        run, note = with_strategy(run, strategy_name)
    if folder is not None:
        run = replace(run, folder=str(folder))
    if steps is not None:
        # A warm-up longer than a short trial is shortened rather than refused.
        warmup = min(run.optimizer.warmup, max(0, steps - 1))
        run = replace(run, steps=steps, optimizer=replace(run.optimizer, warmup=warmup))
    return run, [] if note is None else [note]


data_app = typer_app()


@data_app.command("data")
def data_command(
    run: Annotated[Path, typer.Argument(help="Run file (YAML).")],
    sequence: Annotated[int, typer.Option(min=0, help="Index, from 0 in training order.")] = 0,
    held_out: Annotated[bool, typer.Option("--held-out", help="Show a held-out sequence.")] = False,
    settings: Settings = None,
) -> None:
    """Show a run file's sequences: which documents, and which of their tokens are trained."""
    chosen, given = load_run(run, settings or ()), settings or ()
    named = any(one.partition("=")[0].strip() in ("data.cache", "data") for one in given)
    if run.name == "config.yaml" and chosen.data.cache != DataConfig().cache and not named:
        raise UnsupportedError(
            f"{run}: data.cache: a run folder's config.yaml may not make farspan write to "
            f"{chosen.data.cache}; to allow it, give --set data.cache={chosen.data.cache}, or "
            "another"
        )
    with ReadingLine(sys.stderr) as told:
        lines = list(load("farspan.train.setup", "show_data")(chosen, sequence, held_out, told))
    for line in lines:
        print(line.rstrip())


class MeasuringNotes:
    """Function that says once that this machine is being measured, for up to a minute."""

    def __init__(self) -> None:
        self.words: list[str] = []  # printed with the answer
        self.said = False

    def __call__(self, what: str) -> None:
        if not self.said:
            print(*fold(f"this machine: {what}"), sep="\n", file=sys.stderr)
        self.said = True
        self.words += [what] * (what == BUSY_RATES)


class ReadingLine:
    """Function that shows the progress of reading data, on a terminal in one rewritten line."""

    SECONDS = 1.0  # until the first line

    def __init__(self, out: TextIO) -> None:
        self._out, self._tenths, self._began = out, 0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __call__(self, documents: int, tokens: int, read: Any) -> None:
        """Show the documents and tokens so far, and the share of the data that has been read."""
        counts = (write_number(documents, "document"), write_number(tokens, "token"))
        text = f"tokenizing {read}: {', '.join(counts)}"
        tenths = int(10 * read.fraction())
        if self._out.isatty():
            self._out.write(f"\r{text[:79]}\x1b[K")
            self._out.flush()
        elif tenths != self._tenths and time.monotonic() - self._began >= self.SECONDS:
            print(text, file=self._out, flush=True)
        self._tenths = tenths

    def __exit__(self, *_: object) -> None:
        if self._out.isatty():
            self._out.write("\r\x1b[K")


merge_app = typer_app()


@merge_app.command("merge")
def merge_command(
    run: Annotated[Path, typer.Argument(help="Run folder, or a folder of adapters.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder to write.")],
    base: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of the base model, instead of the adapters' own."),
    ] = None,
) -> None:
    """Merge a run's adapters into their base model; transformers loads the result."""
    load("farspan.cli.with_torch", "merge_and_tell")(run.expanduser(), output.expanduser(), base)


push_app = typer_app()


@push_app.command("push")
def push_command(
    run: Annotated[Path, typer.Argument(help="Run folder whose run has ended.")],
    repo: Annotated[str, typer.Option("--to", metavar="USER/NAME", help="Repository on the hub.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
) -> None:
    """Upload a run's model, with a card that says how it was trained, to the Hugging Face hub."""
    hub = HubConfig(repo, private=not public)
    load("farspan.cli.with_torch", "push_and_tell")(run.expanduser(), hub)


report_app = typer_app()


@report_app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; their runs may be under way.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"The file to write; default: {REPORT} in the run folder; for several runs, here.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the page shows as JSON; write no page.")
    ] = False,
) -> None:
    """Write one HTML page on one or several runs: curves, memory, time, order of the work."""
    read = [read_run(folder) for folder in runs]
    if as_json:
        print(json.dumps(runs_json(read)))
        return
    place = output or (runs[0].expanduser() / REPORT if len(runs) == 1 else Path(REPORT))
    write_output(place.expanduser(), run_page(read), "output")
    print(f"report: {place}")


# -- replacing values of a run file ------------------------------------------------------------


def with_strategy(run: RunConfig, name: str) -> tuple[RunConfig, str | None]:
    """Return the run with strategy `name`, and a note about dropped fields, or None. Of the fields
    of the old schedule, only the tier of weights stays."""
    weights = run.schedule.weights
    dropped = replace(run.schedule, weights=None).given()
    note = None
    if dropped:
        fields_text = ", ".join(f"{key}: {value}" for key, value in to_mapping(dropped).items())
        note = (
            f"schedule: {name} replaces {run.schedule.strategy or 'the written schedule'} and "
            f"drops its {fields_text}"
        )
    return replace(run, schedule=ScheduleConfig(strategy=name, weights=weights)), note


def with_sparse(run: RunConfig, sparse: Sparse | None) -> tuple[RunConfig, str | None]:
    """Return the run with this sparse attention (None: dense), and a note about dropped values, or
    None. The run keeps `warn_below`: it warns if a smaller share of attention is visible."""
    before, note = run.sparse, None
    if sparse is None:
        if before is not None:
            note = "sparse: dense attention replaces the run file's sparse attention"
        return replace(run, sparse=None), note
    before = before or SparseConfig()
    if before.sparsity is not None:
        note = f"sparse: --sparse drops the run file's sparsity: {before.sparsity}"
    return replace(run, sparse=before.over(sparse)), note


# -- without a run file ---------------------------------------------------------------------------

DEFAULT_CONTEXT = 8192


def default_run(settings: Sequence[str] = ()) -> RunConfig:
    """Return the run for use without a run file: a small byte-level model of Qwen2's architecture
    learns Python from the standard library.

    It has four layers with two queries per K,V head, and 8,192 tokens in four chunks and two
    groups.
    """
    model = {
        "model_type": "qwen2",
        "vocab_size": 264,  # 256 bytes and the end token, padded to a multiple of 8
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": DEFAULT_CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
    }
    run = RunConfig(
        model=ModelConfig(config=model),
        data=DataConfig(source=SourceKind.STDLIB, held_out=0.05, tokenizer="bytes"),
        folder="runs/default",
        steps=16,
        context=DEFAULT_CONTEXT,
        schedule=ScheduleConfig(strategy="grouped", chunk=2048),
        optimizer=OptimizerConfig(lr=3e-3, warmup=8),
        evaluation=EvaluationConfig(every=8, sequences=4),
        checkpoints=CheckpointConfig(every=8, keep=2),
    )
    return built(to_mapping(run), settings, "farspan train") if settings else run
