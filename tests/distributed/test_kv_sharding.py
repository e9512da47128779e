"""Keys that stay where they are, and keys that travel round: all queries meet all keys."""

from functools import partial

import pytest
import torch.distributed as dist

from farspan.distributed.collectives import Communicator
from farspan.distributed.kv_sharding import KVShards, Ring
from farspan.program.attention_blocks import Held
from farspan.program.layout import Range
from tests.attention.cases import Case
from tests.attention.held import Spread, fastest
from tests.distributed.spread import Done, Sizes, Way, attend_everywhere, compare, everyone, spreads
from tests.grids import part_of
from tests.oracles.sent_bytes import ring_backward, ring_forward, shards_backward, shards_forward
from tests.ranks import run_ranks


def counts_of(spread: Spread, chunk: int) -> list[int]:
    spans = [spread.held(rank)[chunk] for rank in range(spread.ranks)]
    return [stop - start for start, stop in spans]


def way(peers: Communicator, spread: Spread, chunk: int, rank: int) -> Way:
    call = spread.call(spread.chunks[chunk], chunk, rank, fastest(spread.case))
    counts = counts_of(spread, chunk)
    sent = bytes_of(spread.case, counts, rank)
    return Way(KVShards(peers, counts), call, sent)


def bytes_of(case: Case, counts: list[int], rank: int) -> tuple[int, int]:
    sizes = Sizes(case)
    q, out = sizes.of(case.heads, case.head_dim), sizes.of(case.heads, case.value_dim)
    sums, lse = sizes.of(case.heads, case.value_dim, wide=True), sizes.of(case.heads, 1, wide=True)
    gradient = sizes.of(case.heads, case.head_dim, wide=True)
    return (
        shards_forward(counts, rank, q, sums + lse),
        shards_backward(counts, rank, q + 2 * out + lse, gradient),
    )


def attend(cases: list[Spread]) -> list[Done]:
    peers = everyone()
    return [attend_everywhere(partial(way, peers), [peers], spread) for spread in cases]


@pytest.mark.parametrize("ranks", part_of([2, 3, 4], 3))
def test_equals_attention_of_one_rank(ranks: int) -> None:
    cases = spreads(ranks)
    done = run_ranks(ranks, attend, cases)
    for spread, found in zip(cases, zip(*done, strict=True), strict=True):
        compare(spread, found)
    # Chunks of 10 tokens, dealt alike: what is sent does not grow with the prefix.
    case = cases[0].case
    assert case.tokens > 3 * case.chunk
    for each in done:
        assert len(set(each[0].sent[:3])) == 1


def way_of_both(
    shards: Communicator, ring: Communicator, spread: Spread, chunk: int, rank: int
) -> Way:
    """Two shards, neighbours in number, of each of two members of a ring."""

    def queries(member: int) -> Range:
        first, last = spread.held(2 * member)[chunk], spread.held(2 * member + 1)[chunk]
        return first[0], last[1]

    member, shard = divmod(rank, 2)
    start, stop = spread.chunks[chunk]
    held = [Held(spread.held(2 * other + shard)) for other in range(2)]
    rows = [(each.row(start), each.row(stop) - each.row(start)) for each in held]
    mine = queries(member)
    call = spread.call(mine, chunk, rank, fastest(spread.case))
    counts = counts_of(spread, chunk)[2 * member : 2 * member + 2]
    around = Ring(ring, rows, lambda other: spread.blocks(mine, chunk, 2 * other + shard))
    return Way(KVShards(shards, counts, around), call, None)


def attend_both(cases: list[Spread]) -> list[Done]:
    def mine(groups: list[list[int]]) -> Communicator:
        made = [dist.new_group(ranks) for ranks in groups]
        return Communicator(
            next(group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER)
        )

    shards, ring = mine([[0, 1], [2, 3]]), mine([[0, 2], [1, 3]])
    way = partial(way_of_both, shards, ring)
    return [attend_everywhere(way, [shards, ring], spread) for spread in cases]


def test_shards_of_the_members_of_a_ring() -> None:
    cases = spreads(4)
    done = run_ranks(4, attend_both, cases)
    for spread, found in zip(cases, zip(*done, strict=True), strict=True):
        compare(spread, found)


# -- keys that travel round ------------------------------------------------------------------------


def way_round(peers: Communicator, spread: Spread, chunk: int, rank: int) -> Way:
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


def attend_round(cases: list[Spread]) -> list[Done]:
    peers = everyone()
    return [attend_everywhere(partial(way_round, peers), [peers], spread) for spread in cases]


@pytest.mark.parametrize("ranks", part_of([2, 3, 4], 3))
def test_a_ring_equals_attention_of_one_rank(ranks: int) -> None:
    cases = spreads(ranks)
    done = run_ranks(ranks, attend_round, cases)
    for spread, found in zip(cases, zip(*done, strict=True), strict=True):
        compare(spread, found)
    # Chunks of 10 tokens: what is sent grows by as much in each.
    for each in done:
        forward, backward = zip(*[sent for sent in each[0].sent[:3] if sent], strict=True)
        assert forward[1] - forward[0] == forward[2] - forward[1] > 0
        assert backward[1] - backward[0] == backward[2] - backward[1] > 0
