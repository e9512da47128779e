"""Chats of the field: the text that is trained is the template's, and turns end in a stop."""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers.utils.chat_template_utils import render_jinja_template
from typer.testing import CliRunner

from farspan.cli import app
from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import Corpus, open_corpus, open_form
from farspan.data.tokenizers import Document, HubTokenizer, Written, stop_ids
from farspan.spec import UnsupportedError
from farspan.train import origin
from farspan.train.setup import show_data
from tests.data.characters import character_tokenizer
from tests.data.test_chat import CHAT, IN_PARTS, NO_END, PARTS, TURNS
from tests.train.tiny import MODEL, Stopped, Stopping, fit, tiny_run

TRL_FAMILIES = (
    *("qwen2_5", "qwen3_instruct_2507", "glm4moe", "llama3", "gemma", "phi3", "cohere"),
    *("deepseekv3", "lfm2", "muse_glimmer", "nemotron_3_nano"),
)
# The tokens that stop the models of a family, their tokenizer's first.
STOPS = {
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "llama3": ("<|end_of_text|>", "<|eot_id|>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseekv3": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "muse_glimmer": ("<|eot|>",),
}
CHATML = ("<|im_end|>",)
GLM = """
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def hub(template: Any, eos: str = "$", others: Iterable[str] = (), **own: Any) -> HubTokenizer:
    """A tokenizer of characters and special tokens, whose model stops at `others`, too."""
    inner = character_tokenizer(template)
    inner.add_special_tokens({"eos_token": eos, **own})
    for token in others:
        inner.add_tokens([AddedToken(token, special=True, normalized=False)], special_tokens=True)
    return HubTokenizer(inner, frozenset(map(inner.get_vocab().__getitem__, others)))


def read(tokenizer: HubTokenizer, record: dict[str, Any], **own: Any) -> tuple[str, list[str]]:
    """The text of one record, and what of it is trained."""
    config = DataConfig(
        source=SourceKind.JSONL,
        path="-",
        tokenizer="words",
        **{"format": "chat", **own},
    )
    found = open_form(config, tokenizer).read(Document(0, 3, "data.jsonl: line 3", record))
    assert isinstance(found, Written)
    spans = [(0, len(found.text))] if found.trained is None else found.trained
    return found.text, [found.text[begin:end] for begin, end in spans]


def corpus(root: Path, tokenizer: HubTokenizer, *records: Any, **own: Any) -> Corpus:
    path = root / "data.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(
        source=SourceKind.JSONL,
        path=str(path),
        tokenizer="words",
        cache=str(root / "cache"),
        **{"format": "chat", **own},
    )
    return open_corpus(config, tokenizer, context=200, seed=0, watch=lambda *_: None)


def ids_of(found: Corpus) -> list[int]:
    return [int(number) for number in found.parts[0].stores[0].tokens]


# -- templates by name -----------------------------------------------------------------------------

NAMED = {
    "default": TURNS,
    "tool_use": "({{ tools | length }})" + TURNS,
    "rag": "RAG{{ tools and '' }}" + TURNS,
}
TOOL = {"name": "add", "parameters": {"type": "object"}}


@pytest.mark.parametrize("tools", [None, [TOOL], []])
def test_the_template_is_chosen_as_transformers_chooses_it(tools: Any) -> None:
    tokenizer = hub(NAMED)
    record = {"messages": CHAT, **({} if tools is None else {"tools": tools})}
    expected = tokenizer.inner.apply_chat_template(CHAT, tools=tools, tokenize=False)
    text, trained = read(tokenizer, record)
    assert text == expected
    assert text.startswith("[user]" if tools is None else f"({len(tools)})")
    assert trained == ["ho$", "yes$"]


def test_a_template_is_named_by_the_run_file(tmp_path: Path) -> None:
    text, trained = read(hub(NAMED), {"messages": CHAT, "tools": [TOOL]}, chat_template="rag")
    assert text.startswith("RAG[user]hi$")
    assert trained == ["ho$", "yes$"]
    wrong = r"data\.chat_template: 'rga' is neither a file here nor .*default, rag, tool_use; give"
    with pytest.raises(UnsupportedError, match=wrong):
        read(hub(NAMED), {"messages": CHAT}, chat_template="rga")
    only = {"rag": TURNS, "tool_use": TURNS}
    with pytest.raises(UnsupportedError, match="none named default; its templates are rag, tool"):
        read(hub(only), {"messages": CHAT})
    assert read(hub(only), {"messages": CHAT}, chat_template="rag")[1] == ["ho$", "yes$"]
    (tmp_path / "own.jinja").write_bytes(b"\xef\xbb\xbf" + TURNS.encode())
    own = str(tmp_path / "own.jinja")
    assert read(hub(NAMED), {"messages": CHAT}, chat_template=own)[0][0] == "["


def test_marks_of_either_template_count_and_so_does_its_text(tmp_path: Path) -> None:
    marked = TURNS.replace(
        "{{ m.content }}{{ eos_token }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ eos_token }}",
    )
    told = "{% if tools %}(tools){% endif %}"
    tokenizer = hub({"default": TURNS, "tool_use": told + marked})
    assert read(tokenizer, {"messages": CHAT})[1] == ["ho$", "yes$"]
    assert read(tokenizer, {"messages": CHAT, "tools": [TOOL]})[1] == ["ho", "yes"]
    one = corpus(tmp_path, tokenizer, {"messages": CHAT, "tools": [TOOL]})
    two = corpus(tmp_path, hub({"default": TURNS, "tool_use": told + TURNS}))
    assert one.identity != two.identity
    assert any("no token that stops" in line for line in one.describe(200))


# -- JSON in texts ---------------------------------------------------------------------------------

CALLS = """
{%- if tools %}({{ tools | tojson }}){% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}=ARGUMENTS{% endfor %}{{ eos_token }}
{%- endfor %}{%- if add_generation_prompt %}[assistant]{% endif %}"""
WAYS = {
    "json": "{{ call.function.arguments | tojson }}",
    "items": "{% for k, v in call.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}",
    "added": "{{ '' + call.function.arguments }}",
    "printed": "{{ call.function.arguments }}",
    "either": "{{ call.function.arguments if call.function.arguments is string else "
    "call.function.arguments | tojson }}",
}
CITY = {"city": "Rome"}


def calling(arguments: Any) -> list[Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given_as", ["object", "text", "call", "calls"])
def test_arguments_are_written_once(way: str, given_as: str) -> None:
    """As an object where the template takes it, else as the JSON that it was, or is."""
    text = json.dumps(CITY)
    messages = calling(CITY if given_as == "object" else text)
    if given_as == "call":
        messages[1]["tool_calls"] = [json.dumps(messages[1]["tool_calls"][0])]
    if given_as == "calls":
        messages[1]["tool_calls"] = json.dumps(messages[1]["tool_calls"])
    said = f"f={'city:Rome' if way == 'items' else text}$"
    found = read(hub(CALLS.replace("ARGUMENTS", WAYS[way])), {"messages": messages})
    assert found == (f"[user]hi$[assistant]{said}", [said])


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [{**TOOL, "parameters": json.dumps(TOOL["parameters"])}],
    ],
)
def test_tools_are_read_from_json(tools: Any) -> None:
    assert read(hub(CALLS), {"messages": CHAT, "tools": tools}) == read(
        hub(CALLS), {"messages": CHAT, "tools": [TOOL]}
    )
    functions = {"type": "function", "function": TOOL}
    nested = {"type": "function", "function": json.dumps(TOOL)}
    assert read(hub(CALLS), {"messages": CHAT, "tools": [functions]}) == read(
        hub(CALLS), {"messages": CHAT, "tools": [nested]}
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": CHAT, "tools": "{'name': 'f'}"}, "field 'tools' holds text that is not JSON"),
        ({"messages": CHAT, "tools": ["f"]}, "'tools': tool 1 holds text that is not JSON"),
        ({"messages": CHAT, "tools": {"name": "f"}}, "holds an object, expected a list of tools"),
        ({"messages": CHAT, "tools": [TOOL, 3]}, r"tool 2 holds int \(3\), expected an object"),
        ({"messages": calling("{'city': 1}")}, "message 2: call 1: arguments holds text that is n"),
        ({"messages": calling('["Rome"]')}, "call 1: arguments holds a list, expected an object"),
        ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": 3}]}, "expected a list of cal"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": []}]},
            r"data.jsonl: line 3: message 2 \(assistant\) has no content \(null\); give its text",
        ),
        (
            {"messages": [{"role": "user", "content": None}, CHAT[1]]},
            r"message 1 \(user\) has no c",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]},
            "message 1: content has a part of type 'image_url': only text is trained",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            r"a part of type 'text' that holds int \(3\), expected text",
        ),
    ],
)
def test_what_is_not_said_in_text_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(hub(CALLS), record)


@pytest.mark.parametrize(
    ("template", "record", "what"),
    [
        (TURNS, {"messages": CHAT, "tools": [TOOL]}, "the record's tools"),
        (TURNS, {"messages": calling(CITY)}, "the arguments of its calls"),
        (CALLS.replace("m.content", "m.text"), {"messages": CHAT}, "its content"),
    ],
)
def test_what_a_template_leaves_out_is_named(
    template: str, record: dict[str, Any], what: str
) -> None:
    with pytest.raises(
        UnsupportedError, match=f"line 3: .*the chat template does not write {what}"
    ):
        read(hub(template), record)


# -- contents in parts -----------------------------------------------------------------------------

ADDED = TURNS.replace("{{ m.content }}", "{{ '' + m.content }}")
ITERATED = TURNS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
EITHER = TURNS.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)
SHAPES = {
    "text": CHAT,
    "parts": IN_PARTS,
    "several": [
        {**m, "content": [m["content"][:1], {"type": "output_text", "text": m["content"][1:]}]}
        for m in CHAT
    ],
    "mixed": [CHAT[0], IN_PARTS[1], CHAT[2], IN_PARTS[3]],
}


@pytest.mark.parametrize("template", [TURNS, ADDED, ITERATED, EITHER], ids=range(4))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", ["answers", "all"])
def test_contents_are_given_as_the_template_takes_them(
    template: str, shape: str, loss: str
) -> None:
    text = "[user]hi$\n[assistant]ho$\n[user]so?$\n[assistant]yes$\n"
    expected = ["ho$", "yes$"] if loss == "answers" else [text]
    assert read(hub(template), {"messages": SHAPES[shape]}, loss=loss) == (text, expected)


def test_a_template_of_one_part_takes_texts_too() -> None:
    assert read(hub(PARTS), {"messages": CHAT}) == read(hub(PARTS), {"messages": IN_PARTS})


# -- messages that a template leaves out ---------------------------------------------------------

NAMED_ROLES = """
{%- for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}
{%- elif m.role == 'assistant' %}[assistant]{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
TOLD = {"content": "left out"}
SPEAKS_AND_CALLS = [*calling({}), {"role": "tool", "content": "r"}, {**CHAT[1]}]
SPEAKS_AND_CALLS[1] = {**SPEAKS_AND_CALLS[1], **TOLD}
LEFT_OUT: dict[str, tuple[str, list[Any], str]] = {
    "system": (
        NAMED_ROLES,
        [{"role": "system", **TOLD}, *CHAT],
        r"message 1 \(system\): .* content",
    ),
    "tool": (NAMED_ROLES, [*CHAT, {"role": "tool", **TOLD}], r"message 5 \(tool\): .* its content"),
    "developer of qwen3": (
        "qwen3",
        [{"role": "developer", **TOLD}, *CHAT],
        r"message 1 \(developer\): .* its content; give it the role system",
    ),
    "words with a call": ("llama3_1", SPEAKS_AND_CALLS, r"message 2 \(assistant\): .* its content"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_message_that_the_template_leaves_out_is_named(case: str) -> None:
    """transformers writes a text without it, and says nothing."""
    template, chat, message = LEFT_OUT[case]
    tokenizer = hub(template if "{" in template else trl(template))
    assert TOLD["content"] not in tokenizer.inner.apply_chat_template(chat, tokenize=False)
    with pytest.raises(UnsupportedError, match=message):
        read(tokenizer, {"messages": chat})


def test_what_a_template_leaves_out_of_earlier_turns_alone_may_go() -> None:
    """A template of thoughts writes what the assistant says by the way only while it works."""
    thinking = CALLS.replace(
        "{{ m.content or '' }}",
        "{% if not m.tool_calls or messages[-1].role != 'assistant' or loop.last %}"
        "{{ m.content or '' }}{% endif %}",
    ).replace("ARGUMENTS", WAYS["json"])
    tokenizer = hub(thinking)
    expected = tokenizer.inner.apply_chat_template(SPEAKS_AND_CALLS, tokenize=False)
    text, _ = read(tokenizer, {"messages": SPEAKS_AND_CALLS}, loss="all")
    assert text == expected
    assert TOLD["content"] not in text


@pytest.mark.parametrize("role", ["model", "gpt", "Assistant", "bot"])
def test_the_assistant_by_another_name_is_named(role: str) -> None:
    """Its turn would be read, and not trained."""
    chat = [*CHAT[:2], CHAT[2], {**CHAT[3], "role": role}]
    with pytest.raises(UnsupportedError, match=f"message 4 has the role '{role}', and only turns"):
        read(hub(TURNS), {"messages": chat})
    marked = TURNS.replace(
        "{{ m.content }}{{ eos_token }}",
        "{% if m.role != 'user' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}",
    )
    assert read(hub(marked), {"messages": chat})[1] == ["ho$", "yes$"]


# -- ends of turns ---------------------------------------------------------------------------------


def trl(family: str, training: bool = False) -> str:
    trl = pytest.importorskip("trl")
    name = f"{family}_training.jinja" if training else f"{family}.jinja"
    return (Path(trl.__file__).parent / "chat_templates" / name).read_text("utf-8")


def oracle(
    tokenizer: HubTokenizer, template: str, messages: Sequence[Any]
) -> tuple[str, list[str]]:
    """What transformers marks by a template's {% generation %}, without white space at the end of
    a turn, which stands behind its stop."""
    write: Any = render_jinja_template
    (text,), (spans,) = write(
        conversations=[list(messages)],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.inner.special_tokens_map,
    )
    return text.rstrip(), [text[begin:end].rstrip() for begin, end in spans if end > begin]


USES = {
    "two turns": CHAT,
    "a system": [{"role": "system", "content": "be brief"}, *CHAT],
    "ends said": [
        {"role": "user", "content": "say STOP twice"},
        {"role": "assistant", "content": "a STOP b"},
        {"role": "user", "content": "STOP so?"},
        {"role": "assistant", "content": "yes STOP"},
    ],
}


@pytest.mark.parametrize("family", TRL_FAMILIES)
@pytest.mark.parametrize("use", USES)
def test_turns_are_those_of_trl_s_training_templates(family: str, use: str) -> None:
    stops = STOPS.get(family, CHATML)
    tokenizer = hub(trl(family), stops[0], stops[1:], bos_token="<s>")
    messages = json.loads(json.dumps(USES[use]).replace("STOP", stops[-1]))
    if family == "gemma":
        messages = [m for m in messages if m["role"] != "system"]  # which it refuses
    text, spans = oracle(tokenizer, trl(family, training=True), messages)
    if family == "phi3":  # the end of the last turn is followed by that of all text
        spans = [*spans[:-2], "\n".join(spans[-2:])]
    found, trained = read(tokenizer, {"messages": messages})
    assert found.rstrip() == text
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    # Some of theirs begin with what the prompt of the model's turn has already.
    for turn, span, content in zip(trained, spans, said, strict=True):
        assert span.endswith(turn.rstrip())
        assert content in turn
        assert turn.rstrip().endswith(stops if family != "glm4moe" else ("<|user|>",))
    if family in ("glm4moe", "llama3", "gemma", "phi3", "qwen3_instruct_2507"):
        assert [turn.rstrip() for turn in trained] == spans


def test_the_next_role_s_marker_ends_a_turn(tmp_path: Path) -> None:
    """Of a tool's turn where it follows; the token that stops is trained."""
    signs = ("<|user|>", "<|observation|>", "<|assistant|>")
    tokenizer = hub(GLM, "<|endoftext|>", signs[:2])
    text, trained = read(tokenizer, {"messages": CHAT})
    assert trained == ["\nho<|user|>", "\nyes<|user|>"]
    assert text.endswith("yes<|user|>")
    assert read(tokenizer, {"messages": CHAT}, loss="all") == (text, [text])
    lines = corpus(tmp_path, tokenizer, {"messages": CHAT}).describe(200)
    assert "turns: end in <|user|>, which stops generation" in lines
    assert not any("note: " in line and "turns" in line for line in lines)


def test_a_marker_that_stops_nothing_is_said(tmp_path: Path) -> None:
    """A base model with ChatML: its own end is another."""
    template = trl("qwen2_5")
    inner = hub(template, "<|endoftext|>", ["<|im_end|>"]).inner
    tokenizer = HubTokenizer(inner)
    assert read(tokenizer, {"messages": CHAT})[1] == ["ho<|im_end|>", "yes<|im_end|>"]
    (line,) = (
        s for s in corpus(tmp_path, tokenizer, {"messages": CHAT}).describe(200) if "2 of 2" in s
    )
    assert line.startswith(
        "note: 2 of 2 turns end in <|im_end|>, which does not stop generation (<|"
    )


def test_turns_without_an_end_are_said(tmp_path: Path) -> None:
    lines = corpus(tmp_path, hub(NO_END), {"messages": CHAT}).describe(200)
    (line,) = (line for line in lines if line.startswith("warning: 2 of 2 turns end in no token"))
    assert "does not learn to stop; give a data.chat_template" in line


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [3, 5]}, "config": {"eos_token_id": 4}}, {3, 5}),
        ({"generation_config": {}, "config": {"eos_token_id": 4}}, {4}),
        ({"config": {"text_config": {"eos_token_id": 7}}}, {7}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": "x"}}, set()),
        ({}, set()),
    ],
)
def test_stops_are_those_of_the_model(
    tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert stop_ids(str(tmp_path)) == expected


# -- small faults of data --------------------------------------------------------------------------


def with_begin(template: str | None = None) -> HubTokenizer:
    """A tokenizer that puts <s> before each text."""
    tokenizer = hub(template, bos_token="<s>")
    begin = tokenizer.inner.bos_token_id
    tokenizer.inner.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("own", "record"),
    [
        ({"format": "text"}, {"text": "ab$"}),
        ({"format": "prompt"}, {"prompt": "a", "completion": "b"}),
    ],
)
def test_a_beginning_that_is_there_is_not_added(
    tmp_path: Path, own: dict[str, Any], record: dict[str, str]
) -> None:
    first = next(iter(record))
    found = []
    for number, text in enumerate((record[first], "<s>" + record[first])):
        root = tmp_path / str(number)
        root.mkdir()
        tokenizer = with_begin()
        made = corpus(root, tokenizer, {**record, first: text}, **own)
        trained = made.parts[0].stores[0].trained
        found.append((ids_of(made), None if trained is None else np.asarray(trained).tolist()))
    assert found[0] == found[1]
    assert tokenizer.inner.convert_ids_to_tokens(found[0][0]) == ["<s>", "a", "b", "$"]
    assert found[0][1] in (None, [False, False, True, True])


