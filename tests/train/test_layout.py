"""`parallel` of a run file."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from farspan.program.layout import Auto, Layout, Parallel, check_ranks, layout_of, replicas
from farspan.spec import LayerSpec, ModelSpec, UnsupportedError
from farspan.train.config import RunConfig, load_run
from farspan.train.run_folder import identity
from farspan.train.setup import resolve

MINIMAL: dict[str, Any] = {"model": {"path": "owner/name"}, "data": {}}


def a_file(tmp_path: Path, parallel: Any, **values: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"parallel": parallel} | values))
    return path


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"ulysses": 8, "fsdp": True}, 8, Layout(ulysses=8)),
        ({"ulysses": 2}, 8, Layout(ulysses=2, data=4)),
        ({}, 4, Layout(data=4)),
        ({"tensor": 2, "pipeline": 3, "fsdp": False}, 6, Layout(tensor=2, pipeline=3, fsdp=False)),
        ({"shards": 2, "ring": 2, "data": 2}, 8, Layout(shards=2, ring=2, data=2)),
        ({"ulysses": 1}, None, Layout()),
    ],
)
def test_a_product_of_axes(
    tmp_path: Path, given: dict[str, Any], ranks: int | None, expected: Layout
) -> None:
    parallel = check_ranks(load_run(a_file(tmp_path, given)).parallel, ranks)
    assert isinstance(parallel, Parallel)
    assert parallel.data == expected.data  # config.yaml says it
    assert layout_of(parallel, ranks or 1, no_model) == expected
    assert replicas(parallel) == expected.data


def no_model() -> ModelSpec:
    raise AssertionError("heads decide nothing here")


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "expected"),
    [(1, 2, Layout()), (8, 2, Layout(ulysses=2, shards=4)), (8, 8, Layout(ulysses=8))],
)
def test_auto_goes_by_the_heads(ranks: int, kv_heads: int, expected: Layout) -> None:
    layer = LayerSpec(query_heads=8, kv_heads=kv_heads, head_dim=4, value_dim=4)
    model = ModelSpec(name="m", hidden=32, vocab=9, layers=(layer,), element_bytes=4)
    assert layout_of(check_ranks(Auto.AUTO, ranks), ranks, lambda: model) == expected


@pytest.mark.parametrize(
    ("given", "ranks", "words"),
    [
        ({"ulysses": 8}, None, r"ulysses 8 needs 8 rank.* there is 1.*--nproc-per-node 8 "),
        (
            {"ulysses": 2, "shards": 3},
            8,
            "ulysses 2 x shards 3 needs 6 .* multiple, but there are 8",
        ),
        ({"ulysses": 2}, 3, r"but there are 3; start 2: torchrun --nproc-per-node 2 "),
        ({"ulysses": 2}, 7, r"start 6: torchrun --nproc-per-node 6 "),
        ({"ulysses": 4}, 3, r"start 4: torchrun --nproc-per-node 4 "),
        ({"ulysses": 2, "data": 2}, 8, "ulysses 2 x data 2 needs 4 .*; start 4: .* 4 "),
        (None, 4, "parallel: missing, but 4 ranks were started; .* auto .* data: 4"),
    ],
)
def test_another_number_of_ranks_is_refused(
    tmp_path: Path, given: Any, ranks: int | None, words: str
) -> None:
    run = load_run(a_file(tmp_path, given))
    with pytest.raises(UnsupportedError, match=words) as refused:
        resolve(run, ranks)
    if advised := re.search(r"--nproc-per-node (\d+)", str(refused.value)):
        resolve(run, int(advised[1]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ulises": 2}, r"parallel\.ulises: no such key \(did you mean ulysses\?\)"),
        ({"ring": 0}, r"parallel\.ring: expected a whole number of devices >= 1, got 0"),
        ({"data": 0}, r"parallel\.data: expected a whole number of devices >= 1, got 0"),
        ({"timeout": 0}, r"parallel\.timeout: expected seconds above 0"),
        ({"timeout": 1e15}, r"parallel\.timeout: expected seconds above 0 and up to 1e\+09, got"),
        ({"fsdp": "yes"}, r"parallel\.fsdp: expected true or false"),
        (
            "all",
            r"parallel: expected keys and values \(.*\) or one of auto or null, got text 'all'",
        ),
    ],
)
def test_what_no_layout_has_is_refused(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        load_run(a_file(tmp_path, given))


def test_alone_nothing_changes(tmp_path: Path) -> None:
    for given in (None, "auto"):
        run = load_run(a_file(tmp_path, given))
        assert resolve(run).parallel == run.parallel
        assert resolve(run, 1).parallel == run.parallel


def test_replicas_are_a_larger_batch(tmp_path: Path) -> None:
    """To a checkpoint a run is the same however its update is spread over ranks."""

    def named(parallel: Any, ranks: int, **values: Any) -> str:
        run = resolve(load_run(a_file(tmp_path, parallel, **values)), ranks)
        assert isinstance(run, RunConfig)
        return identity(run)

    assert named({"data": 2}, 2, batch=2) == named(None, 1, batch=4) == named("auto", 8, batch=4)
    assert named({"data": 2}, 2, batch=2) != named(None, 1, batch=2)
    assert resolve(load_run(a_file(tmp_path, {})), 4).tokens_per_step() == 4 * 8192
