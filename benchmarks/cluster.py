"""farspan and three baselines on 8 to 1,024 GPUs, by simulation: longest context and MFU.

    python -m benchmarks.cluster --out benchmarks/results/cluster.json

Nothing here was measured on a cluster. Rates are those of the machine's preset, the communication
is that of `farspan.planner.collectives`, and copies and gathers go on beside the computation,
for every system alike: that is the schedule with streams of its own for them.

- farspan: Ulysses over the K, V heads, shards for the rest, FSDP, the planner's search over a
  coarse part of its space; also cut into pipeline stages of one group each.
- Ulysses + ZeRO-3: a layer at a time over the whole sequence, K, V repeated where there are more
  devices than K, V heads, at most as many devices a sequence as query heads.
- ring + ZeRO-3: K, V travel past every device.
- TP + SP: tensor parallelism over the node, a ring over nodes. Its weights and states are cut over
  the ring too, which is more than Megatron does; without that 70B does not fit at all.

Each baseline takes the fastest of no recomputation, checkpoints on the device and checkpoints on
host that fits; Ulysses also without the last. All of them compute the head in pieces.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.tables import Record, grid, save
from farspan.formatting import write_seconds
from farspan.planner.evaluate import evaluate, most_layers, stage_schedule
from farspan.planner.feasibility import room, space_grids, states_do_not_fit, taken
from farspan.planner.machines import machine
from farspan.planner.plans import best_plan, named_schedule
from farspan.planner.request import Plan, Question
from farspan.planner.search import search
from farspan.planner.space import Space, even, whole_space
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import find_profiles
from farspan.program.layout import Layout
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier

MACHINE = "h100"
MODELS = ("Llama-3-8B", "Llama-3-70B")
GPUS = tuple(8 * 2**power for power in range(8))
MEGA = 2**20
CONTEXTS = (MEGA, 4 * MEGA, 16 * MEGA)
TOKENS_A_STEP = 16 * MEGA  # of all replicas: what a large run takes as a batch
LONGEST = 1024 * MEGA  # no plan is longer
NODE = 8
GIB = 2**30
SECONDS = 4.0  # a search goes on so long once something fits


@dataclass(frozen=True, slots=True)
class System:
    """One way to spread a step over devices."""

    name: str
    layouts: Callable[[ModelSpec, int], Iterator[Layout]]  # of devices that share a sequence
    strategies: tuple[str, ...]  # by which it may run; empty: farspan's search
    most: Callable[[ModelSpec], int]  # devices that can share a sequence


def _any(_: ModelSpec) -> int:
    return max(GPUS)


def _query_heads(model: ModelSpec) -> int:
    return min(layer.query_heads for layer in model.layers)


def _kv_heads(model: ModelSpec) -> int:
    return min(layer.kv_heads for layer in model.layers)


def _grouped(model: ModelSpec, devices: int) -> Iterator[Layout]:
    heads = min(devices, _kv_heads(model))
    for stages in (1, 4, 16):
        if devices % (heads * stages) == 0:
            yield Layout(ulysses=heads, shards=devices // (heads * stages), pipeline=stages)


def _ulysses(_: ModelSpec, devices: int) -> Iterator[Layout]:
    yield Layout(ulysses=devices)


def _ring(_: ModelSpec, devices: int) -> Iterator[Layout]:
    yield Layout(ring=devices)


def _tensor(_: ModelSpec, devices: int) -> Iterator[Layout]:
    yield Layout(tensor=NODE, ring=devices // NODE)


FARSPAN = "farspan"
SYSTEMS = (
    System(FARSPAN, _grouped, (), _any),
    System("Ulysses + ZeRO-3", _ulysses, ("plain", "recompute"), _query_heads),
    System("Ulysses + ZeRO-3, host", _ulysses, ("plain", "recompute", "offload"), _query_heads),
    System("ring + ZeRO-3", _ring, ("plain", "recompute", "offload"), _any),
    System("TP + SP + ring", _tensor, ("plain", "recompute", "offload"), _any),
)


# -- questions -------------------------------------------------------------------------------------


@cache
def profile_of(name: str) -> ModelProfile:
    return find_profiles(name).of(Variant())


@cache
def model_of(name: str, copies: int) -> ModelSpec:
    """The model with every K, V head held `copies` times: K, V of Ulysses over more devices than
    heads. What a cell holds for a moment is left as it is, in the baseline's favour."""
    model = profile_of(name).spec
    layers = [replace(layer, kv_heads=copies * layer.kv_heads) for layer in model.layers]
    return replace(model, layers=tuple(layers))


