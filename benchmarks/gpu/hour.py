"""What only a GPU can tell and no record has, in calls of under ten minutes on a bare machine.

    python -m benchmarks.gpu.hour --out FOLDER --record benchmarks/results/gpu_h100.json

Measurements come in the order in which they tell most (`quarter` in work.py), each by a process of
its own with a time limit. FOLDER has the records, written after each row. The same command again
goes on with what is left; what failed comes last. `--record` begins with a record of the same card
and the same versions (of several files, this card's), so that its ceilings are not measured again.
`--plan` prints the order with expected seconds, and needs no GPU. `--only` names measurements of
any length and strategy. `--tiny` runs the same on a CPU: nothing is to be learned about speed.
"""

import argparse
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import EXPANDABLE, Clock, Nursery, Row, environment
from benchmarks.gpu.planned import Card
from benchmarks.gpu.power import PowerLog
from benchmarks.gpu.session import CHILD, CONVENTIONS, Session, is_done, refuse_another
from benchmarks.gpu.work import Item, Work, full, named, quarter, tiny
from farspan.engine.microbench import PACKAGES
from farspan.formatting import read_bytes
from farspan.spec import UnsupportedError
from farspan_memory.native import LIBRARY

MINUTES = 9.4  # of a call that may take ten
ASK = """import json, torch
torch.empty(1, device="cuda")
of = torch.cuda.get_device_properties(0)
print(json.dumps([of.name, of.total_memory]))"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says."""

    out: Path | None  # None: only to plan
    work: Work
    only: tuple[str, ...] = ()
    host_memory: int | None = None
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
        return begun(self.work, self.record if here else self.begins)


# -- records -------------------------------------------------------------------------------------


def begun(work: Work, path: Path | None) -> Row:
    """A record to go on with, or a new one. Raises UnsupportedError for one of something else."""
    new = {
        "benchmark": "gpu",
        "tiny": work.tiny,
        "model": work.config,
        "dtype": work.dtype,
        "conventions": CONVENTIONS,
        "runs": [],
        "measurements": [],
    }
    if path is None or not path.exists():
        return new
    try:
        found: Row = json.loads(path.read_text("utf-8"))
        assert isinstance(found, dict)
        assert isinstance(found.get("measurements", []), list)
    except (OSError, ValueError, AssertionError) as error:
        raise UnsupportedError(f"{path} cannot be read as a record: {error}") from error
    if any(found.get(name) != new[name] for name in ("benchmark", "tiny", "model", "dtype")):
        raise UnsupportedError(
            f"{path} is a record of something else than this benchmark measures; give another file"
        )
    return found


def saving(path: Path) -> Callable[[Any], None]:
    """Writes a record at once or not at all."""

    def save(record: Any) -> None:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    return save


def of_this_card(records: Sequence[Path], card: str | None) -> Path | None:
    """The record to begin with: the one of the card that is here, if several are given. Raises
    UnsupportedError for a file that is not there."""
    for path in records:
        if not path.is_file():
            raise UnsupportedError(f"record: there is no file {path}; give a committed record")
        with suppress(ValueError, AttributeError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("machine", {}).get("gpu") == card:
                return path
    return records[0] if records else None


# -- what there is to do -------------------------------------------------------------------------


def wanted(asked: Asked) -> list[Item]:
    """Everything that is wanted, the most telling first. Raises UnsupportedError for a name in
    `only` that nothing has."""
    known = named(asked.work)
    for name in asked.only:
        if name not in known:
            raise UnsupportedError(
                f"only: nothing is called {name!r}; give names of {', '.join(known)}"
            )
    if asked.only:
        return [known[name] for name in asked.only]
    has_ceilings = any(row["name"] == "ceilings" for row in asked.known()["measurements"])
    return [*[known["ceilings"]] * (not has_ceilings), *quarter(asked.work)]


def left_over(asked: Asked) -> list[Item]:
    """Items that are still to be measured; those that failed, or were stopped, come last."""
    record, items = asked.known(), named(asked.work)
    rows = record["measurements"]
    done = {row["name"] for row in rows if is_done(row) and not _has_fewer(row, items)}
    tried = {record.get("begun"), *(row["name"] for row in rows if not is_done(row))}
    left = [item for item in wanted(asked) if item.name not in done]
    return sorted(left, key=lambda item: item.name in tried)


def _has_fewer(row: Row, items: dict[str, Item]) -> bool:
    """Whether a step was measured, fewer times than is wanted."""
    times = items[row["name"]].steps if row["name"] in items else 1
    return 0 < len(row.get("runs", ())) < times


def run(asked: Asked, card: Card | None, clock: Clock) -> None:
    """Measures what is left while there is time."""
    device = "cpu" if card is None else "cuda"
    nursery = Nursery(CHILD, EXPANDABLE if device == "cuda" else "", asked.site)
    power = None if card is None else PowerLog()
    if power is not None and not power.works:
        print("nvidia-smi is not here: no row has clock and power")
    session = Session(
        asked.work, device, clock, asked.known(), saving(asked.record), print,
        nursery=nursery, card=card, host_memory=asked.host_memory, power=power,
    )  # fmt: skip
    try:
        session.run(left_over(asked))
    finally:
        if power is not None:
            power.close()


# -- the machine ---------------------------------------------------------------------------------


def card_of() -> Card:
    """The GPU. Raises UnsupportedError where there is nothing to measure on."""
    # Asked in a process of its own: this one takes no part of the device.
    asked = [sys.executable, "-c", ASK]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, env=environment(""))
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UnsupportedError(
            f"gpu: this PyTorch ({torch.__version__}) reaches no CUDA device, and all that is "
            f"measured is measured on one ({''.join(last)}); --tiny runs the script without"
        )
    return Card(*json.loads(done.stdout.splitlines()[-1]))


