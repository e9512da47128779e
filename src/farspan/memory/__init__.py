"""Memory that does not fragment: traces, static plans, and a native allocator for PyTorch.

What needs torch is imported when it is first read; `__init__.pyi` tells type checkers its types.
"""

from farspan.lazy import attributes

_HOMES = {
    "begin_iteration": "farspan.engine.allocator",
    "followed": "farspan.engine.allocator",
    "forget": "farspan.engine.allocator",
    "install": "farspan.engine.allocator",
    "installed": "farspan.engine.allocator",
    "plan_iteration": "farspan.memory.replay",
    "read_trace": "farspan.memory.trace",
    "recorded": "farspan.engine.allocator",
    "statistics": "farspan.engine.allocator",
    "uninstall": "farspan.engine.allocator",
    "write_trace": "farspan.memory.trace",
}

__getattr__, __dir__ = attributes(__name__, _HOMES)
__all__ = [*_HOMES]
