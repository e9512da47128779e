from farspan.engine.allocator import (
    begin_iteration,
    install,
    installed,
    learned,
    recorded,
    statistics,
    uninstall,
)

__all__ = [
    "begin_iteration",
    "install",
    "installed",
    "learned",
    "recorded",
    "statistics",
    "uninstall",
]
