"""Programs of their own for what a process can do once: choose PyTorch's allocator, or fail.

A child reads its settings from a file, appends each row that it has to another, and so leaves
what it measured behind even where it is stopped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src", ROOT / "packages" / "farspan-memory" / "src"
# torch reads the older name first, so both are taken out before one is set.
CONFIGURATION, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
# cuBLAS is deterministic on one stream only with workspaces of a fixed size.
FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}
LEAST_SECONDS = 15.0  # of a child: importing torch and starting CUDA take most of it
WORDS = 600  # characters kept of what a child said last

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child left behind, and how it ended: completed, failed, timed out or not run.
    `seconds` are without those that it waited for the nursery's imports."""

    ended: str
    words: str
    seconds: float
    rows: list[Row] = field(default_factory=list)
    import_seconds: float = 0.0

    def to_json(self) -> Row:
        """Without the rows."""
        found = {"ended": self.ended, "words": self.words, "seconds": round(self.seconds, 2)}
        return found | {"import_seconds": round(self.import_seconds, 2)}


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds that are left until a moment of time.monotonic()."""

    end: float

    @classmethod
    def of(cls, seconds: float) -> "Clock":
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def share(self, part: float) -> "Clock":
        """A part of what is left, 0 to 1."""
        return Clock.of(max(0.0, self.left) * part)


def environment(configuration: str, site: Path | None = None) -> dict[str, str]:
    """This process's own, with `configuration` for PyTorch's allocator ("" for its defaults) and
    packages from `site` behind all others."""
    kept = {k: v for k, v in os.environ.items() if k not in (CONFIGURATION, OLDER)}
    places = [*map(str, (ROOT, *SOURCES)), *filter(None, [kept.get("PYTHONPATH")])]
    places += [] if site is None else [str(site.resolve())]
    kept |= FIXED | {"PYTHONPATH": os.pathsep.join(places)}
    return kept | ({CONFIGURATION: configuration} if configuration else {})


def run_child(
    module: str, settings: Mapping[str, Any], seconds: float, configuration: str = ""
) -> Outcome:
    """Runs `python -m MODULE SETTINGS` for at most so long. Raises nothing of the child's."""
    if seconds < LEAST_SECONDS:
        return Outcome("not run", "out of time", 0.0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, given = Path(folder) / "rows", Path(folder) / "settings.json"
        said = Path(folder) / "said"
        given.write_text(json.dumps({**settings, "rows": str(rows), "seconds": seconds}), "utf-8")
        with said.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(given)],
                cwd=ROOT,
                env=environment(configuration),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its own children can be ended with it
            )
            try:
                ended = "failed" if process.wait(seconds) else "completed"
            except subprocess.TimeoutExpired:
                ended = "timed out"
            finally:
                end_group(process.pid)
                process.wait()
        words = "" if ended == "completed" else last_words(said)
        return Outcome(ended, words, time.monotonic() - began, read_rows(rows))


class Nursery:
    """Children that are forked from a process which has imported `preloaded`, so that imports of
    several seconds are made once. That process must leave CUDA alone: whoever starts CUDA cannot
    be forked from."""

    def __init__(self, preloaded: str, configuration: str = "", site: Path | None = None) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([preloaded])
        # Whether there is a GPU is asked of NVML, not of CUDA.
        theirs = environment(configuration, site) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with mock.patch.dict(os.environ, theirs, clear=True):
            forkserver.ensure_running()

    def warm(self) -> float:
        """Waits until everything is imported; the seconds that it took."""
        began = time.monotonic()
        process = self._context.Process()  # does nothing but to be there
        process.start()
        process.join()
        return time.monotonic() - began

    def run(
        self, work: Callable[[dict[str, Any]], None], settings: Mapping[str, Any], seconds: float
    ) -> Outcome:
        """Runs work(settings) for at most so long. Raises nothing of the child's."""
        asked = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows, said = Path(folder) / "rows", Path(folder) / "said"
            said.touch()
            given = {**settings, "rows": str(rows), "seconds": seconds}
            process = self._context.Process(target=_work, args=(work, given, str(said)))
            process.start()  # of the first child it returns when all is imported
            began = time.monotonic()
            try:
                process.join(max(0.0, seconds))
                code = process.exitcode
            finally:
                assert process.pid is not None
                end_group(process.pid)
                process.kill()  # it may not lead a group yet
                process.join()
            ended = "timed out" if code is None else "failed" if code else "completed"
            words = "" if ended == "completed" else last_words(said)
            seconds = time.monotonic() - began
            return Outcome(ended, words, seconds, read_rows(rows), began - asked)


def _work(work: Callable[[dict[str, Any]], None], settings: dict[str, Any], said: str) -> None:
    """In a forked child: all that it says goes to a file."""
    os.setsid()
    with Path(said).open("w", encoding="utf-8") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    work(settings)


def end_group(leader: int) -> None:
    """Ends what is left of a process that leads its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def last_words(path: Path) -> str:
    """The last lines of an output, which name an exception."""
    lines = [line.strip() for line in path.read_text("utf-8", "replace").splitlines()]
    return "\n".join(line for line in lines[-8:] if line)[-WORDS:]


def read_rows(path: Path) -> list[Row]:
    """The rows that are whole; a child may have been stopped while it wrote."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text("utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def settings_of(arguments: list[str]) -> dict[str, Any]:
    """What run_child gave, in the child."""
    found: dict[str, Any] = json.loads(Path(arguments[1]).read_text("utf-8"))
    return found


def add_row(settings: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """One more row, on disk when this returns."""
    with Path(settings["rows"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def words_of(error: BaseException) -> str:
    """An exception in a row."""
    return f"{type(error).__name__}: {error}"[:WORDS]
