"""The arenas of a step, which all of its ranks take or none."""

from collections.abc import Mapping

from farspan.memory.host import TooLarge
from farspan.parallel.ranks import Ranks
from farspan.spec import Refused, Tier
from farspan.transfer.arena import Arena


class DeviceTooSmall(Refused):
    """The GPU cannot hold what is asked for."""


def reserve_together(
    ranks: Ranks | None, arenas: Mapping[Tier, Arena], sizes: Mapping[Tier, int], advice: str
) -> None:
    """Holds so many bytes of each tier. A machine may refuse one rank what forecasts allow, such as
    pages to lock: then TooLarge or DeviceTooSmall is raised on all, which have computed nothing
    yet. A rank by itself raises what it was told."""
    alone = ranks is None or ranks.is_apart or ranks.layout.devices() == 1
    tiers, refused, size, cause = list(Tier), -1, 0, None
    for number, tier in enumerate(tiers):
        try:
            arenas[tier].reserve(sizes[tier])
        except (RuntimeError, MemoryError) as error:
            if alone:
                raise
            refused, size, cause = number, sizes[tier], error
            break
    if ranks is None or alone:
        return
    if cause is not None:
        for arena in arenas.values():
            arena.release()  # what ranks say to each other takes some
    for rank, (number, asked) in enumerate(ranks.figures([refused, size])):
        if number >= 0:
            on_host = tiers[number] is Tier.HOST or ranks.device.type == "cpu"
            kind, place = (TooLarge, "host") if on_host else (DeviceTooSmall, "device")
            raise kind(
                f"{place} memory of rank {rank}: an arena of {asked:,} bytes was refused; {advice}"
            ) from cause
