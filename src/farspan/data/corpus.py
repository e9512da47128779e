"""The corpus of a run: opens sources, tokenizes them and packs sequences, in one call."""

import glob
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import date
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from farspan.data.chat import ChatForm, PreferenceForm, PromptForm, UnpairedForm
from farspan.data.config import (
    SUFFIXES,
    DataConfig,
    Loss,
    PackingKind,
    RecordFormat,
    SourceConfig,
    SourceKind,
    suffix_of,
)
from farspan.data.formats import (
    PLAIN,
    UNTRAINED,
    TokensForm,
    recognise,
    refuse_unused,
)
from farspan.data.packing import (
    BestFitLayout,
    ConcatLayout,
    Mixture,
    PackedBatch,
    Packing,
    SequenceLayout,
    seed_of_source,
    split_held_out,
)
from farspan.data.sources import (
    DEFAULT_SPLIT,
    SAVED,
    DataFiles,
    DatasetRows,
    StreamedRows,
    decode,
    find_files,
    open_dataset,
    read_bytes,
    separator_of,
    stdlib_files,
)
from farspan.data.streaming import DocumentReader, Stream
from farspan.data.templates import Templates, find_template
from farspan.data.token_cache import TokenStore, Turns, Useless, Watch, open_store, store_key
from farspan.data.tokenizers import Form, HubTokenizer, Source, Tokenizer
from farspan.formatting import write_bytes, write_number
from farspan.spec import UnsupportedError

TRAINED = "data.path"
MOST_TEMPLATE = 1 << 20  # bytes of a chat template
_MOST_KINDS = 5  # kinds of files to name in a line
_MUCH = 0.1  # share of padding that is worth a note
# Names of files for training and for evaluation, as the datasets library tells them apart.
_SPLITS = tuple(
    re.compile(rf"(?:^|[-._ /0-9])(?:{words})(?:[-._ /0-9]|$)", re.IGNORECASE)
    for words in ("train|training", "test|testing|valid|validation|dev|eval|evaluation")
)
# Pages about a data set that are in its folder, as in every snapshot of the hub.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|copying|citation|changelog|contributing|authors|credits"
    r"|code_of_conduct|data(set)?[-_ ]?card|datasheet)\b.*\.(md|txt)$|dataset_infos?\.json$",
    re.IGNORECASE,
)
_FILES = (SourceKind.TEXT, SourceKind.JSONL)
_PACKED = "2"  # rises whenever the same documents give other sequences


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source's documents to train on, the reader of its records, and held-out documents."""

    config: DataConfig  # with the recognised format
    form: Form
    train: Source
    held_out: Source | None = None


def open_source(config: DataConfig, tokenizer: Tokenizer) -> OpenedSource:
    """Open a source's files or dataset, and detect the format of its records. Raises
    UnsupportedError if a path matches nothing, a file is trained and held out, or the format is
    unknown."""
    if config.path is None:
        return OpenedSource(
            config, open_form(config, tokenizer), DataFiles(stdlib_files(), SourceKind.TEXT)
        )
    config = settle(config)
    assert config.path is not None, "a corpus has a path"
    train = _open(config, config.path, config.split, streaming=config.streaming)
    if config.format is RecordFormat.TEXT:
        config = _recognise(config, train)
    form = open_form(config, tokenizer)
    needed = [name for name in form.columns if name in (config.ignore or ())]
    if needed:
        raise UnsupportedError(
            f"data.ignore: format {config.format} needs field {needed[0]!r}; leave it out of the "
            "list"
        )
    if isinstance(train, DatasetRows):
        train.refuse_missing(form)
    if not config.held_out_elsewhere():
        return OpenedSource(config, form, train)
    path, split = config.held_out_path or config.path, config.held_out_split or config.split
    assert path is not None, "a corpus has a path"
    held_out = _open(config, path, split, "data.held_out_path", config.streaming)
    if isinstance(held_out, DatasetRows):
        held_out.refuse_missing(form)
    refuse_shared(train, held_out)
    return OpenedSource(config, form, train, held_out)


