"""Chats, ShareGPT conversations, prompts and preferences, written by a chat template.

Training covers the model's turns and the tokens that end them, not the other turns. A template
marks the model's turns by `{% generation %}`. Few templates do; for the others, turns are located
in the rendered text:

    <|user|> Hi. <|end|> <|assistant|> Hello. <|end|> <|user|> And now? <|end|> <|assistant|> ...
    earlier turns, and the sign        [ trained    ] up to the next token that stops
    that the model speaks                             generation, or begins the next turn

Some templates omit thoughts from earlier turns; those are not trained. A template that changes
earlier turns in any other way cannot be used like this, and is refused.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import compress
from typing import Any, ClassVar

from jinja2 import Environment, nodes
from transformers.utils import chat_template_utils

from farspan.data.config import MOST_QUOTED
from farspan.data.formats import (
    ASSISTANT,
    CHOSEN,
    LABEL,
    PROMPT,
    READ,
    REJECTED,
    SYSTEM,
    TEMPLATE_KWARGS,
    TOOLS,
    TURN_MARKS,
    Message,
    field_of,
    take_marks,
    text_of,
    with_system,
)
from farspan.data.templates import CALLS, Templates, read_message, read_object, read_tools
from farspan.data.tokenizers import Document, Form, Written
from farspan.formatting import shortened
from farspan.spec import UnsupportedError

# Names of speakers in ShareGPT and related formats, and their roles.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "system": SYSTEM,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Names of the assistant for which a template writes no turn of the model.
_ANSWERERS = {name for name, role in _SPEAKERS.items() if role == ASSISTANT} | {"ai", "bot"}
_OTHERWISE = (
    "give a data.chat_template that has {% generation %} around the model's turns, or set "
    "data.loss to all"
)
_NOWHERE = "\ue000"  # a character for private use
_Rendered = tuple[str, tuple[tuple[int, int], ...] | None]
# Rises whenever the same record gives other text or spans; the first version had no number.
_READ = 3


_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
# transformers 5.24 passes a thought under any such name to a template that reads either of the
# first two.
_THOUGHTS: tuple[str, ...] = getattr(chat_template_utils, "_REASONING_FIELDS", ())
# Names that are no variables of a record: the rest of the record or the run file sets them.
_NOT_KWARGS = ("messages", "conversation", TOOLS, "chat_template", "add_generation_prompt")


@cache
def named_in(template: str) -> frozenset[str] | None:
    """Return the variables, attributes and keys that a chat template uses. None if the template
    cannot be parsed: rendering it will report that."""
    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = environment.parse(_GENERATION.sub("", template))
    except Exception:  # templates raise errors of any type
        return None
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.name for node in tree.find_all(nodes.Name)}
    return frozenset(names | {str(node.value) for node in tree.find_all(nodes.Const)})


@dataclass(frozen=True, slots=True)
class ChatForm(Form):
    """Reader of chats: records of messages with roles and contents, and of tools to offer.
    ShareGPT records call these `from` and `value`, and may hold the first message in `system`."""

    field: str
    everything: bool  # train all turns, not only the assistant's
    templates: Templates
    stops: tuple[str, ...]  # tokens that stop generation
    marks: tuple[str, ...]  # other special tokens that a template may put after a turn
    sharegpt: bool = False

    @property
    def masked(self) -> bool:
        return not self.everything

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    @property
    def chats(self) -> tuple[str, ...]:
        return self.columns

    def names(self, word: str) -> bool:
        """Return whether a chat template uses this name for a variable, an attribute or a key."""
        templates = (self.templates.default, self.templates.tool_use)
        return any((used := named_in(t)) is None or word in used for t in templates)

    def own_templates(self) -> tuple[str, ...]:
        """Return the chat templates that came with the tokenizer, not those of the run file."""
        inner = self.templates.inner.chat_template
        return tuple(inner.values()) if isinstance(inner, dict) else (inner,) if inner else ()

    def reads(self, document: Document) -> Collection[str]:  # noqa: ARG002 - the same for all
        _, *others = READ["sharegpt" if self.sharegpt else "chat"]
        return {self.field, *others} - (set() if self.names(TOOLS) else {TOOLS})

    def reads_key(self, key: str) -> bool:
        keys = ("from", "value") if self.sharegpt else ("role", "content")
        if key in keys or key in TURN_MARKS:
            return True
        alike = _THOUGHTS[:2] if key in _THOUGHTS else ()
        return not self.sharegpt and any(map(self.names, (key, *alike)))

    def key(self, column: str) -> str:  # noqa: ARG002 - other fields have fixed names
        return "data.field"

    def listing(self) -> list[object]:
        kind = "sharegpt" if self.sharegpt else "chat"
        values = [self.field, self.everything, *self.templates.listing(), *self.stops, *self.marks]
        return [kind, _READ, *values]

    def read(self, document: Document) -> Written | None:
        messages = self.messages(document)
        if not messages:
            return None
        if self.field != PROMPT:
            _refuse_another_prompt(document, messages)
        return self.written(document, messages)

    def written(self, document: Document, messages: Sequence[Message]) -> Written:
        """Render a conversation, system message first. Return the text and its trained spans,
        without the turns that a record marks as not trained."""
        unmarked, turns = take_marks(document, with_system(document, messages), self.everything)
        document, bare = self._prepared(document, unmarked)
        if self.everything:
            text, signs = self._text(document, bare), (*self.stops, *self.marks)
            ended = bare[-1]["role"] != ASSISTANT or text.rstrip().endswith(signs)
            closing = "" if ended else self._closing(document, bare, text)
            return self._noted(Written(text + closing, bare=True), bare)
        written = (self._marked if self.template_says(document) else self._said)(document, bare)
        if turns is not None:
            self._refuse_other_turns(document, written, len(turns))
            written = replace(written, trained=tuple(compress(written.trained or (), turns)))
        return self._noted(written, bare)

    def _noted(self, written: Written, messages: Sequence[Message]) -> Written:
        """Return a copy of `written` with `holds_sign` set: whether any message's own content has a
        token that ends turns. The token cache counts such documents."""
        contents = json.dumps([m.get("content") for m in messages], ensure_ascii=False)
        contains = any(sign in contents for sign in (*self.stops, *self.marks))
        return replace(written, holds_sign=contains)

    def template_says(self, document: Document) -> bool:
        """Return whether the template marks the model's turns by {% generation %}."""
        return self.templates.marks(document.fields.get(TOOLS))

    def answer(self, document: Document, messages: Sequence[Message], prompt: int) -> Written:
        """Render a conversation, and train the model's turns after its first `prompt` messages,
        which are the prompt. Raises UnsupportedError if no such turn follows, or if a message of
        the prompt has a key, such as `weight`, that asks to train it."""
        if any(message.get(mark) for message in messages[:prompt] for mark in TURN_MARKS):
            raise UnsupportedError(
                f"{document.place}: a mark asks to train a turn of the prompt, but only field "
                f"{self.field!r} is trained; leave the mark out, or write the record as a chat"
            )
        unmarked, turns = take_marks(document, with_system(document, messages), False)
        said, answers = (
            sum(m["role"] == ASSISTANT for m in part) for part in (messages, messages[prompt:])
        )
        if answers == 0:
            raise UnsupportedError(
                f"{document.place}: field {self.field!r} has no message of the {ASSISTANT}; give "
                f"the answer as an {ASSISTANT} message, or leave the record out"
            )
        document, bare = self._prepared(document, unmarked)
        written = (self._marked if self.template_says(document) else self._said)(document, bare)
        self._refuse_other_turns(document, written, said)
        kept = [*compress((written.trained or ())[-answers:], (turns or (True,) * said)[-answers:])]
        return self._noted(replace(written, trained=tuple(kept)), bare)

    def _refuse_other_turns(self, document: Document, written: Written, said: int) -> None:
        spans = written.trained or ()
        if len(spans) != said:
            raise UnsupportedError(
                f"{document.place}: field {self.field!r}: the chat template marks {len(spans)} "
                f"turns of the model for {said} messages of the {ASSISTANT}; give another "
                "data.chat_template"
            )

    def _said(self, document: Document, messages: Sequence[Message]) -> Written:
        text = self._text(document, messages)
        spans = self._turns(document, messages, text)
        if spans and spans[-1][1] > len(text):
            text += self._closing(document, messages, text)
        return Written(text, spans, bare=True)

    def messages(self, document: Document) -> Sequence[Message]:
        """Return a record's messages. Raises UnsupportedError if the field is no list of them."""
        given = field_of(document, self.field, self.key(self.field))
        whole = isinstance(given, Sequence) and not isinstance(given, str)
        needed = ("from", "value") if self.sharegpt else ("role",)
        if not whole or not all(
            isinstance(m, Mapping) and all(k in m for k in needed) for m in given
        ):
            what = "from and value" if self.sharegpt else "a role and a content"
            raise UnsupportedError(
                f"{document.place}: field {self.field!r}: expected a list of messages, each with "
                f"{what}"
            )
        if self.sharegpt:
            return self._from_sharegpt(document, given)
        places = (f"{document.place}: message {number}" for number in range(1, len(given) + 1))
        return [read_message(m, place) for m, place in zip(given, places, strict=True)]

    def _from_sharegpt(self, document: Document, turns: Sequence[Message]) -> Sequence[Message]:
        messages: list[Message] = []
        for number, message in enumerate(turns, start=1):
            role = _SPEAKERS.get(str(message.get("from")))
            if role is None:
                raise UnsupportedError(
                    f"{document.place}: message {number} is from {message.get('from')!r}, expected "
                    f"one of {', '.join(_SPEAKERS)}; write others as a chat, with role and content"
                )
            content = message["value"]
            if not isinstance(content, str):
                raise UnsupportedError(
                    f"{document.place}: message {number}: value holds {type(content).__name__}, "
                    "expected text"
                )
            marks = {name: message[name] for name in TURN_MARKS if name in message}
            messages.append({"role": role, "content": content, **marks})
        return messages

    def _kwargs(self, document: Document) -> Mapping[str, Any]:
        """Return the values that a record gives to variables of the template. Drops empty values of
        variables that the template does not use, since tables give every row all columns. Raises
        UnsupportedError if such a value is not empty."""
        given = document.fields.get(TEMPLATE_KWARGS) or {}
        place = f"{document.place}: field {TEMPLATE_KWARGS!r}"
        kwargs = read_object(given, place)
        for name in [*kwargs]:
            if name not in _NOT_KWARGS and self.names(name):
                continue
            if kwargs.pop(name) not in (None, "", [], {}):
                raise UnsupportedError(
                    f"{place}: the chat template takes no variable {name!r}; leave it out, "
                    f"give another data.chat_template, or set data.ignore: [{TEMPLATE_KWARGS}]"
                )
        return kwargs

    def _prepared(
        self, document: Document, messages: Sequence[Message]
    ) -> tuple[Document, Sequence[Message]]:
        """Return the document with parsed tools, and its messages as the template takes them."""
        tools = read_tools(document.fields.get(TOOLS), document.place)
        document = replace(document, fields={**document.fields, TOOLS: tools})
        kwargs = self._kwargs(document)
        try:
            return document, self.templates.suit(messages, tools, kwargs)
        except UnsupportedError as error:
            raise UnsupportedError(f"{document.place}: field {self.field!r}: {error}") from error

    def _turns(
        self, document: Document, messages: Sequence[Message], text: str
    ) -> tuple[tuple[int, int], ...]:
        """Return the spans of characters that the model writes, one for each of its turns."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                _refuse_answerer(document, number + 1, message["role"])
                continue
            if number == 0:
                raise UnsupportedError(
                    f"{document.place}: message 1 is the {ASSISTANT}'s; begin the conversation "
                    "with another role's message"
                )
            turn = _Turn(document, messages, number, text)
            probe = self._text(document, turn.elsewhere())
            begin = self._begin(turn, probe)
            end = None if begin is None else self._end(turn, probe, begin)
            if begin is None:
                raise UnsupportedError(
                    f"{document.place}: message {number + 1}: the chat template does not mark "
                    f"where the model's turn begins (add_generation_prompt), or renders it "
                    f"differently when other messages follow; {_OTHERWISE}"
                )
            if end is None:
                raise UnsupportedError(
                    f"{document.place}: message {number + 1}: the chat template renders it "
                    "differently when other messages follow, so its end cannot be found; "
                    f"{_OTHERWISE}"
                )
            spans.append((begin, end))
        return tuple(spans)

    def _begin(self, turn: "_Turn", probe: str) -> int | None:
        """Return where the model's turn begins in the text; None if that is unknown. `probe` is the
        conversation, rendered with a placeholder as the turn's content."""
        document, messages, number = turn.document, turn.messages, turn.number
        before = self._text(document, messages[:number], opened=True)
        # The sign may ask the model to think first, while earlier turns show no thought. The probe
        # shows which part of the sign is there, as its message shares no character with the sign.
        begin = _common(before, probe)
        told = len(self._text(document, messages[:number]))
        if begin <= told:
            # The template writes no sign. The turn begins with the message, unless text stands
            # before it.
            begin = probe.find(_NOWHERE)
            if probe[told:begin].strip():
                return None
        return begin if turn.text.startswith(probe[:begin]) else None

    def _end(self, turn: "_Turn", probe: str, begin: int) -> int | None:
        """Return where the model's turn that begins at `begin` ends; None if unknown. It ends after
        a token that stops generation or that the template writes between turns; without one, after
        all that the template writes for the turn. Tokens within the content do not count."""
        document, messages, text = turn.document, turn.messages, turn.text
        _, marker, behind = probe.rpartition(_NOWHERE)
        known = bool(marker) and text.endswith(behind)
        content_end = max(begin, len(text) - len(behind)) if known else begin
        until, ending = self._text(document, messages[: turn.number + 1]), ""
        end = len(until)
        if not text.startswith(until):
            # The template may omit thoughts from turns that others follow, but nothing else.
            ending = self._text(document, turn.elsewhere(alone=True)).rpartition(_NOWHERE)[2]
            before = until.removesuffix(ending)
            if (
                not known
                or not until.endswith(ending)
                or not before.endswith(text[begin:content_end])
            ):
                return None
            end = content_end + _common(behind, ending)
        for signs in (self.stops, self.marks):
            ends = [
                text.rfind(s, content_end, end) + len(s)
                for s in signs
                if text.find(s, content_end, end) >= 0
            ]
            if ends:
                return max(ends)
        if ending and end < content_end + len(ending):
            return None
        follows = messages[turn.number + 1 :]
        if not follows:
            return end + len(self._closing(document, messages, text))
        return end if follows[0]["role"] == ASSISTANT else end + len(self._sign_at(text, end))

    def _sign_at(self, text: str, place: int) -> str:
        """Return the token at this place of a text if it may end a turn, else an empty text."""
        return next((s for s in (*self.stops, *self.marks) if text.startswith(s, place)), "")

    def _closing(self, document: Document, messages: Sequence[Message], text: str) -> str:
        """Return the token that ends the model's last turn if the template writes it only before a
        next turn, else "". The caller appends it, so that the model learns to write it."""
        try:
            more = self._text(document, [*messages, _next(messages)])
        except UnsupportedError:  # the template may expect other roles
            return ""
        return self._sign_at(more, len(text)) if more.startswith(text) else ""

    def _text(self, document: Document, messages: Sequence[Message], opened: bool = False) -> str:
        """Render messages; if `opened`, up to and including the prompt for the next answer."""
        tools, kwargs = document.fields.get(TOOLS), self._kwargs(document)
        write = partial(self.templates.write, messages, tools, kwargs, opened)
        return self._refusing(document, lambda: (write(), None))[0]

    def _marked(self, document: Document, messages: Sequence[Message]) -> Written:
        tools, kwargs = document.fields.get(TOOLS), self._kwargs(document)
        write = partial(self.templates.write_marked, messages, tools, kwargs)
        return Written(*self._refusing(document, write), bare=True)

    def _refusing(self, document: Document, write: Callable[[], _Rendered]) -> _Rendered:
        try:
            rendered = write()
            rendered[0].encode()
            return rendered
        except MemoryError:
            raise  # from a memory limit, with a better message
        except Exception as error:  # templates raise errors of any type
            raise UnsupportedError(
                f"{document.place}: the chat template cannot render field {self.field!r}: "
                f"{' '.join(str(error).split())}"
            ) from error


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn of the model, in a rendered conversation."""

    document: Document
    messages: Sequence[Message]
    number: int
    text: str

    def elsewhere(self, alone: bool = False) -> list[Message]:
        """Put a placeholder in place of this turn's content; `alone`: drop later messages."""
        own = {**self.messages[self.number], "content": _placeholder(self.messages)}
        after = [] if alone else self.messages[self.number + 1 :]
        return [*self.messages[: self.number], own, *after]


