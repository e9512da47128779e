"""Members of an enum for one test: what a newcomer adds by one row."""

from enum import StrEnum
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=StrEnum)


def add_member(patch: pytest.MonkeyPatch, kind: type[E], name: str, *row: Any) -> E:
    """Add a member to an enum that has a row of properties for each, and return it."""
    member = kind.__new_member__(kind, name, *row)  # type: ignore[attr-defined]
    member._name_ = name.upper()
    member.__objclass__ = kind
    patch.setitem(kind._member_map_, name.upper(), member)
    patch.setitem(kind._value2member_map_, name, member)
    patch.setattr(kind, "_member_names_", [*kind._member_names_, name.upper()])
    return member
