"""The tables of docs/performance.md: what is planned for an H200, and floors.

    python -m benchmarks.performance

Everything is computed from the machine's preset, by the planner that `benchmarks.gpu` uses; nothing
here is measured. The picture is drawn by `python -m benchmarks.figures` (performance_figures.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.floor import Ceilings, floor
from benchmarks.gpu.planned import Planner
from benchmarks.gpu.show import PUBLISHED
from benchmarks.gpu.work import AUTO, Item, full
from farspan.formatting import write_tokens
from farspan.planner.machines import machine
from farspan.planner.request import Plan

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
OPENING, CLOSING = "<!-- table {} -->", "<!-- end -->"
GIB = 2**30
HOST_BYTES = 118 * GIB  # what a machine of 128 GiB has free
# Large products in bf16 measured with PyTorch on an H200; cuDNN 9.19 there, heads of 128, 32K
# tokens, causal (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results).
CEILINGS = Ceilings(linear=790e12, forward=690e12, backward=575e12)


def planner() -> Planner:
    """One H200 of the preset in a machine of 128 GiB."""
    return Planner(full(), replace(machine("h200"), host_bytes=HOST_BYTES))


def tables() -> dict[str, str]:
    """Every generated table by its name in the page."""
    made, work = planner(), full()
    lengths = (*work.lengths, *work.longer)
    plans = {
        (name, tokens): made.plan(Item("step", 1.0, tokens, name))
        for tokens in lengths
        for name in (AUTO, *work.strategies)
    }
    return {
        "planned": _planned(made, plans, lengths),
        "strategies": _strategies(plans, lengths, work.strategies),
    }


def _planned(made: Planner, plans: dict[tuple[str, int], Plan], lengths: Sequence[int]) -> str:
    rows = []
    for tokens in lengths:
        plan = plans[AUTO, tokens]
        question = made.question(tokens, full().layers)
        least = floor(question, CEILINGS).total
        published = PUBLISHED.get(tokens)
        rows.append(
            [
                write_tokens(tokens),
                f"{least:.1f}",
                f"{plan.seconds.total:.1f}",
                f"{plan.seconds.total / least:.2f}",
                f"{plan.mfu:.1%}",
                f"{plan.device.total / GIB:.0f}",
                f"{plan.host.total / GIB:.0f}",
                "beside" if plan.question.overlap else "in line",
                f"{published:.1f}" if published else "",
            ]
        )
    head = ["tokens", "floor, s", "planned, s", "planned / floor", "MFU", "device, GiB"]
    return _grid([*head, "host, GiB", "copies", "OOMB published, s"], rows)


def _strategies(
    plans: dict[tuple[str, int], Plan], lengths: Sequence[int], names: Sequence[str]
) -> str:
    def cell(plan: Plan) -> str:
        return f"{plan.seconds.total:.1f}" if plan.fits else "does not fit"

    rows = [
        [write_tokens(tokens), *(cell(plans[name, tokens]) for name in (AUTO, *names))]
        for tokens in lengths
    ]
    return _grid(["tokens", AUTO, *names], rows)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["--:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, found: dict[str, str]) -> str:
    """The page with every table in its place. Raises ValueError where a mark is missing."""
    for name, table in found.items():
        opening = OPENING.format(name)
        before, mark, rest = text.partition(opening)
        if not mark or CLOSING not in rest:
            raise ValueError(f"the page has no place for {opening}")
        text = f"{before}{opening}\n\n{table}\n\n{rest[rest.index(CLOSING) :]}"
    return text


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(text, tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