def _placeholder(messages: Sequence[Message]) -> str | list[Mapping[str, str]]:
    """Return a placeholder, which no record contains, to find where a template writes a message's
    content. It is a list of parts if any message's content is one, else a text."""
    parts = any(isinstance(message.get("content"), list) for message in messages)
    return [{"type": "text", "text": _NOWHERE}] if parts else _NOWHERE


def _next(messages: Sequence[Message]) -> Message:
    """Return a message to append, to see what the template writes before a next turn: a tool's
    result if the last message calls a tool, else a user's message."""
    content, calls = _placeholder(messages), messages[-1].get(CALLS)
    if not calls:
        return {"role": "user", "content": content}
    call = calls[0]
    name = call.get("function", call).get("name", "")
    return {"role": "tool", "content": content, "name": name, "tool_call_id": call.get("id", "")}


def _refuse_another_prompt(document: Document, messages: Sequence[Message]) -> None:
    """Raise UnsupportedError if the messages do not begin with the content of a field `prompt`."""
    prompt = document.fields.get(PROMPT)
    begin: object = next((m.get("content") for m in messages if m["role"] != SYSTEM), None)
    if isinstance(prompt, list):
        begin = list(messages[: len(prompt)])
    if prompt and prompt != begin:
        raise UnsupportedError(
            f"{document.place}: field {PROMPT!r} differs from the beginning of the messages; "
            "make it their first message, or leave it out"
        )


