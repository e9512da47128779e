"""`farspan data`."""

from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.ending import typer_app
from farspan.data.corpus import open_corpus
from farspan.data.show import show_sequence
from farspan.data.tokenizers import load_tokenizer
from farspan.spec import Refused
from farspan.train.config import load_run
from farspan.train.setup import resolve

app = typer_app()


@app.command("data")
def data_command(
    run: Annotated[Path, typer.Argument(help="Run file (YAML).")],
    sequence: Annotated[int, typer.Option(min=0, help="Which, counted from 0 as it trains.")] = 0,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Of those that are evaluated on.")
    ] = False,
) -> None:
    """Show a run file's sequences: which documents, and which of their tokens are trained."""
    chosen = resolve(load_run(run))
    tokenizer = load_tokenizer(str(chosen.data.tokenizer), chosen.model.trust_remote_code)
    corpus = open_corpus(
        chosen.data, tokenizer, context=chosen.context, seed=chosen.seed, watch=lambda *_: None
    )
    for line in corpus.describe(chosen.context):
        print(line)
    packing = corpus.train
    if held_out:
        if corpus.held_out is None:
            raise Refused("--held-out: none are; set data.held_out, or data.held_out_path")
        packing = corpus.held_out
        if sequence >= packing.sequences_per_epoch():
            raise Refused(f"--sequence: expected one below {packing.sequences_per_epoch()}")
    batch = packing.once(sequence) if held_out else packing.batch([sequence])
    print(f"\nsequence {sequence}{' held out' if held_out else ''}")
    for line in show_sequence(batch, tokenizer):
        print(line)
