"""What ranks hold, compute and send: as measured, as the script measures, and as the page says."""

import json
import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ranks.clock import BEGIN, END, MEET, RECEIVE, SEND, Event
from benchmarks.ranks.counting import (
    ATTENDED,
    BACKWARD,
    CALLS,
    FORWARD,
    PRODUCTS,
    TOUCHED,
    Counted,
)
from benchmarks.ranks.measure import ALONE, LAYOUTS
from benchmarks.ranks.page import PAGE, RESULTS, Found, tables
from benchmarks.ranks.replay import replay
from tests.ranks import PRELOADED, PROCESSES

RECORD = json.loads(RESULTS.read_text("utf-8"))
SHARING = ("ulysses", "shards", "ring", "tensor", "fsdp")  # the tokens of a sequence
WIDTH = 4  # bytes of an element


def test_who_meets_waits_for_the_last() -> None:
    def rank(first: float, second: float, tail: float) -> tuple[list[Event], float]:
        return [
            Event(MEET, (0, 1), first, 0.5, 1),
            Event(MEET, (0, 1), second, 0.0, 2),
        ], tail

    ranks = [rank(3.0, 1.0, 1.0), rank(1.0, 4.0, 0.0)]
    assert replay(ranks) == 3.0 + 0.5 + 4.0 + 1.0


def test_what_was_begun_may_arrive_before_it_is_waited_for() -> None:
    """The other begins at 2: who works until 3 need not wait, who works until 1 does."""

    def rank(*before: float) -> tuple[list[Event], float]:
        begin, end = before
        return [Event(BEGIN, (0, 1), begin, 0.0, 1), Event(END, (0, 1), end, 0.25, 1)], 0.0

    assert replay([rank(0.0, 3.0), rank(2.0, 0.0)]) == 3.25
    assert replay([rank(0.0, 1.0), rank(2.0, 0.0)]) == 2.25


def test_stages_work_side_by_side() -> None:
    """Three chunks of a second each through two stages."""
    first = [Event(SEND, (1,), 1.0, 0.0)] * 3
    second = [Event(RECEIVE, (0,), 0.0, 0.0), *[Event(RECEIVE, (0,), 1.0, 0.0)] * 2]
    assert replay([(first, 0.0), (second, 1.0)]) == 4.0


def test_ranks_that_wait_for_each_other_are_found() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        replay([([Event(RECEIVE, (1,), 0.0, 0.0)], 0.0), ([Event(RECEIVE, (0,), 0.0, 0.0)], 0.0)])


def test_work_is_counted() -> None:
    """A product, attention of 4 heads without a mask and its backward, and a view that is none."""
    x = torch.randn(1, 4, 8, 16)
    with Counted() as work:
        torch.mm(x.view(32, 16), x.view(16, 32))
    assert work.found[PRODUCTS] == 32 * 16 * 32
    assert work.found[TOUCHED] == WIDTH * (2 * 32 * 16 + 32 * 32)
    assert work.found[CALLS] == 1
    with Counted() as causal, Counted() as whole:
        found = FORWARD(x, x, x, 0.0, True)
    assert causal.found[ATTENDED] == whole.found[ATTENDED] == 4 * 8 * 8 * 16
    with Counted() as work:
        BACKWARD(x, x, x, x, *found, 0.0, False)
    assert work.found[ATTENDED] == 5 * 4 * 8 * 8 * 16


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


def check_work(record: dict[str, Any]) -> None:
    """No rank has a serial part that grows with N but as N does: attention and products fall as
    1 / P, and calls and bytes touched beyond an equal share are as many for a further token
    wherever it is. But for a ring, past whose ranks all keys go."""
    counted = record["counted"]
    found = Found(counted["rows"])
    assert len(found.lengths) >= 3, "how something grows takes three lengths"
    for name in SHARING:
        for ranks in found.ranks:
            for tokens in found.lengths:
                share = attended_share(found, name, ranks, tokens)
                diagonal = counted["chunk"] / tokens
                # The chunk's own keys, of which causal calls see half, are masked where cut.
                most = 1 + diagonal if name in ("shards", "ring") else 1
                assert 1 <= share <= most, (name, ranks, tokens)
                products = found.counted(name, ranks, tokens, PRODUCTS) * ranks
                assert products <= 1.01 * found.counted(ALONE, 1, tokens, PRODUCTS)
            calls = found.further(name, ranks, CALLS)
            assert max(calls) <= 1.01 * min(calls), (name, ranks)
            touched = found.further(name, ranks, TOUCHED)
            grows = max(touched) > 1.01 * min(touched)
            assert grows == (name == "ring"), (name, ranks, touched)


def attended_share(found: Found, name: str, ranks: int, tokens: int) -> float:
    """Attention of one rank, times the ranks, in parts of one process's."""
    whole = found.counted(ALONE, 1, tokens, ATTENDED)
    return found.counted(name, ranks, tokens, ATTENDED) * ranks / whole


def test_measured_work() -> None:
    check_work(RECORD)


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
    check_work(record)
    for row in record["rows"]:
        assert min(min(each.values()) for each in row["seconds"]) >= 0
        # Nobody is done before the busiest rank's own work is.
        busiest = max(each["attention"] + each["rest"] for each in row["seconds"])
        # Three numbers are compared, each rounded by at most 5e-5.
        assert row["replayed_seconds"] >= 0.999 * busiest - 1.5e-4
    assert tables(record).keys() == {"memory", "work", "seconds", "sent"}


def test_the_page_has_the_tables_of_the_record() -> None:
    page = PAGE.read_text("utf-8")
    for name, table in tables(RECORD).items():
        assert f"<!-- table {name} -->\n\n{table}\n\n<!-- end -->" in page, name
