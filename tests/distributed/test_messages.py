"""What ranks send each other is data: every kind comes back equal, and nothing else acts."""

import builtins
import json
import math
import os
import pickle
import random
import threading
import time
from contextlib import suppress
from enum import Flag
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from farspan.data.config import DataConfig, SourceKind
from farspan.distributed import messages
from farspan.distributed.context import run_on_rank0
from farspan.distributed.failure import CooperativeStop, FailureDetector, RankFailed
from farspan.distributed.run_context import launch_env, process_group
from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from farspan.train.config import ModelConfig, RunConfig
from tests.distributed.launched import launch
from tests.distributed.strangers import WAYS, speak
from tests.grids import examples
from tests.ranks import run_ranks


def _again(value: Any) -> Any:
    return messages.decode(messages.encode(value), 0)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([Path("a/b"), torch.bfloat16, torch.device("cpu"), SourceKind.JSONL]),
    st.just(torch.Size([2, 3])),
)
KEYS = st.one_of(st.integers(), st.text(), st.tuples(st.text(), st.integers()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(80))
@given(VALUES)
def test_every_kind_comes_back_as_it_was(value: Any) -> None:
    found = _again(value)
    assert found == value
    assert repr(found) == repr(value)  # 1 is not True, and a tuple no list


def test_own_classes_come_back_as_they_were() -> None:
    run = RunConfig(ModelConfig("tiny"), data=DataConfig(path="a.txt"))
    assert _again(run) == run
    assert math.isnan(_again(float("nan")))
    assert _again(np.int64(3)) == 3
    for tensor in (torch.randn(2, 3).bfloat16(), torch.tensor(3), torch.empty(0, 2)):
        found = _again({"t": tensor})["t"]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)
    array = np.arange(6).reshape(2, 3)
    assert np.array_equal(_again(array), array)
    for error in (UnsupportedError("a: no"), WriteFailed("b")):
        assert type(_again(error)) is type(error)
        assert str(_again(error)) == str(error)


class _Foreign(NamedTuple):
    name: str


class _Pair(tuple[int, ...]):
    """A tuple of another type."""


class _Row(list[int]):
    """A list of another type."""


class _Bits(Flag):
    A, B = 1, 2


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


FIELDS = np.dtype([("a", "i4"), ("b", "f8")])
NOT_SENT = [
    *(_Foreign("a"), Fraction(1, 2), print, object(), RunConfig),
    *(_Pair((1, 2)), _Row([1]), torch.max(torch.eye(2), 0), _Bits.A | _Bits.B, _endless()),
    *(np.zeros(2, FIELDS), np.zeros(2, FIELDS)[0], np.zeros(2, "V3"), np.array([None])),
    *(
        np.ma.masked_array([1, 2], [False, True]),
        np.longdouble(1),
        np.datetime64("2026-01-01", "ns"),
    ),
    *(torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()),
    np.complex64(1 + 2j),
]


@pytest.mark.parametrize("value", NOT_SENT, ids=lambda value: type(value).__name__)
def test_what_is_no_data_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match=r"ranks (can )?exchange|not a class of farspan"):
        messages.encode([value])


def test_views_of_tensors_come_back_as_what_they_show() -> None:
    for tensor in (
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.eye(3)[:, 1],
        nn.Parameter(torch.eye(2)),
    ):
        assert torch.equal(_again(tensor), tensor.detach())
    assert _again(np.bytes_(b"a")) == b"a"


class _Opens:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("opened",)


RUN = "farspan.train.config:RunConfig"
HOSTILE: list[Any] = [
    {"data": ["os:system", {}]},
    {"data": ["farspan.train.config:os.system", {}]},
    {"data": ["farspan.durable:write_bytes", {"path": "a", "data": "b"}]},
    {"data": [RUN, {"folder": "x"}]},
    {"data": [RUN, 3]},
    {"error": ["builtins:SystemExit", [1]]},
    {"error": ["farspan.distributed.failure:exit_process", []]},
    {"enum": ["farspan.data.config:SourceKind", "NONE_OF_THEM"]},
    {"enum": [RUN, "folder"]},
    {"dtype": "load"},
    {"device": "nowhere"},
    {"tensor": ["float32", [1 << 40], ""]},
    {"array": ["|O", [1], "AAAAAAAAAAA="]},
    {"map": [[[], 1]]},
    {"tuple": 3},
    {"bytes": "%%%%5"},
    {"two": 1, "kinds": 2},
    {"unheard": 1},
]


@pytest.mark.parametrize("message", HOSTILE, ids=lambda message: json.dumps(message)[:50])
def test_a_foreign_message_is_named_and_runs_nothing(message: Any) -> None:
    with pytest.raises(RankFailed, match=r"rank 3 sent .* not a message of farspan"):
        messages.decode(json.dumps(message).encode(), 3)


def test_a_pickle_and_deep_brackets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(_Opens()), b"", b"[" * 100_000, b'"\xff"', b'{"tuple": [1'):
        with pytest.raises(RankFailed, match="rank 1 sent"):
            messages.decode(data, 1)
    assert not list(tmp_path.iterdir())


@settings(max_examples=examples(200), deadline=None)
@given(VALUES, st.randoms(use_true_random=False))
def test_a_damaged_message_is_a_value_or_named(value: Any, draw: random.Random) -> None:
    data = bytearray(messages.encode(value))
    for _ in range(3):
        data[draw.randrange(len(data))] = draw.randrange(256)
    with suppress(RankFailed):  # and nothing else
        messages.decode(bytes(data), 2)


