"""What a person is told of allocators compared, in tables and as a picture."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from farspan_memory.compare.allocators import CREATE, MAP, RELEASE, UNMAP
from farspan_memory.compare.compare import (
    CACHING,
    EXPANDABLE,
    PLAN,
    STITCHING,
    AllocatorComparison,
    AllocatorResult,
    AllocatorRun,
)
from farspan_memory.formatting import write_seconds
from farspan_memory.report import (
    MODELLED,
    compare_view,
    page,
    picture,
)
from tests.report.cases import GIB, text_of

SVG = "{http://www.w3.org/2000/svg}"


def served(gib: float, retries: int, calls: dict[str, int], completed: bool = True) -> AllocatorRun:
    size = int(gib * GIB)
    return AllocatorRun(size, completed, size, retries, calls, 0.25, (size // 2, size, size))


def result(name: str, modelled: bool, reserved: float, least: float) -> AllocatorResult:
    calls = {"cudaMalloc": 266, "cudaFree": 4} if name == CACHING else {"cuMemMap": 6770}
    return AllocatorResult(
        name,
        modelled,
        replace(served(reserved, 0, calls), capacity=None),
        served(least, 7, calls),
        None,
    )


def comparison(expandable: float = 80.5) -> AllocatorComparison:
    """A trace of 80 GiB alive; numbers chosen to be recognised."""
    return AllocatorComparison(
        trace="7B <64K>",
        events=81_117,
        live_peak=80 * GIB,
        live=(40 * GIB, 80 * GIB, 60 * GIB),
        marks=((0.0, "step 0"), (0.5, "layer 0 forward"), (0.75, "step 1")),
        step=2**25,
        results=(
            result(CACHING, True, 160, 96),
            result(EXPANDABLE, True, 85, expandable),
            result(f"{STITCHING}, 2 MiB", False, 80, 80),
            result(f"{STITCHING}, 32 MiB", False, 81, 81),
            replace(result(PLAN, False, 80, 80), proved=True),
        ),
    )


def asked_about(found: AllocatorComparison) -> AllocatorComparison:
    """88 GiB on the device: the caching allocator's half do not suffice."""
    results = [
        replace(result, given=served(88, 3, {"cudaMalloc": 5}, completed=index > 0))
        for index, result in enumerate(found.results)
    ]
    return replace(found, results=tuple(results))


def test_nothing_is_cut_in_a_narrow_terminal() -> None:
    """Nor on 80 columns, with a terabyte alive and millions of calls."""
    found = asked_about(comparison())
    calls = dict.fromkeys((CREATE, MAP, UNMAP, RELEASE), 1234567)
    run = replace(served(1000, 1234, calls), seconds=1234.5)
    large = replace(found.results[1], unlimited=run, smallest=run, given=run)
    found = replace(found, results=(*found.results, large))
    narrow = text_of(compare_view([found]), width=80)
    assert "…" not in narrow
    assert narrow == text_of(compare_view([found]), width=200)
    assert f"{EXPANDABLE} 1,234,567 1,234,567 1,234,567 1,234,567 {write_seconds(1234.5)}" in narrow
    assert f"{EXPANDABLE} {MODELLED} 1,000.0 GiB 92.0% 1,000.0 GiB 12.500x 1,234" in narrow


def test_the_picture_is_xml_and_has_a_panel_for_each_allocator_of_each_trace() -> None:
    text = picture([comparison(), asked_about(comparison())])
    root = ElementTree.fromstring(text)
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    for name in (CACHING, EXPANDABLE, f"{STITCHING}, 2 MiB", PLAN):
        assert sum(text.startswith(f"{name} (") for text in words) == 2
    assert "7B <64K>: 81,117 mallocs and frees" in words
    assert words.count("full") == 1  # the one that did not complete
    assert len(list(root.iter(f"{SVG}polyline"))) == 10
    assert len(list(root.iter(f"{SVG}use"))) == 10
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert titles.count("step 1") == 10


@pytest.mark.parametrize("live", [(), (0,)])
def test_a_trace_without_bytes_can_be_drawn(live: tuple[int, ...]) -> None:
    nothing = AllocatorRun(0, True, 0, 0, {}, 0.0, live)
    results = (AllocatorResult(CACHING, True, nothing, nothing, None),)
    found = replace(comparison(), live_peak=0, live=live, marks=(), results=results)
    ElementTree.fromstring(picture([found]))
    assert "1.000x" in text_of(compare_view([found]))


def test_the_page_holds_the_picture_and_the_numbers() -> None:
    text = page([comparison()])
    assert picture([comparison()]) in text
    assert "7B &lt;64K&gt;" in text
    assert "<64K>" not in text
    assert "<td>96.0 GiB</td>" in text
    assert "Expandable segments need as little memory as stitching" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded
