"""Facts about a call, such as its tensors' shapes, which ranks must agree on and compare."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from farspan.program.layout import AXES, SEQUENCE

# Ranks among which a fact is the same: all ranks; those of one batch; those of one pipeline stage,
# which run the same layers; those that hold the same weights if nothing is sharded.
EVERYWHERE, OF_BATCH, OF_STAGE, OF_WEIGHTS = SCOPES = (
    AXES,
    (*SEQUENCE, "pipeline"),
    tuple(axis for axis in AXES if axis != "pipeline"),
    tuple(axis for axis in AXES if axis not in ("pipeline", "tensor")),
)


MISSING = "missing"


PIECE = 2**15  # elements of a tensor that one exchange compares: 30 ms for 300 tensors in fp32


@dataclass(frozen=True, slots=True)
class Described:
    """Facts about a call, compared by `digest`; `words` gives them as text if digests differ."""

    digest: bytes
    words: Callable[[], Mapping[str, str]]


Fact = str | Tensor | Mapping[str, Tensor] | Described


@dataclass(slots=True)
class Agreement:
    """Facts by which a rank describes a call that all ranks are about to make, for comparison.

    Note: [One exchange]. Ranks exchange a row of integers: a flag for a refusal, a digest of the
    facts of each scope, and the figures. If all agree, that is the only collective. Otherwise all
    ranks see it in the rows, and exchange facts and messages as JSON to name the difference.

    Note: [Contents]. A single tensor is compared whole. For tensors in a mapping, each exchange
    compares the next `PIECE` elements: small tensors whole each time, large ones in turns.
    """

    call: str
    facts: dict[tuple[str, ...], dict[str, Fact]] = field(default_factory=dict)
    figures: list[int] = field(default_factory=lambda: [0, 0])
    table: list[list[int]] = field(default_factory=list)  # the figures of every rank

    def __post_init__(self) -> None:
        self.add({"call": self.call})

    def add(self, facts: Mapping[str, Fact], scope: tuple[str, ...] = EVERYWHERE) -> None:
        """Add named facts that must be the same on all ranks along the axes `scope`."""
        self.facts.setdefault(scope, {}).update(facts)

    def digest(self, scope: tuple[str, ...], turn: int) -> int:
        """Return a 64-bit digest of the facts for the axes `scope`: equal for equal facts."""
        found = hashlib.blake2b(digest_size=8)
        for name, fact in self.facts.get(scope, {}).items():
            found.update(f"\0{name}\0".encode())
            if isinstance(fact, Mapping):
                for part in _pieces(fact, turn):
                    found.update(part)
            elif isinstance(fact, Described):
                found.update(fact.digest)
            else:
                found.update(_value_bytes(fact))
        return int.from_bytes(found.digest(), signed=True)

    def words(self, turn: int) -> dict[str, dict[str, str]]:
        """Return the facts as text, by scope and name, for an error that shows which differ."""
        said: dict[str, dict[str, str]] = {}
        for scope, facts in self.facts.items():
            own = said.setdefault(key_of(scope), {})
            for name, fact in facts.items():
                if isinstance(fact, Mapping):
                    each = {n: b"".join(_pieces({n: tensor}, turn)) for n, tensor in fact.items()}
                    own |= {n: _digest_words(found) for n, found in each.items()}
                elif isinstance(fact, Described):
                    own |= fact.words()
                else:
                    own[name] = fact if isinstance(fact, str) else _digest_words(_value_bytes(fact))
        return said


class Ranks(Protocol):
    """Ranks that can compare facts, such as a `ParallelContext`."""

    def agreement(self, call: str) -> AbstractContextManager[Agreement]: ...


@contextmanager
def agreement(ranks: Ranks | None, call: str) -> Iterator[Agreement]:
    """Yield an `Agreement`, to which the caller adds facts about its call. When the block ends, all
    ranks compare these, and all raise if they differ; with `ranks` None nothing is compared."""
    if ranks is None:
        mine = Agreement(call)
        yield mine
        mine.table = [mine.figures]
        return
    with ranks.agreement(call) as mine:
        yield mine


def _pieces(tensors: Mapping[str, Tensor], turn: int) -> Iterator[bytes]:
    """Yield what ranks compare of tensors, as bytes: names, shapes, dtypes, and the piece of their
    elements that is due at this `turn`. See Note: [Contents]."""
    found: dict[torch.device, list[Tensor]] = {}
    for name, tensor in tensors.items():
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}".encode()
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            start = turn * PIECE % (-(-len(flat) // PIECE) * PIECE)
            piece = flat[start : start + PIECE].view(torch.uint8)
            found.setdefault(tensor.device, []).append(piece)
    yield from (torch.cat(of).cpu().numpy().tobytes() for of in found.values())


def key_of(scope: tuple[str, ...]) -> str:
    return " ".join(scope)


def _digest_words(value: bytes) -> str:
    return _DIGEST + hashlib.blake2b(value, digest_size=8).hexdigest()


_DIGEST = "digest "


def between(name: str, values: list[str]) -> str:
    """Return an error message: a fact's different values, and which ranks have each value."""
    kinds = {v: [n for n, other in enumerate(values) if other == v] for v in values}
    if all(value.startswith(_DIGEST) or len(value) > WIDTH for value in kinds):
        return f"{name}: differs between " + " and ".join(f"ranks {of}" for of in kinds.values())
    said = {v: "other numbers" if v.startswith(_DIGEST) else v for v in kinds}
    return f"{name}: " + ", ".join(f"{said[v]} on {_listed(of)}" for v, of in kinds.items())


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


WIDTH = 200  # characters of a value that an error shows


def _value_bytes(value: str | Tensor) -> bytes:
    if isinstance(value, str):
        return value.encode()
    shape = repr((tuple(value.shape), value.dtype)).encode()
    return shape + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