def test_ranks_exchange_messages() -> None:
    assert run_ranks(2, _exchange) == ["a b, refused: no", "a b, refused: no"]


def _exchange() -> str:
    rank = dist.get_rank()
    found = messages.gather("ab"[rank] * 1)
    assert messages.gather([rank] * (1 + 99 * rank)) == [[0], [1] * 100]

    def refuse() -> None:
        raise UnsupportedError("no")

    assert run_on_rank0(lambda: (Path("a"), {1: (2,)})) == (Path("a"), {1: (2,)})
    try:
        run_on_rank0(refuse)
    except UnsupportedError as error:
        return f"{' '.join(found)}, refused: {error}"
    return "not refused"


# -- the store -------------------------------------------------------------------------------------


def test_the_store_listens_where_master_addr_says(tmp_path: Path) -> None:
    assert [end.said for end in launch(tmp_path, 2, _listening)] == ["127.0.0.1 or ::1", "none"]


def _listening() -> str:
    place = launch_env()
    assert place is not None
    port = int(os.environ["MASTER_PORT"])
    with process_group(place, torch.device("cpu"), 20.0):
        mine = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
        dist.barrier()
    own = {c.laddr.ip for c in mine if c.laddr.port == port}
    return "none" if not own else "127.0.0.1 or ::1" if own <= {"127.0.0.1", "::1"} else str(own)


SECONDS, SEED = 1.0, 0


@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_at_the_store_changes_nothing_or_is_named(tmp_path: Path, way: str) -> None:
    """It sends bytes and half messages, or sets keys; benchmarks/kills.py lets it for a minute."""
    for end in launch(tmp_path, 2, _fuzzed, way):
        assert end.said in ("stepped", "named") or "farspan: rank" in end.errors, end


def _fuzzed(way: str) -> str:
    place = launch_env()
    assert place is not None
    until = time.monotonic() + SECONDS
    port = int(os.environ["MASTER_PORT"])
    if place.rank == 0:
        told = (port, until, SEED, (way,))
        threading.Thread(target=speak, args=told, daemon=True).start()
    try:
        with process_group(place, torch.device("cpu"), 20.0):
            stop = False
            while not stop:
                value = torch.ones(1)
                dist.all_reduce(value)
                assert value.item() == 2
                assert messages.gather(place.rank) == [0, 1]
                late = torch.tensor(float(time.monotonic() > until))
                dist.all_reduce(late)
                stop = late.item() > 0
    except RankFailed:
        return "named"
    return "stepped"


def test_an_announced_size_that_cannot_be_is_named() -> None:
    assert all("rank 1 announced a message of" in said for said in run_ranks(2, _announces))


def _announces() -> str:
    if dist.get_rank() == 1:
        size = torch.tensor([1 << 40])
        dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], size)
        return "rank 1 announced a message of its own"
    try:
        messages.gather("a")
    except RankFailed as error:
        return str(error)
    return "nothing"


FOREIGN = ["garbage", "[1]", '{"a": 1}', "[" * 5000, "[Infinity, 1]", '["a", "b"]', b"\xff"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_fault_in_the_store_is_named(text: str | bytes) -> None:
    """It ended the thread that watches the ranks, and the run went on unwatched."""
    store: Any = HashStore()
    detector = FailureDetector(store, 0, 1, None, None)
    store.set("fault", text)
    found = detector._fault(store)
    assert found is not None
    assert "holds a value not from farspan" in str(found.error())


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_words_of_other_ranks_are_passed_over(text: str | bytes) -> None:
    """They say what a rank was doing, and whether it raised the same error."""
    store: Any = HashStore()
    detector = FailureDetector(store, 0, 1, None, None)
    detector.ranks = 2
    for key in ("at/1", "word/0"):
        store.set(key, text)
    assert detector._behind() == {}
    assert not detector._is_said("words")


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_home_of_a_rank_is_named(text: str | bytes) -> None:
    store: Any = HashStore()
    store.set("where/1", text)
    with pytest.raises(RankFailed, match="holds a value not from farspan"):
        FailureDetector(store, 0, 2, None, None)


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "a b", b"\xff"])
def test_a_foreign_request_to_stop_is_named(text: str | bytes) -> None:
    """It ended the thread that watches the ranks."""
    store: Any = HashStore()
    store.set("halt", "")
    detector = FailureDetector(store, 0, 1, None, CooperativeStop(0, 2, 5.0))
    store.set("halt/1", text)
    with detector:
        for _ in range(200):
            time.sleep(0.01 * (detector._known is None))
    assert "holds a value not from farspan" in str(detector._known)


@pytest.mark.parametrize("error", ["MemoryError", "ValueError"])
def test_an_address_that_gloo_cannot_take_is_named(tmp_path: Path, error: str) -> None:
    """It reserved as many bytes as a stranger had announced, or made a string of them."""
    for end in launch(tmp_path, 1, _joins_a_stranger, error):
        assert end.said.startswith("rank 0: "), end


def _joins_a_stranger(error: str) -> str:
    place = launch_env()
    assert place is not None
    vars(dist)["init_process_group"] = partial(_exhausted, error)
    try:
        with process_group(place, torch.device("cpu"), 5.0):
            return "joined"
    except RankFailed as named:
        return str(named)


def _exhausted(error: str, *_: Any, **__: Any) -> None:
    raise getattr(builtins, error)("std::bad_alloc")
