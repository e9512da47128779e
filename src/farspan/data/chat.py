"""Conversations: chats, ShareGPT's, prompts and preferences, as a chat template writes them.

What the model itself says is trained, and what ends it; what it is told is not. A template says
which is which by `{% generation %}` around the model's turns. Few do, so it is found otherwise in
the text of the others:

    <|user|> Hi. <|end|> <|assistant|> Hello. <|end|> <|user|> And now? <|end|> <|assistant|> ...
    turns before it, and the sign      [ trained    ] up to the first end-of-sequence token, or
    that the model speaks                             to where the template ends with this turn

Thoughts that a template leaves out of earlier turns are not trained there. One that writes earlier
turns otherwise in any other way cannot be read so: it is refused.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress
from typing import Any, ClassVar

from jinja2 import Environment, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from farspan.data.formats import (
    ASSISTANT,
    CHOSEN,
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
from farspan.data.tokenizers import Document, Written
from farspan.spec import UnsupportedError

# What ShareGPT and those who came after it call who speaks.
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
MARKS = re.compile(r"\{%[-+]?\s*generation\b")
_OTHERWISE = (
    "give a data.chat_template that has {% generation %} around what the model says, or set "
    "data.loss to all"
)
_NOWHERE = "\ue000"  # a character for private use
_NOWHERE_AS_PART = {"type": "text", "text": _NOWHERE}
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
# transformers 5.24 hands a thought under any of these names to a template that reads either of the
# first two.
_THOUGHTS: tuple[str, ...] = getattr(chat_template_utils, "_REASONING_FIELDS", ())
# What the template gets from the rest of the record, or from the run file.
_NOT_KWARGS = ("messages", "conversation", TOOLS, "chat_template", "add_generation_prompt")


@cache
def named_in(template: str) -> frozenset[str] | None:
    """Find the names in a template: variables, attributes and keys.

    Returns:
        All of them, or None for a template that cannot be parsed, which rendering it reports.
    """
    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = environment.parse(_GENERATION.sub("", template))
    except Exception:  # a template raises what it wants
        return None
    found = {node.attr for node in tree.find_all(nodes.Getattr)}
    found |= {node.name for node in tree.find_all(nodes.Name)}
    return frozenset(found | {str(node.value) for node in tree.find_all(nodes.Const)})


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A list of messages, each with a role and a content, and the tools that may be called. Of
    ShareGPT's they have `from` and `value` instead, and what the system says may stand beside them.
    """

    field: str
    everything: bool  # is trained
    inner: PreTrainedTokenizerBase
    template: str
    sharegpt: bool = False

    any_ids: ClassVar[bool] = False

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
        """Tell whether a template has this name of a variable, an attribute or a key."""
        own = self.own_templates()
        templates = own if self.template in own else (self.template,)
        return any((found := named_in(t)) is None or word in found for t in templates)

    def own_templates(self) -> tuple[str, ...]:
        """List the templates that came with the tokenizer."""
        own = self.inner.chat_template
        return tuple(own.values()) if isinstance(own, dict) else (own,) if own else ()

    def reads(self, document: Document) -> Collection[str]:  # noqa: ARG002 - the same for all
        _, *others = READ["sharegpt" if self.sharegpt else "chat"]
        return {self.field, *others} - (set() if self.names(TOOLS) else {TOOLS})

    def reads_key(self, key: str) -> bool:
        own = ("from", "value") if self.sharegpt else ("role", "content")
        if key in own or key in TURN_MARKS:
            return True
        alike = _THOUGHTS[:2] if key in _THOUGHTS else ()
        return not self.sharegpt and any(map(self.names, (key, *alike)))

    def key(self, column: str) -> str:  # noqa: ARG002 - what else is read has a fixed name
        return "data.field"

    def listing(self) -> list[object]:
        digest = hashlib.sha256(self.template.encode()).hexdigest()
        return ["sharegpt" if self.sharegpt else "chat", self.field, self.everything, digest]

    def read(self, document: Document) -> Written | None:
        messages = self.messages(document)
        if not messages:
            return None
        if self.field != PROMPT:
            _refuse_another_prompt(document, messages)
        return self.written(document, messages)

    def written(self, document: Document, messages: Sequence[Message]) -> Written:
        """Write a conversation, its system message first, without training turns marked off."""
        bare, turns = take_marks(document, with_system(document, messages), self.everything)
        if self.everything:
            return Written(self._text(document, bare), bare=True)
        whole = self._marked if self.template_says() else self._said
        written = whole(document, bare)
        if turns is None:
            return written
        self._refuse_other_turns(document, written, len(turns))
        return replace(written, trained=tuple(compress(written.trained or (), turns)))

    def template_says(self) -> bool:
        """Whether the template marks what the model says."""
        return MARKS.search(self.template) is not None

    def answer(self, document: Document, messages: Sequence[Message], told: int) -> Written:
        """A conversation of which the model's turns behind the first `told` messages are trained.
        Raises UnsupportedError where there is none."""
        if any(message.get(mark) for message in messages[:told] for mark in TURN_MARKS):
            raise UnsupportedError(
                f"{document.place}: a mark has a turn of the prompt trained, and only those of "
                f"field {self.field!r} are; leave the mark out, or write the record as a chat"
            )
        bare, turns = take_marks(document, with_system(document, messages), False)
        said, own = (
            sum(m["role"] == ASSISTANT for m in part) for part in (messages, messages[told:])
        )
        if own == 0:
            raise UnsupportedError(
                f"{document.place}: field {self.field!r} has no message of the {ASSISTANT} of its "
                "own; give the answer as one, or leave the record out"
            )
        whole = self._marked if self.template_says() else self._said
        written = whole(document, bare)
        self._refuse_other_turns(document, written, said)
        kept = [*compress((written.trained or ())[-own:], (turns or (True,) * said)[-own:])]
        return replace(written, trained=tuple(kept))

    def _refuse_other_turns(self, document: Document, written: Written, said: int) -> None:
        spans = written.trained or ()
        if len(spans) != said:
            raise UnsupportedError(
                f"{document.place}: field {self.field!r}: the chat template marks {len(spans)} "
                f"turns of the model in {said} messages of the {ASSISTANT}; give another "
                "data.chat_template"
            )

    def _said(self, document: Document, messages: Sequence[Message]) -> Written:
        text = self._text(document, messages)
        return Written(text, self._turns(document, messages, text), bare=True)

    def messages(self, document: Document) -> Sequence[Message]:
        """Of the record's field. Raises UnsupportedError where it holds something else."""
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
        messages = [{key: value for key, value in m.items() if value is not None} for m in given]
        return self._from_sharegpt(document, messages) if self.sharegpt else messages

    def _from_sharegpt(self, document: Document, given: Sequence[Message]) -> Sequence[Message]:
        """With roles and contents."""
        messages: list[Message] = []
        for number, message in enumerate(given, start=1):
            role = _SPEAKERS.get(str(message.get("from")))
            if role is None:
                raise UnsupportedError(
                    f"{document.place}: message {number} is from {message.get('from')!r}, expected "
                    f"one of {', '.join(_SPEAKERS)}; write others as a chat, with role and content"
                )
            content = message.get("value", "")
            if not isinstance(content, str):
                raise UnsupportedError(
                    f"{document.place}: message {number}: value holds {type(content).__name__}, "
                    "expected text"
                )
            marks = {name: message[name] for name in TURN_MARKS if name in message}
            messages.append({"role": role, "content": content, **marks})
        return messages

    def _kwargs(self, document: Document) -> Mapping[str, Any]:
        """Return the record's variables for the template, each of which it names."""
        given = document.fields.get(TEMPLATE_KWARGS) or {}
        if not isinstance(given, Mapping):
            raise UnsupportedError(
                f"{document.place}: field {TEMPLATE_KWARGS!r} holds {type(given).__name__}, "
                "expected an object"
            )
        for name in given:
            if name in _NOT_KWARGS or not self.names(name):
                raise UnsupportedError(
                    f"{document.place}: field {TEMPLATE_KWARGS!r}: the chat template does not take "
                    f"{name!r} from it; leave it out, or give another data.chat_template"
                )
        return given

    def _tools(self, document: Document) -> Any:
        """ShareGPT's may be JSON in a text."""
        tools = document.fields.get(TOOLS)
        if self.sharegpt and isinstance(tools, str):
            try:
                tools = json.loads(tools) if tools.strip() else None
            except (ValueError, RecursionError) as error:
                raise UnsupportedError(
                    f"{document.place}: field {TOOLS!r} holds text that is not JSON: {error}"
                ) from error
        return tools

    def _turns(
        self, document: Document, messages: Sequence[Message], text: str
    ) -> tuple[tuple[int, int], ...]:
        """The characters that the model says."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if number == 0:
                raise UnsupportedError(
                    f"{document.place}: message 1 is the {ASSISTANT}'s; begin the conversation "
                    "with what the model is told"
                )
            begin = self._begin(document, messages, number, text)
            end = None
            if begin is not None:
                end = self._end(text, begin, self._text(document, messages[: number + 1]))
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

    def _begin(
        self, document: Document, messages: Sequence[Message], number: int, text: str
    ) -> int | None:
        """Where the model begins to say message `number`."""
        before = self._text(document, messages[:number], opened=True)
        # The sign may have the model think first, and an earlier turn show no thought. What of the
        # sign is there is told by a turn of which no character is the sign's.
        content = messages[number].get("content")
        nowhere = _NOWHERE if isinstance(content, str | None) else [_NOWHERE_AS_PART]
        other = {**messages[number], "content": nowhere}
        probe = self._text(document, [*messages[:number], other, *messages[number + 1 :]])
        begin = _shared(before, probe)
        told = len(self._text(document, messages[:number]))
        if begin <= told:
            # There is no sign. Where nothing else stands before the turn, it begins with itself.
            begin = probe.find(_NOWHERE)
            if probe[told:begin].strip():
                return None
        return begin if text.startswith(probe[:begin]) else None

    def _end(self, text: str, start: int, until: str) -> int | None:
        """Where the turn that begins at `start` ends, and `until` where it is the last one."""
        sign = self.inner.eos_token
        if sign and sign in text[start:]:
            end = text.index(sign, start) + len(sign)
            # What the model thought may be gone from turns that others follow; the rest may not.
            said = until[: until.find(sign, start) + len(sign)]
            if said[start:].endswith(text[start:end]):
                return end
        return len(until) if text.startswith(until) else None

    def _text(self, document: Document, messages: Sequence[Message], opened: bool = False) -> str:
        """`opened`: with the sign that the model speaks next."""
        text: str = self._refusing(
            document,
            self.inner.apply_chat_template,
            conversation=list(messages),
            tools=self._tools(document),
            chat_template=self.template,
            add_generation_prompt=opened,
            tokenize=False,
            **self._kwargs(document),
        )
        return text

    def _marked(self, document: Document, messages: Sequence[Message]) -> Written:
        """What the template marks, as characters: the library's own way from them to tokens loses
        turns that begin or end with white space which a tokenizer leaves out of its offsets."""
        (text,), (spans,) = self._refusing(
            document,
            render_jinja_template,
            conversations=[list(messages)],
            tools=self._tools(document),
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.inner.special_tokens_map, **self._kwargs(document)},
        )
        return Written(text, tuple((begin, end) for begin, end in spans), bare=True)

    def _refusing(self, document: Document, write: Callable[..., Any], **how: Any) -> Any:
        try:
            found = write(**how)
            (found if isinstance(found, str) else found[0][0]).encode()
            return found
        except MemoryError:
            raise  # a limit's, that says more
        except Exception as error:  # a template raises what it wants; its words are kept
            raise UnsupportedError(
                f"{document.place}: the chat template cannot render field {self.field!r}: "
                f"{' '.join(str(error).split())}"
            ) from error


def _refuse_another_prompt(document: Document, messages: Sequence[Message]) -> None:
    """Raises UnsupportedError where a field `prompt` says what the messages do not begin with."""
    prompt = document.fields.get(PROMPT)
    begin: object = next((m.get("content") for m in messages if m["role"] != SYSTEM), None)
    if isinstance(prompt, list):
        begin = list(messages[: len(prompt)])
    if prompt and prompt != begin:
        raise UnsupportedError(
            f"{document.place}: field {PROMPT!r} is not what the messages begin with; make it "
            "their first message, or leave it out"
        )


def _are_messages(document: Document, names: Sequence[str], chat: ChatForm | None) -> bool:
    """Tell lists of messages from texts. Raises UnsupportedError if there is one of each, or no
    template that can write messages."""
    texts = [isinstance(field_of(document, name, "data.format"), str) for name in names]
    if any(texts) != all(texts):
        raise UnsupportedError(
            f"{document.place}: one of {' and '.join(names)} is a text and the other is none; give "
            "both as texts, or both as lists of messages"
        )
    if not all(texts) and chat is None:
        raise UnsupportedError(
            f"{document.place}: {' and '.join(names)} are messages, and the tokenizer has no chat "
            "template; give data.chat_template, another data.tokenizer, or texts"
        )
    if all(texts) and chat is not None and chat.template not in chat.own_templates():
        raise UnsupportedError(
            f"data.chat_template: {document.place}: {' and '.join(names)} are texts, which no "
            "template writes; leave it out, or give lists of messages"
        )
    return not all(texts)


def _reads_of(chat: ChatForm | None, document: Document, names: Sequence[str]) -> Collection[str]:
    """List the fields that are read with these names: of messages more than of texts."""
    if chat is None or isinstance(document.fields.get(names[0]), str):
        return names
    return {*names, *({TOOLS, SYSTEM, TEMPLATE_KWARGS} & set(chat.reads(document)))}


@dataclass(frozen=True, slots=True)
class PromptForm:
    """A prompt and how it goes on, as texts or as messages; the prompt is trained only where
    `everything` is."""

    prompt: str
    completion: str
    everything: bool
    chat: ChatForm | None = None  # None: the tokenizer has no template

    any_ids: ClassVar[bool] = False

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
        return "data.prompt" if column == self.prompt else "data.completion"

    def listing(self) -> list[object]:
        chat = () if self.chat is None else self.chat.listing()
        return ["prompt", self.prompt, self.completion, self.everything, *chat]

    def reads(self, document: Document) -> Collection[str]:
        return _reads_of(self.chat, document, self.columns)

    def reads_key(self, key: str) -> bool:
        return self.chat is None or self.chat.reads_key(key)

    def read(self, document: Document) -> Written | None:
        for name in self.columns:
            field_of(document, name, self.key(name))
        if _are_messages(document, self.columns, self.chat):
            return self._messages(document)
        prompt = text_of(document, self.prompt, self.key(self.prompt))
        text = prompt + text_of(document, self.completion, self.key(self.completion))
        if not text.strip():
            return None
        return Written(text, None if self.everything else ((len(prompt), len(text)),))

    def _messages(self, document: Document) -> Written:
        assert self.chat is not None
        told, said = (replace(self.chat, field=n).messages(document) for n in self.columns)
        own = replace(self.chat, field=self.completion)
        if self.everything:
            return own.written(document, [*told, *said])
        return own.answer(document, [*told, *said], len(told))


@dataclass(frozen=True, slots=True)
class PreferenceForm:
    """Two answers to one prompt, each a document with the prompt before it: the one that was
    chosen, and the one that was rejected. Texts stand as they are; messages are written by the
    chat template, and the prompt may stand in both answers instead of a field of its own."""

    chat: ChatForm | None  # None: the tokenizer has no template

    columns: ClassVar[tuple[str, ...]] = (CHOSEN, REJECTED)
    chats: ClassVar[tuple[str, ...]] = (CHOSEN, REJECTED, PROMPT)
    masked: ClassVar[bool] = True
    any_ids: ClassVar[bool] = False

    def reads(self, document: Document) -> Collection[str]:
        return _reads_of(self.chat, document, self.chats)

    def reads_key(self, key: str) -> bool:
        return self.chat is None or self.chat.reads_key(key)

    def key(self, column: str) -> str:  # noqa: ARG002 - all have the names that trainers expect
        return "data.format"

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
        if not told:  # it stands in both answers
            pairs = enumerate(zip(chosen, rejected, strict=False))
            least = min(len(chosen), len(rejected))
            shared = next((n for n, (one, other) in pairs if one != other), least)
            told = self._asked(document, chosen[:shared])
            shared = max(shared, len(told))
        return [
            form.answer(document, told + own, shared)
            for form, own in zip(forms, (chosen, rejected), strict=True)
        ]

    def _asked(self, document: Document, shared: Sequence[Message]) -> list[Message]:
        """Return the message that a prompt as text adds to those that both answers begin with."""
        prompt = document.fields.get(PROMPT)
        if not prompt:
            return []
        text = text_of(document, PROMPT, self.key(PROMPT))
        if not shared:
            return [{"role": "user", "content": text}]
        if text in [message.get("content") for message in shared]:
            return []
        raise UnsupportedError(
            f"{document.place}: field {PROMPT!r} is not among the messages that both answers begin "
            "with; leave it out there, or these messages out of the answers"
        )


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin alike with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
