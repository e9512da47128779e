"""A stranger who reaches the port of a run's store: it sends bytes, half messages, wrong ranks, and
well-formed messages that set the run's own keys to values of its own."""

import json
import pickle
import random
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)  # a client's greeting
WAYS = ("noise", "keys")
# Keys of a run that it sets when ranks fail, stop or leave.
LATER = ("fault", "faults", "halt", "halt/0", "halt/1", "word/0", "left/0", "left/1")
QUERIES = 22  # kinds of the store's messages, and some more


def speak(port: int, until: float, seed: int, ways: Sequence[str] = WAYS) -> None:
    """Talk to the port until that moment of `time.monotonic`: by "noise", which no client would
    send, or by "keys", as a client that writes what it likes."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        try:
            if draw.choice(ways) == "noise":
                _noise(port, draw)
            else:
                _write(port, draw, until)
        except (OSError, RuntimeError):  # it is not there yet, or no more
            time.sleep(0.01)


def _noise(port: int, draw: random.Random) -> None:
    text = _text(draw.choice(["attempt-0/failures/1/fault", "init/", "x" * 9000]))
    huge = struct.pack("<Q", draw.choice([1 << 62, (1 << 64) - 1, 1 << 30, 9]))
    kind = bytes([draw.randrange(QUERIES)])
    said = draw.choice(
        [
            draw.randbytes(draw.randrange(1, 200)),
            VALIDATE[: draw.randrange(1, 5)],
            VALIDATE + draw.randbytes(draw.randrange(1, 60)),
            VALIDATE + kind + text + text,
            VALIDATE + kind + text[: draw.randrange(len(text))],
            VALIDATE + kind + huge + b"abc",
            VALIDATE + kind + huge + text,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
            pickle.dumps(print),
        ]
    )
    with socket.create_connection(("localhost", port), timeout=0.5) as own:
        own.sendall(said)
        own.settimeout(0.02)
        with suppress(TimeoutError):
            own.recv(100)


def _text(key: str) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode()


def _write(port: int, draw: random.Random, until: float) -> None:
    socket.create_connection(("localhost", port), timeout=0.5).close()  # the client waits longer
    store = TCPStore("localhost", port, None, False, timedelta(seconds=0.5), wait_for_workers=False)
    while time.monotonic() < until:
        keys = store.list_keys() or ["init/"]
        stems = {key.rpartition("where/")[0] for key in keys if "where/" in key}
        unset = [stem + name for stem in stems for name in LATER]
        key = draw.choice([*keys, *map(_of_another_rank, keys), *unset])
        with suppress(RuntimeError):  # the store may refuse it
            _change(store, key, draw)
        time.sleep(draw.choice([0.0, 0.01, 0.1]))


def _of_another_rank(key: str) -> str:
    """The key as a rank that the run has not would write it."""
    stem, _, rank = key.rpartition("/")
    return f"{stem}/{int(rank) + 7}" if rank.isdigit() else f"{stem}/7"


def _change(store: Any, key: str, draw: random.Random) -> None:
    value = draw.choice(
        [
            "",
            "garbage",
            "-1",
            "3 0",
            "99999999999999999999",
            json.dumps([99, "a rank that the run has not"]),
            json.dumps({"a": 1}),
            json.dumps(["there", 1, "here"]),
            "[" * 5000,
            b"\xff\x00" * 64,
            draw.randbytes(300),
        ]
    )
    how = draw.randrange(6)
    if how == 0:
        store.delete_key(key)
    elif how == 1:
        store.add(key, draw.choice([1, -5, 1 << 40]))
    elif how == 2:
        store.append(key, value)
    else:
        store.set(key, value)
