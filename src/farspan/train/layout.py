"""How the processes of a run share it: the `parallel` of a run file, as a Layout."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import prod

from farspan.plan.layout import ALONE, AXES, Layout, sequence_layout
from farspan.spec import ModelSpec, Refused

COMMAND = "torchrun --nproc-per-node {} -m farspan train RUN.yaml"

LONGEST = 1e9  # seconds, a life; clocks count nanoseconds in 64 bits, 292 years


class Auto(StrEnum):
    """All ranks share every sequence, in the way that the model's heads allow."""

    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Parallel:
    """So many ranks along each axis of `farspan.plan.layout.Layout`."""

    tensor: int = 1
    ulysses: int = 1
    shards: int = 1
    ring: int = 1
    pipeline: int = 1
    data: int | None = None  # null: what is left over
    fsdp: bool = True
    timeout: float = 600.0  # seconds after which ranks no longer wait for each other

    def __post_init__(self) -> None:
        data = 1 if self.data is None else self.data
        Layout(**self._extents(), data=data, fsdp=self.fsdp)
        if not 0 < self.timeout <= LONGEST:
            raise Refused(
                f"timeout: expected seconds above 0 and up to {LONGEST:.0e}, got {self.timeout!r}"
            )

    def asked(self) -> int:
        """Ranks that are asked for, where `data` does not take what is left over."""
        return prod(self._extents().values()) * (self.data or 1)

    def layout(self, ranks: int) -> Layout:
        """Of so many ranks. Raises Refused where they are not as many as asked for."""
        asked = self.asked()
        if ranks % asked or (self.data is not None and ranks != asked):
            raise Refused(f"{self.describe()}, but {ranks} {'is' if ranks == 1 else 'are'} there")
        return Layout(**self._extents(), data=self.data or ranks // asked, fsdp=self.fsdp)

    def describe(self) -> str:
        """The product, written out."""
        extents = {**self._extents(), "data": self.data or 1}
        found = [f"{name} {n}" for name, n in extents.items() if n > 1] or ["1"]
        many = "" if self.data is not None else " or a multiple"
        return f"parallel: {' x '.join(found)} makes {self.asked()} rank(s){many}"

    def _extents(self) -> dict[str, int]:
        names = {f.name for f in fields(self)} & set(AXES) - {"data"}
        return {name: getattr(self, name) for name in AXES if name in names}


Given = Parallel | Auto | None  # what a run file says


def check_ranks(given: Given, ranks: int | None) -> Given:
    """`given` for so many ranks, None being a process that nobody launched, with `data` written
    out. Raises Refused where it is for another number of them."""
    if isinstance(given, Parallel):
        try:
            return replace(given, data=given.layout(ranks or 1).data)
        except Refused as error:
            many = given.asked()
            if given.data is None:  # of those that are there, as many as can share it
                many *= max(1, (ranks or 1) // many)
            raise Refused(f"{error}; start {many}: {COMMAND.format(many)}") from error
    if given is None and ranks is not None and ranks > 1:
        raise Refused(
            f"parallel: missing, and {ranks} ranks were started; say how they share the run: "
            f"auto, or data: {ranks} for as many replicas"
        )
    return given


def layout_of(given: Given, ranks: int, model: Callable[[], ModelSpec]) -> Layout:
    """The layout of a run on so many ranks; the model is looked at where its heads decide."""
    if isinstance(given, Parallel):
        return given.layout(ranks)
    return ALONE if ranks == 1 else sequence_layout(model(), ranks)


def replicas(given: Given) -> int:
    """Ranks, or groups of them, with sequences of their own."""
    return (given.data or 1) if isinstance(given, Parallel) else 1
