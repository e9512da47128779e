"""This process among the ranks of a layout, and the groups it talks in."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.parallel.meetings import meet
from farspan.parallel.peers import Peers
from farspan.plan.layout import AXES, SEQUENCE, Layout, Rank
from farspan.spec import Refused

TOKENS = (*SEQUENCE, "data")  # ranks that run the same layers on different tokens


@dataclass(slots=True)
class Ranks:
    """Invariant: every rank makes the same groups in the same order, which torch asks for."""

    layout: Layout
    device: torch.device
    timeout: timedelta | None = None  # of collectives along an axis; None: torch's default
    rank: Rank = field(init=False)
    groups: dict[tuple[str, ...], Peers] = field(default_factory=dict)
    made: dict[tuple[str, ...], Any] = field(default_factory=dict)  # by axes of several ranks
    is_apart: bool = False

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise Refused(
                "layout: no process group is there; start with torchrun, or call "
                "torch.distributed.init_process_group first"
            )
        ranks = dist.get_world_size()
        if ranks != self.layout.devices():
            raise Refused(
                f"layout: {self.layout.devices()} devices, but {ranks} ranks were started; start "
                f"as many, or make the product of {', '.join(reversed(AXES))} {ranks}"
            )
        self.rank = Rank(self.layout, dist.get_rank())
        for axis in AXES:
            self.among(axis)
        for axes in (SEQUENCE, (*SEQUENCE, "pipeline"), TOKENS, AXES):
            self.among(*axes)

    def among(self, *axes: str, alone: bool = True) -> Peers:
        """The ranks that differ from this one in these axes alone, by what was sent among them.
        The first call for them is a collective of all ranks. With `alone` there may be no process
        group where this rank is the only one."""
        axes = tuple(axis for axis in AXES if axis in axes)
        if axes not in self.groups:
            assert not self.is_apart, f"a group of {axes} is made by all ranks"
            self.groups[axes] = Peers(None)
        peers = self.groups[axes]
        if peers.group is None:
            peers.group = self._group(axes, alone)
        return peers

    def _group(self, axes: tuple[str, ...], alone: bool) -> dist.ProcessGroup | None:
        """One process group for all axes that have the same ranks: a group of gloo's takes threads
        and half a second, and five axes of most layouts have one rank."""
        several = tuple(axis for axis in axes if getattr(self.layout, axis) > 1)
        if not several and alone:
            return None
        if several not in self.made:
            numbers = range(self.layout.devices())
            members = sorted({Rank(self.layout, n).peers(*several) for n in numbers})
            if len(members) == 1:
                self.made[several] = dist.group.WORLD
            else:
                groups = {ranks: dist.new_group(list(ranks), self.timeout) for ranks in members}
                self.made[several] = groups[self.rank.peers(*several)]
        return self.made[several]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it this rank does its part of a step and waits for nobody: others need not do
        theirs. What it computes means nothing."""
        self.is_apart = True
        try:
            for peers in self.groups.values():
                peers.apart = True
            yield
        finally:
            for peers in self.groups.values():
                peers.apart = False
            self.is_apart = False

    def _meet(self) -> None:
        if not self.is_apart:
            meet()

    def figures(self, mine: Sequence[int]) -> list[list[int]]:
        """What every rank gives, as many numbers each, in the order of ranks."""
        self._meet()
        peers = self.among(*AXES)
        rows = torch.tensor([mine], dtype=torch.int64, device=self.device)
        found: list[list[int]] = peers.gather(rows, [1] * peers.size).tolist()
        return found

    def refuse_unlike(self, what: str, value: str | Tensor, *axes: str) -> None:
        """Raises Refused, on all of them, where a value is not the same on all peers."""
        digest = hashlib.blake2b(_bytes(value), digest_size=8).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(self.device)
        self._meet()
        peers = self.among(*axes)
        found = peers.gather(mine, [1] * peers.size).tolist()
        if len(set(found)) == 1:
            return
        numbers = self.rank.peers(*axes)
        kinds = [
            [n for n, f in zip(numbers, found, strict=True) if f == kind] for kind in set(found)
        ]
        words = " and ".join(f"ranks {sorted(kind)}" for kind in sorted(kinds))
        raise Refused(f"{what}: not the same on {words}; every rank must be given the same")


def refuse_unlike_models(ranks: Ranks, model: nn.Module) -> None:
    """Raises Refused where the ranks' weights, which all of them have whole, differ.

    What is compared are sums over the bits of each parameter, weighted by their place along each
    dimension: a pass over the weights for each of them.
    """
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad} {_bits(p)}"
        for name, p in model.named_parameters()
    ]
    ranks.refuse_unlike("weights", "\n".join(lines), *AXES)


def _bits(parameter: Tensor) -> int:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = parameter.detach().contiguous().view(kinds[parameter.element_size()])
    total = int(whole.sum(dtype=torch.int64))
    for dim, extent in enumerate(whole.shape):
        others = [d for d in range(whole.ndim) if d != dim]
        along = whole.sum(others, dtype=torch.int64) if others else whole.long()
        total = total * 31 + int((along * torch.arange(1, extent + 1, device=along.device)).sum())
    return total


def _bytes(value: str | Tensor) -> bytes:
    if isinstance(value, str):
        return value.encode()
    shape = repr((tuple(value.shape), value.dtype)).encode()
    return shape + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
