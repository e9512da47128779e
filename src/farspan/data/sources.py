"""The boundary between the configured text and everything after it."""

from pathlib import Path

from farspan.data.chat import ChatForm
from farspan.data.config import DataConfig, Format, Loss, SourceKind
from farspan.data.documents import TEXT, Form, Source
from farspan.data.files import JsonLines, TextFiles, decode, find_files, read_bytes, stdlib_files
from farspan.data.forms import PromptForm, TextForm, TokensForm
from farspan.data.hub import open_dataset
from farspan.data.tokenizers import HubTokenizer, Tokenizer
from farspan.spec import Refused


def open_form(config: DataConfig, tokenizer: Tokenizer) -> Form:
    """How records are read. Raises Refused where the tokenizer cannot do that."""
    everything = config.loss is Loss.ALL
    match config.format:
        case Format.CHAT:
            return _chat(config, tokenizer, everything)
        case Format.PROMPT:
            form: Form = PromptForm(config.prompt, config.completion, everything)
        case Format.TOKENS:
            form = TokensForm()
        case Format.TEXT:
            in_files = config.source in (SourceKind.STDLIB, SourceKind.TEXT)
            form = TextForm(TEXT if in_files else config.field or TEXT)
    if config.format is Format.PROMPT and form.masked:
        _refuse_slow(tokenizer)
    return form


def _chat(config: DataConfig, tokenizer: Tokenizer, everything: bool) -> ChatForm:
    if not isinstance(tokenizer, HubTokenizer):
        raise Refused(
            f"data.format: chat needs a tokenizer with a chat template, {config.tokenizer!r} has "
            "none; give the folder or hub name of one"
        )
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        template = decode(read_bytes(path), path, line=1)
    else:
        try:
            template = tokenizer.inner.get_chat_template()
        except ValueError as error:
            raise Refused(
                f"data.chat_template: the tokenizer {config.tokenizer!r} has none of its own; give "
                "a file with one (Jinja), or data.tokenizer the folder or hub name of another"
            ) from error
    if not everything:
        _refuse_slow(tokenizer)
    return ChatForm(config.field or "messages", everything, tokenizer.inner, template)


def _refuse_slow(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, HubTokenizer) and not tokenizer.inner.is_fast:
        raise Refused(
            f"data.tokenizer: {type(tokenizer.inner).__name__} does not say which characters a "
            "token stands for, so what is trained cannot be told; give a fast tokenizer, or set "
            "data.loss to all"
        )


def open_sources(config: DataConfig, form: Form) -> tuple[Source, Source | None]:
    """The source to train on and, where `held_out_path` is given, the one to evaluate on.

    Raises Refused when a path matches nothing or one file is in both.
    """
    if config.path is None:
        return TextFiles(stdlib_files()), None
    train = _open(config, form, config.path, config.split)
    if not config.held_out_elsewhere():
        return train, None
    path, split = config.held_out_path or config.path, config.held_out_split or config.split
    held_out = _open(config, form, path, split, "data.held_out_path")
    shared = {str(entry) for entry in train.listing()} & {str(e) for e in held_out.listing()}
    if shared:
        raise Refused(
            f"data.held_out_path: {sorted(shared)[0]} is also trained on; give other documents, "
            "or use held_out to divide these"
        )
    return train, held_out


def _open(
    config: DataConfig, form: Form, path: str, split: str, field: str = "data.path"
) -> Source:
    if config.source is SourceKind.DATASET:
        return open_dataset(path, config.name, split, form)
    files = find_files(path, field)
    return JsonLines(files) if config.source is SourceKind.JSONL else TextFiles(files)
