"""What only a GPU can tell and no record has, in calls of under ten minutes on a bare machine.

    python -m benchmarks.gpu.hour --out FOLDER --record benchmarks/results/gpu_h100.json

Measurements come in the order in which they tell most (`quarter` in work.py); one that fills a call
has it alone. FOLDER has the records. The same command again goes on with what is left; what failed
comes last. `--record` begins with a record of the same card and the same versions (of several
files, this card's), so that its ceilings are not measured again. `--plan` prints the order with
expected seconds, and needs no GPU. `--only` names measurements, also those of `benchmarks.gpu`, and
the commands of this file: allocators, tests, probe, verify-float64, verify-bfloat16, train-default,
train-stitch, train-replay, calibrate. `--tests` adds the tests that need a GPU and changed since
the record. `--tiny` runs the same on a CPU.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import torch

from benchmarks.children import ROOT, Clock, Row, environment
from benchmarks.gpu.__main__ import begun, saving
from benchmarks.gpu.rows import has_fewer, is_done
from benchmarks.gpu.session import CEILING_SECONDS, Session
from benchmarks.gpu.show import table
from benchmarks.gpu.work import Work, full, named, quarter, tiny
from farspan.formatting import read_bytes
from farspan.spec import UnsupportedError
from farspan_memory.native import LIBRARY

MINUTES = 9.4  # of a call that may take ten
LEAST_SECONDS = 40.0  # measurements that have less are left to the next call
END_SECONDS = 8.0  # kept free at the end of a call
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

    out: Path | None  # None: only to plan
    work: Work
    only: tuple[str, ...] = ()
    tests: bool = False
    host_memory: str | None = None
    site: Path | None = None  # packages that the machine lacks, as `benchmarks.gpu.pack` has them
    begins: Path | None = None  # a record to begin with

    @property
    def folder(self) -> Path:
        return self.out or Path()

    @property
    def record(self) -> Path:
        return self.folder / "gpu.json"

    def known(self) -> Row:
        """The record so far; before anything is measured, the one to begin with."""
        here = self.out is not None and self.record.exists()
        return begun(self.work, self.record if here else self.begins, True)

    def ended(self) -> Row:
        """How commands ended in earlier calls, by name. Raises UnsupportedError."""
        path = self.folder / "hour.json"
        if self.out is None or not path.exists():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UnsupportedError(f"{path} cannot be read: {error}; delete it") from error


# -- what there is to do -------------------------------------------------------------------------


def parts(asked: Asked) -> list[Part]:
    """Everything that is wanted, the most telling first. Raises UnsupportedError for a name in
    `only` that nothing has."""
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
    order += ["tests"] * (asked.tests and bool(changed_tests(asked)))
    if "ceilings" not in steps_done(asked):
        order.insert(0, "ceilings")
    return [known[name] for name in order]


def commands(asked: Asked) -> list[Part]:
    """Parts that are commands of their own, each with the seconds that it may take."""
    out, is_tiny = asked.folder, asked.work.tiny
    small, device = ("--tiny",) * is_tiny, "cpu" if is_tiny else "cuda"
    allocators = ALLOCATORS[:1] if is_tiny else ALLOCATORS
    files = {name: str(out / f"{name}.yaml") for name in allocators}
    cut = ("--context", "64", "--chunk", "16") if is_tiny else ("--context", "2048")
    verify = ("-m", "farspan", "verify", files["default"], *cut, "--groups", "2", "--dtype")
    calibrated = ("--device", device, "--output", str(out / "machine.json"))
    allocator = ("--out", str(out / "allocator.json"), "--seconds", "230", *small)
    many = () if is_tiny else ("-n", "8")
    # By name: to collect all tests takes longer than these take.
    pytest = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", *many)
    pytest += ("--junitxml", str(out / "tests.xml"))
    return [
        Part("allocators", 240, ("-m", "benchmarks.gpu_allocator", *allocator)),
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
    """Names of measurements that the record has with all the steps that are wanted."""
    items = named(asked.work)
    return {
        row["name"]
        for row in asked.known()["measurements"]
        if is_done(row) and row["name"] in items and not has_fewer(row, items[row["name"]])
    }


def left_over(asked: Asked, made: Row) -> list[Part]:
    """Parts that are still to be done. Those that failed, or were stopped, come last, and a command
    that failed is not repeated."""
    done, record = steps_done(asked), asked.known()
    rows = record["measurements"]
    tried = {*made, record.get("begun"), *(row["name"] for row in rows if not is_done(row))}
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
    """Files with tests that need a GPU, without those that passed on this record's card and are
    unchanged since, the packages that they import included."""
    if asked.work.tiny:
        return TINY_TESTS
    passed = asked.known().get("tests", {})
    return tuple(file for file in tests_of_a_gpu() if passed.get(file) != digest_of(file))


def tests_of_a_gpu() -> list[str]:
    """Files with tests that need one."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if MARK in f.read_text(encoding="utf-8")]


