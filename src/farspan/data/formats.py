"""Fields of records: those that each format reads, and the forms of text, Alpaca and tokens.

Every field of a record is read (`READ`), known to be harmless (`is_harmless`), or refused by name.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from farspan.data.config import MOST_QUOTED, DataConfig, Loss, RecordFormat, suffix_of
from farspan.data.tokenizers import TEXT, Document, Encoded, Form, Written
from farspan.formatting import shortened
from farspan.spec import UnsupportedError

INPUT_IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
POSITIONS, LENGTHS, SEQ_IDX, TYPES = "position_ids", "seq_lengths", "seq_idx", "token_type_ids"
LENGTH = "length"
CUMULATIVE = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")
LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
UNTRAINED = -100  # label of a token without a loss, as everywhere in Hugging Face

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
PROMPT, CHOSEN, REJECTED, LABEL = "prompt", "chosen", "rejected", "label"
TOOLS, SYSTEM, TEMPLATE_KWARGS = "tools", "system", "chat_template_kwargs"
TURN_MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")

_BORDER = "borders of documents in a packed row"
_ASKED = {
    TOOLS: "tools that may be called, for a template that names `tools`",
    SYSTEM: "text of a first system message; refused if the messages begin with another one",
    TEMPLATE_KWARGS: "variables for the chat template; one that the template does not name is "
    "refused",
}
_FIRST = {PROMPT: "a text equal to the first message that is not the system's"}
# The fields that each format reads. Those whose names the run file sets (`data.field`,
# `data.prompt`, `data.completion`) appear here by their defaults.
READ: Mapping[str, Mapping[str, str]] = {
    "text": {"text": "the text, trained as a whole"},
    "chat": {"messages": "messages with role and content", **_ASKED, **_FIRST},
    "sharegpt": {"conversations": "messages with from and value", **_ASKED, **_FIRST},
    "alpaca": {
        INSTRUCTION: "in the prompt of Stanford Alpaca",
        INPUT: "in that prompt; may be empty or missing",
        OUTPUT: "the trained text",
    },
    "prompt": {
        PROMPT: "a text, or a list of messages",
        "completion": "like the prompt; its text, or its assistant messages, are trained",
        **{name: f"of messages: {what}" for name, what in _ASKED.items()},
    },
    "tokens": {
        INPUT_IDS: "the ids",
        LABELS: "the id at the same place, unshifted, or -100 if it is not trained",
        MASK: "0 for padding, which is left out; only at the ends",
        **dict.fromkeys(LOSS_MASKS, "1 or true for trained tokens; all given masks must agree"),
        POSITIONS: f"{_BORDER}: from 0, rising by one, from 0 again at each document",
        LENGTHS: f"{_BORDER}: the number of tokens of each document",
        **dict.fromkeys(CUMULATIVE, f"{_BORDER}: 0, then the end of each document"),
        SEQ_IDX: f"{_BORDER}: a number that changes at each document",
        TYPES: "must be all 0",
        LENGTH: "at least the number of ids without padding",
    },
    "preference": {
        CHOSEN: "a text, or a list of messages",
        REJECTED: "the same",
        PROMPT: "like the answers; if they are lists of messages, both may begin with it instead",
        **{name: f"of messages: {what}" for name, what in _ASKED.items()},
    },
    "unpaired": {
        PROMPT: "a text, or a list of messages",
        "completion": "like the prompt: the answer",
        LABEL: "true if the answer is desirable, false if it is not",
        **{name: f"of messages: {what}" for name, what in _ASKED.items()},
    },
}

# Fields of records and messages that describe origin, topic, quality or length. No such field says
# which part is trained, or where it begins (as `prompt_length` does).
_HARMLESS = """
__index_level_0__ id ids uid uuid guid idx index hash hexsha md5 sha sha1 sha256 checksum
source sources origin
dataset dataset_name subset version dump url urls uri link domain
path file file_path file_name filename extension ext size encoding
repo repo_name repository commit license licenses author title model model_name generator
score scores score_chosen score_rejected rating ratings perplexity
timestamp date datetime added created created_at updated_at year language languages language_code
lang country meta metadata views likes
category categories subcategory topic topics tag tags difficulty type task task_type
length num_tokens n_tokens token_count num_turns num_chars char_count num_words word_count
"""
_HARMLESS_ENDINGS = """
id uuid hash hexsha sha source url license licenses language lang score rating
timestamp date datetime title category version
"""
_IN_MEDIA = "image images audio audios video videos pixel"
_SAID = "train training trainable trained loss label labels mask masks weight weights"
HARMLESS_NAMES = frozenset(_HARMLESS.split())
HARMLESS_ENDINGS = tuple(_HARMLESS_ENDINGS.split())  # last words, as in prompt_id
_MEDIA, _IN_TRAINING = frozenset(_IN_MEDIA.split()), frozenset(_SAID.split())
_SPEAKING = _MEDIA | _IN_TRAINING | {"token", "ignore"}  # words that exclude a name


@cache
def _is_harmless_name(name: str) -> bool:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    words = name.split("_")
    ends = words[-1] in HARMLESS_ENDINGS and not _SPEAKING.intersection(words)
    return name in HARMLESS_NAMES or ends


def is_harmless(name: str, value: object) -> bool:
    """Return whether a field's name and value show that it cannot affect training. Lists of
    numbers, and objects with a mask, labels or weights, always can."""
    if isinstance(value, Mapping):
        words = {word for key in value for word in str(key).lower().split("_")}
        says = bool(words & _IN_TRAINING)
    else:
        says = isinstance(value, list) and any(isinstance(v, int | float) for v in value)
    return _is_harmless_name(name) and not says


def is_media(name: str) -> bool:
    """Return whether a field's name hints at images, audio or video."""
    return bool(_MEDIA.intersection(name.lower().replace(".", "_").split("_")))


