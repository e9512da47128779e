"""This process in a layout: its process groups, and work that rank 0 does for all ranks, such as
broadcasting weights that it alone has loaded."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farspan.distributed import messages
from farspan.distributed.agreement import MISSING, SCOPES, Agreement, Fact, between, key_of
from farspan.distributed.collectives import Communicator
from farspan.distributed.failure import activity, record_sync
from farspan.hf.swap import put, replacements
from farspan.program.layout import AXES, SEQUENCE, Layout, Rank
from farspan.spec import UnsupportedError

TOKENS = (*SEQUENCE, "data")  # ranks that run the same layers on different tokens


@dataclass(slots=True)
class ParallelContext:
    """This rank in a layout (torchtitan's ParallelDims), and its communicators along each axis.

    Invariant: every rank makes the same groups in the same order, as torch requires.

    Args:
        layout: The number of devices along each axis.
        device: The device of this rank.
        timeout: Of collectives along an axis; None: torch's default.

    Raises:
        UnsupportedError: No process group exists, or it has more or fewer ranks than `layout`.
    """

    layout: Layout
    device: torch.device
    timeout: timedelta | None = None
    rank: Rank = field(init=False)
    groups: dict[tuple[str, ...], Communicator] = field(default_factory=dict)
    made: dict[tuple[str, ...], Any] = field(default_factory=dict)  # by the axes with several ranks
    agreed: int = 0  # number of exchanges so far, the same on every rank
    scopes: dict[tuple[str, ...], list[tuple[int, ...]]] = field(default_factory=dict)

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
                f"{self.layout.devices()}, or make the product of {', '.join(reversed(AXES))} "
                f"equal {ranks}"
            )
        self.rank = Rank(self.layout, dist.get_rank())
        for axis in AXES:
            self.among(axis)
        for axes in (SEQUENCE, (*SEQUENCE, "pipeline"), TOKENS, AXES):
            self.among(*axes)

    def among(self, *axes: str, alone: bool = True) -> Communicator:
        """Return the communicator of the ranks that differ from this one only along some axes. The
        first call with these axes is a collective of all ranks.

        Args:
            axes: Names of axes of the layout.
            alone: Whether a communicator of this rank alone may have no process group.
        """
        axes = tuple(axis for axis in AXES if axis in axes)
        if axes not in self.groups:
            self.groups[axes] = Communicator(None)
        peers = self.groups[axes]
        if peers.group is None:
            peers.group = self._group(axes, alone)
        return peers

    def _group(self, axes: tuple[str, ...], alone: bool) -> dist.ProcessGroup | None:
        """Return the process group along these axes. Axes with the same ranks share one: a gloo
        group takes threads and half a second, and in most layouts five axes have only one rank."""
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

    def figures(self, mine: Sequence[int]) -> list[list[int]]:
        """Return each rank's integers, in the order of ranks. All ranks pass equally many."""
        record_sync()
        peers = self.among(*AXES)
        rows = torch.tensor([mine], dtype=torch.int64, device=self.device)
        table: list[list[int]] = peers.gather(rows, [1] * peers.size).tolist()
        return table

    @contextmanager
    def agreement(self, call: str) -> Iterator[Agreement]:
        """Check that ranks are about to make the same call: the block adds facts to the
        `Agreement`, and when the block ends, all ranks compare them.

        A rank whose block raises sends its message to the other ranks, which raise it too, so the
        block must not communicate. See Note: [One exchange].

        Raises UnsupportedError on all ranks if a block has raised on one, or facts differ.
        """
        mine, digests, turn = Agreement(call), [0] * len(SCOPES), self.agreed
        try:
            yield mine
            digests = [mine.digest(scope, turn) for scope in SCOPES]
        except Exception as error:
            self._exchange(mine, digests, _words_of(error))
            raise
        self._exchange(mine, digests, None)

    def _exchange(self, mine: Agreement, digests: list[int], refusal: str | None) -> None:
        turn, self.agreed = self.agreed, self.agreed + 1
        table = self.figures([refusal is not None, *digests, *mine.figures])
        mine.table = [row[-len(mine.figures) :] for row in table]
        if not any(row[0] for row in table) and not self._unlike([row[1:] for row in table]):
            return
        said = {"refusal": refusal} if refusal is not None else mine.words(turn)
        everyone = [json.loads(text) for text in self._texts(json.dumps(said))]
        if refusal is None:
            raise UnsupportedError(self._difference(everyone))

    def _unlike(self, table: list[list[int]]) -> bool:
        """Return whether ranks that must agree differ; `table` has a row of digests per rank."""
        return any(
            len({table[n][number] for n in peers}) > 1
            for number, scope in enumerate(SCOPES)
            for peers in self._groups_of(scope)
        )

    def _groups_of(self, scope: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that must agree on facts for these axes (`scope`)."""
        if scope not in self.scopes:
            numbers = range(self.layout.devices())
            self.scopes[scope] = sorted({Rank(self.layout, n).peers(*scope) for n in numbers})
        return self.scopes[scope]

    def _texts(self, mine: str) -> list[str]:
        peers = self.among(*AXES)
        encoded = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8)
        sizes = [size for (size,) in self.figures([len(encoded)])]
        whole = peers.gather(encoded.to(self.device), sizes).cpu()
        return [bytes(part.tolist()).decode() for part in whole.split(sizes)]

    def _difference(self, everyone: list[dict[str, Any]]) -> str:
        """Return an error message that says how the ranks' facts differ, equal on every rank."""
        refused = [(n, entry["refusal"]) for n, entry in enumerate(everyone) if "refusal" in entry]
        if refused:
            return "; ".join(f"rank {number}: {words}" for number, words in refused)
        differences = []
        for scope in SCOPES:
            facts = [entry.get(key_of(scope), {}) for entry in everyone]
            for name in dict.fromkeys(name for entry in facts for name in entry):
                values = [entry.get(name, MISSING) for entry in facts]
                if any(len({values[n] for n in peers}) > 1 for peers in self._groups_of(scope)):
                    differences.append(between(name, values))
        if differences and differences[0].startswith("call: "):
            differences = differences[:1]  # facts of different calls cannot be compared
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        return "; ".join(differences[:SHOWN]) + f"{more}; give every rank the same"

    def refuse_unlike(self, what: str, value: Fact) -> None:
        """Raise UnsupportedError on all ranks if a value differs between them.

        Args:
            what: The name of the value in the error.
            value: This rank's text, tensor or tensors by name.
        """
        with self.agreement(what) as same:
            same.add({what: value})


SHOWN = 4  # differences that an error names


def _words_of(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {text}"


def weight_facts(model: nn.Module) -> dict[str, Fact]:
    """Return checksums of all weights, by which ranks check that they hold the same model.

    A checksum is a sum over the bits of a parameter, weighted by their position along each
    dimension. It takes one pass over the weights per dimension.
    """
    return {
        name: f"{tuple(p.shape)} {p.dtype} {p.requires_grad} {_parameter_checksum(p)}"
        for name, p in model.named_parameters()
    }


def _parameter_checksum(parameter: Tensor) -> int:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = parameter.detach().contiguous().view(kinds[parameter.element_size()])
    total = int(whole.sum(dtype=torch.int64))
    for dim, extent in enumerate(whole.shape):
        others = [d for d in range(whole.ndim) if d != dim]
        along = whole.sum(others, dtype=torch.int64) if others else whole.long()
        total = total * 31 + int((along * torch.arange(1, extent + 1, device=along.device)).sum())
    return total


T = TypeVar("T")


def run_on_rank0(
    work: Callable[[], T],
    raised: tuple[type[Exception], ...] = (UnsupportedError,),
    what: str = "its work for all ranks",
) -> T:
    """Run `work` on rank 0 alone and return its result on every rank; the other ranks wait.
    Exceptions of types in `raised` are raised on all ranks; `what` names the work in timeouts."""
    said: tuple[Any, Exception | None] = None, None
    if dist.get_rank() == 0:
        try:
            with activity(what):
                said = work(), None
        except raised as error:
            said = None, error
    found, refusal = messages.broadcast(said)
    if refusal is not None:
        raise refusal
    return found


def broadcast_bits(tensor: Tensor) -> None:
    """Overwrite a tensor on every rank with rank 0's values, bit for bit."""
    # Every backend can send bytes, whatever the dtype.
    there = tensor.detach()
    flat = there.contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(flat, src=0)
    if flat.data_ptr() != there.data_ptr():
        there.copy_(flat.view(there.dtype).view(there.shape))


WeightForm = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, requires_grad


def is_on_rank0_only(ranks: ParallelContext, model: nn.Module) -> bool:
    """Return True if only rank 0 has loaded the weights, False if all ranks have. All ranks call
    this. Raises UnsupportedError for any other mix of loaded and missing weights."""
    here = {not p.is_meta for p in model.parameters()}
    mixed, whole = zip(*ranks.figures([len(here) > 1, True in here]), strict=True)
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
    """A model's weights on rank 0, before they are sent to all ranks. The model itself has meta
    tensors of the same shapes and dtypes on every rank. So only rank 0 reads the weights, and no
    device holds more than its shard and one whole weight."""

    ranks: ParallelContext
    forms: dict[str, WeightForm]  # by the first name of each weight
    kept: dict[str, Tensor]  # on rank 0

    @classmethod
    def of(cls, ranks: ParallelContext, model: nn.Module) -> "Rank0Weights":
        """Return the weights of rank 0's model, and leave meta tensors in every rank's model. The
        model's registered buffers are copied to every rank's device. Raises UnsupportedError if the
        ranks' models have different modules."""
        named = dict(model.named_parameters())
        places = dict(model.named_parameters(remove_duplicate=False))
        shapes = {n: str(tuple(x.shape)) for n, x in (*places.items(), *model.named_buffers())}
        with ranks.agreement("parallelize: distributing the weights") as same:
            same.add(shapes)
        # Dtypes and ties follow the loaded model: some families keep some weights wider, and a head
        # that the files store apart from the embeddings is not tied to them.
        forms = {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named.items()}
        firsts = {id(p): name for name, p in named.items()}
        ties = {name: firsts[id(p)] for name, p in places.items()}  # tied ones share their first
        forms, ties = run_on_rank0(lambda: (forms, ties))
        blanks = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), trained)
            for name, (shape, dtype, trained) in forms.items()
        }
        put(
            (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], blanks[first])
            for name, first in ties.items()
        )
        _broadcast_buffers(ranks, model)
        first = ranks.rank.number == 0
        return cls(ranks, forms, {n: p.detach() for n, p in named.items()} if first else {})

    def give(self, take: Callable[[str, Tensor], None]) -> None:
        """Broadcast the weights one by one, and call `take` on every rank with the name and the
        whole value of each, on the device.

        A value is freed before the next is sent, unless `take` keeps it. All ranks call this once:
        rank 0 drops each weight after its broadcast.
        """
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
    """Broadcast all weights to every rank's device, or to `home`. All ranks call this."""
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
    put(replacements(model, wholes))


def _broadcast_buffers(ranks: ParallelContext, model: nn.Module) -> None:
    dtypes = run_on_rank0(lambda: [b.dtype for b in model.buffers()])
    for buffer, dtype in zip(list(model.buffers()), dtypes, strict=True):
        there = buffer.detach().to(ranks.device, dtype, copy=True)
        broadcast_bits(there)
        tables = (module._buffers for module in model.modules())
        put((of, name, there) for of in tables for name, b in list(of.items()) if b is buffer)