def open_form(config: DataConfig, tokenizer: Tokenizer) -> Form:
    """Return the form (record reader) of the configured format (text, chat, pairs...). Raises
    UnsupportedError if the tokenizer does not fit the format."""
    everything = config.loss is Loss.ALL
    has_template = config.chat_template is not None or (
        isinstance(tokenizer, HubTokenizer) and bool(tokenizer.inner.chat_template)
    )
    match config.format:
        case RecordFormat.CHAT | RecordFormat.SHAREGPT:
            return _chat(config, tokenizer, everything)
        case RecordFormat.PREFERENCE:
            form: Form = PreferenceForm(_chat(config, tokenizer, False) if has_template else None)
        case RecordFormat.UNPAIRED as kind:
            chat = _chat(config, tokenizer, False) if has_template else None
            form = UnpairedForm(config.prompt, config.completion, False, chat, kind)
        case kind if kind in PLAIN:
            form = PLAIN[kind](config)
        case kind:  # a text or messages, and their answer
            own = kind is RecordFormat.PROMPT
            asked, answer = (config.prompt, config.completion) if own else kind.row.marks
            keys = ("data.prompt", "data.completion") if own else ("data.format", "data.format")
            chat = _chat(config, tokenizer, everything) if has_template else None
            form = PromptForm(asked, answer, everything, chat, kind, keys)
    if not isinstance(form, TokensForm) and form.masked:
        _refuse_slow(tokenizer)
    return form


def _chat(config: DataConfig, tokenizer: Tokenizer, everything: bool) -> ChatForm:
    if not isinstance(tokenizer, HubTokenizer):
        raise UnsupportedError(
            f"data.format: {config.format} needs a tokenizer with a chat template, "
            f"{config.tokenizer!r} has none; set data.tokenizer to one that has"
        )
    inner, name = tokenizer.inner, str(config.tokenizer)
    own, tool_use = find_template(inner, config.chat_template, name, _read_template)
    day = date.today() if config.day is None else date.fromisoformat(config.day)
    templates = Templates(inner, own, tool_use, day)
    if not everything:
        _refuse_slow(tokenizer)
    sharegpt = config.format is RecordFormat.SHAREGPT
    field = config.field or config.format.row.marks[0]  # the form of prompts replaces it
    stops, marks = tokenizer.stops(), tokenizer.marks()
    return ChatForm(field, everything, templates, stops, marks, sharegpt)


def _read_template(path: Path) -> str:
    return decode(read_bytes(path, MOST_TEMPLATE), path, line=1)


def _refuse_slow(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, HubTokenizer) and not tokenizer.inner.is_fast:
        raise UnsupportedError(
            f"data.tokenizer: {type(tokenizer.inner).__name__} does not map tokens to characters, "
            "so farspan cannot tell which tokens to train; use a fast tokenizer, or set data.loss "
            "to all"
        )


def refuse_shared(train: Source, held_out: Source) -> None:
    """Raise UnsupportedError if the same documents are to be trained and held out."""
    other = {str(entry) for entry in held_out.listing()}
    shared = [entry for entry in train.listing() if str(entry) in other]
    if shared:
        name = shared[0][1] if isinstance(train, DataFiles) else train.names()[0]
        raise UnsupportedError(
            f"data.held_out_path: {name} is also trained on; give other documents, or use held_out "
            "(a share, such as 0.05) to divide these"
        )


