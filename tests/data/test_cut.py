"""Packing against a dumb reference: lay the epochs end to end in a list, and cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data.formats import UNTRAINED
from farspan.data.packing import ConcatLayout, Packing, split_held_out
from farspan.data.token_cache import TokenStore
from tests.data.stores import check_documents, make_store


def cut(store: TokenStore, documents: np.ndarray, context: int, seed: int) -> Packing:
    return Packing(store, ConcatLayout(np.diff(store.starts), documents, context, seed), context)


def concatenation(lengths: list[int], context: int, seed: int, tokens: int) -> list[int]:
    """The endless stream, from the orders alone."""
    layout = ConcatLayout(np.array(lengths), np.arange(len(lengths)), context, seed)
    stream: list[int] = []
    epoch = 0
    while len(stream) < tokens:
        for document in layout._order(epoch).documents:
            length = lengths[document]
            stream.extend(1000 * int(document) + p for p in range(length))
        epoch += 1
    return stream[:tokens]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    context=st.integers(1, 30),
    seed=st.integers(0, 5),
    index=st.integers(0, 9),
)
def test_a_sequence_is_a_cut_of_the_stream(
    lengths: list[int], context: int, seed: int, index: int
) -> None:
    packing = cut(make_store(lengths), np.arange(len(lengths)), context, seed)
    batch = packing.batch([index])
    stream = concatenation(lengths, context, seed, (index + 1) * context)
    assert batch.input_ids.tolist() == batch.labels.tolist() == [stream[index * context :]]
    assert batch.tokens == context
    check_documents(batch.input_ids[0], batch.document_ids[0], batch.names[0])


def test_a_cut_document_goes_on_as_a_document_of_its_own() -> None:
    packing = cut(make_store([10]), np.arange(1), 4, seed=0)
    assert packing.batch([1]).input_ids.tolist() == [[4, 5, 6, 7]]
    assert packing.batch([1]).document_ids.tolist() == [[0, 0, 0, 0]]
    # The third sequence ends one epoch and begins the next.
    assert packing.batch([2]).input_ids.tolist() == [[8, 9, 0, 1]]
    assert packing.batch([2]).document_ids.tolist() == [[0, 0, 1, 1]]


def test_a_batch_depends_on_seed_and_index_alone() -> None:
    lengths = [5, 9, 2, 7, 11, 3]
    store, documents = make_store(lengths), np.arange(6)
    walked = cut(store, documents, 8, seed=3)
    rows = [walked.batch([i]).input_ids[0].tolist() for i in range(12)]
    fresh = cut(store, documents, 8, seed=3).batch([11, 0, 5])
    assert fresh.input_ids.tolist() == [rows[11], rows[0], rows[5]]
    other = cut(store, documents, 8, seed=4)
    assert [other.batch([i]).input_ids[0].tolist() for i in range(12)] != rows


def test_every_epoch_holds_every_token_once_in_its_own_order() -> None:
    lengths = [5, 9, 2, 7, 11, 3]
    packing = cut(make_store(lengths), np.arange(6), sum(lengths), seed=0)
    epochs = [packing.batch([i]).input_ids[0].tolist() for i in range(3)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_documents_that_are_divided_are_counted() -> None:
    lengths, context = [5, 9, 2, 7, 11, 3], 8
    packing = cut(make_store(lengths), np.arange(6), context, seed=3)
    parts = [n for i in range(packing.sequences_per_epoch()) for n in packing.once(i).names[0]]
    divided = sum(parts.count(name) > 1 for name in set(parts))
    assert packing.kept.divided == divided > 0
    assert packing.kept.documents == 6
    assert packing.kept.padding == 0


def test_once_covers_the_documents_and_ends_with_them() -> None:
    packing = cut(make_store([5, 9, 2]), np.array([0, 2]), 4, seed=0)
    assert packing.sequences_per_epoch() == 2
    batches = [packing.once(i) for i in range(2)]
    assert [batch.input_ids.shape for batch in batches] == [(1, 4), (1, 4)]
    parts = np.concatenate([batch.input_ids[0, : batch.tokens] for batch in batches])
    assert sorted(parts.tolist()) == [0, 1, 2, 3, 4, 2000, 2001]
    assert batches[1].labels[0, batches[1].tokens :].tolist() == [UNTRAINED]


@given(documents=st.integers(1, 40), fraction=st.floats(0, 0.99), seed=st.integers(0, 3))
def test_divided_documents_are_disjoint_and_complete(
    documents: int, fraction: float, seed: int
) -> None:
    train, held = split_held_out(documents, fraction, seed)
    assert sorted([*train, *held]) == list(range(documents))
    assert len(held) == (0 if fraction == 0 else max(1, round(fraction * documents)))
    again = split_held_out(documents, fraction, seed)
    assert np.array_equal(train, again[0])
    assert np.array_equal(held, again[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_division_depends_on_the_seed(seed: int) -> None:
    assert not np.array_equal(
        split_held_out(50, 0.3, seed)[1], split_held_out(50, 0.3, seed + 1)[1]
    )