def digest_of(file: str) -> str:
    """A digest of a file of tests and of the packages of farspan that it imports."""
    text = (ROOT / file).read_text(encoding="utf-8")
    names = {*re.findall(r"farspan\.(\w+)", text), Path(file).parts[1]}
    found = hashlib.sha256(text.encode())
    for package in (ROOT / "src" / "farspan" / name for name in sorted(names)):
        for path in sorted(package.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def note_tests(asked: Asked) -> None:
    """Writes into the record the digest of each file whose tests ran and passed."""
    ended: dict[str, set[str]] = {}
    try:
        cases = ElementTree.parse(asked.folder / "tests.xml").iter("testcase")
    except (OSError, ElementTree.ParseError):  # pytest was stopped
        return
    for case in cases:
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
    until = ("--until", f"{time.time() + seconds - END_SECONDS:.1f}")
    names = ("--only", *(part.name for part in group))
    return Part(group[0].name, seconds, ("-m", STEPS, *options, *until, *names))


def run_part(
    part: Part, seconds: float, log: Path, site: Path | None = None, lock: int | None = None
) -> Row:
    """How a part ended, and the last lines that it said. Its processes hold the lock, and none of
    them outlives its time: on a card it would hold memory."""
    limit = min(part.seconds, seconds)
    began = time.monotonic()
    variables = environment("") | {"PYTHONUNBUFFERED": "1"}
    if site is not None:
        variables["PYTHONPATH"] += f"{os.pathsep}{site.resolve()}"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=variables, stdout=output,
            stderr=subprocess.STDOUT, pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
        try:
            code = process.wait(limit)
            ended = "completed" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            ended = "timed out"
            end_family(process.pid)
            process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), "said": said}


def end_family(leader: int) -> None:
    """Ends a process and its descendants, also those that lead sessions of their own."""
    try:
        family = [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=5)


def run(asked: Asked, clock: Clock, lock: int | None = None) -> bool:
    """Does what is left while there is time, and writes hour.json after each command. False where a
    part failed."""
    logs, made, ran, good = asked.folder / "logs", asked.ended(), False, True
    logs.mkdir(parents=True, exist_ok=True)
    for name in set(asked.only) & made.keys():
        print(f"{name}: {made[name]['ended']} in an earlier call; delete hour.json to repeat it")
    for group in in_groups(left_over(asked, made)):
        first, left = group[0], clock.left - END_SECONDS
        needed = 0.0 if asked.work.tiny else first.seconds or LEAST_SECONDS
        if left < needed or (ran and first.alone):
            print(*(f"{part.name}: left to the next call" for part in group), sep="\n", flush=True)
            continue
        if first.name.startswith(("train-", "verify-")):
            for name in ALLOCATORS[:1] if asked.work.tiny else ALLOCATORS:
                write_run(asked.folder, name, asked.work.tiny)
        (asked.folder / "tests.xml").unlink(missing_ok=True)
        part, ran = command_of(asked, group, left), True
        name = re.sub(r"[^\w.-]+", "-", part.name)
        log = logs / f"{name}.log"
        found = run_part(part, left, log, asked.site, lock)
        if part.name == "tests":
            note_tests(asked)
        if first.command:
            made[part.name] = found
            saving(asked.folder / "hour.json")(made)
        print(f"{part.name}: {found['ended']} in {found['seconds']} s", flush=True)
        print(*(f"    {line[:200]}" for line in found["said"]), sep="\n", flush=True)
        if found["ended"].startswith("exit"):
            good = False
            if not first.command:  # such as a record of another card: the next would fail alike
                break
    if words := same_losses(asked.folder):
        print(words)
    return good


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
    """Begins with a committed record, unless the folder has ceilings already. Raises
    UnsupportedError for a record of another card, or of other versions than are here: rows of both
    would stand in one table."""
    own = begun(asked.work, asked.record, True)
    if asked.begins is None or any(row["name"] == "ceilings" for row in own["measurements"]):
        refuse_other_machine(own, asked.record)
        return
    found = begun(asked.work, asked.begins, True)
    refuse_other_machine(found, asked.begins)
    names = {row["name"] for row in own["measurements"]}
    kept = [row for row in found["measurements"] if row["name"] not in names]
    saving(asked.record)(found | {"measurements": [*kept, *own["measurements"]]})


