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
from tests.pytorch.cpu_allocator import once
from tests.report.browser import SCHEMES, WIDTHS, Browser, Opened, browser

pytest.importorskip("mkdocs")
__all__ = ["browser"]  # a fixture
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ("index", "tutorials/first-long-run", "reference/cli", "reference/api")
# To open a page takes 4 s of CPU, the longest 10: by default the shortest, by day and by night.
VIEWS = part_of(
    product(SAMPLE, WIDTHS, SCHEMES),
    *(("index", WIDTHS[-1], "dark"), ("index", WIDTHS[0], "light")),
)


def build(to: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "-d", str(to)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def built_site(folder: Path) -> Path:
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, built_site)


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


# Elements of the page that lie beyond the window in no box that scrolls, or in one that hides what
# does not fit.
CLIPPED = """() => {
  const found = [], wide = document.documentElement.clientWidth;
  const scrolls = (one) => {
    for (let up = one; up; up = up.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  for (const one of document.querySelectorAll("article *")) {
    const box = one.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const hides = getComputedStyle(one).overflowX === "hidden" && one.clientWidth > 1;
    if (hides && one.scrollWidth > one.clientWidth + 1) found.push(one.outerHTML.slice(0, 80));
    if ((box.right > wide + 1 || box.left < -1) && !scrolls(one))
      found.push(one.outerHTML.slice(0, 80));
  }
  return found;
}"""
CUT_TABLES = """() => [...document.querySelectorAll("article .md-typeset__scrollwrap")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent.trim())"""


@pytest.mark.parametrize(
    ("part", "width"), part_of(product(["pages", "decisions"], WIDTHS), ("pages", WIDTHS[0]))
)
def test_nothing_is_clipped_on_any_page(
    site: Path, browser: Browser, part: str, width: int
) -> None:
    """On a desk no table has to be scrolled, either."""
    pages = [p for p in site.rglob("*.html") if ("decisions" in p.parts) == (part == "decisions")]
    assert len(pages) > 30
    with browser.opened(site / "index.html") as opened:
        for page in sorted(pages):
            opened.page.set_viewport_size({"width": width, "height": 900})
            opened.page.goto(page.as_uri())
            assert not opened.page.evaluate(CLIPPED), page.name
            if width == WIDTHS[-1]:
                assert not opened.page.evaluate(CUT_TABLES), page.name


def fits(opened: Opened) -> None:
    """Nothing is wider than the window, and nothing comes from elsewhere."""
    assert not [url for url in opened.requests if not url.startswith("file:")]
    opened.requests.clear()
    opened.check()
