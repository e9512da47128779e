"""This process among the ranks of a layout: the groups it communicates in, and what rank 0 does for
all ranks, such as broadcasting weights that it alone has loaded.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.distributed.collectives import Communicator
from farspan.distributed.failure import activity, record_sync
from farspan.program.layout import AXES, SEQUENCE, Layout, Rank
from farspan.spec import UnsupportedError

TOKENS = (*SEQUENCE, "data")  # ranks that run the same layers on different tokens


@dataclass(slots=True)
class ParallelContext:
    """This rank in a layout (torchtitan's ParallelDims), and its communicators along each axis.

    Invariant: every rank makes the same groups in the same order, as torch requires.
    """

    layout: Layout
    device: torch.device
    timeout: timedelta | None = None  # of collectives along an axis; None: torch's default
    rank: Rank = field(init=False)
    groups: dict[tuple[str, ...], Communicator] = field(default_factory=dict)
    made: dict[tuple[str, ...], Any] = field(default_factory=dict)  # by axes of several ranks
    is_apart: bool = False

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise UnsupportedError(
                "layout: no process group exists; start with torchrun, or call "
                "torch.distributed.init_process_group first"
            )
        ranks = dist.get_world_size()
        if ranks != self.layout.devices():
            raise UnsupportedError(
                f"layout: {self.layout.devices()} devices, but {ranks} ranks were started; start "
                f"as many, or make the product of {', '.join(reversed(AXES))} {ranks}"
            )
        self.rank = Rank(self.layout, dist.get_rank())
        for axis in AXES:
            self.among(axis)
        for axes in (SEQUENCE, (*SEQUENCE, "pipeline"), TOKENS, AXES):
            self.among(*axes)

    def among(self, *axes: str, alone: bool = True) -> Communicator:
        """The communicator of the ranks that differ from this one in these axes alone. The first
        call for them is a collective of all ranks. With `alone` it may have no process group if
        this rank is the only one."""
        axes = tuple(axis for axis in AXES if axis in axes)
        if axes not in self.groups:
            assert not self.is_apart, f"a group of {axes} is made by all ranks"
            self.groups[axes] = Communicator(None)
        peers = self.groups[axes]
        if peers.group is None:
            peers.group = self._group(axes, alone)
        return peers

    def _group(self, axes: tuple[str, ...], alone: bool) -> dist.ProcessGroup | None:
        """One process group for all axes that have the same ranks: a gloo group takes threads and
        half a second, and five axes of most layouts have one rank."""
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
        """Inside the block this rank runs its part of a step without the other ranks, which need
        not run theirs: its memory is that of a step, its results mean nothing."""
        self.is_apart = True
        try:
            for peers in self.groups.values():
                peers.apart = True
            yield
        finally:
            for peers in self.groups.values():
                peers.apart = False
            self.is_apart = False

    def _record_sync(self) -> None:
        if not self.is_apart:
            record_sync()

    def figures(self, mine: Sequence[int]) -> list[list[int]]:
        """The numbers that each rank gives, as many each, in the order of ranks."""
        self._record_sync()
        peers = self.among(*AXES)
        rows = torch.tensor([mine], dtype=torch.int64, device=self.device)
        found: list[list[int]] = peers.gather(rows, [1] * peers.size).tolist()
        return found

    def refuse_unlike(self, what: str, value: str | Tensor, *axes: str) -> None:
        """Raises UnsupportedError on all ranks if `value` differs among the ranks of these axes."""
        digest = hashlib.blake2b(_value_bytes(value), digest_size=8).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(self.device)
        self._record_sync()
        peers = self.among(*axes)
        found = peers.gather(mine, [1] * peers.size).tolist()
        if len(set(found)) == 1:
            return
        numbers = self.rank.peers(*axes)
        kinds = [
            [n for n, f in zip(numbers, found, strict=True) if f == kind] for kind in set(found)
        ]
        words = " and ".join(f"ranks {sorted(kind)}" for kind in sorted(kinds))
        raise UnsupportedError(f"{what}: differs between {words}; give every rank the same")


def refuse_unlike_models(ranks: ParallelContext, model: nn.Module) -> None:
    """Raises UnsupportedError if the weights, which every rank has whole, differ between ranks.

    Compared are checksums: sums over the bits of each parameter, weighted by their place along each
    dimension, a pass over the weights for each dimension.
    """
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad} {_parameter_checksum(p)}"
        for name, p in model.named_parameters()
    ]
    ranks.refuse_unlike("weights", "\n".join(lines), *AXES)


def _parameter_checksum(parameter: Tensor) -> int:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = parameter.detach().contiguous().view(kinds[parameter.element_size()])
    total = int(whole.sum(dtype=torch.int64))
    for dim, extent in enumerate(whole.shape):
        others = [d for d in range(whole.ndim) if d != dim]
        along = whole.sum(others, dtype=torch.int64) if others else whole.long()
        total = total * 31 + int((along * torch.arange(1, extent + 1, device=along.device)).sum())
    return total


def _value_bytes(value: str | Tensor) -> bytes:
    if isinstance(value, str):
        return value.encode()
    shape = repr((tuple(value.shape), value.dtype)).encode()
    return shape + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


T = TypeVar("T")


def run_on_rank0(
    work: Callable[[], T],
    raised: tuple[type[Exception], ...] = (UnsupportedError,),
    what: str = "its work for all ranks",
) -> T:
    """The value that `work` returns on rank 0, on every rank; the others wait for it. An exception
    of the types in `raised` is raised on every rank. `what`: label for the timeout message."""
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            with activity(what):
                said = [work(), None]
        except raised as error:
            said = [None, error]
    record_sync()
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    return said[0]


def broadcast_bits(tensor: Tensor) -> None:
    """Copy rank 0's bits into every rank's tensor."""
    # As bytes: every backend knows them, whatever the dtype.
    there = tensor.detach()
    flat = there.contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(flat, src=0)
    if flat.data_ptr() != there.data_ptr():
        there.copy_(flat.view(there.dtype).view(there.shape))


WeightForm = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, requires_grad


def is_on_rank0_only(ranks: ParallelContext, model: nn.Module) -> bool:
    """Whether rank 0 alone has the weights; False: every rank has all of them. All ranks call it.
    Raises UnsupportedError for anything else."""
    here = {not p.is_meta for p in model.parameters()}
    peers = ranks.among(*AXES)
    mine = torch.tensor([len(here) > 1, True in here], dtype=torch.int32, device=ranks.device)
    mixed, whole = peers.gather(mine[None], [1] * peers.size).T.tolist()
    if not any(mixed) and all(whole):
        return False
    if any(mixed) or not whole[0] or any(whole[1:]):
        raise UnsupportedError(
            "model: some weights are missing (on the meta device); load the whole model on rank 0, "
            "and on the other ranks either the whole model or none of its weights"
        )
    return True


@dataclass(slots=True)
class Rank0Weights:
    """The weights of a model, taken out of it: rank 0 holds them, and on every rank the model holds
    meta tensors of the same shapes and dtypes. Rank 0 reads the model once, and no device holds
    more of it than its shard and one weight."""

    ranks: ParallelContext
    forms: dict[str, WeightForm]  # by the first name of each weight
    kept: dict[str, Tensor]  # on rank 0

    @classmethod
    def of(cls, ranks: ParallelContext, model: nn.Module) -> "Rank0Weights":
        """Take the weights out of rank 0's model; the buffers of all ranks become those of rank 0,
        on the device. Raises UnsupportedError if the ranks' models have different modules."""
        named = dict(model.named_parameters())
        places = dict(model.named_parameters(remove_duplicate=False))
        shapes = [(name, tuple(p.shape)) for name, p in places.items()]
        shapes += [(name, tuple(b.shape)) for name, b in model.named_buffers()]
        ranks.refuse_unlike("weights", repr(shapes), *AXES)
        # Dtypes and ties are those of what was loaded: some families keep some weights wider, and
        # a head that the files have apart from the embeddings is not tied to them.
        forms, ties = run_on_rank0(lambda: (_forms(named), _ties(named, places)))
        blanks = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), trained)
            for name, (shape, dtype, trained) in forms.items()
        }
        for name, first_name in ties.items():
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = blanks[first_name]
        _broadcast_buffers(ranks, model)
        first = ranks.rank.number == 0
        return cls(ranks, forms, {n: p.detach() for n, p in named.items()} if first else {})

    def give(self, take: Callable[[str, Tensor], None]) -> None:
        """Call `take` on every rank with the name of each weight and the whole of it on the device.
        The tensor is freed before the next one unless `take` keeps it. All ranks call this once:
        rank 0 drops each weight that it has broadcast."""
        for name, (shape, dtype, _) in self.forms.items():
            take(name, self._whole(name, shape, dtype))

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name in self.kept:
            whole = self.kept.pop(name).to(self.ranks.device)
        else:
            whole = torch.empty(shape, dtype=dtype, device=self.ranks.device)
        broadcast_bits(whole)
        return whole


