"""Pictures of `farspan plan --html` and of a run's page for the docs, by a headless Chromium.

    python -m benchmarks.page_figures runs/first

The run is that of docs/tutorials/first-long-run.md. Needs Chromium, playwright and Pillow. Colours
are reduced to what keeps a picture small."""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.report.browser import CHROMIUM

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
ASKED = (
    *("--model", "Qwen2.5-7B", "--lora", "16", "--context", "1M", "--machine", "h100"),
    *("--host-memory", "200GiB"),
)
WIDTH, TOP = 1280, 1215  # pixels; of the page so many are shown
RUN_WIDTH, RUN_TOP = 1100, 1560
PLACE = 0.55  # of the walk, where some cells are done and others are not
COLOURS = 160


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        command = [sys.executable, "-m", "farspan", "plan", *ASKED, "--html", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            window = chromium.new_page(viewport={"width": WIDTH, "height": TOP})
            window.goto(page.as_uri())
            window.wait_for_timeout(500)
            window.screenshot(path=FIGURES / "plan-page.png")
            slider = window.locator(".scrub input")
            slider.evaluate(
                "(of, to) => { of.value = of.max * to; of.dispatchEvent(new Event('input')) }",
                PLACE,
            )
            window.locator("section:has(.walk)").screenshot(path=FIGURES / "plan-walk.png")
            window.set_viewport_size({"width": RUN_WIDTH, "height": RUN_TOP})
            window.goto((Path(sys.argv[1]) / "report.html").resolve().as_uri())
            window.wait_for_timeout(500)
            window.screenshot(path=FIGURES / "run-page.png")
            chromium.close()
    for name in ("plan-page.png", "plan-walk.png", "run-page.png"):
        reduce_colours(FIGURES / name)


def reduce_colours(path: Path) -> None:
    """In place."""
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main()
