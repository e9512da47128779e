"""`farspan verify`: check that gradients are exact, and find out how many pages sparse attention
needs; and `farspan index`, which makes the index that chooses pages. Both read their request
without torch, so that mistakes in a run file are reported at once."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from farspan.cli import RUN_FILES, Settings, typer_app
from farspan.cli.train import default_run
from farspan.formatting import EXAMPLE, OFF, ON, read_sparse, read_tokens
from farspan.lazy import load
from farspan.profile.catalog import split_revision
from farspan.program.strategies import AUTO, GROUPED, STRATEGIES, strategy
from farspan.spec import SHORT_NAMES, Products, Schedule, Sparse, UnsupportedError
from farspan.train.config import ModelConfig, RunConfig, SparseConfig, load_run

app = typer_app()

EXACT, TEXT = ("float64", 512), ("float32", 4096)  # dtype and context, if not given
DTypeName = Annotated[
    str | None,
    typer.Option(
        help="float64, float32 or bfloat16; or fp64, fp32, bf16. Default: float64; with --text, "
        "float32."
    ),
]
Context = Annotated[
    str | None,
    typer.Option("--context", help="Tokens per sequence: 512, 8K. Default: 512; with --text, 4K."),
]
SparseFields = Annotated[
    str | None,
    typer.Option(
        help=f"Page-sparse attention: {ON}, {OFF} or fields such as {EXAMPLE}; default: the run's. "
        "Also prints its error against dense attention."
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A file, a folder or a glob of text files. Instead of gradients, find the selector "
        "and the page budget that keep 0.9 of dense attention in the first --context tokens.",
    ),
]
Chunk = Annotated[str | None, typer.Option("--chunk", help="Tokens per chunk: 128, 2K.")]
StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help=f"One of {', '.join(STRATEGIES)}; default: the run's, or {GROUPED} for {AUTO}.",
    ),
]


@app.command("verify")
def verify_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, config.json, hub name (also NAME@REVISION) or run file (YAML; shows its "
            "data); a folder without weights gets random ones. Default: `farspan train`'s model."
        ),
    ] = None,
    dtype: DTypeName = None,
    context_text: Context = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    chunk_text: Chunk = None,
    groups: Annotated[
        str | None, typer.Option(help="Layers per group, or a list of group sizes such as 2,1,1.")
    ] = None,
    strategy_name: StrategyName = None,
    sparse: SparseFields = None,
    texts: Texts = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents packed into a row.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights even if the folder has some.")
    ] = False,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Compare loss and every gradient with plain full-sequence autograd; exit 1 if they differ.

    With --text: find a page-sparse selector and budget that keep enough of dense attention.
    """
    usual_dtype, usual_context = TEXT if texts else EXACT
    context = read_tokens(context_text or usual_context, "context")
    chunk = None if chunk_text is None else read_tokens(chunk_text, "chunk")
    run = run_of(model, settings or ())
    attention = attention_for(run, sparse)
    dtype = checked_dtype(dtype or usual_dtype)
    if documents > context:
        raise UnsupportedError(
            f"documents: {documents} do not fit into {context} tokens; give at most {context}"
        )
    if texts:
        attention = compared(attention, sparse, context, documents)
        own = default_run() if model is None else run
        loaded, words = load("farspan.cli.with_torch", "trained_model")(model, own, dtype, seed)
    else:
        source, drawn = source_of(model, run, random_weights)
        loaded = load("farspan.cli.with_torch", "model_for")(source, drawn, dtype, seed, run=run)
    layers = loaded.config.get_text_config().num_hidden_layers
    base, note = base_schedule(run, strategy_name, layers, context)
    chosen = chunk is not None or (strategy_name is None and has_chunk(run))
    schedule = replace_attention(replace_cuts(base, chunk, groups), attention, chosen)
    notes = filter(None, (note, ranks_note(run), packed_note(loaded, dtype)))
    said = [*model_notes(loaded, None if texts else run), *notes]
    data = {"batch": batch, "context": context, "seed": seed, "notes": said, "in_json": as_json}
    if texts:
        tell = load("farspan.cli.with_torch", "compare_and_tell")
        tell(loaded, words, texts, schedule, attention, **data)
    else:
        tell = load("farspan.cli.with_torch", "verify_and_tell")
        tell(loaded, schedule, attention, documents=documents, products=products_of(run), **data)