def ask(name: str, tokens: int, layout: Layout) -> Question:
    """One sequence for each replica."""
    profile = profile_of(name)
    heads = _kv_heads(profile.spec)
    copies = max(1, layout.ulysses * layout.tensor // heads)
    return Question(
        model=model_of(name, copies),
        run=RunSpec(1, tokens),
        machine=machine(MACHINE),
        layout=layout,
        profile=profile,
        overlap=True,
    )


@dataclass(frozen=True, slots=True)
class Coarse(Space):
    """Kept K, V wait on host, and O of an open group is kept only with that of all others."""

    def schedules(self) -> Iterator[Schedule]:
        for chunk, cut, kv in product(self.chunks, self.splits, Tier):
            for kept in (False, True)[: 1 if self.staged else len(cut)]:
                for checkpoint in (True, False)[: max(cut)]:
                    yield Schedule(chunk, cut, kv=kv, kv_kept=kept, layer_checkpoint=checkpoint)


def coarse_space(question: Question, parts: tuple[float, ...] = (0.0, 0.5, 1.0)) -> Coarse:
    """Of at most 64 chunks. A pipeline stage is one group: with more of them stages would wait for
    each other."""
    layers, tokens = len(question.model.layers), question.run.tokens
    counts, staged = (1, 2, 4, 8, 16, layers), question.layout.pipeline > 1
    splits = tuple(dict.fromkeys(even(layers, count) for count in counts if count <= layers))
    if staged:
        splits = whole_space(question).splits
    chunks = tuple(tokens // count for count in (64, 16, 4, 1))
    return Coarse(chunks, splits, parts, parts, staged=staged)


def plans(system: System, question: Question) -> Iterator[Plan]:
    """By each of the system's ways; of farspan the best found, or none."""
    for name in system.strategies:
        yield evaluate(question, name, named_schedule(question, name))
    if not system.strategies:
        found = search(question, coarse_space(question), SECONDS).best
        if found is not None:
            yield found


# -- answers ---------------------------------------------------------------------------------------


def fastest(system: System, name: str, tokens: int, gpus: int) -> Plan | None:
    """The plan of the highest MFU that fits, over layouts and numbers of replicas: as many as there
    may be, then fewer until fewer are slower."""
    model, best = profile_of(name).spec, None
    replicas = min(TOKENS_A_STEP // tokens, gpus // NODE)
    while replicas >= 1:
        found = []
        if gpus // replicas <= system.most(model):
            for layout in system.layouts(model, gpus // replicas):
                question = ask(name, tokens, replace(layout, data=replicas))
                found += [plan for plan in plans(system, question) if plan.fits]
        one = max(found, key=lambda plan: plan.mfu, default=None)
        if best is not None and (one is None or one.mfu < best.mfu):
            break
        best = one or best
        replicas //= 2
    return best


def lengths() -> list[int]:
    """Powers of two and 1.5 times them, in tokens."""
    found, tokens = [], MEGA // 16
    while tokens <= LONGEST:
        found += [tokens, tokens * 3 // 2]
        tokens *= 2
    return found


def longest(system: System, name: str, gpus: int) -> Plan | None:
    """The plan at the longest context."""
    known, low, high = lengths(), -1, len(lengths())
    while high - low > 1:
        middle = (low + high) // 2
        if _may_fit(system, name, known[middle], gpus):
            low = middle
        else:
            high = middle
    kept = None
    while low >= 0 and kept is None:
        kept = next((p for p in _at(system, name, known[low], gpus) if p.fits), None)
        low -= 1
    return kept


def _may_fit(system: System, name: str, tokens: int, gpus: int) -> bool:
    """Exact for baselines; of farspan what its bounds leave."""
    for question in _questions(system, name, tokens, gpus):
        if system.strategies:
            found = any(plan.fits for plan in plans(system, question))
        else:
            found = something_fits(question, coarse_space(question, (0.0,)))
        if found:
            return True
    return False


def something_fits(question: Question, space: Space) -> bool:
    """Do the bounds leave any schedule of the space?"""
    if states_do_not_fit(question):
        return False
    found = (taken(grids)[0] for grids, _, _ in space_grids(question, space))
    return any((room(question, of.device, of.host) >= 0).any() for of in found)


def _at(system: System, name: str, tokens: int, gpus: int) -> Iterator[Plan]:
    """Plans at one context, for the system's layouts."""
    for question in _questions(system, name, tokens, gpus):
        if system.strategies:
            yield from plans(system, question)
        else:
            found = search(question, coarse_space(question, (0.0,)), SECONDS).best
            if found is not None:
                yield found


def _questions(system: System, name: str, tokens: int, gpus: int) -> Iterator[Question]:
    """All devices that can share the one sequence do."""
    model = profile_of(name).spec
    shared = min(gpus, system.most(model))
    for layout in system.layouts(model, shared):
        yield ask(name, tokens, replace(layout, data=gpus // shared))


def cell(plan: Plan | None) -> dict[str, Any] | None:
    """What the page and the figures show of a plan."""
    if plan is None:
        return None
    seconds, schedule = plan.seconds, stage_schedule(plan.question, plan.schedule)
    sizes = schedule.group_sizes(most_layers(plan.question))
    return {
        "tokens": plan.question.run.tokens,
        "layout": asdict(plan.question.layout),
        "strategy": plan.strategy,
        "mfu": plan.mfu,
        "seconds": seconds.total,
        "bound": seconds.bound,
        "network": seconds.collective / seconds.total,
        "device_gib": plan.device.total / GIB,
        "host_gib": plan.host.total / GIB,
        "exchange_gib": plan.device.parts.get("exchange", 0) / GIB,
        "chunk": schedule.chunk,
        "groups": len(sizes),
        "attention_save_fraction": schedule.attention_save_fraction,
        "activation_save_fraction": schedule.activation_save_fraction,
    }


def curves(name: str, system: System) -> Iterator[dict[str, Any]]:
    """One row for each number of GPUs."""
    for gpus in GPUS:
        kept = longest(system, name, gpus)
        reach = 0 if kept is None else kept.question.run.tokens
        yield {
            "model": name,
            "system": system.name,
            "gpus": gpus,
            "longest": cell(kept),
            "at": {
                str(tokens): cell(fastest(system, name, tokens, gpus) if tokens <= reach else None)
                for tokens in CONTEXTS
            },
        }


def planning() -> list[dict[str, Any]]:
    """How long the full search takes for Llama-3-70B at 16M tokens."""
    found = []
    for gpus in (64, 256, 1024):
        question = ask("Llama-3-70B", 16 * MEGA, Layout(ulysses=NODE, shards=gpus // NODE))
        started = time.process_time()
        plan = best_plan(question, ["grouped"])
        spent = time.process_time() - started
        found.append({"gpus": gpus, "cpu_seconds": spent, "gap": plan.gap, **(cell(plan) or {})})
    return found


# -- the page ------------------------------------------------------------------------------------


def tables(cluster: Record) -> dict[str, str]:
    """Tables of many devices by their names in the page."""
    return {
        "cluster longest": reach_table(cluster),
        "cluster mfu": mfu_table(cluster),
        "cluster planning": planning_table(cluster),
    }


def reach_table(cluster: Record) -> str:
    """Longest contexts."""

    def show(row: Record) -> str:
        return _mega(row["longest"]["tokens"]) if row["longest"] else "-"

    return _systems(cluster, show)


def mfu_table(cluster: Record) -> str:
    """MFU at 4M tokens, with N where the network takes over a tenth of the step."""

    def show(row: Record) -> str:
        found = row["at"][str(4 * MEGA)]
        return f"{100 * found['mfu']:.0f}%" + " N" * (found["network"] > 0.1) if found else "-"

    return _systems(cluster, show)


def _systems(cluster: Record, show: Any) -> str:
    sizes = list(dict.fromkeys(row["gpus"] for row in cluster["rows"]))
    by_place = {(row["model"], row["system"], row["gpus"]): row for row in cluster["rows"]}
    body = []
    for model, system in dict.fromkeys((row["model"], row["system"]) for row in cluster["rows"]):
        found = (show(by_place[model, system, size]) for size in sizes)
        body.append([f"{model.removeprefix('Llama-3-')} {system}", *found])
    return grid(["GPUs", *map(str, sizes)], body)


def planning_table(cluster: Record) -> str:
    """Seconds of the full search."""
    rows = [
        [
            str(entry["gpus"]),
            f"{entry['cpu_seconds']:.1f} s",
            f"{100 * entry['mfu']:.0f}%",
            write_seconds(entry["seconds"]),
            f"{100 * entry['gap']:.1f}%",
        ]
        for entry in cluster["planning"]
    ]
    return grid(["GPUs", "search, processor time", "MFU", "step", "gap at most"], rows)


def _mega(tokens: int) -> str:
    return f"{tokens / MEGA:g}M" if tokens >= MEGA else f"{tokens // 1024}K"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    arguments = parser.parse_args()
    started = time.process_time()
    rows = []
    for name in MODELS:
        for system in SYSTEMS:
            for row in curves(name, system):
                rows.append(row)
                print(line(row), flush=True)
    planned = planning()
    for entry in planned:
        print(f"planning 70B at 16M on {entry['gpus']}: {entry['cpu_seconds']:.1f} s")
    record = {
        "about": "simulated on presets' rates with copies and gathers beside the computation",
        "machine": MACHINE,
        "contexts": CONTEXTS,
        "tokens_a_step": TOKENS_A_STEP,
        "planning": planned,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": rows,
    }
    save(arguments.out, record)
    print(f"{time.process_time() - started:.0f} s, {record['peak_mib']:.0f} MiB")


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    reach = row["longest"]["tokens"] / MEGA if row["longest"] else 0
    at = [f"{100 * found['mfu']:.0f}%" if found else "-" for found in row["at"].values()]
    return f"{row['model']} {row['system']} {row['gpus']}: {reach:g}M, MFU {' '.join(at)}"


if __name__ == "__main__":
    main()