@dataclass(slots=True)
class Fields:
    """Filter of records: keeps the fields that the format uses, and collects names of others.

    Args:
        form: reads the records.
        ignore: fields that the user drops; `messages.name` is a key of messages.
        dropped: those of `ignore` that the source has left out already.
    """

    form: Form
    ignore: Collection[str]
    dropped: Iterable[str] = ()
    ignored: set[str] = field(init=False)
    harmless: set[str] = field(init=False, default_factory=set)
    _unread: Counter[str] = field(init=False, default_factory=Counter)  # field to number of records

    def __post_init__(self) -> None:
        self.ignored = set(self.dropped)

    def documents(self, rows: Iterable[Document]) -> Iterator[Document]:
        """Yield each record with only the fields that the format uses. Raises UnsupportedError at
        the end if other fields had content that would be lost; the error names and counts them."""
        count = 0
        for count, document in enumerate(rows, start=1):  # noqa: B007 - the number of all records
            reduced = self._reduced(document)
            if not self._unread:
                yield reduced
        if self._unread:
            raise UnsupportedError(self._refusal(count))

    def _reduced(self, document: Document) -> Document:
        given, unread = document.fields, set[str]()
        if document.line == 0:
            return document  # a text without fields
        if any(given.get(name) is None for name in self.form.columns):
            return document  # the form reports the missing field
        fields = self._split(given, self.form.reads(document).__contains__, "", unread)
        for name in self.form.chats:
            if isinstance(fields.get(name), list):
                fields[name] = [self._message(m, name, unread) for m in fields[name]]
        self._unread.update(unread)
        return replace(document, fields=fields)

    def _message(self, message: Any, name: str, unread: set[str]) -> Any:
        if not isinstance(message, Mapping):
            return message
        kept = self._split(message, self.form.reads_key, f"{name}.", unread)
        for key, parts in kept.items():
            if key == "content" and isinstance(parts, list):
                kept[key] = [self._part(part, f"{name}.content.", unread) for part in parts]
        return kept

    def _part(self, part: Any, prefix: str, unread: set[str]) -> Any:
        if not isinstance(part, Mapping):
            return part
        if is_media(kind := str(part.get("type"))):
            unread.add(prefix + kind)
        return self._split(
            part, lambda key: key in ("type", "text") or self.form.reads_key(key), prefix, unread
        )

    def _split(
        self,
        fields: Mapping[str, Any],
        reads: Callable[[str], bool],
        prefix: str,
        unread: set[str],
    ) -> dict[str, Any]:
        """Return the fields that the format uses. Add other names with content to `ignored` (the
        user drops them), `harmless` (no effect on training) or `unread` (refused at the end)."""
        used = {}
        for name, value in fields.items():
            if prefix + name in self.ignore:
                self.ignored.add(prefix + name)
            elif reads(name) and not (prefix and is_media(name)):
                used[name] = value
            elif value is None or value in ("", [], {}):
                pass
            elif is_harmless(name, value):
                self.harmless.add(prefix + name)
            else:
                unread.add(prefix + name)
        return used

    def _refusal(self, records: int) -> str:
        form, names = self.form.listing()[0], sorted(self._unread)
        counts = ", ".join(
            f"{name!r} (in {self._unread[name]:,} of {records:,} records)" for name in names
        )
        others = [
            kind
            for kind, row in READ.items()
            if kind != form and set(names) <= row.keys() and next(iter(row)) in names
        ]
        reads = f"format {form} does not read"
        if any("." in name for name in names):
            reads = f"neither format {form} nor the chat template reads"
        return (
            f"data.path: {reads} {counts}"
            + "; a run trains on text alone" * any(is_media(name) for name in names)
            + f"; data.format {' or '.join(others)} does" * bool(others)
            + "; leave the field out of the records, or, if training does not need it, set "
            + f"data.ignore: [{', '.join([*self.ignore, *names])}]"
        )


