"""The site is built from the pages, needs no network, and everyone can read it."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import farspan
from tests.grids import part_of
from tests.report.browser import SCHEMES, WIDTHS, Browser, Opened, browser

pytest.importorskip("mkdocs")
__all__ = ["browser"]  # a fixture
ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ("index", "tutorials/first-long-run", "reference/cli", "reference/api")
# To open a page takes 4 s of CPU, the longest 10: by default each in one view or two.
VIEWS = part_of(
    product(SAMPLE, WIDTHS, SCHEMES),
    *(("index", WIDTHS[0], "light"), ("index", WIDTHS[-1], "dark")),
    *(("tutorials/first-long-run", WIDTHS[1], "light"), ("reference/cli", WIDTHS[0], "dark")),
    ("reference/api", WIDTHS[-1], "light"),
)


def build(to: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "-d", str(to)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("site")
    done = build(to)
    assert done.returncode == 0, done.stderr
    return to


def text(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text("utf-8"))


def test_every_link_leads_somewhere_and_every_page_is_there(site: Path) -> None:
    """Or the build fails; recipes and decisions are pages, too."""
    pages = {page.relative_to(site).with_suffix(".md").as_posix() for page in site.rglob("*.html")}
    docs = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert docs < pages
    assert {f"examples/{p.parent.name}.md" for p in ROOT.glob("examples/*/README.md")} < pages


def test_commands_and_names_are_described(site: Path) -> None:
    shown = text(site / "reference/cli.html")
    for words in ("farspan memory compare", "--max-context", "Run file (YAML)", "~/.config"):
        assert words in shown, words
    page = (site / "reference/api.html").read_text("utf-8")
    missing = [
        name
        for name in farspan.__all__
        if name not in ("Refused", "__version__", "memory") and f'id="farspan.{name}"' not in page
    ]
    assert not missing


def test_nothing_is_fetched(site: Path) -> None:
    """No page, style or script of the site names a file elsewhere."""
    loaded = r'<(?:script|img|iframe|source)[^>]*src="?(https?:|//)|<link[^>]*href="?(https?:|//)'
    for page in site.rglob("*.html"):
        found = re.search(loaded, page.read_text("utf-8"))
        assert found is None, (page, found)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:|//)", style.read_text("utf-8")), style


@pytest.mark.parametrize(("name", "width", "scheme"), VIEWS)
def test_everyone_can_read_it(
    site: Path, browser: Browser, name: str, width: int, scheme: str
) -> None:
    """On a phone and on a desk, by day and by night, by ear and by keyboard."""
    with browser.opened(site / f"{name}.html", width, scheme) as opened:
        fits(opened)
        opened.resize(WIDTHS[0])
        fits(opened)
        opened.resize(width)
        assert not opened.violations()  # which asks for style sheets once more, in vain


def fits(opened: Opened) -> None:
    """Nothing is wider than the window, and nothing comes from elsewhere."""
    assert not [url for url in opened.requests if not url.startswith("file:")]
    opened.requests.clear()
    opened.check()
