"""Chat templates: which one to use, the date that it writes, and how it expects messages.

JSON in texts is parsed. Parts without text and messages without content are refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from hashlib import sha256
from itertools import count, product
from pathlib import Path
from typing import Any, NoReturn, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from farspan.data.formats import Message
from farspan.spec import UnsupportedError

CONTENT, CALLS, CALL, ARGUMENTS = "content", "tool_calls", "function_call", "arguments"
# Types of a part that has text, in chat completions and in the Responses API.
_TEXTS = ("text", "input_text", "output_text")
_MEDIA = re.compile("image|audio|video|file")
# Keys that describe a message: a message with only these says nothing.
_ABOUT = frozenset({"role", "name", "id", "type", "tool_call_id", "content"})
# A placeholder for a text, and its forms if a template writes code instead of text: Python or JSON
# of a part or of arguments, or JSON of arguments that were JSON already.
_MARK = "qzq{}qzq"
_WRITTEN = re.compile(r"qzq(\d+)qzq")
_CODE = re.compile(r"""'(text|x)': 'qzq|"text": ?"qzq|\\"x\\": ?\\"qzq""")


def read_tools(value: Any, place: str) -> list[Any] | None:
    """Return a record's tools as JSON schemas, from objects or JSON texts. Raises UnsupportedError,
    with `place` and the number of the tool, for anything else."""
    tools = _parsed(value, f"{place}: field 'tools'") if isinstance(value, str) else value
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise UnsupportedError(
            f"{place}: field 'tools' holds {_kind(tools)}, expected a list of tools, each a JSON "
            "schema"
        )
    return [_schema(tool, f"{place}: field 'tools': tool {n}") for n, tool in enumerate(tools, 1)]


def _schema(tool: Any, place: str) -> Any:
    tool = read_object(tool, place)
    for key in ("function", "parameters"):
        if isinstance(tool.get(key), str):
            tool = {**tool, key: read_object(tool[key], f"{place}: {key}")}
    function = tool.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
        own = read_object(function["parameters"], f"{place}: parameters")
        tool = {**tool, "function": {**function, "parameters": own}}
    return tool


def read_message(fields: Message, place: str) -> Message:
    """Return a message without its keys that are null, and with its tool calls as objects. Raises
    UnsupportedError, with `place`, if it has no content, or content other than text."""
    message = {key: value for key, value in fields.items() if value is not None}
    for key, value in message.items():
        if _MEDIA.fullmatch(key.rstrip("s")) and value:
            raise UnsupportedError(f"{place}: {key}: {_NO_MEDIA}")
    if isinstance(message.get(CONTENT), list | tuple):
        message[CONTENT] = _read_parts(message[CONTENT], place)
    if CALLS in message:
        message[CALLS] = _read_calls(message[CALLS], place)
    if CALL in message:
        message[CALL] = _read_call(message[CALL], f"{place}: {CALL}")
    says = any(
        isinstance(value, str | list | Mapping) and len(value) > 0
        for key, value in message.items()
        if key not in _ABOUT
    )
    if CONTENT not in message and not says:
        raise UnsupportedError(
            f"{place} ({message.get('role')}) has no content (null); give its text (an empty text "
            "if it says nothing), or leave the record out"
        )
    return message


_NO_MEDIA = "only text is trained; leave the record out, or give its text alone"


def _read_parts(parts: Sequence[Any], place: str) -> Any:
    """Return a content's parts, checked to be texts; other lists (a tool's result) unchanged."""
    if not all(isinstance(p, str) or _is_part(p) for p in parts):
        return list(parts)
    kept = []
    for given in parts:
        part = {"type": "text", "text": given} if isinstance(given, str) else given
        kind = part.get("type") or "text"
        if isinstance(kind, str) and _MEDIA.search(kind):
            raise UnsupportedError(f"{place}: content has a part of type {kind!r}: {_NO_MEDIA}")
        text = part.get("text" if kind in _TEXTS else kind)
        if not isinstance(text, str):
            raise UnsupportedError(
                f"{place}: content has a part of type {kind!r} that holds {_kind(text)}, expected "
                "text"
            )
        kept.append({"type": "text", "text": text} if kind in _TEXTS else dict(part))
    return kept


