"""The run folder: one owner, one run, and metrics that end where the weights stand."""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from farspan.durable import WriteFailed
from farspan.spec import UnsupportedError
from farspan.train.config import (
    Decay,
    DeviceAllocator,
    EvaluationConfig,
    OnNonfinite,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SparseConfig,
)
from farspan.train.run_folder import RunFolder, identity
from tests.train.tiny import tiny_run


def prepare(run: RunConfig) -> list[str]:
    with RunFolder(run) as folder:
        return folder.prepare()


def saved(run: RunConfig) -> RunConfig:
    """A folder with a checkpoint, as far as the folder knows."""
    prepare(run)
    (Path(run.folder) / "checkpoints" / "step-00000001").mkdir(exist_ok=True)
    return run


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with (
        RunFolder(run),
        pytest.raises(UnsupportedError, match="folder: another process is training in"),
        RunFolder(run),
    ):
        pass
    prepare(run)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        UnsupportedError, match=r"folder: cannot write in .*file/run: Not a directory"
    ):
        prepare(tiny_run(tmp_path, folder=str(tmp_path / "file" / "run")))


OF_FOLDERS = [".", "checkpoints", "checkpoints/step-00000003", "model"]
WRITTEN = [".lock", "config.yaml", "about.json", "metrics.jsonl", "step.json"]


