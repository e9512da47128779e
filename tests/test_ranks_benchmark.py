"""What ranks hold and send: as measured, and as the script measures."""

import json
import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks.measure import ALONE, LAYOUTS, Found
from benchmarks.tables import load
from tests.ranks import PRELOADED, PROCESSES

RECORD = load("ranks")
SHARING = ("ulysses", "shards", "ring", "tensor", "fsdp")  # the tokens of a sequence
WIDTH = 4  # bytes of an element


def expected_bytes(record: dict[str, Any], layout: str, ranks: int, chunk: int) -> tuple[int, int]:
    """Of a forward and a backward cell of whole chunks on one rank."""
    model, tokens = record["model"], record["chunk"]
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    query = heads * model["head_dim"]
    kv = 2 * model["num_key_value_heads"] * model["head_dim"]
    own, others = tokens // ranks, tokens - tokens // ranks
    ulysses = others * (2 * query + kv) // ranks
    prefix = (chunk + 1) * others * kv  # rows of all ranks but one
    formulas = {
        "ulysses": (ulysses, ulysses),
        "fsdp": (ulysses, ulysses),
        "shards": (others * (2 * query + heads), others * (4 * query + heads)),
        "ring": (prefix, 2 * prefix),
        "tensor": (4 * others * hidden, 4 * others * hidden),
    }
    assert own * ranks == tokens
    forward, backward = formulas[layout]
    return WIDTH * forward, WIDTH * backward


def check_bytes(record: dict[str, Any]) -> None:
    """What is sent is what the formulas say and what the plan says; the ring's alone grows."""
    for row in (row for row in record["rows"] if row["layout"] != ALONE):
        for number, sent in enumerate(row["sent"]):
            assert sent.get("as_planned", row["layout"] == "tensor"), row["layout"]
            cells = [*zip(sent["forward"], sent["backward"], strict=False)]
            if row["layout"] == "pipeline":
                check_stage(record, row, number)
                continue
            wanted = [
                expected_bytes(record, row["layout"], row["ranks"], chunk)
                for chunk in range(row["tokens"] // record["chunk"])
            ]
            assert cells == wanted, (row["layout"], row["ranks"])


def check_stage(record: dict[str, Any], row: dict[str, Any], number: int) -> None:
    """Each token goes up once and down once, but from the last stage and the first. Chunks of a
    pipeline are of the same work, not of the same length."""
    sent = row["sent"][number]
    whole = row["tokens"] * record["model"]["hidden_size"] * WIDTH
    assert sum(sent["forward"]) == (whole if number < row["ranks"] - 1 else 0)
    assert sum(sent["backward"]) == (whole if number else 0)


def check_memory(record: dict[str, Any]) -> None:
    """Arenas are as planned; who shares a sequence holds 1 / P of one process's."""
    found = Found(record["rows"])
    for row in record["rows"]:
        for memory, planned in zip(row["memory"], row["planned"], strict=True):
            assert {tier: memory[tier] for tier in planned} == planned
    for tokens in found.lengths:
        whole = found.arenas(ALONE, 1, tokens)
        states = found.most(ALONE, 1, tokens, "weights", "gradients")
        for ranks in found.ranks:
            for name in SHARING:
                assert found.arenas(name, ranks, tokens) * ranks == whole, (name, ranks)
            # In parts of rows, padded to equal ones.
            cut = found.most("fsdp", ranks, tokens, "weights", "gradients")
            assert states <= cut * ranks <= 1.01 * states


def test_measured_bytes() -> None:
    check_bytes(RECORD)


def test_measured_memory() -> None:
    check_memory(RECORD)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_script_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are forked from where those of other tests are."""
    out = tmp_path / "ranks.json"
    monkeypatch.setattr(sys, "argv", ["", "--tiny", "--out", str(out)])
    ours = lambda _: PROCESSES.set_forkserver_preload(PRELOADED)  # noqa: E731
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", ours)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    runpy.run_module("benchmarks.ranks", run_name="__main__")
    record = json.loads(out.read_text("utf-8"))
    assert {row["layout"] for row in record["rows"]} == {ALONE, *LAYOUTS}
    check_bytes(record)
    check_memory(record)
