from farspan.engine.allocator import (
    begin_iteration,
    followed,
    forget,
    install,
    installed,
    recorded,
    statistics,
    uninstall,
)
from farspan.memory.replay import plan_iteration
from farspan.memory.trace import read_trace, write_trace

__all__ = [
    "begin_iteration",
    "followed",
    "forget",
    "install",
    "installed",
    "plan_iteration",
    "read_trace",
    "recorded",
    "statistics",
    "uninstall",
    "write_trace",
]
