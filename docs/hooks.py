"""What the site of mkdocs.yml has beside the pages of docs/: recipes and CONTRIBUTING.md as pages,
the command line's reference, and a rule for links that leave docs/.

Such a link leads to the page that the file has on the site; of any other file the path stands as
text. A link to a file that is not there, or of a bad form, is a warning, which `--strict` refuses.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from mkdocs.structure.files import File

from farspan.cli import app

ROOT = Path(__file__).parent.parent
COMMANDS = "<!-- commands -->"
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"(https://|mailto:\w+@)[\w-]+(\.[\w-]+)+(/\S*)?")
log = logging.getLogger("mkdocs.plugins.farspan")


def outside() -> dict[str, str]:
    """Files outside docs/ that are pages, by their paths: where they are on the site."""
    recipes = sorted((ROOT / "examples").glob("*/README.md"))
    found = {f"examples/{page.parent.name}/README.md": page.parent.name for page in recipes}
    return {path: f"examples/{name}.md" for path, name in found.items()} | {
        "CONTRIBUTING.md": "contributing.md"
    }


def on_config(config: Any) -> Any:
    """Names of folders in the navigation become their pages."""
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    pages = sorted([*pages, *outside().values()])
    named = set(leaves(config.nav))
    config.nav = unfold(config.nav, [page for page in pages if page not in named])
    return config


def leaves(nav: Any) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from leaves([below] if isinstance(below, str) else below)


def unfold(nav: Any, pages: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            found += [{k: v if isinstance(v, str) else unfold(v, pages)} for k, v in entry.items()]
        elif entry.endswith("/"):
            found += [page for page in pages if os.path.dirname(page) + "/" == entry]
        else:
            found.append(entry)
    return found


def on_files(files: Any, config: Any) -> Any:
    """Pages from outside docs/."""
    for path, page in outside().items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.remove(files.get_file_from_path("hooks.py"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Commands in their place, links that lead somewhere."""
    if COMMANDS in markdown:
        shown = "\n".join(commands())
        markdown = markdown.replace(COMMANDS, f'<div class="commands" markdown>\n\n{shown}\n</div>')
    where = {page: path for path, page in outside().items()}
    source = where.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        parts[index] = LINK.sub(
            lambda found: link(found[1], found[2], source, page.file.src_uri), parts[index]
        )
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """The head of a column without a name is no header."""
    return re.sub(r"<th( [^>]*)?></th>", r"<td\1></td>", html)


def on_post_page(output: str, **_: Any) -> str:
    """The search has a name for those who hear the page."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def link(label: str, url: str, source: str, page: str) -> str:
    """The link `[label](url)` of the file `source` as it stands on the page."""
    parts = urlsplit(url)
    if parts.scheme or url.startswith("#"):
        if parts.scheme and not EXTERNAL.fullmatch(url):
            log.warning("%s: no such form of a link: %s", source, url)
        return f"[{label}]({url})"
    path = os.path.normpath(os.path.join(os.path.dirname(source), parts.path))
    on_site = outside().get(path) or outside().get(f"{path}/README.md")
    if path.startswith("docs/"):
        on_site = path.removeprefix("docs/")
    if on_site:
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        return f"[{label}]({os.path.relpath(on_site, os.path.dirname(page))}{anchor})"
    if not (ROOT / path).exists():
        log.warning("%s: no such file: %s", source, url)
    return label if path in label else f"{label} (`{path}`)"


def commands() -> Iterator[str]:
    """Every command with its arguments and options, as its own help has them."""
    group = typer.main.get_command(app)
    yield from described(group, group.context_class(group, info_name="farspan"), 1)


def described(command: Any, context: Any, level: int) -> Iterator[str]:
    if level > 1:
        yield f"{'#' * level} `{context.command_path}`\n\n{command.help}\n"
        yield f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
        yield "| argument or option | meaning |\n| --- | --- |"
        for parameter in command.get_params(context):
            name, text = parameter.get_help_record(context) or ("", "")
            if name and "--help" not in name:
                text = cell(text).replace("<", "&lt;").replace("*", "\\*")
                yield f"| `{cell(name)}` | {text} |"
        yield ""
    for name in getattr(command, "list_commands", lambda _: ())(context):
        _, called, _ = command.resolve_command(context, [name])
        inner = called.context_class(called, info_name=name, parent=context)
        yield from described(called, inner, level + 1)


def cell(text: str) -> str:
    """Of a table, without this machine's folders."""
    text = re.sub(r"\S+/farspan/machine\.json", "~/.config/farspan/machine.json", text)
    text = text.replace("|", "\\|")
    return " ".join(text.split())
