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
    PLANNED,
    PROVED,
    REAL,
    compare_view,
    page,
    picture,
    remark,
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


def test_every_allocator_says_what_it_needs_and_how_that_is_known() -> None:
    text = text_of(compare_view([comparison()]), width=120)
    assert "7B <64K>: 81,117 mallocs and frees, at most 80.0 GiB alive" in text
    assert f"{CACHING} {MODELLED} 160.0 GiB 50.0% 96.0 GiB 1.200x 7" in text
    assert f"{EXPANDABLE} {MODELLED} 85.0 GiB 5.9% 80.5 GiB 1.006x 7" in text
    assert f"{STITCHING}, 2 MiB {REAL} 80.0 GiB 0.0% 80.0 GiB 1.000x 7" in text
    assert f"{PLAN} {PROVED} 80.0 GiB 0.0%" in text
    greedy = replace(comparison(), results=(result(PLAN, False, 81, 81),))
    assert f"{PLAN} {PLANNED} 81.0 GiB" in text_of(compare_view([greedy]))
    assert "the least capacity is exact to 32.0 MiB" in text


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


def test_it_is_said_plainly_where_expandable_segments_are_as_good() -> None:
    """80.5 GiB are within 1 % of 80; 81 are not."""
    assert remark(comparison(80.5)) == (
        "Expandable segments need as little memory as stitching, within 1% of the "
        f"live peak. {EXPANDABLE}: 80.5 GiB, 7 retries, calls for 250 ms; {STITCHING}, 2 MiB: "
        "80.0 GiB, 7 retries, calls for 250 ms."
    )
    assert remark(comparison(81)).startswith("Stitching needs less memory than expandable segments")
    models = comparison()
    assert remark(replace(models, results=models.results[:2])) == ""


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
