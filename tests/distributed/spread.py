"""Attention over keys that are spread over ranks, run on the ranks, and what it must equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from farspan.attention.backends import accumulate_dtype
from farspan.attention.chunk import AttentionCall
from farspan.distributed.collectives import Communicator
from tests.attention.cases import Case, Inputs, expected, limits, make_inputs
from tests.attention.held import Rows, Spread, lopsided, positions
from tests.numerics import EXACT, relative_error


@dataclass(frozen=True)
class Way:
    """How a rank attends in one chunk, and the bytes that it should send: forward, backward."""

    attention: Any  # has the methods of `Shards` and `Ring`
    call: AttentionCall
    sent: tuple[int, int] | None  # None: not to be compared


WayOf = Callable[[Spread, int, int], Way]  # of a chunk and a rank


@dataclass(frozen=True)
class Done:
    """What a rank found for its tokens, and what it sent in each chunk: forward, backward."""

    results: dict[str, NDArray]  # tensors would be shared with a process that has ended
    sent: list[tuple[int, int] | None]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a token, all batch rows and heads."""

    case: Case

    def of(self, heads: int, width: int, *, wide: bool = False) -> int:
        dtype = accumulate_dtype(self.case.dtype) if wide else self.case.dtype
        return self.case.batch * heads * width * dtype.itemsize


def everyone() -> Communicator:
    """All ranks."""
    group = dist.group.WORLD
    assert group is not None
    return Communicator(group)


def attend_everywhere(way_of: WayOf, peers: Sequence[Communicator], spread: Spread) -> Done:
    """On every rank: forward over the chunks, then backward from the last one to the first."""
    torch.manual_seed(0)
    inputs, rank = make_inputs(spread.case), dist.get_rank()
    rows, held = spread.rows(inputs, rank), spread.held(rank)
    outs, dqs, attended, sent = {}, {}, {}, {}
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks).double()
    ways = [way_of(spread, chunk, rank) for chunk in range(len(held))]
    for chunk, way in enumerate(ways):
        q, k, v, _ = _own(rows, inputs, held[chunk], way)
        before = _sent(peers)
        attended[chunk] = way.attention.attend(way.call, q, k, v, rows, inputs.sinks)
        sent[chunk] = _sent(peers) - before
        outs[chunk] = attended[chunk][0]
        assert outs[chunk].transpose(1, 2).is_contiguous()
        assert outs[chunk].dtype == spread.case.dtype
    for chunk, way in reversed(list(enumerate(ways))):
        q, k, v, dout = _own(rows, inputs, held[chunk], way)
        before = _sent(peers)
        dqs[chunk], *dkv, own_dsinks = way.attention.attend_backward(
            way.call, dout, (q, k, v), attended[chunk], rows, inputs.sinks
        )
        assert rows.added == rows.asked
        assert way.sent in (None, (sent[chunk], _sent(peers) - before)), (chunk, rank)
        rows.add_own(*dkv)
        if dsinks is not None:
            dsinks += own_dsinks
    out, dq = (torch.cat([x[chunk] for chunk in range(len(held))], 2) for x in (outs, dqs))
    dk, dv = (x.permute(1, 2, 0, 3) for x in (rows.dk, rows.dv))
    results = {"out": out, "q": dq, "k": dk, "v": dv}
    if dsinks is not None:
        results["sinks"] = dsinks
    return Done(
        {name: x.double().numpy() for name, x in results.items()}, [way.sent for way in ways]
    )


def _own(
    rows: Rows, inputs: Inputs, span: tuple[int, int], way: Way
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of this rank's tokens; earlier rows are what may be asked for."""
    rows.begin(way.call.own_start)
    q, dout = (x[:, :, slice(*span)] for x in (inputs.q, inputs.dout))
    return q, *rows.own(span[1] - span[0]), dout


def _sent(peers: Sequence[Communicator]) -> int:
    return sum(each.sent for each in peers)


def compare(spread: Spread, done: Sequence[Done]) -> None:
    """What all ranks found together is dense attention and its gradients."""
    torch.manual_seed(0)
    case = spread.case
    inputs = make_inputs(case)
    wanted = expected(case, inputs.to(torch.float64))
    most = dict.fromkeys(wanted, EXACT)
    if case.dtype != torch.float64:
        most = limits(case, inputs)
    for name, tensor in wanted.items():
        if name == "sinks":
            found = torch.stack([torch.from_numpy(each.results[name]) for each in done]).sum(0)
        else:
            found = torch.full_like(tensor, torch.nan)
            for rank, each in enumerate(done):
                found[:, :, positions(spread.held(rank))] = torch.from_numpy(each.results[name])
        noise = tensor.numel() ** 0.5 * 1e-3
        error = relative_error(found, tensor, least=noise)
        assert error <= most[name], f"{spread}: {name}: {error:.3g} > {most[name]:.3g}"


def spreads(ranks: int) -> list[Spread]:
    """Parts that differ by a token, that are empty, and of any size."""
    plain = Case(tokens=37, chunk=10, kv_block=4)
    mixed = ((0, 5, 6, 7, 25), (0, 16, 33))
    short = Case(tokens=9, chunk=2, kv_block=2, kv_heads=1, sinks=True)
    return [
        Spread(plain, ranks),
        Spread(replace(plain, dtype=torch.bfloat16, sinks=True), ranks),
        Spread(Case(tokens=37, chunk=37, kv_block=40, kv_heads=4, value_dim=8), ranks),
        Spread(short, ranks),
        Spread(Case(tokens=37, chunk=10, kv_block=5, window=6, sinks=True), ranks, lopsided),
        Spread(Case(tokens=37, chunk=13, kv_block=3, window=20, batch=2, kv_heads=1), ranks),
        Spread(Case(tokens=37, chunk=12, kv_block=6, batch=2, documents=mixed), ranks, lopsided),
        Spread(
            Case(
                *(37, 9, 7, 2),
                window=11,
                softcap=2.0,
                sinks=True,
                value_dim=12,
                documents=mixed,
            ),
            ranks,
        ),
    ]
