"""Conversations: chats, ShareGPT's and preferences, as a chat template writes them.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from farspan.data.formats import field_of, text_of
from farspan.data.tokenizers import Document, Written
from farspan.spec import UnsupportedError

TOOLS = "tools"
ASSISTANT, SYSTEM = "assistant", "system"
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
Message = Mapping[str, Any]


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
    def optional(self) -> tuple[str, ...]:
        return (TOOLS, SYSTEM) if self.sharegpt else (TOOLS,)

    def key(self, column: str) -> str:  # noqa: ARG002 - what else is read has a fixed name
        return "data.field"

    def listing(self) -> list[object]:
        digest = hashlib.sha256(self.template.encode()).hexdigest()
        return ["sharegpt" if self.sharegpt else "chat", self.field, self.everything, digest]

    def read(self, document: Document) -> Written | None:
        messages = self.messages(document)
        if not messages:
            return None
        if not self.everything and self.template_says():
            return self._marked(document, messages)
        if self.everything:
            return Written(self._text(document, messages), bare=True)
        return self._said(document, messages)

    def template_says(self) -> bool:
        """Whether the template marks what the model says."""
        return MARKS.search(self.template) is not None

    def answer(self, document: Document, messages: Sequence[Message], told: int) -> Written:
        """A conversation of which the model's turns behind the first `told` messages are trained.
        Raises UnsupportedError where there is none."""
        whole = self._marked if self.template_says() else self._said
        written = whole(document, messages)
        spans = written.trained or ()
        said, own = (
            sum(m["role"] == ASSISTANT for m in part) for part in (messages, messages[told:])
        )
        if len(spans) != said:
            raise UnsupportedError(
                f"{document.place}: field {self.field!r}: the chat template marks {len(spans)} "
                f"turns of the model in {said} messages of the {ASSISTANT}; give another "
                "data.chat_template"
            )
        if own == 0:
            raise UnsupportedError(
                f"{document.place}: field {self.field!r} has no message of the {ASSISTANT} of its "
                "own; give the answer as one, or leave the record out"
            )
        return replace(written, trained=spans[-own:])

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
        messages = []
        if document.fields.get(SYSTEM):
            content = text_of(document, SYSTEM, self.key(SYSTEM))
            messages.append({"role": SYSTEM, "content": content})
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
            messages.append({"role": role, "content": content})
        return messages

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
            **self.inner.special_tokens_map,
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


PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


@dataclass(frozen=True, slots=True)
class PreferenceForm:
    """Two answers to one prompt, each a document with the prompt before it: the one that was
    chosen, and the one that was rejected. Texts stand as they are; messages are written by the
    chat template, and the prompt may stand in both answers instead of a field of its own."""

    chat: ChatForm | None  # None: the tokenizer has no template

    columns: ClassVar[tuple[str, ...]] = (CHOSEN, REJECTED)
    optional: ClassVar[tuple[str, ...]] = (PROMPT, TOOLS)
    masked: ClassVar[bool] = True
    any_ids: ClassVar[bool] = False

    def key(self, column: str) -> str:  # noqa: ARG002 - all have the names that trainers expect
        return "data.format"

    def listing(self) -> list[object]:
        return ["preference", *(() if self.chat is None else self.chat.listing())]

    def read(self, document: Document) -> tuple[Written, Written]:
        both = [field_of(document, name, self.key(name)) for name in (CHOSEN, REJECTED)]
        if isinstance(both[0], str) != isinstance(both[1], str):
            raise UnsupportedError(
                f"{document.place}: one answer is a text and the other is none; give both as "
                "texts, or both as lists of messages"
            )
        chosen, rejected = (self._text if isinstance(both[0], str) else self._chat)(document)
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
        if self.chat is None:
            raise UnsupportedError(
                f"{document.place}: the answers are messages, and the tokenizer has no chat "
                "template; give data.chat_template, another data.tokenizer, or answers as texts"
            )
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
        return [
            form.answer(document, told + own, shared)
            for form, own in zip(forms, (chosen, rejected), strict=True)
        ]


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
