"""What `farspan train` does once it knows what is asked: trains, and tells how it ended."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from farspan.cli.ending import FAILED, USAGE
from farspan.distributed.failure import RankFailed, is_shared
from farspan.durable import WriteFailed
from farspan.spec import Refused
from farspan.train.config import RunConfig
from farspan.train.console import make_reporter
from farspan.train.run_folder import Diverged, as_json
from farspan.train.trainer import TrainingResult, train


def train_and_tell(run: RunConfig, notes: Sequence[str], *, in_json: bool) -> None:
    """Trains and prints the result. Raises typer.Exit with the command's exit code, and Refused."""
    try:
        result = train(run, reporter=make_reporter(Console(stderr=in_json)), notes=notes)
    except (WriteFailed, Diverged, RankFailed) as error:
        if not is_shared(error):
            print(f"farspan: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except Refused as error:
        if is_shared(error):
            raise typer.Exit(USAGE) from error
        raise
    if not result.leads:
        pass
    elif in_json:
        print(json.dumps(result_json(result)))
    else:
        print(result.message)
    raise typer.Exit(result.exit_code)


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
