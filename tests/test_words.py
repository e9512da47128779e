"""Gate: docstrings start with the thing or the verb, and prose says who acts."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("src/farspan", "packages/farspan-memory/src")
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "packages/farspan-memory/README.md")

# Share of docstrings that may start with a fragment or a question, and turns of phrase that may
# stand in 1,000 words: those that make a reader wait for the verb, or hide who acts.
OPENINGS, TURNS, TURNS_IN_PAGES = 0.02, 1.5, 1.0
FRAGMENT = re.compile(
    r"(What|Where|Which|Who|Whose|Whoever|How|Whether|Those|That|Of|As|By|In the|For the|"
    r"(One|None) of|Is|Are|Do|Does|Has|Have|Can|Was|Were)\b"
)
TURN = re.compile(
    r"\bwhat (is|are|was|were|it|they|has|have)\b|\bwhere (there|it|they|that|nothing|none|no)\b|"
    r"\bso (many|much)\b(?! that)|\b(nobody|whoever|somebody)\b|\bof (it|them|these|those)\b|"
    r"\bbeside\b|\b(in place of|at hand|all the same|as ever|in vain)\b",
    re.IGNORECASE,
)
CODE = re.compile(
    r"^(```|~~~).*?^\1[^\n]*$|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE
)


def docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from filter(None, [ast.get_docstring(node)])


def prose(text: str) -> Iterator[str]:
    """Yield the texts and comments of more than three words."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def rate(texts: list[str]) -> float:
    """Return the turns in 1,000 words."""
    words = sum(len(text.split()) for text in texts)
    return 1000 * sum(len(TURN.findall(text)) for text in texts) / max(1, words)


def sources() -> list[str]:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150
    return [path.read_text("utf-8") for path in files]


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    found = [one for text in sources() for one in docstrings(text)]
    fragments = [one.splitlines()[0] for one in found if FRAGMENT.match(one)]
    assert len(fragments) <= OPENINGS * len(found), "\n".join(fragments)


def test_code_says_who_acts() -> None:
    texts = [one for text in sources() for one in prose(text) if len(one.split()) > 3]
    assert rate(texts) <= TURNS


def test_pages_say_who_acts() -> None:
    pages = [p for name in PAGES for p in [ROOT / name, *sorted((ROOT / name).rglob("*.md"))]]
    texts = {page: CODE.sub(" ", page.read_text("utf-8")) for page in pages if page.is_file()}
    worst = sorted(texts, key=lambda page: -len(TURN.findall(texts[page])))
    assert rate(list(texts.values())) <= TURNS_IN_PAGES, [page.name for page in worst[:5]]


def test_turns_and_fragments_are_found() -> None:
    assert FRAGMENT.match("Of a tensor that the rank holds whole.")
    assert not FRAGMENT.match("Return the bytes of a cell.")
    assert rate(["where there are none, nobody asks what is there"]) > 100
    assert rate(["Ranks compare their forecasts before a step."]) == 0.0
