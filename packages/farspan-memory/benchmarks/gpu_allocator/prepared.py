"""A trace as children take it: its requests, and a place for each of them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from farspan_memory.compare.compare import FREED


@dataclass(frozen=True, slots=True)
class Prepared:
    """A trace to be served.

    Invariant: `steps` has (tensor, bytes) for a malloc and (tensor, FREED) for a free, none of
    0 bytes; `addresses` has a place in [0, arena) for each malloc, in order.
    """

    name: str
    divided: int  # what every request of the suite's trace was divided by
    live_peak: int  # bytes
    steps: list[tuple[int, int]]
    addresses: list[int]
    arena: int  # bytes
    optimal: bool  # that no arena is smaller is proved

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text("utf-8")))

    def to_json(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "trace": self.name,
            "divided_by": self.divided,
            "events": len(self.steps),
            "live_peak": self.live_peak,
            "arena": self.arena,
            "arena_optimal": self.optimal,
        }


def mallocs(prepared: Prepared) -> list[int]:
    """Bytes of each malloc, in order."""
    return [size for _, size in prepared.steps if size != FREED]