def _refuse_answerer(document: Document, number: int, role: Any) -> None:
    """Raise UnsupportedError if a role is another word for the assistant, such as `bot`."""
    if str(role).strip().lower() in _ANSWERERS:
        raise UnsupportedError(
            f"{document.place}: message {number} has the role {role!r}, and only turns of the role "
            f"{ASSISTANT!r} are trained; write {ASSISTANT!r}, or give a data.chat_template that "
            "has {% generation %} around the model's turns"
        )


def _are_messages(document: Document, names: Sequence[str], chat: ChatForm | None) -> bool:
    """Return whether a record's values are lists of messages, rather than texts. Raises
    UnsupportedError for a mixture, and for messages if there is no template to render them."""
    texts = [isinstance(field_of(document, name, "data.format"), str) for name in names]
    if any(texts) != all(texts):
        raise UnsupportedError(
            f"{document.place}: one of {' and '.join(names)} is a text and the other is not; give "
            "both as texts, or both as lists of messages"
        )
    if not all(texts) and chat is None:
        raise UnsupportedError(
            f"{document.place}: {' and '.join(names)} are messages, and the tokenizer has no chat "
            "template; give data.chat_template, another data.tokenizer, or texts"
        )
    if all(texts) and chat is not None and chat.templates.default not in chat.own_templates():
        raise UnsupportedError(
            f"data.chat_template: {document.place}: {' and '.join(names)} are texts, which need no "
            "template; leave data.chat_template out, or give lists of messages"
        )
    return not all(texts)