def settle(config: DataConfig) -> DataConfig:
    """Return the configuration with the kind of source that its path calls for. Paths of files are
    read as files even if the configuration says `dataset`."""
    path = str(config.path)
    place = Path(path).expanduser()
    if config.on_hub() or any((place / name).is_file() for name in SAVED):
        return config if config.source in _FILES else replace(config, source=SourceKind.DATASET)
    asked = config.name or config.held_out_split or config.split != DEFAULT_SPLIT
    rows = config.source is SourceKind.DATASET or (config.source is SourceKind.AUTO and asked)
    if rows and place.is_dir():
        return replace(config, source=SourceKind.DATASET)
    plain = "/" not in path and not place.suffix and not glob.has_magic(path)
    if config.source is SourceKind.DATASET and plain and not place.exists():
        return config  # some names on the hub have no slash
    if rows and asked:
        raise UnsupportedError(
            f"data.split: {path!r} names files, which have no splits; leave data.name, "
            "data.split and data.held_out_split out, and give data.held_out_path"
        )
    matched = find_files(path, "data.path")
    if config.source in _FILES:
        _refuse_contradiction(config.source, matched)
        return config
    files = _data_of(matched, place)
    _refuse_unknown(files, "data.path")
    _refuse_splits(files, place)
    texts = files == matched and all(SUFFIXES[suffix_of(file)] == "text" for file in files)
    return replace(config, source=SourceKind.TEXT if texts else SourceKind.AUTO)


def _refuse_contradiction(kind: SourceKind, files: tuple[Path, ...]) -> None:
    """Raise UnsupportedError if the files are not what `data.source` says. `text` allows no table,
    and not only records; `jsonl` allows neither tables nor CSV."""
    held = [SUFFIXES.get(suffix_of(file), "text") for file in files]
    other = ("table", "csv") if kind is SourceKind.JSONL else ("table",)
    wrong = [file for file, own in zip(files, held, strict=True) if own in other]
    if kind is SourceKind.TEXT and "text" not in held:
        wrong = list(files)
    if wrong:
        raise UnsupportedError(
            f"data.source: {kind}, but {wrong[0]} has the suffix {suffix_of(wrong[0])}; leave "
            "data.source out to read each file by its suffix"
        )


def _data_of(files: tuple[Path, ...], place: Path) -> tuple[Path, ...]:
    """Return the files of a folder that hold data, by suffix. Pages about the data, such as a
    README, are left out if other files have records."""
    if not place.is_dir():
        return files
    data = tuple(file for file in files if suffix_of(file) in SUFFIXES)
    plain = tuple(file for file in data if not _ABOUT.match(file.name))
    records = any(SUFFIXES[suffix_of(file)] != "text" for file in plain)
    return (plain if records else data) or files


def _refuse_unknown(files: tuple[Path, ...], field: str) -> None:
    wrong = [file for file in files if suffix_of(file) not in SUFFIXES]
    if not wrong:
        return
    suffix = suffix_of(wrong[0])
    more = f" (and {len(wrong) - 1:,} more files)" if len(wrong) > 1 else ""
    near = get_close_matches(suffix, SUFFIXES, n=1)
    name = wrong[0].name[: -len(suffix)] if suffix else wrong[0].name
    way = f"rename it to {name}{near[0]}" if near else "set data.source: text to train it as text"
    others = "" if len(files) == 1 else ", or give a glob of the files to read, such as *.jsonl"
    raise UnsupportedError(
        f"{field}: {wrong[0]}{more}: no format reads the suffix {suffix!r}; {way}{others}. "
        f"Supported suffixes: {', '.join(SUFFIXES)}, each also with .gz or .zst"
    )


def _refuse_splits(files: tuple[Path, ...], place: Path) -> None:
    """Refuse a folder whose file names say that some are for training and others for evaluation."""
    records = [file for file in files if SUFFIXES[suffix_of(file)] != "text"]
    names = {file: str(file.relative_to(place)) if place.is_dir() else "" for file in records}
    train, held = ([f for f, n in names.items() if pattern.search(n)] for pattern in _SPLITS)
    if train and held:
        raise UnsupportedError(
            f"data.path: {place} has {names[train[0]]} to train on and, by its name, "
            f"{names[held[0]]} to evaluate on; give the first as data.path and the other as "
            "data.held_out_path, by their names or as globs"
        )


