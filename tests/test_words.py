"""Gate: docstrings start with the thing or the verb, and prose says who acts."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Every text of the sources, for who reads all of them; `python -m tests.test_words` writes it.
MESSAGES = ROOT / "docs/reference/messages.json"
SHORT = 4  # words; shorter strings are names and parts of tables
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


def joined(node: ast.AST | None) -> str | None:
    """Return the text that a string, an f-string or a sum of them makes, with {expressions}."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(joined(one) or "" for one in values)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right) if joined(left) or joined(right):
            return "".join(joined(one) or f"{{{ast.unparse(one)}}}" for one in (left, right))
    return None


def messages(node: ast.AST) -> Iterator[str]:
    """Yield the errors, help, log lines and other texts below a node, without docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        text = joined(child)
        if text is None:
            yield from messages(child)
        elif len(text.split()) >= SHORT:
            yield text


def all_messages() -> dict[str, list[str]]:
    files = {
        path.relative_to(ROOT).as_posix(): list(messages(ast.parse(path.read_text("utf-8"))))
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    return {path: texts for path, texts in files.items() if texts}


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


def test_the_list_of_messages_is_the_sources() -> None:
    listed = json.loads(MESSAGES.read_text("utf-8"))
    assert listed == all_messages(), "write it anew: python -m tests.test_words"


if __name__ == "__main__":
    MESSAGES.write_text(json.dumps(all_messages(), indent=1, ensure_ascii=False) + "\n", "utf-8")
