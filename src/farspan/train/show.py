"""What a run file's data become, before a model is there."""

from collections.abc import Iterator
from dataclasses import replace

from farspan.data.corpus import open_corpus
from farspan.data.show import show_sequence
from farspan.data.tokenizers import load_tokenizer
from farspan.spec import Refused
from farspan.train.config import RunConfig
from farspan.train.setup import resolve


def show_data(run: RunConfig, sequence: int, held_out: bool) -> Iterator[str]:
    """Lines about the data and one sequence of them, counted from 0 as it is trained, or of those
    that are held out. Raises Refused."""
    run = resolve(replace(run, parallel=None))
    tokenizer = load_tokenizer(str(run.data.tokenizer), run.model.trust_remote_code)
    corpus = open_corpus(
        run.data, tokenizer, context=run.context, seed=run.seed, watch=lambda *_: None
    )
    packing = corpus.held_out if held_out else corpus.train
    if packing is None:
        raise Refused("held_out: no documents are; set data.held_out, or data.held_out_path")
    count = packing.sequences_per_epoch()
    if held_out and sequence >= count:
        raise Refused(f"sequence: expected one of the {count} that are held out, below {count}")
    yield from corpus.describe(run.context)
    yield f"\nsequence {sequence}{' held out' if held_out else ''}"
    batch = packing.once(sequence) if held_out else packing.batch([sequence])
    yield from show_sequence(batch, tokenizer)
