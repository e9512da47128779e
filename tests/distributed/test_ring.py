"""Keys that travel round: a rank's queries meet the keys of all, which come to it."""

from functools import partial

import pytest

from farspan.distributed.collectives import Communicator
from farspan.distributed.kv_sharding import Ring
from farspan.program.attention_blocks import Held
from tests.attention.held import Spread, fastest
from tests.distributed.spread import Done, Sizes, Way, attend_everywhere, compare, everyone, spreads
from tests.grids import part_of
from tests.oracles.sent_bytes import ring_backward, ring_forward
from tests.ranks import run_ranks


def way(peers: Communicator, spread: Spread, chunk: int, rank: int) -> Way:
    case, own = spread.case, spread.held(rank)[chunk]
    start, stop = spread.chunks[chunk]
    held = [Held(spread.held(r)) for r in range(spread.ranks)]
    rows = [(each.row(start), each.row(stop) - each.row(start)) for each in held]
    sizes = Sizes(case)
    row, gradient = (
        sizes.of(case.kv_heads, case.head_dim + case.value_dim, wide=w) for w in (False, True)
    )
    totals = [sum(pair) for pair in rows]
    sent = ring_forward(totals, rank, row), ring_backward(totals, rank, row, gradient)
    call = spread.call(own, chunk, rank, fastest(case))
    return Way(Ring(peers, rows, partial(spread.blocks, own, chunk)), call, sent)


def attend(cases: list[Spread]) -> list[Done]:
    peers = everyone()
    return [attend_everywhere(partial(way, peers), [peers], spread) for spread in cases]


@pytest.mark.parametrize("ranks", part_of([2, 3, 4], 3))
def test_equals_attention_of_one_rank(ranks: int) -> None:
    cases = spreads(ranks)
    done = run_ranks(ranks, attend, cases)
    for spread, found in zip(cases, zip(*done, strict=True), strict=True):
        compare(spread, found)
    # Chunks of 10 tokens: what is sent grows by as much in each.
    for each in done:
        forward, backward = zip(*[sent for sent in each[0].sent[:3] if sent], strict=True)
        assert forward[1] - forward[0] == forward[2] - forward[1] > 0
        assert backward[1] - backward[0] == backward[2] - backward[1] > 0
