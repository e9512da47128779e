"""Ranks of one machine, which share its main memory."""

import hashlib
import os
import platform
from contextlib import suppress
from pathlib import Path

from farspan.memory.host import available_host_bytes, refuse_beyond
from farspan.parallel.ranks import Ranks


def machine_name() -> str:
    """What ranks that see each other's processes have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def refuse_beyond_together(
    ranks: Ranks | None, needed: int, what: str, advice: str, allowed: int | None = None
) -> None:
    """Raises TooLarge, on all ranks, when those of one machine are about to take more of its main
    memory than it has, or than each is `allowed` together. All ranks call it with what each needs,
    and all or none with a limit; None of `ranks`: this process is alone. One that is apart takes
    what they have looked at together."""
    if ranks is not None and ranks.is_apart:
        return
    if ranks is None or ranks.layout.devices() == 1:
        if needed > 0:
            refuse_beyond(needed, what, advice, allowed=allowed)
        return
    machine = hashlib.blake2b(machine_name().encode(), digest_size=7).digest()
    mine = [int.from_bytes(machine), needed, available_host_bytes(), allowed or 0]
    found = ranks.figures(mine)
    for name in dict.fromkeys(row[0] for row in found):
        near = [row for row in found if row[0] == name]
        said = f"{what}, on {len(near)} ranks of a machine," if len(near) > 1 else what
        # All have looked before any goes on to take some.
        room = None if allowed is None else sum(row[3] for row in near)
        least = min(row[2] for row in near)
        refuse_beyond(sum(row[1] for row in near), said, advice, least, room)
