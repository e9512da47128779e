"""Available memory is the least of what the machine and its control groups leave."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from farspan.host import GIB, available_host_bytes, describe_host, refuse_beyond
from farspan.spec import UnsupportedError


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * GIB))


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def belong(root: Path, line: str) -> None:
    write(root / "proc/self", cgroup=line)


def test_without_groups_it_is_the_machine_s(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) == 8 * GIB


def test_version_two_and_the_groups_around(tmp_path: Path) -> None:
    belong(tmp_path, "0::/outer/inner")
    group = tmp_path / "sys/fs/cgroup/outer"
    write(group / "inner", memory__max="max", memory__current=GIB)
    write(group, memory__max=3 * GIB, memory__current=GIB)
    assert available_host_bytes(tmp_path) == 2 * GIB
    write(group, memory__stat=f"anon 5\ninactive_file {GIB // 2}")
    assert available_host_bytes(tmp_path) == 2 * GIB + GIB // 2


def test_version_one(tmp_path: Path) -> None:
    belong(tmp_path, "4:cpu,memory:/job\n2:pids:/job")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    write(group, memory__limit_in_bytes=GIB, memory__usage_in_bytes=GIB // 4)
    assert available_host_bytes(tmp_path) == GIB - GIB // 4


def test_no_limit_of_version_one_is_a_large_number(tmp_path: Path) -> None:
    belong(tmp_path, "4:memory:/")
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    assert available_host_bytes(tmp_path) == 8 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    belong(tmp_path, "0::/job")
    write(tmp_path / "sys/fs/cgroup/job", memory__max=GIB, memory__current=2 * GIB)
    assert available_host_bytes(tmp_path) == 0


def test_the_refusal_has_the_numbers_and_what_to_change() -> None:
    refuse_beyond(GIB, "a step", "shorten it", available=GIB)
    with pytest.raises(
        UnsupportedError, match=r"a step needs 2\.00 GiB, but only 1\.00 GiB .*; shorten it"
    ):
        refuse_beyond(2 * GIB, "a step", "shorten it", available=GIB)
    with pytest.raises(
        UnsupportedError, match=r"a step needs 20\.00 MiB, but only 1\.50 KiB are available"
    ):
        refuse_beyond(20 * 2**20, "a step", "shorten it", available=1536)


def test_what_a_host_shows_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(total=9, available=8, free=2, cached=5)
    monkeypatch.setattr("psutil.virtual_memory", lambda: shown)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(free=1))
    expected = {"total": 9, "available": 8, "free": 2, "cached": 5, "swap_free": 1}
    assert describe_host(tmp_path) == expected
    belong(tmp_path, "0::/outer/inner")
    group = tmp_path / "sys/fs/cgroup/outer"
    write(group, memory__max=7, memory__current=3)
    write(group / "inner", memory__max="max", memory__current=3)
    assert describe_host(tmp_path) == expected | {"group": 4}
