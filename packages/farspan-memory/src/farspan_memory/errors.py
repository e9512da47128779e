"""What the package raises where a request cannot be met."""


class UnsupportedError(ValueError):
    """The request cannot be met; the message names the field, what was expected and what to
    change."""
