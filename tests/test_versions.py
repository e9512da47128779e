"""The versions that the package asks for are those that the tests ran with."""

import json
import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions import PAGE, RECORD, ROOT, filled


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    found = (re.fullmatch(r"([\w-]+)==(\S+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


OLDEST, NEWEST = pins("constraints-oldest.txt"), pins("constraints.txt")


def test_lower_bounds_are_the_oldest_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["lora"]]
    bounds = {
        requirement.name.lower(): str(requirement.specifier)
        for requirement in map(Requirement, asked)
    }
    assert bounds == {name: f">={OLDEST[name]}" for name in bounds}


def test_nothing_oldest_is_newer_than_the_newest() -> None:
    assert all(Version(NEWEST[name]) >= Version(pin) for name, pin in OLDEST.items())


def test_the_page_has_the_table_of_what_the_tests_ran_with() -> None:
    records = json.loads(RECORD.read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    assert filled(text, records) == text
    assert {n: records["oldest"][n] for n in ("torch", "transformers", "peft")} == {
        n: OLDEST[n] for n in ("torch", "transformers", "peft")
    }
