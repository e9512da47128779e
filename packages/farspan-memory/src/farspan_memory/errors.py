"""Errors of the package."""


class UnsupportedError(ValueError):
    """The request cannot be met; the message names the field, the expected value and the remedy."""
