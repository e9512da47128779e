"""AdamW's states in main memory, where the update happens.

Parameters are cut into pieces that pass through slots of pinned memory:

    evict   g0   g1   g2   g3           gradients to the host, a slot each
    CPU          u0   u1   u2   u3      fused AdamW on master and moments; the weight rounded
    fetch             w0   w1   w2      new weights back to the device

AdamW is elementwise, so pieces change nothing; on a CPU the bits are those of `DeviceStates`.

Note: [A gradient that has not arrived]. The CPU waits for the event behind a piece's copies before
it reads their slot.
Note: [A weight that has not left]. A slot's weight is written again (by the CPU, or by an evict
where a parameter has no master) only behind the event of the fetch that read it last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from farspan.attention.softmax import accumulate_dtype
from farspan.distributed.context import ParallelContext
from farspan.engine.tiers import Arena, CopyEngine, refuse_beyond_together
from farspan.plan.footprints import Lane
from farspan.plan.price.states import MOMENTS, SLOTS, staged_elements
from farspan.spec import Refused, Tier
from farspan.train.optimizer_parts import Held, Parameters, Rule, is_low, widen_gradient

ADVICE = (
    "set optimizer.states to device, or to 8bit (other results than AdamW's), or train fewer "
    "parameters"
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, stop) of a parameter, counted along its memory."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class _Slot:
    """Where a piece passes through. Invariant: `sent` is the event of the last copy out of it."""

    gradient: Tensor  # uint8
    weight: Tensor  # uint8
    arrived: Any = None
    sent: Any = None

    def view(self, memory: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return memory[: count * dtype.itemsize].view(dtype)


class HostStates:
    """Invariant: between updates a bfloat16 or float16 parameter equals its fp32 master rounded,
    and no copy is under way."""

    def __init__(
        self,
        parameters: Parameters,
        rule: Rule,
        copies: CopyEngine | None = None,
        ranks: ParallelContext | None = None,
        room: int | None = None,
    ) -> None:
        """Takes all of its memory now. Raises TooLarge when the host cannot hold it, and what the
        other ranks there take now, or it is more than `room` bytes."""
        for name, parameter in parameters.items():
            if not parameter.is_contiguous():
                raise Refused(
                    f"optimizer.states: host takes contiguous parameters and {name} has strides "
                    f"{parameter.stride()}; set states to device"
                )
        self._parameters = parameters
        self._rule = rule
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._copies = copies or CopyEngine(device, overlap=device.type == "cuda")
        # In line on CUDA there are no events to wait for before the CPU reads what was evicted.
        assert self._copies.overlap or device.type != "cuda"
        self._arena = Arena(Tier.HOST, device)
        self._states: dict[str, Tensor] = {}
        self._updates = {name: torch.zeros(()) for name in parameters}
        self._staged = staged_elements(sum(p.numel() for p in parameters.values()))
        self._slots = self._lay_out(ranks, room)
        self._began = False
        for name, parameter in parameters.items():
            widen_gradient(parameter)
            if is_low(parameter):
                self._states[f"master/{name}"].copy_(parameter.detach())

    def _lay_out(self, ranks: ParallelContext | None, room: int | None) -> list[_Slot]:
        """Masters and moments, the widest elements first so that each is aligned; then slots."""
        wide = {name: accumulate_dtype(p.dtype) for name, p in self._parameters.items()}
        names = sorted(wide, key=lambda name: -wide[name].itemsize)
        gradient = self._staged * max((dtype.itemsize for dtype in wide.values()), default=0)
        weight = self._staged * max((p.itemsize for p in self._parameters.values()), default=0)
        lasting = sum(
            p.numel() * wide[name].itemsize * (MOMENTS + is_low(p))
            for name, p in self._parameters.items()
        )
        size = lasting + SLOTS * (gradient + weight)
        what = "the optimizer's states in main memory"
        refuse_beyond_together(ranks, size, what, ADVICE, room)
        self._arena.reserve(size)
        address = 0
        for name in names:
            parameter = self._parameters[name]
            keys = ("master",) * is_low(parameter) + ("exp_avg", "exp_avg_sq")
            for key in keys:
                view = self._arena.view(address, tuple(parameter.shape), wide[name])
                self._states[f"{key}/{name}"] = view.zero_()
                address += view.nbytes
        gradients = [address + i * gradient for i in range(SLOTS)]
        weights = [address + SLOTS * gradient + i * weight for i in range(SLOTS)]
        return [
            _Slot(
                self._arena.view(of_gradient, (gradient,), torch.uint8),
                self._arena.view(of_weight, (weight,), torch.uint8),
            )
            for of_gradient, of_weight in zip(gradients, weights, strict=True)
        ]

    def tensors(self) -> dict[str, Tensor]:
        return self._states | {f"step/{name}": count for name, count in self._updates.items()}

    def held(self) -> Held:
        counters = sum(count.nbytes for count in self._updates.values())
        slots = sum(slot.gradient.nbytes + slot.weight.nbytes for slot in self._slots)
        pinned = self._copies.device.type == "cuda"
        return Held(0, self._arena.nbytes + counters, 0 if pinned or self._began else slots)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        pieces = list(self._pieces())
        for parameter in self._parameters.values():
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        self._copies.begin()
        try:
            for index in range(len(pieces) + SLOTS - 1):
                if index < len(pieces):
                    self._bring(pieces[index], self._slots[index % SLOTS])
                done = index - SLOTS + 1
                if done >= 0:
                    self._update(pieces[done], self._slots[done % SLOTS], lr)
        finally:
            self._copies.end()
        self._began = True

    def _pieces(self) -> Iterator[_Piece]:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._updates[name] += 1
                for start in range(0, parameter.numel(), self._staged):
                    yield _Piece(name, start, min(start + self._staged, parameter.numel()))

    def _bring(self, piece: _Piece, slot: _Slot) -> None:
        """Issues the copies to the host. See Note: [A weight that has not left]."""
        parameter = self._parameters[piece.name]
        assert parameter.grad is not None, "a piece is of a parameter with a gradient"
        gradient = _part(parameter.grad, piece)
        self._copies.evict(slot.view(slot.gradient, len(gradient), gradient.dtype), gradient)
        if not is_low(parameter):
            self._copies.wait(Lane.EVICT, slot.sent)
            weight = _part(parameter, piece)
            self._copies.evict(slot.view(slot.weight, len(weight), weight.dtype), weight)
        slot.arrived = self._copies.record(Lane.EVICT)

    def _update(self, piece: _Piece, slot: _Slot, lr: float) -> None:
        """Updates a piece and issues its way back."""
        config, parameter = self._rule.config, self._parameters[piece.name]
        count = piece.stop - piece.start
        out = slot.view(slot.weight, count, parameter.dtype)
        _await(slot.arrived)  # Note: [A gradient that has not arrived]
        master = self._states.get(f"master/{piece.name}")
        weight = out if master is None else _part(master, piece)
        adamw(
            [weight],
            [slot.view(slot.gradient, count, weight.dtype)],
            [_part(self._states[f"exp_avg/{piece.name}"], piece)],
            [_part(self._states[f"exp_avg_sq/{piece.name}"], piece)],
            [],
            [self._updates[piece.name] - 1],  # a copy: it is counted up for each piece
            fused=True,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=self._rule.weight_decay(piece.name),
            eps=config.eps,
            maximize=False,
        )
        if master is not None:
            _await(slot.sent)  # Note: [A weight that has not left]
            out.copy_(weight)
        self._copies.fetch(_part(parameter, piece), out)
        slot.sent = self._copies.record(Lane.FETCH)


def _part(tensor: Tensor | nn.Parameter, piece: _Piece) -> Tensor:
    return tensor.detach().view(-1)[piece.start : piece.stop]


def _await(event: Any) -> None:
    """The CPU waits; None is of a copy that has happened, or never was."""
    if event is not None:
        event.synchronize()
