"""What only a GPU can tell and no record has, in calls of under ten minutes on a bare machine.

    python -m benchmarks.gpu.hour --out FOLDER --record benchmarks/results/gpu_h100.json

Measurements come in the order in which they tell most (`quarter` in work.py); one that fills a call
has it alone. FOLDER has the records. The same command again goes on with what is left; what failed
comes last. `--record` begins with a record of the same card and the same versions, so that its
ceilings are not measured again. `--plan` prints the order with expected seconds, and needs no GPU.
`--only` names measurements, also those of `benchmarks.gpu`, and the commands of this file:
allocators, tests, probe, verify-float64, verify-bfloat16, train-default, train-stitch,
train-replay, calibrate. `--tests` adds the tests that need a GPU and changed since the record.
`--tiny` runs the same on a CPU.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.children import ROOT, Clock, Row, environment
from benchmarks.gpu.__main__ import begun, saving
from benchmarks.gpu.rows import has_fewer, is_done
from benchmarks.gpu.session import CEILING_SECONDS, Session
from benchmarks.gpu.show import table
from benchmarks.gpu.work import Work, full, named, quarter, tiny
from farspan.formatting import read_bytes
from farspan.memory.native import LIBRARY
from farspan.spec import UnsupportedError

MINUTES = 9.4  # of a call that may take ten
LEAST_SECONDS = 10.0  # a part that has less is left to the next call
END_SECONDS = 8.0  # of the time left, that no part has
# Of `--plan`: a quarter of an hour, less the start of a machine; imports of each call.
QUARTER_SECONDS, START_SECONDS, IMPORT_SECONDS = 900.0, 90.0, 15.0
LONGEST_SECONDS = 150.0  # of the search for the baseline's longest context
SHOWN = 6  # last lines of a log
STEPS = "benchmarks.gpu"
ALLOCATORS = ("default", "stitch", "replay")
TINY_TESTS = ("tests/attention/test_backends.py",)
MARK = "mark.gpu"
RUN_FILE = """\
model:
  dtype: bfloat16
  config:
    {{model_type: qwen2, vocab_size: 264, hidden_size: 512, intermediate_size: 1024,
     num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
     max_position_embeddings: 8192, tie_word_embeddings: true, eos_token_id: 256}}
data: {{source: stdlib, held_out: 0.05, tokenizer: bytes}}
folder: {folder}
context: {context}
steps: {steps}
device: {device}
{allocator}
schedule: {{strategy: grouped, chunk: {chunk}, kv: host}}
optimizer: {{lr: 1.0e-3, warmup: 1}}
kernels: {{deterministic: true}}
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement of benchmarks.gpu, or a command with the seconds that it may take."""

    name: str
    seconds: float = 0.0
    command: tuple[str, ...] = ()  # after the interpreter
    alone: bool = False  # in a call


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says."""

    out: Path
    work: Work
    only: tuple[str, ...] = ()
    tests: bool = False
    host_memory: str | None = None
    site: Path | None = None  # packages that the machine lacks, as `benchmarks.gpu.pack` has them
    begins: Path | None = None  # a record to begin with

    @property
    def record(self) -> Path:
        return self.out / "gpu.json"

    def known(self) -> Row:
        """The record so far; that to begin with, where nothing was measured yet."""
        path = self.record if self.record.exists() else self.begins
        return begun(self.work, path, True)


# -- what there is to do -------------------------------------------------------------------------


def parts(asked: Asked) -> list[Part]:
    """In the order in which they tell most; what no record lacks is there by name. Raises
    UnsupportedError for a name that nothing has."""
    steps = {i.name: Part(i.name, alone=i.alone) for i in named(asked.work).values()}
    known = steps | {part.name: part for part in commands(asked)}
    for name in asked.only:
        if name not in known:
            raise UnsupportedError(
                f"only: nothing is called {name!r}; give names of {', '.join(known)}"
            )
    if asked.only:
        return [known[name] for name in asked.only]
    order = [item.name for item in quarter(asked.work)]
    order.insert(order.index("longest"), "allocators")
    order += ["tests"] * asked.tests
    if "ceilings" not in steps_done(asked):
        order.insert(0, "ceilings")
    return [known[name] for name in order]