def refuse_unused(ignore: Collection[str], seen: Collection[str]) -> None:
    """Raise UnsupportedError if data.ignore names a field that no record has (not in `seen`)."""
    for name in ignore:
        if name not in seen:
            raise UnsupportedError(
                f"data.ignore: no record has a field {name!r}; leave it out of the list"
            )


def recognise(config: DataConfig, document: Document) -> DataConfig:
    """Return the configuration with the format that the fields of the first document suggest,
    unless the run file names a format. Raises UnsupportedError if no format fits, or several do."""
    if config.format is not RecordFormat.TEXT or config.field is not None:
        return config
    fields = {name: value for name, value in document.fields.items() if value is not None}
    # Ignore the user's fields first. If the format needs one, opening the source refuses that
    # later.
    ignored = config.ignore or ()
    left = fields.keys() - {*ignored}
    kinds = _forms_with(left) or _forms_with(fields.keys())
    if not kinds and TEXT in document.fields:
        return config  # null, which the form reports
    if not kinds and suffix_of(document.place.rpartition(": ")[0]) in (".csv", ".tsv"):
        raise UnsupportedError(
            f"{document.place} has no column 'text' (the first line has: {_listed(fields)}); set "
            "data.field to the column with the text, or, if this is no header, add one above"
        )
    if not kinds:
        forms = ", ".join(f"{kind} ({' and '.join(kind.row.marks)})" for kind in RecordFormat)
        raise UnsupportedError(
            f"{document.place} has no field 'text' (it has: {_listed(fields)}), and matches no "
            f"format known by its fields: {forms}; set data.field to the field of its text; or "
            "data.format: prompt, with data.prompt and data.completion as the fields of a prompt "
            "and its answer; or data.format and data.field for another format"
        )
    if len(kinds) > 1:
        ways = (
            f"data.ignore: [{', '.join([*ignored, *_unused(kind, fields)])}] to read it as {kind}"
            for kind in kinds
        )
        raise UnsupportedError(
            f"{document.place} has the fields of several formats: {', '.join(kinds)}; set "
            f"{', or '.join(ways)}"
        )
    kind, field = kinds[0], None
    if kind is RecordFormat.SHAREGPT and _has_roles(fields["conversations"]):
        kind, field = RecordFormat.CHAT, "conversations"
    return replace(config, format=kind, field=field)


def _listed(names: Iterable[str]) -> str:
    return shortened(", ".join(names), MOST_QUOTED)


