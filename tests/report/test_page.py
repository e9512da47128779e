"""Pages need nothing but themselves, whatever their data say, and what they show is the plan's."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from farspan.durable import write_output
from farspan.formatting import write_bytes, write_seconds
from farspan.planner.remedies import part_words
from farspan.planner.request import Plan
from farspan.report.page import POLICY, html_page, page_json
from farspan.report.plan import BOUND
from farspan.report.plan_page import PageOf, plan_page, step_json
from farspan.spec import UnsupportedError
from tests.grids import part_of
from tests.report.browser import SCHEMES, WIDTHS, Browser
from tests.report.test_timeline import planned

STRATEGIES = ("grouped", "fpdt", "swap")
# Names of what is drawn and who wrote the library, which nothing loads.
NAMES = ("http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot")


def data_of(page: str) -> Any:
    """What a page has to show."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [planned(name) for name in STRATEGIES]


@pytest.fixture(scope="module")
def page(plans: list[Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_output(path, plan_page(PageOf(plans, command="farspan plan --model <any>")), "html")
    return path


# -- as text ---------------------------------------------------------------------------------------


def test_a_page_refers_to_nothing_outside(page: Path) -> None:
    text = page.read_text()
    for name in NAMES:
        text = text.replace(name, "")
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"@import|\bsrc=|url\((?!#)", text)
    assert POLICY.startswith("default-src 'none'")
    assert f'content="{POLICY}"' in text


def test_data_cannot_leave_their_element() -> None:
    data = {"text": "</script><script>alert(1)</script><!-- \u2028", "title": "&"}
    text = html_page("</title><b>", data, "plan.js")
    assert "<!-- " not in page_json(data)
    assert data_of(text) == data
    assert "<title>&lt;/title&gt;&lt;b&gt;</title>" in text


def test_numbers_that_are_none_are_left_out() -> None:
    assert json.loads(page_json({"loss": [1.5, float("nan"), float("inf")], 3: ()})) == {
        "loss": [1.5, None, None],
        "3": [],
    }


def test_a_page_stays_until_another_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.html"
    write_output(path, "first", "html")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnsupportedError, match=r"plan\.html cannot be written: No space left"):
            write_output(path, "second", "html")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_any_name_of_a_file_can_be_written(tmp_path: Path) -> None:
    """Those that are no Unicode, too; and a pipe is a file to write to."""
    write_output(tmp_path / "plan.html", html_page("\udcff", {"name": "\ud800"}, "plan.js"), "html")
    assert data_of((tmp_path / "plan.html").read_text()) == {"name": "?"}
    write_output(Path("/dev/null"), "page", "html")
    assert Path("/dev/null").is_char_device()


# -- a plan's numbers ------------------------------------------------------------------------------


def test_the_page_has_the_numbers_of_the_plans(page: Path, plans: list[Plan]) -> None:
    shown = data_of(page.read_text())["plans"]
    for one, plan in zip(shown, plans, strict=True):
        given = plan.to_json()
        for tier in ("device", "host"):
            budget = given[f"{tier}_bytes"]
            assert {name: size for name, _, size in one[tier]["parts"]} == budget["parts"]
            assert (one[tier]["total"], one[tier]["limit"]) == (budget["total"], budget["limit"])
        for name in ("strategy", "fits", "mfu", "tokens_per_second"):
            assert one[name] == given[name]
        assert one["bound"] == BOUND[given["bound"]]  # in the terminal's words
        assert one["seconds"] == given["seconds_per_step"]


def spread_of(values: Any, unit: int, count: int) -> list[int]:
    """Bytes at each of so many positions."""
    return [of * unit for of in values] if isinstance(values, list) else [values] * count


@pytest.mark.parametrize("frames", [1000, 1])
def test_memory_over_the_step_reaches_what_is_planned(plans: list[Plan], frames: int) -> None:
    """At its fullest moment, however few positions are shown."""
    for plan in plans:
        step = step_json(plan, frames=frames)
        count = len(step["time"])
        assert count <= frames
        assert step["time"] == sorted(step["time"])
        for budget, of in ((plan.device, step["device"]), (plan.host, step["host"])):
            spread = [spread_of(cause["values"], of["unit"], count) for cause in of["causes"]]
            most = max(map(sum, zip(*spread, strict=True)))
            assert abs(most - budget.total) <= of["unit"] * len(spread)


def test_of_a_large_grid_a_part_is_shown(plans: list[Plan]) -> None:
    for plan in plans:
        step = step_json(plan, frames=9, rows=2, columns=2)
        assert step["walk"]["layers"] == [0, 3]
        assert len(step["walk"]["cells"]) == 4
        assert "9 of " in step["thinned"]
        assert "2 of 4 layers" in step["thinned"]
    assert step_json(plans[0])["thinned"] == ""


