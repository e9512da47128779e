"""The trained model as a folder that `from_pretrained` reads; its source is named in it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging

from farspan.checkpoint.local import manifest_path
from farspan.data.tokenizers import Tokenizer, reads_back
from farspan.durable import PARTIAL, digest, publish, read_json, write_bytes, writing
from farspan.train.config import RunConfig

# Beside the weights: the SHA-256 of the manifest, and so of every file, of a checkpoint, and how it
# was trained. A folder without it, or with another one, is not the result of this run: replaced.
SOURCE = "farspan.json"


def base_of(run: RunConfig) -> dict[str, Any]:
    """What a folder of adapters says of the model they are for, where that is not the one of
    model.path: peft would lay them beside another rope, say, without a word."""
    if run.model.lora is None or not run.model.overrides:
        return {}
    return {"overrides": json.loads(json.dumps(run.model.overrides))}


def source_of(checkpoint: Path, marks: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder says that was made of a checkpoint."""
    return {
        **marks,
        "checkpoint": checkpoint.name,
        "manifest_sha256": digest(manifest_path(checkpoint)),
    }


def is_exported(checkpoint: Path, folder: Path, marks: Mapping[str, Any]) -> bool:
    """Whether `folder` was made of this very checkpoint."""
    return read_json(folder / SOURCE) == source_of(checkpoint, marks)


def export(
    model: Any,
    tokenizer: Tokenizer,
    checkpoint: Path,
    folder: Path,
    note: Callable[[str], None],
    marks: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes `folder`, which `from_pretrained` reads, unless it was made of this very checkpoint.
    `marks` are what a reader is to know of how it was trained; `weights` are the whole ones of a
    model that is dealt over ranks. Raises WriteFailed."""
    if is_exported(checkpoint, folder, marks):
        return
    source = source_of(checkpoint, marks)
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    with writing(partial), _without_bars():
        model.save_pretrained(partial, **({} if weights is None else {"state_dict": weights}))
        tokenizer.save(partial)
        write_bytes(partial / SOURCE, json.dumps(source).encode("utf-8"))
    publish(partial, folder)
    if "overrides" in marks:
        note(
            f"note: the adapters in {folder} are for a model with {', '.join(marks['overrides'])} "
            f"of model.overrides: load it with these ({SOURCE} has them), then the adapters"
        )
    if not reads_back(tokenizer, folder):
        note(
            f"warning: for this model type transformers reads the tokenizer in {folder} as another "
            "one; load it with PreTrainedTokenizerFast, or from where the run has it"
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers' own progress bars would tear ours apart."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
