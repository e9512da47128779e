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

__all__ = [
    "begin_iteration",
    "followed",
    "forget",
    "install",
    "installed",
    "recorded",
    "statistics",
    "uninstall",
]