def _recognise(config: DataConfig, train: DataFiles | DatasetRows) -> DataConfig:
    """Return the configuration with the format of the first record. Raises UnsupportedError if the
    first record of another file has another format."""
    if isinstance(train, DatasetRows):
        first = next(train.documents(), None)
        return config if first is None else recognise(config, first)
    found, place = config, ""
    for document in train.firsts():
        if not place:
            found, place = recognise(config, document), train.names()[0]
            place = document.place.rpartition(": ")[0]
            continue
        try:
            other = recognise(config, document)
        except UnsupportedError:
            continue  # the form reports such records, with a count
        if other.format is not found.format:
            raise UnsupportedError(
                f"data.path: {place} has format {found.format}, but "
                f"{document.place.rpartition(': ')[0]} {other.format}; list each in data.sources"
            )
    return found


def _open(
    config: DataConfig,
    path: str,
    split: str,
    field: str = "data.path",
    streaming: bool | None = None,
) -> DataFiles | DatasetRows:
    if config.source is SourceKind.DATASET:
        return open_dataset(path, config.name, split, streaming).without(config.ignore or ())
    files = find_files(path, field)
    if config.source is SourceKind.AUTO:
        files = _data_of(files, Path(path).expanduser())
        _refuse_unknown(files, field)
    return DataFiles(files, config.source)


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a corpus, tokenized and packed into sequences."""

    opened: OpenedSource
    recognised: bool  # format known by the fields, not from the run file
    weight: float
    # Documents to train on (a stream's first window), and documents to evaluate on, if any.
    stores: tuple[TokenStore, ...]
    train: Packing | Stream
    held_out: Packing | None
    turns: tuple[str, ...]  # lines about the ends of turns


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sequences to train on and, if documents are held out, sequences to evaluate on."""

    train: Packing | Mixture | Stream
    held_out: Packing | Mixture | None
    parts: tuple[Part, ...]
    largest: int  # largest id: the model needs a larger vocabulary
    longest: int  # tokens of the longest document or answer: the most positions
    identity: str  # two corpora with one identity give the same sequences
    trained: float  # share of all tokens

    def describe(self, context: int) -> list[str]:
        """Return the lines about the data that a run prints at its start."""
        kept, held_out = self.train.kept, self.held_out
        mostly = f", {self.trained:.1%} of them trained" if self.trained < 1.0 else ""
        sequences, until = kept.sequences, "an epoch"
        if isinstance(self.train, Mixture):
            sequences, until = self.train.sequences_per_epoch(), "until each source has been read"
            until += " (of a stream, its first window)" * bool(self.streams())
        elif self.streams():
            until = "in the first window"
        room = kept.sequences * context
        lines = [
            *self._describe_streams(),
            f"data: {kept.tokens:,} tokens{mostly}, {write_number(sequences, 'sequence')} of "
            f"{context:,} tokens {until}; "
            f"{f'{held_out.kept.tokens:,} tokens' if held_out else 'none'} held out",
            *self._describe_parts(),
            *self._describe_fields(),
            *self._describe_pairs(),
            *dict.fromkeys(line for part in self.parts for line in part.turns),
            f"packing: {kept.divided:,} of {write_number(kept.documents, 'document')} divided, "
            f"{kept.padding / room:.1%} padding"
            + (f"; {kept.left_out:,} tokens in untrained pieces left out" if kept.left_out else ""),
        ]
        if kept.tokens < context:
            what, more = "all documents together are", "more data"
            if self.streams():
                what, more = "a window is", "a larger data.window"
            lines.append(
                f"warning: {what} shorter than one sequence; give {more} or a shorter context"
            )
        elif kept.padding > _MUCH * room:
            lines.append(
                "note: few documents fit together into a sequence; another context, or packing: "
                "cut (which divides documents), wastes less on padding"
            )
        return lines

    def streams(self) -> list[Stream]:
        """Return the sources that are read window by window, in the order of all sources."""
        return [part.train for part in self.parts if isinstance(part.train, Stream)]

    def sequences_per_epoch(self) -> int | None:
        """Return how many sequences read every document once; None if a stream's end is unknown."""
        if self.streams() or isinstance(self.train, Stream):
            return None
        return self.train.sequences_per_epoch()

    def read_ahead(self, check: Callable[[OpenedSource, TokenStore], None]) -> None:
        """Let streams read their next window in a thread during training. `check` refuses a window
        that the model cannot take, before the window's first step."""
        for part in self.parts:
            if isinstance(part.train, Stream):
                part.train.check = partial(check, part.opened)

    def _describe_streams(self) -> Iterator[str]:
        for part in self.parts:
            if isinstance(part.train, Stream):
                yield (
                    f"streamed: {part.opened.config.path} in windows of "
                    f"{write_bytes(part.train.size)}; the first has "
                    f"{write_number(part.stores[0].documents(), 'document')}, "
                    f"{len(part.stores[0].tokens):,} tokens"
                )

    def _describe_parts(self) -> Iterator[str]:
        if not isinstance(self.train, Mixture):
            (part,) = self.parts
            if part.recognised:
                yield f"format: {part.opened.config.format}, known by the fields of its records"
            yield from _describe_files(part)
            return
        weights = sum(part.weight for part in self.parts)
        for part, times in zip(self.parts, self.train.epochs(), strict=True):
            kept, config = part.train.kept, part.opened.config
            yield (
                f"source {config.path or config.source} ({config.format}): "
                f"{part.weight / weights:.1%} of all tokens; its {kept.tokens:,} tokens in "
                f"{write_number(kept.sequences, 'sequence')} are read {times:.2f} times until each "
                "source has been read"
            )
            yield from _describe_files(part)

    def _describe_fields(self) -> Iterator[str]:
        for part in self.parts:
            where = f" of {part.opened.config.path}" if len(self.parts) > 1 else ""
            left = {name: set[str]() for name in ("ignored", "harmless")}
            for store in part.stores:
                for name in left:
                    left[name].update(getattr(store, name))
            if left["ignored"]:
                yield f"ignored{where}, as data.ignore says: {', '.join(sorted(left['ignored']))}"
            if left["harmless"]:
                yield (
                    f"fields{where} that do not affect training: "
                    f"{', '.join(sorted(left['harmless']))}"
                )

    @property
    def paired(self) -> bool:
        """True if all documents are pairs of answers."""
        return all(part.stores[0].middles is not None for part in self.parts)

    def _describe_pairs(self) -> Iterator[str]:
        for part in self.parts:
            store = part.stores[0]
            if store.answers is not None:
                good, count = int(store.answers[:, 1].sum()), store.documents()
                yield f"answers: {count:,}, {good:,} of them desirable"
            if store.middles is None:
                continue
            ends = np.stack([store.starts[:-1], store.middles, store.starts[1:]])
            both, (chosen, rejected) = np.diff(store.starts), np.diff(ends, axis=0).mean(1)
            yield (
                f"pairs: {len(both):,}, of {both.min():,} to {both.max():,} tokens; on average "
                f"{chosen:,.0f} with the chosen answer and {rejected:,.0f} with the rejected one"
            )