def _forms_with(names: Collection[str]) -> list[RecordFormat]:
    """Return the formats whose marks are all among these names, without those whose marks another
    one extends: records with a label are rated answers, not plain completions."""
    found = [kind for kind in RecordFormat if all(name in names for name in kind.row.marks)]
    marks = [set(kind.row.marks) for kind in found]
    return [kind for kind in found if not any({*kind.row.marks} < more for more in marks)]


def _unused(kind: RecordFormat, fields: Mapping[str, Any]) -> list[str]:
    """Return a record's fields that the format does not use and that might affect training."""
    return [
        name
        for name, value in fields.items()
        if name not in READ[kind] and not is_harmless(name, value)
    ]


def _has_roles(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and isinstance(messages[0], Mapping)
        and "role" in messages[0]
    )


@dataclass(frozen=True, slots=True)
class TextForm(Form):
    """Reader of records with one field of text, all of which is trained."""

    field: str

    masked: ClassVar[bool] = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    def reads(self, document: Document) -> Collection[str]:  # noqa: ARG002 - the same for all
        return self.columns

    def key(self, column: str) -> str:  # noqa: ARG002 - there is only one
        return "data.field"

    def listing(self) -> list[object]:
        return ["text", self.field]

    def read(self, document: Document) -> Written | None:
        text = text_of(document, self.field, self.key(self.field))
        return Written(text) if text.strip() else None


# Copied from Stanford Alpaca's train.py.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


@dataclass(frozen=True, slots=True)
class AlpacaForm(Form):
    """Reader of records with an instruction, an optional input and an output, which it writes in
    Stanford Alpaca's format. The prompt is trained only if `everything` is set."""

    everything: bool

    columns: ClassVar[tuple[str, ...]] = (INSTRUCTION, OUTPUT)

    @property
    def masked(self) -> bool:
        return not self.everything

    def listing(self) -> list[object]:
        return ["alpaca", self.everything]

    def reads(self, document: Document) -> Collection[str]:  # noqa: ARG002 - the same for all
        return READ["alpaca"]

    def read(self, document: Document) -> Written | None:
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
class TokensForm(Form):
    """Reader of records of token ids, with optional labels and masks for training, an attention
    mask for padding at the ends, and positions or lengths that divide packed rows."""

    columns: ClassVar[tuple[str, ...]] = (INPUT_IDS,)
    masked: ClassVar[bool] = True
    any_ids: ClassVar[bool] = True

    def listing(self) -> list[object]:
        return ["tokens", *READ["tokens"]]

    def reads(self, document: Document) -> Collection[str]:  # noqa: ARG002 - the same for all
        return READ["tokens"]

    def read(self, document: Document) -> tuple[Encoded, ...]:
        ids = _whole_numbers(document, INPUT_IDS)
        tokens, fields = len(ids), document.fields
        labels = ids
        if fields.get(LABELS) is not None:
            labels = _of_each(document, LABELS, _whole_numbers(document, LABELS), tokens)
        trained = labels != UNTRAINED
        for name in LOSS_MASKS:
            if fields.get(name) is not None:
                mask = _zeros_and_ones(document, name)
                trained = trained & _of_each(document, name, mask, tokens)
        if fields.get(TYPES) is not None and _whole_numbers(document, TYPES).any():
            raise UnsupportedError(
                f"{document.place}: field {TYPES!r} has token types other than 0, which a causal "
                "model does not use; leave the field out"
            )
        own = slice(0, tokens) if fields.get(MASK) is None else _unpadded(document, tokens)
        length = fields.get(LENGTH)
        if isinstance(length, int | float) and length < own.stop - own.start:
            raise UnsupportedError(
                f"{document.place}: field {LENGTH!r} is {length} for {own.stop - own.start} "
                "input_ids; cut input_ids to that length, give an attention_mask with 0 for "
                f"padding, or set data.ignore: [{LENGTH}]"
            )
        ids, labels, trained = ids[own], labels[own], trained[own]
        if len(ids) == 0:
            return ()
        starts = _starts(document, tokens, own)
        if ids.min() < 0:
            raise UnsupportedError(
                f"{document.place}: field 'input_ids' has a negative id, {ids.min()}"
            )
        if ids.max() >= 1 << 32:
            raise UnsupportedError(
                f"{document.place}: field 'input_ids' has an id of {ids.max()}, expected ids "
                "below 2**32"
            )
        if bool(((labels != ids) & (labels != UNTRAINED)).any()):
            raise UnsupportedError(
                f"{document.place}: field 'labels' differs from input_ids; each label is the id "
                "at the same place, unshifted, or -100 if it is not trained"
            )
        cuts = np.flatnonzero(starts[1:]) + 1
        pieces = zip(np.split(ids, cuts), np.split(trained, cuts), strict=True)
        return tuple(Encoded(*piece) for piece in pieces)