def broadcast_from_rank0(
    ranks: ParallelContext, model: nn.Module, home: torch.device | None = None
) -> None:
    """Give every rank all weights, on its device, or at `home`. All ranks call it."""
    if not is_on_rank0_only(ranks, model):
        return
    weights = Rank0Weights.of(ranks, model)
    named = dict(model.named_parameters())
    wholes = {}

    def keep(name: str, whole: Tensor) -> None:
        wholes[named[name]] = nn.Parameter(
            whole.to(home or ranks.device), named[name].requires_grad
        )

    weights.give(keep)
    _replace(model, wholes)


def _forms(named: Mapping[str, nn.Parameter]) -> dict[str, WeightForm]:
    return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named.items()}


def _ties(named: Mapping[str, nn.Parameter], places: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The first name of the parameter at each name."""
    first = {id(p): name for name, p in named.items()}
    return {name: first[id(p)] for name, p in places.items()}


def _replace(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters under all of their names: tied weights have several."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in others:
                module._parameters[name] = others[parameter]


def _broadcast_buffers(ranks: ParallelContext, model: nn.Module) -> None:
    dtypes = run_on_rank0(lambda: [b.dtype for b in model.buffers()])
    for buffer, dtype in zip(list(model.buffers()), dtypes, strict=True):
        there = buffer.detach().to(ranks.device, dtype, copy=True)
        broadcast_bits(there)
        for module in model.modules():
            for name, b in module._buffers.items():
                if b is buffer:
                    module._buffers[name] = there
