"""Children of a benchmark, forked from where ranks are: that process has imported what takes
seconds, once for all tests of a worker."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.children import Nursery, Outcome
from tests import ranks


class Forked(Nursery):
    """In the place of one that starts a process of its own, and so imports everything again."""

    def __init__(self, *_: str) -> None:
        self._context = ranks.PROCESSES


def run_child(
    module: str, settings: Mapping[str, Any], seconds: float, configuration: str = ""
) -> Outcome:
    """As `benchmarks.children.run_child`, on a CPU: `configuration` is for CUDA's allocator."""
    assert not configuration or settings["device"] == "cpu"
    return Forked().run(partial(_as_program, module), settings, seconds)


def _as_program(module: str, settings: dict[str, Any]) -> None:
    given = Path(settings["rows"]).with_name("settings.json")
    given.write_text(json.dumps(settings), encoding="utf-8")
    sys.argv = [module, str(given)]
    import_module(module).main()
