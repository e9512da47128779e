from farspan.engine.allocator import (
    begin_iteration,
    forget,
    install,
    installed,
    learned,
    recorded,
    statistics,
    uninstall,
)

__all__ = [
    "begin_iteration",
    "forget",
    "install",
    "installed",
    "learned",
    "recorded",
    "statistics",
    "uninstall",
]