def model_notes(model: Any, run: RunConfig | None) -> list[str]:
    """Return lines about the model's RoPE and longest document and, with a run, the lines that
    `farspan data` prints about its data."""
    positions: list[str] = load("farspan.hf.unsupported", "describe_positions")(model)
    data = [] if run is None else load("farspan.train.setup", "glance_at_data")(run)
    return [*positions, *(line for line in data if line not in positions)]


index_app = typer_app()

READ = 1024  # tokens; an index from them was measured to be good


@index_app.command("index")
def index_command(
    model: Annotated[
        str, typer.Argument(help="Folder, hub name (also NAME@REVISION) or run file (YAML).")
    ],
    texts: Annotated[
        list[str],
        typer.Option("--text", help="A file, a folder or a glob of text files to read."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write. Default: the run's sparse.index."),
    ] = None,
    context_text: Annotated[
        str | None,
        typer.Option("--context", help="Longest document to train: 128K. Default: the run's."),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(min=1, help=f"Dims of keys. Default: the run's, or {Sparse().index_dim}."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    settings: Settings = None,
) -> None:
    """Train on a text the index by which sparse attention, `selector: index`, chooses pages.

    The text's first 1,024 tokens are read at several places of the context; the model is unchanged.
    """
    run = run_of(model, settings or ())
    given = (None if run is None else run.sparse) or SparseConfig()
    folder = output or (given.index and Path(given.index))
    if not folder:
        raise UnsupportedError("output: missing; give --output FOLDER")
    folder = folder.expanduser()
    if os.path.lexists(folder):
        raise UnsupportedError(f"output: {folder} exists already; name a new folder")
    longest = context_text or (None if run is None else run.context)
    if longest is None:
        raise UnsupportedError("context: missing; give --context LENGTH, such as 128K")
    context = read_tokens(longest, "context")
    dtype, seed = checked_dtype(dtype), 0 if run is None else run.seed
    loaded, words = load("farspan.cli.with_torch", "trained_model")(model, run, dtype, seed)
    if note := packed_note(loaded, dtype):
        print(note)
    make = load("farspan.cli.with_torch", "index_and_tell")
    make(loaded, words, texts, folder, dim or given.index_dim, min(READ, context), context)


def compared(
    attention: SparseConfig | None, text: str | None, context: int, documents: int
) -> SparseConfig:
    """Return the sparse attention whose selectors and budgets are compared: the given one, else one
    that always shows the last eighth of the context (of 32K: 4,096 tokens, as by default). Raises
    UnsupportedError for `documents` above 1, or for dense attention with a text."""
    if documents > 1:
        raise UnsupportedError("documents: --text is read as one document; leave out --documents")
    if attention is None and text is not None:
        raise UnsupportedError(
            f"sparse: {OFF} leaves nothing to compare on --text; leave --sparse out, or give "
            f"fields such as {EXAMPLE}"
        )
    if attention is not None:
        return attention
    page = Sparse().page
    return SparseConfig(recent=context // 8 // page * page)


def has_chunk(run: RunConfig | None) -> bool:
    """Return whether the run file sets the chunk size."""
    return run is not None and run.schedule.chunk is not None


def run_of(model: str | None, settings: Sequence[str]) -> RunConfig | None:
    """Return the run of the run file `model`, changed by the `--set` options `settings`; None if
    `model` is no run file. Raises UnsupportedError for a wrong file, or settings without a file."""
    if model is not None and model.endswith(RUN_FILES):
        return load_run(Path(model), settings)
    if settings:
        raise UnsupportedError(f"--set {settings[0]}: needs a run file; name one")
    return None


def base_schedule(
    run: RunConfig | None, name: str | None, layers: int, context: int
) -> tuple[Schedule, str | None]:
    """Return the schedule to verify, and a note for the user or None: by the command line's
    strategy, else the run file's schedule, else `grouped`."""
    written = None
    if name is None and run is not None:
        written = run.schedule
        name = written.strategy
    elif name is None:
        name = GROUPED
    note = None
    if name == AUTO:
        name, note = GROUPED, f"schedule: {GROUPED} instead of {AUTO}, which needs a machine"
    base = Schedule() if name is None else strategy(name, layers, context)
    return base if written is None else written.apply(base), note


def replace_cuts(schedule: Schedule, chunk: int | None, groups: str | None) -> Schedule:
    """Return the schedule with the command line's chunk and groups. Raises UnsupportedError."""
    if chunk is not None:
        schedule = replace(schedule, chunk=chunk)
    if groups is not None:
        try:
            sizes = tuple(int(size) for size in groups.split(","))
        except ValueError as error:
            raise UnsupportedError(
                f"groups: expected a number such as 4, or a list such as 2,1,1; got {groups!r}"
            ) from error
        schedule = replace(schedule, groups=sizes[0] if len(sizes) == 1 else sizes)
    return schedule


def attention_for(run: RunConfig | None, text: str | None) -> SparseConfig | None:
    """Return the command line's sparse attention, else the run's; None: dense attention."""
    if text is not None:
        pages, before = read_sparse(text), None if run is None else run.sparse
        if pages is None:
            return None
        return (before or SparseConfig()).over(pages)
    return None if run is None else run.sparse


def products_of(run: RunConfig | None) -> Products | None:
    """Return the run's lower precision of linear products; None if they are exact."""
    return None if run is None else run.kernels.products


def ranks_note(run: RunConfig | None) -> str | None:
    """Return a note, for a run on several ranks, that here one process runs the whole step."""
    if run is None or run.parallel is None:
        return None
    return "parallel: ignored: one process runs the whole step here, not the ranks of the run"


def packed_note(model: Any, dtype: str) -> str | None:
    """Return a note if the model computes in another dtype than the user requested."""
    used = str(model.dtype).removeprefix("torch.")
    where = f"dtype: {used} replaces {dtype}, which quantised weights do not support"
    return None if used == dtype else where


def replace_attention(
    schedule: Schedule, attention: SparseConfig | None, written: bool
) -> Schedule:
    """Return the schedule with this sparse attention. A chunk that the user has set (`written`)
    must be whole pages; other chunks are rounded up to whole pages. Raises UnsupportedError."""
    if attention is None:
        return schedule
    if written:
        return replace(schedule, sparse=attention.spec())
    return schedule.with_sparse(attention.spec())


def checked_dtype(name: str) -> str:
    """Return the full name of a dtype, such as `bfloat16` for `bf16`. Raises UnsupportedError."""
    found = SHORT_NAMES.get(name, name)
    if found not in ("float64", "float32", "bfloat16"):
        raise UnsupportedError(f"dtype: expected float64, float32 or bfloat16, got {found!r}")
    return found


def source_of(
    model: str | None, run: RunConfig | None, random_weights: bool
) -> tuple[ModelConfig, bool]:
    """Return where to load the model to verify, and whether to give it random weights."""
    if run is not None:
        return run.model, False
    if model is None:
        return default_run().model, False
    path, revision = split_revision(model)
    source = ModelConfig(path=path, revision=revision)
    return source, random_weights or not has_weights(path)


def has_weights(path: str) -> bool:
    """Return whether a local folder contains weights in any format; True for names on the hub."""
    folder = Path(path)
    return not folder.exists() or any([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
