"""What `farspan train` and `farspan verify` do once they know what is asked: this needs torch."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedModel

from farspan.cli import FAILED, USAGE
from farspan.distributed.failure import RankFailed, is_shared
from farspan.durable import WriteFailed
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.formatting import sparse_words
from farspan.hf.load import Weights, add_adapters, load_model
from farspan.hf.merge import merge
from farspan.hf.quantized import is_quantized_folder, refuse_whole
from farspan.report.tables import show
from farspan.sparse.train import fraction_of
from farspan.sparse.verify import Approximation
from farspan.spec import Schedule, UnsupportedError
from farspan.train.config import ModelConfig, RunConfig, SparseConfig
from farspan.train.console import make_reporter
from farspan.train.origin import with_base
from farspan.train.run_folder import as_json
from farspan.train.step_runner import TrainingResult
from farspan.train.trainer import Diverged, train

FURTHEST = "gradients furthest from plain autograd's"


def train_and_tell(run: RunConfig, notes: Sequence[str], *, in_json: bool) -> None:
    """Trains and prints the result. Raises typer.Exit with the command's exit code, and
    UnsupportedError."""
    try:
        result = train(run, reporter=make_reporter(Console(stderr=in_json)), notes=notes)
    except (WriteFailed, Diverged, RankFailed) as error:
        if not is_shared(error):
            print(f"farspan: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except UnsupportedError as error:
        if is_shared(error):
            raise typer.Exit(USAGE) from error
        raise
    if result.leads:
        print(json.dumps(result_json(result)) if in_json else result.message)
    raise typer.Exit(result.exit_code)


def merge_and_tell(source: Path, folder: Path, base: str | None) -> None:
    """Merges and says so. Raises typer.Exit where the disk is full, and UnsupportedError."""
    try:
        print(merge(source, folder, base).describe())
    except WriteFailed as error:
        print(f"farspan: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error


def result_json(result: TrainingResult) -> dict[str, Any]:
    """A training result for a program to read."""
    heldout, comparison = result.heldout_loss, result.comparison
    return {
        **({"attention": "sparse"} if result.sparse else {}),
        "folder": str(result.folder),
        "step": result.step,
        "steps": result.steps,
        "loss": result.loss,
        "heldout_loss": None if heldout is None else as_json(heldout),
        "skipped": result.skipped,
        "comparison": None if comparison is None else comparison.to_json(),
        "message": result.message,
    }


def model_for(source: ModelConfig, drawn: bool, dtype: str, seed: int) -> PreTrainedModel:
    """The model to verify, in evaluation mode: dropout plays no part in exactness. Adapters are
    drawn whole: of zeros half of their gradients would be zeros. For a folder of adapters: the
    model that they are for, with such. Quantised weights are in float32 where float64 is asked
    for."""
    source, _ = with_base(source)
    if dtype == "float64" and (source.quantize or is_quantized_folder(source.path)):
        dtype = "float32"  # packed weights have no products in float64
    model = load_model(
        path=source.path,
        config=source.config,
        overrides=source.overrides,
        weights=Weights.RANDOM if drawn else Weights.SAVED,
        dtype=getattr(torch, dtype),
        seed=seed,
        trust_remote_code=source.trust_remote_code,
        revision=source.revision,
        nf4=source.quantize is not None,
    )
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
            zero=False,
        )
    # Some families keep a few parameters in float32, whatever is asked for.
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
) -> None:
    """Prints the notes, verifies and prints the outcome. Raises typer.Exit with the command's exit
    code, and UnsupportedError."""
    run = VerificationRun(batch, context, documents, seed)
    for note in notes:
        print(note, file=sys.stderr if in_json else sys.stdout)
    selector = fraction_of(attention, schedule, run.tokens)
    outcome = verify(model, schedule, run, worst=10, selector=selector)
    if in_json:
        print(json.dumps(outcome.to_json()))
    else:
        show_outcome(outcome)
    raise typer.Exit(0 if outcome.passed else FAILED)


def show_outcome(outcome: Verification) -> None:
    """Print a verification for a person."""
    table = Table("parameter", "relative error", "limit", title=FURTHEST)
    for entry in outcome.worst:
        table.add_row(entry.name, f"{entry.error:.2e}", f"{entry.limit:.2e}")
    show(table)
    verdict = "[green]exact[/green]" if outcome.passed else "[red]NOT exact[/red]"
    own = "" if outcome.sparse is None else " for sparse attention's own function"
    show(
        f"{verdict}{own}: {outcome.checked_parameters} parameters in {outcome.dtype}, worst "
        f"relative error {outcome.max_relative_error:.2e}, loss {outcome.loss_error:.2e}"
    )
    if outcome.float64_error is not None:
        show(
            f"the same schedule in float64: {outcome.float64_error:.2e}; over all parameters "
            f"{outcome.rounding_ratio:.2f}x plain autograd's error"
        )
    show(f"limit: {outcome.rule}")
    if outcome.sparse is not None:
        show_approximation(outcome.sparse)


def show_approximation(found: Approximation) -> None:
    """Print how far a sparse step is from dense attention, layer by layer (OOMB's figure 7)."""
    modules = list(dict.fromkeys(name for errors in found.dense_error.values() for name in errors))
    title = "relative error of gradients against dense attention"
    title = f"APPROXIMATE: {title}" if found.hides else f"nothing is hidden: {title}"
    table = Table("layer", *(Column(name, overflow="fold") for name in modules), title=title)
    for layer, errors in found.dense_error.items():
        table.add_row(layer, *(f"{errors[m]:.1e}" if m in errors else "" for m in modules))
    show(table)
    show(
        f"{sparse_words(found.pages, hides=found.hides)}; {found.selector}\n"
        f"against dense attention: all gradients {found.gradient_error:.2e}, loss "
        f"{found.loss_error:.2e}"
    )
    if not found.hides:
        show(
            "nothing is hidden at this length, so this is dense attention: give a longer --context "
            "or a smaller budget to see what it costs"
        )