def _read_calls(value: Any, place: str) -> list[Any]:
    calls = _parsed(value, f"{place}: {CALLS}") if isinstance(value, str) else value
    if not isinstance(calls, list | tuple):
        raise UnsupportedError(f"{place}: {CALLS} holds {_kind(calls)}, expected a list of calls")
    return [_read_call(call, f"{place}: call {n}") for n, call in enumerate(calls, 1)]


def _read_call(value: Any, place: str) -> Message:
    """Return a tool call as an object. Its arguments, an object or a JSON text, are checked and
    stay as they are."""
    call = read_object(value, place)
    if "function" in call:
        return {**call, "function": _read_call(call["function"], place)}
    if isinstance(call.get(ARGUMENTS), str):
        _arguments(call[ARGUMENTS], place)
    return call


def _arguments(text: str, place: str = "") -> Any:
    """Parse the arguments of a call; some APIs write no arguments as an empty text."""
    return read_object(text, f"{place}: {ARGUMENTS}") if text.strip() else {}


def read_object(given: Any, place: str) -> dict[str, Any]:
    """Return an object, or parse one from a JSON text. Raises UnsupportedError, with `place`, for
    anything else."""
    value = _parsed(given, place) if isinstance(given, str) else given
    if not isinstance(value, Mapping):
        raise UnsupportedError(f"{place} holds {_kind(value)}, expected an object with fields")
    return dict(value)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"{place} holds text that is not JSON: {error}") from error


def _kind(value: Any) -> str:
    names = {type(None): "nothing", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"{type(value).__name__} ({value!r})"[:80])


# -- forms that a template may take ----------------------------------------------------------------


def as_objects(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the arguments of tool calls are objects."""
    return _changed(messages, lambda own: _arguments(own) if isinstance(own, str) else own)


def as_json(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the arguments of tool calls are JSON texts."""
    return _changed(
        messages, lambda own: own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)
    )


def as_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each content is a list of parts."""
    return [
        {**m, CONTENT: [{"type": "text", "text": m[CONTENT]}]}
        if isinstance(m.get(CONTENT), str)
        else m
        for m in messages
    ]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each content is a text: the joined texts of its parts."""
    return [
        {**m, CONTENT: "".join(part["text"] for part in m[CONTENT])}
        if isinstance(m.get(CONTENT), list) and all(map(_holds_text, m[CONTENT]))
        else m
        for m in messages
    ]


def with_marks(messages: Sequence[Message]) -> list[Message]:
    """Return messages with numbered placeholders for texts and for arguments of tool calls: a
    rendered text then shows which of these the template writes."""
    numbers: Iterator[int] = count()

    def content(value: Any) -> Any:
        if isinstance(value, str):
            return _mark(numbers) if value else value
        if isinstance(value, list):
            keys = ((part, _text_key(part)) for part in value)
            return [part if key is None else {**part, key: _mark(numbers)} for part, key in keys]
        return value

    def arguments(value: Any) -> Any:
        found = {"x": _mark(numbers)}
        return json.dumps(found) if isinstance(value, str) else found

    marked = [{**m, CONTENT: content(m[CONTENT])} if CONTENT in m else m for m in messages]
    return _changed(marked, arguments)


def _mark(numbers: Iterator[int]) -> str:
    return _MARK.format(next(numbers))


def find_marks(text: str) -> set[int] | None:
    """Return the numbers of the placeholders in a rendered text; None if the template wrote a list
    or object that contains one as Python or JSON code."""
    numbers = {int(number) for number in _WRITTEN.findall(text.lower())}
    return None if _CODE.search(text.lower()) else numbers


def marks_in(value: Any) -> set[int]:
    """Return the numbers of the placeholders that messages, or a part of a message, contain."""
    return {int(number) for number in _WRITTEN.findall(repr(value))}


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and ("type" in value or "text" in value)


