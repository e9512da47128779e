"""Traces of training steps through four allocators, and what a hit costs in the native one.

    python -m benchmarks.allocator \
        --out packages/farspan-memory/benchmarks/results/allocator.json

Nothing here runs on a GPU: traces are recorded from tensors without memory, PyTorch's allocators
are models of their rules, stitching is the native code over its null backend, and what calls of the
driver cost is published elsewhere. Nanoseconds a request are measured on the machine at hand.

ZeRO-3 gathers a layer's weights before its forward and its backward and frees them after; the trace
`gathered` has those requests added at the marks of a step that trains LoRA adapters.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.engine.microbench import describe_machine
from farspan.engine.trace_steps import TraceRequest
from farspan_memory.compare.compare import AllocatorComparison, compare, contenders
from farspan_memory.trace import Event, FreeEvent, Malloc, Mark, Trace, from_events

KILO = 1024
VARIED = (64 * KILO, 48 * KILO, 60 * KILO, 52 * KILO, 63 * KILO, 49 * KILO, 57 * KILO, 61 * KILO)
NATIVE = Path(__file__).parent.parent / "native"


@dataclass(frozen=True, slots=True)
class Case:
    """A trace of the suite; `gathered` bytes are those of a layer's weights, 0 for none."""

    name: str
    request: TraceRequest
    gathered: int = 0

    def trace(self) -> Trace:
        found = from_events(self.request.trace().events, self.name)
        events = tuple(gather(found, self.gathered)) if self.gathered else found.events
        return Trace(events, self.name)


LLAMA, QWEN = "Llama-3-8B", "Qwen2.5-7B"
LAYER_BYTES = 2 * 218_112_000  # weights of one layer of Llama-3-8B, 2 bytes each
SUITE = (
    Case("checkpointed, 64K, 3 steps", TraceRequest(LLAMA, (64 * KILO,) * 3, strategy="recompute")),
    Case("checkpointed, 48K to 64K, 8 steps", TraceRequest(LLAMA, VARIED, strategy="recompute")),
    Case("4 layers, all kept, 48K to 64K", TraceRequest(LLAMA, VARIED, layers=4)),
    Case(
        "inputs offloaded, 128K, 2 steps", TraceRequest(QWEN, (128 * KILO,) * 2, strategy="offload")
    ),
    Case(
        "LoRA, weights gathered, 48K to 64K",
        TraceRequest(LLAMA, VARIED, strategy="recompute", rank=16),
        gathered=LAYER_BYTES,
    ),
    Case(
        "farspan's cells, grouped, 8 layers, 64K",
        TraceRequest(QWEN, (64 * KILO,), layers=8, strategy="grouped"),
    ),
    Case(
        "farspan's cells, memo, 8 layers, 64K",
        TraceRequest(QWEN, (64 * KILO,), layers=8, strategy="memo"),
    ),
)


def gather(trace: Trace, size: int) -> Iterator[Event]:
    """The trace with a layer's weights alive from its mark to the next one."""
    free = 1 + max(event.tensor for event in trace.events if isinstance(event, Malloc))
    held: int | None = None
    for event in trace.events:
        if isinstance(event, Mark):
            if held is not None:
                yield FreeEvent(held)
            held = free if event.name.startswith("layer ") else None
            yield event
            if held is not None:
                yield Malloc(held, size)
                free += 1
        else:
            yield event
    if held is not None:
        yield FreeEvent(held)


def row(case: Case) -> dict[str, Any]:
    """One trace through all allocators."""
    began = time.process_time()
    trace = case.trace()
    recorded = time.process_time() - began
    found = compare(trace, contenders())
    spent = time.process_time() - began - recorded
    return {
        **found.to_json(),
        "least_over_live": {result.name: least(found, result.name) for result in found.results},
        "cpu_seconds": {"record": recorded, "compare": spent},
    }


def least(found: AllocatorComparison, name: str) -> float:
    """The least capacity that completes, as a multiple of the live peak."""
    result = next(result for result in found.results if result.name == name)
    return (result.smallest.capacity or 0) / found.live_peak


def hits() -> list[str]:
    """What the native benchmark prints: nanoseconds a malloc and its free."""
    with tempfile.TemporaryDirectory() as folder:
        configure = ["cmake", "-S", str(NATIVE), "-B", folder, "-DTESTS=ON"]
        subprocess.run(configure, check=True, capture_output=True)
        build = ["cmake", "--build", folder, "--parallel", "2"]
        subprocess.run(build, check=True, capture_output=True)
        (program,) = (path for path in Path(folder).rglob("bench") if path.is_file())
        printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return printed.strip().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    arguments = parser.parse_args()
    rows = []
    for case in SUITE:
        rows.append(row(case))
        shares = ", ".join(f"{k} {v:.3f}" for k, v in rows[-1]["least_over_live"].items())
        print(f"{case.name}: {shares}", flush=True)
    native = hits() if shutil.which("cmake") else []
    print("\n".join(native))
    record = {"machine": describe_machine(), "rows": rows, "hits": native}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
