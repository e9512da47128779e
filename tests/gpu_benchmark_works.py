"""What children do in tests of a nursery."""

import os
import subprocess
import time
from typing import Any

from benchmarks.children import add_row


def succeeds(settings: dict[str, Any]) -> None:
    add_row(settings, {"value": settings["value"]})


def fails(settings: dict[str, Any]) -> None:
    add_row(settings, {"before": 1})
    raise ValueError("on purpose")


def dies(settings: dict[str, Any]) -> None:
    add_row(settings, {"before": 1})
    os.abort()


def sleeps(settings: dict[str, Any]) -> None:
    add_row(settings, {"before": 1})
    time.sleep(600)


def tells(settings: dict[str, Any]) -> None:
    add_row(settings, {name: os.environ.get(name) for name in settings["names"]})


def starts_another(settings: dict[str, Any]) -> None:
    process = subprocess.Popen(["sleep", "600"])
    add_row(settings, {"pid": process.pid})