def test_signs_of_an_end_in_texts_are_said(tmp_path: Path) -> None:
    lines = corpus(tmp_path, hub(None), {"text": "a$b"}, {"text": "ab"}, format="text").describe(
        200
    )
    said = "note: the text of a special token occurs in 1 document; the tokenizer reads this"
    assert any(line.startswith(said) for line in lines)


# -- the day ---------------------------------------------------------------------------------------

DATED = "{{ strftime_now('%d %b %Y') }}" + TURNS


class Clock(date):
    """A day that does not pass."""

    day_now = date(2026, 11, 27)

    @classmethod
    def today(cls) -> date:  # type: ignore[override]
        return cls.day_now


def dated(root: Path, template: str = DATED, **own: Any) -> Any:
    character_tokenizer(template).save_pretrained(root / "tokenizer")
    path = root / "data.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(4)))
    data = DataConfig(
        source=SourceKind.JSONL,
        path=str(path),
        format="chat",  # type: ignore[arg-type]
        tokenizer=str(root / "tokenizer"),
        cache=str(root / "cache"),
        **own,
    )
    return replace(tiny_run(root), data=data, context=64)


def without_spaces(text: str) -> str:
    """Which the tokenizer puts between characters."""
    return text.replace(" ", "").replace("\n", "").replace("read", "").replace("trained", "")


def weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "run" / "model" / "model.safetensors")


def test_a_run_keeps_the_day_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed on another day without its cache: the same tokens, the same weights."""
    monkeypatch.setattr(origin, "date", Clock)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for root in (whole, parts):
        root.mkdir()
    fit(dated(whole))
    with pytest.raises(Stopped):
        fit(dated(parts), reporter=Stopping(4))
    monkeypatch.setattr(Clock, "day_now", date(2026, 11, 28))
    shutil.rmtree(parts / "cache")
    shown = "\n".join(show_data(dated(parts), 0, False))
    assert "day: as today's date, the chat template may write 2026-11-27 (data.day)" in shown
    assert "27Nov2026[user]hi$" in without_spaces(shown)
    other = "data.day was '2026-11-27', is now '2026-11-28'; set these back to resume it"
    with pytest.raises(UnsupportedError, match=other):
        fit(dated(parts, day="2026-11-28"))
    fit(dated(parts))
    assert all(map(torch.equal, weights(whole).values(), weights(parts).values()))
    (parts / "run").rename(parts / "gone")
    shown = "\n".join(show_data(dated(parts), 0, False))
    assert "28Nov2026[user]hi$" in without_spaces(shown)


def test_the_cache_knows_the_day_where_a_template_does(tmp_path: Path) -> None:
    days = ("2026-11-27", "2026-11-28")
    one, two = (corpus(tmp_path, hub(DATED), {"messages": CHAT}, day=day) for day in days)
    assert one.identity != two.identity
    same = [corpus(tmp_path, hub(TURNS), {"messages": CHAT}, day=day) for day in days]
    assert same[0].identity == same[1].identity
    assert len(list((tmp_path / "cache").glob("[0-9a-f]*"))) == 3
    with pytest.raises(UnsupportedError, match="day: expected one such as 2026-11-27, got 'today'"):
        DataConfig(day="today")


def test_the_library_s_own_clock_is_left_as_it_was() -> None:
    tokenizer = hub(DATED)
    assert read(tokenizer, {"messages": CHAT}, day="2001-02-03")[0].startswith("03 Feb 2001[user]")
    before = date.today()
    said = tokenizer.inner.apply_chat_template(CHAT, tokenize=False)
    assert str(said).startswith(tuple(f"{day:%d %b %Y}" for day in (before, date.today())))


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        ("{{ strftime_now('%H:%M') }}", r"the chat template writes the time of day \('%H:%M'\)"),
        ("{{ ['a', 'b'] | random }}", "it writes random text"),
        ("{{ lipsum() }}", "it writes random text"),
    ],
)
def test_what_is_another_text_at_each_reading_is_refused(begin: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot render field 'messages': {words}"):
        read(hub(begin + TURNS), {"messages": CHAT})


def test_the_command_says_what_stops_a_turn(tmp_path: Path) -> None:
    """The model folder's generation_config counts, beside the tokenizer's own end."""
    signs = ("<|user|>", "<|observation|>", "<|assistant|>")
    tokenizer = hub(GLM, "<|endoftext|>", signs)
    tokenizer.save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    user = tokenizer.inner.convert_tokens_to_ids("<|user|>")
    generation = {"eos_token_id": [user]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model}}\nfolder: {tmp_path}/run\ncontext: 64\n"
        f"data: {{source: jsonl, path: {tmp_path}/data.jsonl, cache: {tmp_path}/cache}}\n"
    )
    result = CliRunner().invoke(app, ["data", str(tmp_path / "run.yaml")])
    assert "turns: end in <|user|>, which stops generation" in result.output
    assert "yes<|user|>" in without_spaces(result.output)
