"""Text, prompts with completions, instructions and tokens: forms of records without messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from farspan.data.tokenizers import Document, Encoded, Written
from farspan.spec import UnsupportedError

INPUT_IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
UNTRAINED = -100  # label of a token that no loss is of, as everywhere in Hugging Face


@dataclass(frozen=True, slots=True)
class TextForm:
    """One field of text, all of which is trained."""

    field: str

    optional: ClassVar[tuple[str, ...]] = ()
    masked: ClassVar[bool] = False
    any_ids: ClassVar[bool] = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    def key(self, column: str) -> str:  # noqa: ARG002 - there is one
        return "data.field"

    def listing(self) -> list[object]:
        return ["text", self.field]

    def read(self, document: Document) -> Written | None:
        text = text_of(document, self.field, self.key(self.field))
        return Written(text) if text.strip() else None


@dataclass(frozen=True, slots=True)
class PromptForm:
    """A text and how it goes on; the prompt is trained only where `everything` is."""

    prompt: str
    completion: str
    everything: bool

    optional: ClassVar[tuple[str, ...]] = ()
    any_ids: ClassVar[bool] = False

    @property
    def masked(self) -> bool:
        return not self.everything

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.completion

    def key(self, column: str) -> str:
        return "data.prompt" if column == self.prompt else "data.completion"

    def listing(self) -> list[object]:
        return ["prompt", self.prompt, self.completion, self.everything]

    def read(self, document: Document) -> Written | None:
        prompt = text_of(document, self.prompt, self.key(self.prompt))
        text = prompt + text_of(document, self.completion, self.key(self.completion))
        if not text.strip():
            return None
        return Written(text, None if self.everything else ((len(prompt), len(text)),))


INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
# Of Stanford Alpaca's train.py, to the letter.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_NOT_ALPACA = ("system", "history")  # that others have added to its records


@dataclass(frozen=True, slots=True)
class AlpacaForm:
    """An instruction, an input where there is one, and the output, in the words of Stanford Alpaca;
    these are trained only where `everything` is."""

    everything: bool

    columns: ClassVar[tuple[str, ...]] = (INSTRUCTION, OUTPUT)
    optional: ClassVar[tuple[str, ...]] = (INPUT, *_NOT_ALPACA)
    any_ids: ClassVar[bool] = False

    @property
    def masked(self) -> bool:
        return not self.everything

    def key(self, column: str) -> str:  # noqa: ARG002 - all have the names that they are known by
        return "data.format"

    def listing(self) -> list[object]:
        return ["alpaca", self.everything]

    def read(self, document: Document) -> Written | None:
        for other in _NOT_ALPACA:
            if document.fields.get(other):
                raise UnsupportedError(
                    f"{document.place}: field {other!r} is not part of Alpaca's prompt; leave it "
                    "out, or write the record as a chat"
                )
        output = text_of(document, OUTPUT, self.key(OUTPUT))
        fields = {INSTRUCTION: text_of(document, INSTRUCTION, self.key(INSTRUCTION))}
        if document.fields.get(INPUT):
            fields[INPUT] = text_of(document, INPUT, self.key(INPUT))
        if not output.strip() and not "".join(fields.values()).strip():
            return None
        prompt = (_ALPACA_WITH_INPUT if INPUT in fields else _ALPACA).format(**fields)
        whole = prompt + output
        return Written(whole, None if self.everything else ((len(prompt), len(whole)),))


@dataclass(frozen=True, slots=True)
class TokensForm:
    """Token ids as they are and, where there are any, labels: the same ids, or -100. What an
    attention_mask has zeros for, at either end, is padding and no part of the document."""

    columns: ClassVar[tuple[str, ...]] = (INPUT_IDS,)
    optional: ClassVar[tuple[str, ...]] = (LABELS, MASK)
    masked: ClassVar[bool] = True
    any_ids: ClassVar[bool] = True

    def key(self, column: str) -> str:  # noqa: ARG002 - all have the names that trainers expect
        return "data.format"

    def listing(self) -> list[object]:
        return ["tokens", *self.columns, *self.optional]

    def read(self, document: Document) -> Encoded | None:
        ids = _whole_numbers(document, INPUT_IDS)
        labels = ids
        if document.fields.get(LABELS) is not None:
            labels = _whole_numbers(document, LABELS)
        if len(labels) != len(ids):
            raise UnsupportedError(
                f"{document.place}: {len(labels)} labels for {len(ids)} input_ids; give one for "
                "each"
            )
        if document.fields.get(MASK) is not None:
            own = _own(document, len(ids))
            ids, labels = ids[own], labels[own]
        if len(ids) == 0:
            return None
        if ids.min() < 0:
            raise UnsupportedError(
                f"{document.place}: field 'input_ids' has a negative id, {ids.min()}"
            )
        if ids.max() >= 1 << 32:
            raise UnsupportedError(
                f"{document.place}: field 'input_ids' has an id of {ids.max()}, expected ids "
                "below 2**32"
            )
        trained = labels != UNTRAINED
        if bool((labels[trained] != ids[trained]).any()):
            raise UnsupportedError(
                f"{document.place}: field 'labels' differs from input_ids; each label is the id "
                "at the same place, unshifted, or -100 if it is not trained"
            )
        return Encoded(ids, trained)


def field_of(document: Document, field: str, key: str) -> Any:
    """What a record has under `field`; `key` of the run file would say another. Raises
    UnsupportedError."""
    if field not in document.fields:
        raise UnsupportedError(
            f"{document.place} has no field {field!r} (it has: {', '.join(document.fields)}); "
            f"add it, or set {key}"
        )
    return document.fields[field]


def text_of(document: Document, field: str, key: str) -> str:
    """Raises UnsupportedError where it is none, or none that can be encoded."""
    text = field_of(document, field, key)
    if not isinstance(text, str):
        raise UnsupportedError(
            f"{document.place}: field {field!r} holds {type(text).__name__}, expected text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as an escape
        raise UnsupportedError(
            f"{document.place}: field {field!r} is not valid Unicode: {error.reason}"
        ) from error
    return text


def _own(document: Document, tokens: int) -> slice:
    """The tokens between the padding at either end."""
    mask = _whole_numbers(document, MASK)
    if len(mask) != tokens:
        raise UnsupportedError(
            f"{document.place}: attention_mask has {len(mask)} entries for {tokens} input_ids; "
            "give one for each"
        )
    if not np.isin(mask, (0, 1)).all():
        raise UnsupportedError(
            f"{document.place}: field 'attention_mask' has values other than 0 (padding) and 1; "
            "give "
            "each document a row of its own, without padding"
        )
    read = np.flatnonzero(mask)
    if len(read) == 0:
        return slice(0)
    begin, end = int(read[0]), int(read[-1]) + 1
    if len(read) != end - begin:
        raise UnsupportedError(
            f"{document.place}: field 'attention_mask' has 0 between tokens of 1; padding is at "
            "the ends: give tokens that are read and not trained a label of -100 instead"
        )
    return slice(begin, end)


def _whole_numbers(document: Document, field: str) -> np.ndarray:
    given = field_of(document, field, "data.format")
    if isinstance(given, Sequence) and all(type(number) is int for number in given):
        try:
            return np.asarray(given, dtype=np.int64)
        except OverflowError:
            pass
    raise UnsupportedError(f"{document.place}: field {field!r}: expected a list of whole numbers")