def commands(asked: Asked) -> list[Part]:
    """Those that are no measurements of benchmarks.gpu. Writes the run files of those that
    train."""
    out, is_tiny = asked.out, asked.work.tiny
    small, device = ("--tiny",) * is_tiny, "cpu" if is_tiny else "cuda"
    allocators = ALLOCATORS[:1] if is_tiny else ALLOCATORS
    files = {name: str(out / f"{name}.yaml") for name in allocators}
    cut = ("--context", "64", "--chunk", "16") if is_tiny else ("--context", "2048")
    verify = ("-m", "farspan", "verify", files["default"], *cut, "--groups", "2", "--dtype")
    calibrated = ("--device", device, "--output", str(out / "machine.json"))
    allocator = ("--out", str(out / "allocator.json"), "--seconds", "110", *small)
    many = () if is_tiny else ("-n", "8")
    # By name: to collect all tests takes longer than these take.
    pytest = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", *many)
    pytest += ("--junitxml", str(out / "tests.xml"))
    return [
        Part("allocators", 120, ("-m", "benchmarks.gpu_allocator", *allocator)),
        Part("tests", 180, (*pytest, *changed_tests(asked))),
        Part(
            "probe", 150, ("-m", "benchmarks.gpu.probe", "--out", str(out / "probe.json"), *small)
        ),
        Part("verify-float64", 60, (*verify, "float64")),
        Part("verify-bfloat16", 60, (*verify, "bfloat16")),
        *(
            Part(f"train-{name}", 60, ("-m", "farspan", "train", file))
            for name, file in files.items()
        ),
        Part(
            "calibrate", 120, ("-m", "farspan", "calibrate", *calibrated, *("--quick",) * is_tiny)
        ),
    ]


def steps_done(asked: Asked) -> set[str]:
    """Names of measurements that the record has, as often as they are wanted."""
    items = named(asked.work)
    return {
        row["name"]
        for row in asked.known()["measurements"]
        if is_done(row) and row["name"] in items and not has_fewer(row, items[row["name"]])
    }


def left_over(asked: Asked, made: Row) -> list[Part]:
    """What is still to be done, what failed or was stopped last. A command that failed would fail
    again."""
    done, rows = steps_done(asked), asked.known()["measurements"]
    tried = set(made) | {row["name"] for row in rows if not is_done(row)}
    done |= {name for name, part in made.items() if part["ended"] != "timed out"}
    left = [part for part in parts(asked) if part.name not in done]
    return sorted(left, key=lambda part: part.name in tried)


def in_groups(left: Iterable[Part]) -> list[list[Part]]:
    """Measurements that one process makes together; everything else by itself."""

    def key(numbered: tuple[int, Part]) -> int:
        number, part = numbered
        apart = part.command or part.alone or part.name == "longest"
        return number if apart else -1

    groups = groupby(enumerate(left), key)
    return [[part for _, part in group] for _, group in groups]


# -- tests that need a GPU -----------------------------------------------------------------------


def changed_tests(asked: Asked) -> tuple[str, ...]:
    """Files with tests that need a GPU, but for those that passed on this record's card and are
    unchanged since, as is the package that they test."""
    if asked.work.tiny:
        return TINY_TESTS
    passed = asked.known().get("tests", {})
    return tuple(file for file in tests_of_a_gpu() if passed.get(file) != digest_of(file))


def tests_of_a_gpu() -> list[str]:
    """Files with tests that need one."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if MARK in f.read_text(encoding="utf-8")]


def digest_of(file: str) -> str:
    """Of a file of tests and of the package that has its folder's name."""
    package = ROOT / "src" / "farspan" / Path(file).parts[1]
    found = hashlib.sha256((ROOT / file).read_bytes())
    for path in sorted(package.rglob("*.py")) if package.is_dir() else ():
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def note_tests(asked: Asked) -> None:
    """Writes into the record the digest of each file whose tests ran and passed."""
    report = asked.out / "tests.xml"
    if not report.exists():
        return
    ended: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # Of a class of tests the name has the class, too.
        words = case.get("classname", "").split(".")
        file = next(
            (f"{'/'.join(words[:n])}.py" for n in range(len(words), 0, -1)
             if (ROOT / f"{'/'.join(words[:n])}.py").exists()), ""
        )  # fmt: skip
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        ended.setdefault(file, set()).update(bad or {"passed"})
    passed = [
        f for f, how in ended.items() if f and "passed" in how and how <= {"passed", "skipped"}
    ]
    record = asked.known()
    record["tests"] = record.get("tests", {}) | {file: digest_of(file) for file in passed}
    saving(asked.record)(record)


# -- running -------------------------------------------------------------------------------------


