"""What was written is read back; what is broken is refused by its line."""

import json
import pickle
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan_memory.errors import UnsupportedError
from farspan_memory.placement import PlacementRequest
from farspan_memory.trace import (
    LARGEST,
    FreeEvent,
    Malloc,
    Mark,
    Trace,
    TraceFormat,
    from_csv,
    from_text,
    read_format,
    read_trace,
    to_csv,
    to_text,
    write_trace,
)
from tests.memory.traces import traces

SMALL = Trace((Malloc(1, 10), Mark("layer 0 forward"), Malloc(2, 5, 3), FreeEvent(1)), "small")
TEXT = """# trace small
malloc 1 10
# mark layer 0 forward
malloc 2 5 stream 3
free 1
# end 4
"""


def test_the_text_is_memos_with_streams_and_marks() -> None:
    assert to_text(SMALL) == TEXT
    assert from_text(TEXT, "f") == SMALL


@given(traces())
def test_text_comes_back(trace: Trace) -> None:
    found = from_text(to_text(trace), "f")
    assert found.events == trace.events


def test_memos_own_lines_are_read() -> None:
    text = "malloc 7 4096\n\n# a comment\nfree 7 4096\r\nmalloc 7 1\n"
    assert from_text(text, "f").events == (Malloc(7, 4096), FreeEvent(7), Malloc(7, 1))
    assert from_text(text, "f").name == "f"


@given(traces(), st.data())
def test_a_file_that_was_cut_off_is_refused(trace: Trace, data: st.DataObject) -> None:
    text = to_text(trace)
    cut = text[: data.draw(st.integers(len("# trace w"), len(text) - 1))]
    with pytest.raises(UnsupportedError, match=r"^f:\d+: "):
        from_text(cut, "f")


def test_a_bare_file_that_ends_within_a_line_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^f:2: .*cut off"):
        from_text("malloc 1 4096\nmalloc 2 40", "f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("malloc 1 2\nmaloc 2 3\n", "f:2: expected"),
        ("malloc 1\n", "f:1: expected"),
        ("# x\nfree 5\n", "f:2: free of tensor 5 without a malloc"),
        ("malloc 5 1\nfree 5\nfree 5\n", "f:3: free of tensor 5 a second time"),
        ("malloc 5 1\nmalloc 5 1\n", "f:2: malloc of tensor 5, which is still allocated"),
        ("malloc 5 -1\n", "f:1: size -1"),
        (f"malloc 5 {LARGEST + 1}\n", f"f:1: size {LARGEST + 1}"),
        (f"malloc 5 1\nmalloc 6 1 stream {2**64}\n", f"f:2: stream {2**64}, expected 0 to"),
        ("# trace x\nmalloc 5 1\n# end 2\n", "f:3: 1 events came before"),
        ("# trace x\n# end 0\nmalloc 5 1\n", "f:3: the trace ended in line 2"),
        ("# trace x\nmalloc 5 1\n", "cut off"),
    ],
)
def test_broken_text_is_refused_by_its_line(text: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        from_text(text, "f")


@pytest.mark.parametrize("name", ["two\nlines", " blank", "", "bell\a"])
def test_a_name_that_is_no_line_is_not_written(name: str) -> None:
    with pytest.raises(UnsupportedError, match="printable name on one line"):
        to_text(Trace((Mark(name),)))


# -- MiniMalloc's CSV --------------------------------------------------------------------------


@given(traces(marks=False))
def test_csv_keeps_sizes_and_who_meets_whom(trace: Trace) -> None:
    found = from_csv(to_csv(trace), "f").requests()
    end = len(trace.events)
    assert (
        tuple(PlacementRequest(r.size, r.born, min(r.dies, end)) for r in found) == trace.requests()
    )


ROWS = st.lists(
    st.tuples(st.integers(-9, 9), st.integers(1, 6), st.integers(0, 2**50)), max_size=12
)


@given(ROWS)
def test_lifetimes_of_any_csv_meet_as_they_did(rows: list[tuple[int, int, int]]) -> None:
    lines = [f"{i},{low},{low + n},{size}\n" for i, (low, n, size) in enumerate(rows)]
    trace = from_csv("id,lower,upper,size\n" + "".join(lines), "f")
    mallocs = [event.tensor for event in trace.events if isinstance(event, Malloc)]
    by_id = dict(zip(mallocs, trace.requests(), strict=True))
    assert len(by_id) == len(rows)
    for i, j in combinations(range(len(rows)), 2):
        (low, n, _), (other, m, _) = rows[i], rows[j]
        met = by_id[i].born < by_id[j].dies and by_id[j].born < by_id[i].dies
        assert met == (low < other + m and other < low + n)


@given(traces(marks=False), st.data())
def test_a_csv_that_was_cut_within_a_line_is_refused(trace: Trace, data: st.DataObject) -> None:
    text = to_csv(trace)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    if not cut.endswith("\n"):
        with pytest.raises(UnsupportedError, match=r"^f:\d+: "):
            from_csv(cut, "f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,lower,upper\n1,2,3\n", "f:1: expected the columns"),
        ("id,lower,upper,size\n1,2,3\n", "f:2: expected 4 fields"),
        ("id,lower,upper,size\n1,2,3,4\n\n1,2,3,x\n", "f:4: expected whole numbers"),
        ("id,lower,upper,size\n1,3,3,4\n", "f:2: the tensor lives in"),
        ("id,lower,upper,size\n1,2,3,4\n1,5,6,4\n", "f:3: id 1 occurs twice"),
        ("id,lower,upper,size\n1,2,3,512\n2,2,3,51", "f:3: the file is cut off"),
        ("id,lower,upper,size", "f:1: the file is cut off"),
    ],
)
def test_broken_csv_is_refused_by_its_line(text: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        from_csv(text, "f")


# -- files -------------------------------------------------------------------------------------


def test_the_format_is_told_by_the_content(tmp_path: Path) -> None:
    place = tmp_path / "trace.bin"
    write_trace(SMALL, place)
    assert read_trace(place) == SMALL
    assert read_format(place)[1] is TraceFormat.TEXT
    place.write_text("\ufeff" + to_csv(SMALL))
    assert read_trace(place).requests()[0] == PlacementRequest(10, 0, 2)
    assert read_format(place)[1] is TraceFormat.CSV
    snapshot = {"device_traces": [[{"action": "alloc", "addr": 16, "size": 3, "stream": 0}]]}
    for content in (pickle.dumps(snapshot), json.dumps(snapshot).encode()):
        place.write_bytes(content)
        assert read_trace(place).events == (Malloc(0, 3),)
        assert read_format(place)[1] is TraceFormat.SNAPSHOT


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(UnsupportedError, match="cannot be read"):
        read_trace(tmp_path)
    with pytest.raises(UnsupportedError, match="cannot be written"):
        write_trace(SMALL, tmp_path)
    (tmp_path / "t").write_bytes(b"malloc 1 2\n\xff\xfe")
    with pytest.raises(UnsupportedError, match="not UTF-8"):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Of a trace that was cut off before its first line nothing is left."""
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match="t: the file is empty"):
        read_trace(path)
