"""Chats as templates write them, and what of them is trained."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers.processors import TemplateProcessing

from farspan.data import token_cache
from farspan.data.config import DataConfig
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.formats import UNTRAINED
from farspan.data.tokenizers import HubTokenizer, Written, load_tokenizer
from farspan.spec import UnsupportedError
from tests.data.characters import character_tokenizer
from tests.data.stores import open_records

TURNS = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# What some templates do: thoughts are kept in the last turn only, an empty one where there is none.
THINKING = """
{%- for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' and loop.last %}<{{ m.thought }}>{% endif %}
{{- m.content }}{{ eos_token }}\n{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# And has the model begin with a thought, of which earlier turns show nothing.
THOUGHTFUL = THINKING.removesuffix("{% endif %}") + "<{% endif %}"
# Of these, the earlier are not even written the same.
REWRITING = """
{%- for m in messages %}[{{ m.role }}]
{{- m.content if loop.last else m.content | upper }}{{ eos_token }}\n{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# Of these, the earlier end otherwise, with a sign that ends what the user says too.
ENDING = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- if m.role == 'assistant' and not loop.last %};{% else %}{{ eos_token }}{% endif %}
{%- endfor %}{%- if add_generation_prompt %}[assistant]{% endif %}"""
# The user's turn ends with the sign that the model speaks.
BRACKETS = """
{%- for m in messages %}
{%- if m.role == 'user' %}[I]{{ m.content }}[/I]{% else %} {{ m.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""
MARKED = """
{%- for m in messages %}[{{ m.role }}]
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"""
NO_END = """
{%- for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
TOOLS = """
{%- if tools %}({{ tools[0].name }}){% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "yes"},
]
# The same as lists of parts, and a template that knows nothing else.
IN_PARTS = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
PARTS = TURNS.replace("m.content", "m.content[0].text")
Build = Callable[..., Corpus]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A corpus of these chats, of a tokenizer with a token a character and this template."""

    def make(template: str | None, *chats: object, tools: object = None, **fields: Any) -> Corpus:
        character_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
        records = [{"messages": c, **({"tools": tools} if tools else {})} for c in chats]
        use = load_tokenizer(str(tmp_path / "tokenizer"))
        return open_records(tmp_path, *records, tokenizer=use, format="chat", **fields)

    return make


def read(corpus: Corpus) -> tuple[str, str]:
    """The first sequence, and what of it is trained, `_` for what is not."""
    batch = corpus.train.once(0)
    characters = character_tokenizer().convert_ids_to_tokens(batch.input_ids[0].tolist())
    labels = batch.labels[0].tolist()
    spoken = ["_" if n == UNTRAINED else c for n, c in zip(labels, characters, strict=True)]
    return "".join(characters), "".join(spoken)


def masked(text: str, *spoken: str) -> str:
    """The text with `_` in place of all but these parts, each of which is there once."""
    kept = ["_"] * len(text)
    for part in spoken:
        assert text.count(part) == 1, part
        begin = text.index(part)
        kept[begin : begin + len(part)] = part
    return "".join(kept)


@pytest.mark.parametrize(
    ("template", "text", "spoken"),
    [
        (TURNS, "[user]hi$\n[assistant]ho$\n[user]so?$\n[assistant]yes$\n", ("ho$", "yes$")),
        (MARKED, "[user]hi$\n[assistant]ho$\n[user]so?$\n[assistant]yes$\n", ("ho$", "yes$")),
        (NO_END, "[user]hi\n[assistant]ho\n[user]so?\n[assistant]yes\n", ("ho\n", "yes\n")),
        (
            THINKING,
            "[user]hi$\n[assistant]ho$\n[user]so?$\n[assistant]<>yes$\n",
            ("ho$", "<>yes$"),
        ),
        (
            THOUGHTFUL,
            "[user]hi$\n[assistant]ho$\n[user]so?$\n[assistant]<>yes$\n",
            ("ho$", ">yes$"),
        ),
        (BRACKETS, "[I]hi[/I] ho$[I]so?[/I] yes$", ("ho$", "yes$")),
        (PARTS, "[user]hi$\n[assistant]ho$\n[user]so?$\n[assistant]yes$\n", ("ho$", "yes$")),
    ],
    ids=["ended", "marked", "without an end", "thinking", "thoughtful", "no sign", "parts"],
)
def test_what_the_model_says_is_trained_and_its_end(
    build: Build, template: str, text: str, spoken: tuple[str, ...]
) -> None:
    chat = IN_PARTS if template is PARTS else CHAT
    assert read(build(template, chat)) == (text, masked(text, *spoken))
    assert read(build(template, chat, loss="all")) == (text, text)


def test_what_is_said_may_begin_like_the_sign_to_think(build: Build) -> None:
    chat = [{**m, "content": f"<{m['content']}"} for m in CHAT]
    text, spoken = read(build(THOUGHTFUL, chat))
    assert spoken == masked(text, "<ho$", "><yes$")


def test_calls_of_tools_are_said_by_the_model(build: Build) -> None:
    """A key of a message that holds nothing is not there; what a call says stays."""
    call = {"name": "add", "arguments": {"a": 1, "b": None}, "id": None}
    chat = [
        {"role": "user", "content": "1+1", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    said = '{"name": "add", "arguments": {"a": 1, "b": null}, "id": null}$'
    text = f"(add)[user]1+1$[assistant]{said}[tool]2$[assistant]two$"
    found = read(build(TOOLS, chat, tools=[{"name": "add", "default": None}]))
    assert found == (text, masked(text, said, "two$"))


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (
            REWRITING,
            CHAT,
            "message 2: the chat template does not mark .* or renders it differently",
        ),
        (ENDING, CHAT, "message 2: the chat template renders it differently .* its end cannot"),
        (TURNS, [CHAT[0], {"role": "assistant", "content": "\ud800"}], "surrogates not allowed"),
        (TURNS, CHAT[1:], "message 1 is the assistant's; begin the conversation with another"),
        (TURNS, CHAT[:1], "none of its tokens is trained; give chats with turns of the assistant"),
        (TURNS, "hi", "line 1: field 'messages': expected a list of messages, each with a role"),
        (TURNS, [{"content": "hi"}], "line 1: field 'messages': expected a list of messages"),
        (
            "{{ raise_exception('only pairs') }}",
            CHAT,
            "line 1: the chat template cannot render field 'messages': only pairs",
        ),
        ("{{ messages[0].x.y }}", CHAT, "the chat template cannot render field 'messages'"),
        (None, CHAT, r"data\.chat_template: the tokenizer .* has none of its own; give a Jinja"),
    ],
)
def test_a_chat_that_cannot_be_read_is_refused(
    build: Build, template: str | None, chat: object, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(template, chat)


def test_a_dataset_of_chats_is_read_with_its_tools(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    """Keys that a table fills in because other rows have them are not there."""
    tools = [{"name": "add"}]
    calls = [{"name": "add", "arguments": {"a": 1}}]
    other = [CHAT[0], {**CHAT[1], "tool_calls": [{"name": "add", "arguments": {"b": 1}}]}]
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    rows = {"messages": [chat, other], "tools": [tools, tools], "id": [1, 2]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    character_tokenizer(TOOLS).save_pretrained(tmp_path / "tokenizer")
    fields: dict[str, Any] = {"source": "dataset", "path": str(tmp_path / "set"), "format": "chat"}
    config = DataConfig(**fields, cache=str(tmp_path / "cache"))
    use = load_tokenizer(str(tmp_path / "tokenizer"))
    text, spoken = read(open_corpus(config, use, context=199, seed=0, watch=lambda *_: None))
    said = ['{"name": "add", "arguments": {"a": 1}}$', 'ho{"name": "add", "arguments": {"b": 1}}$']
    assert text.count("(add)[user]hi$[assistant]") == 2
    assert spoken == masked(text, *said)


def test_a_chat_has_the_template_s_beginning_alone() -> None:
    """Not that of the tokenizer besides."""
    tokenizer = character_tokenizer("^{{ messages[0].content }}")
    first = tokenizer.convert_tokens_to_ids("^")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="^ $A", special_tokens=[("^", first)]
    )
    assert tokenizer("a")["input_ids"][0] == first
    (found,) = HubTokenizer(tokenizer).mark([Written("^ab", ((1, 2),), bare=True)])
    assert tokenizer.convert_ids_to_tokens(found.ids.tolist()) == ["^", "a", "b"]
    assert found.trained.tolist() == [False, True, False]


SPOKEN = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}


def as_sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"from": SPOKEN[m["role"]], "value": m["content"]} for m in messages]


def test_sharegpt_is_a_chat_with_other_words(tmp_path: Path) -> None:
    """Known by its fields; to the token what a chat of the same words is."""
    character_tokenizer(TOOLS).save_pretrained(tmp_path / "tokenizer")
    use = load_tokenizer(str(tmp_path / "tokenizer"))
    told = [*CHAT[:3], {"role": "tool", "content": "42"}, CHAT[3]]
    tools = [{"name": "add"}]

    def found(**record: Any) -> tuple[str, str]:
        return read(open_records(tmp_path, record, tokenizer=use))

    text = "(add)[system]be brief$[user]hi$[assistant]ho$[user]so?$[tool]42$[assistant]yes$"
    expected = text, masked(text, "ho$", "yes$")
    said = as_sharegpt(told)
    assert found(conversations=said, system="be brief", tools=json.dumps(tools)) == expected
    system = {"role": "system", "content": "be brief"}
    assert found(messages=[system, *told], tools=tools) == expected
    # Roles and contents under ShareGPT's name.
    assert found(conversations=told) == found(messages=told)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "line 1: message 1 is from 'function_call', expected one of human, user, gpt",
        ),
        (
            {"conversations": [{"from": "human", "value": 3}]},
            "line 1: message 1: value holds int, expected text",
        ),
        ({"conversations": [{"from": "human"}]}, "list of messages, each with from and value"),
        (
            {"conversations": [{"from": "human", "value": "a"}], "tools": "{"},
            "line 1: field 'tools' holds text that is not JSON",
        ),
    ],
)
def test_what_sharegpt_does_not_say_is_refused(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    character_tokenizer(TOOLS).save_pretrained(tmp_path / "tokenizer")
    use = load_tokenizer(str(tmp_path / "tokenizer"))
    with pytest.raises(UnsupportedError, match=message):
        open_records(tmp_path, record, tokenizer=use)


ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
LARGE = "{{ 'x' * 4000000000 }}"
# One operation, in which Python handles no signal.
POWER = "{% set n = messages | length + 4 %}{{ (n ** (n ** n)) % 7 }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, r"takes more than 0\.5 s of CPU; leave this record out"),
        (POWER, r"takes more than 0\.5 s of CPU"),
        (LARGE, "needs more than 512 MiB; leave this record out"),
    ],
)
def test_a_template_has_limits(
    build: Build, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of time and memory, at the record that meets them; nothing of its process is left."""
    # 1 GiB of new pages took up to 1.5 s of CPU, most of it the system's.
    monkeypatch.setattr(token_cache, "CPU_SECONDS", 30.0 if "MiB" in words else 0.5)
    bomb = f"{{% if messages[-1].content == 'bomb' %}}{template}{{% endif %}}{TURNS}"
    begin, before = sum(os.times()[:4]), set(psutil.Process().children())
    with pytest.raises(UnsupportedError, match=f"line 2: the chat template {words}"):
        build(bomb, CHAT, [*CHAT, {"role": "assistant", "content": "bomb"}])
    assert sum(os.times()[:4]) - begin < token_cache.CPU_SECONDS + 1
    gc.collect()  # the reading that was given up
    assert set(psutil.Process().children()) <= before
