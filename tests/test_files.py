"""Files of the repository that no code reads say what is true of it."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from farspan.spec import VERSION

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALLOCATOR = tomllib.loads((ROOT / "packages/farspan-memory/pyproject.toml").read_text("utf-8"))[
    "project"
]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_one() -> None:
    assert PROJECT["version"] == VERSION
    assert ALLOCATOR["version"] == VERSION
    assert yaml.safe_load(read("CITATION.cff"))["version"] == VERSION
    assert re.search(rf"^#+ \[?{re.escape(VERSION)}\b", read("CHANGELOG.md"), re.MULTILINE)


def test_the_image_is_made_of_what_is_there() -> None:
    text = read("Dockerfile").replace("\\\n", " ")
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert {"cpu", "cuda"} <= set(stages) == {"cpu", "cuda", "wheel"}
    left_out = read(".dockerignore").split()
    for source in re.findall(r"^COPY (?:--from=(\w+) )?(\S+) \S+$", text, re.MULTILINE):
        assert source[0] in stages if source[0] else (ROOT / source[1]).exists()
        assert source[1] not in left_out
    extras = re.findall(r"farspan\[(.*?)\]", text)
    assert extras
    assert set(",".join(extras).split(",")) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("name", ["AGENTS.md", "CHANGELOG.md"])
def test_pages_name_what_is_there(name: str) -> None:
    text = read(name)
    for link, heading in re.findall(r"\]\((?!https:)([^)#]+)#?([^)]*)\)", text):
        target = ROOT / link
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {title.lower().replace(" ", "-") for title in titles}
    for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), target
    for path in re.findall(r"`((?:src|tests|benchmarks|docs|examples)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