def _reads_of(chat: ChatForm | None, document: Document, names: Sequence[str]) -> Collection[str]:
    """Return which fields of a record its reader uses: `names` and, if the first of these fields
    holds messages, also tools, system message and template variables."""
    if chat is None or isinstance(document.fields.get(names[0]), str):
        return names
    return {*names, *({TOOLS, SYSTEM, TEMPLATE_KWARGS} & set(chat.reads(document)))}


@dataclass(frozen=True, slots=True)
class PromptForm(Form):
    """Reader of records of a prompt and its completion, or of two other fields used as such, as
    texts or messages. The prompt is trained only if `everything` is set."""

    prompt: str
    completion: str
    everything: bool
    chat: ChatForm | None = None  # None: the tokenizer has no template
    name: str = PROMPT  # of the format
    keys: tuple[str, str] = ("data.prompt", "data.completion")  # with which users name the fields

    @property
    def masked(self) -> bool:
        return not self.everything

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.completion

    @property
    def chats(self) -> tuple[str, ...]:
        return self.columns

    def key(self, column: str) -> str:
        return self.keys[self.columns.index(column)]

    def listing(self) -> list[object]:
        chat = () if self.chat is None else self.chat.listing()
        return [self.name, self.prompt, self.completion, self.everything, *chat]

    def reads(self, document: Document) -> Collection[str]:
        return _reads_of(self.chat, document, self.columns)

    def reads_key(self, key: str) -> bool:
        return self.chat is None or self.chat.reads_key(key)

    def read(self, document: Document) -> Written | None:
        for name in self.chats:
            field_of(document, name, self.key(name))
        if _are_messages(document, self.chats, self.chat):
            return self._messages(document)
        prompt = text_of(document, self.prompt, self.key(self.prompt))
        text = prompt + text_of(document, self.completion, self.key(self.completion))
        if not text.strip():
            return None
        return Written(text, None if self.everything else ((len(prompt), len(text)),))

    def _messages(self, document: Document) -> Written:
        assert self.chat is not None
        told, said = (replace(self.chat, field=n).messages(document) for n in self.chats)
        form = replace(self.chat, field=self.completion)
        if self.everything:
            return form.written(document, [*told, *said])
        return form.answer(document, [*told, *said], len(told))


