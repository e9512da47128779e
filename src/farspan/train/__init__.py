"""Training: configuration, planning, optimizers, loggers and the loop. The package is callable,
like the command: `farspan.train("run.yaml")`."""

import sys
from types import ModuleType
from typing import Any

from farspan.lazy import load


class _CallablePackage(ModuleType):
    """Module that can also be called, so that `farspan.train` is both a package and a function,
    whichever is imported first; `farspan/__init__.pyi` shows type checkers the function."""

    def __call__(self, run: Any, **given: Any) -> Any:
        """Call `farspan.train.trainer.train`, which needs torch."""
        return load("farspan.train.trainer", "train")(run, **given)


sys.modules[__name__].__class__ = _CallablePackage