def write_run(out: Path, name: str, is_tiny: bool) -> Path:
    """A run file that trains a small model for a few steps with this allocator, by kernels that
    give the same bits each time: runs are compared."""
    path = out / f"{name}.yaml"
    sizes = {"context": 128, "chunk": 32, "steps": 2} if is_tiny else {}
    fields: dict[str, Any] = {"context": 8192, "chunk": 2048, "steps": 6} | sizes
    allocator = "" if is_tiny else f"allocator: {name}"
    folder = (out / "runs" / name).resolve()
    device = "cpu" if is_tiny else "cuda"
    words = RUN_FILE.format(folder=folder, device=device, allocator=allocator, **fields)
    path.write_text(words, encoding="utf-8")
    return path


def command_of(asked: Asked, group: Sequence[Part], seconds: float) -> Part:
    """The command that does a group, in so many seconds at most."""
    first = group[0]
    if first.command:
        return first
    if first.name == "longest":
        seconds = min(seconds, LONGEST_SECONDS)
    memory = () if asked.host_memory is None else ("--host-memory", asked.host_memory)
    options = ("--out", str(asked.record), "--resume", *memory, *("--tiny",) * asked.work.tiny)
    minutes = ("--minutes", f"{(seconds - END_SECONDS) / 60:.2f}")
    names = ("--only", *(part.name for part in group))
    return Part(STEPS, seconds, ("-m", STEPS, *options, *minutes, *names))


def run_part(part: Part, seconds: float, log: Path, site: Path | None = None) -> Row:
    """How a part ended, and the last lines that it said."""
    limit = min(part.seconds, seconds)
    began = time.monotonic()
    variables = environment("") | {"PYTHONUNBUFFERED": "1"}
    if site is not None:
        variables["PYTHONPATH"] += f"{os.pathsep}{site.resolve()}"
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                [sys.executable, *part.command], cwd=ROOT, env=variables,
                stdout=output, stderr=subprocess.STDOUT, timeout=limit, check=False,
            )  # fmt: skip
            ended = "completed" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "timed out"
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), "said": said}


def run(asked: Asked, clock: Clock) -> None:
    """Everything that is left, while there is time. Writes hour.json after each part."""
    logs = asked.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name in ALLOCATORS[:1] if asked.work.tiny else ALLOCATORS:
        write_run(asked.out, name, asked.work.tiny)
    kept = asked.out / "hour.json"
    made = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    ran = False
    for group in in_groups(left_over(asked, made)):
        left = clock.left - END_SECONDS
        if left < LEAST_SECONDS or (ran and group[0].alone):
            print(*(f"{part.name}: left to the next call" for part in group), sep="\n", flush=True)
            continue
        part = command_of(asked, group, left)
        found = run_part(part, left, logs / f"{part.name}.log", asked.site)
        if part.name == "tests":
            note_tests(asked)
        if group[0].command:
            made[part.name] = found
            saving(kept)(made)
        ran = True
        print(f"{part.name}: {found['ended']} in {found['seconds']} s", flush=True)
        print(*(f"    {line[:200]}" for line in found["said"]), sep="\n", flush=True)
    if words := same_losses(asked.out):
        print(words)


def same_losses(out: Path) -> str:
    """Of runs with different allocators, whose losses have the same bits; "" where none ran."""
    losses: dict[str, list[float]] = {}
    for name in ALLOCATORS:
        path = out / "runs" / name / "metrics.jsonl"
        if path.exists():
            rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            losses[name] = [row["loss"] for row in rows if "loss" in row]
    if len(losses) < 2:
        return ""
    first = losses.pop("default", None)
    said = (f"{name}: {'yes' if losses[name] == first else 'NO'}" for name in losses)
    return f"the losses of PyTorch's allocator? {', '.join(said)}"


def seed(asked: Asked) -> None:
    """Begins with a committed record. Raises UnsupportedError for one of another card, or of other
    versions than are here: rows of both would stand in one table."""
    found = asked.known()
    was, card = found.get("machine", {}), card_name()
    here = {name: version(name) for name in was.get("versions", {})} | {"torch": torch.__version__}
    pairs = [
        (f"{name} {old}", f"{name} {here[name]}") for name, old in was.get("versions", {}).items()
    ]
    pairs += [(was.get("gpu"), card)] if card is not None else []
    for old, now in pairs:
        if old != now:
            raise UnsupportedError(
                f"record: {asked.begins} is of {old}, here is {now}; leave --record out, and "
                "ceilings are measured first"
            )
    saving(asked.record)(found)