def open_corpus(
    config: DataConfig, tokenizer: Tokenizer, *, context: int, seed: int, watch: Watch
) -> Corpus:
    """Read the documents of a run, tokenize them (once, then from a cache) and pack them.

    `watch(documents, tokens)` is called while tokens are written; it may raise to abandon that.
    Raises UnsupportedError if data cannot be read or leave nothing to train on.
    """
    parts: list[Part] = []
    for number, (own, weight) in enumerate(config.each()):
        place = number if config.sources is not None else None
        with _naming(place):
            opened = open_source(own, tokenizer)
            seeds = seed_of_source(seed, number)
            parts.append(
                _open_part(own, opened, weight, tokenizer, context=context, seed=seeds, watch=watch)
            )
            _check_disjoint(parts)
    stores = [store for part in parts for store in part.stores]
    tokens = [len(part.stores[0].tokens) for part in parts]
    return Corpus(
        _mixed([part.train for part in parts], [part.weight for part in parts]),
        _mix_held_out([part.held_out for part in parts if part.held_out is not None]),
        tuple(parts),
        largest=max(s.largest for s in stores),
        longest=max(s.longest() for s in stores),
        identity=_identity(parts),
        trained=sum(p.stores[0].trained_tokens() for p in parts) / sum(tokens),
    )


