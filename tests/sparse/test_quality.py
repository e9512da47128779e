"""The mass that is seen is what dense attention would give to what is seen."""

from dataclasses import replace

import pytest
import torch

from farspan.attention.far import Mass
from farspan.sparse.attend import sampled, seen_mask, seen_mass
from farspan.sparse.pages import RandomPages
from farspan.spec import Sparse
from tests.attention.cases import Case, make_inputs
from tests.numerics import EXACT, assert_exact
from tests.sparse.cases import MIXED, SPARSE, Sequence, SparseCase, document_ids
from tests.unread import Unread


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


PLAIN = Case(tokens=93, chunk=16, kv_block=24, batch=2)
DENSE = [
    PLAIN,
    replace(PLAIN, sinks=True),
    replace(PLAIN, softcap=1.5, documents=MIXED, sinks=True),
]


def masses(case: SparseCase, samples: int) -> list[Mass]:
    sequence, inputs = Sequence(case), make_inputs(case.dense)
    _, attended = sequence.forward(inputs)
    found = []
    for start in case.starts:
        call, span = case.call(start)
        q, k = inputs.q[:, :, span], inputs.k[:, :, span]
        spans = [(low, min(low + 24, start)) for low in range(0, start, 24)]
        tokens = sampled(q.shape[2], samples)
        lse = attended[start][1]
        with Unread():
            mass = seen_mass(call, q, k, lse, sequence.pages, tokens, spans, inputs.sinks)
        found.append(Mass(*mass.tolist()))
    return found


@pytest.mark.parametrize("dense", DENSE, ids=str)
def test_it_is_the_dense_weight_of_what_is_seen(dense: Case) -> None:
    case = SparseCase(dense)
    torch.manual_seed(1)
    found = masses(case, 4)
    torch.manual_seed(1)
    inputs, sequence = make_inputs(dense), Sequence(case)
    sequence.forward(inputs)
    ids = document_ids(dense)
    every = replace(SPARSE, recent=dense.tokens)
    scores = dense.scale * inputs.q @ inputs.k.repeat_interleave(2, 1).mT
    if dense.softcap is not None:
        scores = dense.softcap * torch.tanh(scores / dense.softcap)
    visible = seen_mask(sequence.choice(), every, 16, ids).repeat_interleave(2, 1)
    mine = seen_mask(sequence.choice(), SPARSE, 16, ids).repeat_interleave(2, 1)
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    sink = 0.0 if inputs.sinks is None else inputs.sinks.exp()[:, None]
    mass = ((weights * mine).sum(3) + sink) / (weights.sum(3) + sink)
    assert mass.min() < 0.9
    for start, got in zip(case.starts, found, strict=True):
        chunk = mass[:, :, start : start + 16]
        few = chunk[:, :, torch.tensor(sampled(chunk.shape[2], 4))]
        wanted = torch.stack([few.mean(), few.min()])
        assert_exact(torch.tensor([got.mean, got.minimum], dtype=torch.float64), wanted)


def test_it_is_one_where_nothing_is_left_out() -> None:
    case = SparseCase(PLAIN, Sparse(page=4, budget=92, recent=0, sinks=0))
    for mass in masses(case, 16):
        assert_exact(torch.tensor([mass.mean, mass.minimum]), torch.ones(2), limit=EXACT)


def test_retrieval_sees_more_than_random_pages() -> None:
    torch.manual_seed(1)
    ours = masses(SparseCase(PLAIN), 16)
    torch.manual_seed(1)
    control = masses(SparseCase(PLAIN, select=RandomPages(3, seed=0)), 16)
    assert ours[-1].mean > control[-1].mean


@pytest.mark.parametrize(("tokens", "samples"), [(16, 4), (13, 4), (3, 8), (1, 1), (9, 0)])
def test_samples_are_tokens_of_the_chunk_and_its_last(tokens: int, samples: int) -> None:
    places = sampled(tokens, samples)
    assert places[-1] == tokens - 1
    assert min(places) >= 0
    assert min(samples, tokens) <= len(places) <= max(1, 2 * samples)
