"""Programs of their own for what a process can do once: choose PyTorch's allocator, or fail.

A child reads its settings from a file, appends each row that it has to another, and so leaves
what it measured behind even where it is stopped. It may be started before its settings are known:
it imports what it needs, some seconds, and waits for them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# torch reads the older name first, so both are taken out before one is set.
CONFIGURATION, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
# cuBLAS is deterministic on one stream only with workspaces of a fixed size.
FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}
LEAST_SECONDS = 15.0  # of a child: importing torch and starting CUDA take most of it
POLL_SECONDS = 0.02
GIVEN, ROWS, SAID = "settings.json", "rows", "said"  # files of a child
WORDS = 600  # characters kept of what a child said last

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child left behind, and how it ended: completed, failed, timed out or not run."""

    ended: str
    words: str
    seconds: float
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> Row:
        """Without the rows."""
        return {"ended": self.ended, "words": self.words, "seconds": round(self.seconds, 2)}


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


def environment(configuration: str) -> dict[str, str]:
    """This process's own, with `configuration` for PyTorch's allocator; "" for its defaults."""
    kept = {k: v for k, v in os.environ.items() if k not in (CONFIGURATION, OLDER)}
    places = [str(ROOT), str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= FIXED | {"PYTHONPATH": os.pathsep.join(places)}
    return kept | ({CONFIGURATION: configuration} if configuration else {})


@dataclass(slots=True)
class Child:
    """A process that waits for its settings, from `begin` until it is given them or ended."""

    process: "subprocess.Popen[bytes]"
    folder: "tempfile.TemporaryDirectory[str]"
    given: float = 0.0  # when it was given its settings, of time.monotonic()

    @classmethod
    def begin(cls, module: str, configuration: str = "") -> "Child":
        """Starts `python -m MODULE SETTINGS`."""
        folder = tempfile.TemporaryDirectory()
        with (Path(folder.name) / SAID).open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(Path(folder.name) / GIVEN)],
                cwd=ROOT,
                env=environment(configuration),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its own children can be ended with it
            )
        return cls(process, folder)

    def give(self, settings: Mapping[str, Any], seconds: float) -> None:
        """It begins its work, for which it has so long."""
        place = Path(self.folder.name)
        whole = {**settings, "rows": str(place / ROWS), "seconds": seconds}
        (place / "unfinished").write_text(json.dumps(whole), "utf-8")
        self.given = time.monotonic()
        (place / "unfinished").rename(place / GIVEN)

    def outcome(self, seconds: float) -> Outcome:
        """Waits for at most so long, and ends it. Raises nothing of the child's."""
        place = Path(self.folder.name)
        try:
            ended = "failed" if self.process.wait(seconds) else "completed"
        except subprocess.TimeoutExpired:
            ended = "timed out"
        finally:
            end_group(self.process)
        words = "" if ended == "completed" else last_words(place / SAID)
        found = Outcome(ended, words, time.monotonic() - self.given, read_rows(place / ROWS))
        self.folder.cleanup()
        return found

    def end(self) -> None:
        """It is not needed."""
        end_group(self.process)
        self.folder.cleanup()


def run_child(
    module: str, settings: Mapping[str, Any], seconds: float, configuration: str = ""
) -> Outcome:
    """Runs `python -m MODULE SETTINGS` for at most so long. Raises nothing of the child's."""
    if seconds < LEAST_SECONDS:
        return Outcome("not run", "out of time", 0.0)
    child = Child.begin(module, configuration)
    child.give(settings, seconds)
    return child.outcome(seconds)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a child that leads its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    """What the child was given, in the child, once it was; it exits when nobody is left to."""
    given, parent = Path(arguments[1]), os.getppid()
    while not given.exists():
        if os.getppid() != parent:
            sys.exit("nobody gave it settings")
        time.sleep(POLL_SECONDS)
    found: dict[str, Any] = json.loads(given.read_text("utf-8"))
    return found


def add_row(settings: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """One more row, on disk when this returns."""
    with Path(settings["rows"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def words_of(error: BaseException) -> str:
    """An exception in a row."""
    return f"{type(error).__name__}: {error}"[:WORDS]