@contextmanager
def _naming(number: int | None) -> Iterator[None]:
    """Name source `number`, as data.sources[number], in errors that the with-block raises."""
    try:
        yield
    except UnsupportedError as error:
        key = str(error).partition("data.")[2].partition(":")[0]
        keys = {field.name for field in fields(SourceConfig)}
        if number is None or not str(error).startswith("data.") or key not in keys:
            raise
        # Other keys in the message too, such as data.ignore in advice.
        words = re.sub(rf"\bdata\.({'|'.join(keys)})\b", rf"data.sources[{number}].\1", str(error))
        raise UnsupportedError(words) from error


def _open_part(
    config: DataConfig,
    opened: OpenedSource,
    weight: float,
    tokenizer: Tokenizer,
    *,
    context: int,
    seed: int,
    watch: Watch,
) -> Part:
    opens = partial(
        open_store,
        form=opened.form,
        tokenizer=tokenizer,
        cache=Path(config.cache),
        watch=watch,
        ignore=config.ignore or (),
    )
    divide = partial(_divide, config, seed)
    pack = partial(_pack, kind=config.packing, context=context)
    train: Packing | Stream
    if config.streaming:
        size, kind = config.window_bytes(), str(config.packing)
        sort = store_key(opened.train, opened.form, tokenizer, config.ignore or ())
        key = json.dumps([_PACKED, sort, size, kind, context, seed, config.held_out])
        name = f"stream-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        assert isinstance(opened.train, DataFiles | StreamedRows), "it can be read on"
        train = Stream(
            DocumentReader(opened.train),
            opens,
            lambda store, documents, drawn: pack(store, documents, TRAINED, seed=drawn),
            choose=lambda store: divide(store)[0],
            folder=Path(config.cache).expanduser() / name,
            size=size,
            seed=seed,
            watch=watch,
        )
        store = train.first
    else:
        store = opens(opened.train)
        train = pack(store, divide(store)[0], TRAINED, seed=seed)
    held = divide(store)[1]
    held_out, stores = None, [store]
    if opened.held_out is not None:
        aside = opens(opened.held_out)
        held_out = pack(aside, np.arange(aside.documents()), "data.held_out_path", seed=seed)
        stores.append(aside)
    elif len(held) > 0:
        held_out = pack(store, held, "data.held_out", seed=seed)
    refuse_unused(config.ignore or (), {name for own in stores for name in own.ignored})
    recognised = opened.config.format is not config.format
    turns = (*_describe_day(opened.form), *describe_turns(store.turns, tokenizer))
    return Part(opened, recognised, weight, tuple(stores), train, held_out, turns)