@dataclass(frozen=True, slots=True)
class UnpairedForm(PromptForm):
    """Reader of single answers: a prompt, its completion, and whether that is desirable."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.completion, LABEL

    @property
    def chats(self) -> tuple[str, ...]:
        return self.prompt, self.completion

    def key(self, column: str) -> str:  # noqa: ARG002
        return "data.format"

    def reads(self, document: Document) -> Collection[str]:
        return {LABEL, *_reads_of(self.chat, document, self.chats)}

    def read(self, document: Document) -> Written | None:
        label = field_of(document, LABEL, self.key(LABEL))
        if label not in (False, True):  # 0 and 1 as well
            raise UnsupportedError(
                f"{document.place}: field {LABEL!r} is {shortened(repr(label), MOST_QUOTED)}, "
                "expected true for a desirable answer or false"
            )
        written = PromptForm.read(self, document)
        return None if written is None else replace(written, desirable=bool(label))


@dataclass(frozen=True, slots=True)
class PreferenceForm(Form):
    """Reader of pairs: a chosen and a rejected answer to one prompt, as two documents that each
    begin with the prompt. The chat template renders messages; texts stay as they are. The prompt
    may have its own field, or be the beginning of both answers."""

    chat: ChatForm | None  # None: the tokenizer has no template

    columns: ClassVar[tuple[str, ...]] = (CHOSEN, REJECTED)
    chats: ClassVar[tuple[str, ...]] = (CHOSEN, REJECTED, PROMPT)
    masked: ClassVar[bool] = True

    def reads(self, document: Document) -> Collection[str]:
        texts = all(isinstance(document.fields.get(name), str) for name in self.columns)
        if texts and document.fields.get(PROMPT) is None:
            raise UnsupportedError(
                f"{document.place}: both answers are texts, but there is no field {PROMPT!r} "
                f"(only: {', '.join(document.fields)}); give the text they answer as {PROMPT!r}"
            )
        return _reads_of(self.chat, document, self.chats)

    def reads_key(self, key: str) -> bool:
        return self.chat is None or self.chat.reads_key(key)

    def listing(self) -> list[object]:
        return ["preference", *(() if self.chat is None else self.chat.listing())]

    def read(self, document: Document) -> tuple[Written, Written]:
        messages = _are_messages(document, self.columns, self.chat)
        chosen, rejected = (self._chat if messages else self._text)(document)
        if chosen.text == rejected.text:
            raise UnsupportedError(
                f"{document.place}: both answers are the same; leave the record out"
            )
        return chosen, rejected

    def _text(self, document: Document) -> list[Written]:
        prompt = text_of(document, PROMPT, self.key(PROMPT))
        texts = [prompt + text_of(document, name, self.key(name)) for name in (CHOSEN, REJECTED)]
        return [Written(text, ((len(prompt), len(text)),)) for text in texts]

    def _chat(self, document: Document) -> list[Written]:
        assert self.chat is not None
        forms = [replace(self.chat, field=name) for name in (CHOSEN, REJECTED)]
        chosen, rejected = (list(form.messages(document)) for form in forms)
        told: list[Message] = []
        if isinstance(document.fields.get(PROMPT), list):
            told = list(replace(self.chat, field=PROMPT).messages(document))
        shared = len(told)
        if not told:  # both answers contain it
            pairs = enumerate(zip(chosen, rejected, strict=False))
            least = min(len(chosen), len(rejected))
            shared = next((n for n, (one, other) in pairs if one != other), least)
            told = self._prompt(document, chosen[:shared])
            shared = max(shared, len(told))
        return [
            form.answer(document, told + own, shared)
            for form, own in zip(forms, (chosen, rejected), strict=True)
        ]

    def _prompt(self, document: Document, shared: Sequence[Message]) -> list[Message]:
        """Return a pair's text prompt as a list of one user message; [] if it has none, or if the
        prompt is among the messages `shared` that begin both answers. Raises UnsupportedError if
        `shared` has only other messages."""
        prompt = document.fields.get(PROMPT)
        if not prompt:
            return []
        text = text_of(document, PROMPT, self.key(PROMPT))
        if not shared:
            return [{"role": "user", "content": text}]
        if text in [message.get("content") for message in shared]:
            return []
        raise UnsupportedError(
            f"{document.place}: field {PROMPT!r} differs from the messages that both answers begin "
            f"with; leave out field {PROMPT!r}, or leave these messages out of the answers"
        )


def _common(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
