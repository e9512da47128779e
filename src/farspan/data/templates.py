"""Chat templates: which one writes a conversation, on which day, and in which form it takes it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from farspan.data.messages import (
    Message,
    as_json,
    as_objects,
    as_parts,
    as_text,
    count_marks,
    with_marks,
)
from farspan.spec import UnsupportedError

DEFAULT, TOOL_USE = "default", "tool_use"  # names that transformers chooses by
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")
_CLOCK = "strftime_now"
# Two moments of one day that no format but one of the time of day tells apart.
_MOMENTS = (time(0, 0, 0), time(13, 14, 15, 161718))


@dataclass(frozen=True, slots=True)
class Templates:
    """The template of conversations and, where it is another, that of conversations with tools."""

    inner: PreTrainedTokenizerBase
    default: str
    tool_use: str
    day: date

    def listing(self) -> list[object]:
        """Give JSON values that change whenever the text does, the day only where it is written."""
        digests = [sha256(t.encode()).hexdigest() for t in (self.default, self.tool_use)]
        return [*digests, str(self.day) if self.dated() else None]

    def dated(self) -> bool:
        """Tell whether a template may write the day."""
        return _CLOCK in self.default + self.tool_use

    def marks(self, tools: Any) -> bool:
        """Tell whether the template marks the model's turns by {% generation %}."""
        return _MARKS.search(self.choose(tools)) is not None

    def choose(self, tools: Any) -> str:
        """Choose as transformers' `get_chat_template` does: by the presence of tools."""
        return self.default if tools is None else self.tool_use

    def write(self, messages: Sequence[Message], tools: Any, opened: bool = False) -> str:
        """Render a conversation; `opened` adds the prompt for the model's next turn."""
        template, write = self.choose(tools), cast(Any, self.inner.apply_chat_template)
        with _settled(template, self.day):
            text: str = write(
                conversation=list(messages),
                tools=tools,
                chat_template=template,
                add_generation_prompt=opened,
                tokenize=False,
            )
        return text

    def write_marked(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Render a conversation, with the characters that the template marks: the library's own way
        from them to tokens loses turns that begin or end with white space which a tokenizer leaves
        out of its offsets."""
        template, write = self.choose(tools), cast(Any, chat_template_utils.render_jinja_template)
        with _settled(template, self.day):
            (text,), (spans,) = write(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.inner.special_tokens_map,
            )
        return text, tuple((begin, end) for begin, end in spans)

    def suit(self, messages: Sequence[Message], tools: Any) -> Sequence[Message]:
        """Give a conversation in the form that the template takes.

        Contents may be texts or parts, arguments of calls objects or JSON in texts. Of a copy with
        marks in place of them, the form that suits writes every mark, and none as code. Objects,
        and contents as they are given, come first.
        """
        best, most = as_objects(messages), -2
        told = [best] if best == as_json(messages) else [best, as_json(messages)]
        for given, shape in product(told, (None, as_text, as_parts)):
            found = given if shape is None else shape(given)
            probe, marks = with_marks(found)
            try:
                score = count_marks(self.write(probe, tools).lower())
            except MemoryError:
                raise
            except Exception:  # a template raises what it wants: it does not take this form
                score = -1
            if score > most:
                best, most = found, score
            if score == marks:
                break
        return best


@contextmanager
def _settled(template: str, day: date) -> Iterator[None]:
    """Have the template write the same text whenever it is read: of this day, and none that is
    drawn at random."""
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
            f"it writes the time of day ({form!r}), which is another at each reading; give a "
            "data.chat_template without it"
        )
    return texts.pop()


def _refuse_random(*_: object, **__: object) -> NoReturn:
    raise UnsupportedError(
        "it writes random text, which is another at each reading; give a data.chat_template "
        "without it"
    )


def find_template(
    inner: PreTrainedTokenizerBase, chosen: str | None, tokenizer: str, read: Callable[[Path], str]
) -> tuple[str, str]:
    """Find the template of conversations, and that of conversations with tools.

    Args:
        inner: The tokenizer, with one template, several by name, or none.
        chosen: The name of one of its templates, or a file; None: as transformers chooses.
        tokenizer: Its name in messages.
        read: Reads a file.

    Raises:
        UnsupportedError: Where there is no such template, naming those that there are.
    """
    own = inner.chat_template
    named: Mapping[str, str] = own if isinstance(own, dict) else {}
    names = f"; its templates are {', '.join(sorted(named))}" if named else ""
    if chosen is None:
        if isinstance(own, str):
            return own, own
        if DEFAULT in named:
            return named[DEFAULT], named.get(TOOL_USE, named[DEFAULT])
        what = "one of these by name, or " if named else ""
        raise UnsupportedError(
            f"data.chat_template: the tokenizer {tokenizer!r} has none "
            f"{'named default' if named else 'of its own'}{names}; give {what}a file with one "
            "(Jinja), or data.tokenizer the folder or hub name of another"
        )
    if chosen in named:
        return named[chosen], named[chosen]
    path = Path(chosen).expanduser()
    if named and not path.exists():
        raise UnsupportedError(
            f"data.chat_template: {chosen!r} is neither a file here nor a template of the "
            f"tokenizer {tokenizer!r}{names}; give one of these, or a file with one (Jinja)"
        )
    template = read(path)
    return template, template
