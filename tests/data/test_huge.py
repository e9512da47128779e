"""Files of any size are read up to a limit, which an error names: in ten seconds of an idle
processor and 1 GiB above what the process had. Most of the 0.5 to 2 seconds that a limit takes is
the system's, for new pages, whose cost machines differ in; a terabyte takes hundreds."""

import gzip
import json
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import open_corpus
from farspan.data.sources import MOST_TEXT, MOST_VALUES, DataFiles
from farspan.data.tokenizers import ByteTokenizer
from tests.durations import slowness
from tests.grids import part_of

SECONDS, MEMORY = 10.0, 1 << 30


def bounded(read: Callable[[], object]) -> str:
    """What it is refused with, in a child of this process that has no more of either."""
    there, here = os.pipe()
    seconds = SECONDS * slowness()
    child = os.fork()
    if child == 0:
        try:
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends it
            read()
        except BaseException as error:
            os.write(here, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(here)
    with os.fdopen(there) as words:
        found = words.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"ended by signal {-status}"
    return found


def refused(tmp_path: Path, kind: str, path: Path) -> str:
    config = DataConfig(source=SourceKind(kind), path=str(path), cache=str(tmp_path / "cache"))
    opening = partial(open_corpus, context=64, seed=0, watch=lambda *_: None)
    return bounded(lambda: opening(config, ByteTokenizer()))


def sparse(path: Path, size: int) -> Path:
    """Zeros that take no room."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def bomb(path: Path, block: bytes, count: int) -> Path:
    """A gzip file of members of one block each."""
    member = gzip.compress(block, compresslevel=1)
    path.write_bytes(member * count)
    return path


def test_a_text_file_of_any_size(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.txt", 1 << 40)
    assert f"{path}: has more than 256 MiB" in refused(tmp_path, "text", path)


def test_a_line_of_any_length(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.jsonl", 1 << 40)
    assert f"{path}: line 1 has more than 256 MiB" in refused(tmp_path, "jsonl", path)


def test_a_line_that_was_compressed(tmp_path: Path) -> None:
    """32 GiB in 32 MB or so; and as blank lines, which are no document."""
    path = bomb(tmp_path / "a.jsonl.gz", b"x" * (1 << 24), 2048)
    assert f"{path}: line 1 has more than 256 MiB" in refused(tmp_path, "jsonl", path)


def test_blank_lines_without_end(tmp_path: Path) -> None:
    path = bomb(tmp_path / "a.jsonl.gz", b"\n" * (1 << 20), 2048)
    assert f"{path}: line 1048577 follows 1,048,576 blank lines" in refused(tmp_path, "jsonl", path)


@pytest.mark.parametrize("value", part_of(["[]", "{}", "1", '""'], "{}", '""'))
def test_a_record_of_any_number_of_values(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": [' + ",".join([value] * (MOST_VALUES + 1)) + "]}")
    assert path.stat().st_size < MOST_TEXT
    assert "a.jsonl: line 1 has more than 16,777,216 values" in refused(tmp_path, "jsonl", path)


def test_commas_of_a_text_are_no_values(tmp_path: Path) -> None:
    text = '1,2,[\\"' * (MOST_VALUES // 2)
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "{text}"}}')
    (document,) = DataFiles((path,)).documents()
    assert document.fields["text"] == json.loads(f'"{text}"')
