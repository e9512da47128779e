"""Plants each fault of `faults.py` in a copy of the tree, and sees that its tests fail.

    python -m tests.mutants                      # every fault, one process
    python -m tests.mutants --workers 2 merge    # those with 'merge' in their names, two at a time
    python -m tests.mutants --texts              # only whether every text is there once

A fault is caught when one of its tests fails with it, and passes without. Where its text is not
once in the sources and `tests/oracles`, or its tests are not found, the list is wrong and not the
code.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tests.mutants.faults import FAULTS, Fault
from tests.mutants.field import FIELD
from tests.mutants.kept import KEPT
from tests.mutants.kernels import KERNELS
from tests.mutants.layers import LAYERS
from tests.mutants.planner import PLANNER
from tests.mutants.templates import TEMPLATES
from tests.mutants.trust import TRUST

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("src/farspan", "packages/farspan-memory/src", "tests/oracles")
FOLDERS = ("src", "packages", "tests", "benchmarks", "docs")
FILES = (
    *("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile"),
    *("constraints.txt", "constraints-oldest.txt"),
)
# Imported once, which takes 5 s: tests run in processes that are forked from this one.
PRELOADED = ("torch.distributed.checkpoint", "torch.distributed.tensor", "transformers")
OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
    "--hypothesis-profile=unshrunk",  # a failure is enough
)
SECONDS = 600  # of one fault's tests, which take some 10
PASSED, FAILED = 0, 1  # pytest's exit codes; others are of tests that did not run


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault."""

    word: str  # caught, survived, or what is wrong with the list
    failed: str = ""  # pytest's id of the test that caught it
    output: str = ""  # pytest's last line


def places(fault: Fault, root: Path) -> list[Path]:
    """The files in which the fault's text is, as often as it is there."""
    found: list[Path] = []
    for path in sorted(path for part in SOURCES for path in (root / part).rglob("*.py")):
        found += [path] * path.read_text(encoding="utf-8").count(fault.old)
    return found


class Tree:
    """A copy of the working tree, with at most one fault in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound = Path(), ""  # the file that has a fault, and its text
        self._writes = 0
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)

    def start(self, tests: Sequence[str], *options: str) -> int:
        """The number of a process that runs these tests."""
        process = os.fork()
        if process == 0:
            code = 3
            try:
                code = self._run([*OPTIONS, *options, *tests])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        return process

    def _run(self, arguments: list[str]) -> int:
        signal.alarm(SECONDS)
        out = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.folder)
        memory = self.folder / "packages" / "farspan-memory" / "src"
        sys.path[:0] = [str(self.folder / "src"), str(memory), str(self.folder)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.dont_write_bytecode = False  # it is read by the next fault's tests
        return int(pytest.main(arguments))

    def plant(self, fault: Fault) -> None:
        (path,) = places(fault, self.folder)
        self.sound = path, path.read_text(encoding="utf-8")
        self._write(path, self.sound[1].replace(fault.old, fault.new))

    def outcome(self, status: int) -> Outcome:
        """Of the tests that have ended; the tree is then as it was."""
        self._write(*self.sound)
        lines = [line for line in self.output().splitlines() if line.strip()] or ["no output"]
        named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        failed = named[0].split(" ", 1)[1].split(" - ")[0] if named else ""
        code = os.waitstatus_to_exitcode(status)
        word = {PASSED: "survived", FAILED: "caught"}.get(code, f"tests did not run ({code})")
        return Outcome(word, failed, lines[-1])

    def output(self) -> str:
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: Python tells by it, in seconds, and by the size, whether what it
        has compiled is of this text."""
        path.write_text(text, encoding="utf-8")
        self._writes += 1
        moment = time.time() + 10 * self._writes
        os.utime(path, (moment, moment))


def chosen(names: Sequence[str]) -> list[Fault]:
    """Faults with one of these in their names; all, without any."""
    return [
        f
        for f in (*FAULTS, *FIELD, *KEPT, *KERNELS, *LAYERS, *PLANNER, *TEMPLATES, *TRUST)
        if not names or any(name in f.name for name in names)
    ]


def outcomes(
    faults: Sequence[Fault], workers: int, folder: Path
) -> Iterator[tuple[Fault, Outcome]]:
    """As they come; `workers` trees at once."""
    waiting, running = list(faults), dict[int, tuple[Tree, Fault]]()
    trees = [Tree(folder / str(number)) for number in range(workers)]
    while waiting or running:
        while waiting and trees:
            tree, fault = trees.pop(), waiting.pop(0)
            tree.plant(fault)
            running[tree.start(fault.tests, "-x")] = tree, fault
        process, status = os.wait()
        tree, fault = running.pop(process)
        trees.append(tree)
        yield fault, tree.outcome(status)


def refuse_failing(tests: Sequence[str], folder: Path) -> None:
    """Ends the process where tests fail without a fault."""
    sound = Tree(folder / "sound")
    _, status = os.waitpid(sound.start(tests), 0)
    if os.waitstatus_to_exitcode(status) != PASSED:
        raise SystemExit(f"tests that caught faults fail without:\n{sound.output()[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", help="parts of the names of faults; all, without any")
    parser.add_argument("--workers", type=int, default=1, help="faults at a time")
    parser.add_argument("--texts", action="store_true", help="look for the texts alone")
    arguments = parser.parse_args()
    faults = chosen(arguments.names)
    counts = {fault.name: len(places(fault, ROOT)) for fault in faults}
    lost = {name: count for name, count in counts.items() if count != 1}
    if lost or arguments.texts:
        print(f"{len(faults) - len(lost)} of {len(faults)} texts are there once")
        raise SystemExit("\n".join(f"{n}: found {c} times" for n, c in lost.items()) or 0)
    for name in PRELOADED:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        found = list[Outcome]()
        for fault, outcome in outcomes(faults, arguments.workers, Path(folder)):
            found.append(outcome)
            words = outcome.failed or outcome.output
            print(f"{outcome.word:10} {fault.name}: {words}", flush=True)
        caught = [outcome for outcome in found if outcome.word == "caught"]
        refuse_failing(sorted({outcome.failed for outcome in caught}), Path(folder))
    print(f"{len(caught)} of {len(faults)} caught, by tests that pass without")
    sys.exit(len(caught) != len(faults))


if __name__ == "__main__":
    main()
