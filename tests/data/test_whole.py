"""Whole documents in sequences, against the plainest best fit there is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data.formats import UNTRAINED
from farspan.data.packing import BestFitLayout, Packing, best_fit
from farspan.data.token_cache import TokenStore
from tests.data.stores import check_documents, make_store

LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=12)


def whole(store: TokenStore, context: int, seed: int = 0) -> Packing:
    documents = np.arange(store.documents())
    return Packing(
        store, BestFitLayout(store.starts, documents, context, seed, store.trained), context
    )


def tightest(lengths: list[int], room: int) -> list[list[int]]:
    """The lengths of each sequence: every length, one by one, where the least room stays."""
    sequences: list[list[int]] = []
    for length in lengths:
        fitting = [s for s in sequences if sum(s) + length <= room]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            sequences.append([length])
    return sequences


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), room=st.integers(40, 90))
def test_a_length_goes_where_the_least_room_stays(lengths: list[int], room: int) -> None:
    lengths = sorted(lengths, reverse=True)
    place = best_fit(np.array(lengths), room).tolist()
    found = np.bincount(place, weights=lengths)
    # Where rooms are equal either will do: the sums are the same.
    assert sorted(found) == sorted(sum(s) for s in tightest(lengths, room))


@pytest.mark.parametrize("room", [8192, 131072])
def test_a_million_documents_leave_next_to_no_padding(room: int) -> None:
    """What the run file's page says of log-normal lengths."""
    drawn = np.random.default_rng(0).lognormal(6.5, 1.3, 1_000_000).astype(np.int64)
    lengths = np.sort(drawn.clip(2, room))[::-1]
    sequences = best_fit(lengths, room).max() + 1
    assert 0 <= 1 - lengths.sum() / (sequences * room) < 1e-4


@given(lengths=LENGTHS, context=st.integers(2, 35), seed=st.integers(0, 5), epoch=st.integers(0, 2))
def test_an_epoch_holds_every_document_whole_or_in_the_fewest_pieces(
    lengths: list[int], context: int, seed: int, epoch: int
) -> None:
    packing = whole(make_store(lengths), context, seed)
    count = packing.sequences_per_epoch()
    pieces, tokens = [], 0
    for index in range(epoch * count, (epoch + 1) * count):
        batch = packing.batch([index])
        ids, marks, names = batch.input_ids[0], batch.document_ids[0], batch.names[0]
        assert ids.shape == (context,)
        check_documents(ids[: batch.tokens], marks[: batch.tokens], names)
        assert (batch.labels[0, : batch.tokens] == ids[: batch.tokens]).all()
        assert (batch.labels[0, batch.tokens :] == UNTRAINED).all()
        assert (marks[batch.tokens :] >= len(names)).all()
        assert (np.diff(marks) >= 0).all()
        pieces += [ids[marks == n].tolist() for n in range(len(names))]
        tokens += batch.tokens
    expected = []
    for document, length in enumerate(lengths):
        own = [1000 * document + position for position in range(length)]
        expected += [own[i : i + context] for i in range(0, length, context)]
    # A piece of one token has nothing to be predicted from.
    assert sorted(pieces) == sorted(piece for piece in expected if len(piece) > 1)
    kept = packing.kept
    assert kept.tokens == tokens == sum(lengths) - kept.left_out
    assert kept.padding == count * context - tokens
    assert kept.divided == sum(length > context for length in lengths)


def test_epochs_differ_in_all_but_their_lengths() -> None:
    lengths = [9, 9, 9, 9, 6, 6, 6, 6, 5, 5, 5, 5]
    packing = whole(make_store(lengths), 20)
    count = packing.sequences_per_epoch()
    epochs = [
        [packing.batch([i]).input_ids[0].tolist() for i in range(e * count, (e + 1) * count)]
        for e in range(3)
    ]
    assert epochs[0] != epochs[1] != epochs[2]
    again = whole(make_store(lengths), 20).batch([2 * count + 1, 0]).input_ids.tolist()
    assert again == [epochs[2][1], epochs[0][0]]
    other = whole(make_store(lengths), 20, seed=1)
    assert [other.batch([i]).input_ids[0].tolist() for i in range(count)] != epochs[0]


def test_documents_of_a_sequence_come_in_any_order() -> None:
    """Not the longest first, as they were laid: long ones would never have anything before them."""
    packing = whole(make_store([9, 6, 5]), 20)
    orders = {packing.batch([epoch]).names[0] for epoch in range(40)}
    assert len(orders) == 6


def test_what_trains_nothing_is_left_out() -> None:
    """A document that is not trained, and one of which the first token alone is."""
    lengths = [4, 3, 5]
    trained = [*[False] * 4, True, False, False, False, True, True, False, True]
    packing = whole(make_store(lengths, trained), 8)
    batch = packing.once(0)
    assert packing.sequences_per_epoch() == 1
    assert batch.input_ids.tolist() == [[2000, 2001, 2002, 2003, 2004]]
    assert batch.labels.tolist() == [[UNTRAINED, 2001, 2002, UNTRAINED, 2004]]
    assert packing.kept.left_out == 7
    assert packing.kept.documents == 3


def test_padding_is_documents_no_longer_than_the_data_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no position is beyond those of documents, and attention over it is short."""
    packing = whole(make_store([5, 3]), 20)
    marks = packing.batch([0]).document_ids[0]
    assert np.bincount(marks).max() == 5
    monkeypatch.setattr("farspan.data.packing._PADDED", 2)
    marks = whole(make_store([5, 3]), 20).batch([0]).document_ids[0]
    assert np.bincount(marks)[2:].tolist() == [2] * 6


def test_a_sequence_alone_has_no_padding() -> None:
    assert whole(make_store([5, 3]), 20).once(0).input_ids.shape == (1, 8)
    packing = whole(make_store([5, 3, 7]), 9)
    shapes = [packing.once(i).input_ids.shape for i in range(packing.sequences_per_epoch())]
    assert shapes == [(1, 9), (1, 9)]
