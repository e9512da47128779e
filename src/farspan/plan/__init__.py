"""Planning, without torch: what a step takes on a machine, before it runs.

This package is also the public function: `farspan.plan(config, context=..., machine=...)` is
`farspan.planner.api.plan`. Importing any module of the package binds `farspan.plan` to the package,
so a function of that name would be there or not by the order of imports; a package that can be
called is both, in every order.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any

from farspan.lazy import attributes, load


class _Planning(ModuleType):
    @property
    def __signature__(self) -> Signature:
        return signature(load("farspan.planner.api", "plan"))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return load("farspan.planner.api", "plan")(*arguments, **options)


sys.modules[__name__].__class__ = _Planning

# For `help(farspan.plan)`, which shows a package's functions and not how it is called.
__getattr__, __dir__ = attributes(__name__, {"plan": "farspan.planner.api"})
__all__ = ["plan"]
