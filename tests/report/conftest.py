"""What tests of pages share."""

from tests.report.browser import browser

__all__ = ["browser"]