@pytest.mark.parametrize("what", ["another kind", "dangling", "pipe"])
@pytest.mark.parametrize("name", [*OF_FOLDERS, *WRITTEN])
def test_what_is_in_the_way_is_refused_before_training(
    tmp_path: Path, name: str, what: str
) -> None:
    """And stays there. A file has the name of a folder, a folder that of a file; a pipe would be
    waited for."""
    run = tiny_run(tmp_path)
    path = Path(run.folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "dangling":
        path.symlink_to(tmp_path / "nothing")
    elif what == "pipe":
        os.mkfifo(path)
    elif name in WRITTEN:
        path.mkdir()
    else:
        path.write_text("mine")
    kind = "file" if name in WRITTEN else "folder"
    message = rf"{path} is in the way.*: expected a {kind} or nothing; move it away, then run"
    with pytest.raises(UnsupportedError, match=message):
        prepare(run)
    assert os.path.lexists(path)
    assert path.is_file() is (what == "another kind" and kind == "folder")


@pytest.mark.parametrize("name", ["model/my-notes.txt", "model/config.json"])
def test_a_folder_with_the_models_name_is_not_replaced(tmp_path: Path, name: str) -> None:
    run = tiny_run(tmp_path)
    path = Path(run.folder) / name
    path.parent.mkdir(parents=True)
    prepare(run)  # it is empty
    path.write_text("mine")
    message = rf"model is in the way: it has {path.name} but no farspan\.json of an earlier run"
    with pytest.raises(UnsupportedError, match=message):
        prepare(run)
    (path.parent / "farspan.json").write_text("{}")
    prepare(run)
    assert path.read_text() == "mine"


def test_only_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Whatever else begins as that does is the user's."""
    run = tiny_run(tmp_path)
    prepare(run)
    folder = Path(run.folder)
    mine = [".partial-notes", "checkpoints/.partial-mine", "checkpoints/.partial-step-1"]
    left = [
        *(".partial-config.yaml", ".partial-77-shortage.json", ".partial-old-model"),
        *("checkpoints/.partial-step-00000001", "checkpoints/.partial-0123456789abcdef"),
    ]
    for name in (*mine, *left):
        (folder / name).write_text("x")
    folders = [folder / ".partial-model", folder / "checkpoints/.partial-step-00000004"]
    for path in folders:
        path.mkdir()
        (path / "half").write_text("x")
    prepare(run)
    assert [name for name in mine if not (folder / name).exists()] == []
    assert [name for name in left if (folder / name).exists()] == []
    assert [path for path in folders if path.exists()] == []


def test_copies_of_checkpoints_are_no_run_to_protect(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    prepare(run)
    (Path(run.folder) / "checkpoints" / "step-00000001-good").mkdir()
    assert prepare(replace(run, seed=1)) == []


def test_a_changed_run_is_refused_by_its_keys(tmp_path: Path) -> None:
    run = saved(tiny_run(tmp_path))
    changed = replace(run, steps=9, optimizer=replace(run.optimizer, betas=(0.8, 0.9)))
    message = (
        r"holds another run: optimizer\.betas was \[0\.9, 0\.95\], is now \[0\.8, 0\.9\]; "
        r"steps was 5, is now 9 \(its learning rate falls over all its steps\); set these back"
    )
    with pytest.raises(UnsupportedError, match=message):
        prepare(changed)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["steps"] == 5


def test_steps_may_change_where_the_learning_rate_does_not_fall_over_them(tmp_path: Path) -> None:
    run = saved(tiny_run(tmp_path, optimizer=OptimizerConfig(decay=Decay.CONSTANT)))
    assert prepare(replace(run, steps=9)) == []
    assert identity(replace(run, steps=9)) == identity(run)
    cosine = replace(run, optimizer=OptimizerConfig())
    assert identity(replace(cosine, steps=9)) != identity(cosine)
    with pytest.raises(
        UnsupportedError, match=r"decay was 'constant', is now 'cosine'; steps was 9, is"
    ):
        prepare(cosine)


def test_what_decides_nothing_may_change(tmp_path: Path) -> None:
    run = saved(tiny_run(tmp_path))
    free = replace(
        run,
        data=replace(run.data, cache="elsewhere"),
        evaluation=EvaluationConfig(every=7),
        checkpoints=replace(run.checkpoints, keep=9),
        nonfinite=OnNonfinite.SKIP,
        allocator=DeviceAllocator.STITCH,
        host_memory="1GiB",
        margin="1GiB",
    )
    assert prepare(free) == []
    assert identity(free) == identity(run)
    assert identity(replace(run, seed=1)) != identity(run)


def test_sparse_attention_decides_what_a_run_computes(tmp_path: Path) -> None:
    run = saved(tiny_run(tmp_path, sparse=SparseConfig()))
    warned = replace(run, sparse=SparseConfig(warn_below=0.5))
    assert prepare(warned) == []
    assert identity(warned) == identity(run)
    others = [None, SparseConfig(page=64), SparseConfig(sparsity=0.5), SparseConfig(recent=0)]
    for sparse in others:
        assert identity(replace(run, sparse=sparse)) != identity(run)
        with pytest.raises(UnsupportedError, match=r"holds another run: sparse\."):
            prepare(replace(run, sparse=sparse))


def test_what_changes_roundings_may_change_and_is_told(tmp_path: Path) -> None:
    run = saved(tiny_run(tmp_path))
    other = replace(run, device="cpu", schedule=ScheduleConfig(strategy="oomb", groups=(1, 1)))
    assert prepare(other) == [
        "device was 'auto', is now 'cpu'",
        "schedule.groups was None, is now [1, 1]",
        "schedule.strategy was 'grouped', is now 'oomb'",
    ]
    assert prepare(other) == []


@pytest.mark.parametrize("content", [b"steps: \xff", b"[1, 2]", b"steps: ["])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    run = saved(tiny_run(tmp_path))
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises(
        UnsupportedError, match=r"config\.yaml: .*restore it, or give another folder"
    ):
        prepare(run)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == content


def test_without_a_checkpoint_there_is_nothing_to_protect(tmp_path: Path) -> None:
    prepare(tiny_run(tmp_path))
    assert prepare(tiny_run(tmp_path, optimizer=OptimizerConfig(lr=0.5))) == []
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["optimizer"]["lr"] == 0.5


def test_metrics_end_at_the_resumed_step(tmp_path: Path) -> None:
    with RunFolder(tiny_run(tmp_path)) as folder:
        assert folder.rewind(3) == []
        for step in range(6):
            folder.record({"step": step, "loss": step / 3})
        with folder.metrics.open("a") as file:
            file.write('{"step": ' + "[" * 100_000)
        kept = folder.rewind(3)
        assert kept == [{"step": s, "loss": s / 3} for s in range(4)]
        folder.record({"step": 4})
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        assert lines == [*kept, {"step": 4}]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"step": 2, "heldout_loss": "abc"}', "heldout_loss: expected a number, got 'abc'"),
        ('{"step": 2, "loss": NaN}', "loss: expected a finite number, got nan"),
        ('{"step": 2, "loss": null}', "loss: expected a number, got None"),
        ('{"step": true}', "step: expected a whole number from 0, got True"),
        ('{"step": 2', "cannot be read as JSON"),
        (f'{{"step": 2, "message": {"[" * 90}{"]" * 90}}}', "nested more than 64 levels deep"),
    ],
)
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: str, field: str) -> None:
    with RunFolder(tiny_run(tmp_path)) as folder:
        folder.metrics.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3, "loss": "nan"}}\n')
        with pytest.raises(
            UnsupportedError, match=rf"metrics\.jsonl is damaged: line 2: .*{field}"
        ):
            folder.rewind(3)


def test_a_line_of_which_a_part_was_written_is_an_error_and_dropped_later(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder(tiny_run(tmp_path)) as folder:
        folder.record({"step": 1})
        size = folder.metrics.stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
            with pytest.raises(WriteFailed, match=r"metrics\.jsonl: .*only part of the line"):
                folder.record({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert folder.metrics.stat().st_size == size + 5
        assert folder.rewind(9) == [{"step": 1}]
