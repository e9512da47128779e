"""`margin`: what a run's planner leaves of a GPU and of main memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farspan.distributed.run_context import DistributedContext
from farspan.planner.machines import machine
from farspan.planner.request import SHARE, Margin
from farspan.spec import UnsupportedError
from farspan.train.config import RunConfig, StatesPlace, load_run
from farspan.train.context import inspect_model
from farspan.train.planning import question_of
from farspan.train.run_folder import identity
from tests.cli.test_plan_run import RUN, planned, write
from tests.train.tiny import MODEL, load_tiny, tiny_run

GIB = 2**30


def asked(run: RunConfig, unified: bool = False) -> Margin:
    """What the run's question says."""
    model = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
    looked = inspect_model(model, "float32", torch.device("cpu"))
    here = replace(machine("h100"), unified=unified)
    world = DistributedContext(torch.device("cpu"))
    return question_of(run, looked, here, StatesPlace.DEVICE, world).margin


def test_the_run_asks_for_it(tmp_path: Path) -> None:
    made = machine("h100")
    assert asked(tiny_run(tmp_path)) == Margin(int(SHARE * made.device_bytes) - made.reserve)
    assert asked(tiny_run(tmp_path, margin="2GiB")) == Margin(2 * GIB, 2 * GIB)
    assert asked(tiny_run(tmp_path, margin=0)) == Margin()
    assert asked(tiny_run(tmp_path), unified=True) == Margin()
    assert asked(tiny_run(tmp_path, margin="2GiB"), unified=True) == Margin(0, 2 * GIB)


def test_what_is_no_size_is_refused_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: text, path: t}\nmargin: much\n")
    with pytest.raises(UnsupportedError, match=r"run\.yaml: margin: expected bytes such as 3GiB"):
        load_run(path)
    with pytest.raises(UnsupportedError, match=r"^margin: expected bytes such as 3GiB"):
        tiny_run(tmp_path, margin="lots")


def test_it_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    assert identity(tiny_run(tmp_path)) == identity(tiny_run(tmp_path, margin="1GiB"))


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", **RUN, margin="1GiB")
    assert planned(file)["margin"]["device"] == GIB
    assert planned(file, "--margin", "10%")["margin"]["device"] > 12 * GIB
    assert planned(file, "--margin", "0")["margin"] == {"device": 0, "host": 0}


def test_its_older_name_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", **RUN, headroom="1GiB")
    assert load_run(file).margin == "1GiB"
    with pytest.raises(UnsupportedError, match=r"headroom: the older name of margin.*keep margin"):
        load_run(write(tmp_path / "both.yaml", **RUN, headroom="1GiB", margin="2GiB"))
