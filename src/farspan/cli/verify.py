"""`farspan verify`: are the gradients exact?"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from farspan.cli.ending import FAILED, typer_app
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.models.load import load_model
from farspan.plan.strategies import STRATEGIES, strategy
from farspan.spec import Refused, Schedule
from farspan.train.config import AUTO, load_run
from farspan.train.default import default_run

app = typer_app()
RUN_FILES = (".yaml", ".yml")
GROUPED = "grouped"


@app.command("verify")
def verify_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, config.json, hub name or run file (YAML); a folder without weights gets "
            "random ones. Without it: the model of `farspan train`."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    context: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    chunk: Annotated[int | None, typer.Option(help="Tokens a chunk.")] = None,
    groups: Annotated[
        str | None, typer.Option(help="Layers a group, or a list of sizes such as 2,1,1.")
    ] = None,
    strategy_name: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help=f"One of {', '.join(STRATEGIES)}; default: the run's, {GROUPED} where that is "
            f"{AUTO}.",
        ),
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents packed into a row.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw weights although the folder has some.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Compare loss and every gradient with plain full-sequence autograd; exit 1 if they differ."""
    loaded = model_for(model, dtype, seed, random_weights)
    layers = loaded.config.get_text_config().num_hidden_layers
    base, note = base_schedule(model, strategy_name, layers, context)
    schedule = replace_cuts(base, chunk, groups)
    if documents > context:
        raise Refused(f"documents: at most one a token, so at most {context}, got {documents}")
    if note is not None:
        Console(stderr=as_json).print(note)
    outcome = verify(loaded, schedule, VerificationRun(batch, context, documents, seed), worst=10)
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        show(outcome)
    raise typer.Exit(0 if outcome.passed else FAILED)


def base_schedule(
    model: str | None, name: str | None, layers: int, context: int
) -> tuple[Schedule, str | None]:
    """The strategy of the command line; else the schedule of the run file; else grouped. Also what
    the user is to know of it."""
    written = None
    if name is None and model is not None and model.endswith(RUN_FILES):
        written = load_run(Path(model)).schedule
        name = written.strategy
    elif name is None:
        name = GROUPED
    note = None
    if name == AUTO:
        name, note = GROUPED, f"schedule: {GROUPED} stands in for {AUTO}, which needs a machine"
    base = Schedule() if name is None else strategy(name, layers, context)
    return base if written is None else written.apply(base), note


def replace_cuts(schedule: Schedule, chunk: int | None, groups: str | None) -> Schedule:
    """The schedule with the chunk and groups of the command line. Raises Refused."""
    if chunk is not None:
        schedule = replace(schedule, chunk=chunk)
    if groups is not None:
        try:
            sizes = tuple(int(size) for size in groups.split(","))
        except ValueError as error:
            raise Refused(
                f"groups: expected a number such as 4, or a list such as 2,1,1; got {groups!r}"
            ) from error
        schedule = replace(schedule, groups=sizes[0] if len(sizes) == 1 else sizes)
    return schedule


def model_for(model: str | None, dtype: str, seed: int, random_weights: bool) -> PreTrainedModel:
    """The model to verify, in evaluation mode: dropout plays no part in exactness."""
    if dtype not in ("float64", "float32", "bfloat16"):
        raise Refused(f"dtype: expected float64, float32 or bfloat16, got {dtype!r}")
    source: dict[str, Any]
    if model is None or model.endswith(RUN_FILES):
        run = default_run() if model is None else load_run(Path(model))
        source = {
            "path": run.model.path,
            "config": run.model.config,
            "overrides": run.model.overrides,
        }
    else:
        source = {"path": model, "random_weights": random_weights or not has_weights(model)}
    return load_model(**source, dtype=getattr(torch, dtype), seed=seed).eval()


def has_weights(path: str) -> bool:
    """Does this local folder hold weights, of whatever format? A hub name is taken to."""
    folder = Path(path)
    return not folder.exists() or any([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def show(outcome: Verification) -> None:
    """Print a verification for a person."""
    console = Console()
    table = Table("parameter", "relative error", "limit", title="worst parameters")
    for entry in outcome.worst:
        table.add_row(entry.name, f"{entry.error:.2e}", f"{entry.limit:.2e}")
    console.print(table)
    verdict = "[green]exact[/green]" if outcome.passed else "[red]NOT exact[/red]"
    console.print(
        f"{verdict}: {outcome.checked_parameters} parameters in {outcome.dtype}, worst relative "
        f"error {outcome.max_relative_error:.2e}, loss {outcome.loss_error:.2e}\n{outcome.rule}"
    )