def _divide(config: DataConfig, seed: int, store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    """Divide documents into those to train on and those held out. Raises UnsupportedError if none
    is left to train on."""
    chosen, held = split_held_out(store.documents(), config.held_out, seed)
    if len(chosen) == 0:
        raise UnsupportedError(
            f"data.held_out: {config.held_out} of {write_number(store.documents(), 'document')} "
            "leaves nothing to train on; give data.held_out_path, or set held_out to 0"
        )
    return chosen, held


S = TypeVar("S", Packing, Packing | Stream)


def _mixed(packings: list[S], weights: list[float]) -> S | Mixture:
    return packings[0] if len(packings) == 1 else Mixture(packings, weights)


def _mix_held_out(packings: list[Packing]) -> Packing | Mixture | None:
    """Combine all sources' held-out documents for evaluation, which reads each sequence once."""
    return _mixed(packings, [p.kept.tokens for p in packings]) if packings else None


def _identity(parts: list[Part]) -> str:
    digests = [store.digest for part in parts for store in part.stores]
    digests += [f"window {p.train.size}" for p in parts if isinstance(p.train, Stream)]
    if len(parts) > 1:  # also tells which sources hold documents out
        digests += [f"{part.weight!r}x{len(part.stores)}" for part in parts]
    return hashlib.sha256(" ".join([_PACKED, *digests]).encode()).hexdigest()


def _pack(
    store: TokenStore,
    documents: np.ndarray,
    source: str,
    *,
    kind: PackingKind,
    context: int,
    seed: int,
) -> Packing:
    """Pack a source's documents into sequences. `source` is its key in the run file, for errors."""
    if store.middles is not None or store.answers is not None:
        _refuse_cut(store, documents, source, kind, context)
    if kind is PackingKind.CUT:
        if store.trained is not None and not store.trained.all():
            raise UnsupportedError(
                "data.packing: cut may make sequences without a trained token; set it to "
                "whole, or data.loss to all"
            )
        layout: SequenceLayout = ConcatLayout(np.diff(store.starts), documents, context, seed)
    else:
        layout = BestFitLayout(store.starts, documents, context, seed, store.trained)
        if layout.kept.tokens == 0:
            raise Useless(
                f"{source}: no document has a trained token after its first, so there is nothing "
                f"to {'train' if source == TRAINED else 'evaluate'} on; give longer documents"
            )
    return Packing(store, layout, context)


def _refuse_cut(
    store: TokenStore, documents: np.ndarray, source: str, kind: PackingKind, context: int
) -> None:
    """Raise UnsupportedError if packing would cut answers, which are compared whole."""
    what = "pairs" if store.answers is None else "answers"
    if kind is PackingKind.CUT:
        raise UnsupportedError(f"data.packing: cut would divide {what}; set it to whole")
    lengths = np.diff(store.starts)[documents]
    long = int((lengths > context).sum())
    if long:
        place = int(documents[lengths.argmax()])
        raise UnsupportedError(
            f"{source}: {long:,} of {len(lengths):,} {what} are longer than the context of "
            f"{context:,} tokens, and {what} are not divided; the longest, {store.name(place)}, "
            f"has {int(lengths.max()):,} tokens; raise context to that, or leave out long {what}"
        )


def _check_disjoint(parts: list[Part]) -> None:
    """Raise UnsupportedError if the last source trains on the same documents as another source, or
    if documents that a source holds out are trained on."""
    last = parts[-1]
    for part in parts:
        trained, others = part.stores[0].digest, [s.digest for s in last.stores[1:]]
        if trained in others or last.stores[0].digest in [s.digest for s in part.stores[1:]]:
            raise UnsupportedError(
                "data.held_out_path: these documents are also trained on; give others, "
                "or use held_out to divide these"
            )
        if part is last:
            continue
        for one, other in ((part.opened, last.opened), (last.opened, part.opened)):
            if other.held_out is not None:
                refuse_shared(one.train, other.held_out)
        if trained == last.stores[0].digest:
            raise UnsupportedError(
                "data.path: another source has the same documents; give them once, with the sum of "
                "both weights"
            )


def _describe_files(part: Part) -> Iterator[str]:
    train, config = part.opened.train, part.opened.config
    if not isinstance(train, DataFiles) or config.source is not SourceKind.AUTO:
        return
    if config.path is None:  # Python's own sources
        return
    counts = train.suffixes()
    if len(counts) > 1:
        yield f"files: {_counts(counts)}"
    left = set(find_files(str(config.path), "data.path")).difference(train.files)
    if left:
        names = Counter(
            file.name if _ABOUT.match(file.name) else suffix_of(file) or file.name
            for file in sorted(left)
        )
        yield f"skipped, because these are not data files: {_counts(names)}"
    signs = {separator_of(file) for file in train.files if SUFFIXES[suffix_of(file)] == "csv"}
    if signs - {","}:
        yield f"CSV cells are separated by {' and '.join(repr(sign) for sign in sorted(signs))}"


def _counts(counts: Counter[str]) -> str:
    """Return counts by name as text, the largest first, such as `8 .py, 3 .md, 2 others`."""
    most = counts.most_common(_MOST_KINDS)
    others = counts.total() - sum(number for _, number in most)
    return ", ".join(f"{number:,} {name}" for name, number in most) + (
        f", {others:,} others" if others else ""
    )


def _describe_day(form: Form) -> Iterator[str]:
    chat = form.chat if isinstance(form, PromptForm | PreferenceForm) else form
    if isinstance(chat, ChatForm) and chat.templates.dated():
        yield f"day: as today's date, the chat template may write {chat.templates.day} (data.day)"


def describe_turns(turns: Turns, tokenizer: Tokenizer) -> Iterator[str]:
    """Return lines that say how trained turns end, and whether generation stops there."""

    def shown(ids: Iterable[int]) -> list[str]:
        return [_short(tokenizer.decode(np.asarray([number]))) for number in ids]

    ends, signs, last = tokenizer.ends(), tokenizer.signs(), dict(turns.last)
    stop, mark = last.keys() & ends, last.keys() & (signs - ends)
    if stop:
        yield f"turns: end in {' or '.join(shown(stop))}, which stops generation"
    if mark:
        number = sum(last[own] for own in mark)
        yield (
            f"note: {number:,} of {turns.number:,} turns end in {' or '.join(shown(mark))}, which "
            f"does not stop generation ({', '.join(shown(sorted(ends))) or 'nothing'} does); add "
            "it to eos_token_id of the model's generation_config.json"
        )
    others = [own for own in last if own not in stop | mark]
    number = turns.number - sum(last[own] for own in stop | mark)
    if number:
        yield (
            f"warning: {number:,} of {turns.number:,} turns end in no token that stops generation "
            f"({', '.join(map(repr, shown(others[:3])))}), so the model does not learn to stop; "
            "give a data.chat_template that writes one after each turn of the assistant, or a "
            "data.tokenizer with an end-of-sequence token"
        )
    if turns.signed:
        yield (
            "note: the text of a special token occurs in "
            f"{write_number(turns.signed, 'document')}; the tokenizer reads this text as that token"
        )


_SHOWN = 160  # most characters of a part; the middle is cut
_PARTS = 40  # most parts of a document


def show_sequence(batch: PackedBatch, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield lines that show the first sequence: one per document, and one per stretch of trained or
    untrained tokens. A document's first token is untrained, whatever its label."""
    marks = batch.document_ids[0]
    for number, name in enumerate(batch.names[0]):
        tokens = np.flatnonzero(marks == number)
        ids, trained = batch.input_ids[0, tokens], batch.labels[0, tokens] != UNTRAINED
        trained[0] = False
        yield f"{name}: {len(tokens):,} tokens, {int(trained.sum()):,} trained"
        begins = np.flatnonzero(np.diff(trained, prepend=not trained[0]))
        for begin, end in zip(begins[:_PARTS], [*begins[1:], len(tokens)], strict=False):
            what = "trained" if trained[begin] else "read"
            yield f"  {what:7} {_short(tokenizer.decode(ids[begin:end]))}"
        if len(begins) > _PARTS:
            yield f"  and {len(begins) - _PARTS:,} more parts"
    rest = len(marks) - batch.tokens
    if rest:
        yield f"padding: {rest:,} tokens"


def _short(text: str) -> str:
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