def refuse_other_machine(record: Row, path: Path) -> None:
    """Raises UnsupportedError for a record of another card or of other versions."""
    was, card = record.get("machine", {}), card_name()
    pairs = [(name, old, installed(name)) for name, old in was.get("versions", {}).items()]
    if card is not None and "gpu" in was:
        pairs.append(("the card", was["gpu"], card))
    for name, old, now in pairs:
        if old != now:
            raise UnsupportedError(
                f"record: in {path} {name} is {old}, here it is {now}; give a record of this "
                "machine, or another folder and no --record: then ceilings are measured first"
            )


def installed(name: str) -> str:
    """The version of a package here; "none" without it."""
    if name == "torch":
        return torch.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def of_this_card(records: Sequence[Path]) -> Path | None:
    """The record to begin with: the one of the card that is here, if several are given. Raises
    UnsupportedError for a file that is not there."""
    for path in records:
        if not path.is_file():
            raise UnsupportedError(f"record: there is no file {path}; give a committed record")
    card = card_name()
    for path in records:
        with suppress(ValueError, AttributeError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("machine", {}).get("gpu") == card:
                return path
    return records[0] if records else None


def check_site(site: Path) -> None:
    """Puts the allocator's library in its place. Raises UnsupportedError for a folder that lacks
    what `benchmarks.gpu.pack` writes: baselines would be measured without their kernels."""
    for name in ("liger_kernel", "bitsandbytes", LIBRARY.name):
        if not (site / name).exists():
            raise UnsupportedError(
                f"site: {site} has no {name}; write it by `python -m benchmarks.gpu.pack {site}`"
            )
    if not LIBRARY.exists():
        shutil.copy(site / LIBRARY.name, LIBRARY)


def locked(folder: Path) -> int:
    """A lock on the folder, held until this process and its children end. Raises UnsupportedError
    where another call holds it."""
    held = os.open(folder / "hour.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UnsupportedError(
            f"out: another call still measures in {folder}; wait for it, or end its processes"
        ) from error
    return held


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
    parser.add_argument(
        "--record", type=Path, nargs="+", default=(), help="a record of this card, or of several"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call, at most")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="these, in this order"
    )
    parser.add_argument("--tests", action="store_true", help="also tests that changed since")
    parser.add_argument("--plan", action="store_true", help="print the order and measure nothing")
    parser.add_argument("--host-memory", help="such as 105GiB, to plan with less than is shown")
    parser.add_argument("--site", type=Path, help="folder that benchmarks.gpu.pack wrote")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    given = parser.parse_args()
    if given.out is None and not given.plan:
        parser.error("the following arguments are required: --out")
    try:
        sys.exit(None if performed(given) else 1)
    except UnsupportedError as error:
        sys.exit(f"farspan: {error}")


def performed(given: argparse.Namespace) -> bool:
    """Does what the command line asks; False where a part failed. Raises UnsupportedError."""
    if not (math.isfinite(given.minutes) and given.minutes > 0):
        raise UnsupportedError(f"minutes: expected a number above 0, got {given.minutes}")
    out = None if given.out is None else given.out.resolve()
    site = None if given.site is None else given.site.resolve()
    begins = of_this_card([path.resolve() for path in given.record])
    work = tiny() if given.tiny else full()
    asked = Asked(out, work, tuple(given.only), given.tests, given.host_memory, site, begins)
    left = left_over(asked, asked.ended())  # names and files are refused before anything runs
    if given.plan or out is None:
        print(plan_text(left, expected(asked, asked.known()), given.minutes))
        return True
    if not given.tiny and not torch.cuda.is_available():
        raise UnsupportedError(
            "gpu: this PyTorch reaches no CUDA device; --tiny runs the script without"
        )
    if site is not None:
        check_site(site)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = locked(out)
    except OSError as error:
        raise UnsupportedError(f"out: {out} cannot be written: {error}") from error
    seed(asked)
    return run(asked, Clock.of(60 * given.minutes), lock)


if __name__ == "__main__":
    main()
