"""Weights that rank 0 alone has loaded, handed out to all ranks one at a time.

So a model is read once, lies whole in one machine's main memory, and no device holds more of it
than what it keeps and one weight. FSDP2's users know this as `broadcast_from_rank0`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farspan.parallel.leader import broadcast, by_first
from farspan.parallel.ranks import Ranks
from farspan.plan.layout import AXES
from farspan.spec import Refused

Form = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, requires_grad


def is_handed_out(ranks: Ranks, model: nn.Module) -> bool:
    """Whether rank 0 alone has the weights; False: every rank has them all. All ranks call it.
    Raises Refused for anything else."""
    here = {not p.is_meta for p in model.parameters()}
    peers = ranks.among(*AXES)
    mine = torch.tensor([len(here) > 1, True in here], dtype=torch.int32, device=ranks.device)
    mixed, whole = peers.gather(mine[None], [1] * peers.size).T.tolist()
    if not any(mixed) and all(whole):
        return False
    if any(mixed) or not whole[0] or any(whole[1:]):
        raise Refused(
            "model: weights are on the meta device, but not all of them on all ranks but the "
            "first; load the model whole on rank 0, and elsewhere the same or none of it"
        )
    return True


@dataclass(slots=True)
class Handout:
    """The weights of a model, out of it: rank 0 has them, the model has stand-ins for them on the
    meta device, of the same forms on all ranks."""

    ranks: Ranks
    forms: dict[str, Form]  # by the first name of each weight
    kept: dict[str, Tensor]  # on rank 0

    @classmethod
    def of(cls, ranks: Ranks, model: nn.Module) -> "Handout":
        """Takes the weights out of rank 0's model; buffers of all ranks become those of rank 0, on
        the device. Raises Refused where the models are not of the same modules."""
        named = dict(model.named_parameters())
        places = dict(model.named_parameters(remove_duplicate=False))
        shapes = [(name, tuple(p.shape)) for name, p in places.items()]
        shapes += [(name, tuple(b.shape)) for name, b in model.named_buffers()]
        ranks.refuse_unlike("weights", repr(shapes), *AXES)
        # Dtypes and ties are those of what was loaded: some families keep some weights wider, and
        # a head that the files have apart from the embeddings is not tied to them.
        forms, ties = by_first(lambda: (_forms(named), _ties(named, places)))
        blanks = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), trained)
            for name, (shape, dtype, trained) in forms.items()
        }
        for name, first_name in ties.items():
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = blanks[first_name]
        _hand_out_buffers(ranks, model)
        first = ranks.rank.number == 0
        return cls(ranks, forms, {n: p.detach() for n, p in named.items()} if first else {})

    def give(self, take: Callable[[str, Tensor], None]) -> None:
        """Calls `take` with the name of every weight and all of it, on the device, which is gone
        when the next one comes unless it was kept. All ranks call it, once: rank 0 lets go of what
        it has handed out."""
        for name, (shape, dtype, _) in self.forms.items():
            take(name, self._whole(name, shape, dtype))

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name in self.kept:
            whole = self.kept.pop(name).to(self.ranks.device)
        else:
            whole = torch.empty(shape, dtype=dtype, device=self.ranks.device)
        broadcast(whole)
        return whole


def hand_out(ranks: Ranks, model: nn.Module) -> None:
    """Every rank has all weights on its device. All ranks call it."""
    if not is_handed_out(ranks, model):
        return
    handout = Handout.of(ranks, model)
    named = dict(model.named_parameters())
    wholes = {}

    def keep(name: str, whole: Tensor) -> None:
        wholes[named[name]] = nn.Parameter(whole, named[name].requires_grad)

    handout.give(keep)
    _replace(model, wholes)


def _forms(named: Mapping[str, nn.Parameter]) -> dict[str, Form]:
    return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named.items()}


def _ties(named: Mapping[str, nn.Parameter], places: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The first name of what is in each place."""
    first = {id(p): name for name, p in named.items()}
    return {name: first[id(p)] for name, p in places.items()}


def _replace(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Other parameters, in every place that some have: tied weights have several."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in others:
                module._parameters[name] = others[parameter]


def _hand_out_buffers(ranks: Ranks, model: nn.Module) -> None:
    dtypes = by_first(lambda: [b.dtype for b in model.buffers()])
    for buffer, dtype in zip(list(model.buffers()), dtypes, strict=True):
        there = buffer.detach().to(ranks.device, dtype, copy=True)
        broadcast(there)
        for module in model.modules():
            for name, b in module._buffers.items():
                if b is buffer:
                    module._buffers[name] = there
