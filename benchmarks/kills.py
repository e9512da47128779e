"""Kill training at random moments, or fill its disk, and start it again: is anything lost?

    python -m benchmarks.kills [--trials 12] [--only NAME ...] [--disks 20] [--out FILE]

With `--only`, the record in FILE keeps its other modes.

Every mode trains a tiny model by the engine for five steps, once undisturbed. A trial starts the
same run in a folder of its own and kills its processes by SIGKILL after a random part of the time
that a whole run takes, loading and exporting included; of several ranks one, or all. The same
command then goes on. Nothing is lost if the model has the bits of the undisturbed run, and if the
metrics are the same but for the clock. For a full disk the run folder is on a tmpfs too small for
it; the run must end by a named error, and go on once there is room. That needs root.

    python -m benchmarks.kills --network 60 [--out FILE]

Strangers speak to the store of ranks instead, for so many seconds in all: what no client would
send, or as a client that sets the run's keys. A run must end as if nothing had been said or by a
named error, and go on once they are silent.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.tables import RESULTS, save
from farspan.data.config import DataConfig, LossConfig, RecordFormat
from farspan.distributed.failure import FAILED, RankFailed
from farspan.durable import WriteFailed
from farspan.engine.microbench import describe_machine
from farspan.program.layout import Parallel
from farspan.spec import LossKind, Reference, Tier, UnsupportedError
from farspan.train.config import (
    DType,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StatesPlace,
)
from farspan.train.optimizer import TrainingOptimizer
from farspan.train.trainer import train
from tests.distributed.strangers import WAYS, speak
from tests.train.tiny import MODEL, Quiet, load_tiny, tiny_run

KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "heldout_loss")
NAMED = (UnsupportedError, WriteFailed, RankFailed)
FULL = 3  # exit status of a run that ended by a named error
SECONDS = 120.0  # that a start may take
# While strangers speak: steps of a run, and seconds that ranks wait for each other.
SPOKEN_STEPS, PATIENCE = 25, 10.0


def _disk(run: RunConfig) -> RunConfig:
    model = ModelConfig(config=MODEL, dtype=DType.BFLOAT16)  # with masters
    return replace(run, model=model, optimizer=replace(run.optimizer, states=StatesPlace.DISK))


def _host(run: RunConfig) -> RunConfig:
    schedule = replace(run.schedule, strategy="grouped", weights=Tier.HOST)
    return replace(run, schedule=schedule)


def _lora(run: RunConfig) -> RunConfig:
    lora = LoraConfig(rank=2, targets="linear", dropout=0.1)
    return replace(run, model=replace(run.model, lora=lora))


def _pairs(run: RunConfig) -> RunConfig:
    path = Path(run.folder).parent / "pairs.jsonl"
    rows = [
        {"prompt": f"{i}? ", "chosen": "yes " * (1 + i % 3), "rejected": "no"} for i in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(path), format=RecordFormat.PREFERENCE, cache=run.data.cache)
    return replace(run, data=data, loss=LossConfig(LossKind.DPO, reference=Reference.STORED))


def _stream(run: RunConfig) -> RunConfig:
    return replace(run, data=replace(run.data, streaming=True, window="70B"))


def _best(run: RunConfig) -> RunConfig:
    checkpoints = replace(run.checkpoints, keep=1, best=True)
    return replace(run, checkpoints=checkpoints, evaluation=replace(run.evaluation, every=1))


def _ranks(run: RunConfig, **layout: Any) -> RunConfig:
    return replace(run, parallel=Parallel(**layout))


MODES: dict[str, tuple[int, Callable[[RunConfig], RunConfig]]] = {
    "states on the device": (1, lambda run: run),
    "states on a drive": (1, _disk),
    "weights on the host": (1, _host),
    "LoRA with dropout": (1, _lora),
    "DPO with stored references": (1, _pairs),
    "a stream": (1, _stream),
    "the best checkpoint": (1, _best),
    "accumulation of 4": (1, lambda run: replace(run, accumulate=4)),
    "2 ranks, data": (2, lambda run: _ranks(run, data=2, fsdp=False)),
    "2 ranks, FSDP": (2, lambda run: _ranks(run, data=2)),
    "4 ranks, shards and data": (4, lambda run: _ranks(run, data=2, shards=2)),
    "2 ranks, a stream": (2, lambda run: _ranks(_stream(run), data=2)),
    "2 ranks, LoRA": (2, lambda run: _ranks(_lora(run), data=2)),
    "2 ranks, DPO": (2, lambda run: _ranks(_pairs(run), data=2)),
    "2 ranks, weights on the host": (2, lambda run: _ranks(_host(run), data=2)),
    "4 ranks, weights on the host": (4, lambda run: _ranks(_host(run), data=2, shards=2)),
}


def run_of(mode: str, where: Path) -> RunConfig:
    """The run of a mode, in a folder of its own with a cache of its own."""
    where.mkdir(parents=True, exist_ok=True)
    return MODES[mode][1](tiny_run(where))


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        found: int = free.getsockname()[1]
        return found


def started(run: RunConfig, ranks: int, port: int | None = None) -> list[int]:
    """Fork the processes of a run, whose store has the port; their numbers."""
    children, port = list[int](), port or free_port()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _train(run, rank, ranks, port)
        children.append(child)
    return children


def _train(run: RunConfig, rank: int, ranks: int, port: int) -> None:
    """A child: train, and leave with what became of it."""
    status = 1
    try:
        log = os.open(f"{run.folder}.log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if ranks > 1:
            said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in said.items()})
            os.environ["MASTER_ADDR"] = "localhost"
        status = 0 if train(run, reporter=Quiet()).step == run.steps else 1
    except NAMED as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        status = FULL
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def ended(children: list[int], doomed: Sequence[int] = (), at: float = SECONDS) -> list[int]:
    """Wait for the processes, of which the `doomed` are killed after `at` seconds; exit codes."""
    began, codes = time.monotonic(), dict[int, int]()
    while len(codes) < len(children):
        passed = time.monotonic() - began
        for number in range(len(children)) if passed > SECONDS else doomed if passed > at else ():
            if children[number] not in codes:
                os.kill(children[number], signal.SIGKILL)
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [codes[child] for child in children]


def outcome(run: RunConfig) -> dict[str, Any]:
    """The bits of the model, the metrics without the clock, and names that should not be left."""
    folder = Path(run.folder)
    model = sorted(p for p in (folder / "model").iterdir() if p.suffix == ".safetensors")
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in model}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    metrics = [{key: line.get(key) for key in KEYS} for line in lines]
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    return {"model": sums, "metrics": metrics, "checkpoints": kept}


def trial(
    mode: str, where: Path, whole: Mapping[str, Any], lasts: float, draw: random.Random
) -> str:
    """Kill a run once, or twice, and say what became of it."""
    ranks, run = MODES[mode][0], run_of(mode, where)
    killed = 0
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.uniform(0, lasts)
        doomed = list(range(ranks)) if draw.random() < 0.5 else [draw.randrange(ranks)]
        codes = ended(started(run, ranks), doomed, at)
        killed += sum(code == -signal.SIGKILL for code in codes)
    codes = ended(started(run, ranks))
    if any(codes):
        return f"lost: the last start ended with {codes}"
    found = outcome(run)
    wrong = [name for name in whole if found[name] != whole[name]]
    if wrong:
        return f"lost: another {wrong[0]}"
    return "the same bits, killed" if killed else "the same bits, ended before"


def kills(mode: str, root: Path, trials: int, seed: int) -> dict[str, Any]:
    """Trials of one mode."""
    ranks, draw = MODES[mode][0], random.Random(f"{mode} {seed}")
    for name in ("first", "whole"):  # the first one reads libraries from the disk
        run = run_of(mode, root / name)
        began = time.monotonic()
        codes = ended(started(run, ranks))
        lasts = time.monotonic() - began
        assert not any(codes), (mode, codes, Path(f"{run.folder}.log-0").read_text()[-2000:])
    whole = outcome(run)
    found = Counter[str]()
    for number in range(trials):
        where = root / f"trial-{number}"
        result = trial(mode, where, whole, lasts, draw)
        found[result] += 1
        if not result.startswith("lost"):
            shutil.rmtree(where)
    return {"mode": mode, "ranks": ranks, "seconds": round(lasts, 2), "trials": dict(found)}


def disks(root: Path, count: int) -> dict[str, Any]:
    """Fill the disk of a run at `count` moments: sizes from almost nothing to almost enough."""
    run = run_of("states on the device", root / "whole")
    assert not any(ended(started(run, 1)))
    whole = outcome(run)
    size = sum(p.stat().st_size for p in Path(run.folder).rglob("*") if p.is_file())
    found = Counter[str]()
    for number in range(count):
        where = root / f"disk-{number}"
        run = run_of("states on the device", where)
        Path(run.folder).mkdir()
        room = max(8192, size * (number + 1) // (count + 1))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", run.folder]
        subprocess.run(mount, check=True)
        try:
            (first,) = ended(started(run, 1))
            subprocess.run(["mount", "-o", "remount,size=64m", run.folder], check=True)
            (second,) = ended(started(run, 1))
            same = second == 0 and outcome(run) == whole
            how = {FULL: "a named error", 0: "ended, its page aside"}.get(first, f"status {first}")
            found[f"{how}, then {'the same bits' if same else 'LOST'}"] += 1
        finally:
            subprocess.run(["umount", run.folder], check=True)
    return {"sizes": count, "bytes": size, "trials": dict(found)}


def network(root: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Have strangers speak to runs of two ranks for so many seconds, to each run in one way."""
    modes = ("2 ranks, data", "2 ranks, FSDP")
    whole = {}
    for mode in modes:
        run = _besieged(mode, root / f"{mode} whole")
        assert not any(ended(started(run, 2)))
        whole[mode] = outcome(run)
    found = {way: Counter[str]() for way in WAYS}
    spoken, number = 0.0, 0
    while spoken < seconds:
        mode, way = modes[number // 2 % 2], WAYS[number % 2]
        run = _besieged(mode, root / f"network-{number}")
        began = time.monotonic()
        codes = besieged(run, way, seed + number)
        spoken += time.monotonic() - began
        result = "as if nothing had been said"
        if any(codes):
            errors = [error_of(run, rank, code) for rank, code in enumerate(codes)]
            unnamed = [error for error in errors if error is None]
            result = f"LOST: ended with {codes}" if unnamed else "a named error"
            codes = ended(started(run, 2))
        same = not any(codes) and outcome(run) == whole[mode]
        found[way][result + (", the same bits" if same else f", LOST: {codes}")] += 1
        if same and "LOST" not in result:
            shutil.rmtree(root / f"network-{number}")
        number += 1
    return {
        "seconds": round(spoken),
        "runs": number,
        "ways": {k: dict(v) for k, v in found.items()},
    }


def _besieged(mode: str, where: Path) -> RunConfig:
    """Of ranks that step for seconds, and do not wait for each other for long."""
    run = run_of(mode, where)
    parallel = replace(cast(Parallel, run.parallel), timeout=PATIENCE)
    return replace(run, steps=SPOKEN_STEPS, parallel=parallel)


def besieged(run: RunConfig, way: str, seed: int) -> list[int]:
    """Train on two ranks while two strangers speak; exit codes of the ranks."""
    port, strangers = free_port(), []
    for number in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's client logs every refusal
                speak(port, time.monotonic() + SECONDS, 2 * seed + number, (way,))
            finally:
                os._exit(0)
        strangers.append(child)
    try:
        return ended(started(run, 2, port))
    finally:
        for child in strangers:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def error_of(run: RunConfig, rank: int, code: int) -> str | None:
    """What a rank said that ended with a code; None where it is no named error."""
    if code == 0:
        return ""
    last = Path(f"{run.folder}.log-{rank}").read_text(errors="replace").strip().split("\n")[-1]
    named = code == FULL or (code == FAILED and last.startswith("farspan: "))
    return last if named else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--disks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    out = asked.out or RESULTS / ("network.json" if asked.network else "kills.json")
    torch.set_num_threads(1)
    # What is imported at its first use is imported here, once. No backward: its threads and forks
    # do not go together.
    model: Any = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
    TrainingOptimizer(model, OptimizerConfig()).step(0.0, torch.zeros(()))
    root = Path(tempfile.mkdtemp(prefix="farspan-kills-"))
    if asked.network:
        told = {"machine": describe_machine(), **network(root, asked.network, asked.seed)}
        save(out, told)
        print(told["ways"])
        raise SystemExit("LOST" in str(told))
    before = json.loads(out.read_text()) if out.exists() else {"modes": []}
    kept = [mode for mode in before["modes"] if mode["mode"] not in asked.only]
    record: dict[str, Any] = {**before, "machine": describe_machine(), "modes": kept}
    record["date"] = time.strftime("%Y-%m-%d")
    try:
        for mode in asked.only:
            record["modes"].append(kills(mode, root / mode, asked.trials, asked.seed))
            print(record["modes"][-1], flush=True)
        if asked.disks:
            record["disks"] = disks(root / "disks", asked.disks)
            print(record["disks"], flush=True)
    finally:
        save(out, record)
    lost = [mode for mode in record["modes"] if any("lost" in name for name in mode["trials"])]
    if not lost:
        shutil.rmtree(root)
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
