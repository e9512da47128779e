from farspan_memory.allocator import (
    begin_iteration,
    followed,
    forget,
    install,
    installed,
    record_script,
    recorded,
    statistics,
    uninstall,
)
from farspan_memory.errors import UnsupportedError
from farspan_memory.replay import plan_iteration
from farspan_memory.trace import Trace, from_events, read_trace, write_trace

__all__ = [
    "Trace",
    "UnsupportedError",
    "begin_iteration",
    "followed",
    "forget",
    "from_events",
    "install",
    "installed",
    "plan_iteration",
    "read_trace",
    "record_script",
    "recorded",
    "statistics",
    "uninstall",
    "write_trace",
]