def versions() -> dict[str, str]:
    """Those that a record has, without starting CUDA here."""
    return {"torch": torch.__version__} | {name: version(name) for name in PACKAGES}


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
    """A lock on the folder, held until this process ends. Raises UnsupportedError where another
    call holds it."""
    held = os.open(folder / "hour.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UnsupportedError(
            f"out: another call still measures in {folder}; wait for it, or end its processes"
        ) from error
    return held


def plan_text(asked: Asked) -> str:
    """What is left in its order, with expected seconds on the record's card."""
    record, left = asked.known(), left_over(asked)
    host = asked.host_memory
    if host is None and record["runs"]:
        host = int(record["runs"][-1]["main_memory"]["available"])
    session = Session(
        asked.work, "cuda", Clock.of(1e6), record, lambda _: None, print,
        host_memory=host, repeat=0.0,
    )  # fmt: skip
    session.plan_with(left)
    lines, total = [f"{'seconds':>8}{'in all':>8}"], 0.0
    for item in left:
        found = session.arranged(item)
        if isinstance(found, str):
            raise UnsupportedError(f"plan: {item.name}: {found}")
        total += found.seconds
        lines.append(f"{found.seconds:8.0f}{total:8.0f}  {item.name}")
    return "\n".join(lines)


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
    parser.add_argument("--plan", action="store_true", help="print the order and measure nothing")
    parser.add_argument("--host-memory", help="such as 105GiB, to plan with less than is shown")
    parser.add_argument("--site", type=Path, help="folder that benchmarks.gpu.pack wrote")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    given = parser.parse_args()
    if given.out is None and not given.plan:
        parser.error("the following arguments are required: --out")
    try:
        perform(given)
    except UnsupportedError as error:
        sys.exit(f"farspan: {error}")


def perform(given: argparse.Namespace) -> None:
    """Does what the command line asks. Raises UnsupportedError."""
    if not (math.isfinite(given.minutes) and given.minutes > 0):
        raise UnsupportedError(f"minutes: expected a number above 0, got {given.minutes}")
    host = None if given.host_memory is None else read_bytes(given.host_memory, "host_memory")
    out = None if given.out is None else given.out.resolve()
    site = None if given.site is None else given.site.resolve()
    card = None if given.tiny or given.plan else card_of()
    begins = of_this_card(
        [path.resolve() for path in given.record], None if card is None else card.name
    )
    work, only = tiny() if given.tiny else full(), tuple(given.only)
    asked = Asked(out, work, only, host, site, begins)
    if given.plan or out is None:
        print(plan_text(asked))
        return
    left_over(asked)  # names and files are refused before anything runs
    if site is not None:
        check_site(site)
    try:
        out.mkdir(parents=True, exist_ok=True)
        locked(out)
    except OSError as error:
        raise UnsupportedError(f"out: {out} cannot be written: {error}") from error
    if card is not None:
        refuse_another(asked.known(), {"gpu": card.name, "versions": versions()})
    run(asked, card, Clock.of(60 * given.minutes))


if __name__ == "__main__":
    main()
