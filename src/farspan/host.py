"""Main memory that a process may still take: the machine's free memory and the limits of its
control groups."""

from pathlib import Path

import psutil

from farspan.spec import UnsupportedError

MIB, GIB = 2**20, 2**30
# More than any machine has; an "unlimited" control group of version 1 has a limit near 2**63.
UNLIMITED = 2**60


class TooLarge(UnsupportedError):
    """A request for more main memory than is available."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes of main memory this process can still take before the kernel kills it,
    from the files of /proc and /sys under `root`."""
    free = int(psutil.virtual_memory().available)
    return min([free, *_group_headroom(root)])


def describe_host(root: Path = Path("/")) -> dict[str, int]:
    """Return the sizes of main memory in the kernel's and the control groups' files. `total` may be
    less than the machine has: some virtual machines show memory only once it has been used."""
    sizes, swap = psutil.virtual_memory(), psutil.swap_memory()
    shown = {name: int(getattr(sizes, name)) for name in ("total", "available", "free")}
    cached = int(getattr(sizes, "cached", 0))  # on some systems only
    facts = {**shown, "cached": cached, "swap_free": int(swap.free)}
    if headroom := _group_headroom(root):
        facts["group"] = min(headroom)
    return facts


def refuse_beyond(
    needed: int,
    what: str,
    advice: str,
    available: int | None = None,
    allowed: int | None = None,
) -> None:
    """Raise TooLarge if `needed` bytes of main memory exceed the `available` bytes (None: measured
    now), or the `allowed` bytes, which the user's limit `host_memory` leaves (None: no limit)."""
    if allowed is not None and needed > allowed:
        raise TooLarge(
            f"host memory: {what} needs {_size(needed)}, but host_memory leaves only "
            f"{_size(max(0, allowed))}; raise host_memory, or {advice}"
        )
    limit = available_host_bytes() if available is None else available
    if needed > limit:
        raise TooLarge(
            f"host memory: {what} needs {_size(needed)}, but only {_size(limit)} are available on "
            f"this machine (or in its control group); {advice}"
        )


def _size(number: int) -> str:
    """Return bytes as text, in the largest unit of which there is at least one. `formatting` cannot
    be used, because its layer is higher."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number} bytes"


def _group_headroom(root: Path) -> list[int]:
    """Return limit - usage (bytes) of each control group of this process, innermost first."""
    headroom = []
    for folder, limit_name, usage_name in _group_folders(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < UNLIMITED:
            headroom.append(max(0, limit - usage + _reclaimable(folder)))
    return headroom


def _group_folders(root: Path) -> list[tuple[Path, str, str]]:
    base = root / "sys/fs/cgroup"
    folders = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = base, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = top / path.lstrip("/")
        # Limits of the outer groups hold as well. In a container the path may not be mounted.
        chain = [inner, *[parent for parent in inner.parents if parent.is_relative_to(top)]]
        folders += [(folder, *names) for folder in chain if folder.is_dir()]
    return folders


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" means no limit
        return None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of a control group's file cache, which the kernel frees before it kills."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))
