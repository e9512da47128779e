"""HTML pages that need no network and no other file.

    text = html_page("A title", {"any": "JSON"}, "plan.js")

A page is a title, data and one script of `page/` that shows the data. The script calls
`farspan.page(build)` once, where `build(data)` returns an element or a list of elements. The
functions that make elements take plain data, described in a comment above each:

    page.js    facts, numbers, bars, table, choice, words, note, section, columns, details, make;
               bytes, seconds, tokens, percent, rate and count write numbers
    charts.js  memory (stacked by cause over a step), lines (over steps, or over anything)
    walk.js    walk (the grid of cells), step (memory and walk of `plan_page.step_json`, together)

Bytes and seconds are numbers in the data, which the page writes as `farspan.formatting` does;
sentences are made in Python. Numbers that are not finite become null, which charts leave out.

All pages look and behave alike: light and dark, any width from 360 pixels, no meaning in colour
alone, full use by keyboard, a table or words next to every picture. A policy in the page's head
forbids it to load anything. `page/uplot/` is a copy of a library that draws lines and areas; the
page includes its licence."""

import json
import math
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from farspan.spec import VERSION

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# A browser requests an icon from the server unless the page names one.
ICON = "data:,"
STYLES = "uplot/uplot.css", "page.css"
SCRIPTS = "uplot/uplot.js", "page.js", "charts.js", "walk.js"
LICENCE = "uplot/LICENSE"


def html_page(title: str, data: Mapping[str, Any], script: str) -> str:
    """Return an HTML page in which `script`, a file of `page/`, draws `data`. No text in `data` can
    end the script element that contains it."""
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
    """Return data as JSON for a script element. The text contains no `<`, so that neither an end of
    the element nor a comment can begin inside it."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None, since JSON has no such numbers."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


@cache
def _asset(name: str) -> str:
    """Return the text of a file in `page/`. It must not contain the end of an HTML element."""
    text = (files("farspan.report") / "page" / name).read_text(encoding="utf-8")
    assert not any(end in text for end in ("</script", "</style", "-->")), name
    return text
