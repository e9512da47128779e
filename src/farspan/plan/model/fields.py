"""Read a model's configuration field by field, refusing what no model could have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farspan.spec import UnsupportedError


@dataclass(frozen=True, slots=True)
class Fields:
    """A configuration's fields. Names in `aliases` may also go by the family's own name.

    Every method raises UnsupportedError, naming the field, for a value that is missing or makes no
    sense.
    """

    values: Mapping[str, Any]
    aliases: Mapping[str, str]

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands. Where both names are given the common one counts, as in
        transformers."""
        own = self.aliases.get(name, name)
        return self.values.get(name, self.values.get(own, default))

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the field must be there."""
        return self.number(name, default, least=1)

    def number(self, name: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.get(name, default)
        if value is None:
            raise UnsupportedError(
                f"{self._called(name)}: missing from the model's configuration; expected a whole "
                f"number of at least {least}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UnsupportedError(
                f"{self._called(name)}: expected a whole number of at least {least}, got {value!r}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null counts as the default."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnsupportedError(f"{self._called(name)}: expected true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """A name; null counts as the default."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise UnsupportedError(f"{self._called(name)}: expected a name, got {value!r}")
        return value

    def positive(self, name: str, default: float) -> float | None:
        """A number above zero, or None where it is null."""
        value = self.get(name, default)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UnsupportedError(
                f"{self._called(name)}: expected a number above 0 or null, got {value!r}"
            )
        return float(value)

    def _called(self, name: str) -> str:
        """The name the user will find in the file."""
        return name if name in self.values else self.aliases.get(name, name)
