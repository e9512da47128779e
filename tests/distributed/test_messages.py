"""What ranks send each other is data: every kind comes back equal, and nothing else acts."""

import json
import math
import os
import pickle
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from enum import Flag
from fractions import Fraction
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
from farspan.distributed.failure import FailureDetector, RankFailed
from farspan.distributed.run_context import launch_env, process_group
from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from farspan.train.config import ModelConfig, RunConfig
from tests.distributed.launched import launch
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


@settings(max_examples=200, deadline=None)
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
    with pytest.raises(TypeError, match=r"ranks exchange|no class of farspan"):
        messages.encode([value])


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2026-01-01"], "M8[ns]"),
        np.array(["a", "bcd"]),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        np.array([1 + 2j]),
    ],
)
def test_arrays_of_plain_types_come_back(array: np.ndarray) -> None:
    found = _again(array)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


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
    {"data": ["farspan.durable:shutil.rmtree", {}]},
    {"data": ["subprocess:Popen", {"args": "true"}]},
    {"data": [RUN, {"folder": "x"}]},
    {"data": [RUN, 3]},
    {"error": ["builtins:SystemExit", [1]]},
    {"error": ["farspan.distributed.failure:exit_process", []]},
    {"enum": ["farspan.data.config:SourceKind", "NONE_OF_THEM"]},
    {"enum": [RUN, "folder"]},
    {"dtype": "load"},
    {"dtype": "__builtins__"},
    {"device": "nowhere"},
    {"tensor": ["float32", [1 << 40], ""]},
    {"tensor": ["float32", [2], "AAAA"]},
    {"array": ["|O", [1], "AAAAAAAAAAA="]},
    {"map": [[[], 1]]},
    {"map": [[1]]},
    {"tuple": 3},
    {"bytes": "%%%%5"},
    {"two": 1, "kinds": 2},
    {},
    {"unheard": 1},
]


@pytest.mark.parametrize("message", HOSTILE, ids=lambda message: json.dumps(message)[:50])
def test_a_foreign_message_is_named_and_runs_nothing(message: Any) -> None:
    with pytest.raises(RankFailed, match=r"rank 3 sent .* no message of farspan's"):
        messages.decode(json.dumps(message).encode(), 3)


def test_a_pickle_and_deep_brackets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(_Opens()), b"", b"[" * 100_000, b'"\xff"', b'{"tuple": [1'):
        with pytest.raises(RankFailed, match="rank 1 sent"):
            messages.decode(data, 1)
    assert not list(tmp_path.iterdir())


@settings(max_examples=200, deadline=None)
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


def test_one_rank_that_sends_a_pickle_is_named() -> None:
    assert all("rank 1 sent" in said for said in run_ranks(2, _one_is_foreign))


def _one_is_foreign() -> str:
    if dist.get_rank() == 1:
        messages.encode = lambda value: pickle.dumps(_Opens())  # noqa: ARG005
    try:
        messages.gather("a")
    except RankFailed as error:
        assert not Path("opened").exists()
        return str(error)
    return "nothing"


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


SECONDS = 4.0


def test_garbage_at_the_store_changes_nothing(tmp_path: Path) -> None:
    """A stranger who reaches the port sends bytes, half messages and the keys of other ranks."""
    for end in launch(tmp_path, 2, _fuzzed):
        assert end.said in ("stepped", "named"), end


def _fuzzed() -> str:
    place = launch_env()
    assert place is not None
    until = time.monotonic() + SECONDS
    port = int(os.environ["MASTER_PORT"])
    if place.rank == 0:
        threading.Thread(target=_speak, args=(port, until), daemon=True).start()
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


def _speak(port: int, until: float) -> None:
    draw = random.Random(0)
    kinds = [
        lambda: draw.randbytes(draw.randrange(1, 200)),
        lambda: b"\x00" + struct.pack("<q", draw.choice([3, 1 << 62, -1])) + b"abc",  # a key
        lambda: struct.pack("<I", 0x3C85F7CE) + draw.randbytes(30),  # libuv's greeting, then noise
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: pickle.dumps(_Opens()),
    ]
    while time.monotonic() < until:
        try:
            with socket.create_connection(("localhost", port), timeout=0.5) as own:
                own.sendall(draw.choice(kinds)())
                time.sleep(0.005)
        except OSError:
            time.sleep(0.01)


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


@pytest.mark.parametrize("text", ["garbage", "[1]", '{"a": 1}', "[" * 5000])
def test_a_foreign_fault_in_the_store_is_named(text: str) -> None:
    """It ended the thread that watches the ranks, and the run went on unwatched."""
    store = HashStore()
    detector = FailureDetector(store, 0, 1, None, None)
    store.set("fault", text)
    found = detector._fault(store)
    assert found is not None
    assert "holds what farspan did not write" in str(found.error())