def card_name() -> str | None:
    """The first GPU's, as its driver has it, without starting CUDA; None where none says."""
    asked = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


# -- the plan ------------------------------------------------------------------------------------


def expected(asked: Asked, record: Row) -> dict[str, float]:
    """Seconds of each part on the record's card: of commands and searches, at most."""
    host = None
    if asked.host_memory is not None:
        host = read_bytes(asked.host_memory, "host_memory")
    elif record["runs"]:
        host = int(record["runs"][-1]["main_memory"]["available"])
    found = {part.name: part.seconds for part in parts(asked)}
    steps = [part.name for part in parts(asked) if not part.command]
    session = Session(
        asked.work, "cuda", Clock.of(1e6), record, lambda _: None, lambda _: None,
        only=tuple(steps), host_memory=host, repeat=0.0,
    )  # fmt: skip
    session.plan_with(session.asked())
    for item in session.asked():
        if item.work == "ceilings":
            found[item.name] = CEILING_SECONDS
        elif item.work == "longest":
            found[item.name] = LONGEST_SECONDS
        else:
            arranged = session.arranged(item)
            if isinstance(arranged, str):
                raise UnsupportedError(f"plan: {item.name}: {arranged}")
            found[item.name] = arranged.seconds
    return found


def calls_of(left: Sequence[Part], seconds: dict[str, float], minutes: float) -> dict[str, int]:
    """In which call of a quarter of an hour each part is made, from 1; 0: in none of it."""
    calls = dict.fromkeys((part.name for part in left), 0)
    todo, budget, number = list(left), QUARTER_SECONDS - START_SECONDS, 0
    while todo and budget > 60 * 2:
        number += 1
        all_of_it = free = min(budget, 60 * minutes) - IMPORT_SECONDS - END_SECONDS
        for part in list(todo):
            ran = free < all_of_it
            if seconds[part.name] > free or (ran and part.alone):
                continue
            calls[part.name] = number
            free -= seconds[part.name]
            todo.remove(part)
            if part.alone:
                break
        if free == all_of_it:
            break
        budget -= all_of_it - free + IMPORT_SECONDS + END_SECONDS
    return calls


def plan_text(left: Sequence[Part], seconds: dict[str, float], minutes: float) -> str:
    """The order with expected seconds, and the call of a quarter of an hour that has each."""
    calls = calls_of(left, seconds, minutes)
    body = [
        (p.name, f"{seconds[p.name]:.0f}", str(calls[p.name] or "later"), "alone" * p.alone)
        for p in left
    ]
    total = sum(seconds[name] for name, call in calls.items() if call)
    ends = f"in a quarter of an hour: {total:.0f} s of measurements"
    return f"{table(('', 'expected s', 'call', ''), body)}\n{ends}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder of the records")
    parser.add_argument("--record", type=Path, help="a record of this card to begin with")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call, at most")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="these, in this order"
    )
    parser.add_argument("--tests", action="store_true", help="also tests that changed since")
    parser.add_argument("--plan", action="store_true", help="print the order and measure nothing")
    parser.add_argument("--host-memory", help="such as 104GiB, where less is shown than there is")
    parser.add_argument("--site", type=Path, help="folder that benchmarks.gpu.pack wrote")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    given = parser.parse_args()
    if given.out is None and not given.plan:
        parser.error("the following arguments are required: --out")
    work, out = tiny() if given.tiny else full(), given.out or Path("plan-without-a-folder")
    asked = Asked(
        out, work, tuple(given.only), given.tests, given.host_memory, given.site, given.record
    )
    try:
        if given.plan:
            seconds = expected(asked, asked.known())
            print(plan_text(left_over(asked, {}), seconds, given.minutes))
            return
        if not given.tiny and not torch.cuda.is_available():
            raise UnsupportedError(
                "gpu: this PyTorch reaches no CUDA device; --tiny runs the script without"
            )
        parts(asked)  # names are refused before anything runs
        out.mkdir(parents=True, exist_ok=True)
        if given.record is not None and not asked.record.exists():
            seed(asked)
        if given.site is not None and not LIBRARY.exists():
            shutil.copy(given.site / LIBRARY.name, LIBRARY)
        run(asked, Clock.of(60 * given.minutes))
    except UnsupportedError as error:
        sys.exit(f"farspan: {error}")


if __name__ == "__main__":
    main()