@pytest.mark.parametrize("frames", [1000, 13])
def test_the_walk_ends_with_every_cell_done(plans: list[Plan], frames: int) -> None:
    for plan in plans:
        walk = step_json(plan, frames=frames)["walk"]
        assert len(walk["cells"]) == len(walk["layers"]) * len(walk["chunks"])
        for states in walk["cells"]:
            assert states[::2] == sorted(set(states[::2]))
            assert states[-1] >> 8 == 3
            assert states[-1] & 0b11110011 == 0  # nothing is left but sums, which the group frees
        assert all(states[-1] == 0 for states in walk["inputs"] if states)


def fullest_of(step: Any) -> int:
    """Where both tiers together are fullest, each measured by what it can hold."""
    count = len(step["time"])
    shares = [0.0] * count
    for of in (step["device"], step["host"]):
        for cause in of["causes"]:
            for place, size in enumerate(spread_of(cause["values"], of["unit"], count)):
                shares[place] += size / of["limit"]
    return shares.index(max(shares))


# Where the cursor of each chart is, as a share of its width; -1 where none is seen.
MARKED = """charts => charts.map(of => {
    const cursor = of.querySelector(".u-cursor-x"), box = of.getBoundingClientRect();
    if (cursor.classList.contains("u-off")) return -1;
    return (cursor.getBoundingClientRect().left - box.left) / box.width;
})"""

# Words of the names beside bars that are broken inside: a word of two lines has two boxes.
BROKEN = """cells => cells.flatMap(cell => [...cell.childNodes].filter(of => of.nodeType === 3)
  .flatMap(of => [...of.data.matchAll(/[^\\s-]+/g)].filter(word => {
    const range = document.createRange();
    range.setStart(of, word.index);
    range.setEnd(of, word.index + word[0].length);
    return range.getClientRects().length > 1;
  }).map(word => word[0])))"""

# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", part_of(SCHEMES, SCHEMES[0]))
def test_a_page_is_whole_at_any_width(browser: Browser, page: Path, scheme: str) -> None:
    step = data_of(page.read_text())["plans"][0]["step"]
    fullest = step["time"][fullest_of(step)] / step["time"][-1]
    with browser.opened(page, scheme=scheme) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach(of => of.open = true)")
        for width in WIDTHS:
            opened.resize(width)
            opened.check()
            assert opened.page.locator(".bars th").evaluate_all(BROKEN) == []
            marks = opened.page.locator(".plot:has(.u-cursor-x) .u-over").evaluate_all(MARKED)
            assert len(marks) == 2  # of the device and the host, at the fullest moment of the step
            assert abs(marks[0] - marks[1]) < 0.01
            assert abs(marks[0] - fullest) < 0.01
        assert opened.violations() == []


def test_another_plan_is_a_click_away(browser: Browser, page: Path, plans: list[Plan]) -> None:
    with browser.opened(page, 768) as opened:
        shown = opened.page.locator("main")
        for plan, row in zip(plans, opened.page.locator(".choice tbody tr").all(), strict=True):
            row.click()
            text = shown.inner_text()
            assert f"The schedule: {plan.strategy}" in text
            assert f"a step takes {write_seconds(plan.seconds.total)}" in text
            assert f"Device: {write_bytes(plan.device.total)}" in text
            for name, size in plan.host.parts.items():
                assert f"{part_words(name)}\t{write_bytes(size)}" in text
        opened.page.keyboard.press("ArrowUp")  # of the row that was clicked last
        assert f"The schedule: {plans[-2].strategy}" in shown.inner_text()
        opened.check()
        assert opened.violations() == []


def test_the_walk_is_scrubbed_to_its_end(browser: Browser, page: Path, plans: list[Plan]) -> None:
    with browser.opened(page, 768) as opened:
        slider = opened.page.locator(".scrub input")
        cells = {name: f".walk .cells rect.{name}" for name in ("done", "host", "device")}
        count = len(step_json(plans[0])["walk"]["cells"])
        slider.focus()
        opened.page.keyboard.press("Home")
        assert opened.page.locator(cells["done"]).count() == 0
        opened.page.keyboard.press("End")
        assert opened.page.locator(cells["done"]).count() == count
        assert opened.page.locator(cells["host"]).count() == 0
        assert opened.page.locator(cells["device"]).count() == 0
        chart = opened.page.get_by_role("slider", name="Memory of the device")
        assert chart.get_attribute("aria-valuenow") == slider.input_value()
        chart.focus()
        for _ in range(2):
            opened.page.keyboard.press("PageDown")
        assert opened.page.locator(cells["done"]).count() < count
        assert chart.get_attribute("aria-valuenow") == slider.input_value()
        opened.check()


def test_data_that_a_page_does_not_know_are_told(browser: Browser, tmp_path: Path) -> None:
    write_output(tmp_path / "plan.html", html_page("A plan", {"plans": 3}, "plan.js"), "html")
    with browser.opened(tmp_path / "plan.html") as opened:
        shown = opened.page.locator("main").inner_text()
        assert shown.startswith("This page cannot be drawn: it cannot read its data")
        assert len(opened.complaints) == 1
