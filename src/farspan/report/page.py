"""One HTML page that needs nothing but itself: no network, no other file.

    text = html_page("A title", {"any": "JSON"}, "plan.js")

A page is a title, data and one script of `page/` that says what is shown of the data. The script
calls `farspan.page(build)` once, where `build(data)` returns elements, or a list of them; their
makers are functions of plain data, each with a comment that says what it takes:

    page.js    facts, numbers, bars, table, choice, words, note, section, columns, details, make;
               bytes, seconds, tokens, percent, rate and count write numbers
    charts.js  memory (stacked by cause over a step), lines (over steps, or over anything)
    walk.js    walk (the grid of cells), step (memory and walk of `plan_page.step_json`, together)

Data are plain values: bytes and seconds are numbers, which the page writes as `farspan.formatting`
does; sentences are made in Python. Numbers that are not finite become null, which charts leave out.

Look and behaviour are the same of every page: light and dark, any width from 360 pixels, no meaning
in colour alone, the keyboard for everything, a table or words beside every picture. A policy in the
page's head forbids it to load anything. `page/uplot/` is a copy of a library that draws lines and
areas; its licence is in the page, too."""

import json
import math
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from farspan.spec import VERSION, UnsupportedError

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# Browsers look for an icon of their own where a page names none.
ICON = "data:,"
STYLES = "uplot/uplot.css", "page.css"
SCRIPTS = "uplot/uplot.js", "page.js", "charts.js", "walk.js"
LICENCE = "uplot/LICENSE"


def html_page(title: str, data: Mapping[str, Any], script: str) -> str:
    """A whole page, as text; `script` is a file of `page/`. What is in `data` cannot end the
    element that it lies in, whatever it says."""
    styles = "\n".join(f"<style>{_asset(name)}</style>" for name in STYLES)
    scripts = "\n".join(f"<script>{_asset(name)}</script>" for name in (*SCRIPTS, script))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="farspan {VERSION}">
<link rel="icon" href="{ICON}">
<title>{escape(title)}</title>
{styles}
</head>
<body>
<noscript>This page draws itself with JavaScript, which is switched off here.</noscript>
<script type="application/json" id="data">{page_json(data)}</script>
<!--
{_asset(LICENCE)}-->
{scripts}
</body>
</html>
"""


def page_json(data: Any) -> str:
    """Data as JSON that may stand inside a script element: no `<` is left in it, so that neither an
    end of the element nor a comment can begin."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write_page(path: Path, text: str | bytes, option: str = "html") -> None:
    """A page, or what else a command writes: one that is there stays until the new one is whole.
    Raises UnsupportedError, naming the option, where it cannot be written."""
    # What names of files have that is no Unicode becomes a question mark.
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    partial = path.with_name(f".partial-{path.name}")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a terminal
            return
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UnsupportedError(
            f"{option}: {path} cannot be written: {error.strerror}; free some space, fix its "
            "permissions, or name another file"
        ) from error


def _finite(value: Any) -> Any:
    """Not-a-number and the infinities are no JSON."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(of) for key, of in value.items()}
        case list() | tuple():
            return [_finite(of) for of in value]
        case _:
            return value


@cache
def _asset(name: str) -> str:
    """A file of `page/`, which must not end the element that it is put into."""
    text = (files("farspan.report") / "page" / name).read_text(encoding="utf-8")
    assert not any(end in text for end in ("</script", "</style", "-->")), name
    return text