# Forms that need no chat template, by the configuration of their source.
PLAIN: Mapping[RecordFormat, Callable[[DataConfig], Form]] = {
    RecordFormat.TEXT: lambda config: TextForm(config.field or TEXT),
    RecordFormat.ALPACA: lambda config: AlpacaForm(config.loss is Loss.ALL),
    RecordFormat.TOKENS: lambda _: TokensForm(),
}


def _of_each(document: Document, name: str, values: np.ndarray, tokens: int) -> np.ndarray:
    """Return the values of a field. Raises UnsupportedError unless there is one for each token."""
    if len(values) != tokens:
        raise UnsupportedError(
            f"{document.place}: field {name!r} has {len(values)} entries for {tokens} input_ids; "
            "give one for each"
        )
    return values


def _zeros_and_ones(document: Document, name: str) -> np.ndarray:
    given = document.fields[name]
    if not isinstance(given, Sequence) or any(
        not isinstance(flag, int | float) or flag not in (0, 1) for flag in given
    ):
        raise UnsupportedError(
            f"{document.place}: field {name!r}: expected a list of 0 (not trained) and 1"
        )
    return np.asarray(given, dtype=bool)


def _starts(document: Document, tokens: int, span: slice) -> np.ndarray:
    """Return for each token in `span` whether a document begins there, bool. The record's
    positions, sequence numbers and lengths of documents must agree on this, as far as it has
    them."""
    count = span.stop - span.start
    by_field: dict[str, np.ndarray] = {}
    for name in (POSITIONS, SEQ_IDX, LENGTHS, *CUMULATIVE):
        if document.fields.get(name) is None:
            continue
        values = _whole_numbers(document, name)
        if name in (POSITIONS, SEQ_IDX):
            values = _of_each(document, name, values, tokens)[span]
        if name == POSITIONS:
            starts = values == 0
            fits = starts[:1].all() and (starts[1:] | (np.diff(values) == 1)).all()
            expected = "positions that begin at 0 and rise by one, or restart at 0"
        elif name == SEQ_IDX:
            starts, fits, expected = np.diff(values, prepend=-1) != 0, True, ""
            starts[:1] = True
        else:
            edges = np.concatenate([[0], np.cumsum(values)]) if name == LENGTHS else values
            rising = len(edges) > 1 and (np.diff(edges) > 0).all()
            # Check the inner edges too: a sum of lengths above 2**63 is negative.
            inside = rising and edges.min() == 0 and edges.max() == count
            fits = inside and edges[0] == 0 and edges[-1] == count
            expected = f"documents of one token or more that end at token {count}"
            starts = np.isin(np.arange(count), edges)
        if not fits:
            raise UnsupportedError(
                f"{document.place}: field {name!r}: expected {expected}; give each document a row "
                "of its own"
            )
        by_field[name] = starts
    first = next(iter(by_field), "")
    for name, starts in by_field.items():
        if not np.array_equal(starts, by_field[first]):
            raise UnsupportedError(
                f"{document.place}: fields {first!r} and {name!r} disagree on where documents "
                "begin; leave out the field that is wrong"
            )
    return by_field.get(first, np.arange(count) == 0)


