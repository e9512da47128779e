"""The tables of docs/evidence/several-gpus.md, from a record of `python -m benchmarks.ranks`."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.performance import filled
from benchmarks.ranks.clock import ATTENTION, COLLECTIVES, REST
from benchmarks.ranks.counting import ATTENDED, CALLS, PRODUCTS, TOUCHED
from benchmarks.ranks.measure import ALONE, LAYOUTS, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "several-gpus.md"
RESULTS = ROOT / "benchmarks" / "results" / "ranks.json"
MB = 1e6


def write(record: dict[str, Any]) -> None:
    PAGE.write_text(filled(PAGE.read_text("utf-8"), tables(record)), "utf-8")


def tables(record: dict[str, Any]) -> dict[str, str]:
    """By the names of their places on the page."""
    found = Found(record["rows"])
    return {
        "memory": found.memory(),
        "work": Found(record["counted"]["rows"]).work_table(),
        "seconds": found.seconds(),
        "sent": found.sent(),
    }


class Found:
    """A record's rows, and what follows from them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["layout"], row["ranks"], row["tokens"]): row for row in rows}
        self.lengths = sorted({row["tokens"] for row in rows})
        self.ranks = sorted({row["ranks"] for row in rows} - {1})

    def row(self, layout: str, ranks: int, tokens: int) -> Row:
        return self._rows[ALONE if ranks == 1 else layout, ranks, tokens]

    def arenas(self, layout: str, ranks: int, tokens: int) -> int:
        """Bytes, of the rank with most, on both tiers."""
        memory = self.row(layout, ranks, tokens)["memory"]
        return max(each["device"] + each["host"] for each in memory)

    def most(self, layout: str, ranks: int, tokens: int, *names: str) -> int:
        """Bytes of one rank's memory beside the arenas, of the rank with most."""
        memory = self.row(layout, ranks, tokens)["memory"]
        return max(sum(each[name] for name in names) for each in memory)

    def part(self, layout: str, ranks: int, tokens: int, name: str) -> float:
        """Processor seconds of the rank with most of them."""
        return max(each[name] for each in self.row(layout, ranks, tokens)["seconds"])

    def work(self, tokens: int) -> float:
        """Processor seconds of one process."""
        return sum(self.row(ALONE, 1, tokens)["seconds"][0].values())

    def counted(self, layout: str, ranks: int, tokens: int, name: str) -> int:
        """Of the rank that is given most."""
        return max(each[name] for each in self.row(layout, ranks, tokens)["work"])

    def serial(self, layout: str, ranks: int, tokens: int, name: str) -> float:
        """What one rank is given beyond its equal share of one process's work."""
        whole = self.counted(ALONE, 1, tokens, name)
        return self.counted(layout, ranks, tokens, name) - whole / ranks

    def further(self, layout: str, ranks: int, name: str) -> list[float]:
        """What that grows by with a token, from each length to the next."""
        left = [self.serial(layout, ranks, tokens, name) for tokens in self.lengths]
        return [
            (b - a) / (n - m) for (m, a), (n, b) in pairwise(zip(self.lengths, left, strict=True))
        ]

    # -- tables ----------------------------------------------------------------------------------

    def memory(self) -> str:
        shortest, longest = self.lengths[0], self.lengths[-1]
        whole = self.arenas(ALONE, 1, longest)

        def line(name: str, counts: list[int]) -> list[str]:
            most = counts[-1]
            held = [self.arenas(name, ranks, longest) / whole for ranks in counts]
            bytes_ = [
                self.arenas(name, most, longest),
                *(self.most(name, most, n, "beside") for n in (shortest, longest)),
                self.most(name, most, longest, "weights", "gradients"),
            ]
            return [name, *(f"{n:.3f}" for n in held), *(f"{n / MB:.1f}" for n in bytes_)]

        head = ["layout", *(f"arenas of one, {n} ranks" for n in self.ranks), "arenas, MB"]
        head += [f"beside, {_tokens(n)}" for n in (shortest, longest)]
        lines = [line(ALONE, [1] * len(self.ranks)), *(line(n, self.ranks) for n in LAYOUTS)]
        return _table([*head, "weights, gradients"], lines)

    def work_table(self) -> str:
        ranks, longest = self.ranks[-1], self.lengths[-1]

        def line(name: str) -> list[str]:
            shares = [
                self.counted(name, ranks, longest, kind) / self.counted(ALONE, 1, longest, kind)
                for kind in (ATTENDED, PRODUCTS, TOUCHED, CALLS)
            ]
            beyond = [f"{each / 1e3:.1f}" for each in self.further(name, ranks, TOUCHED)]
            return [name, *(f"{share:.3f}" for share in shares), *beyond]

        head = ["layout", "attention", "products", "bytes touched", "calls"]
        head += [f"beyond, {_tokens(m)} to {_tokens(n)}" for m, n in pairwise(self.lengths)]
        return _table(head, [line(name) for name in LAYOUTS])

    def seconds(self) -> str:
        longest, ranks = self.lengths[-1], self.ranks[-1]

        def line(name: str, count: int) -> list[str]:
            parts = [self.part(name, count, longest, p) for p in (ATTENTION, REST, COLLECTIVES)]
            steps = [self.row(name, count, n)["replayed_seconds"] for n in self.lengths]
            faster = [self.work(n) / t for n, t in zip(self.lengths, steps, strict=True)]
            return [
                name,
                *(f"{part:.2f}" for part in (*parts, steps[-1])),
                *(f"{times:.1f}" for times in faster),
            ]

        head = ["layout", "attention", "rest", "collectives", "step"]
        head += [f"times faster, {_tokens(tokens)}" for tokens in self.lengths]
        return _table(head, [line(ALONE, 1), *(line(name, ranks) for name in LAYOUTS)])

    def sent(self) -> str:
        longest, ranks = self.lengths[-1], self.ranks[-1]

        def line(name: str) -> list[str]:
            sent = self.row(name, ranks, longest)["sent"]
            kinds = [
                max((each[kind] for each in sent), key=sum) for kind in ("forward", "backward")
            ]
            cells = [f"{kind[n]:,}" for kind in kinds for n in (1, -1)]
            return [name, *cells, f"{max(each['step'] for each in sent) / MB:.1f}"]

        head = ["layout", "forward, 2nd chunk", "last", "backward, 2nd chunk", "last"]
        return _table([*head, "a step, MB"], [line(name) for name in LAYOUTS])


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    write(json.loads(RESULTS.read_text("utf-8")))


if __name__ == "__main__":
    main()