def _text_key(part: Any) -> str | None:
    """Return the key that holds the text of a part of a message; None if the part has no text."""
    key = part.get("type") if _is_part(part) else None
    return key if isinstance(key, str) and isinstance(part.get(key), str) else None


def _holds_text(part: Any) -> bool:
    return _text_key(part) == "text"


def _changed(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return messages with the arguments of each tool call replaced by `change(arguments)`."""

    def of(call: Any) -> Any:
        if isinstance(call, Mapping) and "function" in call:
            return {**call, "function": of(call["function"])}
        has = isinstance(call, Mapping) and ARGUMENTS in call
        return {**call, ARGUMENTS: change(call[ARGUMENTS])} if has else call

    changed: list[Message] = []
    for message in messages:
        own = dict(message)
        if CALLS in own:
            own[CALLS] = [of(call) for call in own[CALLS]]
        if CALL in own:
            own[CALL] = of(own[CALL])
        changed.append(own)
    return changed


# -- templates -------------------------------------------------------------------------------------

DEFAULT, TOOL_USE = "default", "tool_use"  # names by which transformers chooses
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")
_CLOCK = "strftime_now"
# Two moments of a day; only a format that writes the time of day gives different texts.
_MOMENTS = (time(0, 0, 0), time(13, 14, 15, 161718))


@dataclass(frozen=True, slots=True)
class Templates:
    """A tokenizer's chat template, and the one for conversations with tools (often the same)."""

    inner: PreTrainedTokenizerBase
    default: str
    tool_use: str
    day: date

    def listing(self) -> list[object]:
        """Return JSON values for the cache's key: digests of the templates, and the day (None if no
        template may write it)."""
        digests = [sha256(t.encode()).hexdigest() for t in (self.default, self.tool_use)]
        return [*digests, str(self.day) if self.dated() else None]

    def dated(self) -> bool:
        """Return whether a template may write the current day into its text."""
        return _CLOCK in self.default + self.tool_use

    def marks(self, tools: Any) -> bool:
        """Return whether the template marks the model's turns by {% generation %}."""
        return _MARKS.search(self.choose(tools)) is not None

    def choose(self, tools: Any) -> str:
        """Return the template to use with these tools (None: no tools), as transformers would."""
        return self.default if tools is None else self.tool_use

    def write(
        self,
        messages: Sequence[Message],
        tools: Any,
        kwargs: Mapping[str, Any],
        opened: bool = False,
    ) -> str:
        """Render a conversation with a record's variables; if `opened`, begin the next answer."""
        template, write = self.choose(tools), cast(Any, self.inner.apply_chat_template)
        with _settled(template, self.day):
            text: str = write(
                conversation=list(messages),
                tools=tools,
                chat_template=template,
                add_generation_prompt=opened,
                tokenize=False,
                **kwargs,
            )
        return text

    def write_marked(
        self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Render a conversation. Return the text, and the spans of characters that the template
        marks as the model's."""
        # Spans, not transformers' token masks: these lose turns that begin or end with white space
        # if the tokenizer leaves white space out of its offsets.
        template, write = self.choose(tools), cast(Any, chat_template_utils.render_jinja_template)
        with _settled(template, self.day):
            (text,), (spans,) = write(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self.inner.special_tokens_map, **kwargs},
            )
        return text, tuple((begin, end) for begin, end in spans)

    def suit(
        self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any]
    ) -> Sequence[Message]:
        """Return a conversation converted such that the template can render it whole.

        Contents may be texts or parts; arguments of calls may be objects or JSON in texts. Forms
        are tried with placeholders in the messages: in a suitable form the template writes every
        placeholder, and none as code. Objects, and contents as given, come first.

        Raises:
            UnsupportedError: If the template does not write a message, its calls or the tools.
        """
        if tools and not re.search(r"\btools\b", self.choose(tools)):
            raise UnsupportedError(
                "the chat template does not write the record's tools; give a data.chat_template "
                "that does, or records without the field"
            )
        best, probe, shown = as_objects(messages), None, set[int]()
        told = [best] if best == as_json(messages) else [best, as_json(messages)]
        for form, shape in product(told, (None, as_text, as_parts)):
            candidate = form if shape is None else shape(form)
            marked = with_marks(candidate)
            try:
                marks = find_marks(self.write(marked, tools, kwargs))
            except MemoryError:
                raise
            except Exception:  # templates raise errors of any type: this form does not suit
                continue
            if marks is not None and (probe is None or len(marks) > len(shown)):
                best, probe, shown = candidate, marked, marks
            if probe is not None and shown >= marks_in(probe):
                return best
        if probe is not None:
            self._refuse_unwritten(probe, shown, tools, kwargs)
        return best

    def _refuse_unwritten(
        self, probe: Sequence[Message], shown: set[int], tools: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a message of `probe` with a placeholder that the template does not write (not in
        `shown`). The model's earlier turns may lack parts, such as thoughts."""
        for number, message in enumerate(probe, start=1):
            left = marks_in(message) - shown
            if left and message["role"] == "assistant" and number < len(probe):
                with suppress(Exception):  # it may expect another last message
                    left -= find_marks(self.write(probe[:number], tools, kwargs)) or set()
            if left:
                calls = not left & marks_in(message.get(CONTENT))
                role = "give it the role system, " * (message["role"] == "developer")
                raise UnsupportedError(
                    f"message {number} ({message['role']}): the chat template does not write "
                    f"{'the arguments of its calls' if calls else 'its content'}; {role}leave it "
                    "out, or give a data.chat_template that does"
                )


@contextmanager
def _settled(template: str, day: date) -> Iterator[None]:
    """Make rendering in the with-block reproducible: a fixed day, and no random text."""
    environment: Any = chat_template_utils._compile_jinja_template(template).environment
    names, filters = environment.globals, environment.filters
    before = names[_CLOCK], names["lipsum"], filters["random"]
    names[_CLOCK] = partial(_written, day)
    names["lipsum"] = filters["random"] = _refuse_random
    try:
        yield
    finally:
        names[_CLOCK], names["lipsum"], filters["random"] = before


def _written(day: date, form: str) -> str:
    texts = {datetime.combine(day, moment).strftime(form) for moment in _MOMENTS}
    if len(texts) > 1:
        raise UnsupportedError(
            f"the chat template writes the time of day ({form!r}), which changes at each reading; "
            "give a data.chat_template that does not"
        )
    return texts.pop()


def _refuse_random(*_: object, **__: object) -> NoReturn:
    raise UnsupportedError(
        "it writes random text, different at each reading; give another data.chat_template"
    )


def find_template(
    inner: PreTrainedTokenizerBase, chosen: str | None, tokenizer: str, read: Callable[[Path], str]
) -> tuple[str, str]:
    """Return the chat template for conversations, and the one for conversations with tools.

    Args:
        inner: The tokenizer, with one template, several by name, or none.
        chosen: The name of one of its templates, or a file; None: transformers' choice.
        tokenizer: Its name in messages.
        read: Reads a file.

    Raises:
        UnsupportedError: If the template does not exist; the error names those that do.
    """
    own = inner.chat_template
    named: Mapping[str, str] = own if isinstance(own, dict) else {}
    names = f"; its templates are {', '.join(sorted(named))}" if named else ""
    if chosen is None:
        if isinstance(own, str):
            return own, own
        if DEFAULT in named:
            return named[DEFAULT], named.get(TOOL_USE, named[DEFAULT])
        what = "the name of one of these, or " if named else ""
        raise UnsupportedError(
            f"data.chat_template: the tokenizer {tokenizer!r} has none "
            f"{'named default' if named else 'of its own'}{names}; give {what}a Jinja file, or set "
            "data.tokenizer to the folder or hub name of a tokenizer that has one"
        )
    if chosen in named:
        return named[chosen], named[chosen]
    path = Path(chosen).expanduser()
    if named and not path.exists():
        raise UnsupportedError(
            f"data.chat_template: {chosen!r} is neither a file here nor a template of the "
            f"tokenizer {tokenizer!r}{names}; give the name of one of these, or a Jinja file"
        )
    template = read(path)
    return template, template