def field_of(document: Document, field: str, key: str) -> Any:
    """Return a record's field. Raises UnsupportedError, naming the run file's key, if missing."""
    value = document.fields.get(field)
    if value is None and field in document.fields:
        raise UnsupportedError(
            f"{document.place}: field {field!r} is null; give it a value, or leave the record out"
        )
    if value is None:
        raise UnsupportedError(
            f"{document.place} has no field {field!r} (it has: {_listed(document.fields)}); "
            f"add it, or set {key}"
        )
    return value


def text_of(document: Document, field: str, key: str) -> str:
    """Return a field's text. Raises UnsupportedError for another type or invalid Unicode."""
    text = field_of(document, field, key)
    if not isinstance(text, str):
        raise UnsupportedError(
            f"{document.place}: field {field!r} holds {type(text).__name__}, expected text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, from an escape
        raise UnsupportedError(
            f"{document.place}: field {field!r} is not valid Unicode: {error.reason}"
        ) from error
    return text


def _unpadded(document: Document, tokens: int) -> slice:
    """Return the range of a row's tokens that are not padding, which is only at the ends."""
    mask = _of_each(document, MASK, _whole_numbers(document, MASK), tokens)
    if not np.isin(mask, (0, 1)).all():
        raise UnsupportedError(
            f"{document.place}: field 'attention_mask' has values other than 0 (padding) and 1; "
            "give each document a row of its own, without padding"
        )
    read = np.flatnonzero(mask)
    if len(read) == 0:
        return slice(0)
    begin, end = int(read[0]), int(read[-1]) + 1
    if len(read) != end - begin:
        raise UnsupportedError(
            f"{document.place}: field 'attention_mask' has 0 between tokens of 1; padding is only "
            "at the ends: to read a token without training it, give it the label -100"
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


Message = Mapping[str, Any]
ASSISTANT = "assistant"


def take_marks(
    document: Document, messages: Sequence[Message], everything: bool
) -> tuple[list[Message], tuple[bool, ...] | None]:
    """Remove the keys of messages, such as `weight`, that say whether a turn is trained.

    Args:
        document: the record, for the words of errors.
        messages: messages with roles; `TURN_MARKS` may be 0 or false, 1 or true.
        everything: train all messages, not only the assistant's.

    Returns:
        The messages without marks, and whether each turn of the assistant is trained; None if all
        are.

    Raises:
        UnsupportedError: a mark has another value, or asks to train a message of another role.
    """
    turns = []
    bare: list[Message] = []
    for number, message in enumerate(messages, start=1):
        marks = {name: message[name] for name in TURN_MARKS if message.get(name) is not None}
        for name, value in marks.items():
            where = f"{document.place}: message {number}: {name!r}"
            if not isinstance(value, int | float) or value not in (0, 1):
                raise UnsupportedError(f"{where} is {value!r}, expected 0 or 1, false or true")
            if everything and not value:
                raise UnsupportedError(
                    f"{where} excludes a turn from training, but data.loss: all trains every turn; "
                    "set data.loss to answers, or leave the mark out"
                )
            if value and not everything and message.get("role") != ASSISTANT:
                raise UnsupportedError(
                    f"{where} asks to train a turn of the {message.get('role')}, but only the "
                    f"{ASSISTANT}'s turns are trained; leave the mark out, or set data.loss to all"
                )
        if message.get("role") == ASSISTANT:
            turns.append(all(marks.values()))
        bare.append({k: v for k, v in message.items() if k not in TURN_MARKS})
    return bare, None if all(turns) else tuple(turns)


def with_system(document: Document, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages, preceded by one with the text of the record's field `system`. Raises
    UnsupportedError if they begin with a different system message."""
    if not messages or not document.fields.get(SYSTEM):
        return messages
    content = text_of(document, SYSTEM, "data.format")
    if messages[0].get("role") not in (SYSTEM, "developer"):
        return [{"role": SYSTEM, "content": content}, *messages]
    if messages[0].get("content") != content:
        raise UnsupportedError(
            f"{document.place}: field {SYSTEM!r} and the first message are system messages that "
            "differ; leave one of them out"
        )
    return messages
