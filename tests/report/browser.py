"""A headless Chromium for the tests of pages: what a page does there that it must not."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (360, 768, 1440)  # pixels
SCHEMES = ("light", "dark")
HEIGHT = 900


@dataclass(slots=True)
class Opened:
    """A page in the browser, and what it complained of and asked for since it was opened."""

    page: Any  # of playwright
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # addresses, but for its own

    def check(self) -> None:
        """Nothing was complained of, nothing asked for, and nothing is wider than the window."""
        assert not self.complaints
        assert not self.requests
        wider = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wider[0] <= wider[1], wider

    def resize(self, width: int) -> None:
        """Charts follow in the next frame."""
        self.page.set_viewport_size({"width": width, "height": HEIGHT})
        self.page.wait_for_timeout(100)

    def violations(self) -> list[str]:
        """What the accessibility checker axe finds: which rule, where."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        found = axe.run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['target']} {node['failureSummary']}"
            for rule in found
            for node in rule["nodes"]
        ]


@dataclass(frozen=True, slots=True)
class Browser:
    chromium: Any  # of playwright

    @contextmanager
    def opened(self, path: Path, width: int = 1440, scheme: str = "light") -> Iterator[Opened]:
        """A page from a file, drawn."""
        context = self.chromium.new_context(
            viewport={"width": width, "height": HEIGHT}, color_scheme=scheme
        )
        try:
            found = Opened(context.new_page())
            address = path.resolve().as_uri()
            found.page.on("console", lambda message: found.complaints.append(message.text))
            found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
            found.page.on(
                "request",
                lambda of: (
                    None
                    if of.url == address or of.url.startswith("data:")
                    else found.requests.append(of.url)
                ),
            )
            found.page.goto(address)
            found.page.wait_for_selector("footer")
            found.page.wait_for_timeout(100)  # charts are drawn in the next frame
            yield found
        finally:
            context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For the tests of a module. Skips where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
