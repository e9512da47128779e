"""YAML becomes dataclasses exactly, or the key and what it expected are named."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis.strategies import booleans, dictionaries, floats, integers, lists, none, text

from farspan.spec import UnsupportedError
from farspan.train.yaml_config import build, read_mapping, to_mapping, write_mapping

WRITTEN = none() | booleans() | integers() | floats(allow_nan=False) | text()


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    pair: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise UnsupportedError(f"rate: expected 0 or more, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool = False
    name: str | None = None
    color: Color = Color.RED
    groups: int | tuple[int, ...] = 1
    extra: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def load(text: str) -> Outer:
    return build(Outer, read_mapping(text, "run.yaml"))


def test_everything_given_arrives_with_its_type() -> None:
    made = load(
        "{count: 3, flag: true, name: x, color: blue, groups: [1, 2], extra: {a: {b: [1]}},"
        " inner: {rate: 2, pair: [1, 2.5]}}"
    )
    assert made == Outer(
        3, True, "x", Color.BLUE, (1, 2), {"a": {"b": [1]}}, Inner(2.0, (1.0, 2.5))
    )
    assert isinstance(made.inner.rate, float)
    assert build(Outer, to_mapping(made)) == made


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "+.001"])
def test_a_rate_may_be_written_as_people_write_it(text: str) -> None:
    assert load(f"{{count: 1, inner: {{rate: {text}}}}}").inner.rate == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count: 1\ncolour: red", r"^colour: no such key \(did you mean color\?\); the keys here"),
        ("count: 1\ninner: {rat: 1}", r"^inner\.rat: no such key .*rate.*; the keys here are rate"),
        ("count: x", r"^count: expected a whole number, got text 'x'$"),
        ("count: 1.0", r"^count: expected a whole number, got float 1\.0"),
        ("count: true", r"^count: expected a whole number, got bool True"),
        ("count: null", r"^count: expected a whole number, got null"),
        ("count: 1\nflag: 1", r"^flag: expected true or false, got int 1"),
        ("count: 1\nname: 5", r"^name: expected text or null, got int 5"),
        ("count: 1\nname: ''", r"^name: expected text, got '', which names nothing"),
        ('count: 1\nname: "a\\0b"', r"^name: expected text, got 'a\\x00b', which names nothing"),
        ("count: 10000000000000000000", r"^count: expected a whole number of at most 2\*\*63 - 1"),
        ("count: 010", r"^count: expected a whole number, got text '010'"),
        ("count: 1:30", r"^count: expected a whole number, got text '1:30'"),
        ("count: 0x_", r"^count: expected a whole number, got text '0x_'"),
        ("count: 1\ncolor: bleu", r"^color: expected one of red, blue, got .*did you mean blue"),
        ("count: 1\ngroups: [1, x]", r"^groups\[1\]: expected a whole number, got text 'x'"),
        ("count: 1\ngroups: x", r"^groups: expected a whole number or a list, each a whole"),
        ("count: 1\ninner: 5", r"^inner: expected keys and values \(rate, pair\), got int 5"),
        ("count: 1\ninner: {rate: fast}", r"^inner\.rate: expected a number, got text 'fast'"),
        ("count: 1\ninner: {rate: -1.5.2}", r"^inner\.rate: expected a number"),
        ("count: 1\ninner: {rate: true}", r"^inner\.rate: expected a number, got bool True"),
        ("count: 1\ninner: {pair: [1]}", r"^inner\.pair: expected a list of 2, each a number"),
        ("count: 1\ninner: {rate: -1}", r"^inner\.rate: expected 0 or more, got -1\.0"),
        ("count: 1\nextra: [1]", r"^extra: expected keys and values, got list"),
        ("flag: true", r"^count: missing; must be given$"),
        ("count: 1\nflag: true\ncount: 2", r"^run\.yaml: count: given twice, .* line 3"),
        ("inner: {rate: 1, rate: 2}", r"^run\.yaml: rate: given twice"),
        ("[1, 2]", r"^run\.yaml: expected keys and values, got list"),
        ("count: [1", r"^run\.yaml: not valid YAML: .*\n?.*line 1"),
        ("count: !!int x", r"^run\.yaml: not valid YAML: a value is not of its type"),
        ("count: !!bool x", r"^run\.yaml: not valid YAML: a value is not of its type"),
        ("count: 1\nextra: {a: !!binary aGk=}", r"^run\.yaml: not valid YAML: could not determine"),
        (f"count: {'9' * 5000}", r"^run\.yaml: not valid YAML: a value is not of its type"),
        (f"count: {'[' * 3000}{']' * 3000}", r"^run\.yaml: not valid YAML: nested too deep"),
        ("count: 1\nextra: &all {a: *all}", r"^run\.yaml: not valid YAML: .*recursive node"),
        ("count: !!python/object/apply:os.getcwd []", r"^run\.yaml: not valid YAML: could not"),
    ],
)
def test_whatever_is_not_expected_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load(text)


def test_a_merged_mapping_gives_what_is_not_given() -> None:
    text = "inner: &base {rate: 2, pair: [1, 2]}\nextra: {<<: *base, rate: 3}\ncount: 1"
    made = load(text)
    assert made.inner == Inner(2.0, (1.0, 2.0))
    assert made.extra == {"rate": 3, "pair": [1, 2]}
    with pytest.raises(
        UnsupportedError, match=r"^run\.yaml: rate: given twice, the second time on line 2"
    ):
        load("inner: &base {rate: 2}\nextra: {<<: *base, rate: 3, rate: 4}\ncount: 1")
    with pytest.raises(UnsupportedError, match=r"^run\.yaml: not valid YAML: .*expected a mapping"):
        load("extra: {<<: 5}\ncount: 1")


def test_numbers_are_those_of_today_and_dates_are_text() -> None:
    text = "a: [1e6, 1.5e-3, -2, 1_000, .5, .inf]\nb: [2024-11-05, 2024-99-99, 010, 0x10, e1]"
    assert read_mapping(text, "run.yaml") == {
        "a": [1e6, 1.5e-3, -2, 1000, 0.5, float("inf")],
        "b": ["2024-11-05", "2024-99-99", "010", "0x10", "e1"],
    }


@given(values=dictionaries(text(), WRITTEN | lists(WRITTEN)))
@example({"a": ["1e6", "010", "1:30", "2024-11-05", "on", "~", "", "1_0", ".5", 1e-5, 1e300]})
def test_what_is_written_reads_back_as_itself(values: dict[str, Any]) -> None:
    written = write_mapping(values)
    assert read_mapping(written, "run.yaml") == yaml.safe_load(written) == values


def test_a_written_file_reads_as_a_person_would_write_it() -> None:
    values = {"path": "données/é.jsonl", "schedule": {"groups": [6, 5, 5]}, "ignore": ["a", "b"]}
    text = write_mapping(values)
    assert text == "path: données/é.jsonl\nschedule:\n  groups: [6, 5, 5]\nignore:\n- a\n- b\n"
    assert read_mapping(text, "it") == values
